"""A night's run that ended goes on the next morning, and what restarted meanwhile is told."""

from pathlib import Path

import pytest

from batchml.client import Client
from batchml.errors import NotFound
from tests.support.cli import Cli, write_job

JOB = """
image = "python"
command = ["python", "train.py", "{steps}", "{dies}"]
[params]
steps = 6
dies = 3
"""
# Each start that does not die where it is told to comes one step further at least.
TRAIN = """
import os, sys
from batchml.runtime import checkpoint
steps, dies = map(int, sys.argv[1:])
found = checkpoint.newest()
first = found.step if found else 0
print("begins at", first, flush=True)
for step in range(first, steps):
    if step == dies and os.environ.get("BATCHML_GENERATION", "1") == "1":
        sys.exit(3)
    checkpoint.save(lambda folder: open(folder + "/state", "w").write("x"), step + 1)
print("done", flush=True)
"""


@pytest.fixture
def shared(cli: Cli, environments: Path) -> Cli:
    cli.home.envs.symlink_to(environments)
    write_job(cli.folder, "train", JOB, train__py=TRAIN)
    return cli


@pytest.mark.journey
def test_what_failed_goes_on_where_it_was(shared: Cli) -> None:
    first = shared("submit", "train", "--wait", "--json")
    assert first.code == 3, first.err
    old = shared.home.runs / first.json["jobId"] / "checkpoints"
    before = sorted(path.name for path in old.iterdir())
    assert f"batchml rerun --resume {first.json['jobId'][:8]}\n" in shared("show", "@last").out
    again = shared("rerun", "@last", "--resume", "-p", "dies=9", "--wait")
    assert again.code == 0, again.err
    assert f"It resumes from step 3 of train {first.json['jobId']}." in again.err
    assert f"resumes from step 3 of train {first.json['jobId']}\n" in again.out
    assert "begins at 3\n" in again.out and again.out.count("] done\n") == 1
    shown = shared("show", "@last").out
    assert f"resumes    from the checkpoint of train {first.json['jobId'][:8]}\n" in shown
    assert sorted(path.name for path in old.iterdir()) == before
    client = Client("local", shared.folder, environ=shared.environ)
    told: list[str] = []
    third = Client("local", shared.folder, environ=shared.environ, tell=told.append).run("@last")
    further = third.rerun(resume=True, params={"steps": 8})
    assert further is not None and further.wait().exit_code == 0
    assert any("It resumes from step 6" in words for words in told)
    nothing = client.submit(command=["true"])
    nothing.wait()
    with pytest.raises(NotFound, match="has saved nothing to go on from"):
        nothing.rerun(resume=True)


def test_ranks_that_began_again_in_place_are_told_and_go_on_in_another_run(shared: Cli) -> None:
    job = shared.folder / "jobs" / "train" / "job.toml"
    job.write_text(JOB + '[launch]\nkind = "torchrun"\n')
    assert shared("submit", "train", "--wait").code == 0
    shown = shared("show", "@last")
    assert "restarted  once in place: rank 0 on node 0" in shown.out
    assert " ended with 3, at " in shown.out
    (restart,) = shared("show", "@last", "--json").json["restarts"]
    assert restart["why"].endswith("ended with 3")
    again = shared("rerun", "@last", "--resume", "-p", "steps=7", "--wait")
    assert again.code == 0, again.err
    assert "generation 1: 1 node, 1 rank, from step 6." in again.out
