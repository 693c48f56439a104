"""The root of the command line: `run(arguments)` -> exit code."""

import io
import os
import sys
from collections.abc import Sequence

import typer

from batchml.errors import BatchmlError

app = typer.Typer(
    name="batchml",
    help="Run training containers on AWS Batch, or on this machine by the same commands.",
    epilog="Example: batchml submit --wait lenet",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 80},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def command_group(name: str, words: str, example: str) -> typer.Typer:
    """A group of commands below the root, such as `local`."""
    group = typer.Typer(
        help=words, epilog=f"Example: {example}", no_args_is_help=True, rich_markup_mode=None
    )
    app.add_typer(group, name=name)
    return group


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from batchml import __version__

        print(f"batchml {__version__}")
        raise typer.Exit


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Errors of ours become one message on stderr and their exit code."""
    before, command = _split_command(list(arguments))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a job prints may be anything; a terminal of another encoding shows "?" for it.
            stream.reconfigure(errors="replace")
    try:
        try:
            app(args=before, prog_name="batchml", obj=command)
        finally:
            sys.stdout.flush()  # here, where a full disk can still be told
    except BatchmlError as error:
        print(f"batchml: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        _drop_output()  # whoever read it has gone
        return 141
    except OSError as error:  # of the system: a disk that is full, a folder that is not ours
        where = f" ({error.filename})" if error.filename else ""
        print(f"batchml: {error.strerror or error}{where}", file=sys.stderr)
        _drop_output()
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def _drop_output() -> None:
    """Nothing more can be written to stdout, nor at exit what it still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split_command(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """What follows the first `--` is the run's command, never ours to parse."""
    if "--" not in arguments:
        return arguments, None
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


from batchml.cli import (  # noqa: E402  (the commands register themselves)
    compute,  # noqa: F401
    doctor,  # noqa: F401
    envs,  # noqa: F401
    images,  # noqa: F401
    jobdef,  # noqa: F401
    jobs,  # noqa: F401
    local,  # noqa: F401
    queues,  # noqa: F401
    setup,  # noqa: F401
)
