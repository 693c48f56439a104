"""Fallback: another queue for a run that finds no host in its own, and how such a move is told.

AWS Batch moves no job from one queue to another. A run is moved by cancelling its job where it
waits and submitting the same again elsewhere: CancelJob leaves alone what has started, so the
second job is sent only once the first has surely not begun. Source: AWS Batch API Reference,
CancelJob.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from batchml.errors import UsageError
from batchml.model.names import bare_name, in_words
from batchml.model.run import JobStatus, Run
from batchml.model.tables import parse_duration

FALLBACK_TAG = "batchml:fallback"  # of a run that may move: QUEUE:SECONDS
MOVED_TAG = "batchml:moved"  # of a run that has: the id of the job before
WATCHES_TAG = "batchml:watches"  # of a run that moves another one: the key of that
MOVED = "BATCHML_MOVED"  # the same, as a variable: runtime/entry/fetch.py reads it
DEFAULT_AFTER = "30m"

# What a job that was moved says of its end. AWS Batch keeps up to 1,024 characters of it.
MOVED_MARK = "batchml: moved to the queue "
_MOVED_TO = re.compile(rf"{MOVED_MARK}([A-Za-z0-9_-]{{1,128}}): ")


class Fallback(Struct, frozen=True, forbid_unknown_fields=True):
    """`[fallback]` of a job.toml: the queue to go to, and after how long a wait."""

    queue: str = ""  # none: the run waits in its own queue
    after: str | int = DEFAULT_AFTER

    @property
    def seconds(self) -> int:
        return parse_duration(self.after) or 0


def read_flag(text: str | None) -> dict[str, str]:
    """`--fallback QUEUE[:30m]` as a `[fallback]` table; empty where it was not given."""
    if not text:
        return {}
    queue, colon, after = text.rpartition(":") if ":" in text else (text, "", "")
    if not queue or (colon and not after):
        raise UsageError(f"--fallback {text}: write it as QUEUE, or QUEUE:30m.")
    return {"queue": queue, "after": after or DEFAULT_AFTER}


def fallback_mistakes(fallback: Fallback, queue: str, groups: object) -> Iterator[str]:
    """What types cannot say of `[fallback]`, beside the job's own queue."""
    if not fallback.seconds:
        yield (
            f"fallback.after: found {fallback.after!r}. Write how long to wait before the move, "
            'such as "30m".'
        )
    if fallback.queue and fallback.queue == queue:
        yield f"fallback.queue: {queue} is the run's own queue. Name another."
    if fallback.queue and groups:
        yield "fallback: with [[groups]]. The jobs of a gang do not move: leave one of them out."


def moving_reason(queue: str, seconds: int) -> str:
    """What is said to CancelJob of a job that is moved. `queue` is its name in AWS."""
    return f"{MOVED_MARK}{bare_name(queue)}: no host within {in_words(seconds)}"


def moved_to(run: Run) -> str:
    """The queue that a job's run was moved to; empty for any other job."""
    found = _MOVED_TO.match(run.status_reason) if run.status is JobStatus.FAILED else None
    return found[1] if found else ""


def said_gone_on(queue: str, job_id: str) -> str:
    """What who looks after a run, or waits for it, is told once it has moved."""
    return f"Moved to the queue {queue}: it is the job {job_id}."


def said_moves(fallback: str) -> str:
    """The tag of a run that may move, in words."""
    queue, _, seconds = fallback.rpartition(":")
    return f"to the queue {queue}, when it finds no host within {in_words(_number(seconds))}"


def said_moved(fallback: str, before: str) -> str:
    """The tags of a run that has moved, in words."""
    queue, _, seconds = fallback.rpartition(":")
    waited = f" after {in_words(_number(seconds))} without a host" if queue else ""
    return f"to the queue {queue}{waited}; before it was the job {before}"


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
