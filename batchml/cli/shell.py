"""shell: into a run that is RUNNING."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json, OneRun
from batchml.cli.output import print_json
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.client.doors import Seat
    from batchml.client.place import Place

Node = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Which node; the first is 0, and the main one."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Until the run is RUNNING.")]


@app.command(epilog="Example: batchml shell @last -- nvidia-smi")
def shell(
    ctx: typer.Context,
    run: OneRun,
    node: Node = None,
    wait: Wait = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Open a shell inside a run that is RUNNING, or run one command there: -- COMMAND.

    It has the run's variables, working folder and limits, and ends with the run. The exit code is
    the command's.
    """
    from batchml.cli.wiring import open_place
    from batchml.client.doors import ask_inside, run_inside

    command = tuple(ctx.obj or ())
    if ctx.obj is not None and not command:
        raise UsageError("Nothing follows the --: name a command, or leave it out for a shell.")
    if json_ and not command:
        raise UsageError("--json is for a command: batchml shell RUN --json -- COMMAND")
    place = open_place(env)
    seat = find(place, run, node, wait)
    if json_:
        asked = ask_inside(place, seat, command, limit=None)
        text = asked.out.decode("utf-8", "replace")
        print_json({"jobId": seat.run.job_id, "exitCode": asked.code, "output": text})
        raise typer.Exit(asked.code)
    raise typer.Exit(run_inside(place, seat, command))


def find(place: "Place", word: str, node: int | None, wait: bool) -> "Seat":
    """The seat; with `wait` once the run runs, saying meanwhile what it waits for."""
    from batchml.cli.output import say
    from batchml.client.doors import find_seat
    from batchml.errors import NotRunning

    told = ""
    while True:
        try:
            return find_seat(place, word, node)
        except NotRunning as error:
            if not wait or error.over:
                raise
            state = str(error).partition(" and has")[0]
            if state != told:
                say(f"{state}: it is waited for.")
                told = state
            place.clock.sleep(place.pace.most)
