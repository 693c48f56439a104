"""A save at its system calls: killed after any of them, told that the disk fails at any of them.

strace does it; without strace these tests are skipped. BATCHML_TORTURE walks every point.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from batchml.runtime import checkpoint
from tests.support.generate import TORTURE
from tests.torture.test_system_calls import can_trace

pytestmark = pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to trace")

ROOT = str(Path(__file__).parents[2])
_UNTOUCHED = ""  # no strace
_POINTS = 12  # in the suite; all of them in torture

# Saves step 20 where step 10 is; what is needed for that is imported before the mark.
PROGRAM = """
import os, sys
from batchml.runtime import checkpoint
from batchml.runtime.checkpoint import layout
from batchml.runtime.telemetry import budget
def write(path):
    for name in ("a", "b"):
        with open(path + "/" + name, "wb") as file:
            file.write(b"new")
os.path.exists("/begin")
try:
    os.mkdir("/proc/begin")
except OSError:
    pass
try:
    checkpoint.newest()
except OSError:
    sys.exit(4)  # rather than to begin anew
sys.exit(0 if checkpoint.save(write, 20, keep=1) else 3)
"""
_CALLS = "mkdir,openat,write,fsync,rename,unlink,unlinkat,rmdir,fchmod"


class Saver:
    """A program that saves under strace."""

    def __init__(self, folder: Path) -> None:
        self._trace = folder / "trace"
        self.checkpoints = folder / "checkpoint"
        self._environ = {
            "PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "PYTHONDONTWRITEBYTECODE": "1",
            "BATCHML_CHECKPOINT_DIR": str(self.checkpoints), "BATCHML_RUN": "job",
        }  # fmt: skip
        self._attempt = 0

    def run(self, *options: str) -> tuple[int, str]:
        """One attempt; its exit status and what it said."""
        self._attempt += 1
        words = ["strace", "-qq", "-o", str(self._trace), "-e", f"trace={_CALLS}", *options]
        if options == (_UNTOUCHED,):
            words = []
        done = subprocess.run(
            [*words, sys.executable, "-S", "-c", PROGRAM], capture_output=True, text=True,
            env={**self._environ, "BATCHML_ATTEMPT": str(self._attempt)},
        )  # fmt: skip
        return done.returncode, done.stderr

    def points(self) -> list[tuple[str, int]]:
        """Each call that a save makes, with its number in the program."""
        assert self.run() == (0, "")
        before, _, after = self._trace.read_text().partition('mkdir("/proc/begin"')
        counts = Counter(re.findall(r"^(\w+)\(", before, re.MULTILINE))
        counts["mkdir"] += 1
        found = []
        for call in re.findall(r"^(\w+)\(", after, re.MULTILINE):
            counts[call] += 1
            found.append((call, counts[call]))
        return found

    def begin_anew(self, folder: Path) -> None:
        subprocess.run(["rm", "-rf", str(self.checkpoints)], check=True)
        for step in (5, 10):
            assert checkpoint.save(lambda path: _write(path, "old"), step, folder=str(folder))
        (self.checkpoints / ".batchml-fence.json").unlink()


def _write(path: str, text: str) -> None:
    for name in ("a", "b"):
        Path(path, name).write_text(text)


def loaded(folder: Path) -> tuple[int, str]:
    """The step that is loaded, and what both its files hold."""
    found = checkpoint.newest(str(folder))
    assert found is not None
    text = Path(found.path, "a").read_text()
    assert Path(found.path, "b").read_text() == text
    assert checkpoint.newest_step(str(folder)) == found.step
    return found.step, text


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    found = Saver(tmp_path)
    found.begin_anew(found.checkpoints)
    return found


def some(points: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """A part of them that is spread over the whole, and all of them in torture."""
    if TORTURE > 1:
        return points
    step = -(-len(points) // _POINTS)
    return points[os.getpid() % step :: step]


def test_killed_after_any_call_it_leaves_the_old_or_the_new(saver: Saver) -> None:
    """A7."""
    points = saver.points()
    assert {call for call, _ in points} >= {"mkdir", "openat", "write", "fsync", "rename"}
    seen = Counter[str]()
    for call, number in some(points):
        saver.begin_anew(saver.checkpoints)
        code, _ = saver.run("-e", f"inject={call}:signal=SIGKILL:when={number}")
        assert code == -9, (call, number)
        step, text = loaded(saver.checkpoints)
        assert (step, text) in {(10, "old"), (20, "new")}, (call, number)
        seen[text] += 1
        code, said = saver.run(_UNTOUCHED)  # the next attempt
        assert (code, said) == (0, ""), (call, number)
        assert loaded(saver.checkpoints) == (20, "new")
        left = [name for name in os.listdir(saver.checkpoints) if name.startswith((".s", ".r"))]
        assert left == [], (call, number)
    assert set(seen) == {"old", "new"}
    print(f"{len(points)} points, {seen}")


def test_a_disk_that_fails_at_any_call_leaves_the_old_or_the_new(saver: Saver) -> None:
    """C9: and the program is told, and goes on."""
    faults = {"openat": "EMFILE", "write": "ENOSPC", "fsync": "EIO", "mkdir": "ENOSPC",
              "rename": "ENOSPC"}  # fmt: skip
    points = [point for point in saver.points() if point[0] in faults]
    codes = Counter[int]()
    for call, number in some(points):
        saver.begin_anew(saver.checkpoints)
        code, said = saver.run("-e", f"inject={call}:error={faults[call]}:when={number}")
        step, text = loaded(saver.checkpoints)
        codes[code] += 1
        if code == 3:
            assert said.count("\n") == 1 or "passed over" in said, said
            assert "was not saved: " in said
            late = "may not outlive a power cut" in said
            assert (step, text) == ((20, "new") if late else (10, "old")), (call, number)
        elif code == 4:
            assert (call, step, text) == ("openat", 10, "old"), (call, number)
        else:  # it befell the old one, say, that was to be removed
            assert (code, step, text) == (0, 20, "new"), (call, number, said)
    assert codes[3] > 0
    print(f"{len(points)} points, {codes}")
