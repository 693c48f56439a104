"""Show a running sweep: a live table on a terminal, otherwise a line now and then."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Protocol, TextIO

from batchml.cli.render import cells, cut, pad, printable
from batchml.cli.terminal import Screen, is_dumb, paint, screen
from batchml.model.names import dollars, duration
from batchml.model.sweep import TrialState
from batchml.sweeps.commands.render import describe_best
from batchml.sweeps.started import StartedSweep
from batchml.sweeps.summary import SweepSnapshot

_PLAIN = 80  # columns without a terminal
_BAR = 40  # columns of the longest bar
_TITLE = 10  # columns of the name at least
_EVERY = 30.0  # seconds between two lines if only numbers have changed
_KINDS = {
    TrialState.DONE: "good", TrialState.FAILED: "bad", TrialState.LOST: "bad",
    TrialState.RUNNING: "busy", TrialState.DIVERGED: "odd", TrialState.KILLED: "odd",
    TrialState.PRUNED: "dim", TrialState.PAUSED: "dim", TrialState.WAITING: "dim",
}  # fmt: skip
# The character of a state in the bar, which can be told apart without colours.
_MARKS = {
    TrialState.DONE: "\u2588", TrialState.PRUNED: "\u2592", TrialState.PAUSED: "\u2592",
    TrialState.FAILED: "x", TrialState.LOST: "x", TrialState.DIVERGED: "~",
    TrialState.KILLED: "-", TrialState.RUNNING: ">", TrialState.WAITING: "\u00b7",
}  # fmt: skip


class SweepProgressView(Protocol):
    def show(self, snapshot: SweepSnapshot) -> None:
        """Show a snapshot."""


@contextmanager
def open_view(sweep: StartedSweep, *, to_stderr: bool) -> Iterator[SweepProgressView]:
    """The view for the output stream; `to_stderr` keeps stdout for a JSON document."""
    stream = sys.stderr if to_stderr else sys.stdout
    if stream.isatty() and not is_dumb():
        with _live_view(sweep, stream) as view:
            yield view
    else:
        yield _PlainView(sweep, stream)


def draw(snapshot: SweepSnapshot, sweep: StartedSweep, on: Screen) -> str:
    """The table as text, no wider than the screen: trials, the best, how much of limits is used."""
    width = on.width or _PLAIN
    rows = [("best", _best(snapshot, sweep)), ("", _params(snapshot)), *_facts(snapshot, sweep)]
    names = max(len(name) for name, _ in rows)
    lines = [_title(snapshot, sweep, on), _bar(snapshot, min(width - 2, _BAR), on)]
    lines.append(_counts(snapshot, on, width))
    for name, value in rows:
        if value:
            shown = cut(value, width - names - 4)
            lines.append(f"  {_paint(pad(name, names), 'dim', on)}  {shown}")
    kind = "bad" if snapshot.stopping and not snapshot.ended else "dim"
    for notice in _last_notices(snapshot):
        lines.append(_paint(cut(f"  {printable(notice)}", width), kind, on))
    return "\n".join(lines)


def plain_lines(snapshot: SweepSnapshot, sweep: StartedSweep) -> list[str]:
    """A snapshot as lines for a log: one for the state, one for the best trial."""
    counts = ", ".join(f"{count} {state}" for state, count in _states(snapshot)) or "no trial yet"
    facts = "; ".join(f"{name} {value}" for name, value in _facts(snapshot, sweep))
    lines = [f"{_trials(snapshot)}: {counts}{'; ' if facts else ''}{facts}"]
    if snapshot.best is not None:
        lines.append(f"Best: {_best(snapshot, sweep)}")
    return [printable(line) for line in lines]


# --- Parts of the table ---------------------------------------------------------------------------


def _title(snapshot: SweepSnapshot, sweep: StartedSweep, on: Screen) -> str:
    took = duration(snapshot.hours * 3600)
    stop = sweep.spec.early_stop.method
    how = sweep.spec.method + (f" + {stop}" if stop != "none" else "")
    title = f"{printable(sweep.name)} {sweep.key[:8]}"
    width = on.width or _PLAIN
    rest = cut(f"  {how}  {snapshot.status}  {took}", width - _TITLE)
    return _paint(cut(title, width - cells(rest)), "strong", on) + _paint(rest, "dim", on)


def _bar(snapshot: SweepSnapshot, width: int, on: Screen) -> str:
    """A character for each trial, or for several trials; dots are trials that have not begun."""
    states = _states(snapshot)
    total = max(sum(snapshot.counts.values()), snapshot.wanted or 0)
    if not total:
        return ""
    size = min(width, total)
    drawn, upto, cell = [], 0, 0
    for state, count in states:
        upto += count
        last = max(cell + (1 if count else 0), round(upto * size / total))
        last = min(size, last)
        drawn.append(_paint(_MARKS[state] * (last - cell), _KINDS[state], on))
        cell = last
    return f"  {''.join(drawn)}{_paint('.' * (size - cell), 'dim', on)}"


def _counts(snapshot: SweepSnapshot, on: Screen, width: int) -> str:
    states = _states(snapshot)
    plain = ", ".join(f"{count:,} {state.lower()}" for state, count in states) or "none yet"
    line = f"  {_trials(snapshot)}: {plain}"
    if cells(line) > width:
        return cut(line, width)
    shown = [_paint(f"{count:,} {state.lower()}", _KINDS[state], on) for state, count in states]
    return f"  {_trials(snapshot)}: {', '.join(shown) or plain}"


def _trials(snapshot: SweepSnapshot) -> str:
    """How many trials have ended, and of how many; confirming runs are added."""
    what = "trials and confirming runs" if snapshot.confirming else "trials"
    if snapshot.wanted is None:
        return f"{snapshot.over:,} {what}"
    all_of_them = max(snapshot.wanted + snapshot.confirming, sum(snapshot.counts.values()))
    return f"{snapshot.over:,} of {all_of_them:,} {what}"


def _states(snapshot: SweepSnapshot) -> list[tuple[TrialState, int]]:
    """States with trials, ended ones first, waiting ones last."""
    return [(state, snapshot.counts[state]) for state in _MARKS if snapshot.counts.get(state)]


def _best(snapshot: SweepSnapshot, sweep: StartedSweep) -> str:
    best = snapshot.best
    if best is None:
        return "" if snapshot.ended else "none yet"
    return describe_best(sweep, best)


def _params(snapshot: SweepSnapshot) -> str:
    params = snapshot.best.params if snapshot.best is not None else {}
    return printable(", ".join(f"{name} {_value(value)}" for name, value in params.items()))


def _facts(snapshot: SweepSnapshot, sweep: StartedSweep) -> list[tuple[str, str]]:
    """How much of the limits is used, and the time left."""
    found = []
    if snapshot.spent is not None:
        spent = dollars(Decimal(snapshot.spent))
        limit = f" of {dollars(Decimal(snapshot.cost_limit))}" if snapshot.cost_limit else ""
        coming = snapshot.committed or 0.0
        more = f", {dollars(Decimal(coming))} committed" if coming > 0 else ""
        found.append(("cost", f"{spent}{limit}{more}"))
    if snapshot.hours_limit is not None:
        limit = duration(snapshot.hours_limit * 3600)
        found.append(("hours", f"{duration(snapshot.hours * 3600)} of {limit}"))
    if snapshot.steps_saved:
        step = printable(sweep.spec.early_stop.step)
        done, saved = snapshot.steps, snapshot.steps_saved
        share = f"{saved / (saved + done):.0%}"
        found.append(("saved", f"{saved:,} {step}s not run, {share} of these trials in full"))
    if not snapshot.ended and snapshot.in_flight:
        left = "unknown" if snapshot.eta is None else f"about {duration(snapshot.eta)}"
        found.append(("left", left))
    return found


def _last_notices(snapshot: SweepSnapshot) -> Sequence[str]:
    """The newest notices; at the end all, because they include the output of a failed trial."""
    why = snapshot.ended or snapshot.stopping
    notices = snapshot.notices if why else snapshot.notices[-3:]
    return [*notices, f"{'Ended' if snapshot.ended else 'Stopping'}: {why}"] if why else notices


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _paint(text: str, kind: str, on: Screen) -> str:
    return paint(text, kind) if on.colour and text else text


# --- Views ----------------------------------------------------------------------------------------


class _PlainView:
    """The view without a terminal: a line when the best changes or trials end, but not often."""

    def __init__(self, sweep: StartedSweep, stream: TextIO) -> None:
        self._sweep = sweep
        self._stream = stream
        self._printed_at = 0.0  # when the last line was
        self._best: tuple[object, ...] = ()
        self._over = -1
        self._notices: tuple[str, ...] = ()

    def show(self, snapshot: SweepSnapshot) -> None:
        for notice in snapshot.notices:  # without notices that are no longer true
            if notice not in self._notices:
                print(printable(notice), file=self._stream)
        self._notices = snapshot.notices
        best = snapshot.best
        shown = (best.number, best.step) if best else ()
        is_new = shown != self._best and best is not None and best.state is TrialState.DONE
        is_due = snapshot.over != self._over and snapshot.at - self._printed_at >= _EVERY
        if not (is_new or is_due or (snapshot.ended and snapshot.over != self._over)):
            return
        how, *rest = plain_lines(snapshot, self._sweep)
        for line in (how, *(rest if shown != self._best else ())):
            print(line, file=self._stream, flush=True)
        self._printed_at, self._best, self._over = snapshot.at, shown, snapshot.over


@contextmanager
def _live_view(sweep: StartedSweep, stream: TextIO) -> Iterator[SweepProgressView]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream)

    class Drawn:
        def show(self, snapshot: SweepSnapshot) -> None:
            on = Screen(console.size.width, screen(stream).colour)
            text = Text.from_ansi(draw(snapshot, sweep, on))
            text.no_wrap, text.overflow = True, "ellipsis"
            live.update(text, refresh=True)

    # Other output goes above the table; the last table stays.
    with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        yield Drawn()
