"""The runner: the parent of an attempt's processes, which outlives the server.

It serves one attempt at a time, and is there for the next when that has ended. What to run comes as
a message over a socket, and is never written to disk; with it comes the attempt's record, a file
that the server has locked: a lock stays held for as long as anyone has the descriptor, so there is
no moment at which an attempt lives without it. What a runner has done is told by files in the
attempt's folder, so that a server can be killed and started again at any moment without an attempt
noticing; the socket only saves the server from looking.

    runner.json  the record. Empty: the attempt never began. Locked: its runner lives. Holds the
                 runner's identity (boot id, pid, start time, kind, slot), and since when the
                 program runs
    exit.json    the record under its last name, once every process of the attempt is gone: how it
                 ended, beside the identity
    progress     what it does before the program runs, a line each
    log          the output: one event a line, `<ms> <message>`

When the socket closes, the server has died: an idle runner ends, a busy one after its attempt.

Standard library only, few imports: a first attempt waits for it to start.
"""

from __future__ import annotations

import _thread
import errno
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

from batchml.local.executors.cgroup import Groups, slot_name
from batchml.local.executors.slot import Slot, make_slot
from batchml.runtime.processes import (
    become_reaper,
    boot_id,
    kill_descendants,
    reap,
    signal_file,
    signals_in,
    start_time,
)

INLINE = 32_768  # bytes of a message; a larger spec comes in an anonymous file beside it
_RETRY_AFTER = 0.2  # seconds between tries when the disk is full
_FD_BYTES = socket.CMSG_SPACE(2 * 4)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS = int(socket.MSG_DONTWAIT)
_HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)


class Kind(Protocol):
    """A way to run attempts. `run` returns the exit record, less `stopped_at`.

    `litter` is a folder to delete once the end has been reported.
    """

    litter: str

    def run(self, spec: dict[str, Any], io: Io) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Log:
    """The attempt's output on disk. Waits for space rather than lose a line.

    `meanwhile` is called while it waits: a stop must reach the program on a full disk as well.
    """

    def __init__(self, path: str, meanwhile: Callable[[], object]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file: int = until_it_works(lambda: os.open(path, flags, 0o600))
        self._meanwhile = meanwhile
        self._last = 0
        self.must_last = False  # holds what cannot be made again

    def write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._last = max(self._last, now_ms())
        stamp = b"%d " % self._last
        data = memoryview(b"".join([b"%s%s\n" % (stamp, line) for line in lines]))
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:  # disk full: the program waits on its pipe meanwhile
                raise_unless_it_may_pass(error)
                self._meanwhile()
                time.sleep(_RETRY_AFTER)

    def close(self) -> None:
        if self.must_last:
            until_it_works(lambda: os.fsync(self._file), self._meanwhile)
        os.close(self._file)


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
            if "stop" in message:
                self.stops.add(message["stop"])
            elif "kill" in message:
                self.kills.add(message["kill"])
            else:
                self.attempts.append((message, _descriptors(ancillary)))
                return  # another comes after its end

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
    """

    def __init__(self, link: Link, folder: str, task_id: str, record: Record) -> None:
        self.folder = folder
        self.wake = link.wake
        self.stopping_since: float | None = None
        self.meanwhile: Callable[[], object] = lambda: None
        self._link = link
        self._task_id = task_id
        self._record = record
        self._log = Log(f"{folder}/log", self._wait)
        self._note_stop()

    @property
    def children(self) -> int:
        return self._link.children

    def drain(self) -> None:
        self._link.drain()
        self._note_stop()

    def write(self, lines: list[bytes]) -> None:
        """Append lines to the log, waiting while the disk is full."""
        if lines:
            self._log.must_last = True
            self._log.write(lines)

    def preamble(self, text: str) -> None:
        """The log's first line, if it is to have one: ours, not the program's."""
        if text:
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
        about = {"started_at": at_ms, "address": address}
        until_it_works(lambda: self._record.add(about), self._wait)
        self._link.tell({"task_id": self._task_id, "started": at_ms, "address": address})

    def close(self) -> None:
        if self.stopping_since == -math.inf:
            self._note_rehearsal()
        self._log.close()

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
        if self._link.killed or self._task_id in self._link.kills:
            self.stopping_since = -math.inf
        elif self.stopping_since is None and (
            self._link.terminated or self._task_id in self._link.stops
        ):
            self.stopping_since = time.monotonic()


class Record:
    """`runner.json`, which becomes `exit.json`. Holds the lock for as long as it is open."""

    def __init__(self, folder: str, file: int, identity: bytes) -> None:
        """`identity` is a JSON object."""
        self._folder = folder
        self._file = file
        self._identity = identity
        self._size = os.fstat(file).st_size  # 0, unless another runner was killed on this one
        until_it_works(lambda: self._write(identity))

    def add(self, more: dict[str, Any]) -> None:
        self._write(self._identity[:-1] + b", " + json.dumps(more).encode()[1:])

    def _write(self, data: bytes) -> None:
        """Over what was there, in one go, so that there is no moment at which it is empty."""
        data = data.ljust(self._size)
        os.pwrite(self._file, data, 0)
        self._size = len(data)

    def finish(self, ended: dict[str, Any]) -> None:
        """The attempt has ended, and this is how.

        Not synced: the server's journal is, and until it has the end, a power cut is what took
        the attempt (docs/durability.md).
        """
        until_it_works(lambda: self.add(ended))
        until_it_works(
            lambda: os.rename(f"{self._folder}/runner.json", f"{self._folder}/exit.json")
        )

    def close(self) -> None:
        os.close(self._file)


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
        while True:
            while link.attempts:
                message, descriptors = link.attempts.pop(0)
                self._attempt(message, descriptors)
            if link.server is None or link.terminated:
                return
            link.drain(None)

    def _attempt(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if message.get("spec") is None:
            with open(descriptors.pop(), "rb") as file:
                file.seek(0)
                message["spec"] = json.load(file)
        folder, spec = message["folder"], message["spec"]
        task_id = spec["task_id"]
        identity = self._encoded
        if "label" in spec:
            identity = json.dumps({**self._identity, "label": spec["label"]}).encode()
        record = Record(folder, descriptors[0], identity)
        io = Io(self._link, folder, task_id, record)
        try:
            ended = self._kind.run(spec, io)
        finally:
            self._kill()
        io.close()
        # Once nothing of the attempt runs any more.
        ended["stopped_at"] = now_ms()
        record.finish(ended)
        litter, self._kind.litter = self._kind.litter, ""
        told = {"task_id": task_id, "ended": ended}
        self._link.tell({**told, "busy": True} if litter else told, surely=True)
        self._link.stops.discard(task_id)
        self._link.kills.discard(task_id)
        record.close()
        if litter:
            _remove(litter)
            self._link.tell({"idle": True}, surely=True)

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


def now_ms() -> int:
    return int(time.time() * 1000)


def until_it_works(write: Callable[[], Any], meanwhile: Callable[[], object] | None = None) -> Any:
    """A full disk must not cost the record of an attempt."""
    while True:
        try:
            return write()
        except OSError as error:
            raise_unless_it_may_pass(error)
            if meanwhile is not None:
                meanwhile()
            time.sleep(_RETRY_AFTER)


def raise_unless_it_may_pass(error: OSError) -> None:
    """A full disk has space again some day; a folder that was deleted does not come back."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE):
        raise error


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
        from batchml.local.executors.contained import Containers

        return Containers()
    from batchml.local.executors.program import Programs

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
    """`runner.py CONFIG`: JSON with the kind of attempts, the socket, and where slots are made.

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
