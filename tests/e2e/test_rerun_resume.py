"""A night's run that ended goes on the next morning, and what restarted meanwhile is told."""

import shlex

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
def shared(cli: Cli) -> Cli:
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


# A program that names its checkpoint itself, as programs with --resume FILE do.
NAMED = """
import os, sys
if "--resume" in sys.argv:
    print("goes on from", open(sys.argv[-1]).read())
    sys.exit()
open(os.environ["BATCHML_CHECKPOINT_DIR"] + "/last.pt", "w").write("step 1")
sys.exit(3)
"""


def test_explain_knows_where_the_file_is_that_a_resumed_run_missed(shared: Cli) -> None:
    job = 'image = "python"\ncommand = ["python", "t.py", "{params}"]\nflags = "kebab"\n'
    write_job(shared.folder, "t", job, t__py=NAMED)
    assert shared("submit", "t", "--name", "victim", "--wait").code == 3
    victim = shared("show", "victim", "--json").json["jobId"]
    assert shared("rerun", "--resume", "victim", "-p", "resume=exp/last.pt", "--wait").code == 1
    found = shared("explain", "@last", "--json").json
    assert "exp/last.pt is not in the run" in found["verdict"]
    assert found["command"] == (
        f"batchml rerun --resume {victim} -p 'resume={{checkpoints}}/last.pt'"
    )
    resumed = shared(*shlex.split(found["command"])[1:], "--wait")
    assert resumed.code == 0 and "goes on from step 1" in resumed.out
    assert shared("rerun", "@last", "--wait").code == 1
    found = shared("explain", "@last", "--json").json
    assert "this run did not resume" in found["verdict"] and "had resumed" in found["fix"]
    again = shared(*shlex.split(found["command"])[1:], "--wait")
    assert again.code == 0 and "goes on from step 1" in again.out


def test_a_rerun_says_that_its_image_stays_and_explain_that_the_package_is_listed(
    shared: Cli,
) -> None:
    job = write_job(shared.folder, "t", 'command = ["python", "t.py", "{n}"]\n[params]\nn = 1\n',
                    requirements__txt="", t__py="import six")  # fmt: skip
    assert shared("submit", "t", "-p", "n=2", "--wait").code == 1
    assert "Add six to jobs/t/requirements.txt" in shared("explain", "@last").out
    assert "The image stays" not in shared("rerun", "@last", "--code", "--dry-run").err
    (job / "requirements.txt").write_text("six\n")
    again = shared("rerun", "@last", "--code", "--wait")
    assert (again.code, again.err.count("The image stays as it was, although")) == (1, 1)
    found = shared("explain", "@last", "--json").json
    assert "jobs/t/requirements.txt has six now" in found["fix"]
    assert found["command"] == f"batchml submit {job} -p n=2"
