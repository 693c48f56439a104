"""Images of jobs: folders with a requirements.txt, environment.yml or Dockerfile, named by content.

A client publishes an image to the state folder as it would push a built image to a registry, and
names it `batchml/NAME:HASH` in the job definition. The folder is the whole build context: an image
that is built from it is the same as the one that `batchml image build` makes. Its name in the
Docker engine also has the engine's processor.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

from batchml.model.image import (
    CONDA,
    FILES,
    REQUIREMENTS,
    Recipe,
    digest,
    has_whole_package,
    make_recipe,
    parse_reference,
)
from batchml.runtime.package import sources

_ENVIRONMENT = (REQUIREMENTS, ".python-version")  # files that determine an environment
_TOOLS = ("micromamba", "mamba", "conda")  # conda programs, the fastest first


class LocalImage(Struct, frozen=True):
    """A published image and its folder."""

    name: str
    tag: str
    folder: Path

    @property
    def label(self) -> str:
        """The name of the virtual environment. It differs from the image's tag, which covers the
        runtime, too.
        """
        return f"{self.name}-{digest(_read(self.folder, _ENVIRONMENT))}"

    @property
    def conda_label(self) -> str:
        """The name of the environment that a conda program makes."""
        return f"{self.name}-{digest(_read(self.folder, (CONDA,)))}"

    @property
    def requirements(self) -> Path:
        return self.folder / REQUIREMENTS

    @property
    def conda(self) -> Path | None:
        """The environment.yml, if the image has one."""
        path = self.folder / CONDA
        return path if path.is_file() else None

    def python(self) -> str | None:
        """An interpreter of the image's Python version, or None."""
        version_file = self.folder / ".python-version"
        if not version_file.exists():
            return sys.executable
        version = version_file.read_text("utf-8").strip()
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            return sys.executable
        return shutil.which(f"python{version}")


def conda_tool(path: str) -> str | None:
    """The program on a PATH that makes an environment from an environment.yml, or None."""
    return next(filter(None, (shutil.which(name, path=path) for name in _TOOLS)), None)


def uv_program() -> str:
    """The path of uv, which comes with batchml; empty if it was removed."""
    try:
        path = _bundled_uv()
    except (ImportError, FileNotFoundError):
        path = ""
    return path if path and os.path.exists(path) else shutil.which("uv") or ""


@cache  # it takes a fifth of the time in which an attempt is prepared
def _bundled_uv() -> str:
    from uv import find_uv_bin

    return find_uv_bin()


def publish(images: Path, source: Path) -> str:
    """Copy an image's files into the state folder; return its reference."""
    return publish_recipe(images, _recipe(source))


def publish_recipe(images: Path, image: Recipe) -> str:
    """Copy the files of a recipe into the state folder; return its reference."""
    _store_files(images / f"{image.name}-{image.content}", image.files, image.programs)
    return image.reference


def _recipe(source: Path) -> Recipe:
    files = dict(_read(source, FILES))
    return make_recipe(source.name, files, sources(has_whole_package(files)))


def _read(folder: Path, names: Sequence[str]) -> list[tuple[str, bytes]]:
    return [(name, (folder / name).read_bytes()) for name in names if (folder / name).is_file()]


def _store_files(
    target: Path, content: Sequence[tuple[str, bytes]], programs: Collection[str] = ()
) -> None:
    """Make a folder with all of `content`, unless it exists."""
    if target.exists():
        return
    # This may create the state folder, which must be private from the start.
    for folder in (target.parent.parent, target.parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, data in content:
            path = temporary / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                if name in programs:
                    os.fchmod(file.fileno(), 0o700)
                os.fsync(file.fileno())  # else a power cut could leave the name without the content
        temporary.rename(target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.exists():  # else another process has stored the same content
            raise


def find(images: Path, reference: str) -> LocalImage | None:
    """The published image of a reference; None for any other image."""
    parsed = parse_reference(reference)
    if parsed is None:
        return None
    folder = images / f"{parsed.name}-{parsed.content}"
    return LocalImage(parsed.name, parsed.content, folder) if folder.is_dir() else None


def publish_runtime(runtimes: Path) -> Path:
    """Copy `batchml.runtime` to a folder where jobs can import it, and nothing else of this
    package.
    """
    content = sorted(sources().items())
    target = runtimes / digest(content)
    _store_files(target, content)
    return target
