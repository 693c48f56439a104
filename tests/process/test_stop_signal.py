"""`should_stop()`: who looks is not ended by the signal before it has saved."""

import os
import signal
import subprocess
import sys
from pathlib import Path

_LOOKS = """
import os, sys, time
from batchml.runtime import should_stop
should_stop()
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
while not should_stop():
    time.sleep(0.01)
print(os.waitpid(child, 0)[1])
"""


def test_who_looks_outlives_the_signal_and_its_workers_do_not(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    process = subprocess.Popen(
        [sys.executable, "-c", _LOOKS], text=True, stdout=subprocess.PIPE,
        env={**os.environ, "BATCHML_STOP_FILE": str(stop)},
    )  # fmt: skip
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    for number in (worker, process.pid):
        os.kill(number, signal.SIGTERM)
    stop.touch()
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert int(rest) == signal.SIGTERM


def test_outside_a_run_nothing_is_changed() -> None:
    script = "import signal; from batchml.runtime import should_stop; print(should_stop())\n"
    script += "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    environ = {name: each for name, each in os.environ.items() if name != "BATCHML_STOP_FILE"}
    out = subprocess.check_output([sys.executable, "-c", script], env=environ, text=True)
    assert out.split() == ["False", "True"]


def test_a_signal_that_comes_while_python_ends_changes_nothing(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    stop.touch()
    script = """
import os
from batchml.runtime import should_stop
class Late:  # goes when Python has set its handlers back
    def __del__(self, kill=os.kill, own=os.getpid()):
        kill(own, 15)
late = Late()
assert should_stop()
"""
    env = {"BATCHML_STOP_FILE": str(stop), "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", script], env=env, timeout=30).returncode == 0
