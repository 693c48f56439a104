"""The result of the embedded server's check that a log is unchanged since its run wrote it.

The server sends the result in an HTTP header of the answer to GetLogEvents. An answer to
FilterLogEvents has a header for all logs that it named.
"""

import json
from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct

HEADER = "x-batchml-log"
HEADER_OF_MANY = "x-batchml-logs"


class LogState(StrEnum):
    COMPLETE = "complete"  # it is unchanged
    CUT = "cut"  # its last lines are missing
    CHANGED = "changed"  # some of its lines differ
    ADDED = "added"  # it is complete, with more lines after it
    GONE = "gone"  # its file was deleted
    UNPROVEN = "unproven"  # the server has no record of the run's output
    UNCHECKED = "unchecked"  # the server has not checked all of it yet: read on


class LogCheck(Struct, frozen=True, omit_defaults=True):
    """The result of a check. Lines are numbered from 1."""

    state: LogState
    lines: int = 0  # the number of lines that the run wrote
    found: int = 0  # for CUT: the number of lines that are left
    first: int = 0  # the first difference is at this line or later,
    last: int = 0  # and at this line or earlier
    why: str = ""  # the reason for UNPROVEN
    file: str = ""  # the path of the log's file

    @property
    def is_final(self) -> bool:
        return self.state is not LogState.UNCHECKED

    @property
    def is_damaged(self) -> bool:
        """Whether the log differs from the run's output."""
        return self.state in (LogState.CUT, LogState.CHANGED, LogState.ADDED, LogState.GONE)

    @property
    def is_complete(self) -> bool | None:
        """Whether the log is unchanged; None if that is unknown."""
        if self.state is LogState.COMPLETE:
            return True
        return False if self.is_damaged else None

    def to_header(self) -> str:
        return json.dumps(msgspec.to_builtins(self))  # only ASCII, unlike JSON of msgspec

    def describe(self, child: str = "") -> str:
        """Explain to a user that a log is not complete; "" for a complete log.

        `child` names the log among several.
        """
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


def parse_header(text: str | None) -> LogCheck | None:
    """Parse the header; None if there is none, or if another program wrote it."""
    try:
        return None if text is None else msgspec.json.decode(text, type=LogCheck)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def to_header_of_many(checks: Sequence[LogCheck | None]) -> str:
    """The header for many logs: the number of lines of each complete one. The other logs have to
    be read one by one.
    """
    return json.dumps([check.lines if check and check.is_complete else None for check in checks])


def parse_header_of_many(text: str | None) -> list[LogCheck | None] | None:
    """Parse the header for many logs; None if there is none, or if another program wrote it."""
    try:
        found = None if text is None else msgspec.json.decode(text, type=list[int | None])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    if found is None:
        return None
    return [None if lines is None else LogCheck(LogState.COMPLETE, lines) for lines in found]


def _count(lines: int) -> str:
    return f"{lines} line{'' if lines == 1 else 's'}"


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first} to {last}"
