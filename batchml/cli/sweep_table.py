"""A sweep while it runs: a table that changes on a terminal, a line now and then elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Protocol, TextIO

from batchml.cli.colour import Screen, is_dumb, paint, screen
from batchml.cli.render import cells, cut, pad, printable
from batchml.model.names import dollars, duration
from batchml.model.sweep import TrialState

if TYPE_CHECKING:
    from batchml.client.sweeping.freezing import Frozen
    from batchml.model.sweep import Trial
    from batchml.sweep.summary import Picture

_PLAIN = 80  # cells where there is no window
_BAR = 40  # cells of the longest bar
_TITLE = 10  # cells that the name has at least
_EVERY = 30.0  # seconds between two lines of a sweep whose numbers only grow
_KINDS = {
    TrialState.DONE: "good", TrialState.FAILED: "bad", TrialState.LOST: "bad",
    TrialState.RUNNING: "busy", TrialState.DIVERGED: "odd", TrialState.KILLED: "odd",
    TrialState.PRUNED: "dim", TrialState.PAUSED: "dim", TrialState.WAITING: "dim",
}  # fmt: skip
# How a state looks in the bar, without colours too.
_MARKS = {
    TrialState.DONE: "\u2588", TrialState.PRUNED: "\u2592", TrialState.PAUSED: "\u2592",
    TrialState.FAILED: "x", TrialState.LOST: "x", TrialState.DIVERGED: "~",
    TrialState.KILLED: "-", TrialState.RUNNING: ">", TrialState.WAITING: "\u00b7",
}  # fmt: skip


class View(Protocol):
    def show(self, picture: "Picture") -> None:
        """Take one picture."""


@contextmanager
def watching(frozen: "Frozen", *, to_stderr: bool) -> Iterator[View]:
    """The view for where output goes; `to_stderr` keeps stdout for a JSON document."""
    stream = sys.stderr if to_stderr else sys.stdout
    if stream.isatty() and not is_dumb():
        with _drawing(frozen, stream) as view:
            yield view
    else:
        yield _Lines(frozen, stream)


def draw(picture: "Picture", frozen: "Frozen", on: Screen) -> str:
    """The table as text, no wider than the screen: trials, the best, what is used of the limits."""
    width = on.width or _PLAIN
    rows = [("best", _best(picture, frozen)), ("", _params(picture)), *_facts(picture, frozen)]
    names = max(len(name) for name, _ in rows)
    lines = [_title(picture, frozen, on), _bar(picture, min(width - 2, _BAR), on)]
    lines.append(_counts(picture, on, width))
    for name, value in rows:
        if value:
            shown = cut(value, width - names - 4)
            lines.append(f"  {_painted(pad(name, names), 'dim', on)}  {shown}")
    kind = "bad" if picture.stopping and not picture.ended else "dim"
    for notice in _last_words(picture):
        lines.append(_painted(cut(f"  {printable(notice)}", width), kind, on))
    return "\n".join(lines)


def classic(picture: "Picture", frozen: "Frozen") -> list[str]:
    """The same as lines for a log: one that says how it stands, one for the best."""
    counts = ", ".join(f"{many} {state}" for state, many in _states(picture)) or "no trial yet"
    facts = "; ".join(f"{name} {value}" for name, value in _facts(picture, frozen))
    lines = [f"{_trials(picture)}: {counts}{'; ' if facts else ''}{facts}"]
    if picture.best is not None:
        lines.append(f"Best: {_best(picture, frozen)}")
    return [printable(line) for line in lines]


# --- parts ----------------------------------------------------------------------------------


def _title(picture: "Picture", frozen: "Frozen", on: Screen) -> str:
    took = duration(picture.hours * 3600)
    stop = frozen.spec.early_stop.method
    how = frozen.spec.method + (f" + {stop}" if stop != "none" else "")
    title = f"{printable(frozen.name)} {frozen.key[:8]}"
    width = on.width or _PLAIN
    rest = cut(f"  {how}  {picture.status}  {took}", width - _TITLE)
    return _painted(cut(title, width - cells(rest)), "strong", on) + _painted(rest, "dim", on)


def _bar(picture: "Picture", width: int, on: Screen) -> str:
    """A cell for each trial, or for a share of them; what is still to come is blank."""
    states = _states(picture)
    total = max(sum(picture.counts.values()), picture.wanted or 0)
    if not total:
        return ""
    size = min(width, total)
    drawn, upto, cell = [], 0, 0
    for state, many in states:
        upto += many
        last = max(cell + (1 if many else 0), round(upto * size / total))
        last = min(size, last)
        drawn.append(_painted(_MARKS[state] * (last - cell), _KINDS[state], on))
        cell = last
    return f"  {''.join(drawn)}{_painted('.' * (size - cell), 'dim', on)}"


def _counts(picture: "Picture", on: Screen, width: int) -> str:
    states = _states(picture)
    plain = ", ".join(f"{many:,} {state.lower()}" for state, many in states) or "none yet"
    line = f"  {_trials(picture)}: {plain}"
    if cells(line) > width:
        return cut(line, width)
    shown = [_painted(f"{many:,} {state.lower()}", _KINDS[state], on) for state, many in states]
    return f"  {_trials(picture)}: {', '.join(shown) or plain}"


def _trials(picture: "Picture") -> str:
    """How many have ended, and of how many; runs that confirm the best come on top."""
    what = "trials and confirming runs" if picture.confirming else "trials"
    if picture.wanted is None:
        return f"{picture.over:,} {what}"
    all_of_them = max(picture.wanted + picture.confirming, sum(picture.counts.values()))
    return f"{picture.over:,} of {all_of_them:,} {what}"


def _states(picture: "Picture") -> list[tuple[TrialState, int]]:
    """What has ended first, what waits last."""
    return [(state, picture.counts[state]) for state in _MARKS if picture.counts.get(state)]


def _best(picture: "Picture", frozen: "Frozen") -> str:
    best = picture.best
    if best is None:
        return "" if picture.ended else "none yet"
    return best_words(frozen, best)


def _params(picture: "Picture") -> str:
    params = picture.best.params if picture.best is not None else {}
    return printable(", ".join(f"{name} {_value(value)}" for name, value in params.items()))


def best_words(frozen: "Frozen", best: "Trial") -> str:
    """`val_accuracy 0.9813, trial 17, epoch 27`"""
    goals = zip(frozen.spec.goals, best.values or (), strict=False)
    values = ", ".join(f"{printable(goal.metric)} {value:.6g}" for goal, value in goals)
    step = f", {printable(frozen.spec.early_stop.step)} {best.step}" if best.step else ""
    state = "" if best.state is TrialState.DONE else f", {best.state.value}"
    return f"{values}, trial {best.number}{step}{state}"


def _facts(picture: "Picture", frozen: "Frozen") -> list[tuple[str, str]]:
    """What is used, and of what; and the time left."""
    found = []
    if picture.spent is not None:
        spent = dollars(Decimal(picture.spent))
        limit = f" of {dollars(Decimal(picture.cost_limit))}" if picture.cost_limit else ""
        coming = picture.committed or 0.0
        more = f", {dollars(Decimal(coming))} committed" if coming > 0 else ""
        found.append(("cost", f"{spent}{limit}{more}"))
    if picture.hours_limit is not None:
        limit = duration(picture.hours_limit * 3600)
        found.append(("hours", f"{duration(picture.hours * 3600)} of {limit}"))
    if picture.steps_saved:
        step = printable(frozen.spec.early_stop.step)
        done, saved = picture.steps, picture.steps_saved
        share = f"{saved / (saved + done):.0%}"
        found.append(("saved", f"{saved:,} {step}s not run, {share} of these trials in full"))
    if not picture.ended and picture.in_flight:
        left = "unknown" if picture.eta is None else f"about {duration(picture.eta)}"
        found.append(("left", left))
    return found


def _last_words(picture: "Picture") -> Sequence[str]:
    """The newest notices; of one that ends all, which say what the first failed trial printed."""
    why = picture.ended or picture.stopping
    notices = picture.notices if why else picture.notices[-3:]
    return [*notices, f"{'Ended' if picture.ended else 'Stopping'}: {why}"] if why else notices


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _painted(text: str, kind: str, on: Screen) -> str:
    return paint(text, kind) if on.colour and text else text


# --- where it goes --------------------------------------------------------------------------


class _Lines:
    """Without a terminal: a line when something ends or begins, and not more often than needed."""

    def __init__(self, frozen: "Frozen", stream: TextIO) -> None:
        self._frozen = frozen
        self._stream = stream
        self._said = 0.0  # when the last line was
        self._best: tuple[object, ...] = ()
        self._over = -1
        self._notices: tuple[str, ...] = ()

    def show(self, picture: "Picture") -> None:
        for notice in picture.notices:  # one that no longer holds is gone from there
            if notice not in self._notices:
                print(printable(notice), file=self._stream)
        self._notices = picture.notices
        best = picture.best
        shown = (best.number, best.step) if best else ()
        is_new = shown != self._best and best is not None and best.state is TrialState.DONE
        is_due = picture.over != self._over and picture.at - self._said >= _EVERY
        if not (is_new or is_due or (picture.ended and picture.over != self._over)):
            return
        how, *rest = classic(picture, self._frozen)
        for line in (how, *(rest if shown != self._best else ())):
            print(line, file=self._stream, flush=True)
        self._said, self._best, self._over = picture.at, shown, picture.over


@contextmanager
def _drawing(frozen: "Frozen", stream: TextIO) -> Iterator[View]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream)

    class Drawn:
        def show(self, picture: "Picture") -> None:
            on = Screen(console.size.width, screen(stream).colour)
            text = Text.from_ansi(draw(picture, frozen, on))
            text.no_wrap, text.overflow = True, "ellipsis"
            live.update(text, refresh=True)

    # What is said meanwhile goes above the table; the last table stays where it is.
    with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
        yield Drawn()
