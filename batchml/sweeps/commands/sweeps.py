"""The commands `sweep` and `sweeps ls, show, best, report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.app import app, command_group
from batchml.cli.options import AllProjects, DryRun, Env, Json, Project, open_context
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable
from batchml.config.project import project_name
from batchml.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.sweeps.control.state import SweepState
    from batchml.sweeps.start import PreparedSweep
    from batchml.sweeps.started import StartedSweep
    from batchml.sweeps.stores import SweepStore
    from batchml.sweeps.view import SweepView


# --- `sweep` --------------------------------------------------------------------------------------


CHECK = "check"  # the word before FILE: print the forecast, and start nothing


@app.command(epilog="Example: batchml sweep sweep.toml --trials 20")
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[check] FILE",
            help="Sweep file, or job with a sweep.toml. With `check` nothing is started.",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Control the sweep until it has ended (the default).")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return, and let the sweep run on its own.")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Set limits.trials: trials in all.")
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
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name the sweep.")] = None,
    strict_resources: Annotated[
        bool, typer.Option("--strict-resources", help="Fail if the job does not fit this machine.")
    ] = False,
    include_secrets: Annotated[
        bool, typer.Option("--include-secrets", help="Also send files that look like secrets.")
    ] = False,
    dry_run: DryRun = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Search for the best parameters of a job.

    `sweep check FILE` prints the number of points and steps, the greatest
    cost and three trials' commands; nothing is sent.
    """
    from batchml.sweeps.start import SweepOptions, limit_changes, prepare_sweep

    is_check, file = parse_arguments(words or [])
    if wait and detach:
        raise UsageError("--wait and --detach exclude each other.")
    context = open_context(env, project)
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
    if is_check or dry_run:
        _check(prepared, requests=dry_run, json_=json_)
        return
    _start(context, prepared, is_detached=detach, json_=json_)


def parse_arguments(words: list[str]) -> tuple[bool, str]:
    """Whether to check only, and the file that the words name. Raises UsageError."""
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


def _check(prepared: "PreparedSweep", *, requests: bool, json_: bool) -> None:
    """Print the forecast, or with `requests` the first AWS requests, as `submit --dry-run` does."""
    from batchml.sweeps.start import check_sweep

    checked = check_sweep(prepared.sweep)
    if requests:
        print_json(checked.requests)
        return
    if json_:
        print_json(checked.to_json())
        return
    for line in checked.lines:
        print_line(printable(line))


def _start(
    context: "Context", prepared: "PreparedSweep", *, is_detached: bool, json_: bool
) -> None:
    from batchml.sweeps.commands import running
    from batchml.sweeps.commands.running import SweepInterrupt
    from batchml.sweeps.run import check_controller
    from batchml.sweeps.spec.rules import notices
    from batchml.sweeps.start import start_sweep

    sweep = prepared.sweep
    for notice in notices(sweep.spec, sweep.job_spec):
        say(notice)
    interrupt = SweepInterrupt(context, sweep, json_=json_, is_started=False)
    with interrupt.reported():
        if is_detached:
            check_controller(context, sweep, prepared.cache)
        store = start_sweep(context, prepared, say, interrupt.before_spec)
        interrupt.is_started = True
        started = f"Started sweep [{sweep.name} - {sweep.key}] in [{context.env}]"
        (say if json_ else print_line)(started)
        if is_detached:
            running.detach_here(context, sweep, store, json_=json_)
        else:
            running.control_here(context, sweep, store, json_=json_)


# --- `sweeps ls, show, best, report` --------------------------------------------------------------


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
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="List at most this many, the newest.")
    ] = 20,
    all_: AllProjects = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """List the project's sweeps, newest first."""
    from batchml.sweeps.commands.render import row_json, sweeps_table
    from batchml.sweeps.stores import list_sweeps
    from batchml.sweeps.view import make_row

    context = open_context(env, project, all_projects=all_)
    every = list_sweeps(context)
    # The project of a damaged sweep, which has no name, is not known: it is always listed.
    sweeps = [each for each in every if all_ or each.project == context.project or not each.name]
    rows = [make_row(context, listed) for listed in sweeps[:limit]]
    if json_:
        return print_json([row_json(row) for row in rows])
    if not rows and every:
        name = project_name(context.project)
        return say(f"No sweeps in the project {name}; {len(every)} in others: --all.")
    if not rows:
        return say("No sweeps. `batchml sweep sweep.toml` starts one.")
    print_line(sweeps_table(rows, context.clock.now(), has_projects=all_))
    if len(sweeps) > limit:
        say(f"Only the newest {limit} are listed; --limit lists more.")


@sweeps_app.command("show", epilog="Example: batchml sweeps show --follow @last")
def show(
    word: OneSweep,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Update the output until the sweep has ended.")
    ] = False,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="Show one trial, and why it failed.")
    ] = None,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show the state of a sweep, once or live.

    A sweep that waits for a controller continues with `sweeps resume`.
    """
    from batchml.sweeps.commands.render import describe_next_commands, sweep_json
    from batchml.sweeps.commands.running import draw, open_view
    from batchml.sweeps.view import SweepView

    context = open_context(env, project)
    sweep, store = find_sweep(context, word)
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
        return say(describe_next_commands(context, sweep, view.state, snapshot, view.holder()))
    with open_view(sweep, to_stderr=False) as display:
        try:
            for snapshot in view.snapshots():
                display.show(snapshot)
        except KeyboardInterrupt:
            return
    for line in _results(view):
        print_line(line)
    say(describe_next_commands(context, sweep, view.state, view.snapshot(), ""))


def _results(view: "SweepView") -> list[str]:
    """Lines for confirming runs and the Pareto front."""
    from batchml.sweeps.commands.render import confirmed_lines, front_lines

    summary = view.summary
    return [*confirmed_lines(summary.confirmed), *front_lines(summary.pareto)]


def _show_trial(
    context: "Context", sweep: "StartedSweep", state: "SweepState", number: int, *, json_: bool
) -> None:
    from batchml.sweeps.commands.best import describe_trial, find_trial, trial_details_json

    trial = find_trial(sweep, state, number)
    if json_:
        return print_json(trial_details_json(sweep, trial, state))
    print_line(describe_trial(context, sweep, trial, context.clock.now()))


@sweeps_app.command("best", epilog="Example: batchml sweeps best @last --command")
def best(
    word: OneSweep,
    count: Annotated[
        int, typer.Option("-n", min=1, metavar="K", help="Show this number of trials.")
    ] = 1,
    command: Annotated[
        bool, typer.Option("--command", help="Print only the shell command that runs the trial.")
    ] = False,
    get: Annotated[
        Path | None,
        typer.Option(
            "--get",
            metavar="DIR",
            help="Fetch the best trial as a job: code, job.toml, outputs, checkpoint.",
        ),
    ] = None,
    job: Annotated[
        bool, typer.Option("--job", help="Print only a job.toml with the trial's parameters.")
    ] = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Show the best trials, or fetch the best one."""
    from batchml.sweeps.commands import best as sweep_best
    from batchml.sweeps.view import SweepView

    if sum((command, job, get is not None)) > 1:
        raise UsageError("--command, --job and --get exclude each other.")
    context = open_context(env, project)
    sweep, store = find_sweep(context, word)
    state = SweepView(context, sweep, store).state
    trials = sweep_best.best_first(sweep, state)[:count]
    if not trials:
        raise sweep_best.no_best_trial(sweep, state)
    if json_ and get is None:
        print_json(sweep_best.best_json(sweep, trials, state))
        return sweep_best.say_doubts(context, trials[0])
    if command:
        from batchml.sweeps.started import command_line

        return print_line("\n".join(command_line(sweep, each) for each in trials))
    if job:
        return print_line(sweep_best.trial_job_file(sweep, trials[0]))
    if get is not None:
        return sweep_best.fetch_as_job(context, sweep, store, trials[0], state, get, json_=json_)
    print_line(sweep_best.best_text(sweep, trials, state))
    sweep_best.say_doubts(context, trials[0])


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
    project: Project = None,
    json_: Json = False,
) -> None:
    """Write a report as an HTML page, with CSV and JSON files.

    The page needs no network and no server. A report can be written at any
    time.
    """
    from batchml.jobs.written import note_written
    from batchml.sweeps.report.page import data_files, write_report
    from batchml.sweeps.view import SweepView

    context = open_context(env, project)
    sweep, store = find_sweep(context, word)
    path = output or Path(f"{sweep.name}-{sweep.key[:8]}.html")
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"-o {path}: the name must end in .html.")
    if not path.parent.is_dir():
        raise UsageError(f"-o {path}: the folder {path.parent} does not exist. Make it first.")
    state = SweepView(context, sweep, store).state
    write_report(sweep, state, path, context.clock)
    table, document = data_files(path)
    note_written(context.home, [path, table, document])
    if json_:
        files = {"html": path, "csv": table, "json": document}
        paths = {kind: str(file.absolute()) for kind, file in files.items()}
        return print_json({"sweepId": sweep.key, "trials": len(state.trials), **paths})
    size = path.stat().st_size
    print_line(printable(str(path)))
    say(f"{len(state.trials):,} trials, {size // 1024:,} KiB; also {table.name} and "
        f"{document.name}.")  # fmt: skip


def find_sweep(context: "Context", word: str) -> "tuple[StartedSweep, SweepStore]":
    """The sweep that a word names. Raises NotFound."""
    from batchml.sweeps.started import load_started
    from batchml.sweeps.stores import find_sweep_store

    store = find_sweep_store(context, word)
    return load_started(store, word), store
