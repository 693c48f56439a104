"""Finding runs: conditions, filters, and one answer out of AWS and the history."""

from collections.abc import Iterator, Sequence
from errno import ENOSPC
from itertools import islice
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi
from batchml.errors import UsageError
from batchml.history import History, end_record
from batchml.model.run import Attempt, JobStatus, MetricRange, Record, Run
from batchml.runs.metrics.conditions import MetricCondition, MetricValue, read_condition
from batchml.runs.search import (
    COMMIT_TAG,
    LISTED_WITHIN,
    LOST_AFTER,
    MAX_OTHERS,
    FoundRun,
    RunFilter,
    SkippedRuns,
    matches,
    read_commit,
    read_states,
    search,
)

ANY = RunFilter()


def job_id(number: int) -> str:
    return f"6b0e0000-0000-4000-8000-{number:012d}"


def run(number: int, status: str = "SUCCEEDED", **more: object) -> Run:
    values = {"job_id": job_id(number), "name": "train", "queue": "default",
              "status": JobStatus(status), "created_at": number, "exit_code": 0}  # fmt: skip
    return Run(**{**values, **more})  # type: ignore[arg-type]


class FakeBatch(JobApi):
    """Lists and describes `runs`; keeps what it was asked."""

    is_local = True

    def __init__(self, *runs: Run, is_local: bool = True) -> None:
        self.is_local = is_local
        self.runs = {run.job_id: run for run in runs}
        self.calls: list[str] = []
        self.hidden: dict[str, Run] = {}  # children, which are listed on request only

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> Iterator[Run]:
        self.calls.append("ListJobs")
        for each in sorted(self.runs.values(), key=lambda run: -(run.created_at or 0)):
            if each.queue == queue and (each.created_at or 0) >= since:
                # ListJobs tells less than DescribeJobs.
                yield Run(each.job_id, each.name, queue, each.status, created_at=each.created_at)

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        self.calls.append(f"DescribeJobs {len(job_ids)}")
        known = self.runs | self.hidden
        return {each: known[each] for each in job_ids if each in known}


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "history.jsonl")


def remembered(history: History, number: int, **more: object) -> None:
    values = {"job_id": job_id(number), "name": "train", "env": "local", "queue": "default",
              "at": number}  # fmt: skip
    history.add(Record(**{**values, **more}))  # type: ignore[arg-type]


def found(
    api: JobApi, history: History, wanted: RunFilter = ANY, queues: Sequence[str] = ("default",)
) -> list[FoundRun]:
    return list(search(api, history, "local", queues, wanted))


def numbers(found: Sequence[FoundRun]) -> list[int]:
    return [int(each.job_id[-12:]) for each in found]


# --- what is written on the command line ----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("val_accuracy>0.98", MetricCondition("val_accuracy", ">", 0.98)),
        ("loss <= 1e-3", MetricCondition("loss", "<=", 0.001)),
        ("f1==1", MetricCondition("f1", "==", 1.0)),
        ("a=-2", MetricCondition("a", "=", -2.0)),
        ("max(val_accuracy)>0.98", MetricCondition("val_accuracy", ">", 0.98, "max")),
        ("last(loss(train)) < 1", MetricCondition("loss(train)", "<", 1.0, "last")),
    ],
)
def test_conditions_are_read(text: str, condition: MetricCondition) -> None:
    assert read_condition(text, "--metric") == condition


@pytest.mark.parametrize("text", ["loss", "loss>", ">1", "loss>good", "loss=>1", ""])
def test_other_texts_are_no_conditions(text: str) -> None:
    with pytest.raises(UsageError, match="in quotes"):
        read_condition(text, "--metric")


def test_an_unknown_function_of_a_metric_is_named() -> None:
    with pytest.raises(UsageError, match=r"no such function\. Did you mean 'max'"):
        read_condition("maxx(loss)>1", "--metric")


def with_loss(last: float, *range_: float, **directions: str) -> Record:
    ranges = {"loss": MetricRange(*range_)} if range_ else {}
    return Record(metrics={"loss": last}, ranges=ranges, directions=directions)


def test_a_metric_that_a_run_does_not_have_fulfils_nothing() -> None:
    assert MetricCondition("loss", "<", 1.0).holds(with_loss(0.5))
    assert not MetricCondition("loss", "<", 1.0).holds(with_loss(float("nan")))
    assert not MetricCondition("loss", "!=", 1.0).holds(Record())


@pytest.mark.parametrize(
    ("function", "value"),
    [("first", 2.0), ("last", 0.5), ("min", 0.25), ("max", 3.0), ("best", 0.25)],
)
def test_each_function_has_its_value(function: str, value: float) -> None:
    known = with_loss(0.5, 2.0, 0.25, 3.0, loss="min")
    assert MetricCondition("loss", "==", value, function).holds(known)


def test_an_array_has_the_mean_of_its_children_or_the_value_of_one() -> None:
    ranges = {"loss:0": MetricRange(2.0, 0.25, 3.0), "loss:4": MetricRange(4.0, 0.5, 5.0)}
    metrics = {"loss:0": 0.5, "loss:4": 1.5, "other:0": 9.0}
    record = Record(metrics=metrics, ranges=ranges, directions={"loss": "min"})
    values = {"last": 1.0, "first": 3.0, "min": 0.25, "max": 5.0, "best": 0.25}
    assert {each: MetricValue("loss", each).read(record) for each in values} == values
    assert MetricValue("loss").read(None) is None
    assert MetricValue("loss:4").read(record) == 1.5


def test_the_best_value_is_unknown_without_a_direction_and_in_old_records() -> None:
    best = MetricCondition("loss", "<", 9.0, "best")
    assert not best.holds(with_loss(0.5, 2.0, 0.25, 3.0))
    assert not best.holds(with_loss(0.5, loss="min"))


def test_states_and_classes_are_read_in_any_case() -> None:
    assert read_states(["running", "out-of-memory"], "--status") == {"RUNNING", "out-of-memory"}
    assert read_states(["succeeded"], "--status") == {"SUCCEEDED"}
    with pytest.raises(UsageError, match="Did you mean 'RUNNING'"):
        read_states(["RUNING"], "--status")


def test_a_commit_is_given_by_four_digits_or_more() -> None:
    assert read_commit("ABCD12", "--commit") == "abcd12"
    for text in ("abc", "main", "abcdefgh"):
        with pytest.raises(UsageError):
            read_commit(text, "--commit")


# --- what matches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "yes"),
    [
        (RunFilter(params={"lr": "1e-1"}), True),
        (RunFilter(params={"lr": "0.2"}), False),
        (RunFilter(params={"amp": "true", "opt": "sgd"}), True),
        (RunFilter(params={"nothing": ""}), False),
        (RunFilter(tags={"team": "vision"}), True),
        (RunFilter(tags={"team": "Vision"}), False),
        (RunFilter(commit="abcd"), True),
        (RunFilter(commit="bcde"), False),
        (RunFilter(metrics=(MetricCondition("acc", ">", 0.9),)), True),
        (
            RunFilter(
                metrics=(MetricCondition("acc", ">", 0.9), MetricCondition("acc", "<", 0.91))
            ),
            False,
        ),
        (RunFilter(states=frozenset({"app-error"})), True),
        (RunFilter(states=frozenset({"SUCCEEDED"})), False),
        (RunFilter(name="train"), True),
        (RunFilter(name="trai"), False),
        (RunFilter(name="train-2abcdefghijklmnop"), True),
        (RunFilter(queue="other"), False),
        (RunFilter(since=8), False),
    ],
)
def test_each_filter(wanted: RunFilter, yes: bool) -> None:
    told = run(
        7, "FAILED", exit_code=2, tags={"team": "vision", COMMIT_TAG: "abcdef"},
        params={"lr": 0.1, "amp": True, "opt": "sgd"}, job_name="train-2abcdefghijklmnop",
    )  # fmt: skip
    assert matches(FoundRun(told, Record(metrics={"acc": 0.95})), wanted) is yes


# --- out of AWS and the history -------------------------------------------------------------


def test_runs_of_both_come_newest_first_and_each_once(history: History) -> None:
    remembered(history, 1)
    history.add_ends([run(1)])  # seen before AWS forgot it
    remembered(history, 3)
    remembered(history, 4)  # forgotten, and nobody saw its end
    api = FakeBatch(run(2), run(3, "RUNNING"), run(5))
    all_ = found(api, history)
    assert numbers(all_) == [5, 4, 3, 2, 1]
    assert [each.run.status.value if each.run else None for each in all_] == [
        "SUCCEEDED", None, "RUNNING", "SUCCEEDED", "SUCCEEDED",
    ]  # fmt: skip
    assert api.calls == ["ListJobs", "DescribeJobs 4"]


def test_an_end_that_was_seen_once_is_not_asked_for_again(history: History) -> None:
    remembered(history, 1)
    ended = run(1, "FAILED", exit_code=9, attempts=(Attempt(exit_code=9, host="i-0"),))
    api = FakeBatch(ended)
    first, again = found(api, history), found(api, history)
    assert api.calls == ["ListJobs", "DescribeJobs 1", "ListJobs"]
    assert first[0].run == ended
    assert again[0].run is not None
    assert (again[0].run.exit_code, again[0].run.attempts) == (9, ended.attempts)


def test_an_array_began_with_its_first_child_which_is_asked_once(history: History) -> None:
    remembered(history, 1, array_size=6)
    children = {"RUNNING": 2, "SUCCEEDED": 4}
    array = run(1, "PENDING", array_size=6, children=children)
    child = run(1, started_at=700, job_id=f"{array.job_id}:0")
    api = FakeBatch(array)
    api.hidden = {child.job_id: child}
    (going,) = found(api, history, RunFilter(states=frozenset({"RUNNING"})))  # AWS says PENDING
    assert going.run is not None and going.run.started_at == 700
    assert api.calls == ["ListJobs", "DescribeJobs 2"]
    api.runs[array.job_id] = replace(array, status=JobStatus.FAILED, children={"FAILED": 6})
    history.add_ends(api.runs.values())  # somebody saw its end and not when it began
    for calls in (["ListJobs", "DescribeJobs 1"], ["ListJobs"]):
        api.calls = []
        (ended,) = found(api, history)
        assert ended.run is not None
        assert (ended.run.status, ended.run.started_at) == (JobStatus.FAILED, 700)
        assert api.calls == calls


def test_what_aws_forgot_long_ago_is_asked_for_once(history: History) -> None:
    remembered(history, 1)
    remembered(history, 2, at=LOST_AFTER)
    now = LOST_AFTER + 3
    api = FakeBatch()
    for calls in ("DescribeJobs 2", "DescribeJobs 1"):
        assert numbers(list(search(api, history, "local", ["default"], ANY, now=now))) == [2, 1]
        assert api.calls[-1] == calls
    api.runs[job_id(1)] = run(1, "RUNNING")  # it was another account that did not know it
    (_, one) = search(api, history, "local", ["default"], ANY, now=now)
    assert one.run == run(1, "RUNNING")


def test_a_run_that_aws_does_not_show_yet_is_not_forgotten(history: History) -> None:
    remembered(history, 1)
    api = FakeBatch(is_local=False)
    (young,) = search(api, history, "local", ["default"], ANY, now=1 + LISTED_WITHIN)
    assert young.run is not None
    assert (young.run.status, young.run.job_id) == (JobStatus.SUBMITTED, job_id(1))
    (old,) = search(api, history, "local", ["default"], ANY, now=2 + LISTED_WITHIN)
    assert old.run is None
    (here,) = search(FakeBatch(), history, "local", ["default"], ANY, now=1 + LISTED_WITHIN)
    assert here.run is None


def test_no_more_is_asked_than_is_read(history: History) -> None:
    api = FakeBatch(*(run(number) for number in range(1000)))
    some = list(islice(search(api, history, "local", ["default"], RunFilter()), 31))
    assert len(some) == 31
    assert api.calls == ["ListJobs", "DescribeJobs 100"]
    few = list(islice(search(api, history, "local", ["default"], RunFilter(), first=31), 31))
    assert few == some
    assert api.calls[2:] == ["ListJobs", "DescribeJobs 31"]


def test_a_state_is_looked_for_after_the_look_that_is_newer(history: History) -> None:
    """A run that ListJobs calls RUNNING may have ended when DescribeJobs is asked."""
    api = FakeBatch(run(1, "RUNNING"), run(2, "FAILED", exit_code=1), run(3))
    listed = api.list_recent

    def late(queue: str, since: int = 0, name: str = "") -> Iterator[Run]:
        yield from list(listed(queue, since, name))
        api.runs[job_id(1)] = run(1, "FAILED", exit_code=1)

    api.list_recent = late  # type: ignore[method-assign]
    assert numbers(found(api, history, RunFilter(states=frozenset({"FAILED"})))) == [2, 1]
    assert api.calls[-1] == "DescribeJobs 2"  # 3 has ended otherwise for good


def test_metrics_are_measured_only_where_they_decide_and_only_once(history: History) -> None:
    remembered(history, 1, tags={"a": "b"})
    remembered(history, 2)
    remembered(history, 3, tags={"a": "b"})
    history.add(end_record(run(3), {"loss": 0.5}))
    api, asked = FakeBatch(run(1), run(2), run(3)), list[str]()

    def measure(run: Run, record: Record) -> Record:
        asked.append(run.job_id)
        return replace(record, metrics={"loss": 0.1})

    wanted = RunFilter(tags={"a": "b"}, metrics=(MetricCondition("loss", "<", 0.2),))
    some = list(search(api, history, "local", ["default"], wanted, measure))
    assert numbers(some) == [1]
    assert asked == [job_id(1)]  # not 2, which has another tag; not 3, which was read before

    wanted = RunFilter(tags={"a": "b"}, metrics=(MetricCondition("loss", "<", 0.2, "min"),))
    list(search(api, history, "local", ["default"], wanted, measure))
    assert asked[1:] == [job_id(3), job_id(1)]  # of 3 only the last value is known


def test_a_queue_and_a_time_are_filters_of_the_history_too(history: History) -> None:
    remembered(history, 1)
    remembered(history, 5, queue="other")
    remembered(history, 9)
    history.add_ends([run(1), run(5), run(9)])
    api = FakeBatch()
    assert numbers(found(api, history, RunFilter(queue="default", since=5))) == [9]
    assert numbers(found(api, history, RunFilter(queue="other"), ["other"])) == [5]


def test_a_full_disk_hides_no_run(tmp_path: Path) -> None:
    class Full(History):
        def _append(self, lines: object, durable: bool = False) -> None:
            raise OSError(ENOSPC, "No space left on device")

    remembered(History(tmp_path / "history.jsonl"), 1)
    remembered(History(tmp_path / "history.jsonl"), 2)
    api = FakeBatch(run(2))
    full = Full(tmp_path / "history.jsonl")
    assert numbers(list(search(api, full, "local", ["default"], ANY, now=2 * LOST_AFTER))) == [2, 1]


def test_a_long_command_is_the_one_that_was_asked_for() -> None:
    sent = run(1, command=("batchml-order",))
    assert FoundRun(sent, Record(command=("a", "b"))).command == ("a", "b")
    assert FoundRun(sent, None).command == ("batchml-order",)


# --- sweeps ---------------------------------------------------------------------------------

KEY = "2bcdefgh2345abcde"
TAGS = {"batchml:sweep": KEY}


def test_runs_of_a_sweep_are_left_out_unless_they_are_asked_for(history: History) -> None:
    remembered(history, 2, tags=TAGS)  # from here
    api = FakeBatch(run(1), run(2), run(3, tags=TAGS), run(4))  # 3: from elsewhere
    left_out = SkippedRuns()
    shown = search(api, history, "local", ["default"], ANY, left_out=left_out)
    assert numbers(list(shown)) == [4, 1] and left_out.sweeps == {KEY}
    assert numbers(found(api, history, RunFilter(tags=TAGS))) == [3, 2]
    assert numbers(found(api, history, RunFilter(name="train"))) == [4, 3, 2, 1]


def test_what_does_not_match_is_not_said_to_be_left_out(history: History) -> None:
    api = FakeBatch(run(1, tags=TAGS))
    left_out = SkippedRuns()
    wanted = RunFilter(states=frozenset({"FAILED"}))
    assert not list(search(api, history, "local", ["default"], wanted, left_out=left_out))
    assert not left_out.sweeps


def test_no_log_of_a_trial_is_read_for_a_metric(history: History) -> None:
    remembered(history, 1, tags=TAGS)
    wanted = RunFilter(metrics=(read_condition("loss<1", "--metric"),))

    def measure(run: Run, record: Record) -> Record:
        raise AssertionError("read")

    api = FakeBatch(run(1, tags=TAGS))
    assert not list(search(api, history, "local", ["default"], wanted, measure))


# --- projects -------------------------------------------------------------------------------


def test_only_runs_of_the_project_are_found_and_the_others_are_counted(history: History) -> None:
    remembered(history, 1, project="ours")
    remembered(history, 2, project="theirs")
    remembered(history, 3)  # of a version before projects
    tags = {"batchml:project": "ours"}
    api = FakeBatch(run(1), run(2), run(3), run(4, tags=tags), run(5))  # 4, 5: from elsewhere
    left_out = SkippedRuns()
    ours = RunFilter(project="ours")
    shown = list(search(api, history, "local", ["default"], ours, left_out=left_out))
    assert numbers(shown) == [4, 1]
    assert "DescribeJobs 3" in api.calls  # not the runs whose projects the history has
    left_out = SkippedRuns()
    nobodys = RunFilter(project="nobodys")
    assert not list(search(api, history, "local", ["default"], nobodys, left_out=left_out))
    assert left_out.of_projects == {"ours": 2, "theirs": 1, "": 2}
    assert numbers(found(api, history)) == [5, 4, 3, 2, 1]


def test_a_search_reads_a_limited_number_of_runs_of_others(history: History) -> None:
    remembered(history, 1, project="ours")
    api = FakeBatch(*(run(number) for number in range(1, MAX_OTHERS + 300)))
    left_out = SkippedRuns()
    ours = RunFilter(project="ours")
    shown = list(search(api, history, "local", ["default"], ours, left_out=left_out))
    assert numbers(shown) == [1] and left_out.is_cut
    assert len(api.calls) <= 2 + MAX_OTHERS // 100
