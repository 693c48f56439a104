"""Why a run waits or failed, for the command and for `RunHandle.explain()`."""

from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchml.client.place import Place
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.ops.explain.folder import Here, Missed
    from batchml.ops.explain.look import Told
    from batchml.ops.explain.words import Words

_WEEK = 7 * 86_400  # seconds


def explain_run(place: "Place", word: str) -> "Told":
    """Explain the run that `word` means.

    Raises NotFound, UsageError, and what AWS answers when it will not say anything of the run.
    """
    from batchml.client.renumbered import Renumbered
    from batchml.client.runs import select
    from batchml.ops.explain.look import explain
    from batchml.ops.explain.words import Words
    from batchml.ops.select import bare_id

    (job_id,) = select(place, [word])
    records = place.history.remembered()
    record = records.get(job_id)
    whole = record or records.get(bare_id(job_id))
    words = Words(place.env, whole.job if whole is not None else "")

    def look_here(run: "Run", missed: "Missed") -> "Here":
        return _look(place, whole, run, missed)

    diagnosis = Renumbered(place.connect(), bare_id(job_id), whole)

    def seats() -> list[str]:
        return own_seats(records, place.env, place.clock.now())

    told = explain(diagnosis, job_id, record, words, place.clock, look_here, seats)
    told = with_waiting(place, told, record, words)
    explanation = diagnosis.named(told.explanation)
    return replace(told, explanation=explanation, note=refused_since(place, word))


def own_seats(records: "Iterable[Record]", env: str, now: float) -> list[str]:
    """The notebooks and `alloc`s of this week that were not seen to end: job ids. Pure.

    `records` with the newest first; `now` in seconds.
    """
    from batchml.model.group import SEAT_TAG

    new = takewhile(lambda each: each.at > (now - _WEEK) * 1000, records)
    own = (each for each in new if SEAT_TAG in each.tags and each.env == env)
    return [each.job_id for each in own if not each.has_ended]


def with_waiting(place: "Place", told: "Told", record: "Record | None", words: "Words") -> "Told":
    """Of a gang whose head runs, what its workers wait for; nothing is asked for any other run."""
    from batchml.client.gang_parts import parts_of
    from batchml.errors import BatchmlError
    from batchml.ops.explain.workers import RUNS, with_workers
    from batchml.ops.search import Found

    if told.explanation.cause != RUNS:
        return told
    try:
        parts = parts_of(place, Found(told.run, record))
    except BatchmlError:  # an extra
        return told
    runs = {part.group: part.found.run for part in parts if part.found is not None}
    known = {group: run for group, run in runs.items() if run is not None}
    explanation = with_workers(told.explanation, known, words)
    return replace(told, explanation=explanation, calls=told.calls + bool(parts))


def _look(place: "Place", record: "Record | None", run: "Run", missed: "Missed") -> "Here":
    """What the folder and the images here tell of what a run missed."""
    from batchml.ops.explain.folder import images_with, look
    from batchml.ops.explain.words import own_image
    from batchml.resources import shipped

    folder = Path(record.folder) if record is not None and record.folder else None
    here = look(folder, missed, place.home.root)
    if not missed.is_module:
        return here
    image = own_image(run.image)
    own = place.here / "images" / image / "requirements.txt"
    is_own = bool(image) and own.is_file() and own.parent != shipped("images") / image
    return replace(
        here,
        images=images_with(place.image_folders, missed.name),
        recipe=f"images/{image}/requirements.txt" if is_own else _recipe(place, record, image),
    )


def _recipe(place: "Place", record: "Record | None", image: str) -> str:
    """The file of the job's own folder that its image was made from; empty if there is none."""
    from batchml.errors import BatchmlError
    from batchml.ops.jobs import load_job
    from batchml.ops.sources import find_source

    if record is None or not record.job or not image:
        return ""
    folder = Path(record.job)
    try:
        source = find_source(load_job(folder).image, place.image_folders, folder)
    except (BatchmlError, OSError):
        return ""
    if source is None or not source.file or source.name != image:
        return ""
    here = place.here.resolve()
    below = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return str(below / source.file)


def refused_since(place: "Place", word: str) -> str:
    """Of `@last`: that there was a submission after it, which was refused and is no run."""
    if word != "@last":
        return ""
    newest = next(iter(place.history.names(place.env)), None)
    if newest is None or not newest.refused:
        return ""
    return f"The submission after it, {newest.name}, was refused: {newest.refused}"
