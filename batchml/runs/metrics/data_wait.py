"""The share of its time for which a run waited for data, from the marks of its nodes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from batchml.model.names import short_duration

if TYPE_CHECKING:
    from batchml.runs.metrics.usage import UsageSample

_DATA_WAIT = "data_wait"  # of a `usage` mark: the percentage of the time
_LEAST_DATA_WAIT = 1.0  # percent; less is not worth a line


class DataWaitShare(Struct, frozen=True):
    """The time for which a container waited for data, in its last attempt.

    `staging`: the seconds in which data sets were copied before the start. `disks`: the seconds in
    which at least one of its processes waited for a disk or a shared folder.
    """

    node: str
    percent: float  # of the time, staging included
    staging: float = 0.0
    disks: float = 0.0

    def describe(self, has_nodes: bool) -> str:
        """`4 % of the time (staging 12 s, disks 3 s)`."""
        parts = [("staging", self.staging), ("disks", self.disks)]
        times = ", ".join(f"{name} {_seconds(each)}" for name, each in parts if each)
        where = f" on {self.node}" if has_nodes else ""
        return f"{self.percent:.0f} % of the time{where} ({times})"


def find_data_wait(uses: "Iterable[UsageSample]") -> DataWaitShare | None:
    """The waiting time of the container that waited most; None if it is not worth a line.

    It is for a run with data sets, and for one that waits for at least 1 % of its time.
    """
    found = [
        DataWaitShare(
            use.node.name, use.usage[_DATA_WAIT], use.usage.get("staging", 0.0),
            use.usage.get("io_wait", 0.0),
        )
        for use in uses
        if _DATA_WAIT in use.usage
    ]  # fmt: skip
    most = max(found, key=lambda each: each.percent, default=None)
    return most if most and (most.staging or most.percent >= _LEAST_DATA_WAIT) else None


def data_wait_json(share: DataWaitShare | None) -> dict[str, Any]:
    """The waiting time for `--json`; {} without it."""
    if share is None:
        return {}
    told = {
        "percent": round(share.percent, 1),
        "staging": round(share.staging, 2),
        "disks": round(share.disks, 2),
    }
    return {"dataWait": told}


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else short_duration(round(seconds))
