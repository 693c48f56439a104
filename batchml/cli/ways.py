"""What can be done next with a run, as it is typed."""

from typing import TYPE_CHECKING

from batchml.model.names import short_id
from batchml.model.run import JobStatus
from batchml.ops.select import bare_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchml.client.place import Place
    from batchml.model.run import Run
    from batchml.ops.search import Found


def word_of(place: "Place", job_id: str) -> str:
    """The shortest that names a run on the command line, and `--env` where that is needed."""
    whole = bare_id(job_id)
    return short_id(whole) + job_id[len(whole) :] + place.option


def ways_on(place: "Place", found: "Found") -> "Iterator[tuple[str, str]]":
    """What a user may want to know or do next, each with its command."""
    from batchml.ops.rerun import first_id, first_numbers

    run = found.run
    job_id = first_id(found.job_id, first_numbers(run, found.record))
    word = word_of(place, job_id)
    if found.cost is None and not place.settings.is_local:
        yield "cost", f"batchml cost {word}"
    if found.sweep:
        yield "sweep", f"batchml sweeps show {found.sweep}{place.option}"
    if run is None:
        if found.record is not None and not found.sweep and not found.is_worker:
            yield "again", f"batchml rerun {word}"
        return
    has_begun = _has_begun(run)
    if has_begun and (place.settings.is_local or outputs_of(place, run)):
        yield "copy", f"batchml get {word}"
    if run.status.is_terminal:
        is_again = not (found.sweep or found.is_worker)
        yield from _after_the_end(run, word, has_begun, is_again=is_again)
        if is_again and _has_saved(place, run):
            yield "go on", f"batchml rerun --resume {word}"
        return
    if has_begun:
        yield "follow", f"batchml logs -f {word}"
    else:
        yield "why", f"batchml explain {word}"
    yield "end", f"batchml cancel {word_of(place, job_id.partition('#')[0])}"


def _after_the_end(
    run: "Run", word: str, has_begun: bool, *, is_again: bool
) -> "Iterator[tuple[str, str]]":
    if has_begun:
        yield "printed", f"batchml logs {word}"
    if run.status is JobStatus.FAILED:
        yield "why", f"batchml explain {word}"
    if is_again and run.node_index is None:
        failed = " --failed" if run.children.get("FAILED") else ""
        yield "again", f"batchml rerun {word}{failed}"


def _has_saved(place: "Place", run: "Run") -> bool:
    """Whether a run that failed left a checkpoint; in AWS, and of an array, nobody looks."""
    if run.status is not JobStatus.FAILED or not place.settings.is_local or run.children:
        return False
    from batchml.client.resuming import saved_here

    return bool(saved_here(place, run.job_id))


def _has_begun(run: "Run") -> bool:
    waiting = {status.value for status in JobStatus if status.order < JobStatus.STARTING.order}
    return bool(run.attempts or run.started_at or run.children.keys() - waiting)


def outputs_of(place: "Place", run: "Run | None", job_id: str = "") -> str:
    """Where a run's outputs are: a folder of this machine, or an s3:// URL; "" for neither.

    A folder is one with something in it; what an s3:// URL has is not asked.
    """
    folder = place.outputs(run.job_id if run else job_id)
    if folder is not None:
        return str(folder) if any(folder.iterdir()) else ""
    store = run.environment.get("BATCHML_STORE", "") if run else ""
    return f"{store}/output" if store.startswith("s3://") else ""
