"""The rate limit of submissions, shared by all processes of a user: AWS counts calls by account.

It is a token bucket in a locked file of 60 bytes. A process books the next free moment and waits
for it outside of the lock, so that turns come in order and a process that is killed while it waits
costs one turn. A throttled call halves the rate for all processes, and time gives it back.
"""

import fcntl
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from batchml.clock import Clock
from batchml.runtime.processes import boot_id

# SubmitJob: 50 a second and account (AWS General Reference, "AWS Batch endpoints and quotas");
# the console and other people use some of them.
RATE = 40.0
BURST = 40.0  # turns that need not wait after a quiet time
SLOWEST = 1.0  # turns a second: the rate after any number of throttled calls
RECOVERY = 2.0  # turns a second that come back each second
_SAME_THROTTLING = 1.0  # seconds in which several throttled calls count once
_MAX_WAIT = 600.0  # seconds until a turn, at most; a later time is from another boot

_FORMAT = struct.Struct("<ddd36s")  # BucketState, and the boot: its clock starts at 0
REPORTED_WAIT = 2.0  # seconds: a longer wait is reported to the user


class BucketState(Struct, frozen=True):
    """The state of the token bucket. Times are in seconds of the monotonic clock."""

    free: float = 0.0  # the time of the next turn, without a burst
    rate: float = RATE
    since: float = 0.0  # the time of the last throttled call, from which `rate` recovers


def current_rate(state: BucketState, now: float) -> float:
    """Turns a second, with the recovery since the last throttling."""
    if state.since > now:  # a time of another boot
        return RATE
    return min(RATE, state.rate + (now - state.since) * RECOVERY)


def take(state: BucketState, now: float) -> tuple[BucketState, float]:
    """Book a turn; the new shared state, and the seconds to wait for the turn."""
    rate = current_rate(state, now)
    fullest = now - BURST / rate
    free = state.free if fullest <= state.free <= now + _MAX_WAIT else fullest
    free += 1 / rate
    return replace(state, free=free), max(0.0, free - now)


def throttled(state: BucketState, now: float) -> BucketState:
    """The state after a throttled call: half the rate from now on, and no burst."""
    if 0 <= now - state.since < _SAME_THROTTLING and state.rate < RATE:
        return state
    slower = max(SLOWEST, current_rate(state, now) / 2)
    free = state.free if state.free <= now + _MAX_WAIT else now
    return BucketState(max(free, now), slower, now)


class RateBucket:
    """The token bucket in the file at `path`, which is created when first needed.

    If the file cannot be written, only AWS limits the rate.
    """

    def __init__(self, path: Path, boot: str | None = None) -> None:
        """`boot`: the id of this machine's boot; read when first needed unless given."""
        self._path = path
        self._boot = boot

    def take(self, clock: Clock, tell: Callable[[str], None] = lambda _: None) -> None:
        """Wait for a turn. `tell` gets a message about a long wait."""
        wait = self._change(lambda state: take(state, clock.monotonic()))
        if wait > REPORTED_WAIT:
            tell(f"Waiting {wait:.0f} s for a turn: AWS Batch limits submissions a second.")
        if wait:
            clock.sleep(wait)

    def throttled(self, clock: Clock) -> None:
        """Slow down all processes, after AWS has throttled a call."""
        self._change(lambda state: (throttled(state, clock.monotonic()), 0.0))

    def _change(self, change: Callable[[BucketState], tuple[BucketState, float]]) -> float:
        """Change the state under a lock; the seconds to wait."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return change(BucketState())[1]
        try:
            boot = self._this_boot()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            state, wait = change(_read_state(os.pread(descriptor, _FORMAT.size, 0), boot))
            os.pwrite(descriptor, _FORMAT.pack(state.free, state.rate, state.since, boot), 0)
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
    """The state in the file; the initial state if the file is new, damaged or of another boot."""
    if len(data) != _FORMAT.size:
        return BucketState()
    free, rate, since, of_boot = _FORMAT.unpack(data)
    is_sane = math.isfinite(free) and math.isfinite(since) and SLOWEST <= rate <= RATE
    return BucketState(free, rate, since) if is_sane and of_boot == boot else BucketState()
