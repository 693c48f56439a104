"""A sweep as it was started: `spec.json` in its store, which its controllers and viewers read."""

import shlex
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from batchml.aws.naming import Platform
from batchml.errors import NotFound, SweepDamaged
from batchml.model.environment import LOCAL
from batchml.model.job import JobSpec
from batchml.model.names import to_one_line
from batchml.model.run import DATA_VARIABLE
from batchml.model.sweep import Params, SweepSpec, Trial
from batchml.runtime.protocol.variables import (
    INDEX,
    SEED,
    fill_command,
    fill_folders,
    folder_placeholders,
)
from batchml.runtime.storage.store import Store
from batchml.sweeps.control.plan import ChosenMode, SubmitMode, choose_mode, params_of

SPEC = "spec.json"  # the key in the sweep's store
_WRITTEN = ("outputs", "checkpoints")  # placeholders of folders that a run has from the beginning


class StartedSweep(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A sweep with all that its controllers need. Written once, before the first trial."""

    key: str
    name: str
    env: str
    project: str = ""  # its identity; "" for sweeps of versions before projects
    spec: SweepSpec
    job: dict[str, Any]  # the JobSpec as a table
    queue: str = ""  # the name of the job queue in AWS Batch
    image: str = ""  # the reference of the image
    code: str = ""  # the address of the code archive; empty for a job without code of its own
    created_at: float = 0.0  # seconds since the epoch
    user: str = ""
    commit: str = ""  # of the job's git repository
    text: str = ""  # the content of the sweep file
    hourly: float | None = None  # USD for an hour of one trial; None: unknown, or free
    tags: dict[str, str] = {}  # tags of the trials' jobs
    store: str = field(default="", name="board")  # the store's address: a folder, or s3://...
    runs: str = ""  # the address below which each job has a prefix; empty on `local`
    documents: str = ""  # the address of the documents with commands too long for a request
    platform: Platform = Platform()  # the environment's part of the job definitions
    environ: dict[str, str] = {}  # variables that the environment gives each trial
    folder: str = ""  # the folder whose files are in the code archive

    @property
    def job_spec(self) -> JobSpec:
        return msgspec.convert(self.job, JobSpec)

    @property
    def bucket(self) -> str:
        """The name of the environment's bucket; empty on `local`."""
        return self.runs.removeprefix("s3://").partition("/")[0]

    @property
    def resource_tags(self) -> dict[str, str]:
        """The tags without that of the job: for resources that are no jobs of trials."""
        return {name: value for name, value in self.tags.items() if name != "batchml:job"}

    @property
    def is_free(self) -> bool:
        """Whether the sweep runs on this machine and batchml.toml sets no `usd_per_hour`."""
        return self.env == LOCAL and self.hourly is None

    @property
    def chosen_mode(self) -> ChosenMode:
        """How the sweep is submitted to AWS Batch, and the reason."""
        job = self.job_spec
        seconds = job.timeout_seconds
        timeout = None if seconds is None else float(seconds) * job.retry.attempts
        return choose_mode(self.spec, hourly=self.hourly, timeout=timeout)

    @property
    def mode(self) -> SubmitMode:
        return self.chosen_mode.mode


def load_started(
    store: Store, word: str, hint: str = "`batchml sweeps ls` shows them."
) -> StartedSweep:
    """The sweep of a store, which the user named by `word`. Raises NotFound, and what
    `read_started` raises."""
    sweep = read_started(store)
    if sweep is None:
        raise NotFound("Sweep", word, [], hint)
    return sweep


def read_started(store: Store) -> StartedSweep | None:
    """The sweep of a store; None for a store without a sweep.

    Raises StoreError, and SweepDamaged for a `spec.json` that is damaged or that a later version of
    batchml has written.
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
    """The sweep with the present paths of its store and code: a state folder can be moved."""
    if sweep.env != LOCAL or not where.startswith("/"):
        return sweep
    name = sweep.code.rpartition("/")[2]
    codes = Path(where).parent.parent / "code"
    return replace(sweep, store=where, code=str(codes / name) if name else "")


def write_started(store: Store, sweep: StartedSweep) -> bool:
    """Write `spec.json`. False, and nothing is written, if the store has one. Raises StoreError."""
    return store.create(SPEC, msgspec.json.encode(sweep))


# --- The commands of trials -----------------------------------------------------------------------


SEED_VARIABLE = "BATCHML_SEED"


def command_words(job: JobSpec, params: Params) -> list[str]:
    """The command of a trial. The trial's parameters replace those of the job."""
    return fill_command(job.template, {**job.params, **params})


def trial_command(sweep: StartedSweep, trial: Trial) -> list[str]:
    """The command of a trial, of a confirming run with its own seed."""
    job = sweep.job_spec
    return command_words(job, params_of(trial, job.params))


def local_folders(sweep: StartedSweep, trial: Trial) -> dict[str, str]:
    """What the folders of a run are for a trial's command in a shell: placeholder -> value."""
    own = {name: name for name in (*_WRITTEN, "data", "workspace")}
    data = str({**sweep.environ, **sweep.job_spec.env}.get(DATA_VARIABLE) or own["data"])
    return {**own, "data": data, "run": f"trial-{trial.number}", INDEX: "0", SEED: str(trial.seed)}


def command_line(sweep: StartedSweep, trial: Trial) -> str:
    """The shell command, in one line, that runs a trial again on this machine, with its seed.

    The folders that a run has and that it writes to are folders of these names here.
    """
    words = trial_command(sweep, trial)
    made = [each for each in _WRITTEN if each in folder_placeholders(words)]
    make = f"mkdir -p {' '.join(made)} && " if made else ""
    words = fill_folders(words, local_folders(sweep, trial))
    return to_one_line(f"{make}{SEED_VARIABLE}={trial.seed} {shlex.join(words)}")
