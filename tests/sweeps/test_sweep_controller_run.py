"""A controller that is a run: the requests that submit it, and the checks that it makes first."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from batchml.aws.naming import Platform
from batchml.errors import ConfigError, NotFound, ServiceUnreachable
from batchml.local.executors import spec
from batchml.model.job import JobSpec
from batchml.model.sweep import Dimension, Goal, SweepLimits, SweepSpec
from batchml.resources import shipped_folder
from batchml.runs.controllers import (
    IMAGE,
    ControllerContext,
    context_in_aws,
    controller_platform,
    controller_requests,
)
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.run import (
    ATTEND,
    ControllerArguments,
    check_method,
    controller_record,
    controller_run,
    digest_of,
    open_sweep,
)
from batchml.sweeps.started import StartedSweep, write_started
from tests.support.fakes import FakeClock
from tests.support.models import faults

KEY, RUN = "2abcdefghijklmnop", "3bcdefghijklmnopq"
SPEC = SweepSpec(
    name="lenet", job="lenet", goals=(Goal("acc", "max"),),
    space={"lr": Dimension("float", 0.0, 1.0)}, limits=SweepLimits(trials=8, parallel=2),
)  # fmt: skip
JOB = JobSpec(name="lenet", image="python", command=("true", "{lr}"), code=False)
STARTED = StartedSweep(
    key=KEY, name="lenet", env="dev", spec=SPEC, job=msgspec.to_builtins(JOB),
    queue="batchml-dev-default", store=f"s3://bucket/runs/{KEY}", runs="s3://bucket/runs",
    tags={"batchml:sweep": KEY, "batchml:env": "dev", "batchml:job": "/home/me/lenet"},
)  # fmt: skip
PLATFORM = Platform(
    gpu="driver-mount", job_role="arn:aws:iam::123456789012:role/job", workspace="/workspace",
    execution_role="arn:aws:iam::123456789012:role/execution", user="1000:1000", log_group="/logs",
)  # fmt: skip
ROLE = "arn:aws:iam::123456789012:role/controller"
PINNED = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/controller@sha256:" + "0" * 64


def in_aws() -> tuple[dict[str, object], dict[str, object]]:
    where = ControllerArguments(KEY, "dev", STARTED.store, "us-east-1", "f" * 64)
    command = ("python", "-m", "batchml", *ATTEND, *where.options)
    platform = controller_platform(PLATFORM, {"ControllerRoleArn": ROLE}, "dev")
    made = controller_requests(
        controller_run(STARTED, command, PINNED, STARTED.queue, platform), RUN
    )
    assert made.document is None
    return made.register, made.submit


def test_in_aws_a_controller_is_small_is_tried_again_and_has_its_own_role() -> None:
    register, submit = in_aws()
    assert faults("batch", "RegisterJobDefinition", register) == []
    assert faults("batch", "SubmitJob", submit) == []
    container = register["containerProperties"]
    assert isinstance(container, dict)
    assert container["jobRoleArn"] == ROLE
    assert "volumes" not in container and "privileged" not in container
    overrides, retry = submit["containerOverrides"], submit["retryStrategy"]
    assert isinstance(overrides, dict) and isinstance(retry, dict)
    needs = {each["type"]: each["value"] for each in overrides["resourceRequirements"]}
    assert needs == {"VCPU": "1", "MEMORY": "1024"}
    assert retry["attempts"] == 10
    assert retry["evaluateOnExit"][-1] == {"onReason": "*", "action": "RETRY"}
    variables = {each["name"] for each in overrides["environment"]}
    assert "BATCHML_SWEEP" not in variables, "by that a trial is known"
    assert submit["tags"] == {"batchml:sweep": KEY, "batchml:env": "dev", "batchml:key": RUN}


def test_what_it_is_told_is_what_it_reads() -> None:
    _, submit = in_aws()
    overrides = submit["containerOverrides"]
    assert isinstance(overrides, dict)
    assert overrides["command"] == [
        "python", "-m", "batchml", "sweeps", "attend", KEY, "--env", "dev",
        "--store", STARTED.store, "--region", "us-east-1", "--digest", "f" * 64,
    ]  # fmt: skip


def test_the_embedded_server_knows_the_same_command() -> None:
    assert ATTEND == spec.CONTROLLER_COMMAND


def test_the_history_keeps_a_controller_as_a_run_of_its_own() -> None:
    run = controller_run(
        replace(STARTED, runs=""), (*ATTEND, KEY), "batchml/controller", "controllers", Platform()
    )
    requests = controller_requests(run, RUN)
    assert requests.submit["jobName"] == f"lenet-controller-{RUN}"
    record = controller_record(STARTED, RUN, requests)
    assert (record.key, record.name, record.queue) == (RUN, "lenet-controller", "controllers")
    assert record.tags["batchml:sweep"] == KEY and record.command == (*ATTEND, KEY)


def test_stacks_without_the_role_are_to_be_updated() -> None:
    with pytest.raises(ConfigError, match="batchml setup --env dev"):
        controller_platform(PLATFORM, {}, "dev")


def test_a_method_that_needs_optuna_needs_an_image_with_it() -> None:
    mine = (shipped_folder("images") / IMAGE / "requirements.txt").read_text("utf-8")
    packages = "\n".join(line for line in mine.splitlines() if not line.startswith("#"))
    check_method(STARTED, packages)
    gp = replace(STARTED, spec=replace(SPEC, method="gp"))
    with pytest.raises(ConfigError, match="method gp needs Optuna"):
        check_method(gp, mine)
    check_method(gp, f"{packages}\noptuna==5.0.0\ntorch==2.5.0\n")


def test_another_sweep_than_was_meant_is_not_controlled(tmp_path: Path) -> None:
    """A program in a job can write below runs/, and so change what its sweep would submit."""
    store = FolderStore(str(tmp_path / KEY))
    write_started(store, STARTED)
    where = ControllerArguments(KEY, "dev", str(tmp_path / KEY), "us-east-1")
    place = context_in_aws("dev", "us-east-1", tmp_path, FakeClock(), "the sweep")
    assert (place.env, place.settings.environment.region) == ("dev", "us-east-1")
    found, started = open_sweep(place, where)
    assert (started.key, started.spec) == (KEY, SPEC)
    meant = ControllerArguments(KEY, "dev", where.store, digest=digest_of(found))
    assert open_sweep(place, meant)[1] == started
    evil = msgspec.json.encode(replace(STARTED, job={"command": ["evil"]}))
    store.put("spec.json", evil)
    with pytest.raises(ConfigError, match="has changed since"):
        open_sweep(place, meant)
    with pytest.raises(NotFound, match="does not exist"):
        open_sweep(place, ControllerArguments("4bcdefghijklmnopq", "dev", where.store))


def test_a_controller_starts_no_server_for_it_would_end_with_it(tmp_path: Path) -> None:
    from batchml.config.settings import load_settings

    clock = FakeClock()
    environ = {"BATCHML_HOME": str(tmp_path / "home"), "BATCHML_ENV": "local"}
    place = ControllerContext(load_settings(environ, tmp_path, None), clock, tmp_path)
    with pytest.raises(ServiceUnreachable, match="batchml local start"):
        place.connect()
    assert clock.naps and not (tmp_path / "home").exists()
