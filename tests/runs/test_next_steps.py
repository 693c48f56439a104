"""What `show` says can be done next."""

from pathlib import Path
from typing import Any

import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.explain.ask import describe_resuming
from batchml.explain.failing import why_ended
from batchml.explain.missing import RESUMES, EndedRun
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.commands.next_commands import describe_outputs, next_commands, short_word
from batchml.runs.search import FoundRun
from tests.support.fakes import FakeClock

ID = "6b0e0000-0000-4000-8000-000000000001"


def place(tmp_path: Path, env: str = "local") -> Context:
    (tmp_path / "batchml.toml").write_text('[env.dev]\nregion = "us-east-1"\n')
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, env)
    return Context(settings, FakeClock(), tmp_path)


def run(status: str, **more: Any) -> Run:
    return Run(**{"job_id": ID, "name": "n", "queue": "q", "status": JobStatus(status), **more})


@pytest.mark.parametrize(
    ("run", "commands"),
    [
        (run("RUNNABLE"), ["explain 6b0e0000", "cancel 6b0e0000"]),
        (run("RUNNING", started_at=1), ["get 6b0e0000", "logs -f 6b0e0000", "cancel 6b0e0000"]),
        (run("PENDING", children={"RUNNING": 1, "PENDING": 2}),
         ["get 6b0e0000", "logs -f 6b0e0000", "cancel 6b0e0000"]),
        (run("PENDING", children={"PENDING": 3}), ["explain 6b0e0000", "cancel 6b0e0000"]),
        (run("SUCCEEDED", started_at=1), ["get 6b0e0000", "logs 6b0e0000", "rerun 6b0e0000"]),
        (run("FAILED", children={"SUCCEEDED": 1, "FAILED": 1}),
         ["get 6b0e0000", "logs 6b0e0000", "explain 6b0e0000", "rerun 6b0e0000 --failed"]),
        (run("FAILED"), ["explain 6b0e0000", "rerun 6b0e0000"]),
        (run("FAILED", started_at=1, nodes=2),
         ["get 6b0e0000", "logs 6b0e0000", "explain 6b0e0000", "rerun 6b0e0000"]),
        (run("FAILED", tags={"batchml:gang": "2head", "batchml:key": "2own"}),
         ["explain 6b0e0000"]),
        (run("RUNNING", started_at=1, job_id=f"{ID}#1", node_index=1),
         ["get 6b0e0000#1", "logs -f 6b0e0000#1", "cancel 6b0e0000"]),
    ],
)  # fmt: skip
def test_each_state_has_its_commands(run: Run, commands: list[str], tmp_path: Path) -> None:
    found = [text for _, text in next_commands(place(tmp_path), FoundRun(run, None))]
    assert found == [f"batchml {command}" for command in commands]


def test_a_run_goes_on_from_a_checkpoint_or_begins_with_the_files_that_it_wrote(
    tmp_path: Path,
) -> None:
    failed, local = run("FAILED"), place(tmp_path)
    runs = tmp_path / "home" / "runs" / ID
    word, command = "", "batchml rerun --resume 6b0e0000"
    assert describe_resuming(local, failed).startswith("it has saved nothing, so it starts from")
    assert command not in dict(next_commands(local, FoundRun(failed, None))).values()
    for path, label, words in (
        ("output/work/runs/ckpt.pt", "with files", "with --resume the files that it wrote are"),
        ("checkpoints/last.pt", "go on", "with --resume the files in {checkpoints} are there"),
    ):
        (runs / path).parent.mkdir(parents=True)
        (runs / path).write_text("weights")
        assert dict(next_commands(local, FoundRun(failed, None)))[label] == command
        word = describe_resuming(local, failed)
        assert word.startswith(words)
    assert describe_resuming(place(tmp_path, "dev"), failed) == RESUMES
    stopped = run("FAILED", status_reason="Job attempt duration exceeded timeout", timeout=60)
    found = why_ended(EndedRun(stopped, resuming=word))
    assert found.fix == f"Give it more time; {word}."


def test_of_a_sweeps_run_the_sweep_is_named_and_it_is_not_run_again_alone(tmp_path: Path) -> None:
    key = "2bcdefgh2345abcde"
    store = {"BATCHML_SWEEP": f"s3://b/runs/{key}"}  # of one that was submitted elsewhere
    for more in ({"tags": {"batchml:sweep": key}}, {"environment": store}):
        found = [
            text
            for _, text in next_commands(place(tmp_path), FoundRun(run("FAILED", **more), None))
        ]
        assert found == [f"batchml sweeps show {key}", "batchml explain 6b0e0000"]
    strange = run("FAILED", tags={"batchml:sweep": "\x1b[2J"})
    assert FoundRun(strange, None).sweep == ""


def test_in_aws_the_environment_is_named_and_the_cost_is_asked_for(tmp_path: Path) -> None:
    dev = place(tmp_path, "dev")
    child = run("FAILED", job_id=f"{ID}:3")
    assert dict(next_commands(dev, FoundRun(child, None))) == {
        "cost": "batchml cost 6b0e0000:3 --env dev",
        "why": "batchml explain 6b0e0000:3 --env dev",
        "again": "batchml rerun 6b0e0000:3 --env dev",
    }
    assert "cost" not in dict(next_commands(dev, FoundRun(child, Record(cost=1.0))))
    assert short_word(dev, ID) == "6b0e0000 --env dev"


def test_a_forgotten_run_can_be_submitted_again(tmp_path: Path) -> None:
    forgotten = FoundRun(None, Record(job_id=ID))
    assert dict(next_commands(place(tmp_path), forgotten)) == {"again": "batchml rerun 6b0e0000"}


def test_outputs_are_a_folder_here_and_an_address_in_aws(tmp_path: Path) -> None:
    stored = run("SUCCEEDED", environment={"BATCHML_STORE": "s3://b/runs/k"})
    assert describe_outputs(place(tmp_path, "dev"), stored) == "s3://b/runs/k/output"
    folder = tmp_path / "home" / "runs" / ID / "output"
    folder.mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    assert describe_outputs(place(tmp_path), stored) == ""  # nothing was left there
    (folder / "model").touch()
    assert describe_outputs(place(tmp_path), stored) == str(folder)
    assert describe_outputs(place(tmp_path), None, ID) == str(folder)
    assert describe_outputs(place(tmp_path), None, "other") == ""
