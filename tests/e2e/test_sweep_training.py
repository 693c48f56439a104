"""Sweeps of the jobs that ship with batchml: their own programs and sweep files, on few digits."""

import pytest

from batchml.client import Client
from batchml.model.sweep import Trial, TrialState
from tests.e2e.test_training import LIMIT, real_mnist
from tests.support.cli import Cli
from tests.support.few_digits import few_digits

JOBS = ("lenet", "lenet-mxnet")
GOOD = ((0.05, 32), (0.03, 32), (0.08, 32), (0.04, 64))
POOR = (0.005, 256)  # after an epoch it knows little


def prepare(cli: Cli, job: str, *points: tuple[float, int]) -> None:
    """The job with few digits; its sweep file tries these first: learning rate, batch size."""
    folder = few_digits(cli.folder, job, train=2000, validation=1000)
    with open(folder / "sweep.toml", "a", encoding="utf-8") as file:
        for lr, batch_size in points:
            file.write(f"\n[[points]]\nlr = {lr}\nbatch_size = {batch_size}\n")


def trials(cli: Cli) -> list[Trial]:
    return client(cli).sweeps("@last").trials()


def client(cli: Cli) -> Client:
    return Client("local", cli.folder, environ={"BATCHML_HOME": str(cli.home.root)})


def said(cli: Cli, trial: Trial) -> str:
    """The log of the last part of a trial."""
    lines = client(cli).run(trial.job_id).logs()
    return "\n".join(line.text for line in lines)


def expected() -> float:
    """The accuracy that says it learned, after three epochs of 2,000 digits."""
    return 0.85 if real_mnist() else 0.5


@pytest.mark.parametrize("job", JOBS)
def test_the_sweep_file_beside_a_job_needs_no_more_than_the_jobs_name(cli: Cli, job: str) -> None:
    shown = cli("sweep", "check", job)
    assert shown.code == 0, shown
    assert f"Sweep {job} of job {job}" in shown.out
    assert "python train.py --epochs 3 --lr 0." in shown.out


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_search_stops_a_poor_training_by_what_the_others_printed(cli: Cli, job: str) -> None:
    prepare(cli, job, *GOOD, POOR)
    shown = cli("sweep", job, "--trials", "6", "--json", timeout=LIMIT, **real_mnist())
    assert shown.code == 0, shown
    found = shown.json
    assert found["counts"].keys() == {"DONE", "PRUNED"}
    assert found["best"]["step"] == 3
    assert found["best"]["metrics"]["val_accuracy"] > expected()
    assert found["stepsSaved"] >= 2
    every = trials(cli)
    for trial in every:
        steps = [1, 2, 3] if trial.state is TrialState.DONE else [1]
        assert [report.step for report in trial.reports] == steps
    poor = every[len(GOOD)]
    assert poor.state is TrialState.PRUNED
    assert [decision.goes_on for decision in poor.decisions] == [False]
    assert "others do better, the trial is stopped" in said(cli, poor)


@pytest.mark.slow
def test_the_best_third_goes_on_from_its_checkpoint(cli: Cli) -> None:
    prepare(cli, "lenet", *GOOD[:3])
    shown = cli(
        "sweep", "lenet", "--trials", "3", "--set", "early_stop.resume=true", "--json",
        timeout=LIMIT, **real_mnist(),
    )  # fmt: skip
    assert shown.code == 0, shown
    found = shown.json
    assert found["counts"] == {"DONE": 1, "PRUNED": 2}
    assert found["best"]["metrics"]["val_accuracy"] > expected()
    every = trials(cli)
    (promoted,) = [trial for trial in every if trial.state is TrialState.DONE]
    assert [report.step for report in promoted.reports] == [1, 2, 3]
    first = {trial.number: trial.reports[0].values[0] for trial in every}
    assert first[promoted.number] == max(first.values())
    log = said(cli, promoted)
    assert "Resuming in epoch " in log
    assert "Epoch[0] " not in log
