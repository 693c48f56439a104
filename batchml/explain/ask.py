"""Explain one run by a few calls to AWS, each chosen from the answers so far.

The other modules of this folder make no calls to AWS.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import USAGE
from batchml.aws.diagnosis import Diagnosis
from batchml.aws.pricing.prices import CHOSEN_BY_BATCH
from batchml.clock import Clock
from batchml.context import Context
from batchml.errors import BatchmlError, NotFound
from batchml.explain.clues import match_log
from batchml.explain.compute import SOON, AwsQuestion, WaitingRun
from batchml.explain.failing import items_to_search, why_ended
from batchml.explain.missing import (
    NOT_SENT,
    RESUMES,
    EndedRun,
    FileState,
    LocalFindings,
    LocalSearch,
    MissingItem,
    explain_guess,
    images_with,
    names_package,
    possible_items,
    refine,
    search_folder,
    with_findings,
)
from batchml.explain.rank_logs import program_lines
from batchml.explain.resumed import find_saved
from batchml.explain.suggest import CommandWriter, describe_time, own_image
from batchml.explain.waiting import (
    RUNS,
    add_children,
    add_fallback,
    add_held_runs,
    add_waiting_workers,
    choose_children,
    explain_children,
    explain_idleness,
    next_question,
    why_waits,
)
from batchml.jobs.find import load_job, own_image_files
from batchml.model.explanation import Explanation
from batchml.model.group import HELD_TAG, is_listed
from batchml.model.image import parse_own_image
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
from batchml.runs.groups.members import find_worker_groups
from batchml.runs.job_images import present_source
from batchml.runs.metrics.usage import (
    LEAST_IDLE,
    NodeRun,
    describe_idle_nodes,
    find_nodes,
    idle_seconds,
    read_usage,
)
from batchml.runs.names import bare_id
from batchml.runs.rerun.resubmit import RenumberedDiagnosis, find_local_checkpoints
from batchml.runs.rerun.rules import PER_RUN
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.log_marks import parse_mark

PAUSE = 5.0  # seconds before a question is repeated, because its answer may be out of date

# The log may tell the cause of these.
_READS_LOG = (
    OutcomeClass.APP_ERROR,
    OutcomeClass.OUT_OF_MEMORY,
    OutcomeClass.TIMED_OUT,
    OutcomeClass.UNKNOWN,
)


class ExplainedRun(Struct, frozen=True):
    """A run and its explanation.

    `is_forgotten`: AWS Batch does not know the run any more.
    """

    run: Run
    explanation: Explanation
    calls: int  # to AWS
    failed_calls: tuple[str, ...] = ()  # each with the reason
    is_forgotten: bool = False
    note: str = ""  # for the user, on a later submission


def explain_from_aws(
    diagnosis: Diagnosis,
    job_id: str,
    record: Record | None,
    commands: CommandWriter,
    clock: Clock,
    search: LocalSearch = lambda *_: LocalFindings(),
    held_runs: Callable[[], Sequence[str]] = tuple,
    resuming: Callable[[Run], str] = lambda _: RESUMES,
    scripts: Mapping[str, str] = MappingProxyType({}),
) -> ExplainedRun:
    """Say why a run waits or failed, in at most as many calls as `diagnosis` may make.

    `record`: the run in the history, in case AWS Batch has forgotten it. `search` looks on this
    machine for a file that the run did not find. `held_runs` lists job ids of notebooks and
    `alloc`s, which may hold the resources that a run waits for. `resuming` says what a rerun finds
    of what the run has saved. `scripts`: the bootstrap scripts of hosts, by compute environment.

    Raises NotFound if neither AWS Batch nor the history knows the run, and AccessError,
    ServiceError or ServiceUnreachable if the first call fails.
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
        run = _run_from_history(record)
    now = int(clock.now() * 1000)
    if run.status.is_terminal:
        cost = record.max_cost if record else None
        variables = variables_of_user(run, record) if record else ()
        ended = EndedRun(run, commands, max_cost=cost, variables=variables, resuming=resuming(run))
        explanation = _explain_ended(diagnosis, ended, search)
    elif found:
        waiting = WaitingRun(run, now, commands, scripts=scripts)
        explanation = _explain_waiting(diagnosis, waiting, clock, held_runs)
    else:
        explanation = _explain_unlisted(run, commands, now)
    failed_calls = tuple(diagnosis.failed_calls)
    return ExplainedRun(run, explanation, diagnosis.calls, failed_calls, is_forgotten=not found)


def _run_from_history(record: Record) -> Run:
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


def _explain_unlisted(run: Run, commands: CommandWriter, now: int) -> Explanation:
    """Explain a run of the history that AWS Batch does not describe: not yet, or not any more."""
    age = now - (run.created_at or now)
    if age < SOON and not commands.is_local:
        return Explanation(
            "submitted",
            f"It was submitted {describe_time(age)} ago; AWS Batch does not show it yet.",
            is_problem=False,
        )  # fmt: skip
    kept = "" if commands.is_local else "; AWS Batch keeps ended jobs for 7 days"
    return Explanation(
        "forgotten", NOT_KNOWN_WORDS,
        (f"submitted {describe_time(age)} ago{kept}",),
        "It can be submitted again.", commands.batchml("rerun", run.job_id),
    )  # fmt: skip


# --- ended runs -----------------------------------------------------------------------------


def _explain_ended(diagnosis: Diagnosis, ended: EndedRun, search: LocalSearch) -> Explanation:
    outcome = classify(ended.run).outcome
    if ended.run.children and (ended.run.failures or outcome is OutcomeClass.APP_ERROR):
        return _explain_children(diagnosis, ended, search)
    if outcome is OutcomeClass.DEPENDENCY_FAILED and ended.run.depends_on and diagnosis.left:
        return why_ended(replace(ended, dependencies=diagnosis.runs(ended.run.depends_on)))
    gave_up = outcome is OutcomeClass.HOST_LOST and ended.run.exit_code == TRY_ELSEWHERE
    is_lost = outcome is OutcomeClass.HOST_LOST and not gave_up
    if is_lost and ended.run.host.startswith("i-") and not ended.commands.is_local:
        return why_ended(replace(ended, instance=diagnosis.instance(ended.run.host)))
    if outcome in _READS_LOG or gave_up:
        lines = _last_lines(diagnosis, ended.run)
        marks = [mark for line in lines or () if (mark := parse_mark(line)) is not None]
        ended = replace(ended, lines=_without_marks(lines), memory=_most_memory(marks))
        ended = with_findings(ended, items_to_search(ended), search)
    return why_ended(ended)


def _explain_children(diagnosis: Diagnosis, ended: EndedRun, search: LocalSearch) -> Explanation:
    """Explain a failed array by a few of its failed children, whose jobs have the details."""
    failed = diagnosis.children(ended.run, JobStatus.FAILED.value)
    array = with_failures(ended.run, failed)
    ids = [child.job_id for child in choose_children(failed)]
    children = diagnosis.runs(ids) if ids and diagnosis.left else ()
    pairs = [
        (child, _explain_ended(diagnosis, replace(ended, run=child, array=array), search))
        for child in children
    ]
    return explain_children(array, failed, pairs) if pairs else why_ended(replace(ended, run=array))


def _last_lines(diagnosis: Diagnosis, run: Run) -> tuple[str, ...] | None:
    """The last page of the last attempt's log."""
    stream = run.attempts[-1].log_stream if run.attempts else ""
    if not stream and run.nodes and diagnosis.left:  # the main node has the log
        nodes = diagnosis.runs([f"{run.job_id}#0"])
        stream = next((each.log_stream for node in nodes for each in node.attempts[-1:]), "")
    if not stream:
        return None
    return diagnosis.last_lines(run.log_group, stream)


def _most_memory(marks: Iterable[tuple[str, Mapping[str, str]]]) -> float | None:
    """The memory of the last attempt in MiB, by the last mark that says the most; else None."""
    most = [
        words["most_memory"] for kind, words in marks if kind == USAGE and "most_memory" in words
    ]
    return float(most[-1]) if most else None


def _without_marks(lines: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return lines and program_lines([line for line in lines if parse_mark(line) is None])


# --- waiting runs ---------------------------------------------------------------------------


def _explain_waiting(
    diagnosis: Diagnosis,
    waiting: WaitingRun,
    clock: Clock,
    held_runs: Callable[[], Sequence[str]],
) -> Explanation:
    """Ask until the cause is certain, or no call is left."""
    while diagnosis.left and (question := next_question(waiting)) is not None:
        if question is AwsQuestion.AGAIN:
            clock.sleep(PAUSE)
        answers = _ASK[question](diagnosis, waiting)
        waiting = replace(waiting, **answers, asked=waiting.asked | {question})
        if waiting.run.status.is_terminal:  # it ended meanwhile
            return why_ended(EndedRun(waiting.run, waiting.commands))
    # Count these questions as asked, so that no cause waits for their answers.
    asked = waiting.asked | {AwsQuestion.FAILED, AwsQuestion.CHILD, AwsQuestion.BOOTSTRAP}
    found = why_waits(replace(waiting, asked=asked))
    if found.cause == "full":
        found = add_held_runs(found, _held_runs(diagnosis, waiting, held_runs()), waiting.commands)
    found = add_fallback(found, waiting)
    if waiting.array is None:
        return found
    index, size = waiting.run.array_index, waiting.array.array_size
    child = f"child {index} of {size}, one of the waiting children"
    found = replace(found, evidence=(child, *found.evidence))
    return add_children(waiting.array, waiting.failed, found)


def _held_runs(diagnosis: Diagnosis, waiting: WaitingRun, known: Sequence[str]) -> tuple[Run, ...]:
    """Notebooks and `alloc`s that may hold what a run waits for. `known`: job ids of candidates.

    On `local` all queues share the machine; in AWS, only held runs of the run's own queue count.
    """
    listed = diagnosis.running(waiting.run.queue) if diagnosis.left > 1 else ()
    ids = tuple(dict.fromkeys((*known, *listed)))
    try:
        runs = diagnosis.runs(ids) if ids and diagnosis.left else ()
    except BatchmlError:  # the verdict stands without them
        return ()
    own = [run for run in runs if waiting.commands.is_local or run.queue == waiting.run.queue]
    return tuple(run for run in own if HELD_TAG in run.tags and run.status.holds_resources)


def _look_into_array(diagnosis: Diagnosis, waiting: WaitingRun) -> dict[str, Any]:
    """Look at a waiting child instead of its array, with the resources that the array requests."""
    child = next(iter(diagnosis.children(waiting.run, JobStatus.RUNNABLE.value)), None)
    if child is None:
        return {}
    merged = replace(
        waiting.run,
        job_id=child.job_id,
        status=child.status,
        status_reason=child.status_reason,
        created_at=child.created_at or waiting.run.created_at,
        array_index=child.array_index,
        array_size=0,
        children={},
        depends_on=(),
    )
    return {"run": merged, "array": waiting.run}


def _ask_again(diagnosis: Diagnosis, waiting: WaitingRun) -> dict[str, Any]:
    found = diagnosis.runs([waiting.run.job_id])
    return {"run": found[0]} if found else {}


def _ask_head(diagnosis: Diagnosis, waiting: WaitingRun) -> dict[str, Any]:
    front = waiting.snapshot.front if waiting.snapshot else ()
    return {"head": next(iter(diagnosis.runs([front[0].job_id])), None)} if front else {}


def _instance_types(waiting: WaitingRun) -> tuple[str, ...]:
    """The types that the queue's compute environments name; none if AWS Batch chooses types."""
    named = {name for each in waiting.usable for name in each.instance_types}
    if named.intersection(CHOSEN_BY_BATCH) or not all(e.instance_types for e in waiting.usable):
        return ()
    return tuple(sorted(named))


def _ask_types(diagnosis: Diagnosis, waiting: WaitingRun) -> dict[str, Any]:
    names = _instance_types(waiting)
    return {"types": diagnosis.host_types(names)} if names else {}


def _ask_hosts(diagnosis: Diagnosis, waiting: WaitingRun) -> dict[str, Any]:
    """The number of hosts of the compute environment with the most desiredvCpus."""
    known = [each for each in waiting.usable if each.cluster]
    if not known:
        return {}
    largest = max(known, key=lambda each: each.desired_vcpus)
    return {"hosts": diagnosis.count_hosts(largest.cluster)}


_ASK: dict[AwsQuestion, Callable[[Diagnosis, WaitingRun], dict[str, Any]]] = {
    AwsQuestion.DEPENDENCIES: lambda ask, waiting: {
        "dependencies": ask.runs(waiting.run.depends_on)
    },
    AwsQuestion.FAILED: lambda ask, waiting: {
        "failed": ask.children(waiting.run, JobStatus.FAILED.value)
    },
    AwsQuestion.CHILD: _look_into_array,
    AwsQuestion.QUEUE: lambda ask, waiting: {"queue": ask.queue(waiting.run.queue)},
    AwsQuestion.ENVIRONMENTS: lambda ask, waiting: {
        "environments": ask.environments(waiting.queue.environments if waiting.queue else ()) or ()
    },
    AwsQuestion.STOCK: lambda ask, waiting: {
        "stock": ask.consumable(next(iter(waiting.run.consumables)))
    },
    AwsQuestion.SNAPSHOT: lambda ask, waiting: {"snapshot": ask.snapshot(waiting.run.queue)},
    AwsQuestion.HEAD: _ask_head,
    AwsQuestion.TYPES: _ask_types,
    AwsQuestion.IMAGE: lambda ask, waiting: {
        "architecture": ask.architecture(next(e.ami for e in waiting.environments if e.ami))
    },
    AwsQuestion.BOOTSTRAP: lambda ask, waiting: {
        "bootstrap": ask.bootstrap_failure(waiting.commands.env, waiting.scripted, waiting.now)
    },
    AwsQuestion.ACTIVITIES: lambda ask, waiting: {
        "activities": ask.activities([each.name for each in waiting.usable])
    },
    AwsQuestion.HOSTS: _ask_hosts,
    AwsQuestion.AGAIN: _ask_again,
}


# --- service --------------------------------------------------------------------------------------
# Explain a run for `batchml explain` and `RunHandle.explain()`, with history and local files.


_WEEK = 7 * 86_400  # seconds


def describe_resuming(context: Context, run: Run) -> str:
    """What a rerun finds of what a run has saved; RESUMES if this machine cannot see that."""
    if not context.settings.is_local or run.children or run.nodes:
        return RESUMES
    saved = find_local_checkpoints(context, run.job_id)
    if saved.step is not None:
        return RESUMES
    if not saved:
        return "it has saved nothing, so it starts from the beginning"
    files = "files that it wrote" if saved.is_kept else "files in {checkpoints}"
    return f"with --resume the {files} are there again, and the program has to load them"


def explain_run(context: Context, word: str) -> ExplainedRun:
    """Explain the run that `word` selects: a job id, a name or `@last`.

    Raises NotFound, UsageError, and AWS's error if it refuses to describe the run.
    """
    (job_id,) = select(context, [word])
    records = context.history.records()
    record = records.get(job_id)
    source_record = record or records.get(bare_id(job_id))
    folder = source_record.job if source_record is not None else ""
    commands = CommandWriter(
        context.env, folder, context.project, _image_word(source_record), _default_params(folder),
        source_record is not None and source_record.other,
    )  # fmt: skip

    def search_locally(run: Run, item: MissingItem) -> LocalFindings:
        return _search_locally(context, source_record, run, item)

    diagnosis = RenumberedDiagnosis(context.connect(), bare_id(job_id), source_record)

    def held_runs() -> list[str]:
        return own_held_runs(records, context.env, context.clock.now())

    explained = explain_from_aws(
        diagnosis, job_id, record, commands, context.clock, search_locally, held_runs,
        lambda run: describe_resuming(context, run), _bootstrap_scripts(context),
    )  # fmt: skip
    explained = add_workers(context, explained, record, commands)
    explained = add_idleness(context, explained, record, commands)
    explanation = diagnosis.named(explained.explanation)
    return replace(explained, explanation=explanation, note=refused_submission(context, word))


def _bootstrap_scripts(context: Context) -> dict[str, str]:
    described = context.settings.environment.compute
    return {name: each.bootstrap for name, each in described.items() if each.bootstrap}


def variables_of_user(run: Run, record: Record) -> tuple[str, ...]:
    """The names of the variables that are not the job's, nor set for each run anew. Pure."""
    known = record.spec.get("env", {})
    return tuple(
        name for name in run.environment if name not in known and not name.startswith(PER_RUN)
    )


def _image_word(record: Record | None) -> str:
    """The image of a run without a job, if it was made of a file of the folder; else empty."""
    word = record.spec.get("image", "") if record is not None and not record.job else ""
    return word if parse_own_image(word) is not None else ""


def _default_params(folder: str) -> dict[str, Any]:
    """The parameters of a job; none if its file cannot be read any more."""
    try:
        return load_job(Path(folder)).params if folder else {}
    except (BatchmlError, OSError):
        return {}


def own_held_runs(records: Iterable[Record], env: str, now: float) -> list[str]:
    """Job ids of this week's notebooks and `alloc`s whose end was not seen. Pure.

    `records`: the newest first. `now`: in seconds.
    """
    new = takewhile(lambda each: each.at > (now - _WEEK) * 1000, records)
    own = (each for each in new if HELD_TAG in each.tags and each.env == env)
    return [each.job_id for each in own if not each.has_ended]


def add_workers(
    context: Context, explained: ExplainedRun, record: Record | None, commands: CommandWriter
) -> ExplainedRun:
    """Add the waiting workers of a group run whose head runs; other runs need no call."""
    if explained.explanation.cause != RUNS:
        return explained
    try:
        parts = find_worker_groups(context, FoundRun(explained.run, record))
    except BatchmlError:  # the verdict stands without the workers
        return explained
    runs = {part.group: part.found.run for part in parts if part.found is not None}
    known = {group: run for group, run in runs.items() if run is not None}
    explanation = add_waiting_workers(explained.explanation, known, commands)
    return replace(explained, explanation=explanation, calls=explained.calls + bool(parts))


def add_idleness(
    context: Context, explained: ExplainedRun, record: Record | None, commands: CommandWriter
) -> ExplainedRun:
    """The explanation of a run that runs, and that has done nothing for some minutes.

    At most two calls, and none for a run that has run for less than two minutes.
    """
    run, now = explained.run, int(context.clock.now() * 1000)
    is_old = now - (run.started_at or now) >= LEAST_IDLE
    if explained.explanation.cause != RUNS or not is_old or (not run.attempts and not run.nodes):
        return explained
    try:
        nodes = find_nodes(context, FoundRun(run, record), ()) or [NodeRun(run.name, run)]
    except BatchmlError:  # the verdict stands without it
        return explained
    uses = read_usage(context, nodes)
    explanation = explain_idleness(
        explained.explanation, run, idle_seconds(uses), describe_idle_nodes(uses), commands
    )
    calls = explained.calls + 1 + bool(run.nodes)
    return replace(explained, explanation=explanation, calls=calls)


def _search_locally(
    context: Context, record: Record | None, run: Run, item: MissingItem
) -> LocalFindings:
    """Search the run's folder, and images on this machine, for what the run did not find."""
    folder = Path(record.folder) if record is not None and record.folder else None
    findings = search_folder(folder, item, context.home.root)
    if not item.is_module:
        is_absent = findings.state is FileState.ABSENT
        saved = find_saved(context, record, run, item.name) if is_absent else None
        return replace(findings, saved=saved)
    here = Path(record.job or record.folder) if record is not None else Path()
    files = own_image_files(here) if record is not None and (record.job or record.folder) else ()
    image = own_image(run.image)
    own = context.folder / "images" / image / "requirements.txt"
    is_own = bool(image) and own.is_file() and own.parent != shipped_folder("images") / image
    requirements = (
        f"images/{image}/requirements.txt" if is_own else _requirements_file(context, record, image)
    )
    is_named = bool(requirements) and names_package(context.folder / requirements, item.name)
    return replace(
        findings,
        images=images_with(context.image_folders, item.name),
        own_file=files[0] if files else "",
        is_listed=bool(files) and names_package(here / files[0], item.name),
        requirements=requirements,
        is_newer=is_named and not _is_of_now(context, record, run),
    )


def _is_of_now(context: Context, record: Record | None, run: Run) -> bool:
    """Whether the run's image is known to be made of the files that are there now."""
    source = present_source(context, record) if record is not None else None
    if source is None or not context.settings.is_local:
        return False
    try:
        return source.recipe().reference == run.image
    except (BatchmlError, OSError):
        return False


def _requirements_file(context: Context, record: Record | None, image: str) -> str:
    """The file of the folder from which the run's image was built; empty without one."""
    source = present_source(context, record) if record is not None else None
    if record is None or source is None or not source.file or source.name != image:
        return ""
    folder = Path(record.job or record.folder)
    here = context.folder.resolve()
    below = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return str(below / source.file)


def refused_submission(context: Context, word: str) -> str:
    """A note for `@last`, if a later submission was refused, so that it is no run; else empty."""
    if word != "@last":
        return ""
    names = context.history.names(context.env)
    own = (each for each in names if each.project == context.project and is_listed(each))
    newest = next(own, None)
    if newest is None or not newest.refused:
        return ""
    return f"The submission after it, {newest.name}, was refused: {newest.refused}"


def waiting_reason(context: Context, job_id: str) -> str:
    """Why a run waits, in the words of `explain`; empty if AWS does not answer."""
    try:
        return explain_run(context, job_id).explanation.verdict
    except BatchmlError:  # the caller can do without it
        return ""


def cause_in_log(context: Context, record: Record | None, run: Run, lines: Sequence[str]) -> str:
    """The verdict on the last lines of a log, without a call to AWS; empty if none is certain.

    For a file that was not sent it names the ignore file and what to do, as `explain` does.
    """
    lines = program_lines(lines)
    found = match_log(lines)
    ended = with_findings(
        EndedRun(run, lines=lines),
        possible_items(found, lines),
        lambda run, item: _search_locally(context, record, run, item),
    )
    if ended.findings.state in NOT_SENT:
        better = refine(found, ended) if found is not None else explain_guess(ended)
        if better is not None:
            return f"{better.verdict} {better.fix}".rstrip()
    return found.verdict if found is not None else ""
