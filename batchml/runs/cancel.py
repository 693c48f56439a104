"""Stop runs in any state, and check that they are stopping.

TerminateJob is used for all of them: CancelJob succeeds even where it does nothing, and does not
stop a job that has started. Source: AWS Batch API Reference, CancelJob, TerminateJob.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from batchml.aws.batch.jobs import JobApi
from batchml.clock import Clock
from batchml.errors import BatchmlError, UsageError
from batchml.model.run import Run

MAX_PARALLEL = 8  # calls at a time
PATIENCE = 10.0  # seconds until DescribeJobs shows the termination
POLL_PAUSE = 1.0  # seconds between two polls


class CancelledRun(Struct, frozen=True):
    """The outcome for one run.

    `had_ended` is True for a run that had ended before. `left` says why the run is not stopping;
    "" if it is stopping.
    """

    run: Run
    had_ended: bool = False
    left: str = ""
    error: BatchmlError | None = None


def cancel(
    api: JobApi, before: Mapping[str, Run], reason: str, clock: Clock
) -> dict[str, CancelledRun]:
    """Stop the runs of `before`, their states by job id, and check that they are stopping.

    If one run cannot be stopped, the others are. A second call changes nothing.
    Raises UsageError for a node, before anything is stopped.
    """
    refuse_nodes(before)
    alive = [job_id for job_id, run in before.items() if not run.status.is_terminal]
    errors = _terminate_all(api, without_covered_children(alive), reason)
    after = _wait_until_stopping(api, alive, errors, clock)
    return {
        job_id: _outcome(run, after.get(job_id, run), errors.get(job_id))
        for job_id, run in before.items()
    }


def refuse_nodes(job_ids: Iterable[str]) -> None:
    """Raise UsageError for nodes: stopping one node stops all, so the user has to name the run."""
    for job_id in job_ids:
        run, is_node, _ = job_id.partition("#")
        if is_node:
            raise UsageError(
                f"{job_id}: a node cannot be stopped alone. To stop all nodes: batchml cancel {run}"
            )


def without_covered_children(job_ids: Sequence[str]) -> list[str]:
    """The ids, without children whose whole array is among the ids."""
    whole = set(job_ids)
    return [each for each in job_ids if ":" not in each or each.partition(":")[0] not in whole]


def is_stopping(run: Run) -> bool:
    """True if a run has ended, or AWS Batch has recorded that it has to end."""
    return run.status.is_terminal or run.is_terminated or run.is_cancelled


def _terminate_all(api: JobApi, job_ids: Sequence[str], reason: str) -> dict[str, BatchmlError]:
    def terminate(job_id: str) -> BatchmlError | None:
        try:
            api.terminate(job_id, reason)
        except BatchmlError as error:
            return error
        return None

    if len(job_ids) < 2:
        errors = [terminate(job_id) for job_id in job_ids]
    else:
        with ThreadPoolExecutor(MAX_PARALLEL) as pool:
            errors = list(pool.map(terminate, job_ids))
    found = zip(job_ids, errors, strict=True)
    return {job_id: error for job_id, error in found if error is not None}


def _wait_until_stopping(
    api: JobApi, job_ids: Sequence[str], refused: Container[str], clock: Clock
) -> dict[str, Run]:
    """The runs, as soon as all are stopping or `PATIENCE` is over.

    Runs whose stop was refused are described, but not waited for; nor are children, which AWS Batch
    ends one after the other once their array is stopping.
    """
    found: dict[str, Run] = {}
    rest = list(job_ids)
    end = clock.monotonic() + PATIENCE
    while rest:
        found |= api.describe(rest)
        rest = [
            each
            for each in rest
            if each not in refused and ":" not in each
            and not (each in found and is_stopping(found[each]))
        ]  # fmt: skip
        if not rest or clock.monotonic() >= end:
            break
        clock.sleep(POLL_PAUSE)
    return found


def _outcome(before: Run, after: Run, error: BatchmlError | None) -> CancelledRun:
    if before.status.is_terminal:
        return CancelledRun(before, had_ended=True)
    if error is not None and not is_stopping(after):
        return CancelledRun(after, left=str(error), error=error)
    if not is_stopping(after) and ":" not in after.job_id:
        return CancelledRun(
            after, left="AWS Batch accepted the request, but the run is not stopping yet."
        )
    return CancelledRun(after)
