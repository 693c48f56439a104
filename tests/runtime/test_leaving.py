"""How long a run has to save when its host goes: the grace, or what is left of the host's time."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from batchml.runtime.entry.attempt import Output, RunningAttempt, grace_within
from batchml.runtime.entry.stopping import Signals
from batchml.runtime.nodes.launcher import ASKED, VERDICT
from batchml.runtime.nodes.supervisor.settings import StopOrder, ranks_grace, read_stop
from batchml.runtime.protocol.exit_codes import STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.variables import RuntimeEnv

FOREVER = float("inf")


@pytest.mark.parametrize(
    ("grace", "left", "seconds"),
    [
        (30, FOREVER, 30),  # nobody said when
        (30, 118, 30),  # there is time enough
        (100, 40, 35),  # and five seconds for what is sent
        (30, 8, 5),  # little is left: half a chance
        (30, -60, 5),  # it should be gone already, and is not
        (2, 0, 2),  # never more than the run asked for
    ],
)
def test_the_kill_comes_before_the_host_goes(grace: float, left: float, seconds: float) -> None:
    assert grace_within(grace, left) == seconds


class Attempt:
    """One whose command is a program that sleeps, at a time of the test's."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.stop_file = folder / "stop"
        self.verdict = folder / "verdict"
        environ = {"BATCHML_GRACE": "100", "BATCHML_STOP_FILE": str(self.stop_file)}
        stream = self.stream = BytesIO()
        self.running = RunningAttempt(
            RuntimeEnv.read(environ), environ, Output(stream, FOREVER), Signals(), None, False,
            clock=lambda: self.now,
        )  # fmt: skip
        self.running.delegate_to(self.child.pid, f"{self.verdict}{ASKED}", makes_stop_file=True)

    def told(self) -> StopOrder:
        """What a supervisor finds out after its signal."""
        return read_stop({VERDICT: str(self.verdict)}, signal.SIGTERM, 100.0)


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    made = Attempt(tmp_path)
    yield made
    made.child.kill()
    made.child.wait()


def test_a_notice_leaves_what_the_host_has_and_tells_the_supervisor(attempt: Attempt) -> None:
    running = attempt.running
    running.stop("the host goes", TRY_ELSEWHERE, 40.0)
    assert running.until_kill() == 35
    assert attempt.child.wait(60) == -signal.SIGTERM
    assert attempt.told() == StopOrder(TRY_ELSEWHERE, "the host goes", ranks_grace(35.0))
    assert ranks_grace(35.0) == 30.5  # the supervisor has the rest to end by itself
    attempt.now += 1
    running.stop("the host goes", TRY_ELSEWHERE, 39.0)  # as the watch says it each second
    assert running.until_kill() == 34
    assert attempt.stream.getvalue() == b"batchml: the host goes\n"


def test_a_notice_brings_the_end_of_a_stop_forward_and_changes_nothing_else(
    attempt: Attempt,
) -> None:
    running = attempt.running
    running.stop("too dear", STOPPED)
    assert running.until_kill() == 100
    running.stop("the host goes", TRY_ELSEWHERE, 40.0)
    assert running.until_kill() == 35
    assert running.forced == STOPPED
    assert attempt.stream.getvalue() == b"batchml: too dear\n"
    attempt.now += 50
    running.stop("too dear", STOPPED)
    assert running.until_kill() == 0


def test_ranks_find_the_stop_file_only_once_their_supervisor_knows_of_the_stop(
    attempt: Attempt,
) -> None:
    """Else all of them may end with 0 first, and the run would count as a success."""
    attempt.running.stop("too dear", STOPPED)
    assert not attempt.stop_file.exists()
    attempt.running.delegate_to(attempt.child.pid, "", makes_stop_file=False)  # as Ray's
    attempt.running.stop("too dear", STOPPED)
    assert attempt.stop_file.exists()


def test_a_supervisor_that_finds_nothing_written_down_has_its_own_grace(tmp_path: Path) -> None:
    missing = {VERDICT: str(tmp_path / "verdict")}
    plain = StopOrder(STOPPED, "stopped (SIGTERM)", 26.0)
    assert read_stop(missing, signal.SIGTERM, 30.0) == plain
    (tmp_path / f"verdict{ASKED}").write_text(json.dumps({"code": 75, "why": "cut o"})[:-3])
    assert read_stop(missing, signal.SIGTERM, 30.0) == plain
