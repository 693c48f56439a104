"""Render queues, compute environments and hosts as tables and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchml.cli.render import duration, narrow_columns, printable, table, time_json
from batchml.cli.terminal import Screen
from batchml.cluster.rows import ComputeRow, HostRow, HostTotal, vcpus_now
from batchml.cluster.snapshot import ClusterSnapshot, QueueRow, RunRow
from batchml.model.explanation import ComputeState
from batchml.model.hosts import HostResources, HostState
from batchml.model.names import distinct_names, short_id
from batchml.model.run import Run
from batchml.runs.commands.usage import memory

LONGEST = 32  # the most characters of a name
RUNS = 3  # the most runs of a host to name

# Columns that a narrow window leaves out, the least important first.
HOST_GIVES_WAY = ("MEMORY", "ZONE", "COMPUTE", "UP", "GPU", "CPU", "USD/H", "RUNS", "GPUS", "VCPUS")
COMPUTE_GIVES_WAY = ("GPUS", "KIND", "NOTE", "STATE", "VCPUS", "HOSTS")


def queue_table(rows: Sequence[QueueRow], bare: Callable[[str], str]) -> list[list[str]]:
    """Queues, the highest priority first, with a heading.

    `bare` converts a name in AWS to that of batchml.toml. Two queues never have one name.
    """
    labels = distinct_names((row.name for row in rows if row.state), bare)
    cells = [["NAME", "PRIORITY", "STATE", "RUNNING", "WAITING", "VCPUS", "GPUS", "COMPUTE",
              "ORDER", "REASON"]]  # fmt: skip
    for row in sorted(rows, key=lambda row: (-(row.state.priority if row.state else 0), row.name)):
        state = row.state
        if state is None:
            continue
        cells.append(
            [
                printable(labels[row.name]),
                str(state.priority),
                state_word(state.is_enabled, state.status),
                str(row.running) if row.counts else "",
                str(row.waiting) if row.counts else "",
                held_and_asked(row.vcpus, row.asked_vcpus, row.is_exact),
                held_and_asked(row.gpus, row.asked_gpus, row.is_exact),
                ", ".join(map(bare, state.environments)),
                "fair share" if state.policy else "first come",
                printable(state.status_reason if state.status != "VALID" else row.reason),
            ]
        )
    return cells


def host_lines(snapshot: ClusterSnapshot, on: Screen, most: int) -> list[str]:
    """Tables of compute environments and of at most `most` hosts."""
    lines = []
    if snapshot.computes:
        rows = narrow_columns(
            compute_table(snapshot.computes, is_local=snapshot.is_local),
            on.width,
            COMPUTE_GIVES_WAY,
        )
        lines += [table(rows, on), ""]
    if snapshot.hosts:
        rows = narrow_columns(
            host_table(snapshot.hosts[:most], snapshot.at), on.width, HOST_GIVES_WAY
        )
        lines.append(table(rows, on))
        if len(snapshot.hosts) > most:
            lines.append(f"and {len(snapshot.hosts) - most} more")
    elif snapshot.hosts is not None:
        lines.append("No hosts: AWS Batch starts hosts for waiting runs and ends them afterwards.")
    return lines


def host_table(rows: Sequence[HostRow], now_ms: int) -> list[list[str]]:
    """A row for each host, with a heading."""
    cells = [["HOST", "STATE", "COMPUTE", "TYPE", "ZONE", "VCPUS", "GPUS", "MEMORY", "CPU", "GPU",
              "UP", "USD/H", "RUNS"]]  # fmt: skip

    for row in rows:
        host, resources, use = row.host, row.host.resources, row.usage
        kind = f"{host.type} spot" if row.spot and host.type else host.type
        cells.append(
            [
                printable(host.name)[:LONGEST],
                host.state.value,
                names_text(row.computes),
                "" if host.type == host.name else printable(kind),
                printable(host.zone),
                used_of(resources.used_vcpus, resources.vcpus),
                used_of(resources.used_gpus, resources.gpus),
                _memory_of(resources),
                percent(use["cpu"] / resources.vcpus) if "cpu" in use and resources.vcpus else "",
                percent(use["gpu"] / resources.gpus) if "gpu" in use and resources.gpus else "",
                _age(host.since, now_ms),
                "" if row.price is None else f"{row.price:.2f}",
                _run_names(row),
            ]
        )
    return cells


def _run_names(row: HostRow) -> str:
    """The runs of a host: some names, and the number of other runs."""
    names = [
        printable(run.name)[:LONGEST] if run.node_index is None else
        f"{short_id(run.job_id.partition('#')[0])} node {run.node_index}"
        for run in row.runs
    ]  # fmt: skip
    more = max(row.host.tasks, len(names)) - len(names[:RUNS])
    if not names:
        return f"{more} of arrays or other programs" if more else ""
    return ", ".join(names[:RUNS]) + (f" and {more} more" if more else "")


def compute_table(rows: Sequence[ComputeRow], *, is_local: bool = False) -> list[list[str]]:
    """A row for each compute environment, with a heading."""
    cells = [["COMPUTE", "VCPUS MIN/NOW/MAX", "STATE", "KIND", "HOSTS", "VCPUS", "GPUS", "NOTE"]]
    for row in rows:
        state = row.state
        now = vcpus_now(state, row.resources, is_local=is_local)
        limits = f"{state.min_vcpus}/{now}/{state.max_vcpus}" if state.is_managed else ""
        cells.append(
            [
                printable(state.name)[:LONGEST],
                limits,
                state_word(state.is_enabled, state.status),
                "" if is_local else _kind(state),
                states_text(row.hosts),
                used_of(row.resources.used_vcpus, row.resources.vcpus),
                used_of(row.resources.used_gpus, row.resources.gpus),
                _note(row),
            ]
        )
    return cells


def names_text(names: Sequence[str]) -> str:
    """`one, two and 3 more`: as many names as fit; a single name that is too long is cut."""
    names = [printable(name) for name in names]
    for count in range(len(names), 0, -1):
        more = f" and {len(names) - count} more" if count < len(names) else ""
        text = ", ".join(names[:count]) + more
        if len(text) <= LONGEST:
            return text
    return names[0][: LONGEST - len(more)] + more if names else ""


def _kind(state: ComputeState) -> str:
    return "spot" if state.is_spot else "on-demand" if state.is_managed else "unmanaged"


def _note(row: ComputeRow) -> str:
    state = row.state
    if state.status not in ("VALID", "UPDATING"):
        return printable(state.status_reason)
    missing = state.desired_vcpus - row.resources.vcpus
    return f"{missing:g} vCPUs are starting" if missing > 0 and row.hosts else ""


def state_word(is_enabled: bool, status: str) -> str:
    """AWS Batch's state, or its status unless that is VALID."""
    return status if status not in ("VALID", "") else "ENABLED" if is_enabled else "DISABLED"


def total_line(snapshot: ClusterSnapshot) -> str:
    """`3 hosts: 1 allocated, 2 idle   vCPUs 40/96   GPUs 6/8   in use: CPU 61%, GPU 93%`.

    Empty if the hosts are unknown.
    """
    if snapshot.hosts is None:
        return ""
    total = snapshot.total
    count = sum(total.hosts.values())
    who = "this machine" if snapshot.is_local else f"{count} host{'' if count == 1 else 's'}"
    words = [f"{who}: {states_text(total.hosts, snapshot.is_local)}" if total.hosts else "no hosts"]
    for name, used, had in (
        ("vCPUs", total.resources.used_vcpus, total.resources.vcpus),
        ("GPUs", total.resources.used_gpus, total.resources.gpus),
    ):
        words += [f"{name} {used_of(used, had)}"] if had else []
    words += [f"memory {_memory_of(total.resources)}"] if total.resources.memory_mib else []
    words += [in_use] if (in_use := _in_use(total, snapshot.machine_cpu)) else []
    words += [f"{total.price:.2f} USD/h"] if total.price is not None else []
    return "   ".join(words)


_NOTABLE = 0.1  # the difference from which the use by other programs is shown


def _in_use(total: HostTotal, machine: float | None) -> str:
    """`in use: CPU 17% by runs, 95% in all, GPU 93%`; "" if nothing is known."""
    cpu = total.cpu
    parts = [] if cpu is None else [f"CPU {percent(cpu)}"]
    if machine is not None and machine - (cpu or 0.0) >= _NOTABLE:
        by_runs = "CPU " if cpu is None else f"CPU {percent(cpu)} by runs, "
        parts = [f"{by_runs}{percent(machine)} in all"]
    parts += [f"GPU {percent(total.gpu)}"] if total.gpu is not None else []
    return f"in use: {', '.join(parts)}" if parts else ""


def states_text(hosts: Mapping[HostState, int], is_one: bool = False) -> str:
    return ", ".join(state if is_one else f"{count} {state}" for state, count in hosts.items())


def missing_line(snapshot: ClusterSnapshot) -> str:
    """The calls that AWS refused; empty without any."""
    words = " ".join("; ".join(snapshot.missing).split())
    return printable(f"Not shown: {words}.") if words else ""


def used_of(used: float, had: float) -> str:
    return f"{used:g}/{had:g}" if had else ""


def percent(part: float) -> str:
    return f"{100 * part:.0f}%"


def _memory_of(resources: HostResources) -> str:
    return (
        f"{memory(resources.used_memory_mib) or 0}/{memory(resources.memory_mib)}"
        if resources.memory_mib
        else ""
    )


def _age(since: int, now_ms: int) -> str:
    return duration((now_ms - since) / 1000) if since else ""


def age_text(run: Run, now_ms: int) -> str:
    """How long a run has run, or waited."""
    return _age(run.started_at or run.created_at or 0, now_ms)


def held_and_asked(held: int, asked: int, is_exact: bool) -> str:
    """`12+40`: held by running runs, requested by waiting runs; `12+>40` for a lower bound."""
    if not held and not asked:
        return ""
    return f"{held}+{'' if is_exact else '>'}{asked}" if asked else str(held)


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
            "whole": row.is_exact,
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
        "room": resources_json(row.resources),
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
        "since": time_json(host.since or None),
        "tasks": host.tasks,
        "room": resources_json(host.resources),
        "usage": row.usage or None,
        "usdPerHour": None if row.price is None else float(row.price),
        "runs": [run.job_id for run in row.runs],
    }


def total_json(snapshot: ClusterSnapshot) -> dict[str, Any] | None:
    if snapshot.hosts is None:
        return None
    total = snapshot.total
    return {
        "hosts": {each.value: count for each, count in total.hosts.items()},
        "room": resources_json(total.resources),
        "cpuInUse": total.cpu,
        "gpuInUse": total.gpu,
        "usdPerHour": None if total.price is None else float(total.price),
    }


def resources_json(resources: HostResources) -> dict[str, Any]:
    return {
        "vcpus": resources.vcpus,
        "memory": resources.memory_mib,
        "gpus": resources.gpus,
        "usedVcpus": resources.used_vcpus,
        "usedMemory": resources.used_memory_mib,
        "usedGpus": resources.used_gpus,
    }
