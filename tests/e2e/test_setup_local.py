"""setup, teardown, compute and queue on this machine: queues and definitions that run jobs."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli, write_job
from tests.support.local_server import wait_for

CONFIG = """
default = "dev"
project = "p"
[env.dev]
region = "us-east-1"
profile = "research"
ami = "build"
gpu_access = "driver-mount"
jobs = ["greet"]
[env.dev.storage]
workspace = "efs"
[env.dev.compute.gpu]
instance_types = ["g5.xlarge", "g6.xlarge"]
max_vcpus = 64
[env.dev.compute.gpu-spot]
instance_types = ["g5", "g6"]
spot = true
max_vcpus = 256
[env.dev.queues.default]
priority = 10
compute = ["gpu-spot", "gpu"]
[env.dev.queues.urgent]
priority = 100
compute = ["gpu"]
"""
JOB = f"""
image = "public.example/greet@sha256:{64 * "0"}"
command = ["sh", "-c", "echo hello {{name}}"]
code = false
[params]
name = "world"
[resources]
vcpus = 1
memory = "64 MiB"
"""
LOCAL = ("--env", "local")


@pytest.fixture
def place(cli: Cli) -> Cli:
    """A folder with the contract's batchml.toml, with a job of its own."""
    (cli.folder / "batchml.toml").write_text(CONFIG)
    write_job(cli.folder, "greet", JOB)
    return cli


@pytest.fixture
def ready(place: Cli) -> Cli:
    assert place("setup", *LOCAL, "--yes").code == 0
    return place


def names(cli: Cli, command: str) -> list[str]:
    key = {"compute": "computeEnvironmentName", "queue": "jobQueueName"}[command]
    return sorted(found[key] for found in cli(command, "list", *LOCAL, "--json").json)


def steps(document: Any) -> set[tuple[str, str, str]]:
    return {
        (step["action"], step["kind"], step["name"].removeprefix("p--").partition("-")[0])
        for step in document["steps"] if step["action"] != "keep"
    }  # fmt: skip


@pytest.mark.journey
def test_setup_plans_asks_makes_and_has_nothing_to_do_then(place: Cli) -> None:
    planned = place("setup", *LOCAL, "--plan")
    assert planned.code == 2
    assert "create   compute environment gpu-spot" in planned.out
    assert "the compute environments, queues and jobs of dev." in planned.out
    before = names(place, "queue")

    unasked = place("setup", *LOCAL)
    assert unasked.code == 2
    assert "--yes" in unasked.err
    assert names(place, "queue") == before == ["default"]

    done = place("setup", *LOCAL, "--yes", "--json")
    assert done.code == 0
    assert done.json["applied"] is True
    assert steps(done.json) == {
        ("create", "compute environment", "gpu"), ("create", "job queue", "urgent"),
        ("create", "job queue", "default"), ("create", "job definition", "greet"),
    }  # fmt: skip
    assert names(place, "queue") == ["p--default", "p--urgent"]
    assert len(place("queue", "list", "--all", *LOCAL, "--json").json) == 3
    assert {"p--gpu", "p--gpu-spot"} <= set(names(place, "compute"))

    again = place("setup", *LOCAL, "--yes")
    assert (again.code, "Nothing to do." in again.out) == (0, True)
    planned = place("setup", *LOCAL, "--plan", "--json")
    assert planned.code == 0
    assert steps(planned.json) == set()
    assert planned.json["applied"] is False


def test_a_change_of_the_file_is_a_change_here(ready: Cli) -> None:
    config = ready.folder / "batchml.toml"
    text = CONFIG.replace("priority = 100", "priority = 7")
    config.write_text(text.replace('[env.dev.compute.gpu-spot]\n', "[env.dev.compute.spot]\n")
                      .replace('"gpu-spot", ', '"spot", '))  # fmt: skip
    planned = ready("setup", *LOCAL, "--plan")
    assert planned.code == 2
    assert "priority: 100 -> 7" in planned.out
    assert ready("setup", *LOCAL, "--yes").code == 0
    assert "p--gpu-spot" not in names(ready, "compute")
    assert ready("setup", *LOCAL, "--plan").code == 0


def definitions(cli: Cli) -> list[str]:
    return [each["jobDefinitionName"] for each in cli("jobdef", "list", *LOCAL, "--json").json]


@pytest.mark.journey
def test_submit_uses_the_queues_and_the_definition_that_setup_made(ready: Cli) -> None:
    made = definitions(ready)
    assert [name.partition("-")[0] for name in made] == ["greet"]
    shown = ready("submit", *LOCAL, "--queue", "urgent", "--wait", "greet", "-p", "name=you")
    assert shown.code == 0
    assert "to the job queue [urgent]" in shown.out
    assert "] hello you" in shown.out
    assert definitions(ready) == made


def test_the_urgent_queue_is_served_first_on_a_busy_machine(ready: Cli) -> None:
    gate = ready.folder / "go"
    order = ready.folder / "order"
    size = json.loads(ready("local", "status", "--json").out)
    assert size["state"] == "running"
    script = f"until [ -e {gate} ]; do sleep 0.05; done"
    all_of_it = ("--vcpus", "1024")  # fitted to the machine: one job at a time
    busy = ready("submit", *LOCAL, "--json", *all_of_it, "--", "sh", "-c", script).json["jobId"]
    wait_for(
        lambda: ready("show", busy, *LOCAL, "--json").json["status"] == "RUNNING", "it is busy"
    )
    waiting = [
        ready(
            "submit", *LOCAL, "--json", "--queue", queue, *all_of_it,
            "--", "sh", "-c", f"echo {queue} >> {order}",
        ).json["jobId"]
        for queue in ("default", "urgent")
    ]  # fmt: skip
    gate.touch()
    assert ready("wait", *LOCAL, busy, *waiting).code == 0
    assert order.read_text().split() == ["urgent", "default"]


def test_teardown_deletes_what_setup_made_and_leaves_the_default_queue_working(
    ready: Cli,
) -> None:
    assert ready("teardown", *LOCAL, "--plan").code == 2
    unasked = ready("teardown", *LOCAL)
    assert unasked.code == 2 and "--yes" in unasked.err
    assert "p--urgent" in names(ready, "queue")

    done = ready("teardown", *LOCAL, "--yes", "--json")
    assert done.code == 0 and done.json["applied"] is True
    assert names(ready, "queue") == ["default"]
    assert not {"p--gpu", "p--gpu-spot"} & set(names(ready, "compute"))
    assert ready("teardown", *LOCAL, "--plan").code == 0
    shown = ready("submit", *LOCAL, "--wait", "--", "echo", "still here")
    assert shown.code == 0 and "] still here" in shown.out


def test_a_queue_with_runs_in_it_is_not_taken_away_unasked(ready: Cli) -> None:
    job = ready(
        "submit", *LOCAL, "--json", "--queue", "urgent", "--", "sleep", "600"
    ).json["jobId"]  # fmt: skip
    config = ready.folder / "batchml.toml"
    config.write_text(CONFIG.partition("[env.dev.queues.urgent]")[0])
    refused = ready("setup", *LOCAL, "--yes")
    assert refused.code == 2
    assert "LOSES 1 run in it" in refused.out
    assert "--allow-loss urgent" in refused.err
    assert "p--urgent" in names(ready, "queue")
    assert ready("setup", *LOCAL, "--yes", "--allow-loss", "urgent").code == 0
    assert names(ready, "queue") == ["p--default"]
    assert ready("wait", job, *LOCAL).code != 0


def test_teardown_does_not_end_runs_unasked(ready: Cli) -> None:
    job = ready(
        "submit", *LOCAL, "--json", "--queue", "urgent", "--", "sleep", "600"
    ).json["jobId"]  # fmt: skip
    for allowed in ((), ("--allow-loss", "default")):
        refused = ready("teardown", *LOCAL, "--yes", *allowed)
        assert refused.code == 2 and "LOSES 1 run in it" in refused.out
        assert "Nothing was changed" in refused.err and "--allow-loss urgent" in refused.err
    assert "p--urgent" in names(ready, "queue")
    assert ready("teardown", *LOCAL, "--yes", "--allow-loss", "urgent").code == 0
    assert names(ready, "queue") == ["default"]
    assert ready("wait", job, *LOCAL).code != 0


def test_compute_environments_one_by_one(place: Cli) -> None:
    made = place(
        "compute", "create", "cpu", *LOCAL, "--instance-type", "c7i", "--max-vcpus", "8", "--json"
    )
    assert made.code == 0
    assert made.json == [{"kind": "compute environment", "name": "p--cpu"}]
    assert "cpu" in place("compute", "list", *LOCAL).out
    twice = place("compute", "create", "cpu", *LOCAL, "--instance-type", "c7i", "--max-vcpus", "8")
    assert (twice.code, "cpu exists already" in twice.err) == (2, True)

    changed = place("compute", "update", "cpu", *LOCAL, "--max-vcpus", "16", "--json")
    assert changed.code == 0
    assert changed.json["computeResources"]["maxvCpus"] == 16
    assert place("compute", "update", "cpu", *LOCAL).code == 2
    refresh = place("compute", "update", "cpu", *LOCAL, "--refresh", "--yes")
    assert (refresh.code, "local has no AMIs" in refresh.err) == (2, True)
    rebuild = place("setup", *LOCAL, "--rebuild-image", "--yes")
    assert (rebuild.code, "local has no AMIs" in rebuild.err) == (2, True)
    disabled = place("compute", "update", "cpu", *LOCAL, "--disable", "--json")
    assert disabled.json["state"] == "DISABLED"

    wrong = place("compute", "create", "x", *LOCAL, "--instance-type", "??", "--disk", "1 GiB")
    assert wrong.code == 78
    assert "instance_types" in wrong.err and "disk" in wrong.err and "max_vcpus" in wrong.err

    missing = place("compute", "delete", "cup", *LOCAL, "--yes")
    assert missing.code == 1
    assert "'cup' does not exist" in missing.err and "cpu" in missing.err
    unasked = place("compute", "delete", "cpu", *LOCAL)
    assert unasked.code == 2 and "p--cpu" in names(place, "compute")
    assert place("compute", "delete", "cpu", *LOCAL, "--yes", "--json").json == [
        {"kind": "compute environment", "name": "p--cpu"}
    ]
    assert "p--cpu" not in names(place, "compute")


def test_queues_one_by_one(ready: Cli) -> None:
    made = ready(
        "queue", "create", "night", *LOCAL, "--priority", "2", "--compute", "gpu", "--compute",
        "gpu-spot", "--share", "team=2", "--json",
    )  # fmt: skip
    assert made.code == 0
    assert {"kind": "job queue", "name": "p--night"} in made.json
    lines = ready("queue", "list", *LOCAL).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["urgent", "default", "night"]
    assert "fair share" in lines[3]

    assert "exists already" in ready("queue", "create", "night", *LOCAL, "--compute", "gpu").err
    missing = ready("queue", "create", "other", *LOCAL, "--compute", "gup")
    assert missing.code == 1 and "'gup' does not exist" in missing.err and "gpu" in missing.err

    changed = ready("queue", "update", "night", *LOCAL, "--priority", "999", "--json")
    assert changed.json["priority"] == 999
    assert ready("queue", "update", "night", *LOCAL).code == 2
    assert ready("queue", "update", "night", *LOCAL, "--priority", "1001").code == 78
    assert ready("queue", "update", "nigth", *LOCAL, "--priority", "1").code == 1

    used = ready("compute", "delete", "gpu", *LOCAL, "--yes")
    assert used.code == 2 and "is used by: " in used.err and "night" in used.err

    assert ready("setup", *LOCAL, "--plan").code == 0, "setup leaves alone what it did not make"
    assert ready("queue", "delete", "night", *LOCAL).code == 2
    assert ready("queue", "delete", "night", *LOCAL, "--yes", "--json").json == [
        {"kind": "job queue", "name": "p--night"}
    ]
    assert names(ready, "queue") == ["p--default", "p--urgent"]


def test_a_change_by_a_single_command_is_changed_back_by_setup(ready: Cli) -> None:
    assert ready("queue", "update", "urgent", *LOCAL, "--priority", "1").code == 0
    planned = ready("setup", *LOCAL, "--plan")
    assert planned.code == 2 and "priority: 1 -> 100" in planned.out
    assert ready("setup", *LOCAL, "--yes").code == 0
    assert ready("setup", *LOCAL, "--plan").code == 0


def test_every_answer_in_json_is_one_document(ready: Cli) -> None:
    for arguments in (
        ("setup", "--plan"), ("setup", "--yes"), ("teardown", "--plan"), ("compute", "list"),
        ("queue", "list"), ("teardown", "--yes"),
    ):  # fmt: skip
        shown = ready(*arguments, *LOCAL, "--json")
        assert shown.json is not None, arguments
        assert shown.out.count("\n") <= 1 or json.loads(shown.out)


def test_every_mistake_of_the_file_is_told_before_anything_is_done(place: Cli) -> None:
    (place.folder / "batchml.toml").write_text(
        CONFIG.replace("max_vcpus = 64", 'max_vcpus = "64"').replace("urgent]", "urgent]\ntypo = 1")
    )
    shown = place("setup", *LOCAL, "--yes")
    assert shown.code == 78
    assert "env.dev.compute.gpu.max_vcpus: found '64'. Expected a whole number." in shown.err
    assert "env.dev.queues.urgent.typo: unknown key." in shown.err


def test_like_names_the_environment_that_local_is_to_be(place: Cli) -> None:
    shown = place("setup", *LOCAL, "--like", "dve", "--plan")
    assert shown.code == 1 and "'dve' does not exist" in shown.err
    assert place("setup", *LOCAL, "--like", "dev", "--plan").code == 2


def test_of_several_environments_one_is_named(place: Cli) -> None:
    """Nothing is deleted because a second environment was described."""
    assert place("setup", *LOCAL, "--yes").code == 0
    more = CONFIG.replace('default = "dev"\n', "") + '[env.prod]\nregion = "eu-west-1"\n'
    (place.folder / "batchml.toml").write_text(more)
    unclear = place("setup", "--yes")
    assert (unclear.code, "--like dev or --like prod" in unclear.err) == (2, True)
    assert "p--urgent" in names(place, "queue")
    assert "Nothing to do." in place("setup", "--like", "dev").out
    wrong = place("setup", "--env", "dev", "--like", "prod", "--plan")
    assert (wrong.code, "--like is only for local" in wrong.err) == (2, True)


def test_what_others_use_is_not_half_torn_down(ready: Cli) -> None:
    assert ready("queue", "create", "night", "--compute", "gpu", *LOCAL).code == 0
    before = names(ready, "queue")
    refused = ready("teardown", *LOCAL, "--yes")
    assert (refused.code, "used by queues that setup did not make: p--night" in refused.err) == (
        2,
        True,
    )
    assert names(ready, "queue") == before
    assert ready("queue", "delete", "night", "--yes", *LOCAL).code == 0
    assert ready("teardown", *LOCAL, "--yes").code == 0
    assert names(ready, "queue") == ["default"]


def test_a_queue_that_is_not_described_any_more_leaves_the_default_one(ready: Cli) -> None:
    (ready.folder / "batchml.toml").write_text(CONFIG.partition("[env.dev.queues.default]")[0])
    assert ready("setup", *LOCAL, "--yes").code == 0
    assert names(ready, "queue") == ["default"]
    assert ready("submit", *LOCAL, "--wait", "--", "true").code == 0


def test_a_mistake_elsewhere_keeps_nobody_from_the_runs_here(place: Cli) -> None:
    run = place("submit", *LOCAL, "--wait", "--json", "--", "true").json["jobId"]
    (place.folder / "batchml.toml").write_text(CONFIG.replace("max_vcpus = 64", "max_vcpu = 64"))
    assert place("show", run, *LOCAL).code == 0
    there = place("ls", "--env", "dev")
    assert (there.code, "env.dev.compute.gpu.max_vcpu: unknown key" in there.err) == (78, True)
    like = place("setup", *LOCAL, "--plan")
    assert (like.code, "max_vcpu" in like.err) == (78, True)
    doctor = place("doctor", *LOCAL)
    assert (doctor.code, "max_vcpu" in doctor.out) == (1, True)


def test_ctrl_c_at_the_question_changes_nothing(place: Cli) -> None:
    master, slave = pty.openpty()
    asked = subprocess.Popen(
        place.command("setup", *LOCAL), cwd=place.folder, env=place.environ, stdin=slave,
        stdout=subprocess.PIPE, stderr=slave, text=True,
    )  # fmt: skip
    os.close(slave)
    seen = ""
    while "[y/N]" not in seen:
        seen += os.read(master, 4096).decode()
    asked.send_signal(signal.SIGINT)
    assert asked.wait(30) == 130
    assert "Nothing was changed." in os.read(master, 4096).decode()
    assert names(place, "queue") == ["default"]


def test_what_is_said_of_flags_that_do_nothing_or_mean_something_else(ready: Cli) -> None:
    (ready.folder / "batchml.toml").write_text(CONFIG.replace("priority = 100", "priority = 90"))
    done = ready("setup", *LOCAL, "--yes", "--allow-loss", "nope")
    assert (done.code, "--allow-loss nope: no resource of that name" in done.err) == (0, True)
    listed = ready("queue", "create", "both", "--compute", "gpu,gpu-spot", *LOCAL)
    assert (listed.code, "--compute gpu --compute gpu-spot" in listed.err) == (2, True)


def test_create_without_flags_makes_what_the_file_describes(place: Cli) -> None:
    assert place("compute", "create", "gpu", *LOCAL).code == 0
    assert place("queue", "create", "urgent", *LOCAL).code == 0
    (made,) = (q for q in place("queue", "list", *LOCAL, "--json").json if q["priority"] == 100)
    assert made["jobQueueName"] == "p--urgent"
    again = place("compute", "create", "gpu", *LOCAL)
    assert (again.code, "gpu exists already" in again.err) == (2, True)


def test_what_one_project_sets_up_does_not_change_another(ready: Cli, tmp_path: Path) -> None:
    other = Cli(tmp_path / "other", ready.home)
    other.folder.mkdir()
    config = CONFIG.replace('project = "p"', 'project = "q"').replace("= 100", "= 7")
    (other.folder / "batchml.toml").write_text(config.replace('jobs = ["greet"]\n', ""))
    before = ready("queue", "list", *LOCAL, "--json").json
    assert other("setup", *LOCAL, "--yes").code == 0
    assert ready("queue", "list", *LOCAL, "--json").json == before
    assert ready("setup", *LOCAL, "--plan").code == 0
    assert names(other, "queue") == ["q--default", "q--urgent"]
    lines = ready("queue", "list", *LOCAL).out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["urgent", "default"]
    lines = ready("queue", "list", "--all", *LOCAL).out.splitlines()
    listed = [line.split()[0] for line in lines[1:]]
    assert sorted(listed) == ["default", "p--default", "q--default", "q--urgent", "urgent"]
    sent = other("submit", *LOCAL, "--queue", "urgent", "--wait", "--json", "--", "true").json
    assert sent["jobQueue"] == "q--urgent"
    assert other("teardown", *LOCAL, "--yes").code == 0
    assert ready("queue", "list", *LOCAL, "--json").json == before
