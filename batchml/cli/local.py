"""local start, stop, status, env, reset."""

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
    chaos: Annotated[
        str | None,
        typer.Option(help="Failures to rehearse until it stops: host-lost@60s, throttle=20%."),
    ] = None,
    json_: Json = False,
) -> None:
    """Start the server, unless it runs. `submit` does this by itself."""
    from batchml.clock import SystemClock
    from batchml.local import control

    home = _home()
    seconds = read_seconds(idle, "--idle")
    options = _executor_options(executor, allow_path, allow_privileged) + _chaos_options(chaos)
    options += [] if vcpus is None else ["--vcpus", str(vcpus)]
    found = control.running(home)
    if found is not None and (idle or options or port not in (0, found.port)):
        raise LocalServerError(
            f"The server runs already, on port {found.port}. To start it otherwise, stop it "
            f"first: batchml local stop"
        )
    if found is None:
        control.start(home, SystemClock(), port, seconds, options)
    _print_status(home, json_)


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
    from batchml.local import chaos

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
    """Say whether the server runs, and where. Exit code 0 when it does, 1 when not."""
    home = _home()
    if not _print_status(home, json_):
        raise typer.Exit(1)


@local_app.command(epilog='Example: eval "$(batchml local env)" && aws batch describe-job-queues')
def env(json_: Json = False) -> None:
    """Print the variables that point any AWS client at the server, which is started if need be."""
    from batchml.client.place import LOCAL_REGION
    from batchml.clock import SystemClock
    from batchml.local import control

    home = _home()
    endpoint = control.ensure(home, SystemClock())
    keys = home.keys()
    variables = {
        "AWS_ENDPOINT_URL_BATCH": endpoint.url,
        "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": endpoint.url,
        "AWS_ENDPOINT_URL_STS": endpoint.url,
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


@local_app.command(epilog="Example: batchml local reset --yes")
def reset(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    delete_data: Annotated[
        bool, typer.Option("--delete-data", help="Also empty the workspace and the data sets.")
    ] = False,
    archive: Annotated[
        str, typer.Option(metavar="PLACE", help="With --delete-data: where the archive is.")
    ] = "",
    allow_loss: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="workspace or data: may be lost. May be repeated."),
    ] = None,
    json_: Json = False,
) -> None:
    """Stop the server and its jobs, and forget all jobs, logs, queues and outputs.

    Environments made for images, data sets and the workspace stay. --delete-data empties the last
    two as well, once `batchml workspace archive` has all of the workspace.
    """
    from batchml.cli import resetting
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
        f"run{'' if runs == 1 else 's'} forgotten with logs and outputs."
    )
    if data is not None:
        print(f"The workspace and the data sets are empty. {data.way_back}")


def _print_status(home: Any, json_: bool) -> bool:
    from batchml.local import control
    from batchml.local.executors.choice import read_choice

    found = control.running(home)
    choice = read_choice(home)
    executor, believed = choice.executor, {"vcpus": choice.vcpus} if choice.vcpus else {}
    if json_:
        rehearsed = {"chaos": found.chaos} if found and found.chaos else {}
        print_json(
            {
                "state": "running" if found else "stopped",
                "pid": found.pid if found else None,
                "endpoint": found.url if found else None,
                "executor": executor,
                "home": str(home.root),
                **believed,
                **rehearsed,
            }
        )
    elif found:
        print(
            f"Running on {found.url}, process {found.pid}, executor {executor}, "
            f"state in {home.root}"
        )
        if believed:
            count = f"{choice.vcpus} vCPU{'s'[: choice.vcpus > 1]}"
            print(f"Takes this machine for one of {count}; --vcpus 0 counts them.")
        if found.chaos:
            print(f"Rehearsing failures until it stops: {found.chaos}")
    else:
        print(f"Not running. State in {home.root}")
    return found is not None
