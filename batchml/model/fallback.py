"""`[fallback]` of a job.toml: the queue to which a run moves if it finds no host in its own queue.

AWS Batch cannot move a job to another queue. So the waiting job is cancelled and submitted again.
CancelJob has no effect on a job that has started, so the second job is sent only after it is
certain that the first never starts. Source: AWS Batch API Reference, CancelJob.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from batchml.errors import UsageError
from batchml.model.names import bare_name, short_duration
from batchml.model.run import JobStatus, Run
from batchml.model.tables import parse_duration

FALLBACK_TAG = "batchml:fallback"  # on a run that may move: QUEUE:SECONDS
MOVED_TAG = "batchml:moved"  # on a run that has moved: the id of its earlier job
WATCHES_TAG = "batchml:watches"  # on a run that watches and moves another run: its key
MOVED = "BATCHML_MOVED"  # the variable with the id of the earlier job, for runtime/entry/fetch.py
DEFAULT_AFTER = "30m"

# The beginning of CancelJob's reason for a job that is moved. AWS allows 1,024 characters.
MOVED_MARK = "batchml: moved to the queue "
_MOVED_TO = rf"{MOVED_MARK}([A-Za-z0-9_-]{{1,128}}): "


class Fallback(Struct, frozen=True, forbid_unknown_fields=True):
    """The queue to move to, and the time of waiting before the move."""

    queue: str = ""  # "": the run waits in its own queue
    after: str | int = DEFAULT_AFTER

    @property
    def seconds(self) -> int:
        return parse_duration(self.after) or 0


def parse_fallback_flag(text: str | None) -> dict[str, str]:
    """`--fallback QUEUE[:30m]` as a `[fallback]` table; empty without the flag."""
    if not text:
        return {}
    queue, colon, after = text.rpartition(":") if ":" in text else (text, "", "")
    if not queue or (colon and not after):
        raise UsageError(f"--fallback {text}: write it as QUEUE, or QUEUE:30m.")
    return {"queue": queue, "after": after or DEFAULT_AFTER}


def fallback_mistakes(fallback: Fallback, queue: str, groups: object) -> Iterator[str]:
    """The mistakes in `[fallback]` that types cannot find. `queue` is the queue of the job."""
    if not fallback.seconds:
        yield (
            f"fallback.after: found {fallback.after!r}. Write the time before the move, such as "
            '"30m".'
        )
    if fallback.queue and fallback.queue == queue:
        yield f"fallback.queue: {queue} is the run's own queue. Name another."
    if fallback.queue and groups:
        yield "fallback: excludes [[groups]], because group runs do not move. Remove one of them."


def move_reason(queue: str, seconds: int) -> str:
    """The reason of CancelJob for a job that is moved. `queue` is the new queue's name in AWS."""
    return f"{MOVED_MARK}{bare_name(queue)}: no host within {short_duration(seconds)}"


def moved_to(run: Run) -> str:
    """The queue to which the run of a cancelled job has moved; "" for other jobs."""
    found = re.match(_MOVED_TO, run.status_reason) if run.status is JobStatus.FAILED else None
    return found[1] if found else ""


def describe_move_done(queue: str, job_id: str) -> str:
    """The message about a finished move, for commands that follow the run."""
    return f"Moved to the queue {queue}: the new job is {job_id}."


def describe_fallback(fallback: str) -> str:
    """Describe the fallback of a run that may move, from its FALLBACK_TAG."""
    queue, _, seconds = fallback.rpartition(":")
    return f"to the queue {queue}, if it finds no host within {short_duration(_number(seconds))}"


def describe_move(fallback: str, earlier_job: str) -> str:
    """Describe a finished move, from the run's FALLBACK_TAG and MOVED_TAG."""
    queue, _, seconds = fallback.rpartition(":")
    waited = f" after {short_duration(_number(seconds))} without a host" if queue else ""
    return f"to the queue {queue}{waited}; its earlier job was {earlier_job}"


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
