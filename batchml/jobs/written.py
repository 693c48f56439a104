"""The files that batchml itself has written: reports, plots, exports, fetched outputs.

They are no code, so they are not sent with runs. The state folder lists them. A file that was
changed since then, or moved, is the user's own and is sent.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import LocalServerError
from batchml.local.home import Home
from batchml.runtime.storage.files import write_atomically

LIST = "written.jsonl"  # in the state folder
WRITTEN = "batchml wrote it"  # why such a file is not sent
# The ignore file of a folder of fetched outputs.
OUTPUTS_RULE = "# Outputs of a run: .batchmlignore keeps them out of the code of others.\n*\n"
_OUTPUTS_OF = "# The run: "  # a line after the rule; version 0.1.0 wrote none
_MOST = 4 * 1024**2  # bytes of the list


class _WrittenPath(Struct, frozen=True, omit_defaults=True):
    """A line of the list. A path without `mtime` is a folder."""

    path: str
    size: int = 0
    mtime: int | None = None  # ns
    run: str = ""  # the job id of the run that wrote the fetched file
    into: str = ""  # the real path of the folder into which it was fetched

    @property
    def is_unchanged(self) -> bool:
        """Whether the file is as it was written. OSError: no."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (self.size, self.mtime) == (found.st_size, found.st_mtime_ns)


class WrittenPaths(Struct, frozen=True):
    """The files in a list, by their path, and the folders."""

    files: dict[str, _WrittenPath] = {}
    folders: frozenset[str] = frozenset()

    def has(self, path: str, *, is_folder: bool) -> bool:
        """Whether batchml wrote what is at a real path, and nobody has changed it. OSError: no."""
        if is_folder:
            return path in self.folders
        known = self.files.get(path)
        return known is not None and known.is_unchanged

    def other_run(self, folder: Path, job_id: str) -> str:
        """The job id of another run whose files were fetched into a folder and are there; ""."""
        real = os.path.realpath(folder)
        fetched = (each for each in self.files.values() if each.into == real)
        others = (each.run for each in fetched if each.run != job_id and each.is_unchanged)
        return next(others, "")


def note_written(
    home: Home,
    paths: Iterable[Path],
    most: int = _MOST,
    *,
    run: str = "",
    into: Path | None = None,
) -> None:
    """List files and folders that batchml has just written. A folder stands for its content.

    `run`: the job id of a run whose files were fetched `into` a folder. From a list of more than
    `most` bytes, files that are gone are dropped first. A list that cannot be written is no reason
    to fail: then the files are sent as others are.
    """
    with suppress(OSError, LocalServerError):
        place = os.path.realpath(into) if into is not None and run else ""
        found = (replace(_describe(path), run=run, into=place) for path in paths)
        lines = [msgspec.json.encode(each) + b"\n" for each in found]
        home.prepare()
        path = home.root / LIST
        if path.exists() and path.stat().st_size > most:
            _drop_missing(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab") as file:
            file.write(b"".join(lines))


def is_outputs_rule(path: Path) -> bool:
    """Whether an ignore file is the one that `get` wrote, unchanged."""
    return _read_outputs_rule(path) is not None


def write_outputs_rule(path: Path, job_id: str) -> None:
    """Write the ignore file of a folder for the outputs of a run. Raises OSError."""
    path.write_text(OUTPUTS_RULE + (f"{_OUTPUTS_OF}{job_id}\n" if job_id else ""))


def outputs_run(path: Path) -> str:
    """The job id in an ignore file that `get` wrote; "" if it names none."""
    return _read_outputs_rule(path) or ""


def _read_outputs_rule(path: Path) -> str | None:
    """The job id in an ignore file that `get` wrote, or ""; None for any other file."""
    try:
        # A pipe would have to be written first.
        text = path.read_text("utf-8", "replace") if path.is_file() else ""
    except OSError:
        return None
    rest = text.removeprefix(OUTPUTS_RULE)
    if rest == text:
        return None
    job_id = rest.removeprefix(_OUTPUTS_OF).removesuffix("\n")
    is_ours = not rest or rest == f"{_OUTPUTS_OF}{job_id}\n"
    return job_id if is_ours and "\n" not in job_id else None


def read_written(root: Path | None) -> WrittenPaths:
    """The list in a state folder; lines that cannot be read are skipped."""
    if root is None:
        return WrittenPaths()
    files: dict[str, _WrittenPath] = {}
    folders = set()
    for each in _read(root / LIST):
        if each.mtime is None:
            folders.add(each.path)
        else:
            files[each.path] = each
    return WrittenPaths(files, frozenset(folders))


def _describe(path: Path) -> _WrittenPath:
    real = Path(os.path.realpath(path.parent)) / path.name
    if path.is_dir():
        return _WrittenPath(str(real))
    found = path.stat()
    return _WrittenPath(str(real), found.st_size, found.st_mtime_ns)


def _read(path: Path) -> Iterable[_WrittenPath]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(msgspec.DecodeError):
            yield _LINE.decode(line)


def _drop_missing(path: Path) -> None:
    newest = {each.path: each for each in _read(path)}
    kept = (each for each in newest.values() if os.path.lexists(each.path))
    write_atomically(str(path), b"".join(msgspec.json.encode(each) + b"\n" for each in kept), 0o600)


_LINE = msgspec.json.Decoder(_WrittenPath)
