"""Submissions under way, as files that their processes hold locked.

A file without a lock is of a client that was killed: what it submitted, or did not, is to be
settled. So whether anything is to be settled costs one look into a folder, and nobody settles what
another process is just sending.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchml.ops.history import History
from batchml.runtime.storage.files import is_locked

# Seconds. A younger file may be one whose process has not come to lock it yet.
YOUNG = 1.0


class Flights:
    """The files of one environment. A file that cannot be made is no reason not to submit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "Flights":
        """Those of an environment, in the state folder that a history is in."""
        return cls(history.path.parent / "submitting" / (env or "-"))

    @contextmanager
    def flight(self, key: str) -> Iterator[None]:
        """Show others that the submission `key` is being sent by this process.

        The file stays if what is inside ends by an exception that leaves the outcome open; then
        `landed` removes it.
        """
        descriptor = self._take(key)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def landed(self, key: str) -> None:
        """The submission is settled."""
        with suppress(OSError):
            (self._folder / key).unlink()

    def is_flying(self, key: str) -> bool:
        """True while a process is sending it."""
        try:
            return is_locked(str(self._folder / key))
        except OSError:
            return False

    def abandoned(self, now: float) -> list[str]:
        """The keys whose processes have gone; `now` in seconds since the epoch."""
        found = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    age = now - entry.stat().st_mtime
                    if abs(age) >= YOUNG and not self.is_flying(entry.name):
                        found.append(entry.name)
        return sorted(found)

    def _take(self, key: str) -> int | None:
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
