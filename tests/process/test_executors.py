"""What every executor does, whatever an attempt is to it: one suite, run against each of them."""

import contextlib
import errno
import json
import os
import resource
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from batchml.local.executors import cgroup
from batchml.local.executors.processors import Processor, claimed_processors
from batchml.local.executors.runner.link import INLINE
from batchml.local.executors.supervisor import RUNNER_LOST
from batchml.local.home import Home
from tests.support.executor_rig import Rig, attempt_of, job_of, need_engine

PYTHON = "python3"

LIMIT = """
import os
paths = dict(line.strip().split(":", 2)[1:] for line in open("/proc/self/cgroup"))
of = lambda name: next((path for key, path in paths.items() if name in key.split(",")), "")
def first(*candidates):
    return next(open(path).read().strip() for path in candidates if os.path.exists(path))
v2 = paths.get("", "")
print(first(f"/sys/fs/cgroup/memory{of('memory')}/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            f"/sys/fs/cgroup{v2}/memory.max", "/sys/fs/cgroup/memory.max"))
print(first(f"/sys/fs/cgroup/pids{of('pids')}/pids.max", "/sys/fs/cgroup/pids/pids.max",
            f"/sys/fs/cgroup{v2}/pids.max", "/sys/fs/cgroup/pids.max"))
"""


@pytest.fixture(params=["process", "docker"])
def rig(request: pytest.FixtureRequest, home: Home) -> Iterator[Rig]:
    if request.param == "docker":
        need_engine()
    made = Rig(request.param, home, {"SERVER_SECRET": "never shown"})
    yield made
    made.close()


def needs_limits(rig: Rig) -> None:
    """As processes, jobs have limits only where the server may write control groups."""
    if rig.kind == "process" and not cgroup.find(rig.identity.id):
        pytest.skip("no control group may be written here")


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_an_exit_code_is_the_programs(rig: Rig, code: int) -> None:
    done = rig.run(["sh", "-c", f"exit {code}"])
    assert done.exit.code == code
    assert not (done.exit.oom or done.exit.lost or done.exit.start_failure)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_program_that_a_signal_ends_has_128_and_its_number(rig: Rig, number: int) -> None:
    done = rig.run(["sh", "-c", f"kill -{int(number)} $$"])
    assert (done.exit.code, done.exit.oom) == (128 + number, False)


def test_each_stream_keeps_its_order_and_its_lines_whole(rig: Rig) -> None:
    script = "for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done"
    done = rig.run(["sh", "-c", script])
    for stream in (b"out", b"err"):
        told = [line for line in done.lines if line.startswith(stream)]
        assert told == [b"%s %d" % (stream, i) for i in range(1, 6)]
    assert len(done.lines) == 10


def test_a_line_of_one_stream_is_not_cut_by_the_other(rig: Rig) -> None:
    if rig.kind == "process":
        pytest.skip("a process has one pipe for both streams, as a terminal has")
    script = "printf half; sleep 0.2; echo error >&2; sleep 0.2; echo ' and half'"
    assert set(rig.run(["sh", "-c", script]).lines) == {b"half and half", b"error"}


def test_output_is_kept_byte_for_byte(rig: Rig) -> None:
    script = r"printf 'a\377\376\000b\r\n\nlatin \351\n\t tab\nlast, without its end'"
    lines = rig.run(["sh", "-c", script]).lines
    assert lines == [b"a\xff\xfe\0b\r", b" ", b"latin \xe9", b"\t tab", b"last, without its end"]


def test_a_huge_line_comes_in_pieces_that_lose_nothing(rig: Rig) -> None:
    script = "import sys; sys.stdout.buffer.write(b'0123456789' * 100_000 + b'\\nafter\\n')"
    *pieces, after = rig.run([PYTHON, "-c", script]).lines
    assert b"".join(pieces) == b"0123456789" * 100_000
    assert (len(pieces), after) == (4, b"after")


def test_many_lines_are_all_there(rig: Rig) -> None:
    done = rig.run(["sh", "-c", "seq 50000"])
    assert done.lines == [b"%d" % number for number in range(1, 50001)]


def test_a_program_cannot_forge_our_marks(rig: Rig) -> None:
    assert rig.run(["echo", "::batchml end code=0 lines=0"]).lines == [
        b" ::batchml end code=0 lines=0"
    ]


def test_the_environment_is_batchs_and_the_jobs_and_not_the_servers(rig: Rig) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    task = rig.start([PYTHON, "-c", script], env={"MINE": "a b=c", "HOME": "/tmp"})
    seen = json.loads(rig.outcome(task).text)
    job, attempt = rig.given[task]
    assert (seen["MINE"], seen["HOME"]) == ("a b=c", "/tmp")
    assert seen["AWS_BATCH_JOB_ID"] == job.id
    assert seen["AWS_BATCH_JOB_ATTEMPT"] == str(attempt.number)
    assert seen["AWS_BATCH_JQ_NAME"] == "default"
    assert seen["AWS_BATCH_CE_NAME"] == "this-machine"
    assert seen["BATCHML_RUN"] == job.id
    assert "SERVER_SECRET" not in seen


def test_arguments_are_not_split_again(rig: Rig) -> None:
    words = ["a b", "$HOME", "*", "'", "-x", "ü"]
    script = "import sys; print(ascii(sys.argv[1:]))"
    assert rig.run([PYTHON, "-c", script, *words]).text == ascii(words)


def test_each_attempt_has_a_fresh_working_directory(rig: Rig) -> None:
    script = "test ! -e marker && touch marker && pwd"
    assert [rig.run(["sh", "-c", script]).exit.code for _ in range(2)] == [0, 0]


def test_outputs_lie_where_the_run_keeps_them(rig: Rig) -> None:
    script = (
        'umask 022; echo kept > "$BATCHML_OUTPUT_DIR/file"; echo c > "$BATCHML_CHECKPOINT_DIR/c"'
    )
    task = rig.start(["sh", "-c", script])
    assert rig.outcome(task).exit.code == 0
    assert (rig.output(task) / "file").read_text() == "kept\n"
    assert (rig.output(task).parent / "checkpoints" / "c").read_text() == "c\n"


def test_checkpoints_and_the_workspace_are_there_for_the_next_attempt(rig: Rig) -> None:
    script = (
        'cat "$BATCHML_CHECKPOINT_DIR/step" "$BATCHML_WORKSPACE/shared" 2>/dev/null; '
        'echo one > "$BATCHML_CHECKPOINT_DIR/step"; echo all > "$BATCHML_WORKSPACE/shared"'
    )
    task = rig.start(["sh", "-c", script])
    assert rig.outcome(task).lines == []
    assert rig.outcome(rig.start_job(rig.given[task][0])).lines == [b"one", b"all"]


SHOW_PROCESSORS = "import os; print(*sorted(os.sched_getaffinity(0)), flush=True)"


def processors_of(rig: Rig, task_id: str) -> set[int]:
    return {int(word) for word in rig.outcome(task_id).text.split()}


def test_attempts_have_processors_of_their_own_while_there_are_enough(rig: Rig) -> None:
    here = os.sched_getaffinity(0)
    tasks = [rig.start([PYTHON, "-c", SHOW_PROCESSORS]) for _ in range(len(here) + 1)]
    *own, last = [processors_of(rig, task_id) for task_id in tasks]
    assert sorted(own) == [{number} for number in sorted(here)]
    assert last == here, "it found none left"


def test_an_attempt_takes_no_processor_of_another_server(rig: Rig) -> None:
    first, *rest = sorted(os.sched_getaffinity(0))
    rig.claimed = {first}
    found = processors_of(rig, rig.start([PYTHON, "-c", SHOW_PROCESSORS], vcpus=1))
    assert found == ({rest[0]} if rest else {first})
    rig.claimed = {first, *rest}
    found = processors_of(rig, rig.start([PYTHON, "-c", SHOW_PROCESSORS]))
    assert found == {first, *rest}


@pytest.mark.parametrize("rig", ["process"], indirect=True)
def test_the_processors_of_an_attempt_stay_claimed_when_its_server_ends(rig: Rig) -> None:
    """As a container it claims them in the same way; but Docker takes only real processors."""
    number = 100_000 + os.getpid()  # no other test has it
    rig.processors = (Processor(number),)
    rig.restart()
    task_id = rig.start(["sleep", "600"])
    rig.until(lambda: rig.started(task_id))
    assert claimed_processors([number]) == {number}
    rig.restart()
    assert claimed_processors([number]) == {number}
    rig.executor.stop(task_id)
    rig.outcome(task_id)
    assert claimed_processors([number]) == set()


def test_a_missing_program_is_127_and_named(rig: Rig) -> None:
    done = rig.run(["no-such-program-anywhere"])
    assert done.exit.code == 127
    assert "no-such-program-anywhere" in done.text


def test_a_file_that_is_no_program_is_126(rig: Rig) -> None:
    assert rig.run(["/etc/passwd"]).exit.code == 126


@pytest.mark.parametrize("command", ["no-such-program-anywhere", "/etc/passwd"])
def test_without_an_init_process_it_cannot_be_started(rig: Rig, command: str) -> None:
    """B23."""
    done = rig.run([command], init=False)
    assert done.exit.code is None
    assert done.exit.start_failure.startswith("CannotStartContainerError: ")
    assert command in done.exit.start_failure


def test_it_starts_before_it_ends(rig: Rig) -> None:
    task = rig.start(["sleep", "0.1"])
    done = rig.outcome(task)
    assert done.started_at is not None and done.exit.stopped_at is not None
    assert done.exit.started_at == done.started_at
    assert done.exit.stopped_at - done.started_at >= 100


# --- stops --------------------------------------------------------------------------------------


def test_a_stop_is_heard_and_may_be_answered(rig: Rig) -> None:
    script = "trap 'echo saved; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    task = rig.start(["sh", "-c", script])
    rig.until_line(task, b"ready")
    rig.executor.stop(task)
    done = rig.outcome(task)
    assert (done.exit.code, done.lines) == (3, [b"ready", b"saved"])


def test_a_program_without_an_answer_ends_with_143(rig: Rig) -> None:
    task = rig.start(["sleep", "60"])
    rig.until(lambda: rig.started(task))
    rig.executor.stop(task)
    assert rig.outcome(task, 20).exit.code == 143


def test_a_program_that_will_not_hear_is_killed_after_its_grace(rig: Rig) -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    task = rig.start(["sh", "-c", script], env={"BATCHML_GRACE": "1"})
    rig.until_line(task, b"ready")
    rig.executor.stop(task)
    done = rig.outcome(task, 20)
    assert (done.exit.code, done.exit.oom) == (137, False)


def test_a_stop_right_after_the_start_is_not_lost(rig: Rig) -> None:
    task = rig.start(["sleep", "60"])
    rig.executor.stop(task)
    assert rig.outcome(task, 20).exit.code in (None, 143)


def test_nothing_of_an_attempt_lives_on(rig: Rig) -> None:
    """Neither what was forked, nor who made a session of its own, nor who ignores signals."""
    tag = f"4{uuid.uuid4().int % 10**8:08d}"
    script = (
        f"(trap '' TERM HUP; sleep {tag}) & setsid sleep {tag} & "
        f"(setsid sh -c 'sleep {tag} & sleep {tag}' &) ; sleep 0.3; exit 5"
    )
    assert rig.run(["sh", "-c", script]).exit.code == 5
    assert alive(tag) == []


def alive(word: str) -> list[str]:
    """Processes of this machine, containers' too, that have a word in their command."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if word.encode() in file.read().split(b"\0"):
                        found.append(entry)
            except OSError:
                continue
    return found


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ENOSPC])
def test_a_start_waits_until_the_system_has_room(rig: Rig, number: int) -> None:
    left = [OSError(number, os.strerror(number))] * 2

    def refuse(_: dict[str, Any]) -> None:
        if left:
            raise left.pop()

    rig.change = refuse
    done = rig.run(["sh", "-c", "exit 3"])
    assert (done.exit.code, left) == (3, [])


def test_a_start_waits_for_each_descriptor_that_it_needs(rig: Rig) -> None:
    """None is free at first, then one after the other is: it fails at another place each time."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        large = {"LARGE": "x" * 2 * INLINE}  # comes in a file of its own
        task = rig.start(["sh", "-c", "echo $BATCHML_RUN; exit 3"], env=large)
        for _ in range(8):
            rig.wait(0.25)
            os.close(taken.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in taken:
            os.close(file)
    done = rig.outcome(task)
    assert (done.exit.code, len(done.lines)) == (3, 1)


# --- limits -------------------------------------------------------------------------------------


def test_more_memory_than_asked_for_ends_the_program_as_out_of_memory(rig: Rig) -> None:
    needs_limits(rig)
    done = rig.run([PYTHON, "-c", "x = bytearray(400 << 20)"], memory=64)
    assert (done.exit.code, done.exit.oom) == (137, True)


def test_a_child_that_is_killed_for_memory_is_told_and_ends_nothing(rig: Rig) -> None:
    needs_limits(rig)
    script = "import os\nif os.fork() == 0:\n x = bytearray(400 << 20)\nprint(os.wait()[1])"
    done = rig.run([PYTHON, "-c", script], memory=64)
    assert (done.exit.code, done.exit.oom) == (0, False)
    assert done.lines[0] == b"9"
    assert "memory" in done.text


def test_limits_are_what_the_job_needs(rig: Rig) -> None:
    needs_limits(rig)
    memory, pids = rig.run([PYTHON, "-c", LIMIT], memory=96).lines
    assert int(memory) == 96 << 20
    assert pids.isdigit()


def test_many_at_once_end_each_with_its_own_code_and_output(rig: Rig) -> None:
    tasks = [rig.start(["sh", "-c", f"echo {n}; sleep 0.2; exit {n}"]) for n in range(8)]
    for number, task in enumerate(tasks):
        done = rig.outcome(task)
        assert (done.exit.code, done.lines) == (number, [b"%d" % number])


# --- servers and runners that die ---------------------------------------------------------------

COUNT = "echo begun; i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo $i; sleep 0.05; done; exit 6"


def test_another_server_finds_an_attempt_where_it_is(rig: Rig) -> None:
    task = rig.start(["sh", "-c", COUNT])
    rig.until_line(task, b"3")
    rig.restart()
    done = rig.outcome(task)
    assert done.exit.code == 6
    assert done.lines == [b"begun", *(b"%d" % number for number in range(1, 41))]


def test_another_server_finds_what_ended_without_one(rig: Rig) -> None:
    task = rig.start(["sh", "-c", "echo begun; sleep 0.5; exit 4"])
    rig.until_line(task, b"begun")
    rig.executor.close()
    path = rig.home.attempt(task) / "exit.json"
    rig.until(path.exists)
    rig.reopen()
    assert rig.outcome(task).exit.code == 4


def test_another_server_can_stop_an_attempt(rig: Rig) -> None:
    task = rig.start(["sh", "-c", "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"])
    rig.until_line(task, b"ready")
    rig.restart()
    rig.executor.stop(task)
    assert rig.outcome(task, 20).exit.code == 9


def test_a_runner_that_is_killed_loses_a_process_and_not_a_container(rig: Rig) -> None:
    tag = f"4{uuid.uuid4().int % 10**8:08d}"
    task = rig.start(["sh", "-c", f"setsid sleep {tag} & {COUNT}"])
    rig.until_line(task, b"3")
    os.kill(rig.runner(task), signal.SIGKILL)
    done = rig.outcome(task)
    if rig.kind == "process":
        assert (done.exit.code, done.exit.log) == (None, None)
        assert done.exit.lost.startswith("Host EC2 ")
    else:
        assert (done.exit.code, done.exit.log and done.exit.log.shown) == (6, 41)
        assert done.lines == [b"begun", *(b"%d" % number for number in range(1, 41))]
    assert alive(tag) == []


def test_a_runner_that_is_killed_together_with_its_server(rig: Rig) -> None:
    task = rig.start(["sh", "-c", COUNT])
    rig.until_line(task, b"3")
    rig.executor.close()
    os.kill(rig.runner(task), signal.SIGKILL)
    rig.reopen()
    done = rig.outcome(task)
    assert done.exit.code == (None if rig.kind == "process" else 6)
    if rig.kind == "docker":
        assert done.lines == [b"begun", *(b"%d" % number for number in range(1, 41))]


def test_a_log_that_can_grow_no_more_stops_the_program_and_says_so(rig: Rig) -> None:
    flood = "trap 'exit 9' TERM; echo ready; while [ ! -e \"$BATCHML_OUTPUT_DIR/go\" ]; do sleep "
    flood += "0.05; done; while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done"
    task = rig.start(["sh", "-c", flood])
    rig.until_line(task, b"ready")
    resource.prlimit(rig.runner(task), resource.RLIMIT_FSIZE, (100_000, 100_000))
    (rig.output(task) / "go").touch()
    done = rig.outcome(task, 40)
    assert done.exit.code == 9, "it was told to stop, and had its grace"
    assert done.exit.reason.endswith("the largest file size (RLIMIT_FSIZE, 100000 bytes)")
    log = (rig.home.attempt(task) / "log").read_bytes()
    assert 99_900 < len(log) <= 100_000 and log.endswith(b"x\n"), "no line is torn"
    assert rig.run(["true"]).exit.code == 0, "the next attempt has a log of its own"


def test_what_ends_a_runner_is_said_with_the_loss_of_its_attempt(rig: Rig) -> None:
    job = job_of(["true"])
    attempt = attempt_of(job)
    (rig.home.attempt(attempt.task_id) / "log").mkdir(parents=True)
    done_by = rig.start_job(job, attempt)
    exit_ = rig.until(lambda: rig.ended(done_by), 60)
    assert exit_.lost.startswith(f"{RUNNER_LOST} It failed: IsADirectoryError: ")
