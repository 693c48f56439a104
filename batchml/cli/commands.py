"""completion: the script that a shell needs for Tab to know batchml's words."""

import sys
from typing import Annotated

import typer

from batchml.cli.app import app
from batchml.cli.completion import SCRIPTS
from batchml.errors import UsageError, did_you_mean


@app.command(epilog='Example: eval "$(batchml completion bash)"')
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script that completes commands, options and names in a shell."""

    if shell not in SCRIPTS:
        raise UsageError(
            f"completion {shell}: no such shell.{did_you_mean(shell, SCRIPTS)} "
            f"Shells: {', '.join(SCRIPTS)}."
        )
    sys.stdout.write(SCRIPTS[shell])
