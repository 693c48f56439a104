"""The runner: the parent of one attempt's processes, which outlives the server.

It is told everything by `spec.json` in the attempt's folder, and reports by files there, so that a
server can be killed and started again at any moment without an attempt noticing:

    lock         held (flock) from before the runner's birth, for it inherits the server's hold, to
                 its end, when the kernel lets go of it
    runner.json  its identity: boot id, pid, start time
    progress     what it does before the program runs, a line each
    started      written when the program has been started
    log          the output: one event a line, `<ms> <message>`
    exit.json    how it ended; written last, and only once every process of the attempt is gone

Standard library only, few imports: one is started for each attempt.
"""

import errno
import fcntl
import os
import select
import signal
import sys
import time
from typing import Any

from batchml.runtime.files import read_json, write_json
from batchml.runtime.lines import LineSplitter
from batchml.runtime.processes import (
    become_reaper,
    boot_id,
    kill_descendants,
    send,
    start_time,
)

_READ = 65_536
_RETRY_AFTER = 0.2  # seconds between tries when the disk is full


class Log:
    """The attempt's output on disk. Waits for space rather than lose a line.

    `meanwhile` is called while it waits: a stop must reach the program on a full disk as well.
    """

    def __init__(self, path: str, meanwhile: Any) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file: int = _until_it_works(lambda: os.open(path, flags, 0o600))
        self._meanwhile = meanwhile
        self._last = 0

    def write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._last = max(self._last, int(time.time() * 1000))
        stamp = b"%d " % self._last
        data = b"".join(b"%s%s\n" % (stamp, line) for line in lines)
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:  # disk full: the program waits on its pipe meanwhile
                _raise_unless_it_may_pass(error)
                self._meanwhile()
                time.sleep(_RETRY_AFTER)

    def close(self) -> None:
        _until_it_works(lambda: os.fsync(self._file))
        os.close(self._file)


class Runner:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.spec: dict[str, Any] = read_json(self._path("spec.json"))
        self.stopping_since: float | None = None
        self.killed = False
        self._child: int | None = None
        self._told = False
        self._wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end)
        signal.signal(signal.SIGTERM, self._asked_to_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The server blocked TERM until here; what it sent meanwhile arrives now. The program
        # inherits the mask, and starts with nothing blocked, as in a container.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.log = Log(self._path("log"), self._until_kill)

    def run(self) -> None:
        ended = self._run()
        kill_descendants()
        self.log.close()
        # stopped_at: once nothing of the attempt runs any more.
        ended["stopped_at"] = _now()
        _until_it_works(lambda: write_json(self._path("exit.json"), ended))
        self._notify()
        self._clear_away()

    def _clear_away(self) -> None:
        """What a container leaves in its own file system is gone with it; outputs lie elsewhere."""
        from shutil import rmtree

        rmtree(self.spec["cwd"], ignore_errors=True)

    def _run(self) -> dict[str, Any]:
        failure = self._prepare()
        if failure:
            return _not_started(failure)
        if self.stopping_since is not None:
            return _not_started("CannotStartContainerError: stopped before the program started")
        if not self.spec["command"]:
            return _not_started("CannotCreateContainerError: no command specified")
        self.log.write([self.spec["preamble"].encode()])
        kills_before = _oom_kills()
        started_at = _now()
        try:
            child, output = self._spawn(self.spec["command"], self.spec["env"])
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            name = self.spec["command"][0]
            self.log.write([f"batchml: cannot run {name!r}: {error.strerror}".encode()])
            self._mark_started(started_at)
            return {"code": code, "started_at": started_at}
        except ValueError as error:  # a NUL, or `=` in a variable's name
            return _not_started(f"CannotCreateContainerError: {error}")
        self._mark_started(started_at)
        # Our runtime writes marks of its own, and sees to it that the program cannot.
        splitter = LineSplitter(escape=not self.spec.get("marks"))
        status = self._follow(child, output, self.log.write, splitter)
        code = os.waitstatus_to_exitcode(status)
        by_signal = -code if code < 0 else 0
        code = 128 + by_signal if by_signal else code
        # Our runtime, where it is the child, ends with its program's code: 137 for both.
        killed = code == 128 + signal.SIGKILL and not self.killed
        return {
            "code": code,
            "signal": by_signal,
            "oom": killed and _oom_kills() > kills_before,
            "started_at": started_at,
        }

    def _prepare(self) -> str:
        """Make what the program needs (its environment). Returns what went wrong, or nothing."""
        if not self.spec.get("prepare"):
            return ""
        said = ["no message"]
        try:
            child, output = self._spawn(self.spec["prepare"], self.spec["prepare_env"])
        except (OSError, ValueError) as error:
            return f"CannotPullContainerError: {error}"
        tell = lambda new: self._progress(new, said)  # noqa: E731
        status = self._follow(child, output, tell, LineSplitter())
        if status == 0:
            return ""
        if self.stopping_since is not None:
            return "CannotPullContainerError: stopped while the environment was being made"
        return f"CannotPullContainerError: {said[-1]}"

    def _progress(self, new: list[bytes], said: list[str]) -> None:
        said += [line.decode("utf-8", "replace") for line in new]
        del said[:-1]
        try:
            with open(self._path("progress"), "ab") as file:
                file.write(b"".join(line + b"\n" for line in new))
        except OSError:
            return  # disk full: it is only for show
        self._notify()

    def _spawn(self, command: list[str], env: dict[str, str]) -> tuple[int, int]:
        """Start a command in its own session; its output and errors share one pipe."""
        import subprocess

        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                command, cwd=self.spec["cwd"], env=env, stdin=subprocess.DEVNULL,
                stdout=write_end, stderr=write_end, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        process.returncode = 0  # reaped here, by waitpid, together with the adopted orphans
        self._child, self._told = process.pid, False
        os.set_blocking(read_end, False)
        return process.pid, read_end

    def _follow(self, child: int, output: int, sink: Any, splitter: LineSplitter) -> int:
        """Copy output until the child has ended and all that it left behind; its wait status."""
        sources = {output, self._wake}
        status: int | None = None
        while status is None:
            ready, _, _ = select.select(sources, [], [], self._until_kill())
            if output in ready:
                data = _read(output)
                sink(splitter.feed(data or b""))
                if data == b"":
                    sources.discard(output)
            if self._wake in ready:
                _read(self._wake)
            status = _reap_until(child)
        self._child = None
        # As when a container's first process ends: whatever it left behind ends too. What they
        # have written is read; the end of the stream is not waited for, because a process that
        # we may not kill (one of another user) could hold the pipe for ever.
        kill_descendants()
        while data := _read(output):
            sink(splitter.feed(data))
        sink(splitter.finish())
        os.close(output)
        return status

    def _asked_to_stop(self, *_: object) -> None:
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def _until_kill(self) -> float | None:
        """TERM once a stop is asked for, KILL when its grace is over; seconds until the next look.

        As a container's first process gets it; our runtime passes it on to the others.
        """
        if self.stopping_since is None or self._child is None:
            return None
        if not self._told:
            send([self._child], signal.SIGTERM)
            self._told = True
        left = self.stopping_since + float(self.spec["grace"]) - time.monotonic()
        if left > 0:
            return left
        self.killed = True
        send([self._child], signal.SIGKILL)
        return 0.05

    def _mark_started(self, at: int) -> None:
        _until_it_works(lambda: write_json(self._path("started"), {"at": at}), self._until_kill)
        self._notify()

    def _notify(self) -> None:
        """Tell the server, if there is one, that something here has changed."""
        try:
            pipe = os.open(self.spec["notify"], os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return
        try:
            os.write(pipe, self.spec["task_id"].encode() + b"\n")
        except OSError:
            pass  # full: the server looks at every attempt now and then anyway
        finally:
            os.close(pipe)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def _read(pipe: int) -> bytes | None:
    """What can be read now; None when that is nothing yet, empty at the end of the stream."""
    try:
        return os.read(pipe, _READ)
    except BlockingIOError:
        return None


def _reap_until(child: int) -> int | None:
    """Collect ended children; the wait status of `child` once it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if pid == 0:
            return None


def _oom_kills() -> int:
    """How often the kernel has killed for memory since boot; 0 where it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0


def _now() -> int:
    return int(time.time() * 1000)


def _not_started(why: str) -> dict[str, Any]:
    return {"code": None, "start_failure": why}


def _until_it_works(write: Any, meanwhile: Any = None) -> Any:
    """A full disk must not cost the record of an attempt."""
    while True:
        try:
            return write()
        except OSError as error:
            _raise_unless_it_may_pass(error)
            if meanwhile is not None:
                meanwhile()
            time.sleep(_RETRY_AFTER)


def _raise_unless_it_may_pass(error: OSError) -> None:
    """A full disk has space again some day; a folder that was deleted does not come back."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE):
        raise error


def main() -> None:
    """`runner.py FOLDER [LOCK]`: LOCK is the descriptor by which the server holds the lock file."""
    folder = sys.argv[1]
    os.umask(0o077)
    if len(sys.argv) > 2:
        lock = int(sys.argv[2])
        os.set_inheritable(lock, False)
    else:
        lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # another runner has this attempt
    if os.path.exists(os.path.join(folder, "exit.json")):
        return
    become_reaper()
    identity = {"boot_id": boot_id(), "pid": os.getpid(), "start_time": start_time(os.getpid())}
    try:
        _until_it_works(lambda: write_json(os.path.join(folder, "runner.json"), identity))
        Runner(folder).run()
    except OSError:  # the attempt's folder has gone, and with it all who could be told
        kill_descendants()
        raise


if __name__ == "__main__":
    main()
