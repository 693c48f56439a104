"""`batchml alloc`: allocate resources, as Slurm's salloc does, and work on them in a shell."""

from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct
from msgspec.structs import replace

from batchml.cli.app import app
from batchml.cli.options import DryRun, Env, Json, Project, open_context, read_seconds
from batchml.cli.output import print_json, say
from batchml.cli.render import job_title
from batchml.errors import BatchmlError, NotRunning, UsageError
from batchml.model.group import ALLOC
from batchml.model.run import Run, classify
from batchml.runs.commands.options import takes_options
from batchml.runs.options import RunRequest, SubmitOptions, to_request
from batchml.runs.submit import submitted_json
from batchml.runtime.protocol.variables import SLURM
from batchml.runtime.sessions.alloc import format_seconds
from batchml.sessions.commands.held import (
    NEVER,
    HeldKind,
    end_run,
    exit_code_after,
    prepare,
    signals_interrupt,
    start,
    wait_for_run,
)
from batchml.sessions.exec.backends import run_inside
from batchml.sessions.exec.target import find_target
from batchml.sessions.held import check_plugin, wait_for_srun

if TYPE_CHECKING:
    from batchml.context import Context

KIND = HeldKind(ALLOC, "run", "The resources are released.")


@app.command(epilog="Example: batchml alloc --gpus 1 --time 2h")
@takes_options(
    (
        "gpus",
        "neurons",
        "vcpus",
        "memory",
        "nodes",
        "queue",
        "image",
        "name",
        "max_cost",
        "set_env",
        "tags",
    ),
    texts={"image": "Use this image; default: python."},
    defaults={"name": "alloc"},
)
def alloc(
    *,
    ctx: typer.Context,
    options: SubmitOptions,
    time: Annotated[
        str | None, typer.Option(metavar="DURATION", help='End after at most this time: "2h".')
    ] = None,
    idle: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help='End after this time without a shell: "30m", "never".'
        ),
    ] = "10m",
    code: Annotated[
        bool, typer.Option("--code/--no-code", help="Send the files of this folder, or do not.")
    ] = True,
    shell: Annotated[
        bool, typer.Option("--shell/--no-shell", help="Start a shell, or only hold the resources.")
    ] = True,
    dry_run: DryRun = False,
    env: Env = None,
    project: Project = None,
    json_: Json = False,
) -> None:
    """Allocate resources, and run a shell or the command after -- on them.

    The resources are released when the shell ends, or when no shell was open for the time of
    --idle. Ctrl-C before the shell starts cancels the run. The exit code is the shell's. With
    --json no shell is started: the resources are only held.
    """
    if ctx.obj == []:
        raise UsageError("Nothing follows the --: give a command, or leave it out for a shell.")
    flags = AllocOptions(
        command=tuple(ctx.obj) if ctx.obj else (),
        idle_s=None if idle == NEVER else read_seconds(idle, "--idle"),
        shell=shell and not json_,
        dry_run=dry_run,
        json_=json_,
    )
    check_options(flags, wants_shell=shell)
    context = open_context(env, project)
    request = _request(options, timeout=time, code=code)
    raise typer.Exit(allocate(context, request, flags))


def _request(options: SubmitOptions, *, timeout: str | None, code: bool) -> RunRequest:
    """Describe the run, whose command only holds the resources."""
    command = ("python3", "-m", "batchml.runtime.sessions.alloc")
    request = to_request(options={**options, "command": command, "timeout": timeout})
    changes = dict(request.changes)
    if not code:
        changes["code"] = False
    if (options.get("nodes") or 1) > 1:  # the shell reaches the other nodes by srun
        changes["env"] = {SLURM: "1", **changes.get("env", {})}
    return replace(request, changes=changes)


# --- The flow -------------------------------------------------------------------------------------


class AllocOptions(Struct, frozen=True, kw_only=True):
    """Options of the command. Without a `command` a shell is started. `idle_s` is in seconds."""

    command: tuple[str, ...] = ()
    idle_s: int | None = None
    shell: bool = True
    dry_run: bool = False
    json_: bool = False


def check_options(flags: AllocOptions, *, wants_shell: bool = True) -> None:
    """Raise UsageError for options that contradict each other."""
    if flags.idle_s == 0:
        raise UsageError('--idle 0s: the run would end at once. Give "10m", or "never".')
    if flags.command and not flags.shell:
        flag = "--json" if wants_shell else "--no-shell"
        raise UsageError(
            f"{flag} only holds the resources, and would not run the command after --. Leave one "
            "of them out. To run commands later: batchml shell RUN -- COMMAND"
        )


def allocate(context: "Context", request: RunRequest, flags: AllocOptions) -> int:
    """Start the run, run the shell in it, and end it; return the exit code of the shell."""
    prepared = prepare(context, request, KIND, idle_s=flags.idle_s, dry_run=flags.dry_run)
    if flags.shell:
        check_plugin(context)
    with signals_interrupt():
        job_id, run = start(
            context,
            prepared,
            wait=lambda job_id: wait_for_run(context, job_id, "Ctrl-C cancels"),
            on_error=lambda job_id: say(_describe_held(context, job_id, flags)),
        )
        assert run is not None
        try:
            say(_describe_granted(run, flags))
            if flags.shell and not flags.command:
                has_code = request.changes.get("code") is not False
                say(_COPY if has_code else _NO_COPY)
            if flags.shell:
                return _run_shell(context, run, flags)
            _print_held(context, run, submitted_json(context, prepared, job_id), flags)
            return 0
        except KeyboardInterrupt as interrupt:
            _end(context, job_id, flags)
            return exit_code_after(interrupt)


_COPY = "This is a copy of the folder: `batchml get` brings changed files."
_NO_COPY = "The working folder is empty: `batchml get` brings the files that you make there."


def _describe_granted(run: Run, flags: AllocOptions) -> str:
    gpus = f", {run.gpus} GPU{'s' if run.gpus > 1 else ''}" if run.gpus else ""
    gpus = f", {run.neurons} Neuron chips" if run.neurons else gpus
    end = " `exit` releases the resources." if flags.shell and not flags.command else ""
    size = f"{run.vcpus} vCPU{'' if run.vcpus == 1 else 's'}{gpus}, {run.memory_mib} MiB"
    nodes = f"{run.nodes} nodes, each of " if run.nodes else ""
    return f"{job_title(run)} is granted {nodes}{size}.{end}"


def _run_shell(context: "Context", run: Run, flags: AllocOptions) -> int:
    """Run the shell or command, and end the run after it, also after an error."""
    try:
        target = find_target(context, run.job_id)
        if run.nodes:
            wait_for_srun(context, target)
        code = run_inside(context, target, flags.command)
    except NotRunning as error:  # the run ended, and the shell with it
        say(str(error))
        code = error.exit_code
    except Exception:
        _end(context, run.job_id, flags)
        raise
    ended = _end(context, run.job_id, flags)
    # If something else ended the run, and the shell with it, the run's exit code counts.
    return code if ended is None else classify(ended).exit_code or code


def _end(context: "Context", job_id: str, flags: AllocOptions) -> Run | None:
    """End the run, report its end, and return it; None if its end is not known."""
    try:
        ended = end_run(context, job_id, KIND)
    except BatchmlError as error:
        held = _describe_held(context, job_id, flags)
        say(f"The resources could not be released: {error}\n{held}")
        return None
    if ended is not None and ended.status.value != "SUCCEEDED":
        say(f"  batchml logs {job_id}{context.env_option}")
    return ended


def _describe_held(context: "Context", job_id: str, flags: AllocOptions) -> str:
    return f"{_describe_idle_end(flags)} To end it: batchml cancel {job_id}{context.env_option}"


def _describe_idle_end(flags: AllocOptions) -> str:
    if flags.idle_s is None:
        return "The run is held until you end it."
    return f"The run ends itself after {format_seconds(flags.idle_s)} without a shell."


def _print_held(
    context: "Context", run: Run, submitted: dict[str, str], flags: AllocOptions
) -> None:
    if flags.json_:
        print_json({**submitted, "status": run.status.value})
    say(f"  shell:  batchml shell {run.job_id}{context.env_option}")
    say(f"  end:    batchml cancel {run.job_id}{context.env_option}")
    say(_describe_idle_end(flags))
