"""The steps that `alloc` and `notebook` share: submit a held run, wait until it runs, end it."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from msgspec import Struct

from batchml.cli.output import print_json, print_line, say
from batchml.cli.render import printable
from batchml.errors import BatchmlError, HeldRunEnded
from batchml.model.outcome import describe_outcome
from batchml.model.run import Run
from batchml.runs.commands.interrupt import finish_submission
from batchml.runs.commands.live import WaitingRuns, status_line_below
from batchml.runs.groups.members import terminate_all
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, to_requests
from batchml.runs.submit import announcement, submit_run
from batchml.sessions.held import (
    describe_run_cost,
    end_held_run,
    prepare_held_run,
    wait_until_running,
)

if TYPE_CHECKING:
    from batchml.context import Context

NEVER = "never"  # as a value of --idle

_CANCEL_REASON = "Cancelled by the user while it waited"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class HeldKind(Struct, frozen=True):
    """The differences between the commands that hold a run."""

    tag: str  # the value of the tag of held runs
    name: str  # of the run in messages: "run", "notebook"
    end_message: str  # when the user has ended the run


class EndSignal(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a closed terminal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C, so that the run is ended then, too."""

    def interrupt(number: int, _frame: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise EndSignal(number)

    before = [signal.signal(number, interrupt) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def exit_code_after(interrupt: KeyboardInterrupt) -> int:
    """Return the exit code after Ctrl-C or a signal."""
    number = interrupt.number if isinstance(interrupt, EndSignal) else int(signal.SIGINT)
    return 128 + number


def prepare(
    context: "Context",
    request: RunRequest,
    kind: HeldKind,
    *,
    idle_s: float | None,
    dry_run: bool,
) -> PreparedRun:
    """Prepare the run and print its notices. With `dry_run` print the requests and exit."""
    prepared = prepare_held_run(context, request, kind=kind.tag, idle_s=idle_s, notify=say)
    for notice in prepared.notices:
        say(notice)
    if dry_run:
        print_json(to_requests(prepared))
        raise typer.Exit(0)
    return prepared


def start(
    context: "Context",
    prepared: PreparedRun,
    *,
    wait: Callable[[str], Run] | None,
    on_error: Callable[[str], None],
) -> tuple[str, Run | None]:
    """Submit the run and `wait` for it; return its id, and the running run (None without `wait`).

    Ctrl-C cancels the run and exits. After any other error the run is still held, and `on_error`
    says so to the user.
    """
    job_ids: list[str] = []
    try:
        with finish_submission(job_ids):
            job_id = submit_run(context, prepared, say)
            job_ids.append(job_id)
            say(announcement(context, prepared, job_id))
        return job_id, wait(job_id) if wait else None
    except KeyboardInterrupt as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C exits at once
        for job_id in job_ids:
            terminate_all(context, [job_id], _CANCEL_REASON)
            say(f"\nCancelled job {job_id}.")
        raise typer.Exit(exit_code_after(interrupt)) from None
    except HeldRunEnded:
        raise
    except BatchmlError:
        for job_id in job_ids:
            on_error(job_id)
        raise


def wait_for_run(context: "Context", job_id: str, hint: str) -> Run:
    """Wait until the run is RUNNING, with a status line. Raises HeldRunEnded."""
    waiting = WaitingRuns(context.clock, list(context.describe([job_id]).values()), hint)
    with status_line_below(waiting, context.clock, True):
        # On a terminal, stdout is printed above the status line.
        notify = print_line if sys.stdout.isatty() else say
        return wait_until_running(context, job_id, notify, see=waiting.see)


def end_run(context: "Context", job_id: str, kind: HeldKind) -> Run | None:
    """End the run, report its end and its cost, and return it; None if it has not ended yet."""
    ended = end_held_run(context, job_id, say)
    cost = describe_run_cost(context, job_id)
    if ended is None:
        say(f"The {kind.name} is being stopped. {cost}")
    elif ended.status.value == "SUCCEEDED":
        say(f"{kind.end_message} {cost}")
    else:
        say(f"The {kind.name} ended: {printable(describe_outcome(ended))}. {cost}")
    return ended
