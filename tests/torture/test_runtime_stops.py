"""A TERM at any system call of the runtime: no traceback, no stop lost, no exit code that is a lie.

strace does it; without strace these tests are skipped. BATCHML_TORTURE walks every point.
"""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from batchml.clock import SystemClock
from batchml.runtime.processes import descendants
from batchml.runtime.protocol.log_marks import parse_mark
from tests.support.generate import TORTURE
from tests.support.local_server import wait_for
from tests.torture.test_system_calls import can_trace

pytestmark = pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace")

CLOCK = SystemClock()
SEED = 20261122
_POINTS = 3  # of each command in the suite
_CALLS = (
    "openat,read,write,close,rt_sigaction,pipe2,vfork,clone,clone3,wait4,waitid,epoll_wait,"
    "epoll_ctl,unlink,mkdir,munmap,exit_group"
)
_LONG = ["sleep", "60"]
_SHORT = ["echo", "done"]


def traced(folder: Path, command: list[str], *options: str) -> "subprocess.Popen[bytes]":
    """The runtime under strace; only itself is traced, not the command."""
    words = ["strace", "-qq", "-o", str(folder / "trace"), "-e", f"trace={_CALLS}", *options]
    return subprocess.Popen(
        [*words, sys.executable, "-m", "batchml.runtime.run", *command],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"], "TMPDIR": str(folder), "AWS_BATCH_JOB_ID": "j",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def points(folder: Path, command: list[str]) -> list[tuple[str, int]]:
    """Every call that the runtime makes until a TERM or its end, numbered among its name's."""
    process = traced(folder, command)
    if command == _LONG:
        wait_for(lambda: len(descendants(process.pid)) > 1, "the command runs", 20)
        runtime = descendants(process.pid)[0]
        CLOCK.sleep(0.2)  # until the runtime waits: nothing shows that but its calls
        os.kill(runtime, signal.SIGTERM)
    process.communicate(timeout=60)
    counts: Counter[str] = Counter()
    found = []
    for line in (folder / "trace").read_text().splitlines():
        if line.startswith("--- SIGTERM"):
            break
        name = line.partition("(")[0]
        if name.isidentifier():
            counts[name] += 1
            found.append((name, counts[name]))
    return found


def chosen(found: list[tuple[str, int]]) -> list[tuple[str, int]]:
    if TORTURE > 1:
        return found
    # The end, where Python takes its handlers back, and a few of the others.
    few = random.Random(SEED).sample(found[:-30], min(_POINTS, len(found[:-30])))
    return few + random.Random(SEED).sample(found[-30:], min(_POINTS, len(found[-30:])))


def stop_at(folder: Path, command: list[str], name: str, number: int) -> tuple[int, list[str]]:
    """The exit code as a shell has it, and the lines, with a TERM as this call begins."""
    inject = f"inject={name}:signal=SIGTERM:when={number}"
    process = traced(folder, command, "-e", inject)
    output, errors = process.communicate(timeout=30)
    where = f"TERM at {name} number {number}"
    assert b"Traceback" not in errors and b"Exception" not in errors, (where, errors.decode())
    code = process.returncode
    lines = output.decode().splitlines()
    marks = [mark for line in lines if (mark := parse_mark(line)) and mark[0] == "end"]
    if marks:
        assert marks == [("end", {**marks[0][1], "code": str(code)})], (where, code, lines)
    return (128 - code if code < 0 else code), lines


def test_a_stop_at_any_call_ends_a_long_command_at_once(tmp_path: Path) -> None:
    for name, number in chosen(points(tmp_path, _LONG)):
        code, _ = stop_at(tmp_path, _LONG, name, number)
        assert code == 128 + signal.SIGTERM, (name, number)


def test_a_stop_at_any_call_leaves_the_code_of_a_command_that_ends_true(tmp_path: Path) -> None:
    for name, number in chosen(points(tmp_path, _SHORT)):
        code, lines = stop_at(tmp_path, _SHORT, name, number)
        assert code in (0, 128 + signal.SIGTERM), (name, number, code)
        if code == 0:
            assert lines[0] == "done", (name, number)
