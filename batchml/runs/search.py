"""Search for runs in AWS Batch, which forgets them some days after their end, and in the history.

Source: AWS Batch User Guide, "Jobs" (a finished job stays listed for at least seven days).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from heapq import merge
from itertools import chain, islice, repeat
from math import isnan

from msgspec import Struct, field
from msgspec.structs import replace

from batchml.aws.batch.jobs import MAX_DESCRIBE, JobApi
from batchml.errors import UsageError, did_you_mean
from batchml.history import History, HistoryRecords, MetricBound, RunQuery
from batchml.model.fallback import WATCHES_TAG, moved_to
from batchml.model.group import GANG_TAG, GROUP_TAG, is_worker
from batchml.model.names import is_key, split_key
from batchml.model.numbering import original_id, original_numbers, plain_command, shown_params
from batchml.model.run import (
    DATA_VARIABLE,
    PROJECT_TAG,
    SWEEP_TAG,
    JobStatus,
    OutcomeClass,
    Record,
    Run,
    RunTimes,
    classify,
    effective_state,
    first_child_id,
    first_start,
    has_begun,
    run_from_record,
    times_of,
)
from batchml.runs.metrics.conditions import (
    MetricCondition,
    MetricValue,
    best_values,
    child_of,
    first_values,
)
from batchml.runtime.protocol.launch import own_command

COMMIT_TAG = "batchml:commit"
# Environment variable of the runs of a sweep: the address of its store, which ends with its key.
_STORE_VARIABLE = "BATCHML_SWEEP"
LOST_AFTER = 8 * 24 * 3_600_000  # ms after its submission: AWS Batch has forgotten the run
LISTED_WITHIN = 60_000  # ms after its submission: until then AWS Batch may not return the run
MAX_OTHERS = 1_000  # jobs of other projects that a search reads: about ten calls of each kind
MIN_COMMIT = 4  # characters, as in git


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
    include_workers: bool = False  # list the workers of group runs beside their heads
    project: str = ""  # its identity; runs of no project do not match

    @property
    def is_deep(self) -> bool:
        """True if the answer of ListJobs is not enough to decide whether a run matches."""
        return bool(self.tags or self.params or self.metrics or self.commit) or any(
            state not in JobStatus.__members__ for state in self.states
        )

    @property
    def values(self) -> list[MetricValue]:
        """The values of metrics that the filter compares."""
        return [condition.value for condition in self.metrics]

    @property
    def leaves_out_sweeps(self) -> bool:
        """True unless the filter has a name or a sweep: runs of sweeps would hide other runs."""
        return not self.name and SWEEP_TAG not in self.tags

    @property
    def leaves_out_workers(self) -> bool:
        """True if only the head of a group run is listed, not its workers."""
        return not (
            self.include_workers or self.name or GANG_TAG in self.tags or GROUP_TAG in self.tags
        )


def code_digest(address: str) -> str:
    """The SHA-256 in the name of a code package; "" without an address."""
    return address.rpartition("/")[2].partition(".")[0]


class SkippedRuns(Struct):
    """The runs that a search has left out.

    `sweeps`: keys of sweeps. `of_projects`: by project, the number of runs of other projects that
    would be listed; `passed` counts all their jobs. `is_cut`: AWS Batch has more runs than were
    read, of which some may be of the project.
    """

    sweeps: set[str] = field(default_factory=set)
    of_projects: dict[str, int] = field(default_factory=dict)
    passed: int = 0
    is_cut: bool = False

    @property
    def others(self) -> int:
        return sum(self.of_projects.values())


class FoundRun(Struct, frozen=True):
    """A run as AWS Batch describes it, its record in the history, or both.

    `run` is None if AWS Batch has forgotten the run and the history does not have its end.
    """

    run: Run | None
    record: Record | None
    idle: float = 0.0  # seconds for which it has done nothing, if they were asked for

    @property
    def job_id(self) -> str:
        return self.run.job_id if self.run else self._known.job_id

    @property
    def shown_id(self) -> str:
        """The id as users see and type it."""
        return original_id(self.job_id, original_numbers(self.run, self.record))

    @property
    def name(self) -> str:
        return self.run.name if self.run else self._known.name

    @property
    def key(self) -> str:
        return (self.run.key if self.run else "") or self._known.key

    @property
    def queue(self) -> str:
        return self.run.queue if self.run else self._known.queue

    @property
    def created_at(self) -> int:
        return (self.run.created_at if self.run else None) or self._known.at

    def times(self, now_ms: int) -> RunTimes:
        """When it started, how long it ran and waited; `now_ms` is in ms since the epoch."""
        unknown = RunTimes(None, None, None)
        return times_of(self.run, now_ms, self.created_at) if self.run else unknown

    @property
    def tags(self) -> dict[str, str]:
        return {**self._known.tags, **(self.run.tags if self.run else {})}

    @property
    def params(self) -> dict[str, object]:
        """The parameters; those of a child have its number in place of `{index}`."""
        params = {**self._known.params, **(self.run.params if self.run else {})}
        is_array = self.run is not None and self.run.array_size
        return params if is_array else shown_params(params, self.run, self.record)

    @property
    def metrics(self) -> dict[str, float]:
        return self._known.metrics

    @property
    def first_metrics(self) -> dict[str, float]:
        """The first value of each metric, as far as the history has it."""
        return first_values(self._known.ranges)

    @property
    def best_metrics(self) -> dict[str, float]:
        """The best value of each metric whose direction is known."""
        return best_values(self._known.ranges, self._known.directions)

    @property
    def cost(self) -> float | None:
        return self._known.cost

    @property
    def command(self) -> tuple[str, ...]:
        """The command as the user gave it: a long command is not in the request."""
        return self._known.command or (self.run.command if self.run else ())

    @property
    def own_command(self) -> str:
        """The command as one line, without the programs that batchml puts before it."""
        return " ".join(own_command(plain_command(self.command)))

    @property
    def commit(self) -> str:
        return self._known.commit or self.tags.get(COMMIT_TAG, "")

    @property
    def code(self) -> str:
        """The address of the code package; its name begins with the SHA-256. "" without code."""
        sent = self.run.environment.get("BATCHML_CODE", "") if self.run else ""
        return self._known.code or sent

    @property
    def data_dir(self) -> str:
        """The folder of data sets that the run was given; "" for the environment's own."""
        kept: object = self.record.spec.get("env", {}) if self.record else {}
        there = self.run.environment.get(DATA_VARIABLE, "") if self.run else ""
        return there or str(kept.get(DATA_VARIABLE, "") if isinstance(kept, dict) else "")

    @property
    def data_sets(self) -> dict[str, str]:
        """The data sets that the run reads: the name and the address of each."""
        kept = (self.run.data if self.run else None) or self._known.spec.get("data")
        return {name: str(each) for name, each in kept.items()} if isinstance(kept, dict) else {}

    @property
    def project(self) -> str:
        return self._known.project or self.tags.get(PROJECT_TAG, "")

    @property
    def sweep(self) -> str:
        """The key of the sweep whose trial or controller the run is; "" for other runs."""
        store = self.run.environment.get(_STORE_VARIABLE, "") if self.run else ""
        key = self.tags.get(SWEEP_TAG, "") or store.rstrip("/").rpartition("/")[2]
        return key if is_key(key) else ""

    @property
    def is_worker(self) -> bool:
        """True for workers of a group run, and for watchers of a run that may move."""
        return is_worker(self.tags) or WATCHES_TAG in self.tags

    @property
    def has_moved(self) -> bool:
        """True for a job whose run has moved: it goes on as another job, in another queue."""
        return self.run is not None and bool(moved_to(self.run))

    @property
    def states(self) -> set[str]:
        """The state and the outcome class, as names for filters."""
        if self.run is None:
            return set()
        status = self.run.status
        return {status.value, effective_state(self.run)} | (
            {classify(self.run).outcome.value} if status.is_terminal else set()
        )

    @property
    def _known(self) -> Record:
        return self.record or Record()


def read_states(texts: Iterable[str], flag: str) -> frozenset[str]:
    """Check names of states and outcome classes, in any case. Raises UsageError."""
    known = [*(each.value for each in JobStatus), *(each.value for each in OutcomeClass)]
    by_lower = {name.lower(): name for name in known}
    # "succeeded" is a state and a class; the state needs no DescribeJobs.
    by_lower["succeeded"] = JobStatus.SUCCEEDED.value
    for text in texts:
        if text.lower() not in by_lower:
            raise UsageError(
                f"{flag} {text}: no such state.{did_you_mean(text, known)} "
                f"States: {', '.join(JobStatus)}; classes: {', '.join(OutcomeClass)}."
            )
    return frozenset(by_lower[text.lower()] for text in texts)


def read_commit(text: str, flag: str) -> str:
    """Check the start of a commit's id. Raises UsageError."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{{MIN_COMMIT},64}}", text):
        raise UsageError(f"{flag} {text}: give {MIN_COMMIT} or more digits of a commit's id.")
    return text.lower()


def matches(found: FoundRun, filters: RunFilter) -> bool:
    """True if a run matches, judged by all that the run and the record say."""
    return (
        _may_match(found, filters)
        and (not filters.states or bool(found.states & filters.states))
        and all(found.tags.get(name) == value for name, value in filters.tags.items())
        and all(
            name in found.params and is_param_value(found.params[name], text)
            for name, text in filters.params.items()
        )
        and all(condition.holds(found.record) for condition in filters.metrics)
        and found.commit.startswith(filters.commit)
    )


def is_param_value(value: object, text: str) -> bool:
    """True if `text` is this value of a parameter: 0.10 and 1e-1 are equal."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return str(value) == text


def _may_match(found: FoundRun, filters: RunFilter) -> bool:
    """True if a run of ListJobs may match; its state may have changed, so it is not compared."""
    return (
        (not filters.queue or found.queue == filters.queue)
        and (not filters.name or filters.name in (found.name, *_names(found)))
        and found.created_at >= filters.since
    )


def _names(found: FoundRun) -> tuple[str, ...]:
    text = found.run.job_name if found.run else found.record.job_name if found.record else ""
    return (text, *split_key(text)[:1])


def search(
    api: JobApi,
    history: History,
    env: str,
    queues: Iterable[str],
    filters: RunFilter,
    measure: Callable[[Run, Record], Record] | None = None,
    now: int = 0,
    left_out: SkippedRuns | None = None,
    complete: Callable[[list[FoundRun]], list[FoundRun]] = list,
    first: int = MAX_DESCRIBE,
) -> Iterator[FoundRun]:
    """The runs that match the filter, newest first; calls are made as the caller iterates.

    A round is one page of ListJobs for each queue, and one DescribeJobs for up to a hundred runs
    whose end is not in the history; at first only for `first` runs. The history keeps their ends.
    `measure` adds the metrics in a run's log to its record; it is called if the filter has metrics
    that are not in the history. `now` is in milliseconds since the epoch. `left_out` is filled.
    `complete` adds the parameters of trials, where runs of sweeps are listed. After `MAX_OTHERS`
    jobs of other projects only runs of the history are searched.
    """
    left_out = SkippedRuns() if left_out is None else left_out
    records = history.records(env)
    newest: dict[str, str] = {}  # key -> the newest job of a run that may move: it has several

    def note_newest(found: FoundRun) -> FoundRun:
        if found.record is None or found.record.fallback or found.record.moved:
            newest.setdefault(found.key, found.job_id)
        return found

    candidates = (
        found
        for found in map(note_newest, _candidates(api, records, queues, filters, left_out))
        if _may_match(found, filters)
        and _may_have_state(found, filters)
        and not (found.record and _is_elsewhere(found, filters, left_out))
    )
    without_metrics = replace(filters, metrics=())
    has_found = False
    sizes = chain([first], repeat(MAX_DESCRIBE))
    for chunk in iter(lambda: list(islice(candidates, next(sizes))), []):
        described = describe_candidates(api, history, chunk, now)
        for found in described if filters.leaves_out_sweeps else complete(described):
            if matches(found, without_metrics):
                if _is_elsewhere(found, filters, left_out):
                    continue
                if filters.leaves_out_sweeps and found.sweep:
                    left_out.sweeps.add(found.sweep)
                    continue
                is_superseded = filters.queue or newest.get(found.key, found.job_id) != found.job_id
                if found.has_moved and is_superseded:
                    continue
                if filters.leaves_out_workers and found.is_worker:
                    continue
                measured = with_metrics(found, filters.values, measure)
                if matches(measured, filters):
                    has_found = True
                    yield measured
    if filters.project and not has_found:  # how many others there are is said only then
        _count_others(records, filters, left_out)


def _count_others(records: HistoryRecords, filters: RunFilter, left_out: SkippedRuns) -> None:
    """Add the runs of other projects that only the history has."""
    for project, count in records.of_others(to_query(filters)).items():
        left_out.passed += count
        left_out.of_projects[project] = left_out.of_projects.get(project, 0) + count


def to_query(filters: RunFilter) -> RunQuery:
    """The part of a filter that the index of the history knows; other runs do not match either."""
    statuses = set[str]()
    for state in filters.states:
        if state in JobStatus.__members__:
            statuses.add(state)
        else:  # a class: of success or of failure
            statuses |= {JobStatus.SUCCEEDED.value, JobStatus.FAILED.value}
    return RunQuery(
        filters.project, filters.queue, filters.name, filters.since, frozenset(statuses),
        tuple(to_bound(each) for each in filters.metrics if not isnan(each.bound)),
        filters.tags, filters.params, filters.commit, not filters.leaves_out_sweeps,
    )  # fmt: skip


_COLUMNS = {
    "last": ("last",), "first": ("first",), "min": ("least",), "max": ("greatest",),
    "best": ("least", "greatest"),
}  # fmt: skip


def to_bound(condition: MetricCondition) -> MetricBound:
    name = child_of(condition.name)[0]
    return MetricBound(name, _COLUMNS[condition.function], condition.sign, condition.bound)


def _is_elsewhere(found: FoundRun, filters: RunFilter, left_out: SkippedRuns) -> bool:
    """Whether a run is of another project, which is counted as `ls` would list it."""
    if filters.project in ("", found.project):
        return False
    left_out.passed += 1
    # Those of the history are counted by its index, as most of them are never read.
    if found.record is None and not (found.is_worker or found.has_moved or found.sweep):
        left_out.of_projects[found.project] = left_out.of_projects.get(found.project, 0) + 1
    return True


def with_metrics(
    found: FoundRun,
    values: Iterable[MetricValue],
    measure: Callable[[Run, Record], Record] | None,
) -> FoundRun:
    """The run with the metrics in its log, if one of these values needs them."""
    record = found.record or Record()
    needs_range = [value.function != "last" for value in values]
    is_known = record.measured and not (any(needs_range) and lacks_ranges(record))
    if measure is None or found.run is None or is_known or not needs_range:
        return found
    return FoundRun(found.run, measure(found.run, record))


def lacks_ranges(record: Record) -> bool:
    """True for a record of an earlier version, which has only the last value of each metric."""
    return bool(record.metrics) and not record.ranges


def _may_have_state(found: FoundRun, filters: RunFilter) -> bool:
    """False if the run has ended in a state that does not match."""
    if filters.is_deep or not filters.states or found.run is None:
        return True
    return bool(found.states & filters.states) or not found.run.status.is_terminal


def _candidates(
    api: JobApi,
    records: HistoryRecords,
    queues: Iterable[str],
    filters: RunFilter,
    left_out: SkippedRuns,
) -> Iterator[FoundRun]:
    """Every run once, newest first, as ListJobs or the history has it."""
    # A job's name in AWS is the run's name and the key; ListJobs takes an asterisk at the end.
    name = f"{filters.name}*" if filters.name else ""
    since = max(0, filters.since)  # AWS refuses times before 1970

    def listed_in(queue: str) -> Iterator[FoundRun]:
        for run in api.list_recent(queue, since, name):
            if left_out.passed >= MAX_OTHERS:
                left_out.is_cut = True
                return
            record = records.get(run.job_id)
            # The record of its end has more than ListJobs returns.
            yield FoundRun(run_from_record(record) or run, record)

    kept = (
        FoundRun(run_from_record(record), record)
        for record in records.matching(to_query(filters))
        if record.at >= filters.since
    )
    seen: set[str] = set()
    listed = map(listed_in, queues)
    for found in merge(*listed, kept, key=lambda each: each.created_at, reverse=True):
        if found.job_id not in seen:
            seen.add(found.job_id)
            yield found


def describe_candidates(
    api: JobApi, history: History, candidates: list[FoundRun], now: int
) -> list[FoundRun]:
    """The same runs, as DescribeJobs returns those whose end is not in the history: one call."""
    ask = [found.job_id for found in candidates if not _needs_no_call(found)]
    arrays = [found.job_id for found in candidates if _lacks_start(found, now)]
    asked = [*ask, *map(first_child_id, arrays)]
    described = api.describe(asked) if asked else {}
    starts = {
        each: at
        for each in arrays
        if (at := first_start(described.pop(first_child_id(each), None)))
    }
    described = {each: _with_start(run, starts) for each, run in described.items()}
    with suppress(OSError):  # as in `keep_ends`
        history.add_starts({each: at for each, at in starts.items() if each not in ask})
    keep_ends(history, [found.record for found in candidates if found.record], described)
    with suppress(OSError):  # as in `keep_ends`
        history.add_lost(
            found.job_id
            for found in candidates
            if found.job_id in ask and found.job_id not in described and found.run is None
            and found.created_at < now - LOST_AFTER
        )  # fmt: skip
    return [
        FoundRun(known and _with_start(known, starts), each.record)
        for each in candidates
        for known in [
            described.get(each.job_id) or each.run or run_from_history(api, each.record, now)
        ]
    ]


def _lacks_start(found: FoundRun, now: int) -> bool:
    """True for an array whose start is not in the history but may be in AWS Batch."""
    run = found.run
    size = (run.array_size if run else 0) or (found.record.array_size if found.record else 0)
    if not size or found.created_at < now - LOST_AFTER:
        return False
    return run is None or (
        not run.started_at and run.array_index is None and (not run.children or has_begun(run))
    )


def _with_start(run: Run, starts: Mapping[str, int]) -> Run:
    start = starts.get(run.job_id)
    return replace(run, started_at=start) if start and not run.started_at else run


def _needs_no_call(found: FoundRun) -> bool:
    """True if the history has the run's end, or AWS Batch has forgotten the run."""
    record = found.record
    return record is not None and (record.has_ended or (record.lost and found.run is None))


def keep_ends(history: History, records: Iterable[Record], described: Mapping[str, Run]) -> None:
    """Keep the ends of this machine's runs in the history: AWS Batch will forget them.

    If the disk is full, the next call keeps them.
    """
    with suppress(OSError):
        history.add_ends(
            described[each.job_id]
            for each in records
            if not each.has_ended and each.job_id in described
        )


def run_from_history(api: JobApi, record: Record | None, now: int) -> Run | None:
    """A run that AWS Batch does not return, from its record: ended or just submitted; else None.

    AWS Batch may not return a run for some seconds; the embedded server returns it at once.
    """
    ended = run_from_record(record)
    if ended is not None or record is None:
        return ended
    if api.is_local or record.at < now - LISTED_WITHIN:
        return None
    return run_as_submitted(record)


def run_as_submitted(record: Record) -> Run:
    """A record as a run that was just submitted."""
    return Run(
        record.job_id,
        record.name,
        record.queue,
        JobStatus.SUBMITTED,
        created_at=record.at,
        job_name=record.job_name,
        key=record.key,
    )
