"""The ledger of a sweep: its events, in segments, each of which is written once and completely.

A controller takes a segment's number by creating it. If the next number is taken, another
controller has taken over the sweep, and this one stops: the numbers fence off the old controller.
From time to time all segments are merged into one pack and deleted; readers take the newest pack
and the segments after it.

A segment begins with a line about its writer, followed by one event a line. A last line without a
newline was torn when a disk lost power, and does not count. Only the last segment can be torn:
the writer of the next segment notes it in that segment's first line. Any other segment that cannot
be read to its end is damage, and is reported: no trial is lost in silence.
"""

import gc
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from batchml.errors import ControllerReplaced, LedgerDamaged, SweepStoreError
from batchml.runtime.storage.store import Store, StoreError
from batchml.sweeps.control.events import Event
from batchml.sweeps.control.state import SweepState

PACK_AFTER = 50  # segments
_PACK_AT_MOST = 500  # segments: a reader needs one GET for each
_LOG, _PACKS = "log/", "packs/"
_TRIES = 10  # attempts to read while a writer packs

_TORN = "torn"  # in a first line: the segment before is torn
_CHUNK = 1 << 20  # bytes that are decoded at a time
_SEGMENT_FILE = re.compile(r"(\d{9})\.jsonl")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class SweepLedger:
    """The ledger in a sweep's store. `by`: a description of the writer, put into each segment.

    Every method raises StoreError when the store cannot be read or written; the same call may then
    be repeated.
    """

    def __init__(self, store: Store, by: str = "") -> None:
        self._store = store
        self._header: dict[str, object] = {"by": by, "nonce": os.urandom(6).hex()}
        self._last: int | None = None  # the last segment; None: not read yet
        self._replaced_by: str | None = None
        self._unconfirmed: dict[int, list[bytes]] = {}  # perhaps written: the answer was lost
        self._base = 0  # the last segment in the newest pack
        self._packed_bytes = 0
        self._new_bytes = 0  # of the segments since then

    def load(self) -> SweepState:
        """The present state of the sweep. Raises LedgerDamaged."""
        state = SweepState()
        self._read_into(state)
        return state

    def take_over(self) -> SweepState:
        """Load the state, and shut out all other writers. For the owner of the lease.

        Raises LedgerDamaged; ControllerReplaced if others take the ledger over again and again.
        """
        state = SweepState()
        for _ in range(_TRIES):
            self._last = self._replaced_by = None
            self._read_into(state)
            with suppress(ControllerReplaced):
                self.append(())
                return state
        raise ControllerReplaced()

    def follow(self, state: SweepState) -> bool:
        """Apply the events that were written since `state` was loaded. False if there are none."""
        before = state.segment
        segments: list[bytes] = []
        while (data := self._store.get(_segment(before + len(segments) + 1))) is not None:
            segments.append(data)
        # Checked last: segments that a newer pack replaces may be of a writer that was shut out.
        if self._newest_pack() > before:
            self._read_into(state)
        for number, data in enumerate(_events(before, segments), before + 1):
            if number > state.segment:
                _apply(state, _segment(number), data)
                state.segment = number
        return state.segment > before

    def append(self, events: Iterable[Event]) -> None:
        """Write one segment, which is durable on return. The caller applies the events itself.

        Raises ControllerReplaced, in this call and all later ones, if another writer has written
        since this one first loaded, took over or last appended. After a StoreError it is unknown
        whether the segment was written: it is safe to append the same events again, alone or with
        others.
        """
        if self._replaced_by is not None:
            raise ControllerReplaced(self._replaced_by)
        if self._last is None:
            self._last = max(self._newest_pack(), *self._numbers(_LOG), 0)
            self._note_torn(self._last, self._store.get(_segment(self._last)))
        lines = [_encoder.encode(each) for each in (self._header, *events)]
        data = b"\n".join(lines) + b"\n"
        while not self._write(self._last + 1, data):
            self._last += 1  # a segment that seemed lost had arrived
        self._last += 1
        self._unconfirmed.clear()
        self._new_bytes += len(data)
        if self._is_pack_due():
            with suppress(StoreError, SweepStoreError):  # the next call may succeed
                self.pack()

    def pack(self) -> None:
        """Merge all segments into a pack. Others may read meanwhile. Safe to kill at any point."""
        base, old, segments = self._read()
        number = base + len(segments)
        if not segments:
            return
        data = b"".join([old, *_events(base, segments)])
        self._store.put(_pack(number), data)
        self._base, self._packed_bytes, self._new_bytes = number, len(data), 0
        packs = [_pack(each) for each in self._numbers(_PACKS) if each < number]
        logs = [_segment(each) for each in self._numbers(_LOG) if each <= number]
        self._store.delete(*packs, *logs)

    def _write(self, number: int, data: bytes) -> bool:
        """Create a segment. False if an earlier segment of ours has its number.

        Raises ControllerReplaced.
        """
        key = _segment(number)
        tried = self._unconfirmed.setdefault(number, [])
        tried.append(data)
        stored = data if self._store.create(key, data) else self._store.get(key)
        # A number whose segment was packed and deleted can be created again.
        if stored is None or stored not in tried or self._newest_pack() >= number:
            self._replaced_by = _writer(stored)
            raise ControllerReplaced(self._replaced_by)
        return stored == data

    def _is_pack_due(self) -> bool:
        """Whether to pack now: often while the ledger is small, seldom when it is large."""
        count = (self._last or 0) - self._base
        has_grown = self._new_bytes * 4 >= self._packed_bytes
        return count >= PACK_AFTER and (has_grown or count >= _PACK_AT_MOST)

    def _read_into(self, state: SweepState) -> None:
        base, packed, segments = self._read()
        self._base, self._packed_bytes = base, len(packed)
        self._new_bytes = sum(map(len, segments))
        if base > state.segment:  # the whole pack: events that were applied before change nothing
            _apply(state, _pack(base), packed)
            state.segment = base
        for number, data in enumerate(_events(base, segments), base + 1):
            if number > state.segment:
                _apply(state, _segment(number), data)
                state.segment = number
        if self._last is None:  # later reads do not make this the writer again
            self._last = state.segment
            self._note_torn(self._last, segments[-1] if segments else None)

    def _note_torn(self, number: int, segment: bytes | None) -> None:
        """Note in the next first line that the segment before it is torn, if it is."""
        self._header.pop(_TORN, None)
        if segment is not None and not segment.endswith(b"\n"):
            self._header[_TORN] = number

    def _read(self) -> tuple[int, bytes, list[bytes]]:
        """The number and content of the newest pack, and all segments after it."""
        missing = 0
        for _ in range(_TRIES):
            base = self._newest_pack()
            numbers = sorted(each for each in self._numbers(_LOG) if each > base)
            keys = [_pack(base)] if base else []
            contents = self._store.get_many([*keys, *map(_segment, numbers)])
            present = [data for data in contents if data is not None]
            if self._newest_pack() != base or len(present) < len(contents):
                continue  # another process has packed meanwhile
            missing = next((n for n, has in enumerate(numbers, base + 1) if n != has), 0)
            if not missing:
                packed, segments = (present[0], present[1:]) if base else (b"", present)
                if packed and not packed.endswith(b"\n"):
                    raise LedgerDamaged(f"{_pack(base)} breaks off")
                return base, packed, segments
        if not missing:
            raise StoreError("the sweep's ledger is packed again and again", temporary=True)
        raise LedgerDamaged(f"{_segment(missing)} is missing")

    def _newest_pack(self) -> int:
        return max(self._numbers(_PACKS), default=0)

    def _numbers(self, prefix: str) -> list[int]:
        names = (key.removeprefix(prefix) for key in self._store.keys(prefix))
        return [int(match[1]) for name in names if (match := _SEGMENT_FILE.fullmatch(name))]


def _segment(number: int) -> str:
    return f"{_LOG}{number:09d}.jsonl"


def _pack(number: int) -> str:
    return f"{_PACKS}{number:09d}.jsonl"


def _events(before: int, segments: Sequence[bytes]) -> list[bytes]:
    """The complete lines of consecutive segments, without the first line of each.

    The first segment has the number `before` + 1. Raises LedgerDamaged.
    """
    lines = []
    for number, segment in enumerate(segments, before + 1):
        after = segments[number - before : number - before + 1]
        is_torn = not segment.endswith(b"\n")
        if is_torn and after and _header(after[0]).get(_TORN) != number:
            raise LedgerDamaged(f"{_segment(number)} breaks off, and others follow it")
        if b"\n" in segment and not _header(segment):
            raise LedgerDamaged(f"{_segment(number)} has no valid first line")
        lines.append(segment[segment.find(b"\n") + 1 : segment.rfind(b"\n") + 1])
    return lines


def _header(segment: bytes | None) -> dict[str, object]:
    """The first line of a segment; empty where it cannot be read."""
    with suppress(msgspec.DecodeError):
        header = msgspec.json.decode((segment or b"").partition(b"\n")[0])
        if isinstance(header, dict):
            return header
    return {}


def _writer(segment: bytes | None) -> str:
    """The writer of a segment, if it can be read."""
    return str(_header(segment).get("by", ""))


def _apply(state: SweepState, key: str, lines: bytes) -> None:
    """Apply the events in `lines` to a state, in chunks. Raises LedgerDamaged."""
    start = 0
    # Garbage collection would take a third of the time and free nothing.
    was_on = gc.isenabled()
    gc.disable()
    try:
        while start < len(lines):
            end = lines.find(b"\n", start + _CHUNK) + 1 or len(lines)
            for event in _decoder.decode_lines(lines[start:end]):
                state.apply(event)
            start = end
    except msgspec.DecodeError as error:
        raise LedgerDamaged(
            f"{key} cannot be read ({error}), unless a newer batchml wrote it"
        ) from error
    finally:
        if was_on:
            gc.enable()
