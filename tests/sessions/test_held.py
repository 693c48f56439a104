"""Runs that are held for a person: how they are ordered and waited for."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.config.settings import load_settings
from batchml.context import Context, PollIntervals
from batchml.errors import (
    BatchmlError,
    ConfigError,
    ExecUnavailable,
    HeldRunEnded,
    ServiceUnreachable,
    UsageError,
)
from batchml.model.group import HELD_TAG
from batchml.model.run import JobStatus, Run
from batchml.runs.options import to_request
from batchml.runs.prepare import prepare
from batchml.sessions.commands.alloc import AllocOptions, check_options
from batchml.sessions.held import (
    check_plugin,
    end_held_run,
    hold_request,
    prepare_held_run,
    wait_until_running,
)
from tests.support.fakes import FakeClock

RUN = Run("id-1", "alloc", "gpu", JobStatus.SUBMITTED)


class Scripted(Context):
    """A place whose run is in these states, one a look; `None` is a look that failed."""

    def __init__(self, here: Path, states: Sequence[Run | None]) -> None:
        environ = {"BATCHML_HOME": str(here / "home")}
        self.time = FakeClock()
        super().__init__(load_settings(environ, here, None), self.time, here)
        self._left = list(states)

    @property
    def pace(self) -> PollIntervals:
        return PollIntervals(describe_rate=None)

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        found = self._left.pop(0)
        if found is None:
            raise ServiceUnreachable("no route")
        return {found.job_id: found}


def in_state(status: JobStatus, **more: object) -> Run:
    return replace(RUN, status=status, **more)


def test_it_tells_each_state_once_and_returns_the_run_that_runs(tmp_path: Path) -> None:
    runnable = in_state(JobStatus.RUNNABLE)
    place = Scripted(tmp_path, [RUN, runnable, None, runnable, in_state(JobStatus.RUNNING)])
    told: list[str] = []
    run = wait_until_running(place, "id-1", told.append, reason=lambda: "")
    assert run.status is JobStatus.RUNNING
    assert told == [
        f"Job [alloc - id-1] is {state}." for state in ("SUBMITTED", "RUNNABLE", "RUNNING")
    ]


def test_it_tells_what_holds_its_start_up_as_far_as_the_run_says_it(tmp_path: Path) -> None:
    making = "Making the environment notebook-1: creating it (once for these requirements)"
    starting = in_state(JobStatus.STARTING, status_reason=making)
    step = replace(starting, status_reason="Making the environment notebook-1: fetching torch")
    place = Scripted(tmp_path, [starting, starting, step, in_state(JobStatus.RUNNING)])
    told: list[str] = []
    wait_until_running(place, "id-1", told.append, reason=lambda: "")
    assert told[1:-1] == [f"  {making}"]


def test_it_says_why_it_waits_after_ten_seconds_and_only_what_is_new(tmp_path: Path) -> None:
    runnable = in_state(JobStatus.RUNNABLE)
    place = Scripted(tmp_path, [*[runnable] * 40, in_state(JobStatus.RUNNING)])
    asked, told = list[float](), list[str]()
    reasons = iter(["2 runs are before it."] * 2 + ["No host has a GPU."] * 20)

    def why() -> str:
        asked.append(place.time.time - 1_000_000)
        return next(reasons)

    wait_until_running(place, "id-1", told.append, reason=why)
    assert told[1:-1] == ["  2 runs are before it.", "  No host has a GPU."]
    assert asked[0] >= 10
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps == sorted(gaps) and max(gaps) <= 315  # ever more seldom


def test_a_run_that_ended_first_is_an_error_with_its_code(tmp_path: Path) -> None:
    failed = in_state(
        JobStatus.FAILED, status_reason="MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - too large"
    )
    with pytest.raises(HeldRunEnded) as raised:
        wait_until_running(Scripted(tmp_path, [RUN, failed]), "id-1", lambda _: None)
    assert raised.value.exit_code == 69
    assert "batchml explain id-1" in str(raised.value)


def test_lost_contact_ends_the_waiting_only_when_it_lasts(tmp_path: Path) -> None:
    with pytest.raises(BatchmlError, match="no route"):
        wait_until_running(Scripted(tmp_path, [RUN, *[None] * 500]), "id-1", lambda _: None)


def test_the_run_is_told_when_it_is_idle_and_what_it_costs(tmp_path: Path) -> None:
    order = to_request(
        options={"command": ["python", "-m", "x"], "set_env": {"BATCHML_RATE": "7", "A": "b"}}
    )
    held = hold_request(order, "notebook", 600, 1.005)
    place = Scripted(tmp_path, [])
    request = prepare(place, held, dry_run=True).requests.submit
    env = {each["name"]: each["value"] for each in request["containerOverrides"]["environment"]}
    assert (env["BATCHML_IDLE"], env["BATCHML_RATE"], env["A"]) == ("600", "7", "b")
    assert request["tags"][HELD_TAG] == "notebook"


def test_without_a_limit_or_a_price_nothing_is_said_of_them() -> None:
    held = hold_request(to_request(options={"command": ["x"]}), "alloc", None, 0.0)
    assert held.changes["env"] == {"BATCHML_SEAT": "alloc"}


def test_the_tag_is_not_for_users_to_give(tmp_path: Path) -> None:
    order = to_request(options={"command": ["x"], "tags": {HELD_TAG: "alloc"}})
    with pytest.raises(ConfigError, match="batchml's own"):
        prepare(Scripted(tmp_path, []), order, dry_run=True)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (AllocOptions(idle_s=0), "would end at once"),
        (AllocOptions(command=("nvidia-smi",), shell=False), "would not run the command"),
    ],
)
def test_what_cannot_be_wanted_together_is_refused(wish: AllocOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_options(wish)


def test_a_machine_with_a_price_tells_it_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "batchml.toml").write_text("[env.local]\nusd_per_hour = 2\n")
    place = Scripted(tmp_path, [])
    told: list[str] = []
    order = to_request(options={"command": ["python3"], "vcpus": 1000})
    held = prepare_held_run(place, order, kind="alloc", idle_s=600, notify=told.append)
    assert told == ["About $2.00 an hour, for as long as it is held."]
    env = held.requests.submit["containerOverrides"]["environment"]
    assert {"name": "BATCHML_RATE", "value": "2"} in env


def test_without_the_program_that_gets_in_nothing_is_held_in_aws(tmp_path: Path) -> None:
    (tmp_path / "batchml.toml").write_text('[env.dev]\nregion = "us-east-1"\n')
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "dev")
    context = Context(settings, FakeClock(), tmp_path)
    with pytest.raises(ExecUnavailable, match="Install it"):
        check_plugin(context, {"PATH": str(tmp_path)})
    check_plugin(Scripted(tmp_path, []), {"PATH": str(tmp_path)})


class Given(Scripted):
    """A place without a server, whose stops are noted."""

    def __init__(self, here: Path, states: Sequence[Run | None]) -> None:
        super().__init__(here, states)
        self.stopped: list[tuple[str, str]] = []

    @property
    def batch(self) -> Any:
        return self

    def terminate(self, job_id: str, reason: str) -> None:
        self.stopped.append((job_id, reason))


def test_what_does_not_run_yet_is_cancelled_and_what_has_ended_is_left(tmp_path: Path) -> None:
    cancelled = in_state(JobStatus.FAILED, is_cancelled=True)
    runnable = in_state(JobStatus.RUNNABLE)
    place = Given(tmp_path, [runnable, runnable, cancelled])
    assert end_held_run(place, "id-1") == cancelled
    assert place.stopped == [("id-1", "Ended by its user")]
    place = Given(tmp_path, [cancelled])
    assert end_held_run(place, "id-1") == cancelled
    assert place.stopped == []
