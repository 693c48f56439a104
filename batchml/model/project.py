"""A project's own image: which file of a job's folder it is made from. No I/O.

`image` of a job.toml says it in one of three ways: `"."` (the folder's one file), `"./FILE"`, or
`"NAME + FILE"` (the packages of a requirements.txt on top of an image below `images/`).
"""

import re
from collections.abc import Collection, Mapping

from msgspec import Struct

from batchml.errors import did_you_mean
from batchml.model.image import DOCKERFILE, REQUIREMENTS

CONDA = "environment.yml"
HERE = "."

# What is looked for, in the order in which it is told.
FILES = (REQUIREMENTS, CONDA, "environment.yaml", DOCKERFILE)

_ADDED = re.compile(r"\s*([^\s+]+)\s*\+\s*(\S.*?)\s*")


class Word(Struct, frozen=True):
    """An `image` that means a file of the job's folder. Without `file`: the one that is there."""

    file: str = ""
    base: str = ""  # the name of an image below images/; empty: the one of batchml's for the file


def parse_word(image: str) -> Word | None:
    """What an `image` says of the job's folder; None for a name below images/ or a reference."""
    if image.rstrip("/") == HERE:
        return Word()
    if image.startswith("./"):
        return Word(image[2:])
    found = _ADDED.fullmatch(image)
    if found:
        return Word(found[2].removeprefix("./"), found[1])
    return None


def is_reference(image: str) -> bool:
    """True for an image of some registry: neither a name below images/ nor a file."""
    return parse_word(image) is None and any(mark in image for mark in "/:@.")


def kind_of(file: str) -> str:
    """What a file is: one of REQUIREMENTS, CONDA, DOCKERFILE; empty for anything else."""
    name = file.rpartition("/")[2]
    if name.endswith(".txt"):
        return REQUIREMENTS
    if name.endswith((".yml", ".yaml")):
        return CONDA
    return DOCKERFILE if DOCKERFILE in (name.partition(".")[0], name.rpartition(".")[2]) else ""


def choose(files: Mapping[str, str]) -> tuple[str, list[str]]:
    """The file that decides the image, of FILES that are there with their text; and mistakes.

    A file that another one names belongs to it: the requirements.txt that a Dockerfile copies, or
    that an environment.yml installs.
    """
    alone = [name for name in FILES if name in files and not _is_named(name, files)]
    if len(alone) == 1:
        return alone[0], []
    if not files:
        return "", [f"image: the folder has none of {', '.join(FILES)}."]
    found = alone or [name for name in FILES if name in files]
    ways = " or ".join(f'image = "./{name}"' for name in found)
    return "", [f"image: the folder has {' and '.join(found)}. Say which is meant: {ways}."]


def _is_named(name: str, files: Mapping[str, str]) -> bool:
    pattern = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    return any(pattern.search(_said(text)) for other, text in files.items() if other != name)


def _said(text: str) -> str:
    """A file without its lines of comment."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def word_mistakes(word: Word, files: Collection[str]) -> list[str]:
    """What is wrong with a choice. `files` are those that are there, by path below the folder."""
    if not word.file:
        return []
    if word.file.startswith("/") or ".." in word.file.split("/"):
        return [f"image: {word.file} does not lie in the job's folder."]
    kind = kind_of(word.file)
    if not kind:
        return [
            f"image: {word.file} is none of {REQUIREMENTS}, {CONDA}, {DOCKERFILE}, or named alike "
            f"(requirements-gpu.txt, gpu.yml, Dockerfile.gpu)."
        ]
    if word.base and kind != REQUIREMENTS:
        return [
            f'image: "{word.base} + {word.file}": only a {REQUIREMENTS} can be put on top of '
            f"another image."
        ]
    if word.file not in files:
        return [f"image: the folder has no {word.file}.{did_you_mean(word.file, list(files))}"]
    return []


def image_name(folder: str) -> str:
    """The name that an image made from a folder has: the folder's, as registries take names."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")
    return name if len(name) > 1 else f"job-{name}".rstrip("-")  # ECR: 2 letters at least


def python_version(content: bytes) -> tuple[str, list[str]]:
    """The version that a `.python-version` asks for, as `3.12`; empty for none; and mistakes."""
    found = content.decode("utf-8", "replace").split()
    if not found:
        return "", []
    match = re.fullmatch(r"(3\.\d+)(\.\d+)?", found[0])
    if match and len(found) == 1:
        return match[1], []
    return "", [f".python-version: found {' '.join(found)!r}. Expected one such as 3.12."]
