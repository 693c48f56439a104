"""What goes on now: queues, the runs in them, and what these use. One poll a round."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch import BatchApi
from batchml.aws.live import LIVE, LiveApi
from batchml.errors import AccessError
from batchml.model.array import began, first_child
from batchml.model.run import Run
from batchml.model.status import JobStatus
from batchml.runtime.lines import parse_mark

USAGE_EVERY = 15.0  # seconds between two looks; our runtime tells it twice a minute
USAGE_AGE = 120_000  # ms: what was said before that is not of now
PACE = 0.5  # seconds for each call of a round, so that it makes two a second at most
MOST = 100  # runs that are asked about in detail: one call


class QueueRow(Struct, frozen=True):
    """How many runs a queue has in which state, and what those that run hold."""

    name: str
    counts: dict[JobStatus, int]
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0


class RunRow(Struct, frozen=True):
    """`usage`: cpu in cores, memory and gpu_memory in MiB, gpu in percent; empty if not known."""

    run: Run
    usage: dict[str, float] = {}


class Snapshot(Struct, frozen=True):
    """`at` in ms since the epoch. `calls` were made for it."""

    at: int
    queues: tuple[QueueRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    calls: int = 0


def make_snapshot(
    queues: Iterable[str], runs: Sequence[Run], usage: Mapping[str, Mapping[str, float]], at: int
) -> Snapshot:
    """The rows, those that run first and then those that will soon; the newest first of each."""
    ordered = sorted(runs, key=lambda run: (-run.status.order, -(run.created_at or 0)))
    return Snapshot(
        at=at,
        queues=tuple(_queue_row(name, [r for r in runs if r.queue == name]) for name in queues),
        runs=tuple(RunRow(run, dict(usage.get(run.job_id, {}))) for run in ordered),
    )


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
        self._look_at_usage([run for run in whole if run.status is JobStatus.RUNNING])
        self._forget(runs)
        found = make_snapshot(names, whole, self._usage, int(self._now() * 1000))
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

    def _look_at_usage(self, running: Sequence[Run]) -> None:
        now = self._now()
        if now - self._usage_at < USAGE_EVERY:
            return
        self._usage_at = now
        # Of each the current attempt, which is the last.
        streams = {run.attempts[-1].log_stream: run for run in running if run.attempts}
        since = int(now * 1000) - USAGE_AGE
        for group in sorted({run.log_group for run in streams.values()}):
            own = sorted(name for name, run in streams.items() if name and run.log_group == group)
            try:
                for stream, message in self._live.marked(group, own, since):
                    mark = parse_mark(message)
                    if mark is not None and mark[0] == "usage":
                        used = {name: float(value) for name, value in mark[1].items()}
                        self._usage[streams[stream].job_id] = used
            except AccessError:
                return  # it is an extra: who may not read logs sees the rest

    def _forget(self, runs: Mapping[str, Run]) -> None:
        """What has ended is gone; who is not running any more is asked about anew."""
        gone = {job_id for job_id in self._details if job_id not in runs}
        gone |= {each for each, run in runs.items() if not holders(run)}
        for job_id in gone:
            self._details.pop(job_id, None)
            self._usage.pop(job_id, None)
