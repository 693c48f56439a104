"""A snapshot of queues, runs, compute environments and hosts as table rows. Pure."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import LIVE
from batchml.cluster.queueing import describe_move, positions, short_reason
from batchml.cluster.rows import (
    ClusterState,
    ComputeRow,
    HostRow,
    HostTotal,
    compute_rows,
    host_rows,
    names_of_hosts,
    sum_hosts,
)
from batchml.model.explanation import QueueState
from batchml.model.group import GANG_TAG
from batchml.model.run import JobStatus, Run, shown_state
from batchml.runtime.protocol.launch import RAY, LaunchPlan

NO_CLUSTER = ClusterState()


class QueueRow(Struct, frozen=True):
    """The runs of a queue by status, the resources that they hold, and those that they request.

    Unless `is_whole`, the requests of some runs are unknown, and `asked_*` are lower bounds.
    `head`: the run that is next; `reason`: why it waits. `state`: None if it was not asked for.
    """

    name: str
    counts: dict[JobStatus, int]
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    asked_vcpus: int = 0
    asked_memory_mib: int = 0
    asked_gpus: int = 0
    is_whole: bool = True
    state: QueueState | None = None
    head: str = ""  # job id
    reason: str = ""

    @property
    def running(self) -> int:
        """Containers that hold a host."""
        return sum(count for state, count in self.counts.items() if state.holds_resources)

    @property
    def waiting(self) -> int:
        return sum(self.counts.values()) - self.running


class RunRow(Struct, frozen=True):
    """A run.

    `usage`: cpu in cores, memory and gpu_memory in MiB, gpu in percent, net_in and net_out in bytes
    a second; empty if unknown. `nodes`: the first nodes of a multi-node run. `head`: of a worker in
    a group run the job id of the head, whose row is above. `position`: in its queue, from 1, and
    `reason`: why it waits. `hosts`: names of its hosts.
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
    refused.
    """

    at: int
    queues: tuple[QueueRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    calls: int = 0
    computes: tuple[ComputeRow, ...] = ()
    hosts: tuple[HostRow, ...] | None = None
    missing: tuple[str, ...] = ()
    is_local: bool = False

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
    names: Sequence[str] = (),
) -> ClusterSnapshot:
    """Make the rows: running runs, the newest first, then waiting runs by position.

    Workers of a group run follow their head. `names`: the queues that were asked for, if any.
    """
    queues = list(queues)
    held = {name: sum(run.vcpus * count_placed(run) for run in runs if run.queue == name)
            for name in queues}  # fmt: skip
    cluster = replace(cluster, held=held)
    heads = _heads(runs)
    places = _positions(queues, runs, cluster)
    called = names_of_hosts(cluster)

    def row(run: Run) -> RunRow:
        parts = tuple(map(row, nodes.get(run.job_id, ())))
        own = [run.host] if not run.nodes and run.status.holds_resources else []
        there = [called.get(host, host) for host in own if host]
        place = places.get(run.job_id)
        return RunRow(
            run,
            dict(usage.get(run.job_id, {})),
            parts,
            heads.get(run.job_id, ""),
            place,
            _reason(run, place, cluster, at),
            tuple(dict.fromkeys([*there, *(host for part in parts for host in part.hosts)])),
        )

    def order(run: Run) -> tuple[float, ...]:
        state = JobStatus(shown_state(run))
        place = 0 if state.holds_resources else places.get(run.job_id, sys.maxsize)
        return (-state.order, place, -(run.created_at or 0))

    ordered = _behind_heads(sorted(runs, key=order), heads)
    return ClusterSnapshot(
        at=at,
        queues=tuple(
            _queue_row(name, [run for run in runs if run.queue == name], places, cluster, at)
            for name in queues
        ),
        runs=tuple(map(row, ordered)),
        computes=compute_rows(cluster, names),
        hosts=None if cluster.hosts is None else host_rows(cluster, _holding(runs, nodes), usage),
        missing=cluster.missing,
        is_local=cluster.is_local,
    )


def _reason(run: Run, place: int | None, cluster: ClusterState, at: int) -> str:
    """Why a run waits, and where its fallback moves it."""
    return ", ".join(filter(None, (short_reason(run, place, cluster), describe_move(run, at))))


def _holding(runs: Iterable[Run], nodes: Mapping[str, Sequence[Run]]) -> list[Run]:
    """Containers that hold a host: runs, and the nodes of multi-node runs."""
    found = [run for run in runs if count_placed(run) and not run.nodes]
    return found + [node for each in nodes.values() for node in each if node.status.holds_resources]


def _positions(queues: Iterable[str], runs: Sequence[Run], cluster: ClusterState) -> dict[str, int]:
    """Job id -> its position in its queue."""
    found: dict[str, int] = {}
    for name in queues:
        state = cluster.queues.get(name)
        is_fair = state is not None and bool(state.policy)
        own = [run for run in runs if run.queue == name]
        found |= positions(own, cluster.fronts.get(name), is_fair=is_fair)
    return found


def _heads(runs: Iterable[Run]) -> dict[str, str]:
    """Job id of workers in a group run -> job id of the head, if both are listed.

    Tags and variables of runs without a host are unknown. The tags of the workers or the variables
    of the head suffice.
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


def _behind_heads(runs: Sequence[Run], heads: Mapping[str, str]) -> list[Run]:
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
    name: str, runs: Sequence[Run], places: Mapping[str, int], cluster: ClusterState, at: int
) -> QueueRow:
    head = next((run for run in runs if places.get(run.job_id) == 1), None)
    return QueueRow(
        name=name,
        counts={status: sum(_containers(run, status) for run in runs) for status in LIVE},
        vcpus=sum(run.vcpus * count_placed(run) for run in runs),
        memory_mib=sum(run.memory_mib * count_placed(run) for run in runs),
        gpus=sum(run.gpus * count_placed(run) for run in runs),
        asked_vcpus=sum(run.vcpus * count_waiting(run) for run in runs),
        asked_memory_mib=sum(run.memory_mib * count_waiting(run) for run in runs),
        asked_gpus=sum(run.gpus * count_waiting(run) for run in runs),
        is_whole=all(run.vcpus for run in runs if count_waiting(run)),
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
