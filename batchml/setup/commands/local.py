"""batchml local start, stop, status, env, adopt, clean and reset."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from msgspec import to_builtins
from msgspec.structs import replace

from batchml.cli.app import command_group
from batchml.cli.options import Json, open_context, read_seconds
from batchml.cli.output import print_json, print_line
from batchml.cli.render import time_json
from batchml.clock import SystemClock
from batchml.config.project import short_project
from batchml.context import LOCAL_REGION, Context
from batchml.errors import LocalServerError, TransferFailed, UsageError
from batchml.local import control, disk
from batchml.local.batch import fault_injection
from batchml.local.control import describe_silence, describe_state, is_answering
from batchml.local.deletion_guard import NAMES, WORKSPACE, delete_data, describe_losses, find_losses
from batchml.local.executors.choice import read_choice, read_endpoints, save_endpoints
from batchml.local.home import Home
from batchml.local.images import uv_program
from batchml.local.server.auth import ENDPOINTS
from batchml.local.store import adopt as adopting
from batchml.local.store import identity
from batchml.model.environment import endpoint_mistakes, endpoint_variables
from batchml.model.names import short_duration
from batchml.model.run import RunName
from batchml.runtime.entry.folders import size_text
from batchml.runtime.processes import state_of
from batchml.workspace.commands import show_progress
from batchml.workspace.local import LocalWorkspace, track_progress

local_app = command_group(
    "local",
    "Control the embedded AWS Batch of this machine.",
    'eval "$(batchml local env)" && aws batch describe-job-queues',
)


def _context() -> Any:
    return open_context("local")


def _home() -> Any:
    return _context().home


@local_app.command(epilog="Example: batchml local start --port 8123")
def start(
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="N", help="Listen on this port; 0: any free port."),
    ] = 0,
    idle: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Stop after this time without jobs and requests: 10m."
        ),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="process|docker", help="Run jobs as processes or Docker containers (kept)."
        ),
    ] = None,
    allow_path: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER", help="Allow containers to mount this folder (kept). May be repeated."
        ),
    ] = None,
    allow_privileged: Annotated[
        bool | None,
        typer.Option(
            "--allow-privileged/--no-allow-privileged",
            help="Allow privileged containers (kept).",
        ),
    ] = None,
    vcpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10_000,
            metavar="N",
            help="Place jobs as if this machine had N vCPUs; 0: as many as it has (kept).",
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVICE=URL",
            help="Give jobs this endpoint of another AWS service: s3=http://127.0.0.1:9000 (kept). "
            "An empty URL removes it. May be repeated.",
        ),
    ] = None,
    chaos: Annotated[
        str | None,
        typer.Option(
            metavar="FAULTS",
            help="Inject faults until the server stops: throttle=20%,oom@60s.",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Start the server unless it runs.

    `submit` starts it by itself. Later starts keep the values of options that are marked (kept).
    """
    context = _context()
    home = context.home
    seconds = read_seconds(idle, "--idle")
    endpoints = {**context.settings.environment.endpoints, **_read_endpoints(endpoint or ())}
    options = _executor_options(executor, allow_path, allow_privileged) + _chaos_options(chaos)
    options += [] if vcpus is None else ["--vcpus", str(vcpus)]
    found = control.find_server(home)
    if found is not None and (idle or options or port not in (0, found.port)):
        raise LocalServerError(
            f"The server already runs on port {found.port}. To start it with other options, stop "
            f"it first: batchml local stop"
        )
    if endpoints:
        save_endpoints(home, endpoints)
    if found is None:
        control.start_server(home, SystemClock(), port, seconds, options)
    _print_status(home, json_)


def _read_endpoints(given: Iterable[str]) -> dict[str, str]:
    """Service -> URL; an empty URL removes the service. Raises UsageError."""
    found = {service: url for service, _, url in (text.partition("=") for text in given)}
    mistakes = list(endpoint_mistakes({k: v for k, v in found.items() if v}))
    mistakes += [f"{text}: expected SERVICE=URL." for text in given if "=" not in text]
    if mistakes:
        raise UsageError("\n".join(f"--endpoint {mistake}" for mistake in mistakes))
    return found


def _executor_options(
    executor: str | None, paths: list[str] | None, privileged: bool | None
) -> list[str]:
    if executor not in (None, "process", "docker"):
        raise UsageError(f"--executor {executor}: choose process or docker.")
    options = [] if executor is None else ["--executor", executor]
    for path in paths or ():
        options += ["--allow-path", os.path.abspath(path)]
    if privileged is not None:
        options.append("--allow-privileged" if privileged else "--no-allow-privileged")
    return options


def _chaos_options(text: str | None) -> list[str]:
    """The server's option for `--chaos`, checked before the server starts."""
    if text is None:
        return []
    fault_injection.parse(text)
    return [f"--chaos={text}"]


@local_app.command(epilog="Example: batchml local stop")
def stop(json_: Json = False) -> None:
    """Stop the server. Running jobs continue, and the next start finds them."""
    home = _home()
    was_running = control.stop_server(home, SystemClock())
    if not json_:
        print("Stopped. Running jobs continue." if was_running else "No server was running.")
    else:
        _print_status(home, json_)


@local_app.command(epilog="Example: batchml local status --json")
def status(json_: Json = False) -> None:
    """Show whether the server runs and answers, where, and the space that its folder takes.

    Exit code 0 if it answers, else 1.
    """
    home = _home()
    if not _print_status(home, json_, disk.measure(home)):
        raise typer.Exit(1)


@local_app.command(epilog='Example: eval "$(batchml local env)" && aws batch describe-job-queues')
def env(json_: Json = False) -> None:
    """Print the variables that point AWS clients at the server, and start it if needed."""
    context = _context()
    server = context.server()
    home = context.home
    keys = home.keys()
    variables = {
        **dict.fromkeys(ENDPOINTS, server.url),
        **endpoint_variables(read_endpoints(home)),
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "AWS_REGION": LOCAL_REGION,
        "AWS_DEFAULT_REGION": LOCAL_REGION,
    }
    if json_:
        print_json(variables)
        return
    for name, value in variables.items():
        print(f"export {name}={value}")
    # An AWS client would send these, or use them instead.
    print("unset AWS_SESSION_TOKEN AWS_PROFILE AWS_DEFAULT_PROFILE")


@local_app.command(epilog="Example: batchml local adopt --yes")
def adopt(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json_: Json = False,
) -> None:
    """Turn a copy or a restored backup of a state folder into an independent folder.

    Runs that ran at the time of the copy end here as lost hosts. Waiting runs also start here. The
    original folder and its runs do not change.
    """
    home = _home()
    if not home.journal.exists():
        raise LocalServerError(f"{home.root} holds no jobs yet, so there is nothing to adopt.")
    control.stop_server(home, SystemClock())
    lock = home.hold()
    try:
        copy = adopting.inspect_copy(home)
        if copy is None:
            raise LocalServerError(f"{home.root} is not a copy. There is nothing to adopt.")
        if not yes:
            _ask_to_adopt(home, copy)
        adopting.adopt(home)
    finally:
        os.close(lock)
    if json_:
        print_json({"home": str(home.root), "lost": copy.running, "waiting": copy.waiting})
        return
    print(
        f"{home.root} is adopted. When the next command starts its server, "
        f"{_describe_adoption(copy)}."
    )
    if copy.unknown:
        folder = home.local / adopting.SET_ASIDE
        print(f"Attempts that its journal does not know ({copy.unknown}) were moved to {folder}.")


def _describe_adoption(copy: Any) -> str:
    """The effect of an adoption on the runs of a copy."""
    lost, waiting = copy.running, copy.waiting
    ends = f"{lost} running job{' ends as a lost host' if lost == 1 else 's end as lost hosts'}"
    return f"{ends} and {waiting} waiting job{' starts' if waiting == 1 else 's start'}"


def _ask_to_adopt(home: Any, copy: Any) -> None:
    text = (
        f"{home.root} {copy.why}. If you adopt it, {_describe_adoption(copy)}. The original "
        f"folder, if it still exists, runs its jobs, too."
    )
    if not sys.stdin.isatty():
        raise UsageError(f"{text} To adopt it without this question: --yes.")
    typer.confirm(f"{text} Adopt it?", abort=True)


@local_app.command(epilog="Example: batchml local clean --dry-run")
def clean(
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Choose environments and data copies unused for this time; default: 30d.",
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Choose all that no process uses now.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed and change nothing.")
    ] = False,
    json_: Json = False,
) -> None:
    """Free the disk of old environments, packages that none shares, and old copies of data sets.

    A run that needs a removed environment or copy makes it again. Runs, outputs and logs stay.
    """
    if all_ and older_than is not None:
        raise UsageError("--all and --older-than exclude each other.")
    least_age = "" if all_ else older_than or "30d"
    seconds = read_seconds(least_age, "--older-than")
    context = _context()
    found = disk.find_waste(context.home, context.clock.now() - (seconds or 0))
    freed = found if dry_run else disk.free(context.home, found, uv_program())
    if json_:
        print_json(
            {
                "environments": [
                    {
                        "name": each.path.name,
                        "size": each.size,
                        "lastUsedAt": time_json(int(each.used * 1000) or None),
                    }
                    for each in freed.environments
                ],
                "packages": [{"name": each.name, "size": each.size} for each in freed.packages],
                "copies": [
                    {
                        "source": each.source or None,
                        "size": each.size,
                        "lastUsedAt": time_json(int(each.used * 1000) or None),
                    }
                    for each in freed.copies
                ],
                "size": freed.size,
                "dryRun": dry_run,
            }
        )
        return
    now = context.clock.now()
    for each in freed.environments:
        use = _describe_last_use(now - each.used) if each.used else "never completed"
        print_line(f"{each.path.name}  {use}  {size_text(each.size)}")
    for copy in freed.copies:
        name = f"copy of {copy.source}" if copy.source else "unfinished copy of a data set"
        print_line(f"{name}  {_describe_last_use(now - copy.used)}  {size_text(copy.size)}")
    if freed.packages:
        names = [each.name for each in sorted(freed.packages, key=lambda each: -each.size)]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        size = size_text(sum(each.size for each in freed.packages))
        print_line(f"packages {', '.join(names[:3])}{more}  {size}")
    print_line(f"{'Would free' if dry_run else 'Freed'} {size_text(freed.size)}.")
    left = disk.measure(context.home)
    if dry_run:
        copies = sum(each.size for each in freed.copies)
        environments = max(0, left.environments - (freed.size - copies))
        left = replace(left, environments=environments, copies=max(0, left.copies - copies))
    for line in disk.describe_remaining(left, least_age):
        print_line(line)


def _describe_last_use(age: float) -> str:
    """The last use of something, `age` seconds ago."""
    is_old = age >= 2 * 86_400
    ago = f"{age // 86_400:.0f} days" if is_old else short_duration(age // 60 * 60 or age)
    return f"last used {ago} ago"


@local_app.command(epilog="Example: batchml local reset --yes")
def reset(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Also delete workspace, data sets and volumes.")
    ] = False,
    archive: Annotated[
        str,
        typer.Option(
            metavar="LOCATION", help="With --delete-data: use the archive at this location."
        ),
    ] = "",
    allow_loss: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Allow the loss of workspace, data or volumes. May be repeated."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Stop the server and its jobs, and delete all jobs, sweeps, logs, queues and outputs.

    Data sets, volumes and the workspace stay; --delete-data also deletes them, if `batchml
    workspace archive` has archived the whole workspace. Virtual environments stay, too: see `local
    clean`.
    """
    from batchml.local.reset import count_sweeps, forget
    from batchml.runs.fallback.move import FallbackPlans

    context = _context()
    home = context.home
    data = None
    if delete_data:
        data = LocalData(context, archive, tuple(allow_loss or ()))
        data.check("nothing was done", reads=True)
    elif archive or allow_loss:
        raise UsageError("--archive and --allow-loss need --delete-data.")
    if not yes:
        _confirm_reset(home, list(context.history.names(context.env)), deletes_data=delete_data)
    clock = SystemClock()
    control.stop_server(home, clock)
    lock = home.hold() if home.local.is_dir() else None
    sweeps = count_sweeps(home)
    killed = forget(home, clock)
    FallbackPlans.beside(context.history, context.env).clear()
    runs = len(list(context.history.names(context.env)))
    context.history.forget(context.env)  # the same file has the runs in AWS
    if data is not None:
        data.check("the jobs were deleted, the data stays")  # jobs may have written meanwhile
        data.delete()
    if lock is not None:
        os.close(lock)
    if json_:
        _print_status(home, json_)
        return
    print(
        f"Reset. {killed} running job{'' if killed == 1 else 's'} stopped, {runs} "
        f"run{'' if runs == 1 else 's'} and {sweeps} sweep{'' if sweeps == 1 else 's'} deleted "
        f"with logs and outputs."
    )
    left = disk.measure(home).environments
    if left:
        print(f"Environments stay ({size_text(left)}). To free them: batchml local clean --all")
    if data is not None:
        print(f"The workspace, the data sets and the volumes are empty. {data.restore_hint}")


def _is_copy(home: Any) -> bool:
    """Whether this folder is a copy of one from which a server has run."""
    return (home.local / "identity.json").exists() and identity.read_identity(home) is None


def _print_status(home: Any, json_: bool, use: disk.DiskUse | None = None) -> bool:
    """Print whether the server runs, where, with which options, and the space that the folder takes
    if it was measured. Returns whether it answers.
    """
    found = control.find_server(home)
    answering = found is not None and is_answering(found)
    letter = state_of(found.pid) if found and not answering else ""
    choice = read_choice(home)
    obstacle = _context().find_start_obstacle() if answering else ""
    if json_:
        optional = {
            "vcpus": choice.vcpus,
            "endpoints": choice.endpoints,
            "chaos": found and found.chaos,
            "readOnly": found and found.read_only,
            "heldBack": obstacle,
            "processState": letter,
            "disk": use and to_builtins(use),
        }
        print_json(
            {
                "state": "running" if answering else "not answering" if found else "stopped",
                "pid": found.pid if found else None,
                "endpoint": found.url if found else None,
                "executor": choice.executor,
                "home": str(home.root),
                **{key: value for key, value in optional.items() if value},
            }
        )
    elif found:
        running = "Running" if answering else f"Does not answer ({describe_state(letter)})"
        print(
            f"{running} on {found.url}, process {found.pid}, executor {choice.executor}, "
            f"state in {home.root}"
        )
        if choice.vcpus:
            count = f"{choice.vcpus} vCPU{'s'[: choice.vcpus > 1]}"
            print(f"Places jobs as if this machine had {count}; --vcpus 0 uses the real number.")
        for service, url in choice.endpoints.items():
            print(f"Endpoint of {service} for jobs: {url}")
        if found.chaos:
            print(f"Injects failures until it stops: {found.chaos}")
        if not answering:
            print(describe_silence(home))
        for line in (found.read_only, obstacle):
            if line:
                print(line)
    else:
        print(f"Not running. State in {home.root}")
        if _is_copy(home):
            print("It is a copy or a restored backup, and read-only until `batchml local adopt`.")
    if use is not None and not json_:
        print(f"Disk: {use.describe()}. {size_text(use.free)} are free.")
    return answering


def _confirm_reset(home: Home, runs: Sequence[RunName], *, deletes_data: bool) -> None:
    """Ask the user to confirm. Raises UsageError without a terminal."""
    more = ", its workspace, data sets and volumes" if deletes_data else ""
    text = f"This deletes every job, sweep, log and output in {home.root}{more}"
    text += f", of all projects: {_count_runs(runs)}." if runs else "."
    if not sys.stdin.isatty():
        raise UsageError(f"{text} To confirm: --yes.")
    if not deletes_data:
        typer.confirm(f"{text} Delete them?", abort=True)
        return
    print(text)
    if typer.prompt("Type delete to confirm", default="", show_default=False) != "delete":
        raise UsageError("Nothing was done.")


def _count_runs(runs: Sequence[RunName]) -> str:
    """`48 runs of 3 projects (digits, vision, lm)`; projects of the newest runs first."""
    known = list(dict.fromkeys(each.project for each in runs if each.project))
    names = ", ".join(short_project(each, known) for each in known[:5])
    names += f" and {len(known) - 5} more" if len(known) > 5 else ""
    count = f"{len(runs)} run{'s'[: len(runs) != 1]}"
    return f"{count} of {len(known)} project{'s'[: len(known) != 1]} ({names})" if known else count


# --- local reset --delete-data --------------------------------------------------------------------
class LocalData:
    """The workspace, data sets and volumes of a state folder, and the archive of the workspace."""

    def __init__(self, context: Context, archive: str, allowed: tuple[str, ...]) -> None:
        """`archive`: the location that the user gave. `allowed`: names of data that may be lost."""
        unknown = [name for name in allowed if name not in NAMES]
        if unknown:
            raise UsageError(f"--allow-loss {unknown[0]}: choose {' or '.join(NAMES)}.")
        self._home, self._allowed, self._given = context.home, allowed, archive
        self._clock = context.clock
        _, self._store = LocalWorkspace(self._home.root, context.folder).open_archive(archive)

    def check(self, so_far: str, reads: bool = False) -> None:
        """Raise TransferFailed if data would be lost. `so_far`: what the command has done.

        With `reads`, the whole archive is read and verified, not only its manifest.
        """
        with show_progress(self._clock) as watch:
            reads = reads and WORKSPACE not in self._allowed
            losses = find_losses(self._home, self._store, track_progress(watch) if reads else None)
        lines = describe_losses(losses, self._allowed)
        if not lines:
            return
        names = [loss.name for loss in losses if loss.name not in self._allowed]
        to = f" --to {self._given}" if self._given else ""
        commands = [f"  batchml workspace archive{to}   # keeps it"] if WORKSPACE in names else []
        flags = " ".join(f"--allow-loss {name}" for name in names)
        commands.append(f"  {flags}   # with this command: allows the loss")
        raise TransferFailed("\n".join([f"Data would be lost: {so_far}.", *lines, *commands]))

    def delete(self) -> None:
        """Delete the workspace, the data sets and the volumes."""
        delete_data(self._home, self._store)

    @property
    def restore_hint(self) -> str:
        """How to restore the archived workspace."""
        command = "batchml workspace restore" + (f" --from {self._given}" if self._given else "")
        return f"To restore the archived files: {command}"
