"""Causes that lie in other runs, and in the children of an array. Pure."""

from msgspec.structs import replace

from batchml.model.explanation import Explanation
from batchml.model.run import JobStatus
from batchml.ops.explain.children import with_children
from batchml.ops.explain.seen import Look, Seen
from batchml.ops.explain.words import count, named

_SHOWN = 3


def pending(seen: Seen) -> Explanation | None:
    """A run that waits for others, or an array whose children are at work."""
    run = seen.run
    if run.is_cancelled or run.is_terminated:
        return Explanation(
            "being-cancelled", "It was cancelled, and ends when what it waits for has ended.",
            (f"reason given: {run.status_reason or 'none'}",), is_problem=False,
            command=seen.words.batchml("wait", run.job_id),
        )  # fmt: skip
    if run.depends_on and (not run.children or set(run.children) <= {"PENDING"}):
        return _waits_for(seen) if Look.DEPENDENCIES in seen.asked else None
    if run.children:
        return _array(seen)
    if run.is_sequential or run.array_index is not None:
        return Explanation(
            "dependency", "It waits for another child of its array, or for its array.",
            is_problem=False, command=seen.words.batchml("explain", run.job_id.partition(":")[0]),
        )  # fmt: skip
    return Explanation(
        "dependency", "AWS Batch says that it waits for other runs, and names none.",
        command=seen.words.batchml("show", run.job_id),
    )  # fmt: skip


def _waits_for(seen: Seen) -> Explanation:
    run, words = seen.run, seen.words
    known = {each.job_id: each for each in seen.dependencies}
    circle = [each for each in seen.dependencies if run.job_id in each.depends_on]
    if run.job_id in run.depends_on or circle:
        other = circle[0].job_id if circle else run.job_id
        return Explanation(
            "dependency-cycle", "It waits for a run that waits for it: neither can ever start.",
            (f"{run.job_id} waits for {other}, and that for {run.job_id}",),
            "Cancel it, and submit it again without that --after.",
            words.batchml("cancel", run.job_id),
        )  # fmt: skip
    failed = [each for each in seen.dependencies if each.status is JobStatus.FAILED]
    if failed:
        return Explanation(
            "dependency-failed", f"A run that it depends on has failed: {named(failed[0])}.",
            ("AWS Batch fails what depends on a failed run",),
            "See why that one failed.", words.about(failed[0]).batchml("explain", failed[0].job_id),
        )  # fmt: skip
    left = [each for each in seen.dependencies if not each.status.is_terminal]
    lost = [job_id for job_id in run.depends_on if job_id not in known]
    evidence = [f"{named(each)} is {each.status}" for each in left[:_SHOWN]]
    evidence += [f"{job_id}: AWS Batch does not know it" for job_id in lost[:_SHOWN]]
    waits = count(len(left) + len(lost), "run that has", "runs that have")
    if left:
        slow = next((each for each in left if each.status is not JobStatus.RUNNING), left[0])
        return Explanation(
            "dependency", f"It waits for {waits} not ended.", tuple(evidence), is_problem=False,
            command=words.about(slow).batchml("explain", slow.job_id),
        )  # fmt: skip
    if lost:
        return Explanation(
            "dependency-forgotten", f"It waits for {waits} been forgotten by AWS Batch.",
            tuple(evidence), "Cancel it, and submit it again without that --after.",
            words.batchml("cancel", run.job_id),
        )  # fmt: skip
    return Explanation(
        "released", "All runs that it depends on have succeeded: it is about to become RUNNABLE.",
        is_problem=False, command=words.batchml("explain", run.job_id),
    )  # fmt: skip


def _array(seen: Seen) -> Explanation | None:
    """An array is PENDING for as long as its children are at work."""
    run = seen.run
    if run.children.get("FAILED") and Look.FAILED not in seen.asked:
        return None
    if run.children.get("RUNNABLE") and Look.CHILD not in seen.asked:
        return None
    found = Explanation(
        "array-at-work", "Its children are at work; AWS Batch calls an array PENDING meanwhile.",
        is_problem=False, command=seen.words.batchml("logs", "-f", run.job_id),
    )  # fmt: skip
    if seen.failed:
        first = seen.failed[0].job_id
        found = replace(
            found, fix=f"See why child {seen.failed[0].array_index} failed.",
            command=seen.words.batchml("explain", first), is_problem=True,
        )  # fmt: skip
    return with_children(run, seen.failed, found)
