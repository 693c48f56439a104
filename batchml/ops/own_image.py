"""What a job's own file asks of its image, as the files of a folder below `images/` say it."""

import codecs
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchml.errors import ConfigError
from batchml.model.image import CUDA_REQUIREMENTS, DOCKERFILE, FILES, REQUIREMENTS, SETTINGS
from batchml.model.project import CONDA, kind_of, python_version

if TYPE_CHECKING:
    from batchml.model.conda import Conda

_PYTHON_BASE = "ARG BASE=python:"


def read_files(folder: Path) -> dict[str, bytes]:
    """What of an image's folder decides it, by name. Raises OSError."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


Made = tuple[dict[str, bytes], dict[str, bytes], frozenset[str]]


class _Source(NamedTuple):
    folder: Path
    file: str
    base: Path | None


def make(folder: Path, file: str, base: Path | None) -> Made:
    """The files of an image's folder as a file of a job's folder says them, what else its
    Dockerfile sees, and which of that may be executed. `base` is the image's folder that packages
    are put on. Raises ConfigError with every mistake.
    """
    making = {REQUIREMENTS: _of_requirements, CONDA: _of_conda, DOCKERFILE: _of_dockerfile}
    mistakes: list[str] = []
    try:
        made = making[kind_of(file)](_Source(folder, file, base), mistakes)
    except OSError as error:
        mistakes.append(f"{error.filename}: cannot be read: {error.strerror}.")
        made = {}, {}, frozenset[str]()
    if mistakes:
        raise ConfigError(str(folder), mistakes)
    return made


class _Reader:
    """The texts of a folder's files; those that are none are mistakes."""

    def __init__(self, folder: Path, mistakes: list[str]) -> None:
        self._folder = folder
        self._mistakes = mistakes

    def __call__(self, name: str) -> str | None:
        path = self._folder / name
        if not path.is_file():
            return None
        content = path.read_bytes()
        # `pip freeze > requirements.txt` of PowerShell 5 writes UTF-16, and pip reads it.
        is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        try:
            text = content.decode("utf-16" if is_wide else "utf-8-sig")
        except UnicodeDecodeError:
            self._mistakes.append(f"{name}: is not UTF-8.")
            return ""
        return text.replace("\r\n", "\n")


def _of_requirements(source: _Source, mistakes: list[str]) -> Made:
    assert source.base is not None, "find_source gives one"
    base = read_files(source.base)
    folder, read = source.folder, _Reader(source.folder, mistakes)
    wanted = _requirements(source.file, read, mistakes)
    files = {name: base[name] for name in (DOCKERFILE, SETTINGS) if name in base}
    files[REQUIREMENTS] = base.get(REQUIREMENTS, b"") + wanted
    if b" --hash=" in wanted and _packages(base.get(REQUIREMENTS, b"")):
        mistakes.append(
            f"{source.file}: has hashes, which pip then wants of the packages of the image "
            f'{source.base.name} too. Lock those as well, with image = "./{source.file}".'
        )
    # The folder's own for GPUs stands for its plain one, as an image's does.
    for_cuda = wanted
    if source.file == REQUIREMENTS and (folder / CUDA_REQUIREMENTS).is_file():
        for_cuda = _requirements(CUDA_REQUIREMENTS, read, mistakes)
    if for_cuda != wanted or CUDA_REQUIREMENTS in base:
        cuda = base.get(CUDA_REQUIREMENTS, base.get(REQUIREMENTS, b""))
        files[CUDA_REQUIREMENTS] = cuda + for_cuda
    version = _wanted_python(folder, mistakes)
    if version:
        files[".python-version"] = f"{version}\n".encode()
        files[DOCKERFILE] = _on_python(source.base, files.get(DOCKERFILE, b""), version, mistakes)
    elif ".python-version" in base:
        files[".python-version"] = base[".python-version"]
    return files, {}, frozenset()


def _requirements(file: str, read: _Reader, mistakes: list[str]) -> bytes:
    from batchml.model.requirements import read_requirements

    found = read_requirements(file, read)
    mistakes += found.mistakes
    return found.text.encode()


def _packages(requirements: bytes) -> list[str]:
    """The lines of a requirements.txt that ask for a package, without a hash."""
    lines = requirements.decode("utf-8", "replace").splitlines()
    return [
        line for line in lines if line.strip()[:1] not in ("", "#", "-") and "--hash" not in line
    ]


def _wanted_python(folder: Path, mistakes: list[str]) -> str:
    path = folder / ".python-version"
    if not path.is_file():
        return ""
    version, wrong = python_version(path.read_bytes())
    mistakes += wrong
    return version


def _on_python(base: Path, dockerfile: bytes, version: str, mistakes: list[str]) -> bytes:
    """The Dockerfile of an image on another version of Python."""
    lines = dockerfile.decode("utf-8", "replace").split("\n")
    for place, line in enumerate(lines):
        if line.startswith(_PYTHON_BASE):
            # python:3.11-slim-bookworm: what follows the version stays.
            _, dash, kind = line.removeprefix(_PYTHON_BASE).partition("-")
            lines[place] = f"{_PYTHON_BASE}{version}{dash}{kind}"
            return "\n".join(lines).encode()
    mistakes.append(
        f".python-version: the image {base.name} has a Python of its own: write a {DOCKERFILE}, or "
        f"leave the file out."
    )
    return dockerfile


def _of_conda(source: _Source, mistakes: list[str]) -> Made:
    from batchml.model import conda

    found, wrong = conda.read_conda(source.file, _Reader(source.folder, mistakes))
    mistakes += wrong
    files = {
        DOCKERFILE: conda.DOCKERFILE.encode(),
        SETTINGS: conda.SETTINGS.encode(),
        **_for_pip(found),
    }
    return files, {CONDA: found.render().encode()}, frozenset()


def _for_pip(found: "Conda") -> dict[str, bytes]:
    """What a virtual environment of the same packages is made from, where pip is enough."""
    plain = found.by_pip()
    if plain is None:
        return {}
    requirements, version = plain
    return {REQUIREMENTS: requirements.encode(), ".python-version": f"{version}\n".encode()}


def _of_dockerfile(source: _Source, mistakes: list[str]) -> Made:
    from batchml.model.dockerfile import complete, mistakes_of
    from batchml.ops.context import collect

    folder = source.folder
    text = _Reader(folder, mistakes)(source.file) or ""
    mistakes += [f"{source.file}: {mistake}" for mistake in mistakes_of(text)]
    context = collect(folder, source.file, text)
    mistakes += context.mistakes
    files = {DOCKERFILE: complete(text).encode()}
    # What a process has of it: the packages that pip can have.
    if (folder / ".python-version").is_file():
        files[".python-version"] = (folder / ".python-version").read_bytes()
    if REQUIREMENTS in context.files:  # as it is: other files that it names may be copied, too
        files[REQUIREMENTS] = context.files[REQUIREMENTS]
    elif (folder / REQUIREMENTS).is_file():
        unfit: list[str] = []
        wanted = _requirements(REQUIREMENTS, _Reader(folder, unfit), unfit)
        files |= {} if unfit else {REQUIREMENTS: wanted}
    return files, context.files, context.programs
