"""What comes before a container runs: its image, its folders, its network, itself.

All of it can be waited for long, and ends when a stop is asked for.
"""

import fcntl
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from batchml.local.executors import docker
from batchml.local.executors.aside import Aside, read_now
from batchml.local.executors.docker import Engine, Refused, Unreachable
from batchml.local.executors.mounts import Mounts, NotStarted, let_read

if TYPE_CHECKING:
    from batchml.local.executors.runner import Io

T = TypeVar("T")

RUNTIME = "/opt/batchml"  # as in the images under images/

_PROGRESS_EVERY = 0.5


class Making:
    """Whatever goes wrong in here is NotStarted."""

    def __init__(self, spec: dict[str, Any], io: "Io", engine: Engine) -> None:
        self._spec = spec
        self._io = io
        self._engine = engine
        self.mounts = Mounts(spec["sources"], spec["labels"]["batchml.home"], spec["task_id"])

    def create(self) -> None:
        """Make the container, unless it is there: a runner may have died before it could tell."""
        config = through_runtime(self._spec, self._image())
        if self._spec["wrap"]:
            let_read(self._spec["runtime"])
        mounts = [*config["HostConfig"].get("Mounts", ()), *self.mounts.open()]
        host_config = {**config["HostConfig"], "Mounts": mounts}
        config = {**config, "HostConfig": host_config}
        network = self._spec.get("network")
        if network:
            self.make_network()
            host_config["NetworkMode"] = network["name"]
            endpoints = {network["name"]: {"Aliases": network["aliases"]}}
            config["NetworkingConfig"] = {"EndpointsConfig": endpoints}
        self.check_stop("CannotCreateContainerError")
        try:
            self.ask(lambda api: api.create_container_from_config(config, self._spec["name"]))
        except Refused as error:
            if error.status != 409:
                raise NotStarted(f"CannotCreateContainerError: {as_engine(error)}") from error

    def ask(self, call: Callable[[Any], T], to: str = "created") -> T:
        """The engine's answer. Raises Refused."""
        try:
            return self._engine.ask(call, until_stop=True)
        except Unreachable as error:
            raise NotStarted(
                f"DockerTimeoutError: Could not transition to {to}; {error}"
            ) from error

    def check_stop(self, kind: str) -> None:
        if self._io.stopping_since is not None:
            raise NotStarted(f"{kind}: stopped before the program started")

    def _image(self) -> dict[str, Any]:
        """The configuration of the image, which is fetched or built if it is not there."""
        name = self._spec["config"]["Image"]
        for get in (self._get_image, None):
            try:
                found = self.ask(lambda api: api.inspect_image(name))
                return dict(found.get("Config") or {})
            except Refused as error:
                if error.status != 404 or get is None:
                    raise NotStarted(f"CannotPullContainerError: {as_engine(error)}") from error
                get()
        raise AssertionError("unreachable: the second look returns or raises")

    def _get_image(self) -> None:
        name = self._spec["config"]["Image"]
        if self._spec["pull"]:
            self._wait_for(
                lambda aside: self._engine.once(lambda api: docker.pull(api, name, aside))
            )
            return
        folder = self._spec["build"]
        if not os.path.exists(os.path.join(folder, "Dockerfile")):
            raise NotStarted(
                f"CannotPullContainerError: no image {name} in the Docker engine, and what it is "
                f"built from is not known here. Build it from the folder that has its Dockerfile: "
                f"docker build -t {name} FOLDER"
            )
        runtime = self._spec["runtime"]

        def build(aside: Aside) -> None:
            with open(f"{folder}.lock", "a", encoding="ascii") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another attempt may be building the same
                if not aside.abandoned:
                    self._engine.once(lambda api: docker.build(api, name, folder, runtime, aside))

        self._wait_for(build)

    def _wait_for(self, work: Callable[[Aside], Any]) -> None:
        """See a fetch or a build through, telling how far it is."""
        aside = Aside(work)
        told = -_PROGRESS_EVERY
        over = False
        try:
            while not over:
                pause = told + _PROGRESS_EVERY - time.monotonic() if aside.said else None
                waits = None if pause is None else max(0.0, pause)
                ready, _, _ = select.select([aside.pipe, self._io.wake], [], [], waits)
                if self._io.wake in ready:
                    self._io.drain()
                self.check_stop("CannotPullContainerError")
                over = aside.pipe in ready and read_now(aside.pipe) == b""
                if aside.said and (over or time.monotonic() >= told + _PROGRESS_EVERY):
                    told = time.monotonic()
                    self._io.progress(aside.last_said())
        finally:
            aside.close()
        try:
            aside.result()
        except NotStarted:
            raise
        except Exception as error:
            raise NotStarted(f"CannotPullContainerError: {as_engine(error)}") from error

    def make_network(self) -> None:
        network = self._spec["network"]["name"]
        with open(self._spec["lock"], "a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two of one name would be possible
            try:
                if not self.ask(lambda api: api.networks(names=[f"^{network}$"])):
                    labels = self._spec["labels"]
                    self.ask(
                        lambda api: api.create_network(network, driver="bridge", labels=labels)
                    )
            except Refused as error:
                raise NotStarted(f"ResourceInitializationError: {as_engine(error)}") from error


def through_runtime(spec: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine is asked for, now that the image is known. Pure.

    Code that travels with a run is unpacked by our runtime. Our images have it as their entry
    point; into any other it is mounted, and runs there what the image would have run.
    """
    config = dict(spec["config"])
    if has_runtime(image) or not spec["wrap"]:
        return config
    theirs = dict(entry.split("=", 1) for entry in image.get("Env") or () if "=" in entry)
    env = dict(entry.split("=", 1) for entry in config["Env"])
    search = [RUNTIME, *filter(None, [env.get("PYTHONPATH", theirs.get("PYTHONPATH"))])]
    env |= {"PYTHONPATH": ":".join(search), "PYTHONUNBUFFERED": "1"}
    mount = {"Type": "bind", "Source": spec["runtime"], "Target": RUNTIME, "ReadOnly": True}
    host_config = dict(config["HostConfig"])
    host_config["Mounts"] = [*host_config["Mounts"], mount]
    return {
        **config,
        "Entrypoint": ["python3", "-m", "batchml.runtime.run"],
        "Cmd": [*(image.get("Entrypoint") or ()), *(config["Cmd"] or image.get("Cmd") or ())],
        "Env": [f"{name}={value}" for name, value in env.items()],
        "HostConfig": host_config,
    }


def has_runtime(config: Mapping[str, Any]) -> bool:
    """Whether our runtime is the parent of the program: it sees to marks in the output itself."""
    return "batchml.runtime.run" in (config.get("Entrypoint") or ())


def as_engine(error: BaseException) -> str:
    return f"Error response from daemon: {error}" if isinstance(error, Refused) else str(error)
