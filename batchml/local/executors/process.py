"""Attempts as processes of this machine: no isolation, the same user as the server.

Each attempt has a runner (`runner.py`) that outlives the server. What a runner has done is read
from its files; a signal through a named pipe only says when to look.
"""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.clock import Clock
from batchml.local.executors.spec import Host, NoEnvironment, runner_spec
from batchml.local.home import read_record
from batchml.local.messages import Ended, Event, Exit, Noted, Started
from batchml.local.state import Attempt, Job
from batchml.runtime.processes import descendants, send, start_time

log = logging.getLogger("batchml.local")

RUNNER_LOST = "Host EC2 (instance this-machine) terminated: the runner of this attempt is gone."

_KILL_LIMIT = 30.0  # seconds for what a lost runner left behind to die

_PACKAGE_ROOT = str(Path(__file__).parents[3])
_START = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from batchml.local.executors.runner import main; main()"
)


class _Identity(Struct, frozen=True):
    """A runner, as it says itself: a bare pid may by now be somebody else's."""

    pid: int
    start_time: int | None = None


class _Started(Struct, frozen=True):
    at: int  # ms


class ProcessExecutor:
    """Starts attempts, adopts those of a server before this one, and reports what they do."""

    def __init__(
        self,
        host: Host,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        report: Callable[[Event], None],
    ) -> None:
        self._host = host
        self._home = host.home
        self._loop = loop
        self._clock = clock
        self._report = report
        self._watched: dict[str, int] = {}  # task id -> pidfd of its runner
        self._labels: dict[str, str] = {}
        self._seen: dict[str, object] = {}  # what was reported of attempts that are starting
        self._to_stop: set[str] = set()
        _make_pipe(self._home.notify)
        # Opened for writing as well, so that it never reads as closed.
        self._pipe = os.open(self._home.notify, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(self._pipe, self._notified)

    def close(self) -> None:
        """Let go of everything; the attempts go on."""
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        for pidfd in self._watched.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._watched.clear()

    # --- what the engine asks for -----------------------------------------------------------

    def start(self, job: Job, attempt: Attempt) -> None:
        """Start an attempt. What prevents it is reported as its end, and never ends the server."""
        try:
            self._start(job, attempt)
        except NoEnvironment as error:
            self._end(attempt.task_id, Exit(start_failure=str(error)))
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("attempt %s of job %s cannot start", attempt.number, job.id)
            self._end(attempt.task_id, Exit(start_failure=f"CannotCreateContainerError: {error}"))

    def _start(self, job: Job, attempt: Attempt) -> None:
        folder = self._home.attempt(attempt.task_id)
        spec = runner_spec(self._host, job, attempt)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The runner inherits this hold, so there is no moment at which it lives without it, and
        # no two servers can start the same attempt twice.
        lock = _take(folder / "lock", os.O_CREAT)
        if lock is None:
            self._loop.call_later(0.05, self.adopt, job, attempt)
            return
        try:
            shutil.rmtree(folder / "work", ignore_errors=True)  # fresh for each attempt
            (folder / "work").mkdir(mode=0o700)
            for name in ("BATCHML_OUTPUT_DIR", "BATCHML_CHECKPOINT_DIR", "BATCHML_WORKSPACE"):
                Path(spec["env"][name]).mkdir(mode=0o700, parents=True, exist_ok=True)
            # Not synced: after a power cut an attempt without `runner.json` is prepared again.
            (folder / "spec.json").write_text(json.dumps(spec), "ascii")
            runner = _spawn(folder, lock)
        finally:
            os.close(lock)
        self._labels[attempt.task_id] = spec.get("label", "")
        self._watch(attempt.task_id, _Identity(runner))

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Take over an attempt that an earlier server started, whatever has become of it."""
        task_id = attempt.task_id
        folder = self._home.attempt(task_id)
        alive = self._is_alive(task_id)  # first: a runner writes its record, then dies
        identity = read_record(folder / "runner.json", _Identity)
        if (folder / "exit.json").exists():
            self._read_exit(task_id)
        elif alive and identity is None:  # it has its lock, and will write this next
            self._loop.call_later(0.05, self.adopt, job, attempt)
        elif alive and identity is not None:
            self._labels[task_id] = str(_read_spec(folder).get("label", ""))
            self._watch(task_id, identity)
            self.look(task_id)
        elif not (folder / "runner.json").exists():
            self.start(job, attempt)  # acknowledged, but its runner never came to life
        else:
            self._lost(task_id)

    def stop(self, task_id: str) -> None:
        """TERM to the runner, which gives the attempt its grace."""
        self._to_stop.add(task_id)  # for a runner that is not watched yet
        pidfd = self._watched.get(task_id)
        if pidfd is not None:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            except ProcessLookupError:
                pass  # it is ending already

    def look(self, task_id: str) -> None:
        """Report what an attempt has done since the last look."""
        folder = self._home.attempt(task_id)
        started = read_record(folder / "started", _Started)
        if started is not None:
            if self._seen.get(task_id) != started:
                self._seen[task_id] = started
                self._report(Started(task_id, started.at))
            return
        text = _last_line(folder / "progress")
        if text and self._seen.get(task_id) != text:
            self._seen[task_id] = text
            label = self._labels.get(task_id, "")
            self._report(Noted(task_id, f"Making the environment {label}: {text}", self._now()))

    # --- what the runners tell --------------------------------------------------------------

    def _notified(self) -> None:
        try:
            told = os.read(self._pipe, 65_536)
        except BlockingIOError:
            return
        for task_id in set(told.decode("ascii", "replace").split()):
            if task_id in self._watched:
                self.look(task_id)

    def _watch(self, task_id: str, runner: _Identity) -> None:
        try:
            pidfd = os.pidfd_open(runner.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._after_runner, task_id)
            return
        if runner.start_time not in (None, start_time(runner.pid)):
            os.close(pidfd)
            self._loop.call_soon(self._after_runner, task_id)
            return
        self._watched[task_id] = pidfd
        self._loop.add_reader(pidfd, self._gone, task_id, runner.pid)
        if task_id in self._to_stop:
            self.stop(task_id)

    def _gone(self, task_id: str, pid: int) -> None:
        pidfd = self._watched.pop(task_id)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass  # an adopted runner is not our child
        self._after_runner(task_id)

    def _after_runner(self, task_id: str) -> None:
        self.look(task_id)
        if (self._home.attempt(task_id) / "exit.json").exists():
            self._read_exit(task_id)
        else:
            self._lost(task_id)

    def _read_exit(self, task_id: str) -> None:
        exit_ = read_record(self._home.attempt(task_id) / "exit.json", Exit)
        if exit_ is None:
            log.error("exit.json of attempt %s is not an exit record", task_id)
            self._lost(task_id)
        else:
            self._end(task_id, exit_)

    def _lost(self, task_id: str, until: float = 0.0, looked: bool = False) -> None:
        """The runner died without a record: nothing of its attempt may live on.

        Done after two looks in a row that find nothing: one alone misses a process that is just
        being replaced by another (exec), or that forks and dies while the list is read.
        """
        left = tagged(task_id)
        if not (looked and not left):
            until = until or self._loop.time() + _KILL_LIMIT
            send(left, signal.SIGSTOP)  # whoever is stopped cannot fork while others are killed
            send(left, signal.SIGKILL)
            if self._loop.time() < until:
                self._loop.call_later(0.02, self._lost, task_id, until, not left)
                return
            log.error("processes %s of attempt %s cannot be killed", left, task_id)
        self._end(task_id, Exit(lost=RUNNER_LOST, stopped_at=self._now()))

    def _end(self, task_id: str, exit_: Exit) -> None:
        self._seen.pop(task_id, None)
        self._labels.pop(task_id, None)
        self._to_stop.discard(task_id)
        self._report(Ended(task_id, exit_, self._now()))

    def _is_alive(self, task_id: str) -> bool:
        """True while a runner holds the attempt's lock; a dead one cannot."""
        try:
            lock = _take(self._home.attempt(task_id) / "lock")
        except FileNotFoundError:
            return False
        if lock is None:
            return True
        os.close(lock)
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


def _spawn(folder: Path, lock: int) -> int:
    """Start the runner of an attempt, with the hold on its lock; its pid."""
    # TERM is blocked until the runner is ready for it, so an early stop is not lost on it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with open(folder / "runner.err", "ab") as errors:
            runner = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, str(folder), str(lock)],
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, cwd="/",
                start_new_session=True, pass_fds=[lock],
            )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    runner.returncode = 0  # reaped in `_gone`
    return runner.pid


def _take(path: Path, flags: int = 0) -> int | None:
    """The descriptor of a lock file that is now held, or None when someone else holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _make_pipe(path: Path) -> None:
    """The named pipe by which runners call; that of an earlier server will do."""
    try:
        if stat.S_ISFIFO(path.lstat().st_mode):
            return
        path.unlink()
    except FileNotFoundError:
        pass
    os.mkfifo(path, 0o600)


def _read_spec(folder: Path) -> dict[str, Any]:
    return read_record(folder / "spec.json", dict[str, Any]) or {}


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""
