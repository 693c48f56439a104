"""What a command line that cannot be read was probably meant to say."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

# A line that cannot be read. Where typer keeps its name depends on the version.
WrongLine: type[Exception] = typer.BadParameter.__mro__[1]

# What other programs call our commands.
SYNONYMS = {
    "status": "ls", "ps": "ls", "list": "ls", "jobs": "ls", "runs": "ls", "history": "ls",
    "run": "submit", "start": "submit", "exec": "submit", "stop": "cancel", "kill": "cancel",
    "terminate": "cancel", "delete": "cancel", "rm": "cancel", "log": "logs", "tail": "logs",
    "follow": "logs -f", "attach": "logs -f", "describe": "show", "info": "show", "why": "explain",
    "download": "get", "fetch": "get", "retry": "rerun", "resubmit": "rerun", "price": "cost",
    "help": "--help", "version": "--version",
}  # fmt: skip

_PAIR = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=.*", re.DOTALL)
_PROGRAM = re.compile(r".*\.(py|sh)|python[0-9.]*|bash|sh|torchrun", re.DOTALL)


class SubmitCommand(TyperCommand):
    """Says what stands after `--`, and how a line is written that forgot it."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except WrongLine as error:
            self._help(ctx, error, given)
            raise

    def _help(self, ctx: Any, error: Any, given: list[str]) -> None:
        option = getattr(error, "option_name", "")
        if not option:
            _, rest, _ = self.make_parser(ctx).parse_args(args=list(given))
            hint = about_words(given, rest)
        elif _is_near(option, getattr(error, "possibilities", ())):
            return
        else:
            hint = about_option(given, option)
            error.possibilities = None
        if hint:
            error.message = f"{error.message}. {hint}"


def _is_near(option: str, known: Iterable[str] | None) -> bool:
    """Whether it is one of ours, misspelt. Typer finds `--help` like `--lr`."""
    from difflib import get_close_matches

    return bool(get_close_matches(option.strip("-"), [each.strip("-") for each in known or ()]))


def about_words(given: Sequence[str], rest: Sequence[str]) -> str:
    """For words after the job: `lr=0.3`, or the program's own. `rest` are those; "" if none are."""
    if not rest:
        return ""
    if all(_PAIR.fullmatch(word) for word in rest):
        return f"Parameters of the job: {_joined(part for word in rest for part in ('-p', word))}"
    first = given.index(rest[0])
    return _command(given[max(0, first - 1) :])


def about_option(given: Sequence[str], option: str) -> str:
    """For an option that we do not have: a parameter of the job, or the program's own."""
    place = next((i for i, word in enumerate(given) if word.partition("=")[0] == option), None)
    if place is None:  # one letter of several: -xvf
        return ""
    before = [word for word in given[:place] if not word.startswith("-")]
    if len(before) > 1 or (before and _PROGRAM.fullmatch(before[0])):
        return _command(given[given.index(before[0]) :])
    if not option.startswith("--"):
        return ""
    pair = given[place].strip("-")
    if "=" not in pair:
        pair += f"={given[place + 1] if place + 1 < len(given) else 'VALUE'}"
    return f"A parameter of the job: {_joined(['-p', pair])}"


def about_command(word: str) -> str:
    """For a word that is none of our commands, but one of somebody's."""
    return f"Did you mean 'batchml {SYNONYMS[word]}'?" if word in SYNONYMS else ""


def _command(words: Sequence[str]) -> str:
    if words and words[0].endswith(".py"):
        words = ["python", *words]
    return f"A command stands after --: batchml submit -- {_joined(words)}"


def _joined(words: Iterable[str]) -> str:
    from shlex import join

    from batchml.cli.render import printable

    return printable(join(words))
