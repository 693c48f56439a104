"""The status line at the bottom of a terminal while a run goes on: its data and its text."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from batchml.cli.render import cells, cut, duration
from batchml.cli.terminal import kind_of, sparkline
from batchml.model.run import JobStatus, Run, effective_state

HINT = "Ctrl-C detaches"
_BAR, _REST = "\u2501", "\u2500"  # heavy and light: distinct without colour
_SPARK = 16
_GAP = 2


class Curve(NamedTuple):
    """The metric of the status line, by its name in job.toml."""

    name: str
    values: Sequence[float]


class StatusBoard(Struct, frozen=True):
    """The data of the status line. Times are seconds of one clock."""

    title: str
    states: tuple[tuple[str, float], ...] = ()  # each state and when it began, in their order
    text: str = ""  # why it waits, that there is no contact
    fraction: float | None = None  # the part of the run that is done, from 0 to 1
    left: float | None = None  # estimated seconds to the end
    children: str = ""
    curve: Curve | None = None
    usage: Mapping[str, float] = {}
    hint: str = HINT


class StatusPart(NamedTuple):
    text: str
    kind: str  # of colour.paint
    rank: int  # in a narrow window the part with the highest number is left out first


def entered(states: tuple[tuple[str, float], ...], run: Run, now: float, clock: float) -> tuple[
    tuple[str, float], ...
]:  # fmt: skip
    """`states` after `run` was seen.

    `now` is the time of day, `clock` that of the states. The run's own times say when it was
    submitted and started; the two clocks may differ, so no state begins in the future or before the
    state before it.
    """
    status = effective_state(run)
    if states and states[-1][0] == status:
        return states
    known = run.started_at if status == JobStatus.RUNNING else None
    began = clock if known is None else clock - max(0.0, now - known / 1000)
    if not states and run.created_at:
        submitted = clock - max(0.0, now - run.created_at / 1000)
        if status in (JobStatus.RUNNING, JobStatus.STARTING):
            states = (("waited", submitted),)  # its states in between were not seen
        else:
            began = submitted
    return (*states, (status, max(began, states[-1][1]) if states else began))


def parts(board: StatusBoard, now: float) -> list[StatusPart]:
    """The parts of the line, from left to right."""
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
        name, values = board.curve
        found.append(StatusPart(f"{name} {values[-1]:.4g}", "", 4))
        if len(values) > 1:
            found.append(StatusPart(sparkline(values[-200:], _SPARK), "busy", 7))
    if board.usage:
        found.append(StatusPart(usage_text(board.usage), "dim", 9))
    found.append(StatusPart(board.hint, "dim", 8))
    return found


def fit(found: Sequence[StatusPart], width: int) -> list[StatusPart]:
    """As many parts as have room, the most important ones; the last of them cut if necessary.

    A part about a problem is cut before it is left out.
    """
    kept = list(found)
    while _width(kept) > width and len(kept) > 1:
        kept.remove(max(kept, key=lambda part: part.rank))
    if kept and _width(kept) > width:
        kept = [kept[0]._replace(text=cut(kept[0].text, width))]
    return kept


def status_line(board: StatusBoard, now: float, width: int) -> list[StatusPart]:
    """The line for a window of `width` cells."""
    found = parts(board, now)
    kept = fit(found, width)
    texts = [part for part in found if board.text and part.text == board.text]
    room = width - _width(kept) - _GAP
    if texts and texts[0] not in kept and room >= 12:
        kept.append(texts[0]._replace(text=cut(texts[0].text, room)))
    return kept


def _width(kept: Sequence[StatusPart]) -> int:
    return sum(cells(part.text) for part in kept) + _GAP * max(0, len(kept) - 1)


def bar(fraction: float, width: int) -> str:
    full = min(width, max(0, int(fraction * width)))
    return _BAR * full + _REST * (width - full)


def usage_text(usage: Mapping[str, float]) -> str:
    """`1.9 cores, 812 MiB, GPU 45 %, 2.9 GiB`"""
    shown = []
    if "cpu" in usage:
        shown.append(f"{usage['cpu']:.1f} cores")
    if "memory" in usage:
        shown.append(_size(usage["memory"]))
    if "gpu" in usage:
        shown.append(f"GPU {usage['gpu']:.0f} %")
    if "gpu_memory" in usage:
        shown.append(_size(usage["gpu_memory"]))
    return ", ".join(shown)


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
