"""show: what a run has to do with other runs, and which of its parts failed."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchml.client.gang_parts import Part
    from batchml.client.place import Place
    from batchml.model.run import Run
    from batchml.ops.search import Found

FAILED_SHOWN = 50  # children
NAME = 32  # cells of the name of a run that is not the one shown


def seat(place: "Place", found: "Found") -> str:
    """Of a notebook: the way back, or why it ended and what it cost."""
    from batchml.model.group import SEAT_TAG

    if found.run is None or SEAT_TAG not in found.tags:
        return ""
    from batchml.client.notebook import seat_words

    return seat_words(place, found.run)


def moving(found: "Found") -> "Mapping[str, str]":
    """Of a run with a fallback: where it may go, or from where it came."""
    from batchml.model.fallback import FALLBACK_TAG, MOVED_TAG, said_moved, said_moves

    may = found.tags.get(FALLBACK_TAG, "")
    before = found.tags.get(MOVED_TAG, "")
    if before:
        return {"moved": said_moved(may, before)}
    run = found.run
    waits = may and run is not None and not (run.started_at or run.status.is_terminal)
    return {"moves": said_moves(may)} if waits else {}


def first_run(found: "Found") -> str:
    """Which children of another array it runs again, under the numbers that they had there."""
    from batchml.ops.rerun import first_numbers

    first = first_numbers(found.run, found.record)
    if not first or ":" in found.job_id:
        return ""
    what = "child" if len(first) == 1 else "children"
    return f"{what} {numbers(list(first))} of a larger array, by the numbers they have there"


def resumed(place: "Place", found: "Found") -> str:
    """The run from whose checkpoints it went on."""
    from batchml.client.numbering import typed
    from batchml.model.names import short_id
    from batchml.model.record import RESUMES_TAG

    before = found.tags.get(RESUMES_TAG, "")
    if not before:
        return ""
    whole, colon, child = typed(place, before).partition(":")
    known = place.history.remembered().get(whole)
    name = f"{known.name} " if known else ""
    return f"from the checkpoint of {name}{short_id(whole)}{colon}{child}"


def needed(place: "Place", run: "Run") -> str:
    """What a run depends on, as `prep 3f2a1b0c RUNNING`; their states while it waits for them."""
    from batchml.cli.render import cut
    from batchml.errors import BatchmlError
    from batchml.model.names import short_id
    from batchml.model.run import JobStatus, state_text

    if not run.depends_on:
        return ""
    told: dict[str, Run] = {}
    with suppress(BatchmlError):  # it is an extra: the ids are known
        if run.status in (JobStatus.SUBMITTED, JobStatus.PENDING):
            told = place.describe(run.depends_on)
    kept = place.history.remembered()  # of every environment: a pipeline may have several
    parts = []
    for job_id in run.depends_on:
        known = told.get(job_id) or kept.get(job_id)
        name = f"{cut(known.name, NAME)} " if known else ""
        state = f" {state_text(told[job_id])}" if job_id in told else ""
        parts.append(f"{name}{short_id(job_id)}{state}")
    return ", ".join(parts)


def groups(parts: "Sequence[Part]") -> str:
    """The workers of a gang: `workers 3 RUNNING, 1/4 done  3f2a1b0c`, one group after the other."""
    from batchml.model.names import short_id
    from batchml.model.record import NOT_KNOWN

    said = []
    for part in parts:
        run = part.found.run if part.found else None
        state = _of_workers(run) if run else NOT_KNOWN if part.job_id else "never submitted"
        known = f" ({short_id(part.job_id)})" if part.job_id else ""
        said.append(f"{part.group} {state}{known}")
    return "; ".join(said)


def _of_workers(run: "Run") -> str:
    """Workers that the head has ended when it ended have not failed, whatever AWS Batch says."""
    from batchml.model.group import ENDED_BY_HEAD
    from batchml.model.run import array_size, state_text

    if not (run.status.is_terminal and run.is_terminated and run.status_reason == ENDED_BY_HEAD):
        return state_text(run)
    done = f", {run.children.get('SUCCEEDED', 0)} of {array_size(run)} done" if run.children else ""
    return f"ended with the run{done}"


def groups_json(parts: "Sequence[Part]") -> dict[str, Any]:
    """The same for programs; nothing for a run that is no gang."""
    found = []
    for part in parts:
        run = part.found.run if part.found else None
        found.append(
            {
                "name": part.group,
                "jobId": part.job_id or None,
                "status": run.status.value if run else None,
                "size": (run.array_size or 1) if run else part.size or None,
                "children": run.children if run else {},
            }
        )
    return {"groups": found} if found else {}


def failed_children(place: "Place", found: "Found", run: "Run") -> list[int] | None:
    """Which children of an array: one call more. None if AWS does not tell; it is an extra."""
    from batchml.aws.batch.jobs import indices
    from batchml.errors import BatchmlError
    from batchml.model.run import JobStatus
    from batchml.ops.rerun import first_numbers

    if not run.children.get("FAILED"):
        return []
    first = first_numbers(run, found.record)
    try:
        known = indices(place.connect(), run.job_id, JobStatus.FAILED)
        return [first[index] if index < len(first) else index for index in known]
    except BatchmlError:
        return None


def numbers(known: list[int]) -> str:
    from batchml.ops.rerun import ranges

    return ranges(known[:FAILED_SHOWN]) + (" ..." if len(known) > FAILED_SHOWN else "")
