"""Resource usage of runs and their nodes as cells of a table, for `top` and `show`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchml.model.names import format_used, idle_text

if TYPE_CHECKING:
    from batchml.model.run import Run
    from batchml.runs.metrics.usage import SlowRank, UsageSample

USED = ("CPU", "MEMORY", "GPU", "GPU MEM", "IN", "OUT")
SHOWN = 16  # nodes of a run that are listed
CURVE = 20  # cells
_GIVES_WAY = ("OVER TIME", "GPU MEM", "OUT", "IN", "MEMORY", "GPU", "CPU")


def cells_of(run: "Run", use: Mapping[str, float]) -> list[str]:
    """Usage as cells of the columns USED, with the run's resources if they are known."""
    cores = use.get("cores", 0.0)
    given = f"{cores:g}" if 0 < cores < (run.vcpus or cores + 1) else number(run.vcpus)
    return [
        _of(format_used(use["cpu"]) if "cpu" in use else "", given),
        _of(memory(int(use.get("memory", 0))), memory(run.memory_mib)),
        _of(format_used(use["gpu"] / 100 * run.gpus) if "gpu" in use else "", number(run.gpus)),
        memory(int(use.get("gpu_memory", 0))),
        _rate(use.get("net_in")),
        _rate(use.get("net_out")),
    ]


def node_lines(uses: "Sequence[UsageSample]", width: int) -> Iterator[str]:
    """A table with a row for each node, and a line about slow ranks; no lines without nodes."""
    from batchml.cli.render import narrow_columns, printable, table
    from batchml.cli.terminal import screen, sparkline
    from batchml.runs.metrics.usage import (
        describe_idle_nodes,
        describe_slow_ranks,
        find_slow_ranks,
        use_of,
    )

    if not uses:
        return
    rows = [["NODE", "STATUS", *USED, "OVER TIME"]]
    for use in uses[:SHOWN]:
        curve = use.series.get("gpu") or use.series.get("cpu")
        drawn = sparkline(curve.values, CURVE) if curve and len(curve.samples) > 1 else ""
        state = ", ".join(filter(None, (use.node.run.status.value, idle_text(use.idle))))
        words = [printable(use.node.name), state]
        whole = use_of(use)  # the most memory: the last sample of a node that ends is small
        most = {"memory": whole.memory} if whole else {}
        rows.append([*words, *cells_of(use.node.run, {**use.usage, **most}), drawn])
    kept = narrow_columns(rows, width, _GIVES_WAY)
    yield from table(kept, screen()._replace(width=width)).splitlines()
    if len(uses) > SHOWN:
        yield f"and {len(uses) - SHOWN} more nodes, with --json"
    for text in describe_idle_nodes(uses):
        yield f"{'idle':<10} {printable(text)}"
    slow = find_slow_ranks(uses)
    if slow is not None:
        yield f"{'slow rank':<10} {printable(describe_slow_ranks(slow))}"


def nodes_json(uses: "Sequence[UsageSample]") -> dict[str, Any]:
    """The nodes for `--json`; {} without nodes."""
    from batchml.runs.metrics.usage import find_slow_ranks

    if not uses:
        return {}
    nodes = [
        {
            "name": use.node.name,
            "jobId": use.node.run.job_id,
            "status": use.node.run.status.value,
            "usage": use.usage or None,
            "ranks": {str(rank): told for rank, told in sorted(use.ranks.items())},
            **({"waits": use.waits} if use.waits else {}),
        }
        for use in uses
    ]
    return {"nodes": nodes, "slowRank": _slow_json(find_slow_ranks(uses))}


def _slow_json(slow: "SlowRank | None") -> dict[str, Any] | None:
    if slow is None:
        return None
    return {
        "ranks": list(slow.ranks),
        "nodes": list(slow.nodes),
        "othersPercent": round(slow.others, 1),
        "evidence": slow.evidence,
    }


def number(count: int) -> str:
    return str(count) if count else ""


def memory(mib: int) -> str:
    return "" if not mib else f"{mib}M" if mib < 10_240 else f"{mib / 1024:.0f}G"


def _of(used: str, had: str) -> str:
    return f"{used}/{had}" if used and had else had or used


def _rate(speed: float | None) -> str:
    """Bytes a second, as `12 MB/s`; "" if unknown."""
    if speed is None:
        return ""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if speed >= size:
            return f"{speed / size:.3g} {unit}/s"
    return f"{speed:.0f} B/s"
