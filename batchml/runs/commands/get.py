"""get: copy a run's outputs, or its checkpoints, to a folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, OneRun, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable
from batchml.errors import NotFound
from batchml.runs.commands.next_commands import short_word
from batchml.runs.find import load_runs, select
from batchml.runs.outputs import (
    CHECKPOINTS,
    MAX_LEFT_OUT,
    OUTPUT,
    CopiedOutputs,
    copy_outputs,
    default_folder,
    open_outputs,
)
from batchml.runtime.entry.folders import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchml.context import Context
    from batchml.runs.search import FoundRun


@app.command(epilog="Example: batchml get @last results/")
def get(
    run: OneRun,
    dest: Annotated[
        Path | None,
        typer.Argument(metavar="[DEST]", help="Folder; default: NAME-ID in this folder."),
    ] = None,
    checkpoints: Annotated[
        bool,
        typer.Option("--checkpoints", help="Copy what it has saved in its checkpoint folder."),
    ] = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Copy a run's outputs, or its checkpoints, to a folder.

    Unchanged files are not copied again: after an interruption the same command goes on, and later
    it copies new files.
    """
    context = open_context(env, project)
    (found,) = load_runs(context, select(context, [run]))
    part = CHECKPOINTS if checkpoints else OUTPUT
    folder = dest or Path(default_folder(found, part))
    done = CopiedOutputs()
    for each in copy_outputs(context, found, folder, part):
        if isinstance(each, CopiedOutputs):
            done = each
        elif not json_:
            print_line(printable(f"{folder / each.name}  {size_text(each.size)}"))
    _say_left_out(done.left_out)
    if json_:
        print_json(
            {
                "jobId": found.job_id,
                "folder": str(folder.absolute()),
                "copied": done.files,
                "bytes": done.size,
                "unchanged": done.unchanged,
                "leftOut": list(done.left_out),
            }
        )
    elif done == CopiedOutputs():
        say(_describe_nothing(context, found, checkpoints=checkpoints))
    elif done.files or done.unchanged:
        new = f"{_files(done.files)}, {size_text(done.size)}" if done.files else "Nothing new"
        were = "was" if done.unchanged == 1 else "were"
        there = f"; {_files(done.unchanged)} {were} there already" if done.unchanged else ""
        say(f"{new}, in {printable(str(folder))}{there}.")


def _describe_nothing(context: "Context", found: "FoundRun", *, checkpoints: bool) -> str:
    """Why nothing was copied, and whether there are checkpoints instead of outputs."""
    if checkpoints:
        place = "" if context.settings.is_local else " in the bucket (a workspace keeps its own)"
        return f"The run has no checkpoints{place}: nothing is saved in BATCHML_CHECKPOINT_DIR."
    try:
        is_saved = any(True for _ in open_outputs(context, found, CHECKPOINTS).entries())
    except NotFound:
        is_saved = False
    if is_saved:
        command = f"batchml get {short_word(context, found.shown_id)} --checkpoints"
        return f"The run has no outputs. It has checkpoints: {command}"
    return (
        "The run has no outputs: it wrote nothing to BATCHML_OUTPUT_DIR, and nothing of its "
        "working folder was kept."
    )


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _say_left_out(names: "Sequence[str]") -> None:
    for text in names[:MAX_LEFT_OUT]:
        say(f"Left out: {printable(text)}")
    if len(names) > MAX_LEFT_OUT:
        say(f"Left out: {len(names) - MAX_LEFT_OUT} more.")
