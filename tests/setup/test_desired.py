"""What batchml.toml wants of AWS: the stacks' parameters, and what follows from an update."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.capacity import make_offers
from batchml.aws.cloudformation import Stack
from batchml.aws.naming import UNKNOWN
from batchml.config.environments import read_environments
from batchml.model.environment import Environment
from batchml.resources import shipped_folder
from batchml.setup.desired import (
    STACKS,
    SetupSpec,
    content_version,
    wanted_stacks,
    wanted_state,
    without_efa,
)
from batchml.setup.sharing import CurrentState
from tests.support.aws_world import parsed

TEMPLATES = {
    short: (shipped_folder("cfn") / f"{short}.yaml").read_text("utf-8") for short in STACKS
}


def described(**table: Any) -> Environment:
    usual = {
        "region": "us-east-1",
        "compute": {"gpu": {"instance_types": ["g5"], "max_vcpus": 8}},
        "queues": {"default": {"compute": ["gpu"]}},
    }
    return read_environments({"env": {"dev": {**usual, **table}}}, "here")[1]["dev"]


ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


def spec(**table: Any) -> SetupSpec:
    offers = make_offers("us-east-1", ["g5"], [("g5.xlarge", zone) for zone in ZONES])
    return SetupSpec("dev", described(**table), TEMPLATES, lambda platform: {}, offers=offers)


def deployed(made: SetupSpec, **outputs: dict[str, str]) -> CurrentState:
    """As though everything of the scheme were there, with these outputs of its stacks."""
    current = CurrentState()
    for short in wanted_stacks(made):
        blueprint = next(
            b for b in wanted_state(made, current).stacks if b.name == made.stack(short)
        )
        stack = Stack(
            blueprint.name, blueprint.name, "CREATE_COMPLETE", "", outputs.get(short, {}),
            blueprint.parameters, blueprint.tags, template=blueprint.template,
        )  # fmt: skip
        current = replace(current, stacks={**current.stacks, stack.name: stack})
    return current


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"ami": "build", "storage": {"workspace": "fsx-lustre"}},
        {"network": {"egress": "endpoints", "zones": 3, "cidr": "10.0.0.0/20"}},
        {"budget": {"usd": 5, "email": "a@b.c"}, "storage": {"workspace": "none"}},
        {"secrets": ["arn:aws:ssm:us-east-1:123456789012:parameter/team/wandb"]},
    ],
    ids=["usual", "built", "endpoints", "budget", "secrets"],
)
def test_stacks_are_given_the_parameters_that_they_have_and_no_others(table: Any) -> None:
    for blueprint in wanted_state(spec(**table), CurrentState()).stacks:
        known = parsed(blueprint.template)["Parameters"]
        assert set(blueprint.parameters) <= set(known), blueprint.name
        needed = {name for name, body in known.items() if "Default" not in body}
        assert needed <= set(blueprint.parameters), blueprint.name
        for name, value in blueprint.parameters.items():
            allowed = known[name].get("AllowedValues")
            assert not allowed or value in map(str, allowed), f"{name}={value}"


def test_an_image_is_built_anew_when_its_template_has_changed() -> None:
    text = without_efa(TEMPLATES["ami"])
    stacks = {b.name: b for b in wanted_state(spec(ami="build"), CurrentState()).stacks}
    assert stacks["batchml-dev-ami"].parameters["ContentVersion"] == content_version(text)
    assert content_version(text) != content_version(text.replace("nvidia", "Nvidia", 1))
    assert content_version(text) == content_version(text + "\n")
    major, *parts = content_version(text).split(".")
    assert (major, len(parts)) == ("1", 2)
    assert all(0 <= int(part) < 2**30 for part in parts)


def test_an_image_is_rebuilt_only_when_asked_and_only_once() -> None:
    text = without_efa(TEMPLATES["ami"])
    first = content_version(text)

    def version(deployed: str, rebuild_of: str = "") -> str:
        stack = Stack(
            "id",
            "batchml-dev-ami",
            "CREATE_COMPLETE",
            outputs={"ImageId": "ami-01234567"},
            parameters={"ContentVersion": deployed},
        )
        asked = replace(spec(ami="build"), rebuild_of=rebuild_of)
        stacks = wanted_state(asked, CurrentState(stacks={stack.name: stack})).stacks
        return {b.name: b for b in stacks}[stack.name].parameters["ContentVersion"]

    second = version(first, rebuild_of=first)
    assert second != first and second.rpartition(".")[0] == first.rpartition(".")[0]
    assert version(second, rebuild_of=first) == second, "the plan after the build has nothing to do"
    assert version(second) == second, "nor has the next setup"
    older = first.rpartition(".")[0] + ".77"  # of an earlier version of batchml
    assert version(older) == older
    assert version("1.5.9") == first, "another template is another image"


FAST = {"instance_types": ["g6.48xlarge"], "max_vcpus": 384, "efa": True}


def test_only_the_image_of_hosts_with_efa_has_its_driver() -> None:
    """Images of other environments stay as they are, with the hosts that start from them."""
    text = TEMPLATES["ami"]
    found = {}
    for name, compute in (
        ("efa", {"gpu": FAST}),
        ("none", {"gpu": {**FAST, "efa": False}}),
        ("own image", {"gpu": {**FAST, "efa": False}, "fast": {**FAST, "ami": "ami-01234567"}}),
    ):
        made = wanted_state(spec(ami="build", compute=compute), CurrentState())
        (found[name],) = [each for each in made.stacks if each.name == "batchml-dev-ami"]
    assert found["efa"].template == text
    assert found["none"].template == found["own image"].template == without_efa(text)
    assert re.search(r"\befa|Efa", without_efa(text)) is None
    versions = {each.parameters["ContentVersion"] for each in found.values()}
    assert len(versions) == 2
    assert parsed(without_efa(text))["Resources"].keys() == parsed(text)["Resources"].keys() - {
        "EfaComponent"
    }


def test_hosts_with_efa_are_in_one_subnet_unless_they_are_reserved() -> None:
    cr = "cr-01234567"
    computes = {
        "near": FAST, "reserved": {**FAST, "capacity_reservation": cr},
        "block": {**FAST, "capacity_block": cr}, "far": {**FAST, "efa": False},
        "auto": {**FAST, "efa": "auto", "ami": "ecs-gpu"},
    }  # fmt: skip
    names = [(f"g6.{size}", zone) for size in ("48xlarge",) for zone in ZONES[1:]]
    offers = make_offers("us-east-1", ["g6.48xlarge"], names)
    wanted = replace(
        spec(
            ami="build",
            gpu_access="toolkit",
            compute=computes,
            queues={"default": {"compute": ["near"]}},
        ),
        offers=offers,
    )
    current = deployed(
        wanted,
        network={"SubnetIds": "subnet-b,subnet-c", "VpcId": "vpc-1", "SecurityGroupId": "sg-1"},
        ami={"ImageId": "ami-01234567"},
    )
    made = wanted_state(wanted, current)
    subnets = {
        name: each["computeResources"]["subnets"] for name, each in made.environments.items()
    }
    both = ["subnet-b", "subnet-c"]
    assert subnets == {
        "batchml-dev-near": ["subnet-b"], "batchml-dev-reserved": both,
        "batchml-dev-block": both, "batchml-dev-far": both, "batchml-dev-auto": both,
    }  # fmt: skip
    assert list(made.groups) == ["batchml-dev-near"]


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"storage": {"workspace": "efs"}}, {"storage": {"workspace": "fsx-lustre"}}, "templates"),
        ({"network": {"zones": 2}}, {"network": {"zones": 3}}, "environments"),
    ],
    ids=["file system", "subnets"],
)
def test_what_follows_from_an_update_of_a_stack_is_in_the_plan(
    before: Any, after: Any, what: str
) -> None:
    current = deployed(
        spec(**before),
        network={"SubnetIds": "subnet-1,subnet-2", "VpcId": "vpc-1", "SecurityGroupId": "sg-1"},
        storage={"FileSystemId": "fs-1", "FileSystemDns": "fs-1.efs"},
    )
    same = getattr(wanted_state(spec(**before), current), what)
    other = getattr(wanted_state(spec(**after), current), what)
    assert same != other
    if what == "environments":
        subnets = other["batchml-dev-gpu"]["computeResources"]["subnets"]
        assert subnets == ["subnet-1", "subnet-2", f"{UNKNOWN}network.SubnetIds.us-east-1c»"]


def test_a_changed_template_alone_leaves_the_outputs_of_its_stack() -> None:
    made = spec()
    ids = "subnet-1,subnet-2,subnet-3"
    current = deployed(made, network={"SubnetIds": ids, "SecurityGroupId": "sg-1"})
    changed = replace(made, templates={**TEMPLATES, "network": TEMPLATES["network"] + "# new\n"})
    environments = wanted_state(changed, current).environments
    assert environments["batchml-dev-gpu"]["computeResources"]["subnets"] == ids.split(",")


def test_the_templates_are_those_that_ship(tmp_path: Path) -> None:
    assert {path.stem for path in shipped_folder("cfn").glob("*.yaml")} == set(STACKS)


def test_hosts_with_neuron_chips_keep_their_image_until_a_refresh() -> None:
    table = {"compute": {"trn": {"instance_types": ["trn1.32xlarge"], "max_vcpus": 128}},
             "queues": {"default": {"compute": ["trn"]}}}  # fmt: skip

    def image(newest: str, current: CurrentState) -> str:
        made = replace(spec(**table), neuron_image=newest)
        request = wanted_state(made, current).environments["batchml-dev-trn"]
        (entry,) = request["computeResources"]["ec2Configuration"]
        return str(entry["imageIdOverride"])

    assert image("ami-1", CurrentState()) == "ami-1"
    assert UNKNOWN in image("", CurrentState()), "without AWS, the plan shows a placeholder"
    made = replace(spec(**table), neuron_image="ami-1")
    there = wanted_state(made, CurrentState()).environments["batchml-dev-trn"]
    replaced = CurrentState(environments={"batchml-dev-trn-r2": there})
    assert image("ami-2", replaced) == "ami-1"
    own = {"computeResources": {"ec2Configuration": [{"imageIdOverride": "ami-9"}]},
           "tags": there["tags"]}  # fmt: skip
    assert image("ami-2", CurrentState(environments={"batchml-dev-trn": own})) == "ami-2", (
        "the user's AMI is not kept when batchml.toml no longer names it"
    )
