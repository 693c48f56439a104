"""get: copy a run's outputs to a folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, OneRun, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable
from batchml.model.names import short_id, to_name
from batchml.runs.find import load_runs, select
from batchml.runs.outputs import MAX_LEFT_OUT, CopiedOutputs, copy_outputs
from batchml.runtime.entry.folders import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence


@app.command(epilog="Example: batchml get @last results/")
def get(
    run: OneRun,
    dest: Annotated[
        Path | None,
        typer.Argument(metavar="[DEST]", help="Folder; default: NAME-ID in this folder."),
    ] = None,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Copy a run's outputs to a folder.

    Unchanged files are not copied again: after an interruption the same command goes on, and later
    it copies new files.
    """
    context = open_context(env, project)
    (found,) = load_runs(context, select(context, [run]))
    folder = dest or Path(to_name(f"{found.name}-{short_id(found.job_id)}"))
    done = CopiedOutputs()
    for each in copy_outputs(context, found, folder):
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
        say(
            "The run has no outputs: it wrote nothing to BATCHML_OUTPUT_DIR, and nothing of its "
            "working folder was kept."
        )
    elif done.files or done.unchanged:
        new = f"{_files(done.files)}, {size_text(done.size)}" if done.files else "Nothing new"
        were = "was" if done.unchanged == 1 else "were"
        there = f"; {_files(done.unchanged)} {were} there already" if done.unchanged else ""
        say(f"{new}, in {printable(str(folder))}{there}.")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _say_left_out(names: "Sequence[str]") -> None:
    for text in names[:MAX_LEFT_OUT]:
        say(f"Left out: {printable(text)}")
    if len(names) > MAX_LEFT_OUT:
        say(f"Left out: {len(names) - MAX_LEFT_OUT} more.")
