"""The lease: which controller a sweep has. Each that takes it over takes the next number.

A lease ends some time after its owner has renewed it last. Clocks of two machines differ, so two
may each take it for theirs for a moment: the ledger's numbers fence out the earlier one. The lease
only keeps it from coming to that.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec import Struct

from batchml.clock import Clock
from batchml.runtime.storage.store import Store, StoreError
from batchml.sweep.ledger import Fenced

AWS_LIFE, LOCAL_LIFE = 90.0, 15.0  # seconds after the last renewal
_PREFIX = "lease/"
_NAME = re.compile(r"(\d{6})\.json")


class Owner(Struct, frozen=True, omit_defaults=True):
    """A controller: a process of a machine, or a run in AWS Batch."""

    user: str = ""
    host: str = ""
    pid: int = 0
    began: str = ""  # tells two processes of one number apart
    job: str = ""  # the run's id; its attempts come one after the other

    @property
    def words(self) -> str:
        """For people: a short sentence's subject."""
        if self.job:
            return f"the run {self.job}"
        return f"process {self.pid} on {self.host}" + (f", of {self.user}" if self.user else "")


class Held(Struct, frozen=True):
    """It is ours."""

    number: int


class Refused(Struct, frozen=True):
    """Another has it; `until` in seconds since the epoch, unless it is renewed."""

    holder: Owner
    until: float


class _Content(Struct, frozen=True):
    owner: Owner
    until: float
    nonce: str  # of the Lease that wrote it: one process may have two
    released: bool = False


class Lease:
    """The lease on a board, of one who would control its sweep.

    `is_gone` says of another owner whether it is sure to have ended. Methods raise StoreError when
    the board cannot be had.
    """

    def __init__(
        self,
        board: Store,
        clock: Clock,
        owner: Owner,
        life: float = AWS_LIFE,
        is_gone: Callable[[Owner, Owner], bool] | None = None,
    ) -> None:
        self._board = board
        self._clock = clock
        self._owner = owner
        self._life = life
        self._is_gone = is_gone or has_ended
        self._nonce = os.urandom(8).hex()
        self._number = 0
        self._renewed = 0.0

    def take(self) -> Held | Refused:
        """Take the lease, unless another controller has it."""
        while True:
            number = max(self._numbers(), default=0)
            found = self._read(number) if number else None
            if found is not None and self._is_live(found):
                if found.nonce != self._nonce:
                    return Refused(found.owner, found.until)
                return self._have(number)  # the answer to an earlier try was lost
            if self._board.create(_key(number + 1), self._content()):
                return self._have(number + 1)

    def renew(self) -> None:
        """Keep it. Called often, it does something each third of its life.

        Raises Fenced when it was lost.
        """
        if self._clock.now() - self._renewed < self._life / 3:
            return
        self._check()
        now = self._clock.now()
        self._board.put(_key(self._number), self._content())
        self._renewed = now

    def release(self) -> None:
        """Give it back: the next one may take it at once. Does nothing for one that was lost."""
        if self._number:
            with suppress(Fenced):
                self._check()
                self._board.put(_key(self._number), self._content(released=True))
        self._number = 0

    def holder(self) -> Refused | None:
        """Who has it now; None when nobody does."""
        number = max(self._numbers(), default=0)
        found = self._read(number) if number else None
        return Refused(found.owner, found.until) if found and self._is_live(found) else None

    def _have(self, number: int) -> Held:
        self._number, self._renewed = number, self._clock.now()
        with suppress(StoreError):  # older ones are in nobody's way
            self._board.delete(*(_key(each) for each in self._numbers() if each < number))
        return Held(number)

    def _check(self) -> None:
        newest = max(self._numbers(), default=0)
        if newest != self._number:
            found = self._read(newest)
            raise Fenced(found.owner.words if found else "")

    def _is_live(self, found: _Content) -> bool:
        if found.released or found.until <= self._clock.now():
            return False
        return not self._is_gone(found.owner, self._owner)

    def _content(self, released: bool = False) -> bytes:
        until = self._clock.now() + self._life
        return msgspec.json.encode(_Content(self._owner, until, self._nonce, released))

    def _read(self, number: int) -> _Content | None:
        """None for one that is not there, or that nobody can read: it holds nothing up."""
        data = self._board.get(_key(number))
        try:
            return msgspec.json.decode(data, type=_Content) if data else None
        except msgspec.DecodeError:
            return None

    def _numbers(self) -> list[int]:
        names = (key.removeprefix(_PREFIX) for key in self._board.keys(_PREFIX))
        return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def this_process(user: str = "", job: str = "") -> Owner:
    """The owner that this process is."""
    import socket

    pid = os.getpid()
    return Owner(user, socket.gethostname(), pid, _began(pid) or "", job)


def has_ended(other: Owner, ours: Owner) -> bool:
    """True where it is sure that an owner has ended: a process of this machine that is not there
    any more, or an earlier attempt of our own run."""
    if other.job or ours.job:
        return other.job == ours.job
    if other.host != ours.host or not other.began:
        return False
    return _began(other.pid) != other.began


def _began(pid: int) -> str | None:
    """When a process began, in ticks since this machine did; None for one that has ended.

    Empty where the system does not say. Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None if os.path.isdir("/proc/self") else ""
    return None if fields[0] == "Z" else fields[19]


def _key(number: int) -> str:
    return f"{_PREFIX}{number:06d}.json"
