"""Jobs: what a sweep asks of AWS Batch, in its own words. `client/sweeping/jobs.py` answers it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from batchml.model.run import JobStatus
from batchml.sweep.events import Wave

MAX_LOOK = 100  # job ids of one `look`, which is one call


class Look(Struct, frozen=True):
    """A wave's job as AWS Batch tells of it. Times in seconds since the epoch."""

    status: JobStatus
    children: Mapping[str, int] = {}  # how many are in each JobStatus; of an array only
    started_at: float | None = None
    stopped_at: float | None = None
    exit_code: int | None = None  # of a job that is no array
    reason: str = ""  # why it ended or cannot run, in AWS's words


class Child(Struct, frozen=True):
    """A child of an array that FAILED, after all its attempts."""

    index: int
    job_id: str  # with `:INDEX`
    exit_code: int | None = None
    reason: str = ""
    started_at: float | None = None
    stopped_at: float | None = None


class Jobs(Protocol):
    """The jobs of one sweep. Each method raises BatchmlError when AWS Batch does not do it.

    `hourly`: USD for an hour of one trial; None where nobody pays. `timeout`: seconds after which
    AWS Batch ends one attempt of a trial; None: never.
    """

    hourly: float | None
    timeout: float | None

    def submit(self, wave: Wave, size: int, width: int, after: str = "") -> str:
        """Send the wave's SubmitJob exactly once; the job's id.

        The wave's key is in the job's name: one that was sent before, by whoever it was, is found
        and not sent again. `size`: how many children; 1 is a plain job, without an index. `width`:
        bytes of a line of the manifest, which is on the board already. `after`: the id of the job
        that must have succeeded before this one starts.
        """

    def look(self, job_ids: Sequence[str]) -> dict[str, Look]:
        """What is known of these jobs, at most MAX_LOOK, in one call. Unknown ones are left out."""

    def failed_children(self, job_id: str) -> list[Child]:
        """The children of an array that FAILED so far; a call for each 1,000."""

    def terminate(self, job_ids: Sequence[str], why: str) -> None:
        """End these jobs with all their children; those that have ended stay as they are."""

    def hold(self, quantity: int) -> None:
        """At most `quantity` children at once, of everything that is submitted from now on.

        Called before each submission that needs it, also again with the same or another number.
        """

    def release(self, *, is_patient: bool = False) -> bool:
        """Delete what `hold` made, if it made anything, once the sweep's trials have all ended.

        False where it stays: a job asks for it still whose last container is just ending. Who is
        patient asks again later; otherwise people are told of it.
        """
