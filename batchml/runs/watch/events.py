"""The events of a run that is followed. The caller decides what to show.

`child` names the part of the run: "" is the run itself, "3" is child or node 3, "3/2" is the second
attempt of child 3. Times are in milliseconds since the epoch.
"""

from msgspec import Struct

from batchml.model.logcheck import LogCheck
from batchml.model.run import Run

# Values of LogClosed.proof
MARKED = "marked"  # the end mark counts as many lines as were read
PROVEN = "proven"  # the embedded server has checked that the log is what was written
QUIET = "quiet"  # there is no end mark, and no more lines came
SHORT = "short"  # the end mark counts more or fewer lines than were read
CUT = "cut"  # the log could not be read to its end
DAMAGED = "damaged"  # the embedded server found that the log is not what was written


class StatusChanged(Struct, frozen=True):
    """The run, or some children of an array, have a new state."""

    run: Run


class RunMessage(Struct, frozen=True):
    """A message for the user: why the run waits, that a child failed, that a log is missing."""

    run: Run
    text: str


class LogOpened(Struct, frozen=True):
    """The output of an attempt begins; `number` counts from 1."""

    stream: str
    number: int
    child: str = ""


class HostAssigned(Struct, frozen=True):
    """The host mark of the embedded server; yielded once for all parts on the same host.

    `host` has the keys `executor`, `image`, `environment`, and `made` if the attempt has made it.
    """

    host: dict[str, str]


class OutputLine(Struct, frozen=True, gc=False):
    """One line of output."""

    timestamp: int
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


class IdlenessReported(Struct, frozen=True):
    """The attempt is idle; `waits` says for what: `rank 1 waits to connect to 10.0.0.1:29500`."""

    waits: str
    child: str = ""


class LogClosed(Struct, frozen=True):
    """The output of an attempt has ended. `proof`, a constant above, says if it is whole."""

    stream: str
    lines: int
    proof: str
    child: str = ""
    check: LogCheck | None = None

    @property
    def is_complete(self) -> bool | None:
        """True if all lines were read, None if that cannot be known."""
        if self.proof in (MARKED, PROVEN):
            return True
        return None if self.proof == QUIET else False


class PollingPaused(Struct, frozen=True):
    """All lines so far were yielded: a caller that buffers lines should print them."""


class ContactLost(Struct, frozen=True):
    """AWS Batch, or the log, cannot be reached now; the run goes on."""

    error: str


class RunEnded(Struct, frozen=True):
    """The last event: the run has ended, and its output was read."""

    run: Run


RunEvent = (
    StatusChanged
    | RunMessage
    | LogOpened
    | HostAssigned
    | OutputLine
    | MetricsReported
    | UsageReported
    | IdlenessReported
    | LogClosed
    | PollingPaused
    | ContactLost
    | RunEnded
)
