"""sweep: search for the parameters with which a job does best."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.starting import Ready

CHECK = "check"  # the word before FILE that sends nothing


@app.command(epilog="Example: batchml sweep sweep.toml --trials 20")
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[check] FILE",
            help="A sweep file, or a job with a sweep.toml. `check` only says what it comes to.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until it has ended: the default.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it to itself.")] = False,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Trials in all: limits.trials.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Trials at once: limits.parallel.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the file: space.lr.log=[1e-5,1]."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the sweep.")] = None,
    strict_resources: Annotated[
        bool, typer.Option("--strict-resources", help="Refuse what does not fit, do not fit it.")
    ] = False,
    include_secrets: Annotated[
        bool, typer.Option("--include-secrets", help="Send files that look like secrets, too.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Search for the parameters with which a job does best.

    `sweep check FILE` says how many points and steps it comes to, what it
    costs at worst, and shows three commands and the requests; nothing is sent.
    """
    from batchml.cli.wiring import open_place
    from batchml.client.sweeping.reading import Wish, widths
    from batchml.client.sweeping.starting import make_ready

    is_check, file = read_words(words or [])
    if wait and detach:
        raise UsageError("--wait and --detach go one at a time.")
    place = open_place(env)
    changes = (*(set_ or ()), *widths(trials, parallel))
    ready = make_ready(
        place,
        Wish(
            file=file, changes=changes, name=name or "",
            strict=strict_resources, include_secrets=include_secrets,
        ),
    )  # fmt: skip
    for notice in ready.notices:
        say(notice)
    if is_check:
        _check(ready, json_=json_)
        return
    _run(place, ready, is_detached=detach, json_=json_)


def read_words(words: list[str]) -> tuple[bool, str]:
    """Whether to check only, and the file. Raises UsageError."""
    example = "batchml sweep sweep.toml, or batchml sweep check sweep.toml"
    match words:
        case [] | ["check"]:
            raise UsageError(f"sweep needs a file: {example}.")
        case [file]:
            return False, file
        case ["check", file]:
            return True, file
        case [first, _]:
            meant = did_you_mean(first, [CHECK])
            raise UsageError(f"sweep takes one file, found {first} before it.{meant} {example}.")
    raise UsageError(f"sweep takes one file at a time, found {len(words)} words: {example}.")


def _check(ready: "Ready", *, json_: bool) -> None:
    from batchml.cli.render import printable
    from batchml.client.sweeping.checking import check

    checked = check(ready.frozen)
    if json_:
        print_json(checked.as_json())
        return
    for line in checked.lines:
        print_line(printable(line))


def _run(place: "Place", ready: "Ready", *, is_detached: bool, json_: bool) -> None:
    from batchml.cli import sweep_running
    from batchml.cli.sweep_leaving import Leaving
    from batchml.client.sweeping.starting import start
    from batchml.model.sweepjob import notices

    frozen = ready.frozen
    for notice in notices(frozen.spec, frozen.job_spec):
        say(notice)
    leaving = Leaving(place, frozen, json_=json_, is_started=False)
    with leaving.told():
        board = start(place, ready, say, leaving.writing)
        leaving.is_started = True
        (say if json_ else print_line)(sweep_running.announcement(place, frozen))
        if is_detached:
            sweep_running.detach(place, frozen, board, json_=json_)
        else:
            sweep_running.attend(place, frozen, board, json_=json_)
