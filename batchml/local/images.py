"""Images as processes know them: a folder with a `requirements.txt`, kept by content.

A client publishes an image here, as it would push a built one to a registry, and names it
`batchml/NAME:TAG` in the job definition. What is kept is the whole build context: an image made of
it is the one that `batchml image build` makes.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from batchml.model.image import FILES, Recipe, digest, is_whole, parse_reference, recipe
from batchml.runtime.sources import sources

_ENVIRONMENT = ("requirements.txt", ".python-version")  # what decides a virtual environment


class LocalImage(Struct, frozen=True):
    name: str
    tag: str
    folder: Path

    @property
    def label(self) -> str:
        """Names the virtual environment: not the image, which has the runtime in it as well."""
        return f"{self.name}-{digest(_read(self.folder, _ENVIRONMENT))}"

    @property
    def requirements(self) -> Path:
        return self.folder / "requirements.txt"

    def python(self) -> str | None:
        """An interpreter of the version that the image asks for, or None."""
        wanted = self.folder / ".python-version"
        if not wanted.exists():
            return sys.executable
        version = wanted.read_text("utf-8").strip()
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            return sys.executable
        return shutil.which(f"python{version}")


def reference(source: Path) -> str:
    """The reference that an image's folder has by its content. Raises ConfigError."""
    return _recipe(source).reference


def publish(images: Path, source: Path) -> str:
    """Copy what decides an image into the state folder; return its reference."""
    made = _recipe(source)
    _put(images / f"{made.name}-{made.tag}", made.files)
    return made.reference


def _recipe(source: Path) -> Recipe:
    files = dict(_read(source, FILES))
    return recipe(source.name, files, sources(is_whole(files)))


def _read(folder: Path, names: Sequence[str]) -> list[tuple[str, bytes]]:
    return [(name, (folder / name).read_bytes()) for name in names if (folder / name).is_file()]


def _put(target: Path, content: Sequence[tuple[str, bytes]]) -> None:
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
