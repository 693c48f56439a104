"""`batchml notebook`: JupyterLab in a run, used from the browser on this machine."""

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, cast

import typer
from msgspec import Struct

from batchml.cli.app import app
from batchml.cli.options import DryRun, Env, Json, Project, open_context, read_seconds
from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable, run_json
from batchml.errors import BatchmlError, HeldRunEnded, NotRunning, UsageError
from batchml.model.group import NOTEBOOK
from batchml.model.run import Run, classify
from batchml.runs.commands.options import takes_options
from batchml.runs.held import last_message
from batchml.runs.options import RunRequest, SubmitOptions, option_rows, to_request
from batchml.runs.submit import submitted_json
from batchml.runs.watch.wait import wait_for_runs
from batchml.runtime.sessions.notebook import PORT
from batchml.sessions.commands.held import (
    NEVER,
    HeldKind,
    end_run,
    prepare,
    signals_interrupt,
    start,
    wait_for_run,
)
from batchml.sessions.exec.backends import open_port_forward
from batchml.sessions.exec.target import ExecTarget, describe_end, find_target
from batchml.sessions.forward.listener import open_listener
from batchml.sessions.held import describe_run_cost
from batchml.sessions.notebook import (
    IDLE,
    PROGRAM,
    NotebookAddress,
    check_image,
    check_reachable,
    default_limits,
    describe_earlier,
    end_error,
    fetch_address,
    find_notebook,
    keep_forwarding,
    match_notebook,
    notebook_job,
    notebook_resources,
    open_browser,
    raise_if_ended,
    sole_notebook,
    unfinished_notebooks,
)

if TYPE_CHECKING:
    from batchml.context import Context

KIND = HeldKind(NOTEBOOK, "notebook", "The notebook has ended.")
_IN_SPEC = ("gpus", "neurons", "vcpus", "memory", "image")  # options that its own job has


@app.command(epilog="Example: batchml notebook --gpus 1 --idle 30m")
@takes_options(
    (
        "gpus",
        "neurons",
        "vcpus",
        "memory",
        "queue",
        "image",
        "name",
        "set_env",
        "tags",
        "max_cost",
    ),
    texts={"image": "Use this image, which has JupyterLab; default: notebook."},
)
def notebook(
    *,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Running notebook to return to.")
    ] = None,
    options: SubmitOptions,
    idle: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help='End after this time without use: "30m", "never"; default: 1h.'
        ),
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="DURATION", help='End after at most this time: "12h".')
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", "--local-port", metavar="N", help="Use this port of this machine."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
    end: Annotated[
        bool, typer.Option("--end", help="End RUN, or the only running one; with --new: at Ctrl-C.")
    ] = False,
    new: Annotated[
        bool, typer.Option("--new", help="Start another notebook, even if one runs.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the notebook, and do not wait for it.")
    ] = False,
    dry_run: DryRun = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Run JupyterLab in a run, and print its URL for the browser on this machine.

    JupyterLab shows the workspace. Ctrl-C leaves the notebook running, and `batchml notebook`
    returns to it. It ends itself, and logs its cost, after the time of --idle without use.
    """
    flags = NotebookOptions(
        port=port, open_=open_, end=end, detach=detach, dry_run=dry_run, json_=json_
    )
    values = {
        "--idle": idle,
        "--time": time,
        "--dry-run": dry_run or None,
        "--detach": detach or None,
        "--new": new or None,
    }
    used = [option_rows()[name].flag for name in options if name != "name"]
    used += [flag for flag, value in values.items() if value is not None]
    _check_flags(run, used, end=end and not new)
    if end and detach:
        raise UsageError("--end and --detach: --end needs this command to stay. Leave one out.")
    context = open_context(env, project)
    if run is not None:
        raise typer.Exit(return_to(context, find_notebook(context, run), flags))
    if end and not new:
        raise typer.Exit(return_to(context, sole_notebook(context), flags))
    if not new and not dry_run:
        records = context.history.recent(context.env)
        match = match_notebook(unfinished_notebooks(context), options, records)
        if match is not None:
            ignored = [flag for flag in ("--idle", "--time", "--max-cost") if flag in used]
            _report_return(match, ignored)
            raise typer.Exit(return_to(context, match, flags))
    request = _request(context, options, time)
    raise typer.Exit(start_notebook(context, request, _read_idle(idle), flags))


def _report_return(run: Run, ignored: Sequence[str]) -> None:
    kept = f" It keeps its own values of {', '.join(ignored)}." if ignored else ""
    say(
        f"Your notebook {run.job_id} is {run.status.value}: returning to it.{kept} "
        "To start another: batchml notebook --new"
    )


def _check_flags(run: str | None, used: list[str], *, end: bool = False) -> None:
    """Raise UsageError for flags that describe a new notebook, if none is started."""
    if run is None and end and used:
        raise UsageError(
            f"{', '.join(used)}: --end ends the notebook that runs. Leave these flags out, or add "
            "--new to start another notebook that ends together with this command."
        )
    if run is not None and used:
        raise UsageError(
            f"{', '.join(used)}: {run} runs already and cannot be changed. Leave these flags out, "
            "or leave the run out to start another notebook."
        )


def _read_idle(text: str | None) -> float | None:
    """Parse --idle as seconds; None for "never". Raises UsageError."""
    if text == NEVER:
        return None
    seconds = read_seconds(text, "--idle")
    if seconds == 0:
        raise UsageError('--idle 0s: the run would end at once. Give "30m", "2h", or "never".')
    return IDLE if seconds is None else float(seconds)


def _request(context: "Context", options: SubmitOptions, timeout: str | None) -> RunRequest:
    gpus, vcpus, memory = options.get("gpus"), options.get("vcpus"), options.get("memory")
    limits, neurons = default_limits(context), options.get("neurons")
    resources = notebook_resources(gpus, vcpus, memory, limits, neurons)
    spec = notebook_job(options.get("image"), resources)
    check_image(context, spec.image)
    rest = {name: value for name, value in options.items() if name not in _IN_SPEC}
    return to_request(spec, cast(SubmitOptions, {**rest, "timeout": timeout}))


# --- The flow -------------------------------------------------------------------------------------


class NotebookOptions(Struct, frozen=True, kw_only=True):
    """Options of the command that do not describe the run."""

    port: int | None = None
    open_: bool = False
    end: bool = False
    detach: bool = False
    dry_run: bool = False
    json_: bool = False


def start_notebook(
    context: "Context", request: RunRequest, idle_s: float | None, flags: NotebookOptions
) -> int:
    """Start a notebook and connect to it; return the exit code."""
    if not flags.dry_run:
        for text in describe_earlier(context):
            say(text)
    prepared = prepare(context, request, KIND, idle_s=idle_s, dry_run=flags.dry_run)
    check_reachable(context, prepared.requests.register)
    if flags.port is not None:
        open_listener(flags.port, flags.port).close()  # fails if the port is taken

    def wait(job_id: str) -> Run:
        return _wait(context, job_id, "Ctrl-C cancels")

    def report_kept(job_id: str) -> None:
        say("The notebook was started, and continues:")
        _print_commands(context, job_id)

    with signals_interrupt():
        job_id, run = start(
            context, prepared, wait=None if flags.detach else wait, on_error=report_kept
        )
    submitted = submitted_json(context, prepared, job_id)
    if run is None:
        return _print_detached(context, submitted, flags)
    return _connect(context, run, submitted, flags)


def return_to(context: "Context", run: Run, flags: NotebookOptions) -> int:
    """Connect to a notebook that exists, or with `end` end it; return the exit code."""
    fields = {
        "jobId": run.job_id,
        "jobName": run.job_name,
        "jobQueue": run.queue,
        "env": context.env,
    }
    if flags.end:
        return _end(context, run, fields, flags)
    if run.status.is_terminal:
        raise end_error(context, run)
    if flags.detach:
        return _print_detached(context, fields, flags)
    if run.status.value != "RUNNING":
        try:
            run = _wait(context, run.job_id, "Ctrl-C leaves")
        except KeyboardInterrupt:
            say("\nThe notebook is still waiting.")
            _print_commands(context, run.job_id)
            raise
    return _connect(context, run, fields, flags)


def _print_detached(context: "Context", fields: dict[str, str], flags: NotebookOptions) -> int:
    _print_commands(context, fields["jobId"])
    if flags.json_:
        print_json(fields)
    return 0


def _wait(context: "Context", job_id: str, hint: str) -> Run:
    try:
        return wait_for_run(context, job_id, hint)
    except HeldRunEnded as error:  # it may have been RUNNING between two polls
        raise end_error(context, context.describe([job_id])[job_id], str(error)) from error


def _connect(context: "Context", run: Run, fields: dict[str, str], flags: NotebookOptions) -> int:
    """Forward a port to JupyterLab until the run ends or the user presses Ctrl-C."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        target = find_target(context, run.job_id)
        address = fetch_address(context, target)
        forward = open_port_forward(context, target, address.port, flags.port)
        _print_url(context, target, address, forward.url, fields, flags)
        say(keep_forwarding(context, target, address, forward, say))
    except KeyboardInterrupt:
        return _leave(context, run, flags)
    except NotRunning as error:
        raise_if_ended(context, run.job_id, error)
        raise
    except HeldRunEnded:
        raise
    except BatchmlError:
        _report_unreachable(context, run.job_id, flags)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return _report_end(context, run.job_id)


def _report_unreachable(context: "Context", job_id: str, flags: NotebookOptions) -> None:
    """With --end end the notebook, which cannot be reached; else say that it still runs."""
    if flags.end:
        _end_and_report(context, job_id)
    else:
        say("The notebook still runs.")
        _print_commands(context, job_id)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _print_url(
    context: "Context",
    target: ExecTarget,
    address: NotebookAddress,
    base: str,
    fields: dict[str, str],
    flags: NotebookOptions,
) -> None:
    """Print the URL; its token only on a terminal."""
    url = f"{base}/lab"
    if flags.json_:
        print_json({**fields, "status": "RUNNING", "url": url, "folder": address.root})
        sys.stdout.flush()
    elif sys.stdout.isatty():
        print_line(f"\n  {url}?token={address.token}\n")
    else:
        print_line(url)
    if flags.json_ or not sys.stdout.isatty():
        command = " ".join((*PROGRAM, "where"))
        say(
            "The token is shown only on a terminal. For programs: "
            f"batchml shell {target.run.job_id}{context.env_option} -- {command}"
        )
    if flags.open_:
        open_browser(context, f"{url}?token={address.token}", "JupyterLab")
    local_port = base.rpartition(":")[2]
    if flags.port is None and local_port != str(PORT):
        say(f"Port {PORT} of this machine is taken: port {local_port} is used instead.")
    say(f"JupyterLab shows {address.root}.")
    if flags.end:
        say("Ctrl-C ends the notebook.")
    else:
        say("Ctrl-C leaves it running.")
        _print_commands(context, target.run.job_id)


def _print_commands(context: "Context", job_id: str) -> None:
    say(f"  return to it:  batchml notebook {job_id}{context.env_option}")
    say(f"  end it:        batchml notebook {job_id}{context.env_option} --end")


# --- The end --------------------------------------------------------------------------------------


def _leave(context: "Context", run: Run, flags: NotebookOptions) -> int:
    """After Ctrl-C: leave the notebook running, or with --end end it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C exits at once
    if flags.end:
        say("")
        return _end_and_report(context, run.job_id)
    say("\nThe notebook continues. It ends when it is idle, unless `--idle never` was given.")
    _print_commands(context, run.job_id)
    return 0


def _end(context: "Context", run: Run, fields: dict[str, str], flags: NotebookOptions) -> int:
    if run.status.is_terminal:
        say(f"It has already ended: {describe_end(run)}.")
    code = 0 if run.status.is_terminal else _end_and_report(context, run.job_id)
    if flags.json_:
        print_json({**fields, **run_json(context.describe([run.job_id])[run.job_id])})
    return code


def _end_and_report(context: "Context", job_id: str) -> int:
    ended = end_run(context, job_id, KIND)
    if ended is None or ended.is_terminated or ended.is_cancelled:
        return 0
    return classify(ended).exit_code


def _report_end(context: "Context", job_id: str) -> int:
    """Report the end of a run that ended by itself, and its cost; return its exit code."""
    (run,) = wait_for_runs(context, [job_id])
    message = last_message(context, run)
    if message:
        say(f"Its last message: {printable(message)}")
    cost = describe_run_cost(context, job_id)
    say(f"{cost} Full log: batchml logs {job_id}{context.env_option}".strip())
    return classify(run).exit_code
