"""Where the head and the workers of a Ray cluster meet: two documents in the bucket or workspace.

`gang/head.json` says where the head is, `gang/ended.json` that it has ended for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional

from batchml.runtime.nodes.link.rendezvous import Rendezvous
from batchml.runtime.storage.store import StoreError

_HEAD = "gang/head.json"
_ENDED = "gang/ended.json"


class HeadRecord(NamedTuple):
    """Where a head is, and which versions a worker needs to join it."""

    run: str  # the id of its job
    attempt: int
    address: str
    gcs_port: int
    control_port: int
    ray: str
    python: str
    at: float  # seconds since the epoch

    @property
    def gcs(self) -> str:
        return f"{self.address}:{self.gcs_port}"


class HeadRendezvous:
    """Every method raises StoreError when the documents cannot be read or written."""

    def __init__(self, documents: Rendezvous) -> None:
        self._documents = documents

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HeadRendezvous:
        return cls(Rendezvous.of_group(environ))

    def head(self) -> Optional[HeadRecord]:
        found = self._documents.read(_HEAD)
        if found is None:
            return None
        try:
            return HeadRecord(**found)
        except TypeError as error:
            raise StoreError(f"{_HEAD} is of another batchml: {error}") from error

    def publish(self, head: HeadRecord) -> None:
        """A head begins, or begins again after its host was lost."""
        self._documents.delete(_ENDED)
        self._documents.write(_HEAD, head._asdict())

    def end_code(self) -> Optional[int]:
        """The exit code of the program, once there is nothing left to do for workers."""
        found = self._documents.read(_ENDED)
        return None if found is None else int(found.get("code", 0))

    def end(self, code: int, at: float) -> None:
        self._documents.write(_ENDED, {"code": code, "at": at})
