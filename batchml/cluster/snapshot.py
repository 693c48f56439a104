"""A snapshot of queues, runs, compute environments and hosts as table rows. Pure."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import LIVE
from batchml.cluster.rows import (
    ClusterState,
    ComputeRow,
    HostRow,
    HostTotal,
    compute_rows,
    host_rows,
    sum_hosts,
    sum_resources,
)
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.fallback import FALLBACK_TAG
from batchml.model.group import GANG_TAG
from batchml.model.hosts import ClusterHost, HostState
from batchml.model.names import distinct_names, short_duration, short_id
from batchml.model.run import JobStatus, Run, effective_state
from batchml.runtime.protocol.launch import RAY, LaunchPlan

# --- queueing -------------------------------------------------------------------------------------
# Positions of runs in a queue, and why a run waits, in a few words, like squeue's REASON.
# `batchml explain` says more. Sources: AWS Batch User Guide, "Job scheduling" (first in, first out
# by the time of submission, unless the queue has a scheduling policy; the head of a queue blocks
# the runs behind it) and "Jobs stuck in RUNNABLE" (AWS Batch's status reasons).


_SHORT_REASONS = {
    "INSUFFICIENT_INSTANCE_CAPACITY": "no capacity",
    "COMPUTE_ENVIRONMENT_MAX_RESOURCE": "too large for its compute",
    "JOB_RESOURCE_REQUIREMENT": "too large for any host",
    "SERVICE_ROLE_PERMISSIONS": "service role may not start hosts",
    "EC2_INSTANCE_CONFIGURATION_UNSUPPORTED": "hosts cannot start with this configuration",
}


def count_runnable(run: Run) -> int:
    """The number of a run's containers that are RUNNABLE, so that they wait for a host."""
    if run.children:
        return run.children.get(JobStatus.RUNNABLE.value, 0)
    return int(run.status is JobStatus.RUNNABLE)


def positions(
    runs: Sequence[Run], front: Sequence[str] | None, *, is_fair: bool = False
) -> dict[str, int]:
    """Job id -> its position among the RUNNABLE containers of a queue, from 1.

    `front` is AWS Batch's own order, which includes retries; other runs follow by age. With a
    scheduling policy (`is_fair`) age does not count, and runs that are not in `front` have no
    position.
    """
    waiting = {run.job_id: run for run in runs if count_runnable(run)}
    found: dict[str, int] = {}
    position = 0
    for each in front or ():
        owner = each.partition(":")[0].partition("#")[0]
        if owner in waiting:  # other runs have started since
            position += 1
            found.setdefault(owner, position)
    if is_fair:
        return found
    rest = [run for job_id, run in waiting.items() if job_id not in found]
    for run in sorted(rest, key=lambda run: (run.created_at or 0, run.job_id)):
        found[run.job_id] = position + 1
        position += count_runnable(run)
    return found


def short_reason(run: Run, position: int | None, cluster: ClusterState) -> str:
    """Why a run waits, in a few words; empty if it does not wait or the reason is unknown."""
    if run.status.is_terminal or run.status.holds_resources:
        return ""
    if not count_runnable(run):
        return _not_runnable(run)
    if run.status_reason and not run.children:
        return shorten_reason(run.status_reason)
    if position is None:
        return "waits for its share's turn" if _is_fair(run.queue, cluster) else ""
    if position > 1:
        return f"{position - 1} before it"
    return _queue_reason(run.queue, cluster) or _host_reason(run, cluster)


def describe_coming_move(run: Run, now: float) -> str:
    """Where and when a waiting run with `--fallback` moves: `moves to gpu in 17 s`. `now` in ms.

    Empty for other runs, and for a run with dependencies: the time since which it finds no host is
    unknown.
    """
    queue, _, after = run.tags.get(FALLBACK_TAG, "").rpartition(":")
    if run.status is not JobStatus.RUNNABLE or queue in ("", run.queue) or not after.isdecimal():
        return ""
    ends = [each.stopped_at or 0 for each in run.attempts]
    since = max(ends, default=0) or (0 if run.depends_on else run.created_at or 0)
    if not since:
        return ""
    left = int(after) - (now - since) / 1000
    return f"moves to {queue}" + (f" in {short_duration(math.ceil(left))}" if left > 0 else "")


def shorten_reason(status_reason: str) -> str:
    """AWS Batch's status reason of a run that cannot be placed, in a few words."""
    code = status_reason.partition(" - ")[0].rpartition(":")[2].strip()
    if code in _SHORT_REASONS:
        return _SHORT_REASONS[code]
    is_code = code.replace("_", "").isalnum() and code == code.upper()
    return code.replace("_", " ").lower() if is_code else status_reason


def _not_runnable(run: Run) -> str:
    if run.status is JobStatus.SUBMITTED:
        return "just submitted"
    if run.children:  # its children run, or will soon
        return ""
    if not run.depends_on:
        return "waits for other runs"
    more = len(run.depends_on) - 1
    return f"after {short_id(run.depends_on[0])}{f' and {more} more' if more else ''}"


def _is_fair(queue: str, cluster: ClusterState) -> bool:
    """Whether a queue has a scheduling policy."""
    state = cluster.queues.get(queue)
    return state is not None and bool(state.policy)


def _queue_reason(name: str, cluster: ClusterState) -> str:
    """The fault of the queue, or of all its compute environments."""
    queue = cluster.queues.get(name)
    if queue is None:
        return ""
    if queue.status not in ("VALID", "UPDATING"):
        return f"queue is {queue.status}"
    if not queue.is_enabled:
        return "queue is DISABLED"
    if not queue.environments:
        return "queue has no compute"
    computes = cluster.computes_of(name)
    if not computes or any(_is_usable(each) for each in computes):
        return ""
    bad = computes[0]
    return f"compute is {bad.status if bad.is_enabled else 'DISABLED'}"


def _is_usable(compute: ComputeState) -> bool:
    return compute.is_enabled and compute.status in ("VALID", "UPDATING")


def _host_reason(run: Run, cluster: ClusterState) -> str:
    """Why the head of a queue without faults waits."""
    computes = [each for each in cluster.computes_of(run.queue) if _is_usable(each)]
    if not computes or not run.vcpus:
        return ""
    asked = run.vcpus * max(1, run.nodes)
    most = max(each.max_vcpus for each in computes)
    if asked > most and all(each.max_vcpus for each in computes):
        return f"needs {asked} vCPUs, compute has {most} at most"
    if cluster.hosts is None:
        return ""
    hosts = _hosts_of(computes, cluster)
    fit = [
        host for host in hosts
        if host.takes_runs and host.resources.holds(run.vcpus, run.memory_mib, run.gpus)
    ]  # fmt: skip
    if len(fit) >= max(1, run.nodes):
        return _maximum_reason(asked, computes, cluster) or "next to start"
    if any(host.state is HostState.STARTING for host in hosts) or _is_growing(computes, cluster):
        return "hosts are starting"
    if hosts and (cluster.is_local or not any(each.is_managed for each in computes)):
        return _lacking_reason(run, hosts)
    used = {c.name: sum_resources(cluster.hosts_of(c)).used_vcpus for c in computes}
    if all(used[each.name] + asked > each.max_vcpus for each in computes):
        total = sum(each.max_vcpus for each in computes)
        return f"compute is full: {sum_resources(hosts).used_vcpus:g} of {total} vCPUs"
    return "waits for a host"


def _maximum_reason(asked: int, computes: Sequence[ComputeState], cluster: ClusterState) -> str:
    """Say that `local`'s compute environments are at maxvCpus, although the machine has free vCPUs.

    Empty in AWS, where maxvCpus limits only the start of new hosts.
    """
    total, held = sum(each.max_vcpus for each in computes), cluster.vcpus_held_in(computes)
    if not cluster.is_local or not total or held + asked <= total:
        return ""
    return f"compute is full: {held:g} of {total} vCPUs"


def _hosts_of(computes: Iterable[ComputeState], cluster: ClusterState) -> list[ClusterHost]:
    """Each host once: compute environments of `local` share the machine."""
    return list({host.id: host for each in computes for host in cluster.hosts_of(each)}.values())


def _is_growing(computes: Iterable[ComputeState], cluster: ClusterState) -> bool:
    """Whether desiredvCpus is more than the hosts have."""
    return any(
        each.desired_vcpus > sum_resources(cluster.hosts_of(each)).vcpus for each in computes
    )


def _lacking_reason(run: Run, hosts: Iterable[ClusterHost]) -> str:
    """The resource of which no host has enough for the run: GPUs first, memory last."""
    if run.nodes > 1:
        return f"needs {run.nodes} times {run.vcpus} vCPUs at once"
    free = [host.resources for host in hosts if host.takes_runs]
    requests: tuple[tuple[str, int, list[float]], ...] = (
        ("GPU", run.gpus, [each.gpus - each.used_gpus for each in free]),
        ("vCPU", run.vcpus, [each.vcpus - each.used_vcpus for each in free]),
        ("MiB", run.memory_mib, [each.memory_mib - each.used_memory_mib for each in free]),
    )
    for unit, requested, available in requests:
        most = max(available, default=0)
        if requested > most:
            plural = "s" if requested > 1 and unit != "MiB" else ""
            return f"needs {requested} {unit}{plural}, {most:g} free"
    return "no host has room for it"


# --- snapshot -------------------------------------------------------------------------------------


NO_CLUSTER = ClusterState()


class QueueRow(Struct, frozen=True):
    """The runs of a queue by status, the resources that they hold, and those that they request.

    Unless `is_exact`, the requests of some runs are unknown, and `asked_*` are lower bounds.
    `head`: the job id of the run that is next; `reason`: why it waits. `state`: None if AWS was not
    asked for it.
    """

    name: str
    counts: dict[JobStatus, int]
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    asked_vcpus: int = 0
    asked_memory_mib: int = 0
    asked_gpus: int = 0
    is_exact: bool = True
    state: QueueState | None = None
    head: str = ""
    reason: str = ""

    @property
    def running(self) -> int:
        """The number of containers that hold a host."""
        return sum(count for state, count in self.counts.items() if state.holds_resources)

    @property
    def waiting(self) -> int:
        """The number of containers without a host."""
        return sum(self.counts.values()) - self.running


class RunRow(Struct, frozen=True):
    """A run.

    `usage`: cpu in cores, memory and gpu_memory in MiB, gpu in percent, net_in and net_out in bytes
    a second; empty if unknown. `nodes`: the first nodes of a multi-node run. `head`: for a worker
    of a group run, the job id of the head, whose row is above. `position`: the position in its
    queue, from 1. `reason`: why it waits. `hosts`: the names of its hosts.
    """

    run: Run
    usage: dict[str, float] = {}
    nodes: "tuple[RunRow, ...]" = ()
    head: str = ""
    position: int | None = None
    reason: str = ""
    hosts: tuple[str, ...] = ()


class ClusterSnapshot(Struct, frozen=True):
    """Queues, runs, compute environments and hosts at a time (`at`, ms since the epoch).

    `calls`: the number of calls to AWS. `hosts`: None if unknown. `missing`: calls that AWS
    refused. `machine_cpu`: on `local`, the fraction of this machine's processors that all its
    programs use; None if it was not measured.
    """

    at: int
    queues: tuple[QueueRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    calls: int = 0
    computes: tuple[ComputeRow, ...] = ()
    hosts: tuple[HostRow, ...] | None = None
    missing: tuple[str, ...] = ()
    is_local: bool = False
    others: int = 0  # runs of other projects, which are not in `runs`
    machine_cpu: float | None = None

    @property
    def total(self) -> HostTotal:
        return sum_hosts(self.hosts or ())


def make_snapshot(
    queues: Iterable[str],
    runs: Sequence[Run],
    usage: Mapping[str, Mapping[str, float]],
    at: int,
    nodes: Mapping[str, Sequence[Run]] = {},
    cluster: ClusterState = NO_CLUSTER,
    asked: Sequence[str] = (),
) -> ClusterSnapshot:
    """Make the rows: running runs, the newest first, then waiting runs by position.

    Workers of a group run follow their head. `asked`: the queues that the user named, if any.
    """
    queues = list(queues)
    of_queue = {name: [run for run in runs if run.queue == name] for name in queues}
    held = {name: sum(run.vcpus * count_placed(run) for run in of_queue[name]) for name in queues}
    cluster = replace(cluster, held=held)
    heads = _group_heads(runs)
    queue_positions: dict[str, int] = {}  # job id -> its position in its queue
    for name, own in of_queue.items():
        queue_positions |= positions(own, cluster.fronts.get(name), is_fair=_is_fair(name, cluster))
    host_names = {host.id: host.name for host in cluster.hosts or ()}

    def row(run: Run) -> RunRow:
        node_rows = tuple(map(row, nodes.get(run.job_id, ())))
        is_placed = run.host and not run.nodes and run.status.holds_resources
        hosts = [host_names.get(run.host, run.host)] if is_placed else []
        position = queue_positions.get(run.job_id)
        return RunRow(
            run,
            dict(usage.get(run.job_id, {})),
            node_rows,
            heads.get(run.job_id, ""),
            position,
            _reason(run, position, cluster, at),
            tuple(dict.fromkeys([*hosts, *(host for each in node_rows for host in each.hosts)])),
        )

    def order(run: Run) -> tuple[float, ...]:
        state = JobStatus(effective_state(run))
        position = 0 if state.holds_resources else queue_positions.get(run.job_id, sys.maxsize)
        return (-state.order, position, -(run.created_at or 0))

    ordered = _sort_behind_heads(sorted(runs, key=order), heads)
    return ClusterSnapshot(
        at=at,
        queues=tuple(
            _queue_row(name, own, queue_positions, cluster, at) for name, own in of_queue.items()
        ),
        runs=tuple(map(row, ordered)),
        computes=compute_rows(cluster, asked),
        hosts=None
        if cluster.hosts is None
        else host_rows(cluster, _placed_containers(runs, nodes), usage),
        missing=cluster.missing,
        is_local=cluster.is_local,
    )


def narrow_to_project(
    snapshot: ClusterSnapshot, project: str, known: Mapping[str, str], asked: Sequence[str] = ()
) -> ClusterSnapshot:
    """The runs of a project, and its queues or those in `asked`. Numbers and positions count all.

    `known`: projects by job id, for runs that were not described.
    """
    runs = tuple(
        row
        for row in snapshot.runs
        if (row.run.project or known.get(row.run.job_id, "")) == project
    )
    queues = tuple(
        row
        for row in snapshot.queues
        if row.state is None or row.state.project in ("", project) or row.name in asked
    )
    count = sum(not row.head for row in snapshot.runs) - sum(not row.head for row in runs)
    return replace(snapshot, runs=runs, queues=queues, others=count)


def with_queue_names(snapshot: ClusterSnapshot, label: Callable[[str], str]) -> ClusterSnapshot:
    """The snapshot with short names of queues, for people."""
    names = {row.name for row in snapshot.queues} | {row.run.queue for row in snapshot.runs}
    labels = distinct_names(names, label)
    queues = tuple(replace(row, name=labels[row.name]) for row in snapshot.queues)
    runs = tuple(
        replace(row, run=replace(row.run, queue=labels[row.run.queue])) for row in snapshot.runs
    )
    return replace(snapshot, queues=queues, runs=runs)


def _reason(run: Run, position: int | None, cluster: ClusterState, at: int) -> str:
    """Why a run waits, and where its fallback moves it."""
    return ", ".join(
        filter(None, (short_reason(run, position, cluster), describe_coming_move(run, at)))
    )


def _placed_containers(runs: Iterable[Run], nodes: Mapping[str, Sequence[Run]]) -> list[Run]:
    """Containers that hold a host: runs, and the nodes of multi-node runs."""
    found = [run for run in runs if count_placed(run) and not run.nodes]
    return found + [node for each in nodes.values() for node in each if node.status.holds_resources]


def _group_heads(runs: Iterable[Run]) -> dict[str, str]:
    """Job id of a worker of a group run -> job id of the head, if both are listed.

    AWS Batch lists runs without their tags and variables, so that these are known only of runs that
    were described. Either the worker's tags or the head's variables suffice.
    """
    runs = list(runs)
    by_key = {run.key: run.job_id for run in runs if run.key}
    by_name = {
        each.job_name: run.job_id for run in runs for each in (_plan(run) or LaunchPlan(RAY)).groups
    }
    found = {
        run.job_id: by_name.get(run.job_name, "") or by_key.get(run.tags.get(GANG_TAG, ""), "")
        for run in runs
    }
    return {worker: head for worker, head in found.items() if head and not found.get(head)}


def _sort_behind_heads(runs: Sequence[Run], heads: Mapping[str, str]) -> list[Run]:
    workers: dict[str, list[Run]] = {}
    for run in runs:
        if run.job_id in heads:
            workers.setdefault(heads[run.job_id], []).append(run)
    firsts = [run for run in runs if run.job_id not in heads]
    return [each for run in firsts for each in (run, *workers.get(run.job_id, ()))]


def _plan(run: Run) -> LaunchPlan | None:
    try:
        return LaunchPlan.read(run.environment)
    except ValueError:  # another program's variable
        return None


def _queue_row(
    name: str,
    runs: Sequence[Run],
    queue_positions: Mapping[str, int],
    cluster: ClusterState,
    at: int,
) -> QueueRow:
    head = next((run for run in runs if queue_positions.get(run.job_id) == 1), None)
    return QueueRow(
        name=name,
        counts={status: sum(_containers(run, status) for run in runs) for status in LIVE},
        vcpus=sum(run.vcpus * count_placed(run) for run in runs),
        memory_mib=sum(run.memory_mib * count_placed(run) for run in runs),
        gpus=sum(run.gpus * count_placed(run) for run in runs),
        asked_vcpus=sum(run.vcpus * count_waiting(run) for run in runs),
        asked_memory_mib=sum(run.memory_mib * count_waiting(run) for run in runs),
        asked_gpus=sum(run.gpus * count_waiting(run) for run in runs),
        is_exact=all(run.vcpus for run in runs if count_waiting(run)),
        state=cluster.queues.get(name),
        head=head.job_id if head else "",
        reason=_reason(head, 1, cluster, at) if head else "",
    )


def _containers(run: Run, status: JobStatus) -> int:
    """The number of a run's containers with a status: children of an array, else the run itself."""
    return run.children.get(status.value, 0) if run.children else int(run.status is status)


def count_placed(run: Run) -> int:
    """The number of a run's containers that hold a host now."""
    if run.children:
        return sum(_containers(run, each) for each in LIVE if each.holds_resources)
    return max(1, run.nodes) if run.status.holds_resources else 0


def count_waiting(run: Run) -> int:
    """The number of a run's containers that have no host yet."""
    if run.children:
        return sum(_containers(run, each) for each in LIVE if not each.holds_resources)
    return 0 if run.status.holds_resources else max(1, run.nodes)
