"""jobdef list, register, delete, gc: against a real server."""

from typing import Any

import pytest

from tests.support.cli import Cli, write_job
from tests.support.local_server import wait_for_job

JOB = 'image = "python"\ncommand = ["python", "-c", "print(1)"]\n'


def names(cli: Cli, *flags: str) -> list[str]:
    return [each["jobDefinitionName"] for each in cli("jobdef", "list", "--json", *flags).json]


@pytest.mark.journey
def test_a_definition_is_registered_once_and_submit_takes_it(cli: Cli) -> None:
    write_job(cli.folder, "hello", JOB)
    shown = cli("jobdef", "register", "hello", "--json")
    (first,) = shown.json
    assert (shown.code, first["job"], first["isNew"]) == (0, "hello", True)
    again = cli("jobdef", "register", "hello")
    assert again.code == 0
    assert "exists already, with the same content" in again.out
    assert cli("jobdef", "register", "hello", "--json").json[0]["isNew"] is False
    assert cli("submit", "--wait", "hello").code == 0
    (listed,) = cli("jobdef", "list", "--json").json
    assert listed["jobDefinitionName"] == first["jobDefinitionName"]
    assert listed["revision"] == 1
    assert listed["job"] == "hello"
    assert listed["registered"].startswith("20")
    assert listed["image"].startswith("batchml/python:")


def test_another_client_runs_what_was_registered(cli: Cli, batch: Any) -> None:
    write_job(cli.folder, "hello", JOB)
    (made,) = cli("jobdef", "register", "hello", "--json").json
    job = batch.submit_job(
        jobName="theirs", jobQueue="default", jobDefinition=made["jobDefinitionName"]
    )
    assert wait_for_job(batch, job["jobId"])["status"] == "SUCCEEDED"


def test_mistakes_of_any_job_are_told_before_anything_is_registered(cli: Cli) -> None:
    write_job(cli.folder, "good", JOB)
    write_job(cli.folder, "bad", 'image = "python"\n')
    shown = cli("jobdef", "register", "good", "bad")
    assert shown.code == 78
    assert "command: missing" in shown.err
    assert cli("jobdef", "register", "god").code == 78
    assert "Did you mean 'good'?" in cli("jobdef", "register", "god").err
    assert names(cli) == []


def test_a_definition_is_deleted_by_name_or_revision(cli: Cli, batch: Any) -> None:
    write_job(cli.folder, "hello", JOB)
    (made,) = cli("jobdef", "register", "hello", "--json").json
    name = made["jobDefinitionName"]
    shown = cli("jobdef", "delete", f"{name}:2")
    assert shown.code == 1
    assert f"{name}:1" in shown.err
    assert cli("jobdef", "delete", f"{name}:1").out == (
        f"Job definition [{name}:1] is deregistered.\n"
    )
    assert batch.describe_job_definitions(jobDefinitionName=name)["jobDefinitions"][0][
        "status"
    ] == "INACTIVE"  # fmt: skip
    assert names(cli) == []
    assert cli("jobdef", "delete", name).code == 1
    assert cli("jobdef", "register", "hello", "--json").json[0]["isNew"] is True
    deleted = cli("jobdef", "delete", name, "--json").json
    assert [(each["jobDefinitionName"], each["revision"]) for each in deleted] == [(name, 2)]


def outdated(batch: Any, name: str, job: str) -> str:
    """Register a definition as one that was made long ago."""
    made = batch.register_job_definition(
        jobDefinitionName=name, type="container",
        tags={"batchml": job, "batchml:registered": "2020-01-01"},
        containerProperties={
            "image": "any", "command": ["sleep", "600"],
            "resourceRequirements": [{"type": "VCPU", "value": "1"},
                                     {"type": "MEMORY", "value": "64"}],
        },
    )  # fmt: skip
    return f"{made['jobDefinitionName']}:{made['revision']}"


def test_gc_takes_what_nobody_needs_and_nothing_else(cli: Cli, batch: Any) -> None:
    write_job(cli.folder, "hello", JOB)
    cli("jobdef", "register", "hello")
    for name, job in (("unused", "hello"), ("running", "hello"), ("alone", "other")):
        outdated(batch, name, job)
    batch.register_job_definition(
        jobDefinitionName="by-hand", type="container",
        containerProperties={"image": "any", "vcpus": 1, "memory": 64},
    )  # fmt: skip
    job = batch.submit_job(jobName="r", jobQueue="default", jobDefinition="running")
    (kept,) = names(cli, "--job", "hello")[0:1]

    shown = cli("jobdef", "gc", "--dry-run", "--json")
    assert [each["jobDefinitionName"] for each in shown.json] == ["alone", "unused"]
    assert "2 would be deregistered" in cli("jobdef", "gc", "--dry-run").err
    assert len(names(cli, "--all")) == 5

    shown = cli("jobdef", "gc")
    assert shown.code == 0
    assert "[alone:1]" in shown.out
    assert "2 deregistered" in shown.err
    assert names(cli, "--all") == sorted(["by-hand", kept, "running"])

    batch.terminate_job(jobId=job["jobId"], reason="test")
    wait_for_job(batch, job["jobId"], "FAILED")
    # It ended a moment ago: whoever looks back thirty days sees it, who looks back none does not.
    assert cli("jobdef", "gc", "--json").json == []
    gone = cli("jobdef", "gc", "--older-than", "0s", "--json").json
    assert [each["jobDefinitionName"] for each in gone] == ["running"]


def test_gc_keeps_the_newest_of_a_job_here_though_it_is_old(cli: Cli, batch: Any) -> None:
    outdated(batch, "mine", "hello")
    write_job(cli.folder, "hello", JOB)
    assert cli("jobdef", "gc", "--json").json == []
    (cli.folder / "jobs" / "hello" / "job.toml").write_text("nonsense = ")
    assert cli("jobdef", "gc").code == 78  # not taken for a job that is gone
    (cli.folder / "jobs" / "hello" / "job.toml").unlink()
    assert [each["jobDefinitionName"] for each in cli("jobdef", "gc", "--json").json] == ["mine"]


def test_gc_wants_a_duration(cli: Cli) -> None:
    shown = cli("jobdef", "gc", "--older-than", "soon")
    assert shown.code == 2
    assert "30d" in shown.err or "7d" in shown.err
    shown = cli("jobdef", "gc", "--older-than", "")
    assert shown.code == 2
    assert "--older-than is empty" in shown.err


def test_a_list_of_nothing_says_how_to_make_one(cli: Cli) -> None:
    shown = cli("jobdef", "list")
    assert (shown.code, shown.out) == (0, "")
    assert "jobdef register" in shown.err
