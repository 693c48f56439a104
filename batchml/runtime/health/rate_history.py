"""The rates that earlier runs of the environment have measured between their nodes.

Each rate is a value of its own in the store that all runs of the environment share, so runs that
write at once do not overwrite each other. The newest `KEPT` of each kind of run stay.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import List, NamedTuple, Optional

from batchml.runtime.health.network import KEPT, EarlierRate, MeasuredRate, digest
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF, Store

_FOLDERS = (".batchml", "network")  # below a workspace; in a bucket: runs/network/


class RateKind(NamedTuple):
    """The runs whose rates are compared, if their software is the same, too."""

    instance_type: str  # empty on other machines
    nodes: int
    processes: int  # on all nodes
    backend: str

    @property
    def prefix(self) -> str:
        kind = self.instance_type or "machine"
        return f"network/{kind}-{self.nodes}-{self.processes}-{self.backend}/"


class RateHistory:
    """The rates of one kind of run. Every method raises StoreError."""

    def __init__(self, store: Store, kind: RateKind) -> None:
        self._store = store
        self._kind = kind

    @classmethod
    def open(
        cls, env: RuntimeEnv, environ: Mapping[str, str], kind: RateKind
    ) -> Optional[RateHistory]:
        """The history in the bucket of all runs, else in the workspace; None without either."""
        if "://" in env.store:
            above = env.store.rstrip("/").rpartition("/")[0]
            return cls(open_store(above, environ, limits=BRIEF), kind)
        if not env.workspace:
            return None
        _make_folders(env.workspace, *_FOLDERS, kind.prefix.split("/")[1])
        folder = os.path.join(env.workspace, _FOLDERS[0])
        return cls(open_store(folder, environ, limits=BRIEF), kind)

    def read(self) -> List[EarlierRate]:
        """All rates, the oldest first.

        The names of the values have the rates, so this is one request.
        """
        found = []
        for key in self._store.keys(self._kind.prefix):
            parts = key.rpartition("/")[2].split("_")
            try:
                found.append(EarlierRate(parts[3], int(parts[2]), float(parts[1])))
            except (IndexError, ValueError):
                continue  # a file of another program
        return found

    def add(self, measured: MeasuredRate, run: str, now: float) -> None:
        """Add a rate, and remove the oldest ones. `now`: seconds since 1970."""
        name = (
            f"{int(now * 1000):014d}_{measured.rate:.4g}_{measured.bytes}_"
            f"{digest(measured.software)}_{os.urandom(3).hex()}"
        )
        document = {**measured._asdict(), **self._kind._asdict(), "run": run, "at": round(now, 3)}
        self._store.put(self._kind.prefix + name, json.dumps(document).encode())
        self._store.delete(*self._store.keys(self._kind.prefix)[:-KEPT])


def _make_folders(workspace: str, *names: str) -> None:
    """Make folders that every user may write to: the next run may belong to another user."""
    path = workspace
    for name in names:
        path = os.path.join(path, name)
        try:
            os.mkdir(path)
            os.chmod(path, 0o777)  # whatever the umask
        except OSError:
            continue  # it exists, or the store will report why it cannot be made
