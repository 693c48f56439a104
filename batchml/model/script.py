"""A script that is a job: its lines `#BATCHML` and `#SBATCH`. Pure.

As sbatch does, lines are read up to the first that is neither empty nor a comment.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from batchml.errors import did_you_mean

OURS, SLURMS = "#BATCHML", "#SBATCH"
_OTHERS = {"#PBS": "PBS", "#BSUB": "LSF", "#$ -": "Grid Engine", "#COBALT": "Cobalt"}
_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".batch", ".job")

# Flags of `submit` that a script may give, and what `Client.order` calls them. A test compares them
# with the command's own.
NUMBERS = {"--vcpus", "--gpus", "--nodes", "--array", "--attempts"}
TEXTS = {"--name", "--queue", "--image", "--memory", "--timeout", "--share", "--fallback"}
AMOUNTS = {"--max-cost"}
PAIRS = {"--param": "params", "--set-env": "set_env", "--tag": "tags"}
LISTS = {"--after", "--retry-on"}
SWITCHES = {"--strict-resources", "--include-secrets"}
SHORT = {"-p": "--param"}
# What is the command's alone: where to, and what the command then does.
NOT_HERE = {"--wait", "--detach", "--dry-run", "--env", "--json", "--cancel-on-interrupt"}

_KNOWN = NUMBERS | TEXTS | AMOUNTS | set(PAIRS) | LISTS | SWITCHES


class Line(Struct, frozen=True):
    """A line that says something to the scheduler; `number` from 1."""

    number: int
    words: tuple[str, ...]


class Script(Struct, frozen=True):
    """A script as it stands. `mistakes` and `notices` name their lines."""

    ours: tuple[Line, ...] = ()
    slurms: tuple[Line, ...] = ()
    mistakes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    has_slurm: bool = False  # it speaks Slurm: by its lines, or by what it calls or reads


def is_script_name(name: str) -> bool:
    return name.endswith(_SUFFIXES)


def looks_like_script(name: str, text: str) -> bool:
    """Whether a file is meant to be submitted as a script, and is no program for another to run."""
    return text.startswith("#!") or is_script_name(name) or bool(_directive(text))


def read_script(text: str, program: Sequence[str]) -> Script:
    """What a script says whose first line names this program. Everything wrong is in `mistakes`."""
    mistakes, notices = list(_form(text, program)), list[str]()
    ours, slurms = list[Line](), list[Line]()
    begun = 0  # the number of the first command's line
    for number, line in enumerate(text.split("\n"), 1):
        bare = line.strip()
        kind = _kind(line)
        if kind and begun:
            notices.append(
                f"line {number}: {kind} below the first command (line {begun}) is not read, as "
                "sbatch does not."
            )
        elif kind:
            words = _words(line[len(kind) :])
            if words is None:
                mistakes.append(f"line {number}: a quote is not closed.")
            else:
                (ours if kind == OURS else slurms).append(Line(number, tuple(words)))
        elif bare and not bare.startswith("#"):
            begun = begun or number
    notices += (*_foreign(text), *_nearly(text))
    notices += _habits(text, program)
    return Script(tuple(ours), tuple(slurms), tuple(mistakes), tuple(notices), has_slurm(text))


def has_slurm(text: str) -> bool:
    """Whether a script speaks Slurm: by its lines, or by what it calls or reads."""
    return bool(re.search(r"^#SBATCH\b|\bSLURM_|^[ \t]*srun\b", text, re.MULTILINE))


def by_line(said: Iterable[str]) -> list[str]:
    """Mistakes or notices in the order of the lines that they name; those of none first."""
    return sorted(dict.fromkeys(said), key=_line_of)


def _line_of(words: str) -> int:
    match = re.match(r"line (\d+):", words)
    return int(match[1]) if match else 0


def read_ours(lines: Sequence[Line]) -> tuple[dict[str, Any], list[str]]:
    """What the `#BATCHML` lines say, as arguments of `Client.order`, and every mistake in them.

    Of a flag that is given twice the last counts, as on a command line.
    """
    found: dict[str, Any] = {}
    mistakes: list[str] = []
    for line in lines:
        words = list(line.words)
        while words:
            wrong = _take(words, found)
            if wrong:
                mistakes.append(f"line {line.number}: {wrong}")
    return found, mistakes


def _take(words: list[str], found: dict[str, Any]) -> str:
    """Take one flag with its value off the words into `found`; what is wrong with it, or ""."""
    word = words.pop(0)
    flag, equals, value = word.partition("=")
    if word.startswith("-p") and not word.startswith("--") and len(word) > 2:
        flag, equals, value = "-p", "=", word[2:]
    flag = SHORT.get(flag, flag)
    if flag in NOT_HERE:
        return f"{flag} belongs on the command line: it says what the command does, not the run."
    if flag not in _KNOWN:
        while words and not words[0].startswith("-"):  # its values
            words.pop(0)
        return f"{OURS} {word}: is no flag of batchml submit.{did_you_mean(flag, _KNOWN)}"
    if flag in SWITCHES:
        found[_name(flag)] = True
        return f"{flag}: takes no value." if equals else ""
    if not equals:
        if not words or (words[0].startswith("--") and words[0].partition("=")[0] in _KNOWN):
            return f"{flag}: has no value."
        value = words.pop(0)
    return _put(flag, value, found)


def _put(flag: str, value: str, found: dict[str, Any]) -> str:
    name = _name(flag)
    if flag in NUMBERS or flag in AMOUNTS:
        number = _number(value, int if flag in NUMBERS else float)
        if number is None:
            return f"{flag}: found {value!r}. Give a number."
        found[name] = number
    elif flag in PAIRS:
        key, equals, text = value.partition("=")
        if not equals or not key:
            return f"{flag} {value}: write it as NAME=VALUE."
        found.setdefault(name, {})[key] = text
    elif flag in LISTS:
        found.setdefault(name, []).append(value)
    else:
        found[name] = value
    return ""


def _number(text: str, kind: type[int] | type[float]) -> int | float | None:
    try:
        return kind(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def _name(flag: str) -> str:
    return PAIRS.get(flag, flag.removeprefix("--").replace("-", "_"))


# --- the text -------------------------------------------------------------------------------------


def _form(text: str, program: Sequence[str]) -> Iterator[str]:
    """What keeps a script from being one."""
    if not text.strip():
        yield "the script is empty."
    elif text.startswith("\ufeff"):
        yield "line 1: a byte order mark is before its #!. Save it as UTF-8 without one."
    elif not text.startswith("#!"):
        yield "line 1: no #! says what runs it. Write #!/bin/bash there."
    elif not program:
        yield "line 1: names no program behind #!. Write #!/bin/bash there."
    if "\r\n" in text:
        yield "its lines end as those of Windows (CR LF). Change them: sed -i 's/\\r$//' SCRIPT"
    if "\0" in text:
        yield "it has a NUL, which no script has."


def _kind(line: str) -> str:
    for kind in (OURS, SLURMS):
        if line.startswith(kind) and line[len(kind) : len(kind) + 1] in ("", " ", "\t"):
            return kind
    return ""


def _directive(text: str) -> str:
    return next(filter(None, map(_kind, text.split("\n"))), "")


def _words(text: str) -> list[str] | None:
    """The words of a line, without a comment behind them; None where a quote is not closed."""
    try:
        return shlex.split(_without_comment(text))
    except ValueError:
        return None


def _without_comment(text: str) -> str:
    """Up to a # that begins a word: one inside a word or a quote is its part."""
    quote, before = "", " "
    for place, char in enumerate(text):
        if before == "\\" and quote != "'":
            before = ""  # this one is taken as it is, and nothing after it is
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and before.isspace():
            return text[:place]
        before = char
    return text


def _foreign(text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        for mark, whose in _OTHERS.items():
            if line.startswith(mark):
                yield f"line {number}: a line of {whose}, which is not read. Write #BATCHML lines."
                return


def _nearly(text: str) -> Iterator[str]:
    """Lines that were meant, and are comments. `##SBATCH` and `# SBATCH` are how one is put out."""
    for number, line in enumerate(text.split("\n"), 1):
        match = _MEANT.match(line)
        if match and not _kind(line):
            kind = f"#{match[1].upper()}"
            yield (
                f"line {number}: `{line.strip()[:40]}` is a comment: write {kind} at the beginning "
                "of the line, and a space behind it."
            )


_MEANT = re.compile(r"[ \t]*#(SBATCH|BATCHML)(?=[ \t-])", re.IGNORECASE)
_SHELLS = re.compile(r"(?:.*/)?(?:ba|da|z|k|a)?sh")
_HABITS = (
    (
        re.compile(
            r"^[ \t]*(?:module[ \t]+(?:load|add|purge|use|swap)|ml[ \t]+\w).*", re.MULTILINE
        ),
        "an image has its packages already and knows no modules: `module` does nothing there",
    ),
    (
        re.compile(r"^[ \t]*(?:conda|mamba|micromamba|source)[ \t]+activate\b.*", re.MULTILINE),
        "an image has one environment, which is active: its packages are those of --image",
    ),
    (
        re.compile(r"^[ \t]*sbatch\b.*", re.MULTILINE),
        "there is no Slurm in a run: submit what follows with --after",
    ),
    *(
        (
            re.compile(rf"^[ \t]*{name}\b.*", re.MULTILINE),
            f"there is no Slurm in a run: outside of it, batchml {ours} does that",
        )
        for name, ours in (
            ("squeue", "ls"),
            ("scancel", "cancel"),
            ("sacct", "show"),
            ("sinfo", "compute list"),
        )
    ),
)


def _habits(text: str, program: Sequence[str]) -> Iterator[str]:
    """What scripts for clusters do that is otherwise here; each said once, for its first line."""
    shell = program[-1] if program[:1] == ["/usr/bin/env"] else "".join(program[:1])
    if not _SHELLS.fullmatch(shell):
        return
    for pattern, said in _HABITS:
        match = pattern.search(text)
        if match:
            number = text.count("\n", 0, match.start()) + 1
            yield f"line {number}: `{match[0].strip()[:60]}`: {said}."
