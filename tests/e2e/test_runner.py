"""The runner alone: a folder with a `spec.json`, no server. What it leaves there is the truth."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local.executors.process import tagged
from batchml.runtime.lines import LineSplitter
from batchml.runtime.processes import send, start_time
from tests.conftest import wait_for
from tests.unit.test_processes import is_alive

CLOCK = SystemClock()


class Attempt:
    """An attempt's folder, and the runners that were started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task_id = folder.name
        self.runners: list[subprocess.Popen[bytes]] = []
        (folder / "work").mkdir(parents=True)

    def start(self, *command: str, **more: Any) -> subprocess.Popen[bytes]:
        spec = {
            "task_id": self.task_id,
            "cwd": str(self.folder / "work"),
            "command": list(command),
            "env": {"PATH": os.environ["PATH"], "BATCHML_TASK": self.task_id},
            "grace": 30,
            "notify": str(self.folder / "nobody-listens"),
            "preamble": "preamble",
            **more,
        }
        (self.folder / "spec.json").write_text(json.dumps(spec))
        return self.start_runner()

    def start_runner(self) -> subprocess.Popen[bytes]:
        """As the server does it: with TERM blocked until the runner is ready for it."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            runner = subprocess.Popen(
                [sys.executable, "-m", "batchml.local.executors.runner", str(self.folder)],
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.runners.append(runner)
        return runner

    def exit(self, limit: float = 30) -> dict[str, Any]:
        """The exit record, read at the first moment at which it is there."""
        wait_for((self.folder / "exit.json").exists, "there is an exit record", limit)
        return dict(json.loads((self.folder / "exit.json").read_text()))

    def lines(self) -> list[bytes]:
        """The program's output, without the times and the preamble."""
        events = (self.folder / "log").read_bytes().split(b"\n")
        assert events.pop() == b"", "the last line is whole"
        messages = [event.partition(b" ")[2] for event in events]
        assert messages[0] == b"preamble"
        return messages[1:]

    def pids(self, count: int = 1) -> list[int]:
        """Pids that the program appended to `pids` beside its working directory."""

        def read() -> list[int]:
            path = self.folder / "pids"
            text = path.read_text() if path.exists() else ""
            return [int(line) for line in text.splitlines()] if text.count("\n") >= count else []

        return list(wait_for(read, f"{count} pids were written"))


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    made = Attempt(tmp_path / f"task-{os.getpid()}-{tmp_path.name}")
    yield made
    for runner in made.runners:
        if runner.poll() is None:
            runner.kill()
        runner.wait(10)
    while left := tagged(made.task_id):
        send(left, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "code", "by"),
    [
        (["sh", "-c", "exit 0"], 0, 0),
        (["sh", "-c", "exit 42"], 42, 0),
        (["sh", "-c", "kill -KILL $$"], 137, signal.SIGKILL),
        (["sh", "-c", "kill -SEGV $$"], 139, signal.SIGSEGV),
    ],
)
def test_the_record_has_the_programs_own_code(
    attempt: Attempt, command: list[str], code: int, by: int
) -> None:
    attempt.start(*command)
    ended = attempt.exit()
    assert (ended["code"], ended["signal"], ended["oom"]) == (code, by, False)
    assert 0 < ended["started_at"] <= ended["stopped_at"] <= CLOCK.now() * 1000
    assert attempt.runners[0].wait(10) == 0


@pytest.mark.parametrize(
    ("command", "code", "word"),
    [("no-such-program", 127, b"No such file"), ("/etc/passwd", 126, b"Permission denied")],
)
def test_a_program_that_cannot_run_has_the_shells_codes_and_a_line_that_says_why(
    attempt: Attempt, command: str, code: int, word: bytes
) -> None:
    attempt.start(command)
    assert attempt.exit()["code"] == code
    (line,) = attempt.lines()
    assert word in line


@pytest.mark.parametrize(
    ("command", "env"),
    [([], {}), (["echo", "nul\0"], {}), (["true"], {"A=B": "x"}), (["true"], {"A": "\ud800"})],
    ids=["no command", "a NUL", "an equals sign", "half a character"],
)
def test_what_no_system_could_start_is_a_start_failure(
    attempt: Attempt, command: list[str], env: dict[str, str]
) -> None:
    attempt.start(*command, env={"BATCHML_TASK": attempt.task_id, **env})
    ended = attempt.exit()
    assert ended["code"] is None
    assert ended["start_failure"].startswith("CannotCreateContainerError: ")


def test_a_program_starts_with_no_signal_blocked_or_ignored(attempt: Attempt) -> None:
    attempt.start("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    assert attempt.exit()["code"] == 0
    # Signals 32 and 33 are the C library's own: its posix_spawn ignores them for whoever it starts,
    # and no program can use them.
    internal = 0b11 << 31
    found = [int(line.split()[1], 16) & ~internal for line in attempt.lines()]
    assert found == [0, 0]


def test_a_tree_that_ignores_a_stop_is_killed_after_the_grace(attempt: Attempt) -> None:
    script = """trap "" TERM
        setsid sh -c 'echo $$ >> ../pids; while :; do sleep 0.1; done' &
        echo $$ >> ../pids; while :; do sleep 0.1; done"""
    runner = attempt.start("sh", "-c", script, grace=1)
    pids = attempt.pids(2)
    asked = CLOCK.monotonic()
    runner.send_signal(signal.SIGTERM)
    ended = attempt.exit()
    assert CLOCK.monotonic() - asked >= 1
    assert not any(is_alive(pid) for pid in pids)
    assert (ended["code"], ended["signal"], ended["oom"]) == (137, signal.SIGKILL, False)


def test_a_program_that_heeds_a_stop_has_its_own_code(attempt: Attempt) -> None:
    script = "trap 'exit 3' TERM; echo $$ >> ../pids; while :; do sleep 0.05; done"
    runner = attempt.start("sh", "-c", script)
    attempt.pids()
    runner.send_signal(signal.SIGTERM)
    assert attempt.exit(10)["code"] == 3


def test_a_stop_before_the_runner_is_ready_prevents_the_program(attempt: Attempt) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        attempt.start("sleep", "300").send_signal(signal.SIGTERM)  # python is not even loaded yet
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert attempt.exit(10)["start_failure"].startswith("CannotStartContainerError: stopped")
    assert not (attempt.folder / "started").exists()


@pytest.mark.parametrize("delay", range(20, 160, 14))
def test_a_stop_at_any_moment_ends_the_attempt(attempt: Attempt, delay: int) -> None:
    runner = attempt.start("sleep", "300")
    CLOCK.sleep(delay / 1000)
    runner.send_signal(signal.SIGTERM)
    ended = attempt.exit(10)
    assert ended["code"] == 143 or ended["start_failure"]
    assert tagged(attempt.task_id) == []


_DAEMONS = r"""
import os, subprocess, sys
def daemon():
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    with open("../pids", "a") as file:
        file.write(f"{os.getpid()}\n")
    os.execvpe("sleep", ["sleep", "300"], {"PATH": os.environ["PATH"]})  # and forgets its tag
for _ in range(5):
    daemon()
while not os.path.exists("../pids") or len(open("../pids").readlines()) < 5:
    pass
"""


def test_daemons_are_dead_before_the_record_appears(attempt: Attempt) -> None:
    attempt.start(sys.executable, "-c", _DAEMONS)
    assert attempt.exit()["code"] == 0
    assert [pid for pid in attempt.pids(5) if is_alive(pid)] == []


def test_binary_output_arrives_whole(attempt: Attempt) -> None:
    size = 20 << 20
    script = f"import random, sys; sys.stdout.buffer.write(random.Random(11).randbytes({size}))"
    attempt.start(sys.executable, "-c", script)
    assert attempt.exit(60)["code"] == 0
    splitter = LineSplitter()
    expected = splitter.feed(random.Random(11).randbytes(size)) + splitter.finish()
    assert attempt.lines() == expected


def test_the_times_of_a_log_never_go_back(attempt: Attempt) -> None:
    attempt.start("sh", "-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.01; done")
    attempt.exit()
    events = (attempt.folder / "log").read_text().splitlines()
    stamps = [int(event.split()[0]) for event in events]
    assert len(stamps) == 6
    assert stamps == sorted(stamps)


def test_a_second_runner_on_the_same_folder_does_nothing(attempt: Attempt) -> None:
    first = attempt.start(
        "sh", "-c", "echo $$ >> ../pids; while [ ! -e ../go ]; do sleep 0.05; done"
    )
    attempt.pids()
    before = (attempt.folder / "runner.json").read_text()
    assert json.loads(before)["pid"] == first.pid
    assert json.loads(before)["start_time"] == start_time(first.pid)
    assert attempt.start_runner().wait(20) == 0
    (attempt.folder / "go").touch()
    ended = attempt.exit()
    assert first.wait(10) == 0
    assert attempt.start_runner().wait(20) == 0  # nor on one that has ended
    assert attempt.exit() == ended
    assert (attempt.folder / "runner.json").read_text() == before
    assert len(attempt.pids()) == 1


def test_a_killed_runner_leaves_no_record_and_a_tree_that_can_be_found(attempt: Attempt) -> None:
    script = """echo $$ >> ../pids
        setsid env -i sh -c 'echo $$ >> ../pids; exec sleep 300' &
        sleep 300"""
    runner = attempt.start("sh", "-c", script)
    pids = attempt.pids(2)
    runner.kill()
    runner.wait(10)
    assert not (attempt.folder / "exit.json").exists()
    # The second has no tag in its environment any more, but a parent that has.
    assert set(pids) <= set(tagged(attempt.task_id))


def test_what_prepares_the_program_says_how_far_it_is_and_why_it_failed(attempt: Attempt) -> None:
    prepare = ["sh", "-c", "echo first; echo the cause; exit 1"]
    attempt.start("true", prepare=prepare, prepare_env={"PATH": os.environ["PATH"]})
    ended = attempt.exit()
    assert ended == {
        "code": None,
        "start_failure": "CannotPullContainerError: the cause",
        "stopped_at": ended["stopped_at"],
    }
    assert (attempt.folder / "progress").read_text() == "first\nthe cause\n"
    assert not (attempt.folder / "started").exists()
