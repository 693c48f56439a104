"""Move a run that finds no host to another queue: the decision (pure), and the calls.

1. CancelJob in the first queue. It has no effect on a job that has started; then the run stays. So
a job that is FAILED with batchml's reason was not running, and will not start. 2. A look-up in the
other queue of a job with the same name: another process may have made the move. 3. The record in
the history, SubmitJob, and the job id in the history, as for any submission.

If a process is killed between two steps, there is one job or none, and the next process continues
at step 2: the status reason of the first job names the other queue. The runtime's claim is the last
safeguard: if two jobs continue the same job, only the first one runs.
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

PATIENCE = 30.0  # seconds until AWS Batch has ended a waiting job after CancelJob
POLL_PAUSE = 1.0  # seconds between two polls in that time
WATCHER_GRACE = 600  # seconds that the watcher may be late before a command makes the move

# Values of the fields of a record that describe the end, for a run that has not ended.
_NO_END: dict[str, Any] = {
    **dict.fromkeys(("status", "outcome", "reason", "container_reason", "log_group"), ""),
    **dict.fromkeys(("exit_code", "created_at", "started_at", "stopped_at", "cost")),
    **dict.fromkeys(("lost", "measured"), False),
    "attempts": (), "children": {}, "failures": {}, "metrics": {}, "ranges": {},
    "max_attempts": 1,
}  # fmt: skip

_MAX_PLAN_AGE = 30 * 86_400  # seconds by which a plan may be older than the newest plan

_WAITING = (JobStatus.SUBMITTED, JobStatus.RUNNABLE)


class FallbackPlan(Struct, frozen=True):
    """The plan of a move, made when the run is submitted.

    `after` is the time in seconds that the run waits for a host. `requests` are the requests of the
    job in the other queue. `keeps` is True if checkpoints are stored by the run's key, so that a
    run that has begun can move. `lent` are the names of environment variables whose values may be
    secret: the values are not stored, but read from the first job.
    """

    key: str
    after: int
    requests: SubmissionRequests
    record: Record
    keeps: bool = False
    lent: tuple[str, ...] = ()

    @property
    def queue(self) -> str:
        """The name of the other queue in AWS."""
        return str(self.requests.submit["jobQueue"])

    def about(self, record: Record) -> "FallbackPlan":
        """The plan with the final record of the run."""
        tags = dict(record.tags)
        requests = replace(self.requests, submit={**self.requests.submit, "tags": tags})
        there = replace(
            record, queue=self.queue, gpus=self.record.gpus, vcpus=self.record.vcpus, tags=tags
        )
        return replace(self, requests=requests, record=there)


class MoveStep(Enum):
    """What to do with a run that may move."""

    WAIT = "the run waits for a host in time, or it runs"
    LEAVE = "the time is over: cancel the job in the first queue"
    GO_ON = "the job was cancelled for the move: submit it in the other queue"
    OVER = "the run has ended, or it cannot move any more"


class MoveDecision(Struct, frozen=True):
    """The next step. `seconds` is the time until a step after WAIT may be due; 0 if unknown."""

    step: MoveStep
    seconds: float = 0.0


def decide(plan: FallbackPlan, run: Run, now: int, ready: int = 0) -> MoveDecision:
    """Decide what to do with a run that may move. Pure; times are in ms since the epoch.

    `ready` is the time at which a run with dependencies was first seen to wait only for a host,
    which AWS Batch does not return; 0 if it was not seen yet.
    """
    if run.status.is_terminal:
        return MoveDecision(MoveStep.GO_ON if moved_to(run) == plan.queue else MoveStep.OVER)
    if run.queue == plan.queue:  # it has moved; another cancel would end the run
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
    """The time since which a run waits for a host; 0 if that is not known yet."""
    ended = max((each.stopped_at or 0 for each in run.attempts), default=0)
    if ended:
        return ended  # in the queue again, after its host was lost
    return ready if run.depends_on else run.created_at or 0


def leave_out_values(
    requests: SubmissionRequests, env: Container[str]
) -> tuple[SubmissionRequests, tuple[str, ...]]:
    """The requests without these environment variables, and the names of those that they had.

    The document of the requests is left out, too: it is in the run's store.
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
    """The requests of the second job: a tag, and a variable for the claim, name the first job.

    `values` are environment variables of the first job.
    """
    more = [{"name": name, "value": value} for name, value in {**values, MOVED: job_id}.items()]
    submit = _with_environment(requests.submit, lambda known: known + more)
    return replace(
        requests, submit={**submit, "tags": {**submit.get("tags", {}), MOVED_TAG: job_id}}
    )


def _container_overrides(submit: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The container overrides of a job, or of its node ranges."""
    nodes = submit.get("nodeOverrides")
    if nodes is None:
        return [submit["containerOverrides"]]
    return [each["containerOverrides"] for each in nodes["nodePropertyOverrides"]]


def _with_environment(
    submit: Mapping[str, Any], vary: Callable[[list[dict[str, str]]], list[dict[str, str]]]
) -> dict[str, Any]:
    """A copy of the SubmitJob request with environment variables changed by `vary`."""
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
    """The job that continues a moved job in the other queue; "" if there is none. One call.

    Both jobs have the same name, of which the submission's key is a part.
    """
    queue = moved_to(run)
    if not queue or not run.job_name:
        return ""
    try:
        found = api.find_by_name(queue, run.job_name)
    except ServiceError as error:
        if error.code == "ClientException":  # the queue was deleted, and its jobs with it
            return ""
        raise
    return keep_one_job(api, found, lambda _: None) if found else ""


class Mover:
    """Moves one run, and keeps the move in the history of this machine."""

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
        self._ready = 0  # as in `decide`

    def see(self, run: Run, patience: int = 0) -> MoveDecision:
        """Decide what to do with the run as it is now.

        `patience` are seconds in which another process may make the move first.
        """
        now = int(self._clock.now() * 1000)
        if run.status in _WAITING and not self._ready:
            self._ready = now
        plan = replace(self.plan, after=self.plan.after + patience) if patience else self.plan
        return decide(plan, run, now, self._ready)

    def step(self, run: Run) -> str:
        """Make the move if it is due; the id of the final job, or "" while the run may move."""
        step = self.see(run).step
        if step is MoveStep.OVER:
            return run.job_id
        job_id = self.move(run) if step is not MoveStep.WAIT else run.job_id
        return job_id if job_id != run.job_id else ""

    def move(self, run: Run) -> str:
        """Move a run whose time is over; the id of the job that goes on: its own if started.

        Raises the errors of CancelJob, DescribeJobs and SubmitJob, and OSError if the intent could
        not be written. After an error the method can be called again.
        """
        flights = InFlight.beside(self._history, self.plan.record.env)
        with flights.mark(self.plan.key):
            # Described again: another process of this machine may just have moved the run.
            job_id = self._move(self._api().describe([run.job_id]).get(run.job_id, run))
            flights.remove(self.plan.key)
            return job_id

    def _move(self, run: Run) -> str:
        was_cancelled = run.status.is_terminal
        if not was_cancelled:
            self._check(run)
            run = self._cancel(run)
        return (
            self._submit_in_other_queue(run, was_cancelled)
            if moved_to(run) == self.plan.queue
            else run.job_id
        )

    def _check(self, run: Run) -> None:
        """Check before CancelJob that the other queue takes jobs. Raises ServiceError."""
        self._read_values(run)
        if not self._api().takes_jobs(self.plan.queue):
            raise ServiceError(
                "CancelJob",
                "ClientException",
                f"The queue {self.plan.queue} does not exist, or takes no jobs: the run stays in "
                "its queue.",
                400,
            )

    def _read_values(self, run: Run) -> dict[str, str]:
        """The values that the plan leaves out. Raises ServiceError if AWS does not return them."""
        missing = [name for name in self.plan.lent if name not in run.environment]
        if missing:
            raise ServiceError(
                "DescribeJobs",
                "ClientException",
                f"AWS Batch does not return the run's variables {', '.join(missing)}: nothing is "
                "submitted without them.",
                400,
            )
        return {name: run.environment[name] for name in self.plan.lent}

    def _cancel(self, run: Run) -> Run:
        """Cancel the job; the run when it has ended, or after `PATIENCE`: it may have started."""
        api, job_id = self._api(), run.job_id
        api.cancel(job_id, move_reason(self.plan.queue, self.plan.after))
        end = self._clock.monotonic() + PATIENCE
        while True:
            run = api.describe([job_id]).get(job_id, run)
            if run.status.is_terminal or self._clock.monotonic() >= end:
                return run
            self._clock.sleep(POLL_PAUSE)

    def _submit_in_other_queue(self, run: Run, was_cancelled: bool) -> str:
        """Submit the job in the other queue, unless another process has.

        If another process cancelled the first job (`was_cancelled`), its successor is looked for as
        long as AWS Batch may not list it yet.
        """
        api, before = self._api(), run.job_id
        record = replace(
            self.plan.record, job_id=before, moved=before, at=int(self._clock.now() * 1000)
        )
        seconds = listing_delay(api) if was_cancelled else 0.0
        found = look_up(api, record, self._clock, seconds)
        if found:
            job_id = keep_one_job(api, found, self._tell)
            self._keep_intent(record)
            self._history.add_job_id(record.key, job_id)
            self._tell(describe_move_done(self.plan.queue, job_id))
            return job_id
        requests = next_requests(self.plan.requests, before, self._read_values(run))
        record = replace(record, tags=requests.submit["tags"])
        self._history.intend(record)
        try:
            submitter = Submitter(api, self._history, self._clock, self._tell, share=self._share)
            job_id = send_intent(submitter, requests, record)
        except (BatchmlError, Interrupted):
            # So that the refusal is not final, and the move can be repeated.
            self._keep_intent(record)
            self._tell(
                f"The run was cancelled in its queue, and is not in {self.plan.queue} yet. To try "
                f"again: batchml wait {before}"
            )
            raise
        job_id = self._keep_one(record, job_id)
        self._tell(describe_move_done(self.plan.queue, job_id))
        return job_id

    def _keep_one(self, record: Record, job_id: str) -> str:
        """The job to keep, if another machine has just made the same move."""
        try:
            found = self._api().find_by_name(record.queue, record.job_name)
        except BatchmlError:
            return job_id
        kept = keep_one_job(self._api(), found, self._tell) if len(found) > 1 else job_id
        if kept != job_id:
            self._history.add_job_id(record.key, kept)
        return kept

    def _keep_intent(self, record: Record) -> None:
        with suppress(OSError):
            self._history.intend(record)


class FallbackPlans:
    """The plans of the runs of an environment that may move: a file for each run.

    Only the user can read a file. It has the requests without the values of the job's environment
    variables. It is deleted after the run's end or its move.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "FallbackPlans":
        return cls(history.path.parent / "fallbacks" / (env or "-"))

    def keep(self, plan: FallbackPlan) -> None:
        """Write the plan to disk. Raises OSError; then nothing may be sent."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._delete_old()
        write_atomically(str(self._folder / plan.key), encode_plan(plan))

    def _delete_old(self) -> None:
        """Delete plans that no command has used for long: AWS Batch may have forgotten the runs."""
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

    def save_watcher(self, key: str, job_id: str) -> None:
        """Write the job id of the watcher of a run."""
        with suppress(OSError):
            self._folder.joinpath(f"{key}.watcher").write_text(job_id, "utf-8")

    def watcher(self, key: str) -> str:
        """The job id of the watcher of a run; "" without one."""
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
    """Decode a plan. Raises msgspec.DecodeError for other data."""
    return msgspec.json.decode(data, type=FallbackPlan)


def digest_of(data: bytes) -> str:
    """The digest of a plan, since programs in jobs can also write to the bucket."""
    return hashlib.sha256(data).hexdigest()


def record_after_move(record: Record, before: str, queue: str) -> Record:
    """The record of a run that goes on in another queue, without an end."""
    return replace(record, **_NO_END, job_id=before, moved=before, queue=queue)
