"""Runs as text and JSON, tables, and text that is safe for a terminal."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from batchml.cli.terminal import Screen, kind_of, paint, screen
from batchml.cli.terminal import sparkline as sparkline
from batchml.model.names import duration as duration
from batchml.model.names import short_id
from batchml.model.outcome import describe_children, describe_outcome
from batchml.model.run import Run, classify, describe_state

RULE = "=" * 80


def timestamp(ms: int) -> str:
    """`2026-11-21T19:02:57.076Z`"""
    whole, rest = divmod(ms, 1000)
    return f"{_second(whole)}.{rest:03d}Z"


@lru_cache(maxsize=16)  # cached: thousands of lines may have the same second
def _second(whole: int) -> str:
    return datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def job_title(run: Run) -> str:
    return f"Job [{run.name} - {run.job_id}]"


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor, change its title or reorder what is read."""
    # Carriage returns of a progress bar: a terminal would show the last text.
    if text.isprintable():
        return text
    text = text.rstrip("\r").rpartition("\r")[2]
    return "".join(char if char == "\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}"
                   for char in text)  # fmt: skip


def run_json(run: Run) -> dict[str, Any]:
    """A run as JSON: AWS's names for AWS's fields, our own for the rest."""
    found: dict[str, Any] = {
        "jobId": run.job_id,
        "jobName": run.job_name or run.name,
        "name": run.name,
        "jobQueue": run.queue,
        "status": run.status.value,
        "statusReason": run.status_reason or None,
        "createdAt": run.created_at,
        "startedAt": run.started_at,
        "stoppedAt": run.stopped_at,
        "exitCode": run.exit_code,
        "attempts": len(run.attempts),
    }
    if run.status.is_terminal:
        found["class"] = classify(run).outcome.value
    return found


def run_rows(runs: Sequence[Run], now_ms: int) -> list[list[str]]:
    """Table rows of `ls`, with a heading."""
    rows = [["ID", "NAME", "QUEUE", "STATUS", "CLASS", "CODE", "AGE", "RAN"]]
    for run in runs:
        outcome = classify(run) if run.status.is_terminal else None
        end = [outcome.outcome.value, str(outcome.exit_code)] if outcome else ["", ""]
        age = duration((now_ms - run.created_at) / 1000) if run.created_at else ""
        first = [short_id(run.job_id), run.name, run.queue, describe_state(run)]
        rows.append([*first, *end, age, _ran(run, now_ms)])
    return rows


def _ran(run: Run, now_ms: int) -> str:
    if not run.started_at:
        return ""
    return duration(((run.stopped_at or now_ms) - run.started_at) / 1000)


# Columns that a narrow window leaves out, in this order.
_LESS = (
    "LIMITS", "PRIORITY", "TAGS", "PARAMS", "COMMIT", "JOB", "CODE", "RAN", "QUEUE", "CLASS", "AGE",
)  # fmt: skip
_LEAST = 8  # cells of a column that is cut
_NAME = 12  # cells of a name that is cut


def table(rows: Sequence[Sequence[str]], on: Screen | None = None) -> str:
    """The rows with aligned columns; the first row is the heading.

    `on` is stdout unless given. In a window some columns are left out and long cells cut, so that
    no line wraps; words such as FAILED have colours there.
    """
    width, colour = on or screen()
    columns = [list(column) for column in zip(*rows, strict=True)]
    if width:
        columns = _fitted(columns, width)
    padded = [[pad(cell, _column_width(column)) for cell in column] for column in columns]
    heading, *others = zip(*padded, strict=True)
    lines = ["  ".join(map(_painted, row) if colour else row).rstrip() for row in others]
    top = "  ".join(heading).rstrip()
    return "\n".join([paint(top, "strong") if colour else top, *lines])


def _fitted(columns: list[list[str]], width: int) -> list[list[str]]:
    """The columns with shorter names, then without the least important columns, then with shorter
    cells.

    Empty columns go first, then those of `_LESS`, then the last ones. Long cells are cut together,
    so that neighbours keep equal widths.
    """
    empty = [column[0] for column in columns if not any(column[1:])]
    for name in (*empty, "", *_LESS):
        if _row_width(columns) <= width:
            return columns
        if not name:
            columns = shorter_names(columns, width)
        columns = [column for column in columns if column[0] != name or not name] or columns
    while len(columns) > 1 and _row_width(columns, _LEAST) > width:
        columns = columns[:-1]
    most = max(map(_column_width, columns))
    while most > _LEAST and _row_width(columns, most) > width:
        most -= 1
    return [[cut(cell, most) for cell in column] for column in columns]


def shorter_names(columns: list[list[str]], width: int) -> list[list[str]]:
    """Cut long names of runs first: one would cost all others a column.

    A name in the first column identifies its row, and stays.
    """
    over = _row_width(columns) - width
    return [
        [cut(cell, max(_NAME, _column_width(column) - over)) for cell in column]
        if place and column[0] == "NAME" and over > 0
        else column
        for place, column in enumerate(columns)
    ]


def narrow_columns(
    rows: Sequence[Sequence[str]], width: int, gives_way: Sequence[str]
) -> list[list[str]]:
    """Leave out empty columns, and columns for which a window of `width` has no room.

    `gives_way`: the columns that may be left out, the least important first.
    """
    kept = [i for i, name in enumerate(rows[0]) if i < 2 or any(row[i] for row in rows[1:])]
    for name in ("", *gives_way):
        kept = [i for i in kept if rows[0][i] != name]
        columns = [[row[i] for row in rows] for i in kept]
        columns = shorter_names(columns, width) if width else columns
        found = [list(row) for row in zip(*columns, strict=True)]
        if not width or max(map(cells, table(found, Screen()).splitlines())) <= width:
            break
    return found


def _painted(cell: str) -> str:
    word = cell.rstrip()
    # Of an array's state its word: `2 RUNNING, 4/6 done`; of what cannot be cut, all of it.
    kind = kind_of(word) or kind_of(word.partition(",")[0].rpartition(" ")[2])
    return paint(word, kind) + cell[len(word) :]


def _column_width(column: Sequence[str]) -> int:
    return max(map(cells, column))


def _row_width(columns: Sequence[Sequence[str]], most: int = sys.maxsize) -> int:
    """The width of a row where no column is wider than `most`."""
    return sum(min(most, _column_width(column)) for column in columns) + 2 * (len(columns) - 1)


def cells(text: str) -> int:
    """The number of terminal cells of a text."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def pad(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def cut(text: str, width: int) -> str:
    """The start of a text, and an ellipsis."""
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    kept = text[: width - 1]
    while cells(kept) > width - 1:
        kept = kept[:-1]
    return kept.rstrip() + "\u2026"


def children(run: Run) -> str:
    """`2 FAILED, 40 SUCCEEDED, 958 RUNNABLE of 1000` for an array; empty for any other run."""
    return describe_children(run)


def verdict(run: Run) -> str:
    """One sentence about the outcome of a run, without control characters."""
    return printable(describe_outcome(run))
