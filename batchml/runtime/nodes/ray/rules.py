"""What head and workers of a Ray gang do, decided: `head_step` and `worker_step`. Pure.

A worker looks for the head, joins its Ray, and stays until the head has ended for good. A head that
is gone without that word may come again on another host: then the worker joins that one.
"""

from __future__ import annotations

from typing import FrozenSet, List, NamedTuple, Optional, Tuple, Union

from batchml.runtime.nodes.ray.rendezvous import Card
from batchml.runtime.protocol.exit_codes import STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import Workers

WORD_EVERY = 30.0  # seconds between two lines about who is missing
HEAD_GRACE = 600.0  # seconds that workers wait for a head that is gone to come again
LAST_GRACE = 10.0  # seconds, when it was in its last attempt: only the way to it may be broken
FRESH = 30.0  # seconds; Ray that ended sooner has not worked
BEAT = 5.0  # seconds between two signs of life of a supervisor
SILENT = 20.0  # seconds without one, and it is gone
MOST_STARTS = 3  # of Ray in a row that did not work

# --- actions, of both -----------------------------------------------------------------------------


class Say(NamedTuple):
    text: str


class Leave(NamedTuple):
    """Exit, having ended Ray. `why` is empty where the program chose the code."""

    code: int
    why: str = ""


# --- the head -------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A worker: one of its group, numbered from 0."""

    group: str
    number: int
    address: str = ""

    @property
    def place(self) -> Tuple[str, int]:
        """Whose it is, whatever host and attempt it has."""
        return self.group, self.number

    def __str__(self) -> str:
        return f"{self.group}[{self.number}]" + (f" at {self.address}" if self.address else "")


class Head(NamedTuple):
    groups: Tuple[Workers, ...]
    until: float  # when enough workers have to be there
    next_word: float
    here: FrozenSet[Tuple[str, int]] = frozenset()
    is_running: bool = False


class Joined(NamedTuple):
    """A worker's Ray is part of the gang."""

    member: Member


class Left(NamedTuple):
    member: Member


class RayEnded(NamedTuple):
    words: str


class ProgramEnded(NamedTuple):
    code: int


class Stop(NamedTuple):
    """A signal asks for the end."""

    number: int


class Tick(NamedTuple):
    now: float  # seconds, of a clock that only goes forward


class Start(NamedTuple):
    """The program."""


class PassOn(NamedTuple):
    """The signal to the program, which says itself how it ends."""

    number: int


HeadEvent = Union[Joined, Left, RayEnded, ProgramEnded, Stop, Tick]
HeadAction = Union[Say, Start, PassOn, Leave]


def begin_head(groups: Tuple[Workers, ...], now: float, limit: float) -> Head:
    """A head whose Ray is up. Enough workers have to come within `limit` seconds."""
    return Head(groups, now + limit, now + WORD_EVERY)


def head_step(head: Head, event: HeadEvent) -> Tuple[Head, List[HeadAction]]:
    if isinstance(event, (Joined, Left)):
        place, is_in = {event.member.place}, isinstance(event, Joined)
        head = head._replace(here=head.here | place if is_in else head.here - place)
        verb = "has joined" if is_in else "is gone"
        return head, [Say(f"worker {event.member} {verb}: {_count(head)}")]
    if isinstance(event, RayEnded):
        return head, [Leave(TRY_ELSEWHERE, f"Ray has ended on the head: {event.words}")]
    if isinstance(event, ProgramEnded):
        return head, [Leave(event.code)]
    if isinstance(event, Stop):
        return head, [PassOn(event.number)] if head.is_running else [
            Leave(STOPPED, "stopped while waiting")
        ]
    return _head_tick(head, event.now)


def _head_tick(head: Head, now: float) -> Tuple[Head, List[HeadAction]]:
    if head.is_running:
        return head, []
    missing = _missing(head)
    if not missing:
        return head._replace(is_running=True), [Say(f"{_count(head)}; the program starts"), Start()]
    if now >= head.until:
        return head, [Leave(TRY_ELSEWHERE, f"not enough workers came in time: {missing}")]
    if now < head.next_word:
        return head, []
    left = f"{head.until - now:.0f} s are left"
    return head._replace(next_word=now + WORD_EVERY), [
        Say(f"waiting for workers: {missing}; {left}")
    ]


def is_short(head: Head, group: Workers) -> bool:
    """True when not all of a group are here: some may still wait in the queue."""
    return _here(head, group) < group.size


def _here(head: Head, group: Workers) -> int:
    return sum(name == group.name for name, _ in head.here)


def _count(head: Head) -> str:
    counts = (f"{_here(head, each)} of {each.size} {each.name}" for each in head.groups)
    return ", ".join(counts) or "no workers"


def _missing(head: Head) -> str:
    """Who has to be there and is not."""
    lacks = [(each, each.least - _here(head, each)) for each in head.groups]
    told = (
        f"{_here(head, each)} of {each.least} {each.name} are there (job {each.job_name})"
        for each, count in lacks
        if count > 0
    )
    return ", ".join(told)


# --- a worker -------------------------------------------------------------------------------------


class Worker(NamedTuple):
    until: float  # when a head has to be there
    card: Optional[Card] = None  # of the head that it belongs to, or did last
    is_linked: bool = False  # to the head
    ray_since: float = -1.0  # when Ray was started; negative while it is not
    is_up: bool = False  # Ray, as part of the gang
    failed: int = 0  # starts of Ray in a row that came to nothing
    attempts: int = 0  # that the head has at most; 0: nobody has said

    @property
    def had_last(self) -> bool:
        """The head that it belongs to does not come again."""
        return self.card is not None and 0 < self.attempts <= self.card.attempt


class Found(NamedTuple):
    """What lies where head and workers meet."""

    now: float
    card: Optional[Card]
    ended: Optional[int]
    head_is_over: bool = False  # its job has ended, and Batch will not try it again
    trouble: str = ""  # why the last head could not be reached


class Connected(NamedTuple):
    now: float
    card: Card


class TurnedAway(NamedTuple):
    code: int
    why: str


class Lost(NamedTuple):
    """The connection to the head."""

    now: float


class RayUp(NamedTuple):
    pass


class RayDown(NamedTuple):
    now: float
    words: str


class Over(NamedTuple):
    """The head says that it has ended for good."""

    code: int


class Dial(NamedTuple):
    card: Card


class StartRay(NamedTuple):
    card: Card


class EndRay(NamedTuple):
    pass


class TellJoined(NamedTuple):
    pass


WorkerEvent = Union[Found, Connected, TurnedAway, Lost, RayUp, RayDown, Over, Stop]
WorkerAction = Union[Say, Dial, StartRay, EndRay, TellJoined, Leave]


def worker_step(
    worker: Worker, event: WorkerEvent, grace: float = HEAD_GRACE
) -> Tuple[Worker, List[WorkerAction]]:
    if isinstance(event, Found):
        return _found(worker, event)
    if isinstance(event, Connected):
        return _connected(worker, event)
    if isinstance(event, TurnedAway):
        return worker, [Leave(event.code, event.why)]
    if isinstance(event, Lost):
        limit = min(grace, LAST_GRACE) if worker.had_last else grace
        word = f"the head does not answer; waiting up to {limit:.0f} s for it to come again"
        return worker._replace(is_linked=False, until=event.now + limit), [Say(word)]
    if isinstance(event, RayUp):
        return worker._replace(is_up=True), [TellJoined()] if worker.is_linked else []
    if isinstance(event, RayDown):
        return _ray_down(worker, event)
    if isinstance(event, Over):
        return worker, _over(event.code)
    return worker, [Leave(STOPPED, "stopped")]


def _found(worker: Worker, event: Found) -> Tuple[Worker, List[WorkerAction]]:
    if event.ended is not None:
        return worker, _over(event.ended)
    if worker.is_linked:
        return worker, []
    if event.head_is_over:
        return worker, [Say("the job of the head has ended"), Leave(0)]
    if event.now >= worker.until:
        if worker.had_last:
            return worker, [
                Say("the head has not come again, and it has no attempt left"),
                Leave(0),
            ]
        why = "the head has not come again" if worker.card else "no head has come"
        trouble = f"; last: {event.trouble}" if event.trouble else ""
        return worker, [Leave(TRY_ELSEWHERE, f"{why} in time{trouble}")]
    return worker, [] if event.card is None else [Dial(event.card)]


def _over(code: int) -> List[WorkerAction]:
    return [Say(f"the head has ended (exit {code})"), Leave(0)]


def _connected(worker: Worker, event: Connected) -> Tuple[Worker, List[WorkerAction]]:
    is_same = worker.card == event.card  # the way to it was broken, Ray may not be
    worker = worker._replace(card=event.card, is_linked=True)
    if is_same and worker.ray_since >= 0:
        return worker, [TellJoined()] if worker.is_up else []
    ends: List[WorkerAction] = [EndRay()] if worker.ray_since >= 0 else []
    return worker._replace(ray_since=event.now, is_up=False), [*ends, StartRay(event.card)]


def _ray_down(worker: Worker, event: RayDown) -> Tuple[Worker, List[WorkerAction]]:
    was_short = not worker.is_up or event.now - worker.ray_since < FRESH
    card, worker = worker.card, worker._replace(ray_since=-1.0, is_up=False)
    if not worker.is_linked or card is None:  # it ends with its head: that is no failure
        return worker._replace(failed=0), [EndRay()]
    worker = worker._replace(failed=worker.failed + 1 if was_short else 0)
    if worker.failed >= MOST_STARTS:
        return worker, [Leave(TRY_ELSEWHERE, f"Ray does not start: {event.words}")]
    again = Say(f"Ray has ended here and is started again: {event.words}")
    return worker._replace(ray_since=event.now), [again, EndRay(), StartRay(card)]
