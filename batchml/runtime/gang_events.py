"""What the rules of a gang hear, and what they order: `gang_rules.py` makes one of the other."""

from __future__ import annotations

from typing import NamedTuple, Tuple, Union

from batchml.runtime.codes import STOPPED
from batchml.runtime.generations import Past


class Limits(NamedTuple):
    """Of one gang. Times are seconds."""

    nodes: int = 1
    attempt: int = 1
    start_within: float = 1200.0  # until all nodes are there
    regroup: float = 60.0  # until a node that fell silent is there again
    gone: float = 10.0  # the same for one whose supervisor has ended: nobody brings it back
    hang_after: float = 0.0  # 0: never
    grace: float = 30.0  # from a stop to the kill
    end_grace: float = 3.0  # the same for ranks whose peers are gone: nothing is left to save
    confirm: float = 30.0  # after the kill, until a node says that nothing is left


class Node(NamedTuple):
    number: int  # 0: the main node
    processes: int
    address: str = ""
    host: str = ""  # how people know it

    def named(self) -> str:
        where = self.host or self.address
        return f"node {self.number} ({where})" if where else f"node {self.number}"


class Failure(NamedTuple):
    """A rank that ended otherwise than with 0."""

    node: int
    rank: int
    code: int  # below 0: of a signal
    tail: Tuple[str, ...] = ()  # the last lines that it printed
    stamp: float = 0.0  # when it failed by its own account, in seconds since 1970; 0: unknown
    was_sent: bool = False  # we had sent it the signal that it died by
    is_memory: bool = False  # the kernel killed it for want of memory


# --- events: what has happened, and when (`at`, in seconds of one clock) --------------------------


class Tick(NamedTuple):
    at: float


class Joined(NamedTuple):
    """A node is here, fit for a generation: nothing of an earlier one runs on it."""

    at: float
    node: Node
    unfit: str = ""  # why its host is not, as a line says it


class Left(NamedTuple):
    """A node is gone; `silent` where only nothing is heard of it."""

    at: float
    node: int
    silent: bool = False


class RankExited(NamedTuple):
    at: float
    generation: int
    failure: Failure  # with code 0 it is none


class Ended(NamedTuple):
    """Nothing of a generation is left on a node; `unfit`: why its host should have no other."""

    at: float
    generation: int
    node: int
    unfit: str = ""


class Progressed(NamedTuple):
    """There is a new newest checkpoint."""

    at: float


class Pulse(NamedTuple):
    """A rank has given a sign of life."""

    at: float


class Asked(NamedTuple):
    """A stop was asked for on a node. `softly`: no signal, the program looks for itself.

    `grace`: seconds from the stop to the kill, if that node has no more.
    """

    at: float
    node: int
    code: int = STOPPED
    why: str = ""
    softly: bool = False
    grace: float = float("inf")


class NotBegun(NamedTuple):
    """A node could not even begin, and has ended."""

    at: float
    node: int
    code: int
    why: str


class Lost(NamedTuple):
    """A node's supervisor has died, and nobody brings it back."""

    at: float
    node: int
    why: str


Event = Union[
    Tick, Joined, Left, RankExited, Ended, Progressed, Pulse, Asked, NotBegun, Lost
]  # fmt: skip


# --- actions --------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Start the ranks of a generation on every node, in the order of `nodes`."""

    generation: int
    restarts: int  # before it, in this attempt
    nodes: Tuple[Node, ...]


class EndRanks(NamedTuple):
    """TERM, `grace`, KILL on every node; with `stacks` the ranks write first where they are."""

    generation: int
    grace: float
    stacks: bool = False


class StopRanks(NamedTuple):
    """As `EndRanks`, for good: the stop file is made, and the ranks may save."""

    code: int
    why: str
    grace: float
    softly: bool = False  # the stop file alone


class Record(NamedTuple):
    """Remember the generations so far."""

    past: Tuple[Past, ...]


class Say(NamedTuple):
    text: str


class Exit(NamedTuple):
    """Every supervisor ends with this code; `by_runtime` unless it is the program's own."""

    code: int
    why: str
    by_runtime: bool = True
    tail: Tuple[str, ...] = ()


Action = Union[Begin, EndRanks, StopRanks, Record, Say, Exit]
