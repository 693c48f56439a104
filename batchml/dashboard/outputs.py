"""The files of a run: its outputs with download, and its code as it was sent.

A request names a file by a digest of its name, which is looked up among the files that the client
lists: nothing of a request becomes a path. Outputs are sent as attachments and never shown, since
the program of the run has written them.
"""

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from batchml.cli.render import timestamp
from batchml.client import Client
from batchml.dashboard.act import shell
from batchml.dashboard.app import PageQuery, Response, Route, route
from batchml.dashboard.html import Html, join, tag
from batchml.dashboard.layout import command_line, facts, page
from batchml.errors import NotFound
from batchml.handles import RunHandle
from batchml.jobs.code_diff import CodeFile
from batchml.model.names import short_id
from batchml.runs.outputs import OutputEntry, Unreadable
from batchml.runs.search import FoundRun, code_digest
from batchml.runtime.entry.folders import size_text

MOST_FILES = 500  # in a table
_MOST_TEXT = 200_000  # characters of a file of code
_CHUNK = 1 << 18  # bytes


def file_key(name: str) -> str:
    """The digest by which a request names a file."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]


class FilePages:
    """The routes of outputs and code."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def routes(self) -> list[Route]:
        return [
            route("/run/*/outputs", self.outputs),
            route("/run/*/output/*", self.output),
            route("/run/*/code", self.code),
            route("/run/*/code/*", self.code_file),
        ]

    def outputs(self, query: PageQuery) -> Html:
        return outputs_panel(self._client.run(query.parts[0]), self._client.env_option)

    def output(self, query: PageQuery) -> Response:
        return output_response(self._client.run(query.parts[0]), query.parts[1])

    def code(self, query: PageQuery) -> Html:
        handle = self._client.run(query.parts[0])
        assert handle.seen is not None  # as `Client.run` has found it
        return code_panel(handle.seen, handle.code())

    def code_file(self, query: PageQuery) -> Html:
        handle = self._client.run(query.parts[0])
        assert handle.seen is not None
        return code_page(handle.seen, handle.code(), query.parts[1], self._client.env)


# --- Outputs --------------------------------------------------------------------------------------


def outputs_panel(handle: RunHandle, env_option: str) -> Html:
    """The files that a run has written to BATCHML_OUTPUT_DIR, or changed in its folder."""
    try:
        entries = sorted(handle.list_outputs(), key=lambda each: each.name)
    except NotFound as error:
        return tag("p", f"No outputs. {error.hint}", class_="dim")
    if not entries:
        return tag("p", "No outputs. Files that the program writes to the folder ",
                   tag("code", "$BATCHML_OUTPUT_DIR"), " are kept and listed here.",
                   class_="dim")  # fmt: skip
    base = f"/run/{quote(handle.job_id, safe='')}/output/"
    rows = [
        (tag("a", each.name, href=f"{base}{file_key(each.name)}", download=True),
         size_text(each.size), tag("time", timestamp(each.at // 1_000_000)[:19].replace("T", " ")))
        for each in entries[:MOST_FILES]
    ]  # fmt: skip
    total = size_text(sum(each.size for each in entries))
    count = "1 file" if len(entries) == 1 else f"{len(entries):,} files"
    more = f"; the table has the first {MOST_FILES}" if len(entries) > MOST_FILES else ""
    word = short_id(handle.seen.shown_id if handle.seen else handle.job_id)
    return join((
        tag("p", f"{count}, {total}{more}."),
        _files_table("Outputs", ("File", "Size", "Changed (UTC)"), rows),
        command_line(shell("batchml", "get", word) + env_option, "All of them"),
    ))  # fmt: skip


def output_response(handle: RunHandle, key: str) -> Response:
    """A file of the outputs, as an attachment. Raises NotFound."""
    entry = _find(handle.list_outputs(), key)

    def write(path: Path) -> None:
        try:
            handle.fetch_output(entry, path)
        except Unreadable as error:
            raise NotFound("File", entry.name, [], f"{error}.") from error

    return file_response(entry.name, write)


def file_response(name: str, write: Callable[[Path], None]) -> Response:
    """A file to save, which is written on the disk first. Raises what `write` raises."""
    folder = tempfile.TemporaryDirectory(prefix="batchml-")
    path = Path(folder.name) / "file"
    try:
        write(path)
        size = path.stat().st_size
    except BaseException:
        folder.cleanup()
        raise
    return Response(
        kind="application/octet-stream",
        headers={
            "content-disposition": attachment(name),
            "content-length": str(size),
            "cache-control": "no-store",
        },
        stream=_stream(path, folder),
    )


async def _stream(path: Path, folder: "tempfile.TemporaryDirectory[str]") -> AsyncIterator[bytes]:
    try:
        with path.open("rb") as file:
            while part := await asyncio.to_thread(file.read, _CHUNK):
                yield part
    finally:
        folder.cleanup()


def attachment(name: str) -> str:
    """The header Content-Disposition for a file: its last name only, in both forms of RFC 6266."""
    last = name.rpartition("/")[2]
    plain = "".join(each if (each.isascii() and each.isalnum()) or each in "._-" else "_"
                    for each in last)  # fmt: skip
    coded = quote(last.encode("utf-8", "replace"), safe="")
    return f"attachment; filename=\"{plain or 'file'}\"; filename*=UTF-8''{coded}"


def _find(entries: Iterable[OutputEntry], key: str) -> OutputEntry:
    for each in entries:
        if file_key(each.name) == key:
            return each
    raise NotFound("File of the run", key, [], "It may have been deleted meanwhile.")


# --- Code -----------------------------------------------------------------------------------------


def code_panel(found: FoundRun, files: Mapping[str, CodeFile]) -> Html:
    """The commit and the files of the code that was sent with a run."""
    record = found.record
    dirty = {True: "with changes that are not committed", False: "without changes"}
    about = facts([
        ("Commit", found.commit or None),
        ("", dirty.get(record.dirty) if record and found.commit and record.dirty is not None
         else None),
        ("SHA-256", tag("code", code_digest(found.code)) if found.code else None),
        ("Folder", record.folder if record else None),
    ])  # fmt: skip
    if not files:
        why = "Its folder had no files." if found.code else "No code was sent: it is in the image."
        return join((about, tag("p", why, class_="dim")))
    base = f"/run/{quote(found.job_id, safe='')}/code/"
    rows = [
        (tag("a", name, href=f"{base}{file_key(name)}"), size_text(len(file.content)))
        for name, file in sorted(files.items())[:MOST_FILES]
    ]
    more = len(files) - MOST_FILES
    return join((
        about, _files_table("Files of the code", ("File", "Size"), rows),
        tag("p", f"and {more} more", class_="dim") if more > 0 else None,
    ))  # fmt: skip


def code_page(found: FoundRun, files: Mapping[str, CodeFile], key: str, env: str) -> Html:
    """One file of the code, as a text. Raises NotFound."""
    name = next((each for each in files if file_key(each) == key), "")
    if not name:
        raise NotFound("File of the code", key, [], "")
    content = files[name].content
    text = content[: 4 * _MOST_TEXT].decode("utf-8", "replace")[:_MOST_TEXT]
    shown = tag("p", "This file is not a text.") if "\0" in text else tag(
        "pre", text, class_="log code", tabindex="0", aria_label=name)  # fmt: skip
    is_cut = len(content) > len(text.encode("utf-8", "replace")) and "\0" not in text
    back = tag("a", f"{found.name} {found.shown_id[:8]}", href=f"/run/{quote(found.job_id)}")
    return page(
        name, tag("h1", name), tag("p", "As it was sent with ", back), shown,
        tag("p", f"Cut after {_MOST_TEXT} characters.") if is_cut else None, env=env, view="code",
    )  # fmt: skip


def _files_table(
    caption: str, heading: Sequence[str], rows: Iterable[Sequence[Html | str]]
) -> Html:
    first = tag("tr", *(tag("th", name, scope="col") for name in heading))
    lines = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    table = tag("table", tag("caption", caption, class_="unseen"), tag("thead", first),
                tag("tbody", *lines))  # fmt: skip
    return tag("div", table, class_="within files", tabindex="0", role="region", aria_label=caption)
