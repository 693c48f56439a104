"""The runner: the parent of an attempt's processes, which outlives the server.

It serves one attempt at a time, and is there for the next when that has ended. What to run comes as
a message over a socket, and is never written to disk; with it comes the attempt's record, a file
that the server has locked: a lock stays held for as long as anyone has the descriptor, so there is
no moment at which an attempt lives without it. What a runner has done is told by files in the
attempt's folder (files.py), so that a server can be killed and started again at any moment
without an attempt noticing; the socket only saves the server from looking.

The server sends an attempt before it has committed that the program may begin. The runner prepares
it (its folder, its environment, its container) and starts the program on a second message. If the
server dies before that, the runner never starts the program, and notes this in the record, even if
the journal already has the start. No other file, and no missing file, is evidence of that.

When the socket closes, the server has died: an idle runner ends, a busy one after its attempt.

Standard library only, few imports: a first attempt waits for it to start.
"""

from __future__ import annotations

import _thread
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from batchml import __version__
from batchml.local.executors.cgroup import Groups, slot_name
from batchml.local.executors.cgroup_slot import Slot, make_slot
from batchml.local.executors.runner.files import (
    Log,
    Record,
    folder_of,
    leave_reason,
    now_ms,
    until_it_works,
)
from batchml.runtime.processes import (
    become_reaper,
    boot_id,
    kill_descendants,
    reap,
    signal_file,
    signals_in,
    start_time,
)

VERSION = f"{__version__}/2"  # of this code, and of what it and the server say to each other
INLINE = 32_768  # bytes of a message; a larger spec comes in an anonymous file beside it
HOST_LOST = "Host EC2 (instance this-machine) terminated: "  # begins the reason, in AWS's words
_FD_BYTES = socket.CMSG_SPACE(2 * 4)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS = int(socket.MSG_DONTWAIT)
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)


class Withdrawn(Exception):
    """The program of an attempt is not to be started, by this runner at least.

    Its text says what this machine lacks for it, if that is why.
    """


class Kind(Protocol):
    """A way to run attempts. `run` returns the exit record, less `stopped_at` and `log`. It calls
    `Io.wait_to_begin` before it starts the program; raises Withdrawn.

    `litter` is a folder to delete once the end has been reported.
    """

    litter: str

    def run(self, spec: dict[str, Any], io: Io) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Link:
    """What a runner hears: its server's messages and the system's signals, behind `wake`."""

    def __init__(self, server: socket.socket) -> None:
        self.server: socket.socket | None = server
        self._socket = server.fileno()
        self._signals = signal_file(*_HEARD)
        self._epoll = select.epoll(2)
        self._epoll.register(self._signals, select.EPOLLIN)
        self._epoll.register(self._socket, select.EPOLLIN)
        self.wake = self._epoll.fileno()
        self.children = 0  # how often a child was said to have ended
        self.terminated = False
        self.killed = False
        self.begun: set[str] = set()
        self.withdrawn: set[str] = set()
        self.stops: set[str] = set()
        self.kills: set[str] = set()
        self.attempts: list[tuple[dict[str, Any], list[int]]] = []

    def drain(self, timeout: float | None = 0) -> None:
        """Take in what has come; without a timeout, once something has."""
        for source, _ in self._epoll.poll(timeout):
            if source == self._signals:
                come = signals_in(self._signals)
                self.children += signal.SIGCHLD in come
                self.terminated |= signal.SIGTERM in come
                self.killed |= signal.SIGUSR1 in come
            else:
                self._receive()

    def _receive(self) -> None:
        while self.server is not None:
            try:
                data, ancillary, _, _ = self.server.recvmsg(
                    INLINE + 1024, _FD_BYTES, _RECEIVE_FLAGS
                )
            except BlockingIOError:
                return
            except ConnectionError:
                data, ancillary = b"", []
            if not data:
                self._epoll.unregister(self._socket)
                self.server.close()
                self.server = None
                return
            message = json.loads(data)
            if "folder" in message:
                self.attempts.append((message, _descriptors(ancillary)))
                return  # another comes after its end
            if "begin" in message:
                self.begun.add(message["begin"])
            elif "withdraw" in message:
                self.withdrawn.add(message["withdraw"])
            elif "stop" in message:
                self.stops.add(message["stop"])
            elif "kill" in message:
                self.kills.add(message["kill"])

    def forget(self, task_id: str) -> None:
        for tasks in (self.begun, self.withdrawn, self.stops, self.kills):
            tasks.discard(task_id)

    def tell(self, message: dict[str, Any], *, surely: bool = False) -> None:
        """Tell the server, if there is one. Not `surely`: unless it has no time to listen."""
        if self.server is None:
            return
        try:
            self.server.send(json.dumps(message).encode(), 0 if surely else _SEND_FLAGS)
        except OSError:
            pass  # it is gone, as the next look will show; or it is slow, and looks by itself


class Io:
    """What a kind of attempts works with: the attempt's log, its server, and the wish to stop.

    `stopping_since` is on the monotonic clock; minus infinity when no grace is to be given. `wake`
    is readable when something has come, a stop or the end of a child; then `drain` takes it in.
    `children` grows when children have ended.
    `meanwhile` is called while a write waits for space on a full disk.

    `is_quick`: the server takes the attempt for prepared already.
    """

    def __init__(
        self, link: Link, folder: str, task_id: str, record: Record, is_quick: bool = False
    ) -> None:
        self._is_quick = is_quick
        self.folder = folder
        self.wake = link.wake
        self.stopping_since: float | None = None
        self.meanwhile: Callable[[], object] = lambda: None
        self._link = link
        self._task_id = task_id
        self._record = record
        self._log = Log(record.folder, self._wait)
        self._note_stop()

    @property
    def children(self) -> int:
        return self._link.children

    def drain(self) -> None:
        self._link.drain()
        self._note_stop()

    def wait_to_begin(self) -> None:
        """Return once the program may be started, or a stop is asked for. Raises Withdrawn."""
        link, task_id = self._link, self._task_id
        if not self._is_quick and task_id not in link.begun:
            link.tell({"task_id": task_id, "prepared": True}, surely=True)
        while task_id not in link.begun:
            if link.server is None or task_id in link.withdrawn:
                raise Withdrawn
            if self.stopping_since is not None:
                return
            link.drain(None)
            self._note_stop()
        self._record.note_begun()

    def write(self, lines: list[bytes]) -> None:
        """Append lines to the log, waiting while the disk is full.

        Once the log can grow no more, the program is stopped, and what it still prints is lost.
        """
        if lines:
            self._log.must_last = True
            self._log.write(lines)
        if self._log.full and self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def preamble(self, text: str) -> None:
        """The log's first line, if it is to have one: ours, not the program's."""
        if text and self._log.is_empty:
            self._log.write([text.encode("utf-8", "replace")])

    def progress(self, text: str) -> None:
        """Say what is being done before the program runs."""
        try:
            with open(os.path.join(self.folder, "progress"), "ab") as file:
                file.write(text.encode("utf-8", "replace") + b"\n")
        except OSError:
            return  # disk full: it is only for show
        self._link.tell({"task_id": self._task_id, "progress": text})

    def started(self, at_ms: int, address: str = "") -> None:
        """Say that the program runs, and where others reach it if it has an address of its own.

        May be left out when it has ended by now.
        """
        until_it_works(
            lambda: self._record.add({"started_at": at_ms, "address": address}), self._wait
        )
        self._link.tell({"task_id": self._task_id, "started": at_ms, "address": address})

    def close(self) -> tuple[dict[str, Any], str]:
        """The proof of the log, which is closed, and why the program was stopped, if from here."""
        if self.stopping_since == -math.inf:
            self._note_rehearsal()
        return self._log.close(), self._log.full

    def _note_rehearsal(self) -> None:
        """Whoever reads the log is to know that it was a rehearsal, and of what."""
        try:
            with open(os.path.join(self.folder, "rehearsal"), "rb") as file:
                self.write([file.read()])
        except OSError:
            pass

    def _wait(self) -> None:
        self.drain()
        self.meanwhile()

    def _note_stop(self) -> None:
        link, task_id = self._link, self._task_id
        if link.killed or task_id in link.kills or task_id in link.withdrawn:
            self.stopping_since = -math.inf
        elif self.stopping_since is None and (link.terminated or task_id in link.stops):
            self.stopping_since = time.monotonic()


class Runner:
    def __init__(self, link: Link, kind: Kind, identity: dict[str, Any], slot: Slot | None) -> None:
        self._link = link
        self._kind = kind
        self._identity = identity
        self._encoded = json.dumps(identity).encode()
        self._slot = slot

    def serve(self) -> None:
        """Run attempts until the server is gone, or a signal asks for the end."""
        link = self._link
        link.tell({"ready": VERSION}, surely=True)
        while True:
            while link.attempts:
                message, descriptors = link.attempts.pop(0)
                try:
                    self._attempt(message, descriptors)
                except BaseException as error:
                    leave_reason(message["folder"], error)
                    raise
            if link.server is None or link.terminated:
                return
            link.drain(None)

    def _attempt(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if message.get("spec") is None:
            with open(descriptors.pop(), "rb") as file:
                file.seek(0)
                message["spec"] = json.load(file)
        spec = message["spec"]
        folder = folder_of(descriptors[0])
        task_id = spec["task_id"]
        identity = self._encoded
        if "label" in spec:
            identity = json.dumps({**self._identity, "label": spec["label"]}).encode()
        record = Record(folder, descriptors[0], identity)
        if message.get("begin"):
            self._link.begun.add(task_id)
        io = Io(self._link, folder, task_id, record, message.get("quick", False))
        told: dict[str, Any] = {"task_id": task_id}
        ended: dict[str, Any] = {}
        try:
            ended = self._kind.run(spec, io)
        except Withdrawn as error:
            told["withdrawn"] = str(error)
        finally:
            self._kill()
        ended["log"], reason = io.close()
        if reason:
            ended["reason"] = reason
        # Once nothing of the attempt runs any more.
        if task_id in self._link.withdrawn:
            told["withdrawn"] = ""
        elif "withdrawn" not in told:
            told["ended"] = {**ended, "stopped_at": now_ms()}
            record.finish(told["ended"])
        elif self._link.server is None:
            self._note_never_began(record)
        litter, self._kind.litter = self._kind.litter, ""
        self._link.forget(task_id)
        record.close()
        self._link.tell({**told, "busy": True} if litter else told, surely=True)
        if litter:
            _remove(litter)
            self._link.tell({"idle": True}, surely=True)

    def _note_never_began(self, record: Record) -> None:
        """For the next server. Without it the attempt counts as lost."""
        try:
            record.add({"never_began": True})
        except OSError:
            pass

    def _kill(self) -> None:
        """As when a container's first process ends: whatever it left behind ends too."""
        if not reap():
            if self._slot is not None:
                self._slot.kill()
            kill_descendants()


def _remove(folder: str) -> None:
    from shutil import rmtree

    try:
        rmtree(folder, ignore_errors=True)
    except RecursionError:  # folders in folders, a thousand deep
        import subprocess

        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    return [
        int.from_bytes(data[at : at + 4], sys.byteorder)
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for at in range(0, len(data) // 4 * 4, 4)
    ]


def _slot(groups: Groups, name: str) -> Slot | None:
    if not groups:
        return None
    try:
        return make_slot(groups, name)
    except OSError as error:
        print(f"no limits: {error}", file=sys.stderr)
        return None


def _kind(name: str, slot: Slot | None) -> Kind:
    if name == "container":
        from batchml.local.executors.runner.container import Containers

        return Containers()
    from batchml.local.executors.runner.process import Programs

    return Programs(slot)


def _work(config: dict[str, Any]) -> None:
    server = socket.socket(fileno=config["socket"])
    os.set_inheritable(config["socket"], False)
    pid = os.getpid()
    started = start_time(pid)
    slot = None  # of a container the engine has one
    if config["kind"] == "process":
        slot = _slot(config["groups"], slot_name(pid, started))
    identity = {
        "boot_id": boot_id(),
        "pid": pid,
        "start_time": started,
        "kind": config["kind"],
        "groups": list(slot.folders.values()) if slot else [],
    }
    kind = _kind(config["kind"], slot)
    try:
        Runner(Link(server), kind, identity, slot).serve()
    finally:
        kill_descendants()
        kind.close()
        if slot is not None:
            slot.remove()


def main() -> None:
    """`main.py CONFIG`: JSON with the kind of attempts, the socket, and where slots are made.

    The work is done by a second thread, because the first one stands for its process: it is charged
    for memory and chosen when memory is short, and so it must never be in a slot.
    """
    import threading  # noqa: F401  (whoever imports it first is the first thread to it)

    config = json.loads(sys.argv[1])
    os.umask(0o077)
    os.chdir("/")
    for number in _HEARD:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    become_reaper()
    over = _thread.allocate_lock()
    over.acquire()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            _work(config)
        except BaseException as error:
            failed.append(error)
        finally:
            over.release()

    _thread.start_new_thread(work, ())
    over.acquire()
    if failed:
        raise failed[0]


if __name__ == "__main__":
    main()
