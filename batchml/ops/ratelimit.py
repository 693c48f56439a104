"""One rate for all the processes of a user: AWS counts calls by account, not by process.

A token bucket in a locked file of 60 bytes. Whoever takes a turn books the next free moment and
waits for it outside of the lock, so that turns come in order and a process that is killed while it
waits costs one turn. Being throttled halves the rate for everybody, and time gives it back.
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

# SubmitJob: 50 a second and account (AWS General Reference, "AWS Batch endpoints and quotas");
# the console and other people use some of them.
RATE = 40.0
BURST = 40.0  # turns that need not wait after a quiet time
SLOWEST = 1.0  # turns a second, however often AWS throttles
RECOVERY = 2.0  # turns a second that come back each second
_CALM = 1.0  # seconds for which one throttling speaks for all that were sent at the same time
_FURTHEST = 600.0  # seconds ahead that a booked moment can be; a later one is of another boot

_FORMAT = struct.Struct("<ddd36s")  # and the boot, with which the clock begins anew
TOLD = 2.0  # seconds of waiting that a user is told of


class Turns(Struct, frozen=True):
    """What the processes share. Times are seconds of the clock that never jumps."""

    free: float = 0.0  # when the next turn would be, if there were no burst
    rate: float = RATE
    since: float = 0.0  # when AWS throttled last, and `rate` was true


def current_rate(turns: Turns, now: float) -> float:
    """Turns a second, with what came back since the last throttling."""
    if turns.since > now:  # of another boot
        return RATE
    return min(RATE, turns.rate + (now - turns.since) * RECOVERY)


def take(turns: Turns, now: float) -> tuple[Turns, float]:
    """Book a turn; what is shared then, and the seconds to wait for it."""
    rate = current_rate(turns, now)
    fullest = now - BURST / rate
    free = turns.free if fullest <= turns.free <= now + _FURTHEST else fullest
    free += 1 / rate
    return replace(turns, free=free), max(0.0, free - now)


def throttled(turns: Turns, now: float) -> Turns:
    """AWS said that it was too much: half of the rate from now on, and no burst."""
    if 0 <= now - turns.since < _CALM and turns.rate < RATE:
        return turns
    slower = max(SLOWEST, current_rate(turns, now) / 2)
    free = turns.free if turns.free <= now + _FURTHEST else now
    return Turns(max(free, now), slower, now)


class Bucket:
    """The turns in the file at `path`, which is made when first needed.

    A file that cannot be written is no reason not to submit: then AWS alone says what is too much.
    """

    def __init__(self, path: Path, boot: str | None = None) -> None:
        """`boot`: the id of this machine's boot; read when first needed unless given."""
        self._path = path
        self._boot = boot

    def take(self, clock: Clock, tell: Callable[[str], None] = lambda _: None) -> None:
        """Wait for a turn. `tell` hears of a long wait, in words."""
        wait = self._change(lambda turns: take(turns, clock.monotonic()))
        if wait > TOLD:
            tell(f"Waiting {wait:.0f} s for a turn: AWS Batch takes so many submissions a second.")
        if wait:
            clock.sleep(wait)

    def throttled(self, clock: Clock) -> None:
        """Tell everybody that AWS throttles."""
        self._change(lambda turns: (throttled(turns, clock.monotonic()), 0.0))

    def _change(self, change: Callable[[Turns], tuple[Turns, float]]) -> float:
        """Change what is shared while nobody else does; the second value of `change`."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return change(Turns())[1]
        try:
            boot = self._this_boot()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            turns, wait = change(_read(os.pread(descriptor, _FORMAT.size, 0), boot))
            os.pwrite(descriptor, _FORMAT.pack(turns.free, turns.rate, turns.since, boot), 0)
            return wait
        except OSError:
            return 0.0
        finally:
            os.close(descriptor)

    def _this_boot(self) -> bytes:
        if self._boot is None:
            from batchml.runtime.processes import boot_id

            self._boot = boot_id()
        return self._boot.encode()[:36].ljust(36, b"\0")


def _read(data: bytes, boot: bytes) -> Turns:
    """What the file holds; a new or damaged one, or one of another boot, that nobody had a turn."""
    if len(data) != _FORMAT.size:
        return Turns()
    free, rate, since, of_boot = _FORMAT.unpack(data)
    is_sane = math.isfinite(free) and math.isfinite(since) and SLOWEST <= rate <= RATE
    return Turns(free, rate, since) if is_sane and of_boot == boot else Turns()
