"""The jobs of a sweep in AWS Batch: submit, observe and terminate them, and send their code."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import list_failed_children
from batchml.aws.batch.requests import SubmissionContext, SubmissionRequests, make_submission
from batchml.aws.batch.resources import ConsumableApi
from batchml.aws.s3 import BucketStore
from batchml.context import Context, Notify
from batchml.errors import BatchmlError, NotFound, ServiceError, UsageError
from batchml.jobs.code import pack
from batchml.model.names import to_name
from batchml.model.run import Record, Run
from batchml.runs.package import PackageStore, describe_changed_code, store_package
from batchml.runs.rate_limit import RateBucket
from batchml.runs.send import keep_one_job, listing_delay, look_up, make_submitter
from batchml.runs.submit import submit
from batchml.runtime.storage.store import Store
from batchml.sweeps.control.events import TrialBatch
from batchml.sweeps.control.watch import FailedChild, JobObservation
from batchml.sweeps.started import StartedSweep

# --- The code of the next batches: the user may send new code -------------------------------------


CODE = "code.json"  # the key in the sweep's store, once new code was sent


class CodeUpdate(Struct, frozen=True):
    """The code of the next batches: a name, because all archives of a sweep are in one folder."""

    name: str  # of the archive
    at: float  # when it was sent, in seconds since the epoch


def current_code(sweep: StartedSweep, store: Store) -> CodeUpdate:
    """The code that the next batch runs. Raises StoreError."""
    data = store.get(CODE)
    try:
        update = msgspec.json.decode(data, type=CodeUpdate) if data else None
    except msgspec.DecodeError:
        update = None
    if update is None or "/" in update.name:
        return CodeUpdate(sweep.code.rpartition("/")[2], sweep.created_at)
    return update


def with_current_code(sweep: StartedSweep, store: Store) -> StartedSweep:
    """The sweep with the code that was sent last, for the next batch. Raises StoreError."""
    if not sweep.code:
        return sweep
    codes = sweep.code.rpartition("/")[0]
    return replace(sweep, code=f"{codes}/{current_code(sweep, store).name}")


def check_code(context: Context, sweep: StartedSweep, store: Store) -> None:
    """Raise NotFound if the code that the next trials would run is gone. One call in AWS."""
    code = with_current_code(sweep, store).code
    if not code or _exists(context, code):
        return
    raise NotFound(
        "Code of the sweep", sweep.name, [],
        f"Its trials would run {code}, which is gone, so nothing was requested. Send the present "
        f"code with --code of `batchml sweeps resume {sweep.key}` or `batchml sweeps rerun "
        f"{sweep.key} --trial N`, or start a new sweep: batchml sweep FILE",
    )  # fmt: skip


def _exists(context: Context, code: str) -> bool:
    if not code.startswith("s3://"):
        return Path(code).is_file()
    bucket, _, key = code.removeprefix("s3://").partition("/")
    return BucketStore(context.connect(), bucket).has(key)


def send_code(
    context: Context,
    sweep: StartedSweep,
    store: Store,
    *,
    include_secrets: bool = False,
    tell: Notify = lambda _: None,
) -> bool:
    """Send the present code, which trials run from the next batch on. False if nothing changed.

    Raises UsageError for a job without code of its own or whose folder is gone, ConfigError for
    code that cannot be packed, and what sending it raises.
    """
    if not sweep.code:
        raise UsageError("--code: its job has `code = false`, so the code is in the image.")
    if not Path(sweep.folder).is_dir():
        raise UsageError(f"--code: {sweep.folder}, the folder of the code, does not exist.")
    archive = pack(Path(sweep.folder), context.home.root, include_secrets)
    if not context.settings.is_local:
        context.home.prepare()
    store_package(
        context, PackageStore(sweep.code.rpartition("/")[0], sweep.bucket), archive, None, tell
    )
    if archive.name == current_code(sweep, store).name:
        tell("The code is the same as before.")
        return False
    store.put(CODE, msgspec.json.encode(CodeUpdate(archive.name, context.clock.now())))
    return True


def describe_old_code(context: Context, sweep: StartedSweep, store: Store) -> str:
    """A line that trials will run older code than the folder has now; "" if they do not.

    Also "" if the two cannot be compared. Raises StoreError.
    """
    if not sweep.code:
        return ""
    code = current_code(sweep, store)
    changed = describe_changed_code(context, sweep.folder, code.name, code.at)
    return f"Trials run {changed}" if changed else ""


# --- From a batch of trials to the requests of its job. Pure --------------------------------------


# The command of the job if the template of the trials' command is long. The runtime reads the
# template from the store in any case.
LONG_COMMAND_PLACEHOLDER = "batchml-trial"
_LONGEST = 1024  # characters of a template


def consumable_name(key: str) -> str:
    """The name of the consumable resource that limits the sweep's running trials."""
    return f"batchml-{key}"


def requests_of_batch(
    sweep: StartedSweep,
    batch: TrialBatch,
    size: int,
    width: int,
    *,
    after: str = "",
    is_limited: bool = False,
) -> SubmissionRequests:
    """The requests of the job of a batch: of an array, unless `size` is 1.

    `width`: bytes of a line of the manifest. `after`: the job that must succeed first.
    `is_limited`: each child requires one unit of the sweep's consumable resource. Raises
    ConfigError for a job whose variables are too long.
    """
    job = sweep.job_spec
    variables = {
        "BATCHML_SWEEP": sweep.store,
        "BATCHML_WAVE": str(batch.number),
        "BATCHML_WAVE_WIDTH": str(width),
    }
    if batch.rung is not None:
        variables["BATCHML_RUNG"] = str(batch.rung)
    submission = SubmissionContext(
        key=batch.key,
        name=batch_name(sweep, batch),
        code=sweep.code,
        store=f"{sweep.runs}/{batch.key}" if sweep.runs else "",
        documents=sweep.documents,
        env={**sweep.environ, **variables},
        tags={**sweep.tags, "batchml:key": batch.key},
        depends_on=(after,) if after else (),
        array=size if size > 1 else None,
        consumables={consumable_name(sweep.key): 1} if is_limited else {},
        command=_command(job.template),
    )
    return make_submission(
        job, image=sweep.image, queue=sweep.queue, submission=submission, platform=sweep.platform
    )


def batch_name(sweep: StartedSweep, batch: TrialBatch) -> str:
    """The name in `ls`: `lenet-w1`."""
    return to_name(f"{sweep.name}-w{batch.number}")


def batch_record(
    sweep: StartedSweep, batch: TrialBatch, size: int, requests: SubmissionRequests
) -> Record:
    """The record of a batch's job, for the history of the machine that submits it."""
    job = sweep.job_spec
    return Record(
        key=batch.key,
        name=batch_name(sweep, batch),
        job_name=requests.submit["jobName"],
        project=sweep.project,
        env=sweep.env,
        queue=requests.submit["jobQueue"],
        folder=sweep.folder,
        command=job.template,
        tags=requests.submit["tags"],
        commit=sweep.commit,
        image=sweep.image,
        vcpus=job.resources.vcpus,
        memory_mib=job.resources.memory_mib,
        gpus=job.resources.gpu_count,
        neurons=job.resources.neurons,
        array_size=size if size > 1 else 0,
        patterns=job.patterns,
        directions=job.directions | {goal.metric: goal.direction for goal in sweep.spec.goals},
        code=sweep.code,
    )


def first_requests(sweep: StartedSweep, size: int) -> dict[str, Any]:
    """The requests of the first batch, for people to see. Nothing is sent."""
    batch = TrialBatch(number=1, at=sweep.created_at, key=sweep.key, trials=())
    requests = requests_of_batch(
        sweep, batch, size, 0, is_limited=size > sweep.spec.limits.parallel
    )
    return {"RegisterJobDefinition": requests.register, "SubmitJob": requests.submit}


def _command(template: tuple[str, ...]) -> tuple[str, ...]:
    """The command for people to see; the runtime of each trial fills in the template."""
    return template if sum(map(len, template)) <= _LONGEST else (LONG_COMMAND_PLACEHOLDER,)


# --- The calls to AWS Batch -----------------------------------------------------------------------


# The key that marks, in the store, that the consumable resource may exist.
LIMIT_MARK = "held"
_REASON = 1024  # the most characters of a reason in TerminateJob


class BatchJobs:
    """The jobs of one sweep: `SweepJobs` by calls to AWS Batch.

    The store has a mark for each batch that may have been submitted.
    """

    def __init__(
        self, context: Context, sweep: StartedSweep, store: Store, tell: Notify = lambda _: None
    ) -> None:
        self._context = context
        self._sweep = sweep
        self._store = store
        self._tell = tell
        self._limit = 0  # as last set by `limit_running`
        self.hourly = sweep.hourly
        self.timeout = float(seconds) if (seconds := sweep.job_spec.timeout_seconds) else None

    def submit(self, batch: TrialBatch, size: int, width: int, after: str = "") -> str:
        sweep = with_current_code(self._sweep, self._store)
        requests = requests_of_batch(
            sweep, batch, size, width, after=after, is_limited=self._limit > 0
        )
        record = batch_record(sweep, batch, size, requests)
        if not self._mark_sent(batch):
            job_id = self._find_sent(record, batch)
            if job_id:
                return job_id
        return self._send(requests, record)

    def _mark_sent(self, batch: TrialBatch) -> bool:
        """Mark a batch before it is submitted. False if an earlier attempt has marked it."""
        token = os.urandom(16).hex().encode()
        return self._store.create(f"waves/{batch.number:06}.sent", token)

    def _find_sent(self, record: Record, batch: TrialBatch) -> str:
        """The id of the job of a batch that another attempt may have submitted; "" if none did.

        That attempt was killed or did not get the answer. The job is searched for until AWS Batch
        would certainly list it.
        """
        api, clock = self._context.batch, self._context.clock
        age = max(0.0, clock.now() - batch.at)
        jobs = look_up(api, record, clock, max(0.0, listing_delay(api) - age))
        return keep_one_job(api, jobs, self._tell) if jobs else ""

    def _send(self, requests: SubmissionRequests, record: Record) -> str:
        context = self._context
        if requests.document is not None:
            store_package(
                context,
                PackageStore(self._sweep.documents, self._sweep.bucket),
                None,
                requests.document,
                self._tell,
            )
        submitter = make_submitter(context, self._tell, self._rate())
        return submit(submitter, requests, replace(record, at=int(context.clock.now() * 1000)))

    def _rate(self) -> RateBucket | None:
        if self._context.settings.is_local:
            return None
        self._context.home.prepare()
        return RateBucket(self._context.home.root / "submits")

    def observe(self, job_ids: Sequence[str]) -> dict[str, JobObservation]:
        runs = self._context.describe(job_ids)
        return {job_id: _to_observation(run) for job_id, run in runs.items()}

    def failed_children(self, job_id: str) -> list[FailedChild]:
        return [
            FailedChild(
                run.array_index or 0, run.job_id, run.exit_code, run.reason or run.status_reason,
                _seconds(run.started_at), _seconds(run.stopped_at),
            )
            for run in list_failed_children(self._context.connect(), job_id)
        ]  # fmt: skip

    def terminate(self, job_ids: Sequence[str], why: str) -> None:
        terminate_all(self._context, job_ids, why)

    def limit_running(self, quantity: int) -> None:
        if quantity == self._limit:
            return
        consumables = ConsumableApi(self._context.connect())
        self._store.put(LIMIT_MARK, str(quantity).encode())
        consumables.set_total(consumable_name(self._sweep.key), quantity, self._sweep.resource_tags)
        self._limit = quantity

    def remove_limit(self, *, is_patient: bool = False) -> bool:
        if self._store.get(LIMIT_MARK) is None:
            return True
        try:
            ConsumableApi(self._context.connect()).delete(consumable_name(self._sweep.key))
        except ServiceError as error:
            if not is_patient:
                self._tell(f"A consumable resource could not be deleted: {error}")
            return False
        self._store.delete(LIMIT_MARK)
        self._limit = 0
        return True


def terminate_all(context: Context, job_ids: Iterable[str], why: str) -> None:
    """Terminate jobs. Raises the first error after it has tried all of them."""
    first: BatchmlError | None = None
    for job_id in job_ids:
        try:
            context.batch.terminate(job_id, why[:_REASON])
        except BatchmlError as error:
            first = first or error
    if first is not None:
        raise first


def _to_observation(run: Run) -> JobObservation:
    return JobObservation(
        status=run.status,
        children=run.children,
        started_at=_seconds(run.started_at),
        stopped_at=_seconds(run.stopped_at),
        exit_code=run.exit_code,
        reason=run.reason or run.status_reason,
    )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
