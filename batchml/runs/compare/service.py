"""Read all that is compared of runs: requests, logs, resource use, bills, prices of workers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.cost.quote import ContainerNeed
from batchml.cost.service import is_free, quote_of
from batchml.errors import BatchmlError, UsageError
from batchml.jobs.code_diff import FileDifference, compare_packages
from batchml.rich_html import to_html
from batchml.runs.compare.conclusions import Conclusion, WorkerOffer, conclude, wait_share
from batchml.runs.compare.facts import RunDifference, compare
from batchml.runs.compare.figures import MeasuredRun, RunGroup, group_runs
from batchml.runs.find import MAX_CHILDREN, load_children, load_runs, with_first_start, with_trials
from batchml.runs.groups.members import bill_runs, find_worker_groups
from batchml.runs.metrics.pace import PaceLog
from batchml.runs.metrics.usage import (
    collect_usage,
    find_nodes,
    own_container,
    read_run_metrics,
    read_usage,
)
from batchml.runs.package import read_files
from batchml.runs.search import FoundRun, code_digest

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.cost.bill import Bill

MAX_RUNS = 200  # whose logs are read, children of arrays included


def measure_groups(context: "Context", job_ids: Sequence[str]) -> list[RunGroup]:
    """Measure runs and group them. An array is a group of its first `MAX_CHILDREN` children.

    Calls: one DescribeJobs for a hundred runs, those that read logs, and those that make bills.
    Raises NotFound for a run that is not known, and UsageError for too many runs.
    """
    runs = with_trials(context, load_runs(context, list(dict.fromkeys(job_ids))))
    entries = [load_children(context, each) or [each] for each in runs]
    count = sum(map(len, entries))
    if count > MAX_RUNS:
        raise UsageError(f"{count} runs: at most {MAX_RUNS} can be compared at once.")
    singles = [each for entry in entries for each in entry]
    bills = {} if is_free(context) else bill_runs(context, singles)
    now = int(context.clock.now() * 1000)
    measured = [
        [_measure(context, each, bills.get(each.job_id)) for each in entry] for entry in entries
    ]
    return group_runs(measured, now)


def left_out(groups: Sequence[RunGroup]) -> list[str]:
    """A message for each array of which only the first children are compared."""
    return [
        f"{group.first.name} {group.short_id}: only the first {MAX_CHILDREN} children are compared."
        for group in groups
        if group.is_array and len(group.runs) == MAX_CHILDREN < _array_size(group)
    ]


def _array_size(group: RunGroup) -> int:
    record = group.first.record
    return record.array_size if record else MAX_CHILDREN + 1


def _measure(context: "Context", found: FoundRun, bill: "Bill | None") -> MeasuredRun:
    found = with_first_start(context, found)
    run, record = found.run, found.record
    if run is None:
        return MeasuredRun(found, bill=bill)
    log = PaceLog(record.patterns if record else {})
    nodes = find_nodes(context, found, find_worker_groups(context, found))
    measured = read_run_metrics(context, run, nodes, record, log)
    single = own_container(run) if not nodes else []
    if single:  # its log was just read
        uses = collect_usage(single, measured.usage, int(context.clock.now() * 1000))
    else:
        uses = read_usage(context, nodes, whole=True)
    return MeasuredRun(
        FoundRun(run, measured.added_to(record)), measured.series, log.steps.pace(),
        log.epochs.pace(), tuple(uses), bill, measured.is_whole,
    )  # fmt: skip


class ComparedRuns(Struct, frozen=True):
    """The results of runs: a group for each of them, or for those that differ only in a seed.

    `conclusions` are what the figures show, `notices` what could not be compared.
    """

    groups: tuple[RunGroup, ...]
    conclusions: tuple[Conclusion, ...]
    notices: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        return to_html(self)


def compare_results(context: "Context", job_ids: Sequence[str]) -> ComparedRuns:
    """Measure and group runs, as `measure_groups` does, and conclude."""
    groups = measure_groups(context, job_ids)
    conclusions = conclude(groups, offer_workers(context, groups))
    notices = left_out(groups)
    if not all(each.is_whole for group in groups for each in group.runs):
        notices.append("A log is long or cannot be read, so figures may be missing.")
    return ComparedRuns(tuple(groups), tuple(conclusions), tuple(notices))


class RunComparison(Struct, frozen=True):
    """How two runs differ. `files` is None if a code could not be read; `why` says the reason."""

    left: FoundRun
    right: FoundRun
    facts: tuple[RunDifference, ...]  # equal ones included: `same`
    files: tuple[FileDifference, ...] | None
    why: str = ""

    def _repr_html_(self) -> str:
        return to_html(self)


def compare_requests(context: "Context", left: str, right: str) -> RunComparison:
    """Compare the requests and the code of two runs, given by their job ids.

    Raises NotFound for a run that is not known.
    """
    one, other = with_trials(context, load_runs(context, [left, right]))
    facts = tuple(compare(one, other))
    if code_digest(one.code) == code_digest(other.code):
        return RunComparison(one, other, facts, ())
    try:
        files = compare_packages(read_files(context, one.code), read_files(context, other.code))
    except BatchmlError as error:
        return RunComparison(one, other, facts, None, str(error))
    return RunComparison(one, other, facts, tuple(files))


def changed_files(context: "Context", one: RunGroup, other: RunGroup) -> list[str]:
    """The files of the code that differ between two groups; none if their code cannot be read.

    Only on `local`: elsewhere both archives would have to be fetched, which `diff` does.
    """
    if not context.settings.is_local:
        return []
    try:
        codes = [read_files(context, group.first.code) for group in (one, other)]
    except BatchmlError:  # the names are optional information
        return []
    return [each.name for each in compare_packages(*codes)]


def offer_workers(context: "Context", groups: Sequence[RunGroup]) -> dict[str, WorkerOffer]:
    """Label -> a CPU worker with its price, for runs that wait for data.

    The worker is as large as those of the run, or has the run's vCPUs and memory; it costs what the
    cheapest queue of the environment asks.
    """
    return {
        group.label: _offer(context, group)
        for group in groups
        if wait_share(group) is not None and group.first.run is not None
    }


def _offer(context: "Context", group: RunGroup) -> WorkerOffer:
    runs = [part.found.run for part in find_worker_groups(context, group.first) if part.found]
    shape = next(filter(None, runs), group.first.run)
    assert shape is not None
    need = ContainerNeed(shape.vcpus, shape.memory_mib)
    hours = []
    for queue in context.settings.environment.queues or ("default",):
        try:
            hour = quote_of(context, need, queue).hour
        except BatchmlError:  # a price is optional information
            continue
        if hour is not None and hour.high:
            hours.append(float(hour.high))
    return WorkerOffer(shape.vcpus, min(hours, default=None))
