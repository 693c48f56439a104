"""The code package of a run: the archive of its code, where it is stored, and its git commit."""

import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from msgspec import Struct

from batchml.clock import Clock
from batchml.config.project import repository_root
from batchml.errors import BatchmlError, ConfigError, NotFound
from batchml.jobs.code import CodeArchive, PackMemory, describe_sent, pack, put_once
from batchml.runtime.entry.fetch import BadArchive, unpack
from batchml.runtime.protocol.variables import (
    folder_placeholders,
    folder_variable,
    params_placeholders,
)

if TYPE_CHECKING:
    import subprocess

    from batchml.aws.batch.requests import CommandDocument
    from batchml.context import Context, EnvironmentCache
    from batchml.jobs.code_diff import CodeFile
    from batchml.jobs.find import ImageSource
    from batchml.model.job import JobSpec
    from batchml.runs.options import ResolvedJob, RunRequest
    from batchml.runtime.storage.store import Store

_CODE_FOLDER = "code"  # jobs may read this folder of the bucket: cfn/roles.yaml

# The reference of an image that `batchml image push` has pushed.
_BATCHML_IMAGE = r"\.dkr\.ecr\.[a-z0-9.-]+/batchml/[^/]+$"


class PackageStore(Struct, frozen=True):
    """Where code packages are stored: a folder of this machine, or a bucket.

    `codes` is the address of the archives and documents, whose names are hashes of their content;
    "" if the environment has no bucket. `is_read` is False for a run whose image has no runtime
    that would fetch them.
    """

    codes: str
    bucket: str = ""
    is_read: bool = True

    @property
    def documents(self) -> str:
        return self.codes if self.is_read else ""

    def address(self, archive: CodeArchive | None) -> str:
        """The address of a run's code; "" without code."""
        return f"{self.codes}/{archive.name}" if archive else ""

    def store(self, key: str) -> str:
        """The address of the run's checkpoints and outputs in the bucket; "" on `local`."""
        return f"s3://{self.bucket}/runs/{key}" if self.bucket and self.is_read else ""


_STORED_AGE = 60.0  # seconds


class SubmissionMemory:
    """What a program's earlier submissions have found out, for its next ones."""

    def __init__(self, clock: Clock) -> None:
        self.packs = PackMemory(clock)
        self.commits = CommitMemory(clock)
        self._clock = clock
        self._stored = ("", 0.0)

    def note_stored(self, address: str) -> None:
        """Remember that a bucket has this code package."""
        self._stored = (address, self._clock.monotonic())

    def is_stored(self, address: str) -> bool:
        """Whether the bucket had the package a moment ago: then it is not asked again."""
        known, at = self._stored
        return known == address and self._clock.monotonic() - at < _STORED_AGE


_memories = WeakKeyDictionary["Context", SubmissionMemory]()


def memory_of(context: "Context") -> SubmissionMemory:
    """The memory of an environment, as long as the program keeps its context."""
    memory = _memories.get(context)
    if memory is None:
        memory = _memories[context] = SubmissionMemory(context.clock)
    return memory


def find_package_store(
    context: "Context", cache: "EnvironmentCache | None", image: str, source: "ImageSource | None"
) -> PackageStore:
    """The package store of an environment, for a run with this image."""
    if cache is None:
        return PackageStore(str(context.home.code))
    bucket = cache.outputs().get("BucketName", "")
    is_read = source is not None or re.search(_BATCHML_IMAGE, image) is not None
    return PackageStore(f"s3://{bucket}/{_CODE_FOLDER}" if bucket else "", bucket, is_read)


def code_folder(job: "ResolvedJob") -> Path | None:
    """The folder that is sent as code; None for a job without code."""
    code = job.spec.code
    return None if code is False else job.folder if code is True else job.folder / code


def pack_code(
    context: "Context",
    request: "RunRequest",
    job: "ResolvedJob",
    store: PackageStore,
    notices: list[str],
) -> CodeArchive | None:
    """The archive of the job's code; None for a job without code. Raises ConfigError."""
    spec, folder, source = job.spec, job.folder, code_folder(job)
    if source is None:
        return None
    if not source.is_dir():
        raise ConfigError(str(folder / "job.toml"), [f"code: {source} is not a folder."])
    if not store.is_read:
        raise ConfigError(
            spec.name,
            [
                f"code: {spec.image} is not an image that batchml built, so nothing in it would "
                f"fetch and unpack the folder in {context.env}. Set code = false and put the code "
                f"into the image, or name a folder below images/ whose Dockerfile builds on it."
            ],
        )
    if not store.codes:
        raise ConfigError(
            context.env,
            [
                f"code: {context.env} has no bucket for it. Is it set up? "
                f"`batchml setup --env {context.env}`. Or put the code into the image and set "
                f"code = false."
            ],
        )
    # Without the state folder: it holds keys, and all earlier archives.
    memory = memory_of(context).packs
    archive = pack(source, context.home.root, request.include_secrets, request.files, memory)
    if archive.left_out:
        names = ", ".join(archive.left_out[:5]) + (", ..." if len(archive.left_out) > 5 else "")
        notices.append(f"Not sent, because they are not files of this folder: {names}.")
    return archive


def check_placeholders(spec: "JobSpec", store: PackageStore) -> None:
    """Raise ConfigError for a command with folders that nothing in its image would fill in."""
    names = [*folder_placeholders(spec.argv()), *params_placeholders(spec.params)]
    if names and not store.is_read:
        variable = folder_variable(names[0])
        raise ConfigError(
            spec.name,
            [
                f"command: {spec.image} is not an image that batchml built, so nothing in it would "
                f"replace {{{names[0]}}}. Run a shell, which reads {variable}: sh -c '...'"
            ],
        )


def _open_store(context: "Context", packages: PackageStore) -> "Store":
    if packages.bucket:
        from batchml.aws.s3 import BucketStore

        return BucketStore(context.connect(), packages.bucket, _CODE_FOLDER)
    from batchml.runtime.storage.folder import FolderStore

    return FolderStore(str(context.home.code), private=True)


def store_package(
    context: "Context",
    packages: PackageStore,
    archive: CodeArchive | None,
    document: "CommandDocument | None",
    tell: Callable[[str], None],
) -> None:
    """Store code and document where the run finds them; one call for each that exists already.

    A bucket is asked for the same code once a minute.
    """
    memory = memory_of(context)
    store = _open_store(context, packages)
    if document is not None:
        data = document.data
        put_once(store, document.name, lambda: data)
    if archive is not None:
        address = packages.address(archive)
        is_known = bool(packages.bucket) and memory.is_stored(address)
        sent = not is_known and put_once(store, archive.name, lambda: archive.data)
        if not is_known:
            memory.note_stored(address)
        if archive.files and (sent or packages.bucket):
            tell(describe_sent(archive, sent))


# --- Packages that were sent ----------------------------------------------------------------------


_S3_URL = r"s3://([^/]+)/(.+)"


@contextmanager
def fetch_package(context: "Context", address: str) -> Iterator[Path]:
    """A context with the file of the code package at an address, fetched if it is in a bucket.

    Raises NotFound for a package that was deleted.
    """
    stored = re.fullmatch(_S3_URL, address)
    with tempfile.TemporaryDirectory(prefix="batchml-again-") as folder:
        path = context.home.code / Path(address).name  # the state folder may have been moved
        if stored is not None:
            from batchml.aws.s3 import BucketStore

            path = Path(folder) / "archive"
            BucketStore(context.connect(), stored[1]).get_file(stored[2], str(path))
        if not path.is_file():
            raise _package_gone(address, "it was deleted")
        yield path


@contextmanager
def unpack_code(context: "Context", address: str) -> Iterator[str]:
    """A context with a temporary folder of the code at an address; "" without an address.

    Raises NotFound for code that was deleted.
    """
    if not address:
        yield ""
        return
    with (
        fetch_package(context, address) as archive,
        tempfile.TemporaryDirectory(prefix="batchml-again-") as folder,
    ):
        try:
            unpack(str(archive), folder)
        except BadArchive as error:
            raise _package_gone(address, str(error)) from error
        yield folder


def read_files(context: "Context", address: str) -> "dict[str, CodeFile]":
    """The files of the code at an address; {} without an address.

    Raises NotFound for code that was deleted or damaged.
    """
    from batchml.jobs.code_diff import read_package

    if not address:
        return {}
    with fetch_package(context, address) as archive:
        try:
            return read_package(archive)
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise _package_gone(address, str(error)) from error


def _package_gone(address: str, why: str) -> NotFound:
    hint = f"Submit its job again: batchml submit JOB. ({why})"
    return NotFound("Code of the run", address, [], hint)


def describe_changed_code(
    context: "Context", folder: str, name: str, sent_at: float, more: Mapping[str, bytes] = {}
) -> str:
    """`the code of 12:01; FOLDER has changed since: --code sends it.`, for a run of older code.

    `name` is that of the archive that was sent at `sent_at` (seconds since the epoch), `more` are
    its files that are in no folder. "" if the folder has the same files still, or if the two cannot
    be compared.
    """
    if not (folder and name and Path(folder).is_dir()):
        return ""
    try:
        if pack(Path(folder), context.home.root, True, more).name == name:
            return ""
    except BatchmlError:
        return ""
    sent = datetime.fromtimestamp(sent_at).astimezone()
    day = "" if context.clock.now() - sent_at < 12 * 3600 else f"{sent:%Y-%m-%d} "
    return f"the code of {day}{sent:%H:%M}; {folder} has changed since: --code sends it."


# --- git commit -----------------------------------------------------------------------------------
# The commit that is checked out is read from git's files, which is faster than starting git. Only
# git can tell whether the folder has changes that are not committed: `git status` runs while the
# requests are made, and after at most `PATIENCE` seconds the answer is "unknown".
#
# Source: gitrepository-layout(5).


PATIENCE = 0.2  # seconds that `git status` may take

_COMMIT = r"[0-9a-f]{40}([0-9a-f]{24})?"
_MAX_BYTES = 4 * 1024**2  # of packed-refs; a larger file would take too long


class GitCommit(Struct, frozen=True):
    """A commit. `id` is "" outside a repository; `is_dirty` is None if that is unknown."""

    id: str = ""
    is_dirty: bool | None = None


class CommitQuery:
    """A query for the commit of a folder: the constructor starts git, `read` returns the answer.

    With `memory`, git is not started if it has answered a moment ago.
    """

    def __init__(
        self, folder: Path, patience: float = PATIENCE, memory: "CommitMemory | None" = None
    ) -> None:
        self._folder, self._memory, self._patience = folder, memory, patience
        self._id = find_commit(folder)
        self._at = memory.clock.monotonic() if memory else 0.0
        self._known = memory.find(folder, self._id, self._at) if memory else None
        self._status = None if self._known else self._start()

    def _start(self) -> "subprocess.Popen[bytes] | None":
        return _start_git_status(self._folder) if self._id else None

    def read(self, code: str = "") -> GitCommit:
        """The commit. `code`: the name of the archive of the folder, if it was packed meanwhile: an
        earlier answer counts only for the same files.
        """
        if self._known and self._known.code == code:
            return self._known.commit
        status = self._status or self._start()
        is_dirty = _read_git_status(status, self._patience) if status else None
        commit = GitCommit(self._id, is_dirty)
        if self._memory and code and is_dirty is not None:
            self._memory.known = _KnownCommit(self._folder, code, self._at, commit)
        return commit


_COMMIT_AGE = 1.0  # seconds


class _KnownCommit(Struct, frozen=True):
    """The answer to a query that was made at `at` (monotonic), with the archive of the folder."""

    folder: Path
    code: str
    at: float
    commit: GitCommit


class CommitMemory:
    """The last answer about a commit, of a program that submits the same folder again and again."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.known: _KnownCommit | None = None

    def find(self, folder: Path, commit: str, now: float) -> _KnownCommit | None:
        """The answer about this commit of a folder, if it was given a moment ago."""
        known = self.known
        if known is None or (known.folder, known.commit.id) != (folder, commit):
            return None
        return known if now - known.at < _COMMIT_AGE else None


def find_commit(folder: Path) -> str:
    """The commit that is checked out at `folder`; "" without a repository or a readable commit."""
    top = repository_root(str(folder))
    try:
        return _head(_git_folder(Path(top, ".git"))) if top else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _git_folder(path: Path) -> Path:
    """The repository's folder: in a worktree or a submodule `.git` is a file that names it."""
    if path.is_dir():
        return path
    return path.parent / path.read_text("utf-8").strip().removeprefix("gitdir:").strip()


def _head(git: Path) -> str:
    head = (git / "HEAD").read_text("utf-8").strip()
    if not head.startswith("ref:"):
        return _valid_commit(head)
    name = head.removeprefix("ref:").strip()
    if not name.startswith("refs/") or ".." in name:
        return ""
    shared = git
    if (git / "commondir").is_file():  # a worktree: its branches are in the main repository
        shared = git / (git / "commondir").read_text("utf-8").strip()
    for folder in (git, shared):
        if (folder / name).is_file():
            return _valid_commit((folder / name).read_text("utf-8").strip())
    packed = shared / "packed-refs"
    if packed.is_file() and packed.stat().st_size <= _MAX_BYTES:
        for line in packed.read_text("utf-8").splitlines():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return _valid_commit(commit)
    return ""  # before the first commit


def _valid_commit(text: str) -> str:
    return text if re.fullmatch(_COMMIT, text) else ""


def _start_git_status(folder: Path) -> "subprocess.Popen[bytes] | None":
    """Start `git status`, without programs that the repository's configuration names."""
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
