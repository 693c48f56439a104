"""The commands `sweeps ls, show, best, report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import command_group
from batchml.cli.options import Env, Json, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable
from batchml.errors import NotFound, UsageError

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.sweeps.control.state import SweepState
    from batchml.sweeps.started import StartedSweep
    from batchml.sweeps.stores import SweepStore
    from batchml.sweeps.view import SweepView

sweeps_app = command_group(
    "sweeps",
    "List, show and manage sweeps.",
    "batchml sweeps show @last",
)

OneSweep = Annotated[
    str, typer.Argument(metavar="SWEEP", help="Key, prefix of a key, name or @last.")
]


@sweeps_app.command("ls", epilog="Example: batchml sweeps ls")
def list_(
    limit: Annotated[int, typer.Option(min=1, help="List at most this many, the newest.")] = 20,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List the environment's sweeps, newest first."""
    from batchml.sweeps.commands.render import row_json, sweeps_table
    from batchml.sweeps.stores import list_sweeps
    from batchml.sweeps.view import make_row

    context = open_context(env)
    stores = list_sweeps(context)
    found = [make_row(context, each) for each in stores[:limit]]
    if json_:
        return print_json([row_json(each) for each in found])
    if not found:
        return say("No sweeps. `batchml sweep sweep.toml` starts one.")
    print_line(sweeps_table(found, context.clock.now()))
    if len(stores) > limit:
        say(f"Only the newest {limit} are listed; --limit lists more.")


@sweeps_app.command("show", epilog="Example: batchml sweeps show --follow @last")
def show(
    word: OneSweep,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Update until the sweep has ended.")
    ] = False,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="Show one trial, and why it failed.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show the state of a sweep, once or live.

    It begins no trials: `sweeps resume` continues a sweep that needs a
    controller.
    """
    from batchml.sweeps.commands.next_commands import describe_next
    from batchml.sweeps.commands.render import sweep_json
    from batchml.sweeps.commands.table import draw, open_view
    from batchml.sweeps.view import SweepView

    context = open_context(env)
    sweep, store = find(context, word)
    view = SweepView(context, sweep, store)
    if trial is not None:
        if follow:
            raise UsageError(
                "--trial and --follow exclude each other; `batchml logs -f` follows a trial."
            )
        return _show_trial(context, sweep, view.state, trial, json_=json_)
    if json_:
        snapshot = view.snapshot()
        return print_json(sweep_json(sweep, view.state, snapshot, view.summary, view.holder()))
    if not follow:
        from batchml.cli.terminal import screen

        snapshot = view.snapshot()
        print_line("\n".join([draw(snapshot, sweep, screen()), *_results(view)]))
        return say(describe_next(context, sweep, view.state, snapshot, view.holder()))
    with open_view(sweep, to_stderr=False) as display:
        try:
            for snapshot in view.snapshots():
                display.show(snapshot)
        except KeyboardInterrupt:
            return
    for line in _results(view):
        print_line(line)
    say(describe_next(context, sweep, view.state, view.snapshot(), ""))


def _results(view: "SweepView") -> list[str]:
    """Lines on confirming runs and the Pareto front."""
    from batchml.sweeps.commands.render import confirmed_lines, front_lines

    summary = view.summary
    return [*confirmed_lines(summary.confirmed), *front_lines(summary.pareto)]


def _show_trial(
    context: "Context", sweep: "StartedSweep", state: "SweepState", number: int, *, json_: bool
) -> None:
    from batchml.sweeps.commands import best as sweep_trial

    trial = sweep_trial.find_trial(sweep, state, number)
    if json_:
        return print_json(sweep_trial.trial_details_json(sweep, trial, state))
    print_line(sweep_trial.describe_trial(context, sweep, trial, context.clock.now()))


@sweeps_app.command("best", epilog="Example: batchml sweeps best @last --command")
def best(
    word: OneSweep,
    count: Annotated[int, typer.Option("-n", min=1, metavar="K", help="Number of trials.")] = 1,
    command: Annotated[
        bool, typer.Option("--command", help="Print only the shell command that runs it.")
    ] = False,
    get: Annotated[
        Path | None,
        typer.Option(
            "--get", metavar="DIR", help="Fetch it as a job: code, job.toml, outputs, checkpoint."
        ),
    ] = None,
    job: Annotated[
        bool, typer.Option("--job", help="Print only the job.toml with its parameters.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Show the best trials, or fetch the best one."""
    from batchml.sweeps.commands import best as sweep_best
    from batchml.sweeps.view import SweepView

    if sum((command, job, get is not None)) > 1:
        raise UsageError("--command, --job and --get exclude each other.")
    context = open_context(env)
    sweep, store = find(context, word)
    state = SweepView(context, sweep, store).state
    trials = sweep_best.best_first(sweep, state)[:count]
    if not trials:
        raise sweep_best.no_best_trial(sweep, state)
    if json_ and get is None:
        return print_json(sweep_best.best_json(sweep, trials, state))
    if command:
        from batchml.sweeps.report.data import command_line

        return print_line("\n".join(command_line(sweep.job_spec, each) for each in trials))
    if job:
        return print_line(sweep_best.trial_job_file(sweep, trials[0]))
    if get is not None:
        return sweep_best.fetch_as_job(context, sweep, store, trials[0], state, get, json_=json_)
    print_line(sweep_best.best_text(sweep, trials, state))


@sweeps_app.command("report", epilog="Example: batchml sweeps report @last -o lenet.html")
def report(
    word: OneSweep,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write this file; the default is NAME-KEY.html."
        ),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Write a report as an HTML page, with CSV and JSON files.

    The page needs no network and no server. A report can be written at any
    time.
    """
    from batchml.sweeps.report.page import data_files, write_report
    from batchml.sweeps.view import SweepView

    context = open_context(env)
    sweep, store = find(context, word)
    path = output or Path(f"{sweep.name}-{sweep.key[:8]}.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {path}: the name must end in .html.")
    _check_folder(f"-o {path}", path)
    state = SweepView(context, sweep, store).state
    write_report(sweep, state, path, context.clock)
    table, document = data_files(path)
    if json_:
        files = {"html": path, "csv": table, "json": document}
        return print_json(
            {"sweepId": sweep.key, "trials": len(state.trials)}
            | {name: str(each.absolute()) for name, each in files.items()}
        )
    size = path.stat().st_size
    print_line(printable(str(path)))
    say(f"{len(state.trials):,} trials, {size // 1024:,} KiB; also {table.name} and "
        f"{document.name}.")  # fmt: skip


def _check_folder(given: str, path: Path) -> None:
    """Raise UsageError for a file whose folder does not exist."""
    if not path.parent.is_dir():
        raise UsageError(f"{given}: the folder {path.parent} does not exist. Make it first.")


def find(context: "Context", word: str) -> "tuple[StartedSweep, SweepStore]":
    """The sweep that a word names. Raises NotFound."""
    from batchml.sweeps.started import read_started
    from batchml.sweeps.stores import find_sweep_store

    store = find_sweep_store(context, word)
    sweep = read_started(store)
    if sweep is None:
        raise NotFound("Sweep", word, [], "`batchml sweeps ls` shows them.")
    return sweep, store
