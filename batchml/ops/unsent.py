"""The jobs of gangs that are not sent yet: their requests, until the last of them is."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from batchml.aws.batch.requests import Submission
from batchml.ops.history import History


class Unsent:
    """A file for each gang, private to the user, by the key of its head.

    It holds what the requests hold, variables of the command line among it; so it is gone as soon
    as all are sent, and there is none for a run that is one job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, history: History, env: str) -> "Unsent":
        """Those of an environment, in the state folder that a history is in."""
        return cls(history.path.parent / "gangs" / (env or "-"))

    def keep(self, gang: str, requests: Mapping[str, Submission]) -> None:
        """Keep the requests of its jobs, by their keys. On return they are on the disk.

        Raises OSError, and then nothing may be sent.
        """
        from batchml.runtime.storage.files import write_atomically

        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(str(self._folder / gang), msgspec.json.encode(requests))

    def find(self, gang: str, key: str) -> Submission | None:
        """The requests of one job; None where they are not kept."""
        try:
            data = (self._folder / gang).read_bytes()
            return msgspec.json.decode(data, type=dict[str, Submission]).get(key)
        except (OSError, msgspec.DecodeError):
            return None

    def gangs(self) -> list[str]:
        """The gangs of which something is kept."""
        try:
            return sorted(os.listdir(self._folder))
        except OSError:
            return []

    def drop(self, gang: str) -> None:
        with suppress(OSError):
            (self._folder / gang).unlink()
