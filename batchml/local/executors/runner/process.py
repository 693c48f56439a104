"""Attempts that are programs of this machine: started, followed, stopped, cleared away.

Runs in a runner. Standard library only.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from batchml.local.executors.cgroup import most_pids
from batchml.local.executors.cgroup_slot import Slot
from batchml.local.executors.runner.files import now_ms, until_it_works
from batchml.local.executors.runner.fork_server import Forker
from batchml.local.executors.runner.main import Withdrawn
from batchml.runtime.processes import send
from batchml.runtime.protocol.log_marks import NEEDED_MEMORY, LineSplitter

if TYPE_CHECKING:
    from batchml.local.executors.runner.main import Io

_READ = 65_536
_HELD_BACK = 0.015  # seconds; a program that ends sooner was never reported as started
_TRIES = 50  # to start a program while the system has no room for another process
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

Sink = Callable[[list[bytes]], None]


class Programs:
    """The kind `process`. Serves one attempt after the other, and keeps nothing but a folder."""

    def __init__(self, slot: Slot | None) -> None:
        self.litter = ""
        self.slot = slot
        self.forker = Forker()
        self._most_pids = most_pids()
        # The last attempt's folders, if it left them as they were. A folder that is moved costs a
        # third of one that is made, and far less while the disk is busy.
        self._spare = ""  # its working directory
        self._spare_run = ""  # its job's folder, with those for outputs and checkpoints

    def run(self, spec: dict[str, Any], io: Io) -> dict[str, Any]:
        code = None
        try:
            ended = _Attempt(self, spec, io).run()
            code = ended["code"]
            return ended
        finally:
            os.chdir("/")
            self._put_away(spec["cwd"])
            # A job that failed may be tried again, by another runner.
            if code == 0 and _is_unused(spec.get("own", ""), spec.get("folders", [])):
                self._spare_run = spec["own"]

    def close(self) -> None:
        if self._spare:
            try:
                os.rmdir(self._spare)
            except OSError:
                pass  # its attempt's folder has been deleted

    def limit(self, needs: dict[str, int] | None, *, memory: bool = True) -> Slot | None:
        """The slot, with limits that suit; None where there is none. Raises OSError."""
        if self.slot is not None and needs is not None:
            self.slot.limit(needs["memory"] if memory else None, needs["vcpus"], self._most_pids)
            return self.slot
        return None

    def make_folder(self, path: str) -> None:
        """A fresh working directory."""
        try:
            if self._spare:
                spare, self._spare = self._spare, ""
                os.rename(spare, path)
            else:
                os.mkdir(path, 0o700)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
                raise
            # One is there: of a server that was killed before it could send the attempt.
            from shutil import rmtree

            rmtree(path, ignore_errors=True)
            os.mkdir(path, 0o700)

    def make_run_folders(self, own: str, folders: list[str]) -> None:
        """The folders for outputs and checkpoints, unless an earlier attempt has made them."""
        if self._spare_run and own:
            spare, self._spare_run = self._spare_run, ""
            try:
                os.rename(spare, own)
            except OSError:
                pass  # there is one
            else:
                return
        for path in folders:
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                pass
            except FileNotFoundError:
                os.makedirs(path, 0o700, exist_ok=True)

    def _put_away(self, path: str) -> None:
        """What a container leaves in its own file system is gone with it; outputs lie elsewhere."""
        if _entries(path) == []:
            self._spare = path
        elif os.path.lexists(path):
            self.litter = path


def _entries(path: str) -> list[str] | None:
    """The names in a folder that is ours alone; None when it is anything else by now."""
    try:
        found = os.stat(path, follow_symlinks=False)
        if found.st_mode != stat.S_IFDIR | 0o700 or found.st_uid != os.geteuid():
            return None
        return os.listdir(path)
    except OSError:
        return None


def _is_unused(own: str, folders: list[str]) -> bool:
    """True when a job's folder holds these folders, nothing else, and nothing is in them."""
    return (
        bool(own)
        and len(_entries(own) or ()) == len(folders)
        and all(_entries(folder) == [] for folder in folders)
    )


class _Attempt:
    def __init__(self, programs: Programs, spec: dict[str, Any], io: Io) -> None:
        self._programs = programs
        self._spec = spec
        self._io = io
        self._child: int | None = None
        self._told = False
        self._killed = False
        io.meanwhile = self._until_kill

    def run(self) -> dict[str, Any]:
        try:
            until_it_works(self._make_folders, self._io.drain, lasting=(errno.EROFS,))
        except (OSError, ValueError) as error:  # a job may name other folders than ours
            if not os.path.isdir(os.path.dirname(self._spec["cwd"])):
                raise Withdrawn("the state folder was moved") from error
            return _not_started(f"CannotCreateContainerError: {error}")
        failure = self._prepare()
        if failure:
            return _not_started(failure)
        self._check_python()
        self._io.wait_to_begin()
        if self._io.stopping_since is not None:
            return _not_started("CannotStartContainerError: stopped before the program started")
        if not self._spec["command"]:
            return _not_started("CannotCreateContainerError: no command specified")
        return self._program()

    def _check_python(self) -> None:
        """Raise Withdrawn where the Python that is to run our runtime is gone, which is no fault of
        the job: an installation that was moved or is being replaced.
        """
        python = self._spec["command"][:1]
        if self._spec.get("marks") and python and not os.access(python[0], os.X_OK):
            raise Withdrawn(f"{python[0]} is gone")

    def _make_folders(self) -> None:
        self._programs.make_folder(self._spec["cwd"])
        os.chdir(self._spec["cwd"])
        self._programs.make_run_folders(self._spec.get("own", ""), self._spec.get("folders", []))

    def _program(self) -> dict[str, Any]:
        slot = self._limit()
        if self._spec["preamble"]:
            limits = "cgroup" if slot is not None else "none"
            self._io.preamble(f"{self._spec['preamble']} limits={limits}")
        if slot is not None:
            slot.oom_kills()
        started_at = now_ms()
        try:
            child, output = self._spawn(self._spec["command"], self._spec["env"], slot)
        except OSError as error:
            return self._cannot_run(error, started_at)
        except ValueError as error:  # a NUL, or `=` in a variable's name
            return _not_started(f"CannotCreateContainerError: {error}")
        # Our runtime writes marks of its own, and sees to it that the program cannot.
        splitter = LineSplitter(escape=not self._spec.get("marks"))
        status = self._follow(child, output, self._io.write, splitter, started_at)
        code = os.waitstatus_to_exitcode(status)
        by_signal = -code if code < 0 else 0
        code = 128 + by_signal if by_signal else code
        # Our runtime, where it is the child, ends with its program's code: 137 for both.
        killed = code == 128 + signal.SIGKILL and not self._killed
        short = slot.oom_kills() if slot is not None else 0
        if short and not killed:
            self._io.write([NEEDED_MEMORY.encode()])
        return {
            "code": code,
            "signal": by_signal,
            "oom": killed and short > 0,
            "started_at": started_at,
        }

    def _cannot_run(self, error: OSError, started_at: int) -> dict[str, Any]:
        """As on AWS: an init process ends with a shell's codes; without one nothing is started."""
        name, is_missing = self._spec["command"][0], isinstance(error, FileNotFoundError)
        if self._spec.get("init"):
            self._io.write([f"batchml: cannot run {name!r}: {error.strerror}".encode()])
            return {"code": 127 if is_missing else 126, "started_at": started_at}
        why = str(error.strerror).lower()
        if is_missing and "/" not in name:
            why = "executable file not found in $PATH"
        return _not_started(f'CannotStartContainerError: exec: "{name}": {why}')

    def _limit(self, *, memory: bool = True) -> Slot | None:
        try:
            return self._programs.limit(self._spec.get("needs"), memory=memory)
        except OSError as error:
            self._io.write([f"batchml: the limits cannot be set: {error}".encode()])
            return None

    def _prepare(self) -> str:
        """Make what the program needs (its environment). Returns what went wrong, or nothing."""
        if not self._spec.get("prepare") or _is_made(self._spec.get("made", "")):
            return ""
        last = "no message"

        def tell(lines: list[bytes]) -> None:
            nonlocal last
            for line in lines:
                last = line.decode("utf-8", "replace")
                self._io.progress(last)

        try:
            # In the slot as well, so that it can be found; the job's memory is not meant for it.
            slot = self._limit(memory=False)
            child, output = self._spawn(self._spec["prepare"], self._spec["prepare_env"], slot)
        except (OSError, ValueError) as error:
            return f"CannotPullContainerError: {error}"
        if self._follow(child, output, tell, LineSplitter()) == 0:
            return ""
        if self._io.stopping_since is not None:
            return "CannotPullContainerError: stopped while the environment was being made"
        return f"CannotPullContainerError: {last}"

    def _spawn(self, command: list[str], env: dict[str, str], slot: Slot | None) -> tuple[int, int]:
        """Start a command in its own session; its output and errors share one pipe."""
        output, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            if slot is not None:
                slot.enter()
            try:
                self._child = _started(lambda: self._start(command, env, write_end), command[0])
            finally:
                if slot is not None:
                    slot.leave()
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(write_end)
        self._told = False
        os.set_blocking(output, False)
        return self._child, output

    def _start(self, command: list[str], env: dict[str, str], output: int) -> int:
        """By a fork where that is all the same, which takes a tenth of the time."""
        child = self._programs.forker.start(command, env, output)
        return _spawn(command, env, output) if child is None else child

    def _follow(
        self,
        child: int,
        output: int,
        sink: Sink,
        splitter: LineSplitter,
        started_at: int | None = None,
    ) -> int:
        """Copy output until the child has ended and all that it left behind; its wait status."""
        io = self._io
        wait = select.poll()
        wait.register(output, select.POLLIN)
        wait.register(io.wake, select.POLLIN)
        report_at = None if started_at is None else time.monotonic() + _HELD_BACK
        is_open = True
        seen = -1
        while True:
            if seen != io.children:
                seen = io.children
                status, none_left = _reap_until(child)
                if status is not None:
                    break
            if report_at is not None and time.monotonic() >= report_at and started_at is not None:
                report_at = None
                io.started(started_at, self._spec.get("address", ""))
            for source, _ in wait.poll(_milliseconds(self._until_kill(), report_at)):
                if source == io.wake:
                    io.drain()
                    continue
                data = _read(output)
                sink(splitter.feed(data or b""))
                if data == b"":
                    is_open = False
                    wait.unregister(output)
        self._child = None
        if not none_left:
            self._kill_rest()
        # What they have written is read; the end of the stream is not waited for, because a
        # process that we may not kill (one of another user) could hold the pipe for ever.
        while is_open and (data := _read(output)):
            sink(splitter.feed(data))
        sink(splitter.finish())
        os.close(output)
        return status

    def _kill_rest(self) -> None:
        """As when a container's first process ends: whatever it left behind ends too."""
        from batchml.runtime.processes import kill_descendants

        if self._programs.slot is not None:
            self._programs.slot.kill()
        kill_descendants()

    def _until_kill(self) -> float | None:
        """TERM once a stop is asked for, KILL when its grace is over; seconds until the next look.

        As a container's first process gets it; our runtime passes it on to the others.
        """
        since = self._io.stopping_since
        if since is None or self._child is None:
            return None
        if not self._told and since > 0:  # else there is no grace
            send([self._child], signal.SIGTERM)
            self._told = True
        left = since + float(self._spec["grace"]) - time.monotonic()
        if left > 0:
            return left
        self._killed = True
        send([self._child], signal.SIGKILL)
        return 0.05


def _started(start: Callable[[], int], name: str) -> int:
    """The pid of what `start` starts.

    The system may have no room for another process now, and have it in a moment. Raises OSError and
    ValueError.
    """
    for _ in range(_TRIES):
        try:
            return start()
        except BlockingIOError:  # EAGAIN
            time.sleep(0.1)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), name)


def _spawn(command: list[str], env: dict[str, str], output: int) -> int:
    """Start a program, looked for on the PATH that it will have; its pid.

    With no signal blocked or ignored, as in a container. Raises OSError and ValueError.
    """
    _look_on(env.get("PATH"))
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    return os.posix_spawnp(
        command[0], command, env, file_actions=actions, setsid=True, setsigmask=(),
        setsigdef=_SIGNALS,
    )  # fmt: skip


def _look_on(path: str | None) -> None:
    """The C library looks on our own PATH, and tells nobody else of it."""
    if path is None:
        os.environ.pop("PATH", None)
    elif os.environ.get("PATH") != path:
        os.environ["PATH"] = path


def _milliseconds(kill_in: float | None, report_at: float | None) -> float | None:
    """How long to wait for news, for poll."""
    if report_at is not None:
        report_in = max(0.0, report_at - time.monotonic())
        kill_in = report_in if kill_in is None else min(kill_in, report_in)
    return None if kill_in is None else kill_in * 1000 + 1


def _is_made(environment: str) -> bool:
    """Whether there is nothing to prepare: whoever makes an environment marks it as whole, last."""
    if not environment:
        return False
    from batchml.local.environments import is_whole

    return is_whole(environment)


def _read(pipe: int) -> bytes | None:
    """What can be read now; None when that is nothing yet, empty at the end of the stream."""
    try:
        return os.read(pipe, _READ)
    except BlockingIOError:
        return None


def _reap_until(child: int) -> tuple[int | None, bool]:
    """Collect ended children: the wait status of `child` once it is among them, and whether no
    children are left then.
    """
    status: int | None = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, True
        if pid == 0:
            return status, False
        if pid == child:
            status = ended


def _not_started(why: str) -> dict[str, Any]:
    return {"code": None, "start_failure": why}
