"""Sweeps whose controller is killed, closed, or a run of its own: nothing lost, nothing twice.

BATCHML_TORTURE=20 kills the controllers of twenty sweeps.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchml.model.sweep import TrialState
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.stores import SweepStore
from tests.support.cli import Cli, Shown, read_rest, read_until, write_job
from tests.support.executor_rig import IMAGE, need_engine
from tests.support.generate import TORTURE

# Not an image of ours: as a process it needs no environment that has to be made first.
JOB = f"""
image = "{IMAGE}"
command = ["python3", "train.py", "{{lr}}"]
[params]
lr = 0.1
[resources]
vcpus = 1
memory = "64 MiB"
[checkpoint]
grace = "5s"
"""
# Says in a folder that all share when it began, and when it came to its end.
TRAIN = """
import os, sys, time
lr, trial = float(sys.argv[1]), os.environ["BATCHML_TRIAL"]
sweep = os.path.basename(os.environ["BATCHML_SWEEP"])
place = os.path.join(os.environ["BATCHML_WORKSPACE"], f"seen-{sweep}")
def say(what):
    with open(place, "a") as file:
        file.write(f"{trial} {lr!r} {what}\\n")
say("began")
for epoch in range(1, 1 + int(os.environ.get("EPOCHS", "2"))):
    time.sleep(0.1)
    print(f"epoch={epoch} acc={1 - (lr - 0.3) ** 2}", flush=True)
say("ended")
"""
SWEEP = """
name = "tiny"
job = "tiny"
goal = { max = "acc" }
[space]
lr = { float = [0.0, 1.0] }
[limits]
trials = TRIALS
parallel = 2
"""
LIMIT = 60.0  # seconds


class Scene:
    """One sweep of a job of its own."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.key = ""

    def write(self, trials: int, job: str = JOB, more: str = "") -> None:
        write_job(self.cli.folder, "tiny", job, train__py=TRAIN)
        text = SWEEP.replace("TRIALS", str(trials)) + more
        (self.cli.folder / "sweep.toml").write_text(text)

    def detach(self) -> None:
        self.key = key_in(self.ok("sweep", "--detach", "sweep.toml").out)

    def ok(self, *arguments: str) -> Shown:
        shown = self.cli(*arguments)
        assert shown.code == 0, shown.out + shown.err
        return shown

    @property
    def state(self) -> SweepState:
        folder = str(self.cli.home.root / "sweeps" / self.key)
        return SweepLedger(SweepStore(self.key, folder, FolderStore(folder))).load()

    def until(self, is_so: Callable[[SweepState], object]) -> SweepState:
        end = time.monotonic() + LIMIT
        while not is_so(state := self.state):
            assert time.monotonic() < end, (state.counts, state.stopping, state.ended)
            time.sleep(0.05)
        return state

    def controllers(self) -> list[int]:
        """The processes that are its controller."""
        return [pid for pid, words in processes() if words[-2:] == ["attend", self.key]]

    def began(self) -> list[str]:
        """The trials that have begun, in their order; one that began twice is there twice."""
        return sorted(line.split()[0] for line in self._seen() if line.endswith("began"))

    def _seen(self) -> list[str]:
        path = self.cli.home.root / "workspace" / f"seen-{self.key}"
        return path.read_text().splitlines() if path.exists() else []

    def check_whole(self, trials: int) -> None:
        """Each trial ran once, with the parameters of the ledger; no job was sent twice."""
        state = self.until(lambda state: state.ended)
        assert sorted(state.trials) == list(range(trials))
        assert self.began() == sorted(map(str, range(trials)))
        lines = {line.split()[0]: line.split()[1] for line in self._seen()}
        assert lines == {str(n): repr(trial.params["lr"]) for n, trial in state.trials.items()}
        tag = f"batchml:sweep={self.key}"
        jobs = self.ok("ls", "--limit", "100", "--tag", tag, "--json").json
        keys = [job["jobName"].rpartition("-")[2] for job in jobs]
        waves = [wave.key for wave in state.batches.values()]
        assert sorted(key for key in keys if key in waves) == sorted(waves)


def key_in(text: str) -> str:
    found = re.search(r"\[tiny - (\w{17})\]", text)
    assert found is not None, text
    return found[1]


def processes() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield int(path.parent.name), path.read_text().split("\0")[:-1]
        except OSError:
            continue


def kill_again_and_again(scene: Scene) -> None:
    scene.detach()
    dice, killed = random.Random(), 0
    end = time.monotonic() + LIMIT
    while scene.state.ended is None and time.monotonic() < end:
        time.sleep(dice.uniform(0.1, 0.6))
        if killed < 3:
            for pid in scene.controllers():
                os.kill(pid, signal.SIGKILL)
                killed += 1
    assert killed
    scene.check_whole(5)


def close_again_and_again(scene: Scene) -> None:
    dice = random.Random()
    watching = scene.cli.watch("sweep", "sweep.toml")
    scene.key = key_in(read_until(watching, "Started sweep"))
    for _ in range(2):
        time.sleep(dice.uniform(0.1, 0.8))
        kill(watching)
        watching = scene.cli.watch("sweeps", "resume", scene.key)
    out, err = read_rest(watching, LIMIT)
    # On a busy machine the one before may have seen the end, just before it was killed.
    assert watching.returncode == 0 or "This sweep has ended" in err, out + err
    scene.check_whole(4)


@pytest.fixture
def scene(cli: Cli) -> Scene:
    return Scene(cli)


def test_a_controller_that_is_killed_again_and_again_loses_nothing(scene: Scene) -> None:
    """SIGKILL, at points that nobody chose: AWS Batch tries it again, and it goes on."""
    scene.write(trials=5)
    for _ in range(TORTURE):
        kill_again_and_again(scene)


def test_a_terminal_that_is_closed_is_followed_by_another(scene: Scene) -> None:
    scene.write(trials=4)
    for _ in range(TORTURE):
        close_again_and_again(scene)


def kill(watching: subprocess.Popen[str]) -> None:
    watching.kill()
    watching.communicate()


def test_a_detached_sweep_is_steered_from_anywhere(scene: Scene) -> None:
    """A second controller is refused; stop, resume and top-up reach the one that there is."""
    scene.write(trials=40, job=f'{JOB}[env]\nEPOCHS = "600"\n')
    scene.detach()
    scene.until(lambda state: state.counts[TrialState.RUNNING])
    second = scene.cli("sweeps", "resume", scene.key)
    assert second.code == 1
    assert re.search(r"Another controller has this sweep: the run \w{8}-", second.err)

    stopped = scene.ok("sweeps", "stop", scene.key)
    assert "The controller is" in stopped.err
    state = scene.until(lambda state: state.ended)
    assert state.stopping is not None and state.stopping.by == "user"
    stopped_trials = sorted(state.trials)
    assert {trial.state for trial in state.trials.values()} == {TrialState.KILLED}

    scene.ok("sweeps", "resume", "--detach", scene.key)
    state = scene.until(lambda state: state.ended is None and state.counts[TrialState.RUNNING])
    assert sorted(state.trials) == stopped_trials, "those that were stopped, before others"
    scene.ok("sweeps", "stop", "--now", scene.key)
    state = scene.until(lambda state: state.ended)
    assert {trial.state for trial in state.trials.values()} == {TrialState.KILLED}


def test_a_sweep_that_is_over_gets_more_trials_and_failed_ones_again(scene: Scene) -> None:
    broken = TRAIN.replace(
        'say("began")',
        'say("began")\nif trial == "1": sys.exit(3)',
    )
    scene.write(trials=2, more='failed = "100%"\n')
    (scene.cli.folder / "jobs" / "tiny" / "train.py").write_text(broken)
    scene.key = key_in(scene.cli("sweep", "sweep.toml").out)
    assert scene.state.trials[1].exit_code == 3
    (scene.cli.folder / "jobs" / "tiny" / "train.py").write_text(TRAIN)
    scene.ok("sweeps", "rerun", "--failed", "--code", scene.key)
    state = scene.state
    assert [str(trial.state) for trial in state.trials.values()] == ["DONE"] * 2
    assert scene.began() == ["0", "1", "1"], "the one that failed, once more"
    scene.ok("sweeps", "top-up", "--trials", "3", scene.key)
    scene.ok("sweeps", "confirm", "--top", "1", "--seeds", "1", scene.key)
    state = scene.state
    assert len(state.trials) == 4
    assert [trial.confirms is not None for trial in state.trials.values()] == [False] * 3 + [True]
    over = scene.cli("sweeps", "resume", scene.key)
    assert over.code == 2 and "top-up" in over.err


def test_trials_in_containers_talk_to_a_controller_that_is_none(scene: Scene) -> None:
    """Also where the container's user is another, and this one's files are nobody else's."""
    need_engine()
    assert scene.cli("local", "start", "--executor", "docker").code == 0
    scene.write(trials=2)
    before = os.umask(0o077)
    try:
        scene.detach()
    finally:
        os.umask(before)
    state = scene.until(lambda state: state.ended)
    assert [str(trial.state) for trial in state.trials.values()] == ["DONE"] * 2
    assert all(trial.reports for trial in state.trials.values())
    modes = {path.stat().st_mode & 0o444 for path in scene.cli.home.sweeps.rglob("*.json*")}
    assert modes == {0o444}
    assert not any("seen" in str(path) for path in (scene.cli.home.sweeps / scene.key).iterdir())
