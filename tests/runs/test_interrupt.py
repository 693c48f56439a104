"""Ctrl-C while a run is being submitted: its id first, in some seconds, or the way to find out."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from batchml.runs.commands import submit as submit_module
from batchml.runs.commands.interrupt import finish_submission
from batchml.runs.commands.submit import send
from batchml.runs.send import Interrupted
from tests.runs.test_submit import Client


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def hang() -> None:
    """An answer that does not come."""
    while True:
        signal.pause()


def test_the_submission_is_finished_first(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    sent: list[str] = []
    with pytest.raises(KeyboardInterrupt), finish_submission(sent):
        press()
        sent.append("job")
    assert sent == ["job"]
    assert "Finishing the submission first" in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_second_ctrl_c_leaves_at_once() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), finish_submission([]):
        press()
        press()
        reached = True
    assert not reached


def interrupted(folder: Path, look_hangs: bool, plan: str) -> list[str]:
    """The ids that a submission gives which hangs after Ctrl-C."""
    user = Client(folder, plan)
    happen = user.world._happen

    def slow(operation: str, what: str) -> None:
        if operation == "SubmitJob":
            press()
            hang()
        if look_hangs:
            hang()
        happen(operation, what)

    user.world._happen = slow  # type: ignore[method-assign]
    sent: list[str] = []
    with pytest.raises(Interrupted), finish_submission(sent, patience=0.03, look=0.03):
        user.submit()
    assert len(user.history.unconfirmed("aws")) == (0 if sent else 1)
    return sent


def test_an_answer_that_does_not_come_is_given_up_and_the_run_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted(tmp_path, look_hangs=False, plan="ok") == ["job-0"]
    assert "Submitted job job-0." in capsys.readouterr().err


@pytest.mark.parametrize(("look_hangs", "plan"), [(True, "ok"), (False, "closed")])
def test_where_nobody_knows_the_way_to_find_out_is_said(
    tmp_path: Path, capsys: Any, look_hangs: bool, plan: str
) -> None:
    assert interrupted(tmp_path, look_hangs, plan) == []
    said = capsys.readouterr().err
    assert "It is not known yet whether the run was submitted: batchml reconcile 2a" in said


def test_where_nothing_was_sent_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = Client(tmp_path, "throttled")

    def wait(seconds: float) -> None:
        press()
        hang()

    user.clock.sleep = wait  # type: ignore[method-assign]
    with pytest.raises(Interrupted), finish_submission([], patience=0.03):
        user.submit()
    assert "Nothing was submitted." in capsys.readouterr().err
    assert user.history.unconfirmed("aws") == []


def test_between_submitting_and_following_ctrl_c_detaches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Prepared:
        name, notices = "lenet", ()
        requests = SimpleNamespace(submit={"jobQueue": "default"})

        @property
        def spec(self) -> None:  # what `send` asks for between the two
            press()

    monkeypatch.setattr(submit_module, "submit_run", lambda *_: "j1")
    place: Any = SimpleNamespace(
        settings=SimpleNamespace(is_local=True), env="local", env_option="", resource_label=str
    )
    prepared: Any = Prepared()
    with pytest.raises(typer.Exit) as end:
        send(place, prepared, dry_run=False, wait=True, json_=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert end.value.exit_code == 130
    told = capsys.readouterr().err
    assert "Detached: the job goes on." in told
    assert "batchml logs -f j1" in told
