"""One attempt as a container, through the engine's API: make, start, follow, judge, remove.

Runs in a runner, which outlives the server. The container outlives the runner: one that takes over
(`resume`) finds it by its name and reads again what the log does not hold yet. The engine may be
restarted meanwhile; every call is tried again until it answers.

The only module that imports the `docker` package, once in a runner's life, at its first attempt.
"""

import fcntl
import io as files
import json
import os
import select
import signal
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

from batchml.local.executors.streams import Demux, Recorded, Unseen, cut_torn_line, held_lines
from batchml.runtime.files import read_json, write_json
from batchml.runtime.processes import send, start_time

T = TypeVar("T")

PATIENCE = 60.0  # seconds for the engine to answer before an attempt has started
GONE_AFTER = 600.0  # seconds without an answer until a running attempt counts as lost
CALL_LIMIT = 240.0  # seconds for one call, as ECS's agent waits for a container to be made
RUNTIME = "/opt/batchml"  # as in the images under images/

_RETRY_AFTER = 0.2
_TAIL_LIMIT = 10.0  # seconds of silence after the exit until output counts as complete
_PROGRESS_EVERY = 0.5
_READ = 1 << 18
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


class NotStarted(Exception):
    """The program never ran; the text says why, in AWS's words."""


class Refused(Exception):
    """The engine answered that it will not."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Unreachable(Exception):
    """The engine did not answer."""


class Containers:
    """The kind `container`. What costs time once is done before the first attempt comes."""

    litter = ""

    def __init__(self) -> None:
        threading.Thread(target=_package, daemon=True).start()

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


class Engine:
    """The engine's API. What it refuses is Refused; silence is tried again, then Unreachable."""

    def __init__(self, address: str, io: Io) -> None:
        self._address = address
        self._io = io
        self.patience = PATIENCE
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
        errors = _package().errors
        try:
            return call(_client(self._address))
        except errors.APIError as error:
            text = str(error.explanation or error).strip()
            raise Refused(error.status_code or 500, text) from error
        except (errors.DockerException, OSError) as error:
            raise Unreachable(_innermost(error)) from error


class _Aside:
    """A call that takes its time, in a thread; its pipe is readable when there is news.

    `say` hands a text over; the end of the pipe is the end of the call.
    """

    def __init__(self, work: Callable[["_Aside"], Any]) -> None:
        self.said: list[str] = []
        self.abandoned = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.pipe, self._end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[["_Aside"], Any]) -> None:
        try:
            self._value = work(self)
        except BaseException as error:
            self._error = error
        finally:
            os.close(self._end)

    def say(self, text: str) -> None:
        self.said.append(text)
        self.pass_on(b".")

    def last_said(self) -> str:
        text = self.said[-1]
        self.said.clear()
        return text

    def pass_on(self, data: bytes) -> None:
        while data and not self.abandoned:
            data = data[os.write(self._end, data) :]

    def close(self) -> None:
        """Whoever writes still finds the pipe closed, and ends."""
        self.abandoned = True
        os.close(self.pipe)

    def broke_off(self) -> bool:
        """Whether it ended without an answer, as when the engine is restarted."""
        return self._error is not None and not isinstance(self._error, Refused)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


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
            _let_read(self._spec["runtime"])
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
            self._wait_for(lambda aside: self._engine.once(lambda api: _pull(api, name, aside)))
            return
        folder = self._spec["build"]
        if not os.path.exists(os.path.join(folder, "Dockerfile")):
            raise NotStarted(
                f"CannotPullContainerError: no image {name} in the Docker engine, and what it is "
                f"built from is not known here. Build it from the folder that has its Dockerfile: "
                f"docker build -t {name} FOLDER"
            )
        runtime = self._spec["runtime"]

        def build(aside: _Aside) -> None:
            with open(f"{folder}.lock", "a", encoding="ascii") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another attempt may be building the same
                if not aside.abandoned:
                    self._engine.once(lambda api: _build(api, name, folder, runtime, aside))

        self._wait_for(build)

    def _wait_for(self, work: Callable[[_Aside], Any]) -> None:
        """See a fetch or a build through, telling how far it is."""
        aside = _Aside(work)
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
                over = aside.pipe in ready and _read(aside.pipe) == b""
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
            return [_mount(source, self._spec["allowed"]) for source in self._spec["sources"]]
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
            while data := _read_next(output.fd):
                self._io.write(unseen.feed(demux.feed(data)))
        self._io.write(unseen.feed(demux.finish()))
        self._io.write(unseen.finish())
        return code

    def _record(self, *, follow: bool) -> "_Output":
        aside = _Aside(
            lambda aside: self._engine.once(lambda api: _logs(api, self._id, follow, aside))
        )
        return _Output(aside.pipe, aside.close)

    def _follow(self, output: "_Output", demux: Demux, unseen: Unseen | None = None) -> int | None:
        """Copy the output until the container has ended; its exit code if the engine knows it."""
        waiter = _Aside(lambda _: self._engine.once(lambda api: api.wait(self._id, timeout=None)))
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
                if waiter.broke_off():
                    break
            if output.fd in ready:
                data = _read(output.fd)
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
        if not self._told:
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


# --- what is mounted ----------------------------------------------------------------------------


def _mount(source: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """A bind mount, of a folder that is made if it is missing. Raises NotStarted, OSError."""
    roots = [source["below"]] if source["below"] else allowed
    real = _checked(source["path"], roots)
    if source["make"] and not os.path.exists(real):
        os.makedirs(real, exist_ok=True)
        os.chmod(real, 0o755)
        real = _checked(source["path"], roots)
    if source["ours"]:
        _open_up(real)
    return {
        "Type": "bind", "Source": real, "Target": source["target"],
        "ReadOnly": source["read_only"],
    }  # fmt: skip


def _checked(path: str, roots: Iterable[str]) -> str:
    """Where a path leads, which must be below one of `roots`."""
    real = os.path.realpath(path)
    for root in map(os.path.realpath, roots):
        if real == root or real.startswith(root.rstrip("/") + "/"):
            return real
    raise NotStarted(
        f"CannotCreateContainerError: {path} may not be mounted. Start the server with "
        f"--allow-path {path} to let jobs have it"
    )


def _open_up(path: str) -> None:
    """Let any user of a container in. On this machine the state folder above lets nobody pass."""
    mode = 0o777 if os.path.isdir(path) else 0o644
    if os.stat(path).st_mode & 0o777 != mode:
        os.chmod(path, mode)


def _let_read(folder: str) -> None:
    """The same for all that lies in a folder, to be read alone."""
    for place, _, names in os.walk(folder):
        os.chmod(place, 0o755)
        for name in names:
            os.chmod(os.path.join(place, name), 0o644)


# --- the engine's package -----------------------------------------------------------------------

_clients: dict[str, Any] = {}


def _package() -> Any:
    import docker

    return docker


def _client(address: str) -> Any:
    """The engine at `address` (DOCKER_HOST), or where the environment says."""
    if address not in _clients:
        package = _package()
        environ = {**os.environ, **({"DOCKER_HOST": address} if address else {})}
        where = package.utils.kwargs_from_env(environment=environ)
        _clients[address] = package.APIClient(version="auto", timeout=CALL_LIMIT, **where)
    return _clients[address]


def _pull(api: Any, name: str, aside: _Aside) -> None:
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


def _build(api: Any, name: str, folder: str, runtime: str, aside: _Aside) -> None:
    """Build a published image: its folder and the runtime are what its Dockerfile asks for."""
    try:
        api.inspect_image(name)
        return  # another attempt was faster
    except _package().errors.ImageNotFound:
        pass
    context = files.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for entry in sorted(os.listdir(folder)):
            tar.add(os.path.join(folder, entry), entry, filter=_for_all)
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
        if text:
            last = text.splitlines()[-1]
            aside.say(f"building the image {name}: {last}")


def _for_all(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """The state folder is private; an image's users are others."""
    if "__pycache__" in member.name:
        return None
    member.mode = 0o755 if member.isdir() else 0o644
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _logs(api: Any, container: str, follow: bool, aside: _Aside) -> None:
    """The engine's record of the output from its start, in frames."""
    url = f"{api.base_url}/v{api.api_version}/containers/{container}/logs"
    params = {"stdout": 1, "stderr": 1, "follow": int(follow), "timestamps": 1}
    with api.get(url, params=params, stream=True, timeout=None) as response:
        for block in response.iter_content(None):
            aside.pass_on(block)


# --- small things -------------------------------------------------------------------------------


def _read(fd: int) -> bytes | None:
    """What can be read now; None when that is nothing yet, empty at the end."""
    try:
        return os.read(fd, _READ)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _read_next(fd: int) -> bytes:
    """What comes next; nothing at the end."""
    select.select([fd], [], [])
    return _read(fd) or b""


def _as_it_is(lines: list[bytes]) -> list[bytes]:
    return lines


def _as_engine(error: BaseException) -> str:
    return f"Error response from daemon: {error}" if isinstance(error, Refused) else str(error)


def _is_passing(text: str) -> bool:
    """Failures of a bridge that is busy with other starts."""
    return any(word in text.lower() for word in ("network", "bridge", "endpoint", "veth"))


def _innermost(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return str(error)


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


# --- at the server's start ----------------------------------------------------------------------


def sweep(home: str, attempts: str) -> int:
    """Remove containers of a state folder whose attempt is over or forgotten; their number."""
    api = _client("")
    errors = _package().errors
    mine = {"label": f"batchml.home={home}"}
    removed = 0
    for found in api.containers(all=True, filters=mine):
        folder = os.path.join(attempts, os.path.basename(found["Labels"].get("batchml.task", "")))
        if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "exit.json")):
            continue
        try:
            api.remove_container(found["Id"], v=True, force=True)
            removed += 1
        except errors.APIError:
            pass  # its runner was faster
    for network in api.networks(filters=mine):
        try:
            api.remove_network(network["Id"])
        except errors.APIError:
            pass  # in use
    return removed


if __name__ == "__main__":
    print(json.dumps({"removed": sweep(*sys.argv[1:3])}))
