"""How far an array is: by its children, as every command says it."""

from batchml.model.run import Run
from batchml.model.status import JobStatus

MAX_ARRAY = 10_000  # children of one array; AWS Batch takes 2 or more

IN_QUEUE = ("SUBMITTED", "PENDING", "RUNNABLE")  # of `shown_state`: nothing of it has begun
_BEGUN = ("STARTING", "RUNNING", "SUCCEEDED", "FAILED")
_LIVE = ("RUNNING", "STARTING", "RUNNABLE")


def shown_state(run: Run) -> str:
    """AWS Batch calls an array PENDING while its children run; people would not."""
    if run.status is JobStatus.PENDING and run.children:
        if any(run.children.get(status) for status in _BEGUN):
            return JobStatus.RUNNING.value
        if run.children.get("RUNNABLE"):
            return JobStatus.RUNNABLE.value
    return run.status.value


def state_text(run: Run) -> str:
    """A run's state; of an array how far it is: `2 RUNNING, 4/6 done`, `FAILED, 2 of 6`."""
    if not run.children:
        return run.status.value
    failed, size = run.children.get("FAILED", 0), array_size(run)
    if run.status.is_terminal:
        return f"{run.status}, {failed or size} of {size}"
    live = next((each for each in _LIVE if run.children.get(each)), "RUNNING")
    words = f"{run.children.get(live, 0)} {live}, {done(run)}/{size} done"
    return f"{words}, {failed} FAILED" if failed else words


def done(run: Run) -> int:
    """How many children have ended."""
    return run.children.get("SUCCEEDED", 0) + run.children.get("FAILED", 0)


def array_size(run: Run) -> int:
    return run.array_size or sum(run.children.values())


def has_begun(run: Run) -> bool:
    """True for an array of which a child has started, or may have and is over."""
    return any(run.children.get(status) for status in _BEGUN)


def first_child(job_id: str) -> str:
    """The child that begins first: AWS tells of it, but not of the array, when it was started."""
    return f"{job_id}:0"


def began(child: Run | None) -> int | None:
    """When a child was started first, in ms; None while it was not, or is not known."""
    if child is None:
        return None
    known = [child.started_at, *(attempt.started_at for attempt in child.attempts)]
    return min(filter(None, known), default=None)
