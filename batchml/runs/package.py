"""The code package of a run: the archive of its code, and where it and a long command lie."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.errors import ConfigError
from batchml.jobs.code import CodeArchive, describe_sent, pack, put_once

if TYPE_CHECKING:
    import subprocess

    from batchml.aws.batch.requests import CommandDocument
    from batchml.context import Context, EnvironmentCache
    from batchml.jobs.find import ImageSource
    from batchml.runs.options import ResolvedJob, RunRequest
    from batchml.runtime.storage.store import Store

_CODE_FOLDER = "code"  # the folder of the bucket that jobs may read: cfn/roles.yaml

# In the registry that `batchml image push` pushes to.
_BATCHML_IMAGE = re.compile(r"\.dkr\.ecr\.[a-z0-9.-]+/batchml/[^/]+$")


class PackageStore(Struct, frozen=True):
    """Where code packages are stored: a folder of this machine, or a bucket.

    `is_read` is False for a run whose image has no runtime that would fetch them.
    """

    codes: str  # archives and documents, by content; empty where there is no place for them
    bucket: str = ""
    is_read: bool = True

    @property
    def documents(self) -> str:
        return self.codes if self.is_read else ""

    def address(self, archive: CodeArchive | None) -> str:
        """Where a run finds its code; empty without code."""
        return f"{self.codes}/{archive.name}" if archive else ""

    def store(self, key: str) -> str:
        """The folder of the run's checkpoints and outputs in the bucket; empty on `local`, which
        gives it folders.
        """
        return f"s3://{self.bucket}/runs/{key}" if self.bucket and self.is_read else ""


def find_package_store(
    context: "Context", known: "EnvironmentCache | None", image: str, source: "ImageSource | None"
) -> PackageStore:
    """The package store of an environment, for a run with this image."""
    if known is None:
        return PackageStore(str(context.home.code))
    bucket = known.outputs().get("BucketName", "")
    is_read = source is not None or _BATCHML_IMAGE.search(image) is not None
    return PackageStore(f"s3://{bucket}/{_CODE_FOLDER}" if bucket else "", bucket, is_read)


def code_folder(ordered: "ResolvedJob") -> Path | None:
    """The folder that is sent as code; None for none."""
    code = ordered.spec.code
    return None if code is False else ordered.folder if code is True else ordered.folder / code


def pack_code(
    context: "Context",
    order: "RunRequest",
    ordered: "ResolvedJob",
    depot: PackageStore,
    notices: list[str],
) -> CodeArchive | None:
    """The archive of the job's code; None for a job without code. Raises ConfigError."""
    spec, folder, source = ordered.spec, ordered.folder, code_folder(ordered)
    if source is None:
        return None
    if not source.is_dir():
        raise ConfigError(str(folder / "job.toml"), [f"code: {source} is not a folder."])
    if not depot.is_read:
        raise ConfigError(
            spec.name,
            [
                f"code: {spec.image} is not an image that batchml built, so nothing in it would "
                f"fetch and unpack the folder in {context.env}. Set code = false and put the code "
                f"into the image, or name a folder below images/ whose Dockerfile builds on it."
            ],
        )
    if not depot.codes:
        raise ConfigError(
            context.env,
            [
                f"code: the environment has no bucket for it. Make one with "
                f"`batchml setup --env {context.env}`, or put the code into the image and set "
                f"code = false."
            ],
        )
    # The state folder holds keys, and all earlier archives.
    archive = pack(source, context.home.root, order.include_secrets)
    if archive.left_out:
        names = ", ".join(archive.left_out[:5]) + (", ..." if len(archive.left_out) > 5 else "")
        notices.append(f"Left behind, not being files of this folder: {names}.")
    return archive


def _open_store(context: "Context", depot: PackageStore) -> "Store":
    if depot.bucket:
        from batchml.aws.s3 import BucketStore

        return BucketStore(context.connect(), depot.bucket, _CODE_FOLDER)
    from batchml.runtime.storage.folder import FolderStore

    return FolderStore(str(context.home.code), private=True)


def store_package(
    context: "Context",
    depot: PackageStore,
    archive: CodeArchive | None,
    document: "CommandDocument | None",
    tell: Callable[[str], None],
) -> None:
    """Store code and document where the run finds them, unless they exist; one look for each."""
    store = _open_store(context, depot)
    if document is not None:
        data = document.data
        put_once(store, document.name, lambda: data)
    if archive is not None:
        sent = put_once(store, archive.name, lambda: archive.data)
        if archive.files and (sent or depot.bucket):
            tell(describe_sent(archive, sent))


# --- git commit -----------------------------------------------------------------------------------
# Which commit of a git repository a folder is at. The commit is read from files: no process.
#
# Only git can tell whether the folder has changes that are not committed. `git status` runs beside
# other work and gets at most `PATIENCE` seconds: after that the answer is "not known".
#
# Source: gitrepository-layout(5).


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
        self._status = _start_git_status(folder) if self._id else None
        self._patience = patience

    def read(self) -> GitCommit:
        status = self._status
        return GitCommit(self._id, _read_git_status(status, self._patience) if status else None)


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
        return _valid_commit(head)
    name = head.removeprefix("ref:").strip()
    if not name.startswith("refs/") or ".." in name:
        return ""
    shared = git
    if (git / "commondir").is_file():  # of a worktree: branches are the main repository's
        shared = git / (git / "commondir").read_text("utf-8").strip()
    for place in (git, shared):
        if (place / name).is_file():
            return _valid_commit((place / name).read_text("utf-8").strip())
    packed = shared / "packed-refs"
    if packed.is_file() and packed.stat().st_size <= _MAX_BYTES:
        for line in packed.read_text("utf-8").splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return _valid_commit(commit)
    return ""  # before the first commit


def _valid_commit(text: str) -> str:
    return text if _COMMIT.fullmatch(text) else ""


def _start_git_status(folder: Path) -> "subprocess.Popen[bytes] | None":
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


def _read_git_status(status: "subprocess.Popen[bytes]", patience: float) -> bool | None:
    import subprocess

    try:
        out, _ = status.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        status.kill()
        status.communicate()
        return None
    return bool(out) if status.returncode == 0 else None
