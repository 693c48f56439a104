"""Our program inside: what it is asked, whom it finds, what it passes on, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import NotRunning, UsageError
from batchml.local.exec import _MODULES
from batchml.model.run import JobStatus, Run
from batchml.runtime.exec import presence
from batchml.runtime.exec.command import (
    NO_PROGRAM,
    RUN_ENDED,
    ExecFailed,
    ExecRequest,
    resolve_command,
)
from batchml.runtime.exec.relay import (
    EXIT,
    INPUT,
    OUTPUT,
    OVER,
    READY,
    REFUSED,
    FrameParser,
    LineCodec,
    frame,
)
from batchml.runtime.exec.run_process import find_run_process
from batchml.runtime.processes import descendants
from batchml.sessions.exec.target import ExecTarget, find_target, not_running
from tests.sessions.test_forward import echo_server
from tests.support.fakes import FakeClock
from tests.support.local_server import wait_for

ROOT = Path(__file__).parents[2]
JOB = "11111111-2222-4333-8444-555555555555"


# --- words and frames -----------------------------------------------------------------------------


def test_an_order_is_one_word_without_quotes_and_read_back() -> None:
    order = ExecRequest(["sh", "-c", 'echo "ü" $HOME'], stream="relay", text=True, size=[24, 80])
    word = order.encode()
    assert word.isascii() and not set(word) & set(" '\"$\\`;&|")
    assert ExecRequest.parse([word]) == order
    assert ExecRequest.parse(["--", "ls", "-l"]).command == ["ls", "-l"]
    assert ExecRequest.parse([]) == ExecRequest(command=[])
    for wrong in (["x"], ["ls", "-l"], [ExecRequest().encode()[:-1] + "!"]):
        with pytest.raises(ValueError):
            ExecRequest.parse(wrong)


def test_frames_come_whole_however_they_are_cut_and_whatever_lies_between_lines() -> None:
    sent = [(INPUT, b"a\r\n\0"), (OVER, b""), (OUTPUT, bytes(range(256)) * 20)]
    plain = b"".join(frame(*each) for each in sent)
    lines = LineCodec()
    text = b"\r\nStarting session\r\n" + b"noise ".join(lines.pack(*each) for each in sent)
    text = text.replace(b"\n", b"\r\n")
    for size in (1, 5, 4096):
        frames, wire = FrameParser(), LineCodec()
        cut = [plain[at : at + size] for at in range(0, len(plain), size)]
        assert [one for part in cut for one in frames.feed(part)] == sent
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        found = [one for part in cut for one in wire.feed(part)]
        assert b"".join(content for kind, content in found if kind == OUTPUT) == sent[2][1]
        assert found[:2] == sent[:2]
    assert max(map(len, lines.pack(*sent[2]).split(b"\n"))) < 4096, "no line is a terminal's most"
    assert list(LineCodec().feed(b"~batchml~###\n")) == []


def test_what_is_sent_into_a_container_needs_nothing_else_of_ours() -> None:
    known: set[str] = set()
    for name in _MODULES:
        text = (ROOT / "batchml" / "runtime" / f"{name.replace('.', '/')}.py").read_text()
        needed = re.findall(r"^from batchml\.runtime\.([\w.]+)", text, re.MULTILINE)
        assert set(needed) <= known, name
        known.add(name)
        inner = re.findall(r"^ +from batchml\.runtime\.([\w.]+)", text, re.MULTILINE)
        assert set(inner) <= set(_MODULES), name


def test_the_best_shell_is_the_users_then_bash_then_sh(tmp_path: Path) -> None:
    assert resolve_command(ExecRequest(), {"SHELL": "/bin/sh", "PATH": "/bin"}) == ["/bin/sh"]
    with pytest.raises(ExecFailed, match="no shell") as caught:
        resolve_command(ExecRequest(), {"PATH": str(tmp_path), "SHELL": "/no/such"})
    assert caught.value.code == 127
    for name in ("sh", "bash"):
        (tmp_path / name).write_text("#!/bin/true")
        (tmp_path / name).chmod(0o755)
        assert resolve_command(ExecRequest(), {"PATH": str(tmp_path)}) == [str(tmp_path / name)]


# --- presence files -------------------------------------------------------------------------------


def test_presence_files_are_counted_and_one_whose_holder_is_killed_is_gone(tmp_path: Path) -> None:
    environ = {"BATCHML_METRICS": str(tmp_path / "metrics")}
    assert presence.count(environ) == 0
    with presence.hold_presence(environ), presence.hold_presence(environ):
        assert presence.count(environ) == 2
    assert presence.count(environ) == 0
    hold = "from batchml.runtime.exec import presence; import os, time\n"
    hold += "with presence.hold_presence(os.environ): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", hold],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert presence.count(environ) == 1
        holder.kill()
        holder.wait()
        assert presence.count(environ) == 0
    assert os.listdir(presence.folder_of(environ)) == [], "what it left is removed"


def test_where_nothing_can_be_written_all_else_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {"BATCHML_METRICS": str(tmp_path / "file" / "metrics")}
    with presence.hold_presence(environ):
        assert presence.count(environ) == 0
    assert presence.folder_of({"AWS_BATCH_JOB_ID": "a/b"}).endswith("batchml-seats-a-b")


# --- beside a program -----------------------------------------------------------------------------


@contextmanager
def program(folder: Path, script: str = "sleep 300", **more: str) -> Iterator[int]:
    """A run's program that stands for all of its container; its pid."""
    environ = {"PATH": os.environ["PATH"], "AWS_BATCH_JOB_ID": JOB, **more}
    environ["BATCHML_METRICS"] = str(folder / "metrics")
    with subprocess.Popen(["sh", "-c", script], env=environ, cwd=folder) as process:
        try:
            yield process.pid
        finally:
            for pid in descendants(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()


def inside(order: ExecRequest, **more: object) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "batchml.runtime.exec.main", order.encode()]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, **more)  # type: ignore[call-overload,no-any-return]


def test_the_program_is_found_and_whoever_starts_it_stands_aside(tmp_path: Path) -> None:
    script = "X=1 sh -c ': batchml.runtime.run; INNER=yes sleep 300; :'; :"
    with program(tmp_path, script, BATCHML_TASK="t1") as pid:
        found = wait_for(
            lambda: (p := find_run_process(pid)) and p.environ.get("INNER") and p,
            "the program runs",
        )
        assert (found.folder, found.user) == (str(tmp_path), os.geteuid())
        assert found.environ["X"] == "1"
        assert find_run_process(pid, task="t2") is None, "that of another attempt is not ours"


def test_a_command_beside_it_is_counted_and_ends_with_the_connection(tmp_path: Path) -> None:
    with program(tmp_path) as pid:
        lifeline, ours = os.pipe()
        environ = {"BATCHML_METRICS": str(tmp_path / "metrics")}
        script = "trap '' HUP TERM; setsid sleep 300 & echo $PWD; sleep 300"
        order = ExecRequest(["sh", "-c", script], root=pid, lifeline=lifeline)
        with inside(order, pass_fds=[lifeline]) as process:
            assert process.stdout is not None
            assert process.stdout.readline().decode().strip() == str(tmp_path)
            assert presence.count(environ) == 1
            below = descendants(process.pid)
            assert len(below) >= 2
            os.close(ours)
            os.close(lifeline)
            assert process.wait(20) == RUN_ENDED
        assert presence.count(environ) == 0
        assert not [one for one in below if os.path.exists(f"/proc/{one}/cwd")]


def test_it_ends_with_the_attempt_where_no_control_group_does_that(tmp_path: Path) -> None:
    record = tmp_path / "runner.json"
    record.touch()
    with program(tmp_path) as pid:
        order = ExecRequest(["sh", "-c", "echo in; sleep 300"], root=pid, record=str(record))
        with inside(order) as process:
            assert process.stdout is not None and process.stdout.readline() == b"in\n"
            record.unlink()
            assert process.wait(20) == RUN_ENDED


def test_without_a_program_it_says_so(tmp_path: Path) -> None:
    with program(tmp_path) as pid:
        done = subprocess.run(
            [sys.executable, "-c", "import batchml.runtime.exec.main as i; "
             "i._PATIENCE = 0; i.main()",
             ExecRequest(["true"], root=pid, task="other").encode()],
            cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert done.returncode == NO_PROGRAM and "the run's program has not started yet" in done.stderr


def test_a_relay_ends_what_it_started_when_its_client_is_gone(tmp_path: Path) -> None:
    with program(tmp_path) as pid:
        order = ExecRequest(["sh", "-c", "echo in; sleep 300"], root=pid, stream="relay")
        with inside(order) as process:
            assert process.stdin is not None and process.stdout is not None
            frames = FrameParser()
            seen: list[tuple[bytes, bytes]] = []
            while (OUTPUT, b"in\n") not in seen:
                seen += frames.feed(os.read(process.stdout.fileno(), 4096))
            assert seen[0] == (READY, b"")
            process.stdin.close()
            assert process.wait(20) == RUN_ENDED


def test_a_relay_on_a_terminal_has_its_size_and_says_the_code(tmp_path: Path) -> None:
    with program(tmp_path) as pid:
        script = "stty size; test -t 0 && test -t 2 && read x; echo got $x; exit 9"
        order = ExecRequest(
            ["sh", "-c", script], root=pid, stream="relay", size=[33, 77], term="dumb"
        )
        with inside(order) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(frame(INPUT, b"line\n"))
            process.stdin.flush()
            out = b""
            frames = FrameParser()
            for kind, content in frames.feed(process.stdout.read()):
                out += content if kind == OUTPUT else b""
                code = content if kind == EXIT else b""
        assert b"33 77\r\n" in out and b"got line\r\n" in out and code == b"9"


def test_a_relay_reaches_a_port_of_its_own_loopback_and_half_closes(tmp_path: Path) -> None:
    with program(tmp_path) as pid, echo_server() as port:
        with inside(ExecRequest(root=pid, stream="port", port=port)) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(frame(INPUT, b"ping") + frame(OVER))
            process.stdin.flush()
            found = list(FrameParser().feed(process.stdout.read()))
            assert found == [(READY, b""), (OUTPUT, b"ping"), (EXIT, b"0")]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            free = listener.getsockname()[1]
        with inside(ExecRequest(root=pid, stream="port", port=free)) as process:
            assert process.stdout is not None
            assert list(FrameParser().feed(process.stdout.read())) == [(EXIT, b"%d" % REFUSED)]
            assert process.wait(20) == REFUSED


# --- which attempt --------------------------------------------------------------------------------


def place_with(folder: Path, *runs: Run) -> Context:
    by_id = {run.job_id: run for run in runs}

    class Told(Context):
        def describe(self, job_ids: object) -> dict[str, Run]:
            return {each: by_id[each] for each in job_ids if each in by_id}  # type: ignore[attr-defined]

    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, None)
    return Told(settings, FakeClock(), folder)


def run(job_id: str = JOB, status: str = "RUNNING", **more: object) -> Run:
    return Run(job_id, "train", "q", JobStatus(status), **more)  # type: ignore[arg-type]


def test_the_target_of_a_run_of_a_child_and_of_a_node(tmp_path: Path) -> None:
    assert find_target(place_with(tmp_path, run()), JOB) == ExecTarget(run())
    child = run(f"{JOB}:3", array_index=3)
    assert find_target(place_with(tmp_path, child), f"{JOB}:3").run == child
    nodes = [run(f"{JOB}#{n}", node_index=n) for n in range(2)]
    place = place_with(tmp_path, run(nodes=2), *nodes)
    assert find_target(place, JOB) == ExecTarget(nodes[0], 0)
    assert find_target(place, JOB, 1) == ExecTarget(nodes[1], 1)
    with pytest.raises(UsageError, match="--node 2: the nodes of train are 0 to 1"):
        find_target(place, JOB, 2)
    with pytest.raises(UsageError, match=f"array of 10 runs: name one of them, such as {JOB}:0"):
        find_target(place_with(tmp_path, run(array_size=10)), JOB)


def test_a_run_that_nobody_can_be_in_says_why(tmp_path: Path) -> None:
    place = place_with(tmp_path, run(status="RUNNABLE"))
    with pytest.raises(NotRunning, match=f"train is RUNNABLE.*batchml explain {JOB}") as caught:
        find_target(place, JOB)
    assert (caught.value.exit_code, caught.value.over) == (75, False)
    over = not_running(place, run(status="FAILED", exit_code=3), "@last")
    assert (over.exit_code, over.over) == (1, True)
    assert "train has ended: app-error, exit code 3." in str(over) and "logs @last" in str(over)


def test_threads_of_a_client_need_no_signals(tmp_path: Path) -> None:
    from batchml.sessions.terminal import lend_terminal

    failed: list[BaseException] = []

    def work() -> None:
        try:
            with lend_terminal(lambda _: None):
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
