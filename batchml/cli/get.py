"""get: a run's outputs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json, OneRun
from batchml.cli.output import print_json, print_line, say

if TYPE_CHECKING:
    from collections.abc import Sequence


@app.command(epilog="Example: batchml get @last results/")
def get(
    run: OneRun,
    dest: Annotated[
        Path | None,
        typer.Argument(metavar="[DEST]", help="A folder; NAME-ID here unless given."),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Copy a run's outputs to a folder.

    What is there unchanged is not copied again: the same command goes on after an interruption, and
    brings what has been added since.
    """
    from batchml.cli.render import printable
    from batchml.cli.wiring import open_place
    from batchml.client.fetching import outputs
    from batchml.client.finding import recall
    from batchml.client.runs import select
    from batchml.model.names import short_id, to_name
    from batchml.ops.outputs import Copied
    from batchml.runtime.entry.folders import size_text

    place = open_place(env)
    (found,) = recall(place, select(place, [run]))
    folder = dest or Path(to_name(f"{found.name}-{short_id(found.job_id)}"))
    done = Copied()
    for each in outputs(place, found, folder):
        if isinstance(each, Copied):
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
    elif done == Copied():
        say(
            "The run has left nothing in BATCHML_OUTPUT_DIR. Of its working folder nothing is "
            "kept: the end of its log names what was written there."
        )
    elif done.files or done.unchanged:
        new = f"{_files(done.files)}, {size_text(done.size)}" if done.files else "Nothing new"
        were = "was" if done.unchanged == 1 else "were"
        there = f"; {_files(done.unchanged)} {were} there already" if done.unchanged else ""
        say(f"{new}, in {printable(str(folder))}{there}.")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _say_left_out(names: "Sequence[str]") -> None:
    from batchml.cli.render import printable
    from batchml.ops.outputs import MAX_LEFT_OUT

    for text in names[:MAX_LEFT_OUT]:
        say(f"Left out: {printable(text)}")
    if len(names) > MAX_LEFT_OUT:
        say(f"Left out: {len(names) - MAX_LEFT_OUT} more.")
