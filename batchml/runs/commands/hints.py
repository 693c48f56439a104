"""Hints for mistakes in command lines of `submit`."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from batchml.cli.app import CheckedCommand, ClickUsageError
from batchml.cli.render import printable
from batchml.runs.options import option_rows

_PAIR = r"(?s)[A-Za-z_][A-Za-z0-9_.]*=.*"
_PROGRAM = r"(?s).*\.(py|sh)|python[0-9.]*|bash|sh|torchrun"


class CommandAfterOptions(CheckedCommand):
    """A command whose usage ends with `-- COMMAND`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


class SubmitCommand(CommandAfterOptions):
    """The command `submit`: its errors have hints."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except ClickUsageError as error:
            self._add_hint(ctx, error, given)
            raise

    def _add_hint(self, ctx: Any, error: Any, given: list[str]) -> None:
        option = getattr(error, "option_name", "")
        sbatch_hint = slurm_hint(option, given) or array_hint(getattr(error, "param", None), given)
        if sbatch_hint:
            hint, error.possibilities = sbatch_hint, None
        elif not hasattr(error, "possibilities") and option:
            return  # the option exists, and lacks its value
        elif not option:
            _, rest, _ = self.make_parser(ctx).parse_args(args=list(given))
            hint = words_hint(given, rest)
        elif _is_near(option, getattr(error, "possibilities", ())):
            return
        else:
            hint = option_hint(given, option)
            error.possibilities = None
        if hint:
            error.message = f"{error.message.rstrip('.')}. {hint}"


def slurm_hint(option: str, given: Sequence[str]) -> str:
    """A hint for an option of sbatch: `--gres: here --gpus 1`; "" for another option."""
    if not option:
        return ""
    place = next((i for i, word in enumerate(given) if word.startswith(option)), None)
    if place is None or [word for word in given[:place] if re.fullmatch(_PROGRAM, word)]:
        return ""  # an option after the program is the program's
    from batchml.jobs import slurm

    name = option.lstrip("-")
    name = name if option.startswith("--") else slurm.SHORT.get(name[:1], "")
    if slurm.PASSED_OVER.get(name):
        return f"{option} is an option of sbatch: {slurm.PASSED_OVER[name]}"
    if name in slurm.REFUSED:
        return f"{option} is an option of sbatch: {slurm.REFUSED[name]}"
    if name not in slurm.READ | slurm.READ_BARE:
        return ""
    return _translate(option, given[place : place + 2])


def array_hint(param: Any, given: Sequence[str]) -> str:
    """A hint for `--array 0-3`, task ids as in sbatch: batchml takes a number; else ""."""
    if getattr(param, "name", "") != "array":
        return ""
    words = list(given)
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--array"), None)
    if place is None:
        return ""
    text = words[place].partition("=")[2] or (words[place + 1] if words[place + 1 :] else "")
    from batchml.jobs.slurm import parse_array

    found = parse_array(text)
    if found is None:
        return ""
    count = len(found.ids)
    if tuple(found.ids) == tuple(range(count)):
        return f"--array {text}: here --array {count}, for 0 to {count - 1}"
    return (
        f"Other ids are for a script's own line, #SBATCH --array={text}; here --array 4 is 0 to 3"
    )


def _translate(option: str, words: Sequence[str]) -> str:
    """The flags of batchml that a line `#SBATCH` with these words would set."""
    from batchml.jobs.script import ScriptLine
    from batchml.jobs.slurm import read_slurm

    if option == "--time" and words[1:] and words[1][-1:] in ("h", "m", "s", "d"):
        return f"{option}: here {_quote(['--timeout', words[1]])}"
    asked = read_slurm([ScriptLine(1, tuple(words))], {})
    if asked.mistakes:  # the next word is not its value, or cannot be read
        asked = read_slurm([ScriptLine(1, tuple(words[:1]))], {})
    if asked.mistakes or not asked.options:
        return ""
    flags = [part for name, value in asked.options.items() for part in _flag(name, value)]
    return f"{option}: here {_quote(flags)}"


def _flag(name: str, value: Any) -> list[str]:
    flag = option_rows()[name].flag
    if isinstance(value, dict):
        return [part for key, each in value.items() for part in (flag, f"{key}={each}")]
    values = value if isinstance(value, list | tuple) else [value]
    return [part for each in values for part in (flag, str(each))]


def _is_near(option: str, known: Iterable[str] | None) -> bool:
    """True for a misspelt option. Typer itself would suggest `--help` for `--lr`."""
    from difflib import get_close_matches

    return bool(get_close_matches(option.strip("-"), [each.strip("-") for each in known or ()]))


def words_hint(given: Sequence[str], rest: Sequence[str]) -> str:
    """A hint for `rest`, the words after the job: parameters `lr=0.3`, or a command; else ""."""
    if not rest:
        return ""
    if all(re.fullmatch(_PAIR, word) for word in rest):
        return f"Parameters of the job: {_quote(part for word in rest for part in ('-p', word))}"
    first = given.index(rest[0])
    return _command(given[max(0, first - 1) :])


def option_hint(given: Sequence[str], option: str) -> str:
    """A hint for an unknown option: a parameter of the job, or an option of the program."""
    place = next((i for i, word in enumerate(given) if word.partition("=")[0] == option), None)
    if place is None:  # one of several letters: -xvf
        return ""
    before = [word for word in given[:place] if not word.startswith("-")]
    if len(before) > 1 or (before and re.fullmatch(_PROGRAM, before[0])):
        return _command(given[given.index(before[0]) :])
    if not option.startswith("--"):
        return ""
    pair = given[place].strip("-")
    if "=" not in pair:
        pair += f"={given[place + 1] if place + 1 < len(given) else 'VALUE'}"
    return f"A parameter of the job: {_quote(['-p', pair])}"


def _command(words: Sequence[str]) -> str:
    if words and words[0].endswith((".sh", ".py")):
        quoted = _quote([words[0], "--", *words[1:]])
        return f"A script's arguments stand after --: batchml submit {quoted}"
    return f"A command stands after --: batchml submit -- {_quote(words)}"


def _quote(words: Iterable[str]) -> str:
    from shlex import join

    return printable(join(words))
