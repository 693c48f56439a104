"""`setup --push`: the images of the folder's jobs, and the environment that needs them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchml.local.home import ServerEndpoint
from tests.support.aws_http import served
from tests.support.aws_world import Account
from tests.support.cli import Cli, Shown, write_job
from tests.support.executor_rig import PROCESSOR
from tests.support.fakes import FastClock
from tests.support.image_rig import HOSTS, Rig
from tests.support.registry_rig import Refused

AWS_FILE = f"""
[env.dev]
region = "us-east-1"
jobs = ["small"]
[env.dev.storage]
workspace = "none"
[env.dev.compute.cpu]
instance_types = ["{HOSTS[PROCESSOR]}"]
max_vcpus = 4
[env.dev.queues.default]
compute = ["cpu"]
"""


@pytest.fixture
def account(tmp_path: Path) -> Iterator[tuple[Account, str]]:
    (tmp_path / "account").mkdir()
    made = Account(tmp_path / "account", FastClock())
    with served(made) as url:
        yield made, url
    made.close()


@pytest.fixture
def setup(
    rig: Rig, cli: Cli, server: ServerEndpoint, account: tuple[Account, str]
) -> Callable[..., Shown]:
    """`setup --env dev` in a folder with the job `small`, which has an image of its own."""
    keys = cli.home.keys()
    environ = {
        "AWS_ENDPOINT_URL": account[1],
        "AWS_ENDPOINT_URL_BATCH": server.url,
        "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": server.url,
        "AWS_ENDPOINT_URL_ECR": rig.registry.url,
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "HOME": str(cli.folder),
        "BATCHML_HOME": str(cli.folder / "client"),
    }
    (cli.folder / "batchml.toml").write_text(AWS_FILE)
    (rig.folder.parent).rename(cli.folder / "images")
    rig.folder = cli.folder / "images" / rig.folder.name
    write_job(cli.folder, "small", f'image = "{rig.folder.name}"\ncommand = ["true"]\n')
    return lambda *words, **more: cli("setup", "--env", "dev", *words, **(environ | more))


def test_setup_pushes_the_images_of_the_folders_jobs_and_registers_them(
    rig: Rig, setup: Callable[..., Shown], account: tuple[Account, str]
) -> None:
    plan = setup("--push", "--plan")
    assert (plan.code, f"Images to push: {rig.repository}:" in plan.out) == (2, True), plan.err
    assert "job definition of small: not yet." in plan.out
    assert not rig.registry.writes() and not account[0].stacks

    made = setup("--push", "--yes")
    assert made.code == 0, made.out + made.err
    there = rig.there()
    assert there is not None and f"@{there[0]}" in made.err
    assert made.err.index("pushed ") < made.err.index("create stack batchml-dev-network")
    assert "create job definition small-" in made.err, "the image is there when jobs are registered"
    assert made.out.endswith("is ready. Next:\n  batchml submit --env dev --wait small\n")

    writes = rig.registry.writes()
    again = setup("--push", "--yes")
    assert (again.code, "ECR has the images of the jobs." in again.out) == (0, True), again.err
    assert "Nothing to do." in again.out and rig.registry.writes() == writes


def test_without_push_the_next_step_is_image_push(rig: Rig, setup: Callable[..., Shown]) -> None:
    made = setup("--yes")
    assert made.code == 0, made.out + made.err
    first, second = made.out.splitlines()[-2:]
    assert first.startswith(f"  batchml image push --env dev {rig.folder.name}")
    assert second == "  batchml submit --env dev --wait small"
    assert not rig.registry.writes()
    # Later the image alone is missing.
    pushed = setup("--push", "--yes")
    assert pushed.code == 0 and rig.there() is not None, pushed.err


def test_a_missing_engine_is_told_before_anything_is_made(
    rig: Rig, setup: Callable[..., Shown], account: tuple[Account, str]
) -> None:
    none = setup("--push", "--yes", DOCKER_HOST="unix:///nowhere.sock")
    assert none.code == 1
    assert "Nothing was made, because --push cannot build" in none.err
    assert "Without --push, setup needs no Docker engine" in none.err
    assert not account[0].stacks and not none.out


def test_a_push_that_is_denied_leaves_no_environment(
    rig: Rig, setup: Callable[..., Shown], account: tuple[Account, str]
) -> None:
    denied = Refused("AccessDeniedException", "User: arn:aws:iam::1:user/a is not authorized")
    rig.registry.refuse = lambda operation: denied if operation == "CreateRepository" else None
    done = setup("--push", "--yes")
    assert (done.code, "CreateRepository" in done.err) == (77, True), done.err
    assert "Nothing else was made, because setup pushes images first." in done.err
    assert not account[0].stacks
    rig.registry.refuse = lambda operation: None
    assert setup("--push", "--yes").code == 0
