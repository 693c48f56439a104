"""Ctrl-C while a run is being submitted: its job id first, within some seconds."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from batchml.cli.output import say
from batchml.errors import INTERRUPTED

PATIENCE = 2.0  # seconds for the answer that is under way; then the run is looked up once
LOOK = 3.0  # seconds for that


def end_interrupted() -> int:
    """End as a program does that Ctrl-C ended: only then a shell ends its loop, too.

    Where nobody sits at a terminal, return the exit code that says so: scripts rely on it.
    """
    if any(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        try:
            sys.stdout.flush()
        except OSError:
            pass  # whoever read it has gone
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return INTERRUPTED


@contextmanager
def submitting(sent: list[str], patience: float = PATIENCE, look: float = LOOK) -> Iterator[None]:
    """Hold the first Ctrl-C back until the run has its id, for some seconds; a second leaves.

    `sent` gets the id of a run that was found after Ctrl-C. Where nobody knows what became of it,
    the way to find out is said. Ctrl-C arrives at the end in any case, as KeyboardInterrupt.
    """
    from batchml.ops.submit import Interrupted

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
