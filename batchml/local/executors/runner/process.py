"""Attempts that are processes of this machine: start, follow and stop them, and clean up.

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
from types import ModuleType
from typing import Any

from batchml.local.executors.cgroup import Slot, max_pids
from batchml.local.executors.processors import bound_to
from batchml.local.executors.runner.files import now_ms, until_it_works
from batchml.local.executors.runner.fork_server import ForkServer
from batchml.local.executors.runner.link import AttemptIo, AttemptWithdrawn, read_now
from batchml.runtime.processes import kill_descendants, send, spawn
from batchml.runtime.protocol.log_marks import NEEDED_MEMORY, LineSplitter

_REPORT_AFTER = 0.015  # seconds; the start of a program that ends sooner is not reported
_TRIES = 50  # tries to start a program while the system has no room for a process

Sink = Callable[[list[bytes]], None]


class ProcessAttempts:
    """The kind `process`. Serves one attempt after the other; keeps only unused folders."""

    def __init__(self, slot: Slot | None) -> None:
        self.to_delete = ""
        self.slot = slot
        self.forker = ForkServer()
        self._max_pids = max_pids()
        # Folders of the last attempt, if it left them empty. Moving a folder takes a third of the
        # time of making one, and far less while the disk is busy.
        self._spare = ""  # its working directory
        self._spare_run = ""  # its run's folder, with those for outputs and checkpoints

    def run(self, spec: dict[str, Any], io: AttemptIo) -> dict[str, Any]:
        code = None
        try:
            ended = _ProcessAttempt(self, spec, io).run()
            code = ended["code"]
            return ended
        finally:
            os.chdir("/")
            self._put_away(spec["cwd"])
            # Not after a failure: another runner may retry the job in the same folder.
            if code == 0 and _is_unused(spec.get("own", ""), spec.get("folders", [])):
                self._spare_run = spec["own"]

    @property
    def keeps_process(self) -> bool:
        return self.forker.is_waiting

    def rest(self) -> None:
        self.forker.dismiss()

    def close(self) -> None:
        self.forker.dismiss()
        if self._spare:
            try:
                os.rmdir(self._spare)
            except OSError:
                pass  # its attempt's folder was deleted

    def limit(self, needs: dict[str, int] | None, *, memory: bool = True) -> Slot | None:
        """The slot with the job's limits; None where there is none. Raises OSError."""
        if self.slot is not None and needs is not None:
            self.slot.limit(needs["memory"] if memory else None, needs["vcpus"], self._max_pids)
            return self.slot
        return None

    def make_folder(self, path: str) -> None:
        """Make an empty working directory."""
        try:
            if self._spare:
                spare, self._spare = self._spare, ""
                os.rename(spare, path)
            else:
                os.mkdir(path, 0o700)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
                raise
            # It exists, because an earlier runner of this attempt died; or the spare one is gone.
            from shutil import rmtree

            rmtree(path, ignore_errors=True)
            os.mkdir(path, 0o700)

    def make_run_folders(self, run_folder: str, folders: list[str]) -> None:
        """Make the folders for outputs and checkpoints, unless an earlier attempt has made them."""
        if self._spare_run and run_folder:
            spare, self._spare_run = self._spare_run, ""
            try:
                os.rename(spare, run_folder)
            except OSError:
                pass  # it exists
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
        """Keep an empty working directory for the next attempt; have any other one deleted. Outputs
        are in other folders.
        """
        if _entries(path) == []:
            self._spare = path
        elif os.path.lexists(path):
            self.to_delete = path


def _entries(path: str) -> list[str] | None:
    """The names in a folder that is private to this user; None for anything else."""
    try:
        status = os.stat(path, follow_symlinks=False)
        if status.st_mode != stat.S_IFDIR | 0o700 or status.st_uid != os.geteuid():
            return None
        return os.listdir(path)
    except OSError:
        return None


def _is_unused(run_folder: str, folders: list[str]) -> bool:
    """True when a run's folder contains only these folders, and they are empty."""
    return (
        bool(run_folder)
        and len(_entries(run_folder) or ()) == len(folders)
        and all(_entries(folder) == [] for folder in folders)
    )


class _ProcessAttempt:
    def __init__(self, kind: ProcessAttempts, spec: dict[str, Any], io: AttemptIo) -> None:
        self._kind = kind
        self._spec = spec
        self._io = io
        self._child: int | None = None
        self._has_term = False
        self._killed = False
        self._made = ""  # how its environment was made, if this attempt has made it
        io.while_waiting = self._send_due_signals

    def run(self) -> dict[str, Any]:
        try:
            until_it_works(self._make_folders, self._io.drain, lasting=(errno.EROFS,))
        except (OSError, ValueError) as error:  # a job may choose its own folders
            if not os.path.isdir(os.path.dirname(self._spec["cwd"])):
                raise AttemptWithdrawn("the state folder was moved") from error
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
        return self._run_program()

    def _check_python(self) -> None:
        """Raise AttemptWithdrawn when the Python for batchml's runtime is missing. That is not the
        job's fault: the installation was moved or is being replaced.
        """
        python = self._spec["command"][:1]
        if self._spec.get("marks") and python and not os.access(python[0], os.X_OK):
            raise AttemptWithdrawn(f"{python[0]} is gone")

    def _make_folders(self) -> None:
        self._kind.make_folder(self._spec["cwd"])
        os.chdir(self._spec["cwd"])
        self._kind.make_run_folders(self._spec.get("own", ""), self._spec.get("folders", []))

    def _run_program(self) -> dict[str, Any]:
        slot = self._limit()
        if self._spec["preamble"]:
            limits = "cgroup" if slot is not None else "none"
            text = f"{self._spec['preamble']} limits={limits}"
            if self._made:
                from urllib.parse import quote

                text += f" made={quote(self._made)}"
            self._io.write_preamble(text)
        if slot is not None:
            slot.oom_kills()
        started_at = now_ms()
        status = None
        while status is None:  # until the program has certainly begun
            try:
                with bound_to(self._spec.get("processors", ())):
                    child, output = self._spawn(self._spec["command"], self._spec["env"], slot)
            except OSError as error:
                return self._cannot_run(error, started_at)
            except ValueError as error:  # a NUL, or `=` in a variable's name
                return _not_started(f"CannotCreateContainerError: {error}")
            # batchml's runtime writes its own marks, and prevents the program from writing any.
            splitter = LineSplitter(escape=not self._spec.get("marks"))
            status = self._follow(child, output, self._io.write, splitter, started_at)
            if self._kind.forker.has_missed and not self._has_term and not self._killed:
                status, slot = None, self._limit()
        if self._has_term or self._killed:
            self._kind.forker.dismiss()  # a signal of this attempt may reach it late
        code = os.waitstatus_to_exitcode(status)
        by_signal = -code if code < 0 else 0
        code = 128 + by_signal if by_signal else code
        # The code is 137 whether the child itself was killed, or the program of batchml's runtime.
        killed_by_others = code == 128 + signal.SIGKILL and not self._killed
        oom_kills = slot.oom_kills() if slot is not None else 0
        if oom_kills and not killed_by_others:
            self._io.write([NEEDED_MEMORY.encode()])
        return {
            "code": code,
            "signal": by_signal,
            "oom": killed_by_others and oom_kills > 0,
            "started_at": started_at,
        }

    def _cannot_run(self, error: OSError, started_at: int) -> dict[str, Any]:
        """Fail as on AWS: with an init process with a shell's exit code, else without a start."""
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
            return self._kind.limit(self._spec.get("needs"), memory=memory)
        except OSError as error:
            self._io.write([f"batchml: the limits cannot be set: {error}".encode()])
            return None

    def _prepare(self) -> str:
        """Make the program's environment. Returns the error, or ""."""
        if not self._spec.get("prepare"):
            return ""
        environments = _environments()
        if self._spec.get("made") and environments.is_complete(self._spec["made"]):
            environments.note_use(self._spec["made"])
            return ""
        last = "no message"

        def report(lines: list[bytes]) -> None:
            nonlocal last
            for line in lines:
                last = line.decode("utf-8", "replace")
                self._io.report_progress(last)

        try:
            # In the slot, so that its processes can be found, but without the job's limit of
            # memory.
            slot = self._limit(memory=False)
            child, output = self._spawn(self._spec["prepare"], self._spec["prepare_env"], slot)
        except (OSError, ValueError) as error:
            return f"CannotPullContainerError: {error}"
        if self._follow(child, output, report, LineSplitter()) == 0:
            if last.startswith(environments.MADE):
                self._made = last
            return ""
        if self._io.stopping_since is not None:
            return "CannotPullContainerError: stopped while the environment was being made"
        return f"CannotPullContainerError: {last}"

    def _spawn(self, command: list[str], env: dict[str, str], slot: Slot | None) -> tuple[int, int]:
        """Start a command in its own session; standard output and errors share one pipe."""
        output, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            self._child = self._kind.forker.take(command, env, write_end)
            if self._child is None:
                self._child = self._start_in(slot, command, env, write_end)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(write_end)
        self._has_term = False
        os.set_blocking(output, False)
        return self._child, output

    def _start_in(
        self, slot: Slot | None, command: list[str], env: dict[str, str], output: int
    ) -> int:
        if slot is not None:
            slot.enter()
        try:
            return _start_with_retries(lambda: self._start(command, env, output), command[0])
        finally:
            if slot is not None:
                slot.leave()

    def _start(self, command: list[str], env: dict[str, str], output: int) -> int:
        """Fork where possible, which takes a tenth of the time."""
        child = self._kind.forker.start(command, env, output)
        return spawn(command, env, output, ()) if child is None else child

    def _follow(
        self,
        child: int,
        output: int,
        sink: Sink,
        splitter: LineSplitter,
        started_at: int | None = None,
    ) -> int:
        """Copy the output until the child and its remaining processes have ended; the child's wait
        status.
        """
        io = self._io
        wait = select.poll()
        wait.register(output, select.POLLIN)
        wait.register(io.wake, select.POLLIN)
        forker = self._kind.forker
        link = forker.link
        if link >= 0:
            wait.register(link, select.POLLIN)
        report_at = None if started_at is None else time.monotonic() + _REPORT_AFTER
        is_open = True
        status: int | None = None
        none_left = False
        children = -1
        while True:
            if children != io.children:
                children = io.children
                status, none_left = _reap_until(child)
                if status is not None:
                    code = forker.note_end(child)
                    status = status if code is None else code << 8
                    break
            if report_at is not None and time.monotonic() >= report_at and started_at is not None:
                report_at = None
                io.report_started(started_at, self._spec.get("address", ""))
            for source, _ in wait.poll(_milliseconds(self._send_due_signals(), report_at)):
                if source == io.wake:
                    io.drain()
                    continue
                if source == link:
                    code = forker.receive_code()
                    wait.unregister(link)
                    if code is not None:
                        status, none_left = code << 8, True
                    continue
                data = read_now(output)
                sink(splitter.feed(data or b""))
                if data == b"":
                    is_open = False
                    wait.unregister(output)
            if status is not None:  # a runtime that waits for the next attempt
                break
        self._child = None
        if not none_left:
            self._kill_rest()
        # Read the output up to now, but do not wait for the end of the stream: a process that we
        # may not kill (of another user) could hold the pipe forever.
        while is_open and (data := read_now(output)):
            sink(splitter.feed(data))
        sink(splitter.finish())
        os.close(output)
        return status

    def _kill_rest(self) -> None:
        """Kill all remaining processes, as at the end of a container's first process."""
        if self._kind.slot is not None:
            self._kind.slot.kill()
        kill_descendants()

    def _send_due_signals(self) -> float | None:
        """Send TERM once a stop is requested, KILL after the grace period; seconds until the next
        call.

        Only the child gets the signals, as a container's first process does; batchml's runtime
        forwards them.
        """
        since = self._io.stopping_since
        if since is None or self._child is None:
            return None
        if not self._has_term and since > 0:  # else there is no grace period
            send([self._child], signal.SIGTERM)
            self._has_term = True
        left = since + float(self._spec["grace"]) - time.monotonic()
        if left > 0:
            return left
        self._killed = True
        send([self._child], signal.SIGKILL)
        return 0.05


def _start_with_retries(start: Callable[[], int], name: str) -> int:
    """Start a process; its pid. Retried, because the system may lack room for a process only
    briefly.

    Raises OSError and ValueError.
    """
    for _ in range(_TRIES):
        try:
            return start()
        except BlockingIOError:  # EAGAIN
            time.sleep(0.1)
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), name)


def _milliseconds(kill_in: float | None, report_at: float | None) -> float | None:
    """The timeout for poll."""
    if report_at is not None:
        report_in = max(0.0, report_at - time.monotonic())
        kill_in = report_in if kill_in is None else min(kill_in, report_in)
    return None if kill_in is None else kill_in * 1000 + 1


def _environments() -> ModuleType:
    """The module is imported only where it is needed: a runner starts in milliseconds."""
    from batchml.local import environments

    return environments


def _reap_until(child: int) -> tuple[int | None, bool]:
    """Collect ended children: the wait status of `child` if it was among them, and whether no child
    is left.
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
