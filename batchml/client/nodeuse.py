"""What the nodes of a run use: who they are, and what their logs say of it, in few calls."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from batchml.aws.batch.jobs import RANKS, USAGE, LiveApi, Mark
from batchml.errors import BatchmlError
from batchml.ops.using import Node, Use, collect

if TYPE_CHECKING:
    from batchml.client.finding import Measured
    from batchml.client.gang_parts import Part
    from batchml.client.place import Place
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.ops.search import Found

MOST = 64  # containers of one run that are looked at: with the run itself one call
WINDOW = 600_000  # ms: the end of what is read where not all of it is wanted
READING_TIME = 5.0  # seconds that logs are read before the rest is left unread


def nodes_of(place: "Place", found: "Found", parts: "Sequence[Part]") -> list[Node]:
    """The nodes of a multi-node run, or the head and the workers of a gang, which have begun; one
    node itself; of any other run none. One call at most.
    """
    run = found.run
    if run is None or not (run.started_at or run.attempts):
        return []
    if run.node_index is not None:
        return [Node(f"node {run.node_index}", run)] if run.attempts else []
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
    told = place.describe(list(asked.values())) if asked else {}
    known |= {name: told[job_id] for name, job_id in asked.items() if job_id in told}
    return [Node(name, each) for name, each in known.items() if each.attempts]


def uses_of(place: "Place", nodes: Sequence[Node], whole: bool = False) -> list[Use]:
    """What these use, the newest and as curves: of the last ten minutes, or the `whole` run.

    One call for a hundred streams and what they have; who may not read logs sees states alone.
    """
    if not nodes:
        return []
    now = int(place.clock.now() * 1000)
    live = LiveApi(place.connect())
    end = place.clock.monotonic() + READING_TIME

    def marks() -> Iterator[Mark]:
        for group in sorted({node.run.log_group for node in nodes}):
            runs = [node.run for node in nodes if node.run.log_group == group]
            tried = [one for run in runs for one in (run.attempts if whole else run.attempts[-1:])]
            streams = sorted({one.log_stream for one in tried if one.log_stream})
            begun = min((one.started_at or 0 for one in tried), default=0)
            over = all(run.status.is_terminal for run in runs)
            last = max((one.stopped_at or now for one in tried), default=now) if over else now
            since = begun if whole else max(begun, last - WINDOW)
            for mark in live.marked(group, streams, since, (USAGE, RANKS)):
                yield mark
                if place.clock.monotonic() > end:
                    return

    seen: list[Mark] = []
    try:
        for mark in marks():
            seen.append(mark)
    except BatchmlError:
        pass  # it is an extra
    return collect(nodes, seen, now)


def measure_gang(
    place: "Place", run: "Run", nodes: Sequence[Node], record: "Record | None"
) -> "Measured":
    """The metrics of any run, as `measure` has them; of one whose ranks train together, those of
    the main node, where rank 0 is.
    """
    from msgspec.structs import replace

    from batchml.client.finding import measure
    from batchml.model.outcome import is_torchrun

    if nodes and is_torchrun(run):
        main = next((each.run for each in nodes if each.run.node_index in (0, None)), None)
        run = replace(run, attempts=main.attempts) if main else run
    return measure(place, run, record)
