"""A project's Dockerfile: which files it copies, and what batchml adds to it. No I/O.

Source: Docker's documentation, "Dockerfile reference".
"""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile

from msgspec import Struct

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(.*)")
# A word of its own: `<<<` is a text of the shell, `1 << n` arithmetic.
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?([\"']?)([\w.-]+)\1(?=$|[\s>|;&])")
_BUILDKIT = re.compile(
    r"--(?:mount|network|security|chmod|link|parents|exclude|checksum|keep-git-dir)\b"
)
_MAY_HOLD_TEXT = ("RUN", "COPY", "ADD")
_REMOTE = re.compile(r"(?:https?|git|ssh)://|git@")
_RUNTIME = "batchml.runtime.run"


class Instruction(Struct, frozen=True):
    number: int  # of its line
    word: str  # FROM, COPY, ...
    rest: str


class Copied(Struct, frozen=True):
    """A source of COPY or ADD below the job's folder; it may hold wildcards."""

    number: int
    path: str


def instructions(text: str) -> list[Instruction]:
    """The instructions, lines that go on joined, without comments and here-documents."""
    escape, found = _escape(text), list[Instruction]()
    parts, start = list[str](), 0
    lines = enumerate(text.splitlines(), 1)
    for number, raw in lines:
        line = raw.strip()
        if not line or line.startswith("#"):  # within an instruction as well
            continue
        start = start if parts else number
        parts.append(line.removesuffix(escape).strip())
        if line.endswith(escape):
            continue
        found.append(_instruction(start, parts))
        parts = []
        if found[-1].word in _MAY_HOLD_TEXT:
            for _, mark in _HEREDOC.findall(found[-1].rest):
                next((inner for _, inner in lines if inner.strip() == mark), None)
    return [*found, _instruction(start, parts)] if any(parts) else found


def _instruction(number: int, parts: list[str]) -> Instruction:
    word, _, rest = " ".join(parts).replace("\t", " ").partition(" ")
    return Instruction(number, word.upper(), rest.strip())


def _escape(text: str) -> str:
    for line in text.splitlines():
        directive = _DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape":
            return directive[2].strip()
    return "\\"


def copied(text: str) -> tuple[list[Copied], list[str]]:
    """The sources that come from the job's folder, and what cannot be told of them."""
    found: list[Copied] = []
    mistakes: list[str] = []
    for each in instructions(text):
        if each.word not in ("COPY", "ADD") or _HEREDOC.search(each.rest):
            continue
        words = _words(each.rest)
        flags = _flags(each.rest)
        if any(flag.startswith("--from=") for flag in flags):
            continue
        for path in words[len(flags) : -1]:
            if _REMOTE.match(path):
                continue
            if "$" in path:
                mistakes.append(
                    f"line {each.number}: {each.word} {path}: a variable; write the file's name, "
                    "so that it is known what the image is made of."
                )
                continue
            parts = [part for part in path.split("/") if part not in ("", ".")]
            if ".." in parts:
                mistakes.append(f"line {each.number}: {each.word} {path}: leaves the folder.")
                continue
            found.append(Copied(each.number, "/".join(parts)))
    return found, mistakes


def _flags(rest: str) -> list[str]:
    return list(takewhile(lambda word: word.startswith("--"), rest.split()))


def _words(rest: str) -> list[str]:
    start = rest.find("[")
    if start >= 0 and all(word.startswith("--") for word in rest[:start].split()):
        try:
            listed = json.loads(rest[start:])
        except ValueError:
            listed = None
        if isinstance(listed, list):
            return [*rest[:start].split(), *map(str, listed)]
    try:
        return shlex.split(rest, posix=True)
    except ValueError:
        return rest.split()


def mistakes_of(text: str) -> Iterator[str]:
    """Why a run could not be started by the image, where the file tells."""
    found = instructions(text)
    if not any(each.word == "FROM" for each in found):
        yield "has no FROM: it says what the image is built on."
    if found and len(instructions(f"{text}\nRUN true\n")) == len(found):
        yield "its last line goes on where there is no more."
    for each in found:
        if each.word in _MAY_HOLD_TEXT:
            asked = next(filter(None, map(_BUILDKIT.match, _flags(each.rest))), None)
            if asked or _HEREDOC.search(each.rest):
                what = asked[0] if asked else "a here-document"
                yield (
                    f"line {each.number}: {each.word} with {what} needs BuildKit, which batchml "
                    "does not ask. Do without, or build the image yourself (docker buildx build) "
                    "and name it in `image`."
                )
    entry = _last(found, "ENTRYPOINT")
    if entry is not None and _json(entry.rest) is None:
        yield (
            f"line {entry.number}: ENTRYPOINT as a line of the shell leaves out the job's command. "
            f'Write it as a list: ENTRYPOINT ["{(entry.rest.split() or ["sh"])[0]}", ...].'
        )


def complete(text: str) -> str:
    """The Dockerfile with what fetches a run's code and starts its program.

    As images of batchml do, it runs as user 1000:1000 with the home /job, and in the folder that
    the Dockerfile names, or there. An entry point of its own is started by ours.
    """
    found = instructions(text)
    last = _last_stage(found)
    if any(each.word == "ENTRYPOINT" and _RUNTIME in each.rest for each in last):
        return text
    entry = _last(last, "ENTRYPOINT")
    theirs = (_json(entry.rest) or []) if entry else []
    folder = "" if any(each.word == "WORKDIR" for each in last) else "WORKDIR /job\n"
    start = json.dumps(["python3", "-m", _RUNTIME, *theirs])
    added = _ADDED.replace("\\\n", f"{_escape(text)}\n")
    return f"{text.rstrip()}\n{added}{folder}ENTRYPOINT {start}\n"


_ADDED = """
# --- added by batchml: what fetches the code of a run and starts its program ---
USER 0
RUN python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || \\
    { echo "batchml starts programs with python3, of 3.8 or later: install it in the Dockerfile"; \\
    exit 1; }
RUN mkdir -p /job && chown 1000:1000 /job
COPY batchml /opt/batchml/batchml
ENV PYTHONPATH=/opt/batchml${PYTHONPATH:+:${PYTHONPATH}} \\
    PYTHONUNBUFFERED=1 \\
    HOME=/job
USER 1000:1000
"""


def _last_stage(found: list[Instruction]) -> list[Instruction]:
    starts = [place for place, each in enumerate(found) if each.word == "FROM"]
    return found[starts[-1] :] if starts else found


def _last(found: list[Instruction], word: str) -> Instruction | None:
    return next((each for each in reversed(_last_stage(found)) if each.word == word), None)


def _json(text: str) -> list[str] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return [str(each) for each in found] if isinstance(found, list) else None
