"""How the server of a state folder runs jobs: chosen at one start, and stored for later starts."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import LocalServerError
from batchml.local.home import Home, read_record
from batchml.local.machine import count_vcpus
from batchml.runtime.storage.files import write_json

PROCESS, CONTAINER = "process", "container"  # the kinds of attempts
DOCKER = "docker"
EXECUTORS = (PROCESS, DOCKER)
_FILE = "executor.json"


class Permits(Struct, frozen=True):
    """Rights of jobs that only the start of the server grants, never a job's definition."""

    paths: tuple[str, ...] = ()  # host folders that jobs may mount, besides the shared ones
    privileged: bool = False


class ExecutorChoice(Struct, frozen=True):
    """The executor, the permits, and the services that jobs of this state folder use."""

    executor: str = PROCESS
    permits: Permits = Permits()
    had_docker: bool = False  # Docker is or was the executor, so there may be containers
    vcpus: int = 0  # place jobs as if the machine had so many; 0: the real number
    endpoints: dict[str, str] = {}  # service -> URL, of services that the server does not serve

    @property
    def kind(self) -> str:
        """The kind of new attempts. Attempts that exist already keep their kind."""
        return CONTAINER if self.executor == DOCKER else PROCESS


def read_choice(home: Home) -> ExecutorChoice:
    return read_record(home.local / _FILE, ExecutorChoice) or ExecutorChoice()


def server_vcpus(home: Home) -> int:
    """The number of vCPUs that the server of this state folder gives to jobs: that of `batchml
    local start --vcpus`, or that of this machine.
    """
    return read_choice(home).vcpus or count_vcpus()


def choose(
    home: Home,
    executor: str | None,
    paths: list[str] | None,
    privileged: bool | None,
    vcpus: int | None = None,
) -> ExecutorChoice:
    """Store and return the choice: the arguments, or for None the values that were stored
    before.
    """
    before = read_choice(home)
    executor = executor or before.executor
    permits = Permits(
        paths=before.permits.paths if paths is None else tuple(paths),
        privileged=before.permits.privileged if privileged is None else privileged,
    )
    choice = ExecutorChoice(
        executor,
        permits,
        had_docker=before.had_docker or executor == DOCKER,
        vcpus=before.vcpus if vcpus is None else vcpus,
        endpoints=before.endpoints,
    )
    _save(home, choice, before)
    return choice


def save_endpoints(home: Home, changes: Mapping[str, str]) -> None:
    """Add services and their URLs to the stored ones; an empty URL removes a service.

    Raises LocalServerError when the state folder cannot be written.
    """
    before = read_choice(home)
    endpoints = {k: v for k, v in {**before.endpoints, **changes}.items() if v}
    try:
        home.prepare()
        _save(home, replace(before, endpoints=endpoints), before)
    except OSError as error:
        raise LocalServerError(
            f"The state folder {home.root} cannot be used: {error.strerror}."
        ) from error


def read_endpoints(home: Home) -> dict[str, str]:
    """The stored endpoints: service -> URL. Read for each attempt, so that a change needs no
    restart.
    """
    path = f"{home.local}/{_FILE}"
    try:
        changed = os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return {}
    return _read_endpoints_of(path, changed)


@lru_cache(maxsize=4)
def _read_endpoints_of(path: str, changed: int) -> dict[str, str]:
    """The endpoints in a file that was `changed` at this time, in ns: part of the cache's key."""
    choice = read_record(Path(path), ExecutorChoice)
    return choice.endpoints if choice else {}


def _save(home: Home, choice: ExecutorChoice, before: ExecutorChoice) -> None:
    if choice != before:
        write_json(str(home.local / _FILE), msgspec.to_builtins(choice))
