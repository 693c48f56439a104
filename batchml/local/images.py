"""Images as processes know them: a folder with a `requirements.txt`, kept by content.

A client publishes an image here, as it would push a built one to a registry, and names it
`batchml/NAME:TAG` in the job definition. What is kept is the whole build context: an image made of
it is the one that `batchml image build` makes.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import Struct

from batchml.model.image import (
    FILES,
    REQUIREMENTS,
    Recipe,
    digest,
    is_whole,
    parse_reference,
    recipe,
)
from batchml.model.project import CONDA
from batchml.runtime.package import sources

_ENVIRONMENT = (REQUIREMENTS, ".python-version")  # what decides a virtual environment
_TOOLS = ("micromamba", "mamba", "conda")  # that make one from CONDA; the quickest first


class LocalImage(Struct, frozen=True):
    name: str
    tag: str
    folder: Path

    @property
    def label(self) -> str:
        """Names the virtual environment: not the image, which has the runtime in it as well."""
        return f"{self.name}-{digest(_read(self.folder, _ENVIRONMENT))}"

    @property
    def conda_label(self) -> str:
        """Names the environment that a tool of conda makes."""
        return f"{self.name}-{digest(_read(self.folder, (CONDA,)))}"

    @property
    def requirements(self) -> Path:
        return self.folder / REQUIREMENTS

    @property
    def conda(self) -> Path | None:
        """The environment.yml of an image that has one."""
        path = self.folder / CONDA
        return path if path.is_file() else None

    def python(self) -> str | None:
        """An interpreter of the version that the image asks for, or None."""
        wanted = self.folder / ".python-version"
        if not wanted.exists():
            return sys.executable
        version = wanted.read_text("utf-8").strip()
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            return sys.executable
        return shutil.which(f"python{version}")


def conda_tool(path: str) -> str | None:
    """The program on a PATH that makes an environment from an environment.yml, or None."""
    return next(filter(None, (shutil.which(name, path=path) for name in _TOOLS)), None)


def reference(source: Path) -> str:
    """The reference that an image's folder has by its content. Raises ConfigError."""
    return _recipe(source).reference


def publish(images: Path, source: Path) -> str:
    """Copy what decides an image into the state folder; return its reference."""
    return keep(images, _recipe(source))


def keep(images: Path, made: Recipe) -> str:
    """Copy what decides an image into the state folder; return its reference."""
    _put(images / f"{made.name}-{made.tag}", made.files, made.programs)
    return made.reference


def _recipe(source: Path) -> Recipe:
    files = dict(_read(source, FILES))
    return recipe(source.name, files, sources(is_whole(files)))


def _read(folder: Path, names: Sequence[str]) -> list[tuple[str, bytes]]:
    return [(name, (folder / name).read_bytes()) for name in names if (folder / name).is_file()]


def _put(
    target: Path, content: Sequence[tuple[str, bytes]], programs: Collection[str] = ()
) -> None:
    """Make a folder that holds `content` whole, unless it is there."""
    if target.exists():
        return
    # The state folder may be made here first, and must be private from then on.
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
                os.fsync(file.fileno())  # or a power cut could leave the name without the content
        temporary.rename(target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.exists():  # else someone was faster with the same content
            raise


def find(images: Path, reference: str) -> LocalImage | None:
    """The published image of a reference; None for any other image."""
    found = parse_reference(reference)
    if found is None:
        return None
    folder = images / f"{found.name}-{found.tag}"
    return LocalImage(found.name, found.tag, folder) if folder.is_dir() else None


def publish_runtime(runtimes: Path) -> Path:
    """Copy `batchml.runtime` where jobs can import it and nothing else of this installation."""
    content = sorted(sources().items())
    target = runtimes / digest(content)
    _put(target, content)
    return target
