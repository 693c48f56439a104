"""sweeps resume, stop, top-up, rerun, confirm: what can be done with a sweep that was started."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, say
from batchml.cli.render import printable
from batchml.cli.sweeps import OneSweep, find, sweeps_app
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.client.sweeping.freezing import Frozen
    from batchml.sweep.asking import Ask

Code = Annotated[
    bool, typer.Option("--code", help="With the code as it is now, from here on.")
]  # fmt: skip
Secrets = Annotated[
    bool,
    typer.Option("--include-secrets", help="Beside --code: send files that look like secrets."),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--detach", show_default=False,
        help="Be its controller until it has ended (the default), or leave that to a run.",
    ),
]  # fmt: skip


@sweeps_app.command(epilog="Example: batchml sweeps resume @last --detach")
def resume(
    sweep: OneSweep,
    code: Code = False,
    include_secrets: Secrets = False,
    wait: Wait = True,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Go on with a sweep: whose terminal was closed, or that was stopped.

    One that came to its end is given more by `sweeps top-up`.
    """
    from batchml.client.sweeping.holding import refuse_second
    from batchml.client.sweeping.steering import go_on

    place, frozen, board = _find(env, sweep)
    asked = go_on(board)
    if asked is None:
        refuse_second(place, board)
    _send(place, frozen, board, code=code, include_secrets=include_secrets)
    _see_to(place, frozen, board, asked, wait=wait, json_=json_)


@sweeps_app.command(epilog="Example: batchml sweeps stop @last")
def stop(
    sweep: OneSweep,
    now: Annotated[bool, typer.Option("--now", help="Without the grace to save.")] = False,
    reason: Annotated[str, typer.Option(help="Kept with the sweep.")] = "stopped by the user",
    env: Env = None,
    json_: Json = False,
) -> None:
    """Have every trial save and end, and begin no other; `resume` goes on from there."""
    from batchml.cli import sweep_running
    from batchml.cli.following import detaching
    from batchml.client.sweeping.ending import Stop

    place, frozen, board = _find(env, sweep)
    stopping = Stop(place, frozen, board, say)
    if not stopping.begin(reason, now=now):
        with detaching(place, []):
            sweep_running.show(stopping.pictures(), frozen, to_stderr=True)
        say(f"Sweep [{frozen.name} - {frozen.key}] has stopped.")
    if json_:
        print_json({"sweepId": frozen.key, "name": frozen.name, "env": place.env})
    elif not stopping.had_ended:
        say(f"  go on:   batchml sweeps resume {_word(place, frozen)}")


@sweeps_app.command("top-up", epilog="Example: batchml sweeps top-up @last --trials 128")
def top_up(
    sweep: OneSweep,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Trials in all, those before among them.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(metavar="H", help="Hours in all, since its first wave.")
    ] = None,
    cost: Annotated[
        float | None, typer.Option(metavar="USD", help="What it may cost in all.")
    ] = None,
    parallel: Annotated[int | None, typer.Option(metavar="N", help="Trials at once.")] = None,
    wait: Wait = True,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Give a sweep, running or over, other limits: it goes on from what it knows.

    One that was only stopped goes on with `sweeps resume`.
    """
    from batchml.client.sweeping import steering

    place, frozen, board = _find(env, sweep)
    asked = steering.top_up(
        frozen, board, trials=trials, hours=hours, cost=cost, parallel=parallel
    )  # fmt: skip
    _see_to(place, frozen, board, asked, wait=wait, json_=json_)


@sweeps_app.command(epilog="Example: batchml sweeps rerun @last --failed")
def rerun(
    sweep: OneSweep,
    failed: Annotated[bool, typer.Option("--failed", help="All that failed.")] = False,
    trial: Annotated[
        list[int] | None, typer.Option("--trial", metavar="N", help="This one. May be repeated.")
    ] = None,
    code: Code = False,
    include_secrets: Secrets = False,
    wait: Wait = True,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Run trials of a sweep once more, from their beginning.

    A bug is mended: --code sends the code as it is now; without it they run
    the code that the sweep was started with.
    """
    from batchml.client.sweeping import steering

    if failed == bool(trial):
        raise UsageError("rerun: say which trials: either --failed, or --trial N.")
    place, frozen, board = _find(env, sweep)
    asked = steering.rerun(board, tuple(trial or ()))
    if asked is None:
        say(f"No trial of {frozen.name} has failed: nothing was done.")
        if json_:
            print_json(None)
        return
    _send(place, frozen, board, code=code, include_secrets=include_secrets)
    _see_to(place, frozen, board, asked, wait=wait, json_=json_)


@sweeps_app.command(epilog="Example: batchml sweeps confirm @last --top 3 --seeds 3")
def confirm(
    sweep: OneSweep,
    top: Annotated[int | None, typer.Option(metavar="N", help="How many of the best.")] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="How often each.")] = None,
    wait: Wait = True,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Run the best trials again with other seeds: was it luck?"""
    from batchml.client.sweeping import steering

    place, frozen, board = _find(env, sweep)
    asked = steering.confirm(frozen, board, top, seeds)
    _see_to(place, frozen, board, asked, wait=wait, json_=json_)


def _send(
    place: "Place", frozen: "Frozen", board: "Board", *, code: bool, include_secrets: bool
) -> None:
    """Send the code as it is now, or say that what runs is other code."""
    from batchml.client.sweeping.recoding import old_code, send_code

    if code:
        send_code(place, frozen, board, include_secrets=include_secrets, tell=say)
    elif words := old_code(place, frozen, board):
        say(printable(words))


def _see_to(
    place: "Place",
    frozen: "Frozen",
    board: "Board",
    asked: "Ask | None",
    *,
    wait: bool,
    json_: bool,
) -> None:
    """Have it done: by the controller that there is, by a run, or here."""
    from batchml.cli import sweep_running
    from batchml.client.sweeping.recoding import check_code
    from batchml.client.sweeping.steering import leave_ask

    check_code(place, frozen, board)
    found = leave_ask(place, board, asked) if asked is not None else None
    if found is not None:
        say(f"Asked: its controller, {found.holder.words}, sees to it.")
        if json_:
            print_json({"sweepId": frozen.key, "name": frozen.name, "env": place.env})
        else:
            say(f"  follow:  batchml sweeps show --follow {_word(place, frozen)}")
    elif wait:
        sweep_running.attend(place, frozen, board, json_=json_)
    else:
        sweep_running.detach(place, frozen, board, json_=json_)


def _find(env: str | None, word: str) -> "tuple[Place, Frozen, Board]":
    from batchml.cli.wiring import open_place

    place = open_place(env)
    return place, *find(place, word)


def _word(place: "Place", frozen: "Frozen") -> str:
    return f"{frozen.key}{place.option}"


# --- a controller that is a run -----------------------------------------------------------------


@sweeps_app.command(hidden=True, epilog="Example: batchml sweeps attend KEY")
def attend(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Of the sweep.")],
    env: Env = None,
    board: Annotated[str, typer.Option(help="Its address, where no batchml.toml says it.")] = "",
    region: Annotated[str, typer.Option(help="Beside --board.")] = "",
    digest: Annotated[str, typer.Option(help="Of its first document.")] = "",
) -> None:
    """Be a sweep's controller, as a run that `--detach` has submitted."""
    from batchml.cli.attending import attend_as_run
    from batchml.client.sweeping.attending import Where
    from batchml.model.environment import LOCAL

    # Trials in containers read what this writes, as another user.
    os.umask(0o022)
    raise typer.Exit(attend_as_run(Where(key, env or LOCAL, board, region, digest)))
