"""What the main node hears of the nodes of a run (events), and what it does about it (actions).

`rules.py` decides between the two, and `coordinator.py` carries out the actions.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple, Union

from batchml.runtime.nodes.supervisor.restarts import RestartRecord
from batchml.runtime.protocol.exit_codes import STOPPED


class RunNode(NamedTuple):
    """A node of the run."""

    number: int  # 0: the main node
    processes: int  # ranks on it
    address: str = ""
    host: str = ""  # the name of its host in messages

    def describe(self) -> str:
        where = self.host or self.address
        return f"node {self.number} ({where})" if where else f"node {self.number}"


class RankFailure(NamedTuple):
    """How a rank ended."""

    node: int
    rank: int
    code: int  # the exit code; minus the signal's number, if a signal ended the rank
    tail: Tuple[str, ...] = ()  # the last lines that it printed
    stamp: float = 0.0  # when it failed by its own account, in seconds since 1970; 0: unknown
    was_sent: bool = False  # the supervisor had sent it the signal that ended it
    is_memory: bool = False  # the kernel killed it because memory was full


# --- Events: `at` is their time, in seconds of a monotonic clock ----------------------------------


class ClockTick(NamedTuple):
    """Time has passed. Comes about once a second."""

    at: float


class NodeJoined(NamedTuple):
    """A node is connected, and no process of an earlier generation runs on it."""

    at: float
    node: RunNode
    unfit: str = ""  # why its host is unfit to run ranks; empty: it is fit


class NodeLeft(NamedTuple):
    """A node is gone. `silent`: its connection is open, but it sends nothing."""

    at: float
    node: int
    silent: bool = False


class RankExited(NamedTuple):
    """A rank has ended, perhaps with code 0."""

    at: float
    generation: int
    failure: RankFailure


class RanksGone(NamedTuple):
    """No process of a generation is left on a node. `unfit`: see `NodeJoined`."""

    at: float
    generation: int
    node: int
    unfit: str = ""


class CheckpointSaved(NamedTuple):
    """A newer checkpoint exists."""

    at: float


class SignOfLife(NamedTuple):
    """A rank gave a sign of life."""

    at: float


class StopAsked(NamedTuple):
    """A stop was requested on a node. `softly`: by the stop file alone, without a signal.

    `grace`: the seconds that this node has from the stop to the kill.
    """

    at: float
    node: int
    code: int = STOPPED
    why: str = ""
    softly: bool = False
    grace: float = float("inf")


class StartFailed(NamedTuple):
    """A node could not start its command, and has ended."""

    at: float
    node: int
    code: int
    why: str


class SupervisorLost(NamedTuple):
    """The supervisor of a node has died, and nothing restarts it."""

    at: float
    node: int
    why: str


class NetworkChecked(NamedTuple):
    """The network between the nodes was checked. `why`: why the run ends, with `code`."""

    at: float
    code: int = 0
    why: str = ""


Event = Union[
    ClockTick, NodeJoined, NodeLeft, RankExited, RanksGone, CheckpointSaved, SignOfLife, StopAsked,
    StartFailed, SupervisorLost, NetworkChecked,
]  # fmt: skip


# --- Actions --------------------------------------------------------------------------------------


class CheckNetwork(NamedTuple):
    """Let all nodes measure their network; `NetworkChecked` follows."""

    nodes: Tuple[RunNode, ...]


class LeaveNetworkCheck(NamedTuple):
    """End the check of the network on all nodes: a node is gone, or was."""


class BeginGeneration(NamedTuple):
    """Start the ranks of a generation on every node, numbered in the order of `nodes`."""

    generation: int
    restarts: int  # generations before it in this attempt
    nodes: Tuple[RunNode, ...]


class EndRanks(NamedTuple):
    """Send SIGTERM to the ranks on every node, and SIGKILL after `grace` seconds.

    `stacks`: the ranks first write their stacks.
    """

    grace: float
    stacks: bool = False


class StopRanks(NamedTuple):
    """End the run: make the stop file, and end the ranks as for `EndRanks`, but let them save."""

    code: int
    why: str
    grace: float
    softly: bool = False  # only make the stop file, and send no signal


class KeepRecord(NamedTuple):
    """Write the record of the generations so far."""

    past: Tuple[RestartRecord, ...]


class SayLine(NamedTuple):
    """Write a line for people into the log of the main node."""

    text: str


class EndRun(NamedTuple):
    """End every supervisor with this code. `by_runtime`: the runtime chose it, not the program."""

    code: int
    why: str
    by_runtime: bool = True
    tail: Tuple[str, ...] = ()  # the last lines of the rank that caused the end


Action = Union[
    CheckNetwork, LeaveNetworkCheck, BeginGeneration, EndRanks, StopRanks, KeepRecord, SayLine,
    EndRun,
]  # fmt: skip
