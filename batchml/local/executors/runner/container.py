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
from typing import TYPE_CHECKING, Any, TypeVar

from batchml.local.executors import docker
from batchml.local.executors.docker import Engine, Refused, Unreachable
from batchml.local.executors.mounts import Mounts, NotStarted, let_read
from batchml.local.executors.runner.main import HOST_LOST, Withdrawn
from batchml.local.executors.runner.streams import (
    Aside,
    Demux,
    Recorded,
    Unseen,
    held_lines,
    read_next,
    read_now,
)
from batchml.runtime.processes import send, start_time
from batchml.runtime.storage.files import read_json, write_json

if TYPE_CHECKING:
    from batchml.local.executors.runner.main import Io

# --- how a container is set up --------------------------------------------------------------------
# What comes before a container runs: its image, its folders, its network, itself.
#
# All of it can be waited for long, and ends when a stop is asked for.


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


# --- the attempt in a container -------------------------------------------------------------------


PATIENCE = 60.0  # seconds for the engine to answer before an attempt has started
GONE_AFTER = 600.0  # seconds without an answer until a running attempt counts as lost

_RETRY_AFTER = 0.2
_TAIL_LIMIT = 10.0  # seconds of silence after the exit until the engine's record is read
_GONE = HOST_LOST + "the container of this attempt is gone."
_RESTARTED = HOST_LOST + "the Docker engine was restarted, which ended the container."
_BY_HAND = HOST_LOST + "the container was restarted by hand."
_NO_COMMAND = 127  # exit code of an init process whose program is not there
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LACKS_PYTHON = (
    "{image} has no {python}. batchml's runtime, which unpacks the code of a run and starts its "
    "program, is written in Python. Install {python} in the image."
)


class Containers:
    """The kind `container`. What costs time once is done before the first attempt comes."""

    litter = ""

    def __init__(self) -> None:
        threading.Thread(target=docker.package, daemon=True).start()

    def run(self, spec: dict[str, Any], io: "Io") -> dict[str, Any]:
        return run(spec, io)

    def close(self) -> None:
        pass


def run(spec: dict[str, Any], io: "Io") -> dict[str, Any]:
    """Run an attempt to its end; the exit record."""
    engine = Engine(spec.get("engine", ""), io, float(spec.get("patience", PATIENCE)))
    attempt = _Attempt(spec, io, engine)
    try:
        ended = attempt.run()
    except NotStarted as error:
        ended = {"code": None, "start_failure": str(error)}
    except Withdrawn:
        attempt.remove_container()
        raise
    except Unreachable as error:
        attempt.kill_by_pid()
        ended = {"code": None, "lost": f"{HOST_LOST}{error}"}
    except Exception as error:  # ours: nothing of the attempt may live on unwatched
        traceback.print_exc()
        ended = {"code": None, "lost": f"{HOST_LOST}{type(error).__name__}: {error}"}
    attempt.remove(ended)
    return ended


class _Attempt:
    def __init__(self, spec: dict[str, Any], io: "Io", engine: Engine) -> None:
        self._spec = spec
        self._io = io
        self._engine = engine
        self._making = Making(spec, io, engine)
        self._id = spec["name"]
        self._started_at: int | None = None
        self._stop_signal = "SIGTERM"
        self._told = False
        self._process: tuple[int, int | None] = (0, None)

    def run(self) -> dict[str, Any]:
        before: dict[str, Any] | None = read_json(self._path("container.json"))
        if before is not None:  # judged by a runner that died before it could report
            return before
        if not self._spec.get("resume"):  # else it may have run, so it is not made again
            self._making.create()
        found = self._find()
        if found is None:
            return {"code": None, "lost": _GONE}
        self._stop_signal = found["Config"].get("StopSignal") or self._stop_signal
        marks = has_runtime(found["Config"])
        if found["State"]["Status"] != "created":
            return self._take_over(found, marks)
        with self._attach() as output:
            self._io.wait_to_begin()
            self._io.preamble(self._spec["preamble"])
            self._start()
            return self._judge(self._follow(output, Demux(escape=not marks)))

    def _path(self, name: str) -> str:
        return os.path.join(self._io.folder, name)

    # --- before the program runs ------------------------------------------------------------

    def _attach(self) -> "_Output":
        """The container's output as it comes, from its first byte: asked for before it starts."""
        params = {"stdout": 1, "stderr": 1, "stream": 1}
        sock = self._making.ask(lambda api: api.attach_socket(self._id, params), "started")
        return _Output(sock.fileno(), sock.close)

    def _start(self) -> None:
        """Start it. The engine fails at a network now and then when many start: tried once more."""
        self._making.mounts.open()
        for last in (False, True):
            self._making.check_stop("CannotStartContainerError")
            try:
                self._making.ask(lambda api: api.start(self._id), "started")
                break
            except Refused as error:
                if last or not _is_passing(str(error)):
                    why = self._lacks_python(self._find() or {}) or as_engine(error)
                    raise NotStarted(f"CannotStartContainerError: {why}") from error
                if self._spec.get("network"):
                    self._making.make_network()
        found = self._find() or {}
        if found:
            self._making.mounts.check(int(found["State"]["Pid"]), found["Id"])
        self._making.mounts.close()
        self._note_start(found)

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

    def _take_over(self, found: dict[str, Any], marks: bool) -> dict[str, Any]:
        """Go on with a container that another runner started."""
        self._note_start(found)
        return self._judge(self._read_again(Recorded(escape=not marks)))

    def _read_again(self, demux: Recorded) -> int | None:
        """Follow the engine's own record of the output, past what our log holds already.

        A record that is followed may end without its last line, so it is read once more.
        """
        with self._record(follow=True) as output:
            code = self._follow(output, demux, Unseen(held_lines(self._path("log"))))
        self._read_rest(demux.recorded())
        return code

    def _read_rest(self, demux: Recorded) -> None:
        """Write what the engine's own record of the output holds and our log does not."""
        unseen = Unseen(held_lines(self._path("log")))
        with self._record(follow=False) as output:
            while data := read_next(output.fd):
                self._io.write(unseen.feed(demux.feed(data)))
        self._io.write(unseen.feed(demux.finish()))
        self._io.write(unseen.finish())

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
        is_cut = False  # the output has not come to its end
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
                is_cut = True
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
        if is_cut and unseen is None:
            self._read_rest(demux.recorded())
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
        if code == _NO_COMMAND and (why := self._lacks_python(found or {})):
            return {"code": None, "start_failure": f"CannotStartContainerError: {why}"}
        if code == 0 and self._was_started_again(state):
            # The engine's answer was read from the new start, which shows no exit code: 0.
            return {"code": None, "lost": _BY_HAND, "started_at": self._started_at}
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

    def _lacks_python(self, found: Mapping[str, Any]) -> str:
        """What to say when our runtime was to start the program and the image has no Python."""
        config = found.get("Config") or {}
        if not has_runtime(config):
            return ""
        python = config["Entrypoint"][0]
        env = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
        search = env.get("PATH", _USUAL_PATH)
        try:
            there = self._engine.once(lambda api: docker.has_program(api, self._id, python, search))
        except (Refused, Unreachable):
            return ""
        return "" if there else _LACKS_PYTHON.format(python=python, image=config["Image"])

    def _was_started_again(self, state: Mapping[str, Any]) -> bool:
        """Whether somebody ended this container by hand and started it again: `docker restart`."""
        began = str(state.get("StartedAt", ""))
        return bool(began) and self._started_at is not None and _ms(began) > self._started_at

    def _was_cut_off(self, state: Mapping[str, Any]) -> bool:
        """Whether the engine or the machine was started again beneath the container.

        Nobody may have been there to see it. Then a container that had ended by itself before
        looks the same; where that is the question, a retry does less harm than a wrong verdict.
        """
        if self._engine.was_gone:
            return True
        start, end = self._started_at, str(state.get("FinishedAt", ""))
        if start is None or not end:
            return False
        if start < _booted_at():
            return True
        engine = self._engine_started_at()
        return start < engine and _ms(end) <= engine

    def _engine_started_at(self) -> int:
        """In ms; 0 where it does not say.

        It makes its default bridge anew when it starts, unless containers have gone on (with
        `live-restore`): then this is the time of an earlier start, before theirs.
        """
        try:
            found = self._engine.once(lambda api: api.inspect_network("bridge"))
        except (Refused, Unreachable):
            return 0
        return _ms(found["Created"])

    def remove(self, ended: Mapping[str, Any]) -> None:
        """Remove the container, and the network with its last node. What stays is swept later."""
        try:
            write_json(self._path("container.json"), ended)
        except OSError:
            pass  # full disk: it matters only if this runner is killed right now
        self.remove_container()

    def remove_container(self) -> None:
        self._making.mounts.close()
        self._try(lambda api: api.remove_container(self._id, v=True, force=True))
        network = self._spec.get("network")
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


def _broke_off(waiter: Aside) -> bool:
    """Whether it ended without an answer, as when the engine is restarted."""
    return waiter.error is not None and not isinstance(waiter.error, Refused)


def _as_it_is(lines: list[bytes]) -> list[bytes]:
    return lines


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
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) * 1000 + moment.microsecond // 1000
