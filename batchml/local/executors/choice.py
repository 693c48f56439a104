"""Which executor a state folder uses, and what its jobs may have: said once, and kept."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from batchml.local.executors.container import Permits, container_spec, home_label
from batchml.local.executors.spec import Host, runner_spec
from batchml.local.home import Home, read_record
from batchml.local.state import Attempt, Job
from batchml.runtime.files import write_json

PROCESS, DOCKER = "process", "docker"
EXECUTORS = (PROCESS, DOCKER)


class Choice(Struct, frozen=True):
    executor: str = PROCESS
    permits: Permits = Permits()

    @property
    def is_docker(self) -> bool:
        return self.executor == DOCKER

    def spec_of(self, host: Host) -> Callable[[Job, Attempt], dict[str, Any]]:
        """What a runner is told of an attempt."""
        if self.is_docker:
            return lambda job, attempt: container_spec(host, self.permits, job, attempt)
        return lambda job, attempt: runner_spec(host, job, attempt)


def read_choice(home: Home) -> Choice:
    return read_record(home.local / "executor.json", Choice) or Choice()


def choose(
    home: Home, executor: str | None, paths: list[str] | None, privileged: bool | None
) -> Choice:
    """The choice from now on: what is given, and for the rest what was chosen before."""
    before = read_choice(home)
    permits = Permits(
        paths=before.permits.paths if paths is None else tuple(paths),
        privileged=before.permits.privileged if privileged is None else privileged,
    )
    choice = Choice(executor or before.executor, permits)
    if choice != before:
        write_json(str(home.local / "executor.json"), msgspec.to_builtins(choice))
    return choice


async def sweep(home: Home) -> None:
    """Remove containers that no attempt owns, in a process beside the server."""
    with open(home.local / "runners.log", "ab") as log:
        process = await asyncio.create_subprocess_exec(
            *_sweeper(home), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    await process.wait()


def remove_containers(home: Home) -> None:
    """Remove the containers of a state folder whose attempts are forgotten."""
    subprocess.run(_sweeper(home), stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _sweeper(home: Home) -> list[str]:
    words = [sys.executable, "-m", "batchml.local.executors.docker"]
    return [*words, home_label(home), str(home.attempts)]
