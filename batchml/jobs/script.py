"""Read the `#BATCHML` and `#SBATCH` lines of a script that is submitted.

As in sbatch, lines after the first command are not read.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

OURS, SLURMS = "#BATCHML", "#SBATCH"
_OTHER_SCHEDULERS = {"#PBS": "PBS", "#BSUB": "LSF", "#$ -": "Grid Engine", "#COBALT": "Cobalt"}
_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".batch", ".job")


class ScriptLine(Struct, frozen=True):
    """A `#BATCHML` or `#SBATCH` line."""

    number: int  # from 1
    words: tuple[str, ...]


class Script(Struct, frozen=True):
    """The directives of a script. `mistakes` and `notices` name their lines."""

    ours: tuple[ScriptLine, ...] = ()
    slurms: tuple[ScriptLine, ...] = ()
    mistakes: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    has_slurm: bool = False  # it has `#SBATCH` lines, calls srun, or reads SLURM_ variables


def is_script_name(name: str) -> bool:
    return name.endswith(_SUFFIXES)


def looks_like_script(name: str, text: str) -> bool:
    """Say whether a file is a script to submit, and not a program for an interpreter."""
    return text.startswith("#!") or is_script_name(name) or any(map(_kind, text.split("\n")))


def read_script(text: str, program: Sequence[str]) -> Script:
    """Read a script. `program` are the words after `#!` of its first line."""
    mistakes, notices = list(_fatal_mistakes(text, program)), list[str]()
    ours, slurms = list[ScriptLine](), list[ScriptLine]()
    first_command = 0  # the number of its line
    for number, line in enumerate(text.split("\n"), 1):
        bare = line.strip()
        kind = _kind(line)
        if kind and first_command:
            notices.append(
                f"line {number}: {kind} after the first command (line {first_command}) is not "
                "read, as in sbatch."
            )
        elif kind:
            words = _words(line[len(kind) :])
            if words is None:
                mistakes.append(f"line {number}: a quote is not closed.")
            else:
                (ours if kind == OURS else slurms).append(ScriptLine(number, tuple(words)))
        elif bare and not bare.startswith("#"):
            first_command = first_command or number
    notices += (*_foreign_notices(text), *_spelling_notices(text))
    notices += _cluster_notices(text, program)
    is_slurm = has_slurm(text)
    resumes = re.search(_AUTO_RESUME, text) if is_slurm else None
    if resumes:  # it is about the whole run, as if a line #SBATCH had it
        number = text.count("\n", 0, resumes.start()) + 1
        slurms.append(ScriptLine(number, ("--auto-resume=1",)))
    return Script(tuple(ours), tuple(slurms), tuple(mistakes), tuple(notices), is_slurm)


# In a call of srun, which may go on in the next lines, or in a variable for one: AWS's scripts have
# AUTO_RESUME="--auto-resume=1", then srun ${AUTO_RESUME}.
_AUTO_RESUME = (
    r"(?m)^[ \t]*(?:srun[ \t](?:[^\n#]|\\\n)*?|(?:export[ \t]+)?\w+=[\"']?)"
    r"--auto-resume[= ][\"']?1\b"
)


def has_slurm(text: str) -> bool:
    """Say whether a script has `#SBATCH` lines, calls srun, or reads SLURM_ variables."""
    return bool(re.search(r"^#SBATCH\b|\bSLURM_|^[ \t]*srun\b", text, re.MULTILINE))


def sort_by_line(messages: Iterable[str]) -> list[str]:
    """Sort mistakes or notices by the lines that they name; those without a line come first."""
    return sorted(dict.fromkeys(messages), key=_line_of)


def _line_of(words: str) -> int:
    match = re.match(r"line (\d+):", words)
    return int(match[1]) if match else 0


# --- The text -------------------------------------------------------------------------------------


def _fatal_mistakes(text: str, program: Sequence[str]) -> Iterator[str]:
    """Yield the mistakes with which a script cannot run at all."""
    if not text.strip():
        yield "the script is empty."
    elif text.startswith("\ufeff"):
        yield "line 1: has a byte order mark before #!. Save it as UTF-8 without that mark."
    elif not text.startswith("#!"):
        yield "line 1: has no #! with the program that runs the script. Write #!/bin/bash there."
    elif not program:
        yield "line 1: names no program after #!. Write #!/bin/bash there."
    if "\r\n" in text:
        yield "its lines end in CR LF, as on Windows. Change them: sed -i 's/\\r$//' SCRIPT"
    if "\0" in text:
        yield "it has a NUL character, so it is no script."


def _kind(line: str) -> str:
    """Return OURS or SLURMS for a line with options; "" for another line."""
    for kind in (OURS, SLURMS):
        if line.startswith(kind) and line[len(kind) : len(kind) + 1] in ("", " ", "\t"):
            return kind
    return ""


def _words(text: str) -> list[str] | None:
    """Split a line into words, without a comment at its end; None if a quote is not closed."""
    try:
        return shlex.split(_without_comment(text))
    except ValueError:
        return None


def _without_comment(text: str) -> str:
    """Cut the text at a # that begins a word. A # inside a word or quotes is text."""
    quote, before = "", " "
    for at, char in enumerate(text):
        if before == "\\" and quote != "'":
            before = ""  # an escaped character
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and before.isspace():
            return text[:at]
        before = char
    return text


def _foreign_notices(text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), 1):
        for mark, scheduler in _OTHER_SCHEDULERS.items():
            if line.startswith(mark):
                yield f"line {number}: {scheduler} options are not read. Write #BATCHML lines."
                return


def _spelling_notices(text: str) -> Iterator[str]:
    """Report comments such as `#sbatch --time 1`. `##SBATCH` and `# SBATCH` disable a line."""
    for number, line in enumerate(text.split("\n"), 1):
        match = re.match(_MISSPELT, line)
        if match and not _kind(line):
            kind = f"#{match[1].upper()}"
            yield (
                f"line {number}: `{line.strip()[:40]}` is a comment: write {kind} at the beginning "
                "of the line, with a space after it."
            )


_MISSPELT = r"(?i)[ \t]*#(SBATCH|BATCHML)(?=[ \t-])"
_SHELLS = r"(?:.*/)?(?:ba|da|z|k|a)?sh"
_CLUSTER_COMMANDS = (
    (
        r"(?m)^[ \t]*(?:module[ \t]+(?:load|add|purge|use|swap)|ml[ \t]+\w).*",
        "an image has its packages installed and has no environment modules: `module` does nothing",
    ),
    (
        r"(?m)^[ \t]*(?:conda|mamba|micromamba|source)[ \t]+activate\b.*",
        "an image has one environment, which is active already. Choose packages by --image",
    ),
    (
        r"(?m)^[ \t]*sbatch\b.*",
        "a run has no Slurm: submit the next run with batchml submit --after",
    ),
    *(
        (
            rf"(?m)^[ \t]*{name}\b.*",
            f"a run has no Slurm: use batchml {ours} outside of the run",
        )
        for name, ours in (
            ("squeue", "ls"),
            ("scancel", "cancel"),
            ("sacct", "show"),
            ("sinfo", "compute list"),
        )
    ),
)


def _cluster_notices(text: str, program: Sequence[str]) -> Iterator[str]:
    """Report commands of cluster scripts that do not work in a run, each at its first line."""
    shell = program[-1] if program[:1] == ["/usr/bin/env"] else "".join(program[:1])
    if not re.fullmatch(_SHELLS, shell):
        return
    for pattern, notice in _CLUSTER_COMMANDS:
        match = re.search(pattern, text)
        if match:
            number = text.count("\n", 0, match.start()) + 1
            yield f"line {number}: `{match[0].strip()[:60]}`: {notice}."
