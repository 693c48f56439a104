"""The first runs by a column: those that sorting every run gives, without reading every run."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi
from batchml.history import History, end_record
from batchml.model.run import SWEEP_TAG, JobStatus, MetricRange, Record, Run
from batchml.runs.compare.columns import FACTS, Column, first_runs, metric_column
from batchml.runs.compare.first import find_first
from batchml.runs.compare.newest import NewestRuns
from batchml.runs.metrics.conditions import MetricCondition, MetricValue
from batchml.runs.search import FoundRun, RunFilter, SkippedRuns, search

NOW = 10**9
MANY = 600  # runs
SEED = 7

Find = Callable[[RunFilter, SkippedRuns], Iterator[FoundRun]]


class FakeBatch(JobApi):
    """Lists and describes two runs."""

    is_local = True

    def __init__(self) -> None:
        self.runs = {
            job_id(number): Run(job_id(number), "train", "q", JobStatus.RUNNING, created_at=number)
            for number in (MANY + 1, MANY + 2)
        }

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterator[Run]:
        yield from list(self.runs.values())[::-1]

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        return {each: self.runs[each] for each in job_ids if each in self.runs}


def job_id(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-000000000000"


def record_of(number: int, random: Random) -> Record:
    """A run, perhaps of a sweep: an array, or with a value, without, unknown, or not ended."""
    begun = Record(
        key=f"2{number:016d}", job_id=job_id(number), name="train", env="dev", queue="q", at=number,
        project=random.choice(["vision", "vision", "digits"]),
        command=("x" * 2_000,),
        directions={"acc": random.choice(["max", "min"])} if random.random() < 0.5 else {},
        tags={SWEEP_TAG: f"2{number:016d}"} if random.random() < 0.1 else {},
    )  # fmt: skip
    last = round(random.gauss(0, 1), 2)  # some are equal
    ranges = {"acc": MetricRange(-last, last - 1, last + random.random())}
    status = random.choice([JobStatus.SUCCEEDED, JobStatus.FAILED])
    ended = Run(begun.job_id, "train", "q", status, created_at=number, key=begun.key)
    metrics, measured = random.choice(
        [({"acc": last}, ranges)] * 6
        + [({"acc": last}, {}), ({}, ranges), ({"loss": 1.0}, {}), ({}, {}), (None, None)]
        + [({"acc:0": last, "acc:1": 1.0}, {"acc:0": ranges["acc"], "acc:1": ranges["acc"]})]
    )
    end = end_record(ended, metrics, None, measured)
    fields = ("status", "outcome", "metrics", "ranges", "measured")
    known = {name: getattr(end, name) for name in fields}
    return begun if random.random() < 0.05 else replace(begun, **known)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    history = History(tmp_path_factory.mktemp("history") / "history.jsonl")
    random = Random(SEED)
    history.intend(*(record_of(number, random) for number in range(MANY)))
    assert history.size > 1024 * 1024  # of a shorter one every record is read
    return history


def measure(run: Run, record: Record) -> Record:
    """The logs of some runs have a value."""
    return replace(record, metrics={"acc": 0.5}) if int(run.job_id[:8], 16) % 2 else record


def find_in(history: History, read: list[str]) -> Find:
    """A search, which notes the runs that it finds."""

    def find(wanted: RunFilter, left_out: SkippedRuns) -> Iterator[FoundRun]:
        api = FakeBatch()
        for each in search(api, history, "dev", ["q"], wanted, measure, NOW, left_out):
            read.append(each.job_id)
            yield each

    return find


def first(
    history: History, find: Find, wanted: RunFilter, column: Column, *, descending: bool
) -> NewestRuns:
    def complete(runs: list[FoundRun]) -> list[FoundRun]:
        return [
            FoundRun(each.run, measure(each.run, each.record or Record()))
            if each.run and column.metric and not (each.record and each.record.measured)
            else each
            for each in runs
        ]

    return find_first(
        history, "dev", find, complete, wanted, 30, column, NOW, descending=descending
    )


WANTED = (
    RunFilter(),
    RunFilter(project="digits"),
    RunFilter(project="digits", states=frozenset({"FAILED"})),
    RunFilter(states=frozenset({"RUNNING"})),
    RunFilter(metrics=(MetricCondition("acc", "<", 0.0),)),
    RunFilter(since=MANY - 20),
    RunFilter(name="train"),  # with the runs of sweeps
)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("name", ["acc", "max(acc)", "best(acc)", "acc:1"])
def test_the_first_by_a_metric_are_those_of_all_runs(
    history: History, name: str, wanted: RunFilter, descending: bool
) -> None:
    function, _, inner = name.rpartition("(")
    metric = MetricValue(inner.removesuffix(")"), function or "last")
    column = metric_column(metric)
    reached = MetricCondition(metric.name, "<", float("inf"), metric.function)
    every = list(find_in(history, [])(wanted, SkippedRuns()))
    # Runs with a value, as a search for it measures them, and the others.
    valued = {
        each.job_id: each
        for each in find_in(history, [])(
            replace(wanted, metrics=(*wanted.metrics, reached)), SkippedRuns()
        )
    }
    expected = first_runs(
        len(every), (valued.get(each.job_id, each) for each in every), column, NOW,
        descending=descending,
    )  # fmt: skip
    found = first(history, find_in(history, []), wanted, column, descending=descending)
    assert [each.job_id for each in found.runs] == [each.job_id for each in expected[:30]]
    assert found.has_more == (len(expected) > 30)


def test_few_records_are_read_for_a_metric_of_a_long_history(history: History) -> None:
    read: list[str] = []
    column = metric_column(MetricValue("acc", "max"))
    found = first(history, find_in(history, read), RunFilter(), column, descending=True)
    assert len(found.runs) == 30
    assert len(read) < 100


@pytest.mark.parametrize("name", ["name", "submitted", "class", "age"])
def test_the_first_by_a_fact_are_those_of_all_runs(history: History, name: str) -> None:
    every = list(find_in(history, [])(RunFilter(), SkippedRuns()))
    for descending in (False, True):
        expected = first_runs(len(every), every, FACTS[name], NOW, descending=descending)
        found = first(
            history, find_in(history, []), RunFilter(), FACTS[name], descending=descending
        )
        assert found.runs == expected[:30]


def test_a_short_history_is_read_once(tmp_path: Path) -> None:
    short, random = History(tmp_path / "history.jsonl"), Random(SEED)
    short.intend(*(record_of(number, random) for number in range(40)))
    searches: list[RunFilter] = []

    def find(wanted: RunFilter, left_out: SkippedRuns) -> Iterator[FoundRun]:
        searches.append(wanted)
        return find_in(short, [])(wanted, left_out)

    first(short, find, RunFilter(), metric_column(MetricValue("loss")), descending=True)
    assert searches == [RunFilter()]
