"""Find runs in AWS Batch and in the history: by job ids, by words of a command line."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from batchml.context import Context
from batchml.errors import BatchmlError, NotFound
from batchml.model.fallback import MOVED_MARK
from batchml.model.numbering import format_ranges, original_id, original_numbers, rerun_id
from batchml.model.run import (
    NOT_KNOWN,
    NOT_KNOWN_WORDS,
    Record,
    Run,
    first_child_id,
    first_start,
    has_begun,
)
from batchml.runs.names import ProjectScope, bare_id, select_run
from batchml.runs.search import FoundRun, keep_ends, run_from_history

if TYPE_CHECKING:
    from batchml.aws.batch.jobs import JobApi
    from batchml.history import HistoryRecords

MAX_CHILDREN = 32  # of an array, whose logs are read


def check_queues(api: "JobApi", queues: Iterable[str]) -> None:
    """Raise NotFound for the first of these queues that does not exist: one call at most."""
    queues = list(queues)
    known = api.queues() if queues else []
    for queue in queues:
        if queue not in known:
            hint = "Without --queue the runs of all queues are shown."
            raise NotFound("Job queue", queue, known, hint)


def load_runs(context: Context, job_ids: Sequence[str]) -> list[FoundRun]:
    """The runs with these ids, in their order, from AWS Batch or the history: a hundred in a call.

    Raises NotFound for the first run that is in neither.
    """
    history, now = context.history, int(context.clock.now() * 1000)
    records = history.records(context.env)
    described = context.describe(list(dict.fromkeys(job_ids)))
    known = {job_id: records.get(job_id) for job_id in {*job_ids, *described}}
    keep_ends(history, filter(None, map(known.get, described)), described)
    found = []
    for job_id in job_ids:
        run, record = described.get(job_id), known[job_id]
        if run is not None and record is not None and record.failures:
            run = msgspec.structs.replace(run, failures=record.failures)
        elif run is not None:
            run = with_child_failures(context, run)
        if record is not None:
            run = run or run_from_history(context.batch, record, now)
        elif run is None:
            raise unknown_run(context, job_id)
        found.append(FoundRun(run, record or _record_of_child(records, job_id)))
    return found


# The module with the function `with_trials(context, runs)`. It is imported only for runs of sweeps.
_TRIALS = "batchml.sweeps.trials"


def with_trials(context: Context, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs; trials of sweeps with their own parameters, which their requests do not have."""
    if not any(each.sweep for each in runs):
        return list(runs)
    found: list[FoundRun] = import_module(_TRIALS).with_trials(context, runs)
    return found


def with_child_failures(context: Context, run: Run) -> Run:
    """The run; an array that failed with the outcomes of its children, which takes one call."""
    if not run.children or run.failures:
        return run
    from batchml.aws.batch import jobs

    return jobs.with_child_failures(context.connect(), run)


def with_first_start(context: Context, found: FoundRun) -> FoundRun:
    """The run; an array with the time when its first child started, which takes one call."""
    run = found.run
    if run is None or run.started_at or not has_begun(run):
        return found
    child = first_child_id(run.job_id)
    try:
        start = first_start(context.describe([child]).get(child))
    except BatchmlError:  # the start is optional information
        return found
    if start and run.status.is_terminal and found.record is not None:
        with suppress(OSError):  # a full disk: the next call tries again
            context.history.add_starts({run.job_id: start})
    return FoundRun(msgspec.structs.replace(run, started_at=start), found.record)


def unknown_run(context: Context, job_id: str) -> NotFound:
    """The error for a job id that AWS Batch does not return."""
    if context.history.records(context.env).get(bare_id(job_id)) is not None:
        hint = NOT_KNOWN_WORDS
    else:
        hint = f"It is {NOT_KNOWN}, and was not submitted from here. `batchml ls` shows the runs."
    return NotFound("Run", job_id, [], describe_parts(context, job_id) or hint)


def describe_parts(context: Context, job_id: str) -> str:
    """For a child or node that does not exist, a sentence with the numbers that exist; else ""."""
    whole = bare_id(job_id)
    run = context.describe([whole]).get(whole) if whole != job_id else None
    if run is None:
        return ""
    size, what = (run.array_size, "children") if ":" in job_id else (run.nodes, "nodes")
    if size:
        return f"The {what} of {run.name} are 0 to {size - 1}."
    return f"{run.name} has no {what}: leave out {job_id.removeprefix(whole)}."


def _record_of_child(records: "HistoryRecords", job_id: str) -> Record | None:
    """The record of a child or node: the request of the whole run, without the run's end."""
    whole = records.get(bare_id(job_id))
    if whole is None:
        return None
    return msgspec.structs.replace(
        whole,
        job_id=job_id,
        status="",
        outcome="",
        metrics={},
        ranges={},
        measured=False,
        cost=None,
    )


def load_children(context: Context, found: FoundRun) -> list[FoundRun]:
    """The first `MAX_CHILDREN` children of an array, in one call; none for any other run."""
    size = found.run.array_size if found.run else 0
    ids = [f"{found.job_id}:{index}" for index in range(min(size, MAX_CHILDREN))]
    return with_trials(context, load_runs(context, ids))


# --- Runs by the words of a command line ----------------------------------------------------------


# Modules with a function `suggest(context, word)`, which returns an error with a better message if
# the word names something else. They are imported only for a word that names no run.
_SUGGESTERS = ("batchml.sweeps.stores",)


def select(context: Context, words: Sequence[str]) -> list[str]:
    """The job ids of the runs that the words name, in their order; ListJobs is called once at most.

    Raises NotFound, UsageError.
    """
    if not words:
        return []

    @cache
    def listed() -> list[tuple[str, str]]:
        runs = [run for queue in context.batch.queues() for run in context.batch.list_recent(queue)]
        runs.sort(key=lambda run: run.created_at or 0, reverse=True)
        return [(run.job_id, run.job_name or run.name) for run in runs]

    def find_projects(job_ids: Sequence[str]) -> dict[str, str]:
        return {job_id: run.project for job_id, run in context.describe(job_ids).items()}

    history = context.history.names(context.env)
    scope = ProjectScope(context.project, find_projects)
    found = []
    for word in words:
        try:
            job_id = _to_aws_child(context, word, select_run(word, history, listed, scope))
            found.append(current_job_id(context, job_id))
        except NotFound as error:
            others = (import_module(name).suggest(context, word) for name in _SUGGESTERS)
            raise next(filter(None, others), error) from None
    return found


def current_job_id(context: Context, job_id: str) -> str:
    """The job id of a run, also after it has moved to another queue as another job."""
    names = context.history.names(context.env).named(bare_id(job_id))
    if not any(name.fallback for name in names):
        return job_id
    from batchml.runs.fallback.watch import follow_move

    return follow_move(context, names, job_id)


def _to_aws_child(context: Context, word: str, job_id: str) -> str:
    """The id of a child in AWS Batch, from its id with the number that it had in the first array.

    The numbers differ in partial reruns of arrays. At most one call. Raises NotFound for a child
    that was not run again.
    """
    whole, colon, _ = job_id.partition(":")
    if not colon:
        return job_id
    record = context.history.records(context.env).get(whole)
    run = None if record else context.describe([whole]).get(whole)
    first = original_numbers(run, record)
    own = rerun_id(job_id, first)
    if own is None:
        hint = f"It runs these children of the first array again: {format_ranges(first[:200])}."
        raise NotFound("Child", word, [], hint)
    return own


def display_id(context: Context, job_id: str) -> str:
    """The id of a child for users: with its number in the first array."""
    record = context.history.records(context.env).get(bare_id(job_id))
    return original_id(job_id, original_numbers(None, record))


def describe_runs(context: Context, job_ids: Sequence[str]) -> dict[str, Run]:
    """The runs with these ids, in their order: one call for a hundred.

    Raises NotFound for the first id that AWS Batch does not return.
    """
    job_ids = list(dict.fromkeys(job_ids))
    found = context.describe(job_ids)
    if any(run.status_reason.startswith(MOVED_MARK) for run in found.values()):
        from batchml.runs.fallback.watch import with_moves

        found = with_moves(context, found)
    for job_id in job_ids:
        if job_id not in found:
            raise unknown_run(context, job_id)
    return {job_id: found[job_id] for job_id in job_ids}
