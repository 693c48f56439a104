"""Restarts in place of a run of ranks: which lines of which log tell of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchml.errors import BatchmlError
from batchml.ops.restarts import PATTERN, Restart, restarts

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.run import Run
    from batchml.ops.using import Node

READING_TIME = 5.0  # seconds that the log is searched before the rest is left


def restarts_of(
    place: "Place", run: "Run | None", nodes: "Sequence[Node]"
) -> tuple[list[Restart], bool]:
    """Those of all attempts, and whether the whole log was searched. One call, and more for a long
    log; for a run without ranks none. Who may not read logs sees none: they are an extra."""
    from batchml.aws.batch.jobs import LiveApi, Mark
    from batchml.model.outcome import is_torchrun

    if run is None or run.node_index is not None or not is_torchrun(run):
        return [], True
    main = next((each.run for each in nodes if each.run.node_index == 0), None)
    run = main or run
    streams = [each.log_stream for each in run.attempts if each.log_stream]
    if not streams:
        return [], True
    begun = min((each.started_at or 0 for each in run.attempts), default=0)
    end = place.clock.monotonic() + READING_TIME

    def has_time() -> bool:
        return place.clock.monotonic() < end

    found: list[Mark] = []
    live = LiveApi(place.connect())
    try:
        for mark in live.matching(run.log_group, streams, begun, PATTERN, has_time):
            found.append(mark)
    except BatchmlError:
        return restarts(found), False
    return restarts(found), has_time()
