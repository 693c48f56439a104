"""The Docker engine: the only module that imports the `docker` package.

A refusal of the engine is EngineRefused. An engine that does not answer is tried again, then
EngineUnreachable is raised.
"""

import contextlib
import io
import os
import select
import tarfile
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from batchml.local.executors.runner.link import AttemptIo, BackgroundCall

T = TypeVar("T")

CALL_LIMIT = 240.0  # seconds for one call, as ECS's agent waits for a container to be made

_RETRY_AFTER = 0.2

_clients: dict[str, Any] = {}


class EngineRefused(Exception):
    """The engine refused a call."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class EngineUnreachable(Exception):
    """The engine did not answer."""


class DockerEngine:
    """The engine's API, called on behalf of one attempt."""

    def __init__(self, address: str, io: AttemptIo, patience: float) -> None:
        self._address = address
        self._io = io
        self.patience = patience  # seconds
        self.was_gone = False  # the engine did not answer a call

    def ask(self, call: Callable[[Any], T], until_stop: bool = False) -> T:
        """The engine's answer to a call. With `until_stop`, a request to stop the attempt ends the
        wait for an engine that does not answer. Raises EngineRefused, EngineUnreachable.
        """
        end = time.monotonic() + self.patience
        while True:
            try:
                return self.once(call)
            except EngineUnreachable as error:
                self.was_gone = True
                stopped = until_stop and self._io.stopping_since is not None
                if stopped or time.monotonic() >= end:
                    raise EngineUnreachable(
                        f"the Docker engine does not answer: {error}"
                    ) from error
            select.select([self._io.wake] if until_stop else [], [], [], _RETRY_AFTER)
            if until_stop:
                self._io.drain()

    def once(self, call: Callable[[Any], T]) -> T:
        return once(self._address, call)


def once(address: str, call: Callable[[Any], T]) -> T:
    """The answer of the engine at `address` ("": the default), tried once. Raises EngineRefused,
    EngineUnreachable.
    """
    errors = package().errors
    try:
        return call(_client(address))
    except errors.APIError as error:
        text = str(error.explanation or error).strip()
        raise EngineRefused(error.status_code or 500, text) from error
    except (errors.DockerException, OSError) as error:
        raise EngineUnreachable(_innermost(error)) from error


def package() -> Any:
    """The `docker` package, whose import is slow."""
    import docker

    return docker


def _client(address: str) -> Any:
    """The client of the engine at `address`, or at that of the environment (DOCKER_HOST)."""
    if address not in _clients:
        docker = package()
        environ = {**os.environ, **({"DOCKER_HOST": address} if address else {})}
        where = docker.utils.kwargs_from_env(environment=environ)
        _clients[address] = docker.APIClient(version="auto", timeout=CALL_LIMIT, **where)
    return _clients[address]


def pull(api: Any, name: str, call: BackgroundCall) -> None:
    """Pull an image from its registry, and report the progress."""
    layers: dict[str, tuple[int, int]] = {}
    call.report(f"fetching the image {name}")
    for entry in api.pull(name, stream=True, decode=True):
        if call.abandoned:
            return
        if "error" in entry:
            raise EngineRefused(500, str(entry["error"]))
        detail = entry.get("progressDetail") or {}
        if entry.get("status") == "Downloading" and detail.get("total"):
            layers[str(entry.get("id"))] = (int(detail["current"]), int(detail["total"]))
            done, total = (sum(numbers) / 1e6 for numbers in zip(*layers.values(), strict=True))
            call.report(f"fetching the image {name} ({done:.0f} of {total:.0f} MB)")


def processor(api: Any) -> str:
    """The processor for which the engine builds images: `amd64`, `arm64`."""
    return str(api.version()["Arch"])


def build(api: Any, name: str, folder: str, runtime: str, call: BackgroundCall) -> None:
    """Build a published image from its folder, which is the whole build context."""
    try:
        api.inspect_image(name)
        return  # another attempt has built it
    except package().errors.ImageNotFound:
        pass
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for entry in sorted(os.listdir(folder)):
            tar.add(os.path.join(folder, entry), entry, filter=_make_readable)
        if not os.path.exists(os.path.join(folder, "batchml")):  # an older version published it
            tar.add(os.path.join(runtime, "batchml"), "batchml", filter=_make_readable)
    context.seek(0)
    wanted = processor(api)
    call.report(f"building the image {name}")
    last = ""
    for entry in api.build(
        fileobj=context, custom_context=True, tag=name, rm=True, forcerm=True, decode=True,
        platform=f"linux/{wanted}",  # a base image in the engine may be for another processor
    ):  # fmt: skip
        if call.abandoned:
            return
        if "error" in entry:
            raise EngineRefused(500, f"{str(entry['error']).strip()} {last}".strip())
        text = str(entry.get("stream", "")).strip()
        if text and not text.startswith(("--->", "Removing intermediate")):
            last = text.splitlines()[-1]
            call.report(f"building the image {name}: {last}")


def _make_readable(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Make a file of the build context readable for all: in the state folder only its owner may
    read it, but a container may run as another user.
    """
    if "__pycache__" in member.name:
        return None
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def has_program(api: Any, container: str, name: str, search: str) -> bool:
    """Whether a folder of `search`, a PATH, contains a program in a container."""
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
    return any(
        api.head(url, params={"path": f"{folder}/{name}"}).status_code == 200
        for folder in search.split(":")
    )


def read_output(api: Any, container: str, follow: bool, call: BackgroundCall) -> None:
    """Pass the engine's record of a container's output, from its start and in frames, to `call`."""
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/logs"
    params = {"stdout": 1, "stderr": 1, "follow": int(follow), "timestamps": 1}
    with api.get(url, params=params, stream=True, timeout=None) as response:
        for block in response.iter_content(None):
            call.pass_on(block)


def _innermost(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error)


# --- Resources of a state folder, by its label ----------------------------------------------------


def list_resources(label: str) -> tuple[list[str], int]:
    """The tasks that have containers, and the number of networks. Raises EngineUnreachable,
    EngineRefused.
    """

    def look(api: Any) -> tuple[list[str], int]:
        tasks = [_task(found) for found in api.containers(all=True, filters=_filter(label))]
        return tasks, len(api.networks(filters=_filter(label)))

    return once("", look)


def remove_resources(label: str, tasks: Collection[str] | None) -> None:
    """Remove the containers of these tasks, or of all tasks, and unused networks."""

    def remove(api: Any) -> None:
        refused = package().errors.APIError  # in use, or removed by another process
        for found in api.containers(all=True, filters=_filter(label)):
            if tasks is None or _task(found) in tasks:
                with contextlib.suppress(refused):
                    api.remove_container(found["Id"], v=True, force=True)
        for network in api.networks(filters=_filter(label)):
            with contextlib.suppress(refused):
                api.remove_network(network["Id"])

    once("", remove)


def _filter(label: str) -> dict[str, str]:
    return {"label": f"batchml.home={label}"}


def _task(container: dict[str, Any]) -> str:
    return str(container["Labels"].get("batchml.task", ""))
