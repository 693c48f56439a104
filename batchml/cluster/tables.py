"""Render queues, compute environments and hosts as tables and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchml.cli.render import duration, narrow_columns, printable, table
from batchml.cli.terminal import Screen
from batchml.cluster.rows import ComputeRow, HostRow, HostTotal, vcpus_now
from batchml.cluster.snapshot import ClusterSnapshot, QueueRow, RunRow
from batchml.model.explanation import ComputeState
from batchml.model.hosts import HostResources, HostState
from batchml.model.names import short_id
from batchml.model.run import Run
from batchml.runs.commands.usage import memory

LONGEST = 32  # characters of a name
RUNS = 3  # runs of a host that are named

# Columns that a narrow window leaves out, the least important first.
HOST_GIVES_WAY = ("MEMORY", "ZONE", "COMPUTE", "UP", "GPU", "CPU", "USD/H", "RUNS", "GPUS", "VCPUS")
COMPUTE_GIVES_WAY = ("GPUS", "KIND", "NOTE", "STATE", "VCPUS", "HOSTS")


def queue_table(rows: Sequence[QueueRow], bare: Callable[[str], str]) -> list[list[str]]:
    """Queues, the highest priority first, with a heading.

    `bare` converts a name in AWS to that of batchml.toml.
    """
    found = [["NAME", "PRIORITY", "STATE", "RUNNING", "WAITING", "VCPUS", "GPUS", "COMPUTE",
              "ORDER", "REASON"]]  # fmt: skip
    for row in sorted(rows, key=lambda row: (-(row.state.priority if row.state else 0), row.name)):
        state = row.state
        if state is None:
            continue
        found.append(
            [
                printable(bare(row.name)),
                str(state.priority),
                state_word(state.is_enabled, state.status),
                str(row.running) if row.counts else "",
                str(row.waiting) if row.counts else "",
                held_and_asked(row.vcpus, row.asked_vcpus, row.is_whole),
                held_and_asked(row.gpus, row.asked_gpus, row.is_whole),
                ", ".join(map(bare, state.environments)),
                "fair share" if state.policy else "first come",
                printable(state.status_reason if state.status != "VALID" else row.reason),
            ]
        )
    return found


def host_lines(found: ClusterSnapshot, on: Screen, most: int) -> list[str]:
    """Tables of compute environments and of at most `most` hosts."""
    lines = []
    if found.computes:
        rows = narrow_columns(
            compute_table(found.computes, is_local=found.is_local), on.width, COMPUTE_GIVES_WAY
        )
        lines += [table(rows, on), ""]
    if found.hosts:
        rows = narrow_columns(host_table(found.hosts[:most], found.at), on.width, HOST_GIVES_WAY)
        lines.append(table(rows, on))
        if len(found.hosts) > most:
            lines.append(f"and {len(found.hosts) - most} more")
    elif found.hosts is not None:
        lines.append("No hosts: AWS Batch starts hosts for waiting runs and ends them afterwards.")
    return lines


def host_table(rows: Sequence[HostRow], now_ms: int) -> list[list[str]]:
    """A row for each host, with a heading."""
    found = [["HOST", "STATE", "COMPUTE", "TYPE", "ZONE", "VCPUS", "GPUS", "MEMORY", "CPU", "GPU",
              "UP", "USD/H", "RUNS"]]  # fmt: skip

    for row in rows:
        host, room, use = row.host, row.host.room, row.usage
        kind = f"{host.type} spot" if row.spot and host.type else host.type
        found.append(
            [
                printable(host.name)[:LONGEST],
                host.state.value,
                names_text(row.computes),
                "" if host.type == host.name else printable(kind),
                printable(host.zone),
                used_of(room.used_vcpus, room.vcpus),
                used_of(room.used_gpus, room.gpus),
                _memory_of(room),
                percent(use["cpu"] / room.vcpus) if "cpu" in use and room.vcpus else "",
                percent(use["gpu"] / room.gpus) if "gpu" in use and room.gpus else "",
                _age(host.since, now_ms),
                "" if row.price is None else f"{row.price:.2f}",
                _names(row),
            ]
        )
    return found


def _names(row: HostRow) -> str:
    """The runs of a host: some names, and the number of other runs."""
    known = [
        printable(run.name)[:LONGEST] if run.node_index is None else
        f"{short_id(run.job_id.partition('#')[0])} node {run.node_index}"
        for run in row.runs
    ]  # fmt: skip
    more = max(row.host.tasks, len(known)) - len(known[:RUNS])
    if not known:
        return f"{more} of arrays or other programs" if more else ""
    return ", ".join(known[:RUNS]) + (f" and {more} more" if more else "")


def compute_table(rows: Sequence[ComputeRow], *, is_local: bool = False) -> list[list[str]]:
    """A row for each compute environment, with a heading."""
    found = [["COMPUTE", "VCPUS MIN/NOW/MAX", "STATE", "KIND", "HOSTS", "VCPUS", "GPUS", "NOTE"]]
    for row in rows:
        state = row.state
        now = vcpus_now(state, row.room, is_local=is_local)
        limits = f"{state.min_vcpus}/{now}/{state.max_vcpus}" if state.is_managed else ""
        found.append(
            [
                printable(state.name)[:LONGEST],
                limits,
                state_word(state.is_enabled, state.status),
                "" if is_local else _kind(state),
                states_text(row.hosts),
                used_of(row.room.used_vcpus, row.room.vcpus),
                used_of(row.room.used_gpus, row.room.gpus),
                _note(row),
            ]
        )
    return found


def names_text(names: Sequence[str], most: int = LONGEST) -> str:
    """`one, two and 3 more`: as many names as fit; a single name that is too long is cut."""
    known = [printable(name) for name in names]
    for count in range(len(known), 0, -1):
        more = f" and {len(known) - count} more" if count < len(known) else ""
        text = ", ".join(known[:count]) + more
        if len(text) <= most:
            return text
    more = f" and {len(known) - 1} more" if len(known) > 1 else ""
    return known[0][: most - len(more)] + more if known else ""


def _kind(state: ComputeState) -> str:
    return "spot" if state.is_spot else "on-demand" if state.is_managed else "unmanaged"


def _note(row: ComputeRow) -> str:
    state = row.state
    if state.status not in ("VALID", "UPDATING"):
        return printable(state.status_reason)
    missing = state.desired_vcpus - row.room.vcpus
    return f"{missing:g} vCPUs are starting" if missing > 0 and row.hosts else ""


def state_word(is_enabled: bool, status: str) -> str:
    """AWS Batch's state, or its status unless that is VALID."""
    return status if status not in ("VALID", "") else "ENABLED" if is_enabled else "DISABLED"


def total_line(found: ClusterSnapshot) -> str:
    """`3 hosts: 1 allocated, 2 idle   vCPUs 40/96   GPUs 6/8   in use: CPU 61%, GPU 93%`.

    Empty if the hosts are unknown.
    """
    if found.hosts is None:
        return ""
    total = found.total
    count = sum(total.hosts.values())
    who = "this machine" if found.is_local else f"{count} host{'' if count == 1 else 's'}"
    words = [f"{who}: {states_text(total.hosts, found.is_local)}" if total.hosts else "no hosts"]
    for name, used, had in (
        ("vCPUs", total.room.used_vcpus, total.room.vcpus),
        ("GPUs", total.room.used_gpus, total.room.gpus),
    ):
        words += [f"{name} {used_of(used, had)}"] if had else []
    words += [f"memory {_memory_of(total.room)}"] if total.room.memory_mib else []
    words += [_in_use(total)] if total.cpu is not None or total.gpu is not None else []
    words += [f"{total.price:.2f} USD/h"] if total.price is not None else []
    return "   ".join(words)


def _in_use(total: HostTotal) -> str:
    parts = (("CPU", total.cpu), ("GPU", total.gpu))
    return "in use: " + ", ".join(f"{n} {percent(part)}" for n, part in parts if part is not None)


def states_text(hosts: Mapping[HostState, int], is_one: bool = False) -> str:
    return ", ".join(state if is_one else f"{count} {state}" for state, count in hosts.items())


def missing_line(found: ClusterSnapshot) -> str:
    """The calls that AWS refused; empty without any."""
    words = " ".join("; ".join(found.missing).split())
    return printable(f"Not shown: {words}.") if words else ""


def used_of(used: float, had: float) -> str:
    return f"{used:g}/{had:g}" if had else ""


def percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _memory_of(room: HostResources) -> str:
    return (
        f"{memory(room.used_memory_mib) or 0}/{memory(room.memory_mib)}" if room.memory_mib else ""
    )


def _age(since: int, now_ms: int) -> str:
    return duration((now_ms - since) / 1000) if since else ""


def age_text(run: Run, now_ms: int) -> str:
    """How long a run has run, or waited."""
    return _age(run.started_at or run.created_at or 0, now_ms)


def held_and_asked(held: int, asked: int, is_whole: bool) -> str:
    """`12+40`: held by running runs, requested by waiting runs; `12+>40` for a lower bound."""
    if not held and not asked:
        return ""
    return f"{held}+{'' if is_whole else '>'}{asked}" if asked else str(held)


def host_or_reason(row: RunRow) -> str:
    """The hosts of a run, or its position and why it waits, like squeue's NODELIST(REASON)."""
    if row.position is not None:
        why = f" {row.reason}" if row.position == 1 and row.reason else ""
        return f"(#{row.position}{printable(why)})"
    if row.reason:
        return f"({printable(row.reason)})"
    more = f" and {len(row.hosts) - 1} more" if len(row.hosts) > 1 else ""
    return printable(row.hosts[0]) + more if row.hosts else ""


# --- JSON -----------------------------------------------------------------------------------


def queue_json(row: QueueRow) -> dict[str, Any]:
    """The members that we add to AWS's description of a queue."""
    return {
        "counts": {state.value: count for state, count in row.counts.items()},
        "running": row.running,
        "waiting": row.waiting,
        "held": {"vcpus": row.vcpus, "memory": row.memory_mib, "gpus": row.gpus},
        "asked": {
            "vcpus": row.asked_vcpus,
            "memory": row.asked_memory_mib,
            "gpus": row.asked_gpus,
            "whole": row.is_whole,
        },
        "head": {"jobId": row.head, "reason": row.reason or None} if row.head else None,
    }


def position_json(row: RunRow) -> dict[str, Any]:
    return {"position": row.position, "reason": row.reason or None, "hosts": list(row.hosts)}


def compute_json(row: ComputeRow) -> dict[str, Any]:
    state = row.state
    return {
        "computeEnvironmentName": state.name,
        "state": "ENABLED" if state.is_enabled else "DISABLED",
        "status": state.status,
        "statusReason": state.status_reason or None,
        "minvCpus": state.min_vcpus,
        "desiredvCpus": state.desired_vcpus,
        "maxvCpus": state.max_vcpus,
        "spot": state.is_spot,
        "hosts": {each.value: count for each, count in row.hosts.items()},
        "room": room_json(row.room),
    }


def host_json(row: HostRow) -> dict[str, Any]:
    host = row.host
    return {
        "name": host.name,
        "containerInstance": host.id if host.cluster else None,
        "ec2InstanceId": host.instance or None,
        "computeEnvironments": list(row.computes),
        "state": host.state.value,
        "type": host.type or None,
        "zone": host.zone or None,
        "spot": row.spot,
        "since": host.since or None,
        "tasks": host.tasks,
        "room": room_json(host.room),
        "usage": row.usage or None,
        "usdPerHour": None if row.price is None else float(row.price),
        "runs": [run.job_id for run in row.runs],
    }


def total_json(found: ClusterSnapshot) -> dict[str, Any] | None:
    if found.hosts is None:
        return None
    total = found.total
    return {
        "hosts": {each.value: count for each, count in total.hosts.items()},
        "room": room_json(total.room),
        "cpuInUse": total.cpu,
        "gpuInUse": total.gpu,
        "usdPerHour": None if total.price is None else float(total.price),
    }


def room_json(room: HostResources) -> dict[str, Any]:
    return {
        "vcpus": room.vcpus,
        "memory": room.memory_mib,
        "gpus": room.gpus,
        "usedVcpus": room.used_vcpus,
        "usedMemory": room.used_memory_mib,
        "usedGpus": room.used_gpus,
    }
