"""Poll the runs, queues, compute environments and hosts of an environment, and ask for prices."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

from msgspec.structs import replace

from batchml.aws.batch.cluster import ClusterApi
from batchml.aws.batch.jobs import LIVE, MAX_DESCRIBE, JobApi, LiveApi
from batchml.aws.pricing.prices import describe_failure
from batchml.cluster.rows import ClusterState, belongs_to, price_item, sum_resources, with_prices
from batchml.cluster.snapshot import (
    ClusterSnapshot,
    QueueRow,
    count_placed,
    count_runnable,
    make_snapshot,
    narrow_to_project,
)
from batchml.context import Context
from batchml.errors import AccessError
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostState
from batchml.model.run import JobStatus, Run, first_child_id, first_start
from batchml.runs.metrics.usage import MAX_MARK_AGE
from batchml.runtime.protocol.log_marks import parse_mark

# --- pollers --------------------------------------------------------------------------------------
USAGE_EVERY = 15.0  # seconds between two polls; our runtime reports usage twice a minute
PACE = 0.5  # seconds of pause for each call, so that a poll makes at most two calls a second
MAX_NODES = 16  # nodes of one run that are polled; the others are not shown
COMPUTE_EVERY = 15.0  # seconds between two polls; hosts take minutes to come and go


class ComputePoller:
    """Polls queues, compute environments and hosts, at most every 15 seconds."""

    def __init__(
        self, api: ClusterApi, now: Callable[[], float], *, is_local: bool = False
    ) -> None:
        self._api = api
        self._now = now
        self._is_local = is_local
        self._polled_at: float | None = None
        self._hosts_polled_at: float | None = None
        self._queues: dict[str, QueueState] = {}
        self._computes: dict[str, ComputeState] | None = None
        self._hosts: tuple[ClusterHost, ...] | None = None
        self._fronts: dict[str, tuple[str, ...]] = {}
        self._fronts_polled_at: dict[str, float] = {}  # queue -> when its front was asked for

    @property
    def calls(self) -> int:
        return self._api.calls

    def queues(self) -> list[str]:
        """The names of all queues, which a poll asks for first.

        Raises AccessError, ServiceError, ServiceUnreachable.
        """
        now = self._now()
        if self._polled_at is None or now - self._polled_at >= COMPUTE_EVERY:
            self._api.missing.clear()
            self._queues = self._api.queues()
            self._computes = self._api.computes()
            self._polled_at = now
        return list(self._queues)

    def poll(
        self, queues: Sequence[str], waiting: Iterable[str], *, with_hosts: bool = True
    ) -> ClusterState:
        """The state of queues. `waiting`: the queues with waiting runs, to ask for their order.

        Without `with_hosts`, AWS is asked for hosts only if a run waits.
        """
        self.queues()
        waiting = list(waiting)
        for queue in waiting:
            if self._fronts_polled_at.get(queue, -COMPUTE_EVERY) + COMPUTE_EVERY <= self._now():
                self._fronts[queue] = self._api.front(queue) or ()
                self._fronts_polled_at[queue] = self._now()
        known = ClusterState(self._queues, self._computes)
        wanted = {
            each.name: each for name in queues or self._queues for each in known.computes_of(name)
        }
        if not queues:  # also compute environments that no queue uses
            wanted = dict(self._computes or {})
        if self._hosts_polled_at != self._polled_at and (with_hosts or waiting):
            self._hosts_polled_at, self._hosts = self._polled_at, self._poll_hosts(wanted)
        return ClusterState(
            self._queues,
            self._computes,
            self._hosts,
            {queue: self._fronts[queue] for queue in waiting if self._fronts.get(queue)},
            tuple(dict.fromkeys(self._api.missing.values())),
            self._is_local,
        )

    def _poll_hosts(self, computes: Mapping[str, ComputeState]) -> tuple[ClusterHost, ...] | None:
        if self._computes is None:
            return None
        joined = self._api.hosts(each.cluster for each in computes.values())
        if joined is None:
            return None
        short = [each for each in computes.values() if _is_short(each, joined)]
        if self._is_local or not short:
            return joined
        instances = {host.instance for host in joined}
        launched = self._api.launched(each.name for each in short)
        return (*joined, *(host for host in launched if host.instance not in instances))


def _is_short(compute: ComputeState, joined: Sequence[ClusterHost]) -> bool:
    """Whether a host is starting, or desiredvCpus is more than the hosts that joined have."""
    own = [host for host in joined if belongs_to(host, compute)]
    is_starting = any(host.state is HostState.STARTING for host in own)
    return is_starting or compute.desired_vcpus > sum_resources(own).vcpus


def poll_pause(calls: int, wanted: float) -> float:
    """Seconds until the next poll: `wanted`, or longer if a poll takes many calls."""
    return max(wanted, calls * PACE)


class ClusterPoller:
    """Polls everything. AWS is asked only once for values of a run that do not change."""

    def __init__(
        self, batch: JobApi, live: LiveApi, now: Callable[[], float], cluster: ComputePoller
    ) -> None:
        self._batch = batch
        self._live = live
        self._now = now
        self._cluster = cluster
        self._details: dict[str, Run] = {}
        self._begun: set[str] = set()  # runs that were described when they held a host
        self._usage: dict[str, dict[str, float]] = {}
        self._nodes: dict[str, dict[str, Run]] = {}  # run -> node -> its last description
        self._usage_polled_at = 0.0

    def poll(
        self, queues: Sequence[str] = (), *, with_hosts: bool = True, with_usage: bool = True
    ) -> ClusterSnapshot:
        """Take a snapshot of these queues, or of all. Raises ServiceError, AccessError."""
        before = self._count_calls()
        every = self._cluster.queues()
        names = list(queues) or every
        # In the order of statuses: a run that moves on meanwhile is listed twice, never missed.
        runs = {
            run.job_id: run
            for queue in names
            for status in LIVE
            for run in self._live.runs(queue, status)
        }
        self._forget(runs)
        calls = self._describe(list(runs.values()))
        detailed = [self._with_details(run) for run in runs.values()]
        running = [run for run in detailed if run.status is JobStatus.RUNNING]
        calls += self._poll_usage(running) if with_usage else 0
        nodes = {job_id: list(each.values()) for job_id, each in self._nodes.items()}
        waiting = dict.fromkeys(run.queue for run in detailed if count_runnable(run))
        cluster = self._cluster.poll(queues, waiting, with_hosts=with_hosts)
        at = int(self._now() * 1000)
        found = make_snapshot(names, detailed, self._usage, at, nodes, cluster, queues)
        return replace(found, calls=calls + self._count_calls() - before)

    def _count_calls(self) -> int:
        return self._live.calls + self._cluster.calls

    def _describe(self, runs: Sequence[Run]) -> int:
        """Describe runs that hold a host and are new or have a new attempt.

        Waiting runs, the oldest first, fill the last call: their requests do not change.
        Returns the number of calls.
        """
        unknown = [run for run in runs if not self._is_known(run)]
        placed = [run.job_id for run in unknown if count_placed(run)][:MAX_DESCRIBE]
        self._begun.update(placed)
        firsts = [
            first_child_id(run.job_id) for run in runs if run.children and run.job_id in placed
        ]
        oldest = sorted(unknown, key=lambda run: run.created_at or 0)
        waiting = [run.job_id for run in oldest if not count_placed(run)]
        ids = [*placed, *firsts]
        ids += waiting[: -len(ids) % MAX_DESCRIBE if ids else MAX_DESCRIBE]
        if not ids:
            return 0
        described = self._batch.describe(ids)
        starts = {each: first_start(described.pop(each, None)) for each in firsts}
        for job_id, run in described.items():
            start = run.started_at or starts.get(first_child_id(job_id))
            self._details[job_id] = replace(run, started_at=start)
        return -(-len(ids) // MAX_DESCRIBE)

    def _is_known(self, run: Run) -> bool:
        """Whether the details of a run are up to date.

        A run that holds a host is described again if it was described before that.
        """
        known = self._details.get(run.job_id)
        if known is None or not count_placed(run):
            return known is not None
        return run.job_id in self._begun and known.status is not JobStatus.STARTING

    def _with_details(self, run: Run) -> Run:
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

    def _poll_usage(self, running: Sequence[Run]) -> int:
        """Read the usage of runs from their logs; return the number of calls to AWS Batch."""
        now = self._now()
        if now - self._usage_polled_at < USAGE_EVERY:
            return 0
        self._usage_polled_at = now
        calls = self._poll_nodes([run for run in running if run.nodes])
        nodes = [node for each in self._nodes.values() for node in each.values()]
        # The last attempt of each is the current one.
        streams = {run.attempts[-1].log_stream: run for run in (*running, *nodes) if run.attempts}
        since = int(now * 1000) - MAX_MARK_AGE
        for group in sorted({run.log_group for run in streams.values()}):
            own = sorted(name for name, run in streams.items() if name and run.log_group == group)
            try:
                for stream, _, message in self._live.read_marks(group, own, since):
                    mark = parse_mark(message)
                    if mark is not None and mark[0] == "usage":
                        used = {name: float(value) for name, value in mark[1].items()}
                        self._usage[streams[stream].job_id] = used
            except AccessError:
                break  # without permission to read logs, all but the usage is shown
        return calls

    def _poll_nodes(self, running: Sequence[Run]) -> int:
        """Describe the nodes that had not begun at the last poll, by at most one call.

        Returns the number of calls.
        """
        asked: dict[str, str] = {}  # node -> run
        for run in running:
            known = self._nodes.get(run.job_id, {})
            ids = [f"{run.job_id}#{index}" for index in range(min(run.nodes, MAX_NODES))]
            asked |= {each: run.job_id for each in ids if not _has_begun(known.get(each))}
        ids = list(asked)[:MAX_DESCRIBE]
        for job_id, node in (self._batch.describe(ids) if ids else {}).items():
            self._nodes.setdefault(asked[job_id], {})[job_id] = node
        return int(bool(ids))

    def _forget(self, runs: Mapping[str, Run]) -> None:
        """Forget runs that have ended, and runs that lost their host: these are described again."""
        stale = {job_id for job_id in (*self._details, *self._nodes) if job_id not in runs}
        stale |= {
            each for each, run in runs.items() if each in self._begun and not count_placed(run)
        }
        self._begun -= stale
        for job_id in stale:
            self._details.pop(job_id, None)
            for each in (job_id, *self._nodes.pop(job_id, ())):
                self._usage.pop(each, None)


def _has_begun(node: Run | None) -> bool:
    return node is not None and bool(node.attempts) and node.status is not JobStatus.STARTING


# --- service --------------------------------------------------------------------------------------


def open_poller(context: Context) -> ClusterPoller:
    """A poller of queues, runs, compute environments and hosts."""
    return _open_poller(context, _open_computes(context))


def _open_computes(context: Context) -> ComputePoller:
    api = ClusterApi(context.connect(), context.env)
    return ComputePoller(api, context.clock.now, is_local=context.settings.is_local)


def _open_poller(context: Context, computes: ComputePoller) -> ClusterPoller:
    return ClusterPoller(context.batch, LiveApi(context.connect()), context.clock.now, computes)


def narrow(
    context: Context, snapshot: ClusterSnapshot, project: str, queues: Sequence[str]
) -> ClusterSnapshot:
    """The runs of a project, as in `narrow_to_project`. The history is read only if needed."""
    known = {}
    if not all(row.run.tags for row in snapshot.runs):  # waiting runs that were not described
        names = context.history.names(context.env)
        ids = [row.run.job_id for row in snapshot.runs if not row.run.tags]
        known = {each.job_id: each.project for job_id in ids for each in names.named(job_id)}
    return narrow_to_project(snapshot, project, known, queues)


def poll_queues(context: Context) -> tuple[ClusterSnapshot, str]:
    """Poll all queues with their runs, and hosts if a run waits.

    If ListJobs is denied, returns only the queues, and the reason. Raises the errors of
    DescribeJobQueues.
    """
    computes = _open_computes(context)
    computes.queues()  # raises errors that do not concern runs
    try:
        return _open_poller(context, computes).poll(with_hosts=False, with_usage=False), ""
    except AccessError as error:
        states = computes.poll((), (), with_hosts=False).queues
        rows = tuple(QueueRow(name, {}, state=state) for name, state in states.items())
        return ClusterSnapshot(int(context.clock.now() * 1000), rows), describe_failure(
            "batch:ListJobs", error
        )


class HostPrices:
    """Adds prices to the hosts of a snapshot.

    AWS is asked once for each instance type. The price of `local` is in batchml.toml.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[str, Decimal] = {}
        self._asked: set[str] = set()

    def add_to(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """Add the known prices. Raises nothing: a price that AWS does not give stays unknown."""
        if not snapshot.hosts:
            return snapshot
        items = sorted({price_item(row) for row in snapshot.hosts if row.host.type})
        self._ask([item for item in items if item not in self._asked])
        return replace(snapshot, hosts=with_prices(snapshot.hosts, self._known))

    def _ask(self, items: Sequence[str]) -> None:
        if not items:
            return
        self._asked.update(items)
        environment = self._context.settings.environment
        if self._context.settings.is_local:
            if environment.usd_per_hour:
                usd = Decimal(str(environment.usd_per_hour))
                self._known |= dict.fromkeys(items, usd)
            return
        price_table = self._context.prices.ask(environment.region, items)
        # Spot prices differ by zone: take the dearest.
        self._known |= {item: price.high for item, price in price_table.prices.items()}
