"""The code that travels with a run: a folder as an archive named by its content."""

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

from msgspec import Struct

from batchml.errors import ConfigError

MAX_BYTES = 256 * 1024**2  # of all files; data belongs into the workspace, not beside the code

_SKIPPED = {
    ".git", ".hg", ".svn", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache",
    ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store",
}  # fmt: skip


class CodeArchive(Struct, frozen=True):
    """A gzipped tar of regular files. The same files make the same bytes, and so the same name.

    `left_out` names what is not a file below the folder: links that lead out of it, pipes, devices.
    """

    digest: str
    data: bytes
    files: int
    left_out: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.digest}.tar.gz"


def pack(folder: Path, without: Path | None = None) -> CodeArchive:
    """Archive the regular files below `folder`, without caches, environments and `without`.

    A link to a file below the folder travels as that file. Raises ConfigError when the files are
    too large to send along with each run, or cannot be read.
    """
    found = _Found(folder.resolve(), without.resolve() if without else None)
    try:
        found.look("")
        files = sorted(found.files)
        size = sum((folder / name).stat().st_size for name in files)
        if size > MAX_BYTES:
            raise ConfigError(str(folder), [_too_large(folder, files, size)])
        contents = [(name, (folder / name).read_bytes()) for name in files]
    except OSError as error:
        raise ConfigError(
            str(folder),
            [
                f"code: {error.filename} cannot be read ({error.strerror}), and the whole folder "
                f"travels with a run. Make it readable, or keep it elsewhere."
            ],
        ) from error
    buffer = io.BytesIO()
    # Names, modes and bytes decide the archive; times and owners do not.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in contents:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if os.access(folder / name, os.X_OK) else 0o644
            tar.addfile(member, io.BytesIO(content))
    data = gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)
    digest = hashlib.sha256(data).hexdigest()
    return CodeArchive(digest, data, len(files), tuple(sorted(found.left_out)))


def _too_large(folder: Path, files: list[str], size: int) -> str:
    largest = max(files, key=lambda name: (folder / name).stat().st_size)
    return (
        f"code: {size // 1024**2} MiB in {len(files)} files; at most {MAX_BYTES // 1024**2} MiB "
        f"travel with a run. The largest is {largest}. Keep data elsewhere (BATCHML_DATA_DIR), or "
        f"run from a smaller folder (in a job.toml: code)."
    )


class _Found:
    """The files below a folder that travel, and what else there is."""

    def __init__(self, root: Path, without: Path | None) -> None:
        self._root = root
        self._without = without
        self.files: list[str] = []
        self.left_out: list[str] = []

    def look(self, below: str) -> None:
        with os.scandir(self._root / below) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.name in _SKIPPED or entry.name.endswith(".pyc"):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if Path(entry.path) != self._without:
                        self.look(name)
                elif entry.is_file() and self._is_inside(entry):
                    self.files.append(name)
                else:
                    self.left_out.append(name)

    def _is_inside(self, entry: os.DirEntry[str]) -> bool:
        return not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(self._root)


def keep(archive: CodeArchive, folder: Path) -> Path:
    """Put the archive into a folder of archives, unless it is there; its path."""
    path = folder / archive.name
    if not path.exists():
        from batchml.runtime.files import write_atomically

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(str(path), archive.data)
    return path
