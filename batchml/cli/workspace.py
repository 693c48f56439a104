"""workspace ls, push, pull, rm, archive, restore: the folder that all runs share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchml.client.place import Place
    from batchml.client.workspace import Workspace
    from batchml.model.workspace import Entry, Report

_NAMED = 20  # files that are left out or missing

workspace_app = command_group(
    "workspace",
    "The folder that all runs of an environment share: /workspace in containers.",
    "batchml workspace push data/",
)

Checksum = Annotated[
    bool, typer.Option("--checksum", help="Compare contents where size and time are the same.")
]


def _open(env: str | None) -> "tuple[Place, Workspace]":
    from batchml.cli.wiring import open_place
    from batchml.client.workspace import find_workspace

    place = open_place(env)
    return place, find_workspace(place, say)


@workspace_app.command("ls", epilog="Example: batchml workspace ls data/ --deep")
def ls(
    path: Annotated[
        str,
        typer.Argument(metavar="[PATH]", help="A folder or file of it; all of it unless given."),
    ] = "",
    deep: Annotated[bool, typer.Option("--deep", "-R", help="Also what lies in folders.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List what lies in the workspace."""
    from batchml.cli.render import printable, table

    _, found = _open(env)
    entries = found.ls(path, deep=deep)
    if json_:
        print_json([_entry_json(entry) for entry in entries])
    elif not entries:
        say(f"Nothing is in {printable(found.where)}{f', {path}' if path else ''}.")
    else:
        print_line(table([["SIZE", "CHANGED", "NAME"], *map(_row, entries)]))


def _row(entry: "Entry") -> list[str]:
    from batchml.cli.render import printable, timestamp
    from batchml.runtime.entry.folders import size_text

    name = {"folder": f"{entry.path}/", "link": f"{entry.path} -> {entry.target}"}
    return [
        size_text(entry.size) if entry.kind == "file" else "",
        timestamp(entry.mtime_ns // 1_000_000)[:19] + "Z" if entry.mtime_ns else "",
        printable(name.get(entry.kind, entry.path)),
    ]


def _entry_json(entry: "Entry") -> dict[str, Any]:
    found: dict[str, Any] = {
        "path": _text(entry.path), "kind": entry.kind, "mode": f"{entry.mode:04o}",
        "size": entry.size, "mtime": entry.mtime_ns / 1e9,
    }  # fmt: skip
    found.update({"target": _text(entry.target)} if entry.kind == "link" else {})
    return found | ({"sha256": entry.sha256} if entry.sha256 else {})


@workspace_app.command(epilog="Example: batchml workspace push data/ sets/mnist")
def push(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="SRC... [DEST]", help="Files and folders here; what they become."),
    ],
    to: Annotated[
        str | None, typer.Option("--to", metavar="DEST", help="DEST, when it could be a source.")
    ] = None,
    checksum: Checksum = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Copy files and folders of this machine into the workspace.

    SRC becomes DEST, or goes into it where DEST ends with a slash or there are several. Without
    DEST, SRC keeps its name. What is there with its size and time is not copied again: the same
    command goes on after an interruption.
    """
    from batchml.cli.transfers import shown

    place, found = _open(env)
    sources, dest = (paths, to) if to is not None else _split(paths, place.here)
    with shown(place.clock) as watch:
        report = found.push([Path(each) for each in sources], dest, watch, checksum=checksum)
    _tell(report, json_, f"in {found.where}")


def _split(paths: "Sequence[str]", here: Path) -> tuple[list[str], str]:
    """The last of several is DEST. Raises UsageError where it may have been meant as a source."""
    *sources, dest = paths
    if not sources:
        return [dest], ""
    is_here = (here / dest).exists() and not dest.endswith(("/", "."))
    if is_here and dest not in sources and Path(dest).name not in (Path(s).name for s in sources):
        raise UsageError(
            f"{dest} is here, too. To push it along with the others, add a dot: push "
            f"{' '.join(paths)} . To have the others become {dest}: push {' '.join(sources)} "
            f"--to {dest}"
        )
    return sources, dest


@workspace_app.command(epilog="Example: batchml workspace pull results/ here/")
def pull(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file or folder of it; . is all.")],
    dest: Annotated[
        str | None, typer.Argument(metavar="[DEST]", help="What it becomes; its name unless given.")
    ] = None,
    checksum: Checksum = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Copy a file or folder of the workspace to this machine.

    What is there with its size and time is not copied again: the same command goes on after an
    interruption.
    """
    from batchml.cli.transfers import shown

    place, found = _open(env)
    with shown(place.clock) as watch:
        report = found.pull(path, _dest(dest, path), watch, checksum=checksum)
    _tell(report, json_, f"in {report.place}")


def _dest(dest: str | None, path: str) -> Path | None:
    """`there/` is the folder into which it goes, under its name."""
    if dest is None:
        return None
    name = path.rstrip("/").rpartition("/")[2]
    return Path(dest) / name if dest.endswith("/") and name not in ("", ".") else Path(dest)


@workspace_app.command(epilog="Example: batchml workspace archive --to /mnt/backup/lab")
def archive(
    to: Annotated[str, typer.Option(metavar="PLACE", help="A folder, or s3://BUCKET/PREFIX.")] = "",
    delete: Annotated[
        bool, typer.Option("--delete", help="Then free the workspace of what was archived.")
    ] = False,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Also read back what was archived before.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace freed files by others of their names.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Keep the workspace elsewhere: plain files, and a list with their checksums.

    Only what is new or changed is sent, and all of it is read back. It is complete when this says
    so, with exit code 0; what was interrupted goes on with the same command.
    """
    from batchml.cli.transfers import shown

    place, found = _open(env)
    with shown(place.clock) as watch:
        report = found.archive(to, watch, delete=delete, checksum=checksum, overwrite=overwrite)
    _tell(report, json_, f"in {report.place}")


@workspace_app.command(epilog="Example: batchml workspace restore --from /mnt/backup/lab")
def restore(
    from_: Annotated[
        str,
        typer.Option(
            "--from", metavar="PLACE", help="A folder, or s3://BUCKET/PREFIX; its own unless given."
        ),
    ] = "",
    partial: Annotated[
        bool, typer.Option("--partial", help="What there is of an archive that is not complete.")
    ] = False,
    checksum: Checksum = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also what is another here: the archive's instead.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Bring back from an archive what the workspace lacks.

    Each file is checked by its checksum. Nothing is removed, and what is another here than in the
    archive stays and is named, unless --overwrite.
    """
    from batchml.cli.transfers import shown

    place, found = _open(env)
    with shown(place.clock) as watch:
        report = found.restore(
            from_, watch, partial=partial, checksum=checksum, overwrite=overwrite
        )
    _tell(report, json_, f"in {found.where}")


@workspace_app.command(epilog="Example: batchml workspace rm sets/old --yes")
def rm(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, and folders with all in them.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Delete from the workspace, for good.

    Runs are not asked whether they use it. An archive keeps its copy, but `restore` leaves it
    there once another archive has been made.
    """
    from batchml.cli.environments import ask
    from batchml.cli.render import printable
    from batchml.cli.transfers import shown
    from batchml.model.workspace import below

    if not all(map(below, paths)):
        raise UsageError("That is all of the workspace: name what is in it.")
    place, found = _open(env)
    named = ", ".join(printable(_text(each)) for each in paths)
    question = f"This deletes {named} in {printable(found.where)}. Type delete to do it:"
    if not ask(question, "--yes", yes=yes, expected=("delete",)):
        raise UsageError("Nothing was deleted.")
    with shown(place.clock) as watch:
        report = found.remove(paths, watch)
    _tell(report, json_, f"in {found.where}")


def _tell(report: "Report", json_: bool, where: str) -> None:
    """Say what was done. Exit code 1 where something is missing."""
    from batchml.cli.render import printable

    for title, names in (("Left out", report.left_out), ("MISSING", report.missing)):
        for text in names[:_NAMED]:
            say(f"{title}: {printable(_text(text))}")
        if len(names) > _NAMED:
            say(f"{title}: {len(names) - _NAMED} more.")
    for note in report.notes:
        say(printable(note))
    if json_:
        print_json(_report_json(report))
    else:
        for line in _said(report, printable(where)):
            print_line(line)
    if not report.is_complete:
        raise typer.Exit(1)


def _said(report: "Report", where: str) -> list[str]:
    from batchml.runtime.entry.folders import size_text

    new = f"{_files(report.files)}, {size_text(report.size)}" if report.files else "Nothing new"
    were = "was" if report.unchanged == 1 else "were"
    there = f"; {_files(report.unchanged)} {were} there already" if report.unchanged else ""
    if report.verb == "rm":
        return [f"{_files(report.removed)} deleted, {where}."]
    lines = [f"{new}, {where}{there}."]
    if report.verb == "archive":
        lines += ["The archive is complete." if report.is_complete else
                  "The archive is NOT complete: run it again when that is mended."]  # fmt: skip
    if report.removed:
        lines.append(f"{_files(report.removed)} freed: batchml workspace restore brings them back.")
    return lines


def _report_json(report: "Report") -> dict[str, Any]:
    return {
        "place": report.place, "complete": report.is_complete, "files": report.files,
        "bytes": report.size, "unchanged": report.unchanged, "removed": report.removed,
        "leftOut": list(map(_text, report.left_out)), "missing": list(map(_text, report.missing)),
        "notes": list(report.notes),
    }  # fmt: skip


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _text(name: str) -> str:
    """A name that may be no text, as text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
