"""What happens to a run that is followed, as values; the caller decides what to show.

`child` says of which part of a run: "" the run itself, "3" the child or node 3, "3/2" its second
attempt.
"""

from msgspec import Struct

from batchml.model.logcheck import LogCheck
from batchml.model.run import Run

MARKED = "marked"  # the end mark counted as many lines as we saw
PROVEN = "proven"  # the embedded server found in the log what was written, and nothing else
QUIET = "quiet"  # no mark; nothing more came
SHORT = "short"  # the end mark counted other than we saw
CUT = "cut"  # the log could not be read to its end
DAMAGED = "damaged"  # the embedded server found that the log is not what was written


class StatusChanged(Struct, frozen=True):
    """The run is in another state, or, of an array, some of its children are."""

    run: Run


class Progress(Struct, frozen=True):
    """What people should know on the way: why a run waits, a child that failed, a missing log."""

    run: Run
    text: str


class Opened(Struct, frozen=True):
    """An attempt's output begins; `number` from 1."""

    stream: str
    number: int
    child: str = ""


class Hosted(Struct, frozen=True):
    """What the attempt runs in, as the embedded server says it; told once if all say the same."""

    how: dict[str, str]


class Line(Struct, frozen=True, gc=False):
    timestamp: int  # ms
    text: str
    child: str = ""


class Measured(Struct, frozen=True):
    """Points that the program reported: `{"step": 1, "loss": 0.5, ...}`."""

    stream: str
    points: tuple[dict[str, float], ...]
    child: str = ""


class Used(Struct, frozen=True):
    """What the attempt uses now: cpu in cores, memory in MiB, gpu in percent, gpu_memory in MiB."""

    stream: str
    usage: dict[str, float]
    child: str = ""


class Closed(Struct, frozen=True):
    """An attempt's output has ended. `proof` says whether all of it was seen, and how we know."""

    stream: str
    lines: int
    proof: str
    child: str = ""
    check: LogCheck | None = None

    @property
    def is_complete(self) -> bool | None:
        """None where nobody knows."""
        if self.proof in (MARKED, PROVEN):
            return True
        return None if self.proof == QUIET else False


class Paused(Struct, frozen=True):
    """All lines that had come were told: who has held some back shows them now."""


class Lost(Struct, frozen=True):
    """No contact for now; the run goes on."""

    error: str


class Ended(Struct, frozen=True):
    run: Run


Happening = (
    StatusChanged
    | Progress
    | Opened
    | Hosted
    | Line
    | Measured
    | Used
    | Closed
    | Paused
    | Lost
    | Ended
)
