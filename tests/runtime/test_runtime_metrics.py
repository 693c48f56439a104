"""From `report` in a program to marks in the log, and back to points: every value as it was."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.runtime.protocol.log_marks import (
    MARK,
    MAX_METRICS,
    LineSplitter,
    metrics_marks,
    parse_mark,
    read_points,
)
from batchml.runtime.telemetry.heartbeat import RankProgress
from batchml.runtime.telemetry.metrics import (
    EVERY,
    MAX_POINTS,
    MetricsRelay,
    append_point,
    report,
    thin_out,
)

NAMES = st.text(min_size=1, max_size=30)
NUMBERS = st.floats() | st.integers(-(2**60), 2**60)
POINTS = st.lists(st.dictionaries(NAMES, NUMBERS, min_size=1, max_size=5), max_size=20)


def carried(marks: list[str]) -> list[dict[str, float]]:
    """What a client reads of marks that went through a log."""
    found = []
    for mark in marks:
        kind, words = parse_mark(mark) or ("", {})
        assert kind == "metrics"
        found += read_points(words["points"])
    return found


def same(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
    return a.keys() == b.keys() and all(
        a[name] == b[name] or (math.isnan(a[name]) and math.isnan(b[name])) for name in a
    )


@given(POINTS)
def test_points_are_read_back_as_they_were_written(points: list[dict[str, float]]) -> None:
    marks = metrics_marks(points)
    assert all(mark.isascii() and "\n" not in mark for mark in marks)
    found = carried(marks)
    assert len(found) == len(points)
    assert all(map(same, found, points))


def test_no_mark_is_longer_than_an_event_can_carry() -> None:
    points = [{"step": step, "x" * 90: 0.1} for step in range(5_000)]
    marks = metrics_marks(points)
    assert max(map(len, marks)) <= MAX_METRICS
    assert [point["step"] for point in carried(marks)] == list(range(5_000))


@given(st.text(max_size=80))
def test_whatever_a_program_prints_as_points_is_survived(text: str) -> None:
    for point in read_points(text):
        assert all(isinstance(value, int | float) for value in point.values())


@pytest.mark.parametrize(
    "text",
    [
        "[1, null, [], \"a\", {}]", '[{"a": true}]', '[{"a": {}}]', '[{"a": "1"}]', '{"a": 1}',
        "[" * 100_000, f'[{{"a": {10**400}}}]', f'[{{"{"a" * 200}": 1}}]',
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_is_no_point_is_left_out(text: str) -> None:
    assert read_points(text) == []


@pytest.mark.parametrize(
    "message",
    ["::batchml metrics", "::batchml metrics 1", "::batchml usage cpu", "::batchml usage cpu=x",
     "::batchml ranks", "::batchml ranks 0", "::batchml ranks a=cpu:1"],
)  # fmt: skip
def test_what_only_looks_like_a_mark_is_a_line(message: str) -> None:
    assert parse_mark(message) is None


def test_a_program_cannot_forge_metrics() -> None:
    lines = LineSplitter(escape=True).feed(b'::batchml metrics [{"loss": 0}]\n')
    assert parse_mark(lines[0].decode()) is None


# --- report ---


class Tensor:
    def __float__(self) -> float:
        return 0.25


def test_report_adds_a_line_and_takes_what_float_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics"
    monkeypatch.setenv("BATCHML_METRICS", str(path))
    report(step=3, total=10, loss=cast(float, Tensor()), rate=math.nan)
    report(accuracy=1)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first.pop("time") > 1.6e9
    assert first == {"step": 3, "total": 10, "loss": 0.25, "rate": "nan"}
    assert second["accuracy"] == 1.0


def test_report_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        report(loss=cast(float, "low"))


def test_report_does_nothing_outside_a_run_and_never_ends_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BATCHML_METRICS", raising=False)
    report(loss=1.0)
    monkeypatch.setenv("BATCHML_METRICS", str(tmp_path / "no" / "such" / "folder"))
    report(loss=1.0)
    report(loss=2.0)
    assert capsys.readouterr().err.count("metrics are not recorded") == 1


def test_report_is_false_once_the_run_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATCHML_METRICS", raising=False)
    assert report(loss=1)
    monkeypatch.setenv("BATCHML_METRICS", str(tmp_path / "metrics"))
    assert report(loss=1)
    monkeypatch.setenv("BATCHML_STOP_FILE", str(tmp_path / "stop"))
    assert report(loss=1)
    (tmp_path / "stop").touch()
    assert not report(loss=1)
    assert len((tmp_path / "metrics").read_text().splitlines()) == 3


def test_of_ranks_that_train_together_the_first_reports_and_the_others_tell_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHML_METRICS", str(tmp_path / "metrics"))
    monkeypatch.setenv("BATCHML_STOP_FILE", str(tmp_path / "stop"))
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("BATCHML_PROGRESS", str(tmp_path / rank))
        assert report(step=7, loss=float(rank))
    (point,) = map(json.loads, (tmp_path / "metrics").read_text().splitlines())
    assert point["loss"] == 0.0
    told = [RankProgress.read((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert [each.step if each else None for each in told] == [7, 7]
    (tmp_path / "stop").touch()
    assert not report(step=8, loss=1)


def test_no_number_is_too_great_and_a_name_that_is_too_long_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics"
    monkeypatch.setenv("BATCHML_METRICS", str(path))
    report(step=10**400, loss=10**400, gain=-(10**400), **{"n" * 101: 1.0})
    report(**{"n" * 102: 1.0})
    point = json.loads(path.read_text().splitlines()[0])
    assert (point["loss"], point["gain"]) == ("inf", "-inf")
    assert not any(name.startswith("nn") for name in point)
    assert capsys.readouterr().err.count("is not recorded: its name has 101 characters") == 1


def test_a_pipe_in_the_place_of_the_file_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics"
    os.mkfifo(path)
    monkeypatch.setenv("BATCHML_METRICS", str(path))
    attempt = FakeAttempt(str(path))
    relay = relay_of(attempt)
    relay.tick(1.0)
    report(loss=1.0)
    relay.finish()
    assert attempt.marks == []


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    program = (
        "from batchml.runtime.telemetry.metrics import report\n"
        "for step in range(200): report(step=step, **{'m' * 90: 0.123456789})"
    )
    env = {**os.environ, "BATCHML_METRICS": str(tmp_path / "m")}
    children = [subprocess.Popen([sys.executable, "-c", program], env=env) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    steps = [json.loads(line)["step"] for line in (tmp_path / "m").read_bytes().splitlines()]
    assert sorted(steps) == sorted([*range(200)] * 2)


# --- companions ---


class FakeEnv:
    def __init__(self, metrics: str) -> None:
        self.metrics = metrics


class FakeAttempt:
    """What a companion is given, and what it wrote."""

    def __init__(self, metrics: str = "", pids: tuple[int, ...] = ()) -> None:
        self.env = FakeEnv(metrics)
        self.environ: Mapping[str, str] = {}
        self.marks: list[str] = []
        self._pids = list(pids)

    def pids(self) -> list[int]:
        return self._pids

    def mark(self, text: str) -> None:
        self.marks.append(MARK + text)


def relay_of(attempt: FakeAttempt) -> MetricsRelay:
    return MetricsRelay(cast(Any, attempt))


def test_the_relay_carries_points_soon_but_not_each_by_itself(tmp_path: Path) -> None:
    attempt = FakeAttempt(str(tmp_path / "m"))
    relay = relay_of(attempt)
    relay.tick(1.0)  # there is no file yet
    assert attempt.marks == []
    for step in range(4):
        append_point(attempt.env.metrics, {"step": step, "loss": 0.5})
        relay.tick(2.0 + step / 4)
    assert len(attempt.marks) == 1
    relay.tick(2.0 + EVERY)
    assert len(attempt.marks) == 2
    append_point(attempt.env.metrics, {"step": 4, "loss": 0.5})
    relay.finish()
    assert [point["step"] for point in carried(attempt.marks)] == [0, 1, 2, 3, 4]


def test_a_line_that_is_half_written_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    attempt = FakeAttempt(str(tmp_path / "m"))
    relay = relay_of(attempt)
    with open(attempt.env.metrics, "wb", buffering=0) as file:
        file.write(b'{"step": 1}\nno point\n{"st')
        relay.tick(1.0)
        file.write(b'ep": 2}\n{"step"')
        relay.finish()
    assert carried(attempt.marks) == [{"step": 1}, {"step": 2}]


def test_a_flood_is_thinned_and_a_rare_metric_survives_it(tmp_path: Path) -> None:
    points: list[dict[str, float]] = [{"step": step, "loss": 1.0} for step in range(10_000)]
    points.insert(7, {"step": 7, "accuracy": 0.5})
    kept = thin_out(points, MAX_POINTS)
    assert len(kept) == MAX_POINTS + 1
    assert {"step": 7, "accuracy": 0.5} in kept
    assert kept[-1]["step"] == 9_999
    assert kept == sorted(kept, key=lambda point: point["step"])
    assert thin_out(points[:50], MAX_POINTS) == points[:50]
