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

SUBMIT_PATIENCE = 2.0  # seconds that a submission may take after Ctrl-C; then the run is looked up
LOOKUP_TIME = 3.0  # seconds for the look-up
_MANY = 5  # for more jobs there is one message for all


class _Terminated(KeyboardInterrupt):
    """The process got SIGTERM."""


@contextmanager
def detaching(context: "Context", job_ids: list[str], *, cancel: bool = False) -> Iterator[None]:
    """After Ctrl-C print how to return to the runs, and exit; a second Ctrl-C exits at once.

    With `cancel`, stop the runs instead. SIGTERM, which cancels a CI job, counts as Ctrl-C.
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
    """After Ctrl-C, wait some seconds until the run has its id; a second Ctrl-C exits.

    `sent` gets the id of a run that was found after Ctrl-C. If the outcome is unknown, a message
    says how to find out. KeyboardInterrupt is raised at the end in any case.
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
                "\nIt is not known yet whether the run was submitted: "
                f"batchml reconcile {stop.key}\n"
                "  Until then, another submission could make a second run."
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
    """Print the commands that follow and cancel a run."""
    if ":" in job_id:
        from batchml.runs.find import display_id

        job_id = display_id(context, job_id)
    say(f"  follow:  batchml logs -f {job_id}{context.env_option}")
    say(f"  cancel:  batchml cancel {job_id}{context.env_option}")
