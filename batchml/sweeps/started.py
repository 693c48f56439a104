"""A sweep as it was started: `spec.json` in its store, the same for all who control or view it."""

import shlex
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from batchml.aws.naming import Platform
from batchml.errors import SweepDamaged
from batchml.model.environment import LOCAL
from batchml.model.job import JobSpec
from batchml.model.names import to_one_line
from batchml.model.sweep import Params, SweepSpec, Trial
from batchml.runtime.protocol.variables import fill_command
from batchml.runtime.storage.store import Store
from batchml.sweeps.control.plan import ChosenMode, SubmitMode, choose_mode

SPEC = "spec.json"  # the key in the sweep's store


class StartedSweep(Struct, frozen=True, omit_defaults=True):
    """Written once, before the first trial. Times are seconds since the epoch."""

    key: str
    name: str
    env: str
    spec: SweepSpec
    job: dict[str, Any]  # the JobSpec as a table
    queue: str = ""  # the name of the queue in AWS
    image: str = ""  # the reference of the image
    code: str = ""  # the address of the archive of the job's code
    created_at: float = 0.0
    user: str = ""
    commit: str = ""
    text: str = ""  # the sweep file
    hourly: float | None = None  # USD for an hour of one trial; None: unknown, or free
    tags: dict[str, str] = {}  # tags of its jobs
    store: str = field(default="", name="board")  # its address: a folder, or s3://BUCKET/PREFIX
    runs: str = ""  # below it each job keeps what outlives it; empty where jobs get folders
    documents: str = ""  # where long commands are put
    platform: Platform = Platform()  # the environment's part of the job definitions
    environ: dict[str, str] = {}  # variables that the environment gives each trial
    folder: str = ""  # whose files were sent

    @property
    def job_spec(self) -> JobSpec:
        return msgspec.convert(self.job, JobSpec)

    @property
    def is_free(self) -> bool:
        """Whether it runs on this machine and batchml.toml sets no `usd_per_hour`."""
        return self.env == LOCAL and self.hourly is None

    @property
    def chosen_mode(self) -> ChosenMode:
        """How it is submitted to AWS Batch, and why so."""
        job = self.job_spec
        seconds = job.timeout_seconds
        timeout = None if seconds is None else float(seconds) * job.retry.attempts
        return choose_mode(self.spec, hourly=self.hourly, timeout=timeout)

    @property
    def mode(self) -> SubmitMode:
        return self.chosen_mode.mode


def read_started(store: Store) -> StartedSweep | None:
    """The sweep of a store; None where there is none.

    Raises SweepDamaged for a document that is damaged or that a later version has written, and
    StoreError.
    """
    data = store.get(SPEC)
    if data is None:
        return None
    try:
        sweep = msgspec.json.decode(data, type=StartedSweep)
    except msgspec.DecodeError as error:
        raise SweepDamaged(getattr(store, "key", ""), SPEC, str(error)) from error
    return _with_present_paths(sweep, getattr(store, "where", ""))


def _with_present_paths(sweep: StartedSweep, where: str) -> StartedSweep:
    """With the paths of the state folder that the store is in now: it may have been moved."""
    if sweep.env != LOCAL or not where.startswith("/"):
        return sweep
    name = sweep.code.rpartition("/")[2]
    codes = Path(where).parent.parent / "code"
    return replace(sweep, store=where, code=str(codes / name) if name else "")


def write_started(store: Store, sweep: StartedSweep) -> bool:
    """Write it, unless the store has one. Whether this call wrote it. Raises StoreError."""
    return store.create(SPEC, msgspec.json.encode(sweep))


# --- The commands of trials -----------------------------------------------------------------------


SEED = "BATCHML_SEED"


def command_words(job: JobSpec, params: Params) -> list[str]:
    """The command of a trial. Its parameters replace those of the job."""
    return fill_command(job.command, {**job.params, **params})


def command_line(job: JobSpec, trial: Trial) -> str:
    """The shell command, in one line, that runs a trial again on this machine, with its seed."""
    return to_one_line(f"{SEED}={trial.seed} {shlex.join(command_words(job, trial.params))}")
