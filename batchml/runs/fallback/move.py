"""Move a run that finds no host to another queue: when (pure), and how, so that it stays one run.

1. CancelJob in the first queue. It has no effect on a job that has started; then nothing else
happens. So a job that is FAILED with our reason has never begun, and never will. 2. A look in the
other queue for a job of the same name: another process may have been faster. 3. The intent in the
history, SubmitJob, and the id in the history, as for any submission.

After a kill between any two steps there is one job or none, and the next process goes on at step 2:
the reason of the first job's end names the other queue. The runtime's claim is the last fence: of
two jobs that follow the same job only the first runs.
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

from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.requests import SubmissionRequests
from batchml.clock import Clock
from batchml.errors import BatchmlError, ServiceError
from batchml.history import History
from batchml.model.fallback import MOVED, MOVED_TAG, describe_move_done, move_reason, moved_to
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.in_flight import InFlight
from batchml.runs.send import (
    Interrupted,
    Submitter,
    keep_one_job,
    listing_delay,
    look_up,
    send_intent,
)
from batchml.runtime.storage.files import write_atomically

PATIENCE = 30.0  # seconds in which AWS Batch ends a waiting job after CancelJob
POLL_PAUSE = 1.0  # seconds between two polls meanwhile
WATCHER_GRACE = 600  # seconds past the wait after which a command does the watcher's work

# Fields of a record that describe a run's end: the values before it.
_NO_END: dict[str, Any] = {
    **dict.fromkeys(("status", "outcome", "reason", "container_reason", "log_group"), ""),
    **dict.fromkeys(("exit_code", "created_at", "started_at", "stopped_at", "cost")),
    **dict.fromkeys(("lost", "measured"), False),
    "attempts": (), "children": {}, "failures": {}, "metrics": {}, "max_attempts": 1,
}  # fmt: skip

_MAX_PLAN_AGE = 30 * 86_400  # seconds that a plan is older than the newest one

_WAITING = (JobStatus.SUBMITTED, JobStatus.RUNNABLE)


class FallbackPlan(Struct, frozen=True):
    """Everything that a move needs.

    `requests` are those of the job in the other queue. `keeps`: checkpoints are kept by the run's
    key, so a run that has begun before may move. `lent` are variables whose values may be secret:
    they are not stored, but read from the first job.
    """

    key: str
    after: int  # seconds
    requests: SubmissionRequests
    record: Record
    keeps: bool = False
    lent: tuple[str, ...] = ()

    @property
    def queue(self) -> str:
        """The other queue: a name in AWS."""
        return str(self.requests.submit["jobQueue"])

    def about(self, record: Record) -> "FallbackPlan":
        """The plan for the run as it is finally sent."""
        tags = dict(record.tags)
        requests = replace(self.requests, submit={**self.requests.submit, "tags": tags})
        return replace(self, requests=requests, record=replace(record, queue=self.queue, tags=tags))


class MoveStep(Enum):
    WAIT = "it may yet begin, or it runs"
    LEAVE = "its wait is over: cancel it where it is"
    GO_ON = "it was cancelled for the move: submit it where it goes"
    OVER = "it has ended, or it can move no more"


class MoveDecision(Struct, frozen=True):
    step: MoveStep
    seconds: float = 0.0  # of WAIT: until the next step may be due; 0: not known


def decide(plan: FallbackPlan, run: Run, now: int, ready: int = 0) -> MoveDecision:
    """What to do about a run that may move. Pure; times in ms since the epoch.

    `ready` is when it was first seen to wait for nothing but a host, where its own times do not
    show that: for a run with dependencies.
    """
    if run.status.is_terminal:
        return MoveDecision(MoveStep.GO_ON if moved_to(run) == plan.queue else MoveStep.OVER)
    if run.queue == plan.queue:  # it was moved already: to leave again would end it
        return MoveDecision(MoveStep.OVER)
    if run.status not in _WAITING or run.is_terminated or run.is_cancelled:
        return MoveDecision(MoveStep.WAIT)
    if run.attempts and not plan.keeps:
        return MoveDecision(MoveStep.OVER)
    since = _waiting_since(run, ready)
    if not since:
        return MoveDecision(MoveStep.WAIT, plan.after)
    left = plan.after - (now - since) / 1000
    return MoveDecision(MoveStep.WAIT, left) if left > 0 else MoveDecision(MoveStep.LEAVE)


def _waiting_since(run: Run, ready: int) -> int:
    """Since when a run waits for a host; 0 where that is not known yet."""
    ended = max((each.stopped_at or 0 for each in run.attempts), default=0)
    if ended:
        return ended  # back in the queue, after its host was lost
    return ready if run.depends_on else run.created_at or 0


def leave_out_values(
    requests: SubmissionRequests, env: Container[str]
) -> tuple[SubmissionRequests, tuple[str, ...]]:
    """The requests without the values of these variables, and the names of the variables that they
    had.

    A document of the requests is in the run's store already.
    """
    lent = tuple(
        each["name"]
        for overrides in _container_overrides(requests.submit)
        for each in overrides.get("environment", ())
        if each["name"] in env
    )

    def without(known: list[dict[str, str]]) -> list[dict[str, str]]:
        return [each for each in known if each["name"] not in env]

    return replace(
        requests, submit=_with_environment(requests.submit, without), document=None
    ), lent


def next_requests(
    requests: SubmissionRequests, job_id: str, values: Mapping[str, str] = {}
) -> SubmissionRequests:
    """The second job's requests, which name the first job: in a tag, and in a variable for the
    claim.

    `values` are the values of the variables of the first job.
    """
    more = [{"name": name, "value": value} for name, value in {**values, MOVED: job_id}.items()]
    submit = _with_environment(requests.submit, lambda known: known + more)
    return replace(
        requests, submit={**submit, "tags": {**submit.get("tags", {}), MOVED_TAG: job_id}}
    )


def _container_overrides(submit: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The overrides of a job's container, or of the containers of its nodes."""
    nodes = submit.get("nodeOverrides")
    if nodes is None:
        return [submit["containerOverrides"]]
    return [each["containerOverrides"] for each in nodes["nodePropertyOverrides"]]


def _with_environment(
    submit: Mapping[str, Any], vary: Callable[[list[dict[str, str]]], list[dict[str, str]]]
) -> dict[str, Any]:
    """The SubmitJob request with other variables; the given one stays as it is."""
    varied = [
        {**each, "environment": vary(list(each.get("environment", ())))}
        for each in _container_overrides(submit)
    ]
    nodes = submit.get("nodeOverrides")
    if nodes is None:
        return {**submit, "containerOverrides": varied[0]}
    ranges = [
        {**each, "containerOverrides": one}
        for each, one in zip(nodes["nodePropertyOverrides"], varied, strict=True)
    ]
    return {**submit, "nodeOverrides": {**nodes, "nodePropertyOverrides": ranges}}


def successor(api: JobApi, run: Run) -> str:
    """The job that goes on where a job was moved to; empty while there is none. One call.

    Both jobs have the same name, of which the submission's key is a part.
    """
    queue = moved_to(run)
    if not queue or not run.job_name:
        return ""
    try:
        found = api.find_by_name(queue, run.job_name)
    except ServiceError as error:
        if error.code == "ClientException":  # the queue is gone, and with it its jobs
            return ""
        raise
    return keep_one_job(api, found, lambda _: None) if found else ""


class Mover:
    """One run that may move, with the state folder of the process that watches it."""

    def __init__(
        self,
        api: Callable[[], JobApi],
        history: History,
        plan: FallbackPlan,
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

    def see(self, run: Run, patience: int = 0) -> MoveDecision:
        """What to do about the run as it is now; `patience`: seconds left to other processes."""
        now = int(self._clock.now() * 1000)
        if run.status in _WAITING and not self._ready:
            self._ready = now
        plan = replace(self.plan, after=self.plan.after + patience) if patience else self.plan
        return decide(plan, run, now, self._ready)

    def step(self, run: Run) -> str:
        """Do what is due now; the id of the final job, "" while the run may still move."""
        step = self.see(run).step
        if step is MoveStep.OVER:
            return run.job_id
        now = self.move(run) if step is not MoveStep.WAIT else run.job_id
        return now if now != run.job_id else ""

    def move(self, run: Run) -> str:
        """Move a run whose wait is over; the id of the job that goes on: its own if it started
        meanwhile.

        Raises the errors of CancelJob, DescribeJobs and SubmitJob, and OSError when the intent
        could not be kept. Then it can be called again.
        """
        flights = InFlight.beside(self._history, self.plan.record.env)
        with flights.flight(self.plan.key):
            # As it is now: another process of this machine may have had the flight before.
            now = self._move(self._api().describe([run.job_id]).get(run.job_id, run))
            flights.remove(self.plan.key)
            return now

    def _move(self, run: Run) -> str:
        was_left = run.status.is_terminal
        if not was_left:
            self._check(run)
            run = self._leave(run)
        return self._go_on(run, was_left) if moved_to(run) == self.plan.queue else run.job_id

    def _check(self, run: Run) -> None:
        """Check, before the cancel, that the other queue exists. Raises ServiceError."""
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
        """The values that the plan leaves out. Raises ServiceError if AWS does not return them."""
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
        """Cancel the job; the run once it has ended, or is seen to have started after all."""
        api, job_id = self._api(), run.job_id
        api.cancel(job_id, move_reason(self.plan.queue, self.plan.after))
        end = self._clock.monotonic() + PATIENCE
        while True:
            run = api.describe([job_id]).get(job_id, run)
            if run.status.is_terminal or self._clock.monotonic() >= end:
                return run
            self._clock.sleep(POLL_PAUSE)

    def _go_on(self, run: Run, was_left: bool) -> str:
        """Submit the job in the other queue, unless another process has.

        A job that another process cancelled is looked for as long as AWS Batch may hide its
        successor.
        """
        api, before = self._api(), run.job_id
        record = replace(
            self.plan.record, job_id=before, moved=before, at=int(self._clock.now() * 1000)
        )
        seconds = listing_delay(api) if was_left else 0.0
        found = look_up(api, record, self._clock, seconds)
        if found:
            job_id = keep_one_job(api, found, self._tell)
            self._keep(record)
            self._history.add_job_id(record.key, job_id)
            self._tell(describe_move_done(self.plan.queue, job_id))
            return job_id
        requests = next_requests(self.plan.requests, before, self._lent(run))
        record = replace(record, tags=requests.submit["tags"])
        self._history.intend(record)
        try:
            submitter = Submitter(api, self._history, self._clock, self._tell, share=self._share)
            job_id = send_intent(submitter, requests, record)
        except (BatchmlError, Interrupted):
            self._keep(record)  # it was not refused for good: the move can be made again
            self._tell(
                f"It was taken out of its queue, and is not in {self.plan.queue} yet: whoever "
                f"waits for it next tries again (batchml wait {before})."
            )
            raise
        job_id = self._only(record, job_id)
        self._tell(describe_move_done(self.plan.queue, job_id))
        return job_id

    def _only(self, record: Record, job_id: str) -> str:
        """The job that stays where another machine has made the same move just now."""
        try:
            found = self._api().find_by_name(record.queue, record.job_name)
        except BatchmlError:
            return job_id
        kept = keep_one_job(self._api(), found, self._tell) if len(found) > 1 else job_id
        if kept != job_id:
            self._history.add_job_id(record.key, kept)
        return kept

    def _keep(self, record: Record) -> None:
        with suppress(OSError):
            self._history.intend(record)


class FallbackPlans:
    """The plans of an environment's runs that may move: one file each, readable by the user alone.

    A file holds the requests without the values of the job's own variables. It is deleted after the
    run's end or its move.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "FallbackPlans":
        return cls(history.path.parent / "fallbacks" / (env or "-"))

    def keep(self, plan: FallbackPlan) -> None:
        """Write the plan to disk. Raises OSError; then nothing may be sent."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._forget_old()
        write_atomically(str(self._folder / plan.key), encode_plan(plan))

    def _forget_old(self) -> None:
        """Delete plans of runs that nobody asked about for long: AWS Batch may have forgotten the
        runs.
        """
        with suppress(OSError), os.scandir(self._folder) as entries:
            times = [(entry.path, entry.stat().st_mtime) for entry in entries]
            newest = max((at for _, at in times), default=0.0)
            for path, at in times:
                if at < newest - _MAX_PLAN_AGE:
                    os.unlink(path)

    def find(self, key: str) -> FallbackPlan | None:
        try:
            return read_plan(self._folder.joinpath(key).read_bytes()) if key else None
        except (OSError, msgspec.DecodeError):
            return None

    def watched(self, key: str, job_id: str) -> None:
        """Note the run that watches this one."""
        with suppress(OSError):
            self._folder.joinpath(f"{key}.watcher").write_text(job_id, "utf-8")

    def watcher(self, key: str) -> str:
        try:
            return self._folder.joinpath(f"{key}.watcher").read_text("utf-8").strip()
        except OSError:
            return ""

    def clear(self) -> None:
        """Delete all plans."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def drop(self, key: str) -> None:
        for name in (key, f"{key}.watcher"):
            with suppress(OSError):
                self._folder.joinpath(name).unlink()


def encode_plan(plan: FallbackPlan) -> bytes:
    return msgspec.json.encode(plan)


def read_plan(data: bytes) -> FallbackPlan:
    """Raises msgspec.DecodeError for other data."""
    return msgspec.json.decode(data, type=FallbackPlan)


def digest_of(data: bytes) -> str:
    """A digest of a plan: programs in jobs can write to the bucket, too."""
    return hashlib.sha256(data).hexdigest()


def record_after_move(record: Record, before: str, queue: str) -> Record:
    """The record of a run that goes on in another queue: its request, and no end."""
    return replace(record, **_NO_END, job_id=before, moved=before, queue=queue)
