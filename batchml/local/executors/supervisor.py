"""Attempts of any kind, each in the care of a runner: started, adopted, stopped, reported.

Runners outlive the server (`runner.py`), and are used again (`pool.py`). What one has done is read
from its files; what it says only saves the server from looking.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.clock import Clock
from batchml.local.executors import cgroup
from batchml.local.executors.pool import Pool, Runner
from batchml.local.executors.pool_folders import Folders
from batchml.local.executors.spec import NoEnvironment
from batchml.local.home import Home, read_record
from batchml.local.messages import Ended, Event, Exit, Noted, Started
from batchml.local.state import Attempt, Job
from batchml.runtime.files import write_atomically
from batchml.runtime.processes import boot_id, descendants, send, start_time

log = logging.getLogger("batchml.local")

RUNNER_LOST = "Host EC2 (instance this-machine) terminated: the runner of this attempt is gone."

_KILL_LIMIT = 30.0  # seconds for what a lost runner left behind to die
_START_TRIES = 3  # runners that may die before they have begun with an attempt
_TRY_AGAIN = 0.2  # seconds, when the system has no room for a runner
_WARM_AFTER = 0.3  # seconds from the server's start to that of its first runner

# What stands in the way now and will not for ever: no room for files, processes or memory.
_MAY_PASS = (
    errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT,
)  # fmt: skip

SpecOf = Callable[[Job, Attempt], dict[str, Any]]
Ahead = Callable[[Job, Attempt], Coroutine[Any, Any, dict[str, Any]] | None]


class _Record(Struct, frozen=True):
    """A runner, as it says itself: a bare pid may by now be somebody else's."""

    pid: int
    start_time: int | None = None
    boot_id: str = ""
    groups: list[str] = []
    label: str = ""
    started_at: int | None = None  # ms
    address: str = ""


class _Starting(Struct):
    """An attempt that has been given to a runner, and how often."""

    job: Job
    attempt: Attempt
    tries: int = 0
    label: str = ""
    kind: str = "process"


class Executor:
    """Starts attempts, adopts those of a server before this one, and reports what they do.

    `spec_of` says what a runner is told; its `kind` chooses the runner: `process` or `container`.
    `ahead` makes the spec of those attempts for which that takes time.
    """

    def __init__(
        self,
        home: Home,
        environ: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        report: Callable[[Event], None],
        spec_of: SpecOf,
        ahead: Ahead | None = None,
    ) -> None:
        self._home = home
        self._loop = loop
        self._clock = clock
        self._report = report
        self._spec_of = spec_of
        self._ahead = ahead
        self._attempts = str(home.attempts)
        self._starting: dict[str, _Starting] = {}  # by task id: those that this server started
        self._running: dict[str, Runner] = {}  # by task id
        self._adopted: dict[str, int] = {}  # by task id: pidfds of other servers' runners
        self._labels: dict[str, str] = {}
        self._seen: dict[str, object] = {}  # what was reported of attempts that are starting
        self._to_stop: set[str] = set()
        self._to_kill: set[str] = set()
        self._making: dict[str, asyncio.Task[dict[str, Any]]] = {}  # specs, by task id
        self._closed = False
        self._shared: set[str] = set()  # folders that all attempts share, made
        self._rebooted = _note_boot(home.local / "boot")
        groups = self._groups()
        self._pool = Pool(
            loop, groups, home.local / "runners.log", environ, self._said, self._runner_gone
        )
        self._folders = Folders(str(home.local / "stock"))
        loop.call_later(_WARM_AFTER, self._warm)

    def _groups(self) -> cgroup.Groups:
        """Where slots are made. What runners of earlier servers left in theirs is killed."""
        groups = cgroup.find(str(self._home.root))
        noted = self._home.local / "groups.json"
        before = read_record(noted, dict[str, str]) or {}
        for found in (before, groups):
            killed = cgroup.sweep(found)
            if killed:
                log.warning("killed processes %s, whose runners were gone", killed)
        if groups != before:
            noted.write_bytes(msgspec.json.encode(groups))
        if not groups:
            log.warning(
                "control groups may not be written here: vCPUs and memory are counted, not enforced"
            )
        return groups

    def _warm(self) -> None:
        if not self._closed:
            self._pool.warm("process")
            self._folders.fill()

    def close(self) -> None:
        """Let go of everything; the attempts go on."""
        self._closed = True
        for making in self._making.values():
            making.cancel()
        self._pool.close()
        self._folders.close()
        cgroup.forget(self._pool.groups)  # else the last runner does it
        for pidfd in self._adopted.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._adopted.clear()

    # --- what the engine asks for -----------------------------------------------------------

    def start(self, job: Job, attempt: Attempt) -> None:
        """Start an attempt. What prevents it is reported as its end, and never ends the server."""
        self._begin(_Starting(job, attempt))

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Take over an attempt that an earlier server started, whatever has become of it."""
        if self._closed:
            return
        task_id = attempt.task_id
        folder = self._home.attempt(task_id)
        alive = self._is_alive(task_id)  # first: a runner writes its record, then dies
        record = read_record(folder / "runner.json", _Record)
        if (folder / "exit.json").exists():
            self._read_exit(task_id)
        elif alive and record is None:  # it has its lock, and will write this next
            self._loop.call_later(0.05, self.adopt, job, attempt)
        elif alive and record is not None:
            self._labels[task_id] = record.label
            self._watch(task_id, record, _Starting(job, attempt))
            self.look(task_id)
        elif record is not None or self._rebooted:
            # After a power cut an empty record proves nothing.
            self._lost(task_id, _Starting(job, attempt))
        else:
            self.start(job, attempt)  # acknowledged, but its runner never began

    def stop(self, task_id: str) -> None:
        """Have the runner give the attempt its grace."""
        self._to_stop.add(task_id)  # for an attempt that has no runner yet
        if task_id in self._making:
            self._making[task_id].cancel()
        runner = self._running.get(task_id)
        if runner is not None:
            runner.send({"stop": task_id})
        self._signal(task_id, signal.SIGTERM)

    def lose(self, task_id: str, why: str, *, warned: bool) -> None:
        """Rehearse the loss of the attempt's host: `warned` is a stop, else nothing has a grace."""
        if warned:
            self.stop(task_id)
            return
        try:
            line = f"batchml: rehearsal: {why}"
            (self._home.attempt(task_id) / "rehearsal").write_text(line, "utf-8")
        except OSError:
            pass  # full disk: the attempt is lost all the same
        self._to_kill.add(task_id)  # for a runner that dies meanwhile
        runner = self._running.get(task_id)
        if runner is not None:
            runner.send({"kill": task_id})
        self._signal(task_id, signal.SIGUSR1)

    def _signal(self, task_id: str, number: int) -> None:
        """To the runner of an earlier server, which hears nothing else."""
        pidfd = self._adopted.get(task_id)
        if pidfd is not None:
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                pass  # it is ending already

    def look(self, task_id: str) -> None:
        """Report what an attempt has done since the last look."""
        folder = self._home.attempt(task_id)
        record = read_record(folder / "runner.json", _Record)
        if record is not None and record.started_at is not None:
            self._started(task_id, record.started_at, record.address)
            return
        text = _last_line(folder / "progress")
        if text:
            self._noted(task_id, text)

    # --- starting ---------------------------------------------------------------------------

    def _begin(self, starting: _Starting, *, resume: bool = False) -> None:
        job, attempt = starting.job, starting.attempt
        if self._closed:
            return
        making = self._ahead(job, attempt) if self._ahead is not None else None
        if making is None:
            self._begin_with(starting, resume, lambda: self._spec_of(job, attempt))
            return
        task = self._loop.create_task(making)
        self._making[attempt.task_id] = task
        task.add_done_callback(lambda _: self._made(starting, resume, task))

    def _made(self, starting: _Starting, resume: bool, task: asyncio.Task[dict[str, Any]]) -> None:
        """A spec that took its time is there, or cannot be made, or is not wanted any more."""
        task_id = starting.attempt.task_id
        self._making.pop(task_id, None)
        if self._closed:
            return
        failed = task.cancelled() or task.exception() is not None
        if failed and resume:  # its container is there: it must not be left alone
            self._lost(task_id, starting)
        elif task.cancelled():
            text = "CannotStartContainerError: stopped before the program started"
            self._end(task_id, Exit(start_failure=text))
        else:
            self._begin_with(starting, resume, task.result)

    def _begin_with(
        self, starting: _Starting, resume: bool, make_spec: Callable[[], dict[str, Any]]
    ) -> None:
        task_id = starting.attempt.task_id
        try:
            self._give_to_a_runner(starting, resume, make_spec())
        except NoEnvironment as error:
            self._end(task_id, Exit(start_failure=str(error)))
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _MAY_PASS:
                if starting.tries == 0:
                    log.warning("attempt %s waits for the system: %s", task_id, error)
                starting.tries = -1
                self._loop.call_later(_TRY_AGAIN, lambda: self._begin(starting, resume=resume))
                return
            if not isinstance(error, OSError):
                number, job_id = starting.attempt.number, starting.job.id
                log.exception("attempt %s of job %s cannot start", number, job_id)
            self._end(task_id, Exit(start_failure=f"CannotCreateContainerError: {error}"))

    def _give_to_a_runner(self, starting: _Starting, resume: bool, spec: dict[str, Any]) -> None:
        job, attempt = starting.job, starting.attempt
        task_id = attempt.task_id
        if resume:
            spec["resume"] = True
        folder = f"{self._attempts}/{task_id}"
        self._folders.put(folder)
        for path in spec.get("shared", ()):
            self._make_once(path)
        # The runner gets this hold, so there is no moment at which it lives without it, and no
        # two servers can start the same attempt twice.
        record = _take(f"{folder}/runner.json", os.O_CREAT)
        if record is None:
            self._loop.call_later(0.05, self.adopt, job, attempt)
            return
        try:
            starting.kind = spec.get("kind", "process")
            starting.label = spec.get("label", "")
            runner = self._pool.take(starting.kind)
            runner.task_id = task_id
            self._starting[task_id] = starting
            self._running[task_id] = runner
            if starting.label:
                self._labels[task_id] = starting.label
            if not runner.send({"folder": folder, "spec": spec}, record):
                # It is dead, or does not listen: then it will be, and the attempt gets another.
                os.kill(runner.pid, signal.SIGKILL)
        finally:
            os.close(record)
        if task_id in self._to_stop:
            runner.send({"stop": task_id})
        if task_id in self._to_kill:
            runner.send({"kill": task_id})

    def _make_once(self, path: str) -> None:
        if path not in self._shared:
            os.makedirs(path, 0o700, exist_ok=True)
            self._shared.add(path)

    # --- what the runners tell --------------------------------------------------------------

    def _said(self, runner: Runner, message: dict[str, Any]) -> None:
        task_id = message.get("task_id", "")
        if "idle" in message:
            self._pool.free(runner)
        elif self._running.get(task_id) is not runner:
            log.warning(
                "runner %s speaks of attempt %s, which it does not have", runner.pid, task_id
            )
        elif "ended" in message:
            del self._running[task_id]
            # Before the end is reported: what is started next wants a runner.
            runner.task_id = ""
            if "busy" not in message:
                self._pool.free(runner)
            self._end(task_id, msgspec.convert(message["ended"], Exit))
        elif "started" in message:
            self._started(task_id, message["started"], message.get("address", ""))
        elif "progress" in message:
            self._noted(task_id, message["progress"])

    def _runner_gone(self, runner: Runner) -> None:
        if runner.task_id:
            self._running.pop(runner.task_id, None)
            self._after_runner(runner.task_id, self._starting[runner.task_id])

    def _started(self, task_id: str, at: int, address: str) -> None:
        if self._seen.get(task_id) != at:
            self._seen[task_id] = at
            self._report(Started(task_id, at, address))

    def _noted(self, task_id: str, text: str) -> None:
        if self._seen.get(task_id) != text:
            self._seen[task_id] = text
            label = self._labels.get(task_id, "")
            about = f"Making the environment {label}: {text}" if label else text
            self._report(Noted(task_id, about, self._now()))

    def _watch(self, task_id: str, record: _Record, starting: _Starting) -> None:
        """Wait for the end of a runner that another server started."""
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._after_runner, task_id, starting)
            return
        if record.start_time not in (None, start_time(record.pid)):
            os.close(pidfd)
            self._loop.call_soon(self._after_runner, task_id, starting)
            return
        self._adopted[task_id] = pidfd
        self._loop.add_reader(pidfd, self._adopted_gone, task_id, starting)
        if task_id in self._to_stop:
            self._signal(task_id, signal.SIGTERM)
        if task_id in self._to_kill:
            self._signal(task_id, signal.SIGUSR1)

    def _adopted_gone(self, task_id: str, starting: _Starting) -> None:
        pidfd = self._adopted.pop(task_id)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._after_runner(task_id, starting)

    def _after_runner(self, task_id: str, starting: _Starting) -> None:
        """A runner is gone: what has become of its attempt is in the files."""
        if self._closed:
            return
        self.look(task_id)
        folder = self._home.attempt(task_id)
        if (folder / "exit.json").exists():
            self._read_exit(task_id)
        elif _is_empty(folder / "runner.json") and starting.tries < _START_TRIES:
            starting.tries = max(starting.tries, 0) + 1
            self._begin(starting)
        else:
            self._lost(task_id, starting)

    def _read_exit(self, task_id: str) -> None:
        exit_ = read_record(self._home.attempt(task_id) / "exit.json", Exit)
        if exit_ is None:
            log.error("exit.json of attempt %s is not an exit record", task_id)
            self._kill_rest(task_id)
        else:
            self._end(task_id, exit_)

    def _lost(self, task_id: str, starting: _Starting) -> None:
        """The runner died without a record: its container goes on, of a process nothing may."""
        try:
            kind = self._spec_of(starting.job, starting.attempt).get("kind", "process")
        except Exception:
            kind = starting.kind
        if kind == "container" and starting.tries < _START_TRIES:
            starting.tries = max(starting.tries, 0) + 1
            log.warning("attempt %s has lost its runner and gets another", task_id)
            self._begin(starting, resume=True)
        else:
            self._kill_rest(task_id)

    def _kill_rest(self, task_id: str, until: float = 0.0, looked: bool = False) -> None:
        """Kill what a lost runner left behind, and report it lost.

        Done after two looks in a row that find nothing: one alone misses a process that is just
        being replaced by another (exec), or that forks and dies while the list is read.
        """
        record = read_record(self._home.attempt(task_id) / "runner.json", _Record)
        groups = record.groups if record is not None and record.boot_id == boot_id() else []
        left = cgroup.kill(groups) + tagged(task_id)
        if not (looked and not left):
            until = until or self._loop.time() + _KILL_LIMIT
            send(left, signal.SIGSTOP)  # whoever is stopped cannot fork while others are killed
            send(left, signal.SIGKILL)
            if self._loop.time() < until:
                self._loop.call_later(0.02, self._kill_rest, task_id, until, not left)
                return
            log.error("processes %s of attempt %s cannot be killed", left, task_id)
        self._end(task_id, Exit(lost=RUNNER_LOST, stopped_at=self._now()))

    def _end(self, task_id: str, exit_: Exit) -> None:
        self._starting.pop(task_id, None)
        self._seen.pop(task_id, None)
        self._labels.pop(task_id, None)
        self._to_stop.discard(task_id)
        self._to_kill.discard(task_id)
        self._report(Ended(task_id, exit_, self._now()))

    def _is_alive(self, task_id: str) -> bool:
        """True while a runner holds the attempt's record; a dead one cannot."""
        try:
            record = _take(f"{self._attempts}/{task_id}/runner.json")
        except FileNotFoundError:
            return False
        if record is None:
            return True
        os.close(record)
        return False

    def _now(self) -> int:
        return int(self._clock.now() * 1000)


def tagged(task_id: str) -> list[int]:
    """Processes that belong to an attempt: those with its variable in their environment, and
    those that descend from them, which may have cleared theirs.
    """
    found = []
    mark = f"BATCHML_TASK={task_id}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue
    return list(dict.fromkeys([*found, *descendants(*found)])) if found else []


def _note_boot(path: Path) -> bool:
    """True when the machine has started again since the last server of this state folder."""
    current = boot_id().encode()
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        before = b""
    if before != current:
        write_atomically(str(path), current)
    return before not in (b"", current)


def _take(path: str, flags: int = 0) -> int | None:
    """The descriptor of a file that is now locked, or None when someone else has locked it."""
    record = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(record)
        return None
    return record


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except FileNotFoundError:
        return True


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""
