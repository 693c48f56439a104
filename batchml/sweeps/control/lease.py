"""The lease, by which a sweep has one controller, and the intervals at which controllers act.

Each controller that takes the lease over takes the next number. The lease expires some time after
its owner has renewed it last. The clocks of two machines differ, so two controllers may both
believe for a moment that they have it: then the numbers of the ledger's segments shut out the
earlier controller. The lease only makes that rare.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec import Struct

from batchml.clock import Clock
from batchml.errors import ControllerReplaced, SweepHasController, SweepStoreError
from batchml.runtime.storage.store import Store, StoreError


class ControllerIntervals(Struct, frozen=True):
    """Intervals in seconds."""

    poll: float  # between two rounds
    poll_at_first: float  # the same, during the first `first_period` of a sweep
    first_period: float
    between_batches: float
    observe: float  # between two calls that ask for the states of jobs
    observe_failures: float  # between two calls that ask which children of an array failed
    at_end: float  # between two rounds, and two calls, at first, once only ends of jobs are awaited
    silence: float  # from the end of a job until its missing messages are no longer waited for
    patience: float  # during which errors of an unreachable service are tolerated
    lease: float  # during which nobody else may take over from a controller that is silent


LOCAL_INTERVALS = ControllerIntervals(
    poll=0.3, poll_at_first=0.3, first_period=0.0, between_batches=0.0,
    observe=1.0, observe_failures=2.0, at_end=0.05, silence=5.0, patience=60.0, lease=15.0,
)  # fmt: skip
AWS_INTERVALS = ControllerIntervals(
    poll=15.0, poll_at_first=5.0, first_period=120.0, between_batches=20.0,
    observe=15.0, observe_failures=60.0, at_end=15.0, silence=300.0, patience=900.0, lease=90.0,
)  # fmt: skip


# --- The lease ------------------------------------------------------------------------------------


_PREFIX = "lease/"
_LEASE_FILE = re.compile(r"(\d{6})\.json")


class LeaseOwner(Struct, frozen=True, omit_defaults=True):
    """A controller: a process of a machine, or a run in AWS Batch."""

    user: str = ""
    host: str = ""
    pid: int = 0
    began: str = ""  # when the process began: it distinguishes processes with the same pid
    job: str = ""  # the id of the run; its attempts follow one another

    @property
    def description(self) -> str:
        """For people, as the subject of a sentence."""
        if self.job:
            return f"the run {self.job}"
        return f"process {self.pid} on {self.host}" + (f", of {self.user}" if self.user else "")


class LeaseTaken(Struct, frozen=True):
    """The caller has the lease."""

    number: int


class LeaseHeld(Struct, frozen=True):
    """Another controller has the lease, `until` (seconds since the epoch) unless it renews it."""

    holder: LeaseOwner
    until: float


class _Content(Struct, frozen=True):
    owner: LeaseOwner
    until: float
    nonce: str  # of the Lease object: one process may have several
    released: bool = False


class Lease:
    """The lease in a sweep's store, as one owner sees it.

    `is_gone` tells whether another owner has certainly ended. Methods raise StoreError.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        owner: LeaseOwner,
        life: float = AWS_INTERVALS.lease,
        is_gone: Callable[[LeaseOwner, LeaseOwner], bool] | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._owner = owner
        self._life = life
        self._is_gone = is_gone or has_ended
        self._nonce = os.urandom(8).hex()
        self._number = 0
        self._renewed = 0.0

    def take(self) -> LeaseTaken | LeaseHeld:
        """Take the lease, unless another controller has it."""
        while True:
            number = newest_lease(self._store)
            found = self._read(number) if number else None
            if found is not None and self._is_live(found):
                if found.nonce != self._nonce:
                    return LeaseHeld(found.owner, found.until)
                # An earlier attempt succeeded, and its answer was lost.
                return self._note_taken(number)
            if self._store.create(_key(number + 1), self._content()):
                return self._note_taken(number + 1)

    def renew(self) -> None:
        """Renew the lease, if a third of its life has passed. Raises ControllerReplaced."""
        if self._clock.now() - self._renewed < self._life / 3:
            return
        self._check_number()
        now = self._clock.now()
        self._store.put(_key(self._number), self._content())
        self._renewed = now

    def release(self) -> None:
        """Let the next controller take it at once. Does nothing if another one has it."""
        if self._number:
            with suppress(ControllerReplaced):
                self._check_number()
                self._store.put(_key(self._number), self._content(released=True))
        self._number = 0

    def holder(self) -> LeaseHeld | None:
        """The present owner; None where there is none."""
        number = newest_lease(self._store)
        found = self._read(number) if number else None
        return LeaseHeld(found.owner, found.until) if found and self._is_live(found) else None

    def _note_taken(self, number: int) -> LeaseTaken:
        self._number, self._renewed = number, self._clock.now()
        with suppress(StoreError, SweepStoreError):  # old files do no harm
            self._store.delete(*(_key(each) for each in _numbers(self._store) if each < number))
        return LeaseTaken(number)

    def _check_number(self) -> None:
        """Raise ControllerReplaced if another owner has taken the lease over."""
        newest = newest_lease(self._store)
        if newest != self._number:
            found = self._read(newest)
            raise ControllerReplaced(found.owner.description if found else "")

    def _is_live(self, found: _Content) -> bool:
        if found.released or found.until <= self._clock.now():
            return False
        return not self._is_gone(found.owner, self._owner)

    def _content(self, released: bool = False) -> bytes:
        until = self._clock.now() + self._life
        return msgspec.json.encode(_Content(self._owner, until, self._nonce, released))

    def _read(self, number: int) -> _Content | None:
        """The content of a lease; None for a missing or unreadable one, which is ignored."""
        data = self._store.get(_key(number))
        try:
            return msgspec.json.decode(data, type=_Content) if data else None
        except msgspec.DecodeError:
            return None


def this_process(user: str = "", job: str = "") -> LeaseOwner:
    """This process as the owner of a lease."""
    import socket

    pid = os.getpid()
    return LeaseOwner(user, socket.gethostname(), pid, _began(pid) or "", job)


def has_ended(other: LeaseOwner, ours: LeaseOwner) -> bool:
    """Whether another owner has certainly ended: a process of this machine that is gone, or an
    earlier attempt of this process's own run."""
    if other.job or ours.job:
        return other.job == ours.job
    if other.host != ours.host or not other.began:
        return False
    return _began(other.pid) != other.began


def _began(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None for one that has ended.

    Empty on a system without /proc. Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None if os.path.isdir("/proc/self") else ""
    return None if fields[0] == "Z" else fields[19]


def _numbers(store: Store) -> list[int]:
    names = (key.removeprefix(_PREFIX) for key in store.keys(_PREFIX))
    return [int(match[1]) for name in names if (match := _LEASE_FILE.fullmatch(name))]


def _key(number: int) -> str:
    return f"{_PREFIX}{number:06d}.json"


def find_holder(store: Store, clock: Clock) -> LeaseHeld | None:
    """The controller that a sweep has; None where there is none. Raises StoreError."""
    return Lease(store, clock, this_process()).holder()


# --- A controller that was submitted, and has not begun -------------------------------------------


_EXPECTED = "controller.json"


class _ExpectedController(Struct, frozen=True):
    job: str
    until: float  # seconds since the epoch
    lease: int  # the newest lease before it was submitted; a later one replaces it


def newest_lease(store: Store) -> int:
    """The number of the newest lease, which may have ended; 0 without one."""
    return max(_numbers(store), default=0)


def expect_controller(store: Store, job: str, until: float, lease: int) -> None:
    """Note that the run `job` will control the sweep, and takes the lease after `lease`.

    After `until`, in seconds since the epoch, it is no longer expected.
    """
    expected = _ExpectedController(job, until, lease)
    store.put(_EXPECTED, msgspec.json.encode(expected))


def find_expected(store: Store, clock: Clock) -> LeaseOwner | None:
    """The run that will control the sweep, until it or another controller has begun."""
    data = store.get(_EXPECTED)
    try:
        found = msgspec.json.decode(data, type=_ExpectedController) if data else None
    except msgspec.DecodeError:
        return None
    if found is None or found.until <= clock.now():
        return None
    return LeaseOwner(job=found.job) if newest_lease(store) == found.lease else None


def refuse_second_controller(store: Store, clock: Clock, key: str) -> None:
    """Raise SweepHasController, which names the controller, if the sweep `key` has one."""
    found = find_holder(store, clock)
    if found is not None:
        raise SweepHasController(found.holder.description, key)
