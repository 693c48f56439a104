"""Options that several commands have, parsers of their values, and the command's environment."""

import os
from typing import Annotated

import typer

from batchml.cli.output import say
from batchml.clock import SystemClock
from batchml.config.settings import load_settings
from batchml.context import Context, current_folder
from batchml.errors import UsageError
from batchml.model.tables import parse_duration

Env = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="NAME",
        help="Use this environment; default: `default` of batchml.toml.",
    ),
]
Project = Annotated[
    str | None,
    typer.Option("--project", metavar="NAME", help="Use this project."),
]
AllProjects = Annotated[bool, typer.Option("--all", help="Include all projects.")]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Job id, prefix, name or @last.")]
OneRun = Annotated[str, typer.Argument(metavar="RUN", help="Job id, prefix, name or @last.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]

Wait = Annotated[
    bool, typer.Option("--wait/--detach", help="Stream the log and exit with the job's code.")
]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Do not call AWS; use the list prices that come with batchml."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the AWS requests and send nothing.")]


def read_pairs(texts: list[str] | None, flag: str) -> dict[str, str]:
    """Parse `["K=V"]` as a mapping. Raises UsageError."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} {text}: write it as NAME=VALUE.")
        pairs[name] = value
    return pairs


_MOST_SECONDS = 36_500 * 86_400


def read_seconds(text: str | None, flag: str) -> int | None:
    """Parse `"2h"` as seconds; None for a flag that was not given. Raises UsageError."""
    if not text:
        return None
    seconds = parse_duration(text)
    if seconds is None:
        raise UsageError(f'{flag} {text}: write a duration such as "10m", "2h" or "7d".')
    if seconds > _MOST_SECONDS:
        raise UsageError(f"{flag} {text}: at most 36500d, a hundred years.")
    return seconds


def open_context(
    env_flag: str | None, project_flag: str | None = None, *, all_projects: bool = False
) -> Context:
    """Open the environment of a command: --env, or the default. `project_flag`: --project.

    Raises ConfigError, NotFound, UsageError; also if --project is given beside --all.
    """
    if all_projects and project_flag is not None:
        raise UsageError("--all and --project exclude each other: --all includes every project.")
    here = current_folder()
    settings = load_settings(os.environ, here, env_flag, project_flag)
    return Context(settings, SystemClock(), here, say)


def choose_offline(context: Context, offline: bool, is_preview: bool, flag: str) -> Context:
    """The context of a command with --offline, or of a preview for which there are no credentials.

    `is_preview`: the command shows something and stops, as its `flag` says. Raises UsageError,
    AccessError for credentials that are incomplete or wrong.
    """
    if offline and context.settings.is_local:
        raise UsageError("--offline is for environments in AWS; local never calls AWS.")
    if offline and not is_preview:
        raise UsageError(f"--offline needs {flag}: without it, this command changes things in AWS.")
    if offline:
        return context.without_aws("AWS was not asked (--offline)")
    if not is_preview or context.settings.is_local or context.connect().has_credentials():
        return context
    return context.without_aws("No AWS credentials were found")
