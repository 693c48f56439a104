"""How the command of a run is started on its nodes: the launch kinds, and the plan of one run.

The plan is `[launch]` and `[[groups]]` of job.toml as JSON. The client writes it into
BATCHML_LAUNCH (`aws/batch/requests.py`), the runtime reads it. Runs of the kind `plain`, whose
command simply runs once on each node, have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Dict, FrozenSet, NamedTuple, Optional, Tuple

VARIABLE = "BATCHML_LAUNCH"
VCPUS = "BATCHML_VCPUS"  # of one node, as the job requested them
TOKEN = "BATCHML_GANG_TOKEN"  # 32 hex digits: the secret that all nodes of a run share
AGAIN = "It begins again in place"  # in the log of the main node, after the cause of a restart

TORCHRUN, RAY, MPI = "torchrun", "ray", "mpi"
HEAD, WORKER = "head", "worker"
ALL, MAIN = "all", "main"


class LaunchKind(NamedTuple):
    """A way to start the command of a run. To add a kind, add a row to `KINDS`, its module, and its
    name to `launch.kind` in `model/job.py`.
    """

    module: str  # of its supervisor, which runs on each node instead of the command
    is_supervised: bool  # the nodes of one job obey the supervisor of the main node
    restarts: bool  # ranks begin again in place, and three vain starts end with 76
    settings: FrozenSet[str]  # keys of [launch] that it understands


_NODES = "batchml.runtime.nodes"
KINDS = {
    TORCHRUN: LaunchKind(
        f"{_NODES}.torchrun", is_supervised=True, restarts=True,
        settings=frozenset(("processes_per_node", "logs", "hang_after", "start_within")),
    ),
    MPI: LaunchKind(
        f"{_NODES}.mpi.main", is_supervised=True, restarts=False,
        settings=frozenset(("processes_per_node", "hang_after", "start_within")),
    ),
    RAY: LaunchKind(
        f"{_NODES}.ray.main", is_supervised=False, restarts=False,
        settings=frozenset(("start_within",)),
    ),
}  # fmt: skip


class WorkerGroup(NamedTuple):
    """A group of Ray workers, which is a job of its own, as the head knows it."""

    name: str
    size: int
    least: int  # workers that have to be there before the program starts
    job_name: str  # in AWS Batch; the head finds the job by it
    queue: str


class LaunchPlan(NamedTuple):
    """What the nodes of a run do together. Times are seconds."""

    kind: str  # a key of `KINDS`, unless a newer client wrote it
    role: str = HEAD  # of a Ray job: HEAD or WORKER
    processes: int = 0  # on each node; 0: one per GPU, or one where there is none
    logs: str = ALL  # the output in the log: of every rank; MAIN: of rank 0, and all errors
    hang_after: float = 0.0  # without output, metrics or progress; 0: never
    start_within: float = 1200.0  # until all nodes, or enough workers, are there
    bandwidth: float = 0.0  # bytes a second between nodes, at least; 0: not measured
    groups: Tuple[WorkerGroup, ...] = ()  # the head's

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Optional[LaunchPlan]:
        """The plan of this run; None for a command that simply runs.

        Raises ValueError for a text that is no plan.
        """
        text = environ.get(VARIABLE, "")
        if not text:
            return None
        try:
            found: Dict[str, Any] = json.loads(text)
            groups = tuple(WorkerGroup(**group) for group in found.pop("groups", ()))
            return cls(**found, groups=groups)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{VARIABLE} is not a launch plan: {error}") from None

    def to_json(self) -> str:
        """The text that `read` reads, without the fields that have their default."""
        document: Dict[str, Any] = {"kind": self.kind}
        for name, value in self._asdict().items():
            if name not in ("kind", "groups") and value != self._field_defaults[name]:
                document[name] = value
        if self.groups:
            document["groups"] = [group._asdict() for group in self.groups]
        return json.dumps(document, separators=(",", ":"))

    @property
    def is_supervised(self) -> bool:
        return self.kind in KINDS and KINDS[self.kind].is_supervised

    @property
    def restarts(self) -> bool:
        return self.kind in KINDS and KINDS[self.kind].restarts
