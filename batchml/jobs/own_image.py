"""A job's own image: choose the file in the job's folder, and make the files of the image.

`image` of a job.toml names the file in one of three ways: `"."` (the folder's only file),
`"./FILE"`, or `"NAME + FILE"` (the packages of a requirements.txt on top of the image NAME). The
files that are made are those of a folder below `images/`.
"""

import codecs
import errno
import glob
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from batchml.errors import ConfigError, did_you_mean
from batchml.jobs import image_files
from batchml.jobs.code import list_names
from batchml.jobs.ignore import IgnoreRules, default_rules, looks_secret
from batchml.model.image import (
    CONDA,
    CUDA_REQUIREMENTS,
    DOCKERFILE,
    FILES,
    REQUIREMENTS,
    SETTINGS,
    OwnImage,
)

# --- Which file -----------------------------------------------------------------------------------


OWN_IMAGE_FILES = (REQUIREMENTS, CONDA, "environment.yaml", DOCKERFILE)


def is_file(path: str) -> bool:
    """Path.is_file of a text, which takes a third of the time: a submission asks for a dozen."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except ValueError:  # a zero byte
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def file_kind(file: str) -> str:
    """Return the kind of a file by its name: REQUIREMENTS, CONDA, DOCKERFILE, or ""."""
    name = file.rpartition("/")[2]
    if name.endswith(".txt"):
        return REQUIREMENTS
    if name.endswith((".yml", ".yaml")):
        return CONDA
    return DOCKERFILE if DOCKERFILE in (name.partition(".")[0], name.rpartition(".")[2]) else ""


def choose_file(files: Mapping[str, str]) -> tuple[str, list[str]]:
    """Choose the file that decides the image. `files` has the texts of existing OWN_IMAGE_FILES.

    A file that another file names is a part of it: a requirements.txt that a Dockerfile copies, or
    that an environment.yml installs. Return the chosen file, and mistakes.
    """
    unnamed = [name for name in OWN_IMAGE_FILES if name in files and not _is_named(name, files)]
    if len(unnamed) == 1:
        return unnamed[0], []
    if not files:
        return "", [f"image: the folder has none of {', '.join(OWN_IMAGE_FILES)}."]
    candidates = unnamed or [name for name in OWN_IMAGE_FILES if name in files]
    choices = " or ".join(f'image = "./{name}"' for name in candidates)
    return "", [f"image: the folder has {' and '.join(candidates)}. Choose one: {choices}."]


def _is_named(name: str, files: Mapping[str, str]) -> bool:
    pattern = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    return any(
        pattern.search(_without_comments(text)) for other, text in files.items() if other != name
    )


def _without_comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def choice_mistakes(choice: OwnImage, files: Collection[str]) -> list[str]:
    """Return the mistakes in a choice. `files` are the paths of existing files."""
    if not choice.file:
        return []
    if choice.file.startswith("/") or ".." in choice.file.split("/"):
        return [f"image: {choice.file} is not in the job's folder."]
    kind = file_kind(choice.file)
    if not kind:
        return [
            f"image: {choice.file} is none of {REQUIREMENTS}, {CONDA}, {DOCKERFILE}, or a similar "
            f"name (requirements-gpu.txt, gpu.yml, Dockerfile.gpu)."
        ]
    if choice.base and kind != REQUIREMENTS:
        return [
            f'image: "{choice.base} + {choice.file}": only a {REQUIREMENTS} can be put on top of '
            f"another image."
        ]
    if choice.file not in files:
        return [f"image: the folder has no {choice.file}.{did_you_mean(choice.file, list(files))}"]
    return []


def image_name(folder: str) -> str:
    """Make the name of an image from a folder's name: only letters that registries allow."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-")
    return name if len(name) > 1 else f"job-{name}".rstrip("-")  # ECR needs at least 2 letters


# --- The image's files ----------------------------------------------------------------------------


_PYTHON_BASE = "ARG BASE=python:"


def read_files(folder: Path) -> dict[str, bytes]:
    """Read the files of an image's folder that decide the image. Raises OSError."""
    return {name: (folder / name).read_bytes() for name in FILES if is_file(f"{folder}/{name}")}


# The files of an image's folder and other files of the build context, contents by path; and the
# paths of executable files.
ImageFiles = tuple[dict[str, bytes], dict[str, bytes], frozenset[str]]


class _Source(NamedTuple):
    folder: Path
    file: str
    base: Path | None


def make_files(folder: Path, file: str, base: Path | None) -> ImageFiles:
    """Make the files of an image from a file of a job's folder.

    `base` is the folder of the image on which the packages are put. Raises ConfigError with every
    mistake.
    """
    makers = {
        REQUIREMENTS: _make_from_requirements,
        CONDA: _make_from_conda,
        DOCKERFILE: _make_from_dockerfile,
    }
    mistakes: list[str] = []
    try:
        files = makers[file_kind(file)](_Source(folder, file, base), mistakes)
    except OSError as error:
        mistakes.append(f"{error.filename}: cannot be read: {error.strerror}.")
        files = {}, {}, frozenset[str]()
    if mistakes:
        raise ConfigError(str(folder), mistakes)
    return files


class _Reader:
    """Reads text files of a folder. A file that is not UTF-8 is a mistake."""

    def __init__(self, folder: Path, mistakes: list[str]) -> None:
        self._folder = folder
        self._mistakes = mistakes

    def __call__(self, name: str) -> str | None:
        path = self._folder / name
        if not path.is_file():
            return None
        content = path.read_bytes()
        # `pip freeze > requirements.txt` in PowerShell 5 writes UTF-16, which pip can read.
        is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        try:
            text = content.decode("utf-16" if is_wide else "utf-8-sig")
        except UnicodeDecodeError:
            self._mistakes.append(f"{name}: is not UTF-8.")
            return ""
        return text.replace("\r\n", "\n")


def _make_from_requirements(source: _Source, mistakes: list[str]) -> ImageFiles:
    assert source.base is not None, "find_source sets it"
    base = read_files(source.base)
    folder, read = source.folder, _Reader(source.folder, mistakes)
    packages = _requirements(source.file, read, mistakes)
    files = {name: base[name] for name in (DOCKERFILE, SETTINGS) if name in base}
    files[REQUIREMENTS] = base.get(REQUIREMENTS, b"") + packages
    # For GPUs, the folder's requirements-cuda.txt replaces its requirements.txt.
    for_cuda = packages
    if source.file == REQUIREMENTS and (folder / CUDA_REQUIREMENTS).is_file():
        for_cuda = _requirements(CUDA_REQUIREMENTS, read, mistakes)
    if for_cuda != packages or CUDA_REQUIREMENTS in base:
        cuda = base.get(CUDA_REQUIREMENTS, base.get(REQUIREMENTS, b""))
        files[CUDA_REQUIREMENTS] = cuda + for_cuda
    version = _read_python_version(folder, mistakes)
    if version:
        files[".python-version"] = f"{version}\n".encode()
        files[DOCKERFILE] = _on_python(source.base, files.get(DOCKERFILE, b""), version, mistakes)
    elif ".python-version" in base:
        files[".python-version"] = base[".python-version"]
    return files, {}, frozenset()


def _requirements(file: str, read: _Reader, mistakes: list[str]) -> bytes:
    found = image_files.read_requirements(file, read)
    mistakes += found.mistakes
    return found.text.encode()


def _read_python_version(folder: Path, mistakes: list[str]) -> str:
    """Read the version in `.python-version`, such as 3.12; "" without that file."""
    path = folder / ".python-version"
    found = path.read_text("utf-8", "replace").split() if path.is_file() else []
    if not found:
        return ""
    match = re.fullmatch(r"(3\.\d+)(\.\d+)?", found[0])
    if match and len(found) == 1:
        return match[1]
    mistakes.append(f".python-version: found {' '.join(found)!r}. Expected a version such as 3.12.")
    return ""


def _on_python(base: Path, dockerfile: bytes, version: str, mistakes: list[str]) -> bytes:
    """Change the version of Python in the Dockerfile of the image `base`."""
    lines = dockerfile.decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines):
        if line.startswith(_PYTHON_BASE):
            # Of python:3.11-slim-bookworm only the version changes.
            _, dash, variant = line.removeprefix(_PYTHON_BASE).partition("-")
            lines[number] = f"{_PYTHON_BASE}{version}{dash}{variant}"
            return "\n".join(lines).encode()
    mistakes.append(
        f".python-version: the image {base.name} does not start from an image of Python, so its "
        f"version cannot be changed. Remove the file, or write a {DOCKERFILE}."
    )
    return dockerfile


def _make_from_conda(source: _Source, mistakes: list[str]) -> ImageFiles:
    found, wrong = image_files.read_conda(source.file, _Reader(source.folder, mistakes))
    mistakes += wrong
    files = {
        DOCKERFILE: image_files.CONDA_DOCKERFILE.encode(),
        SETTINGS: image_files.CONDA_SETTINGS.encode(),
        **_for_pip(found),
    }
    return files, {CONDA: found.render().encode()}, frozenset()


def _for_pip(found: image_files.CondaFile) -> dict[str, bytes]:
    """Make the files for a virtual environment of the same packages, if pip can install them."""
    equivalent = found.pip_equivalent()
    if equivalent is None:
        return {}
    requirements, version = equivalent
    return {REQUIREMENTS: requirements.encode(), ".python-version": f"{version}\n".encode()}


def _make_from_dockerfile(source: _Source, mistakes: list[str]) -> ImageFiles:
    folder = source.folder
    text = _Reader(folder, mistakes)(source.file) or ""
    mistakes += [f"{source.file}: {mistake}" for mistake in image_files.runtime_mistakes(text)]
    context = collect(folder, source.file, text)
    mistakes += context.mistakes
    files = {DOCKERFILE: image_files.add_runtime(text).encode()}
    # A run as a process gets no image, but the packages of the requirements.txt.
    if (folder / ".python-version").is_file():
        files[".python-version"] = (folder / ".python-version").read_bytes()
    if REQUIREMENTS in context.files:  # unchanged: the Dockerfile may copy files that it includes
        files[REQUIREMENTS] = context.files[REQUIREMENTS]
    elif (folder / REQUIREMENTS).is_file():
        errors: list[str] = []  # the image does not need this file, so they are no mistakes
        requirements = _requirements(REQUIREMENTS, _Reader(folder, errors), errors)
        files |= {} if errors else {REQUIREMENTS: requirements}
    return files, context.files, context.programs


# --- The build context of a Dockerfile ------------------------------------------------------------
# Only the files that a Dockerfile copies are sent to the builder, and only they decide the image.


MAX_BYTES = 256 * 1024**2  # of all files

_IGNORE = ".dockerignore"
_MAX_NAMED = 5  # files in one message


class BuildContext(Struct, frozen=True):
    files: dict[str, bytes] = {}  # contents by path
    programs: frozenset[str] = frozenset()  # paths of executable files
    mistakes: tuple[str, ...] = ()


def collect(folder: Path, file: str, text: str) -> BuildContext:
    """Read the files of `folder` that the Dockerfile `file` copies. Raises OSError.

    A file that the Dockerfile names is copied. Of a folder, ignored files, caches, environments and
    links that lead out of `folder` are left out. Files named like keys and passwords are a mistake:
    everybody who pulls the image could read them.
    """
    wanted, wrong = image_files.copy_sources(text)
    mistakes = [f"{file}: {mistake}" for mistake in wrong]
    rules = _read_dockerignore(folder)
    found: dict[str, Path] = {}
    for each in wanted:
        if each.path.split("/")[0] == "batchml" and not (folder / "batchml").exists():
            continue  # the runtime, which batchml adds
        matches = _find_copied(folder, each.path, rules)
        if not matches:
            mistakes.append(
                f"{file}: line {each.number}: {each.path} is not in the folder, or {_IGNORE} "
                "excludes it."
            )
        found |= matches
    secret = sorted(name for name in found if looks_secret(name))
    if secret:
        mistakes.append(
            f"{file}: copies {list_names(secret, _MAX_NAMED)}, named like secrets, into an image "
            f"that others pull. Exclude them in {_IGNORE}, and give secrets to runs by [secrets] "
            "of job.toml."
        )
    size = sum(path.stat().st_size for path in found.values())
    if size > MAX_BYTES:
        mistakes.append(
            f"{file}: copies {size // 1024**2} MiB; at most {MAX_BYTES // 1024**2} MiB are sent to "
            f"the builder. Copy less, or exclude files in {_IGNORE}."
        )
    if mistakes:
        return BuildContext(mistakes=tuple(mistakes))
    programs = frozenset(name for name, path in found.items() if os.access(path, os.X_OK))
    return BuildContext({name: path.read_bytes() for name, path in found.items()}, programs)


def _read_dockerignore(folder: Path) -> IgnoreRules:
    """Read `.dockerignore`. Its patterns start at the top, unlike those of `.gitignore`."""
    path = folder / _IGNORE
    lines = path.read_text("utf-8", "surrogateescape").splitlines() if path.is_file() else []
    return IgnoreRules().plus(_anchored(line.strip()) for line in lines)


def _anchored(line: str) -> str:
    if not line or line.startswith("#"):
        return ""
    negation = "!" if line.startswith("!") else ""
    pattern = line.removeprefix("!").strip().removeprefix("./").lstrip("/")
    return f"{negation}/{pattern}"


def _find_copied(folder: Path, pattern: str, rules: IgnoreRules) -> dict[str, Path]:
    """Find the files of a source of COPY, by path below the folder."""
    paths = [folder / pattern]
    if not paths[0].exists() or not pattern:
        # As in Docker, `*` also matches names that begin with a dot.
        every = glob.glob(f"{glob.escape(str(folder))}/{pattern}", include_hidden=True)
        caches = default_rules()
        paths = [path for path in map(Path, every) if not caches.match(path.name, path.is_dir())]
    found: dict[str, Path] = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found |= _find_below(folder, path, rules)
        elif _is_inside(folder, path) and not _ignored(rules, name):
            found[name] = path
    return found


def _find_below(folder: Path, top: Path, rules: IgnoreRules) -> dict[str, Path]:
    caches = default_rules()
    found: dict[str, Path] = {}
    for parent, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if not caches.match(name, True))
        for name in sorted(names):
            path = Path(parent) / name
            below = path.relative_to(folder).as_posix()
            if name == _IGNORE or caches.match(name, False) or _ignored(rules, below):
                continue
            if _is_inside(folder, path):
                found[below] = path
    return found


def _ignored(rules: IgnoreRules, name: str) -> bool:
    """Say whether a file or a folder above it is ignored, and no later rule includes it."""
    parts = name.split("/")
    ignored = False
    for depth in range(1, len(parts) + 1):
        match = rules.match("/".join(parts[:depth]), depth < len(parts))
        ignored = ignored if match is None else match
    return ignored


def _is_inside(folder: Path, path: Path) -> bool:
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except OSError:  # a link to itself
        return False
