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

# --- Rendezvous -----------------------------------------------------------------------------------
# Workers find their head by two documents in the bucket or the workspace.


_HEAD = "gang/head.json"  # where the head is
_ENDED = "gang/ended.json"  # exists once the head has ended for good


class HeadRecord(NamedTuple):
    """Where a head is, and which versions a worker needs to join it."""

    run: str  # the id of its job
    attempt: int
    address: str
    gcs_port: int  # of Ray's Global Control Service
    control_port: int  # to which the supervisors of workers connect
    ray: str  # the version of Ray
    python: str  # the version of Python
    at: float  # seconds since the epoch

    @property
    def gcs(self) -> str:
        return f"{self.address}:{self.gcs_port}"


class HeadRendezvous:
    """Reads and writes the documents. Every method raises StoreError if that fails."""

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
        """Record a head that begins, or begins again after its host was lost."""
        self._documents.delete(_ENDED)
        self._documents.write(_HEAD, head._asdict())

    def end_code(self) -> Optional[int]:
        """The exit code of the program, once the head has ended for good; None before."""
        found = self._documents.read(_ENDED)
        return None if found is None else int(found.get("code", 0))

    def end(self, code: int, at: float) -> None:
        """Record that the head has ended for good."""
        self._documents.write(_ENDED, {"code": code, "at": at})


# --- Limits ---------------------------------------------------------------------------------------


NOTICE_EVERY = 30.0  # seconds between two lines about missing workers
HEAD_GRACE = 600.0  # seconds that workers wait for a lost head to start again
LAST_GRACE = 10.0  # the same after the head's last attempt: perhaps only the network failed
FRESH = 30.0  # seconds; if Ray ends sooner after its start, that start has failed
BEAT = 5.0  # seconds between two signs of life of a supervisor
SILENT = 20.0  # seconds without a sign of life, after which a supervisor is lost
MOST_STARTS = 3  # failed starts of Ray in a row, after which a node gives up

# --- Actions of both ------------------------------------------------------------------------------


class Announce(NamedTuple):
    """Write a line for people."""

    text: str


class LeaveCluster(NamedTuple):
    """End Ray, and exit with this code. `why` is empty if the program chose the code."""

    code: int
    why: str = ""


# --- The head -------------------------------------------------------------------------------------


class WorkerId(NamedTuple):
    """A worker, identified by its group and its number in the group, from 0."""

    group: str
    number: int
    address: str = ""

    @property
    def identity(self) -> Tuple[str, int]:
        """The same for all hosts and attempts of the worker."""
        return self.group, self.number

    def __str__(self) -> str:
        return f"{self.group}[{self.number}]" + (f" at {self.address}" if self.address else "")


class HeadState(NamedTuple):
    """All that the rules remember of a head. Times are seconds of a monotonic clock."""

    groups: Tuple[WorkerGroup, ...]
    until: float  # when enough workers must have joined
    next_notice: float  # when to name the missing workers again
    joined: FrozenSet[Tuple[str, int]] = frozenset()  # identities of workers
    is_running: bool = False  # the program was started


class WorkerJoined(NamedTuple):
    """The Ray of a worker is part of the cluster."""

    member: WorkerId


class WorkerLeft(NamedTuple):
    """A worker has ended, or is lost."""

    member: WorkerId


class RayEnded(NamedTuple):
    """Ray has ended on the head. `words`: its last lines."""

    words: str


class ProgramEnded(NamedTuple):
    """The program of the run has ended with this exit code."""

    code: int


class StopSignal(NamedTuple):
    """A signal that requests a stop has come."""

    number: int


class HeadTick(NamedTuple):
    """Time has passed."""

    now: float


class StartProgram(NamedTuple):
    """Start the program of the run."""


class PassSignal(NamedTuple):
    """Send the signal to the program, which itself decides how to end."""

    number: int


HeadEvent = Union[WorkerJoined, WorkerLeft, RayEnded, ProgramEnded, StopSignal, HeadTick]
HeadAction = Union[Announce, StartProgram, PassSignal, LeaveCluster]


def begin_head(groups: Tuple[WorkerGroup, ...], now: float, limit: float) -> HeadState:
    """The state of a head whose Ray runs. Enough workers have to join within `limit` seconds."""
    return HeadState(groups, now + limit, now + NOTICE_EVERY)


def head_step(head: HeadState, event: HeadEvent) -> Tuple[HeadState, List[HeadAction]]:
    """The next state of a head, and the actions to take."""
    if isinstance(event, (WorkerJoined, WorkerLeft)):
        worker, has_joined = {event.member.identity}, isinstance(event, WorkerJoined)
        head = head._replace(joined=head.joined | worker if has_joined else head.joined - worker)
        verb = "has joined" if has_joined else "is gone"
        return head, [Announce(f"worker {event.member} {verb}: {_describe_counts(head)}")]
    if isinstance(event, RayEnded):
        return head, [LeaveCluster(TRY_ELSEWHERE, f"Ray has ended on the head: {event.words}")]
    if isinstance(event, ProgramEnded):
        return head, [LeaveCluster(event.code)]
    if isinstance(event, StopSignal):
        return head, [PassSignal(event.number)] if head.is_running else [
            LeaveCluster(STOPPED, "stopped while waiting for workers")
        ]
    return _head_tick(head, event.now)


def _head_tick(head: HeadState, now: float) -> Tuple[HeadState, List[HeadAction]]:
    if head.is_running:
        return head, []
    missing = _describe_missing(head)
    if not missing:
        return head._replace(is_running=True), [
            Announce(f"{_describe_counts(head)}; the program starts"),
            StartProgram(),
        ]
    if now >= head.until:
        return head, [LeaveCluster(TRY_ELSEWHERE, f"not enough workers joined in time: {missing}")]
    if now < head.next_notice:
        return head, []
    left = f"{head.until - now:.0f} s are left"
    return head._replace(next_notice=now + NOTICE_EVERY), [
        Announce(f"waiting for workers: {missing}; {left}")
    ]


def is_incomplete(head: HeadState, group: WorkerGroup) -> bool:
    """Whether workers of the group have not joined: they may still wait in the queue."""
    return _count_joined(head, group) < group.size


def _count_joined(head: HeadState, group: WorkerGroup) -> int:
    return sum(name == group.name for name, _ in head.joined)


def _describe_counts(head: HeadState) -> str:
    counts = (f"{_count_joined(head, g)} of {g.size} {g.name}" for g in head.groups)
    return ", ".join(counts) or "no workers"


def _describe_missing(head: HeadState) -> str:
    """Describe the groups with too few workers; "" if there is none."""
    return ", ".join(
        f"{count} of {group.least} {group.name} have joined (job {group.job_name})"
        for group in head.groups
        for count in [_count_joined(head, group)]
        if count < group.least
    )


# --- A worker -------------------------------------------------------------------------------------


class WorkerState(NamedTuple):
    """All that the rules remember of a worker. Times are seconds of a monotonic clock."""

    until: float  # when a head must have been found
    head: Optional[HeadRecord] = None  # the current or last head
    is_linked: bool = False  # connected to the head
    ray_since: float = -1.0  # when Ray was started; negative while it does not run
    is_up: bool = False  # Ray is part of the cluster
    failed: int = 0  # failed starts of Ray in a row
    attempts: int = 0  # the most that the head's job may make; 0: unknown

    @property
    def head_had_last_attempt(self) -> bool:
        """Whether the head's job makes no attempt after that of `head`."""
        return self.head is not None and 0 < self.attempts <= self.head.attempt


class RendezvousRead(NamedTuple):
    """The documents of the head were read."""

    now: float
    head: Optional[HeadRecord]
    end_code: Optional[int]  # see `HeadRendezvous.end_code`
    head_is_over: bool = False  # the job of the head has ended for good
    trouble: str = ""  # why the latest try to reach the head failed


class HeadConnected(NamedTuple):
    """The worker is connected to the head."""

    now: float
    head: HeadRecord


class HeadRefused(NamedTuple):
    """This worker can never join: the head refuses it, or has other versions."""

    code: int
    why: str


class HeadLost(NamedTuple):
    """The connection to the head is lost."""

    now: float


class RayUp(NamedTuple):
    """The worker's Ray is part of the cluster."""


class RayDown(NamedTuple):
    """The worker's Ray has ended. `words`: its last lines."""

    now: float
    words: str


class HeadEnded(NamedTuple):
    """The head reports that it has ended for good."""

    code: int


class DialHead(NamedTuple):
    """Connect to the head."""

    head: HeadRecord


class StartRay(NamedTuple):
    """Start Ray, as a part of the head's cluster."""

    head: HeadRecord


class EndRay(NamedTuple):
    """End the worker's Ray."""


class ReportJoined(NamedTuple):
    """Report to the head that the worker's Ray is part of the cluster."""


WorkerEvent = Union[
    RendezvousRead, HeadConnected, HeadRefused, HeadLost, RayUp, RayDown, HeadEnded, StopSignal
]
WorkerAction = Union[Announce, DialHead, StartRay, EndRay, ReportJoined, LeaveCluster]


def worker_step(
    worker: WorkerState, event: WorkerEvent, grace: float = HEAD_GRACE
) -> Tuple[WorkerState, List[WorkerAction]]:
    """The next state of a worker, and the actions to take. `grace`: instead of HEAD_GRACE."""
    if isinstance(event, RendezvousRead):
        return _rendezvous_read(worker, event)
    if isinstance(event, HeadConnected):
        return _connected(worker, event)
    if isinstance(event, HeadRefused):
        return worker, [LeaveCluster(event.code, event.why)]
    if isinstance(event, HeadLost):
        limit = min(grace, LAST_GRACE) if worker.head_had_last_attempt else grace
        text = f"the head does not answer; waiting up to {limit:.0f} s for it to start again"
        return worker._replace(is_linked=False, until=event.now + limit), [Announce(text)]
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
                Announce("the head has not started again, and it has no attempt left"),
                LeaveCluster(0),
            ]
        why = "the head has not started again" if worker.head else "no head was found"
        trouble = f"; latest error: {event.trouble}" if event.trouble else ""
        return worker, [LeaveCluster(TRY_ELSEWHERE, f"{why} in time{trouble}")]
    return worker, [] if event.head is None else [DialHead(event.head)]


def _head_ended(code: int) -> List[WorkerAction]:
    return [Announce(f"the head has ended (exit {code})"), LeaveCluster(0)]


def _connected(worker: WorkerState, event: HeadConnected) -> Tuple[WorkerState, List[WorkerAction]]:
    is_same = worker.head == event.head  # the connection was lost, but Ray may still work
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
    again = Announce(f"Ray has ended on this worker and is started again: {event.words}")
    return worker._replace(ray_since=event.now), [again, EndRay(), StartRay(head)]
