"""Columns of `ls`: which names there are, what they show, and how runs are sorted by them."""

import pytest

from batchml.errors import UsageError
from batchml.model.run import JobStatus, MetricRange, Record, Run
from batchml.runs.compare.columns import (
    DEFAULT,
    FACTS,
    KnownNames,
    first_runs,
    known_names,
    read_column,
    to_rows,
)
from batchml.runs.compare.facts import describe_unused, unused_params
from batchml.runs.compare.figures import MeasuredRun, group_runs
from batchml.runs.compare.render import fact_rows
from batchml.runs.search import FoundRun

NOW = 100_000
KNOWN = KnownNames(frozenset({"lr", "epochs"}), frozenset({"acc", "lr"}))


def found(job_id: str = "6b0e0000-0000-4000-8000-000000000001", **record: object) -> FoundRun:
    values = {"metrics": {"acc": 0.5}, "ranges": {"acc": MetricRange(0.1, 0.1, 0.9)},
              "params": {"lr": 0.1}, "cost": 1.25}  # fmt: skip
    run = Run(
        job_id, "train", "gpu", JobStatus.SUCCEEDED, created_at=40_000, started_at=45_000,
        stopped_at=50_000, vcpus=2, memory_mib=2048, image="x:1", exit_code=0,
    )  # fmt: skip
    return FoundRun(run, Record(job_id=job_id, **{**values, **record}))  # type: ignore[arg-type]


def cells(names: str, run: FoundRun) -> list[str]:
    columns = [read_column(name, "--columns", KNOWN) for name in names.split(",")]
    return to_rows(columns, [run], NOW)[1]


def test_facts_parameters_and_metrics_are_columns() -> None:
    assert cells("id,STATUS,class,code,age,ran,waited,cost", found()) == [
        "6b0e0000", "SUCCEEDED", "succeeded", "0", "1:00", "0:05", "0:05", "$1.25",
    ]  # fmt: skip
    assert cells("vcpus,memory,gpus,image,params", found()) == ["2", "2048M", "", "x:1", "lr=0.1"]
    assert cells("lr, epochs,acc,max(acc),first(acc)", found()) == ["0.1", "", "0.5", "0.9", "0.1"]


def test_parameters_that_no_word_of_the_command_uses_are_marked() -> None:
    spec = {"command": ["t", "--lr", "1"], "params": {"lr": 0.1}}
    assert cells("lr,params", found(spec=spec)) == ["0.1*", "lr=0.1*"]
    used = {**spec, "command": ["t", "{lr}"]}
    assert cells("lr,params", found(spec=used)) == ["0.1", "lr=0.1"]
    (group,) = group_runs([[MeasuredRun(found(spec=spec))]], NOW)
    assert {row.name: row.cells for row in fact_rows([group])}["params.lr"] == ["0.1*"]
    assert describe_unused(unused_params(found(spec=spec))).startswith("* lr: no word of")
    assert describe_unused(unused_params(found(spec=used))) == ""


def test_a_metric_whose_last_value_is_not_finite_says_so_and_sorts_last() -> None:
    diverged = found("diverged", metrics={})  # its range is known
    assert cells("acc,min(acc)", diverged) == ["nan/inf", "0.1"]
    assert cells("acc", found(metrics={}, ranges={})) == [""]
    acc = read_column("acc", "--sort", KNOWN)
    for descending in (False, True):
        (_, last) = first_runs(9, [diverged, found()], acc, NOW, descending=descending)
        assert last is diverged


def test_a_name_that_a_parameter_and_a_metric_have_is_the_parameter() -> None:
    both = found(metrics={"lr": 0.01})
    assert cells("lr,params.lr,metrics.lr", both) == ["0.1", "0.1", "0.01"]


def test_a_forgotten_run_has_what_the_history_knows() -> None:
    forgotten = FoundRun(None, Record(job_id="abcd1234-5", name="train", queue="q", at=40_000))
    (row,) = to_rows([FACTS[name] for name in DEFAULT], [forgotten], NOW)[1:]
    assert row == ["abcd1234-5", "train", "q", "not known to the server", "", "", "1:00", ""]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stat", "--sort stat: no such column. Did you mean 'status'?"),
        ("epoch", "Did you mean 'epochs'?"),
        ("", "Columns: id, name, "),
        ("params.acc", "parameters: epochs, lr; metrics: acc, lr."),
        ("mean(acc)", "mean(acc): no such function."),
        ("max(los)", "no such column."),
    ],
)
def test_an_unknown_column_is_named_with_those_that_exist(name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_column(name, "--sort", KNOWN)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_those_of_runs_and_of_the_history_and_of_no_child() -> None:
    runs = [found(), found(metrics={"f1:3": 1.0}, patterns={"step": "x", "a": "y"})]
    names = known_names(runs, ["seed"], ["loss:2", "step"])
    assert names.params == {"lr", "seed"}
    assert names.metrics == {"acc", "f1", "f1:3", "a", "loss", "loss:2"}


def test_runs_without_a_value_come_last_in_either_direction() -> None:
    runs = [
        found("a", metrics={"acc": 0.5}), found("b", metrics={}),
        found("c", metrics={"acc": 0.75}), found("d", metrics={"acc": 0.25}),
    ]  # fmt: skip
    column = read_column("acc", "--sort", KNOWN)
    assert [each.job_id for each in first_runs(9, runs, column, NOW)] == ["d", "a", "c", "b"]
    assert [each.job_id for each in first_runs(9, runs, column, NOW, descending=True)] == [
        "c", "a", "d", "b",
    ]  # fmt: skip


def test_numbers_are_sorted_as_numbers_and_before_texts() -> None:
    runs = [found(str(value), params={"lr": value}) for value in ("auto", 10, 9, True)]
    column = read_column("lr", "--sort", KNOWN)
    assert [each.job_id for each in first_runs(9, runs, column, NOW)] == ["True", "9", "10", "auto"]
