"""The rules of the head and the workers of a Ray cluster: `head_step` and `worker_step`. Pure.

A worker looks for the head, joins its Ray, and stays until the head has ended for good. A head that
is lost may start again on another host: then the worker joins the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import FrozenSet, List, NamedTuple, Optional, Tuple, Union

from batchml.runtime.nodes.link.server import Rendezvous
from batchml.runtime.protocol.exit_codes import STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import WorkerGroup
from batchml.runtime.storage.store import StoreError

# --- rendezvous -----------------------------------------------------------------------------------
# Where the head and the workers of a Ray cluster meet: two documents in the bucket or workspace.
#
# `gang/head.json` says where the head is, `gang/ended.json` that it has ended for good.


_HEAD = "gang/head.json"
_ENDED = "gang/ended.json"


class HeadRecord(NamedTuple):
    """Where a head is, and which versions a worker needs to join it."""

    run: str  # the id of its job
    attempt: int
    address: str
    gcs_port: int
    control_port: int
    ray: str
    python: str
    at: float  # seconds since the epoch

    @property
    def gcs(self) -> str:
        return f"{self.address}:{self.gcs_port}"


class HeadRendezvous:
    """Every method raises StoreError when the documents cannot be read or written."""

    def __init__(self, documents: Rendezvous) -> None:
        self._documents = documents

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HeadRendezvous:
        return cls(Rendezvous.of_group(environ))

    def head(self) -> Optional[HeadRecord]:
        found = self._documents.read(_HEAD)
        if found is None:
            return None
        try:
            return HeadRecord(**found)
        except TypeError as error:
            raise StoreError(f"{_HEAD} is of another batchml: {error}") from error

    def publish(self, head: HeadRecord) -> None:
        """A head begins, or begins again after its host was lost."""
        self._documents.delete(_ENDED)
        self._documents.write(_HEAD, head._asdict())

    def end_code(self) -> Optional[int]:
        """The exit code of the program, once there is nothing left to do for workers."""
        found = self._documents.read(_ENDED)
        return None if found is None else int(found.get("code", 0))

    def end(self, code: int, at: float) -> None:
        self._documents.write(_ENDED, {"code": code, "at": at})


# --- rules ----------------------------------------------------------------------------------------


NOTICE_EVERY = 30.0  # seconds between two lines about missing workers
HEAD_GRACE = 600.0  # seconds that workers wait for a lost head to start again
LAST_GRACE = 10.0  # the same for a head in its last attempt: perhaps only the network failed
FRESH = 30.0  # seconds; Ray that ended sooner never worked
BEAT = 5.0  # seconds between two signs of life of a supervisor
SILENT = 20.0  # seconds without one, after which it is lost
MOST_STARTS = 3  # starts of Ray in a row that failed

# --- Actions of both ------------------------------------------------------------------------------


class Announce(NamedTuple):
    """Write a line for people."""

    text: str


class LeaveCluster(NamedTuple):
    """End Ray, and exit. `why` is empty where the program chose the code."""

    code: int
    why: str = ""


# --- The head -------------------------------------------------------------------------------------


class WorkerId(NamedTuple):
    """A worker, by its group and its number in it, from 0."""

    group: str
    number: int
    address: str = ""

    @property
    def place(self) -> Tuple[str, int]:
        """Its identity over hosts and attempts."""
        return self.group, self.number

    def __str__(self) -> str:
        return f"{self.group}[{self.number}]" + (f" at {self.address}" if self.address else "")


class HeadState(NamedTuple):
    groups: Tuple[WorkerGroup, ...]
    until: float  # when enough workers have to be there
    next_notice: float
    here: FrozenSet[Tuple[str, int]] = frozenset()
    is_running: bool = False


class WorkerJoined(NamedTuple):
    """The Ray of a worker is part of the cluster."""

    member: WorkerId


class WorkerLeft(NamedTuple):
    member: WorkerId


class RayEnded(NamedTuple):
    words: str


class ProgramEnded(NamedTuple):
    code: int


class StopSignal(NamedTuple):
    """A signal requests the end."""

    number: int


class HeadTick(NamedTuple):
    now: float  # seconds, of a clock that only goes forward


class StartProgram(NamedTuple):
    """Start the program of the run."""


class PassSignal(NamedTuple):
    """Send the signal to the program, which chooses how it ends."""

    number: int


HeadEvent = Union[WorkerJoined, WorkerLeft, RayEnded, ProgramEnded, StopSignal, HeadTick]
HeadAction = Union[Announce, StartProgram, PassSignal, LeaveCluster]


def begin_head(groups: Tuple[WorkerGroup, ...], now: float, limit: float) -> HeadState:
    """The state of a head whose Ray is up. Enough workers have to join within `limit` seconds."""
    return HeadState(groups, now + limit, now + NOTICE_EVERY)


def head_step(head: HeadState, event: HeadEvent) -> Tuple[HeadState, List[HeadAction]]:
    if isinstance(event, (WorkerJoined, WorkerLeft)):
        place, is_in = {event.member.place}, isinstance(event, WorkerJoined)
        head = head._replace(here=head.here | place if is_in else head.here - place)
        verb = "has joined" if is_in else "is gone"
        return head, [Announce(f"worker {event.member} {verb}: {_count(head)}")]
    if isinstance(event, RayEnded):
        return head, [LeaveCluster(TRY_ELSEWHERE, f"Ray has ended on the head: {event.words}")]
    if isinstance(event, ProgramEnded):
        return head, [LeaveCluster(event.code)]
    if isinstance(event, StopSignal):
        return head, [PassSignal(event.number)] if head.is_running else [
            LeaveCluster(STOPPED, "stopped while waiting")
        ]
    return _head_tick(head, event.now)


def _head_tick(head: HeadState, now: float) -> Tuple[HeadState, List[HeadAction]]:
    if head.is_running:
        return head, []
    missing = _missing(head)
    if not missing:
        return head._replace(is_running=True), [
            Announce(f"{_count(head)}; the program starts"),
            StartProgram(),
        ]
    if now >= head.until:
        return head, [LeaveCluster(TRY_ELSEWHERE, f"not enough workers came in time: {missing}")]
    if now < head.next_notice:
        return head, []
    left = f"{head.until - now:.0f} s are left"
    return head._replace(next_notice=now + NOTICE_EVERY), [
        Announce(f"waiting for workers: {missing}; {left}")
    ]


def is_incomplete(head: HeadState, group: WorkerGroup) -> bool:
    """Whether a group is not complete: some of its workers may still wait in the queue."""
    return _here(head, group) < group.size


def _here(head: HeadState, group: WorkerGroup) -> int:
    return sum(name == group.name for name, _ in head.here)


def _count(head: HeadState) -> str:
    counts = (f"{_here(head, each)} of {each.size} {each.name}" for each in head.groups)
    return ", ".join(counts) or "no workers"


def _missing(head: HeadState) -> str:
    """Describe the groups with too few workers."""
    lacks = [(each, each.least - _here(head, each)) for each in head.groups]
    parts = (
        f"{_here(head, each)} of {each.least} {each.name} are there (job {each.job_name})"
        for each, count in lacks
        if count > 0
    )
    return ", ".join(parts)


# --- A worker -------------------------------------------------------------------------------------


class WorkerState(NamedTuple):
    until: float  # when a head has to be there
    head: Optional[HeadRecord] = None  # the head that it belongs to, or did last
    is_linked: bool = False  # to the head
    ray_since: float = -1.0  # when Ray was started; negative while it does not run
    is_up: bool = False  # Ray is part of the cluster
    failed: int = 0  # starts of Ray in a row that failed
    attempts: int = 0  # that the head has at most; 0: unknown

    @property
    def head_had_last_attempt(self) -> bool:
        """Whether its head was in its last attempt."""
        return self.head is not None and 0 < self.attempts <= self.head.attempt


class RendezvousRead(NamedTuple):
    """The documents of the head, as they were just read."""

    now: float
    head: Optional[HeadRecord]
    end_code: Optional[int]
    head_is_over: bool = False  # its job has ended for good
    trouble: str = ""  # why the head could not be reached last


class HeadConnected(NamedTuple):
    """The worker is linked to the head."""

    now: float
    head: HeadRecord


class HeadRefused(NamedTuple):
    """The head, or a difference of versions, refuses this worker for good."""

    code: int
    why: str


class HeadLost(NamedTuple):
    """The link to the head is lost."""

    now: float


class RayUp(NamedTuple):
    pass


class RayDown(NamedTuple):
    now: float
    words: str


class HeadEnded(NamedTuple):
    """The head reports that it has ended for good."""

    code: int


class DialHead(NamedTuple):
    head: HeadRecord


class StartRay(NamedTuple):
    head: HeadRecord


class EndRay(NamedTuple):
    pass


class ReportJoined(NamedTuple):
    pass


WorkerEvent = Union[
    RendezvousRead, HeadConnected, HeadRefused, HeadLost, RayUp, RayDown, HeadEnded, StopSignal
]
WorkerAction = Union[Announce, DialHead, StartRay, EndRay, ReportJoined, LeaveCluster]


def worker_step(
    worker: WorkerState, event: WorkerEvent, grace: float = HEAD_GRACE
) -> Tuple[WorkerState, List[WorkerAction]]:
    if isinstance(event, RendezvousRead):
        return _rendezvous_read(worker, event)
    if isinstance(event, HeadConnected):
        return _connected(worker, event)
    if isinstance(event, HeadRefused):
        return worker, [LeaveCluster(event.code, event.why)]
    if isinstance(event, HeadLost):
        limit = min(grace, LAST_GRACE) if worker.head_had_last_attempt else grace
        word = f"the head does not answer; waiting up to {limit:.0f} s for it to start again"
        return worker._replace(is_linked=False, until=event.now + limit), [Announce(word)]
    if isinstance(event, RayUp):
        return worker._replace(is_up=True), [ReportJoined()] if worker.is_linked else []
    if isinstance(event, RayDown):
        return _ray_down(worker, event)
    if isinstance(event, HeadEnded):
        return worker, _head_ended(event.code)
    return worker, [LeaveCluster(STOPPED, "stopped")]


def _rendezvous_read(
    worker: WorkerState, event: RendezvousRead
) -> Tuple[WorkerState, List[WorkerAction]]:
    if event.end_code is not None:
        return worker, _head_ended(event.end_code)
    if worker.is_linked:
        return worker, []
    if event.head_is_over:
        return worker, [Announce("the job of the head has ended"), LeaveCluster(0)]
    if event.now >= worker.until:
        if worker.head_had_last_attempt:
            return worker, [
                Announce("the head has not come again, and it has no attempt left"),
                LeaveCluster(0),
            ]
        why = "the head has not come again" if worker.head else "no head has come"
        trouble = f"; last: {event.trouble}" if event.trouble else ""
        return worker, [LeaveCluster(TRY_ELSEWHERE, f"{why} in time{trouble}")]
    return worker, [] if event.head is None else [DialHead(event.head)]


def _head_ended(code: int) -> List[WorkerAction]:
    return [Announce(f"the head has ended (exit {code})"), LeaveCluster(0)]


def _connected(worker: WorkerState, event: HeadConnected) -> Tuple[WorkerState, List[WorkerAction]]:
    is_same = worker.head == event.head  # its link was lost, but Ray may still work
    worker = worker._replace(head=event.head, is_linked=True)
    if is_same and worker.ray_since >= 0:
        return worker, [ReportJoined()] if worker.is_up else []
    ends: List[WorkerAction] = [EndRay()] if worker.ray_since >= 0 else []
    return worker._replace(ray_since=event.now, is_up=False), [*ends, StartRay(event.head)]


def _ray_down(worker: WorkerState, event: RayDown) -> Tuple[WorkerState, List[WorkerAction]]:
    was_short = not worker.is_up or event.now - worker.ray_since < FRESH
    head, worker = worker.head, worker._replace(ray_since=-1.0, is_up=False)
    if not worker.is_linked or head is None:  # Ray ends with its head: that is no failure
        return worker._replace(failed=0), [EndRay()]
    worker = worker._replace(failed=worker.failed + 1 if was_short else 0)
    if worker.failed >= MOST_STARTS:
        return worker, [LeaveCluster(TRY_ELSEWHERE, f"Ray does not start: {event.words}")]
    again = Announce(f"Ray has ended here and is started again: {event.words}")
    return worker._replace(ray_since=event.now), [again, EndRay(), StartRay(head)]
