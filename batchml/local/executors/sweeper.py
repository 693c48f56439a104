"""Containers and networks of a state folder that no attempt owns: found and removed.

By a process beside the server, which never imports what speaks with the engine:
`python -m batchml.local.executors.sweeper LABEL look|remove|clear [TASK...]`.
"""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Container

import msgspec
from msgspec import Struct

from batchml.local.executors.container import home_label
from batchml.local.home import Home

log = logging.getLogger("batchml.local")

LOOK, REMOVE, CLEAR = "look", "remove", "clear"

_LIMIT = 60.0  # seconds for one of these
_FIRST_PAUSE, _LAST_PAUSE = 15.0, 600.0  # seconds, while the engine does not answer


class Found(Struct, frozen=True):
    """What a state folder has in the engine: whose containers, and how many networks."""

    tasks: list[str]
    networks: int


async def sweep(home: Home, owned: Callable[[], Container[str]]) -> None:
    """Remove what belongs to no task id that is owned once it is found.

    As soon as the engine answers, which may be long after the server has started.
    """
    pause = _FIRST_PAUSE
    while (found := await _beside(home, LOOK)) is None:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
    owners = owned()
    orphans = [task_id for task_id in found.tasks if task_id not in owners]
    if orphans:
        log.warning("removing containers that no attempt owns: %s", orphans)
    if orphans or found.networks:
        await _beside(home, REMOVE, *orphans)


async def remove(home: Home, task_id: str) -> bool:
    """Remove what an attempt has in the engine. False when that cannot be done now."""
    return await _beside(home, REMOVE, task_id) is not None


async def _beside(home: Home, *words: str) -> Found | None:
    """What there was, or None when the engine does not answer."""
    with open(home.local / "runners.log", "ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *_command(home, *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=errors,
        )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _LIMIT)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
    return msgspec.json.decode(output, type=Found) if process.returncode == 0 else None


def clear(home: Home) -> None:
    """Remove whatever a state folder has in the engine, if that answers."""
    try:
        subprocess.run(
            _command(home, CLEAR), stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        pass


def _command(home: Home, *words: str) -> list[str]:
    return [sys.executable, "-m", __name__, home_label(home), *words]


# --- the process beside it ----------------------------------------------------------------------


def main(label: str, verb: str, *tasks: str) -> int:
    from batchml.local.executors import docker

    try:
        found = docker.belongings(label)
        if verb != LOOK:
            docker.remove_belongings(label, None if verb == CLEAR else tasks)
    except docker.Unreachable as error:
        print(f"the Docker engine does not answer: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(Found(*found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
