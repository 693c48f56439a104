"""What head and workers of a Ray gang decide. docs/ray.md."""

from hypothesis import given
from hypothesis import strategies as st

from batchml.runtime.nodes.ray.rules import (
    HEAD_GRACE,
    LAST_GRACE,
    MOST_STARTS,
    NOTICE_EVERY,
    Announce,
    DialHead,
    EndRay,
    HeadConnected,
    HeadEnded,
    HeadEvent,
    HeadLost,
    HeadRecord,
    HeadRefused,
    HeadState,
    HeadTick,
    LeaveCluster,
    PassSignal,
    ProgramEnded,
    RayDown,
    RayEnded,
    RayUp,
    RendezvousRead,
    ReportJoined,
    StartProgram,
    StartRay,
    StopSignal,
    WorkerEvent,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
    WorkerState,
    begin_head,
    head_step,
    is_incomplete,
    worker_step,
)
from batchml.runtime.protocol.launch import WorkerGroup

CPU = WorkerGroup("cpu", 3, 2, "x-cpu-k", "q")
BIG = WorkerGroup("big", 1, 0, "x-big-k", "q")
CARD = HeadRecord("job-1", 1, "10.0.0.1", 6379, 7000, "2.60.0", "3.11.7", 0.0)
AGAIN = CARD._replace(attempt=2, address="10.0.0.2")


def told(*actions: object) -> list[str]:
    """Tuples are equal whatever their names; their texts are not."""
    return [repr(action) for action in actions]


def head_after(
    *events: HeadEvent, groups: tuple[WorkerGroup, ...] = (CPU,)
) -> tuple[HeadState, list[str]]:
    head, done = begin_head(groups, 0.0, 600.0), list[str]()
    for event in events:
        head, actions = head_step(head, event)
        done += told(*actions)
    return head, done


def worker_after(*events: WorkerEvent) -> tuple[WorkerState, list[str]]:
    worker, done = WorkerState(100.0), list[str]()
    for event in events:
        worker, actions = worker_step(worker, event)
        done += told(*actions)
    return worker, done


def test_the_program_starts_once_enough_workers_are_there() -> None:
    one, two = WorkerJoined(WorkerId("cpu", 0)), WorkerJoined(WorkerId("cpu", 1))
    assert "StartProgram()" not in head_after(one, HeadTick(1))[1]
    head, done = head_after(one, two, HeadTick(1), HeadTick(2))
    assert done.count("StartProgram()") == 1
    assert done[-2:] == told(Announce("2 of 3 cpu; the program starts"), StartProgram())
    assert is_incomplete(head, CPU)


def test_the_head_does_not_wait_for_a_group_that_may_be_empty() -> None:
    assert "StartProgram()" in head_after(HeadTick(0), groups=(BIG,))[1]


def test_a_worker_that_joins_twice_counts_once() -> None:
    again = WorkerJoined(WorkerId("cpu", 0, "10.0.0.9"))
    assert (
        "StartProgram()" not in head_after(WorkerJoined(WorkerId("cpu", 0)), again, HeadTick(1))[1]
    )


def test_missing_workers_are_named_regularly_and_at_the_end() -> None:
    words = "waiting for workers: 0 of 2 cpu have joined (job x-cpu-k); 570 s are left"
    assert head_after(HeadTick(1), HeadTick(NOTICE_EVERY), HeadTick(31))[1] == told(Announce(words))
    late = head_after(HeadTick(600))[1]
    why = "not enough workers joined in time: 0 of 2 cpu have joined (job x-cpu-k)"
    assert late == told(LeaveCluster(75, why))


def test_a_lost_worker_is_announced_and_the_program_continues() -> None:
    member = WorkerId("cpu", 1, "10.0.0.7")
    events = (
        WorkerJoined(WorkerId("cpu", 0)),
        WorkerJoined(member),
        HeadTick(1),
        WorkerLeft(member),
        HeadTick(9999),
    )
    assert head_after(*events)[1][-1:] == told(
        Announce("worker cpu[1] at 10.0.0.7 is gone: 1 of 3 cpu")
    )


def test_a_running_program_gets_the_stop_signal() -> None:
    assert head_after(StopSignal(15))[1] == told(
        LeaveCluster(143, "stopped while waiting for workers")
    )
    head, _ = head_after(
        WorkerJoined(WorkerId("cpu", 0)), WorkerJoined(WorkerId("cpu", 1)), HeadTick(1)
    )
    assert told(*head_step(head, StopSignal(15))[1]) == told(PassSignal(15))
    assert told(*head_step(head, ProgramEnded(3))[1]) == told(LeaveCluster(3))
    assert told(*head_step(head, RayEnded("no space"))[1]) == told(
        LeaveCluster(75, "Ray has ended on the head: no space")
    )


def test_a_worker_joins_the_head_that_it_finds() -> None:
    worker, done = worker_after(
        RendezvousRead(0, None, None), RendezvousRead(1, CARD, None), HeadConnected(2, CARD)
    )
    assert done == told(DialHead(CARD), StartRay(CARD))
    assert told(*worker_step(worker, RayUp())[1]) == told(ReportJoined())


def test_a_worker_without_a_head_ends() -> None:
    why = "no head was found in time; latest error: it is refused"
    assert worker_after(RendezvousRead(100, CARD, None, trouble="it is refused"))[1] == told(
        LeaveCluster(75, why)
    )


def test_a_worker_ends_with_code_0_when_its_head_has_ended() -> None:
    for last in (HeadEnded(3), RendezvousRead(5, None, 3)):
        assert worker_after(HeadConnected(1, CARD), RayUp(), last)[1][-1:] == told(LeaveCluster(0))
    assert worker_after(RendezvousRead(5, CARD, None, head_is_over=True))[1][-1:] == told(
        LeaveCluster(0)
    )


def test_a_broken_connection_leaves_ray_alone() -> None:
    events = (
        HeadConnected(1, CARD),
        RayUp(),
        HeadLost(2),
        RendezvousRead(3, CARD, None),
        HeadConnected(4, CARD),
    )
    worker, done = worker_after(*events)
    assert done.count(repr(StartRay(CARD))) == 1
    assert done[-2:] == told(DialHead(CARD), ReportJoined())
    assert worker.is_linked


def test_another_head_gets_another_ray() -> None:
    events = (
        HeadConnected(1, CARD),
        RayUp(),
        HeadLost(2),
        RendezvousRead(9, AGAIN, None),
        HeadConnected(9, AGAIN),
    )
    assert worker_after(*events)[1][-3:] == told(DialHead(AGAIN), EndRay(), StartRay(AGAIN))


def test_the_wait_for_a_lost_head_ends() -> None:
    events = (HeadConnected(1, CARD), RayUp(), HeadLost(2), RayDown(8, "no GCS"))
    worker, done = worker_after(*events)
    assert done[-1:] == told(EndRay())
    assert worker_step(worker, RendezvousRead(1 + HEAD_GRACE, None, None))[1] == []
    assert told(*worker_step(worker, RendezvousRead(2 + HEAD_GRACE, None, None))[1]) == told(
        LeaveCluster(75, "the head has not started again in time")
    )


def test_a_head_lost_in_its_last_attempt_is_given_up_soon() -> None:
    for attempts, limit in ((1, LAST_GRACE), (2, HEAD_GRACE), (0, HEAD_GRACE)):
        worker = WorkerState(100.0, attempts=attempts)
        for event in (HeadConnected(1, CARD), RayUp(), HeadLost(2)):
            worker, _ = worker_step(worker, event)
        assert worker_step(worker, RendezvousRead(1 + limit, CARD, None))[1] == [DialHead(CARD)]
        last = told(*worker_step(worker, RendezvousRead(2 + limit, CARD, None))[1])[-1]
        assert last.startswith("LeaveCluster(code=0" if attempts == 1 else "LeaveCluster(code=75")


def test_ray_that_ends_is_started_again_a_few_times() -> None:
    events: list[WorkerEvent] = [HeadConnected(1, CARD)]
    events += [RayDown(2, "port taken")] * MOST_STARTS
    done = worker_after(*events)[1]
    assert done.count(repr(StartRay(CARD))) == MOST_STARTS
    assert done[-1:] == told(LeaveCluster(75, "Ray does not start: port taken"))
    longer = [each for i in range(9) for each in (RayUp(), RayDown(500.0 * (i + 1), "x"))]
    assert "Leave" not in str(worker_after(HeadConnected(1, CARD), *longer)[1])


def test_a_refused_worker_says_why() -> None:
    assert worker_after(HeadRefused(78, "Ray 2.59"))[1] == told(LeaveCluster(78, "Ray 2.59"))


NOW = st.floats(0, 2000)
CARDS = st.sampled_from([CARD, AGAIN])
EVENTS = st.one_of(
    st.builds(RendezvousRead, NOW, st.none() | CARDS, st.none()),
    st.builds(HeadConnected, NOW, CARDS),
    st.builds(HeadLost, NOW),
    st.just(RayUp()),
    st.builds(RayDown, NOW, st.just("words")),
)


@given(st.lists(EVENTS, max_size=30))
def test_ray_is_never_started_beside_another(events: list[WorkerEvent]) -> None:
    """And a worker never says that it has joined while it has no Ray, or no head."""
    worker, runs, linked, is_up = WorkerState(1e9), False, False, False
    for event in events:
        if isinstance(event, RayUp) and not runs:
            continue  # what is not started does not come up
        if isinstance(event, RayDown):
            runs = is_up = False  # it ended by itself
        if isinstance(event, HeadConnected | HeadLost):
            linked = isinstance(event, HeadConnected)
        is_up = is_up or isinstance(event, RayUp)
        worker, actions = worker_step(worker, event)
        for action in actions:
            if isinstance(action, EndRay):
                runs = is_up = False
            elif isinstance(action, StartRay):
                assert not runs
                runs, is_up = True, False
            elif isinstance(action, ReportJoined):
                assert runs and linked and is_up
            elif isinstance(action, LeaveCluster):
                return


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=20))
def test_the_count_of_joined_workers_is_right(moves: list[tuple[bool, int]]) -> None:
    there: set[int] = set()
    head = begin_head((CPU,), 0.0, 600.0)
    for comes, number in moves:
        member = WorkerId("cpu", number)
        head, _ = head_step(head, WorkerJoined(member) if comes else WorkerLeft(member))
        (there.add if comes else there.discard)(number)
    head, actions = head_step(head, HeadTick(1.0))
    assert ("StartProgram()" in told(*actions)) == (len(there) >= 2)
    assert is_incomplete(head, CPU) == (len(there) < 3)
