"""The shared folder: its entries, the progress of a transfer, and its report."""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from batchml.errors import UsageError

MOUNT = "/workspace"  # its path in containers

Kind = Literal["file", "folder", "link"]


class WorkspaceEntry(Struct, frozen=True):
    """A file, folder or link of the workspace. `path` is relative to it, with `/` as separator."""

    path: str
    kind: Kind = "file"
    mode: int = 0o644  # permissions only
    size: int = 0  # bytes of a file, else 0
    mtime_ns: int = 0  # since the epoch
    sha256: str = ""  # of a file, in hex; empty if it was not computed
    target: str = ""  # of a link


class TransferStatus(Struct, frozen=True):
    """How far a transfer is. Unchanged files count as done."""

    doing: str = ""  # "pushing", "reading back"
    path: str = ""  # the latest file
    files: int = 0
    of_files: int = 0  # 0: not known yet
    size: int = 0  # bytes
    of_size: int = 0
    moved: int = 0  # bytes of `size` that were transferred: they make the rate


OnProgress = Callable[[TransferStatus], None]  # called often, by one thread at a time


def ignore_progress(_: TransferStatus) -> None:
    """Default callback: does nothing."""


class TransferReport(Struct, frozen=True):
    """What a transfer did. `left_out` and `missing` are paths, each with a reason.

    Devices and links that lead out are always left out. Missing files should have been transferred.
    """

    verb: str = ""
    location: str = ""  # a folder, or s3://BUCKET/PREFIX
    files: int = 0  # transferred
    size: int = 0  # bytes transferred
    unchanged: int = 0
    removed: int = 0  # files that `archive --delete` freed or `rm` deleted
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # messages: the cost, files that appear later

    @property
    def is_complete(self) -> bool:
        return not self.missing


def relative_path(path: str) -> str:
    """Return a path of the workspace relative to it: `/workspace/a/` becomes `a`. Raises
    UsageError.
    """
    words = path.removeprefix(MOUNT) if path == MOUNT or path.startswith(f"{MOUNT}/") else path
    if words.startswith("/") and words == path and path != "/":
        raise UsageError(f"{path!r} is not in the workspace: give a path below it, or {MOUNT}/...")
    parts = [part for part in words.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise UsageError(f"{path!r} leads out of the workspace: give a path below it.")
    return "/".join(parts)
