"""`batchml sweep` as a user runs it: one short file, one command, the real embedded AWS Batch."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.client import Client
from batchml.local.home import Home
from batchml.model.sweep import TrialState
from batchml.sweeps.summary import SweepSnapshot
from tests.support.cli import Cli, read_rest, read_until, write_job
from tests.support.local_server import wait_for

JOB = """
image = "docker.io/library/python:3.12"
command = ["python", "train.py", "{params}"]
"""
# Prints as programs do, keeps its place where trials may, and notes beside the job what it ran.
PROGRAM = """
import os, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
lr, folder = float(given["--lr"]), os.environ.get("BATCHML_CHECKPOINT_DIR", ".")
place = os.path.join(folder, "epoch")
first = int(open(place).read()) if os.path.exists(place) else 0
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"{os.environ.get('BATCHML_TRIAL', 99)} {lr} {first}\\n")
for epoch in range(first + 1, int(os.environ.get("BATCHML_STEPS", "9")) + 1):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    print(f"epoch {epoch} loss={1 / epoch:.3f} val_accuracy={1 - abs(lr - 0.3) - 0.5 ** epoch:.4f}")
    sys.stdout.flush()
    open(place, "w").write(str(epoch))
"""
SWEEP = """
job = "tiny"
goal = { max = "val_accuracy" }
method = "random"
[space]
lr = { float = [0.0, 1.0] }
[limits]
trials = 4
"""


class Sweeps(Cli):
    """`run` writes a sweep file and starts it."""

    def file(self, text: str = SWEEP, name: str = "sweep.toml") -> str:
        (self.folder / name).write_text(text)
        return name

    def ran(self) -> list[tuple[int, float, int]]:
        """Trial, lr and the epoch from which it went on, of each program that was started."""
        notes = self.folder / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        found = (line.split() for line in lines)
        return sorted((int(trial), float(lr), int(first)) for trial, lr, first in found)

    def client(self) -> Client:
        return Client("local", self.folder, environ={"BATCHML_HOME": str(self.home.root)})

    def jobs(self) -> int:
        """Runs of all sweeps here, their controllers among them."""
        keys = [path.name for path in (self.home.root / "sweeps").iterdir()]
        runs = [self.client().runs(limit=100, tags={"batchml:sweep": key}) for key in keys]
        return sum(map(len, runs))


@pytest.fixture
def sweeps(tmp_path: Path, home: Home) -> Iterator[Sweeps]:
    folder = tmp_path / "work"
    folder.mkdir()
    env = f'[env]\nNOTES = "{folder / "notes"}"\n'
    write_job(folder, "tiny", JOB + env, train__py=PROGRAM)
    write_job(folder, "slow", JOB + env + 'PAUSE = "0.1"\n', train__py=PROGRAM)
    yield Sweeps(folder, home)


@pytest.mark.journey
def test_one_short_file_and_one_command_give_the_best_trial_and_its_command(
    sweeps: Sweeps,
) -> None:
    shown = sweeps("sweep", sweeps.file())
    assert shown.code == 0, shown
    ran = sweeps.ran()
    best = min(ran, key=lambda each: abs(each[1] - 0.3))
    assert [trial for trial, _, _ in ran] == [0, 1, 2, 3]
    assert f", trial {best[0]}, epoch 9" in shown.out
    assert f"python train.py --lr {best[1]}" in shown.out
    assert "4 of 4 trials: 4 DONE" in shown.out
    assert sweeps.jobs() == 1  # one array
    assert "The best" not in shown.err and "report:  batchml sweeps report" in shown.err
    got = sweeps("sweeps", "best", "@last", "--get", "got")
    assert "run it:  batchml submit got" in got.err, got
    assert f"Trial {best[0]}: it has written no files to BATCHML_OUTPUT_DIR." in got.err
    again = sweeps("submit", "got", "--wait")
    assert again.code == 0 and sweeps.ran()[-1] == (99, best[1], 0), again
    assert sweeps("sweeps", "best", "@last", "--get", "got").code == 0
    (sweeps.folder / "got" / "train.py").write_text("mine")
    refused = sweeps("sweeps", "best", "@last", "--get", "got", "--json")
    assert refused.code == 2 and "another train.py" in refused.json["error"]
    key = shown.out.partition(" - ")[2].partition("]")[0]
    for command in ("show", "logs", "explain"):
        asked = sweeps(command, key)
        assert asked.code == 1 and f"It is a sweep: batchml sweeps show {key}" in asked.err
    shutil.rmtree(sweeps.home.code)
    for words in (["confirm", key], ["top-up", key, "--trials", "9"]):
        refused = sweeps("sweeps", *words)
        assert refused.code == 1 and "is gone, so nothing was requested" in refused.err
    assert sweeps.jobs() == 1
    reset = sweeps("local", "reset", "--yes")
    assert "and 1 sweep deleted" in reset.out
    assert sweeps("sweeps", "ls", "--json").json == []


def test_the_run_of_a_trial_is_shown_with_its_own_parameters(sweeps: Sweeps) -> None:
    job = sweeps.folder / "jobs" / "tiny" / "job.toml"
    job.write_text(job.read_text() + "[params]\nlr = 0.77\nstyle = 'plain'\n")
    text = SWEEP.replace("trials = 4", "trials = 2")
    assert sweeps("sweep", sweeps.file(text)).code == 0
    (sweep,) = sweeps("sweeps", "ls", "--json").json
    tag = f"batchml:sweep={sweep['sweepId']}"
    (array,) = sweeps("ls", "--tag", tag, "--json").json
    lr = {trial: value for trial, value, _ in sweeps.ran()}
    for trial in (0, 1):
        shown = sweeps("show", f"{array['jobId']}:{trial}", "--json").json
        assert shown["params"] == {"lr": lr[trial], "style": "plain"}
        assert shown["command"][:4] == ["python", "train.py", "--lr", str(lr[trial])]
    whole = sweeps("show", array["jobId"], "--json").json
    assert whole["params"] == {"style": "plain"}  # the trials do not share the other parameter
    assert "Only sweeps were submitted" in sweeps("cancel", "@last").err
    assert "Runs of sweeps are left out" in sweeps("ls", "--limit", "1").err
    assert sweeps("submit", "tiny", "-p", "lr=0.5", "--wait").code == 0
    compared = sweeps("compare", "@last", f"{array['jobId']}:1")
    assert str(lr[1]) in compared.out and "0.77" not in compared.out, compared
    assert "command" not in compared.out  # the commands differ only in parameters
    found = sweeps("ls", "--tag", tag, "-p", "style=plain", "--json")
    assert [each["jobId"] for each in found.json] == [array["jobId"]]
    for path in (sweeps.home.root / "sweeps" / sweep["sweepId"] / "waves").iterdir():
        path.unlink()  # without the manifest nothing is said of the parameters
    assert sweeps("show", f"{array['jobId']}:1", "--json").json["params"] == {}


def test_the_default_learns_stops_early_and_says_it_as_json(sweeps: Sweeps) -> None:
    text = SWEEP.replace('method = "random"\n', "").replace("trials = 4", "trials = 9")
    shown = sweeps("sweep", sweeps.file(text + "[early_stop]\nmax = 9\n"), "--wait", "--json")
    assert shown.code == 0, shown
    found = shown.json
    assert found["trials"] == 9
    assert found["ended"] == "done"
    assert found["counts"].keys() <= {"DONE", "PRUNED"} and found["counts"]["PRUNED"] >= 1
    assert found["best"]["metrics"]["val_accuracy"] > 0.8
    assert found["best"]["step"] == 9
    assert set(found["best"]["params"]) == {"lr"}
    assert found["stepsSaved"] > 0
    listed = sweeps("sweeps", "show", found["sweepId"], "--json")
    assert listed.code == 0, listed


def test_halving_is_an_array_for_each_rung_and_goes_on_from_checkpoints(sweeps: Sweeps) -> None:
    stop = '[early_stop]\nmethod = "halving"\nmax = 3\n'
    shown = sweeps("sweep", sweeps.file(SWEEP + stop))
    assert shown.code == 0, shown
    ran = sweeps.ran()
    assert sweeps.jobs() == 2
    assert [first for _, _, first in ran].count(1) == 1 and len(ran) == 5
    last = next(lr for _, lr, first in ran if first == 1)
    assert abs(last - 0.3) == min(abs(lr - 0.3) for _, lr, _ in ran)


def test_promoted_trials_go_on_from_their_checkpoints(sweeps: Sweeps) -> None:
    stop = "[early_stop]\nmax = 3\nresume = true\n"
    shown = sweeps("sweep", sweeps.file(SWEEP + stop), "--json")
    assert shown.code == 0, shown
    ran = sweeps.ran()
    assert [trial for trial, _, first in ran if first == 0] == [0, 1, 2, 3]
    assert {first for _, _, first in ran} == {0, 1}
    assert shown.json["best"]["step"] == 3
    assert len(ran) == len(set(ran))


@pytest.mark.journey
def test_a_sweep_whose_trials_all_fail_stops_early_with_the_programs_code(
    sweeps: Sweeps,
) -> None:
    broken = 'print("reading data")\nraise SystemExit(9)\n'
    (sweeps.folder / "jobs" / "tiny" / "train.py").write_text(broken)
    shown = sweeps("sweep", sweeps.file(SWEEP.replace("trials = 4", "trials = 40")), "--json")
    assert shown.code == 9, shown
    found = shown.json
    assert found["ended"] == "failures"
    assert found["best"] is None
    assert found["counts"]["FAILED"] < 40
    assert any("reading data" in notice for notice in found["notices"])
    again = sweeps("sweeps", "rerun", found["sweepId"], "--failed")
    assert "reading data" in again.out and "--failed --code" in again.err
    assert "No contact" not in again.err, "its notices are no loss of contact"


def test_a_metric_that_is_never_printed_is_said_with_what_was(sweeps: Sweeps) -> None:
    shown = sweeps("sweep", sweeps.file(SWEEP.replace("val_accuracy", "accuracy")))
    assert shown.code != 0
    assert "accuracy never printed" in shown.out
    assert "after a change of [metrics] in job.toml, start a new sweep" in shown.err
    assert shown.out.count("metrics seen: val_accuracy, loss") == 1
    assert "No trial has a result. The first failed: accuracy never printed\n" in shown.out


def test_ctrl_c_leaves_an_array_to_itself_and_what_it_did_is_found_later(sweeps: Sweeps) -> None:
    watching = sweeps.watch("sweep", sweeps.file(SWEEP.replace("tiny", "slow")))
    started = read_until(watching, "Started sweep")
    wait_for(lambda: (sweeps.folder / "notes").exists(), "the first trial")
    watching.send_signal(signal.SIGINT)
    out, err = read_rest(watching, 30)
    assert watching.returncode == 130, (out, err)
    assert "Detached: its trials continue" in err and "batchml sweeps resume" in err
    key = started.partition(" - ")[2].partition("]")[0]
    summary = sweeps.client().sweeps(key).wait(timeout=60)
    assert summary.snapshot.counts[TrialState.DONE] == 4
    assert [trial for trial, _, _ in sweeps.ran()] == [0, 1, 2, 3]
    assert sweeps.jobs() == 1


def test_after_ctrl_c_a_run_controls_a_search_that_learns(sweeps: Sweeps) -> None:
    text = SWEEP.replace("tiny", "slow").replace('method = "random"\n', "")
    watching = sweeps.watch("sweep", sweeps.file(text))
    started = read_until(watching, "Started sweep")
    wait_for(lambda: (sweeps.folder / "notes").exists(), "the first trial")
    watching.send_signal(signal.SIGINT)
    _, err = read_rest(watching, 30)
    assert watching.returncode == 130
    assert "Its controller is the run" in err and "Detached: the sweep goes on." in err
    key = started.partition(" - ")[2].partition("]")[0]
    assert f"batchml sweeps stop {key}" in err
    summary = sweeps.client().sweeps(key).wait(timeout=60)  # which only looks on
    assert summary.snapshot.counts[TrialState.DONE] == 4
    assert [trial for trial, _, _ in sweeps.ran()] == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_reads_json_is_told_of_an_interrupt_too(sweeps: Sweeps, number: signal.Signals) -> None:
    text = SWEEP.replace("tiny", "slow")
    watching = sweeps.watch("sweep", sweeps.file(text), "--json")
    wait_for(lambda: (sweeps.folder / "notes").exists(), "the first trial")
    watching.send_signal(number)
    out, err = read_rest(watching, 30)
    assert watching.returncode == 130, (out, err)
    told = json.loads(out)
    assert (told["status"], told["exitCode"]) == ("running", 130)
    listed = {each["sweepId"]: each["status"] for each in sweeps("sweeps", "ls", "--json").json}
    assert listed == {told["sweepId"]: "running"}

    def ended() -> bool:
        return bool(sweeps("sweeps", "ls", "--json").json[0]["status"] == "ended")

    wait_for(ended, "its end, which nobody attends to", 60)
    assert sweeps("sweeps", "show", told["sweepId"], "--json").json["status"] == "ended"


def test_a_detached_array_needs_nobody(sweeps: Sweeps) -> None:
    """No trial of it waits for another: there is nothing that a controller could stop in time."""
    shown = sweeps("sweep", sweeps.file(), "--detach", "--json", "--trials", "2")
    assert shown.code == 0, shown
    wait_for(lambda: len(sweeps.ran()) == 2, "all trials", 60)
    handle = sweeps.client().sweeps(shown.json["sweepId"])
    assert handle.wait(timeout=60).by == "done"
    assert sweeps.jobs() == 1
    others = sweeps("ls")
    assert "batchml sweeps ls lists sweeps" in others.err
    assert others.out == "" and sweeps("ls", "--json").json == []
    assert len(sweeps("ls", "--json", "--job", "tiny-w1").json) == 1


def test_a_detached_array_whose_trials_all_fail_stops_while_nobody_looks(sweeps: Sweeps) -> None:
    broken = 'print("no such folder: /data")\nraise SystemExit(9)\n'
    (sweeps.folder / "jobs" / "tiny" / "train.py").write_text(broken)
    shown = sweeps("sweep", sweeps.file(SWEEP.replace("trials = 4", "trials = 100")), "--detach")
    assert shown.code == 0 and "Its controller is the run" in shown.err, shown
    summary = sweeps.client().sweeps("@last").wait(timeout=90)  # which only looks on
    assert summary.by == "failures"
    assert summary.snapshot.counts[TrialState.FAILED] < 100
    stands = sweeps("sweeps", "show", "@last")
    assert "no such folder: /data" in stands.out  # the last lines of the first
    way = next(line for line in stands.err.splitlines() if "trial 0 failed:" in line)
    assert "no such folder: /data" in sweeps(*way.partition("batchml ")[2].split()).out
    for command in ("show", "explain"):
        assert sweeps(command, way.split()[-1]).code in (0, 9)
    one = sweeps("sweeps", "show", "@last", "--trial", "0")
    assert "exit code 9" in one.out and "sweeps rerun" in one.out
    again = sweeps("rerun", way.split()[-1])
    assert again.code == 2 and "batchml sweeps rerun" in again.err


def test_the_same_from_python(sweeps: Sweeps) -> None:
    table = {
        "job": "tiny", "goal": {"max": "val_accuracy"}, "method": "grid",
        "space": {"lr": [0.1, 0.3, 0.7]},
    }  # fmt: skip
    snapshots: list[SweepSnapshot] = []
    handle = sweeps.client().sweep(table, name="by-hand")
    summary = handle.wait(snapshots.append, timeout=60)
    best = handle.best()
    assert best is not None and best.params == {"lr": 0.3}
    assert summary.by == "done" and summary.snapshot.best is not None
    assert [trial.params["lr"] for trial in handle.trials()] == [0.1, 0.3, 0.7]
    assert snapshots[-1].ended
    assert handle.name == "by-hand"
    assert sweeps.client().sweeps("by-hand") == handle
    page = handle.report(sweeps.folder / "report.html")
    assert "by-hand" in page.read_text()


def test_every_mistake_is_told_at_once_and_nothing_is_kept(sweeps: Sweeps) -> None:
    wrong = SWEEP.replace("trials = 4", "trails = 4").replace('"tiny"', '"tniy"')
    shown = sweeps("sweep", sweeps.file(wrong.replace("max", "maximum")), "--parallel", "0")
    assert shown.code == 78
    for word in ("trails", "tniy", "maximum", "limits.parallel"):
        assert word in shown.err, shown.err
    assert not os.path.exists(sweeps.home.root / "sweeps")


def test_check_tells_all_and_sends_nothing(sweeps: Sweeps) -> None:
    shown = sweeps("sweep", "check", sweeps.file(), "--trials", "8", "--set", "space.lr=[0.1,0.2]")
    assert shown.code == 0, shown
    assert "nothing was sent" in shown.out
    assert "Trials: 8" in shown.out
    assert "python train.py --lr 0." in shown.out
    assert "SubmitJob" not in shown.out and len(shown.out.splitlines()) <= 20
    assert list(sweeps("sweep", "sweep.toml", "--dry-run").json) == [
        "RegisterJobDefinition", "SubmitJob",
    ]  # fmt: skip
    found = sweeps("sweep", "check", "sweep.toml", "--json").json
    assert found["shape"] == "array"
    assert found["requests"]["SubmitJob"]["arrayProperties"] == {"size": 4}
    assert not os.path.exists(sweeps.home.root / "sweeps")
    assert not os.path.exists(sweeps.home.journal)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("sweep",), "needs a file"),
        (("sweep", "check"), "needs a file"),
        (("sweep", "chck", "sweep.toml"), "Did you mean 'check'"),
        (("sweep", "a", "b", "c"), "one file at a time"),
        (("sweep", "sweep.toml", "--wait", "--detach"), "exclude each other"),
    ],
)
def test_a_line_that_cannot_be_meant_says_how_it_is_written(
    sweeps: Sweeps, words: tuple[str, ...], told: str
) -> None:
    shown = sweeps(*words)
    assert shown.code == 2
    assert told in shown.err
    assert "batchml sweep sweep.toml" in shown.err or "--detach" in words
