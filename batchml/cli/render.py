"""Render runs as text and JSON, tables that fit a window, and text that is safe to print."""

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from batchml.cli.terminal import Screen, kind_of, paint, screen
from batchml.model.names import duration as duration
from batchml.model.numbering import shown_id
from batchml.model.run import Run, classify

RULE = "=" * 80  # a horizontal rule


def timestamp(ms: int) -> str:
    """`2026-11-21T19:02:57.076Z`"""
    seconds, rest = divmod(ms, 1000)
    return f"{_format_second(seconds)}.{rest:03d}Z"


def time_json(ms: int | None) -> str | None:
    """A time in JSON output: ISO 8601, in UTC; None for a time that is not known."""
    return None if ms is None else timestamp(ms)


@lru_cache(maxsize=16)  # cached: thousands of lines may have the same second
def _format_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def job_title(run: Run) -> str:
    return f"Job [{run.name} - {shown_id(run)}]"


def printable(text: str) -> str:
    """Remove what could move a terminal's cursor, change its title or reorder its text."""
    if text.isprintable():
        return text
    # Carriage returns of a progress bar: keep what a terminal would show, the text after the last.
    text = text.rstrip("\r").rpartition("\r")[2]
    return "".join(char if char == "\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}"
                   for char in text)  # fmt: skip


_SGR = r"\x1b\[([0-9;:]*)m"  # ECMA-48: Select Graphic Rendition
_SIZES = {"5": 3, "2": 5}  # parameters of a colour: 38;5;INDEX and 38;2;RED;GREEN;BLUE


def output_line(text: str, *, colour: bool) -> str:
    """Make a line of a program's output printable on a terminal, with its colours if wanted.

    Colours and other attributes end with the line. Text that a program conceals is shown.
    """
    if "\x1b[" not in text:
        return printable(text)
    parts = re.split(_SGR, text.rstrip("\r").rpartition("\r")[2])  # text, parameters, text, ...
    for index in range(1, len(parts), 2):
        is_wanted = colour and not _conceals(parts[index].split(";"))
        parts[index] = f"\x1b[{parts[index]}m" if is_wanted else ""
    parts[::2] = map(printable, parts[::2])
    return "".join(parts) + ("\x1b[0m" if colour else "")


def without_colours(text: str) -> str:
    """A line of a program's output as a person reads it."""
    return re.sub(_SGR, "", text)


def _conceals(codes: list[str]) -> bool:
    while codes:
        if codes[0].lstrip("0") == "8":
            return True
        is_colour = codes[0] in ("38", "48", "58")
        codes = codes[_SIZES.get(codes[1] if codes[1:] else "", 1) if is_colour else 1 :]
    return False


def run_json(run: Run) -> dict[str, Any]:
    """Return a run for --json: AWS's fields have AWS's names."""
    fields: dict[str, Any] = {
        "jobId": run.job_id,
        "jobName": run.job_name or run.name,
        "name": run.name,
        "jobQueue": run.queue,
        "status": run.status.value,
        "statusReason": run.status_reason or None,
        "createdAt": time_json(run.created_at),
        "startedAt": time_json(run.started_at),
        "stoppedAt": time_json(run.stopped_at),
        "exitCode": run.exit_code,
        "attempts": len(run.attempts),
    }
    if run.status.is_terminal:
        fields["class"] = classify(run).outcome.value
    return fields


# Columns that a narrow window leaves out, the least important first.
_OPTIONAL = (
    "LIMITS", "PRIORITY", "TAGS", "PARAMS", "COMMIT", "JOB", "CODE", "RAN", "QUEUE", "CLASS", "AGE",
)  # fmt: skip
_MIN_WIDTH = 8  # cells to which a column may be cut
_MIN_NAME_WIDTH = 12  # cells to which a name may be cut


def table(
    rows: Sequence[Sequence[str]], target: Screen | None = None, *, keep: bool = False
) -> str:
    """Align the columns of the rows; the first row is the heading.

    `target` is by default stdout. In a window, columns are left out, unless `keep` is set, and long
    cells are cut so that no line wraps, and words such as FAILED have colours.
    """
    width, colour = target or screen()
    columns = [list(column) for column in zip(*rows, strict=True)]
    if width:
        columns = _cut_all(columns, width) if keep else _fit(columns, width)
    widths = list(map(_column_width, columns))
    padded = (
        [pad(cell, size) for cell in column] for column, size in zip(columns, widths, strict=True)
    )
    heading, *others = zip(*padded, strict=True)
    lines = ["  ".join(map(_paint_state, row) if colour else row).rstrip() for row in others]
    top = "  ".join(heading).rstrip()
    return "\n".join([paint(top, "strong") if colour else top, *lines])


def _fit(columns: list[list[str]], width: int) -> list[list[str]]:
    """Fit the columns into a window.

    These steps are taken until they fit: leave out empty columns, cut long names, leave out the
    columns of `_OPTIONAL`, then the last ones, and cut all long cells to one width.
    """
    empty = [column[0] for column in columns if not any(column[1:])]
    for name in (*empty, "", *_OPTIONAL):
        if _row_width(columns) <= width:
            return columns
        if not name:
            columns = cut_names(columns, width)
        columns = [column for column in columns if column[0] != name or not name] or columns
    while len(columns) > 1 and _row_width(columns, _MIN_WIDTH) > width:
        columns = columns[:-1]
    return _cut_all(columns, width)


def _cut_all(columns: list[list[str]], width: int) -> list[list[str]]:
    """Cut all long cells to one width, so that the columns fit into a window."""
    limit = max(map(_column_width, columns))
    while limit > _MIN_WIDTH and _row_width(columns, limit) > width:
        limit -= 1
    return [[cut(cell, limit) for cell in column] for column in columns]


def cut_names(columns: list[list[str]], width: int) -> list[list[str]]:
    """Cut the names of runs, so that one long name does not cost all runs a column.

    Names in the first column identify their rows, and stay.
    """
    excess = _row_width(columns) - width
    return [
        [cut(cell, max(_MIN_NAME_WIDTH, _column_width(column) - excess)) for cell in column]
        if number and column[0] == "NAME" and excess > 0
        else column
        for number, column in enumerate(columns)
    ]


def narrow_columns(
    rows: Sequence[Sequence[str]], width: int, gives_way: Sequence[str]
) -> list[list[str]]:
    """Leave out empty columns after the first two, and columns that a window has no room for.

    `gives_way` names the columns that may be left out for room, the least important first.
    """
    kept = [i for i, name in enumerate(rows[0]) if i < 2 or any(row[i] for row in rows[1:])]
    for name in ("", *gives_way):
        kept = [i for i in kept if rows[0][i] != name]
        columns = [[row[i] for row in rows] for i in kept]
        columns = cut_names(columns, width) if width else columns
        narrowed = [list(row) for row in zip(*columns, strict=True)]
        if not width or max(map(cells, table(narrowed, Screen()).splitlines())) <= width:
            break
    return narrowed


def _paint_state(cell: str) -> str:
    """Colour a cell that is a state, or the state of an array: `2 RUNNING, 4/6 done`."""
    word = cell.rstrip()
    kind = kind_of(word) or kind_of(word.partition(",")[0].rpartition(" ")[2])
    return paint(word, kind) + cell[len(word) :]


def _column_width(column: Sequence[str]) -> int:
    return max(map(cells, column))


def _row_width(columns: Sequence[Sequence[str]], limit: int = sys.maxsize) -> int:
    """Return the width of a row if each column is cut to `limit` cells."""
    return sum(min(limit, _column_width(column)) for column in columns) + 2 * (len(columns) - 1)


def cells(text: str) -> int:
    """Count the terminal cells of a text."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def pad(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def cut(text: str, width: int) -> str:
    """Shorten a text to `width` cells; the last of them is an ellipsis."""
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    kept = text[: width - 1]
    while cells(kept) > width - 1:
        kept = kept[:-1]
    return kept.rstrip() + "\u2026"
