"""Flags that several commands have, and functions that parse their values."""

import os
from pathlib import Path
from typing import Annotated

import typer

from batchml.cli.output import say
from batchml.clock import SystemClock
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import UsageError
from batchml.model.tables import parse_duration

Env = Annotated[str | None, typer.Option("--env", metavar="NAME", help="Use this environment.")]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Job id, prefix, name or @last.")]
OneRun = Annotated[str, typer.Argument(metavar="RUN", help="Job id, prefix, name or @last.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]

# Of a run that is submitted, or submitted again.
Param = Annotated[
    list[str] | None, typer.Option("--param", "-p", metavar="K=V", help="Set a parameter.")
]
Name = Annotated[str | None, typer.Option(help="Name of the run.")]
Queue = Annotated[str | None, typer.Option(help="Job queue.")]
Vcpus = Annotated[int | None, typer.Option(help="vCPUs.")]
Memory = Annotated[str | None, typer.Option(help='Memory, such as "8 GiB".')]
Gpus = Annotated[int | None, typer.Option(help="GPUs.")]
Nodes = Annotated[int | None, typer.Option(metavar="N", help="Nodes of a multi-node run.")]
Attempts = Annotated[int | None, typer.Option(help="Tries in all.")]
Timeout = Annotated[str | None, typer.Option(help='Of one attempt, such as "4h".')]
MaxCost = Annotated[
    float | None, typer.Option(metavar="USD", help="Save and stop before it costs more.")
]
Tag = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Tag the run.")]
SetEnv = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Set a variable of the run.")]
Wait = Annotated[
    bool, typer.Option("--wait/--detach", help="Stream the log and exit with the job's code.")
]
Fallback = Annotated[
    str | None,
    typer.Option(metavar="QUEUE[:30m]", help="Move there if it finds no host for so long."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the AWS requests and send nothing.")]


def read_pairs(given: list[str] | None, flag: str) -> dict[str, str]:
    """`["K=V"]` as a mapping. Raises UsageError."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} {text}: write it as NAME=VALUE.")
        found[name] = value
    return found


def read_seconds(text: str | None, flag: str) -> int | None:
    """`"2h"` as seconds; None where the flag was not given. Raises UsageError."""

    if not text:
        return None
    seconds = parse_duration(text)
    if seconds is None:
        raise UsageError(f'{flag} {text}: write a duration such as "10m", "2h" or "7d".')
    return seconds


# --- The environment ------------------------------------------------------------------------------


def open_context(env_flag: str | None) -> Context:
    """The environment of a command. Raises ConfigError, NotFound, UsageError."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UsageError("The current folder does not exist any more: cd to another.") from None
    return Context(load_settings(os.environ, here, env_flag), SystemClock(), here, say)
