"""The shared folder: what lies in it, how far a transfer is, and what became of it."""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from batchml.errors import UsageError

MOUNT = "/workspace"  # where containers have it

Kind = Literal["file", "folder", "link"]


class Entry(Struct, frozen=True):
    """One thing in the workspace. `path` is below it, with `/` between its parts."""

    path: str
    kind: Kind = "file"
    mode: int = 0o644  # permissions alone
    size: int = 0  # bytes of a file; 0 of anything else
    mtime_ns: int = 0  # since the epoch
    sha256: str = ""  # hex, of a file; empty where nobody has read it
    target: str = ""  # where a link leads


class Progress(Struct, frozen=True):
    """How far a transfer is. What is found unchanged counts as done."""

    doing: str = ""  # a word or two: "pushing", "reading back"
    path: str = ""  # the file that was touched last
    files: int = 0
    of_files: int = 0  # 0: not known yet
    size: int = 0  # bytes
    of_size: int = 0
    moved: int = 0  # bytes of `size` that travelled: the rate is theirs


Watch = Callable[[Progress], None]  # called often, and by one thread at a time


def ignore(_: Progress) -> None:
    """Nobody looks."""


class Report(Struct, frozen=True):
    """What a transfer did. `left_out` and `missing` are names, each with the reason.

    What is left out never travels: devices, links that lead out. What is missing should have.
    """

    verb: str = ""
    place: str = ""  # a folder, or s3://BUCKET/PREFIX
    files: int = 0  # that travelled
    size: int = 0  # bytes of them
    unchanged: int = 0
    removed: int = 0  # files of the workspace that `archive --delete` freed
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # for people: what it cost, what may trail

    @property
    def is_complete(self) -> bool:
        return not self.missing


def below(path: str) -> str:
    """A path of the workspace as it is below it: `/workspace/a/` is `a`. Raises UsageError."""
    words = path.removeprefix(MOUNT) if path == MOUNT or path.startswith(f"{MOUNT}/") else path
    if words.startswith("/") and words == path and path != "/":
        raise UsageError(f"{path!r} is not in the workspace: name a path below it, or {MOUNT}/...")
    parts = [part for part in words.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise UsageError(f"{path!r} leads out of the workspace: name a path below it.")
    return "/".join(parts)
