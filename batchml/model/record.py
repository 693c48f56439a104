"""The record of a run in this machine's history, which outlives AWS Batch's memory of it."""

from typing import Any

from msgspec import Struct

from batchml.model.run import Attempt, JobStatus, OutcomeClass, Run
from batchml.runtime.protocol.exit_codes import CRASH_LOOP
from batchml.runtime.protocol.launch import VARIABLE, LaunchPlan

# The state of a run that is only in this machine's history, without its end.
NOT_KNOWN = "not known to the server"
NOT_KNOWN_WORDS = f"It is {NOT_KNOWN}, and its end was not seen from this machine."

RESUMES_TAG = "batchml:resumes"  # the job from whose checkpoints a run continues


class RunName(Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a record by which a run is found."""

    key: str = ""  # "" for runs of the first version
    job_id: str = ""  # "" while it is unknown
    name: str = ""
    job_name: str = ""
    refused: str = ""  # the reason why it was not submitted
    gang: str = ""  # of a worker: the key of its group run
    moved: str = ""  # its earlier job, before it moved to another queue
    fallback: str = ""  # the queue to which it may move: QUEUE:SECONDS


class Record(RunName, frozen=True, omit_defaults=True, gc=False):
    """The submission of a run, and its end once that is known.

    Unknown values have their defaults. Times are in ms since the epoch. A record has no variables
    of the run and no secrets, except those of the job's own file (`spec`).
    """

    # The submission.
    env: str = ""
    queue: str = ""
    at: int = 0
    job: str = ""  # the job's folder
    folder: str = ""  # the folder of the code package
    command: tuple[str, ...] = ()
    params: dict[str, Any] = {}
    tags: dict[str, str] = {}
    commit: str = ""
    dirty: bool | None = None  # the folder had uncommitted changes
    image: str = ""  # the reference in the request
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    array_size: int = 0
    groups: dict[str, str] = {}  # of the head of a group run: the key of each group's job
    patterns: dict[str, str] = {}  # of metrics
    max_cost: float | None = None  # USD
    code: str = ""  # the address of the code package: a path or an s3:// URL
    spec: dict[str, Any] = {}  # the submitted JobSpec as a table, for `rerun`
    other: bool = False  # the command line replaced the job's command

    # The end.
    status: str = ""
    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""  # in AWS Batch's words
    container_reason: str = ""  # in ECS's words
    created_at: int | None = None
    started_at: int | None = None
    stopped_at: int | None = None
    attempts: tuple[Attempt, ...] = ()
    max_attempts: int = 1
    children: dict[str, int] = {}  # of an array: the number of children by status
    failures: dict[str, int] = {}  # of an array: the number of failed children by class
    log_group: str = ""
    metrics: dict[str, float] = {}
    measured: bool = False  # the metrics are those of the whole log
    cost: float | None = None  # USD
    lost: bool = False  # AWS Batch has forgotten the run, and this machine did not see its end

    @property
    def is_open(self) -> bool:
        """Whether it is unknown if the submission reached AWS."""
        return bool(self.key) and not self.job_id and not self.refused

    @property
    def keys(self) -> tuple[str, ...]:
        """Its own key, and for a worker also the key of its group run."""
        return (self.key, self.gang) if self.gang else (self.key,)

    @property
    def has_ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED")


def run_from_record(record: Record | None) -> Run | None:
    """The run as it was at its end; None if its end was not seen from this machine."""
    if record is None or not record.has_ended:
        return None
    outcome = record.outcome
    return Run(
        job_id=record.job_id,
        name=record.name,
        job_name=record.job_name or record.name,
        key=record.key,
        queue=record.queue,
        status=JobStatus(record.status),
        status_reason=record.reason,
        created_at=record.created_at or record.at,
        started_at=record.started_at,
        stopped_at=record.stopped_at,
        exit_code=record.exit_code,
        reason=record.container_reason,
        attempts=record.attempts,
        log_group=record.log_group or "/aws/batch/job",
        is_terminated=outcome == OutcomeClass.CANCELLED,
        image=record.image,
        command=record.command,
        vcpus=record.vcpus,
        memory_mib=record.memory_mib,
        gpus=record.gpus,
        children=record.children,
        failures=record.failures,
        tags=record.tags,
        params=record.params,
        environment=_launch_environment(record),
        max_attempts=record.max_attempts,
        array_size=record.array_size,
        host=record.attempts[-1].host if record.attempts else "",
    )


def _launch_environment(record: Record) -> dict[str, str]:
    """The launch plan, for a run that the runtime ended because of a crash loop."""
    launch = record.spec.get("launch") or {}
    plan = LaunchPlan(str(launch.get("kind")))
    return {VARIABLE: plan.to_json()} if record.exit_code == CRASH_LOOP and plan.restarts else {}
