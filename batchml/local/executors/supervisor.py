"""Attempts on this machine, each run by a runner: prepare, begin, adopt and stop them.

Runners outlive the server (`runner/main.py`) and are used again (`pool.py`). Their files record
what they did; their messages only inform the server earlier.

An attempt is prepared before the journal records that its program may begin. Until then a failure
of this machine (a read-only disk, a missing installation) makes the attempt wait, and `held_back`
is the reason. After that, an attempt is prepared again only if there is evidence that its program
never began; without evidence it ends as a lost host.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from batchml.clock import Clock
from batchml.local.batch.events import (
    NO_LINES,
    AttemptEnded,
    AttemptExit,
    AttemptNeverBegan,
    AttemptPrepared,
    AttemptProgressed,
    AttemptStarted,
    Event,
)
from batchml.local.batch.lifecycle import STOPPED_EARLY
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.environments import is_complete
from batchml.local.executors import cgroup, record, sweeper
from batchml.local.executors.choice import CONTAINER, PROCESS
from batchml.local.executors.pool import (
    OURS,
    AdoptedRunners,
    FolderStock,
    Installation,
    RunnerHandle,
    RunnerPool,
    prepare_groups,
)
from batchml.local.executors.processors import MachineProcessors, give_processors
from batchml.local.executors.record import AttemptCondition
from batchml.local.executors.runner.link import HOST_LOST, VERSION
from batchml.local.executors.spec import RunnerSpecError, SpecMaker
from batchml.local.home import Home, read_record
from batchml.local.logs.check import restore_short
from batchml.local.store.identity import FolderIdentity
from batchml.model.run import CANNOT_START, MAKING

log = logging.getLogger("batchml.local")

RUNNER_LOST = f"{HOST_LOST}the runner of this attempt is gone."
NO_EVIDENCE = f"{HOST_LOST}no record of this attempt's end is left."
COPIED = (
    f"{HOST_LOST}this state folder was copied from {{}}, or restored from a backup of it, while "
    "the attempt ran."
)

_MAX_LOST_RUNNERS = 3  # with this many lost runners, an attempt counts as lost
_TRY_AGAIN = 0.2  # seconds, when the system has no room for a runner
_TRY_AGAIN_HELD = 1.0  # seconds, when this machine cannot start programs
_CHECK_AGAIN = 0.05  # seconds, for a runner that is about to write its record
_PRESTART_AFTER = 0.3  # seconds from the server's start to that of its first runner

# Errors that may pass: no room for files, processes or memory, or a disk that is broken or
# read-only.
_MAY_PASS = (
    errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT,
    errno.EROFS, errno.EIO,
)  # fmt: skip

Prefetch = Callable[[str, Job, JobAttempt], Coroutine[Any, Any, dict[str, Any]] | None]


class _LiveAttempt(Struct, eq=False):
    """An attempt that has not ended."""

    job: Job
    attempt: JobAttempt
    kind: str
    label: str = ""  # the name of the environment that is made for it
    runner: RunnerHandle | None = None  # None for a runner of an earlier server
    spec_task: asyncio.Task[dict[str, Any]] | None = None  # makes its spec
    lost_runners: int = 0
    processors: tuple[int, ...] = ()  # of its own
    waits_for: str = ""  # the reason why this machine cannot start it now
    may_have_begun: bool = False
    stop_requested: bool = False
    kill_requested: bool = False  # by an injected fault: without a grace period
    reported: object = None  # the last report of its preparation or start

    @property
    def task_id(self) -> str:
        return self.attempt.task_id


class AttemptSupervisor:
    """Prepares and starts attempts, adopts those of an earlier server, and reports their events.

    `make_spec` makes the runner's spec of an attempt by its kind. New attempts are of `kind`;
    others keep theirs. `prefetch` makes the spec of attempts for which that takes time.
    `on_upgrade` is called when another version of batchml has been installed. `processors` are
    those that attempts may have for themselves.
    """

    def __init__(
        self,
        home: Home,
        identity: FolderIdentity,
        environ: Mapping[str, str],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        report: Callable[[Event], None],
        make_spec: SpecMaker,
        kind: str = PROCESS,
        prefetch: Prefetch | None = None,
        on_upgrade: Callable[[], None] = lambda: None,
        *,
        installation: Installation = OURS,
        pause: float = _TRY_AGAIN_HELD,
        processors: MachineProcessors = MachineProcessors(),  # noqa: B008 (it never changes)
    ) -> None:
        self._home = home
        self._identity = identity
        self._loop = loop
        self._clock = clock
        self._report = report
        self._make_spec = make_spec
        self._kind = kind
        self._prefetch = prefetch
        self._on_upgrade = on_upgrade
        self._processors = processors
        self._pause = pause  # seconds between two tries of a machine that cannot start programs
        self._live: dict[str, _LiveAttempt] = {}  # by task id
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._shared: set[str] = set()  # shared folders that exist
        groups = prepare_groups(home, identity.id)
        self._pool = RunnerPool(
            loop,
            groups,
            home.local / "runners.log",
            environ,
            self._on_message,
            self._on_runner_exit,
            installation,
        )
        self._adopted = AdoptedRunners(loop, self._read_outcome)
        self._folders = FolderStock(str(home.local / "stock"))
        loop.call_later(_PRESTART_AFTER, self._prestart)

    def _prestart(self) -> None:
        if not self._closed:
            self._pool.prestart(self._kind)
            self._folders.fill()

    def close(self) -> None:
        """Disconnect from all runners; the attempts continue."""
        self._closed = True
        for live in self._live.values():
            if live.spec_task is not None:
                live.spec_task.cancel()
        for task in self._tasks:
            task.cancel()
        self._pool.close()
        self._folders.close()
        cgroup.forget(self._pool.groups)  # if a slot is left, the last runner does this
        self._adopted.close()

    @property
    def held_back(self) -> str:
        """The reason why programs cannot be started on this machine now; empty while they can."""
        why = next((live.waits_for for live in self._live.values() if live.waits_for), "")
        return f"{CANNOT_START}{why}" if why else ""

    # --- Interface of the core --------------------------------------------------------------

    def prepare(self, job: Job, attempt: JobAttempt) -> bool:
        """Have a runner prepare an attempt, without starting its program.

        True when the program can begin at once; otherwise AttemptPrepared is reported when it can.
        A permanent failure is reported as the attempt's end, and never ends the server.
        """
        live = self._live[attempt.task_id] = _LiveAttempt(job, attempt, self._kind_of(attempt))
        return self._prepare(live)

    def begin(self, task_id: str) -> None:
        """Have the runner start the program of a prepared attempt: the journal has recorded it
        now.
        """
        live = self._live.get(task_id)
        if live is None:
            return  # its preparation has failed meanwhile
        live.may_have_begun = True
        if live.runner is None or not live.runner.send({"begin": task_id}):
            self._report_never_began(live)

    def withdraw(self, task_id: str) -> None:
        """Forget an attempt that was prepared for a commit that failed."""
        live = self._live.pop(task_id, None)
        if live is not None and live.spec_task is not None:
            live.spec_task.cancel()
        if live is not None and live.runner is not None:
            live.runner.send({"withdraw": task_id})

    def adopt(self, job: Job, attempt: JobAttempt) -> None:
        """Take over an attempt of an earlier server, in whatever condition it is."""
        if not attempt.may_have_begun:
            self._report(AttemptNeverBegan(attempt.task_id, self._now()))
            return
        live = self._live[attempt.task_id] = _LiveAttempt(job, attempt, self._kind_of(attempt))
        live.may_have_begun = True
        self._adopt(live)

    def _kind_of(self, attempt: JobAttempt) -> str:
        return PROCESS if attempt.is_controller else self._kind

    def _adopt(self, live: _LiveAttempt) -> None:
        if self._closed:
            return
        task_id = live.task_id
        evidence = record.read_evidence(self._home.attempt(task_id))
        found = evidence.record
        if found is not None:
            live.kind, live.label = found.kind, found.label
        match evidence.condition:
            case AttemptCondition.ENDED:
                self._read_exit(task_id)
            case AttemptCondition.BEGINS:
                self._loop.call_later(_CHECK_AGAIN, self._adopt, live)
            case AttemptCondition.LIVES:
                assert found is not None
                self._adopted.watch(task_id, found)
                self._forward_stops(live)
                self.check_progress(task_id)
            case AttemptCondition.NEVER_BEGAN:
                self._report_never_began(live)
            case AttemptCondition.GONE:
                self._handle_loss(live, RUNNER_LOST)
            case AttemptCondition.UNKNOWN:
                why = f" ({evidence.error})" if evidence.error else ""
                log.error("attempt %s has no readable record%s", task_id, why)
                self._handle_loss(live, NO_EVIDENCE)

    def stop(self, task_id: str) -> None:
        """Have the runner stop the attempt, with its grace period."""
        live = self._live.get(task_id)
        if live is None:
            return
        live.stop_requested = True
        if live.spec_task is not None:
            live.spec_task.cancel()
        elif live.runner is None and not live.may_have_begun:  # it waits for this machine
            self._report_ended(task_id, AttemptExit(start_failure=STOPPED_EARLY, log=NO_LINES))
        self._forward_stops(live)

    def lose(self, task_id: str, fault: str, *, warned: bool) -> None:
        """Simulate the loss of the attempt's host: as a stop if `warned`, else without a grace
        period. `fault` is the injected fault, for the log.
        """
        if warned:
            self.stop(task_id)
            return
        live = self._live.get(task_id)
        if live is None:
            return
        try:
            line = f"batchml: injected fault: {fault}"
            (self._home.attempt(task_id) / "rehearsal").write_text(line, "utf-8")
        except OSError:
            pass  # full disk: the log will not mention the fault
        live.kill_requested = True
        self._forward_stops(live)

    def _forward_stops(self, live: _LiveAttempt) -> None:
        """Send a requested stop or kill to the attempt's runner, once it has one."""
        for wanted, word, number in (
            (live.stop_requested, "stop", signal.SIGTERM),
            (live.kill_requested, "kill", signal.SIGUSR1),
        ):
            if wanted and live.runner is not None:
                live.runner.send({word: live.task_id})
            elif wanted:
                self._adopted.signal(live.task_id, number)

    def check_progress(self, task_id: str) -> None:
        """Report what an attempt has done since the last check."""
        live = self._live.get(task_id)
        if live is None:
            return
        folder = self._home.attempt(task_id)
        found = record.read(folder)
        if found is not None and found.started_at is not None:
            self._report_started(live, found.started_at, found.address)
            return
        text = record.read_progress(folder)
        if text:
            self._report_progress(live, text)

    # --- Preparation ------------------------------------------------------------------------

    def _prepare(self, live: _LiveAttempt) -> bool:
        """True when the program can begin at once. An attempt whose program has begun before is a
        container that another runner takes over.
        """
        if self._closed or self._live.get(live.task_id) is not live:
            return False
        kind, job, attempt = live.kind, live.job, live.attempt
        making = self._prefetch(kind, job, attempt) if self._prefetch is not None else None
        if making is None:
            return self._prepare_with(live, lambda: self._make_spec(kind, job, attempt))
        live.spec_task = self._loop.create_task(making)
        live.spec_task.add_done_callback(lambda task: self._on_spec(live, task))
        return False

    def _on_spec(self, live: _LiveAttempt, task: asyncio.Task[dict[str, Any]]) -> None:
        """A spec that took time has been made, has failed, or is not needed any more."""
        live.spec_task = None
        if self._closed or self._live.get(live.task_id) is not live:
            return
        if task.cancelled() and live.may_have_begun:
            self._handle_loss(live, RUNNER_LOST)
        elif task.cancelled():
            self._report_ended(live.task_id, AttemptExit(start_failure=STOPPED_EARLY, log=NO_LINES))
        elif self._prepare_with(live, task.result):
            self._report_prepared(live)

    def _prepare_with(self, live: _LiveAttempt, make_spec: Callable[[], dict[str, Any]]) -> bool:
        try:
            spec = make_spec()
        except RunnerSpecError as error:
            failure = str(error)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _MAY_PASS:
                return self._retry_later(live, _describe(error))
            if not isinstance(error, OSError):
                number, job_id = live.attempt.number, live.job.id
                log.exception("attempt %s of job %s cannot start", number, job_id)
            failure = f"CannotCreateContainerError: {error}"
        else:
            self._give_processors(live, spec)
            try:
                return self._hand_to_runner(live, spec)
            except OSError as error:  # an error of batchml, not of the job
                pause = _TRY_AGAIN if error.errno in _MAY_PASS else self._pause
                return self._retry_later(live, _describe(error), pause)
        if live.may_have_begun:  # its container must not run unattended
            self._handle_loss(live, RUNNER_LOST)
        else:
            self._report_ended(live.task_id, AttemptExit(start_failure=failure, log=NO_LINES))
        return False

    def _give_processors(self, live: _LiveAttempt, spec: dict[str, Any]) -> None:
        """Choose processors that no other attempt uses. A controller has none of its own."""
        if live.attempt.is_controller:
            return
        if not live.processors:
            used = [number for each in self._live.values() for number in each.processors]
            live.processors = self._processors.choose(used, live.job.needs.vcpus)
        give_processors(spec, live.processors)

    def _retry_later(self, live: _LiveAttempt, why: str, pause: float = _TRY_AGAIN) -> bool:
        """This machine cannot start programs now: try the attempt again later."""
        if live.waits_for != why:
            log.warning("attempt %s waits for the system: %s", live.task_id, why)
            self._report_progress(live, f"{CANNOT_START}{why}")
        live.waits_for = why
        self._loop.call_later(pause, self._prepare_again, live)
        return False

    def _prepare_again(self, live: _LiveAttempt) -> None:
        if self._prepare(live):
            self._report_prepared(live)

    def _hand_to_runner(self, live: _LiveAttempt, spec: dict[str, Any]) -> bool:
        folder = f"{self._home.attempts}/{live.task_id}"
        self._folders.put(folder)
        for path in spec.get("shared", ()):
            self._make_once(path)
        # The runner receives the locked record. So there is no moment at which it lives without the
        # lock, and no two servers can start the same attempt.
        file = record.lock_record(f"{folder}/runner.json", os.O_CREAT)
        if file is None:
            self._loop.call_later(_CHECK_AGAIN, self._prepare_again, live)
            return False
        try:
            runner = self._pool.take(live.kind)
            is_quick = (
                runner.version == VERSION and not live.may_have_begun and _is_quick(live, spec)
            )
            message = {"folder": folder, "spec": spec, "quick": is_quick}
            if live.may_have_begun:
                spec["resume"] = message["begin"] = True
            try:
                is_sent = runner.send(message, file)
            except BaseException:
                self._pool.give_back(runner)
                raise
            live.label = spec.get("label", "")
            live.runner, runner.task_id = runner, live.task_id
            if not is_sent:
                # The runner is dead, or does not receive and is killed. The attempt gets another.
                os.kill(runner.pid, signal.SIGKILL)
        finally:
            os.close(file)
        self._forward_stops(live)
        if is_quick and is_sent:
            live.waits_for = ""
        return is_quick and is_sent

    def _make_once(self, path: str) -> None:
        if path not in self._shared:
            os.makedirs(path, 0o700, exist_ok=True)
            self._shared.add(path)

    def _report_prepared(self, live: _LiveAttempt) -> None:
        live.waits_for = ""
        self._report(AttemptPrepared((live.task_id,), self._now()))

    def _report_never_began(self, live: _LiveAttempt) -> None:
        """The journal has the start of this attempt, but its program certainly never began."""
        log.warning("attempt %s never began, and is prepared again", live.task_id)
        if live.runner is not None:  # it does not receive
            os.kill(live.runner.pid, signal.SIGKILL)
        self._live.pop(live.task_id, None)
        self._report(AttemptNeverBegan(live.task_id, self._now()))

    # --- Messages of runners ----------------------------------------------------------------

    def _on_message(self, runner: RunnerHandle, message: dict[str, Any]) -> None:
        if "ready" in message:
            runner.version = message["ready"]
            if runner.version != VERSION:
                self._on_upgrade()
            return
        if "idle" in message:
            self._pool.give_back(runner)
            return
        task_id = message["task_id"]
        if "ended" in message or "withdrawn" in message:
            # Before the end is reported, because the next attempt needs a runner.
            runner.task_id = ""
            if "busy" not in message:
                self._pool.give_back(runner)
        live = self._live.get(task_id)
        if live is None or live.runner is not runner:
            if message.get("withdrawn") != "":
                log.warning(
                    "runner %s reports on attempt %s, which it does not have", runner.pid, task_id
                )
        elif "withdrawn" in message:
            live.runner = None
            if live.may_have_begun:
                self._report_never_began(live)
            else:
                self._retry_later(live, message["withdrawn"], self._pause)
        elif "ended" in message:
            self._report_ended(task_id, msgspec.convert(message["ended"], AttemptExit))
        elif "prepared" in message:
            # Else this server restarts, and the next one prepares the attempt.
            if runner.version == VERSION:
                self._report_prepared(live)
        elif "started" in message:
            self._report_started(live, message["started"], message.get("address", ""))
        elif "progress" in message:
            self._report_progress(live, message["progress"])

    def _on_runner_exit(self, runner: RunnerHandle) -> None:
        live = self._live.get(runner.task_id)
        if live is None or live.runner is not runner:
            return
        live.runner = None
        if live.may_have_begun and runner.has_missed({"begin": live.task_id}):
            self._report_never_began(live)
            return
        if live.may_have_begun:
            self._read_outcome(live.task_id)
            return
        live.lost_runners += bool(runner.version)
        if not runner.version:
            why = f"the runner process ends as soon as it starts: {self._last_runner_error()}"
            self._retry_later(live, why, self._pause)
        elif live.lost_runners < _MAX_LOST_RUNNERS:
            self._prepare_again(live)
        else:
            self._handle_loss(live, RUNNER_LOST)

    def _last_runner_error(self) -> str:
        """The last line that a runner wrote as it died."""
        try:
            lines = (self._home.local / "runners.log").read_bytes()[-2000:].splitlines()
        except OSError:
            lines = []
        wrote_nothing = f"it wrote nothing to {self._home.local / 'runners.log'}"
        return lines[-1].decode("utf-8", "replace") if lines else wrote_nothing

    def _report_started(self, live: _LiveAttempt, at: int, address: str) -> None:
        if live.reported != at:
            live.reported = at
            self._report(AttemptStarted(live.task_id, at, address))

    def _report_progress(self, live: _LiveAttempt, text: str) -> None:
        if live.reported != text:
            live.reported = text
            about = f"{MAKING}{live.label}: {text}" if live.label else text
            self._report(AttemptProgressed(live.task_id, about, self._now()))

    def _read_outcome(self, task_id: str) -> None:
        """The runner of a begun attempt has ended: read the outcome from its files."""
        if self._closed:
            return
        self.check_progress(task_id)
        if (self._home.attempt(task_id) / "exit.json").exists():
            self._read_exit(task_id)
        else:
            self._handle_loss(self._live[task_id], RUNNER_LOST)

    def _read_exit(self, task_id: str) -> None:
        try:
            exit_ = read_record(self._home.attempt(task_id) / "exit.json", AttemptExit)
        except OSError as error:
            log.error("exit.json of attempt %s cannot be read: %s", task_id, error)
            exit_ = None
        if exit_ is None:
            log.error("exit.json of attempt %s is not an exit record", task_id)
            self._kill_leftovers(task_id, NO_EVIDENCE)
        else:
            # The record may have survived a power cut that took the log.
            restore_short(str(self._home.attempt(task_id) / "log"), exit_.log)
            self._report_ended(task_id, exit_)

    def _handle_loss(self, live: _LiveAttempt, why: str) -> None:
        """A runner died without a record. Its container continues; processes are killed."""
        if self._identity.adopted_from:
            why = COPIED.format(self._identity.adopted_from)
        if live.kind != CONTAINER or self._identity.adopted_from:
            self._kill_leftovers(live.task_id, why)
        elif live.lost_runners < _MAX_LOST_RUNNERS:
            live.lost_runners += 1
            log.warning("attempt %s has lost its runner and gets another", live.task_id)
            self._prepare(live)
        else:
            task = self._loop.create_task(self._remove_container(live.task_id, why))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _remove_container(self, task_id: str, why: str) -> None:
        if not await sweeper.remove(self._home, self._identity.id, task_id):
            log.error("the container of attempt %s cannot be removed now", task_id)
        self._kill_leftovers(task_id, why)

    def _kill_leftovers(
        self, task_id: str, why: str, killing: Iterator[list[int]] | None = None
    ) -> None:
        """Kill the processes of a lost runner, and report the attempt lost."""
        if self._closed:
            return
        if killing is None:
            own = self._identity.id
            found = record.read(self._home.attempt(task_id))
            mark = record.mark_of(own, task_id)
            killing = record.kill_processes(mark, record.groups_of(found, own))
        if next(killing, None) is None:
            lost = why + record.describe_failure(self._home.attempt(task_id))
            self._report_ended(task_id, AttemptExit(lost=lost, stopped_at=self._now()))
        else:
            self._loop.call_later(record.PAUSE, self._kill_leftovers, task_id, why, killing)

    def _report_ended(self, task_id: str, exit_: AttemptExit) -> None:
        self._live.pop(task_id, None)
        self._report(AttemptEnded(task_id, exit_, self._now()))

    def _now(self) -> int:
        return int(self._clock.now() * 1000)


def _is_quick(live: _LiveAttempt, spec: Mapping[str, Any]) -> bool:
    """Whether no part of the attempt's preparation takes time or may fail temporarily."""
    has_environment = not spec.get("prepare") or is_complete(spec["made"])
    return live.kind == PROCESS and has_environment


def _describe(error: OSError) -> str:
    where = error.filename or sys.executable
    return f"{where}: {error.strerror}"
