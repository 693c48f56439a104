"""Runs side by side: speed, use, cost, their spread over seeds, and what follows from them."""

import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.cli.terminal import Screen
from batchml.clock import SystemClock
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.cost.bill import Bill, bill_from_history
from batchml.jobs.code import pack
from batchml.model.params import is_seed
from batchml.model.run import Attempt, JobStatus, MetricRange, Record, Run
from batchml.runs.compare.conclusions import WorkerOffer, conclude
from batchml.runs.compare.figures import (
    MeanValue,
    MeasuredRun,
    RunGroup,
    figures_of,
    group_runs,
    mean_value,
)
from batchml.runs.compare.render import (
    fact_rows,
    figure_rows,
    make_charts,
    tables,
    title_of,
    to_json,
    write_page,
)
from batchml.runs.compare.service import changed_files
from batchml.runs.metrics.pace import Pace, PaceLog, PaceReader
from batchml.runs.metrics.series import Sample, Series
from batchml.runs.metrics.usage import NodeRun, UsageSample
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.log_marks import metrics_marks
from batchml.runtime.protocol.variables import fill_command

NOW = 10_000_000
COMMAND = ["train", "--lr", "{lr}", "--seed", "{seed}"]


def job_id(number: int) -> str:
    return f"6b0e{number:04d}-0000-4000-8000-000000000000"


def measured(
    number: int = 1,
    *,
    seconds: float = 3600,
    usd: float | None = 1.408,
    steps: float = 1000,
    metrics: dict[str, float] | None = None,
    params: dict[str, str | int | float | bool] | None = None,
    **more: object,
) -> MeasuredRun:
    """A run that took `seconds` for its steps and cost `usd`."""
    stop = 1_000_000 + int(seconds * 1000)
    attempt = Attempt(started_at=1_000_000, stopped_at=stop, exit_code=0)
    params = {"lr": 0.1, "seed": number} if params is None else params
    run = Run(
        job_id(number), "train", "gpu", JobStatus.SUCCEEDED, created_at=999_000,
        started_at=1_000_000, stopped_at=stop, attempts=(attempt,), vcpus=4, memory_mib=1024,
        gpus=1, params=params, exit_code=0, command=tuple(fill_command(COMMAND, params)),
    )  # fmt: skip
    record = Record(
        job_id=job_id(number), code="s3://b/code/c0de.tar", spec={"command": COMMAND},
        metrics=metrics or {},
    )  # fmt: skip
    bill = Bill(run.job_id, is_free=True) if usd is None else bill_from_history(run, usd)
    values = {"steps": Pace(steps, seconds, steps), "bill": bill, **more}
    return MeasuredRun(FoundRun(run, record), **values)  # type: ignore[arg-type]


def grouped(*runs: MeasuredRun) -> list[RunGroup]:
    return group_runs([[each] for each in runs], NOW)


# --- the pace ---


def paced(*steps: tuple[float, float]) -> Pace | None:
    reader = PaceReader()
    for step, at in steps:
        reader.note(step, at)
    return reader.pace()


def test_steps_before_the_first_report_are_done_too() -> None:
    assert paced((10, 5.0), (20, 7.0), (30, 9.0)) == Pace(20, 4.0, 30)
    assert paced((0, 5.0), (1, 7.0)) == Pace(1, 2.0, 2)
    assert paced((7, 5.0)) == Pace(0, 0.0, None)
    assert paced((math.nan, 5.0)) is None


def test_the_time_between_attempts_is_no_time_of_steps() -> None:
    reader = PaceReader()
    for step, at in ((1, 0.0), (2, 1.0), (3, 2.0)):
        reader.note(step, at)
    reader.new_attempt()
    for step, at in ((3, 1000.0), (4, 1001.0)):
        reader.note(step, at)
    assert reader.pace() == Pace(3, 3.0, 4)


def test_a_program_that_begins_an_earlier_step_again_has_a_new_stretch() -> None:
    assert paced((1, 0.0), (5, 4.0), (3, 50.0), (6, 53.0)) == Pace(7, 7.0, 9)


@pytest.mark.parametrize(
    ("patterns", "lines", "steps", "epochs"),
    [
        ({}, ["epoch 1/3 loss=1", "epoch 2/3", "epoch 2/3 step 5/9"], None, 1),
        ({}, ["Epoch[0] Batch [20]", "Epoch[1] Batch [20]", "best epoch: 1.5"], None, 1),
        ({"step": r"it (\d+)"}, ["it 5", "it 9"], 4, None),
        ({"step": r"epoch (\d+)"}, ["epoch 1", "epoch 4"], None, 3),
        ({"epoch": r"E(\d+)"}, ["E1", "E2", "epoch 77"], None, 1),
        ({}, metrics_marks([{"step": 2, "epoch": 0, "loss": 1}, {"step": 8, "epoch": 1}]), 6, 1),
        ({}, ["no step", "3 epochs will follow"], None, None),
    ],
)
def test_steps_and_epochs_are_read_from_reports_patterns_and_common_lines(
    patterns: dict[str, str], lines: list[str], steps: float | None, epochs: float | None
) -> None:
    log = PaceLog(patterns)
    for place, line in enumerate(lines):
        log.read(place * 1000, line)
    found = [each.pace() for each in (log.steps, log.epochs)]
    assert [each.count if each else None for each in found] == [steps, epochs]


# --- figures ---


def test_the_figures_of_a_run_are_its_metrics_speed_and_cost() -> None:
    run = measured(seconds=1800, usd=0.9, steps=100, epochs=Pace(4, 1800, 5))
    found = figures_of(run, NOW)
    assert found["speed", "secondsPerStep"] == 18
    assert found["speed", "epochsPerHour"] == 8
    assert found["speed", "waited"] == 1
    assert found["cost", "usdPerHour"] == pytest.approx(1.8)
    assert found["cost", "usdPerStep"] == pytest.approx(0.009)
    assert found["cost", "usdPerEpoch"] == pytest.approx(0.18)
    assert all(math.isfinite(value) for value in found.values())


def test_without_prices_and_steps_there_are_no_such_figures() -> None:
    found = figures_of(measured(usd=None, steps=0), NOW)
    assert {name[1] for name in found} == {"seconds", "waited"}


def test_first_best_and_last_values_are_figures() -> None:
    run = measured(metrics={"acc": 0.5})
    record = run.found.record
    assert record is not None
    ranges, directions = {"acc": MetricRange(0.1, 0.1, 0.9)}, {"acc": "max"}
    full = Record(metrics=record.metrics, ranges=ranges, directions=directions)
    found = figures_of(MeasuredRun(FoundRun(run.found.run, full)), NOW)
    assert [found["metrics", "acc", each] for each in ("first", "best", "last")] == [0.1, 0.9, 0.5]


def use(gpu: float, cpu: float) -> tuple[UsageSample, ...]:
    run = measured().found.run
    assert run is not None
    series = {
        name: Series(name, (Sample(value, 1.0, None), Sample(value, 2.0, None)))
        for name, value in (("gpu", gpu), ("cpu", cpu), ("memory", 100.0))
    }
    return (UsageSample(NodeRun("node 0", run), series=series),)


def test_use_is_the_cpu_of_all_nodes_and_the_mean_gpu() -> None:
    found = figures_of(measured(uses=use(50.0, 2.0) + use(100.0, 3.0)), NOW)
    shown = {name[1]: value for name, value in found.items() if name[0] == "use"}
    assert shown == {"cpu": 5.0, "vcpus": 8.0, "memory": 100.0, "gpu": 75.0}


# --- seeds ---


def test_names_of_seeds() -> None:
    assert all(map(is_seed, ("seed", "random_seed", "data-seed", "SEED")))
    assert not any(map(is_seed, ("seeds", "seedling", "lr", "seed_everything")))


def test_runs_that_differ_only_in_the_seed_are_one_group_with_mean_and_spread() -> None:
    runs = [measured(number, metrics={"acc": 0.1 * number}) for number in (1, 2, 3)]
    (group,) = grouped(*runs)
    acc = group.figures["metrics", "acc", "last"]
    assert [acc.mean, acc.sd, acc.n] == pytest.approx([0.2, 0.1, 3])
    assert group.facts["params.seed"] == "1, 2, 3"
    assert group.facts["command"] == " ".join(COMMAND)


def test_the_same_run_again_and_another_parameter_are_columns_of_their_own() -> None:
    again = [measured(number, params={"lr": 0.1, "seed": 0}) for number in (1, 2)]
    assert [len(each.runs) for each in grouped(*again)] == [1, 1]
    other = measured(3, params={"lr": 0.2, "seed": 5})
    groups = grouped(measured(1), other, measured(2))
    assert [len(each.runs) for each in groups] == [2, 1]
    assert [each.label for each in groups] == ["lr=0.1", "lr=0.2"]


def test_labels_are_unique_even_if_nothing_differs() -> None:
    same = [measured(number, params={}) for number in (1, 2)]
    assert [each.label for each in grouped(*same)] == ["6b0e0001", "6b0e0002"]


def test_children_of_an_array_are_one_group() -> None:
    def child(index: int) -> MeasuredRun:
        run = measured(params={}, metrics={"acc": float(index)})
        assert run.found.run is not None
        own = replace(run.found.run, job_id=f"{job_id(1)}:{index}")
        return replace(run, found=FoundRun(own, run.found.record))

    array, single = group_runs([[child(0), child(1)], [measured(2, params={})]], NOW)
    assert array.figures["metrics", "acc", "last"].n == 2
    assert [title_of(each) for each in (array, single)] == [
        "train 6b0e0001, 2 children", "train 6b0e0002",
    ]  # fmt: skip


def test_a_single_value_has_no_deviation() -> None:
    assert mean_value([2.0]) == MeanValue(2.0, None, 1)


# --- conclusions ---


@pytest.mark.parametrize(
    ("faster", "per_dollar", "per_step"), [(1.94, "+23 %", "-19 %"), (2.05, "+30 %", "-23 %")]
)
def test_better_price_for_performance_is_two_figures(
    faster: float, per_dollar: str, per_step: str
) -> None:
    """The classic claim of 23 %, by either reading: a GPU host with and without a CPU host."""
    hours = 1 / faster
    alone = measured(1, params={"lr": 1})
    both = measured(2, params={"lr": 2}, seconds=3600 * hours, usd=(1.408 + 0.816) * hours)
    (conclusion,) = conclude(grouped(alone, both), {})
    assert f"{per_dollar} steps for a dollar, {per_step} dollars for a step" in conclusion.text
    assert conclusion.text.endswith("; it pays from 1.58 times as fast.")
    assert conclusion.figures["timesAsFast"] == pytest.approx(faster)


def test_steps_of_different_jobs_are_not_compared() -> None:
    one, other = measured(1), measured(2)
    assert other.found.run is not None
    renamed = FoundRun(replace(other.found.run, name="other"), other.found.record)
    assert conclude(grouped(one, replace(other, found=renamed)), {}) == []


def test_without_prices_nothing_is_said_about_them() -> None:
    free = [measured(number, params={"lr": number}, usd=None) for number in (1, 2)]
    assert conclude(grouped(*free), {}) == []


def waiting(percent: float, **more: object) -> list[RunGroup]:
    return grouped(measured(metrics={"data_wait": percent}, **more))  # type: ignore[arg-type]


def test_a_wait_for_data_is_weighed_against_the_price_of_workers() -> None:
    groups = waiting(64)
    (conclusion,) = conclude(groups, {groups[0].label: WorkerOffer(16, 0.816)})
    assert conclusion.text == (
        "train: the GPU waited 64 % of the time for data: 1 CPU worker of 16 vCPU would pay from "
        "1.58; it can be up to 2.78 times as fast."
    )
    (conclusion,) = conclude(groups, {groups[0].label: WorkerOffer(4, 0.408)})
    assert "2 CPU workers of 4 vCPU would pay from 1.58" in conclusion.text
    (conclusion,) = conclude(groups, {groups[0].label: WorkerOffer(4, 1.408)})
    assert "would not pay: they pay from 3.00, and it can be 2.78 times" in conclusion.text
    (conclusion,) = conclude(groups, {groups[0].label: WorkerOffer(4)})
    assert "with 2 CPU workers of 4 vCPU it could be up to 2.78 times as fast" in conclusion.text


@pytest.mark.parametrize("percent", [0, 19, 100, 250, -5])
def test_a_short_or_impossible_wait_gives_no_advice(percent: float) -> None:
    groups = waiting(percent)
    assert conclude(groups, {groups[0].label: WorkerOffer(4, 0.1)}) == []


def test_an_idle_gpu_waits_for_data_only_if_the_cpus_are_busy() -> None:
    busy, idle = (grouped(measured(uses=use(36.0, cpu))) for cpu in (3.9, 1.0))
    offers = {"train": WorkerOffer(4, 0.408)}
    (conclusion,) = conclude(busy, offers)
    assert "the CPUs were busy and the GPU waited 64 % of the time for data" in conclusion.text
    assert conclude(idle, offers) == []


# --- what is shown ---


def test_the_table_has_a_row_for_each_figure_and_what_differs() -> None:
    groups = grouped(
        measured(1, metrics={"acc": 0.5}), measured(2, metrics={"acc": 0.75}),
        measured(3, params={"lr": 0.2, "seed": 0}, seconds=7200),
    )  # fmt: skip
    rows = [row for row in fact_rows(groups) if row.matters] + figure_rows(groups)
    (text,) = tables(groups, rows, Screen(0, False))
    lines = {line[:18].strip(): line[18:].split() for line in text.splitlines()}
    assert lines["params.lr"] == ["0.1", "0.2"]
    assert lines["acc"] == ["0.625", "\u00b1", "0.18"]
    assert lines["time of a step"] == ["3.6", "s", "\u00b1", "0", "ms", "7.2", "s"]
    assert "queue" not in lines and "status" not in lines
    assert {row.name for row in fact_rows(groups)} > {"queue", "status"}


def test_of_runs_with_several_seeds_the_seeds_and_their_number_are_shown() -> None:
    groups = grouped(*(measured(seed, metrics={"acc": 0.5}) for seed in (1, 2, 3)))
    rows = [row for row in fact_rows(groups) if row.matters] + figure_rows(groups)
    heading, *lines = tables(groups, rows, Screen(0, False))[0].splitlines()
    assert heading.split("train ")[1].strip() == "6b0e0001, 3 runs"
    assert "params.seed 1, 2, 3" in [" ".join(line.split()) for line in lines]
    alone = fact_rows(grouped(measured(1)))
    assert not any(row.matters for row in alone if row.name == "params.seed")


def test_the_files_that_differ_between_two_codes_are_named(tmp_path: Path) -> None:
    environ = {"BATCHML_HOME": str(tmp_path / "h")}
    context = Context(load_settings(environ, tmp_path, "local"), SystemClock(), tmp_path)
    (tmp_path / "empty").mkdir()
    context.home.code.mkdir(parents=True)
    groups: list[RunGroup] = []
    codes: list[dict[str, bytes]] = [{"train.py": b""}, {"train.py": b"", "sweep.toml": b"x"}]
    for number, files in enumerate(codes, 1):
        archive = pack(tmp_path / "empty", more=files)
        (context.home.code / archive.name).write_bytes(archive.data)
        found = measured(number)
        assert found.found.record is not None
        record = replace(found.found.record, code=str(context.home.code / archive.name))
        groups += grouped(replace(found, found=FoundRun(found.found.run, record)))
    assert changed_files(context, *groups) == ["sweep.toml"]
    (context.home.code / archive.name).unlink()
    assert changed_files(context, *groups) == []


def test_groups_that_do_not_fit_a_window_are_in_tables_below() -> None:
    groups = grouped(*(measured(n, params={"lr": n}) for n in range(1, 8)))
    rows = figure_rows(groups)
    found = tables(groups, rows, Screen(80, False))
    assert len(found) > 1
    assert max(len(line) for text in found for line in text.splitlines()) <= 80
    titles = " ".join(text.splitlines()[0] for text in found)
    assert all(f"6b0e{number:04d}" in titles for number in range(1, 8))


def test_json_has_every_figure_with_its_spread() -> None:
    groups = waiting(64)
    document = json.loads(json.dumps(to_json(groups, conclude(groups, {"train": WorkerOffer(4)}))))
    (group,) = document["groups"]
    assert group["metrics"]["data_wait"]["last"] == {"mean": 64, "sd": None, "n": 1}
    assert group["cost"]["usdPerHour"]["mean"] == pytest.approx(1.408)
    assert group["runs"][0]["jobId"] == job_id(1)
    assert document["conclusions"][0]["waitPercent"] == 64


def test_the_page_is_one_file_with_a_curve_for_each_run_and_no_foreign_html(
    tmp_path: Path,
) -> None:
    def curve(*values: float) -> dict[str, Series]:
        samples = [Sample(value, 100.0 + i, float(i)) for i, value in enumerate(values)]
        return {"<loss>": Series("<loss>", tuple(samples))}

    groups = grouped(
        measured(1, series=curve(3, 2, 1)), measured(2, series=curve(3, math.nan, 1)),
        measured(3, params={"lr": "<b>", "seed": 0}, series=curve(2), uses=use(50.0, 1.0)),
    )  # fmt: skip
    charts = make_charts(groups)
    assert [chart.title for chart in charts][:2] == ["<loss>", "CPU, cores"]
    assert [curve.colour for curve in charts[0].curves] == [0, 0, 1]
    assert charts[0].label == "step"
    rows = fact_rows(groups) + figure_rows(groups)
    write_page(tmp_path / "a.html", groups, rows, conclude(groups, {}))
    page = (tmp_path / "a.html").read_text()
    assert "<b>" not in page and "&lt;loss&gt;" in page and "<script" not in page
    assert page.count("<polyline") == 4 + 3  # one is in two parts; three kinds of resource use
