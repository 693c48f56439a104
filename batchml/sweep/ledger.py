"""The ledger: what happened in a sweep, in segments that are each written once and whole.

A segment's number is taken by creating it. Whoever finds the next number taken learns that another
controller goes on with the sweep, and ends: the number is the fence. From time to time all segments
become one pack, and are deleted; a reader takes the newest pack and the segments after it.

A segment begins with a line that says who wrote it, then has one event a line. A last line without
its end was torn, on a disk that lost power, and does not count. Only the last segment can have been
torn so: whoever goes on after it says in its own first line that it knows. Anything else that does
not read to its end is damage, and no trial is lost in silence.
"""

import gc
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from batchml.errors import BatchmlError
from batchml.runtime.storage.store import Store, StoreError
from batchml.sweep.events import Event
from batchml.sweep.many import get_many
from batchml.sweep.state import SweepState

PACK_AFTER = 50  # segments
_PACK_AT_MOST = 500  # segments: one GET each, for whoever reads
_LOG, _PACKS = "log/", "packs/"
_TRIES = 10  # of one look at the board, while a writer packs

_TORN = "torn"  # in a first line: the segment before is known to lack its tail
_CHUNK = 1 << 20  # bytes that are decoded at a time
_NAME = re.compile(r"(\d{9})\.jsonl")

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Fenced(BatchmlError):
    """Another controller goes on with this sweep."""

    def __init__(self, by: str = "") -> None:
        super().__init__(
            f"Another controller goes on with this sweep{f': {by}' if by else ''}. This one ends; "
            "nothing is lost, and trials that run go on."
        )


class DamagedLedger(BatchmlError):
    """A part of the ledger is missing or cannot be read."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The sweep's ledger is damaged: {what}. Put the file back from a copy of the folder "
            "or bucket, or start a new sweep."
        )


class Ledger:
    """The ledger on a board. `by` is written into each segment: who writes.

    Every method raises StoreError when the board cannot be had; the same may then be tried again.
    """

    def __init__(self, board: Store, by: str = "") -> None:
        self._board = board
        self._header: dict[str, object] = {"by": by, "nonce": os.urandom(6).hex()}
        self._last: int | None = None  # after which segment to write; None: not looked at yet
        self._fenced_by: str | None = None
        self._unsure: dict[int, list[bytes]] = {}  # written, perhaps: the answer was lost
        self._base = 0  # the last segment in the newest pack
        self._packed_bytes = 0
        self._new_bytes = 0  # in segments since

    def load(self) -> SweepState:
        """The sweep as it is now. Raises DamagedLedger."""
        state = SweepState()
        self._catch_up(state)
        return state

    def take_over(self) -> SweepState:
        """`load`, and nobody who wrote until now can from here on. For who has taken the lease.

        Raises DamagedLedger; Fenced when others take it over again and again.
        """
        state = SweepState()
        for _ in range(_TRIES):
            self._last = self._fenced_by = None
            self._catch_up(state)
            with suppress(Fenced):
                self.append(())
                return state
        raise Fenced()

    def follow(self, state: SweepState) -> bool:
        """Take into `state` what was written since it was loaded; whether there was anything."""
        before = state.segment
        found: list[bytes] = []
        while (data := self._board.get(_segment(before + len(found) + 1))) is not None:
            found.append(data)
        # Looked at last: where a pack has these numbers, they may be a fenced writer's.
        if self._newest_pack() > before:
            self._catch_up(state)
        for number, data in enumerate(_events(before, found), before + 1):
            if number > state.segment:
                _fold(state, _segment(number), data)
                state.segment = number
        return state.segment > before

    def append(self, events: Iterable[Event]) -> None:
        """Write one segment; on return it is durable. The caller folds the events itself.

        Raises Fenced, each time from then on, when another has written since this one loaded it
        first, took it over or appended. After a StoreError nobody knows whether the segment was
        written: appending the same events again, alone or with others, is safe.
        """
        if self._fenced_by is not None:
            raise Fenced(self._fenced_by)
        if self._last is None:
            self._last = max(self._newest_pack(), *self._numbers(_LOG), 0)
            self._knows_torn(self._last, self._board.get(_segment(self._last)))
        lines = [_encoder.encode(each) for each in (self._header, *events)]
        data = b"\n".join(lines) + b"\n"
        while not self._write(self._last + 1, data):
            self._last += 1  # what seemed lost had arrived
        self._last += 1
        self._unsure.clear()
        self._new_bytes += len(data)
        if self._is_pack_due():
            with suppress(StoreError):  # the next one may do it
                self.pack()

    def pack(self) -> None:
        """Make one of all segments. At any point of it another may read, or this be killed."""
        base, old, segments = self._read()
        number = base + len(segments)
        if not segments:
            return
        data = b"".join([old, *_events(base, segments)])
        self._board.put(_pack(number), data)
        self._base, self._packed_bytes, self._new_bytes = number, len(data), 0
        packs = [_pack(each) for each in self._numbers(_PACKS) if each < number]
        logs = [_segment(each) for each in self._numbers(_LOG) if each <= number]
        self._board.delete(*packs, *logs)

    def _write(self, number: int, data: bytes) -> bool:
        """Take a number. False where an earlier segment of ours has it. Raises Fenced."""
        key = _segment(number)
        tried = self._unsure.setdefault(number, [])
        tried.append(data)
        found = data if self._board.create(key, data) else self._board.get(key)
        # Where all up to some number were packed and deleted, one of those can be taken again.
        if found is None or found not in tried or self._newest_pack() >= number:
            self._fenced_by = _writer(found)
            raise Fenced(self._fenced_by)
        return found == data

    def _is_pack_due(self) -> bool:
        """Often while it is small; what has grown is not written anew for every few segments."""
        count = (self._last or 0) - self._base
        has_grown = self._new_bytes * 4 >= self._packed_bytes
        return count >= PACK_AFTER and (has_grown or count >= _PACK_AT_MOST)

    def _catch_up(self, state: SweepState) -> None:
        base, packed, segments = self._read()
        self._base, self._packed_bytes = base, len(packed)
        self._new_bytes = sum(map(len, segments))
        if base > state.segment:  # from its start: what is known already changes nothing
            _fold(state, _pack(base), packed)
            state.segment = base
        for number, data in enumerate(_events(base, segments), base + 1):
            if number > state.segment:
                _fold(state, _segment(number), data)
                state.segment = number
        if self._last is None:  # who only looks on later does not become the writer again
            self._last = state.segment
            self._knows_torn(self._last, segments[-1] if segments else None)

    def _knows_torn(self, number: int, segment: bytes | None) -> None:
        """Say from now on that the segment before the next lacks its tail, if it does."""
        self._header.pop(_TORN, None)
        if segment is not None and not segment.endswith(b"\n"):
            self._header[_TORN] = number

    def _read(self) -> tuple[int, bytes, list[bytes]]:
        """The number and content of the newest pack, and all segments after it."""
        lacking = 0
        for _ in range(_TRIES):
            base = self._newest_pack()
            numbers = sorted(each for each in self._numbers(_LOG) if each > base)
            keys = [_pack(base)] if base else []
            found = get_many(self._board, [*keys, *map(_segment, numbers)])
            whole = [data for data in found if data is not None]
            if self._newest_pack() != base or len(whole) < len(found):
                continue  # it was packed meanwhile
            lacking = next((n for n, has in enumerate(numbers, base + 1) if n != has), 0)
            if not lacking:
                packed, segments = (whole[0], whole[1:]) if base else (b"", whole)
                if packed and not packed.endswith(b"\n"):
                    raise DamagedLedger(f"{_pack(base)} breaks off")
                return base, packed, segments
        if not lacking:
            raise StoreError("the sweep's ledger is packed again and again", temporary=True)
        raise DamagedLedger(f"{_segment(lacking)} is missing")

    def _newest_pack(self) -> int:
        return max(self._numbers(_PACKS), default=0)

    def _numbers(self, prefix: str) -> list[int]:
        names = (key.removeprefix(prefix) for key in self._board.keys(prefix))
        return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _segment(number: int) -> str:
    return f"{_LOG}{number:09d}.jsonl"


def _pack(number: int) -> str:
    return f"{_PACKS}{number:09d}.jsonl"


def _events(before: int, segments: Sequence[bytes]) -> list[bytes]:
    """The whole lines of segments that follow each other, without the first line of each; the first
    segment is number `before` + 1. Raises DamagedLedger."""
    found = []
    for number, segment in enumerate(segments, before + 1):
        after = segments[number - before : number - before + 1]
        is_torn = not segment.endswith(b"\n")
        if is_torn and after and _header(after[0]).get(_TORN) != number:
            raise DamagedLedger(f"{_segment(number)} breaks off, and others follow it")
        if b"\n" in segment and not _header(segment):
            raise DamagedLedger(f"{_segment(number)} does not begin as one does")
        found.append(segment[segment.find(b"\n") + 1 : segment.rfind(b"\n") + 1])
    return found


def _header(segment: bytes | None) -> dict[str, object]:
    """What the first line of a segment says; nothing where it cannot be read."""
    with suppress(msgspec.DecodeError):
        found = msgspec.json.decode((segment or b"").partition(b"\n")[0])
        if isinstance(found, dict):
            return found
    return {}


def _writer(segment: bytes | None) -> str:
    """Who wrote a segment, if that can be read."""
    return str(_header(segment).get("by", ""))


def _fold(state: SweepState, key: str, lines: bytes) -> None:
    """Take lines into a state, some at a time. Raises DamagedLedger."""
    start = 0
    # Nothing here is garbage in a circle, and looking for some takes a third of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        while start < len(lines):
            end = lines.find(b"\n", start + _CHUNK) + 1 or len(lines)
            for event in _decoder.decode_lines(lines[start:end]):
                state.fold(event)
            start = end
    except msgspec.DecodeError as error:
        raise DamagedLedger(
            f"{key} cannot be read ({error}), unless a newer batchml wrote it"
        ) from error
    finally:
        if was_on:
            gc.enable()
