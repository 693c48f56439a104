"""The processes of one attempt: found by descent, killed whole, told apart by their start time."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.processes import boot_id, descendants, send, spawn, start_time
from tests.support.local_server import wait_for


def is_alive(pid: int) -> bool:
    """A zombie is dead, whether or not its parent has asked about it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a child in a session of its own, which has a child."""
    shell = subprocess.Popen(
        ["sh", "-c", 'setsid sh -c "sleep 300 & echo \\$! \\$\\$; wait" & wait'],
        stdout=subprocess.PIPE,
    )
    yield shell
    send([*descendants(shell.pid), shell.pid], signal.SIGKILL)
    shell.wait()
    assert shell.stdout is not None
    shell.stdout.close()


def test_descendants_are_found_across_sessions_parents_first(
    family: subprocess.Popen[bytes],
) -> None:
    assert family.stdout is not None
    grandchild, child = map(int, family.stdout.readline().split())
    found = descendants(family.pid)
    assert {child, grandchild} <= set(found)
    assert found.index(child) < found.index(grandchild)
    assert descendants(grandchild) == []
    assert set(descendants(grandchild, family.pid)) == set(found)


def test_a_signal_passes_over_processes_that_are_gone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    there = subprocess.Popen(["sleep", "300"])
    send([gone.pid, there.pid], signal.SIGKILL)
    assert there.wait(10) == -signal.SIGKILL


_KILLS_ITS_TREE = """
import os, subprocess, sys, time
from batchml.runtime.processes import become_reaper, descendants, kill_descendants
assert become_reaper()
# A daemon: its parent dies at once, it has its own session, it ignores TERM, and it forks on.
daemon = 'trap "" TERM; while :; do sleep 0.01 & done'
subprocess.run(["sh", "-c", f"setsid sh -c '{daemon}' >/dev/null 2>&1 & sleep 0.2; echo $!"])
while len(found := descendants(os.getpid())) < 2:
    time.sleep(0.01)  # on a busy machine it has not begun yet
kept = [subprocess.Popen(["sleep", "300"]).pid for _ in range(int(sys.argv[1]))]
ended = kill_descendants(but=kept)
print(len(found) > 1, ended, descendants(os.getpid()) == kept, kill_descendants())
"""


@pytest.mark.parametrize("kept", [0, 2])
def test_killing_the_descendants_ends_daemons_that_fork_on(kept: int) -> None:
    """Also where some children are left alone."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLS_ITS_TREE, str(kept)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.stderr == ""
    daemon, verdict = done.stdout.splitlines()
    assert verdict == "True True True True"
    assert not is_alive(int(daemon))


def test_a_program_is_searched_for_on_its_own_path(tmp_path: Path) -> None:
    program = tmp_path / "only-here"
    program.write_text('#!/bin/sh\nprintf %s "$PATH"')
    program.chmod(0o755)
    before, (output, write_end) = os.environ["PATH"], os.pipe()
    pid = spawn(["only-here"], {"PATH": str(tmp_path)}, write_end)
    os.close(write_end)
    assert os.read(output, 4096).decode() == str(tmp_path)
    os.close(output)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.environ["PATH"] == before


def test_the_start_time_tells_two_processes_apart() -> None:
    own = start_time(os.getpid())
    child = subprocess.Popen(["sleep", "300"])
    try:
        wait_for(lambda: start_time(child.pid) is not None, "the child has a start time")
        assert own is not None
        assert start_time(os.getpid()) == own
        assert start_time(child.pid) != own
    finally:
        child.kill()
        child.wait()
    assert start_time(child.pid) is None


def test_the_boot_has_a_name() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36
