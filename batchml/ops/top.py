"""What goes on now: queues, the runs in them, and what these use. One poll a round."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch import BatchApi
from batchml.aws.live import LIVE, LiveApi
from batchml.errors import AccessError
from batchml.model.array import began, first_child
from batchml.model.gang import GANG_TAG
from batchml.model.run import Run
from batchml.model.status import JobStatus
from batchml.ops.using import AGE
from batchml.runtime.launch import RAY, Plan
from batchml.runtime.lines import parse_mark

USAGE_EVERY = 15.0  # seconds between two looks; our runtime tells it twice a minute
PACE = 0.5  # seconds for each call of a round, so that it makes two a second at most
MOST = 100  # runs that are asked about in detail: one call
MOST_NODES = 16  # of one run that are looked at


class QueueRow(Struct, frozen=True):
    """How many runs a queue has in which state, and what those that run hold."""

    name: str
    counts: dict[JobStatus, int]
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0


class RunRow(Struct, frozen=True):
    """`usage`: cpu in cores, memory and gpu_memory in MiB, gpu in percent, net_in and net_out in
    bytes a second; empty if not known. `nodes`: the first of a multi-node run. `head`: of workers
    of a gang the job id of its head, whose row stands before theirs.
    """

    run: Run
    usage: dict[str, float] = {}
    nodes: "tuple[RunRow, ...]" = ()
    head: str = ""


class Snapshot(Struct, frozen=True):
    """`at` in ms since the epoch. `calls` were made for it."""

    at: int
    queues: tuple[QueueRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    calls: int = 0


def make_snapshot(
    queues: Iterable[str],
    runs: Sequence[Run],
    usage: Mapping[str, Mapping[str, float]],
    at: int,
    nodes: Mapping[str, Sequence[Run]] = {},
) -> Snapshot:
    """The rows, those that run first and then those that will soon; the newest first of each.

    Workers of a gang follow their head.
    """
    heads = _heads(runs)

    def row(run: Run) -> RunRow:
        parts = tuple(map(row, nodes.get(run.job_id, ())))
        usage_now = dict(usage.get(run.job_id, {}))
        return RunRow(run, usage_now, parts, heads.get(run.job_id, ""))

    ordered = sorted(runs, key=lambda run: (-run.status.order, -(run.created_at or 0)))
    ordered = _behind_heads(ordered, heads)
    return Snapshot(
        at=at,
        queues=tuple(_queue_row(name, [r for r in runs if r.queue == name]) for name in queues),
        runs=tuple(map(row, ordered)),
    )


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


def _queue_row(name: str, runs: Sequence[Run]) -> QueueRow:
    return QueueRow(
        name=name,
        counts={status: sum(_containers(run, status) for run in runs) for status in LIVE},
        vcpus=sum(run.vcpus * holders(run) for run in runs),
        memory_mib=sum(run.memory_mib * holders(run) for run in runs),
        gpus=sum(run.gpus * holders(run) for run in runs),
    )


def _containers(run: Run, status: JobStatus) -> int:
    """How many of a run are in a state: of an array its children, of any other run itself."""
    return run.children.get(status.value, 0) if run.children else int(run.status is status)


def holders(run: Run) -> int:
    """How many containers of a run hold machines now."""
    if run.children:
        return sum(_containers(run, each) for each in LIVE if each.holds_resources)
    return max(1, run.nodes) if run.status.holds_resources else 0


def pause(calls: int, wanted: float) -> float:
    """Seconds until the next round: as wanted, and longer where a round takes many calls."""
    return max(wanted, calls * PACE)


class Poller:
    """Looks again and again. What does not change of a run is asked for once."""

    def __init__(self, batch: BatchApi, live: LiveApi, now: Callable[[], float]) -> None:
        self._batch = batch
        self._live = live
        self._now = now
        self._details: dict[str, Run] = {}
        self._usage: dict[str, dict[str, float]] = {}
        self._nodes: dict[str, dict[str, Run]] = {}  # run -> node -> how it was last
        self._usage_at = 0.0
        self._queues: list[str] = []

    def look(self, queues: Sequence[str] = ()) -> Snapshot:
        """How it is now, in these queues or in all. Raises ServiceError, AccessError."""
        before = self._live.calls
        calls = 0
        if not queues and not self._queues:
            self._queues, calls = self._batch.queues(), 1
        names = list(queues) or self._queues
        # From the first state to the last: who moves on meanwhile is met twice, never missed.
        met = [run for queue in names for status in LIVE for run in self._live.runs(queue, status)]
        runs = {run.job_id: run for run in met}
        calls += self._describe(list(runs.values()))
        whole = [self._whole(run) for run in runs.values()]
        calls += self._look_at_usage([run for run in whole if run.status is JobStatus.RUNNING])
        self._forget(runs)
        nodes = {job_id: list(each.values()) for job_id, each in self._nodes.items()}
        found = make_snapshot(names, whole, self._usage, int(self._now() * 1000), nodes)
        return replace(found, calls=calls + self._live.calls - before)

    def _describe(self, runs: Sequence[Run]) -> int:
        """Ask for details of those that have begun and are new, or that have another attempt."""
        begun = [run.job_id for run in runs if holders(run)]
        asked = [each for each in begun if not self._is_known(each)][:MOST]
        if not asked:
            return 0
        firsts = [first_child(run.job_id) for run in runs if run.children and run.job_id in asked]
        ids = [*asked, *firsts]
        told = self._batch.describe(ids)
        starts = {each: began(told.pop(each, None)) for each in firsts}
        for job_id, run in told.items():
            start = run.started_at or starts.get(first_child(job_id))
            self._details[job_id] = replace(run, started_at=start)
        return -(-len(ids) // MOST)

    def _is_known(self, job_id: str) -> bool:
        known = self._details.get(job_id)
        return known is not None and known.status is not JobStatus.STARTING

    def _whole(self, run: Run) -> Run:
        known = self._details.get(run.job_id)
        if known is None:
            return run
        began = run.started_at or known.started_at
        return replace(known, status=run.status, started_at=began, children=run.children)

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
        gone |= {each for each, run in runs.items() if not holders(run)}
        gone |= {job_id for job_id in self._nodes if job_id not in runs}
        for job_id in gone:
            self._details.pop(job_id, None)
            for each in (job_id, *self._nodes.pop(job_id, ())):
                self._usage.pop(each, None)


def _has_begun(node: Run | None) -> bool:
    return node is not None and bool(node.attempts) and node.status is not JobStatus.STARTING
