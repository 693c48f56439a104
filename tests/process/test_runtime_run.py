"""The entry of our images, run as a container runs it: a process with a pipe for its output."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.jobs.code import pack
from batchml.runtime.processes import descendants, state_of
from batchml.runtime.protocol.log_marks import parse_mark
from tests.process.test_processes import is_alive
from tests.support.local_server import wait_for

JOB = "6b0e0000-0000-4000-8000-000000000001"


def start(folder: Path, *command: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "batchml.runtime.run", *command],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


def run(folder: Path, *command: str, **env: str) -> tuple[int, list[bytes]]:
    """The exit code and the lines of one run that ends by itself."""
    process = start(folder, *command, **env)
    output, _ = process.communicate(timeout=60)
    assert output == b"" or output.endswith(b"\n")
    return process.returncode, output.split(b"\n")[:-1]


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 255", 255),
        ("kill -KILL $$", 137),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
    ],
)
def test_the_exit_code_is_the_commands_own(tmp_path: Path, script: str, code: int) -> None:
    assert run(tmp_path, "sh", "-c", script) == (code, [])


def test_a_command_that_is_not_there_is_127_and_one_that_may_not_run_126(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    code, lines = run(tmp_path, "no-such-command")
    assert (code, lines) == (127, [b"batchml: cannot run 'no-such-command': no such command in "
                                   b"this image."])  # fmt: skip
    code, lines = run(tmp_path, "./data")
    assert code == 126 and lines[0].startswith(
        b"batchml: cannot run './data': Permission denied: chmod +x"
    )
    (tmp_path / "data").chmod(0o755)
    (line,) = run(tmp_path, "./data")[1]
    assert b"Exec format error: a script needs a first line with its interpreter" in line
    (line,) = run(tmp_path, "echo a; ls")[1]
    assert line.endswith(b"no such command in this image. Did you mean: sh -c 'echo a; ls'")


@pytest.mark.parametrize(
    ("script", "code"), [("echo a; sleep 60 & exit 3", 3), ("echo a; kill -KILL $$", 137)]
)
def test_a_python_that_cannot_make_sessions_by_posix_spawn_runs_commands_too(
    tmp_path: Path, script: str, code: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef spawn(*_, **more): raise NotImplementedError('setsid')\n"
        "os.posix_spawnp = spawn\n"
    )
    words = [sys.executable, "-m", "batchml.runtime.run", "sh", "-c", script]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDEVMODE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"a\n", b"")


def test_a_command_inherits_no_file_that_the_entry_got(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        words = [sys.executable, "-m", "batchml.runtime.run", "ls", "-l", "/proc/self/fd"]
        done = subprocess.run(words, cwd=tmp_path, pass_fds=[lock.fileno()], stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert b"/dev/null" in done.stdout and str(tmp_path).encode() not in done.stdout


def test_a_command_names_the_folders_of_its_run(tmp_path: Path) -> None:
    folders = {"BATCHML_OUTPUT_DIR": str(tmp_path), "AWS_BATCH_JOB_ID": JOB, "BATCHML_FILL": "1"}
    assert run(tmp_path, "echo", "{outputs}/m", "{run}", **folders)[1][0] == (
        f"{tmp_path}/m {JOB}".encode()
    )
    code, (line, _) = run(tmp_path, "echo", "{workspace}", **folders)
    assert code == 78 and b"has {workspace}, but BATCHML_WORKSPACE is not set here" in line
    del folders["BATCHML_FILL"]  # the command of another client
    assert run(tmp_path, "echo", "{outputs}", **folders)[1][0] == b"{outputs}"


def test_a_child_finds_its_number_in_command_and_parameters(tmp_path: Path) -> None:
    script = ("sh", "-c", "echo {index} $BATCHML_PARAMS")
    given = {"BATCHML_FILL": "1", "BATCHML_PARAMS": '{"seed": "1{index}"}', "AWS_BATCH_JOB_ID": JOB}
    for more, line in (
        ({}, b'0 {"seed": 10}'),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "3"}, b'3 {"seed": 13}'),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "1", "BATCHML_ARRAY_MAP": "2 7-9"}, b'7 {"seed": 17}'),
        ({"BATCHML_PARAMS": "no JSON"}, b"0 no JSON"),
    ):
        assert run(tmp_path, *script, **{**given, **more})[1][0] == line


def test_a_trial_finds_its_seed_in_command_and_parameters(tmp_path: Path) -> None:
    script = ("sh", "-c", "echo {seed} $BATCHML_PARAMS $BATCHML_PARAM_SEED")
    given = {
        "BATCHML_FILL": "1", "BATCHML_PARAMS": '{"seed": "{seed}"}', "BATCHML_PARAM_SEED": "{seed}",
        "AWS_BATCH_JOB_ID": JOB,
    }  # fmt: skip
    assert run(tmp_path, *script, **given)[1][0] == b'0 {"seed": 0} 0'
    assert run(tmp_path, *script, **given, BATCHML_SEED="17")[1][0] == b'17 {"seed": 17} 17'


def test_no_command_and_code_that_cannot_be_unpacked_are_configuration_errors(
    tmp_path: Path,
) -> None:
    assert run(tmp_path)[0] == 78
    (tmp_path / "code").write_text("no archive")
    code, lines = run(tmp_path, "echo", "never", BATCHML_CODE=str(tmp_path / "code"))
    assert code == 78
    assert len(lines) == 1 and lines[0].startswith(b"batchml: the code archive")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, lines = run(tmp_path, "true", BATCHML_OUTPUT_DIR=str(tmp_path / "file" / "output"))
    assert code == 78
    assert len(lines) == 1 and b"file/output" in lines[0]


def test_a_stop_is_heard_by_a_command_that_was_stopped(tmp_path: Path) -> None:
    """It goes on, and saves, where it would wait for the KILL."""
    script = "trap 'echo saved; exit 5' TERM; echo begun; kill -STOP $$; sleep 600 & wait"
    process = start(tmp_path, "sh", "-c", script, BATCHML_GRACE="600")
    assert first_line(process) == b"begun"
    (command,) = descendants(process.pid)
    wait_for(lambda: state_of(command) == "T", "the command has stopped itself")
    process.terminate()
    assert (first_line(process), process.wait(60)) == (b"saved", 5)
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("code", [0, 9])
def test_the_end_mark_counts_every_line_before_it(tmp_path: Path, code: int) -> None:
    script = f"printf 'one\\n\\n\\000\\nlast'; echo error >&2; exit {code}"
    ended, lines = run(tmp_path, "sh", "-c", script, AWS_BATCH_JOB_ID="j")
    assert ended == code
    assert lines[:-1] == [b"one", b" ", b"\x00", b"lasterror"]
    assert parse_mark(lines[-1].decode()) == ("end", {"code": str(code), "lines": "4"})


def test_the_end_mark_tells_of_a_command_that_never_ran(tmp_path: Path) -> None:
    _, lines = run(tmp_path, "no-such-command", AWS_BATCH_JOB_ID="j")
    assert parse_mark(lines[-1].decode()) == ("end", {"code": "127", "lines": "1"})


def test_a_person_sees_no_marks(tmp_path: Path) -> None:
    assert run(tmp_path, "echo", "hello") == (0, [b"hello"])


def test_two_megabytes_arrive_whole(tmp_path: Path) -> None:
    script = "import random, sys; sys.stdout.buffer.write(random.Random(3).randbytes(2 << 20))"
    process = start(tmp_path, sys.executable, "-c", script)
    output, _ = process.communicate(timeout=60)
    expected = random.Random(3).randbytes(2 << 20).replace(b"\n\n", b"\n \n")
    assert process.returncode == 0
    assert output == expected + b"\n" or output == expected


# Waits for its child after a TERM, as a launcher does; the child has a session of its own.
_FAMILY = """
trap : TERM
setsid sh -c 'trap "echo told; exit 0" TERM; echo ready; while :; do sleep 0.02; done' &
wait; wait
echo over; exit 7
"""


def test_a_stop_reaches_every_process_whatever_its_session(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", _FAMILY)
    assert first_line(process) == b"ready"
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=30)
    lines = [line for line in rest.splitlines() if line != b"Terminated"]  # a shell's, of its sleep
    assert lines == [b"told", b"over"]
    assert process.returncode == 7


def test_a_stop_at_any_moment_of_the_start_is_not_lost(tmp_path: Path) -> None:
    """Until our handler is there it ends us at once; from then on it ends the command."""
    for wait in range(0, 120, 12):
        process = start(tmp_path, "sleep", "300")
        SystemClock().sleep(wait / 1000)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode in (143, -signal.SIGTERM)


def test_what_a_command_leaves_behind_neither_hangs_the_run_nor_outlives_it(
    tmp_path: Path,
) -> None:
    script = "setsid sleep 300 & echo $!; sleep 300 & echo $!; exit 5"
    code, lines = run(tmp_path, "sh", "-c", script)
    assert code == 5
    assert len(lines) == 2
    assert not any(is_alive(int(line)) for line in lines)


def test_a_command_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    script = "echo first; exec >&- 2>&-; sleep 0.3; exit 6"
    assert run(tmp_path, "sh", "-c", script) == (6, [b"first"])


def test_orphans_that_end_are_collected_while_the_command_runs(tmp_path: Path) -> None:
    orphans = 'i=0; while [ $i -lt 20 ]; do (sleep 0.01 & echo $! >> "$0"); i=$((i+1)); done'
    process = start(tmp_path, "sh", "-c", f"{orphans}; echo made; sleep 300", str(tmp_path / "p"))
    try:
        assert first_line(process) == b"made"
        pids = [int(line) for line in (tmp_path / "p").read_text().split()]
        assert len(pids) == 20
        collected: Any = lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # noqa: E731
        wait_for(collected, "no orphan is left, not even as a zombie", 10)
        assert descendants(process.pid)  # and the command still runs
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_progress_bar_shows_while_its_line_goes_on(tmp_path: Path) -> None:
    """The bar waits for the test to have seen it; so it was seen before its line ended."""
    bar = "printf '\\r10%%\\r20%%\\r'; while [ ! -e seen ]; do sleep 0.01; done; printf '30%%\\n'"
    program = (
        "import os, sys; from batchml.runtime.run import run;"
        "sys.exit(run(sys.argv[1:], os.environ, sys.stdout.buffer, 0.05))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "sh", "-c", bar], cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert first_line(process) == b"20%"
    (tmp_path / "seen").touch()
    assert process.stdout is not None
    assert process.stdout.read() == b"30%\n"
    assert process.wait(20) == 0


def test_code_is_not_unpacked_over_the_root_of_an_image(tmp_path: Path) -> None:
    """An image without a working directory starts in `/`, where `bin` and `etc` are its own."""
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "batchml-test").write_text("mine")
    packed = pack(source)
    archive = tmp_path / packed.name
    archive.write_bytes(packed.data)
    process = subprocess.run(
        [sys.executable, "-m", "batchml.runtime.run", "sh", "-c", "pwd; cat bin/batchml-test"],
        cwd="/", capture_output=True, check=False,
        env={"PATH": os.environ["PATH"], "BATCHML_CODE": str(archive), "TMPDIR": str(tmp_path),
             "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    folder, content, *_ = process.stdout.decode().splitlines()
    assert Path(folder).parent == tmp_path
    assert content == "mine"
    assert not Path("/bin/batchml-test").exists()
    inside = tmp_path / "inside"
    inside.mkdir()
    _, lines = run(inside, "pwd", BATCHML_CODE=str(archive))
    assert lines[0].decode() == str(inside), "a working directory is used as it is"
