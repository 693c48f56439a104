"""local start, stop, status, env, reset."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Json, read_seconds
from batchml.cli.output import print_json
from batchml.errors import LocalServerError, UsageError

local_app = command_group(
    "local",
    "The embedded AWS Batch on this machine.",
    'eval "$(batchml local env)" && aws batch describe-job-queues',
)


def _place() -> Any:
    from batchml.cli.wiring import open_place

    return open_place("local")


def _home() -> Any:
    return _place().home


@local_app.command(epilog="Example: batchml local start --port 8123")
def start(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Any free one unless given.")] = 0,
    idle: Annotated[
        str | None, typer.Option(help="Stop after so long without jobs and requests: 10m.")
    ] = None,
    executor: Annotated[
        str | None, typer.Option(help="process or docker. Kept for the next starts.")
    ] = None,
    allow_path: Annotated[
        list[str] | None,
        typer.Option(help="A folder that containers may mount. Kept; may be repeated."),
    ] = None,
    allow_privileged: Annotated[
        bool | None,
        typer.Option(
            "--allow-privileged/--no-allow-privileged",
            help="Let containers be privileged. Kept.",
        ),
    ] = None,
    vcpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10_000,
            help="Believe in so many vCPUs, for runs of many nodes; 0: those there are. Kept.",
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVICE=URL",
            help="Give jobs this endpoint of another service: s3=http://127.0.0.1:9000. Kept; may "
            "be repeated; an empty URL takes it out.",
        ),
    ] = None,
    chaos: Annotated[
        str | None,
        typer.Option(help="Failures to rehearse until it stops: host-lost@60s, throttle=20%."),
    ] = None,
    json_: Json = False,
) -> None:
    """Start the server, unless it runs. `submit` does this by itself."""
    from batchml.clock import SystemClock
    from batchml.local import control
    from batchml.local.executors.choice import keep_endpoints

    place = _place()
    home = place.home
    seconds = read_seconds(idle, "--idle")
    endpoints = {**place.settings.environment.endpoints, **_read_endpoints(endpoint or ())}
    options = _executor_options(executor, allow_path, allow_privileged) + _chaos_options(chaos)
    options += [] if vcpus is None else ["--vcpus", str(vcpus)]
    found = control.running(home)
    if found is not None and (idle or options or port not in (0, found.port)):
        raise LocalServerError(
            f"The server runs already, on port {found.port}. To start it otherwise, stop it "
            f"first: batchml local stop"
        )
    if endpoints:
        keep_endpoints(home, endpoints)
    if found is None:
        control.start(home, SystemClock(), port, seconds, options)
    _print_status(home, json_)


def _read_endpoints(given: Iterable[str]) -> dict[str, str]:
    """Service -> URL; an empty URL takes the service out. Raises UsageError."""
    from batchml.model.endpoints import endpoint_mistakes

    found = {service: url for service, _, url in (text.partition("=") for text in given)}
    mistakes = list(endpoint_mistakes({k: v for k, v in found.items() if v}))
    mistakes += [f"{text}: expected SERVICE=URL." for text in given if "=" not in text]
    if mistakes:
        raise UsageError("\n".join(f"--endpoint {mistake}" for mistake in mistakes))
    return found


def _executor_options(
    executor: str | None, paths: list[str] | None, privileged: bool | None
) -> list[str]:
    import os

    if executor not in (None, "process", "docker"):
        raise UsageError(f"--executor {executor}: it is process or docker.")
    options = [] if executor is None else ["--executor", executor]
    for path in paths or ():
        options += ["--allow-path", os.path.abspath(path)]
    if privileged is not None:
        options.append("--allow-privileged" if privileged else "--no-allow-privileged")
    return options


def _chaos_options(text: str | None) -> list[str]:
    """Read it here as well: a mistake is told before anything starts."""
    from batchml.local.batch import fault_injection as chaos

    if text is None:
        return []
    chaos.parse(text)
    return [f"--chaos={text}"]


@local_app.command(epilog="Example: batchml local stop")
def stop(json_: Json = False) -> None:
    """Stop the server. Running jobs go on; the next start finds them, and all else."""
    from batchml.clock import SystemClock
    from batchml.local import control

    home = _home()
    was_running = control.stop(home, SystemClock())
    if not json_:
        print("Stopped. Jobs that run go on." if was_running else "No server was running.")
    else:
        _print_status(home, json_)


@local_app.command(epilog="Example: batchml local status --json")
def status(json_: Json = False) -> None:
    """Show whether the server runs and answers, and where. Exit code 0 when it does, else 1."""
    home = _home()
    if not _print_status(home, json_):
        raise typer.Exit(1)


@local_app.command(epilog='Example: eval "$(batchml local env)" && aws batch describe-job-queues')
def env(json_: Json = False) -> None:
    """Print the variables that point any AWS client at the server, which is started if need be."""
    from batchml.client.place import LOCAL_REGION
    from batchml.local.endpoints import kept_endpoints
    from batchml.local.server.auth import ENDPOINTS
    from batchml.model.endpoints import endpoint_variables

    place = _place()
    server = place.server()
    home = place.home
    keys = home.keys()
    variables = {
        **dict.fromkeys(ENDPOINTS, server.url),
        **endpoint_variables(kept_endpoints(home)),
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
    # They would be sent along, or used instead.
    print("unset AWS_SESSION_TOKEN AWS_PROFILE AWS_DEFAULT_PROFILE")


@local_app.command(epilog="Example: batchml local adopt --yes")
def adopt(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_: Json = False,
) -> None:
    """Turn a copy or a restored backup of a state folder into an independent folder.

    Runs that were going on at the time of the copy end here as lost hosts. Waiting runs start here
    as well. The original folder and its runs are not touched.
    """
    import os

    from batchml.clock import SystemClock
    from batchml.local import control
    from batchml.local.store import adopt as adopting

    home = _home()
    if not home.journal.exists():
        raise LocalServerError(f"{home.root} holds no jobs yet, so there is nothing to adopt.")
    control.stop(home, SystemClock())
    lock = home.hold()
    try:
        copy = adopting.look(home)
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
        f"{home.root} is adopted. When the next command starts its server, {_what_becomes(copy)}."
    )
    if copy.unknown:
        place = home.local / adopting.SET_ASIDE
        print(f"Attempts that its journal does not know ({copy.unknown}) were moved to {place}.")


def _what_becomes(copy: Any) -> str:
    """What happens to the runs of a copy that is adopted."""
    lost, waiting = copy.running, copy.waiting
    ends = f"{lost} running job{' ends as a lost host' if lost == 1 else 's end as lost hosts'}"
    return f"{ends} and {waiting} waiting job{' starts' if waiting == 1 else 's start'}"


def _ask_to_adopt(home: Any, copy: Any) -> None:
    import sys

    text = (
        f"{home.root} {copy.why}. If you adopt it, {_what_becomes(copy)}. Jobs that the original "
        f"folder still has run there as well."
    )
    if not sys.stdin.isatty():
        raise UsageError(f"{text} To adopt it without a question: --yes.")
    typer.confirm(f"{text} Adopt it?", abort=True)


@local_app.command(epilog="Example: batchml local reset --yes")
def reset(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Also empty workspace, data sets and volumes.")
    ] = False,
    archive: Annotated[
        str, typer.Option(metavar="PLACE", help="With --delete-data: where the archive is.")
    ] = "",
    allow_loss: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="workspace, data or volumes: may be lost. Repeatable."),
    ] = None,
    json_: Json = False,
) -> None:
    """Stop the server and its jobs, and forget all jobs, sweeps, logs, queues and outputs.

    Environments made for images, data sets, volumes and the workspace stay. --delete-data empties
    the last three as well, once `batchml workspace archive` has all of the workspace.
    """
    from batchml.cli import resetting
    from batchml.client.sweeping.boards import list_boards
    from batchml.clock import SystemClock
    from batchml.local import control
    from batchml.local.reset import forget
    from batchml.ops.fallback import Plans

    place = _place()
    home = place.home
    data = resetting.Data(place, archive, tuple(allow_loss or ())) if delete_data else None
    if data is None and (archive or allow_loss):
        raise UsageError("--archive and --allow-loss go with --delete-data.")
    if data is not None:
        data.check("nothing was done", reads=True)
    if not yes:
        resetting.ask(home, data)
    clock = SystemClock()
    control.stop(home, clock)
    lock = home.hold() if home.local.is_dir() else None
    sweeps = len(list_boards(place))
    killed = forget(home, clock)
    Plans.beside(place.history, place.env).clear()
    runs = len(place.history.names(place.env))
    place.history.forget(place.env)  # runs in AWS are remembered in the same file
    if data is not None:
        data.check("the jobs were forgotten, the data stays")  # they have worked meanwhile
        data.empty()
    if lock is not None:
        import os

        os.close(lock)
    if json_:
        _print_status(home, json_)
        return
    print(
        f"Reset. {killed} running job{'' if killed == 1 else 's'} stopped, {runs} "
        f"run{'' if runs == 1 else 's'} and {sweeps} sweep{'' if sweeps == 1 else 's'} forgotten "
        f"with logs and outputs."
    )
    if data is not None:
        print(f"The workspace, the data sets and the volumes are empty. {data.way_back}")


def _is_copy(home: Any) -> bool:
    """Whether a server has served from this folder, and it is not that one any more."""
    from batchml.local.store import identity

    return (home.local / "identity.json").exists() and identity.of(home) is None


def _print_status(home: Any, json_: bool) -> bool:
    from batchml.local import control
    from batchml.local.executors.choice import read_choice
    from batchml.local.silence import answers, state_words, unanswered
    from batchml.runtime.processes import state_of

    found = control.running(home)
    answering = found is not None and answers(found)
    letter = state_of(found.pid) if found and not answering else ""
    choice = read_choice(home)
    executor, believed = choice.executor, {"vcpus": choice.vcpus} if choice.vcpus else {}
    held = _place().held_back() if answering else ""
    beside = {"endpoints": choice.endpoints} if choice.endpoints else {}
    if json_:
        rehearsed = {"chaos": found.chaos} if found and found.chaos else {}
        print_json(
            {
                "state": "running" if answering else "not answering" if found else "stopped",
                "pid": found.pid if found else None,
                "endpoint": found.url if found else None,
                "executor": executor,
                "home": str(home.root),
                **believed,
                **beside,
                **rehearsed,
                **({"readOnly": found.read_only} if found and found.read_only else {}),
                **({"heldBack": held} if held else {}),
                **({"processState": letter} if letter else {}),
            }
        )
    elif found:
        running = "Running" if answering else f"Does not answer ({state_words(letter)})"
        print(
            f"{running} on {found.url}, process {found.pid}, executor {executor}, "
            f"state in {home.root}"
        )
        if believed:
            count = f"{choice.vcpus} vCPU{'s'[: choice.vcpus > 1]}"
            print(f"Takes this machine for one of {count}; --vcpus 0 counts them.")
        for service, url in choice.endpoints.items():
            print(f"Endpoint of {service} for jobs: {url}")
        if found.chaos:
            print(f"Rehearsing failures until it stops: {found.chaos}")
        if not answering:
            print(unanswered(home))
        for line in (found.read_only, held):
            if line:
                print(line)
    else:
        print(f"Not running. State in {home.root}")
        if _is_copy(home):
            print("It is a copy or a restored backup, and read-only until `batchml local adopt`.")
    return answering
