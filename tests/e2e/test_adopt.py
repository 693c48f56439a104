"""batchml adopt: a program as it is becomes a job."""

import tomllib

import pytest

from tests.support.cli import Cli

PROGRAM = """
import argparse
import pathlib
import time

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--learning-rate", type=float, default=0.1)
parser.add_argument("--out", default="results/")
parser.add_argument("--forever", action="store_true")
args = parser.parse_args()
for epoch in range(args.epochs):
    print(f"epoch {epoch}: loss={args.learning_rate / (epoch + 1):.4f}", flush=True)
pathlib.Path("model.pt").write_text("weights")
pathlib.Path(args.out).mkdir(exist_ok=True)
pathlib.Path(args.out, "figure.txt").write_text("figure")
while args.forever:
    time.sleep(1)
"""


@pytest.mark.journey
def test_a_program_becomes_a_job_that_runs(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(PROGRAM)
    shown = cli("adopt", "train.py", "--epochs", "2")
    assert shown.code == 0, shown.err
    assert "It printed loss, and wrote model.pt (7 B), results/figure.txt (6 B)." in shown.err
    job = tomllib.loads((cli.folder / "job.toml").read_text())
    assert job["command"] == ["python", "train.py", "{--forever}", "{params}"]
    assert job["params"] == {
        "epochs": 2, "learning_rate": 0.1, "out": "results/", "forever": False,
    } and job["flags"] == "kebab"  # fmt: skip
    assert "keep" not in job and job["image"] == "python"
    assert job["metrics"] == {"loss": {"pattern": "loss=(nan|-?inf|[0-9.eE+-]+)", "best": "min"}}
    assert "loss  0.05 " in cli("show", "@last").out, "the attempt has the metrics of its job.toml"
    ran = cli("submit", "--wait", ".", "-p", "learning_rate=0.5")
    assert ran.code == 0 and "Metrics: loss 0.25" in ran.err
    refused = cli("adopt", "train.py")
    assert refused.code == 2 and "job.toml exists" in refused.err
    printed = cli("adopt", "--dry-run", "train.py")
    assert tomllib.loads(printed.out)["params"]["epochs"] == 3


def test_a_program_without_end_is_stopped_and_one_that_fails_is_still_read(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(PROGRAM)
    shown = cli("adopt", "--for", "1s", "train.py", "--forever")
    assert shown.code == 0 and "It has run for 1 second, and is stopped now." in shown.err
    job = tomllib.loads((cli.folder / "job.toml").read_text())
    assert job["params"]["forever"] is True and "loss" in job["metrics"]

    (cli.folder / "train.py").write_text(f"{PROGRAM}\nraise SystemExit('no data')\n")
    failed = cli("adopt", "--force", "train.py")
    assert failed.code == 1
    assert "The attempt failed: app-error" in failed.err
    assert "no data" in failed.err
    assert tomllib.loads((cli.folder / "job.toml").read_text())["params"]["epochs"] == 3


GOING_ON = """
import argparse, os, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=4)
parser.add_argument("--learning-rate", "--lr", type=float, default=0.1)
parser.add_argument("--out", default="runs/")
parser.add_argument("--die", action="store_true")
parser.add_argument("--dice", type=int)
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)
state = pathlib.Path(args.out, "state")
print("begins at", state.read_text() if state.exists() else 0, flush=True)
state.write_text("3")
sys.exit(9 if args.die else 0)
"""


def test_a_run_that_ended_early_finds_its_own_folder_again(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(GOING_ON)
    assert cli("adopt", "train.py").code == 0
    assert cli("submit", "--wait", ".", "-p", "die=true").code == 9
    again = cli("rerun", "--resume", "--wait", "@last", "-p", "die=false")
    assert again.code == 0 and "begins at 3" in again.out, again.err
    for name, meant in (("lr", "learning_rate"), ("b", "batch_size")):
        refused = cli("submit", ".", "-p", f"{name}=1")
        assert refused.code == 78 and f"the parameter is {meant}" in refused.err
    assert cli("submit", "--dry-run", ".", "-p", "dice=1").code == 0, "a flag of the program"
    assert cli("rerun", "--dry-run", "@last", "-p", "dice=1").code == 0
    refused = cli("rerun", "@last", "-p", "dine=1")
    assert refused.code == 78 and "submit it anew: a rerun has the parameters of" in refused.err
    job = cli.folder / "job.toml"
    job.write_text(job.read_text().replace('"{params}"', '"--out", "{outputs}", "{params}"'))
    job.write_text(job.read_text().replace("out = ", "#out = "))
    refused = cli("submit", ".", "-p", "out=here")
    assert refused.code == 78 and "the command has --out {outputs} already" in refused.err
    lost = cli("submit", "--wait", ".", "-p", "die=true", "--attempts", "2")
    assert "1 attempt was left, but app-error is only retried with --retry-on" in lost.err
    refused = cli("rerun", "--resume", "@last")
    assert refused.code == 1 and "Its outputs, 1 file, stay in " in refused.err
    typed = cli("submit", "--dry-run", "--", "python", "train.py")
    assert "The job.toml beside train.py is not used, nor its [metrics]" in typed.err


RESUMING = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--save-path", default="out")
parser.add_argument("--resume")
args = parser.parse_args()
if args.resume:
    print("goes on from", pathlib.Path(args.resume).read_text())
pathlib.Path(args.save_path).mkdir(parents=True, exist_ok=True)
pathlib.Path(args.save_path, "checkpoint.pt").write_text("weights")
"""


def test_what_a_program_saves_is_found_fetched_and_gone_on_from(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(RESUMING)
    shown = cli("adopt", "train.py")
    assert shown.code == 0, shown.err
    assert "wrote {checkpoints}/checkpoint.pt (7 B)" in shown.err
    assert "-p 'resume={checkpoints}/checkpoint.pt'" in (cli.folder / "job.toml").read_text()
    ran = cli("submit", "--wait", ".")
    saved = "1 file, 7 B, the newest is checkpoint.pt (batchml get "
    assert ran.code == 0 and f"Checkpoints: {saved}" in ran.err
    assert f"checkpoint {saved}" in cli("show", "@last").out
    empty = cli("get", "@last")
    assert "The run has no outputs. It has checkpoints: batchml get " in empty.err
    assert cli("get", "@last", "--checkpoints", "mine").code == 0
    assert (cli.folder / "mine" / "checkpoint.pt").read_text() == "weights"
    again = cli("rerun", "--resume", "@last", "-p", "resume={checkpoints}/checkpoint.pt", "--wait")
    assert again.code == 0, again.err
    assert "has saved is there again: {checkpoints} and kept files" in again.err
    assert "goes on from weights" in again.out
