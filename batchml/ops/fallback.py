"""Move a run that finds no host to another queue: when (pure), and how, so that it stays one run.

1. CancelJob where it waits. Of a job that has started it does nothing, and then nothing else is
   done: so what is FAILED with our words has never begun (again), and never will.
2. A look in the other queue for a job of the same name: whoever moved it before us was faster.
3. The intent in the history, SubmitJob, and the id in the history, as for any submission.

Killed between any two of them, there is one job or none, and whoever looks next goes on at 2: the
end of the first job says where it was going. The runtime's claim is the last fence: of two jobs
that follow the same one only the first runs.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import BatchApi
from batchml.aws.batch.requests import Submission
from batchml.clock import Clock
from batchml.errors import BatchmlError, ServiceError
from batchml.model.fallback import MOVED, MOVED_TAG, moved_to, moving_reason, said_gone_on
from batchml.model.record import Record
from batchml.model.run import JobStatus, Run
from batchml.ops.flights import Flights
from batchml.ops.history import History
from batchml.ops.reconcile import adopt, lag, look_up
from batchml.ops.submit import Interrupted, carry

PATIENCE = 30.0  # seconds in which AWS Batch ends a job that waits, once it was asked to
LOOK = 1.0  # seconds between two looks meanwhile
OVERDUE = 600  # seconds past the wait after which a command does what the watcher was to do

# Of a record: what came of a run, before anything has.
_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("status", "outcome", "reason", "container_reason", "log_group"), ""),
    **dict.fromkeys(("exit_code", "created_at", "started_at", "stopped_at", "cost")),
    **dict.fromkeys(("lost", "measured"), False),
    "attempts": (), "children": {}, "failures": {}, "metrics": {}, "max_attempts": 1,
}  # fmt: skip

_OLD = 30 * 86_400  # seconds that a plan is older than the newest one

_WAITING = (JobStatus.SUBMITTED, JobStatus.RUNNABLE)


class Plan(Struct, frozen=True):
    """All that a move needs. `requests` are those of the job in the other queue.

    `keeps`: what the run has saved is kept by its key, so a run that has begun before may move.
    `lent` are variables whose values may be secret: they are not kept, but read from the first job.
    """

    key: str
    after: int  # seconds
    requests: Submission
    record: Record
    keeps: bool = False
    lent: tuple[str, ...] = ()

    @property
    def queue(self) -> str:
        """Where it goes: a name in AWS."""
        return str(self.requests.submit["jobQueue"])

    def about(self, record: Record) -> "Plan":
        """The same for the run as it is sent at last."""
        tags = dict(record.tags)
        requests = replace(self.requests, submit={**self.requests.submit, "tags": tags})
        return replace(self, requests=requests, record=replace(record, queue=self.queue, tags=tags))


class Step(Enum):
    WAIT = "it may yet begin, or it runs"
    LEAVE = "its wait is over: cancel it where it is"
    GO_ON = "it was cancelled for the move: submit it where it goes"
    OVER = "it has ended, or it can move no more"


class Decision(Struct, frozen=True):
    step: Step
    seconds: float = 0.0  # of WAIT, until there may be something to do; 0: not known


def decide(plan: Plan, run: Run, now: int, ready: int = 0) -> Decision:
    """What is to be done about a run that may move. Pure; times in ms since the epoch.

    `ready` is when it was first seen to wait for nothing but a host, where its own times do not
    say that: of a run that depends on others.
    """
    if run.status.is_terminal:
        return Decision(Step.GO_ON if moved_to(run) == plan.queue else Step.OVER)
    if run.queue == plan.queue:  # it is there, whoever has moved it: to leave again would end it
        return Decision(Step.OVER)
    if run.status not in _WAITING or run.is_terminated or run.is_cancelled:
        return Decision(Step.WAIT)
    if run.attempts and not plan.keeps:
        return Decision(Step.OVER)
    since = _since(run, ready)
    if not since:
        return Decision(Step.WAIT, plan.after)
    left = plan.after - (now - since) / 1000
    return Decision(Step.WAIT, left) if left > 0 else Decision(Step.LEAVE)


def _since(run: Run, ready: int) -> int:
    """From when on a run waits for a host; 0 where nobody can tell yet."""
    ended = max((each.stopped_at or 0 for each in run.attempts), default=0)
    if ended:
        return ended  # back in the queue, after its host was lost
    return ready if run.depends_on else run.created_at or 0


def lending(requests: Submission, env: Container[str]) -> tuple[Submission, tuple[str, ...]]:
    """Requests without the values of these variables, and the names of those that they had.

    A document beside them is in the run's store already.
    """
    lent = tuple(
        each["name"]
        for overrides in _overrides(requests.submit)
        for each in overrides.get("environment", ())
        if each["name"] in env
    )

    def without(known: list[dict[str, str]]) -> list[dict[str, str]]:
        return [each for each in known if each["name"] not in env]

    return replace(requests, submit=_varied(requests.submit, without), document=None), lent


def next_requests(requests: Submission, job_id: str, values: Mapping[str, str] = {}) -> Submission:
    """The second job's, which says whom it follows: by a tag, and to the claim by a variable.

    `values` are the variables that the first job has lent it.
    """
    more = [{"name": name, "value": value} for name, value in {**values, MOVED: job_id}.items()]
    submit = _varied(requests.submit, lambda known: known + more)
    return replace(
        requests, submit={**submit, "tags": {**submit.get("tags", {}), MOVED_TAG: job_id}}
    )


def _overrides(submit: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The overrides of a job's container, or of those of its nodes."""
    nodes = submit.get("nodeOverrides")
    if nodes is None:
        return [submit["containerOverrides"]]
    return [each["containerOverrides"] for each in nodes["nodePropertyOverrides"]]


def _varied(
    submit: Mapping[str, Any], vary: Callable[[list[dict[str, str]]], list[dict[str, str]]]
) -> dict[str, Any]:
    """A SubmitJob request with other variables; the one given stays as it is."""
    varied = [
        {**each, "environment": vary(list(each.get("environment", ())))}
        for each in _overrides(submit)
    ]
    nodes = submit.get("nodeOverrides")
    if nodes is None:
        return {**submit, "containerOverrides": varied[0]}
    ranges = [
        {**each, "containerOverrides": one}
        for each, one in zip(nodes["nodePropertyOverrides"], varied, strict=True)
    ]
    return {**submit, "nodeOverrides": {**nodes, "nodePropertyOverrides": ranges}}


def successor(api: BatchApi, run: Run) -> str:
    """The job that goes on where a job was moved to; empty while there is none. One call.

    The other job has the same name, of which the submission's key is a part.
    """
    queue = moved_to(run)
    if not queue or not run.job_name:
        return ""
    try:
        found = api.called(queue, run.job_name)
    except ServiceError as error:
        if error.code == "ClientException":  # the queue is gone, and with it its jobs
            return ""
        raise
    return adopt(api, found, lambda _: None) if found else ""


class Mover:
    """One run that may move, with the state folder of who looks after it."""

    def __init__(
        self,
        api: Callable[[], BatchApi],
        history: History,
        plan: Plan,
        clock: Clock,
        tell: Callable[[str], None],
        share: str = "",
    ) -> None:
        self._api = api
        self._history = history
        self.plan = plan
        self._clock = clock
        self._tell = tell
        self._share = share
        self._ready = 0
        self._was_pending = False

    def see(self, run: Run, patience: int = 0) -> Decision:
        """What is to be done about the run as it is now; `patience`: seconds left to others."""
        now = int(self._clock.now() * 1000)
        if run.status in _WAITING and not self._ready:
            self._ready = now
        plan = replace(self.plan, after=self.plan.after + patience) if patience else self.plan
        return decide(plan, run, now, self._ready)

    def step(self, run: Run) -> str:
        """Do what is to be done about it now; the job that it is at last, "" while it may move."""
        step = self.see(run).step
        if step is Step.OVER:
            return run.job_id
        now = self.move(run) if step is not Step.WAIT else run.job_id
        return now if now != run.job_id else ""

    def move(self, run: Run) -> str:
        """Move a run whose wait is over; the id of the job that goes on, which is its own when it
        started meanwhile.

        Raises what CancelJob, DescribeJobs and SubmitJob do, and OSError when the intent could not
        be kept. Then it can be done again.
        """
        flights = Flights.beside(self._history, self.plan.record.env)
        with flights.flight(self.plan.key):
            # As it is now: another process of this machine may have had the flight before.
            now = self._move(self._api().describe([run.job_id]).get(run.job_id, run))
            flights.landed(self.plan.key)
            return now

    def _move(self, run: Run) -> str:
        was_left = run.status.is_terminal
        if not was_left:
            self._check(run)
            run = self._leave(run)
        return self._go_on(run, was_left) if moved_to(run) == self.plan.queue else run.job_id

    def _check(self, run: Run) -> None:
        """Before anything is given up: is there a queue to go to? Raises ServiceError."""
        self._lent(run)
        if not self._api().takes_jobs(self.plan.queue):
            raise ServiceError(
                "CancelJob",
                "ClientException",
                f"The queue {self.plan.queue} is not there, or takes no jobs: the run stays where "
                "it waits.",
                400,
            )

    def _lent(self, run: Run) -> dict[str, str]:
        """The values that are not in the plan. Raises ServiceError where AWS does not tell them."""
        missing = [name for name in self.plan.lent if name not in run.environment]
        if missing:
            raise ServiceError(
                "DescribeJobs",
                "ClientException",
                f"AWS Batch does not tell the run's variables {', '.join(missing)}: nothing is "
                "submitted without them.",
                400,
            )
        return {name: run.environment[name] for name in self.plan.lent}

    def _leave(self, run: Run) -> Run:
        """Cancel it; the run once it has ended, or is seen to have started all the same."""
        api, job_id = self._api(), run.job_id
        api.cancel(job_id, moving_reason(self.plan.queue, self.plan.after))
        end = self._clock.monotonic() + PATIENCE
        while True:
            run = api.describe([job_id]).get(job_id, run)
            if run.status.is_terminal or self._clock.monotonic() >= end:
                return run
            self._clock.sleep(LOOK)

    def _go_on(self, run: Run, was_left: bool) -> str:
        """Submit it where it goes, unless somebody has. One that was left by another, who may have
        been about to, is looked for as long as AWS Batch may hide it.
        """
        api, before = self._api(), run.job_id
        record = replace(
            self.plan.record, job_id=before, moved=before, at=int(self._clock.now() * 1000)
        )
        seconds = lag(api) if was_left else 0.0
        found = look_up(api, record, self._clock, seconds)
        if found:
            job_id = adopt(api, found, self._tell)
            self._keep(record)
            self._history.submitted(record.key, job_id)
            self._tell(said_gone_on(self.plan.queue, job_id))
            return job_id
        requests = next_requests(self.plan.requests, before, self._lent(run))
        record = replace(record, tags=requests.submit["tags"])
        self._history.intend(record)
        try:
            job_id = carry(
                api, requests, self._history, record,
                clock=self._clock, share=self._share, tell=self._tell,
            )  # fmt: skip
        except (BatchmlError, Interrupted):
            self._keep(record)  # it was not refused for good: the move can be made again
            self._tell(
                f"It was taken out of its queue, and is not in {self.plan.queue} yet: whoever "
                f"waits for it next tries again (batchml wait {before})."
            )
            raise
        job_id = self._only(record, job_id)
        self._tell(said_gone_on(self.plan.queue, job_id))
        return job_id

    def _only(self, record: Record, job_id: str) -> str:
        """The job that stays where somebody elsewhere has made the same move just now."""
        try:
            found = self._api().called(record.queue, record.job_name)
        except BatchmlError:
            return job_id
        kept = adopt(self._api(), found, self._tell) if len(found) > 1 else job_id
        if kept != job_id:
            self._history.submitted(record.key, kept)
        return kept

    def _keep(self, record: Record) -> None:
        with suppress(OSError):
            self._history.intend(record)


class Plans:
    """The plans of an environment's runs that may move: a file each, private to the user.

    It holds what requests hold but the values of the job's own variables, and goes with the run's
    end or its move.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "Plans":
        return cls(history.path.parent / "fallbacks" / (env or "-"))

    def keep(self, plan: Plan) -> None:
        """On return it is on the disk. Raises OSError, and then nothing may be sent."""
        from batchml.runtime.storage.files import write_atomically

        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._forget_old()
        write_atomically(str(self._folder / plan.key), encode(plan))

    def _forget_old(self) -> None:
        """Of runs that nobody has asked about since: by now AWS Batch may have forgotten them."""
        with suppress(OSError), os.scandir(self._folder) as entries:
            times = [(entry.path, entry.stat().st_mtime) for entry in entries]
            newest = max((at for _, at in times), default=0.0)
            for path, at in times:
                if at < newest - _OLD:
                    os.unlink(path)

    def find(self, key: str) -> Plan | None:
        try:
            return read(self._folder.joinpath(key).read_bytes()) if key else None
        except (OSError, msgspec.DecodeError):
            return None

    def watched(self, key: str, job_id: str) -> None:
        """Note the run that looks after this one."""
        with suppress(OSError):
            self._folder.joinpath(f"{key}.watcher").write_text(job_id, "utf-8")

    def watcher(self, key: str) -> str:
        try:
            return self._folder.joinpath(f"{key}.watcher").read_text("utf-8").strip()
        except OSError:
            return ""

    def clear(self) -> None:
        """Forget all of them."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def drop(self, key: str) -> None:
        for name in (key, f"{key}.watcher"):
            with suppress(OSError):
                self._folder.joinpath(name).unlink()


def encode(plan: Plan) -> bytes:
    return msgspec.json.encode(plan)


def read(data: bytes) -> Plan:
    """Raises msgspec.DecodeError for what is no plan."""
    return msgspec.json.decode(data, type=Plan)


def digest_of(data: bytes) -> str:
    """What tells that a plan in the bucket, where programs in jobs write too, is the one meant."""
    return hashlib.sha256(data).hexdigest()


def followed(record: Record, before: str, queue: str) -> Record:
    """What is kept of a run once it goes on in another queue: what was asked for, and no end."""
    return replace(record, **_NOTHING, job_id=before, moved=before, queue=queue)
