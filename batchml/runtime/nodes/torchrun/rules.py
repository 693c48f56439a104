"""The rules of a gang, all of them pure: `step(state, event)` is the next state and what to do.

The main node's supervisor tells it what happens on any node (`coordinator.py`) and does what it
says. A gang gathers, runs a generation, ends it on every node, and begins the next one; a
stop reaches every node wherever it was asked for. docs/multi-node.md says it for users.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import FrozenSet, List, NamedTuple, Optional, Tuple, Union

from batchml.runtime.nodes.torchrun.restarts import (
    AGAIN,
    DONE,
    EXIT,
    HANG,
    LOST,
    OPEN,
    SIGNAL,
    Past,
    judge,
)
from batchml.runtime.nodes.torchrun.restarts import STOPPED as WAS_STOPPED
from batchml.runtime.protocol.exit_codes import STOPPED, TRY_ELSEWHERE

# --- events and orders ----------------------------------------------------------------------------
# What the rules of a gang hear, and what they order: `step` turns the one into the other.


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


# --- rules ----------------------------------------------------------------------------------------


GATHERING, RUNNING, ENDING, STOPPING, OVER = "gathering", "running", "ending", "stopping", "over"
TOLD_EVERY = 30.0  # seconds between two lines about who is waited for
_NAMED = 8  # nodes that a line names


class State(NamedTuple):
    limits: Limits
    phase: str = GATHERING
    began: float = 0.0  # when the gathering did
    deadline: float = 0.0  # of the phase, where it has one
    told: float = 0.0  # when a line said last who is waited for
    nodes: Tuple[Node, ...] = ()  # those that are here, by index
    generation: int = 0
    restarts: int = -1
    running: int = 0  # ranks that have not ended with 0
    waiting: FrozenSet[int] = frozenset()  # nodes that have not confirmed an end
    failures: Tuple[Failure, ...] = ()
    lost: Tuple[str, ...] = ()  # nodes lost in this generation, as a line names them
    is_hung: bool = False
    pulse: float = 0.0
    progressed: bool = False
    has_saved: bool = False
    asked: bool = False  # a stop without a signal
    stop: Optional[Asked] = None
    past: Tuple[Past, ...] = ()


Step = Tuple[State, List[Action]]


def begin(limits: Limits, at: float, past: Tuple[Past, ...] = (), has_saved: bool = False) -> State:
    """The gang before any node is there. `past` is what earlier attempts remembered."""
    last = past[-1].generation if past else 0
    return State(
        limits, began=at, told=at, deadline=at + limits.start_within, generation=last,
        past=past, has_saved=has_saved,
    )  # fmt: skip


def step(state: State, event: Event) -> Step:
    """What an event makes of the gang. After `Exit` nothing happens any more."""
    if state.phase == OVER:
        return state, []
    if isinstance(event, Joined):
        return _joined(state, event)
    if isinstance(event, Left):
        return _left(state, event)
    if isinstance(event, RankExited):
        return _exited(state, event)
    if isinstance(event, Ended):
        return _ended(state, event)
    if isinstance(event, Asked):
        return _asked(state, event)
    if isinstance(event, NotBegun):
        here = _named(state, event.node)
        return _over(state, Exit(event.code, f"{here} could not begin: {event.why}"))
    if isinstance(event, Lost):
        return _gave_way(state, event)
    if isinstance(event, Progressed):
        return state._replace(progressed=True, has_saved=True, pulse=event.at), []
    if isinstance(event, Pulse):
        return state._replace(pulse=max(state.pulse, event.at)), []
    return _ticked(state, event.at)


# --- nodes come and go ----------------------------------------------------------------------------


def _joined(state: State, event: Joined) -> Step:
    node = event.node
    if event.unfit:
        return _unfit(state, node.number, event.unfit)
    others = [each for each in state.nodes if each.number != node.number]
    state = state._replace(nodes=tuple(sorted([*others, node])))
    if state.phase == RUNNING:  # it begins anew where its ranks should be running
        return _end(state._replace(lost=(*state.lost, node.named())), event.at, node.number)
    if state.phase in (ENDING, STOPPING):
        return _confirmed(state, node.number, event.at)
    return _begin_if_all(state, event.at)


def _left(state: State, event: Left) -> Step:
    if event.node not in {node.number for node in state.nodes}:
        return state, []
    name = _named(state, event.node)
    state = state._replace(nodes=tuple(n for n in state.nodes if n.number != event.node))
    patience = state.limits.regroup if event.silent else state.limits.gone
    how = "does not answer any more" if event.silent else "is gone"
    says: List[Action] = [Say(f"{name} {how}")]
    if state.phase == GATHERING:
        if state.restarts >= 0:
            state = state._replace(deadline=min(state.deadline, event.at + patience))
        return state, says
    state = state._replace(lost=(*state.lost, f"{name} {how}"), deadline=event.at + patience)
    if state.phase == RUNNING:
        state, actions = _end(state, event.at, event.node)
    else:
        state, actions = _confirmed(state, event.node, event.at)
    return state, [*says, *actions]


def _gave_way(state: State, event: Lost) -> Step:
    """Only other hosts, or a new container, bring it back: Batch has to start all anew."""
    if state.stop is not None:
        return state, []  # it is over in any case, with the stop's code
    why = f"node {event.node}: {event.why}"
    past = _closed(state, LOST, 0, f"{why}.")
    return _over(state, Exit(TRY_ELSEWHERE, why), past if past != state.past else ())


def _unfit(state: State, node: int, why: str) -> Step:
    return _over(state, Exit(TRY_ELSEWHERE, f"node {node}: {why}"))


def _begin_if_all(state: State, at: float) -> Step:
    if len(state.nodes) < state.limits.nodes:
        return state, []
    generation, restarts = state.generation + 1, state.restarts + 1
    past = (*state.past, Past(generation, state.limits.attempt))
    state = state._replace(
        phase=RUNNING, generation=generation, restarts=restarts, past=past, pulse=at,
        running=sum(node.processes for node in state.nodes), failures=(), lost=(), is_hung=False,
        progressed=False, deadline=0.0,
    )  # fmt: skip
    return state, [Record(past), Begin(generation, restarts, state.nodes)]


# --- a generation ends ----------------------------------------------------------------------------


def _exited(state: State, event: RankExited) -> Step:
    if event.generation != state.generation or state.phase == GATHERING:
        return state, []
    if event.failure.code == 0:
        state = state._replace(running=state.running - 1)
        if state.phase == RUNNING and state.running == 0:
            return _over(state, Exit(0, "", by_runtime=False), _closed(state, DONE, 0, ""))
        return state, []
    state = state._replace(failures=(*state.failures, event.failure))
    return _end(state, event.at) if state.phase == RUNNING else (state, [])


def _end(state: State, at: float, gone: int = -1) -> Step:
    """End the generation on every node but `gone`, which has none of it any more."""
    grace = state.limits.end_grace
    waiting = frozenset(node.number for node in state.nodes) - {gone}
    state = state._replace(phase=ENDING, waiting=waiting, began=at)
    actions: List[Action] = [EndRanks(state.generation, grace, stacks=state.is_hung)]
    if waiting:
        return state, actions
    state, more = _judge(state, at)
    return state, [*actions, *more]


def _ended(state: State, event: Ended) -> Step:
    if event.generation != state.generation or state.phase not in (ENDING, STOPPING):
        return state, []
    if event.unfit and state.stop is None:
        return _unfit(state, event.node, event.unfit)
    return _confirmed(state, event.node, event.at)


def _confirmed(state: State, index: int, at: float) -> Step:
    state = state._replace(waiting=state.waiting - {index})
    return (state, []) if state.waiting else _judge(state, at)


def _judge(state: State, at: float) -> Step:
    """The generation is gone everywhere: what comes now?"""
    cause = cause_of(state)
    stop = state.stop
    if stop is not None:
        past = _closed(state, WAS_STOPPED, stop.code, stop.why)
        return _over(state, Exit(stop.code, stop.why), past)
    past = _closed(state, cause.kind, cause.code, cause.why)
    state = state._replace(past=past)
    tail = cause.tail
    if state.asked:
        own = cause.kind == EXIT
        end = Exit(cause.code if own else STOPPED, cause.why, by_runtime=not own, tail=tail)
        return _over(state, end, past)
    verdict = judge(past, state.has_saved)
    if verdict is not None:
        return _over(state, Exit(*verdict, tail=tail), past)
    state = state._replace(
        phase=GATHERING, began=at, told=at, deadline=max(state.deadline, at + state.limits.gone)
    )
    state, actions = _begin_if_all(state, at)
    return state, [Record(past), Say(f"{cause.why} {AGAIN}"), *actions]


class Cause(NamedTuple):
    kind: str
    code: int
    why: str
    tail: Tuple[str, ...] = ()


def cause_of(state: State) -> Cause:
    """Why a generation ended, of all that was heard until it was gone everywhere.

    A rank that dies takes its peers' connections with it, and their complaints may come first. So a
    lost node goes before any rank, a kill before any exit, and of exits the earliest by the ranks'
    own account (TORCHELASTIC_ERROR_FILE), else the one that was heard of first.
    """
    if state.lost:
        return Cause(LOST, 0, f"{' and '.join(state.lost[:3])}.")
    if state.is_hung:
        return Cause(HANG, 0, f"No rank gave a sign of life for {state.limits.hang_after:.0f} s.")
    own = [each for each in state.failures if not each.was_sent]
    killed = [each for each in own if each.code < 0]
    if killed:
        first = killed[0]
        name = _signal_name(-first.code)
        full = ": its container's memory is full" if first.is_memory else ""
        words = f"{_rank(state, first)} was ended by {name}{full}."
        return Cause(SIGNAL, first.code, words, first.tail)
    if own:
        first = min(own, key=lambda each: each.stamp or float("inf"))  # the first of equals
        return Cause(
            EXIT, first.code, f"{_rank(state, first)} ended with {first.code}.", first.tail
        )
    return Cause(LOST, 0, "It was ended.")


def _closed(state: State, kind: str, code: int, why: str) -> Tuple[Past, ...]:
    if not state.past or state.past[-1].kind != OPEN:
        return state.past
    last = state.past[-1]._replace(kind=kind, code=code, why=why, progressed=state.progressed)
    return (*state.past[:-1], last)


# --- stops and time -------------------------------------------------------------------------------


def _asked(state: State, event: Asked) -> Step:
    if event.softly:
        if state.asked or state.stop is not None or state.phase == GATHERING:
            return state._replace(asked=True), []
        ask = StopRanks(0, event.why, state.limits.grace, softly=True)
        return state._replace(asked=True), [ask]
    if state.stop is not None:
        return state, []
    why = event.why or f"stopped on {_named(state, event.node)}"
    event = event._replace(why=why, grace=min(event.grace, state.limits.grace))
    state = state._replace(stop=event)
    if state.phase == GATHERING:
        return _over(state, Exit(event.code, why))
    if state.phase == ENDING:
        return state, []  # and then the run
    waiting = frozenset(node.number for node in state.nodes)
    state = state._replace(phase=STOPPING, waiting=waiting, began=event.at)
    return state, [StopRanks(event.code, why, event.grace)]


def _ticked(state: State, at: float) -> Step:
    if state.phase == GATHERING:
        return _waited(state, at)
    if state.phase == RUNNING:
        hang = state.limits.hang_after
        if not hang or at - state.pulse < hang:
            return state, []
        return _end(state._replace(is_hung=True), at)
    grace = state.limits.end_grace
    if state.phase == STOPPING and state.stop is not None:
        grace = state.stop.grace
    if at - state.began < grace + state.limits.confirm:
        return state, []
    names = _listed(_named(state, index) for index in sorted(state.waiting))
    code = state.stop.code if state.stop else TRY_ELSEWHERE
    return _over(state, Exit(code, f"processes on {names} could not be ended"))


def _waited(state: State, at: float) -> Step:
    here = {node.number for node in state.nodes}
    missing = [index for index in range(state.limits.nodes) if index not in here]
    if not missing:
        return state, []
    names = f"node{'s' if missing[1:] else ''} {_listed(map(str, missing))}"
    if at >= state.deadline:
        verb = "did not come" if state.restarts < 0 else "did not come back"
        waited = f"within {at - state.began:.0f} s"
        return _over(state, Exit(TRY_ELSEWHERE, f"{names} {verb} {waited}"))
    if at - state.told < TOLD_EVERY:
        return state, []
    words = f"waiting for {names}: {len(here)} of {state.limits.nodes} are here"
    return state._replace(told=at), [Say(words)]


# --- words ----------------------------------------------------------------------------------------


def _over(state: State, end: Exit, past: Tuple[Past, ...] = ()) -> Step:
    """`past`: to be remembered first."""
    actions: List[Action] = [Record(past)] if past else []
    return state._replace(phase=OVER), [*actions, end]


def _named(state: State, index: int) -> str:
    return next((node.named() for node in state.nodes if node.number == index), f"node {index}")


def _rank(state: State, failure: Failure) -> str:
    where = _named(state, failure.node) if state.limits.nodes > 1 else f"node {failure.node}"
    return f"Rank {failure.rank} on {where}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
