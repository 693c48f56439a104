"""What the command line adds to a client: the current folder and the environment variables."""

import os
from pathlib import Path

from batchml.cli.output import say
from batchml.client.place import Place
from batchml.clock import SystemClock
from batchml.errors import UsageError
from batchml.settings import load_settings


def open_place(env_flag: str | None) -> Place:
    """The environment that a command works in. Raises ConfigError, NotFound, UsageError."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UsageError("The current folder does not exist any more: cd to another.") from None
    return Place(load_settings(os.environ, here, env_flag), SystemClock(), here, say)
