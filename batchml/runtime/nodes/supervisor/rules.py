"""The rules by which the nodes of a run start, end and restart together: `step(state, event)`.

Pure: `step` returns the next state and the actions to take. The main node's coordinator
(`coordinator.py`) passes in what happens on any node, and takes the actions. The nodes gather, run
a generation, end it everywhere, and begin the next one; a stop reaches every node, wherever it was
requested. docs/multi-node.md describes it for users.
"""

from __future__ import annotations

import signal
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import FrozenSet, List, NamedTuple, Optional, Tuple

from batchml.runtime.nodes.supervisor.events import (
    Action,
    BeginGeneration,
    CheckNetwork,
    CheckpointSaved,
    EndRanks,
    EndRun,
    Event,
    KeepRecord,
    LeaveNetworkCheck,
    NetworkChecked,
    NodeJoined,
    NodeLeft,
    RankExited,
    RankFailure,
    RanksGone,
    RunNode,
    SayLine,
    SignOfLife,
    StartFailed,
    StopAsked,
    StopRanks,
    SupervisorLost,
)
from batchml.runtime.nodes.supervisor.restarts import (
    DONE,
    EXIT,
    HANG,
    LOST,
    MEMORY,
    OPEN,
    SIGNAL,
    RestartRecord,
    decide_end,
)
from batchml.runtime.nodes.supervisor.restarts import STOPPED as WAS_STOPPED
from batchml.runtime.protocol.exit_codes import STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import AGAIN, MEMORY_IS_FULL


class SupervisorLimits(NamedTuple):
    """The limits of one run. Times are seconds."""

    nodes: int = 1
    attempt: int = 1
    start_within: float = 1200.0  # until all nodes are connected
    regroup: float = 60.0  # until a node that fell silent is connected again
    gone: float = 10.0  # the same for a node whose connection was closed
    hang_after: float = 0.0  # without a sign of life, until the ranks count as hung; 0: never
    grace: float = 30.0  # from SIGTERM to SIGKILL when the run is stopped
    end_grace: float = 3.0  # the same for ranks whose peers are gone: they cannot save any more
    confirm: float = 30.0  # after the kill, until a node reports that no process is left
    launcher: str = ""  # the program that starts all ranks, such as mpirun; its end ends the run
    checks_network: bool = False  # the nodes measure their network before the first start


# --- Rules ----------------------------------------------------------------------------------------


GATHERING, RUNNING, ENDING, STOPPING, OVER = "gathering", "running", "ending", "stopping", "over"
UNCHECKED, CHECKING, CHECKED = "unchecked", "checking", "checked"  # the network of the nodes
_NOTICE_EVERY = 30.0  # seconds between two lines that name the missing nodes
_MAX_NAMED = 8  # nodes that a line names


class NodesState(NamedTuple):
    """All that the rules remember of a run."""

    limits: SupervisorLimits
    phase: str = GATHERING
    began: float = 0.0  # when this phase began, except for RUNNING
    deadline: float = 0.0  # by when all nodes have to be connected
    noticed: float = 0.0  # when a line last named the missing nodes
    nodes: Tuple[RunNode, ...] = ()  # the connected nodes, in the order of their numbers
    generation: int = 0
    restarts: int = -1  # -1: no generation has begun in this attempt
    running: int = 0  # ranks that have not ended with 0
    waiting: FrozenSet[int] = frozenset()  # nodes that have not confirmed the end of their ranks
    failures: Tuple[RankFailure, ...] = ()
    lost: Tuple[str, ...] = ()  # nodes lost in this generation, described for people
    is_hung: bool = False  # the generation was ended because no rank gave a sign of life
    pulse: float = 0.0  # when a rank last gave a sign of life
    progressed: bool = False  # this generation has saved a checkpoint
    has_saved: bool = False  # any generation has
    stops_softly: bool = False  # a stop without a signal was requested
    stop: Optional[StopAsked] = None  # the stop that was requested by a signal
    past: Tuple[RestartRecord, ...] = ()
    network: str = CHECKED


StepResult = Tuple[NodesState, List[Action]]


def begin(
    limits: SupervisorLimits,
    at: float,
    past: Tuple[RestartRecord, ...] = (),
    has_saved: bool = False,
) -> NodesState:
    """The state before any node is connected. `past` is the record of earlier attempts."""
    last = past[-1].generation if past else 0
    return NodesState(
        limits, began=at, noticed=at, deadline=at + limits.start_within, generation=last,
        past=past, has_saved=has_saved, network=UNCHECKED if limits.checks_network else CHECKED,
    )  # fmt: skip


def step(state: NodesState, event: Event) -> StepResult:
    """The next state, and the actions to take. After `EndRun` no event has an effect."""
    if state.phase == OVER:
        return state, []
    if isinstance(event, NodeJoined):
        return _joined(state, event)
    if isinstance(event, NodeLeft):
        return _left(state, event)
    if isinstance(event, RankExited):
        return _exited(state, event)
    if isinstance(event, RanksGone):
        return _ended(state, event)
    if isinstance(event, StopAsked):
        return _asked(state, event)
    if isinstance(event, StartFailed):
        name = _name(state, event.node)
        return _over(state, EndRun(event.code, f"{name} could not start its command: {event.why}"))
    if isinstance(event, SupervisorLost):
        return _supervisor_lost(state, event)
    if isinstance(event, CheckpointSaved):
        return state._replace(progressed=True, has_saved=True, pulse=event.at), []
    if isinstance(event, SignOfLife):
        return state._replace(pulse=max(state.pulse, event.at)), []
    if isinstance(event, NetworkChecked):
        return _network_checked(state, event)
    return _ticked(state, event.at)


# --- Nodes that come and go -----------------------------------------------------------------------


def _joined(state: NodesState, event: NodeJoined) -> StepResult:
    node = event.node
    if event.unfit:
        return _unfit(state, node.number, event.unfit)
    nodes, place = state.nodes, bisect_left(state.nodes, (node.number,))
    is_back = nodes[place : place + 1] != () and nodes[place].number == node.number
    state = state._replace(nodes=(*nodes[:place], node, *nodes[place + is_back :]))
    if state.phase == RUNNING:  # a new supervisor has no ranks, although they should be running
        return _end(state._replace(lost=(*state.lost, node.describe())), event.at, node.number)
    if state.phase in (ENDING, STOPPING):
        return _confirmed(state, node.number, event.at)
    if is_back and state.network == CHECKING:  # the order or its answer may be lost
        state, actions = _begin_if_all(state._replace(network=CHECKED), event.at)
        return state, [LeaveNetworkCheck(), *actions]
    return _begin_if_all(state, event.at)


def _left(state: NodesState, event: NodeLeft) -> StepResult:
    if event.node not in {node.number for node in state.nodes}:
        return state, []
    name = _name(state, event.node)
    state = state._replace(nodes=tuple(n for n in state.nodes if n.number != event.node))
    patience = state.limits.regroup if event.silent else state.limits.gone
    how = "does not answer any more" if event.silent else "is gone"
    says: List[Action] = [SayLine(f"{name} {how}")]
    if state.phase == GATHERING:
        if state.restarts >= 0:
            state = state._replace(deadline=min(state.deadline, event.at + patience))
        if state.network == CHECKING:  # the other nodes wait in vain for the one that is gone
            return state._replace(network=CHECKED), [*says, LeaveNetworkCheck()]
        return state, says
    state = state._replace(lost=(*state.lost, f"{name} {how}"), deadline=event.at + patience)
    if state.phase == RUNNING:
        state, actions = _end(state, event.at, event.node)
    else:
        state, actions = _confirmed(state, event.node, event.at)
    return state, [*says, *actions]


def _supervisor_lost(state: NodesState, event: SupervisorLost) -> StepResult:
    """End the run: only a new attempt of AWS Batch starts the supervisor again."""
    if state.stop is not None:
        return state, []  # the run ends anyway, with the code of the stop
    why = f"node {event.node}: {event.why}"
    past = _closed(state, LOST, 0, f"{why}.")
    return _over(state, EndRun(TRY_ELSEWHERE, why), past if past != state.past else ())


def _unfit(state: NodesState, node: int, why: str) -> StepResult:
    return _over(state, EndRun(TRY_ELSEWHERE, f"node {node}: {why}"))


def _begin_if_all(state: NodesState, at: float) -> StepResult:
    if len(state.nodes) < state.limits.nodes or state.network == CHECKING:
        return state, []
    if state.network == UNCHECKED:
        return state._replace(network=CHECKING), [CheckNetwork(state.nodes)]
    generation, restarts = state.generation + 1, state.restarts + 1
    past = (*state.past, RestartRecord(generation, state.limits.attempt))
    state = state._replace(
        phase=RUNNING, generation=generation, restarts=restarts, past=past, pulse=at,
        running=1 if state.limits.launcher else sum(node.processes for node in state.nodes),
        failures=(), lost=(), is_hung=False, progressed=False, deadline=0.0,
    )  # fmt: skip
    return state, [KeepRecord(past), BeginGeneration(generation, restarts, state.nodes)]


def _network_checked(state: NodesState, event: NetworkChecked) -> StepResult:
    if state.network != CHECKING:
        return state, []
    if event.code:
        return _over(state, EndRun(event.code, event.why))
    return _begin_if_all(state._replace(network=CHECKED), event.at)


# --- The end of a generation ----------------------------------------------------------------------


def _exited(state: NodesState, event: RankExited) -> StepResult:
    if event.generation != state.generation or state.phase == GATHERING:
        return state, []
    if event.failure.code == 0:
        state = state._replace(running=state.running - 1)
        if state.phase == RUNNING and state.running == 0:
            return _over(state, EndRun(0, "", by_runtime=False), _closed(state, DONE, 0, ""))
        return state, []
    state = state._replace(failures=(*state.failures, event.failure))
    return _end(state, event.at) if state.phase == RUNNING else (state, [])


def _end(state: NodesState, at: float, gone: int = -1) -> StepResult:
    """End the generation on every node except node `gone`, which has no rank of it any more."""
    grace = state.limits.end_grace
    waiting = frozenset(node.number for node in state.nodes) - {gone}
    state = state._replace(phase=ENDING, waiting=waiting, began=at)
    actions: List[Action] = [EndRanks(grace, stacks=state.is_hung)]
    if waiting:
        return state, actions
    state, more = _decide(state, at)
    return state, [*actions, *more]


def _ended(state: NodesState, event: RanksGone) -> StepResult:
    if event.generation != state.generation or state.phase not in (ENDING, STOPPING):
        return state, []
    if event.unfit and state.stop is None:
        return _unfit(state, event.node, event.unfit)
    return _confirmed(state, event.node, event.at)


def _confirmed(state: NodesState, index: int, at: float) -> StepResult:
    state = state._replace(waiting=state.waiting - {index})
    return (state, []) if state.waiting else _decide(state, at)


def _decide(state: NodesState, at: float) -> StepResult:
    """No process of the generation is left: end the run, or begin again."""
    cause = cause_of(state)
    stop = state.stop
    if stop is not None:
        past = _closed(state, WAS_STOPPED, stop.code, stop.why)
        return _over(state, EndRun(stop.code, stop.why), past)
    past = _closed(state, cause.kind, cause.code, cause.why)
    state = state._replace(past=past)
    if state.stops_softly:
        exited = cause.kind == EXIT
        code = cause.code if exited else STOPPED
        return _over(state, EndRun(code, cause.why, not exited, cause.tail), past)
    if state.limits.launcher:
        return _over(state, _launcher_end(cause), past)
    given_up = decide_end(past, state.has_saved)
    if given_up is not None:
        return _over(state, EndRun(*given_up, tail=cause.tail), past)
    state = state._replace(
        phase=GATHERING, began=at, noticed=at, deadline=max(state.deadline, at + state.limits.gone)
    )
    state, actions = _begin_if_all(state, at)
    return state, [KeepRecord(past), SayLine(f"{cause.why} {AGAIN}"), *actions]


def _launcher_end(cause: GenerationCause) -> EndRun:
    """The end of a run whose ranks a launcher started: such ranks are not restarted in place."""
    if cause.kind in (EXIT, SIGNAL, MEMORY):
        return EndRun(cause.code, cause.why, by_runtime=False)
    return EndRun(TRY_ELSEWHERE, cause.why)


class GenerationCause(NamedTuple):
    """Why a generation ended. `kind`: as in `RestartRecord`."""

    kind: str
    code: int
    why: str
    tail: Tuple[str, ...] = ()


def cause_of(state: NodesState) -> GenerationCause:
    """Find the cause in all reports of the ranks and nodes of a generation.

    When a rank dies, its peers lose their connections, so they may fail too, and be reported first.
    Therefore a lost node counts before any rank, and a killed rank before any that exited. Of ranks
    that exited, the first counts: by its TORCHELASTIC_ERROR_FILE, else by the order of the reports.
    """
    if state.lost:
        return GenerationCause(LOST, 0, f"{' and '.join(state.lost[:3])}.")
    if state.is_hung:
        words = f"No rank gave a sign of life for {state.limits.hang_after:.0f} s."
        return GenerationCause(HANG, 0, words)
    failures = [failure for failure in state.failures if not failure.was_sent]
    first = next((failure for failure in failures if failure.code < 0), None)
    if first is not None:
        name = _signal_name(-first.code)
        full = f": {MEMORY_IS_FULL}" if first.is_memory else ""
        words = f"{_name_rank(state, first)} was ended by {name}{full}."
        return GenerationCause(MEMORY if full else SIGNAL, first.code, words, first.tail)
    if failures:
        first = min(failures, key=lambda failure: failure.stamp or float("inf"))
        words = f"{_name_rank(state, first)} ended with {first.code}{_as_did(first, failures)}."
        return GenerationCause(EXIT, first.code, words, first.tail)
    return GenerationCause(LOST, 0, "It was ended.")


def _as_did(first: RankFailure, failures: Sequence[RankFailure]) -> str:
    """`, as did ranks 0, 1 and 3`: the other ranks whose last line is the same."""
    same = [each.rank for each in failures if each.tail[-1:] == first.tail[-1:] != ()]
    others = [str(rank) for rank in sorted(set(same) - {first.rank})]
    if not others:
        return ""
    if len(others) == 1:
        return f", as did rank {others[0]}"
    return f", as did ranks {', '.join(others[:-1])} and {others[-1]}"


def _closed(state: NodesState, kind: str, code: int, why: str) -> Tuple[RestartRecord, ...]:
    """The record, with this end for the current generation."""
    if not state.past or state.past[-1].kind != OPEN:
        return state.past
    last = state.past[-1]._replace(kind=kind, code=code, why=why, progressed=state.progressed)
    return (*state.past[:-1], last)


# --- Stops and time -------------------------------------------------------------------------------


def _asked(state: NodesState, event: StopAsked) -> StepResult:
    if event.softly:
        if state.stops_softly or state.stop is not None or state.phase == GATHERING:
            return state._replace(stops_softly=True), []
        action = StopRanks(0, event.why, state.limits.grace, softly=True)
        return state._replace(stops_softly=True), [action]
    if state.stop is not None:
        return state, []
    why = event.why or f"stopped on {_name(state, event.node)}"
    event = event._replace(why=why, grace=min(event.grace, state.limits.grace))
    state = state._replace(stop=event)
    if state.phase == GATHERING:
        return _over(state, EndRun(event.code, why))
    if state.phase == ENDING:
        return state, []  # the run ends when the generation has ended
    waiting = frozenset(node.number for node in state.nodes)
    state = state._replace(phase=STOPPING, waiting=waiting, began=event.at)
    return state, [StopRanks(event.code, why, event.grace)]


def _ticked(state: NodesState, at: float) -> StepResult:
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
    names = _list(_name(state, index) for index in sorted(state.waiting))
    code = state.stop.code if state.stop else TRY_ELSEWHERE
    return _over(state, EndRun(code, f"processes on {names} could not be ended"))


def _waited(state: NodesState, at: float) -> StepResult:
    connected = {node.number for node in state.nodes}
    missing = [index for index in range(state.limits.nodes) if index not in connected]
    if not missing:
        return state, []
    names = f"node{'s' if missing[1:] else ''} {_list(map(str, missing))}"
    if at >= state.deadline:
        verb = "did not connect" if state.restarts < 0 else "did not connect again"
        waited = f"within {at - state.began:.0f} s"
        return _over(state, EndRun(TRY_ELSEWHERE, f"{names} {verb} {waited}"))
    if at - state.noticed < _NOTICE_EVERY:
        return state, []
    words = f"waiting for {names}: {len(connected)} of {state.limits.nodes} are connected"
    return state._replace(noticed=at), [SayLine(words)]


# --- The end of the run; texts --------------------------------------------------------------------


def _over(state: NodesState, end: EndRun, past: Tuple[RestartRecord, ...] = ()) -> StepResult:
    """End the run. `past`: the record to write first."""
    actions: List[Action] = [KeepRecord(past)] if past else []
    return state._replace(phase=OVER), [*actions, end]


def _name(state: NodesState, index: int) -> str:
    return next((node.describe() for node in state.nodes if node.number == index), f"node {index}")


def _name_rank(state: NodesState, failure: RankFailure) -> str:
    if state.limits.launcher:
        return state.limits.launcher
    where = _name(state, failure.node) if state.limits.nodes > 1 else f"node {failure.node}"
    return f"Rank {failure.rank} on {where}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _list(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + more
