"""Transfer runs: short runs that reach a workspace in AWS, which this machine cannot mount.

A transfer run is an ordinary run in the cheapest queue, tagged `batchml:carry`. Its request is in a
variable; its report, progress and listing are objects of the bucket, below the key of the run.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from batchml.cost.service import quote_of_job
from batchml.errors import BatchmlError, NotFound, TransferWorkerFailed
from batchml.model.environment import Environment, OnProgress, TransferStatus
from batchml.model.job import JobSpec, Resources, Retry
from batchml.model.names import dollars
from batchml.model.outcome import describe_outcome
from batchml.runs.groups.members import terminate_all
from batchml.runs.options import RunRequest
from batchml.runs.prepare import prepare
from batchml.runs.submit import submit_run
from batchml.runs.watch.wait import wait_for_runs
from batchml.runtime.transfer.worker import PROGRESS_KEY, REPORT_KEY, REQUEST_VARIABLE
from batchml.sessions.held import describe_run_cost

if TYPE_CHECKING:
    from batchml.aws.s3 import BucketStore
    from batchml.context import Context
    from batchml.model.run import Run

TRANSFER_TAG = "batchml:carry"  # its value is the verb: archive, push
IMAGE = "python"  # below images/

_MEMORY = "3 GiB"  # for eight files in parallel, 16 MiB each, and a list of all files
_ATTEMPTS = 5  # after a lost host the next attempt continues the transfer


class RemoteTransfers(Protocol):
    """Executes requests of the transfer worker (runtime/transfer/worker.py) in the workspace."""

    def execute(self, request: Mapping[str, Any], on_progress: OnProgress) -> dict[str, Any]:
        """Execute a request; return the report. Raises TransferWorkerFailed."""

    def read_file(self, name: str) -> bytes:
        """Return a file that the last request left beside its report."""

    def describe_cost(self) -> str:
        """Say what the last request cost; "" if that is not known."""


def cheapest_queue(environment: Environment) -> str:
    """Choose the queue for a run of one vCPU, if possible without GPUs, with warm hosts. Pure.

    Raises NotFound if the environment has no queue.
    """
    if environment.controller_queue:
        return environment.controller_queue

    def rank(name: str) -> tuple[bool, bool, int, str]:
        computes = [environment.compute[each] for each in environment.queues[name].compute]
        is_cold = not any(each.min_vcpus for each in computes)
        return any(each.has_gpus for each in computes), is_cold, len(computes), name

    if not environment.queues:
        raise NotFound("Job queue", "for transfers", [], "Describe a queue in batchml.toml.")
    return min(environment.queues, key=rank)


def transfer_request(environment: Environment, request: Mapping[str, Any]) -> RunRequest:
    """Describe the run that executes a request. Pure."""
    verb = str(request["verb"])
    spec = JobSpec(
        name=f"workspace-{verb}",
        image=IMAGE,
        command=("python", "-m", "batchml.runtime.transfer.worker"),
        code=False,
        queue=cheapest_queue(environment),
        resources=Resources(vcpus=1, memory=_MEMORY),
        retry=Retry(attempts=_ATTEMPTS, on=("host-lost",)),
        env={REQUEST_VARIABLE: json.dumps(request, sort_keys=True)},
    )
    return RunRequest(spec=spec, own_tags={TRANSFER_TAG: verb})


def read_progress(document: bytes | None) -> TransferStatus | None:
    """Decode the progress that a worker wrote; None before it wrote any. Pure."""
    try:
        return msgspec.json.decode(document or b"", type=TransferStatus)
    except msgspec.MsgspecError:
        return None


class TransferRuns:
    """Executes each request as a run of an environment in AWS."""

    def __init__(
        self,
        context: "Context",
        bucket: "BucketStore",
        notify: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._context, self._bucket, self._notify = context, bucket, notify
        self._key = self._job_id = ""

    def execute(self, request: Mapping[str, Any], on_progress: OnProgress) -> dict[str, Any]:
        context = self._context
        run_request = transfer_request(context.settings.environment, request)
        prepared = prepare(context, run_request, dry_run=False)
        self._key = prepared.record.key
        self._job_id = submit_run(context, prepared, self._notify)
        self._notify(
            f"Run {self._job_id} in {prepared.requests.submit['jobQueue']} works in the workspace. "
            f"{self._price(prepared.spec)}Starting a host takes some minutes. The run continues "
            f"without this terminal."
        )
        try:
            run = self._wait(on_progress, str(request["verb"]))
        except KeyboardInterrupt:
            if request["verb"] == "list":  # an interrupted listing is of no use
                with suppress(BatchmlError):
                    terminate_all(
                        context, [self._job_id], "Its user no longer waits for the listing"
                    )
            raise
        report = self._read(REPORT_KEY)
        if report is None:
            raise self._end_error(run)
        return dict(json.loads(report))

    def read_file(self, name: str) -> bytes:
        return self._read(name) or b""

    def describe_cost(self) -> str:
        return describe_run_cost(self._context, self._job_id) if self._job_id else ""

    def _price(self, spec: JobSpec) -> str:
        try:
            hour = quote_of_job(self._context, spec).hour
        except BatchmlError:
            return ""
        if hour is None or not hour.high or not math.isfinite(float(hour.high)):
            return ""
        return f"It costs about {dollars(hour.high)} an hour. "

    def _wait(self, on_progress: OnProgress, verb: str) -> "Run":
        def see(runs: "Mapping[str, Run]") -> None:
            run = runs.get(self._job_id)
            if run is None:
                return
            is_running = run.status.value == "RUNNING"
            status = read_progress(self._read(PROGRESS_KEY)) if is_running else None
            on_progress(status or TransferStatus(f"{verb}: the run is {run.status.value}"))

        (run,) = wait_for_runs(self._context, [self._job_id], tell=self._notify, on_states=see)
        return run

    def _end_error(self, run: "Run") -> TransferWorkerFailed:
        option = f" --env {self._context.env}"
        return TransferWorkerFailed(
            f"The transfer run {self._job_id} ended: {describe_outcome(run)}.\n"
            f"  batchml explain {self._job_id}{option}\n"
            f"  batchml logs {self._job_id}{option}",
            run.exit_code or 1,
        )

    def _read(self, name: str) -> bytes | None:
        return self._bucket.get(f"runs/{self._key}/{name}")
