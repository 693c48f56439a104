"""Remove containers, networks and bind mounts of a state folder that belong to no attempt.

A separate process does this, so that the server never imports the Docker client: `python -m
batchml.local.executors.sweeper IDENTITY look|remove|clear [TASK...]`.
"""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Container

import msgspec
from msgspec import Struct

from batchml.local.home import Home

log = logging.getLogger("batchml.local")

LOOK, REMOVE, CLEAR = "look", "remove", "clear"

_LIMIT = 60.0  # seconds for one run of the process
_FIRST_PAUSE, _LAST_PAUSE = 15.0, 600.0  # seconds, while the engine does not answer


class EngineLeftovers(Struct, frozen=True):
    """The resources of a state folder in the engine: tasks with containers, and the number of
    networks.
    """

    tasks: list[str]
    networks: int


async def remove_unowned(home: Home, identity: str, owned: Callable[[], Container[str]]) -> None:
    """Remove the resources of task ids that are not owned when they are found.

    Runs once the engine answers, which may be long after the server's start.
    """
    pause = _FIRST_PAUSE
    while (found := await _run_sweeper(home, identity, LOOK)) is None:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
    owned_now = owned()
    orphans = [task_id for task_id in found.tasks if task_id not in owned_now]
    if orphans:
        log.warning("removing containers that no attempt owns: %s", orphans)
    if orphans or found.networks:
        await _run_sweeper(home, identity, REMOVE, *orphans)


async def remove(home: Home, identity: str, task_id: str) -> bool:
    """Remove an attempt's resources in the engine. False when that is impossible now."""
    return await _run_sweeper(home, identity, REMOVE, task_id) is not None


async def _run_sweeper(home: Home, identity: str, *words: str) -> EngineLeftovers | None:
    """The resources before the change, or None when the engine does not answer."""
    with open(home.local / "runners.log", "ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *_command(identity, *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=errors,
        )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _LIMIT)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
    return msgspec.json.decode(output, type=EngineLeftovers) if process.returncode == 0 else None


def clear(identity: str) -> None:
    """Remove all resources of a state folder in the engine, if it answers."""
    try:
        subprocess.run(
            _command(identity, CLEAR), stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        pass


def _command(identity: str, *words: str) -> list[str]:
    return [sys.executable, "-m", __name__, identity, *words]


# --- The separate process -------------------------------------------------------------------------


def main(identity: str, verb: str, *tasks: str) -> int:
    """Print the resources as JSON, then remove those of `tasks` (REMOVE) or all (CLEAR)."""
    from batchml.local.executors import docker, mounts

    try:
        with_containers, networks = docker.list_resources(identity)
        pinned = mounts.pinned_tasks(identity)
        if verb != LOOK:
            for task in pinned if verb == CLEAR else tasks:
                mounts.unpin(mounts.pins_of(identity, task))
            docker.remove_resources(identity, None if verb == CLEAR else tasks)
    except docker.EngineUnreachable as error:
        print(f"the Docker engine does not answer: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(EngineLeftovers([*{*with_containers, *pinned}], networks)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
