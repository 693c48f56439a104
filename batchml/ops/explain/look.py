"""Explain one run: look, ask what is missing, judge. The one part that asks and waits."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.diagnosis import Diagnosis
from batchml.clock import Clock
from batchml.errors import BatchmlError, NotFound
from batchml.model.explanation import Explanation
from batchml.model.group import SEAT_TAG
from batchml.model.record import NOT_KNOWN, NOT_KNOWN_WORDS, Record
from batchml.model.run import JobStatus, OutcomeClass, Run, classify, with_failures
from batchml.ops.explain.children import of_children, telling, with_children
from batchml.ops.explain.failing import Ended, wanted_here, why_ended
from batchml.ops.explain.folder import Here, Missed
from batchml.ops.explain.ranks import of_first
from batchml.ops.explain.room import with_move, with_seats
from batchml.ops.explain.seen import SOON, Look, Seen
from batchml.ops.explain.waiting import next_look, why_waits
from batchml.ops.explain.words import Words, minutes
from batchml.ops.search import as_run
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.log_marks import parse_mark

PAUSE = 5.0  # seconds until a second look at what a first one made suspect

_READS_LOG = (
    OutcomeClass.APP_ERROR,
    OutcomeClass.OUT_OF_MEMORY,
    OutcomeClass.TIMED_OUT,
    OutcomeClass.UNKNOWN,
)


LookHere = Callable[[Run, Missed], Here]


class Told(Struct, frozen=True):
    """An explanation and what it cost. `is_forgotten`: AWS Batch does not know the run any more."""

    run: Run
    explanation: Explanation
    calls: int
    unasked: tuple[str, ...] = ()
    is_forgotten: bool = False
    note: str = ""


def explain(
    diagnosis: Diagnosis,
    job_id: str,
    record: Record | None,
    words: Words,
    clock: Clock,
    look: LookHere = lambda *_: Here(),
    seats: Callable[[], Sequence[str]] = tuple,
) -> Told:
    """Say why a run waits or failed, by at most as many calls as `diagnosis` may make.

    `record` is what is kept of the run on this machine; from it the run is explained when AWS Batch
    has forgotten it. `look` finds out here what became of a file that the run missed. `seats`
    tells job ids that may hold a machine for somebody: looked at where a run waits for room.

    Raises NotFound when neither knows it, and AccessError, ServiceError or ServiceUnreachable when
    the first question is not answered.
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
        run = remembered(record)
    now = int(clock.now() * 1000)
    if run.status.is_terminal:
        cost = record.max_cost if record else None
        explanation = _ended(diagnosis, Ended(run, words, max_cost=cost), look)
    elif found:
        explanation = _waiting(diagnosis, Seen(run, now, words), clock, seats)
    else:
        explanation = _not_there(run, words, now)
    unasked = tuple(diagnosis.unasked)
    return Told(run, explanation, diagnosis.calls, unasked, is_forgotten=not found)


def remembered(record: Record) -> Run:
    """A run as this machine keeps it. One whose end was not seen from here is SUBMITTED."""
    return as_run(record) or Run(
        job_id=record.job_id,
        name=record.name,
        job_name=record.job_name,
        key=record.key,
        queue=record.queue,
        status=JobStatus.SUBMITTED,
        created_at=record.at,
        array_size=record.array_size,
    )


def _not_there(run: Run, words: Words, now: int) -> Explanation:
    """A run that was submitted from here, and that AWS Batch does not show: not yet, or no more."""
    age = now - (run.created_at or now)
    if age < SOON and not words.is_local:
        return Explanation(
            "submitted", f"It was submitted {minutes(age)} ago; AWS Batch does not show it yet.",
            is_problem=False, command=words.batchml("explain", run.job_id),
        )  # fmt: skip
    kept = "" if words.is_local else "; AWS Batch keeps what has ended for 7 days"
    return Explanation(
        "forgotten", NOT_KNOWN_WORDS,
        (f"submitted {minutes(age)} ago{kept}",),
        "It can be submitted again.", words.batchml("rerun", run.job_id),
    )  # fmt: skip


# --- runs that have ended ---------------------------------------------------------------------


def _ended(diagnosis: Diagnosis, ended: Ended, look: LookHere) -> Explanation:
    outcome, local = classify(ended.run).outcome, ended.words.is_local
    if ended.run.children and (ended.run.failures or outcome is OutcomeClass.APP_ERROR):
        return _of_children(diagnosis, ended, look)
    if outcome is OutcomeClass.DEPENDENCY_FAILED and ended.run.depends_on and diagnosis.left:
        return why_ended(replace(ended, dependencies=diagnosis.runs(ended.run.depends_on)))
    gave_up = outcome is OutcomeClass.HOST_LOST and ended.run.exit_code == TRY_ELSEWHERE
    is_lost = outcome is OutcomeClass.HOST_LOST and not gave_up
    if is_lost and ended.run.host.startswith("i-") and not local:
        return why_ended(replace(ended, machine=diagnosis.machine(ended.run.host)))
    if outcome in _READS_LOG or gave_up:
        ended = replace(ended, lines=_last_lines(diagnosis, ended.run))
        missed = wanted_here(ended)
        if missed is not None:
            ended = replace(ended, here=look(ended.run, missed))
    return why_ended(ended)


def _of_children(diagnosis: Diagnosis, ended: Ended, look: LookHere) -> Explanation:
    """A few children that failed stand for an array: their records have what its own has not."""
    failed = diagnosis.children(ended.run, JobStatus.FAILED.value)
    array = with_failures(ended.run, failed)
    chosen = telling(failed)
    found = diagnosis.runs([child.job_id for child in chosen]) if chosen and diagnosis.left else ()
    each = [replace(ended, run=child, array=array) for child in found]
    told = [(child.run, _ended(diagnosis, child, look)) for child in each]
    return of_children(array, failed, told) if told else why_ended(replace(ended, run=array))


def _last_lines(diagnosis: Diagnosis, run: Run) -> tuple[str, ...] | None:
    """The last page of the last attempt's log, without marks."""
    stream = run.attempts[-1].log_stream if run.attempts else ""
    if not stream and run.nodes and diagnosis.left:  # the log is the main node's
        nodes = diagnosis.runs([f"{run.job_id}#0"])
        stream = next((each.log_stream for node in nodes for each in node.attempts[-1:]), "")
    if not stream:
        return None
    lines = diagnosis.last_lines(run.log_group, stream)
    lines = lines and tuple(line for line in lines if parse_mark(line) is None)
    return of_first(lines) if lines and "BATCHML_LAUNCH" in run.environment else lines


# --- runs that wait ---------------------------------------------------------------------------


def _waiting(
    diagnosis: Diagnosis, seen: Seen, clock: Clock, seats: Callable[[], Sequence[str]]
) -> Explanation:
    while diagnosis.left and (look := next_look(seen)) is not None:
        if look is Look.AGAIN:
            clock.sleep(PAUSE)
        seen = replace(seen, **_LOOKS[look](diagnosis, seen), asked=seen.asked | {look})
        if seen.run.status.is_terminal:  # it ended while it was looked at
            return why_ended(Ended(seen.run, seen.words))
    # What could not be asked any more is not waited for.
    found = why_waits(replace(seen, asked=seen.asked | {Look.FAILED, Look.CHILD}))
    if found.cause == "full":
        found = with_seats(found, _seats(diagnosis, seen, seats()), seen.words)
    found = with_move(found, seen)
    if seen.array is None:
        return found
    child = f"child {seen.run.array_index} of {seen.array.array_size} stands for those that wait"
    found = replace(found, evidence=(child, *found.evidence))
    return with_children(seen.array, seen.failed, found)


def _seats(diagnosis: Diagnosis, seen: Seen, known: Sequence[str]) -> tuple[Run, ...]:
    """Notebooks and the like that hold what a run waits for. `known`: job ids that may be some.

    On `local` all queues share the machine; elsewhere only those of its own queue count.
    """
    listed = diagnosis.running(seen.run.queue) if diagnosis.left > 1 else ()
    ids = tuple(dict.fromkeys((*known, *listed)))
    try:
        runs = diagnosis.runs(ids) if ids and diagnosis.left else ()
    except BatchmlError:  # an extra
        return ()
    own = [run for run in runs if seen.words.is_local or run.queue == seen.run.queue]
    return tuple(run for run in own if SEAT_TAG in run.tags and run.status.holds_resources)


def _child(diagnosis: Diagnosis, seen: Seen) -> dict[str, Any]:
    """A child that waits takes its array's place: what it needs is the array's to say."""
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


def _again(diagnosis: Diagnosis, seen: Seen) -> dict[str, Any]:
    found = diagnosis.runs([seen.run.job_id])
    return {"run": found[0]} if found else {}


def _head(diagnosis: Diagnosis, seen: Seen) -> dict[str, Any]:
    front = seen.snapshot.front if seen.snapshot else ()
    return {"head": next(iter(diagnosis.runs([front[0].job_id])), None)} if front else {}


def _instance_types(seen: Seen) -> tuple[str, ...]:
    """Those that the queue's environments name; nothing where one leaves the choice to AWS."""
    named = {name for each in seen.usable for name in each.instance_types}
    open_ones = {"optimal", "default_x86_64", "default_arm64"}
    is_open = bool(named & open_ones) or any(not each.instance_types for each in seen.usable)
    return () if is_open else tuple(sorted(named))


def _types(diagnosis: Diagnosis, seen: Seen) -> dict[str, Any]:
    names = _instance_types(seen)
    return {"types": diagnosis.host_types(names)} if names else {}


def _hosts(diagnosis: Diagnosis, seen: Seen) -> dict[str, Any]:
    """Of the environment that AWS Batch has asked most of."""
    known = [each for each in seen.usable if each.cluster]
    if not known:
        return {}
    most = max(known, key=lambda each: each.desired_vcpus)
    return {"hosts": diagnosis.hosts(most.cluster)}


_LOOKS: dict[Look, Callable[[Diagnosis, Seen], dict[str, Any]]] = {
    Look.DEPENDENCIES: lambda ask, seen: {"dependencies": ask.runs(seen.run.depends_on)},
    Look.FAILED: lambda ask, seen: {"failed": ask.children(seen.run, JobStatus.FAILED.value)},
    Look.CHILD: _child,
    Look.QUEUE: lambda ask, seen: {"queue": ask.queue(seen.run.queue)},
    Look.ENVIRONMENTS: lambda ask, seen: {
        "environments": ask.environments(seen.queue.environments if seen.queue else ()) or ()
    },
    Look.STOCK: lambda ask, seen: {"stock": ask.stock(next(iter(seen.run.consumables)))},
    Look.SNAPSHOT: lambda ask, seen: {"snapshot": ask.snapshot(seen.run.queue)},
    Look.HEAD: _head,
    Look.TYPES: _types,
    Look.IMAGE: lambda ask, seen: {
        "architecture": ask.architecture(next(e.ami for e in seen.environments if e.ami))
    },
    Look.ACTIVITIES: lambda ask, seen: {
        "activities": ask.activities([each.name for each in seen.usable])
    },
    Look.HOSTS: _hosts,
    Look.AGAIN: _again,
}
