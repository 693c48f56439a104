"""The page that compares runs: which runs, what differs, and the values of its plots."""

import json
from typing import Any

import pytest

from batchml.dashboard.compare import (
    MOST_RUNS,
    ChosenRuns,
    choose_runs,
    compare_page,
    differences_panel,
    fact_rows,
    label_runs,
    results_panel,
    values_document,
    values_table,
)
from batchml.dashboard.curves import COLOURS, colours_of
from batchml.errors import UsageError
from batchml.model.run import JobStatus, MetricRange, Record, Run
from batchml.runs.compare.figures import MeasuredRun, group_runs
from batchml.runs.compare.service import ComparedRuns
from batchml.runs.search import FoundRun

NASTY = "</script><img src=x onerror=alert(1)>\x00\u202e\x1b[31m__proto__"


def found(
    job_id: str, loss: float | None = None, goal: str = "", name: str = "", **params: Any
) -> FoundRun:
    metrics = {} if loss is None else {"loss": loss}
    ranges = {} if loss is None else {"loss": MetricRange(loss, loss, loss)}
    record = Record(
        job_id=job_id, name=name or job_id, params=params, metrics=metrics, ranges=ranges,
        directions={"loss": goal} if goal else {}, code=f"/c/{params.get('lr', 0)}.tar.gz",
    )  # fmt: skip
    run = Run(
        job_id, name or job_id, "q", JobStatus.SUCCEEDED, image="img", vcpus=1,
        environment={"TOKEN": f"secret-{params.get('lr')}", "SAME": "x", "BATCHML_CODE": "y"},
    )  # fmt: skip
    return FoundRun(run, record)


def chosen(*runs: FoundRun) -> ChosenRuns:
    return ChosenRuns(runs, "runs=x", tuple(label_runs(runs)))


def test_runs_are_chosen_by_id_or_by_a_search_each_once() -> None:
    known = [found("a", lr=1), found("b", lr=2), found("c", lr=2)]
    assert choose_runs({"runs": "b,a,b,"}, known).ids == ["b", "a"]
    assert choose_runs({"q": "lr=2"}, known).ids == ["b", "c"]
    assert choose_runs({}, known).ids == choose_runs({"q": " "}, known).ids == []
    assert choose_runs({"q": "a b&c"}, known).query == "q=a+b%26c"


def test_too_many_runs_are_refused() -> None:
    with pytest.raises(UsageError, match=f"at most {MOST_RUNS}"):
        choose_runs({"runs": ",".join(map(str, range(MOST_RUNS + 1)))}, [])


def test_facts_that_differ_stand_first_and_the_equal_ones_are_folded() -> None:
    one, other = found("a", name="net", lr=0.1, n=4), found("b", name="net", lr=0.2, n=4)
    rows = {row.name: row for row in fact_rows([one, other])}
    assert rows["lr"].cells == ("0.1", "0.2") and rows["lr"].differs
    assert not rows["n"].differs and rows["image"].group == "Environment"
    page = str(differences_panel(chosen(one, other)))
    table, _, folded = page.partition("<details")
    assert "lr" in table and ">n<" not in table and ">n<" in folded and "img" in folded


def test_variables_may_be_secrets_and_are_only_said_to_be_equal_or_not() -> None:
    runs = [found("a", lr=1), found("b", lr=2), found("c", lr=1)]
    rows = {row.name: row.cells for row in fact_rows(runs)}
    assert rows["variable TOKEN"] == ("set (1)", "set (2)", "set (1)")
    assert rows["variable SAME"] == ("set", "set", "set")
    assert not any(name.startswith("variable BATCHML") for name in rows)
    assert "secret-1" not in str(compare_page(chosen(*runs), 0, "e"))


def test_the_values_have_columns_that_differ_and_are_valid_json() -> None:
    diverged = found("b", float("nan"), "min", lr="0.2", opt=3, n=4)
    runs = [found("a", 0.5, "min", lr=0.1, opt="sgd", n=4), diverged, found("c", lr=1, n=4)]
    document = values_document(chosen(*runs), 0)
    json.dumps(document, allow_nan=False)
    columns = {each["name"]: each for each in document["columns"]}
    assert columns["lr"]["values"] == [0.1, 0.2, 1.0]
    assert columns["opt"]["values"] == ["sgd", "3", None], "a text makes all of them texts"
    assert columns["loss"]["direction"] == "min"
    assert "n" not in columns and document["ids"] == ["a", "b", "c"]
    table = str(values_table(chosen(*runs), 0))
    assert table.count("<tr") == 4 and 'data-id="c"' in table


def test_a_parameter_and_a_metric_of_one_name_are_two_columns() -> None:
    runs = [found("a", 0.5), found("b", 0.4)]
    for each, value in zip(runs, ("mse", "mae"), strict=True):
        assert each.run is not None
        each.run.params["loss"] = value
    document = values_document(chosen(*runs), 0)
    columns = {each["name"]: each["values"] for each in document["columns"]}
    assert columns["params.loss"] == ["mse", "mae"] and columns["metrics.loss"] == [0.5, 0.4]


def test_the_best_of_a_metric_with_a_direction_is_marked() -> None:
    runs = [found("a", 0.5, "min", lr=1), found("b", 0.2, "min", lr=2)]
    groups = tuple(group_runs([[MeasuredRun(each)] for each in runs], 0))
    panel = str(results_panel(ComparedRuns(groups, ()), ["a", "b"]))
    assert panel.count("\u2605") == 1
    assert panel.index("0.5") < panel.index("0.2") < panel.index("\u2605")
    without = [found("a", 0.5, lr=1), found("b", 0.2, lr=2)]
    groups = tuple(group_runs([[MeasuredRun(each)] for each in without], 0))
    assert "\u2605" not in str(results_panel(ComparedRuns(groups, ()), ["a", "b"]))


def test_a_colour_belongs_to_its_run() -> None:
    ids = [f"job-{number}" for number in range(COLOURS)]
    colours = colours_of(ids)
    assert set(colours.values()) == set(range(COLOURS))
    assert colours_of(ids[:1]) == {ids[0]: colours[ids[0]]}
    assert set(colours_of([*ids, "more"]).values()) == {None}


def test_words_that_find_no_two_runs_are_said() -> None:
    known = [found("one"), found("two")]
    for words, said in (("zzzz", "No run has all of these words: zzzz."),
                        ("one", "Only one run has all of these words: one.")):  # fmt: skip
        assert said in str(compare_page(choose_runs({"q": words}, known), 0, "e"))


def test_without_two_runs_the_page_says_how_to_choose() -> None:
    for runs in ((), (found("a"),)):
        page = str(compare_page(chosen(*runs), 0, "e"))
        assert "the list of runs" in page and "data-panel" not in page


def test_texts_of_others_stay_texts() -> None:
    nasty = [found(each, 1.0, name=NASTY, **{NASTY: NASTY + each}) for each in "ab"]
    page = str(compare_page(chosen(*nasty), 0, NASTY, NASTY))
    for bad in ("<img", "\x00", "\u202e", "\x1b"):
        assert bad not in page
