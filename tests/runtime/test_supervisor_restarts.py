"""Restarts in place, as `show` tells them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.batch.jobs import LogMark
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runs.metrics.usage import (
    NodeRun,
    Restart,
    UnfitNotice,
    find_restarts,
    find_unfit_notices,
    read_restarts,
    restarts_json,
    restarts_text,
)
from batchml.runtime.nodes.supervisor.events import (
    NodeJoined,
    NodeLeft,
    RanksGone,
    RunNode,
    SayLine,
)
from batchml.runtime.nodes.supervisor.rules import (
    SupervisorLimits,
    begin,
    step,
)
from batchml.runtime.protocol.launch import TORCHRUN, LaunchPlan
from tests.runs.test_submission import place_in

MINUTE = 60_000
NOON = 1_795_348_800_000  # ms; 2026-11-22T12:00:00Z


def test_lines_of_the_runtime_alone_count() -> None:
    said = [
        "batchml: Rank 3 on node 1 ended with 1. It begins again in place",
        "It begins again in place",
        "batchml: generation 2: 2 nodes, 8 ranks.",
        "[r0] batchml: Rank 3 on node 1 ended with 1. It begins again in place",
    ]
    assert find_restarts(LogMark("s", NOON, text) for text in said) == [
        Restart(NOON, "rank 3 on node 1 ended with 1")
    ]


def test_what_the_rules_say_is_what_is_read() -> None:
    """A change of these words is found here."""
    state = begin(SupervisorLimits(nodes=2), 0.0)
    for number in (0, 1):
        state, _ = step(state, NodeJoined(1.0, RunNode(number, 1, f"10.0.0.{number}")))
    state, more = step(state, NodeLeft(2.0, 1, silent=True))
    state, actions = step(state, RanksGone(3.0, state.generation, 0))
    lines = [f"batchml: {each.text}" for each in [*more, *actions] if isinstance(each, SayLine)]
    (found,) = find_restarts(LogMark("s", NOON, line) for line in lines)
    assert found.why == "node 1 (10.0.0.1) does not answer any more"


def test_they_are_one_line() -> None:
    first = Restart(NOON, "node 1 is gone")
    later = [Restart(NOON + each * MINUTE, f"rank {each} ended with 1") for each in range(1, 7)]
    assert restarts_text([]) == ""
    assert restarts_text([first]) == "once in place: node 1 is gone, at 12:00 UTC"
    assert restarts_text([first, later[4]], is_whole=False) == (
        "at least 2 times in place: node 1 is gone, at 12:00; rank 5 ended with 1, at 12:05 UTC"
    )
    many = restarts_text([first, *later])
    assert many.startswith("7 times in place, the last of them: rank 2 ended")
    tomorrow = Restart(NOON + 1440 * MINUTE, "rank 0 ended with 2")
    assert "at 11-22 12:00; rank 0 ended with 2, at 11-23 12:00 UTC" in restarts_text(
        [first, tomorrow]
    )
    assert restarts_json([first]) == {
        "restarts": [{"at": "2026-11-22T12:00:00.000Z", "why": "node 1 is gone"}]
    }
    assert restarts_json([]) == {}


class Logs:
    def __init__(self) -> None:
        self.refuses = False

    def answer(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        assert operation == "FilterLogEvents"
        if self.refuses:
            return "AccessDeniedException: no"
        text = "batchml: Node 1 is gone. It begins again in place"
        return {"events": [{"logStreamName": "s1", "timestamp": NOON, "message": text}]}


def test_one_call_asks_the_log_of_the_main_node_in_all_its_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    logs = Logs()
    place, session = place_in(tmp_path, logs.answer)
    env = {"BATCHML_LAUNCH": LaunchPlan(TORCHRUN).to_json()}
    tries = (Attempt(started_at=NOON, log_stream="s1"), Attempt(started_at=NOON, log_stream="s2"))
    whole = Run("j", "n", "q", JobStatus.RUNNING, nodes=2, environment=env)
    nodes = [
        NodeRun(
            f"node {i}", Run(f"j#{i}", "n", "q", JobStatus.RUNNING, attempts=tries, node_index=i)
        )
        for i in range(2)
    ]
    assert read_restarts(place, whole, nodes) == ([Restart(NOON, "node 1 is gone")], True)
    (asked,) = session.asked("FilterLogEvents")
    assert asked["logStreamNames"] == ["s1", "s2"]
    assert asked["filterPattern"] == '"It begins again in place"'
    logs.refuses = True
    assert read_restarts(place, whole, nodes) == ([], False)
    assert read_restarts(place, Run("j", "n", "q", JobStatus.RUNNING), []) == ([], True)
    assert len(session.calls) == 2, "a run without ranks is not asked about"


def test_the_hosts_that_a_run_has_left_are_read_from_its_log() -> None:
    said = (
        "batchml: this host (i-1) is unfit: XID 79; another one is tried (1 of 3)",
        "batchml: node 2: this host (10.0.3.3) is unfit: network: slow",
        "batchml: cannot record that this host is unfit, the run may try it again: full",
        "my host (i-2) is unfit: says the program",
    )
    assert find_unfit_notices(LogMark("s", NOON, text) for text in said) == [
        UnfitNotice(NOON, "i-1", "XID 79; another one is tried (1 of 3)"),
        UnfitNotice(NOON, "10.0.3.3", "network: slow"),
    ]
