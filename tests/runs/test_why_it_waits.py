"""What a run waits for, said now and then where no terminal shows it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.model.run import JobStatus, Run
from batchml.runs.commands.follow import follow
from batchml.runs.commands.live import WaitingText
from batchml.runs.watch.poller import ReasonReporter
from tests.runs.test_submission import place_in
from tests.support.fakes import FakeClock

BEGAN = 1_800_000_000.0
IDS = ("3f2a1b0c-0000-4000-8000-000000000000", "aaaaaaaa-0000-4000-8000-000000000000")


def told_by(waits: Sequence[bool], *, repeats: bool) -> list[float]:
    """When it is told, of looks ten seconds apart."""
    clock, told = FakeClock(0.0), list[float]()
    whys = ReasonReporter(
        clock, lambda _: told.append(clock.time), lambda: "why", first=30, most=200,
        repeats=repeats,
    )  # fmt: skip
    for each in waits:
        whys.see(each)
        clock.sleep(10)
    return told


def test_it_is_told_ever_more_seldom_and_the_same_words_where_that_is_wanted() -> None:
    assert told_by([True] * 80, repeats=True) == [30, 90, 210, 410, 610]
    assert told_by([True] * 80, repeats=False) == [30]


def test_who_begins_soon_is_not_asked_about_and_who_waits_again_is_new() -> None:
    assert told_by([True, True, False] * 9, repeats=True) == []
    assert told_by([True] * 12 + [False] + [True] * 9, repeats=True) == [30, 90, 160, 210][:3]


class Aws:
    """One run, RUNNABLE for ten minutes and then ended; nothing else may be asked."""

    def __init__(self) -> None:
        self.clock = FakeClock(BEGAN)

    def answer(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation != "DescribeJobs":
            return "AccessDeniedException: not for you"
        is_over = self.clock.time > BEGAN + 600
        return {"jobs": [{
            "jobId": IDS[0], "jobName": "train", "jobQueue": "arn:aws:batch:r:1:job-queue/gpu",
            "status": "FAILED" if is_over else "RUNNABLE", "jobDefinition": "d",
            "startedAt": 0, "createdAt": int(BEGAN * 1000), "statusReason": "no host" * is_over,
        }]}  # fmt: skip


@pytest.mark.parametrize("json_", [False, True])
def test_a_log_is_told_and_the_classic_output_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json_: bool
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    aws = Aws()
    place, _ = place_in(tmp_path, aws.answer)
    place.clock = aws.clock
    with pytest.raises(typer.Exit):
        follow(place, IDS[0], json_=json_, from_start=True)
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if " is RUNNABLE after " in line]
    assert [line.split(" after ")[1].partition(":")[0] for line in said] == ["0", "1", "3", "7"]
    assert said[0].startswith("train 3f2a1b0c is RUNNABLE after 0:")
    assert len(said[0].split(": ", 1)[1]) > 10, "explain's words"
    assert out.startswith("{") if json_ else out == f"Job [train - {IDS[0]}] FAILED\n"


def test_of_several_the_first_is_told_and_parts_of_one_are_not_counted(tmp_path: Path) -> None:
    settings = load_settings({"BATCHML_HOME": str(tmp_path)}, tmp_path, None)
    place, said = Context(settings, FakeClock(), tmp_path), list[str]()
    words = WaitingText(place, IDS, said.append, why=lambda job_id: f"why {job_id[:2]}")
    running = Run(IDS[0], "a", "q", JobStatus.RUNNING)
    waiting = Run(IDS[1], "b", "q", JobStatus.RUNNABLE)
    part = Run(f"{IDS[0]}:1", "a", "q", JobStatus.RUNNABLE)
    for _ in range(2):
        words.see({each.job_id: each for each in (running, waiting, part)})
        place.clock.sleep(15)
    assert said == []
    words.see({})
    assert said == ["1 of 2 runs wait. b aaaaaaaa is RUNNABLE: why aa"]
