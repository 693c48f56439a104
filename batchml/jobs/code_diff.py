"""Compare two code packages: the files that differ, as a unified diff. Pure.

A file that is not text, and a file too large for a line-by-line comparison, is only named.
"""

import tarfile
from collections.abc import Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Literal

from msgspec import Struct

from batchml.runtime.entry.folders import size_text

MAX_TEXT = 512 * 1024  # bytes of a file that is compared by line: difflib needs quadratic time
MAX_LINES = 20_000  # of such a file

Change = Literal["added", "removed", "changed", "mode"]


class CodeFile(Struct, frozen=True):
    """A file of a code package."""

    content: bytes
    is_executable: bool = False


class FileDifference(Struct, frozen=True):
    """A file that differs between two packages.

    `lines` are those of a unified diff, without line ends; () for a file that is only named, and
    `why` says why: "binary, 1 KiB and 2 KiB".
    """

    name: str
    change: Change
    lines: tuple[str, ...] = ()
    why: str = ""


def read_package(archive: Path) -> dict[str, CodeFile]:
    """The files of a code package, by name. Raises OSError and tarfile.TarError."""
    found = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                found[member.name] = CodeFile(content.read(), bool(member.mode & 0o100))
    return found


def compare_packages(
    left: Mapping[str, CodeFile], right: Mapping[str, CodeFile]
) -> list[FileDifference]:
    """The files that differ, sorted by name."""
    names = sorted({*left, *right})
    return [each for name in names if (each := _compare(name, left.get(name), right.get(name)))]


def _compare(name: str, left: CodeFile | None, right: CodeFile | None) -> FileDifference | None:
    if left == right:
        return None
    change: Change = "changed"
    if left is None or right is None:
        change = "added" if left is None else "removed"
    elif left.content == right.content:
        now = "executable now" if right.is_executable else "no longer executable"
        return FileDifference(name, "mode", why=now)
    before, after = (each.content if each else b"" for each in (left, right))
    one, other = _text_lines(before), _text_lines(after)
    if one is None or other is None:
        return FileDifference(name, change, why=_only_named(left, right))
    origins = ("/dev/null" if left is None else f"a/{name}", f"b/{name}" if right else "/dev/null")
    return FileDifference(name, change, tuple(_diff_lines(one, other, *origins)))


def _diff_lines(one: list[str], other: list[str], left: str, right: str) -> Iterator[str]:
    found = list(unified_diff(one, other, left, right))
    # An empty file that was added or removed has no lines, and unified_diff prints nothing.
    for line in found or [f"--- {left}\n", f"+++ {right}\n"]:
        yield line.removesuffix("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"


def _text_lines(content: bytes) -> list[str] | None:
    """The lines of a text, with their ends; None for a file that is only named."""
    if len(content) > MAX_TEXT or b"\0" in content:
        return None
    try:
        lines = [f"{line}\n" for line in content.decode().split("\n")]
    except UnicodeDecodeError:
        return None
    lines[-1] = lines[-1].removesuffix("\n")
    return lines[: None if lines[-1] else -1] if len(lines) <= MAX_LINES else None


def _only_named(left: CodeFile | None, right: CodeFile | None) -> str:
    there = [each.content for each in (left, right) if each is not None]
    sizes = " and ".join(size_text(len(each)) for each in there)
    is_large = any(len(each) > MAX_TEXT or each.count(b"\n") >= MAX_LINES for each in there)
    return f"{'too large to compare' if is_large else 'binary'}, {sizes}"


# --- As text --------------------------------------------------------------------------------------


def diff_text(differences: Sequence[FileDifference], most: int | None = None) -> list[str]:
    """The lines of all differences, at most `most` of them; then a line says how many are left."""
    lines = [line for each in differences for line in _file_lines(each)]
    if most is None or len(lines) <= most:
        return lines
    hidden = len(lines) - most
    return [*lines[:most], f"... {hidden:,} more lines of {len(differences)} files"]


def _file_lines(each: FileDifference) -> tuple[str, ...]:
    return each.lines or (f"{each.name}: {each.change} ({each.why})",)
