"""Attempts of either kind, each run by a runner: prepared, begun, adopted, stopped.

Runners outlive the server (`runner.py`) and are used again (`pool.py`). Their files are the record
of what they did; their messages only make the server notice it earlier.

An attempt is prepared before the journal says that its program may begin. A failure of this machine
until then (a read-only disk, a missing installation) makes the attempt wait: `held_back` says why.
After that, an attempt is prepared again only on evidence that its program never began; without
evidence it ends as a lost host.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from batchml.clock import Clock
from batchml.local.batch.events import (
    NO_LINES,
    Ended,
    Event,
    Exit,
    NeverBegan,
    Noted,
    Prepared,
    Started,
)
from batchml.local.batch.lifecycle import STOPPED_EARLY
from batchml.local.batch.state import Attempt, Job
from batchml.local.environments import is_whole
from batchml.local.executors import cgroup, record, sweeper
from batchml.local.executors import record as remains
from batchml.local.executors.adopted import Inherited
from batchml.local.executors.pool import OURS, Folders, Installation, Pool, Runner
from batchml.local.executors.record import CONTAINER, Verdict
from batchml.local.executors.runner.files import FAILURE
from batchml.local.executors.runner.main import HOST_LOST, VERSION
from batchml.local.executors.spec import NoEnvironment, SpecOf
from batchml.local.home import Home, read_record
from batchml.local.store.identity import Identity
from batchml.model.run import CANNOT_START

log = logging.getLogger("batchml.local")

RUNNER_LOST = f"{HOST_LOST}the runner of this attempt is gone."
NO_EVIDENCE = f"{HOST_LOST}nothing is left that says what became of this attempt."
COPIED = (
    f"{HOST_LOST}this state folder was copied from {{}}, or restored from a backup of it, while "
    "the attempt ran."
)

_REASON = 180  # characters; AWS keeps 255 of a status reason
_RUNNERS = 3  # that may be lost before an attempt is
_TRY_AGAIN = 0.2  # seconds, when the system has no room for a runner
_TRY_AGAIN_HELD = 1.0  # seconds, when this machine cannot start programs
_LOOK_AGAIN = 0.05  # seconds, for a runner that is about to write its record
_WARM_AFTER = 0.3  # seconds from the server's start to that of its first runner

# What stands in the way now and will not for ever: no room for files, processes or memory, or a
# disk that is broken or may not be written.
_MAY_PASS = (
    errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT,
    errno.EROFS, errno.EIO,
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
    waits: str = ""  # for this machine to be able to start programs: what is in the way
    may_have_begun: bool = False  # its program may have begun
    stops: bool = False
    dies: bool = False  # for a rehearsal, without a grace
    reported: object = None  # while it is starting

    @property
    def task_id(self) -> str:
        return self.attempt.task_id


class Executor:
    """Prepares attempts and lets them go, adopts those of a server before this one, and reports
    what they do.

    `spec_of` says what the runner of a kind is told; new attempts are of `kind`, and others are
    what they were started as. `ahead` makes the spec of those for which that takes time.
    `upgraded` is called when the installation has become another version.
    """

    def __init__(
        self,
        home: Home,
        identity: Identity,
        environ: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        report: Callable[[Event], None],
        spec_of: SpecOf,
        kind: str = record.PROCESS,
        ahead: Ahead | None = None,
        upgraded: Callable[[], None] = lambda: None,
        *,
        installation: Installation = OURS,
        pause: float = _TRY_AGAIN_HELD,
    ) -> None:
        self._home = home
        self._identity = identity
        self._loop = loop
        self._clock = clock
        self._report = report
        self._spec_of = spec_of
        self._kind = kind
        self._ahead = ahead
        self._upgraded = upgraded
        self._pause = pause  # seconds between two tries of a machine that cannot start programs
        self._attempts = str(home.attempts)
        self._held: dict[str, _Held] = {}  # by task id
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._shared: set[str] = set()  # folders that all attempts share, made
        groups = self._groups()
        self._pool = Pool(
            loop,
            groups,
            home.local / "runners.log",
            environ,
            self._said,
            self._runner_gone,
            installation,
        )
        self._inherited = Inherited(loop, self._after_runner)
        self._folders = Folders(str(home.local / "stock"))
        loop.call_later(_WARM_AFTER, self._warm)

    def _groups(self) -> cgroup.Groups:
        """Where slots are made. What runners of earlier servers left in theirs is killed."""
        groups = cgroup.find(self._identity.id)
        before = read_record(self._home.groups, dict[str, str]) or {}
        for found in (cgroup.ours(before, self._identity.id), groups):
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
        """Disconnect from all runners; the attempts go on."""
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

    @property
    def held_back(self) -> str:
        """Why programs cannot be started on this machine now; empty while they can."""
        why = next((held.waits for held in self._held.values() if held.waits), "")
        return f"{CANNOT_START}{why}" if why else ""

    # --- what the core asks for -------------------------------------------------------------

    def prepare(self, job: Job, attempt: Attempt) -> bool:
        """Have a runner prepare an attempt, and not start its program.

        True when the program can begin at once; otherwise Prepared is reported when it can. What
        prevents it for good is reported as its end, and never ends the server.
        """
        held = self._held[attempt.task_id] = _Held(job, attempt, self._kind_of(attempt))
        return self._make_ready(held)

    def begin(self, task_id: str) -> None:
        """Have the runner of a prepared attempt start its program: the journal has it now."""
        held = self._held.get(task_id)
        if held is None:
            return  # its preparations have failed meanwhile
        held.may_have_begun = True
        if held.runner is None or not held.runner.send({"begin": task_id}):
            self._never_began(held)

    def withdraw(self, task_id: str) -> None:
        """Forget an attempt that was prepared for a commit that could not be made."""
        held = self._held.pop(task_id, None)
        if held is not None and held.making is not None:
            held.making.cancel()
        if held is not None and held.runner is not None:
            held.runner.send({"withdraw": task_id})

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Take over an attempt of an earlier server, whatever has become of it."""
        if not attempt.may_have_begun:
            self._report(NeverBegan(attempt.task_id, self._now()))
            return
        held = self._held[attempt.task_id] = _Held(job, attempt, self._kind_of(attempt))
        held.may_have_begun = True
        self._adopt(held)

    def _kind_of(self, attempt: Attempt) -> str:
        return record.PROCESS if attempt.is_aside else self._kind

    def _adopt(self, held: _Held) -> None:
        if self._closed:
            return
        task_id = held.task_id
        evidence = record.evidence(self._home.attempt(task_id))
        found = evidence.record
        if found is not None:
            held.kind, held.label = found.kind, found.label
        match evidence.verdict:
            case Verdict.ENDED:
                self._read_exit(task_id)
            case Verdict.BEGINS:
                self._loop.call_later(_LOOK_AGAIN, self._adopt, held)
            case Verdict.LIVES:
                assert found is not None
                self._inherited.watch(task_id, found)
                self._pass_on(held)
                self.look(task_id)
            case Verdict.NEVER_BEGAN:
                self._never_began(held)
            case Verdict.GONE:
                self._lost(held, RUNNER_LOST)
            case Verdict.UNKNOWN:
                why = f" ({evidence.error})" if evidence.error else ""
                log.error("attempt %s has no readable record%s", task_id, why)
                self._lost(held, NO_EVIDENCE)

    def stop(self, task_id: str) -> None:
        """Have the runner give the attempt its grace."""
        held = self._held.get(task_id)
        if held is None:
            return
        held.stops = True
        if held.making is not None:
            held.making.cancel()
        elif held.runner is None and not held.may_have_begun:  # it waits for the system
            self._end(task_id, Exit(start_failure=STOPPED_EARLY, log=NO_LINES))
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

    # --- preparing --------------------------------------------------------------------------

    def _make_ready(self, held: _Held) -> bool:
        """True when the program can begin at once. One that has begun before is a container,
        which another runner takes over.
        """
        if self._closed or self._held.get(held.task_id) is not held:
            return False
        kind, job, attempt = held.kind, held.job, held.attempt
        making = self._ahead(kind, job, attempt) if self._ahead is not None else None
        if making is None:
            return self._make_ready_with(held, lambda: self._spec_of(kind, job, attempt))
        held.making = self._loop.create_task(making)
        held.making.add_done_callback(lambda task: self._made(held, task))
        return False

    def _made(self, held: _Held, task: asyncio.Task[dict[str, Any]]) -> None:
        """A spec that took its time is there, or cannot be made, or is not wanted any more."""
        held.making = None
        if self._closed or self._held.get(held.task_id) is not held:
            return
        if task.cancelled() and held.may_have_begun:
            self._lost(held, RUNNER_LOST)
        elif task.cancelled():
            self._end(held.task_id, Exit(start_failure=STOPPED_EARLY, log=NO_LINES))
        elif self._make_ready_with(held, task.result):
            self._prepared(held)

    def _make_ready_with(self, held: _Held, make_spec: Callable[[], dict[str, Any]]) -> bool:
        try:
            spec = make_spec()
        except NoEnvironment as error:
            failure = str(error)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _MAY_PASS:
                return self._wait(held, _in_words(error))
            if not isinstance(error, OSError):
                number, job_id = held.attempt.number, held.job.id
                log.exception("attempt %s of job %s cannot start", number, job_id)
            failure = f"CannotCreateContainerError: {error}"
        else:
            try:
                return self._give_to_a_runner(held, spec)
            except OSError as error:  # of ours, not of the job's
                pause = _TRY_AGAIN if error.errno in _MAY_PASS else self._pause
                return self._wait(held, _in_words(error), pause)
        if held.may_have_begun:  # its container must not be left alone
            self._lost(held, RUNNER_LOST)
        else:
            self._end(held.task_id, Exit(start_failure=failure, log=NO_LINES))
        return False

    def _wait(self, held: _Held, why: str, pause: float = _TRY_AGAIN) -> bool:
        """This machine cannot start programs now: the attempt waits until it can."""
        if held.waits != why:
            log.warning("attempt %s waits for the system: %s", held.task_id, why)
            self._noted(held, f"{CANNOT_START}{why}")
        held.waits = why
        self._loop.call_later(pause, self._make_ready_again, held)
        return False

    def _make_ready_again(self, held: _Held) -> None:
        if self._make_ready(held):
            self._prepared(held)

    def _give_to_a_runner(self, held: _Held, spec: dict[str, Any]) -> bool:
        folder = f"{self._attempts}/{held.task_id}"
        self._folders.put(folder)
        for path in spec.get("shared", ()):
            self._make_once(path)
        # The runner gets this hold, so there is no moment at which it lives without it, and no
        # two servers can start the same attempt twice.
        file = record.take(f"{folder}/runner.json", os.O_CREAT)
        if file is None:
            self._loop.call_later(_LOOK_AGAIN, self._make_ready_again, held)
            return False
        try:
            runner = self._pool.take(held.kind)
            is_quick = (
                runner.version == VERSION and not held.may_have_begun and _is_quick(held, spec)
            )
            message = {"folder": folder, "spec": spec, "quick": is_quick}
            if held.may_have_begun:
                spec["resume"] = message["begin"] = True
            try:
                is_told = runner.send(message, file)
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
        if is_quick and is_told:
            held.waits = ""
        return is_quick and is_told

    def _make_once(self, path: str) -> None:
        if path not in self._shared:
            os.makedirs(path, 0o700, exist_ok=True)
            self._shared.add(path)

    def _prepared(self, held: _Held) -> None:
        held.waits = ""
        self._report(Prepared((held.task_id,), self._now()))

    def _never_began(self, held: _Held) -> None:
        """The journal has the start of this attempt, but its program certainly never began."""
        log.warning("attempt %s never began, and is prepared again", held.task_id)
        if held.runner is not None:  # it does not listen
            os.kill(held.runner.pid, signal.SIGKILL)
        self._held.pop(held.task_id, None)
        self._report(NeverBegan(held.task_id, self._now()))

    # --- what the runners tell --------------------------------------------------------------

    def _said(self, runner: Runner, message: dict[str, Any]) -> None:
        if "ready" in message:
            runner.version = message["ready"]
            if runner.version != VERSION:
                self._upgraded()
            return
        if "idle" in message:
            self._pool.free(runner)
            return
        task_id = message["task_id"]
        if "ended" in message or "withdrawn" in message:
            # Before the end is reported: what is started next wants a runner.
            runner.task_id = ""
            if "busy" not in message:
                self._pool.free(runner)
        held = self._held.get(task_id)
        if held is None or held.runner is not runner:
            if message.get("withdrawn") != "":
                log.warning(
                    "runner %s speaks of attempt %s, which it does not have", runner.pid, task_id
                )
        elif "withdrawn" in message:
            held.runner = None
            if held.may_have_begun:
                self._never_began(held)
            else:
                self._wait(held, message["withdrawn"], self._pause)
        elif "ended" in message:
            self._end(task_id, msgspec.convert(message["ended"], Exit))
        elif "prepared" in message:
            if runner.version == VERSION:  # else the server restarts, and the next one prepares it
                self._prepared(held)
        elif "started" in message:
            self._started(held, message["started"], message.get("address", ""))
        elif "progress" in message:
            self._noted(held, message["progress"])

    def _runner_gone(self, runner: Runner) -> None:
        held = self._held.get(runner.task_id)
        if held is None or held.runner is not runner:
            return
        held.runner = None
        if held.may_have_begun and runner.has_missed({"begin": held.task_id}):
            self._never_began(held)
            return
        if held.may_have_begun:
            self._after_runner(held.task_id)
            return
        held.lost += bool(runner.version)
        if not runner.version:
            why = f"the runner process ends as soon as it starts: {self._last_words()}"
            self._wait(held, why, self._pause)
        elif held.lost < _RUNNERS:
            self._make_ready_again(held)
        else:
            self._lost(held, RUNNER_LOST)

    def _last_words(self) -> str:
        """What the last runner wrote as it died."""
        try:
            lines = (self._home.local / "runners.log").read_bytes()[-2000:].splitlines()
        except OSError:
            lines = []
        wrote_nothing = f"it wrote nothing to {self._home.local / 'runners.log'}"
        return lines[-1].decode("utf-8", "replace") if lines else wrote_nothing

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
        """The runner of an attempt that has begun is gone: the files say what has become of it."""
        if self._closed:
            return
        self.look(task_id)
        if (self._home.attempt(task_id) / "exit.json").exists():
            self._read_exit(task_id)
        else:
            self._lost(self._held[task_id], RUNNER_LOST)

    def _read_exit(self, task_id: str) -> None:
        try:
            exit_ = read_record(self._home.attempt(task_id) / "exit.json", Exit)
        except OSError as error:
            log.error("exit.json of attempt %s cannot be read: %s", task_id, error)
            exit_ = None
        if exit_ is None:
            log.error("exit.json of attempt %s is not an exit record", task_id)
            self._kill_rest(task_id, NO_EVIDENCE)
        else:
            self._end(task_id, exit_)

    def _lost(self, held: _Held, why: str) -> None:
        """A runner died without a record. Its container goes on; processes are killed."""
        if self._identity.adopted_from:
            why = COPIED.format(self._identity.adopted_from)
        if held.kind != CONTAINER or self._identity.adopted_from:
            self._kill_rest(held.task_id, why)
        elif held.lost < _RUNNERS:
            held.lost += 1
            log.warning("attempt %s has lost its runner and gets another", held.task_id)
            self._make_ready(held)
        else:
            task = self._loop.create_task(self._remove_container(held.task_id, why))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _remove_container(self, task_id: str, why: str) -> None:
        if not await sweeper.remove(self._home, self._identity.id, task_id):
            log.error("the container of attempt %s cannot be removed now", task_id)
        self._kill_rest(task_id, why)

    def _kill_rest(
        self, task_id: str, why: str, killing: Iterator[list[int]] | None = None
    ) -> None:
        """Kill what a lost runner left behind, and report it lost."""
        if self._closed:
            return
        if killing is None:
            own = self._identity.id
            found = record.read(self._home.attempt(task_id))
            mark = remains.mark_of(own, task_id)
            killing = remains.kill(mark, remains.groups_of(found, own))
        if next(killing, None) is None:
            lost = why + _failure(self._home.attempt(task_id) / FAILURE)
            self._end(task_id, Exit(lost=lost, stopped_at=self._now()))
        else:
            self._loop.call_later(remains.PAUSE, self._kill_rest, task_id, why, killing)

    def _end(self, task_id: str, exit_: Exit) -> None:
        self._held.pop(task_id, None)
        self._report(Ended(task_id, exit_, self._now()))

    def _now(self) -> int:
        return int(self._clock.now() * 1000)


def _is_quick(held: _Held, spec: Mapping[str, Any]) -> bool:
    """Whether there is nothing to prepare that takes time, or may fail for a while."""
    has_environment = not spec.get("prepare") or is_whole(spec["made"])
    return held.kind == record.PROCESS and has_environment


def _in_words(error: OSError) -> str:
    where = error.filename or sys.executable
    return f"{where}: {error.strerror}"


def _failure(path: Path) -> str:
    """What has ended a runner, as it said it itself, behind the words for its end."""
    text = _last_line(path)[:_REASON]
    return f" It failed: {text}" if text else ""


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
