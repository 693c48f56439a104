"""Attempts of either kind, each in the care of a runner: started, adopted, stopped, reported.

Runners outlive the server (`runner.py`), and are used again (`pool.py`). What one has done is read
from its files; what it says only saves the server from looking.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.clock import Clock
from batchml.local.executors import cgroup, record, remains, sweeper
from batchml.local.executors.inherited import Inherited
from batchml.local.executors.pool import Pool, Runner
from batchml.local.executors.pool_folders import Folders
from batchml.local.executors.record import CONTAINER
from batchml.local.executors.spec import NoEnvironment, SpecOf
from batchml.local.home import Home, read_record
from batchml.local.messages import Ended, Event, Exit, Noted, Started
from batchml.local.state import Attempt, Job
from batchml.runtime.files import write_atomically
from batchml.runtime.processes import boot_id

log = logging.getLogger("batchml.local")

RUNNER_LOST = "Host EC2 (instance this-machine) terminated: the runner of this attempt is gone."

_RUNNERS = 3  # that may be lost before an attempt is
_TRY_AGAIN = 0.2  # seconds, when the system has no room for a runner
_LOOK_AGAIN = 0.05  # seconds, for a runner that is about to write its record
_WARM_AFTER = 0.3  # seconds from the server's start to that of its first runner

# What stands in the way now and will not for ever: no room for files, processes or memory.
_MAY_PASS = (
    errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT,
)  # fmt: skip

Ahead = Callable[[str, Job, Attempt], Coroutine[Any, Any, dict[str, Any]] | None]


class _Held(Struct, eq=False):
    """An attempt that has not ended."""

    job: Job
    attempt: Attempt
    kind: str
    label: str = ""  # of the environment that is made for it
    runner: Runner | None = None  # of this server's
    making: asyncio.Task[dict[str, Any]] | None = None  # its spec
    lost: int = 0  # runners
    waits: bool = False  # for the system to have room
    stops: bool = False
    dies: bool = False  # for a rehearsal, without a grace
    reported: object = None  # while it is starting

    @property
    def task_id(self) -> str:
        return self.attempt.task_id


class Executor:
    """Starts attempts, adopts those of a server before this one, and reports what they do.

    `spec_of` says what the runner of a kind is told; new attempts are of `kind`, and others are
    what they were started as. `ahead` makes the spec of those for which that takes time.
    """

    def __init__(
        self,
        home: Home,
        environ: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        report: Callable[[Event], None],
        spec_of: SpecOf,
        kind: str = record.PROCESS,
        ahead: Ahead | None = None,
    ) -> None:
        self._home = home
        self._loop = loop
        self._clock = clock
        self._report = report
        self._spec_of = spec_of
        self._kind = kind
        self._ahead = ahead
        self._attempts = str(home.attempts)
        self._held: dict[str, _Held] = {}  # by task id
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._shared: set[str] = set()  # folders that all attempts share, made
        self._rebooted = _note_boot(home.local / "boot")
        groups = self._groups()
        self._pool = Pool(
            loop, groups, home.local / "runners.log", environ, self._said, self._runner_gone
        )
        self._inherited = Inherited(loop, self._after_runner)
        self._folders = Folders(str(home.local / "stock"))
        loop.call_later(_WARM_AFTER, self._warm)

    def _groups(self) -> cgroup.Groups:
        """Where slots are made. What runners of earlier servers left in theirs is killed."""
        groups = cgroup.find(str(self._home.root))
        before = read_record(self._home.groups, dict[str, str]) or {}
        for found in (before, groups):
            killed = cgroup.sweep(found)
            if killed:
                log.warning("killed processes %s, whose runners were gone", killed)
        if groups != before:
            self._home.groups.write_bytes(msgspec.json.encode(groups))
        if not groups:
            log.warning(
                "control groups may not be written here: vCPUs and memory of processes are "
                "counted, not enforced"
            )
        return groups

    def _warm(self) -> None:
        if not self._closed:
            self._pool.warm(self._kind)
            self._folders.fill()

    def close(self) -> None:
        """Let go of everything; the attempts go on."""
        self._closed = True
        for held in self._held.values():
            if held.making is not None:
                held.making.cancel()
        for task in self._tasks:
            task.cancel()
        self._pool.close()
        self._folders.close()
        cgroup.forget(self._pool.groups)  # else the last runner does it
        self._inherited.close()

    # --- what the engine asks for -----------------------------------------------------------

    def start(self, job: Job, attempt: Attempt) -> None:
        """Start an attempt. What prevents it is reported as its end, and never ends the server."""
        held = self._held[attempt.task_id] = _Held(job, attempt, self._kind_of(attempt))
        self._begin(held)

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Take over an attempt that an earlier server started, whatever has become of it."""
        held = self._held[attempt.task_id] = _Held(job, attempt, self._kind_of(attempt))
        self._adopt(held)

    def _kind_of(self, attempt: Attempt) -> str:
        return record.PROCESS if attempt.is_aside else self._kind

    def _adopt(self, held: _Held) -> None:
        if self._closed:
            return
        task_id = held.task_id
        folder = self._home.attempt(task_id)
        lives = record.is_held(folder)  # first: a runner writes its record, then dies
        found = record.read(folder)
        if found is not None:
            held.kind, held.label = found.kind, found.label
        if (folder / "exit.json").exists():
            self._read_exit(task_id)
        elif lives and found is None:  # it will write this next
            self._loop.call_later(_LOOK_AGAIN, self._adopt, held)
        elif lives and found is not None:
            self._inherited.watch(task_id, found)
            self._pass_on(held)
            self.look(task_id)
        elif found is not None or self._rebooted:
            # After a power cut an empty record proves nothing.
            self._lost(held)
        else:
            self._begin(held)  # acknowledged, but its runner never began

    def stop(self, task_id: str) -> None:
        """Have the runner give the attempt its grace."""
        held = self._held.get(task_id)
        if held is not None:
            held.stops = True
            if held.making is not None:
                held.making.cancel()
            self._pass_on(held)

    def lose(self, task_id: str, why: str, *, warned: bool) -> None:
        """Rehearse the loss of the attempt's host: `warned` is a stop, else nothing has a grace."""
        if warned:
            self.stop(task_id)
            return
        held = self._held.get(task_id)
        if held is None:
            return
        try:
            line = f"batchml: rehearsal: {why}"
            (self._home.attempt(task_id) / "rehearsal").write_text(line, "utf-8")
        except OSError:
            pass  # full disk: the attempt is lost all the same
        held.dies = True
        self._pass_on(held)

    def _pass_on(self, held: _Held) -> None:
        """Tell the runner of an attempt, as soon as it has one, how it is to end."""
        for wanted, word, number in (
            (held.stops, "stop", signal.SIGTERM),
            (held.dies, "kill", signal.SIGUSR1),
        ):
            if wanted and held.runner is not None:
                held.runner.send({word: held.task_id})
            elif wanted:
                self._inherited.signal(held.task_id, number)

    def look(self, task_id: str) -> None:
        """Report what an attempt has done since the last look."""
        held = self._held.get(task_id)
        if held is None:
            return
        folder = self._home.attempt(task_id)
        found = record.read(folder)
        if found is not None and found.started_at is not None:
            self._started(held, found.started_at, found.address)
            return
        text = _last_line(folder / "progress")
        if text:
            self._noted(held, text)

    # --- starting ---------------------------------------------------------------------------

    def _begin(self, held: _Held, *, resume: bool = False) -> None:
        """`resume`: its container may be there."""
        if self._closed:
            return
        kind, job, attempt = held.kind, held.job, held.attempt
        making = self._ahead(kind, job, attempt) if self._ahead is not None else None
        if making is None:
            self._begin_with(held, resume, lambda: self._spec_of(kind, job, attempt))
            return
        held.making = self._loop.create_task(making)
        held.making.add_done_callback(lambda task: self._made(held, resume, task))

    def _made(self, held: _Held, resume: bool, task: asyncio.Task[dict[str, Any]]) -> None:
        """A spec that took its time is there, or cannot be made, or is not wanted any more."""
        held.making = None
        if self._closed:
            return
        if task.cancelled() and resume:
            self._lost(held)
        elif task.cancelled():
            text = "CannotStartContainerError: stopped before the program started"
            self._end(held.task_id, Exit(start_failure=text))
        else:
            self._begin_with(held, resume, task.result)

    def _begin_with(
        self, held: _Held, resume: bool, make_spec: Callable[[], dict[str, Any]]
    ) -> None:
        task_id = held.task_id
        try:
            self._give_to_a_runner(held, resume, make_spec())
            return
        except NoEnvironment as error:
            failure = str(error)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _MAY_PASS:
                if not held.waits:
                    log.warning("attempt %s waits for the system: %s", task_id, error)
                held.waits = True
                self._loop.call_later(_TRY_AGAIN, lambda: self._begin(held, resume=resume))
                return
            if not isinstance(error, OSError):
                number, job_id = held.attempt.number, held.job.id
                log.exception("attempt %s of job %s cannot start", number, job_id)
            failure = f"CannotCreateContainerError: {error}"
        if resume:  # its container must not be left alone
            self._lost(held)
        else:
            self._end(task_id, Exit(start_failure=failure))

    def _give_to_a_runner(self, held: _Held, resume: bool, spec: dict[str, Any]) -> None:
        if resume:
            spec["resume"] = True
        folder = f"{self._attempts}/{held.task_id}"
        self._folders.put(folder)
        for path in spec.get("shared", ()):
            self._make_once(path)
        # The runner gets this hold, so there is no moment at which it lives without it, and no
        # two servers can start the same attempt twice.
        file = record.take(f"{folder}/runner.json", os.O_CREAT)
        if file is None:
            self._loop.call_later(_LOOK_AGAIN, self._adopt, held)
            return
        try:
            runner = self._pool.take(held.kind)
            try:
                is_told = runner.send({"folder": folder, "spec": spec}, file)
            except BaseException:
                self._pool.free(runner)
                raise
            held.label = spec.get("label", "")
            held.runner, runner.task_id = runner, held.task_id
            if not is_told:
                # It is dead, or does not listen: then it will be, and the attempt gets another.
                os.kill(runner.pid, signal.SIGKILL)
        finally:
            os.close(file)
        self._pass_on(held)

    def _make_once(self, path: str) -> None:
        if path not in self._shared:
            os.makedirs(path, 0o700, exist_ok=True)
            self._shared.add(path)

    # --- what the runners tell --------------------------------------------------------------

    def _said(self, runner: Runner, message: dict[str, Any]) -> None:
        if "idle" in message:
            self._pool.free(runner)
            return
        task_id = message["task_id"]
        held = self._held.get(task_id)
        if held is None or held.runner is not runner:
            log.warning(
                "runner %s speaks of attempt %s, which it does not have", runner.pid, task_id
            )
        elif "ended" in message:
            # Before the end is reported: what is started next wants a runner.
            runner.task_id = ""
            if "busy" not in message:
                self._pool.free(runner)
            self._end(task_id, msgspec.convert(message["ended"], Exit))
        elif "started" in message:
            self._started(held, message["started"], message.get("address", ""))
        elif "progress" in message:
            self._noted(held, message["progress"])

    def _runner_gone(self, runner: Runner) -> None:
        if runner.task_id:
            self._held[runner.task_id].runner = None
            self._after_runner(runner.task_id)

    def _started(self, held: _Held, at: int, address: str) -> None:
        if held.reported != at:
            held.reported = at
            self._report(Started(held.task_id, at, address))

    def _noted(self, held: _Held, text: str) -> None:
        if held.reported != text:
            held.reported = text
            about = f"Making the environment {held.label}: {text}" if held.label else text
            self._report(Noted(held.task_id, about, self._now()))

    def _after_runner(self, task_id: str) -> None:
        """A runner is gone: what has become of its attempt is in the files."""
        if self._closed:
            return
        self.look(task_id)
        held = self._held[task_id]
        folder = self._home.attempt(task_id)
        if (folder / "exit.json").exists():
            self._read_exit(task_id)
        elif record.is_empty(folder) and held.lost < _RUNNERS:
            held.lost += 1
            self._begin(held)
        else:
            self._lost(held)

    def _read_exit(self, task_id: str) -> None:
        exit_ = read_record(self._home.attempt(task_id) / "exit.json", Exit)
        if exit_ is None:
            log.error("exit.json of attempt %s is not an exit record", task_id)
            self._kill_rest(task_id)
        else:
            self._end(task_id, exit_)

    def _lost(self, held: _Held) -> None:
        """A runner died without a record: its container goes on, of a process nothing may."""
        if held.kind != CONTAINER:
            self._kill_rest(held.task_id)
        elif held.lost < _RUNNERS:
            held.lost += 1
            log.warning("attempt %s has lost its runner and gets another", held.task_id)
            self._begin(held, resume=True)
        else:
            task = self._loop.create_task(self._remove_container(held.task_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _remove_container(self, task_id: str) -> None:
        if not await sweeper.remove(self._home, task_id):
            log.error("the container of attempt %s cannot be removed now", task_id)
        self._kill_rest(task_id)

    def _kill_rest(self, task_id: str, killing: Iterator[list[int]] | None = None) -> None:
        """Kill what a lost runner left behind, and report it lost."""
        if self._closed:
            return
        if killing is None:
            killing = remains.kill(task_id, record.read(self._home.attempt(task_id)))
        if next(killing, None) is None:
            self._end(task_id, Exit(lost=RUNNER_LOST, stopped_at=self._now()))
        else:
            self._loop.call_later(remains.PAUSE, self._kill_rest, task_id, killing)

    def _end(self, task_id: str, exit_: Exit) -> None:
        self._held.pop(task_id, None)
        self._report(Ended(task_id, exit_, self._now()))

    def _now(self) -> int:
        return int(self._clock.now() * 1000)


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


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""
