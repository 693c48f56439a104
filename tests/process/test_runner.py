"""The runner alone, told by a socket what a server would tell it. What it leaves is the truth."""

import array
import errno
import fcntl
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.explain.clues import match_reason
from batchml.local.executors import cgroup
from batchml.local.executors.record import find_processes
from batchml.local.executors.runner.files import until_it_works
from batchml.local.executors.runner.link import INLINE
from batchml.runtime.processes import send, start_time
from batchml.runtime.protocol.log_marks import LineSplitter
from tests.process.test_processes import is_alive
from tests.support.local_server import wait_for

CLOCK = SystemClock()


class Runner:
    """A runner, and this side of its socket."""

    def __init__(self, groups: cgroup.Groups | None = None, **more: Any) -> None:
        self.server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.settimeout(60)
        config = {"kind": "process", "socket": theirs.fileno(), "groups": groups or {}, **more}
        # As the server does it: with TERM blocked until the runner is ready for it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "batchml.local.executors.runner.main", json.dumps(config)],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def send(self, message: dict[str, Any], *files: int) -> None:
        data = json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        self.server.sendmsg([data], rights if files else [])

    def hear(self) -> dict[str, Any]:
        """The next that it says; empty when it has let go of the socket."""
        data = self.server.recv(65_536)
        message = dict(json.loads(data)) if data else {}
        return self.hear() if "ready" in message else message

    def memory(self) -> int:
        """KiB that it has in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0])


class Attempt:
    """An attempt's folder, in the care of a runner."""

    def __init__(self, folder: Path, runner: Runner) -> None:
        self.folder = folder
        self.task_id = folder.name
        self.runner = runner
        self.process = runner.process
        folder.mkdir()

    def start(self, *command: str, **more: Any) -> "Attempt":
        spec = {
            "task_id": self.task_id,
            "cwd": str(self.folder / "work"),
            "command": list(command),
            "init": True,
            "env": {"PATH": os.environ["PATH"], "BATCHML_TASK": self.task_id},
            "grace": 30,
            "preamble": "preamble",
            **more,
        }
        record = os.open(self.folder / "runner.json", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if len(json.dumps(spec)) > INLINE:
            whole = os.memfd_create("spec")
            os.write(whole, json.dumps(spec).encode())
            self.runner.send(
                {"folder": str(self.folder), "spec": None, "begin": True}, record, whole
            )
            os.close(whole)
        else:
            self.runner.send({"folder": str(self.folder), "spec": spec, "begin": True}, record)
        os.close(record)
        return self

    def stop(self) -> None:
        self.runner.send({"stop": self.task_id})

    def exit(self, limit: float = 30) -> dict[str, Any]:
        """The exit record, read at the first moment at which it is there."""
        wait_for((self.folder / "exit.json").exists, "there is an exit record", limit)
        return dict(json.loads((self.folder / "exit.json").read_text()))

    def lines(self) -> list[bytes]:
        """The program's output, without the times and the preamble."""
        events = (self.folder / "log").read_bytes().split(b"\n")
        assert events.pop() == b"", "the last line is whole"
        messages = [event.partition(b" ")[2] for event in events]
        assert re.fullmatch(b"preamble limits=(none|cgroup)", messages[0])
        return messages[1:]

    def pids(self, count: int = 1) -> list[int]:
        """Pids that the program appended to `pids` beside its working directory."""

        def read() -> list[int]:
            path = self.folder / "pids"
            text = path.read_text() if path.exists() else ""
            return [int(line) for line in text.splitlines()] if text.count("\n") >= count else []

        return list(wait_for(read, f"{count} pids were written"))

    def is_locked(self) -> bool:
        """True while someone holds the record."""
        names = [self.folder / name for name in ("runner.json", "exit.json")]
        (path,) = [path for path in names if path.exists()]
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False


class Bench:
    """Makes runners and attempts, and leaves nothing of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runners: list[Runner] = []
        self.attempts: list[Attempt] = []

    def runner(self, groups: cgroup.Groups | None = None, **more: Any) -> Runner:
        self.runners.append(Runner(groups, **more))
        return self.runners[-1]

    def attempt(self, runner: Runner) -> Attempt:
        name = f"task-{os.getpid()}-{self._folder.name}-{len(self.attempts)}"
        self.attempts.append(Attempt(self._folder / name, runner))
        return self.attempts[-1]

    def close(self) -> None:
        for runner in self.runners:
            runner.server.close()
            runner.process.kill()
            runner.process.wait(10)
        for attempt in self.attempts:
            while left := find_processes(attempt.task_id):
                send(left, signal.SIGKILL)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


@pytest.fixture
def attempt(bench: Bench) -> Attempt:
    return bench.attempt(bench.runner())


@pytest.mark.parametrize(
    ("command", "code", "by"),
    [
        (["sh", "-c", "exit 0"], 0, 0),
        (["sh", "-c", "exit 42"], 42, 0),
        (["sh", "-c", "kill -KILL $$"], 137, signal.SIGKILL),
        (["sh", "-c", "kill -SEGV $$"], 139, signal.SIGSEGV),
    ],
)
@pytest.mark.journey
def test_the_record_has_the_programs_own_code(
    attempt: Attempt, command: list[str], code: int, by: int
) -> None:
    attempt.start(*command)
    ended = attempt.exit()
    assert (ended["code"], ended["signal"], ended["oom"]) == (code, by, False)
    assert 0 < ended["started_at"] <= ended["stopped_at"] <= CLOCK.now() * 1000
    assert attempt.runner.hear()["ended"].items() <= ended.items()
    attempt.runner.server.close()
    assert attempt.process.wait(10) == 0


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


def test_without_an_init_process_explain_knows_the_command_that_is_missing(
    attempt: Attempt,
) -> None:
    attempt.start("no-such-program", init=False)
    failure = attempt.exit()["start_failure"]
    assert failure.startswith("CannotStartContainerError: ")
    found = match_reason(failure)
    assert found is not None and (found.cause, "no-such-program" in found.verdict) == (
        "missing-command", True,
    )  # fmt: skip


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


@pytest.mark.journey
def test_a_tree_that_ignores_a_stop_is_killed_after_the_grace(attempt: Attempt) -> None:
    script = """trap "" TERM
        setsid sh -c 'echo $$ >> ../pids; while :; do sleep 0.1; done' &
        echo $$ >> ../pids; while :; do sleep 0.1; done"""
    attempt.start("sh", "-c", script, grace=1)
    pids = attempt.pids(2)
    asked = CLOCK.monotonic()
    attempt.stop()
    ended = attempt.exit()
    assert CLOCK.monotonic() - asked >= 1
    assert not any(is_alive(pid) for pid in pids)
    assert (ended["code"], ended["signal"], ended["oom"]) == (137, signal.SIGKILL, False)


def test_a_program_that_heeds_a_stop_has_its_own_code(attempt: Attempt) -> None:
    script = "trap 'exit 3' TERM; echo $$ >> ../pids; while :; do sleep 0.05; done"
    attempt.start("sh", "-c", script)
    attempt.pids()
    attempt.stop()
    assert attempt.exit(10)["code"] == 3


def test_a_signal_to_the_runner_is_a_stop_too_and_then_it_ends(attempt: Attempt) -> None:
    """So a server stops the attempts that another one started: it has no socket to them."""
    attempt.start(
        "sh", "-c", "trap 'exit 3' TERM; echo $$ >> ../pids; while :; do sleep 0.05; done"
    )
    attempt.pids()
    attempt.process.send_signal(signal.SIGTERM)
    assert attempt.exit(10)["code"] == 3
    assert attempt.process.wait(10) == 0


def test_a_stop_before_the_runner_is_ready_prevents_the_program(attempt: Attempt) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        attempt.start("sleep", "300")
        attempt.process.send_signal(signal.SIGTERM)  # python is not even loaded yet
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert attempt.exit(10)["start_failure"].startswith("CannotStartContainerError: stopped")
    assert "started_at" not in attempt.exit()


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5, 8, 20, 50, 100])
@pytest.mark.parametrize("by", ["message", "signal"])
def test_a_stop_at_any_moment_ends_the_attempt(attempt: Attempt, delay: int, by: str) -> None:
    attempt.start("true")
    attempt.exit()  # now it is warm, and the stop finds it anywhere on its way
    attempt = Attempt(attempt.folder.with_name(f"{attempt.task_id}-next"), attempt.runner)
    attempt.start("sleep", "300")
    CLOCK.sleep(delay / 1000)
    if by == "message":
        attempt.stop()
    else:
        attempt.process.send_signal(signal.SIGTERM)
        if not (attempt.folder / "exit.json").exists() and attempt.process.poll() is not None:
            # It was idle: the attempt, which it had not taken in yet, has not begun.
            assert (attempt.folder / "runner.json").read_bytes() == b""
            return
    ended = attempt.exit(10)
    assert ended["code"] == 143 or ended["start_failure"]
    assert find_processes(attempt.task_id) == []


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


def test_a_killed_runner_leaves_no_record_and_a_tree_that_can_be_found(attempt: Attempt) -> None:
    script = """echo $$ >> ../pids
        setsid env -i sh -c 'echo $$ >> ../pids; exec sleep 300' &
        sleep 300"""
    attempt.start("sh", "-c", script)
    pids = attempt.pids(2)
    assert attempt.is_locked()
    attempt.process.kill()
    attempt.process.wait(10)
    assert not attempt.is_locked()
    assert not (attempt.folder / "exit.json").exists()
    # The second has no tag in its environment any more, but a parent that has.
    assert set(pids) <= set(find_processes(attempt.task_id))


def test_what_prepares_the_program_says_how_far_it_is_and_why_it_failed(attempt: Attempt) -> None:
    prepare = ["sh", "-c", "echo first; echo the cause; exit 1"]
    attempt.start("true", prepare=prepare, prepare_env={"PATH": os.environ["PATH"]})
    ended = attempt.exit()
    assert ended["code"] is None
    assert ended["start_failure"] == "CannotPullContainerError: the cause"
    assert (attempt.folder / "progress").read_text() == "first\nthe cause\n"
    assert "started_at" not in ended
    said = [attempt.runner.hear() for _ in range(3)]
    assert [message.get("progress") for message in said] == ["first", "the cause", None]


# --- a runner is used again -------------------------------------------------------------------

_LOOK = r"""
import os, signal
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
print(sorted(os.environ.items()), sorted(os.listdir(".")), sorted(os.listdir("/proc/self/fd")))
print(os.path.relpath(os.getcwd(), os.path.dirname(os.getcwd())), oct(os.umask(0)), mask)
print(os.getsid(0) == os.getpid(), os.stat(".").st_mode & 0o777, os.nice(0))
"""

_LEAVES_TRACES = r"""
import os, signal, subprocess, sys
open("file", "w").close()
os.makedirs("a/b")
os.chmod(".", 0o755)
os.umask(0)
os.nice(3)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
subprocess.Popen(["sleep", "300"], start_new_session=True, env={})
os.chdir("/")
"""


def test_a_runner_that_is_used_again_shows_nothing_of_the_attempt_before(bench: Bench) -> None:
    runner = bench.runner()
    look = [sys.executable, "-I", "-S", "-c", _LOOK]
    env = {"A": "1", "LC_ALL": "C.UTF-8"}
    bench.attempt(runner).start(*look, env=env).exit()
    bench.attempt(runner).start(sys.executable, "-c", _LEAVES_TRACES, env={"B": "2"}).exit()
    between = bench.attempts[-1]
    assert wait_for(lambda: not (between.folder / "work").exists(), "its folder is gone")
    bench.attempt(runner).start(*look, env=env).exit()
    assert bench.attempts[0].lines() == bench.attempts[2].lines()
    assert b"'file'" not in b"".join(bench.attempts[2].lines())


def test_ten_thousand_file_descriptors_later_a_runner_has_as_many_open(bench: Bench) -> None:
    runner = bench.runner()

    def open_files() -> int:
        bench.attempt(runner).start("true").exit()
        while "ended" not in runner.hear():
            pass
        return len(os.listdir(f"/proc/{runner.process.pid}/fd"))

    before = open_files()
    for _ in range(200):
        assert open_files() == before


def test_the_working_directory_is_fresh_each_time_and_gone_when_the_runner_is(bench: Bench) -> None:
    runner = bench.runner()
    for _ in range(3):
        bench.attempt(runner).start("sh", "-c", "ls -A; pwd").exit()
    assert [one.lines() for one in bench.attempts] == [
        [os.fsencode(one.folder / "work")] for one in bench.attempts
    ]
    runner.server.close()
    runner.process.wait(10)
    assert [(one.folder / "work").exists() for one in bench.attempts] == [False] * 3


def test_folders_in_folders_deeper_than_pythons_stack_go_too(bench: Bench) -> None:
    runner = bench.runner()
    deep = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    assert bench.attempt(runner).start(sys.executable, "-c", deep).exit()["code"] == 0
    assert bench.attempt(runner).start("true").exit()["code"] == 0  # once that was removed
    assert not (bench.attempts[0].folder / "work" / "d").exists()


def test_a_short_program_is_not_reported_as_started_a_long_one_is(bench: Bench) -> None:
    runner = bench.runner()
    bench.attempt(runner).start("true")
    assert "ended" in runner.hear()
    long = bench.attempt(runner).start("sleep", "0.2")
    started = runner.hear()["started"]
    record = json.loads((long.folder / "runner.json").read_text())
    assert record["started_at"] == started
    assert (record["pid"], record["start_time"]) == (
        runner.process.pid,
        start_time(runner.process.pid),
    )
    assert runner.hear()["ended"]["started_at"] == started
    assert "pid" in long.exit()


def test_an_idle_runner_ends_with_its_server_and_a_busy_one_after_its_attempt(
    bench: Bench,
) -> None:
    idle, busy = bench.runner(), bench.runner()
    attempt = bench.attempt(busy)
    attempt.start(
        "sh", "-c", "echo $$ >> ../pids; while [ ! -e ../go ]; do sleep 0.02; done; echo hi"
    )
    (pid,) = attempt.pids()
    idle.server.close()
    busy.server.close()
    assert idle.process.wait(10) == 0
    assert is_alive(pid)
    assert attempt.is_locked()
    (attempt.folder / "go").touch()
    assert attempt.exit()["code"] == 0
    assert busy.process.wait(10) == 0
    assert attempt.lines() == [b"hi"]
    assert not attempt.is_locked()


def test_an_attempt_that_was_sent_by_a_server_that_died_at_once_is_carried_out(
    attempt: Attempt,
) -> None:
    attempt.start("echo", "hi")
    attempt.runner.server.close()
    assert attempt.exit()["code"] == 0
    assert attempt.process.wait(10) == 0


def test_a_file_system_that_became_read_only_is_waited_for_and_a_stop_is_heard() -> None:
    faults = [OSError(errno.EROFS, "Read-only file system")]
    heard: list[str] = []

    def write() -> str:
        if faults:
            raise faults.pop()
        return "written"

    assert until_it_works(write, lambda: heard.append("a stop")) == "written"
    assert heard == ["a stop"]
    faults.append(OSError(errno.EROFS, "Read-only file system"))
    with pytest.raises(OSError, match="Read-only"):  # a folder that the job itself has named
        until_it_works(write, lasting=(errno.EROFS,))


def test_the_lock_is_held_from_before_the_message_to_the_end(attempt: Attempt) -> None:
    attempt.process.send_signal(signal.SIGSTOP)
    attempt.start("true")
    assert attempt.is_locked(), "though nobody has taken in the message yet"
    attempt.process.send_signal(signal.SIGCONT)
    attempt.exit()
    wait_for(lambda: not attempt.is_locked(), "the runner lets go of it")
    assert attempt.process.poll() is None


def test_a_large_spec_comes_in_a_file_that_is_nowhere(attempt: Attempt) -> None:
    env = {"PATH": os.environ["PATH"], "BIG": "x" * 100_000}
    attempt.start("sh", "-c", "echo ${#BIG}", env=env)
    assert attempt.exit()["code"] == 0
    assert attempt.lines() == [b"100000"]


def test_nothing_of_what_the_program_was_given_is_on_disk(attempt: Attempt) -> None:
    attempt.start("sh", "-c", "true", env={"PATH": os.environ["PATH"], "S": "hush-hush"})
    attempt.exit()
    for path in attempt.folder.rglob("*"):
        assert path.is_dir() or b"hush-hush" not in path.read_bytes()


def test_orphans_that_end_are_buried_while_the_program_runs(attempt: Attempt) -> None:
    script = """echo $$ >> ../pids; i=0
        while [ $i -lt 2000 ]; do (: &) ; i=$((i+1)); done; echo done
        while [ ! -e ../go ]; do sleep 0.02; done"""
    attempt.start("sh", "-c", script)
    attempt.pids()
    wait_for(lambda: b"done" in (attempt.folder / "log").read_bytes(), "they were made")

    def zombies() -> int:
        children = Path(f"/proc/{attempt.process.pid}/task").glob("*/children")
        pids = [pid for file in children for pid in file.read_text().split()]
        return sum(not is_alive(int(pid)) for pid in pids)

    wait_for(lambda: zombies() == 0, "there are no zombies")
    (attempt.folder / "go").touch()
    assert attempt.exit()["code"] == 0


# --- output -----------------------------------------------------------------------------------


def test_a_line_of_100_mb_arrives_in_pieces_and_whole(attempt: Attempt) -> None:
    size = 100 << 20
    attempt.start("head", "-c", str(size), "/dev/zero")
    assert attempt.exit(60)["code"] == 0
    assert sum(map(len, attempt.lines())) == size
    assert attempt.runner.memory() < 60_000


@pytest.mark.slow
def test_a_gigabyte_of_output_needs_no_more_memory_than_a_line(attempt: Attempt) -> None:
    line = "x" * 99
    attempt.start("sh", "-c", f"yes {line} | head -c {1 << 30}")
    most = 0
    before = CLOCK.monotonic()
    while not (attempt.folder / "exit.json").exists():
        most = max(most, attempt.runner.memory())
        CLOCK.sleep(0.05)
    took = CLOCK.monotonic() - before
    count = (1 << 30) / 100
    print(f"{count / took:.0f} lines/s, {most} KiB")
    assert attempt.exit()["code"] == 0
    assert most < 40_000
    assert count / took > 30_000


# --- limits -----------------------------------------------------------------------------------


NEEDS = {"memory": 64, "vcpus": 1}
_EATS = "x = bytearray(200 << 20)"


def test_a_program_that_needs_more_memory_than_it_asked_for_is_out_of_memory(
    bench: Bench, groups: cgroup.Groups
) -> None:
    attempt = bench.attempt(bench.runner(groups))
    attempt.start(sys.executable, "-c", _EATS, needs=NEEDS)
    ended = attempt.exit()
    assert (ended["code"], ended["oom"]) == (137, True)
    assert attempt.process.poll() is None
    # The next in the same slot has a count of its own.
    after = bench.attempt(attempt.runner).start("sh", "-c", "kill -KILL $$", needs=NEEDS)
    assert (after.exit()["code"], after.exit()["oom"]) == (137, False)
    more = bench.attempt(attempt.runner)
    more.start(sys.executable, "-c", _EATS, needs={"memory": 400, "vcpus": 2})
    assert more.exit()["code"] == 0


def test_a_child_that_was_killed_for_memory_is_said_and_is_no_end_of_the_job(
    bench: Bench, groups: cgroup.Groups
) -> None:
    attempt = bench.attempt(bench.runner(groups))
    attempt.start("sh", "-c", f"{sys.executable} -c '{_EATS}'; exit 0", needs=NEEDS)
    ended = attempt.exit()
    assert (ended["code"], ended["oom"]) == (0, False)
    assert any(b"it needed more memory" in line for line in attempt.lines())


def test_the_runner_is_never_chosen_when_a_program_is_too_large_to_start(
    bench: Bench, groups: cgroup.Groups
) -> None:
    runner = bench.runner(groups)
    env = {f"V{number}": "x" * 100_000 for number in range(18)}
    for _ in range(5):
        attempt = bench.attempt(runner)
        attempt.start("/bin/true", env=env, needs={"memory": 1, "vcpus": 1})
        attempt.exit()
    assert runner.process.poll() is None


def test_a_fork_bomb_is_held_and_ended(bench: Bench, groups: cgroup.Groups) -> None:
    attempt = bench.attempt(bench.runner(groups))
    # One in 64 goes on to try: a fork that the kernel refuses costs it as much as any other.
    pause = "time.sleep(300 if os.getpid() % 64 else 1)"
    bomb = f"import os, time\nwhile True:\n try: os.fork()\n except OSError: {pause}"
    words = [sys.executable, "-I", "-S", "-c", bomb]
    attempt.start(*words, needs={"memory": 4000, "vcpus": 1}, grace=1)
    name = cgroup.slot_name(attempt.process.pid, start_time(attempt.process.pid))
    slot = [os.path.join(folder, name) for folder in groups.values()]

    def many() -> bool:
        return len(cgroup.members(slot)) >= cgroup.max_pids() - 10

    wait_for(many, "it has all that it may have", 60)
    attempt.stop()
    attempt.exit(60)
    assert cgroup.members(slot) == []


def test_a_program_is_born_in_its_slot_and_the_runner_stays_outside(
    bench: Bench, groups: cgroup.Groups
) -> None:
    attempt = bench.attempt(bench.runner(groups))
    attempt.start("sh", "-c", "cat /proc/self/cgroup", needs=NEEDS)
    attempt.exit()
    slot = cgroup.slot_name(attempt.process.pid, start_time(attempt.process.pid)).encode()
    assert sum(slot in line for line in attempt.lines()) == len(groups)
    for task in Path(f"/proc/{attempt.process.pid}/task").iterdir():
        assert slot not in (task / "cgroup").read_bytes()


def test_a_killed_runners_orphans_are_found_by_its_slot_alone(
    bench: Bench, groups: cgroup.Groups
) -> None:
    attempt = bench.attempt(bench.runner(groups))
    script = """import os
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
open("../pids", "a").write(f"{os.getpid()}\\n")
os.execve("/bin/sleep", ["sleep", "300"], {})"""
    keeps = f"{sys.executable} -c '{script}'; sleep 300".replace("\\\\", "\\")
    attempt.start("sh", "-c", keeps, needs=NEEDS)
    (orphan,) = attempt.pids()
    attempt.process.kill()
    attempt.process.wait(10)
    record = json.loads((attempt.folder / "runner.json").read_text())
    assert orphan not in find_processes(attempt.task_id)
    assert orphan in cgroup.members(record["groups"])
    wait_for(lambda: not cgroup.kill(record["groups"]), "all are dead")
    assert not is_alive(orphan)
    assert cgroup.remove(record["groups"], 5)


def test_a_runner_takes_its_slot_along(bench: Bench, groups: cgroup.Groups) -> None:
    attempt = bench.attempt(bench.runner(groups))
    attempt.start("true", needs=NEEDS).exit()
    folders = json.loads((attempt.folder / "exit.json").read_text())["groups"]
    assert all(os.path.isdir(folder) for folder in folders)
    attempt.runner.server.close()
    attempt.process.wait(10)
    assert not any(os.path.isdir(folder) for folder in folders)


def test_without_control_groups_a_job_runs_unlimited_and_says_so(attempt: Attempt) -> None:
    attempt.start(sys.executable, "-c", _EATS, needs=NEEDS)
    assert attempt.exit()["code"] == 0
    assert b"limits=none" in (attempt.folder / "log").read_bytes()
