"""Which executor a state folder uses, and what its jobs may have: said once, and kept."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import LocalServerError
from batchml.local.batch.state import Attempt, Job
from batchml.local.ecs import KEPT
from batchml.local.executors.container_spec import Permits, container_spec
from batchml.local.executors.record import CONTAINER, PROCESS
from batchml.local.executors.spec import Host, SpecOf, controller_spec, runner_spec
from batchml.local.home import Home, read_record
from batchml.runtime.storage.files import write_json

DOCKER = "docker"
EXECUTORS = (PROCESS, DOCKER)


class Choice(Struct, frozen=True):
    executor: str = PROCESS
    permits: Permits = Permits()
    had_docker: bool = False  # now or before: there may be containers
    vcpus: int = 0  # that the machine is believed to have; 0: what it has
    endpoints: dict[str, str] = {}  # read by local/endpoints.py: service -> URL

    @property
    def kind(self) -> str:
        """What new attempts are; those of before stay what they are."""
        return CONTAINER if self.executor == DOCKER else PROCESS

    def spec_of(self, host: Host) -> SpecOf:
        """What a runner is told of an attempt."""

        def made(kind: str, job: Job, attempt: Attempt) -> dict[str, Any]:
            if attempt.is_aside:
                return controller_spec(host, job, attempt)
            if kind == CONTAINER:
                return container_spec(host, self.permits, job, attempt)
            return runner_spec(host, job, attempt)

        return made


def read_choice(home: Home) -> Choice:
    return read_record(home.local / KEPT, Choice) or Choice()


def choose(
    home: Home,
    executor: str | None,
    paths: list[str] | None,
    privileged: bool | None,
    vcpus: int | None = None,
) -> Choice:
    """The choice from now on: what is given, and for the rest what was chosen before."""
    before = read_choice(home)
    executor = executor or before.executor
    permits = Permits(
        paths=before.permits.paths if paths is None else tuple(paths),
        privileged=before.permits.privileged if privileged is None else privileged,
    )
    choice = Choice(
        executor,
        permits,
        had_docker=before.had_docker or executor == DOCKER,
        vcpus=before.vcpus if vcpus is None else vcpus,
        endpoints=before.endpoints,
    )
    _keep(home, choice, before)
    return choice


def keep_endpoints(home: Home, changes: Mapping[str, str]) -> None:
    """Add services and their URLs to the kept ones; an empty URL takes a service out.

    Raises LocalServerError when the state folder cannot be written.
    """
    before = read_choice(home)
    endpoints = {k: v for k, v in {**before.endpoints, **changes}.items() if v}
    try:
        home.prepare()
        _keep(home, replace(before, endpoints=endpoints), before)
    except OSError as error:
        raise LocalServerError(
            f"The state folder {home.root} cannot be used: {error.strerror}."
        ) from error


def _keep(home: Home, choice: Choice, before: Choice) -> None:
    if choice != before:
        write_json(str(home.local / KEPT), msgspec.to_builtins(choice))
