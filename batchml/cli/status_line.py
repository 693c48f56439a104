"""The status line of a run in progress, at the bottom of the terminal: its data and its text."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from batchml.cli.render import cells, cut, duration
from batchml.cli.terminal import kind_of, sparkline
from batchml.model.names import idle_text
from batchml.model.run import JobStatus, Run, effective_state, times_of
from batchml.runtime.entry.folders import size_text

HINT = "Ctrl-C detaches"
_DONE, _TO_DO = "\u2501", "\u2500"  # of the bar: heavy and light, distinct without colours
_SPARKLINE_WIDTH, _VALUES_DRAWN = 16, 200  # cells; the newest values of the metric
_GAP = 2  # cells between two parts
_MIN_TEXT_WIDTH = 12  # cells of a text that is cut


class Curve(NamedTuple):
    """The metric that the status line shows; `name` is its name in job.toml."""

    name: str
    values: Sequence[float]
    breaks: Sequence[int] = ()  # as of `sparkline`


class StatusBoard(Struct, frozen=True):
    """The data of the status line. Times are in seconds, of one monotonic clock."""

    title: str
    states: tuple[tuple[str, float], ...] = ()  # (state, when it began), the oldest first
    text: str = ""  # why the run waits, or that contact is lost
    fraction: float | None = None  # of the run that is done, from 0 to 1
    left: float | None = None  # estimated seconds to the end
    children: str = ""
    curve: Curve | None = None
    usage: Mapping[str, float] = {}
    hint: str = HINT


class StatusPart(NamedTuple):
    text: str
    kind: str  # of `terminal.paint`
    rank: int  # a narrow window leaves out the parts with the highest ranks


def add_state(states: tuple[tuple[str, float], ...], run: Run, now: float, clock: float) -> tuple[
    tuple[str, float], ...
]:  # fmt: skip
    """Add the state of `run` to `states`, if it is a new one.

    `now` is the time of day in seconds, `clock` the time of the clock of `states`. AWS says when
    the run was submitted and started. Its clock may differ from ours, so no state may begin in the
    future, or before the preceding state.
    """
    status = effective_state(run)
    if states and states[-1][0] == status:
        return states
    started = run.started_at if status == JobStatus.RUNNING else None
    began = clock if started is None else clock - max(0.0, now - started / 1000)
    if not states and run.created_at:
        submitted = clock - max(0.0, now - run.created_at / 1000)
        if status in (JobStatus.RUNNING, JobStatus.STARTING):
            began = clock - (times_of(run, int(now * 1000)).ran or 0.0)  # of all attempts
            states = (("waited", submitted),)  # the states in between are unknown
        else:
            began = submitted
    return (*states, (status, max(began, states[-1][1]) if states else began))


def parts(board: StatusBoard, now: float) -> list[StatusPart]:
    """Return the parts of the line, from left to right."""
    found = [StatusPart(board.title, "strong", 2)]
    if board.states:
        ends = [began for _, began in board.states[1:]]
        before = [
            f"{name} {duration(end - began)}"
            for (name, began), end in zip(board.states[:-1], ends, strict=True)
            if end - began >= 1
        ]
        if before:
            found.append(StatusPart(" \u00b7 ".join(before), "dim", 6))
        name, began = board.states[-1]
        found.append(StatusPart(f"{name} {duration(now - began)}", kind_of(name), 0))
    if board.children:
        found.append(StatusPart(board.children, "", 3))
    if board.fraction is not None:
        left = "" if board.left is None else f" ~{duration(board.left)} left"
        done = min(99, int(board.fraction * 100)) if board.fraction < 1 else 100
        found.append(StatusPart(bar(board.fraction, 10), "busy", 5))
        found.append(StatusPart(f"{done}%{left}", "", 1))
    if board.text:
        found.append(StatusPart(board.text, "", 3))
    if board.curve is not None and board.curve.values:
        name, values, breaks = board.curve
        found.append(StatusPart(f"{name} {values[-1]:.4g}", "", 4))
        if len(values) > 1:
            left_out = max(0, len(values) - _VALUES_DRAWN)
            bars = [place - left_out for place in breaks if place > left_out]
            drawn = sparkline(values[left_out:], _SPARKLINE_WIDTH, bars)
            found.append(StatusPart(drawn, "busy", 7))
    if board.usage.get("idle"):
        found.append(StatusPart(idle_text(board.usage["idle"]), "", 3))
    if board.usage:
        found.append(StatusPart(usage_text(board.usage), "dim", 9))
    found.append(StatusPart(board.hint, "dim", 8))
    return found


def fit(found: Sequence[StatusPart], width: int) -> list[StatusPart]:
    """Leave out parts by their ranks until the rest fits; a last part is cut."""
    kept = list(found)
    while _width(kept) > width and len(kept) > 1:
        kept.remove(max(kept, key=lambda part: part.rank))
    if kept and _width(kept) > width:
        kept = [kept[0]._replace(text=cut(kept[0].text, width))]
    return kept


def status_line(board: StatusBoard, now: float, width: int) -> list[StatusPart]:
    """Return the line for a window of `width` cells. A text about a problem is cut rather than left
    out.
    """
    found = parts(board, now)
    kept = fit(found, width)
    room = width - _width(kept) - _GAP
    for part in found:
        if part.text and part.text == board.text and part not in kept and room >= _MIN_TEXT_WIDTH:
            kept.append(part._replace(text=cut(part.text, room)))
    return kept


def _width(kept: Sequence[StatusPart]) -> int:
    return sum(cells(part.text) for part in kept) + _GAP * max(0, len(kept) - 1)


def bar(fraction: float, width: int) -> str:
    full = min(width, max(0, int(fraction * width)))
    return _DONE * full + _TO_DO * (width - full)


def usage_text(usage: Mapping[str, float]) -> str:
    """`1.9 cores, 812 MiB, GPU 45 %, 3.0 GiB`"""
    return ", ".join(text(usage[name]) for name, text in _USAGE.items() if name in usage)


def _memory_text(mib: float) -> str:
    return size_text(mib * 1024**2)


_USAGE: dict[str, Callable[[float], str]] = {
    "cpu": "{:.1f} cores".format,
    "memory": _memory_text,
    "gpu": "GPU {:.0f} %".format,
    "gpu_memory": _memory_text,
}
