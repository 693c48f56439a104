"""Images as processes know them: a folder with a `requirements.txt`, kept by content.

A client publishes the folder of an image here, as it would push a built image to a registry, and
names it `batchml/NAME:TAG` in the job definition. The tag is a hash of all that decides the
environment.
"""

import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

_REFERENCE = re.compile(r"batchml/([a-z0-9][a-z0-9._-]*):([0-9a-f]{12})")
_FILES = ("requirements.txt", ".python-version", "Dockerfile")


class LocalImage(Struct, frozen=True):
    name: str
    tag: str
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.name}-{self.tag}"

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
    """The reference that an image's folder has by its content."""
    return _reference(source.name, _content(source))


def publish(images: Path, source: Path) -> str:
    """Copy what decides an image's environment into the state folder; return its reference."""
    content = _content(source)
    made = _reference(source.name, content)
    _put(images / made.removeprefix("batchml/").replace(":", "-"), content)
    return made


def _reference(name: str, content: Sequence[tuple[str, bytes]]) -> str:
    return f"batchml/{name}:{_digest(content)}"


def _digest(content: Sequence[tuple[str, bytes]]) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def _content(source: Path) -> list[tuple[str, bytes]]:
    return [(name, (source / name).read_bytes()) for name in _FILES if (source / name).exists()]


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
    match = _REFERENCE.fullmatch(reference)
    if not match:
        return None
    folder = images / f"{match[1]}-{match[2]}"
    return LocalImage(match[1], match[2], folder) if folder.is_dir() else None


def publish_runtime(runtimes: Path) -> Path:
    """Copy `batchml.runtime` where jobs can import it and nothing else of this installation."""
    package = Path(__file__).parent.parent
    files = [package / "__init__.py", *sorted((package / "runtime").glob("*.py"))]
    content = [(f"batchml/{file.relative_to(package)}", file.read_bytes()) for file in files]
    target = runtimes / _digest(content)
    _put(target, content)
    return target
