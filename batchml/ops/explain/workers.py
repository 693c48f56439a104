"""Workers of a gang that wait while their head runs. Pure."""

from collections.abc import Mapping

from msgspec.structs import replace

from batchml.model.explanation import Explanation
from batchml.model.run import JobStatus, Run
from batchml.ops.explain.words import Words

RUNS = "running"  # the cause of the verdict on a run that is not waiting

_WAIT = (JobStatus.SUBMITTED, JobStatus.PENDING, JobStatus.RUNNABLE)


def with_workers(head: Explanation, workers: Mapping[str, Run], words: Words) -> Explanation:
    """The verdict on a head that runs, and which of its workers, by group, do not run yet.

    As it was where none waits.
    """
    waiting = {group: run for group, run in workers.items() if _waiting(run)}
    if head.cause != RUNS or not waiting:
        return head
    told = [
        f"group {group}: {_waiting(run)} of {run.array_size or 1} wait, {run.job_id}"
        for group, run in waiting.items()
    ]
    first = next(iter(waiting.values()))
    return replace(
        head,
        verdict=f"{head.verdict} Workers of it wait.",
        evidence=(*head.evidence, *told),
        fix="See why they wait.",
        command=words.batchml("explain", first.job_id),
    )


def _waiting(run: Run) -> int:
    """How many of a group's workers have not begun; of an array its children."""
    if run.children:
        return sum(run.children.get(status.value, 0) for status in _WAIT)
    return int(run.status in _WAIT)
