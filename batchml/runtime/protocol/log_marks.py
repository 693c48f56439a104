"""Lines of a log: split output into lines that CloudWatch Logs accepts, write and read marks.

A mark is a line `::batchml KIND ...` that the runtime writes for batchml's clients.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping

# Bytes of one log event: 256 KiB, less the 26 that CloudWatch Logs adds for each, less one.
MAX_LINE = 262_117

MARK = "::batchml "  # begins lines that clients read and do not print
_MARK = MARK.encode()
_MARKS = (
    r"::batchml (?="
    r"host |"
    r"end code=[0-9]{1,3} lines=[0-9]{1,15}(?: by=runtime)?$|"
    r"metrics \[.*\]$|"
    r"usage (?:[a-z_]{1,20}=[0-9]{1,12}(?:\.[0-9]{1,3})?(?: |$))+$|"
    r"ranks (?:[0-9]{1,6}=[a-z_0-9.,:]{1,200}(?: |$))+$|"
    r"idle .{1,2000}$"
    r")(\w+) (.*)$"
)

# Bytes of a mark with metrics: far below the limit of an event, and quick to read.
MAX_METRICS = 100_000
# A point is `{"step": 3, "total": 10, "time": 1764..., "loss": 0.5}`. A program's metrics cannot
# have these three names.
STEP, TOTAL, TIME = "step", "total", "time"
_FINITE_ONLY = (STEP, TOTAL, TIME)  # their values are left out unless they are finite
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
MAX_METRIC_NAME = 100  # characters
MAX_WAITS = 500  # characters of the text of an idle attempt
MAX_RANKS = 64  # ranks of one node in a mark
# `name:value` in a mark with the usage of ranks.
_FIGURE = r"([a-z_]{1,20}):([0-9]{1,18}(?:\.[0-9]{1,3})?)"


# A line that the embedded AWS Batch writes after the end mark, which does not count it.
NEEDED_MEMORY = "batchml: a process of this job was killed: it needed more memory"


class LineSplitter:
    """Splits a stream of bytes into lines without newline, none longer than MAX_LINE.

    An empty line becomes one space, because CloudWatch Logs would drop an empty event.
    With `escape`, lines that look like marks get a space in front, so that a program cannot forge
    marks.
    """

    def __init__(self, escape: bool = False) -> None:
        self._rest = b""
        self._escape = escape

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the lines that are complete."""
        if b"\n" not in data and len(self._rest) + len(data) <= MAX_LINE:
            self._rest += data
            return []
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()
        lines = [piece for part in parts for piece in _pieces(part)]
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return self._escaped(lines)

    def progress(self) -> list[bytes]:
        """The current text of a progress bar as a line; empty without a bar.

        A bar rewrites its line with carriage returns, and may not end it for hours.
        """
        if b"\r" not in self._rest:
            return []
        texts = [text for text in self._rest.split(b"\r") if text.strip()]
        self._rest = b""
        return self._escaped(texts[-1:])

    def finish(self) -> list[bytes]:
        """The last line, if the stream does not end with a newline."""
        rest, self._rest = self._rest, b""
        return self._escaped(_pieces(rest)) if rest else []

    def _escaped(self, lines: list[bytes]) -> list[bytes]:
        if not self._escape:
            return lines
        return [b" " + line if line.startswith(_MARK) else line for line in lines]


def _pieces(line: bytes) -> list[bytes]:
    if len(line) <= MAX_LINE:
        return [line or b" "]
    return [line[start : start + MAX_LINE] for start in range(0, len(line), MAX_LINE)]


# The end of a line that stands for a traceback; clients look for the traceback of that rank.
SAME_TRACEBACK = " (the same traceback as rank {} above)"
LAST_LINES = "its last lines were:"  # ends a line of the main node; a rank of another node follows


def error_line(error: BaseException, most: int = 300) -> str:
    """An error's text as one line of at most `most` characters; without a text, its class."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def end_mark(code: int, lines: int, by_runtime: bool = False) -> str:
    """The last line of an attempt: its exit code, and the number of lines before this one.

    `by_runtime`: the exit code is one of exit_codes.py, not the program's.
    """
    return f"{MARK}end code={code} lines={lines}{' by=runtime' if by_runtime else ''}"


def metrics_marks(points: Iterable[Mapping[str, float]]) -> list[str]:
    """Marks with these points, in order, none longer than MAX_METRICS bytes."""
    marks: list[str] = []
    texts: list[str] = []
    size = 0
    for text in map(encode_point, points):
        if texts and size + len(text) > MAX_METRICS - 100:
            marks.append(f"{MARK}metrics [{', '.join(texts)}]")
            texts, size = [], 0
        texts.append(text)
        size += len(text) + 2
    return [*marks, f"{MARK}metrics [{', '.join(texts)}]"] if texts else marks


def encode_point(point: Mapping[str, float]) -> str:
    """A point as JSON in ASCII. NaN and infinity become texts, because JSON does not have them."""
    plain = {
        name: value if math.isfinite(value) else str(float(value)) for name, value in point.items()
    }
    return json.dumps(plain)


def read_points(text: str) -> list[dict[str, float]]:
    """The points of a mark with metrics, from the text that `parse_mark` returns.

    Invalid points are left out, because any program may print a mark.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    points = map(_valid_point, found) if isinstance(found, list) else []
    return [point for point in points if point]


def read_point(line: bytes) -> dict[str, float]:
    """The point in a line of the metrics file; empty without a valid point."""
    try:
        return _valid_point(json.loads(line))
    except (ValueError, RecursionError):
        return {}


def _valid_point(found: object) -> dict[str, float]:
    """The valid values of a point, by their names."""
    if not isinstance(found, dict):
        return {}
    point = {}
    for name, value in found.items():
        if isinstance(value, str):
            value = _NOT_FINITE.get(value)
        if not 0 < len(name) <= MAX_METRIC_NAME or not _is_number(value):
            continue
        if math.isfinite(value) or name not in _FINITE_ONLY:
            point[name] = value
    return point


def _is_number(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 1 << 63  # a larger number may be too large for a float
    return isinstance(value, float)


def usage_mark(sample: Mapping[str, float]) -> str:
    """The current usage of an attempt: `cpu` in cores, `cores` as its limit, `memory` in MiB, `gpu`
    in percent, `gpu_memory` in MiB, `net_in` and `net_out` in bytes a second, and `idle`, the
    seconds for which it has done nothing; since its start `staging` and `io_wait`, the seconds in
    which it waited for data sets and disks, and `data_wait`, their percentage. At its end also that
    of the whole attempt: `seconds`, `mean_cpu`, `mean_gpu`, `most_memory`.
    """
    return f"{MARK}usage {' '.join(f'{name}={_short(value)}' for name, value in sample.items())}"


def idle_mark(waits: str) -> str:
    """What the processes of an idle attempt wait for. Its `usage` mark has `idle`, the seconds."""
    return f"{MARK}idle {' '.join(waits.split())[:MAX_WAITS]}"


def ranks_mark(ranks: Mapping[int, Mapping[str, float]]) -> str:
    """The usage of each rank of a node, its `step`, and the percent of time it `waited` for other
    ranks: `ranks 4=cpu:0.97,memory:812,step:120,waited:3.1 5=...`. At most 64 ranks.
    """
    words = []
    for rank in sorted(ranks)[:MAX_RANKS]:
        valid = ((name, value) for name, value in ranks[rank].items() if 0 <= value < 1e15)
        figures = (f"{name}:{_short(value)}" for name, value in valid)
        words.append(f"{rank}={','.join(figures)}")
    return f"{MARK}ranks {' '.join(words)}"


def read_ranks(words: Mapping[str, str]) -> dict[int, dict[str, float]]:
    """Rank -> figures, from the pairs that `parse_mark` returns for a `ranks` mark."""
    return {
        int(rank): {name: float(value) for name, value in re.findall(_FIGURE, figures)}
        for rank, figures in words.items()
        if rank.isdigit()
    }


def _short(value: float) -> str:
    """A number with at most two decimals. Adding 0.0 turns -0.0 into 0: a mark has no minus."""
    return f"{value + 0.0:.2f}".rstrip("0").rstrip(".")


def parse_mark(message: str) -> tuple[str, dict[str, str]] | None:
    """The kind and values of a mark, such as `("end", {"code": "0", "lines": "12"})`; else None.

    For metrics it is `("metrics", {"points": "[...]"})`, which `read_points` reads, and for an idle
    attempt `("idle", {"waits": "rank 1 waits to ..."})`.
    """
    # Most lines are no marks, and `startswith` is faster than the expression.
    found = re.match(_MARKS, message) if message.startswith(MARK) else None
    if not found:
        return None
    if found[1] == "metrics":
        return "metrics", {"points": found[2]}
    if found[1] == "idle":
        return "idle", {"waits": found[2]}
    pairs = (word.partition("=") for word in found[2].split(" "))
    return found[1], {key: value for key, _, value in pairs}
