"""Who holds what a run waits for, and where it goes when it has waited long enough. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from batchml.model.explanation import Explanation
from batchml.model.fallback import FALLBACK_TAG
from batchml.model.group import SEAT_TAG
from batchml.model.names import short_id
from batchml.model.run import Run
from batchml.ops.explain.seen import Seen
from batchml.ops.explain.words import Words, count
from batchml.ops.queueing import move_of


def with_seats(found: Explanation, seats: Sequence[Run], words: Words) -> Explanation:
    """A verdict on a run that waits for room, with the notebooks and `alloc`s that hold some.

    These go on until somebody ends them; the command ends the one that holds most.
    """
    if not seats:
        return found
    ordered = sorted(seats, key=lambda run: (-run.gpus, -_vcpus(run), run.job_id))
    told = [_holds(run) for run in ordered]
    more = f" and {len(told) - 1} more like it" if len(told) > 1 else ""
    return replace(
        found,
        verdict=f"It is next. What it needs is in use: {told[0]}{more}.",
        evidence=(*told, *found.evidence),
        fix="End it, if nobody uses it.",
        command=_end(ordered[0], words),
    )


def with_move(found: Explanation, seen: Seen) -> Explanation:
    """Of a run that may move to another queue: when it does."""
    move = move_of(seen.run, seen.now)
    if not move:
        return found
    queue = seen.run.tags[FALLBACK_TAG].rpartition(":")[0]
    told = move.replace(queue, f"the queue {seen.words.bare(queue)}", 1)
    return replace(found, evidence=(*found.evidence, f"it {told}"))


def _holds(run: Run) -> str:
    gpus = f", {count(run.gpus, 'GPU')}" if run.gpus else ""
    who = f"{run.tags[SEAT_TAG]} {short_id(run.job_id)}"
    return f"{who} holds {count(_vcpus(run), 'vCPU')}{gpus}"


def _vcpus(run: Run) -> int:
    return run.vcpus * max(1, run.nodes)


def _end(run: Run, words: Words) -> str:
    if run.tags[SEAT_TAG] == "notebook":
        return words.batchml("notebook", short_id(run.job_id), "--end")
    return words.batchml("cancel", short_id(run.job_id))
