"""README.md and docs: the commands that they show are there with their flags, and links lead on."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml import Client
from batchml.cli.app import full_command
from batchml.handles import MapHandle, RunHandle
from batchml.prove.claims import ASSUMPTIONS
from batchml.sweeps.handle import SweepHandle

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def of_page(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines_of(text: str) -> set[str]:
    """What begins with `batchml ` on a line of a block, or as inline code."""
    found = {" ".join(each.split()) for each in re.findall(r"`(batchml [^`]+)`", text)}
    for _, block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            found |= {line.strip().removeprefix("$ ")}
    return {line for line in found if re.match(r"batchml (?!notice: )", line)}


def words_of(line: str) -> list[str]:
    """Ours: up to `--`, a comment, or another command."""
    return shlex.split(re.split(r" (?:--|#|\||\|\||&&|>|\.\.\.)(?: |$)", line)[0])[1:]


@pytest.fixture(scope="module")
def commands() -> Any:
    return full_command()


def wrong(command: Any, words: list[str]) -> str:
    """The first word that no command has."""
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return "" if words[0].startswith("-") else words[0]
        command = command.commands[words.pop(0)]
    known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    known |= {"--help", "-h"}
    for word in words:
        flag = word.partition("=")[0].rstrip(",.]")
        if flag.startswith("-") and flag not in known and flag != "-":
            return word
    return ""


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_its_commands_are_there_with_their_flags(page: Path, commands: Any) -> None:
    bad = {
        shown: word
        for shown in sorted(lines_of(page.read_text("utf-8")))
        if (word := wrong(commands, words_of(shown)))
    }
    assert bad == {}


def slugs(text: str) -> Iterator[str]:
    """The anchors of a page, as GitHub names them."""
    seen: dict[str, int] = {}
    for title in re.findall(r"^#{1,6} +(.+?) *$", _BLOCK.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        yield f"{slug}-{count}" if count else slug
    yield from re.findall(r'<a (?:name|id)="([^"]+)"', text)


@pytest.mark.parametrize("page", PAGES, ids=of_page)
def test_its_links_lead_on(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", _BLOCK.sub("", page.read_text("utf-8")))
    bad = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (
            anchor and there.suffix == ".md" and anchor not in slugs(there.read_text("utf-8"))
        ):
            bad.append(link)
    assert bad == []


MARK = re.compile(r"\(U\)|\bunverified\b", re.IGNORECASE)
OF_THE_MARK = ("batchml/prove/", "docs/prove.md")  # they speak of it


def marked_lines() -> list[tuple[str, str]]:
    """The lines with a mark: file, text with the line before and the line after it."""
    paths = [ROOT / "README.md"]
    for folder, pattern in (("docs", "*.md"), ("batchml", "*.py"), ("cfn", "*"), ("images", "*")):
        paths += [path for path in (ROOT / folder).rglob(pattern) if path.is_file()]
    found = []
    for path in paths:
        name = str(path.relative_to(ROOT))
        if name.startswith(OF_THE_MARK) or "__pycache__" in name:
            continue
        lines = path.read_text("utf-8", "replace").splitlines()
        for at, line in enumerate(lines):
            if MARK.search(line):
                found.append((name, " ".join(lines[max(at - 1, 0) : at + 2])))
    return found


def test_every_line_that_is_marked_as_unverified_has_a_row() -> None:
    missing = [
        f"{file}: {text}" for file, text in marked_lines()
        if not any(row.file == file and row.words in text for row in ASSUMPTIONS)
    ]  # fmt: skip
    assert not missing, "\n".join(["add rows to ASSUMPTIONS of batchml/prove/claims.py:", *missing])


def test_every_row_has_a_line_that_is_marked_as_unverified() -> None:
    lines = marked_lines()
    gone = [
        row for row in ASSUMPTIONS
        if not any(row.file == file and row.words in text for file, text in lines)
    ]  # fmt: skip
    assert not gone


@pytest.mark.parametrize("kind", [Client, RunHandle, MapHandle, SweepHandle])
def test_the_page_of_the_python_api_has_every_method(kind: type) -> None:
    text = (ROOT / "docs/python.md").read_text("utf-8")
    names = [name for name in vars(kind) if not name.startswith("_")]
    missing = [name for name in names if not re.search(rf"\.{name}\b|`{name}`", text)]
    assert not missing, missing
