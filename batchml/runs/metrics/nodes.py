"""Read what the nodes of a run use from their logs, in few calls."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchml.aws.batch.jobs import RANKS, USAGE, LiveApi, LogMark
from batchml.errors import BatchmlError
from batchml.model.outcome import is_supervised, restarts_in_place
from batchml.runs.find import measure
from batchml.runs.metrics.usage import PATTERN, NodeUsage, Restart, UsageSample, collect, restarts

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.runs.find import RunMetrics
    from batchml.runs.groups.members import GroupMember
    from batchml.runs.metrics.usage import NodeUsage
    from batchml.runs.search import FoundRun

MOST = 64  # containers of one run whose state is asked for: with the run itself one call
WINDOW = 600_000  # ms: the part of a log, at its end, that is read where the whole is not needed
READING_TIME = 5.0  # seconds that logs are read before the rest is left unread


def nodes_of(
    context: "Context", found: "FoundRun", parts: "Sequence[GroupMember]"
) -> list[NodeUsage]:
    """The nodes of a multi-node run, or the head and workers of a group run, that have begun.

    For one node that node; none for any other run. One call at most.
    """
    run = found.run
    if run is None or not (run.started_at or run.attempts):
        return []
    if run.node_index is not None:
        return [NodeUsage(f"node {run.node_index}", run)] if run.attempts else []
    known = {"head": run} if parts else {}
    asked = {f"node {i}": f"{run.job_id}#{i}" for i in range(run.nodes)}
    for part in parts:
        workers = part.found.run if part.found else None
        if workers is None:
            continue
        if workers.array_size:
            size = range(workers.array_size)
            asked |= {f"{part.group} {i}": f"{workers.job_id}:{i}" for i in size}
        elif workers.attempts:
            known[part.group] = workers
    asked = dict(list(asked.items())[:MOST])
    told = context.describe(list(asked.values())) if asked else {}
    known |= {name: told[job_id] for name, job_id in asked.items() if job_id in told}
    return [NodeUsage(name, each) for name, each in known.items() if each.attempts]


def uses_of(
    context: "Context", nodes: Sequence[NodeUsage], whole: bool = False
) -> list[UsageSample]:
    """The newest usage of these nodes, and curves: of the last ten minutes, or of the `whole` run.

    One call for a hundred streams, and the calls that read them. A user without access to logs gets
    states alone.
    """
    if not nodes:
        return []
    now = int(context.clock.now() * 1000)
    live = LiveApi(context.connect())
    end = context.clock.monotonic() + READING_TIME

    def marks() -> Iterator[LogMark]:
        for group in sorted({node.run.log_group for node in nodes}):
            runs = [node.run for node in nodes if node.run.log_group == group]
            tried = [one for run in runs for one in (run.attempts if whole else run.attempts[-1:])]
            streams = sorted({one.log_stream for one in tried if one.log_stream})
            begun = min((one.started_at or 0 for one in tried), default=0)
            over = all(run.status.is_terminal for run in runs)
            last = max((one.stopped_at or now for one in tried), default=now) if over else now
            since = begun if whole else max(begun, last - WINDOW)
            for mark in live.read_marks(group, streams, since, (USAGE, RANKS)):
                yield mark
                if context.clock.monotonic() > end:
                    return

    seen: list[LogMark] = []
    try:
        for mark in marks():
            seen.append(mark)
    except BatchmlError:
        pass  # usage is optional information
    return collect(nodes, seen, now)


def measure_gang(
    context: "Context", run: "Run", nodes: Sequence[NodeUsage], record: "Record | None"
) -> "RunMetrics":
    """The metrics of any run, like `measure`; for ranks that train together those of the main node,
    which has rank 0.
    """
    from msgspec.structs import replace

    if nodes and is_supervised(run):
        main = next((each.run for each in nodes if each.run.node_index in (0, None)), None)
        run = replace(run, attempts=main.attempts) if main else run
    return measure(context, run, record)


# --- Restarts of ranks in place -------------------------------------------------------------------


def restarts_of(
    context: "Context", run: "Run | None", nodes: "Sequence[NodeUsage]"
) -> tuple[list[Restart], bool]:
    """The restarts of all attempts, and whether the whole log was searched.

    One call, more for a long log; none for a run without ranks. A user without access to logs gets
    none.
    """

    if run is None or run.node_index is not None or not restarts_in_place(run):
        return [], True
    main = next((each.run for each in nodes if each.run.node_index == 0), None)
    run = main or run
    streams = [each.log_stream for each in run.attempts if each.log_stream]
    if not streams:
        return [], True
    begun = min((each.started_at or 0 for each in run.attempts), default=0)
    end = context.clock.monotonic() + READING_TIME

    def has_time() -> bool:
        return context.clock.monotonic() < end

    found: list[LogMark] = []
    live = LiveApi(context.connect())
    try:
        for mark in live.filter_lines(run.log_group, streams, begun, PATTERN, has_time):
            found.append(mark)
    except BatchmlError:
        return restarts(found), False
    return restarts(found), has_time()
