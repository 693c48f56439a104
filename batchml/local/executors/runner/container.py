"""Attempts that are containers: start and follow them, determine their exit, remove them.

Runs in a runner, which outlives the server. The container outlives the runner: the next runner
(`resume`) finds it by its name, and reads the output that the log lacks. The engine may be
restarted meanwhile; every call is retried until it answers.
"""

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from batchml.local.executors import docker
from batchml.local.executors.docker import DockerEngine, EngineRefused, EngineUnreachable
from batchml.local.executors.mounts import AttemptNotStarted
from batchml.local.executors.runner.container_setup import (
    ContainerSetup,
    describe_error,
    has_runtime,
)
from batchml.local.executors.runner.files import now_ms
from batchml.local.executors.runner.link import (
    HOST_LOST,
    AttemptIo,
    AttemptWithdrawn,
    BackgroundCall,
    FrameDecoder,
    RecordedFrameDecoder,
    UnloggedLines,
    logged_lines,
    read_next,
    read_now,
)
from batchml.runtime.processes import send, start_time
from batchml.runtime.storage.files import read_json, write_json

PATIENCE = 60.0  # seconds for the engine to answer before an attempt has started
GONE_AFTER = 600.0  # seconds without an answer until a running attempt counts as lost

_RETRY_AFTER = 0.2
_TAIL_LIMIT = 10.0  # seconds without output after the exit until the engine's record is read
_GONE = HOST_LOST + "the container of this attempt is gone."
_RESTARTED = HOST_LOST + "the Docker engine was restarted, which ended the container."
_BY_HAND = HOST_LOST + "the container was restarted by hand."
_NO_COMMAND = 127  # exit code of an init process whose program is missing
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LACKS_PYTHON = (
    "{image} has no {python}. batchml's runtime, which unpacks the code of a run and starts its "
    "program, is written in Python. Install {python} in the image."
)


class ContainerAttempts:
    """The kind `container`. Slow imports are done before the first attempt comes."""

    to_delete = ""
    keeps_process = False

    def __init__(self) -> None:
        threading.Thread(target=docker.package, daemon=True).start()

    def run(self, spec: dict[str, Any], io: AttemptIo) -> dict[str, Any]:
        """Run an attempt to its end; the exit record."""
        engine = DockerEngine(spec.get("engine", ""), io, float(spec.get("patience", PATIENCE)))
        attempt = _ContainerAttempt(spec, io, engine)
        try:
            ended = attempt.run()
        except AttemptNotStarted as error:
            ended = {"code": None, "start_failure": str(error)}
        except AttemptWithdrawn:
            attempt.remove_container()
            raise
        except EngineUnreachable as error:
            attempt.kill_by_pid()
            ended = {"code": None, "lost": f"{HOST_LOST}{error}"}
        except Exception as error:  # an error of batchml: the attempt must not run unattended
            traceback.print_exc()
            ended = {"code": None, "lost": f"{HOST_LOST}{type(error).__name__}: {error}"}
        attempt.remove(ended)
        return ended

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class _ContainerAttempt:
    def __init__(self, spec: dict[str, Any], io: AttemptIo, engine: DockerEngine) -> None:
        self._spec = spec
        self._io = io
        self._engine = engine
        self._setup = ContainerSetup(spec, io, engine)
        self._id = spec["name"]
        self._started_at: int | None = None
        self._stop_signal = "SIGTERM"
        self._has_term = False
        self._process: tuple[int, int | None] = (0, None)

    def run(self) -> dict[str, Any]:
        before: dict[str, Any] | None = read_json(self._path("container.json"))
        if before is not None:  # an earlier runner died before it could report this exit
            return before
        if not self._spec.get("resume"):  # else it may have run, so it is not created again
            self._setup.create()
        found = self._find()
        if found is None:
            return {"code": None, "lost": _GONE}
        self._stop_signal = found["Config"].get("StopSignal") or self._stop_signal
        writes_marks = has_runtime(found["Config"])
        if found["State"]["Status"] != "created":  # another runner has started it: follow it
            self._note_start(found)
            recorded = RecordedFrameDecoder(escape=not writes_marks)
            return self._determine_exit(self._read_again(recorded))
        with self._attach() as output:
            self._io.wait_to_begin()
            self._io.write_preamble(self._spec["preamble"])
            self._start()
            decoder = FrameDecoder(escape=not writes_marks)
            return self._determine_exit(self._follow(output, decoder))

    def _path(self, name: str) -> str:
        return os.path.join(self._io.folder, name)

    # --- Before the program runs ------------------------------------------------------------

    def _attach(self) -> "_Output":
        """The container's output from its first byte on: attached before the start."""
        params = {"stdout": 1, "stderr": 1, "stream": 1}
        sock = self._setup.ask(lambda api: api.attach_socket(self._id, params), "started")
        return _Output(sock.fileno(), sock.close)

    def _start(self) -> None:
        """Start the container. The engine's network may fail when many start, so this is tried
        twice.
        """
        self._setup.mounts.open()
        for last in (False, True):
            self._setup.check_stop("CannotStartContainerError")
            try:
                self._setup.ask(lambda api: api.start(self._id), "started")
                break
            except EngineRefused as error:
                if last or not _is_temporary(str(error)):
                    why = self._lacks_python(self._find() or {}) or describe_error(error)
                    raise AttemptNotStarted(f"CannotStartContainerError: {why}") from error
                if self._spec.get("network"):
                    self._setup.make_network()
        container = self._find() or {}
        if container:
            self._setup.mounts.check(int(container["State"]["Pid"]), container["Id"])
        self._setup.mounts.close()
        self._note_start(container)

    def _note_start(self, container: Mapping[str, Any]) -> None:
        state = container.get("State") or {}
        pid = int(state.get("Pid", 0))
        self._process = (pid, start_time(pid) if pid else None)
        self._io.while_waiting = self._send_due_signals
        # From now on a silent engine does not end the attempt soon.
        self._started_at = at = _ms(state["StartedAt"]) if state else now_ms()
        self._engine.patience = float(self._spec.get("gone", GONE_AFTER))
        self._engine.was_gone = False
        network = self._spec.get("network")
        if network:
            joined = (container.get("NetworkSettings") or {}).get("Networks") or {}
            self._io.report_started(at, str(joined.get(network["name"], {}).get("IPAddress", "")))
        else:
            self._io.report_started(at)

    # --- While it runs ----------------------------------------------------------------------

    def _find(self) -> dict[str, Any] | None:
        try:
            return dict(self._engine.ask(lambda api: api.inspect_container(self._id)))
        except EngineRefused as error:
            if error.status == 404:
                return None
            raise

    def _read_again(self, decoder: RecordedFrameDecoder) -> int | None:
        """Follow the engine's own record of the output, after the part that the log contains.

        A followed record may end without its last line, so it is read once more.
        """
        with self._open_record(follow=True) as output:
            code = self._follow(output, decoder, UnloggedLines(logged_lines(self._path("log"))))
        self._read_rest(decoder.recorded())
        return code

    def _read_rest(self, decoder: RecordedFrameDecoder) -> None:
        """Write the output in the engine's own record that the log lacks."""
        unseen = UnloggedLines(logged_lines(self._path("log")))
        with self._open_record(follow=False) as output:
            while data := read_next(output.fd):
                self._io.write(unseen.feed(decoder.feed(data)))
        self._io.write(unseen.feed(decoder.finish()))
        self._io.write(unseen.finish())

    def _open_record(self, *, follow: bool) -> "_Output":
        """The engine's record of the output, from its start; `follow`: until the container ends."""
        call = BackgroundCall(
            lambda call: self._engine.once(
                lambda api: docker.read_output(api, self._id, follow, call)
            )
        )
        return _Output(call.pipe, call.close)

    def _follow(
        self, output: "_Output", decoder: FrameDecoder, unseen: UnloggedLines | None = None
    ) -> int | None:
        """Copy the output until the container has ended; its exit code if the engine knows it."""
        waiter = BackgroundCall(
            lambda _: self._engine.once(lambda api: api.wait(self._id, timeout=None))
        )
        keep = unseen.feed if unseen else _as_it_is
        sources = {output.fd, waiter.pipe, self._io.wake}
        last = 0.0  # time of the exit, or of the last output after it
        is_cut = False  # the end of the output is missing
        while output.fd in sources or waiter.pipe in sources:
            over = waiter.pipe not in sources
            ready, _, _ = select.select(sources, [], [], 1.0 if over else self._send_due_signals())
            if self._io.wake in ready:
                self._io.drain()
            if waiter.pipe in ready:
                sources.discard(waiter.pipe)
                last = time.monotonic()
                if _is_interrupted(waiter):
                    break
            if output.fd in ready:
                data = read_now(output.fd)
                self._io.write(keep(decoder.feed(data or b"")))
                last = time.monotonic()
                if data == b"":
                    sources.discard(output.fd)
            elif over and time.monotonic() > last + _TAIL_LIMIT:
                is_cut = True
                break
        waiter.close()
        try:
            code = int(waiter.result()["StatusCode"])
        except EngineRefused:
            code = None  # the container was removed by hand
        except Exception:
            self._engine.was_gone = True
            if self._find() is not None:  # waits until the engine answers again
                return self._read_again(decoder.recorded())
            code = None
        self._io.write(unseen.finish() if unseen else decoder.finish())
        if is_cut and unseen is None:
            self._read_rest(decoder.recorded())
        return code

    def _send_due_signals(self) -> float | None:
        """Send TERM once a stop is requested, KILL after the grace period; seconds until the next
        call.
        """
        since = self._io.stopping_since
        if since is None:
            return None
        if not self._has_term and since > 0:  # else there is no grace period
            self._has_term = self._signal(self._stop_signal)
        left = since + float(self._spec["grace"]) - time.monotonic()
        if left > 0:
            return left if self._has_term else min(left, _RETRY_AFTER)
        if not self._signal("SIGKILL"):
            self._try(lambda api: api.unpause(self._id))
        return 1.0

    def _signal(self, name: str) -> bool:
        return self._try(lambda api: api.kill(self._id, name))

    def _try(self, call: Callable[[Any], Any]) -> bool:
        try:
            self._engine.once(call)
        except (EngineRefused, EngineUnreachable):
            return False
        return True

    # --- After the program ------------------------------------------------------------------

    def _determine_exit(self, code: int | None) -> dict[str, Any]:
        container = self._find()
        state = container["State"] if container is not None else {}
        if code is None:
            code = state.get("ExitCode")
        if code is None:
            return {"code": None, "lost": _GONE, "started_at": self._started_at}
        if code == _NO_COMMAND and (why := self._lacks_python(container or {})):
            return {"code": None, "start_failure": f"CannotStartContainerError: {why}"}
        if code == 0 and self._was_started_again(state):
            # The engine's answer is about the new start, which has not ended, so its exit code is
            # 0.
            return {"code": None, "lost": _BY_HAND, "started_at": self._started_at}
        is_stopped = self._io.stopping_since is not None
        oom = bool(state.get("OOMKilled"))
        if oom and code == 0:
            text = "a process of this container was killed for memory; the first continued."
            self._io.write([f"batchml: {text}".encode()])
        if not (is_stopped or oom) and code in (137, 143, 255) and self._was_cut_off(state):
            return {"code": None, "lost": _RESTARTED, "started_at": self._started_at}
        return {
            "code": code,
            "signal": code - 128 if 128 < code <= 128 + signal.NSIG else 0,
            "oom": oom and code != 0 and not is_stopped,
            "started_at": self._started_at,
        }

    def _lacks_python(self, container: Mapping[str, Any]) -> str:
        """The error if batchml's runtime must start the program and the image has no Python."""
        config = container.get("Config") or {}
        if not has_runtime(config):
            return ""
        python = config["Entrypoint"][0]
        env = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
        search = env.get("PATH", _USUAL_PATH)
        try:
            exists = self._engine.once(
                lambda api: docker.has_program(api, self._id, python, search)
            )
        except (EngineRefused, EngineUnreachable):
            return ""
        return "" if exists else _LACKS_PYTHON.format(python=python, image=config["Image"])

    def _was_started_again(self, state: Mapping[str, Any]) -> bool:
        """Whether somebody restarted this container by hand: `docker restart`."""
        began = str(state.get("StartedAt", ""))
        return bool(began) and self._started_at is not None and _ms(began) > self._started_at

    def _was_cut_off(self, state: Mapping[str, Any]) -> bool:
        """Whether the engine or the machine was restarted while the container ran.

        If no runner observed the restart, a container that had ended by itself before looks the
        same. In doubt this returns True, because a retry does less harm than a wrong exit.
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
        """In ms; 0 where it is unknown.

        The engine recreates its default bridge at its start, unless containers have continued (with
        `live-restore`): then this is the time of an earlier start, before the containers'.
        """
        try:
            network = self._engine.once(lambda api: api.inspect_network("bridge"))
        except (EngineRefused, EngineUnreachable):
            return 0
        return _ms(network["Created"])

    def remove(self, ended: Mapping[str, Any]) -> None:
        """Store the exit for a next runner, then remove the container, and its network with the
        last node. The sweeper removes leftovers.
        """
        try:
            write_json(self._path("container.json"), ended)
        except OSError:
            pass  # full disk: it matters only if this runner is killed now
        self.remove_container()

    def remove_container(self) -> None:
        self._setup.mounts.close()
        self._try(lambda api: api.remove_container(self._id, v=True, force=True))
        network = self._spec.get("network")
        if network:
            self._try(lambda api: api.remove_network(network["name"]))

    def kill_by_pid(self) -> None:
        """Kill the container's first process, which ends the container, when the engine does not
        answer any more.
        """
        pid, started = self._process
        if pid and started is not None and start_time(pid) == started:
            send([pid], signal.SIGKILL)


class _Output:
    """A descriptor from which the engine's frames can be read."""

    def __init__(self, fd: int, close: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.close = close

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_interrupted(waiter: BackgroundCall) -> bool:
    """Whether the wait ended without an answer, as when the engine is restarted."""
    return waiter.error is not None and not isinstance(waiter.error, EngineRefused)


def _as_it_is(lines: list[bytes]) -> list[bytes]:
    return lines


def _is_temporary(text: str) -> bool:
    """Whether a bridge that is busy with other starts caused a failure."""
    return any(word in text.lower() for word in ("network", "bridge", "endpoint", "veth"))


def _booted_at() -> int:
    """When this machine was started, in ms; 0 where it is unknown."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            times = [line.split()[1] for line in file if line.startswith("btime ")]
    except OSError:
        times = []
    return int(times[0]) * 1000 if times else 0


def _ms(text: str) -> int:
    """`2026-11-21T12:09:22.166918183Z` in ms since the epoch."""
    moment = datetime.fromisoformat(text)
    return int(moment.timestamp()) * 1000 + moment.microsecond // 1000
