"""The files that a project's Dockerfile copies: what the image is made of beside it.

Only these travel to the builder, and only these decide the image: a change of any other file of
the folder builds nothing again.
"""

import glob
import os
from pathlib import Path

from msgspec import Struct

from batchml.model.dockerfile import copied
from batchml.ops.ignore import Rules, looks_secret, never

MAX_BYTES = 256 * 1024**2  # of all files

_IGNORE = ".dockerignore"
_TOLD = 5  # names in one message


class Context(Struct, frozen=True):
    files: dict[str, bytes] = {}
    programs: frozenset[str] = frozenset()
    mistakes: tuple[str, ...] = ()


def collect(folder: Path, file: str, text: str) -> Context:
    """The files of `folder` that the Dockerfile `file` copies. Raises OSError.

    A file is taken as it is named; of a folder not what `.dockerignore` names, nor caches,
    environments and links that lead out. Names of keys and passwords are a mistake: whoever pulls
    an image can read it.
    """
    wanted, wrong = copied(text)
    mistakes = [f"{file}: {mistake}" for mistake in wrong]
    rules = _rules(folder)
    found: dict[str, Path] = {}
    for each in wanted:
        if each.path.split("/")[0] == "batchml" and not (folder / "batchml").exists():
            continue  # the runtime, which batchml brings
        matches = _matches(folder, each.path, rules)
        if not matches:
            mistakes.append(
                f"{file}: line {each.number}: {each.path} is not in the folder, or {_IGNORE} "
                "leaves it out."
            )
        found |= matches
    secret = sorted(name for name in found if looks_secret(name))
    if secret:
        more = f" and {len(secret) - _TOLD} more" if len(secret) > _TOLD else ""
        mistakes.append(
            f"{file}: copies {', '.join(secret[:_TOLD])}{more}, named as secrets are, into an "
            f"image that others pull. Leave them out in {_IGNORE}; [secrets] of a job.toml gives a "
            "run what it needs."
        )
    size = sum(path.stat().st_size for path in found.values())
    if size > MAX_BYTES:
        mistakes.append(
            f"{file}: copies {size // 1024**2} MiB; at most {MAX_BYTES // 1024**2} MiB travel to "
            f"the builder. Copy less, or leave it out in {_IGNORE}."
        )
    if mistakes:
        return Context(mistakes=tuple(mistakes))
    programs = frozenset(name for name, path in found.items() if os.access(path, os.X_OK))
    return Context({name: path.read_bytes() for name, path in found.items()}, programs)


def _rules(folder: Path) -> Rules:
    """What `.dockerignore` leaves out: its patterns begin at the top, unlike `.gitignore`'s."""
    path = folder / _IGNORE
    lines = path.read_text("utf-8", "surrogateescape").splitlines() if path.is_file() else []
    return Rules().plus(_anchored(line.strip()) for line in lines)


def _anchored(line: str) -> str:
    if not line or line.startswith("#"):
        return ""
    taken = line.startswith("!")
    pattern = line.removeprefix("!").strip().removeprefix("./").lstrip("/")
    return f"{'!' if taken else ''}/{pattern}"


def _matches(folder: Path, pattern: str, rules: Rules) -> dict[str, Path]:
    """The files that a source of COPY means, by path below the folder."""
    paths = [folder / pattern]
    if not paths[0].exists() or not pattern:
        # As in Docker, and not in a shell, `*` means names that begin with a dot as well.
        every = glob.glob(f"{glob.escape(str(folder))}/{pattern}", include_hidden=True)
        caches = never()
        paths = [path for path in map(Path, every) if not caches.verdict(path.name, path.is_dir())]
    found: dict[str, Path] = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found |= _below(folder, path, rules)
        elif _is_inside(folder, path) and not _ignored(rules, name):
            found[name] = path
    return found


def _below(folder: Path, top: Path, rules: Rules) -> dict[str, Path]:
    caches = never()
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if not caches.verdict(name, True))
        for name in sorted(names):
            path = Path(place) / name
            below = path.relative_to(folder).as_posix()
            if name == _IGNORE or caches.verdict(name, False) or _ignored(rules, below):
                continue
            if _is_inside(folder, path):
                found[below] = path
    return found


def _ignored(rules: Rules, name: str) -> bool:
    """A file goes with its folder, unless a later line takes it in again."""
    parts = name.split("/")
    said = False
    for depth in range(1, len(parts) + 1):
        verdict = rules.verdict("/".join(parts[:depth]), depth < len(parts))
        said = said if verdict is None else verdict
    return said


def _is_inside(folder: Path, path: Path) -> bool:
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except OSError:  # a link to itself
        return False
