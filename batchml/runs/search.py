"""Find runs: in AWS Batch, which forgets them seven days after their end, and in the history.

Source: AWS Batch User Guide, "Jobs" (a finished job stays listed for at least seven days).
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from heapq import merge
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import MAX_DESCRIBE, JobApi
from batchml.errors import UsageError, did_you_mean
from batchml.history import History, HistoryRecords
from batchml.model.fallback import WATCHES_TAG, moved_to
from batchml.model.group import GANG_TAG, GROUP_TAG, is_worker
from batchml.model.names import is_key, split_key
from batchml.model.run import (
    JobStatus,
    OutcomeClass,
    Record,
    Run,
    classify,
    effective_state,
    first_child_id,
    first_start,
    has_begun,
    run_from_record,
)

COMMIT_TAG = "batchml:commit"
SWEEP_TAG = "batchml:sweep"  # tag of the runs of a sweep: its key
_STORE_VARIABLE = (
    "BATCHML_SWEEP"  # variable of its trials: the address of its store, which ends with the key
)
LOST_AFTER = 8 * 24 * 3_600_000  # ms after its submission: then an unknown run is lost
LISTED_WITHIN = 60_000  # ms after its submission in which AWS Batch may not return a run yet
MIN_COMMIT = 4  # characters, as in git

_CONDITION = re.compile(r"\s*([^\s<>=!]+)\s*(>=|<=|==|!=|=|>|<)\s*(\S+)\s*")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


class MetricCondition(Struct, frozen=True):
    """`val_accuracy > 0.98`"""

    name: str
    sign: str
    bound: float

    def holds(self, metrics: Mapping[str, float]) -> bool:
        return self.name in metrics and _OPERATORS[self.sign](metrics[self.name], self.bound)


class RunFilter(Struct, frozen=True):
    """The runs to find; a field with its default value matches all.

    `since` is in milliseconds since the epoch. `states` are names of states or of outcome classes.
    """

    states: frozenset[str] = frozenset()
    queue: str = ""
    name: str = ""
    since: int = 0
    tags: dict[str, str] = {}
    params: dict[str, str] = {}
    metrics: tuple[MetricCondition, ...] = ()
    commit: str = ""
    everything: bool = False  # workers of group runs, too

    @property
    def is_deep(self) -> bool:
        """True when the answer of ListJobs is not enough to match a run."""
        return bool(self.tags or self.params or self.metrics or self.commit) or any(
            state not in JobStatus.__members__ for state in self.states
        )

    @property
    def leaves_out_sweeps(self) -> bool:
        """True unless a sweep, or a run by its name, is wanted: sweeps would hide other runs."""
        return not self.name and SWEEP_TAG not in self.tags

    @property
    def leaves_out_workers(self) -> bool:
        """True unless workers are wanted: the head stands for its group run."""
        return not (self.everything or self.name or GANG_TAG in self.tags or GROUP_TAG in self.tags)


class FoundRun(Struct, frozen=True):
    """A run as AWS Batch describes it, as the history has it, or both.

    `run` is None for a run that AWS Batch has forgotten and whose end was not seen on this machine.
    """

    run: Run | None
    record: Record | None

    @property
    def job_id(self) -> str:
        return self.run.job_id if self.run else self._known.job_id

    @property
    def name(self) -> str:
        return self.run.name if self.run else self._known.name

    @property
    def key(self) -> str:
        return self.run.key if self.run else self._known.key

    @property
    def queue(self) -> str:
        return self.run.queue if self.run else self._known.queue

    @property
    def created_at(self) -> int:
        return (self.run.created_at if self.run else None) or self._known.at

    @property
    def tags(self) -> dict[str, str]:
        return {**self._known.tags, **(self.run.tags if self.run else {})}

    @property
    def params(self) -> dict[str, object]:
        return {**self._known.params, **(self.run.params if self.run else {})}

    @property
    def metrics(self) -> dict[str, float]:
        return self._known.metrics

    @property
    def cost(self) -> float | None:
        return self._known.cost

    @property
    def command(self) -> tuple[str, ...]:
        """The command as it was given: a long one is not in the request."""
        return self._known.command or (self.run.command if self.run else ())

    @property
    def commit(self) -> str:
        return self._known.commit or self.tags.get(COMMIT_TAG, "")

    @property
    def sweep(self) -> str:
        """The key of the sweep that submitted it, as a trial or its controller; empty for none."""
        store = self.run.environment.get(_STORE_VARIABLE, "") if self.run else ""
        key = self.tags.get(SWEEP_TAG, "") or store.rstrip("/").rpartition("/")[2]
        return key if is_key(key) else ""

    @property
    def is_worker(self) -> bool:
        """True for a part of another run: workers of a group run, and watchers."""
        return is_worker(self.tags) or WATCHES_TAG in self.tags

    @property
    def has_moved(self) -> bool:
        """True for a job that was left: its run goes on as another job, in another queue."""
        return self.run is not None and bool(moved_to(self.run))

    @property
    def states(self) -> set[str]:
        """The names that match its state."""
        if self.run is None:
            return set()
        status = self.run.status
        return {status.value, effective_state(self.run)} | (
            {classify(self.run).outcome.value} if status.is_terminal else set()
        )

    @property
    def _known(self) -> Record:
        return self.record or Record()


def read_condition(text: str, flag: str) -> MetricCondition:
    """`"val_accuracy>0.98"` as a condition. Raises UsageError."""
    found = _CONDITION.fullmatch(text)
    if found:
        try:
            return MetricCondition(found[1], found[2], float(found[3]))
        except ValueError:
            pass
    raise UsageError(f"{flag} {text}: write a condition such as 'val_accuracy>0.98', in quotes.")


def read_states(texts: Iterable[str], flag: str) -> frozenset[str]:
    """Names of states (in any case) and of outcome classes. Raises UsageError."""
    known = [*(each.value for each in JobStatus), *(each.value for each in OutcomeClass)]
    by_lower = {name.lower(): name for name in known}
    # A name may be both a state and a class: ListJobs knows states.
    by_lower["succeeded"] = JobStatus.SUCCEEDED.value
    for text in texts:
        if text.lower() not in by_lower:
            raise UsageError(
                f"{flag} {text}: no such state.{did_you_mean(text, known)} "
                f"States: {', '.join(JobStatus)}; classes: {', '.join(OutcomeClass)}."
            )
    return frozenset(by_lower[text.lower()] for text in texts)


def read_commit(text: str, flag: str) -> str:
    """The start of a commit's id. Raises UsageError."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{{MIN_COMMIT},64}}", text):
        raise UsageError(f"{flag} {text}: give {MIN_COMMIT} or more digits of a commit's id.")
    return text.lower()


def matches(found: FoundRun, wanted: RunFilter) -> bool:
    """True when a run, with everything known about it, matches the filter."""
    return (
        _may_match(found, wanted)
        and (not wanted.states or bool(found.states & wanted.states))
        and all(found.tags.get(name) == value for name, value in wanted.tags.items())
        and all(
            name in found.params and is_param_value(found.params[name], text)
            for name, text in wanted.params.items()
        )
        and all(condition.holds(found.metrics) for condition in wanted.metrics)
        and found.commit.startswith(wanted.commit)
    )


def is_param_value(value: object, text: str) -> bool:
    """True when `text` is this value of a parameter: 0.10 and 1e-1 are the same."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return str(value) == text


def _may_match(found: FoundRun, wanted: RunFilter) -> bool:
    """Whether a summary may match: not by its state, which may have changed."""
    return (
        (not wanted.queue or found.queue == wanted.queue)
        and (not wanted.name or wanted.name in (found.name, *_names(found)))
        and found.created_at >= wanted.since
    )


def _names(found: FoundRun) -> tuple[str, ...]:
    whole = found.run.job_name if found.run else found.record.job_name if found.record else ""
    return (whole, *split_key(whole)[:1])


def search(
    api: JobApi,
    history: History,
    env: str,
    queues: Iterable[str],
    wanted: RunFilter,
    measure: Callable[[Run, Record], Mapping[str, float]] | None = None,
    now: int = 0,
    left_out: set[str] | None = None,
) -> Iterator[FoundRun]:
    """The runs that match the filter, newest first; calls are made as far as the caller reads.

    A round is one page of ListJobs for each queue, and one DescribeJobs for up to a hundred runs
    whose end was not seen before. Ends are kept in the history. `measure` reads the metrics in a
    run's log; it is called where they matter and were not read before. `now` is in milliseconds
    since the epoch. `left_out` gets the keys of the sweeps whose runs were left out.
    """
    records = history.records(env)
    newest: dict[str, str] = {}  # key -> its newest job, which stands for a run that has moved

    def noted(found: FoundRun) -> FoundRun:
        newest.setdefault(found.key, found.job_id)
        return found

    candidates = (
        found
        for found in map(noted, _candidates(api, records, queues, wanted))
        if _may_match(found, wanted) and _may_have_state(found, wanted)
    )
    but_metrics = replace(wanted, metrics=())
    for chunk in iter(lambda: list(islice(candidates, MAX_DESCRIBE)), []):
        for found in describe_candidates(api, history, chunk, now):
            if matches(found, but_metrics):
                if wanted.leaves_out_sweeps and found.sweep:
                    if left_out is not None:
                        left_out.add(found.sweep)
                    continue
                goes_on = wanted.queue or newest[found.key] != found.job_id
                if found.has_moved and goes_on:
                    continue
                if wanted.leaves_out_workers and found.is_worker:
                    continue
                measured = _with_metrics(found, measure) if wanted.metrics else found
                if matches(measured, wanted):
                    yield measured


def _with_metrics(
    found: FoundRun, measure: Callable[[Run, Record], Mapping[str, float]] | None
) -> FoundRun:
    record = found.record or Record()
    if measure is None or found.run is None or record.measured:
        return found
    return FoundRun(found.run, replace(record, metrics=dict(measure(found.run, record))))


def _may_have_state(found: FoundRun, wanted: RunFilter) -> bool:
    """False for a final state that does not match."""
    if wanted.is_deep or not wanted.states or found.run is None:
        return True
    return bool(found.states & wanted.states) or not found.run.status.is_terminal


def _candidates(
    api: JobApi, records: HistoryRecords, queues: Iterable[str], wanted: RunFilter
) -> Iterator[FoundRun]:
    """Every run once, newest first, as far as it is known without another call."""
    # A name in AWS ends with the key of its submission: the asterisk is ListJobs' own.
    name = f"{wanted.name}*" if wanted.name else ""
    since = max(0, wanted.since)  # AWS refuses what was before 1970
    listed = (
        (FoundRun(run, records.get(run.job_id)) for run in api.list_recent(queue, since, name))
        for queue in queues
    )
    kept = (
        FoundRun(run_from_record(record), record) for record in records if record.at >= wanted.since
    )
    seen: set[str] = set()
    for found in merge(*listed, kept, key=lambda each: each.created_at, reverse=True):
        if found.job_id not in seen:
            seen.add(found.job_id)
            yield found


def describe_candidates(
    api: JobApi, history: History, candidates: list[FoundRun], now: int
) -> list[FoundRun]:
    """The same runs with everything that AWS Batch knows, for those whose end was not seen: one
    call.
    """
    ask = [found.job_id for found in candidates if not _needs_no_call(found)]
    arrays = [found.job_id for found in candidates if _lacks_start(found, now)]
    asked = [*ask, *map(first_child_id, arrays)]
    told = api.describe(asked) if asked else {}
    starts = {
        each: at for each in arrays if (at := first_start(told.pop(first_child_id(each), None)))
    }
    told = {each: _with_start(run, starts) for each, run in told.items()}
    with suppress(OSError):  # as in `remember`
        history.add_starts({each: at for each, at in starts.items() if each not in ask})
    keep_ends(history, [found.record for found in candidates if found.record], told)
    with suppress(OSError):  # as in `remember`
        history.add_lost(
            found.job_id
            for found in candidates
            if found.job_id in ask and found.job_id not in told and found.run is None
            and found.created_at < now - LOST_AFTER
        )  # fmt: skip
    return [
        FoundRun(known and _with_start(known, starts), each.record)
        for each in map(_with_recorded_end, candidates)
        for known in [told.get(each.job_id) or each.run or run_from_history(api, each.record, now)]
    ]


def _lacks_start(found: FoundRun, now: int) -> bool:
    """True for an array whose first start AWS Batch may know, and the history does not."""
    run = _with_recorded_end(found).run
    size = (run.array_size if run else 0) or (found.record.array_size if found.record else 0)
    if not size or found.created_at < now - LOST_AFTER:
        return False
    return run is None or (
        not run.started_at and run.array_index is None and (not run.children or has_begun(run))
    )


def _with_start(run: Run, starts: Mapping[str, int]) -> Run:
    start = starts.get(run.job_id)
    return replace(run, started_at=start) if start and not run.started_at else run


def _with_recorded_end(found: FoundRun) -> FoundRun:
    """The run with everything that was seen of its end; ListJobs returns only a part."""
    return FoundRun(run_from_record(found.record) or found.run, found.record)


def _needs_no_call(found: FoundRun) -> bool:
    """True when no call is needed: the end was seen, or nobody will ever know it."""
    record = found.record
    return record is not None and (record.has_ended or (record.lost and found.run is None))


def keep_ends(history: History, records: Iterable[Record], told: Mapping[str, Run]) -> None:
    """Keep the ends of this machine's runs, which AWS Batch will forget.

    After a full disk the next call keeps them.
    """
    with suppress(OSError):
        history.add_ends(
            told[each.job_id] for each in records if not each.has_ended and each.job_id in told
        )


def run_from_history(api: JobApi, record: Record | None, now: int) -> Run | None:
    """A run that AWS Batch does not return: as it ended, or as it was just submitted; else None.

    AWS Batch may not return a run for some seconds; the embedded server returns it at once.
    """
    ended = run_from_record(record)
    if ended is not None or record is None:
        return ended
    if api.is_local or record.at < now - LISTED_WITHIN:
        return None
    return run_as_submitted(record)


def run_as_submitted(record: Record) -> Run:
    """The run as its submission describes it."""
    return Run(
        record.job_id,
        record.name,
        record.queue,
        JobStatus.SUBMITTED,
        created_at=record.at,
        job_name=record.job_name,
        key=record.key,
    )
