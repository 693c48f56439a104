"""Attempts that are containers: made, started, followed, judged, removed.

Runs in a runner, which outlives the server. The container outlives the runner: one that takes over
(`resume`) finds it by its name and reads again what the log does not hold yet. The engine may be
restarted meanwhile; every call is tried again until it answers.
"""

import fcntl
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

from batchml.local.executors import docker
from batchml.local.executors.aside import Aside, read_next, read_now
from batchml.local.executors.docker import PATIENCE, Engine, Refused, Unreachable
from batchml.local.executors.mounts import NotStarted, let_read, mount
from batchml.local.executors.streams import Demux, Recorded, Unseen, cut_torn_line, held_lines
from batchml.runtime.files import read_json, write_json
from batchml.runtime.processes import send, start_time

T = TypeVar("T")

GONE_AFTER = 600.0  # seconds without an answer until a running attempt counts as lost
RUNTIME = "/opt/batchml"  # as in the images under images/

_RETRY_AFTER = 0.2
_TAIL_LIMIT = 10.0  # seconds of silence after the exit until output counts as complete
_PROGRESS_EVERY = 0.5
_HOST = "Host EC2 (instance this-machine) terminated: "
_GONE = _HOST + "the container of this attempt is gone."
_RESTARTED = _HOST + "the Docker engine was restarted, which ended the container."


class Io(Protocol):
    """What a runner lends to the attempt in its care."""

    @property
    def folder(self) -> str: ...
    @property
    def stopping_since(self) -> float | None: ...
    @property
    def wake(self) -> int: ...
    def write(self, lines: list[bytes]) -> None: ...
    def preamble(self, text: str) -> None: ...
    def progress(self, text: str) -> None: ...
    def started(self, at_ms: int, address: str = "") -> None: ...
    def drain(self) -> None: ...

    meanwhile: Callable[[], object]  # called while a write waits for space


class Containers:
    """The kind `container`. What costs time once is done before the first attempt comes."""

    litter = ""

    def __init__(self) -> None:
        threading.Thread(target=docker.package, daemon=True).start()

    def run(self, spec: dict[str, Any], io: Io) -> dict[str, Any]:
        return run(spec, io)

    def close(self) -> None:
        pass


def run(spec: dict[str, Any], io: Io) -> dict[str, Any]:
    """Run an attempt to its end; the exit record."""
    engine = Engine(spec.get("engine", ""), io)
    attempt = _Attempt(spec, io, engine)
    try:
        ended = attempt.run()
    except NotStarted as error:
        ended = {"code": None, "start_failure": str(error)}
    except Unreachable as error:
        attempt.kill_by_pid()
        ended = {"code": None, "lost": f"{_HOST}{error}"}
    except Exception as error:  # ours: nothing of the attempt may live on unwatched
        traceback.print_exc()
        ended = {"code": None, "lost": f"{_HOST}{type(error).__name__}: {error}"}
    attempt.remove(ended)
    return ended


class _Attempt:
    def __init__(self, spec: dict[str, Any], io: Io, engine: Engine) -> None:
        self._spec = spec
        self._io = io
        self._engine = engine
        engine.patience = float(spec.get("patience", PATIENCE))
        self._id = spec["name"]
        self._made = False
        self._started_at: int | None = None
        self._stop_signal = "SIGTERM"
        self._told = False
        self._killed = False
        self._process: tuple[int, int | None] = (0, None)

    def run(self) -> dict[str, Any]:
        before: dict[str, Any] | None = read_json(self._path("container.json"))
        if before is not None:  # judged by a runner that died before it could report
            return before
        log_has_lines = cut_torn_line(self._path("log"))
        found = self._find() if self._spec.get("resume") else None
        if found is None and log_has_lines:  # it was there: its output begins after it is made
            return {"code": None, "lost": _GONE}
        if found is None:
            self._create()
            found = self._find()
        if found is None:
            return {"code": None, "lost": _GONE}
        self._made = True
        self._stop_signal = found["Config"].get("StopSignal") or self._stop_signal
        marks = _has_runtime(found["Config"])
        if found["State"]["Status"] != "created":
            return self._take_over(found, log_has_lines, marks)
        if not log_has_lines:
            self._io.preamble(self._spec["preamble"])
        with self._attach() as output:
            self._start()
            return self._judge(self._follow(output, Demux(escape=not marks)))

    def _path(self, name: str) -> str:
        return os.path.join(self._io.folder, name)

    # --- before the program runs ------------------------------------------------------------

    def _create(self) -> None:
        """Make the container, unless it is there: a runner may have died before it could tell."""
        config = through_runtime(self._spec, self._image())
        if self._spec["wrap"]:
            let_read(self._spec["runtime"])
        mounts = [*config["HostConfig"].get("Mounts", ()), *self._mounts()]
        host_config = {**config["HostConfig"], "Mounts": mounts}
        config = {**config, "HostConfig": host_config}
        network = self._spec.get("network")
        if network:
            self._make_network()
            host_config["NetworkMode"] = network["name"]
            endpoints = {network["name"]: {"Aliases": network["aliases"]}}
            config["NetworkingConfig"] = {"EndpointsConfig": endpoints}
        self._check_stop("CannotCreateContainerError")
        try:
            self._before_start(lambda api: api.create_container_from_config(config, self._id))
        except Refused as error:
            if error.status != 409:
                raise NotStarted(f"CannotCreateContainerError: {_as_engine(error)}") from error

    def _before_start(self, call: Callable[[Any], T]) -> T:
        try:
            return self._engine.ask(call, until_stop=True)
        except Unreachable as error:
            to = "started" if self._made else "created"
            raise NotStarted(
                f"DockerTimeoutError: Could not transition to {to}; {error}"
            ) from error

    def _check_stop(self, kind: str) -> None:
        if self._io.stopping_since is not None:
            raise NotStarted(f"{kind}: stopped before the program started")

    def _image(self) -> dict[str, Any]:
        """The configuration of the image, which is fetched or built if it is not there."""
        name = self._spec["config"]["Image"]
        for get in (self._get_image, None):
            try:
                found = self._before_start(lambda api: api.inspect_image(name))
                return dict(found.get("Config") or {})
            except Refused as error:
                if error.status != 404 or get is None:
                    raise NotStarted(f"CannotPullContainerError: {_as_engine(error)}") from error
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
                self._check_stop("CannotPullContainerError")
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
            raise NotStarted(f"CannotPullContainerError: {_as_engine(error)}") from error

    def _mounts(self) -> list[dict[str, Any]]:
        try:
            return [mount(source, self._spec["allowed"]) for source in self._spec["sources"]]
        except OSError as error:
            raise NotStarted(
                f"CannotCreateContainerError: {error.filename}: {error.strerror}"
            ) from error

    def _make_network(self) -> None:
        network = self._spec["network"]["name"]
        with open(self._spec["lock"], "a", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two of one name would be possible
            try:
                if not self._before_start(lambda api: api.networks(names=[f"^{network}$"])):
                    labels = self._spec["labels"]
                    self._before_start(
                        lambda api: api.create_network(network, driver="bridge", labels=labels)
                    )
            except Refused as error:
                raise NotStarted(f"ResourceInitializationError: {_as_engine(error)}") from error

    def _attach(self) -> "_Output":
        """The container's output as it comes, from its first byte: asked for before it starts."""
        params = {"stdout": 1, "stderr": 1, "stream": 1}
        sock = self._before_start(lambda api: api.attach_socket(self._id, params))
        return _Output(sock.fileno(), sock.close)

    def _start(self) -> None:
        """Start it. The engine fails at a network now and then when many start: tried once more."""
        self._made = True
        for last in (False, True):
            self._check_stop("CannotStartContainerError")
            try:
                self._before_start(lambda api: api.start(self._id))
                break
            except Refused as error:
                if last or not _is_passing(str(error)):
                    raise NotStarted(f"CannotStartContainerError: {_as_engine(error)}") from error
                if self._spec.get("network"):
                    self._make_network()
        self._note_start(self._find() or {})

    def _note_start(self, found: Mapping[str, Any]) -> None:
        state = found.get("State") or {}
        pid = int(state.get("Pid", 0))
        self._process = (pid, start_time(pid) if pid else None)
        self._io.meanwhile = self._until_kill
        # From now on an engine that is silent does not end the attempt soon.
        self._started_at = at = _ms(state["StartedAt"]) if state else _now()
        self._engine.patience = float(self._spec.get("gone", GONE_AFTER))
        self._engine.was_gone = False
        network = self._spec.get("network")
        if network:
            joined = (found.get("NetworkSettings") or {}).get("Networks") or {}
            self._io.started(at, str(joined.get(network["name"], {}).get("IPAddress", "")))
        else:
            self._io.started(at)

    # --- while it runs ----------------------------------------------------------------------

    def _find(self) -> dict[str, Any] | None:
        try:
            return dict(self._engine.ask(lambda api: api.inspect_container(self._id)))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def _take_over(self, found: dict[str, Any], log_has_lines: bool, marks: bool) -> dict[str, Any]:
        """Go on with a container that another runner started."""
        if not log_has_lines:
            self._io.preamble(self._spec["preamble"])
        self._note_start(found)
        return self._judge(self._read_again(Recorded(escape=not marks)))

    def _read_again(self, demux: Recorded) -> int | None:
        """Follow the engine's own record of the output, past what our log holds already.

        A record that is followed may end without its last line, so it is read once more.
        """
        with self._record(follow=True) as output:
            code = self._follow(output, demux, Unseen(held_lines(self._path("log"))))
        demux, unseen = demux.recorded(), Unseen(held_lines(self._path("log")))
        with self._record(follow=False) as output:
            while data := read_next(output.fd):
                self._io.write(unseen.feed(demux.feed(data)))
        self._io.write(unseen.feed(demux.finish()))
        self._io.write(unseen.finish())
        return code

    def _record(self, *, follow: bool) -> "_Output":
        aside = Aside(
            lambda aside: self._engine.once(lambda api: docker.record(api, self._id, follow, aside))
        )
        return _Output(aside.pipe, aside.close)

    def _follow(self, output: "_Output", demux: Demux, unseen: Unseen | None = None) -> int | None:
        """Copy the output until the container has ended; its exit code if the engine knows it."""
        waiter = Aside(lambda _: self._engine.once(lambda api: api.wait(self._id, timeout=None)))
        keep = unseen.feed if unseen else _as_it_is
        sources = {output.fd, waiter.pipe, self._io.wake}
        last = 0.0  # when the exit was known, or output came after it
        while output.fd in sources or waiter.pipe in sources:
            over = waiter.pipe not in sources
            ready, _, _ = select.select(sources, [], [], 1.0 if over else self._until_kill())
            if self._io.wake in ready:
                self._io.drain()
            if waiter.pipe in ready:
                sources.discard(waiter.pipe)
                last = time.monotonic()
                if _broke_off(waiter):
                    break
            if output.fd in ready:
                data = read_now(output.fd)
                self._io.write(keep(demux.feed(data or b"")))
                last = time.monotonic()
                if data == b"":
                    sources.discard(output.fd)
            elif over and time.monotonic() > last + _TAIL_LIMIT:
                break
        waiter.close()
        try:
            code = int(waiter.result()["StatusCode"])
        except Refused:
            code = None  # removed by hand
        except Exception:
            self._engine.was_gone = True
            if self._find() is not None:  # once the engine answers again
                return self._read_again(demux.recorded())
            code = None
        self._io.write(unseen.finish() if unseen else demux.finish())
        return code

    def _until_kill(self) -> float | None:
        """TERM once a stop is asked for, KILL when its grace is over; seconds to the next look."""
        since = self._io.stopping_since
        if since is None:
            return None
        if not self._told and since > 0:  # else there is no grace
            self._told = self._signal(self._stop_signal)
        left = since + float(self._spec["grace"]) - time.monotonic()
        if left > 0:
            return left if self._told else min(left, _RETRY_AFTER)
        self._killed = True
        if not self._signal("SIGKILL"):
            self._try(lambda api: api.unpause(self._id))
        return 1.0

    def _signal(self, name: str) -> bool:
        return self._try(lambda api: api.kill(self._id, name))

    def _try(self, call: Callable[[Any], Any]) -> bool:
        try:
            self._engine.once(call)
        except (Refused, Unreachable):
            return False
        return True

    # --- afterwards -------------------------------------------------------------------------

    def _judge(self, code: int | None) -> dict[str, Any]:
        found = self._find()
        state = found["State"] if found is not None else {}
        if code is None:
            code = state.get("ExitCode")
        if code is None:
            return {"code": None, "lost": _GONE, "started_at": self._started_at}
        ours = self._io.stopping_since is not None
        oom = bool(state.get("OOMKilled"))
        if oom and code == 0:
            text = "batchml: a process of this container was killed for memory; the first went on."
            self._io.write([text.encode()])
        if not (ours or oom) and code in (137, 143, 255) and self._was_cut_off(state):
            return {"code": None, "lost": _RESTARTED, "started_at": self._started_at}
        return {
            "code": code,
            "signal": code - 128 if 128 < code <= 128 + signal.NSIG else 0,
            "oom": oom and code != 0 and not ours,
            "started_at": self._started_at,
        }

    def _was_cut_off(self, state: Mapping[str, Any]) -> bool:
        """Whether the engine or the machine was started again beneath the container."""
        if self._engine.was_gone:
            return True
        start, end = self._started_at, state.get("FinishedAt")
        return start is not None and bool(end) and start < _booted_at() <= _ms(str(end))

    def remove(self, ended: Mapping[str, Any]) -> None:
        """Remove the container, and the network with its last node. What stays is swept later."""
        network = self._spec.get("network")
        if not (self._made or network or self._spec.get("resume")):
            return
        try:
            write_json(self._path("container.json"), ended)
        except OSError:
            pass  # full disk: it matters only if this runner is killed right now
        self._try(lambda api: api.remove_container(self._id, v=True, force=True))
        if network:
            self._try(lambda api: api.remove_network(network["name"]))

    def kill_by_pid(self) -> None:
        """The engine is gone for good: end the container's first process, and all with it."""
        pid, started = self._process
        if pid and started is not None and start_time(pid) == started:
            send([pid], signal.SIGKILL)


class _Output:
    """Where the engine's frames can be read."""

    def __init__(self, fd: int, close: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.close = close

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def through_runtime(spec: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine is asked for, now that the image is known. Pure.

    Code that travels with a run is unpacked by our runtime. Our images have it as their entry
    point; into any other it is mounted, and runs there what the image would have run.
    """
    config = dict(spec["config"])
    if _has_runtime(image) or not spec["wrap"]:
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


def _has_runtime(config: Mapping[str, Any]) -> bool:
    """Whether our runtime is the parent of the program: it sees to marks in the output itself."""
    return "batchml.runtime.run" in (config.get("Entrypoint") or ())


def _broke_off(waiter: Aside) -> bool:
    """Whether it ended without an answer, as when the engine is restarted."""
    return waiter.error is not None and not isinstance(waiter.error, Refused)


def _as_it_is(lines: list[bytes]) -> list[bytes]:
    return lines


def _as_engine(error: BaseException) -> str:
    return f"Error response from daemon: {error}" if isinstance(error, Refused) else str(error)


def _is_passing(text: str) -> bool:
    """Failures of a bridge that is busy with other starts."""
    return any(word in text.lower() for word in ("network", "bridge", "endpoint", "veth"))


def _now() -> int:
    return int(time.time() * 1000)


def _booted_at() -> int:
    """When this machine was started, in ms; 0 where it does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            found = [line.split()[1] for line in file if line.startswith("btime ")]
    except OSError:
        found = []
    return int(found[0]) * 1000 if found else 0


def _ms(text: str) -> int:
    """`2026-11-21T12:09:22.166918183Z` in ms since the epoch."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    seconds = datetime.fromisoformat(f"{whole}+00:00").timestamp()
    return int(seconds * 1000) + int((fraction + "000")[:3])
