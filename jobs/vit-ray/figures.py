"""Compute the report of a training from measurements. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

HOUR = 3600.0  # seconds


class Steps(NamedTuple):
    """Measurements of the steps after the warm-up."""

    count: int
    seconds: float  # from the begin of the first step to the end of the last
    waited: float  # seconds of these that waited for data
    began: float  # begin of the first step, in seconds since the Unix epoch
    images: int
    rows: Mapping[int, int]  # number of a node -> images that it blurred


class Node(NamedTuple):
    name: str
    role: str  # head or worker
    vcpus: float
    rows: int
    cpu: float | None  # busy fraction of its vCPUs
    gpu: float | None  # percent


def read_prices(text: str) -> dict[str, float]:
    """Parse `head=1.408,worker=0.816` as dollars an hour by role. Raises ValueError."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, price = part.partition("=")
        if not equals or role not in ("head", "worker"):
            raise ValueError(f"{part!r}: write head=DOLLARS or worker=DOLLARS, for one hour")
        found[role] = float(price)
    return found


def used(samples: Sequence[tuple[float, float, float | None]], begin: float, end: float) -> float:
    """Compute the CPU seconds per second between two times, from samples up to 2 s beside them."""
    inside = [each for each in samples if begin - 2 <= each[0] <= end + 2]
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def mean_gpu(samples: Iterable[tuple[float, float, float | None]]) -> float | None:
    found = [each[2] for each in samples if each[2] is not None]
    return sum(found) / len(found) if found else None


def averages(steps: Steps) -> dict[str, float]:
    """Compute the averages over the steps: the metrics of the run, and a part of its report.

    `step_seconds` are seconds, `data_wait` is the percentage of the time that waited for data.
    """
    seconds = steps.seconds
    return {
        "step_seconds": round(seconds / max(1, steps.count), 4),
        "data_wait": round(100 * steps.waited / seconds, 2) if seconds else 0.0,
        "images_per_second": round(steps.images / seconds, 2) if seconds else 0.0,
    }


def report(steps: Steps, nodes: Sequence[Node], prices: Mapping[str, float]) -> dict[str, Any]:
    """Make the content of report.json. Only the time of the steps is priced."""
    hourly = sum(prices.get(node.role, 0.0) for node in nodes)
    return {
        "steps": steps.count,
        "seconds": round(steps.seconds, 3),
        **averages(steps),
        "nodes": [node._asdict() for node in nodes],
        "dollars_per_hour": round(hourly, 4),
        "dollars_per_1000_steps": round(
            1000 * hourly * steps.seconds / HOUR / max(1, steps.count), 6
        ),
    }


def lines(report: Mapping[str, Any]) -> list[str]:
    """Make the lines of a report for people."""
    found = [
        f"Report: {report['steps']} steps, step time {report['step_seconds']:.3f} s, "
        f"data wait {report['data_wait']:.0f} %, {report['images_per_second']:.1f} images/s"
    ]
    for node in report["nodes"]:
        cpu = "?" if node["cpu"] is None else f"{100 * node['cpu']:.0f} %"
        gpu = "" if node["gpu"] is None else f", GPU {node['gpu']:.0f} %"
        found.append(
            f"Report: {node['name']}: {node['rows']} images blurred, "
            f"CPU {cpu} of {node['vcpus']:g} vCPUs{gpu}"
        )
    found.append(
        f"Report: ${report['dollars_per_hour']:.3f} an hour, "
        f"${report['dollars_per_1000_steps']:.4f} per 1000 steps"
    )
    return found
