"""Where nodes meet whose addresses nobody knows beforehand: JSON documents in a store.

One node writes where it listens, the others read it. Ray's head and the main node of a Slurm script
use it. The store is the run's own, or a folder of the workspace for jobs that run together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Dict, Optional

from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF, Store, StoreError

ADDRESS = "BATCHML_GANG"  # an s3:// address; empty: the workspace
KEY = "BATCHML_GANG_KEY"  # of the head's submission

_FOLDERS = (".batchml", "gangs")  # of the workspace


class Rendezvous:
    """Documents by name. Every method raises StoreError when the store cannot be used.

    `workspace` and `key` name the folder in the workspace, where that is the store.
    """

    def __init__(self, store: Store, workspace: str = "", key: str = "") -> None:
        self._store = store
        self._workspace, self._key = workspace, key

    @classmethod
    def of_group(cls, environ: Mapping[str, str]) -> Rendezvous:
        """The rendezvous of the jobs of one group run."""
        address = environ.get(ADDRESS, "")
        workspace, key = environ.get("BATCHML_WORKSPACE", ""), environ.get(KEY, "")
        if address:
            return cls(open_store(address, environ, limits=BRIEF))
        if not (workspace and key):
            raise StoreError(
                f"head and workers have nowhere to meet: {ADDRESS} is not set, and neither are "
                f"both BATCHML_WORKSPACE and {KEY}. `batchml submit` sets them for a job with "
                f"[[groups]]"
            )
        folder = os.path.join(workspace, *_FOLDERS, key)
        return cls(open_store(folder, environ, limits=BRIEF), workspace, key)

    def read(self, name: str) -> Optional[Dict[str, Any]]:
        data = self._store.get(name)
        if data is None:
            return None
        try:
            found = json.loads(data)
        except ValueError as error:
            raise StoreError(f"{name} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise StoreError(f"{name} is not a JSON object")
        return found

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        self._make_folder(name)
        self._store.put(name, json.dumps(document).encode())

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def _make_folder(self, name: str) -> None:
        """Make the folder in the workspace, for all: the next run may be another user's."""
        path = self._workspace
        for part in (*_FOLDERS, self._key, os.path.dirname(name)) if path else ():
            path = os.path.join(path, part)
            try:
                os.mkdir(path)
                os.chmod(path, 0o777)  # whatever the umask
            except OSError:
                continue  # it exists, or the store reports why it cannot be made
