"""An attempt through our runtime, which the runner forks: as with an interpreter of its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local.executors import cgroup
from batchml.local.executors.record import find_processes
from batchml.runtime.processes import start_time
from tests.process.test_processes import is_alive
from tests.process.test_runner import CLOCK, NEEDS, Attempt, Bench, attempt, bench
from tests.support.local_server import wait_for

__all__ = ["attempt", "bench"]

_ROOT = str(Path(__file__).parents[2])

# What a program sees of itself, and of the runtime that is its parent.
_LOOK = r"""
import os, signal, time
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
print(sorted(os.environ.items()))
print(sorted(os.listdir(".")), sorted(os.listdir("/proc/self/fd")), mask, sorted(ignored))
print(oct(os.umask(0)), os.getsid(0) == os.getpid(), os.nice(0))
own = 3 << 31  # signals that the C library keeps to itself
for line in open(f"/proc/{os.getppid()}/status"):
    name, _, value = line.partition(":")
    if name in ("SigBlk", "SigIgn", "SigCgt"):
        print(name, hex(int(value, 16) & ~own))
    elif name == "Threads":
        print(line.strip())
def files():
    time.sleep(0.01)
    return len(os.listdir(f"/proc/{os.getppid()}/fd"))
# The least of several: on a busy machine the pipe of the start is closed a moment later.
print(min(files() for _ in range(20)), os.getsid(os.getppid()) == os.getppid())
print(os.readlink(f"/proc/{os.getppid()}/cwd") == os.getcwd())
"""


def through(attempt: Attempt, *command: str, fork: bool = True, **more: Any) -> Attempt:
    """Started as the server does it; without `fork`, by a new interpreter, with an idle option."""
    env = {
        "PATH": os.environ["PATH"], "BATCHML_TASK": attempt.task_id, "PYTHONPATH": _ROOT,
        **more.pop("env", {}),
    }  # fmt: skip
    words = [sys.executable, *([] if fork else ["-q"]), "-m", "batchml.runtime.run", *command]
    return attempt.start(*words, env=env, marks=True, **more)


def python(text: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text]


@pytest.fixture
def nohup() -> Iterator[None]:
    """What is started meanwhile ignores signals, as below nohup or behind a shell."""
    numbers = (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("nohup")
def test_a_program_sees_what_it_would_see_with_an_interpreter(bench: Bench) -> None:
    runner = bench.runner()
    seen = []
    for fork in (True, False, True):
        made = bench.attempt(runner)
        through(made, *python(_LOOK), fork=fork, env={"AWS_BATCH_JOB_ID": "j", "LC_ALL": "C.UTF-8"})
        assert made.exit()["code"] == 0
        lines = b"\n".join(made.lines()).replace(made.task_id.encode(), b"TASK")
        seen.append(re.sub(rb"/batchml-\w+", b"/temporary", lines))
    assert seen[0] == seen[1] == seen[2]
    assert b"end code=0" in seen[0]


def test_it_is_forked_once_the_runner_has_loaded_the_runtime(attempt: Attempt) -> None:
    look = "import os; print(open(f'/proc/{os.getppid()}/cmdline').read().split('\\0'))"
    through(attempt, *python(look)).exit()
    assert b"batchml.local.executors.runner.main" in attempt.lines()[0]


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 42", 42), ("kill -SEGV $$", 139), ("exec no-such-program-is-here", 127)],
)
def test_the_code_is_the_programs(attempt: Attempt, script: str, code: int) -> None:
    ended = through(attempt, "sh", "-c", script).exit()
    assert (ended["code"], ended["signal"], ended["oom"]) == (code, 0, False)


def test_a_missing_program_is_named_and_what_no_system_takes_is_a_start_failure(
    bench: Bench,
) -> None:
    runner = bench.runner()
    missing = through(bench.attempt(runner), "no-such-program-is-here")
    assert missing.exit()["code"] == 127
    assert b"no such command" in missing.lines()[0]
    impossible = through(bench.attempt(runner), "echo", "\0")
    assert impossible.exit()["start_failure"].startswith("CannotCreateContainerError")


def test_a_runtime_that_is_killed_takes_its_program_along(attempt: Attempt) -> None:
    through(attempt, "sh", "-c", "echo $$ >> ../pids; sleep 300 & echo $! >> ../pids; wait")
    program, child = attempt.pids(2)
    runtime = int(Path(f"/proc/{program}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(runtime, signal.SIGKILL)
    ended = attempt.exit()
    assert (ended["code"], ended["signal"]) == (137, signal.SIGKILL)
    assert not is_alive(program) and not is_alive(child)
    assert attempt.process.poll() is None


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5, 8, 20, 60])
def test_a_stop_at_any_moment_ends_it(bench: Bench, delay: int) -> None:
    runner = bench.runner()
    through(bench.attempt(runner), "true").exit()
    made = through(bench.attempt(runner), "sleep", "300")
    CLOCK.sleep(delay / 1000)
    made.stop()
    ended = made.exit(20)
    assert ended["code"] == 143 or ended["start_failure"]
    assert find_processes(made.task_id) == []


def test_nothing_of_one_attempt_is_in_the_next(bench: Bench) -> None:
    runner = bench.runner()
    through(bench.attempt(runner), "true", env={"SECRET": "hush", "TMPDIR": "/nowhere"}).exit()
    look = "import os; print(dict(os.environ), open(f'/proc/{os.getppid()}/environ').read())"
    made = through(bench.attempt(runner), *python(look))
    assert made.exit()["code"] == 0
    (line,) = made.lines()
    assert b"hush" not in line and b"nowhere" not in line
    assert b"BATCHML_TASK=" + made.task_id.encode() in line
    assert bench.attempts[0].task_id.encode() not in line


def test_the_lock_goes_with_the_runner_and_all_is_found_by_the_mark(attempt: Attempt) -> None:
    """Also what has forgotten its variables, and whose parent is gone: it descends from ours."""
    script = """echo $PPID >> ../pids
        env -i sh -c 'setsid sh -c "echo \\$\\$ >> ../pids; exec sleep 300" & exit 0'
        exec sleep 300"""
    through(attempt, "sh", "-c", script)
    pids = attempt.pids(2)
    assert attempt.is_locked()
    attempt.process.kill()
    attempt.process.wait(10)
    assert not attempt.is_locked()
    assert set(pids) <= set(find_processes(attempt.task_id))


def test_it_is_found_before_its_program_runs(attempt: Attempt, tmp_path: Path) -> None:
    pipe = tmp_path / "never-written"
    os.mkfifo(pipe)
    through(attempt, "true", env={"BATCHML_CODE": str(pipe)})

    def found() -> set[int]:
        return set(find_processes(attempt.task_id)) - {attempt.process.pid}  # marked while it forks

    (runtime,) = wait_for(found, "it waits for its code")
    attempt.process.kill()
    attempt.process.wait(10)
    assert found() == {runtime}


def test_an_idle_runner_is_nobodys(bench: Bench) -> None:
    made = through(bench.attempt(bench.runner()), "true")
    made.exit()
    assert find_processes(made.task_id) == []
    assert b"BATCHML_TASK" not in Path(f"/proc/{made.process.pid}/environ").read_bytes()


def test_an_environment_that_is_whole_is_not_prepared_again(bench: Bench, tmp_path: Path) -> None:
    runner = bench.runner()
    (tmp_path / "env" / "bin").mkdir(parents=True)
    more: dict[str, Any] = {
        "prepare": ["sh", "-c", "echo not yet; exit 1"], "prepare_env": {},
        "made": str(tmp_path / "env"),
    }  # fmt: skip
    assert through(bench.attempt(runner), "true", **more).exit()["start_failure"]
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "env" / ".complete").write_text(f"{tmp_path.resolve() / 'env'}\n")
    assert through(bench.attempt(runner), "true", **more).exit()["code"] == 0


def test_a_forked_runtime_is_born_in_the_slot(bench: Bench, groups: cgroup.Groups) -> None:
    made = bench.attempt(bench.runner(groups))
    through(made, "sh", "-c", "cat /proc/$PPID/cgroup", needs=NEEDS).exit()
    slot = cgroup.slot_name(made.process.pid, start_time(made.process.pid)).encode()
    assert sum(slot in line for line in made.lines()) == len(groups)
    for task in Path(f"/proc/{made.process.pid}/task").iterdir():
        assert slot not in (task / "cgroup").read_bytes()


def test_memory_is_limited_and_the_runner_never_chosen(bench: Bench, groups: cgroup.Groups) -> None:
    runner = bench.runner(groups)
    eats = through(bench.attempt(runner), *python("x = bytearray(200 << 20)"), needs=NEEDS)
    ended = eats.exit()
    assert (ended["code"], ended["oom"]) == (137, True)
    for _ in range(3):
        through(bench.attempt(runner), "true", needs={"memory": 1, "vcpus": 1}).exit()
    assert runner.process.poll() is None


def test_where_the_mark_finds_no_room_an_interpreter_is_started() -> None:
    script = (
        f"import sys; sys.path.insert(0, {_ROOT!r})\n"
        "from batchml.local.executors.runner.fork_server import ForkServer\n"
        "words = ['python', '-m', 'batchml.runtime.run', 'true']\n"
        "print(ForkServer().start(words, {'BATCHML_TASK': 't' * 36}, 1))"
    )
    for env in ({}, {"A": "too short"}):
        done = subprocess.run(python(script), env=env, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("None\n", "")


def test_the_runtime_is_imported_before_the_first_fork() -> None:
    """Else each attempt would import it anew."""
    script = (
        f"import sys; sys.path.insert(0, {_ROOT!r})\n"
        "from batchml.local.executors.runner import fork_server\n"
        "fork_server._load()\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(python(script), capture_output=True, text=True, check=True)
    needed = {"run", "telemetry.metrics", "telemetry.usage", "telemetry.budget", "sweep.trial"}
    assert {f"batchml.runtime.{name}" for name in needed} <= set(done.stdout.split())


# --- Children of one array ------------------------------------------------------------------------
# A runtime that has served a child serves the next one.


def child(attempt: Attempt, index: int, *command: str, array: str = "a", **more: Any) -> Attempt:
    ids = {"AWS_BATCH_JOB_ID": f"{array}:{index}", "AWS_BATCH_JOB_ARRAY_INDEX": str(index)}
    return through(attempt, *command, env={**ids, **more.pop("env", {})}, **more)


def runtime_of(bench: Bench, runner: Any, index: int, script: str = ":", **more: Any) -> int:
    """The process that served a child whose program has run this script."""
    made = child(bench.attempt(runner), index, "sh", "-c", f"echo $PPID; {script}", **more)
    made.exit()
    return int(made.lines()[0])


def waiting_runtime(bench: Bench, runner: Any) -> int:
    """A runtime that waits for the next child: on a busy machine the first may have taken long."""
    for index in range(100):
        found = runtime_of(bench, runner, index)
        if is_alive(found):
            return found
    raise AssertionError("no runtime waits")


def test_the_runtime_of_a_child_serves_the_next_of_its_array_and_no_other_job(
    bench: Bench,
) -> None:
    runner = bench.runner()
    first = waiting_runtime(bench, runner)
    assert runtime_of(bench, runner, 101) == runtime_of(bench, runner, 102) == first
    assert runtime_of(bench, runner, 0, array="b") != first and not is_alive(first)
    first = waiting_runtime(bench, runner)
    through(bench.attempt(runner), "true").exit()
    assert not is_alive(first)


@pytest.mark.parametrize("script", ["exit 3", "kill -TERM $PPID; sleep 300"])
def test_a_runtime_whose_child_failed_serves_no_other(bench: Bench, script: str) -> None:
    runner = bench.runner()
    first = runtime_of(bench, runner, 0, script)
    assert runtime_of(bench, runner, 1) != first
    assert not is_alive(first)


@pytest.mark.usefixtures("nohup")
def test_a_program_of_a_runtime_that_serves_again_sees_what_it_would_see_with_a_new_one(
    bench: Bench,
) -> None:
    runner = bench.runner()
    seen = []
    for fork in (True, True, False, True):
        made = child(bench.attempt(runner), 7, *python(_LOOK), fork=fork)
        assert made.exit()["code"] == 0
        lines = b"\n".join(made.lines()).replace(made.task_id.encode(), b"TASK")
        lines = re.sub(rb"/batchml-\w+", b"/temporary", lines)
        seen.append(re.sub(rb"\n\d+ (?=True\n)", b"\nFILES ", lines))
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_nothing_of_a_child_is_in_the_next(bench: Bench) -> None:
    runner = bench.runner()
    made = child(bench.attempt(runner), 0, "true", env={"SECRET": "hush"})
    made.exit()
    assert find_processes(made.task_id) == []
    look = "import os; print(dict(os.environ), open(f'/proc/{os.getppid()}/environ').read())"
    after = child(bench.attempt(runner), 1, *python(look))
    assert after.exit()["code"] == 0
    line = after.lines()[0]
    assert b"hush" not in line and made.task_id.encode() not in line
    assert b"BATCHML_TASK=" + after.task_id.encode() in line


def test_daemons_of_a_child_are_dead_before_its_record_appears(bench: Bench) -> None:
    runner = bench.runner()
    runtime_of(bench, runner, 0)
    made = child(
        bench.attempt(runner), 1, "sh", "-c",
        "env -i setsid sleep 300 & echo $! > ../pids; env -i setsid sleep 300 & echo $! >> ../pids",
    )  # fmt: skip
    made.exit()
    assert not any(map(is_alive, made.pids(2)))


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_runtime_that_was_killed_before_it_took_a_child_is_replaced(
    bench: Bench, is_sent: bool
) -> None:
    runner = bench.runner()
    first = waiting_runtime(bench, runner)
    os.kill(first, signal.SIGSTOP if is_sent else signal.SIGKILL)
    made = child(bench.attempt(runner), 101, "sh", "-c", "echo $PPID")
    if is_sent:
        wait_for(lambda: first in find_processes(made.task_id), "the child is handed over")
        CLOCK.sleep(0.05)
        os.kill(first, signal.SIGKILL)
    assert made.exit()["code"] == 0
    assert int(made.lines()[0]) != first


def test_a_child_that_a_killed_runner_has_handed_over_is_found_by_its_mark(bench: Bench) -> None:
    runner = bench.runner()
    first = waiting_runtime(bench, runner)
    os.kill(first, signal.SIGSTOP)
    made = child(bench.attempt(runner), 101, "sleep", "300")
    wait_for(lambda: first in find_processes(made.task_id), "the child is handed over")
    runner.process.kill()
    runner.process.wait(10)
    assert find_processes(made.task_id) == [first]
    os.kill(first, signal.SIGKILL)


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5, 8, 20, 60])
def test_a_stop_at_any_moment_of_a_child_ends_it_and_not_the_next(bench: Bench, delay: int) -> None:
    runner = bench.runner()
    runtime_of(bench, runner, 0)
    for index in range(1, 4):
        made = child(bench.attempt(runner), index, "sleep", "0.01" if index % 2 else "300")
        CLOCK.sleep(delay / 1000)
        made.stop()
        ended = made.exit(20)
        assert ended["code"] in (0, 143) or ended["start_failure"]
        assert find_processes(made.task_id) == []
    assert child(bench.attempt(runner), 4, "sh", "-c", "sleep 0.05").exit()["code"] == 0


def test_a_runtime_that_served_for_long_serves_no_other(bench: Bench) -> None:
    runner = bench.runner()
    first = runtime_of(bench, runner, 0, "sleep 1.1")
    assert runtime_of(bench, runner, 1) != first


def test_a_waiting_runtime_ends_with_its_runner(bench: Bench) -> None:
    runner = bench.runner()
    first = waiting_runtime(bench, runner)
    runner.process.kill()
    wait_for(lambda: not is_alive(first), "it ends")


def test_a_runtime_that_nobody_needs_ends(bench: Bench) -> None:
    first = runtime_of(bench, bench.runner(rest_after=0.0), 0)
    wait_for(lambda: not is_alive(first), "it ends")


def test_memory_of_a_child_is_limited_and_the_next_runs(
    bench: Bench, groups: cgroup.Groups
) -> None:
    runner = bench.runner(groups)
    slot = cgroup.slot_name(runner.process.pid, start_time(runner.process.pid))
    for index in range(2):
        made = child(
            bench.attempt(runner), index, "sh", "-c", "cat /proc/$PPID/cgroup", needs=NEEDS
        )
        assert made.exit()["code"] == 0
        assert sum(slot.encode() in line for line in made.lines()) == len(groups)
    eats = child(bench.attempt(runner), 2, *python("x = bytearray(200 << 20)"), needs=NEEDS)
    ended = eats.exit()
    assert (ended["code"], ended["oom"]) == (137, True)
    assert child(bench.attempt(runner), 3, "true", needs=NEEDS).exit()["code"] == 0


def test_a_stop_reaches_a_child_that_its_runtime_has_not_begun(bench: Bench) -> None:
    runner = bench.runner()
    first = runtime_of(bench, runner, 0)
    os.kill(first, signal.SIGSTOP)
    made = child(bench.attempt(runner), 1, "sleep", "300")
    wait_for(lambda: first in find_processes(made.task_id), "the child is handed over")
    made.stop()
    wait_for(lambda: has_pending(first, signal.SIGTERM), "the stop has been forwarded")
    os.kill(first, signal.SIGCONT)
    assert made.exit(20)["code"] == 143
    assert runtime_of(bench, runner, 2) != first


def has_pending(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return any(
        int(found, 16) >> number - 1 & 1 for found in re.findall(r"S\w+Pnd:\s+(\w+)", status)
    )


def test_a_child_whose_runner_has_gone_ends_with_the_code_of_its_program(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"""
import os, sys
sys.path.insert(0, {_ROOT!r})
from batchml.local.executors.runner.fork_server import ForkServer
forker = ForkServer()
env = {{"PATH": {os.environ["PATH"]!r}, "BATCHML_TASK": "t", "AWS_BATCH_JOB_ARRAY_INDEX": "0",
        "AWS_BATCH_JOB_ID": "a:0"}}
pid = forker.start([sys.executable, "-m", "batchml.runtime.run", "cat", {str(gate)!r}], env, 1)
assert forker.link >= 0
forker.dismiss()  # it serves no other
open({str(gate)!r}, "w").close()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=_ROOT, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
