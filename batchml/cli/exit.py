"""How a command ends after Ctrl-C."""

import os
import signal
import sys

import typer

from batchml.errors import INTERRUPTED


class Detached(typer.Exit):
    """Ctrl-C was handled: now the command ends as it would have ended it."""


def end_interrupted() -> int:
    """End like a program that Ctrl-C ended: only then a shell ends its loop, too.

    Without a terminal, return the exit code for an interruption: scripts rely on it.
    """
    if any(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        try:
            sys.stdout.flush()
        except OSError:
            pass  # the reader has gone
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return INTERRUPTED
