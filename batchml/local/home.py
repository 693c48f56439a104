"""The state folder: its subfolders, its permissions, its keys, and the lock of its server.

local/            the embedded AWS Batch: journal, keys, attempts, its lock and its address
code/ images/     code packages and images of jobs, each named by a hash of its content
runtime/ envs/    batchml's runtime and virtual environments, each named by a hash of its content
runs/             outputs and checkpoints of runs
data/ workspace/  data sets; the folder that all jobs share
volumes/          one folder for each EFS file system that jobs mount, named by its id
archive/          the workspace's archive, unless another folder or bucket was named
sweeps/           messages between a sweep's controller and its trials, by the sweep's key
"""

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from batchml.errors import (
    LocalServerError,
    StateFolderBusy,
    StateFolderGone,
    StateFolderUnsafe,
)
from batchml.runtime.storage.files import is_locked, write_json

T = TypeVar("T")


class AccessKeys(msgspec.Struct, frozen=True):
    """The keys of this state folder's server, with which its callers sign requests."""

    access_key_id: str
    secret_access_key: str


class ServerEndpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The address of the running server."""

    pid: int
    port: int
    chaos: str = ""  # the faults that are injected there; empty for none
    read_only: str = ""  # the reason, if the folder is a copy that must not be changed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Home:
    """The paths of a state folder, its keys, its lock, and the address of its server."""

    def __init__(self, root: Path) -> None:
        self.root = root = root.absolute()  # the server has another working directory
        self.local = root / "local"
        self.journal = self.local / "journal.db"
        self.position = self.local / "position"  # the newest entries of the journal
        self.attempts = self.local / "attempts"
        self.groups = self.local / "groups.json"
        self.network = self.local / "network.json"
        self.log = self.local / "server.log"
        self.images = root / "images"
        self.code = root / "code"
        self.envs = root / "envs"
        self.cache = root / "cache"  # of data sets that runs have copied
        self.runtimes = root / "runtime"
        self.runs = root / "runs"
        self.sweeps = root / "sweeps"
        self.volumes = root / "volumes"

    def prepare(self) -> None:
        """Make the folder, private to this user.

        Raises StateFolderUnsafe when the folder exists and others have access or own it, and
        LocalServerError for a path that no PATH variable of a job could hold.
        """
        if os.pathsep in str(self.root):
            raise LocalServerError(
                f"The state folder {self.root} has {os.pathsep!r} in its path, which separates the "
                f"folders in PATH, so no job could find its programs. Set BATCHML_HOME to a folder "
                f"without it."
            )
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateFolderUnsafe(
                f"The state folder {self.root} cannot be made: {error.strerror}. "
                f"Set BATCHML_HOME to a folder of your own."
            ) from error
        self.check_owner()
        mode = stat.S_IMODE(self.root.stat().st_mode)
        if mode & 0o077:
            if any(self.root.iterdir()):
                raise StateFolderUnsafe(
                    f"Others can read or write the state folder {self.root} (mode "
                    f"{mode:04o}), which holds keys and runs commands. "
                    f"Check what is in it, then: chmod 700 {self.root}"
                )
            self.root.chmod(0o700)
        self.attempts.mkdir(mode=0o700, parents=True, exist_ok=True)

    def check_owner(self) -> None:
        """Raise StateFolderUnsafe when the folder exists and belongs to another user."""
        try:
            owner = self.root.stat().st_uid
        except FileNotFoundError:
            return
        except OSError:
            owner = -1
        if owner != os.geteuid():
            raise StateFolderUnsafe(
                f"The state folder {self.root} belongs to another user. "
                f"Set BATCHML_HOME to a folder of your own."
            )

    def keys(self) -> AccessKeys:
        """The keys of this folder's server. The first call makes them at random."""
        path = self.local / "keys.json"
        if not path.exists():
            # At least 160 bits. The prefix is batchml's, so that nobody takes them for keys of AWS.
            new_keys = {
                "access_key_id": "BMLLOCAL" + secrets.token_hex(6).upper(),
                "secret_access_key": secrets.token_urlsafe(40),
            }
            temporary = path.with_name(f"keys.{os.getpid()}.tmp")
            write_json(str(temporary), new_keys)
            try:
                os.link(temporary, path)  # the first of two processes wins
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise StateFolderUnsafe(
                f"Others can read the keys in {path} (mode {mode:04o}). Delete the file: "
                f"new keys are made at the next start."
            )
        keys = read_record(path, AccessKeys)
        if keys is None:
            raise LocalServerError(
                f"{path} does not hold keys. Delete the file: new keys are made at the next start."
            )
        return keys

    def hold(self) -> int:
        """Lock the folder for this process; the kernel unlocks it when the process ends.

        Returns the lock's file descriptor. Raises StateFolderBusy, which names the holder.
        """
        descriptor = os.open(self.local / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _try_lock(descriptor):
            os.close(descriptor)
            raise StateFolderBusy(str(self.root), self.holder())
        text = f"{os.getpid()}\n".encode()
        os.pwrite(descriptor, text, 0)  # overwrites: the file is never empty
        os.ftruncate(descriptor, len(text))
        return descriptor

    def guard(self) -> Callable[[], None]:
        """A check that the journal is still where it was opened. It raises StateFolderGone."""
        before, journal = self.journal.stat(), str(self.journal)

        def check() -> None:
            try:
                now = os.stat(journal)
            except OSError:
                now = None
            if now is None or not os.path.samestat(now, before):
                raise StateFolderGone(
                    f"The state folder {self.root} was moved, deleted or replaced while its server "
                    f"ran. The server stops; running jobs go on. If you moved the folder, set "
                    f"BATCHML_HOME to its new path: the next command finds the jobs there."
                )

        return check

    def holder(self) -> int | None:
        """The id of the process that locked the folder last, which lives if `is_held`."""
        try:
            text = (self.local / "lock").read_text("ascii", "replace").partition("\n")[0]
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() and text.isascii() else None

    def is_held(self) -> bool:
        """True while a server lives.

        Only the lock proves that, not the recorded port: after a crash any process may listen
        there.
        """
        return is_locked(str(self.local / "lock"))

    def endpoint(self) -> ServerEndpoint | None:
        """The address of the last server, which still serves at this address if `is_held`."""
        return read_record(self.local / "endpoint.json", ServerEndpoint)

    def write_endpoint(self, endpoint: ServerEndpoint) -> None:
        write_json(str(self.local / "endpoint.json"), msgspec.to_builtins(endpoint))

    def attempt(self, task_id: str) -> Path:
        """The folder of an attempt. Task ids are made by the server, never by a user."""
        return self.attempts / task_id


def read_record(path: Path, kind: type[T]) -> T | None:
    """The content of a JSON file, or None when it is missing or not of this type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def _try_lock(descriptor: int) -> bool:
    """Try for a fifth of a second, because `is_held` takes the lock for a moment to test it."""
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.01)
    return False
