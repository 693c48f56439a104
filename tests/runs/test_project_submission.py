"""Runs in AWS whose image is made of the job's own files, and runs that are given secrets."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import ConfigError, NotFound
from batchml.explain.ask import _requirements_file
from batchml.jobs.find import find_source
from batchml.runs.job_images import publish_image, read_platform, resolve_jobs
from batchml.runs.options import RunRequest
from batchml.runs.prepare import prepare
from batchml.runs.rerun.rules import make_rerun
from batchml.runs.submit import submit_run
from batchml.sweeps.start import SweepOptions, prepare_sweep
from tests.runs.test_submission import CONFIG, DIGEST, Aws, aws, place_in, write
from tests.support.scripted import ScriptedSession

__all__ = ["aws"]

JOB = """
command = ["python", "train.py"]
queue = "gpu"
"""
REGISTRY = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
PARAMETER = "arn:aws:ssm:us-east-1:123456789012:parameter/team/wandb"


def project(
    tmp_path: Path, aws: Aws, job: str = JOB, **files: str
) -> tuple[Context, ScriptedSession]:
    write(tmp_path, job)
    for name, text in files.items():
        (tmp_path / "jobs" / "hello" / name.replace("__", ".")).write_text(text)
    return place_in(tmp_path, aws.answer)


def order(**changes: Any) -> RunRequest:
    return RunRequest(job="hello", changes=changes)


def container(context: Context, wanted: RunRequest) -> dict[str, Any]:
    register = prepare(context, wanted, dry_run=True).requests.register
    found: dict[str, Any] = register["containerProperties"]
    return found


def test_a_job_runs_in_the_image_of_its_own_files(tmp_path: Path, aws: Aws) -> None:
    place, _ = project(tmp_path, aws, requirements__txt="six==1\n", train__py="print()\n")
    found = container(place, order())
    assert (found["image"], found["user"]) == (f"{REGISTRY}/batchml/hello@{DIGEST}", "1000:1000")
    ((job,), _) = resolve_jobs(place, ["hello"])
    assert job.request(read_platform(place))["containerProperties"]["image"] == found["image"]
    assert submit_run(place, prepare(place, order(), dry_run=False)) == "j-1"
    assert [key for key in aws.objects if key.startswith("code/")], "its code travels"


def test_one_that_was_not_pushed_says_how(tmp_path: Path, aws: Aws) -> None:
    aws.images = False
    place, session = project(tmp_path, aws, requirements__txt="six==1\n")
    with pytest.raises(NotFound, match=r"batchml image push --env dev jobs/hello$"):
        prepare(place, order(), dry_run=False)
    (tmp_path / "jobs" / "hello" / "environment.yml").write_text("dependencies: [numpy]\n")
    with pytest.raises(NotFound, match=r"batchml image push --env dev jobs/hello --flavor cpu$"):
        prepare(place, order(image="./environment.yml"), dry_run=False)
    assert session.asked("SubmitJob") == []


def test_mistakes_of_the_files_are_told_before_anything_is_asked(tmp_path: Path, aws: Aws) -> None:
    place, session = project(
        tmp_path, aws, environment__yml="dependencies:\n- pip:\n  - -r a.txt\n  - -r b.txt\n"
    )
    with pytest.raises(ConfigError) as caught:
        prepare(place, order(), dry_run=False)
    assert len(caught.value.mistakes) == 2
    assert session.asked("DescribeImages") == []


def test_requirements_that_are_not_used_are_said(tmp_path: Path, aws: Aws) -> None:
    place, _ = project(tmp_path, aws, f'image = "python"\n{JOB}', requirements__txt="six\n")
    told = prepare(place, order(), dry_run=True).notices
    assert any('image = "python + requirements.txt"' in notice for notice in told)
    (tmp_path / "requirements.txt").write_text("six\n")
    plain = RunRequest(command=("true",), changes={"queue": "gpu", "code": False})
    assert (
        "The image does not use requirements.txt; --image . builds an image with it."
        in prepare(place, plain, dry_run=True).notices
    )
    asked = RunRequest(command=("true",), changes={**plain.changes, "image": "."})
    found = prepare(place, asked, dry_run=True)
    assert found.notices == ()
    assert f"{REGISTRY}/batchml/{tmp_path.name.replace('_', '-')}@" in str(found.requests.register)


def test_a_file_that_changes_while_its_job_is_submitted_is_told(tmp_path: Path, aws: Aws) -> None:
    place, _ = project(tmp_path, aws, requirements__txt="six==1\n")
    place.settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "local")
    source = find_source(".", place.image_folders, tmp_path / "jobs" / "hello")
    assert source is not None
    before = source.recipe().reference
    publish_image(place, source, before)
    (source.folder / "requirements.txt").write_text("six==2\n")
    publish_image(place, source, before)  # it is kept: nobody looks at the file
    with pytest.raises(ConfigError, match="changed while it was submitted"):
        publish_image(place, source, before[:-1] + ("0" if before[-1] != "0" else "1"))


def test_a_sweep_runs_in_the_image_of_its_jobs_own_files(tmp_path: Path, aws: Aws) -> None:
    job = 'command = ["python", "train.py", "{lr}"]\nqueue = "gpu"\n[params]\nlr = 0.1\n'
    place, _ = project(tmp_path, aws, job, requirements__txt="six==1\n")
    (tmp_path / "sweep.toml").write_text(
        'job = "hello"\ngoal = { max = "acc" }\nmethod = "random"\n'
        "[space]\nlr = { log = [1e-4, 1e-1] }\n[limits]\ntrials = 2\n"
    )
    assert prepare_sweep(place, SweepOptions(file="sweep.toml")).sweep.image == (
        f"{REGISTRY}/batchml/hello@{DIGEST}"
    )


def test_explain_names_the_file_that_lacks_a_package(tmp_path: Path, aws: Aws) -> None:
    place, _ = project(tmp_path, aws, requirements__txt="six==1\n")
    record = prepare(place, order(), dry_run=True).record
    assert _requirements_file(place, record, "hello") == "jobs/hello/requirements.txt"
    assert _requirements_file(place, record, "python") == ""
    (tmp_path / "jobs" / "hello" / "requirements.txt").unlink()
    assert _requirements_file(place, record, "hello") == ""


# --- secrets ------------------------------------------------------------------------------------

SECRET = JOB + '[secrets]\nWANDB_API_KEY = "ssm:/team/wandb"\n'


def listed(place_: tuple[Context, ScriptedSession], folder: Path, aws: Aws) -> Context:
    """The same, where the environment lists the parameter."""
    config = CONFIG.replace("ami =", f'secrets = ["{PARAMETER}"]\nami =')
    (folder / "batchml.toml").write_text(config)
    place, _ = place_
    place.settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "dev")
    return place


def test_a_secret_that_the_environment_does_not_list_is_refused(tmp_path: Path, aws: Aws) -> None:
    place, session = project(tmp_path, aws, SECRET, requirements__txt="")
    with pytest.raises(ConfigError, match=r"secrets\.WANDB_API_KEY: .*batchml setup --env dev"):
        prepare(place, order(), dry_run=True)
    assert session.asked("RegisterJobDefinition") == []


@pytest.mark.parametrize("more", ["", "nodes = 2\n"])
def test_a_secret_is_named_in_the_definition_and_kept_for_the_next_time(
    tmp_path: Path, aws: Aws, more: str
) -> None:
    place = listed(project(tmp_path, aws, more + SECRET, requirements__txt=""), tmp_path, aws)
    made = prepare(place, order(), dry_run=True)
    told = json.dumps(made.requests.register)
    assert json.dumps([{"name": "WANDB_API_KEY", "valueFrom": PARAMETER}]) in told
    kept = msgspec.json.encode(made.record).decode()
    assert "ssm:/team/wandb" in kept, "where it is kept: a rerun is given it again"
    assert make_rerun(None, made.record).spec.secrets == {"WANDB_API_KEY": "ssm:/team/wandb"}


def test_all_children_of_an_array_are_given_it(tmp_path: Path, aws: Aws) -> None:
    place = listed(project(tmp_path, aws, SECRET, requirements__txt=""), tmp_path, aws)
    found = prepare(place, RunRequest(job="hello", array=3), dry_run=True).requests
    assert found.register["containerProperties"]["secrets"][0]["valueFrom"] == PARAMETER
    assert found.submit["arrayProperties"] == {"size": 3}


def test_every_job_of_a_gang_is_given_it(tmp_path: Path, aws: Aws) -> None:
    gang = (
        'command = ["true"]\nimage = "python"\ncode = false\nqueue = "gpu"\n'
        '[launch]\nkind = "ray"\n[secrets]\nA = "ssm:/team/wandb"\n'
        '[[groups]]\nname = "head"\n[[groups]]\nname = "workers"\ncount = 2\n'
    )
    place = listed(project(tmp_path, aws, gang), tmp_path, aws)
    made = prepare(place, order(), dry_run=True)
    requests = [made.requests, *(each.requests for each in made.workers)]
    assert len(requests) == 2
    for each in requests:
        assert each.register["containerProperties"]["secrets"][0]["valueFrom"] == PARAMETER
