"""When a run that is held has been left idle, and the program that only holds."""

import math
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.runtime.exec.presence import prompt_variables
from batchml.runtime.sessions.alloc import (
    IdleTimer,
    Lifetime,
    describe_cost,
    describe_idle_end,
    describe_new_files,
    format_seconds,
    keep_open,
    read_limit,
    remember_folder,
)
from tests.support.fakes import FakeClock

HOUR = 3600.0


def test_a_run_is_idle_after_the_limit_without_use() -> None:
    idle = IdleTimer(600)
    assert idle.seconds_left(False, 1000.0) == 600  # it counts as used when it begins
    assert idle.seconds_left(False, 1400.0) == 200
    assert idle.seconds_left(True, 1500.0) == 600
    assert idle.seconds_left(False, 2099.0) == 1
    assert idle.seconds_left(False, 2100.0) == 0
    assert idle.seconds_left(False, 9000.0) == 0


@given(st.lists(st.tuples(st.floats(0, 300), st.booleans()), min_size=1), st.floats(1, 900))
def test_an_idle_run_ends_exactly_the_limit_after_its_last_use(
    looks: list[tuple[float, bool]], limit: float
) -> None:
    idle, now, used = IdleTimer(limit), 0.0, None
    for pause, active in looks:
        now += pause
        used = now if active or used is None else used
        assert idle.seconds_left(active, now) == max(0.0, used + limit - now)


def test_without_a_limit_a_run_is_never_idle() -> None:
    assert read_limit({}) == read_limit({"BATCHML_IDLE": "soon"}) == math.inf
    assert read_limit({"BATCHML_IDLE": "600"}) == 600
    assert IdleTimer(math.inf).seconds_left(False, 1e9) == math.inf


def test_the_last_line_says_how_long_the_run_took_and_its_cost() -> None:
    told = {"BATCHML_RATE": "1.005"}
    assert describe_idle_end("the notebook", HOUR, 63 * HOUR + 720, told) == (
        "the notebook was idle for 1 h 0 min and is ended. It ran 63 h 12 min, about 63.52 USD at "
        "1.005 USD an hour."
    )
    assert describe_cost(90, told) == "It ran 1 min, about 0.0251 USD at 1.005 USD an hour."
    assert describe_cost(90, {}) == describe_cost(90, {"BATCHML_RATE": "nan"}) == "It ran 1 min."


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7260, "2 h 1 min")]
)
def test_durations_are_written_in_words(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


def test_a_lifetime_begins_with_the_process() -> None:
    clock = FakeClock(50.0)
    life = Lifetime(clock.monotonic, age=20.0)
    clock.sleep(10)
    assert life.seconds() == 30


class Holding:
    """A run that is held for `idle` seconds; seats are taken and left at times of the clock."""

    def __init__(self, seats: list[tuple[float, float]], stop: float = math.inf) -> None:
        self.clock = FakeClock(0.0)
        self.log: list[str] = []
        self.code = keep_open(
            {"BATCHML_IDLE": "60", "BATCHML_RUN": "run-1"},
            lambda: sum(a <= self.clock.time < b for a, b in seats),
            lambda: self.clock.time >= stop,
            self.log.append,
            monotonic=self.clock.monotonic,
            sleep=self.clock.sleep,
        )


def test_an_allocation_without_a_shell_ends_after_the_idle_limit() -> None:
    held = Holding([])
    assert (held.code, held.clock.time) == (0, 60)
    assert held.log[0] == (
        "allocated; open a shell in it with: batchml shell run-1; it ends by itself when nobody "
        "has been inside for 1 min"
    )
    assert "the allocation was idle for 1 min and is ended. It ran" in held.log[1]


def test_an_allocation_continues_while_a_shell_is_open() -> None:
    held = Holding([(50, 500), (520, 530)])
    assert held.clock.time == pytest.approx(590, abs=1)


def test_new_and_changed_files_are_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, own = tmp_path / "work", tmp_path / "own"
    work.mkdir()
    own.mkdir()
    (work / "train.py").write_text("1")
    (work / "data").write_text("1")
    monkeypatch.chdir(work)
    environ = {"AWS_BATCH_JOB_ID": "run", "BATCHML_WORKSPACE": str(tmp_path / "workspace")}
    assert describe_new_files(environ, str(own)) == ""  # nothing was remembered
    remember_folder(environ, str(own))
    assert describe_new_files(environ, str(own)) == ""
    (work / "train.py").write_text("22")
    (work / "new").write_text("1")
    assert describe_new_files(environ, str(own)) == (
        "train.py (2 B) and new (1 B) were written to the working folder, and can be copied from "
        "there: batchml get run"
    )


def test_the_prompt_of_a_shell_names_the_run() -> None:
    run = {"AWS_BATCH_JOB_ID": "47cc2814-0000:3"}
    assert prompt_variables(run, "/bin/sh") == {"PS1": "(run 47cc2814:3) $ "}
    assert prompt_variables(run, "/bin/zsh") == prompt_variables({}, "bash") == {}
    held = {**run, "BATCHML_SEAT": "alloc", "PROMPT_COMMAND": "echo more;"}
    text = 'PS1=\'~ \'; eval "$PROMPT_COMMAND"; eval "$PROMPT_COMMAND"; echo "$PS1"'
    shown = subprocess.run(
        ["sh", "-c", text], env=prompt_variables(held, "/bin/bash"), capture_output=True, check=True
    )
    assert shown.stdout == b"more\nmore\n(alloc 47cc2814:3) ~ \n"


def test_an_allocation_ends_at_once_after_a_stop() -> None:
    held = Holding([(0, 1000)], stop=70)
    assert (held.code, held.clock.time, len(held.log)) == (0, 70, 1)
