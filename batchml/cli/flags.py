"""Flags that several commands have, and how their texts are read."""

from typing import Annotated

import typer

from batchml.errors import UsageError

Env = Annotated[str | None, typer.Option("--env", metavar="NAME", help="Environment to work in.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


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
    from batchml.model.reading import parse_duration

    if not text:
        return None
    seconds = parse_duration(text)
    if seconds is None:
        raise UsageError(f'{flag} {text}: write a duration such as "10m", "2h" or "7d".')
    return seconds
