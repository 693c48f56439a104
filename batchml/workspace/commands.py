"""`batchml workspace`: list, push, pull, archive, restore and delete files of the shared folder."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from batchml.cli.app import command_group
from batchml.cli.options import Env, Json, open_context
from batchml.cli.output import confirm, print_json, print_line, say
from batchml.cli.render import cut, duration, printable, table, time_json, timestamp
from batchml.cli.terminal import is_dumb, live_line
from batchml.clock import Clock
from batchml.errors import UsageError
from batchml.model.environment import (
    OnProgress,
    TransferReport,
    TransferStatus,
    WorkspaceEntry,
    relative_path,
)
from batchml.runtime.entry.folders import size_text
from batchml.workspace.backends import open_workspace

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.workspace.base import WorkspaceBackend

_MAX_NAMED = 20  # files in messages

workspace_app = command_group(
    "workspace",
    "Copy, archive and delete files of the folder that all runs share: /workspace.",
    "batchml workspace push data/",
)

Checksum = Annotated[
    bool, typer.Option("--checksum", help="Also compare contents of files of equal size and time.")
]


def _open(env: str | None) -> "tuple[Context, WorkspaceBackend]":
    context = open_context(env)
    return context, open_workspace(context, say)


@workspace_app.command("ls", epilog="Example: batchml workspace ls data/ --deep")
def ls(
    path: Annotated[
        str,
        typer.Argument(metavar="[PATH]", help="A folder or file; default: the whole workspace."),
    ] = "",
    deep: Annotated[bool, typer.Option("--deep", "-R", help="Also list subfolders.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List files and folders of the workspace."""

    _, workspace = _open(env)
    entries = workspace.ls(path, deep=deep)
    if json_:
        print_json([_entry_json(entry) for entry in entries])
    elif not entries:
        say(f"{printable(workspace.location)}{f', {path},' if path else ''} is empty.")
    else:
        print_line(table([["SIZE", "CHANGED", "NAME"], *map(_row, entries)]))


def _row(entry: WorkspaceEntry) -> list[str]:
    name = {"folder": f"{entry.path}/", "link": f"{entry.path} -> {entry.target}"}
    return [
        size_text(entry.size) if entry.kind == "file" else "",
        timestamp(entry.mtime_ns // 1_000_000)[:19] + "Z" if entry.mtime_ns else "",
        printable(name.get(entry.kind, entry.path)),
    ]


def _entry_json(entry: WorkspaceEntry) -> dict[str, Any]:
    return {
        "path": _text(entry.path), "kind": entry.kind, "mode": f"{entry.mode:04o}",
        "size": entry.size, "mtime": time_json(entry.mtime_ns // 1_000_000),
        **({"target": _text(entry.target)} if entry.kind == "link" else {}),
        **({"sha256": entry.sha256} if entry.sha256 else {}),
    }  # fmt: skip


@workspace_app.command(epilog="Example: batchml workspace push data/ sets/mnist")
def push(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC... [DEST]", help="Files and folders of this machine; their new name."
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="DEST", help="Give DEST here if it also exists on this machine."
        ),
    ] = None,
    checksum: Checksum = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Copy files and folders of this machine into the workspace.

    SRC becomes DEST, or goes into DEST if that ends with a slash or there are several. Without
    DEST, SRC keeps its name. Files that the workspace has with the same size and time are not
    copied again: after an interruption the same command continues.
    """
    context, workspace = _open(env)
    sources, dest = (paths, to) if to is not None else _split(paths, context.folder)
    files = [Path(each) for each in sources]
    with show_progress(context.clock) as on_progress:
        report = workspace.push(files, dest, on_progress, checksum=checksum)
    _print_report(report, json_, f"in {workspace.location}")


def _split(paths: Sequence[str], here: Path) -> tuple[list[str], str]:
    """Take the last of several paths as DEST. Raises UsageError if it could also be a source."""
    *sources, dest = paths
    if not sources:
        return [dest], ""
    is_here = (here / dest).exists() and not dest.endswith(("/", "."))
    if is_here and dest not in sources and Path(dest).name not in (Path(s).name for s in sources):
        raise UsageError(
            f"{dest} also exists on this machine. To push it, too, add a dot: push "
            f"{' '.join(paths)} . To push the others to {dest}: push {' '.join(sources)} "
            f"--to {dest}"
        )
    return sources, dest


@workspace_app.command(epilog="Example: batchml workspace pull results/ here/")
def pull(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file or folder; `.`: everything.")],
    dest: Annotated[
        str | None,
        typer.Argument(metavar="[DEST]", help="New path on this machine; default: its name."),
    ] = None,
    checksum: Checksum = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Copy a file or folder of the workspace to this machine.

    Files that exist here with the same size and time are not copied again: after an interruption
    the same command continues.
    """
    context, workspace = _open(env)
    with show_progress(context.clock) as on_progress:
        report = workspace.pull(path, _dest(dest, path), on_progress, checksum=checksum)
    _print_report(report, json_, f"in {report.location}")


def _dest(dest: str | None, path: str) -> Path | None:
    """Return the path to pull to: in `folder/` the file keeps its name."""
    if dest is None:
        return None
    name = path.rstrip("/").rpartition("/")[2]
    return Path(dest) / name if dest.endswith("/") and name not in ("", ".") else Path(dest)


@workspace_app.command(epilog="Example: batchml workspace archive --to /mnt/backup/lab")
def archive(
    to: Annotated[
        str, typer.Option(metavar="LOCATION", help="Archive to this folder, or s3://BUCKET/PREFIX.")
    ] = "",
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the archived files from the workspace.")
    ] = False,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Also read back files that were archived before.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace freed files whose names are used again.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Copy the workspace to an archive: plain files, and a list with their checksums.

    Only new and changed files are sent, and then read back. Exit code 0: the archive is
    complete. After an interruption the same command continues. Without --to, the archive is in the
    environment's bucket, or in the state folder of `local`.
    """
    context, workspace = _open(env)
    with show_progress(context.clock) as on_progress:
        report = workspace.archive(
            to, on_progress, delete=delete, checksum=checksum, overwrite=overwrite
        )
    _print_report(report, json_, f"in {report.location}")


@workspace_app.command(epilog="Example: batchml workspace restore --from /mnt/backup/lab")
def restore(
    from_: Annotated[
        str,
        typer.Option(
            "--from", metavar="LOCATION", help="Restore from this folder, or s3://BUCKET/PREFIX."
        ),
    ] = "",
    partial: Annotated[
        bool, typer.Option("--partial", help="Also restore from an incomplete archive.")
    ] = False,
    checksum: Checksum = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also replace files that differ from the archive.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Copy files that the workspace lacks back from an archive.

    Each file is checked by its checksum. Nothing is removed. Without --overwrite, a file that
    differs from the archive stays and is reported.
    """
    context, workspace = _open(env)
    with show_progress(context.clock) as on_progress:
        report = workspace.restore(
            from_, on_progress, partial=partial, checksum=checksum, overwrite=overwrite
        )
    _print_report(report, json_, f"in {workspace.location}")


@workspace_app.command(epilog="Example: batchml workspace rm sets/old --yes")
def rm(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, and folders with their contents.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Delete files of the workspace for good.

    The command does not check whether runs use the files. An archive keeps its copy of a file, and
    `restore` brings it back until the next `archive`.
    """
    if not all(map(relative_path, paths)):
        raise UsageError("A path is the whole workspace. Name files or folders in the workspace.")
    context, workspace = _open(env)
    names = ", ".join(printable(_text(each)) for each in paths)
    question = f"This deletes {names} in {printable(workspace.location)}. To confirm, type delete:"
    if not confirm(question, "--yes", yes=yes, expected=("delete",)):
        raise UsageError("Nothing was deleted.")
    with show_progress(context.clock) as on_progress:
        report = workspace.remove(paths, on_progress)
    _print_report(report, json_, f"in {workspace.location}")


def _print_report(report: TransferReport, json_: bool, where: str) -> None:
    """Print the report of a transfer. Exit with 1 if files are missing."""
    for title, names in (("Left out", report.left_out), ("MISSING", report.missing)):
        for text in names[:_MAX_NAMED]:
            say(f"{title}: {printable(_text(text))}")
        if len(names) > _MAX_NAMED:
            say(f"{title}: {len(names) - _MAX_NAMED} more.")
    for note in report.notes:
        say(printable(note))
    if json_:
        print_json(_report_json(report))
    else:
        for line in _describe(report, printable(where)):
            print_line(line)
    if not report.is_complete:
        raise typer.Exit(1)


def _describe(report: TransferReport, where: str) -> list[str]:
    new = f"{_files(report.files)}, {size_text(report.size)}" if report.files else "Nothing new"
    were = "was" if report.unchanged == 1 else "were"
    unchanged = f"; {_files(report.unchanged)} {were} there already" if report.unchanged else ""
    if report.verb == "rm":
        return [f"{_files(report.removed)} deleted, {where}."]
    lines = [f"{new}, {where}{unchanged}."]
    if report.verb == "archive":
        lines += ["The archive is complete." if report.is_complete else
                  "The archive is NOT complete: fix that and run the command again."]  # fmt: skip
    if report.removed:
        lines.append(f"{_files(report.removed)} freed. To restore: batchml workspace restore")
    return lines


def _report_json(report: TransferReport) -> dict[str, Any]:
    return {
        "place": report.location, "complete": report.is_complete, "files": report.files,
        "bytes": report.size, "unchanged": report.unchanged, "removed": report.removed,
        "leftOut": list(map(_text, report.left_out)), "missing": list(map(_text, report.missing)),
        "notes": list(report.notes),
    }  # fmt: skip


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _text(name: str) -> str:
    """Return a file name as text. Bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# --- Progress of a transfer -----------------------------------------------------------------------
# A terminal shows a line at its bottom. Otherwise a line is printed every ten seconds.


EVERY = 10.0  # seconds between two lines
_RATE_AFTER = 2.0  # seconds until the rate is meaningful


def progress_line(now: TransferStatus, seconds: float, width: int = 80) -> str:
    """`pushing 12/40 files  1.2 GiB of 4.0 GiB  30%  86 MiB/s  ~0:33 left  sets/a.bin`"""
    words = [f"{now.doing} {now.files}/{now.of_files} files"]
    if now.of_size:
        share = 100 if now.size >= now.of_size else int(100 * now.size / now.of_size)
        words += [f"{size_text(now.size)} of {size_text(now.of_size)}", f"{share}%"]
    if seconds >= _RATE_AFTER and now.moved:
        words.append(f"{size_text(int(now.moved / seconds))}/s")
    if seconds >= _RATE_AFTER and 0 < now.size < now.of_size:
        words.append(f"~{duration(seconds * (now.of_size - now.size) / now.size)} left")
    line = "  ".join(words)
    room = width - len(line) - 2
    return f"{line}  {cut(printable(now.path), room)}" if now.path and room >= 12 else line


class TransferDisplay:
    """Shows the latest state of a transfer as a line of text."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = TransferStatus()
        self._doing, self._begin, self._printed = "", clock.monotonic(), clock.monotonic()

    def see(self, now: TransferStatus) -> None:
        if now.doing != self._doing:
            self._doing, self._begin = now.doing, self._clock.monotonic()
        self.now = now

    def line(self, width: int) -> str:
        if not self.now.of_files:
            return self.now.doing or "starting ..."
        return progress_line(self.now, self._clock.monotonic() - self._begin, width)

    def print_sometimes(self, now: TransferStatus) -> None:
        self.see(now)
        if self._clock.monotonic() - self._printed >= EVERY and now.of_files:
            self._printed = self._clock.monotonic()
            say(self.line(200))


@contextmanager
def show_progress(clock: Clock, stream: TextIO | None = None) -> Iterator[OnProgress]:
    """Yield a callback that shows the progress of a transfer on stderr."""
    stream = stream or sys.stderr
    display = TransferDisplay(clock)
    try:
        if not stream.isatty() or is_dumb():
            yield display.print_sometimes
        else:
            with live_line(stream, display.line):
                yield display.see
    except KeyboardInterrupt:
        say("\nInterrupted. Files that have arrived are complete. The same command continues.")
        raise
