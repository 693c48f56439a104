"""Frozen: a sweep as it was started, the same for whoever continues or looks at it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.naming import Platform
from batchml.errors import ConfigError
from batchml.model.environment import LOCAL
from batchml.model.job import JobSpec
from batchml.model.sweep import SweepSpec
from batchml.sweep.shape import Shaped, shaped

if TYPE_CHECKING:
    from batchml.runtime.storage.store import Store

SPEC = "spec.json"  # its key on the board


class Frozen(Struct, frozen=True, omit_defaults=True):
    """Written once, before the first trial. Times in seconds since the epoch."""

    key: str
    name: str
    env: str
    spec: SweepSpec
    job: dict[str, Any]  # the JobSpec as a table
    queue: str = ""  # as AWS names it
    image: str = ""  # its reference
    code: str = ""  # where the archive of the job's code lies
    created_at: float = 0.0
    user: str = ""
    commit: str = ""
    text: str = ""  # the file
    hourly: float | None = None  # USD of one running trial; None: unknown, or free
    tags: dict[str, str] = {}  # of its jobs
    board: str = ""  # where a trial finds the board: a folder, or s3://BUCKET/PREFIX
    runs: str = ""  # below which each job keeps what outlives it; empty where it gets folders
    documents: str = ""  # where long commands are put
    platform: Platform = Platform()  # what its job definitions have of the environment
    environ: dict[str, str] = {}  # variables that the place gives each trial
    folder: str = ""  # whose files travelled

    @property
    def job_spec(self) -> JobSpec:
        return msgspec.convert(self.job, JobSpec)

    @property
    def is_free(self) -> bool:
        """On this machine, unless `usd_per_hour` says what it costs."""
        return self.env == LOCAL and self.hourly is None

    @property
    def shaped(self) -> Shaped:
        """Which way it goes onto AWS Batch, and why."""
        job = self.job_spec
        seconds = job.timeout_seconds
        timeout = None if seconds is None else float(seconds) * job.retry.attempts
        return shaped(self.spec, hourly=self.hourly, timeout=timeout)


class DamagedSweep(ConfigError):
    """Its first document cannot be read."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(SPEC, [why])
        self.args = (
            f"The sweep {key or 'here'} cannot be read: its {SPEC} is damaged, or of a later "
            f"version of batchml ({why}). What its trials said is kept beside it.",
        )


def read_frozen(board: "Store") -> Frozen | None:
    """The sweep of a board; None where there is none. Raises DamagedSweep for one that is damaged
    or was written by a later version, and StoreError."""
    data = board.get(SPEC)
    if data is None:
        return None
    try:
        frozen = msgspec.json.decode(data, type=Frozen)
    except msgspec.DecodeError as error:
        raise DamagedSweep(getattr(board, "key", ""), str(error)) from error
    return _as_it_lies(frozen, getattr(board, "where", ""))


def _as_it_lies(frozen: Frozen, where: str) -> Frozen:
    """With the paths of the state folder that the board is in now: it may have been moved since."""
    if frozen.env != LOCAL or not where.startswith("/"):
        return frozen
    name = frozen.code.rpartition("/")[2]
    codes = Path(where).parent.parent / "code"
    return replace(frozen, board=where, code=str(codes / name) if name else "")


def write_frozen(board: "Store", frozen: Frozen) -> bool:
    """Write it, unless the board has one already; whether this call did. Raises StoreError."""
    return board.create(SPEC, msgspec.json.encode(frozen))
