"""Record: what is kept of a run on this machine, longer than AWS Batch remembers it."""

from typing import Any

from msgspec import Struct

from batchml.model.run import Attempt

# Of a run that is only in the history of this machine, without its end.
NOT_KNOWN = "not known to the server"
NOT_KNOWN_WORDS = f"It is {NOT_KNOWN}, and its end was not seen from this machine."

RESUMES_TAG = "batchml:resumes"  # the job from whose checkpoints a run goes on


class Name(Struct, frozen=True, omit_defaults=True, gc=False):
    """What says which run is meant. `key` is empty for runs of the first version."""

    key: str = ""
    job_id: str = ""  # empty while it is unknown
    name: str = ""
    job_name: str = ""
    refused: str = ""  # why it was never submitted
    gang: str = ""  # of workers: the key of the run that they belong to
    moved: str = ""  # the job that it was before it moved to another queue
    fallback: str = ""  # where it may move to: QUEUE:SECONDS


class Record(Name, frozen=True, omit_defaults=True, gc=False):
    """A run as it was asked for, and, once known, what came of it.

    A value that is not known is at its default. Times are milliseconds since the epoch. There are
    neither variables of the run nor secrets in it, only what the job's own file said (`spec`).
    """

    # What was asked for.
    env: str = ""
    queue: str = ""
    at: int = 0
    job: str = ""  # the job's folder
    folder: str = ""  # whose files travelled
    command: tuple[str, ...] = ()
    params: dict[str, Any] = {}
    tags: dict[str, str] = {}
    commit: str = ""
    dirty: bool | None = None  # the folder had changes that the commit does not have
    image: str = ""  # the reference that was sent
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    array_size: int = 0
    groups: dict[str, str] = {}  # of the head of a gang: group -> the key of its job
    patterns: dict[str, str] = {}  # of metrics
    max_cost: float | None = None  # USD
    code: str = ""  # where the code's archive lies: a path or an s3:// URL
    spec: dict[str, Any] = {}  # the JobSpec that was sent, as a table: what `rerun` starts from
    other: bool = False  # its command was given beside the job, instead of the job's own

    # What came of it.
    status: str = ""
    outcome: str = ""
    exit_code: int | None = None
    reason: str = ""  # of the end, in Batch's words
    container_reason: str = ""  # of the container, in ECS's words
    created_at: int | None = None
    started_at: int | None = None
    stopped_at: int | None = None
    attempts: tuple[Attempt, ...] = ()
    max_attempts: int = 1
    children: dict[str, int] = {}  # of an array: status -> how many
    failures: dict[str, int] = {}  # of an array: class of failed children -> how many
    log_group: str = ""
    metrics: dict[str, float] = {}
    measured: bool = False  # the whole log was read for them
    cost: float | None = None  # USD
    lost: bool = False  # AWS did not know it any more, and nobody saw its end

    @property
    def is_open(self) -> bool:
        """True while nobody knows whether this submission reached AWS."""
        return bool(self.key) and not self.job_id and not self.refused

    @property
    def keys(self) -> tuple[str, ...]:
        """By which it is asked for: its own, and of workers that of their run, last."""
        return (self.key, self.gang) if self.gang else (self.key,)

    @property
    def has_ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED")
