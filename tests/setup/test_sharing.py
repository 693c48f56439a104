"""Two environments in one workspace: the file, both setups and both teardowns, in a played AWS."""

import base64
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.naming import make_platform
from batchml.config.environments import read_environments
from batchml.errors import ConfigError
from batchml.model.environment import Environment
from batchml.setup import apply
from batchml.setup.desired import SetupSpec, state_after_teardown, wanted_state
from batchml.setup.plan import make_plan, refusals
from batchml.setup.sharing import CurrentState, PlanStep, WantedState
from tests.setup.test_setup_plan import World

FILE = """
[env.dev]
region = "us-east-1"
[env.dev.compute.cpu]
instance_types = ["m6i"]
max_vcpus = 16
[env.dev.queues.default]
compute = ["cpu"]

[env.lab]
region = "us-east-1"
[env.lab.storage]
shared_with = "dev"
[env.lab.compute.gpu]
instance_types = ["g5"]
max_vcpus = 16
[env.lab.queues.default]
compute = ["gpu"]
"""


def environments(text: str = FILE) -> dict[str, Environment]:
    return read_environments(tomllib.loads(text), "batchml.toml")[1]


# --- the file -----------------------------------------------------------------------------------


def test_an_environment_that_shares_makes_neither_network_nor_file_system() -> None:
    lab = environments()["lab"]
    assert lab.storage.shared_with == "dev" and lab.storage.workspace == "none"
    assert lab.network.is_given
    given = 'vpc = "vpc-0123abcd"\nsubnets = ["subnet-0123abcd"]\nsecurity_groups = ["sg-0123abcd"]'
    other = environments(FILE + f"\n[env.dev.network]\n{given}\n")["lab"]
    assert other.network.subnets == ("subnet-0123abcd",)


def test_the_file_of_the_documentation_is_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "workspace-aws.md").read_text("utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert environments(block)["lab"].storage.shared_with == "dev"


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ('shared_with = "dev"', 'shared_with = "dve"', "Did you mean 'dev'?"),
        ('shared_with = "dev"', 'shared_with = "lab"', "Expected another environment"),
        ('shared_with = "dev"', 'shared_with = "local"', "Expected another environment"),
        ('shared_with = "dev"', 'shared_with = "dev"\nsize = 1',
         "storage.size: dev owns the workspace"),
        ('[env.lab.storage]', '[env.lab.network]\nzones = 1\n[env.lab.storage]', "network: a"),
        ('[env.lab]\nregion = "us-east-1"', '[env.lab]\nregion = "eu-west-1"', "within one region"),
        ('[env.lab]', '[env.lab]\nprofile = "other"', "within one account"),
        ("[env.dev.compute.cpu]", '[env.dev.storage]\nworkspace = "none"\n[env.dev.compute.cpu]',
         "dev has no workspace"),
        ("[env.dev.compute.cpu]", '[env.dev.storage]\nshared_with = "lab"\n[env.dev.compute.cpu]',
         "has no workspace of its own"),
        ("[env.lab]", '[env.local.storage]\nshared_with = "dev"\n[env.lab]', "local has one"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_told(was: str, now: str, said: str) -> None:
    assert was in FILE
    with pytest.raises(ConfigError) as error:
        environments(FILE.replace(was, now, 1))
    assert said in str(error.value)


# --- AWS ----------------------------------------------------------------------------------------


class Env(World):
    """One environment of the file, in an account that others are in, too."""

    def __init__(self, world: World, name: str) -> None:
        self.__dict__.update(world.__dict__)
        self.name = name

    @property
    def spec(self) -> SetupSpec:
        made = environments()[self.name]
        names = [each for one in made.compute.values() for each in one.instance_types]
        return SetupSpec(
            self.name, made, self.templates, lambda platform: {}, offers=self.account.offers(names)
        )

    def current(self) -> CurrentState:
        return apply.read_state(self.spec, self.tools())

    def refused(self, *, teardown: bool = False, delete_data: bool = False) -> list[str]:
        current = self.current()
        made: WantedState = wanted_state(self.spec, current)
        if teardown:
            made = state_after_teardown(self.spec, current, delete_data=delete_data)
        return refusals(made, make_plan(made, current), current)

    def steps(self, current: CurrentState) -> list[PlanStep]:
        return make_plan(state_after_teardown(self.spec, current, delete_data=False), current)

    def parameter(self, short: str, key: str) -> str:
        stack = self.account.stack(f"batchml-{self.name}-{short}")
        assert stack is not None
        return str(stack.content["parameters"][key])


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, Any]]]:
    """An account in which both environments are set up, the one after the other."""
    world = World(Path(tmp_path_factory.mktemp("account")))
    for name in ("dev", "lab"):
        Env(world, name).setup()
    yield world, world.account.save()
    world.account.close()


@pytest.fixture
def both(account: tuple[World, dict[str, Any]]) -> tuple[Env, Env]:
    world, saved = account
    world.account.restore(saved)
    return Env(world, "dev"), Env(world, "lab")


def test_both_mount_the_same_file_system_in_the_same_network(both: tuple[Env, Env]) -> None:
    dev, lab = both
    names = [stack.name for stack in dev.account.stacks]
    assert "batchml-lab-storage" in names and "batchml-lab-network" not in names
    environments = dev.account.snapshot()["environments"]
    (cpu, *_), (gpu, *_) = environments["batchml-dev-cpu"], environments["batchml-lab-gpu"]
    assert cpu["subnets"] == gpu["subnets"] == [
        "subnet-0aaaaaaaaaaaaaaa1", "subnet-0aaaaaaaaaaaaaaa2",
    ]  # fmt: skip
    assert cpu["securityGroupIds"] == gpu["securityGroupIds"] == ["sg-0aaaaaaaaaaaaaaa1"]
    assert gpu["instanceRole"] and lab.plan() == [] and dev.plan() == []
    # All of it that a submission is told of: the folder is there.
    storage = lab.account.stack("batchml-lab-storage")
    assert storage is not None
    assert make_platform("lab", lab.spec.environment, storage.outputs()).workspace == "/workspace"


@pytest.mark.parametrize("kind", ["efs", "fsx-lustre"])
def test_instances_mount_what_the_other_has(both: tuple[Env, Env], kind: str) -> None:
    _, lab = both
    current = lab.current()
    outputs = {
        "efs": {"FileSystemDns": "fs-1.efs", "AccessPointId": "fsap-1", "LustreMountName": ""},
        "fsx-lustre": {"FileSystemDns": "fs-1.fsx", "LustreMountName": "abc", "AccessPointId": ""},
    }[kind]
    storage = current.owner_stacks["storage"]
    owner_stacks = {
        **current.owner_stacks,
        "storage": replace(storage, outputs={**storage.outputs, **outputs}),
    }
    made = wanted_state(lab.spec, replace(current, owner_stacks=owner_stacks)).templates[
        "batchml-lab-gpu"
    ]
    text = base64.b64decode(made["LaunchTemplateData"]["UserData"]).decode()
    command = {"efs": "accesspoint=fsap-1", "fsx-lustre": "fs-1.fsx@tcp:/abc"}[kind]
    assert command in text and ("mount -t efs" in text) == (kind == "efs")


def test_without_the_other_nothing_is_begun(account: tuple[World, dict[str, Any]]) -> None:
    world, _ = account
    world.account.restore(world.nothing)
    lab = Env(world, "lab")
    (said,) = lab.refused()
    assert said.endswith("First: batchml setup --env dev") and "dev does not exist" in said


def test_data_that_another_works_in_is_not_deleted(both: tuple[Env, Env]) -> None:
    dev, lab = both
    (said,) = dev.refused(teardown=True, delete_data=True)
    assert "workspace of lab" in said and "First: batchml teardown --env lab" in said
    current = dev.current()
    assert current.sharers == ("lab",) and lab.current().sharers == ()
    # Nor by a setup, from a file that does not know of the other.
    alone = environments(FILE.split("[env.lab]")[0] + '[env.dev.storage]\nworkspace = "none"')[
        "dev"
    ]
    made = wanted_state(replace(dev.spec, environment=alone), current)
    (said,) = refusals(made, make_plan(made, current), current)
    assert "stack batchml-dev-storage: its file system is also the workspace of lab" in said


def test_aws_keeps_a_file_system_that_another_imports(both: tuple[Env, Env]) -> None:
    dev, _ = both
    with pytest.raises(Exception, match="in use by batchml-lab-storage"):
        dev.teardown_with_data()


def test_a_teardown_of_the_owner_leaves_the_others_at_work(both: tuple[Env, Env]) -> None:
    dev, lab = both
    kept = {step.name: step.reasons for step in dev.steps(dev.current()) if not step.changes}
    assert kept["batchml-dev-network"] == ("lab uses it",)
    dev.teardown()
    assert dev.parameter("network", "Egress") == "nat"
    assert lab.refused() == [] and lab.plan() == []
    # Once nobody works in it any more, what costs goes.
    lab.teardown()
    assert lab.parameter("storage", "SharedWith") == ""
    assert dev.current().sharers == ()
    dev.teardown()
    assert dev.parameter("network", "Egress") == "none"
    (said,) = lab.refused()
    assert "no egress" in said and "batchml setup --env dev" in said
    dev.setup()
    assert lab.refused() == []
    lab.setup()
    assert lab.parameter("storage", "SharedWith") == "dev" and lab.plan() == []


def test_the_data_of_one_that_shares_is_its_own_alone(both: tuple[Env, Env]) -> None:
    dev, lab = both
    assert lab.refused(teardown=True, delete_data=True) == []
    lab.teardown_with_data()
    assert [stack.name for stack in dev.account.stacks if stack.status != "DELETE_COMPLETE"] == [
        f"batchml-dev-{short}" for short in ("network", "roles", "storage", "observability")
    ]
    assert dev.current().sharers == () and dev.plan() == []
