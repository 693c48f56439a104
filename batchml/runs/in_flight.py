"""Submissions that are being sent: a locked file for each, and the requests of group runs.

A file without a lock belongs to a client that was killed: its submission has to be settled. So a
listing of one folder shows whether a submission is open, and no process settles a submission that
another process is sending.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from batchml.aws.batch.requests import SubmissionRequests
from batchml.history import History
from batchml.runtime.storage.files import is_locked, write_atomically

# Seconds after its creation in which the process of a file may not have locked it yet.
LOCK_GRACE = 1.0


class InFlight:
    """The files of an environment. If a file cannot be created, the submission goes on without."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "InFlight":
        return cls(history.path.parent.joinpath("submitting", env or "-"))

    @contextmanager
    def mark(self, key: str) -> Iterator[None]:
        """Mark the submission `key` as being sent by this process.

        The file stays until `remove`, so that it outlives an error that leaves the outcome open.
        """
        descriptor = self._lock(key)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def remove(self, key: str) -> None:
        """Delete the file of a submission that is settled."""
        with suppress(OSError):
            (self._folder / key).unlink()

    def is_being_sent(self, key: str) -> bool:
        """True while a process is sending the submission."""
        try:
            return is_locked(str(self._folder / key))
        except OSError:
            return False

    def abandoned(self, now: float) -> list[str]:
        """The keys of files whose processes have ended; `now` in seconds since the epoch."""
        found = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    age = now - entry.stat().st_mtime
                    if abs(age) >= LOCK_GRACE and not self.is_being_sent(entry.name):
                        found.append(entry.name)
        return sorted(found)

    def _lock(self, key: str) -> int | None:
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            try:
                descriptor = os.open(self._folder / key, flags, 0o600)
            except FileNotFoundError:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self._folder / key, flags, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            return None
        return descriptor


# --- Requests of group runs that are not sent yet -------------------------------------------------


class UnsentRequests:
    """A file for each group run that is being sent, named by the key of its head.

    It holds the requests of the workers, with environment variables of the command line: so only
    the user can read it, and it is deleted as soon as all are sent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "UnsentRequests":
        return cls(history.path.parent.joinpath("gangs", env or "-"))

    def keep(self, head_key: str, requests: Mapping[str, SubmissionRequests]) -> None:
        """Write the requests of the workers, by their keys, to disk.

        Raises OSError; then nothing may be sent.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(str(self._folder / head_key), msgspec.json.encode(requests))

    def find(self, head_key: str, key: str) -> SubmissionRequests | None:
        """The requests of one job; None if they are not stored."""
        try:
            data = (self._folder / head_key).read_bytes()
            return msgspec.json.decode(data, type=dict[str, SubmissionRequests]).get(key)
        except (OSError, msgspec.DecodeError):
            return None

    def head_keys(self) -> list[str]:
        """The keys of the heads of group runs with stored requests."""
        try:
            return sorted(os.listdir(self._folder))
        except OSError:
            return []

    def drop(self, head_key: str) -> None:
        with suppress(OSError):
            (self._folder / head_key).unlink()
