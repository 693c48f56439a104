"""Events of a run that is followed; the caller decides what to show.

`child` names the part of the run: "" the run itself, "3" the child or node 3, "3/2" its second
attempt.
"""

from msgspec import Struct

from batchml.model.logcheck import LogCheck
from batchml.model.run import Run

MARKED = "marked"  # the end mark counts as many lines as came
PROVEN = "proven"  # the embedded server found in the log what was written, and nothing else
QUIET = "quiet"  # no end mark; nothing more came
SHORT = "short"  # the end mark counts more or fewer lines than came
CUT = "cut"  # the log could not be read to its end
DAMAGED = "damaged"  # the embedded server found that the log is not what was written


class StatusChanged(Struct, frozen=True):
    """The run has a new state, or some children of an array have."""

    run: Run


class RunMessage(Struct, frozen=True):
    """A message about progress: why a run waits, a child that failed, a missing log."""

    run: Run
    text: str


class LogOpened(Struct, frozen=True):
    """The output of an attempt begins; `number` counts from 1."""

    stream: str
    number: int
    child: str = ""


class HostAssigned(Struct, frozen=True):
    """Where the attempt runs, as the embedded server says; yielded once if all parts agree."""

    how: dict[str, str]


class OutputLine(Struct, frozen=True, gc=False):
    timestamp: int  # ms
    text: str
    child: str = ""


class MetricsReported(Struct, frozen=True):
    """Points that the program reported: `{"step": 1, "loss": 0.5, ...}`."""

    stream: str
    points: tuple[dict[str, float], ...]
    child: str = ""


class UsageReported(Struct, frozen=True):
    """Current use of the attempt: cpu in cores, memory and gpu_memory in MiB, gpu in percent."""

    stream: str
    usage: dict[str, float]
    child: str = ""


class LogClosed(Struct, frozen=True):
    """The output of an attempt has ended. `proof` is one of the constants above."""

    stream: str
    lines: int
    proof: str
    child: str = ""
    check: LogCheck | None = None

    @property
    def is_complete(self) -> bool | None:
        """Whether all lines came; None where nobody knows."""
        if self.proof in (MARKED, PROVEN):
            return True
        return None if self.proof == QUIET else False


class PollingPaused(Struct, frozen=True):
    """All lines so far were yielded: a caller that buffers lines prints them now."""


class ContactLost(Struct, frozen=True):
    """No contact for now; the run goes on."""

    error: str


class RunEnded(Struct, frozen=True):
    run: Run


RunEvent = (
    StatusChanged
    | RunMessage
    | LogOpened
    | HostAssigned
    | OutputLine
    | MetricsReported
    | UsageReported
    | LogClosed
    | PollingPaused
    | ContactLost
    | RunEnded
)
