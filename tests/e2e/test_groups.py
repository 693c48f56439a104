"""A job with groups, as a user has it: one run, whatever it is in AWS Batch."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from batchml import Client
from batchml.errors import NotFound
from batchml.explain.ask import ExplainedRun, add_workers
from batchml.explain.suggest import CommandWriter
from batchml.local.home import Home
from batchml.model.explanation import Explanation
from batchml.runs.find import load_runs, select
from batchml.runs.groups.members import find_worker_groups, member_id
from batchml.runs.rerun.resubmit import prepare_again
from tests.support.cli import Cli, write_job

JOB = """
image = "python"
command = ["python", "-c", "pass"]
[launch]
kind = "ray"
[resources]
memory = "64 MiB"
[[groups]]
name = "head"
[[groups]]
name = "workers"
count = 3
min = 0
queue = "default"
"""


@pytest.fixture
def user(cli: Cli) -> Client:
    write_job(cli.folder, "gang", JOB)
    return Client("local", cli.folder, environ=cli.environ)


@pytest.mark.journey
def test_a_gang_is_one_run(cli: Cli, user: Client, home: Home) -> None:
    sleeper = user.submit(command=["sleep", "600"], vcpus=1, memory="64 MiB")
    waiting = cli("submit", "gang", "--after", sleeper.job_id, "--json").json["jobId"]
    plain = user.submit(command=["true"], after=[sleeper])  # a later run, of one job
    context = user._context

    listed = {entry["jobId"]: entry for entry in cli("ls", "--json").json}
    assert set(listed) == {sleeper.job_id, waiting, plain.job_id}
    of_gang = {"batchml:gang": listed[waiting]["tags"]["batchml:gang"]}
    (workers,) = {run.job_id for run in user.runs(tags=of_gang)} - {waiting}
    assert f"groups     workers 0 RUNNING, 0/3 done ({workers[:8]})" in cli("show", "gang").out
    assert select(context, ["@last~1"]) == [waiting]

    (found,) = load_runs(context, [waiting])
    assert member_id(context, found, "workers") == workers
    assert member_id(context, found, "head") == waiting
    with pytest.raises(NotFound, match="Known: head, workers"):
        member_id(context, found, "worker")
    with pytest.raises(NotFound, match="has no groups"):
        member_id(context, load_runs(context, [plain.job_id])[0], "worker")

    assert found.run is not None
    runs = ExplainedRun(
        found.run, Explanation("running", "It is not waiting.", is_problem=False), 1
    )
    told = add_workers(context, runs, found.record, CommandWriter()).explanation
    assert told.command == f"batchml explain {workers}" and "wait" in told.verdict

    ended = cli("cancel", waiting, "--json").json
    assert {entry["jobId"]: entry["left"] for entry in ended} == {waiting: None, workers: None}
    assert all(run.is_terminated for run in user.describe([waiting, workers]))
    assert not plain.describe().is_terminated
    sleeper.cancel()


def test_a_gang_of_another_machine_is_known_by_what_aws_tells(user: Client, home: Home) -> None:
    sleeper = user.submit(command=["sleep", "600"], vcpus=1, memory="64 MiB")
    run = user.submit("gang", after=[sleeper])
    context = user._context
    home.root.joinpath("history.jsonl").unlink()

    (found,) = load_runs(context, [run.job_id])
    (workers,) = find_worker_groups(context, found)
    assert (workers.group, workers.size) == ("workers", 3)
    again = prepare_again(context, found, dry_run=True)
    assert again is not None
    (planned,) = again.workers
    assert planned.requests.submit["arrayProperties"] == {"size": 3}
    assert again.requests.submit["tags"]["batchml:gang"] == planned.record.gang
    run.cancel()
    assert all(each.is_terminated for each in user.describe([run.job_id, workers.job_id]))
    sleeper.cancel()


# A client that is killed when the head is there: its first call was refused, as the definition is
# new, and the third is for the workers.
KILLED = """
import os, signal, sys
from batchml import Client
from batchml.aws.batch.jobs import JobApi
send, calls = JobApi.submit, []
def submit(self, request):
    calls.append(request)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return send(self, request)
JobApi.submit = submit
Client("local", sys.argv[1]).submit("gang", after=[sys.argv[2]])
"""


def test_a_client_killed_between_two_jobs_leaves_a_gang_that_is_finished(
    cli: Cli, user: Client
) -> None:
    sleeper = user.submit(command=["sleep", "600"], vcpus=1, memory="64 MiB")
    command = [sys.executable, "-c", KILLED, str(cli.folder), sleeper.job_id]
    assert subprocess.run(command, env=cli.environ).returncode == -signal.SIGKILL
    (head,) = (run for run in user.runs() if run.name == "gang")

    settled = cli("reconcile", "--json").json
    assert [each["state"] for each in settled] == ["submitted"]
    (found,) = load_runs(user._context, [head.job_id])
    (workers,) = find_worker_groups(user._context, found)
    assert (workers.job_id, workers.size) == (settled[0]["jobId"], 3)
    assert not any((cli.home.root / "gangs" / "local").iterdir())
    head.cancel()
    sleeper.cancel()


def test_what_is_planned_is_three_requests_of_one_run(cli: Cli, user: Client) -> None:
    planned = user.plan("gang")
    head, workers = planned["SubmitJob"], planned["groups"]["workers"]["SubmitJob"]
    told = [
        {each["name"]: each["value"] for each in one["containerOverrides"]["environment"]}
        for one in (head, workers)
    ]
    for name in ("BATCHML_GANG_TOKEN", "BATCHML_GANG_KEY", "BATCHML_CODE"):
        assert told[0][name] == told[1][name]
    assert head["jobName"].endswith(told[0]["BATCHML_GANG_KEY"])
    assert json.loads(told[0]["BATCHML_LAUNCH"])["groups"][0]["job_name"] == workers["jobName"]
    assert workers["arrayProperties"] == {"size": 3}
    assert not Path(cli.home.root / "history.jsonl").exists()
