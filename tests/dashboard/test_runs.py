"""The list of runs: its search, and what the page of a waiting run says."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.cluster.snapshot import RunRow
from batchml.dashboard.run import state_panel, use_words
from batchml.dashboard.runs import matching, search_words
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.search import FoundRun

EXAMPLES = json.loads((Path(__file__).parent / "search.json").read_text())
WAITS = Run("w", "mine", "gpu", JobStatus.RUNNABLE, created_at=1)


@pytest.mark.parametrize(("text", "words"), EXAMPLES)
def test_the_words_of_a_search(text: str, words: list[str]) -> None:
    assert search_words(text) == words


def test_all_words_must_occur_in_any_case() -> None:
    runs = [
        FoundRun(replace(WAITS, job_id=name, name=name), Record(params={"lr": value}))
        for name, value in (("LeNet", 0.1), ("lenet-2", 0.2), ("other", 0.1))
    ]
    assert [each.name for each in matching(runs, " LENET lr=0.1 ")] == ["LeNet"]
    assert len(matching(runs, "runnable")) == len(matching(runs, "")) == 3


def row(name: str, position: int | None, queue: str = "gpu") -> RunRow:
    run = replace(WAITS, job_id=name, name=name, queue=queue)
    return RunRow(run, position=position, reason="for 2 GPUs, none are free")


def test_a_waiting_run_says_its_place_its_reason_and_the_runs_ahead() -> None:
    mine = row("w", 8)
    others = [row(f"<b>{place}", place) for place in (3, 1, 2, 4, 5, 6, 7, 9)]
    elsewhere = [row("x", 1, "cpu"), row("running", None)]
    made = str(state_panel(WAITS, 10, [*others, mine, *elsewhere]))
    assert "8 of 9 in the queue" in made and "for 2 GPUs, none are free" in made
    assert made.index("1. &lt;b&gt;1") < made.index("5. &lt;b&gt;5") and "6. " not in made
    assert "and 2 more" in made and "<b>" not in made and "/run/x" not in made


def test_the_first_of_a_queue_has_none_ahead_and_a_run_elsewhere_no_place() -> None:
    assert "Ahead of it" not in str(state_panel(WAITS, 10, [row("w", 1)]))
    assert "Position" not in str(state_panel(WAITS, 10, [row("other", 1)]))


def test_memory_that_ran_out_was_all_in_use_whatever_the_last_measurement_was() -> None:
    killed = replace(WAITS, status=JobStatus.FAILED, exit_code=137,
                     reason="OutOfMemoryError: Container killed due to memory usage")  # fmt: skip
    shown = use_words(killed, "memory", 1305.0, 2048, "MiB")
    assert shown == "all of 2048 MiB, measured before: 1305"
    assert use_words(killed, "cpu", 0.5, 1.0, "") == "0.5 of 1"
    assert use_words(killed, "memory", None, 2048, "MiB") == "-"
    running = replace(WAITS, status=JobStatus.RUNNING)
    assert use_words(running, "memory", 1305.0, 2048, "MiB") == "1305 of 2048 MiB"
