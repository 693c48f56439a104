"""The command `sweep`: search for the best parameters of a job."""

from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app
from batchml.cli.options import Env, Json, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.sweeps.start import PreparedSweep

CHECK = "check"  # the word before FILE for a check only


@app.command(epilog="Example: batchml sweep sweep.toml --trials 20")
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[check] FILE",
            help="Sweep file, or job with a sweep.toml. `check` only prints the forecast.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until the sweep has ended (the default).")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return, and let the sweep run.")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Set limits.trials: all trials.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Set limits.parallel: trials at once.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key of the file: space.lr.log=[1e-5,1]."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name the sweep.")] = None,
    strict_resources: Annotated[
        bool, typer.Option("--strict-resources", help="Fail if the job does not fit this machine.")
    ] = False,
    include_secrets: Annotated[
        bool, typer.Option("--include-secrets", help="Also send files that look like secrets.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Search for the best parameters of a job.

    `sweep check FILE` prints the number of points and steps, the cost at
    worst, three commands and the requests; nothing is sent.
    """
    from batchml.sweeps.start import SweepOptions, limit_changes, prepare_sweep

    is_check, file = read_words(words or [])
    if wait and detach:
        raise UsageError("--wait and --detach exclude each other.")
    context = open_context(env)
    changes = (*(set_ or ()), *limit_changes(trials, parallel))
    prepared = prepare_sweep(
        context,
        SweepOptions(
            file=file, changes=changes, name=name or "",
            strict=strict_resources, include_secrets=include_secrets,
        ),
    )  # fmt: skip
    for notice in prepared.notices:
        say(notice)
    if is_check:
        _check(prepared, json_=json_)
        return
    _run(context, prepared, is_detached=detach, json_=json_)


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


def _check(prepared: "PreparedSweep", *, json_: bool) -> None:
    from batchml.cli.render import printable
    from batchml.sweeps.start import check_sweep

    checked = check_sweep(prepared.sweep)
    if json_:
        print_json(checked.to_json())
        return
    for line in checked.lines:
        print_line(printable(line))


def _run(context: "Context", prepared: "PreparedSweep", *, is_detached: bool, json_: bool) -> None:
    from batchml.sweeps.commands import running
    from batchml.sweeps.commands.running import SweepInterrupt
    from batchml.sweeps.spec.rules import notices
    from batchml.sweeps.start import start_sweep

    sweep = prepared.sweep
    for notice in notices(sweep.spec, sweep.job_spec):
        say(notice)
    interrupt = SweepInterrupt(context, sweep, json_=json_, is_started=False)
    with interrupt.reported():
        store = start_sweep(context, prepared, say, interrupt.before_spec)
        interrupt.is_started = True
        (say if json_ else print_line)(running.announcement(context, sweep))
        if is_detached:
            running.detach_here(context, sweep, store, json_=json_)
        else:
            running.control_here(context, sweep, store, json_=json_)
