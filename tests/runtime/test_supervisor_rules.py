"""The rules of the supervisors: events in, actions out."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from batchml.runtime.nodes.supervisor.coordinator import failure_of
from batchml.runtime.nodes.supervisor.events import (
    Action,
    BeginGeneration,
    CheckNetwork,
    CheckpointSaved,
    ClockTick,
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
from batchml.runtime.nodes.supervisor.restarts import EXIT, LOST, MEMORY, SIGNAL, RestartRecord
from batchml.runtime.nodes.supervisor.rules import (
    NodesState,
    SupervisorLimits,
    begin,
    step,
)
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    CRASH_LOOP,
    STOPPED,
    TRY_ELSEWHERE,
)

TWO = SupervisorLimits(nodes=2, start_within=100, regroup=60, gone=10, hang_after=50)
NODES = (RunNode(0, 2, "10.0.0.1"), RunNode(1, 2, "10.0.0.2"))


def after(state: NodesState, *events: Event) -> tuple[NodesState, list[Action]]:
    """The state after the events, and what the last of them brought about."""
    actions: list[Action] = []
    for event in events:
        state, actions = step(state, event)
    return state, actions


def running(
    limits: SupervisorLimits = TWO, past: tuple[RestartRecord, ...] = (), has_saved: bool = False
) -> NodesState:
    state = begin(limits, 0.0, past, has_saved)
    return after(state, NodeJoined(1, NODES[0]), NodeJoined(2, NODES[1]))[0]


def checking() -> NodesState:
    """Both nodes are connected, and measure their network."""
    state = begin(TWO._replace(checks_network=True), 0.0)
    state, actions = after(state, NodeJoined(1, NODES[0]), NodeJoined(2, NODES[1]))
    assert actions == [CheckNetwork(NODES)]
    return state


def test_the_network_is_checked_before_the_first_generation_and_only_then() -> None:
    state, actions = after(checking(), ClockTick(5), NetworkChecked(9))
    assert isinstance(actions[1], BeginGeneration) and actions[1].generation == 1
    state, actions = after(
        state, RankExited(12, 1, failed(0, 9)), RanksGone(13, 1, 0), RanksGone(13, 1, 1)
    )
    assert isinstance(actions[-1], BeginGeneration) and actions[-1].restarts == 1


def test_a_network_that_no_other_host_would_cure_ends_the_run_without_a_start() -> None:
    state, actions = after(checking(), NetworkChecked(3, CONFIGURATION_ERROR, "no EFA"))
    assert actions == [EndRun(CONFIGURATION_ERROR, "no EFA")]
    assert state.past == ()  # it does not count as a start without a checkpoint


def test_a_node_that_is_found_unfit_by_the_check_ends_the_run() -> None:
    state, actions = after(checking(), NodeJoined(3, NODES[1], unfit="EFA: it is slow"))
    assert actions == [EndRun(TRY_ELSEWHERE, "node 1: EFA: it is slow")]
    assert state.past == ()


def test_a_node_that_goes_while_the_network_is_checked_ends_the_check_on_all_others() -> None:
    state, actions = after(checking(), NodeLeft(3, 1))
    assert actions[-1] == LeaveNetworkCheck()
    state, actions = after(state, NetworkChecked(4), NodeJoined(5, NODES[1]))
    assert isinstance(actions[-1], BeginGeneration)  # the check is not repeated


def test_a_node_that_lost_its_connection_while_the_network_is_checked_is_not_waited_for() -> None:
    """Its answer may have been lost with the connection."""
    state, actions = after(checking(), NodeJoined(3, NODES[1]))
    assert actions[0] == LeaveNetworkCheck() and isinstance(actions[-1], BeginGeneration)
    assert after(state, NetworkChecked(4))[1] == []


def failed(rank: int, code: int, node: int = 0, stamp: float = 0.0, **more: bool) -> RankFailure:
    return RankFailure(node, rank, code, (f"last of {rank}",), stamp, **more)


def gone(generation: int, at: float = 20.0) -> tuple[RanksGone, RanksGone]:
    return RanksGone(at, generation, 0), RanksGone(at, generation, 1)


def exit_of(actions: Sequence[Action]) -> EndRun | None:
    return next((action for action in actions if isinstance(action, EndRun)), None)


def has(actions: Sequence[Action], kind: type) -> bool:
    return any(isinstance(action, kind) for action in actions)


def test_a_generation_begins_once_all_nodes_are_there_and_ends_with_its_last_rank() -> None:
    state, actions = after(begin(TWO, 0), NodeJoined(1, NODES[1]))
    assert actions == []
    state, actions = after(state, NodeJoined(2, NODES[0]))
    assert actions == [KeepRecord((RestartRecord(1, 1),)), BeginGeneration(1, 0, NODES)]
    ends = [RankExited(5, 1, failed(rank, 0, rank // 2)) for rank in range(4)]
    state, actions = after(state, *ends[:3])
    assert actions == []
    _, actions = after(state, ends[3])
    assert exit_of(actions) == EndRun(0, "", by_runtime=False)


def test_a_line_names_missing_nodes_and_the_wait_for_them_ends() -> None:
    state, _ = after(begin(TWO, 0), NodeJoined(1, NODES[0]), ClockTick(29))
    state, actions = after(state, ClockTick(31))
    assert actions == [SayLine("waiting for node 1: 1 of 2 are connected")]
    state, actions = after(state, ClockTick(60), ClockTick(100.5))
    assert exit_of(actions) == EndRun(TRY_ELSEWHERE, "node 1 did not connect within 100 s")


def test_a_failing_rank_ends_all_ranks_and_a_generation_begins_once_no_process_is_left() -> None:
    state, actions = after(running(), RankExited(5, 1, failed(3, -9, 1)))
    assert actions == [EndRanks(TWO.end_grace)]
    state, actions = after(state, RankExited(5, 1, failed(0, 1)), RanksGone(6, 1, 0))
    assert actions == []
    _, actions = after(state, RanksGone(7, 1, 1))
    why = "Rank 3 on node 1 (10.0.0.2) was ended by SIGKILL."
    assert actions[1] == SayLine(f"{why} It begins again in place")
    assert actions[-1] == BeginGeneration(2, 1, NODES)
    assert actions[0] == KeepRecord((RestartRecord(1, 1, SIGNAL, -9, why),))


def test_the_cause_is_not_the_rank_whose_failure_is_reported_first() -> None:
    """Peers of a killed rank may be heard of before it; of exits the earliest stamp counts."""
    end = RanksGone(9, 1, 0), RanksGone(9, 1, 1)
    _, actions = after(
        running(), RankExited(5, 1, failed(0, 1)), RankExited(5, 1, failed(3, -11, 1)), *end
    )
    assert "Rank 3 on node 1 (10.0.0.2) was ended by SIGSEGV" in str(actions)
    _, actions = after(
        running(), RankExited(5, 1, failed(0, 1)), RankExited(5, 1, failed(2, 4, 1, 7.0)), *end
    )
    assert "Rank 2 on node 1 (10.0.0.2) ended with 4." in str(actions)
    _, actions = after(
        running(), RankExited(5, 1, failed(0, 1)),
        RankExited(5, 1, failed(2, -15, 1, was_sent=True)), *end,
    )  # fmt: skip
    assert "Rank 0 on node 0 (10.0.0.1) ended with 1." in str(actions)


def test_the_reason_says_that_a_rank_was_killed_because_memory_was_full() -> None:
    told = {"rank": 3, "code": -9, "tail": ["x"], "stamp": 0.0, "was_sent": False}
    failure = failure_of(1, {**told, "is_memory": True})
    _, actions = after(running(), RankExited(5, 1, failure), *gone(1))
    assert "was ended by SIGKILL: its container's memory is full. It begins" in str(actions)
    assert isinstance(actions[0], KeepRecord) and actions[0].past[-1].kind == MEMORY


def test_a_program_that_fails_twice_at_once_ends_with_its_own_code() -> None:
    state, _ = after(running(), RankExited(5, 1, failed(1, 3)), *gone(1))
    _, actions = after(state, RankExited(25, 2, failed(2, 3, 1)), *gone(2, 30))
    end = exit_of(actions)
    assert end is not None and (end.code, end.by_runtime) == (3, False)
    assert end.why.startswith("Rank 2 on node 1 (10.0.0.2) ended with 3.")
    assert end.tail == ("last of 2",)


def test_three_generations_without_a_new_checkpoint_are_a_crash_loop() -> None:
    """Across attempts, too; a new checkpoint begins the count anew."""
    state = running(past=(RestartRecord(1, 1, LOST), RestartRecord(2, 1, EXIT, 1)), has_saved=True)
    _, actions = after(state, RankExited(5, 3, failed(1, 1)), *gone(3))
    end = exit_of(actions)
    assert end is not None and (end.code, end.by_runtime) == (CRASH_LOOP, True)
    assert "generations 1, 2, 3" in end.why and "Rank 1 on node 0" in end.why
    _, actions = after(state, CheckpointSaved(4), RankExited(5, 3, failed(1, 1)), *gone(3))
    assert actions[-1] == BeginGeneration(4, 1, NODES)


def test_the_wait_for_a_lost_node_ends() -> None:
    state, actions = after(running(), NodeLeft(10, 1, silent=True))
    assert actions == [
        SayLine("node 1 (10.0.0.2) does not answer any more"), EndRanks(TWO.end_grace),
    ]  # fmt: skip
    state, actions = after(state, RanksGone(12, 1, 0), ClockTick(69))
    assert exit_of(actions) is None
    assert after(state, NodeJoined(69.5, NODES[1]))[1][-1] == BeginGeneration(2, 1, NODES)
    _, actions = after(state, ClockTick(71))
    assert exit_of(actions) == EndRun(TRY_ELSEWHERE, "node 1 did not connect again within 59 s")


def test_the_wait_for_a_node_with_a_closed_connection_is_shorter() -> None:
    state, _ = after(running(), NodeLeft(10, 1), RanksGone(10.5, 1, 0))
    end = exit_of(after(state, ClockTick(21))[1])
    assert end is not None and end.code == TRY_ELSEWHERE


def test_an_unfit_node_ends_the_attempt() -> None:
    unfit = "this host (i-1) is unfit: its disk is full"
    _, actions = after(begin(TWO, 0), NodeJoined(1, NODES[1], unfit))
    words = f"node 1: {unfit}"
    assert actions == [EndRun(TRY_ELSEWHERE, words)]
    state, _ = after(running(), RankExited(5, 1, failed(1, -6)))
    _, actions = after(state, RanksGone(6, 1, 1, unfit))
    assert exit_of(actions) == EndRun(TRY_ELSEWHERE, words)


def test_a_node_that_cannot_start_its_command_ends_the_run() -> None:
    _, actions = after(begin(TWO, 0), StartFailed(1, 1, 78, "no archive"))
    assert actions == [EndRun(78, "node 1 could not start its command: no archive")]


def test_a_supervisor_that_died_before_it_connected_ends_the_run() -> None:
    lost = SupervisorLost(1, 1, "its supervisor is gone")
    words = "node 1: its supervisor is gone"
    assert after(begin(TWO, 0), lost)[1] == [EndRun(TRY_ELSEWHERE, words)]
    state, _ = after(running(), NodeLeft(5, 1))
    _, actions = after(state, lost)  # while the others' ranks are ended
    assert actions == [
        KeepRecord((RestartRecord(1, 1, LOST, 0, f"{words}."),)),
        EndRun(TRY_ELSEWHERE, words),
    ]
    state, _ = after(running(), StopAsked(5, 0, STOPPED, "enough"))
    assert after(state, lost)[1] == []


def test_ranks_without_any_sign_of_life_count_as_hung() -> None:
    state, actions = after(running(), SignOfLife(30), ClockTick(79))
    assert actions == []
    state, actions = after(state, ClockTick(81))
    assert actions == [EndRanks(TWO.end_grace, stacks=True)]
    _, actions = after(state, *gone(1, 90))
    assert "No rank gave a sign of life for 50 s." in str(actions)


def test_a_stop_on_one_node_reaches_all_and_ends_with_its_code() -> None:
    state, actions = after(running(), StopAsked(5, 1, TRY_ELSEWHERE, "spot notice"))
    assert actions == [StopRanks(TRY_ELSEWHERE, "spot notice", TWO.grace)]
    state, _ = after(state, RankExited(6, 1, failed(0, 0)), RankExited(6, 1, failed(1, 143)))
    state, actions = after(state, StopAsked(6, 0, STOPPED, "again"), RanksGone(7, 1, 0))
    assert actions == []
    _, actions = after(state, RanksGone(8, 1, 1))
    assert exit_of(actions) == EndRun(TRY_ELSEWHERE, "spot notice")


def test_a_host_with_less_time_than_the_grace_shortens_the_grace_of_all_ranks() -> None:
    soon = StopAsked(5, 1, TRY_ELSEWHERE, "spot notice", grace=4.0)
    state, actions = after(running(), soon)
    assert actions == [StopRanks(TRY_ELSEWHERE, "spot notice", 4.0)]
    assert after(state, ClockTick(5 + 4 + TWO.confirm - 1))[1] == []
    assert exit_of(after(state, ClockTick(5 + 4 + TWO.confirm))[1]) is not None
    late = after(running(), soon._replace(grace=TWO.grace + 90))[1]
    assert late == [StopRanks(TRY_ELSEWHERE, "spot notice", TWO.grace)]


def test_after_a_stop_no_generation_begins() -> None:
    state, _ = after(running(), RankExited(5, 1, failed(1, -9)), StopAsked(6, 0, STOPPED, "enough"))
    assert exit_of(after(state, *gone(1))[1]) == EndRun(STOPPED, "enough")


def test_a_stop_file_requests_a_stop_without_a_signal() -> None:
    state, actions = after(running(), StopAsked(5, 0, softly=True))
    assert actions == [StopRanks(0, "", TWO.grace, softly=True)]
    ends = [RankExited(9, 1, failed(rank, 0)) for rank in range(4)]
    assert exit_of(after(state, *ends)[1]) == EndRun(0, "", by_runtime=False)


def test_processes_that_cannot_be_ended_end_the_run() -> None:
    state, _ = after(
        running(), RankExited(5, 1, failed(1, -9)), RanksGone(6, 1, 0), ClockTick(37.5)
    )
    _, actions = after(state, ClockTick(38.5))
    words = "processes on node 1 (10.0.0.2) could not be ended"
    assert actions == [EndRun(TRY_ELSEWHERE, words)]


class World:
    """Nodes as they are, which do what they are ordered, while chance works against them."""

    def __init__(self, chance: random.Random, nodes: int) -> None:
        self.chance = chance
        self.limits = SupervisorLimits(
            nodes=nodes, start_within=50, regroup=20, gone=5, hang_after=40
        )
        self.state = begin(self.limits, 0.0)
        self.at = 0.0
        self.there: set[int] = set()
        self.runs: dict[int, int] = {}  # node -> generation whose ranks are alive there
        self.begun: list[int] = []
        self.exit: EndRun | None = None
        self.faults = 12

    def post(self, event: Event) -> None:
        was_over = self.exit is not None
        self.state, actions = step(self.state, event)
        assert not (was_over and actions), "after the exit nothing happens"
        for action in actions:
            self.do(action)

    def do(self, action: Action) -> None:
        if isinstance(action, BeginGeneration):
            assert len(self.there) == self.limits.nodes, "all are there"
            assert not self.runs, "nothing of another generation lives on any node"
            assert action.generation > (self.begun or [0])[-1]
            self.begun.append(action.generation)
            self.runs = {node.number: action.generation for node in action.nodes}
        elif isinstance(action, EndRun):
            assert self.exit is None
            self.exit = action

    def turn(self) -> None:
        self.at += self.chance.random() * 3
        generation = (self.begun or [0])[-1]
        away = [i for i in range(self.limits.nodes) if i not in self.there]
        deed = self.chance.randrange(6)
        if deed == 0 and away:
            node = self.chance.choice(away)
            self.runs.pop(node, None)  # it is here only with nothing running
            self.there.add(node)
            self.post(NodeJoined(self.at, RunNode(node, 1)))
        elif deed == 1 and self.there and self.faults:
            self.faults -= 1
            node = self.chance.choice(sorted(self.there))
            self.there.discard(node)
            self.runs.pop(node, None)
            self.post(NodeLeft(self.at, node, silent=self.chance.random() < 0.5))
        elif deed == 2 and self.runs and self.faults:
            self.faults -= 1
            node = self.chance.choice(sorted(self.runs))
            code = self.chance.choice([1, -9, 0])
            self.post(RankExited(self.at, generation, RankFailure(node, node, code)))
        elif deed == 3 and self.state.phase in ("ending", "stopping") and self.there:
            node = self.chance.choice(sorted(self.there))
            self.runs.pop(node, None)
            self.post(RanksGone(self.at, generation, node))
        elif deed == 4 and self.chance.random() < 0.02:
            self.post(StopAsked(self.at, 0, STOPPED, "stop"))
        elif deed == 5 and self.chance.random() < 0.3:
            self.post(CheckpointSaved(self.at))
        self.post(ClockTick(self.at))


@given(some.integers(0, 2**32), some.integers(1, 4))
def test_whatever_happens_generations_never_overlap_and_the_run_ends(seed: int, nodes: int) -> None:
    world = World(random.Random(seed), nodes)
    for _ in range(3_000):
        world.turn()
        if world.exit is not None:
            break
    assert world.exit is not None, world.state
