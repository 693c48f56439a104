"""Explain a run for `batchml explain` and `RunHandle.explain()`, with history and local files."""

from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import BatchmlError
from batchml.explain.ask import ExplainedRun, explain_from_aws
from batchml.explain.missing import LocalFindings, MissingItem, images_with, search_folder
from batchml.explain.suggest import CommandWriter, own_image
from batchml.explain.waiting import RUNS, add_waiting_workers
from batchml.jobs.find import find_source, load_job
from batchml.model.group import HELD_TAG
from batchml.model.record import Record
from batchml.model.run import Run
from batchml.resources import shipped
from batchml.runs.find import select
from batchml.runs.groups.members import parts_of
from batchml.runs.names import bare_id
from batchml.runs.rerun.resubmit import RenumberedDiagnosis
from batchml.runs.search import FoundRun

_WEEK = 7 * 86_400  # seconds


def explain_run(context: Context, word: str) -> ExplainedRun:
    """Explain the run that `word` selects.

    Raises NotFound, UsageError, and AWS's error if it refuses to describe the run.
    """
    (job_id,) = select(context, [word])
    records = context.history.remembered()
    record = records.get(job_id)
    whole = record or records.get(bare_id(job_id))
    words = CommandWriter(context.env, whole.job if whole is not None else "")

    def search_here(run: Run, missed: MissingItem) -> LocalFindings:
        return _search(context, whole, run, missed)

    diagnosis = RenumberedDiagnosis(context.connect(), bare_id(job_id), whole)

    def held_runs() -> list[str]:
        return own_held_runs(records, context.env, context.clock.now())

    explained = explain_from_aws(
        diagnosis, job_id, record, words, context.clock, search_here, held_runs
    )
    explained = add_workers(context, explained, record, words)
    explanation = diagnosis.named(explained.explanation)
    return replace(explained, explanation=explanation, note=refused_submission(context, word))


def own_held_runs(records: Iterable[Record], env: str, now: float) -> list[str]:
    """Job ids of this week's notebooks and `alloc`s whose end was not seen. Pure.

    `records`: the newest first. `now`: in seconds.
    """
    new = takewhile(lambda each: each.at > (now - _WEEK) * 1000, records)
    own = (each for each in new if HELD_TAG in each.tags and each.env == env)
    return [each.job_id for each in own if not each.has_ended]


def add_workers(
    context: Context, explained: ExplainedRun, record: Record | None, words: CommandWriter
) -> ExplainedRun:
    """Add the waiting workers of a group run whose head runs; other runs need no call."""
    if explained.explanation.cause != RUNS:
        return explained
    try:
        parts = parts_of(context, FoundRun(explained.run, record))
    except BatchmlError:  # the verdict stands without the workers
        return explained
    runs = {part.group: part.found.run for part in parts if part.found is not None}
    known = {group: run for group, run in runs.items() if run is not None}
    explanation = add_waiting_workers(explained.explanation, known, words)
    return replace(explained, explanation=explanation, calls=explained.calls + bool(parts))


def _search(
    context: Context, record: Record | None, run: Run, missed: MissingItem
) -> LocalFindings:
    """Search the run's folder and the images here for a file or module that the run missed."""
    folder = Path(record.folder) if record is not None and record.folder else None
    here = search_folder(folder, missed, context.home.root)
    if not missed.is_module:
        return here
    image = own_image(run.image)
    own = context.here / "images" / image / "requirements.txt"
    is_own = bool(image) and own.is_file() and own.parent != shipped("images") / image
    return replace(
        here,
        images=images_with(context.image_folders, missed.name),
        recipe=f"images/{image}/requirements.txt" if is_own else _recipe(context, record, image),
    )


def _recipe(context: Context, record: Record | None, image: str) -> str:
    """The file in the job's folder from which its image was built; empty without one."""
    if record is None or not record.job or not image:
        return ""
    folder = Path(record.job)
    try:
        source = find_source(load_job(folder).image, context.image_folders, folder)
    except (BatchmlError, OSError):
        return ""
    if source is None or not source.file or source.name != image:
        return ""
    here = context.here.resolve()
    below = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return str(below / source.file)


def refused_submission(context: Context, word: str) -> str:
    """For `@last`: a later submission that was refused, so that it is no run; empty without one."""
    if word != "@last":
        return ""
    newest = next(iter(context.history.names(context.env)), None)
    if newest is None or not newest.refused:
        return ""
    return f"The submission after it, {newest.name}, was refused: {newest.refused}"


def waiting_reason(context: Context, job_id: str) -> str:
    """Why a run waits, in the words of `explain`; empty if AWS does not answer."""
    try:
        return explain_run(context, job_id).explanation.verdict
    except BatchmlError:  # the caller can do without it
        return ""
