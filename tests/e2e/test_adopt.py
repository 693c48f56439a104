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
    assert job["command"] == ["python", "train.py", "{params}"] and job["flags"] == "kebab"
    assert job["params"] == {"epochs": 2, "learning_rate": 0.1, "out": "results/"}
    assert "keep" not in job and job["image"] == "python"
    assert job["metrics"] == {"loss": {"pattern": "loss=(nan|-?inf|[0-9.eE+-]+)", "best": "min"}}
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
    assert job["command"][2] == "--forever" and "loss" in job["metrics"]

    (cli.folder / "train.py").write_text(f"{PROGRAM}\nraise SystemExit('no data')\n")
    failed = cli("adopt", "--force", "train.py")
    assert failed.code == 1
    assert "The attempt failed: app-error" in failed.err
    assert "no data" in failed.err
    assert tomllib.loads((cli.folder / "job.toml").read_text())["params"]["epochs"] == 3


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
