"""Control a sweep in a command: show it while it runs, and print its result."""

import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager

import typer
from msgspec.structs import replace

from batchml.cli.output import print_json, print_line, say, say_lost
from batchml.cli.render import printable
from batchml.context import Context
from batchml.errors import INTERRUPTED, BatchmlError
from batchml.runs.commands.interrupt import detaching
from batchml.sweeps.commands.render import (
    end_lines,
    exit_code,
    identity_json,
    log_of,
    summary_json,
    trial_json,
)
from batchml.sweeps.commands.table import open_view
from batchml.sweeps.control.plan import SubmitMode
from batchml.sweeps.run import (
    control_sweep,
    detach_sweep,
    gains_from_controller,
    needs_controller,
)
from batchml.sweeps.started import SPEC, StartedSweep
from batchml.sweeps.stores import SweepStore, open_sweep_store
from batchml.sweeps.summary import SweepSnapshot, SweepSummary

# --- Ctrl-C and SIGTERM: say once how to continue -------------------------------------------------


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SweepInterrupt:
    """What a command on a sweep prints when it is interrupted.

    `is_started`: whether the sweep exists; None while its `spec.json` is being written.
    """

    def __init__(
        self,
        context: Context,
        sweep: StartedSweep,
        *,
        json_: bool,
        is_started: bool | None = True,
    ) -> None:
        self._context = context
        self._sweep = sweep
        self._json = json_
        self.is_started = is_started
        self._snapshot: SweepSnapshot | None = None

    def before_spec(self) -> None:
        """`spec.json` is about to be written: whether the sweep exists is unknown from now on."""
        self.is_started = None

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Print how to continue if the block is interrupted. Blocks may be nested."""
        with detaching(self._context, []):
            try:
                yield
            except KeyboardInterrupt:
                with _signals_ignored():
                    self._report()
                raise

    def watch(self, snapshots: Iterator[SweepSnapshot]) -> Iterator[SweepSnapshot]:
        for snapshot in snapshots:
            self._snapshot = snapshot
            yield snapshot

    def _report(self) -> None:
        is_started = self.is_started
        if is_started is None:
            is_started = self._exists()
        if is_started is None:
            word = f"{self._sweep.key}{self._context.option}"
            say(f"\nIt is unknown whether the sweep was started: batchml sweeps show {word}")
        elif is_started:
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
        goes_on = snapshot is not None and sweep.mode is not SubmitMode.BATCHES
        status = "running" if goes_on else "paused"
        if snapshot is not None and snapshot.ended:
            status = "ended"
        counts = snapshot.counts if snapshot is not None else {}
        return {
            "sweepId": sweep.key if is_started is not False else None,
            "name": sweep.name,
            "env": self._context.env,
            "status": status if is_started else None,
            "trials": snapshot.planned if snapshot is not None else 0,
            "counts": {str(state): many for state, many in counts.items() if many},
            "best": trial_json(sweep, snapshot.best if snapshot is not None else None),
            "exitCode": INTERRUPTED,
        }


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore further Ctrl-C for a moment: few people press it once."""
    before = [signal.signal(each, signal.SIG_IGN) for each in _SIGNALS]
    try:
        yield
    finally:
        for each, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(each, handler)


def describe_what_continues(
    context: Context, sweep: StartedSweep, snapshot: SweepSnapshot | None
) -> str:
    """What continues without this command, and how to resume. `snapshot`: the last one, if any."""
    word = f"{sweep.key}{context.option}"
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


def announcement(context: Context, sweep: StartedSweep) -> str:
    return f"Started sweep [{sweep.name} - {sweep.key}] in [{context.env}]"


def control_here(context: Context, sweep: StartedSweep, store: SweepStore, *, json_: bool) -> None:
    """Control the sweep until it has ended, and exit with its code."""
    controlled = control_sweep(context, sweep, store, say, lost=say_lost)
    interrupt = SweepInterrupt(context, sweep, json_=json_)
    with interrupt.reported(), closing(controlled.snapshots()) as snapshots:
        watched = interrupt.watch(snapshots)
        show_snapshots(watched if json_ else without_final_best(watched), sweep, to_stderr=json_)
    exit_with_result(context, sweep, controlled.summary, json_=json_)


def detach_here(context: Context, sweep: StartedSweep, store: SweepStore, *, json_: bool) -> None:
    """Let a sweep run by itself, or with a controller that is a run."""
    with SweepInterrupt(context, sweep, json_=json_).reported():
        detach_sweep(context, sweep, store, say)
    if json_:
        print_json(identity_json(sweep))
    else:
        say_next_commands(context, sweep)


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


def say_next_commands(context: Context, sweep: StartedSweep) -> None:
    say(follow_and_stop_lines(f"{sweep.key}{context.option}"))


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
        failed = summary.first_failure
        if failed is not None and (log := log_of(context, failed)):
            say(f"  trial {failed.number} failed:  {log}")
            word = f"{sweep.key}{context.option}"
            code = "--code " if sweep.code else ""
            say(f"  rerun after a fix:  batchml sweeps rerun --failed {code}{word}")
        say(f"  report:  batchml sweeps report {sweep.key}{context.option}")
    raise typer.Exit(exit_code(summary))
