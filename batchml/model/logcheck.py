"""Whether a log is still as its run wrote it, as the embedded server has checked.

The server sends it with the events, in an HTTP header that AWS does not have.
"""

import json
from enum import StrEnum

import msgspec
from msgspec import Struct

HEADER = "x-batchml-log"


class LogState(StrEnum):
    COMPLETE = "complete"  # it holds what was written, and nothing else
    CUT = "cut"  # its last lines are missing
    CHANGED = "changed"  # something in it differs
    ADDED = "added"  # all that was written is there, and more after it
    GONE = "gone"  # its file was deleted
    UNPROVEN = "unproven"  # nobody knows what was written
    UNCHECKED = "unchecked"  # not checked so far: read on


class LogCheck(Struct, frozen=True, omit_defaults=True):
    """Lines are numbered from 1, as users are shown them."""

    state: LogState
    lines: int = 0  # that were written
    found: int = 0  # of a log that was cut: lines that are there
    first: int = 0  # the first line that may differ
    last: int = 0  # the first line that differs is not behind this one
    why: str = ""  # of one that is UNPROVEN
    file: str = ""

    @property
    def is_final(self) -> bool:
        return self.state is not LogState.UNCHECKED

    @property
    def is_damaged(self) -> bool:
        """True where the log is known not to be what its run wrote."""
        return self.state in (LogState.CUT, LogState.CHANGED, LogState.ADDED, LogState.GONE)

    @property
    def is_complete(self) -> bool | None:
        """None where nobody knows."""
        if self.state is LogState.COMPLETE:
            return True
        return False if self.is_damaged else None

    def to_header(self) -> str:
        return json.dumps(msgspec.to_builtins(self))  # in ASCII

    def describe(self, child: str = "") -> str:
        """What to tell a user of a log that is not complete; `child` names it among others."""
        log = f"log of {child}" if child else "log"
        changed = f"This file was changed after it was written: {self.file}"
        match self.state:
            case LogState.CUT:
                return f"The {log} is not complete: {self._missing()}. {changed}"
            case LogState.CHANGED:
                return f"The {log} is not what the run wrote: {self._difference()}. {changed}"
            case LogState.ADDED:
                added = f"something was added after {_count(self.lines)}"
                return f"The {log} is not what the run wrote: {added}. {changed}"
            case LogState.GONE:
                deleted = f"This file with {_count(self.lines)} was deleted: {self.file}"
                return f"The {log} is not complete: it is gone. {deleted}"
            case LogState.UNPROVEN:
                return f"Nothing proves that the {log} is complete: {self.why}"
            case _:
                return ""

    def _missing(self) -> str:
        if self.found >= self.lines:
            return f"{_count(self.lines)} are there, but not all that batchml wrote after them"
        missing = f"line {self.found + 1} of {self.lines} is missing"
        if self.first <= self.found:
            missing += f", and {_lines(self.first, self.found)} may differ from what was written"
        return missing

    def _difference(self) -> str:
        if self.first > self.lines:
            return f"it differs after {_count(self.lines)}"
        if self.first >= self.last:
            return f"it differs at line {self.first} of {self.lines}"
        return f"the first difference is among {_lines(self.first, self.last)} of {self.lines}"


def read_header(text: str | None) -> LogCheck | None:
    """None where the service has sent no such header, or another one."""
    try:
        return None if text is None else msgspec.json.decode(text, type=LogCheck)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def _count(lines: int) -> str:
    return f"{lines} line{'' if lines == 1 else 's'}"


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"
