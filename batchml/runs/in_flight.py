"""Submissions in flight, as files that their processes hold locked; and the rate of submissions.

A file without a lock belongs to a client that was killed: its submission has to be settled. So one
look into a folder finds out whether anything is open, and nobody settles a submission that another
process is just sending.
"""

import fcntl
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import SubmissionRequests
from batchml.clock import Clock
from batchml.history import History
from batchml.runtime.processes import boot_id
from batchml.runtime.storage.files import is_locked, write_atomically

# Seconds. The process of a younger file may not have locked it yet.
LOCK_GRACE = 1.0


class InFlight:
    """The files of one environment. A file that cannot be created does not stop a submission."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "InFlight":
        """The object for an environment, in the state folder of a history."""
        return cls(history.path.parent / "submitting" / (env or "-"))

    @contextmanager
    def flight(self, key: str) -> Iterator[None]:
        """Mark the submission `key` as being sent by this process.

        The file stays after an exception that leaves the outcome open; later `remove` removes it.
        """
        descriptor = self._take(key)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def remove(self, key: str) -> None:
        """The submission is settled."""
        with suppress(OSError):
            (self._folder / key).unlink()

    def is_flying(self, key: str) -> bool:
        """True while a process is sending it."""
        try:
            return is_locked(str(self._folder / key))
        except OSError:
            return False

    def abandoned(self, now: float) -> list[str]:
        """The keys whose processes have ended; `now` in seconds since the epoch."""
        found = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    age = now - entry.stat().st_mtime
                    if abs(age) >= LOCK_GRACE and not self.is_flying(entry.name):
                        found.append(entry.name)
        return sorted(found)

    def _take(self, key: str) -> int | None:
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(self._folder / key, flags, 0o600)
            except FileNotFoundError:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self._folder / key, flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            return None
        return descriptor


# --- The rate of submissions ----------------------------------------------------------------------
# One rate for all processes of a user: AWS counts calls by account, not by process.
#
# A token bucket in a locked file of 60 bytes. A process books the next free moment and
# waits for it outside of the lock, so that turns come in order and a process that is killed while
# it waits costs one turn. Being throttled halves the rate for everybody, and time gives it back.


# SubmitJob: 50 a second and account (AWS General Reference, "AWS Batch endpoints and quotas");
# the console and other people use some of them.
RATE = 40.0
BURST = 40.0  # turns that need not wait after a quiet time
SLOWEST = 1.0  # turns a second, however often AWS throttles
RECOVERY = 2.0  # turns a second that come back each second
_SAME_THROTTLING = (
    1.0  # seconds for which one throttling speaks for all that were sent at the same time
)
_MAX_WAIT = 600.0  # seconds ahead that a booked moment can be; a later one is of another boot

_FORMAT = struct.Struct("<ddd36s")  # and the boot, at which the clock starts again
REPORTED_WAIT = 2.0  # seconds: a longer wait is reported to the user


class BucketState(Struct, frozen=True):
    """The state that the processes share. Times are seconds of the monotonic clock."""

    free: float = 0.0  # when the next turn would be, if there were no burst
    rate: float = RATE
    since: float = 0.0  # when AWS throttled last, and `rate` was true


def current_rate(turns: BucketState, now: float) -> float:
    """Turns a second, with the recovery since the last throttling."""
    if turns.since > now:  # of another boot
        return RATE
    return min(RATE, turns.rate + (now - turns.since) * RECOVERY)


def take(turns: BucketState, now: float) -> tuple[BucketState, float]:
    """Book a turn; the new shared state, and the seconds to wait for the turn."""
    rate = current_rate(turns, now)
    fullest = now - BURST / rate
    free = turns.free if fullest <= turns.free <= now + _MAX_WAIT else fullest
    free += 1 / rate
    return replace(turns, free=free), max(0.0, free - now)


def throttled(turns: BucketState, now: float) -> BucketState:
    """After a throttled call: half of the rate from now on, and no burst."""
    if 0 <= now - turns.since < _SAME_THROTTLING and turns.rate < RATE:
        return turns
    slower = max(SLOWEST, current_rate(turns, now) / 2)
    free = turns.free if turns.free <= now + _MAX_WAIT else now
    return BucketState(max(free, now), slower, now)


class RateBucket:
    """The turns in the file at `path`, which is created when first needed.

    A file that cannot be written does not stop a submission: then only AWS limits the rate.
    """

    def __init__(self, path: Path, boot: str | None = None) -> None:
        """`boot`: the id of this machine's boot; read when first needed unless given."""
        self._path = path
        self._boot = boot

    def take(self, clock: Clock, tell: Callable[[str], None] = lambda _: None) -> None:
        """Wait for a turn. `tell` gets a message about a long wait."""
        wait = self._change(lambda turns: take(turns, clock.monotonic()))
        if wait > REPORTED_WAIT:
            tell(f"Waiting {wait:.0f} s for a turn: AWS Batch takes so many submissions a second.")
        if wait:
            clock.sleep(wait)

    def throttled(self, clock: Clock) -> None:
        """Slow down all processes, after AWS has throttled a call."""
        self._change(lambda turns: (throttled(turns, clock.monotonic()), 0.0))

    def _change(self, change: Callable[[BucketState], tuple[BucketState, float]]) -> float:
        """Change the shared state under a lock; the second value of `change`."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return change(BucketState())[1]
        try:
            boot = self._this_boot()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            turns, wait = change(_read_state(os.pread(descriptor, _FORMAT.size, 0), boot))
            os.pwrite(descriptor, _FORMAT.pack(turns.free, turns.rate, turns.since, boot), 0)
            return wait
        except OSError:
            return 0.0
        finally:
            os.close(descriptor)

    def _this_boot(self) -> bytes:
        if self._boot is None:
            self._boot = boot_id()
        return self._boot.encode()[:36].ljust(36, b"\0")


def _read_state(data: bytes, boot: bytes) -> BucketState:
    """The content of the file; for a new or damaged file, or one of another boot, the initial
    state.
    """
    if len(data) != _FORMAT.size:
        return BucketState()
    free, rate, since, of_boot = _FORMAT.unpack(data)
    is_sane = math.isfinite(free) and math.isfinite(since) and SLOWEST <= rate <= RATE
    return BucketState(free, rate, since) if is_sane and of_boot == boot else BucketState()


# --- Requests of group runs that are not sent yet -------------------------------------------------


class UnsentRequests:
    """A file for each group run, private to the user, by the key of its head.

    It holds the requests, with variables of the command line; so it is deleted as soon as all are
    sent, and a run of one job has none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "UnsentRequests":
        """Those of an environment, in the state folder that a history is in."""
        return cls(history.path.parent / "gangs" / (env or "-"))

    def keep(self, gang: str, requests: Mapping[str, SubmissionRequests]) -> None:
        """Write the requests of its jobs, by their keys, to disk.

        Raises OSError; then nothing may be sent.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(str(self._folder / gang), msgspec.json.encode(requests))

    def find(self, gang: str, key: str) -> SubmissionRequests | None:
        """The requests of one job; None where they are not kept."""
        try:
            data = (self._folder / gang).read_bytes()
            return msgspec.json.decode(data, type=dict[str, SubmissionRequests]).get(key)
        except (OSError, msgspec.DecodeError):
            return None

    def gangs(self) -> list[str]:
        """The group runs with kept requests."""
        try:
            return sorted(os.listdir(self._folder))
        except OSError:
            return []

    def drop(self, gang: str) -> None:
        with suppress(OSError):
            (self._folder / gang).unlink()
