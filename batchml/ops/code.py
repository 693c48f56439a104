"""The code that travels with a run: a folder as an archive named by its content."""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from batchml.errors import ConfigError

MAX_BYTES = 256 * 1024**2  # of all files; data belongs into the workspace, not beside the code

_SKIPPED = {
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store",
}  # fmt: skip


class CodeArchive(Struct, frozen=True):
    """A gzipped tar of regular files. The same files make the same bytes, and so the same name."""

    digest: str
    data: bytes
    files: int

    @property
    def name(self) -> str:
        return f"{self.digest}.tar.gz"


def pack(folder: Path) -> CodeArchive:
    """Archive the regular files below `folder`, without caches, environments and links.

    Raises ConfigError when they are too large to send along with each run.
    """
    files = sorted(_files(folder))
    size = sum((folder / name).stat().st_size for name in files)
    if size > MAX_BYTES:
        largest = max(files, key=lambda name: (folder / name).stat().st_size)
        raise ConfigError(
            str(folder),
            [
                f"code: {size // 1024**2} MiB in {len(files)} files; at most "
                f"{MAX_BYTES // 1024**2} MiB travel with a run. The largest is {largest}. "
                f"Keep data elsewhere, or set code to a smaller folder."
            ],
        )
    buffer = io.BytesIO()
    # Names, modes and bytes decide the archive; times and owners do not.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in files:
            path = folder / name
            content = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(member, io.BytesIO(content))
    data = gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)
    return CodeArchive(hashlib.sha256(data).hexdigest(), data, len(files))


def _files(folder: Path, below: str = "") -> Iterator[str]:
    with os.scandir(folder / below) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.name in _SKIPPED or entry.is_symlink():
                continue
            if entry.is_dir():
                yield from _files(folder, name)
            elif entry.is_file() and not entry.name.endswith(".pyc"):
                yield name


def keep(archive: CodeArchive, folder: Path) -> Path:
    """Put the archive into a folder of archives, unless it is there; its path."""
    path = folder / archive.name
    if not path.exists():
        from batchml.runtime.files import write_atomically

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(str(path), archive.data)
    return path
