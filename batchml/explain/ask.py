"""Explain one run by calls of AWS, each chosen from the answers before. All I/O is here."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.diagnosis import Diagnosis
from batchml.clock import Clock
from batchml.context import Context
from batchml.errors import BatchmlError, NotFound
from batchml.explain.clues import SOON, AwsQuestion, RunObservations, lines_of_first_rank
from batchml.explain.failing import EndedRun, item_to_search, why_ended
from batchml.explain.missing import LocalFindings, MissingItem, images_with, search_folder
from batchml.explain.suggest import CommandWriter, describe_time, own_image
from batchml.explain.waiting import (
    RUNS,
    add_children,
    add_fallback,
    add_held_runs,
    add_waiting_workers,
    choose_children,
    explain_children,
    next_question,
    why_waits,
)
from batchml.jobs.find import find_source, load_job
from batchml.model.explanation import Explanation
from batchml.model.group import HELD_TAG
from batchml.model.run import (
    NOT_KNOWN,
    NOT_KNOWN_WORDS,
    JobStatus,
    OutcomeClass,
    Record,
    Run,
    classify,
    run_from_record,
    with_failures,
)
from batchml.resources import shipped_folder
from batchml.runs.find import select
from batchml.runs.groups.members import parts_of
from batchml.runs.names import bare_id
from batchml.runs.rerun.resubmit import RenumberedDiagnosis
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.log_marks import parse_mark

PAUSE = 5.0  # seconds before a question is repeated whose answer may pass

_READS_LOG = (
    OutcomeClass.APP_ERROR,
    OutcomeClass.OUT_OF_MEMORY,
    OutcomeClass.TIMED_OUT,
    OutcomeClass.UNKNOWN,
)


SearchHere = Callable[[Run, MissingItem], LocalFindings]


class ExplainedRun(Struct, frozen=True):
    """A run and its explanation, the number of calls, and questions that were not answered.

    `is_forgotten`: AWS Batch does not know the run any more.
    """

    run: Run
    explanation: Explanation
    calls: int
    unasked: tuple[str, ...] = ()
    is_forgotten: bool = False
    note: str = ""


def explain_from_aws(
    diagnosis: Diagnosis,
    job_id: str,
    record: Record | None,
    words: CommandWriter,
    clock: Clock,
    search: SearchHere = lambda *_: LocalFindings(),
    held_runs: Callable[[], Sequence[str]] = tuple,
) -> ExplainedRun:
    """Say why a run waits or failed, in at most as many calls as `diagnosis` may make.

    `record`: the history's record, which explains a run that AWS Batch has forgotten. `search`
    looks on this machine for a file that the run missed. `held_runs` lists job ids of notebooks and
    `alloc`s, which may hold the resources that a run waits for.

    Raises NotFound if neither AWS Batch nor the history knows the run, and AccessError,
    ServiceError or ServiceUnreachable if the first question is not answered.
    """
    found = diagnosis.runs([job_id])
    if found:
        run = found[0]
    elif record is None or ":" in job_id or "#" in job_id:
        raise NotFound(
            "Run", job_id, [],
            f"It is {NOT_KNOWN}, and was not submitted from here. `batchml ls` shows the runs.",
        )  # fmt: skip
    else:
        run = run_of_record(record)
    now = int(clock.now() * 1000)
    if run.status.is_terminal:
        cost = record.max_cost if record else None
        explanation = _explain_ended(diagnosis, EndedRun(run, words, max_cost=cost), search)
    elif found:
        explanation = _explain_waiting(
            diagnosis, RunObservations(run, now, words), clock, held_runs
        )
    else:
        explanation = _explain_unlisted(run, words, now)
    unasked = tuple(diagnosis.failed_calls)
    return ExplainedRun(run, explanation, diagnosis.calls, unasked, is_forgotten=not found)


def run_of_record(record: Record) -> Run:
    """A run from the history. If its end was not seen from this machine, it is SUBMITTED."""
    return run_from_record(record) or Run(
        job_id=record.job_id,
        name=record.name,
        job_name=record.job_name,
        key=record.key,
        queue=record.queue,
        status=JobStatus.SUBMITTED,
        created_at=record.at,
        array_size=record.array_size,
    )


def _explain_unlisted(run: Run, words: CommandWriter, now: int) -> Explanation:
    """A run of the history that AWS Batch does not list: not yet, or no more."""
    age = now - (run.created_at or now)
    if age < SOON and not words.is_local:
        return Explanation(
            "submitted",
            f"It was submitted {describe_time(age)} ago; AWS Batch does not show it yet.",
            is_problem=False, command=words.batchml("explain", run.job_id),
        )  # fmt: skip
    kept = "" if words.is_local else "; AWS Batch keeps ended jobs for 7 days"
    return Explanation(
        "forgotten", NOT_KNOWN_WORDS,
        (f"submitted {describe_time(age)} ago{kept}",),
        "It can be submitted again.", words.batchml("rerun", run.job_id),
    )  # fmt: skip


# --- ended runs -----------------------------------------------------------------------------


def _explain_ended(diagnosis: Diagnosis, ended: EndedRun, search: SearchHere) -> Explanation:
    outcome, local = classify(ended.run).outcome, ended.words.is_local
    if ended.run.children and (ended.run.failures or outcome is OutcomeClass.APP_ERROR):
        return _explain_children(diagnosis, ended, search)
    if outcome is OutcomeClass.DEPENDENCY_FAILED and ended.run.depends_on and diagnosis.left:
        return why_ended(replace(ended, dependencies=diagnosis.runs(ended.run.depends_on)))
    gave_up = outcome is OutcomeClass.HOST_LOST and ended.run.exit_code == TRY_ELSEWHERE
    is_lost = outcome is OutcomeClass.HOST_LOST and not gave_up
    if is_lost and ended.run.host.startswith("i-") and not local:
        return why_ended(replace(ended, machine=diagnosis.instance(ended.run.host)))
    if outcome in _READS_LOG or gave_up:
        ended = replace(ended, lines=_last_lines(diagnosis, ended.run))
        missed = item_to_search(ended)
        if missed is not None:
            ended = replace(ended, here=search(ended.run, missed))
    return why_ended(ended)


def _explain_children(diagnosis: Diagnosis, ended: EndedRun, search: SearchHere) -> Explanation:
    """Explain a failed array by a few of its failed children, whose jobs have the details."""
    failed = diagnosis.children(ended.run, JobStatus.FAILED.value)
    array = with_failures(ended.run, failed)
    chosen = choose_children(failed)
    found = diagnosis.runs([child.job_id for child in chosen]) if chosen and diagnosis.left else ()
    each = [replace(ended, run=child, array=array) for child in found]
    pairs = [(child.run, _explain_ended(diagnosis, child, search)) for child in each]
    return explain_children(array, failed, pairs) if pairs else why_ended(replace(ended, run=array))


def _last_lines(diagnosis: Diagnosis, run: Run) -> tuple[str, ...] | None:
    """The last page of the last attempt's log, without marks."""
    stream = run.attempts[-1].log_stream if run.attempts else ""
    if not stream and run.nodes and diagnosis.left:  # the main node has the log
        nodes = diagnosis.runs([f"{run.job_id}#0"])
        stream = next((each.log_stream for node in nodes for each in node.attempts[-1:]), "")
    if not stream:
        return None
    lines = diagnosis.last_lines(run.log_group, stream)
    lines = lines and tuple(line for line in lines if parse_mark(line) is None)
    return lines_of_first_rank(lines) if lines and "BATCHML_LAUNCH" in run.environment else lines


# --- waiting runs ---------------------------------------------------------------------------


def _explain_waiting(
    diagnosis: Diagnosis,
    seen: RunObservations,
    clock: Clock,
    held_runs: Callable[[], Sequence[str]],
) -> Explanation:
    """Ask until the cause is certain, or no call is left."""
    while diagnosis.left and (question := next_question(seen)) is not None:
        if question is AwsQuestion.AGAIN:
            clock.sleep(PAUSE)
        answers = _ASK[question](diagnosis, seen)
        seen = replace(seen, **answers, asked=seen.asked | {question})
        if seen.run.status.is_terminal:  # it ended meanwhile
            return why_ended(EndedRun(seen.run, seen.words))
    # Count these as asked, so that no cause waits for their answers.
    found = why_waits(replace(seen, asked=seen.asked | {AwsQuestion.FAILED, AwsQuestion.CHILD}))
    if found.cause == "full":
        found = add_held_runs(found, _held_runs(diagnosis, seen, held_runs()), seen.words)
    found = add_fallback(found, seen)
    if seen.array is None:
        return found
    child = f"child {seen.run.array_index} of {seen.array.array_size}, one of the waiting children"
    found = replace(found, evidence=(child, *found.evidence))
    return add_children(seen.array, seen.failed, found)


def _held_runs(
    diagnosis: Diagnosis, seen: RunObservations, known: Sequence[str]
) -> tuple[Run, ...]:
    """Notebooks and `alloc`s that hold what a run waits for. `known`: job ids of candidates.

    On `local` all queues share the machine; in AWS only held runs of the run's own queue count.
    """
    listed = diagnosis.running(seen.run.queue) if diagnosis.left > 1 else ()
    ids = tuple(dict.fromkeys((*known, *listed)))
    try:
        runs = diagnosis.runs(ids) if ids and diagnosis.left else ()
    except BatchmlError:  # the verdict stands without them
        return ()
    own = [run for run in runs if seen.words.is_local or run.queue == seen.run.queue]
    return tuple(run for run in own if HELD_TAG in run.tags and run.status.holds_resources)


def _child(diagnosis: Diagnosis, seen: RunObservations) -> dict[str, Any]:
    """Explain a waiting child instead of its array, with the resources that the array requests."""
    child = next(iter(diagnosis.children(seen.run, JobStatus.RUNNABLE.value)), None)
    if child is None:
        return {}
    merged = replace(
        seen.run,
        job_id=child.job_id,
        status=child.status,
        status_reason=child.status_reason,
        created_at=child.created_at or seen.run.created_at,
        array_index=child.array_index,
        array_size=0,
        children={},
        depends_on=(),
    )
    return {"run": merged, "array": seen.run}


def _again(diagnosis: Diagnosis, seen: RunObservations) -> dict[str, Any]:
    found = diagnosis.runs([seen.run.job_id])
    return {"run": found[0]} if found else {}


def _head(diagnosis: Diagnosis, seen: RunObservations) -> dict[str, Any]:
    front = seen.snapshot.front if seen.snapshot else ()
    return {"head": next(iter(diagnosis.runs([front[0].job_id])), None)} if front else {}


def _instance_types(seen: RunObservations) -> tuple[str, ...]:
    """The types that the queue's compute environments name; none if AWS Batch chooses types."""
    named = {name for each in seen.usable for name in each.instance_types}
    chosen_by_aws = {"optimal", "default_x86_64", "default_arm64"}
    is_open = bool(named & chosen_by_aws) or any(not each.instance_types for each in seen.usable)
    return () if is_open else tuple(sorted(named))


def _types(diagnosis: Diagnosis, seen: RunObservations) -> dict[str, Any]:
    names = _instance_types(seen)
    return {"types": diagnosis.host_types(names)} if names else {}


def _hosts(diagnosis: Diagnosis, seen: RunObservations) -> dict[str, Any]:
    """Hosts of the compute environment with the most desiredvCpus."""
    known = [each for each in seen.usable if each.cluster]
    if not known:
        return {}
    most = max(known, key=lambda each: each.desired_vcpus)
    return {"hosts": diagnosis.hosts(most.cluster)}


_ASK: dict[AwsQuestion, Callable[[Diagnosis, RunObservations], dict[str, Any]]] = {
    AwsQuestion.DEPENDENCIES: lambda ask, seen: {"dependencies": ask.runs(seen.run.depends_on)},
    AwsQuestion.FAILED: lambda ask, seen: {
        "failed": ask.children(seen.run, JobStatus.FAILED.value)
    },
    AwsQuestion.CHILD: _child,
    AwsQuestion.QUEUE: lambda ask, seen: {"queue": ask.queue(seen.run.queue)},
    AwsQuestion.ENVIRONMENTS: lambda ask, seen: {
        "environments": ask.environments(seen.queue.environments if seen.queue else ()) or ()
    },
    AwsQuestion.STOCK: lambda ask, seen: {
        "stock": ask.consumable(next(iter(seen.run.consumables)))
    },
    AwsQuestion.SNAPSHOT: lambda ask, seen: {"snapshot": ask.snapshot(seen.run.queue)},
    AwsQuestion.HEAD: _head,
    AwsQuestion.TYPES: _types,
    AwsQuestion.IMAGE: lambda ask, seen: {
        "architecture": ask.architecture(next(e.ami for e in seen.environments if e.ami))
    },
    AwsQuestion.ACTIVITIES: lambda ask, seen: {
        "activities": ask.activities([each.name for each in seen.usable])
    },
    AwsQuestion.HOSTS: _hosts,
    AwsQuestion.AGAIN: _again,
}


# --- service --------------------------------------------------------------------------------------
# Explain a run for `batchml explain` and `RunHandle.explain()`, with history and local files.


_WEEK = 7 * 86_400  # seconds


def explain_run(context: Context, word: str) -> ExplainedRun:
    """Explain the run that `word` selects.

    Raises NotFound, UsageError, and AWS's error if it refuses to describe the run.
    """
    (job_id,) = select(context, [word])
    records = context.history.records()
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
    own = context.folder / "images" / image / "requirements.txt"
    is_own = bool(image) and own.is_file() and own.parent != shipped_folder("images") / image
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
    here = context.folder.resolve()
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
