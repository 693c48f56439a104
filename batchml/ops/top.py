"""What goes on now: queues, the runs in them, and what these use. One poll a round."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import LIVE, BatchApi, LiveApi
from batchml.errors import AccessError
from batchml.model.explanation import QueueState
from batchml.model.group import GANG_TAG
from batchml.model.run import JobStatus, Run, began, first_child, shown_state
from batchml.ops.cluster import (
    Cluster,
    ComputeRow,
    HostRow,
    Total,
    compute_rows,
    host_rows,
    names_of_hosts,
    total,
)
from batchml.ops.cluster_look import ClusterLook
from batchml.ops.queueing import move_of, positions, reason_of, waits
from batchml.ops.using import AGE
from batchml.runtime.protocol.launch import RAY, Plan
from batchml.runtime.protocol.log_marks import parse_mark

USAGE_EVERY = 15.0  # seconds between two looks; our runtime tells it twice a minute
PACE = 0.5  # seconds for each call of a round, so that it makes two a second at most
MOST = 100  # runs that are asked about in detail: one call
MOST_NODES = 16  # of one run that are looked at
NO_CLUSTER = Cluster()


class QueueRow(Struct, frozen=True):
    """How many runs a queue has in which state, what those that run hold, and what those that wait
    ask for: at least so much, unless `is_whole`. `head` is the run whose turn it is, `reason` why
    it waits. `state` is None where nobody asked for it.
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
    """`usage`: cpu in cores, memory and gpu_memory in MiB, gpu in percent, net_in and net_out in
    bytes a second; empty if not known. `nodes`: the first of a multi-node run. `head`: of workers
    of a gang the job id of its head, whose row stands before theirs. `position`: among the
    containers of its queue that wait, from 1; `reason`: why it does. `hosts`: where it is.
    """

    run: Run
    usage: dict[str, float] = {}
    nodes: "tuple[RunRow, ...]" = ()
    head: str = ""
    position: int | None = None
    reason: str = ""
    hosts: tuple[str, ...] = ()


class Snapshot(Struct, frozen=True):
    """`at` in ms since the epoch. `calls` were made for it. `hosts` is None where they are not
    known; `missing` says what could not be asked.
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
    def total(self) -> Total:
        return total(self.hosts or ())


def make_snapshot(
    queues: Iterable[str],
    runs: Sequence[Run],
    usage: Mapping[str, Mapping[str, float]],
    at: int,
    nodes: Mapping[str, Sequence[Run]] = {},
    cluster: Cluster = NO_CLUSTER,
    names: Sequence[str] = (),
) -> Snapshot:
    """The rows: those that run, the newest first; then those that wait, whose turn it is first.

    Workers of a gang follow their head. `names`: of the queues to which it is narrowed, if it is.
    """
    queues = list(queues)
    held = {name: sum(run.vcpus * holders(run) for run in runs if run.queue == name)
            for name in queues}  # fmt: skip
    cluster = replace(cluster, held=held)
    heads = _heads(runs)
    places = _places(queues, runs, cluster)
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
    return Snapshot(
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


def _reason(run: Run, place: int | None, cluster: Cluster, at: int) -> str:
    """Why it waits, and where it goes when it has waited long enough."""
    return ", ".join(filter(None, (reason_of(run, place, cluster), move_of(run, at))))


def _holding(runs: Iterable[Run], nodes: Mapping[str, Sequence[Run]]) -> list[Run]:
    """What has a place on a host: of a run of many nodes, these."""
    found = [run for run in runs if holders(run) and not run.nodes]
    return found + [node for each in nodes.values() for node in each if node.status.holds_resources]


def _places(queues: Iterable[str], runs: Sequence[Run], cluster: Cluster) -> dict[str, int]:
    """Job id -> its place in its queue."""
    found: dict[str, int] = {}
    for name in queues:
        state = cluster.queues.get(name)
        is_fair = state is not None and bool(state.policy)
        own = [run for run in runs if run.queue == name]
        found |= positions(own, cluster.fronts.get(name), is_fair=is_fair)
    return found


def _heads(runs: Iterable[Run]) -> dict[str, str]:
    """Workers of a gang -> its head, job ids, where both are here.

    Of runs that hold no machine yet, neither tags nor variables are known: then the other of the
    two says it.
    """
    runs = list(runs)
    by_key = {run.key: run.job_id for run in runs if run.key}
    by_name = {
        each.job_name: run.job_id for run in runs for each in (_plan(run) or Plan(RAY)).groups
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


def _plan(run: Run) -> Plan | None:
    try:
        return Plan.read(run.environment)
    except ValueError:  # somebody else's variable
        return None


def _queue_row(
    name: str, runs: Sequence[Run], places: Mapping[str, int], cluster: Cluster, at: int
) -> QueueRow:
    head = next((run for run in runs if places.get(run.job_id) == 1), None)
    return QueueRow(
        name=name,
        counts={status: sum(_containers(run, status) for run in runs) for status in LIVE},
        vcpus=sum(run.vcpus * holders(run) for run in runs),
        memory_mib=sum(run.memory_mib * holders(run) for run in runs),
        gpus=sum(run.gpus * holders(run) for run in runs),
        asked_vcpus=sum(run.vcpus * waiters(run) for run in runs),
        asked_memory_mib=sum(run.memory_mib * waiters(run) for run in runs),
        asked_gpus=sum(run.gpus * waiters(run) for run in runs),
        is_whole=all(run.vcpus for run in runs if waiters(run)),
        state=cluster.queues.get(name),
        head=head.job_id if head else "",
        reason=_reason(head, 1, cluster, at) if head else "",
    )


def _containers(run: Run, status: JobStatus) -> int:
    """How many of a run are in a state: of an array its children, of any other run itself."""
    return run.children.get(status.value, 0) if run.children else int(run.status is status)


def holders(run: Run) -> int:
    """How many containers of a run hold machines now."""
    if run.children:
        return sum(_containers(run, each) for each in LIVE if each.holds_resources)
    return max(1, run.nodes) if run.status.holds_resources else 0


def waiters(run: Run) -> int:
    """How many containers of a run will hold machines once they start."""
    if run.children:
        return sum(_containers(run, each) for each in LIVE if not each.holds_resources)
    return 0 if run.status.holds_resources else max(1, run.nodes)


def pause(calls: int, wanted: float) -> float:
    """Seconds until the next round: as wanted, and longer where a round takes many calls."""
    return max(wanted, calls * PACE)


class Poller:
    """Looks again and again. What does not change of a run is asked for once.

    Without a `cluster` to look at there are runs and queues alone.
    """

    def __init__(
        self,
        batch: BatchApi,
        live: LiveApi,
        now: Callable[[], float],
        cluster: ClusterLook | None = None,
    ) -> None:
        self._batch = batch
        self._live = live
        self._now = now
        self._cluster = cluster
        self._details: dict[str, Run] = {}
        self._begun: set[str] = set()  # of these it was asked when they held machines
        self._usage: dict[str, dict[str, float]] = {}
        self._nodes: dict[str, dict[str, Run]] = {}  # run -> node -> how it was last
        self._usage_at = 0.0
        self._queues: list[str] = []

    def look(
        self, queues: Sequence[str] = (), *, with_hosts: bool = True, with_usage: bool = True
    ) -> Snapshot:
        """How it is now, in these queues or in all. Raises ServiceError, AccessError."""
        before = self._counted()
        calls = 0
        if self._cluster is not None:
            self._queues = self._cluster.queues()
        elif not queues and not self._queues:
            self._queues, calls = self._batch.queues(), 1
        names = list(queues) or self._queues
        # From the first state to the last: who moves on meanwhile is met twice, never missed.
        met = [run for queue in names for status in LIVE for run in self._live.runs(queue, status)]
        runs = {run.job_id: run for run in met}
        self._forget(runs)
        calls += self._describe(list(runs.values()))
        whole = [self._whole(run) for run in runs.values()]
        running = [run for run in whole if run.status is JobStatus.RUNNING]
        calls += self._look_at_usage(running) if with_usage else 0
        nodes = {job_id: list(each.values()) for job_id, each in self._nodes.items()}
        cluster = NO_CLUSTER
        if self._cluster is not None:
            waiting = dict.fromkeys(run.queue for run in whole if waits(run))
            cluster = self._cluster.look(queues, waiting, with_hosts=with_hosts)
        at = int(self._now() * 1000)
        found = make_snapshot(names, whole, self._usage, at, nodes, cluster, queues)
        return replace(found, calls=calls + self._counted() - before)

    def _counted(self) -> int:
        return self._live.calls + (self._cluster.calls if self._cluster is not None else 0)

    def _describe(self, runs: Sequence[Run]) -> int:
        """Ask for details of those that have begun and are new, or that have another attempt; then,
        as far as one call goes, of those that wait: what they ask for does not change.
        """
        asked = [run.job_id for run in runs if holders(run) and not self._is_known(run)][:MOST]
        self._begun.update(asked)
        firsts = [first_child(run.job_id) for run in runs if run.children and run.job_id in asked]
        oldest = sorted(runs, key=lambda run: run.created_at or 0)
        later = [run.job_id for run in oldest if not holders(run) and not self._is_known(run)]
        ids = [*asked, *firsts]
        ids += later[: -len(ids) % MOST if ids else MOST]
        if not ids:
            return 0
        told = self._batch.describe(ids)
        starts = {each: began(told.pop(each, None)) for each in firsts}
        for job_id, run in told.items():
            start = run.started_at or starts.get(first_child(job_id))
            self._details[job_id] = replace(run, started_at=start)
        return -(-len(ids) // MOST)

    def _is_known(self, run: Run) -> bool:
        """Who moved on between the lists and the answer is asked about once more, if it holds
        machines.
        """
        known = self._details.get(run.job_id)
        if known is None or not holders(run):
            return known is not None
        return run.job_id in self._begun and known.status is not JobStatus.STARTING

    def _whole(self, run: Run) -> Run:
        known = self._details.get(run.job_id)
        if known is None:
            return run
        return replace(
            known,
            status=run.status,
            status_reason=run.status_reason,
            started_at=run.started_at or known.started_at,
            children=run.children,
        )

    def _look_at_usage(self, running: Sequence[Run]) -> int:
        """How many calls were made, but for those of the logs, which count themselves."""
        now = self._now()
        if now - self._usage_at < USAGE_EVERY:
            return 0
        self._usage_at = now
        calls = self._look_at_nodes([run for run in running if run.nodes])
        nodes = [node for each in self._nodes.values() for node in each.values()]
        # Of each the current attempt, which is the last.
        streams = {run.attempts[-1].log_stream: run for run in (*running, *nodes) if run.attempts}
        since = int(now * 1000) - AGE
        for group in sorted({run.log_group for run in streams.values()}):
            own = sorted(name for name, run in streams.items() if name and run.log_group == group)
            try:
                for stream, _, message in self._live.marked(group, own, since):
                    mark = parse_mark(message)
                    if mark is not None and mark[0] == "usage":
                        used = {name: float(value) for name, value in mark[1].items()}
                        self._usage[streams[stream].job_id] = used
            except AccessError:
                break  # it is an extra: who may not read logs sees the rest
        return calls

    def _look_at_nodes(self, running: Sequence[Run]) -> int:
        """Ask for the nodes that had not begun when they were last asked for: one call, if any."""
        asked: dict[str, str] = {}  # node -> run
        for run in running:
            known = self._nodes.get(run.job_id, {})
            ids = [f"{run.job_id}#{index}" for index in range(min(run.nodes, MOST_NODES))]
            asked |= {each: run.job_id for each in ids if not _has_begun(known.get(each))}
        ids = list(asked)[:MOST]
        for job_id, node in (self._batch.describe(ids) if ids else {}).items():
            self._nodes.setdefault(asked[job_id], {})[job_id] = node
        return int(bool(ids))

    def _forget(self, runs: Mapping[str, Run]) -> None:
        """What has ended is gone; who is not running any more is asked about anew."""
        gone = {job_id for job_id in self._details if job_id not in runs}
        gone |= {each for each, run in runs.items() if each in self._begun and not holders(run)}
        gone |= {job_id for job_id in self._nodes if job_id not in runs}
        self._begun -= gone
        for job_id in gone:
            self._details.pop(job_id, None)
            for each in (job_id, *self._nodes.pop(job_id, ())):
                self._usage.pop(each, None)


def _has_begun(node: Run | None) -> bool:
    return node is not None and bool(node.attempts) and node.status is not JobStatus.STARTING
