"""Ctrl-C in commands that submit or follow runs: detach from the runs, or stop them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from batchml.cli.app import Detached
from batchml.cli.output import say
from batchml.errors import INTERRUPTED
from batchml.model.run import EXIT_CODES, OutcomeClass
from batchml.runs.send import Interrupted

if TYPE_CHECKING:
    from batchml.context import Context

SUBMIT_PATIENCE = 2.0  # seconds for the pending answer; then the run is looked up once
LOOKUP_TIME = 3.0  # seconds for the look-up
_MANY = 5  # jobs; for more there is one message for all


class _Terminated(KeyboardInterrupt):
    """SIGTERM."""


@contextmanager
def detaching(context: "Context", job_ids: list[str], *, cancel: bool = False) -> Iterator[None]:
    """After Ctrl-C leave the runs alone, and print how to come back; a second one exits at once.

    With `cancel`, stop them instead. SIGTERM counts as Ctrl-C: a CI job that is cancelled.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if job_ids and not cancel:
            say(f"\nDetached: the {'job goes' if len(job_ids) == 1 else 'jobs go'} on.")
        if not cancel and len(job_ids) > _MANY:
            say(f"  {len(job_ids)} of them:  batchml ls{context.env_option}")
            job_ids = []
        for job_id in job_ids:
            if cancel:
                from batchml.runs.groups.members import terminate_all

                terminate_all(context, [job_id], "Cancelled by the user (Ctrl-C)")
                say(f"Cancelled job {job_id}.")
            else:
                say_next_commands(context, job_id)
        code = EXIT_CODES[OutcomeClass.CANCELLED] if cancel else INTERRUPTED
        raise (typer.Exit if isinstance(stop, _Terminated) else Detached)(code) from None
    finally:
        if signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: object) -> None:
    raise _Terminated


@contextmanager
def finish_submission(
    sent: list[str], patience: float = SUBMIT_PATIENCE, look: float = LOOKUP_TIME
) -> Iterator[None]:
    """Hold the first Ctrl-C back for some seconds, until the run has its id; a second one exits.

    `sent` gets the id of a run that was found after Ctrl-C. Where the outcome is unknown, a message
    says how to find out. Ctrl-C is raised at the end in any case, as KeyboardInterrupt.
    """
    interrupted = False

    def hold(_number: int, _frame: object) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        say("\nFinishing the submission first. Ctrl-C again leaves at once.")
        signal.setitimer(signal.ITIMER_REAL, patience, look)

    def give_up(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hold), signal.signal(signal.SIGALRM, give_up)
    try:
        yield
    except Interrupted as stop:
        if stop.job_id:
            sent.append(stop.job_id)
            say(f"Submitted job {stop.job_id}.")
        elif stop.is_open:
            say(
                f"\nNobody knows yet whether it was submitted: batchml reconcile {stop.key}\n"
                "  Until then, submitting it again could make a second run."
            )
        else:
            say("\nNothing was submitted.")
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGALRM, before[1])
    if interrupted:
        signal.raise_signal(signal.SIGINT)


def say_next_commands(context: "Context", job_id: str) -> None:
    if ":" in job_id:
        from batchml.runs.rerun.rules import display_id

        job_id = display_id(context, job_id)
    say(f"  follow:  batchml logs -f {job_id}{context.env_option}")
    say(f"  cancel:  batchml cancel {job_id}{context.env_option}")
