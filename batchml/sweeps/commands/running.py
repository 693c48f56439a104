"""Control a sweep in a command: show it while it runs, and print its result."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from decimal import Decimal
from typing import Protocol, TextIO

import typer
from msgspec.structs import replace

from batchml.cli.output import print_json, print_line, say, say_lost
from batchml.cli.render import cells, cut, pad, printable
from batchml.cli.terminal import Screen, is_dumb, paint, screen
from batchml.context import Context
from batchml.errors import INTERRUPTED, BatchmlError
from batchml.model.names import dollars, duration
from batchml.model.sweep import TrialState
from batchml.runs.commands.interrupt import detaching
from batchml.runs.send import Interrupted
from batchml.sweeps.commands.render import (
    counts_json,
    describe_best,
    end_lines,
    exit_code,
    identity_json,
    log_command,
    step_name,
    summary_json,
    sweep_word,
    trial_json,
)
from batchml.sweeps.control.decide import NEVER_PRINTED
from batchml.sweeps.control.plan import SubmitMode
from batchml.sweeps.run import (
    control_sweep,
    detach_sweep,
    gains_from_controller,
    needs_controller,
    submit_controller,
)
from batchml.sweeps.started import SPEC, StartedSweep
from batchml.sweeps.stores import SweepStore, open_sweep_store
from batchml.sweeps.summary import SweepSnapshot, SweepSummary

# --- The table of a running sweep: live on a terminal, otherwise a line now and then --------------


_PLAIN = 80  # columns without a terminal
_BAR = 40  # columns of the longest bar
_TITLE = 10  # columns of the sweep's name, at least
_EVERY = 30.0  # seconds between two lines if only numbers have changed
_KINDS = {  # the kind of text, for `paint`
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
    """An output to which the snapshots of a running sweep are written."""

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
    """The table as text, no wider than the screen: trials, the best trial, the use of limits."""
    width = on.width or _PLAIN
    rows = [("best", _best(snapshot, sweep)), ("", _params(snapshot)), *_facts(snapshot, sweep)]
    names = max(len(name) for name, _ in rows)
    lines = [_title(snapshot, sweep, on), _bar(snapshot, min(width - 2, _BAR), on)]
    lines.append(_counts(snapshot, on, width))
    for name, value in rows:
        if value:
            text = cut(value, width - names - 4)
            lines.append(f"  {_paint(pad(name, names), 'dim', on)}  {text}")
    kind = "bad" if snapshot.stopping and not snapshot.ended else "dim"
    for notice in _last_notices(snapshot):
        lines.append(_paint(cut(f"  {printable(notice)}", width), kind, on))
    return "\n".join(lines)


def plain_lines(snapshot: SweepSnapshot, sweep: StartedSweep) -> list[str]:
    """A snapshot as lines for a log: a line for the state, and a line for the best trial."""
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
    """A character for each trial, or for several trials; dots are trials that are not planned."""
    total = max(sum(snapshot.counts.values()), snapshot.wanted or 0)
    if not total:
        return ""
    size = min(width, total)
    parts, trials, cell = [], 0, 0
    for state, count in _states(snapshot):  # each state has at least one cell
        trials += count
        end = min(size, max(cell + 1, round(trials * size / total)))
        parts.append(_paint(_MARKS[state] * (end - cell), _KINDS[state], on))
        cell = end
    return f"  {''.join(parts)}{_paint('.' * (size - cell), 'dim', on)}"


def _counts(snapshot: SweepSnapshot, on: Screen, width: int) -> str:
    states = _states(snapshot)
    plain = ", ".join(f"{count:,} {state.lower()}" for state, count in states) or "none yet"
    line = f"  {_trials(snapshot)}: {plain}"
    if cells(line) > width:
        return cut(line, width)
    parts = [_paint(f"{count:,} {state.lower()}", _KINDS[state], on) for state, count in states]
    return f"  {_trials(snapshot)}: {', '.join(parts) or plain}"


def _trials(snapshot: SweepSnapshot) -> str:
    """How many trials have ended, of how many in all; confirming runs are included."""
    noun = "trials and confirming runs" if snapshot.confirming else "trials"
    if snapshot.wanted is None:
        return f"{snapshot.over:,} {noun}"
    total = max(snapshot.wanted + snapshot.confirming, sum(snapshot.counts.values()))
    return f"{snapshot.over:,} of {total:,} {noun}"


def _states(snapshot: SweepSnapshot) -> list[tuple[TrialState, int]]:
    """The states that trials have, with their numbers: ended states first, WAITING last."""
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
    """The use of limits, and the time left."""
    facts = []
    if snapshot.spent is not None:
        spent = dollars(Decimal(snapshot.spent))
        limit = f" of {dollars(Decimal(snapshot.cost_limit))}" if snapshot.cost_limit else ""
        committed = snapshot.committed or 0.0
        more = f", {dollars(Decimal(committed))} committed" if committed > 0 else ""
        facts.append(("cost", f"{spent}{limit}{more}"))
    if snapshot.hours_limit is not None:
        limit = duration(snapshot.hours_limit * 3600)
        facts.append(("hours", f"{duration(snapshot.hours * 3600)} of {limit}"))
    if snapshot.steps_saved:
        step = step_name(sweep, snapshot.best)
        done, saved = snapshot.steps, snapshot.steps_saved
        share = f"{saved / (saved + done):.0%}"
        facts.append(("saved", f"{saved:,} {step}s not run, {share} of these trials in full"))
    if not snapshot.ended and snapshot.in_flight:
        left = "unknown" if snapshot.eta is None else f"about {duration(snapshot.eta)}"
        facts.append(("left", left))
    return facts


def _last_notices(snapshot: SweepSnapshot) -> Sequence[str]:
    """The newest notices; at the end all notices, with the output of a failed trial."""
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
    """The view without a terminal: a line for a new best trial, and seldom for ended trials."""

    def __init__(self, sweep: StartedSweep, stream: TextIO) -> None:
        self._sweep = sweep
        self._stream = stream
        self._printed_at = 0.0  # when the last line was printed
        self._best: tuple[object, ...] = ()  # number and step of the best trial at that time
        self._over = -1  # trials that had ended at that time
        self._notices: tuple[str, ...] = ()

    def show(self, snapshot: SweepSnapshot) -> None:
        for notice in snapshot.notices:
            if notice not in self._notices:
                print(printable(notice), file=self._stream)
        self._notices = snapshot.notices
        best = snapshot.best
        present = (best.number, best.step) if best else ()
        is_new = present != self._best and best is not None and best.state is TrialState.DONE
        is_due = snapshot.over != self._over and snapshot.at - self._printed_at >= _EVERY
        if not (is_new or is_due or (snapshot.ended and snapshot.over != self._over)):
            return
        state_line, *best_line = plain_lines(snapshot, self._sweep)
        for line in (state_line, *(best_line if present != self._best else ())):
            print(line, file=self._stream, flush=True)
        self._printed_at, self._best, self._over = snapshot.at, present, snapshot.over


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


# --- Ctrl-C and SIGTERM: say once how to continue -------------------------------------------------


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SweepInterrupt:
    """The output of a sweep's command when Ctrl-C or SIGTERM interrupts the command.

    `is_started`: whether the sweep exists; None while its `spec.json` is being written. `hand_over`
    submits a controller as a run; it is called for a sweep that would not go on without one.
    """

    def __init__(
        self,
        context: Context,
        sweep: StartedSweep,
        *,
        json_: bool,
        is_started: bool | None = True,
        hand_over: Callable[[], object] | None = None,
    ) -> None:
        self._context = context
        self._sweep = sweep
        self._json = json_
        self.is_started = is_started
        self._hand_over = hand_over
        self._is_handed_over = False
        self._snapshot: SweepSnapshot | None = None

    def before_spec(self) -> None:
        """Note that `spec.json` is being written: it is unknown whether the sweep exists."""
        self.is_started = None

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Print how to continue if the block is interrupted. Blocks may be nested."""
        with detaching(self._context, []):
            try:
                yield
            except KeyboardInterrupt:
                why = self._try_to_hand_over()
                with _signals_ignored():
                    self._report(why)
                raise

    def watch(self, snapshots: Iterator[SweepSnapshot]) -> Iterator[SweepSnapshot]:
        """The same snapshots. The last of them is reported if the command is interrupted."""
        for snapshot in snapshots:
            self._snapshot = snapshot
            yield snapshot

    def _try_to_hand_over(self) -> str:
        """Let a run control the sweep if it would not go on by itself; why that failed, else ""."""
        snapshot = self._snapshot
        is_over = snapshot is not None and bool(snapshot.ended)
        goes_on = snapshot is not None and not needs_controller(self._sweep)
        if self._hand_over is None or self.is_started is not True or is_over or goes_on:
            return ""
        say("\nA run takes over the control of the sweep. Ctrl-C again leaves at once.")
        try:
            self._hand_over()
        except Interrupted as stop:
            self._is_handed_over = bool(stop.job_id)
            return "" if stop.job_id else "interrupted"
        except KeyboardInterrupt:
            return "interrupted"
        except BatchmlError as error:
            return str(error)
        self._is_handed_over = True
        return ""

    def _report(self, why: str = "") -> None:
        """Print what continues; `why` the sweep was not handed over to a run."""
        is_started = self.is_started
        if is_started is None:
            is_started = self._exists()
        if is_started is None:
            word = sweep_word(self._context, self._sweep)
            say(f"\nIt is unknown whether the sweep was started: batchml sweeps show {word}")
        elif is_started and self._is_handed_over:
            word = sweep_word(self._context, self._sweep)
            say(f"\nDetached: the sweep goes on.\n{follow_and_stop_lines(word)}")
        elif is_started:
            if why:
                say(f"\nNo run took over the control: {why}")
            say(describe_what_continues(self._context, self._sweep, self._snapshot))
        else:
            say("\nNothing was started.")
        if self._json:
            print_json(self._as_json(is_started))

    def _exists(self) -> bool | None:
        """Whether the sweep has its `spec.json`; None in AWS, where reading it takes time."""
        if not self._context.settings.is_local:
            return None
        try:
            return open_sweep_store(self._context, self._sweep.key).get(SPEC) is not None
        except BatchmlError:
            return None

    def _as_json(self, is_started: bool | None) -> dict[str, object]:
        snapshot, sweep = self._snapshot, self._sweep
        continues = snapshot is not None and sweep.mode is not SubmitMode.BATCHES
        continues = continues or self._is_handed_over
        status = "running" if continues else "paused"
        if snapshot is not None and snapshot.ended:
            status = "ended"
        counts = snapshot.counts if snapshot is not None else {}
        return {
            "sweepId": sweep.key if is_started is not False else None,
            "name": sweep.name,
            "env": self._context.env,
            "status": status if is_started else None,
            "trials": snapshot.planned if snapshot is not None else 0,
            "counts": counts_json(counts),
            "best": trial_json(sweep, snapshot.best if snapshot is not None else None),
            "exitCode": INTERRUPTED,
        }


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals for a moment: many people press Ctrl-C more than once."""
    before = [signal.signal(each, signal.SIG_IGN) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(each, handler)


def describe_what_continues(
    context: Context, sweep: StartedSweep, snapshot: SweepSnapshot | None
) -> str:
    """Lines that say what continues without this command, and how to resume.

    `snapshot`: the last one; None if no round was completed.
    """
    word = sweep_word(context, sweep)
    if snapshot is None:
        words = "\nPaused: the sweep was started, but not all of its trials were submitted."
    elif sweep.mode is SubmitMode.BATCHES:
        words = (
            "\nPaused: submitted trials continue, and no other begins until you resume the sweep:"
        )
    elif needs_controller(sweep):
        words = "\nDetached: its trials continue. Limits and early stopping need a controller:"
    elif gains_from_controller(sweep):
        words = "\nDetached: its trials continue. Only a controller stops it if all fail:"
    else:
        words = "\nDetached: its trials continue by themselves."
    resume = [f"  resume:  batchml sweeps resume {word}"]
    if needs_controller(sweep):
        resume.append(f"  without this terminal:  batchml sweeps resume --detach {word}")
    return "\n".join([words, *resume, follow_and_stop_lines(word)])


def follow_and_stop_lines(word: str) -> str:
    return f"  follow:  batchml sweeps show --follow {word}\n  stop:    batchml sweeps stop {word}"


# --- Running --------------------------------------------------------------------------------------


def control_here(context: Context, sweep: StartedSweep, store: SweepStore, *, json_: bool) -> None:
    """Control the sweep until it has ended, and exit with its code."""
    controller = control_sweep(context, sweep, store, say, lost=say_lost)
    interrupt = SweepInterrupt(
        context, sweep, json_=json_,
        hand_over=lambda: submit_controller(context, sweep, store, say),
    )  # fmt: skip
    with interrupt.reported(), closing(controller.snapshots()) as snapshots:
        watched = interrupt.watch(snapshots)
        show_snapshots(watched if json_ else without_final_best(watched), sweep, to_stderr=json_)
    exit_with_result(context, sweep, controller.summary, json_=json_)


def detach_here(context: Context, sweep: StartedSweep, store: SweepStore, *, json_: bool) -> None:
    """Let a sweep run without this process, and say how to follow it."""
    with SweepInterrupt(context, sweep, json_=json_).reported():
        detach_sweep(context, sweep, store, say)
    if json_:
        print_json(identity_json(sweep))
    else:
        say(follow_and_stop_lines(sweep_word(context, sweep)))


def show_snapshots(
    snapshots: Iterator[SweepSnapshot], sweep: StartedSweep, *, to_stderr: bool
) -> None:
    """Show each snapshot: as a table on a terminal, otherwise as lines."""
    with open_view(sweep, to_stderr=to_stderr) as display:
        for snapshot in snapshots:
            display.show(snapshot)


def without_final_best(snapshots: Iterator[SweepSnapshot]) -> Iterator[SweepSnapshot]:
    """The snapshots; the last one without the best trial, which `end_lines` prints in full."""
    for snapshot in snapshots:
        yield replace(snapshot, best=None) if snapshot.ended else snapshot


# --- The end --------------------------------------------------------------------------------------


def exit_with_result(
    context: Context, sweep: StartedSweep, summary: SweepSummary, *, json_: bool
) -> None:
    """Print the result, and exit with its code."""
    if json_:
        print_json(summary_json(sweep, summary))
    else:
        for line in end_lines(sweep, summary):
            print_line(printable(line))
        failed, word = summary.first_failure, sweep_word(context, sweep)
        if failed is not None and (log := log_command(context, failed)):
            say(f"  trial {failed.number} failed:  {log}")
            code = "--code " if sweep.code else ""
            say(f"  rerun after a fix:  batchml sweeps rerun --failed {code}{word}")
            if NEVER_PRINTED in failed.why:  # perhaps its pattern is wrong
                say("  after a change of [metrics] in job.toml, start a new sweep")
        say(f"  report:  batchml sweeps report {word}")
    raise typer.Exit(exit_code(summary))
