"""The server's side of runners: start them when needed, use them again, end idle ones, and adopt
those of earlier servers.
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batchml.local.executors import cgroup
from batchml.local.executors.cgroup import Groups
from batchml.local.executors.record import RunnerRecord
from batchml.local.executors.runner.link import INLINE
from batchml.local.home import Home, read_record
from batchml.runtime.package import module_command, package_root
from batchml.runtime.processes import start_time

log = logging.getLogger("batchml.local")

IDLE_LIMIT = 20.0  # seconds until an unused runner ends
_LOOK_EVERY = 5.0  # seconds between two searches for idle runners
_BUFFER = 65_536
_SPARE = 2  # idle runners in addition to one for each CPU
_SOCKET = 3  # the descriptor of the socket in the runner
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_REMOVE_AGAIN = 0.05  # seconds


class Installation(NamedTuple):
    """The installation that runs the runners: a Python, and the folder with the package
    `batchml`.
    """

    python: str = sys.executable
    root: str = package_root()


OURS = Installation()


# Variables of the server that a runner receives. None of them reaches a job.
_PASSED_ON = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")
_FOR_DOCKER = ("DOCKER_", "XDG_", "SSH_AUTH_SOCK", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")

_decode = msgspec.json.Decoder().decode


class RunnerHandle:
    """A runner that this server started."""

    def __init__(self, kind: str, pid: int, server: socket.socket) -> None:
        self.kind = kind
        self.pid = pid
        self.started = start_time(pid)
        self.pidfd = os.pidfd_open(pid)
        self.socket: socket.socket | None = server
        self.task_id = ""  # of the attempt that it runs
        self.has_unread = False  # the runner died with unread messages in its socket
        self._last_sent: dict[str, Any] = {}
        self.version = ""  # the version of the runner's code, once it is ready to serve
        self.idle_since = 0.0

    def send(self, message: dict[str, Any], record: int | None = None) -> bool:
        """Send a message, and the descriptor of a locked record. False when the runner does not
        receive it.
        """
        if self.socket is None:
            return False
        data = msgspec.json.encode(message)
        files = [] if record is None else [record]
        if len(data) > INLINE:
            files.append(_anonymous_file(msgspec.json.encode(message["spec"])))
            data = msgspec.json.encode({**message, "spec": None})
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        try:
            self.socket.sendmsg([data], ancillary if files else [], socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            for file in files[1:]:
                os.close(file)
        self._last_sent = message
        return True

    def has_missed(self, message: dict[str, Any]) -> bool:
        """Whether a dead runner certainly did not read `message`: it was the last message, and not
        all messages were read.
        """
        return self.has_unread and self._last_sent == message

    def receive(self) -> dict[str, Any] | None:
        """The next message; None once the runner has closed the socket."""
        assert self.socket is not None
        try:
            data = self._read()
        except ConnectionResetError:  # reported once, before the remaining messages: unix(7)
            self.has_unread = True
            data = self._read()
        except ConnectionError:
            return None
        return dict(_decode(data)) if data else None

    def _read(self) -> bytes:
        assert self.socket is not None
        return self.socket.recv(_BUFFER, socket.MSG_DONTWAIT)


def _anonymous_file(content: bytes) -> int:
    """A file that is not on any disk, because a spec may contain secrets."""
    file = os.memfd_create("spec", os.MFD_CLOEXEC)
    while content:
        content = content[os.write(file, content) :]
    return file


class RunnerPool:
    """Runners by kind. `on_message` gets each message of a runner, `on_exit` each runner that has
    died.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        groups: Groups,
        errors: Path,
        environ: Mapping[str, str],
        on_message: Callable[[RunnerHandle, dict[str, Any]], None],
        on_exit: Callable[[RunnerHandle], None],
        installation: Installation = OURS,
    ) -> None:
        self.groups = groups
        self._installation = installation
        self._loop = loop
        self._errors = errors
        self._environ = environ
        self._on_message = on_message
        self._notify_exit = on_exit
        self._all: dict[int, RunnerHandle] = {}  # by pid
        self._idle: dict[str, list[RunnerHandle]] = {}  # by kind; the last runner is used next
        self._max_idle = (os.cpu_count() or 1) + _SPARE
        self._timer: asyncio.TimerHandle | None = None

    def take(self, kind: str) -> RunnerHandle:
        """An idle runner, or a new one. Raises OSError."""
        idle = self._idle.get(kind)
        while idle:
            runner = idle.pop()
            if runner.socket is not None:
                return runner
        return self._start(kind)

    def prestart(self, kind: str) -> None:
        """Start a runner unless there is one, so that a first job need not wait for it."""
        if not any(runner.kind == kind for runner in self._all.values()):
            try:
                self.give_back(self._start(kind))
            except OSError as error:
                log.warning("no runner can be started now: %s", error)

    def give_back(self, runner: RunnerHandle) -> None:
        """Make a runner available for another attempt."""
        runner.task_id = ""
        runner.idle_since = self._loop.time()
        idle = self._idle.setdefault(runner.kind, [])
        idle.append(runner)
        if len(idle) > self._max_idle:
            self._dismiss(idle.pop(0))
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_EVERY, self._end_idle)

    def close(self) -> None:
        """Disconnect from all runners: idle ones end, busy ones after their attempt."""
        if self._timer is not None:
            self._timer.cancel()
        for runner in list(self._all.values()):
            self._dismiss(runner)
            self._loop.remove_reader(runner.pidfd)
            os.close(runner.pidfd)
        self._all.clear()
        self._idle.clear()

    def _end_idle(self) -> None:
        """End the runners that have been idle for `IDLE_LIMIT`, except the last used one of each
        kind.
        """
        self._timer = None
        before = self._loop.time() - IDLE_LIMIT
        for idle in self._idle.values():
            while len(idle) > 1 and idle[0].idle_since < before:
                self._dismiss(idle.pop(0))
        if any(len(idle) > 1 for idle in self._idle.values()):
            self._timer = self._loop.call_later(_LOOK_EVERY, self._end_idle)

    def _dismiss(self, runner: RunnerHandle) -> None:
        """Close the socket of a runner, which then ends once it is idle."""
        if runner.socket is not None:
            self._loop.remove_reader(runner.socket)
            runner.socket.close()
            runner.socket = None

    def _start(self, kind: str) -> RunnerHandle:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = self._spawn(kind, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            runner = RunnerHandle(kind, pid, ours)
        except OSError:
            ours.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._all[pid] = runner
        self._loop.add_reader(ours, self._listen, runner)
        self._loop.add_reader(runner.pidfd, self._ended, runner)
        return runner

    def _spawn(self, kind: str, theirs: int) -> int:
        """Start a runner; its pid. Raises OSError with the name of the file that failed."""
        errors = os.open(self._errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return self._spawn_with(kind, theirs, errors)
        finally:
            os.close(errors)

    def _spawn_with(self, kind: str, theirs: int, errors: int) -> int:
        config = {"kind": kind, "socket": _SOCKET, "groups": self.groups}
        flags = ["-I"] if kind == "container" else ["-I", "-S"]  # -S hides the package `docker`
        python, root = self._installation
        program = module_command(python, "batchml.local.executors.runner.main", flags, root)
        words = [*program, json.dumps(config)]
        env = {
            name: value
            for name, value in self._environ.items()
            if name in _PASSED_ON or (kind == "container" and name.upper().startswith(_FOR_DOCKER))
        }
        # Stop signals are blocked until the runner handles them, so an early stop is not lost.
        return os.posix_spawn(
            python, words, env, setsid=True, setsigmask=(signal.SIGTERM,),
            setsigdef=_SIGNALS,
            file_actions=[
                # In this order: the socket or the file may have a number below 3.
                (os.POSIX_SPAWN_DUP2, errors, 1),
                (os.POSIX_SPAWN_DUP2, errors, 2),
                (os.POSIX_SPAWN_DUP2, theirs, _SOCKET),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            ],
        )  # fmt: skip

    def _listen(self, runner: RunnerHandle) -> None:
        """Receive one message. The event loop calls again while there are more."""
        if runner.socket is None:
            return
        try:
            message = runner.receive()
        except BlockingIOError:
            if runner.pid not in self._all:  # the runner is dead, and all messages were read
                self._dismiss(runner)
            return
        if message is None:  # the runner is dying, which its pidfd will report
            self._dismiss(runner)
        else:
            self._on_message(runner, message)

    def _ended(self, runner: RunnerHandle) -> None:
        """A runner is dead: read its last messages and clean up after it."""
        self._loop.remove_reader(runner.pidfd)
        os.close(runner.pidfd)
        self._all.pop(runner.pid, None)
        while runner.socket is not None:
            self._listen(runner)
        try:
            os.waitpid(runner.pid, os.WNOHANG)
        except ChildProcessError:
            pass
        for idle in self._idle.values():
            if runner in idle:
                idle.remove(runner)
        self._notify_exit(runner)
        self._remove_slot(cgroup.slot_name(runner.pid, runner.started))

    def _remove_slot(self, name: str, tries: int = 100) -> None:
        """Remove the slot of a dead runner that was killed. Other runners remove their slots
        themselves.
        """
        folders = [os.path.join(folder, name) for folder in self.groups.values()]
        if any(map(os.path.isdir, folders)):
            cgroup.kill(folders)
            if not cgroup.remove(folders, limit=0) and tries:
                self._loop.call_later(_REMOVE_AGAIN, self._remove_slot, name, tries - 1)


def prepare_groups(home: Home, identity: str) -> Groups:
    """Find the control groups for slots, and kill processes that lost runners left in theirs."""
    groups = cgroup.find(identity)
    before = read_record(home.groups, dict[str, str]) or {}
    for found in (cgroup.ours(before, identity), groups):
        killed = cgroup.remove_dead_slots(found)
        if killed:
            log.warning("killed processes %s, whose runners were gone", killed)
    if groups != before:
        home.groups.write_bytes(msgspec.json.encode(groups))
    if not groups:
        log.warning(
            "control groups may not be written here: vCPUs and memory of processes are "
            "counted, not enforced"
        )
    return groups


# --- Runners of earlier servers -------------------------------------------------------------------


class AdoptedRunners:
    """Runners of earlier servers, by task id: they receive only signals, and send no messages.

    `on_exit` is called with the task id of each runner that has died, until `close`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[str], None]) -> None:
        self._loop = loop
        self._notify_exit = on_exit
        self._pidfds: dict[str, int] = {}

    def watch(self, task_id: str, record: RunnerRecord) -> None:
        """Wait for the end of an attempt's runner, which may have ended already."""
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._notify_exit, task_id)
            return
        if record.start_time not in (None, start_time(record.pid)):
            os.close(pidfd)
            self._loop.call_soon(self._notify_exit, task_id)
            return
        self._pidfds[task_id] = pidfd
        self._loop.add_reader(pidfd, self._on_exit, task_id)

    def signal(self, task_id: str, number: int) -> None:
        """Signal the runner of an attempt, if it is an adopted one."""
        pidfd = self._pidfds.get(task_id)
        if pidfd is not None:
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                pass  # it is ending already

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _on_exit(self, task_id: str) -> None:
        pidfd = self._pidfds.pop(task_id)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._notify_exit(task_id)


# --- Folders made in advance ----------------------------------------------------------------------
# Creating a file waits for the file system's journal, which is busy during each commit of the
# server's own journal: a folder with a file takes 0.4 ms then, and 0.1 ms otherwise. Moving a
# folder does not wait. So a thread makes folders in advance, and the start of an attempt only moves
# one of them.

_LEAST = 32  # with fewer folders in stock, more are made
_MOST = 96  # folders in stock
_FILES = ("runner.json",)


class FolderStock:
    """Empty folders for attempts, each with an empty record."""

    def __init__(self, stock: str) -> None:
        """`stock` is a folder of the same file system, which only this class uses."""
        self._path = stock
        os.makedirs(stock, 0o700, exist_ok=True)
        self._ready = deque(_find_complete(stock))
        self._next = max((int(name) for name in self._ready), default=0) + 1
        self._maker = ThreadPoolExecutor(1, "folders")
        self._making: Future[None] | None = None

    def put(self, path: str) -> None:
        """Make sure that the folder `path` exists. Raises OSError."""
        try:
            ready = self._ready.popleft()
        except IndexError:
            _make(path)
        else:
            try:
                os.rename(f"{self._path}/{ready}", path)
            except OSError:
                self._ready.append(ready)  # the folder exists already, or cannot be made
                _make(path)
        if len(self._ready) < _LEAST:
            self.fill()

    def fill(self) -> None:
        """Have more folders made, unless that is in progress."""
        if self._making is None or self._making.done():
            self._making = self._maker.submit(self._fill)

    def close(self) -> None:
        self._maker.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        while len(self._ready) < _MOST:
            name = str(self._next)
            self._next += 1
            try:
                _make(f"{self._path}/{name}")
            except OSError:
                return  # disk full: `put` will report it
            self._ready.append(name)


def _make(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    for name in _FILES:
        os.close(os.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _find_complete(stock: str) -> Iterable[str]:
    """The names of complete folders of an earlier server. A folder that was being made when the
    server was killed is not complete.
    """
    for name in os.listdir(stock):
        if name.isdecimal() and sorted(os.listdir(f"{stock}/{name}")) == sorted(_FILES):
            yield name
