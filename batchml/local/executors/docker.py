"""The Docker engine: the only module that imports the `docker` package.

It is imported once in a runner's life. What the engine refuses is Refused; an engine that does not
answer is asked again, and then Unreachable.
"""

import contextlib
import io
import os
import select
import tarfile
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from batchml.local.executors.runner.streams import Aside

if TYPE_CHECKING:
    from batchml.local.executors.runner.main import Io

T = TypeVar("T")

CALL_LIMIT = 240.0  # seconds for one call, as ECS's agent waits for a container to be made

_RETRY_AFTER = 0.2

_clients: dict[str, Any] = {}


class Refused(Exception):
    """The engine answered that it will not."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Unreachable(Exception):
    """The engine did not answer."""


class Engine:
    """The engine's API, as it is asked on behalf of one attempt."""

    def __init__(self, address: str, io: "Io", patience: float) -> None:
        self._address = address
        self._io = io
        self.patience = patience  # seconds
        self.was_gone = False

    def ask(self, call: Callable[[Any], T], until_stop: bool = False) -> T:
        """The answer. With `until_stop` a stop ends the wait for an engine that is silent."""
        end = time.monotonic() + self.patience
        while True:
            try:
                return self.once(call)
            except Unreachable as error:
                self.was_gone = True
                stopped = until_stop and self._io.stopping_since is not None
                if stopped or time.monotonic() >= end:
                    raise Unreachable(f"the Docker engine does not answer: {error}") from error
            select.select([self._io.wake] if until_stop else [], [], [], _RETRY_AFTER)
            if until_stop:
                self._io.drain()

    def once(self, call: Callable[[Any], T]) -> T:
        return once(self._address, call)


def once(address: str, call: Callable[[Any], T]) -> T:
    """The answer of the engine at `address`. Raises Refused, Unreachable."""
    errors = package().errors
    try:
        return call(_client(address))
    except errors.APIError as error:
        text = str(error.explanation or error).strip()
        raise Refused(error.status_code or 500, text) from error
    except (errors.DockerException, OSError) as error:
        raise Unreachable(_innermost(error)) from error


def package() -> Any:
    import docker

    return docker


def _client(address: str) -> Any:
    """The engine at `address` (DOCKER_HOST), or where the environment says."""
    if address not in _clients:
        docker = package()
        environ = {**os.environ, **({"DOCKER_HOST": address} if address else {})}
        where = docker.utils.kwargs_from_env(environment=environ)
        _clients[address] = docker.APIClient(version="auto", timeout=CALL_LIMIT, **where)
    return _clients[address]


def pull(api: Any, name: str, aside: Aside) -> None:
    layers: dict[str, tuple[int, int]] = {}
    aside.say(f"fetching the image {name}")
    for entry in api.pull(name, stream=True, decode=True):
        if aside.abandoned:
            return
        if "error" in entry:
            raise Refused(500, str(entry["error"]))
        detail = entry.get("progressDetail") or {}
        if entry.get("status") == "Downloading" and detail.get("total"):
            layers[str(entry.get("id"))] = (int(detail["current"]), int(detail["total"]))
            done, total = (sum(numbers) / 1e6 for numbers in zip(*layers.values(), strict=True))
            aside.say(f"fetching the image {name} ({done:.0f} of {total:.0f} MB)")


def build(api: Any, name: str, folder: str, runtime: str, aside: Aside) -> None:
    """Build a published image from its folder, which has all that its Dockerfile asks for."""
    try:
        api.inspect_image(name)
        return  # another attempt was faster
    except package().errors.ImageNotFound:
        pass
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for entry in sorted(os.listdir(folder)):
            tar.add(os.path.join(folder, entry), entry, filter=_for_all)
        if not os.path.exists(os.path.join(folder, "batchml")):  # published by an older version
            tar.add(os.path.join(runtime, "batchml"), "batchml", filter=_for_all)
    context.seek(0)
    aside.say(f"building the image {name}")
    last = ""
    for entry in api.build(
        fileobj=context, custom_context=True, tag=name, rm=True, forcerm=True, decode=True
    ):
        if aside.abandoned:
            return
        if "error" in entry:
            raise Refused(500, f"{str(entry['error']).strip()} {last}".strip())
        text = str(entry.get("stream", "")).strip()
        if text and not text.startswith(("--->", "Removing intermediate")):
            last = text.splitlines()[-1]
            aside.say(f"building the image {name}: {last}")


def _for_all(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The state folder is private; an image's users are others."""
    if "__pycache__" in member.name:
        return None
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def has_program(api: Any, container: str, name: str, search: str) -> bool:
    """Whether a folder of `search`, a PATH, holds a file of this name in a container."""
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/archive"
    return any(
        api.head(url, params={"path": f"{folder}/{name}"}).status_code == 200
        for folder in search.split(":")
    )


def record(api: Any, container: str, follow: bool, aside: Aside) -> None:
    """The engine's record of the output from its start, in frames."""
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/logs"
    params = {"stdout": 1, "stderr": 1, "follow": int(follow), "timestamps": 1}
    with api.get(url, params=params, stream=True, timeout=None) as response:
        for block in response.iter_content(None):
            aside.pass_on(block)


def _innermost(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error)


# --- what is left of a state folder's, seen by its label ------------------------------------------


def belongings(label: str) -> tuple[list[str], int]:
    """The tasks that have containers, and the number of networks. Raises Unreachable, Refused."""

    def look(api: Any) -> tuple[list[str], int]:
        tasks = [_task(found) for found in api.containers(all=True, filters=_of(label))]
        return tasks, len(api.networks(filters=_of(label)))

    return once("", look)


def remove_belongings(label: str, tasks: Collection[str] | None) -> None:
    """Remove the containers of these tasks, or of all, and networks that nobody is in."""

    def remove(api: Any) -> None:
        refused = package().errors.APIError  # in use, or someone else was faster
        for found in api.containers(all=True, filters=_of(label)):
            if tasks is None or _task(found) in tasks:
                with contextlib.suppress(refused):
                    api.remove_container(found["Id"], v=True, force=True)
        for network in api.networks(filters=_of(label)):
            with contextlib.suppress(refused):
                api.remove_network(network["Id"])

    once("", remove)


def _of(label: str) -> dict[str, str]:
    return {"label": f"batchml.home={label}"}


def _task(container: dict[str, Any]) -> str:
    return str(container["Labels"].get("batchml.task", ""))
