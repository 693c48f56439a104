"""The steps before the program of a container: its image, folders, network, and the container.

Runs in a runner. Each step may take long, and ends when a stop is requested.
"""

import fcntl
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from batchml.local.executors import docker
from batchml.local.executors.docker import DockerEngine, EngineRefused, EngineUnreachable
from batchml.local.executors.mounts import AttemptNotStarted, ContainerMounts, make_readable
from batchml.local.executors.runner.link import AttemptIo, BackgroundCall, read_now

T = TypeVar("T")

RUNTIME = "/opt/batchml"  # as in the images of the folder images/

_PROGRESS_EVERY = 0.5  # seconds between two reports


class ContainerSetup:
    """Prepares the image, the folders, the network and the container.

    Each step may take long, and ends when a stop is requested. Failures raise AttemptNotStarted.
    """

    def __init__(self, spec: dict[str, Any], io: AttemptIo, engine: DockerEngine) -> None:
        self._spec = spec
        self._io = io
        self._engine = engine
        self.mounts = ContainerMounts(
            spec["sources"], spec["labels"]["batchml.home"], spec["task_id"]
        )

    def create(self) -> None:
        """Create the container, unless it exists: an earlier runner may have died after creating
        it.
        """
        config = through_runtime(self._spec, self._image())
        if self._spec["wrap"]:
            make_readable(self._spec["runtime"])
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
            self._create(config)
        except EngineRefused as error:
            if error.status != 409:
                raise AttemptNotStarted(
                    f"CannotCreateContainerError: {describe_error(error)}"
                ) from error

    def _create(self, config: dict[str, Any]) -> None:
        """Create the container: without processors of its own if the engine does not have them.

        The engine may run in a virtual machine with fewer processors. Raises EngineRefused.
        """
        name = self._spec["name"]
        try:
            self.ask(lambda api: api.create_container_from_config(config, name))
        except EngineRefused as error:
            if "Requested CPUs are not available" not in str(error):
                raise
            del config["HostConfig"]["CpusetCpus"]
            self.ask(lambda api: api.create_container_from_config(config, name))

    def ask(self, call: Callable[[Any], T], to: str = "created") -> T:
        """The engine's answer to a call. `to` is the state that the call leads to, for the message
        if the engine does not answer. Raises EngineRefused, AttemptNotStarted.
        """
        try:
            return self._engine.ask(call, until_stop=True)
        except EngineUnreachable as error:
            raise AttemptNotStarted(
                f"DockerTimeoutError: Could not transition to {to}; {error}"
            ) from error

    def check_stop(self, kind: str) -> None:
        if self._io.stopping_since is not None:
            raise AttemptNotStarted(f"{kind}: stopped before the program started")

    def _image(self) -> dict[str, Any]:
        """The configuration of the image, which is fetched or built if it is missing."""
        config = self._spec["config"]
        if self._spec.get("add_processor"):
            config["Image"] += f"-{self.ask(docker.processor)}"
        name = config["Image"]
        for get in (self._get_image, None):
            try:
                image = self.ask(lambda api: api.inspect_image(name))
                return dict(image.get("Config") or {})
            except EngineRefused as error:
                if error.status != 404 or get is None:
                    raise AttemptNotStarted(
                        f"CannotPullContainerError: {describe_error(error)}"
                    ) from error
                get()
        raise AssertionError("unreachable: the second look returns or raises")

    def _get_image(self) -> None:
        name = self._spec["config"]["Image"]
        if self._spec["pull"]:
            self._wait_for(lambda call: self._engine.once(lambda api: docker.pull(api, name, call)))
            return
        folder = self._spec["build"]
        if not os.path.exists(os.path.join(folder, "Dockerfile")):
            raise AttemptNotStarted(
                f"CannotPullContainerError: the Docker engine has no image {name}, and the state "
                f"folder does not have its Dockerfile. Build it from the folder that has it: "
                f"docker build -t {name} FOLDER"
            )
        runtime = self._spec["runtime"]

        def build(call: BackgroundCall) -> None:
            with open(f"{folder}.lock", "a", encoding="ascii") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another attempt may be building the same image
                if not call.abandoned:
                    self._engine.once(lambda api: docker.build(api, name, folder, runtime, call))

        self._wait_for(build)

    def _wait_for(self, work: Callable[[BackgroundCall], Any]) -> None:
        """Run a fetch or a build to its end, reporting its progress."""
        call = BackgroundCall(work)
        reported_at = -_PROGRESS_EVERY
        over = False
        try:
            while not over:
                pause = reported_at + _PROGRESS_EVERY - time.monotonic() if call.reports else None
                waits = None if pause is None else max(0.0, pause)
                ready, _, _ = select.select([call.pipe, self._io.wake], [], [], waits)
                if self._io.wake in ready:
                    self._io.drain()
                self.check_stop("CannotPullContainerError")
                over = call.pipe in ready and read_now(call.pipe) == b""
                if call.reports and (over or time.monotonic() >= reported_at + _PROGRESS_EVERY):
                    reported_at = time.monotonic()
                    self._io.report_progress(call.last_report())
        finally:
            call.close()
        try:
            call.result()
        except AttemptNotStarted:
            raise
        except Exception as error:
            raise AttemptNotStarted(f"CannotPullContainerError: {describe_error(error)}") from error

    def make_network(self) -> None:
        network = self._spec["network"]["name"]
        with open(self._spec["lock"], "a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # else two networks of one name could be created
            try:
                if not self.ask(lambda api: api.networks(names=[f"^{network}$"])):
                    labels = self._spec["labels"]
                    self.ask(
                        lambda api: api.create_network(network, driver="bridge", labels=labels)
                    )
            except EngineRefused as error:
                raise AttemptNotStarted(
                    f"ResourceInitializationError: {describe_error(error)}"
                ) from error


def through_runtime(spec: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's configuration, now that the image is known. Pure.

    batchml's runtime unpacks the code package of a run. Images of batchml have it as their entry
    point. In any other image it is mounted, and then runs the image's own program.
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
    """Whether batchml's runtime is the parent of the program: it handles marks in the output
    itself.
    """
    return "batchml.runtime.run" in (config.get("Entrypoint") or ())


def describe_error(error: BaseException) -> str:
    """An error in the words of the `docker` command."""
    return (
        f"Error response from daemon: {error}" if isinstance(error, EngineRefused) else str(error)
    )
