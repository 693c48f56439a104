"""Which commit of a git repository a folder is at. The commit is read from files: no process.

Only git can tell whether the folder has changes that are not committed. `git status` runs beside
other work and gets at most `PATIENCE` seconds: after that the answer is "not known".

Source: gitrepository-layout(5).
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import subprocess

PATIENCE = 0.2  # seconds that `git status` may take

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_MAX_BYTES = 4 * 1024**2  # of packed-refs; a larger file would take too long


class GitCommit(Struct, frozen=True):
    """`id` is empty outside a repository; `is_dirty` is None where it is not known."""

    id: str = ""
    is_dirty: bool | None = None


class CommitQuery:
    """A query for the commit of a folder: it starts at construction, `read` returns the answer."""

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        self._id = find_commit(folder)
        self._status = _ask(folder) if self._id else None
        self._patience = patience

    def read(self) -> GitCommit:
        status = self._status
        return GitCommit(self._id, _answer(status, self._patience) if status else None)


def find_commit(folder: Path) -> str:
    """The commit that is checked out at `folder`; empty where there is none, or none readable."""
    for above in (folder, *folder.parents):
        if (above / ".git").exists():
            try:
                return _head(_git_folder(above / ".git"))
            except (OSError, UnicodeDecodeError):
                return ""
    return ""


def _git_folder(path: Path) -> Path:
    """The repository's folder: in a worktree or a submodule `.git` is a file that names it."""
    if path.is_dir():
        return path
    told = path.read_text("utf-8").strip().removeprefix("gitdir:").strip()
    return path.parent / told


def _head(git: Path) -> str:
    head = (git / "HEAD").read_text("utf-8").strip()
    if not head.startswith("ref:"):
        return _checked(head)
    name = head.removeprefix("ref:").strip()
    if not name.startswith("refs/") or ".." in name:
        return ""
    shared = git
    if (git / "commondir").is_file():  # of a worktree: branches are the main repository's
        shared = git / (git / "commondir").read_text("utf-8").strip()
    for place in (git, shared):
        if (place / name).is_file():
            return _checked((place / name).read_text("utf-8").strip())
    packed = shared / "packed-refs"
    if packed.is_file() and packed.stat().st_size <= _MAX_BYTES:
        for line in packed.read_text("utf-8").splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return _checked(commit)
    return ""  # before the first commit


def _checked(text: str) -> str:
    return text if _COMMIT.fullmatch(text) else ""


def _ask(folder: Path) -> "subprocess.Popen[bytes] | None":
    """A running `git status`; it runs nothing of the repository's own configuration."""
    import subprocess

    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain", "--", "."]
    try:
        return subprocess.Popen(
            command, cwd=folder, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return None


def _answer(status: "subprocess.Popen[bytes]", patience: float) -> bool | None:
    import subprocess

    try:
        out, _ = status.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        status.kill()
        status.communicate()
        return None
    return bool(out) if status.returncode == 0 else None
