"""The state folder: who may read it, what lies where, and who holds it.

local/            the embedded AWS Batch: journal, keys, attempts, its lock and its address
code/ images/     what jobs are made of, by content
runtime/ envs/    what processes run in, by content
runs/             outputs and checkpoints of runs
data/ workspace/  data sets; the folder that all jobs share
volumes/          file systems of EFS, as containers mount them, by id
archive/          the workspace's, unless another place was named
sweeps/           what the trials of a sweep and its controller tell each other, by key
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
from batchml.local.server.auth import Keys
from batchml.runtime.storage.files import is_locked, write_json

T = TypeVar("T")


class Endpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the running server answers."""

    pid: int
    port: int
    chaos: str = ""  # what is being rehearsed there
    read_only: str = ""  # why nothing may be changed there: the folder is a copy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class Home:
    def __init__(self, root: Path) -> None:
        self.root = root = root.absolute()  # the server has another working directory
        self.local = root / "local"
        self.journal = self.local / "journal.db"
        self.position = self.local / "position"  # the newest things in the journal
        self.attempts = self.local / "attempts"
        self.groups = self.local / "groups.json"
        self.network = self.local / "network.json"
        self.log = self.local / "server.log"
        self.images = root / "images"
        self.code = root / "code"
        self.envs = root / "envs"
        self.runtimes = root / "runtime"
        self.runs = root / "runs"
        self.sweeps = root / "sweeps"
        self.volumes = root / "volumes"

    def prepare(self) -> None:
        """Make the folder, private to this user.

        Raises StateFolderUnsafe when it exists and others can get in, or when it is not ours, and
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
        found = self.root.stat()
        if stat.S_IMODE(found.st_mode) & 0o077:
            if any(self.root.iterdir()):
                raise StateFolderUnsafe(
                    f"Others can read or write the state folder {self.root} (mode "
                    f"{stat.S_IMODE(found.st_mode):04o}), which holds keys and runs commands. "
                    f"Check what is in it, then: chmod 700 {self.root}"
                )
            self.root.chmod(0o700)
        self.attempts.mkdir(mode=0o700, parents=True, exist_ok=True)

    def check_owner(self) -> None:
        """Raise StateFolderUnsafe when the folder exists and is not ours."""
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

    def keys(self) -> Keys:
        """The keys of this folder's server, made at random when first asked for."""
        path = self.local / "keys.json"
        if not path.exists():
            # 160 bits and more; the prefix is ours, so that nobody takes them for AWS's.
            made = {
                "access_key_id": "BMLLOCAL" + secrets.token_hex(6).upper(),
                "secret_access_key": secrets.token_urlsafe(40),
            }
            temporary = path.with_name(f"keys.{os.getpid()}.tmp")
            write_json(str(temporary), made)
            try:
                os.link(temporary, path)  # the first of two makers wins
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
        keys = read_record(path, Keys)
        if keys is None:
            raise LocalServerError(
                f"{path} does not hold keys. Delete the file: new keys are made at the next start."
            )
        return keys

    def hold(self) -> int:
        """Take the folder for this process; the kernel gives it back when the process ends.

        Returns the lock's file descriptor. Raises StateFolderBusy, naming the holder.
        """
        descriptor = os.open(self.local / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not _locked(descriptor):
            os.close(descriptor)
            raise StateFolderBusy(str(self.root), self.holder())
        text = f"{os.getpid()}\n".encode()
        os.pwrite(descriptor, text, 0)  # over the old one: it is never empty for a reader
        os.ftruncate(descriptor, len(text))
        return descriptor

    def guard(self) -> Callable[[], None]:
        """A check that the journal still lies where it was opened. It raises StateFolderGone."""
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
        """The process that took the folder last, which is alive if `is_held`."""
        try:
            text = (self.local / "lock").read_text("ascii", "replace").partition("\n")[0]
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() and text.isascii() else None

    def is_held(self) -> bool:
        """True while a server lives.

        This, not the recorded port, says whether one does: after a crash any process may listen
        there, but only a live server holds the lock.
        """
        return is_locked(str(self.local / "lock"))

    def endpoint(self) -> Endpoint | None:
        """Where the last server answered, or answers if `is_held`."""
        return read_record(self.local / "endpoint.json", Endpoint)

    def write_endpoint(self, endpoint: Endpoint) -> None:
        write_json(str(self.local / "endpoint.json"), msgspec.to_builtins(endpoint))

    def attempt(self, task_id: str) -> Path:
        """The folder of an attempt. Task ids are made by the server, never by a user."""
        return self.attempts / task_id


def read_record(path: Path, kind: type[T]) -> T | None:
    """What a JSON file holds, or None when there is no such file or it holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def _locked(descriptor: int) -> bool:
    """Try for a fifth of a second: `is_held` takes the lock for a moment when it looks."""
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.01)
    return False
