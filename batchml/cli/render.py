"""Nouns -> text and JSON."""

import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from batchml.cli.colour import Screen, kind_of, paint, screen
from batchml.cli.spark import sparkline as sparkline
from batchml.model.names import duration as duration
from batchml.model.names import short_id
from batchml.model.outcome import children_text, describe_outcome
from batchml.model.run import Run, classify, state_text

if TYPE_CHECKING:
    from batchml.ops.metrics import Series

RULE = "=" * 80


def timestamp(ms: int) -> str:
    """`2026-11-21T19:02:57.076Z`"""
    whole, rest = divmod(ms, 1000)
    return f"{_second(whole)}.{rest:03d}Z"


@lru_cache(maxsize=16)  # lines come in floods, thousands of one second
def _second(whole: int) -> str:
    return datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def job_title(run: Run) -> str:
    return f"Job [{run.name} - {run.job_id}]"


def printable(text: str) -> str:
    """Text that cannot move a terminal's cursor, change its title or reorder what is read."""
    # A progress bar's carriage returns: what stands last is what a terminal would show.
    if text.isprintable():
        return text
    text = text.rstrip("\r").rpartition("\r")[2]
    return "".join(char if char == "\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}"
                   for char in text)  # fmt: skip


def run_json(run: Run) -> dict[str, Any]:
    """AWS's names for what AWS names, ours for the rest."""
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
        first = [short_id(run.job_id), run.name, run.queue, state_text(run)]
        rows.append([*first, *end, age, _ran(run, now_ms)])
    return rows


def _ran(run: Run, now_ms: int) -> str:
    if not run.started_at:
        return ""
    return duration(((run.stopped_at or now_ms) - run.started_at) / 1000)


# Columns of tables that a narrow window does without, the first first.
_LESS = (
    "LIMITS", "PRIORITY", "TAGS", "PARAMS", "COMMIT", "JOB", "CODE", "RAN", "QUEUE", "CLASS", "AGE",
)  # fmt: skip
_LEAST = 8  # cells of a column that is cut
_NAME = 12  # cells of a name that is cut


def table(rows: Sequence[Sequence[str]], on: Screen | None = None) -> str:
    """Columns wide enough for their longest cell; the first row is the heading.

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
    """With shorter names, then without the columns that matter least, then with shorter cells.

    Those are empty ones, those of `_LESS`, the last ones. Long cells give way together, so that
    what stands side by side stays as wide.
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
    """Long names of runs give way before anything else: one would cost all the others a column.

    Where the name stands first it is what a row is known by, and stays.
    """
    over = _row_width(columns) - width
    return [
        [cut(cell, max(_NAME, _column_width(column) - over)) for cell in column]
        if place and column[0] == "NAME" and over > 0
        else column
        for place, column in enumerate(columns)
    ]


def _painted(cell: str) -> str:
    word = cell.rstrip()
    # Of an array's state its word: `2 RUNNING, 4/6 done`; of what cannot be cut, all of it.
    kind = kind_of(word) or kind_of(word.partition(",")[0].rpartition(" ")[2])
    return paint(word, kind) + cell[len(word) :]


def _column_width(column: Sequence[str]) -> int:
    return max(map(cells, column))


def _row_width(columns: Sequence[Sequence[str]], most: int = sys.maxsize) -> int:
    """Cells of a row, where no column takes more than `most`."""
    return sum(min(most, _column_width(column)) for column in columns) + 2 * (len(columns) - 1)


def cells(text: str) -> int:
    """How many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def pad(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def cut(text: str, width: int) -> str:
    """The start of a text, and a sign that it goes on."""
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    kept = text[: width - 1]
    while cells(kept) > width - 1:
        kept = kept[:-1]
    return kept.rstrip() + "\u2026"


def metric_lines(series: "Mapping[str, Series]", width: int = 0) -> list[str]:
    """A line a metric: `loss  0.21  (a curve)  0.21 to 2.3, 12 values`; 80 cells unless `width`."""
    names = max((cells(name) for name in map(printable, series)), default=0)
    lines = []
    for each in series.values():
        known = [value for value in each.values if math.isfinite(value)]
        span = f"{min(known):.4g} to {max(known):.4g}, " if len(known) > 1 else ""
        count = len(each.samples)
        words = f"{span}{count} value{'' if count == 1 else 's'}"
        start = f"{pad(printable(each.name), names)}  {each.last:<8.4g}"
        room = (width or 80) - cells(start) - 4
        curve = f"{sparkline(each.values, min(24, room)):<24}" if count > 1 else ""
        line = f"{start}  {curve}"
        lines.append(f"{line}  {words}".rstrip() if len(words) + 26 <= room else line.rstrip())
    return lines


def children(run: Run) -> str:
    """`2 FAILED, 40 SUCCEEDED, 958 RUNNABLE of 1000` for an array; empty for any other run."""
    return children_text(run)


def verdict(run: Run) -> str:
    """One sentence on what a finished run came to, fit for a terminal."""
    return printable(describe_outcome(run))
