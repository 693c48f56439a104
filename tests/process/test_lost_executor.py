"""What every executor does with an attempt whose host is lost on request: B202, B203, B207."""

import os
import signal
from collections.abc import Iterator

import pytest

from batchml.local.home import Home
from tests.support.executor_rig import Rig, need_engine

# What hears of it says so; the child would outlive its parent if it could.
SCRIPT = """
trap 'echo heard' TERM HUP USR1
setsid sh -c 'trap "" TERM HUP; sleep 0.5; while true; do echo child; sleep 0.1; done' &
echo ready
while true; do sleep 0.05; done
"""
WHY = b"batchml: injected fault: host-lost@1m"


@pytest.fixture(params=["process", "docker"])
def rig(request: pytest.FixtureRequest, home: Home) -> Iterator[Rig]:
    if request.param == "docker":
        need_engine()
    made = Rig(request.param, home)
    yield made
    made.close()


def begin(rig: Rig) -> str:
    task = rig.start(["sh", "-c", SCRIPT])
    rig.until_line(task, b"ready")
    rig.until(lambda: rig.started(task) is not None)
    return task


def check(rig: Rig, task: str) -> None:
    """It was killed at once, all of it, nothing was told to save, and the log says why."""
    done = rig.outcome(task, 10)
    assert done.exit.code == 137 or done.exit.lost
    assert not done.exit.oom
    assert b"heard" not in done.lines
    assert done.lines[-1] == WHY
    size = (rig.home.attempt(task) / "log").stat().st_size
    rig.wait(0.6)
    assert (rig.home.attempt(task) / "log").stat().st_size == size, "nothing of it lives"


def test_a_lost_host_takes_the_whole_tree_without_a_word(rig: Rig) -> None:
    task = begin(rig)
    rig.executor.lose(task, "host-lost@1m", warned=False)
    check(rig, task)
    assert rig.run(["echo", "next"]).lines == [b"next"], "the runner is as good as before"


def test_a_server_that_was_started_again_can_do_it_as_well(rig: Rig) -> None:
    task = begin(rig)
    rig.restart()
    rig.executor.lose(task, "host-lost@1m", warned=False)
    check(rig, task)


def test_the_order_may_come_twice_and_before_and_after_a_restart(rig: Rig) -> None:
    task = begin(rig)
    os.kill(rig.runner(task), signal.SIGSTOP)
    rig.executor.lose(task, "host-lost@1m", warned=False)
    rig.restart()
    rig.executor.lose(task, "host-lost@1m", warned=False)
    os.kill(rig.runner(task), signal.SIGCONT)
    check(rig, task)


def test_a_warned_host_gives_its_grace(rig: Rig) -> None:
    task = rig.start(["sh", "-c", "trap 'echo saved; exit 7' TERM; echo ready; sleep 60 & wait"])
    rig.until_line(task, b"ready")
    rig.executor.lose(task, "spot@1m", warned=True)
    done = rig.outcome(task)
    assert (done.exit.code, done.lines) == (7, [b"ready", b"saved"])
