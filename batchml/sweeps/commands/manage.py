"""The commands `sweeps resume, stop, top-up, rerun, confirm`, and `sweeps attend` for --detach."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchml.cli.options import Env, Json, Project, open_context
from batchml.cli.output import print_json, print_line, say, say_lost
from batchml.cli.render import printable
from batchml.errors import UsageError
from batchml.runs.commands.interrupt import detaching
from batchml.sweeps.commands.sweeps import OneSweep, find_sweep, sweeps_app

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.sweeps.control.inbox import SweepRequest
    from batchml.sweeps.run import ControllerArguments
    from batchml.sweeps.started import StartedSweep
    from batchml.sweeps.stores import SweepStore

Code = Annotated[bool, typer.Option("--code", help="First send the job's code as it is now.")]
Secrets = Annotated[
    bool,
    typer.Option("--include-secrets", help="With --code: also send files that look like secrets."),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait/--detach", show_default=False,
        help="Control the sweep here until it has ended (the default), or let a run do it.",
    ),
]  # fmt: skip


@sweeps_app.command(epilog="Example: batchml sweeps resume @last --detach")
def resume(
    word: OneSweep,
    code: Code = False,
    include_secrets: Secrets = False,
    wait: Wait = True,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Continue a sweep that was stopped, or whose terminal was closed.

    `sweeps top-up` continues a sweep that has ended by itself.
    """
    from batchml.sweeps.control.lease import refuse_second_controller
    from batchml.sweeps.manage import make_resume

    context, sweep, store = _find(env, project, word)
    request = make_resume(store)
    if request is None:
        refuse_second_controller(store, context.clock, store.key)
    _send(context, sweep, store, code=code, include_secrets=include_secrets)
    _hand_over(context, sweep, store, request, wait=wait, json_=json_)


@sweeps_app.command(epilog="Example: batchml sweeps stop @last")
def stop(
    word: OneSweep,
    now: Annotated[
        bool, typer.Option("--now", help="Terminate trials without time to save.")
    ] = False,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Record this reason.")
    ] = "stopped by the user",
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Let all trials save and end, and begin no other.

    `sweeps resume` continues from there.
    """
    from batchml.sweeps.commands import running
    from batchml.sweeps.commands.render import identity_json, sweep_word
    from batchml.sweeps.manage import SweepStop

    context, sweep, store = _find(env, project, word)
    stopping = SweepStop(context, sweep, store, say)
    if not stopping.begin(reason, now=now):
        with detaching(context, []):
            running.show_snapshots(stopping.snapshots(), sweep, to_stderr=True)
        say(f"Sweep [{sweep.name} - {sweep.key}] has stopped.")
    if json_:
        print_json(identity_json(sweep))
    elif not stopping.had_ended:
        say(f"  resume:  batchml sweeps resume {sweep_word(context, sweep)}")


@sweeps_app.command("top-up", epilog="Example: batchml sweeps top-up @last --trials 128")
def top_up(
    word: OneSweep,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Set the number of trials in all.")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(metavar="H", help="Set the limit of hours since the sweep began."),
    ] = None,
    cost: Annotated[
        float | None, typer.Option(metavar="USD", help="Set the limit of the sweep's cost.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Set the number of trials at once.")
    ] = None,
    wait: Wait = True,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Change the limits of a sweep, which then continues.

    A sweep that has ended by itself continues too. `sweeps resume` continues a
    sweep that was stopped.
    """
    from batchml.sweeps import manage

    context, sweep, store = _find(env, project, word)
    request = manage.make_top_up(
        sweep, store, trials=trials, hours=hours, cost=cost, parallel=parallel
    )  # fmt: skip
    _hand_over(context, sweep, store, request, wait=wait, json_=json_)


@sweeps_app.command(epilog="Example: batchml sweeps rerun @last --failed")
def rerun(
    word: OneSweep,
    failed: Annotated[bool, typer.Option("--failed", help="Run all failed trials.")] = False,
    trial: Annotated[
        list[int] | None,
        typer.Option("--trial", metavar="N", help="Run this trial. May be repeated."),
    ] = None,
    code: Code = False,
    include_secrets: Secrets = False,
    wait: Wait = True,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Run trials of a sweep again from their beginning.

    After a fix in the code use --code: otherwise they run the code that was
    sent before. The job stays as it was at the start: after a change of
    job.toml, start a new sweep.
    """
    from batchml.sweeps import manage

    if failed == bool(trial):
        raise UsageError("rerun: give either --failed or --trial N.")
    context, sweep, store = _find(env, project, word)
    request = manage.make_rerun(store, tuple(trial or ()))
    if request is None:
        say(f"No trial of {sweep.name} has failed. Nothing was done.")
        if json_:
            print_json(None)
        return
    _send(context, sweep, store, code=code, include_secrets=include_secrets)
    _hand_over(context, sweep, store, request, wait=wait, json_=json_)


@sweeps_app.command(epilog="Example: batchml sweeps confirm @last --top 3 --seeds 3")
def confirm(
    word: OneSweep,
    top: Annotated[
        int | None, typer.Option(metavar="N", help="Run this number of the best trials.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="Run each trial with this number of seeds.")
    ] = None,
    wait: Wait = True,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Run the best trials again with other seeds."""
    from batchml.sweeps import manage

    context, sweep, store = _find(env, project, word)
    request = manage.make_confirm(sweep, store, top, seeds)
    _hand_over(context, sweep, store, request, wait=wait, json_=json_)


def _send(
    context: "Context",
    sweep: "StartedSweep",
    store: "SweepStore",
    *,
    code: bool,
    include_secrets: bool,
) -> None:
    """Send the present code, or tell the user that trials run older code."""
    from batchml.sweeps.jobs import describe_old_code, send_code

    if code:
        send_code(context, sweep, store, include_secrets=include_secrets, tell=say)
    elif words := describe_old_code(context, sweep, store):
        say(printable(words))


def _hand_over(
    context: "Context",
    sweep: "StartedSweep",
    store: "SweepStore",
    request: "SweepRequest | None",
    *,
    wait: bool,
    json_: bool,
) -> None:
    """Give a request to the running controller. If none runs, control the sweep in this process, or
    with `wait` False by a run."""
    from batchml.sweeps.commands import running
    from batchml.sweeps.commands.render import identity_json, sweep_word
    from batchml.sweeps.jobs import check_code
    from batchml.sweeps.manage import hand_over

    check_code(context, sweep, store)
    lease = hand_over(context, store, request) if request is not None else None
    if lease is not None:
        say(f"Requested. The controller is {lease.holder.description}.")
        if json_:
            print_json(identity_json(sweep))
        else:
            say(f"  follow:  batchml sweeps show --follow {sweep_word(context, sweep)}")
    elif wait:
        running.control_here(context, sweep, store, json_=json_)
    else:
        running.detach_here(context, sweep, store, json_=json_)


def _find(
    env: str | None, project: str | None, word: str
) -> "tuple[Context, StartedSweep, SweepStore]":
    context = open_context(env, project)
    return context, *find_sweep(context, word)


# --- The controller as a run: `sweeps attend`, which `--detach` submits ---------------------------


@sweeps_app.command(hidden=True, epilog="Example: batchml sweeps attend KEY")
def attend(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of the sweep.")],
    env: Env = None,
    store: Annotated[str, typer.Option("--store", help="Address of the sweep's store.")] = "",
    region: Annotated[str, typer.Option(help="AWS Region of the environment, with --store.")] = "",
    digest: Annotated[str, typer.Option(help="Digest of spec.json.")] = "",
) -> None:
    """Control a sweep in a run that --detach has submitted."""
    from batchml.model.environment import LOCAL
    from batchml.sweeps.run import ControllerArguments

    # Trials in containers read files of this process as another user.
    os.umask(0o022)
    raise typer.Exit(attend_as_run(ControllerArguments(key, env or LOCAL, store, region, digest)))


def attend_as_run(arguments: "ControllerArguments") -> int:
    """Control the sweep until it has ended, or another controller has it. Returns exit code 0.

    A failed sweep is no failure of its controller. After an error AWS Batch retries the run, except
    after ConfigError and AccessError.
    """
    from batchml.errors import ControllerReplaced

    try:
        _control(arguments)
    except ControllerReplaced as error:
        say(str(error))
    return 0


def _control(arguments: "ControllerArguments") -> None:
    from contextlib import closing

    from batchml.sweeps.commands import running
    from batchml.sweeps.commands.render import end_lines
    from batchml.sweeps.control.lease import this_process
    from batchml.sweeps.run import control_sweep, open_sweep

    context = _context(arguments)
    store, sweep = open_sweep(context, arguments)
    owner = this_process(sweep.user, os.environ.get("AWS_BATCH_JOB_ID", ""))
    controller = control_sweep(context, sweep, store, say, owner, lost=say_lost)
    with detaching(context, []), closing(controller.snapshots()) as snapshots:
        running.show_snapshots(running.without_final_best(snapshots), sweep, to_stderr=False)
    for line in end_lines(sweep, controller.summary):
        print_line(printable(line))


def _context(arguments: "ControllerArguments") -> "Context":
    from batchml.clock import SystemClock
    from batchml.config.settings import load_settings
    from batchml.model.environment import LOCAL
    from batchml.runs.controllers import ControllerContext, context_in_aws

    clock = SystemClock()
    if arguments.store:
        return context_in_aws(
            arguments.env, arguments.region, Path.home() / ".batchml", clock, source="the sweep"
        )
    settings = load_settings(os.environ, Path.cwd(), LOCAL)
    return ControllerContext(settings, clock, Path.cwd(), say)
