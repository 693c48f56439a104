"""A project's requirements.txt, as one file that pip can read anywhere. No I/O.

Source: pip's documentation, "Requirements File Format".
"""

import re
from collections.abc import Callable, Iterator

from msgspec import Struct

Read = Callable[[str], str | None]  # the text of a file of the folder; None where there is none

# Options that name a file or a folder, and what they name.
_NAMING = re.compile(
    r"(-[rcef]|--(?:requirement|constraint|editable|find-links))(?:\s*=\s*|\s+|(?<=^-\w))"
    r"(\"[^\"]*\"|'[^']*'|\S+).*"
)
_REMOTE = re.compile(r"(?:\w+\+)?(?:https?|ssh|git|ftp)://|git\+")
_LOCAL = re.compile(r"(?:(\w[\w.-]*)(?:\[[^\]]*\])?\s*@\s*)?(?:file:|~?\.{0,2}/|\.(?=$|\[|\s)).*")
_FOLDER = re.compile(r"[\w.-]+/")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")  # as pip reads them
_ARCHIVE = re.compile(r"\S+\.(?:whl|zip|tar\.gz|tgz|tar\.bz2)(?:\s.*)?")
_COMMENT = re.compile(r"(?:^|\s+)#.*$")


class Requirements(Struct, frozen=True):
    """`lines` without comments, what other files of the folder say put in their place."""

    lines: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)


def read_requirements(file: str, read: Read) -> Requirements:
    """The requirements of a file and of those that it names with -r, and every mistake."""
    lines: list[str] = []
    mistakes: list[str] = []
    _read(file, read, lines, mistakes, ())
    return Requirements(tuple(dict.fromkeys(lines)), tuple(mistakes))


def _read(
    file: str, read: Read, lines: list[str], mistakes: list[str], trail: tuple[str, ...]
) -> None:
    text = read(file)
    if text is None:
        mistakes.append(f"{' -> '.join((*trail, file))}: is not in the folder.")
        return
    for number, line in _logical(text):
        option, named = _named(line)
        if option == "r" and not _REMOTE.match(named):
            inner = _beside(file, named)
            if inner is None:
                mistakes.append(f"{file}:{number}: {named} lies outside the folder.")
            elif inner == file or inner in trail:
                mistakes.append(f"{file}:{number}: {inner} includes itself.")
            else:
                _read(inner, read, lines, mistakes, (*trail, file))
            continue
        wrong = _mistake(line, option, named)
        if wrong:
            mistakes.append(f"{file}:{number}: {wrong}")
        else:
            lines.append(line)


def _named(line: str) -> tuple[str, str]:
    """The option that a line begins with, r, c, e or f, and the file or folder after it."""
    found = _NAMING.fullmatch(line)
    return (found[1].lstrip("-")[0], found[2].strip("\"'")) if found else ("", "")


def _mistake(line: str, option: str, named: str) -> str:
    """What an image could not be made with: it has no file of the folder but this one."""
    variable = _VARIABLE.search(line)
    if variable:
        return (
            f"{variable[0]}: a variable, which nobody sets where the image is made. What is secret "
            "does not belong there either: whoever pulls the image can read it."
        )
    if option and not _REMOTE.match(named):
        if option == "c":
            return f"{line}: constraints do not come along. Pin the versions here."
        return f"{line}: a folder of this machine, which no image has. {_TRAVELS}"
    if line.startswith("-"):
        return ""
    path = _LOCAL.fullmatch(line)
    if path and path[1]:
        return f"{line}: a path of this machine. Write {path[1]}==VERSION, {_FREEZE}"
    if path or ("://" not in line and (_ARCHIVE.fullmatch(line) or _FOLDER.match(line))):
        return f"{line}: a path of this machine, which no image has. {_TRAVELS}"
    return ""


_FREEZE = "as `pip list --format=freeze` does for all."
_TRAVELS = (
    "The job's folder travels with the run as its code: import it from there, or write a "
    "Dockerfile."
)


def _logical(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers: without comments, those that end with a backslash joined."""
    parts, start = list[str](), 0
    for number, raw in enumerate(text.splitlines(), 1):
        start = start if parts else number
        line = _COMMENT.sub("", raw).strip()
        if line.endswith("\\"):
            parts.append(line[:-1].strip())
            continue
        whole = " ".join(filter(None, (*parts, line)))
        parts = []
        if whole:
            yield start, whole
    if any(parts):
        yield start, " ".join(filter(None, parts))


def _beside(file: str, other: str) -> str | None:
    """The path of a file that another names, below the folder; None if it leaves it."""
    if other.startswith("/"):
        return None
    parts = [part for part in file.split("/")[:-1]]
    for part in other.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)
