"""How the command of a run is started on its nodes: what `[launch]` and `[[groups]]` say, as JSON.

The client writes it into BATCHML_LAUNCH of a run whose command is not simply run once
(`aws/batch/requests.py`); the runtime reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Dict, NamedTuple, Optional, Tuple

VARIABLE = "BATCHML_LAUNCH"
VCPUS = "BATCHML_VCPUS"  # of one node, as the job asked for them
TOKEN = "BATCHML_GANG_TOKEN"  # 32 hex digits, the same on every node of a run: who has it belongs

TORCHRUN, RAY = "torchrun", "ray"
HEAD, WORKER = "head", "worker"
ALL, MAIN = "all", "main"


class Workers(NamedTuple):
    """A group of workers of a Ray gang, as the head knows it: a job of its own."""

    name: str
    size: int
    least: int  # so many have to be there before the program starts
    job_name: str  # in AWS Batch, whole; by it the head finds the job
    queue: str


class Plan(NamedTuple):
    """What the nodes of a run do together. Times are seconds."""

    kind: str  # TORCHRUN or RAY
    role: str = HEAD  # of a Ray gang: HEAD or WORKER
    processes: int = 0  # on each node; 0: one per GPU, or one where there is none
    logs: str = ALL  # whose output goes to the log: every rank's, or that of rank 0 and all errors
    hang_after: float = 0.0  # without output, metrics or progress; 0: never
    start_within: float = 1200.0  # until all nodes, or enough workers, are there
    bandwidth: float = 0.0  # bytes a second between nodes, at least; 0: not measured
    groups: Tuple[Workers, ...] = ()  # the head's

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Optional[Plan]:
        """The plan of this run; None for a command that is simply run.

        Raises ValueError for a text that no client of ours wrote.
        """
        text = environ.get(VARIABLE, "")
        if not text:
            return None
        try:
            found: Dict[str, Any] = json.loads(text)
            groups = tuple(Workers(**group) for group in found.pop("groups", ()))
            return cls(**found, groups=groups)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{VARIABLE} is not a launch plan: {error}") from None

    def to_json(self) -> str:
        """What `read` reads, without what is as it is by default."""
        told: Dict[str, Any] = {"kind": self.kind}
        for name, value in self._asdict().items():
            if name not in ("kind", "groups") and value != self._field_defaults[name]:
                told[name] = value
        if self.groups:
            told["groups"] = [group._asdict() for group in self.groups]
        return json.dumps(told, separators=(",", ":"))
