"""Which zones a network has subnets in, and which of them a compute environment uses."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.capacity import BUILD_TYPE, EXPANDED, Offers, fetch_offers, make_offers
from batchml.aws.cloudformation import ChangeSet, Stack, StackChange
from batchml.config.environments import read_environments
from batchml.local.server.protocol import service_model
from batchml.model.environment import Environment
from batchml.setup.desired import SetupSpec, wanted_by_command, wanted_state
from batchml.setup.network import choose_zones, existing_layout, plan_layout, zone_mistakes
from batchml.setup.plan import make_plan, refusals
from batchml.setup.sharing import Action, CurrentState, WantedState, is_known
from tests.setup.test_desired import TEMPLATES
from tests.setup.test_setup_plan import NETWORK, World, made, new, only_world, ready, world

__all__ = ["made", "new", "only_world", "ready", "world"]  # fixtures

ALL = tuple(f"us-east-1{letter}" for letter in "abcdef")
A, B, C, D, E, F = ALL
# g5 is not in e, p5 is only in d, and the image can be built everywhere but in d.
OFFERED = [
    *(("g5.xlarge", zone) for zone in (A, B, C, D, F)), ("p5.48xlarge", D),
    *((BUILD_TYPE, zone) for zone in (A, B, C, E, F)), *(("m5.large", zone) for zone in ALL),
    ("g5.xlarge", "us-east-1-bos-1a"), ("m5.large", "us-east-1-wl1-bos-wlz-1"),
]  # fmt: skip


def offers(*names: str) -> Offers:
    return make_offers("us-east-1", [*names, BUILD_TYPE], OFFERED)


def environment(
    network: dict[str, Any] | None = None, ami: str = "ecs-gpu", **computes: list[str]
) -> Environment:
    table = {
        "region": "us-east-1", "network": network or {}, "ami": ami,
        "compute": {n: {"instance_types": t, "max_vcpus": 8} for n, t in computes.items()},
    }  # fmt: skip
    return read_environments({"env": {"dev": table}}, "here")[1]["dev"]


def network_stack(**more: Any) -> Stack:
    return Stack(NETWORK, NETWORK, "CREATE_COMPLETE", **more)


def old_stack(zones: int) -> Stack:
    """A network that was set up by the first template, which cut its range into quarters."""
    return network_stack(
        parameters={"VpcCidr": "10.42.0.0/16", "SubnetBits": "14", "Zones": str(zones),
                    "Egress": "nat", "EnvironmentName": "dev"},
        outputs={"AvailabilityZones": ",".join(ALL[:zones]), "SecurityGroupId": "sg-1",
                 "SubnetIds": ",".join(f"subnet-{n}" for n in range(1, zones + 1)),
                 "BuildSubnetId": "subnet-1", "VpcId": "vpc-1"},
        tags={"batchml:env": "dev"},
        template="Parameters: {}\n",
    )  # fmt: skip


# --- the choice of zones ------------------------------------------------------------------------


def test_a_network_has_every_zone_that_offers_a_type_and_only_usual_ones() -> None:
    assert choose_zones([["g5"]], offers("g5"), (), 6, False) == (A, B, C, D, F)
    both = choose_zones([["g5"], ["m5.large"]], offers("g5", "m5.large"), (), 6, False)
    assert both == (A, B, C, D, F, E), "the zone with fewer types is last"
    assert choose_zones([], offers("m5.large"), (), 6, False) == ALL


def test_names_that_aws_batch_expands_stand_for_the_families_of_its_documentation() -> None:
    shape = service_model("batch").shape_for("ComputeResource").members["instanceTypes"]
    texts = {name: shape.documentation.partition(f"<code>{name}</code>")[2] for name in EXPANDED}
    for name, families in EXPANDED.items():
        said = re.findall(r"<code>(\w+)</code>", texts[name].partition("</li>")[0])
        expected = EXPANDED[said[0]] if said[0] in EXPANDED else tuple(sorted(said))
        assert families == expected, name
        offered = make_offers("us-east-1", [name], [(f"{families[-1]}.large", C)])
        assert offered.zones_of([name]) == {C} and offered.missing([name]) == ()


def test_few_zones_are_those_that_serve_every_compute_environment() -> None:
    groups = [["g5"], ["p5.48xlarge"]]
    assert choose_zones(groups, offers("g5", "p5.48xlarge"), (), 1, False) == (D,)
    assert choose_zones([["g5"]], offers("g5"), (), 2, False) == (A, B)


def test_the_image_is_built_where_its_instance_type_is_offered() -> None:
    zones = choose_zones([["p5.48xlarge"]], offers("p5.48xlarge"), (), 6, True)
    assert zones == (D, A)
    made = SetupSpec(
        "dev", environment(ami="build", gpu=["p5.48xlarge"]), TEMPLATES, lambda _: {},
        offers=offers("p5.48xlarge"),
    )  # fmt: skip
    stack = network_stack(
        parameters=blueprint(made, CurrentState()),
        outputs={"SubnetIds": "subnet-d,subnet-a", "AvailabilityZones": f"{D},{A}"},
    )
    wanted = wanted_state(made, CurrentState(stacks={NETWORK: stack}))
    (ami,) = [each for each in wanted.stacks if each.name.endswith("-ami")]
    assert ami.parameters["Subnet"] == "subnet-a"
    gpu = wanted.environments["batchml-dev-gpu"]["computeResources"]
    assert gpu["subnets"] == ["subnet-d"]


def test_zones_that_exist_stay_first_whatever_is_offered() -> None:
    assert choose_zones([["p5.48xlarge"]], offers("p5.48xlarge"), (E, A), 6, False) == (E, A, D)
    assert choose_zones([["g5"]], offers("g5"), (E, A), 1, False) == (E, A)


def test_without_an_answer_the_first_zones_are_taken_as_they_were_before() -> None:
    unknown = Offers(ALL, why="it is denied")
    assert choose_zones([["g5"]], unknown, (), 6, False) == (A, B, C)
    assert choose_zones([["g5"]], unknown, (), 1, False) == (A,)
    assert choose_zones([["g5"]], unknown, (E,), 6, False) == (E,)


# --- the ranges ---------------------------------------------------------------------------------


def test_a_new_network_is_cut_into_eighths_and_the_last_is_public() -> None:
    layout = plan_layout(
        environment(cpu=["m5.large"]), offers("m5.large"), None, builds_image=False
    )
    assert layout.zones == ALL and layout.public == "10.42.224.0/19"
    assert layout.ranges == tuple(f"10.42.{32 * place}.0/19" for place in range(6))
    small = environment({"cidr": "10.0.0.0/22"}, cpu=["m5.large"])
    assert plan_layout(small, offers("m5.large"), None, builds_image=False).ranges[5] == (
        "10.0.2.128/25"
    )


@pytest.mark.parametrize(
    ("zones", "ranges", "public"),
    [
        (1, ("10.42.0.0/18",), "10.42.64.0/20"),
        (2, ("10.42.0.0/18", "10.42.64.0/18"), "10.42.128.0/20"),
        (3, ("10.42.0.0/18", "10.42.64.0/18", "10.42.128.0/18"), None),
    ],
)
def test_subnets_of_the_first_template_keep_zone_and_range_and_others_come_beside_them(
    zones: int, ranges: tuple[str, ...], public: str | None
) -> None:
    stack = old_stack(zones)
    found = existing_layout(stack)
    assert found is not None
    assert (found.zones, found.ranges, found.public) == (ALL[:zones], ranges, "10.42.192.0/18")
    layout = plan_layout(
        environment(cpu=["m5.large"]), offers("m5.large"), stack, builds_image=False
    )
    assert layout.ranges[:zones] == ranges and layout.zones[:zones] == ALL[:zones]
    assert layout.public == found.public
    more = layout.ranges[zones:]
    assert (more[0] if more else None) == public, "no room is left beside three quarters"
    assert len(layout.zones) == len(layout.ranges) == (3 if zones == 3 else 6)


def test_a_zone_that_is_added_later_moves_no_other() -> None:
    new = plan_layout(
        environment(gpu=["p5.48xlarge"]), offers("p5.48xlarge"), None, builds_image=False
    )
    stack = network_stack(parameters={"VpcCidr": "10.42.0.0/16", **new.to_parameters()})
    more = plan_layout(
        environment(gpu=["p5.48xlarge"], cpu=["g5"]), offers("p5.48xlarge", "g5"), stack,
        builds_image=False,
    )  # fmt: skip
    assert more.zones == (D, A, B, C, F)
    assert more.ranges == tuple(f"10.42.{32 * place}.0/19" for place in range(5))
    assert plan_layout(
        environment(cpu=["m5.large"]), Offers(why="denied"), stack, builds_image=False
    ) == new  # fmt: skip


# --- the plan -----------------------------------------------------------------------------------


def blueprint(spec: SetupSpec, current: CurrentState) -> dict[str, str]:
    (found,) = [each for each in wanted_state(spec, current).stacks if each.name == NETWORK]
    return found.parameters


def spec(made: Environment, found: Offers | None) -> SetupSpec:
    return SetupSpec("dev", made, TEMPLATES, lambda _: {}, offers=found)


def test_an_environment_of_the_first_template_gets_subnets_and_replaces_none() -> None:
    """Its compute environments change in place: AWS Batch adds subnets to them."""
    current = CurrentState(stacks={NETWORK: old_stack(2)})
    own = spec(environment(gpu=["g5"], big=["p5.48xlarge"]), offers("g5", "p5.48xlarge"))
    wanted = wanted_state(own, current)
    assert blueprint(own, current)["Zones"] == f"{A},{B},{D},{C},{F}"
    gpu = wanted.environments["batchml-dev-gpu"]["computeResources"]["subnets"]
    assert gpu[:2] == ["subnet-1", "subnet-2"] and len(gpu) == 5 and not is_known(gpu)
    assert len(wanted.environments["batchml-dev-big"]["computeResources"]["subnets"]) == 1
    # With the limit that its file may name, nothing of it changes but the parameters' names.
    same = spec(environment({"zones": 2}, gpu=["g5"]), offers("g5"))
    asked = wanted_state(same, current)
    assert asked.environments["batchml-dev-gpu"]["computeResources"]["subnets"] == gpu[:2]
    found = {**asked.environments["batchml-dev-gpu"], "status": "VALID"}
    now = replace(current, environments={"batchml-dev-gpu": found})
    more = wanted_state(own, now)
    (step,) = [each for each in make_plan(more, now) if each.name == "batchml-dev-gpu" and
               each.kind == "compute environment"]  # fmt: skip
    assert step.action is Action.UPDATE and step.reasons[0].startswith("subnets: [subnet-1")


def test_a_plan_that_would_replace_a_subnet_under_hosts_is_refused() -> None:
    change = StackChange("Modify", "PrivateSubnet1", "AWS::EC2::Subnet", "True", ("CidrBlock",))
    current = CurrentState(change_sets={NETWORK: ChangeSet("c", "CREATE_COMPLETE", "", (change,))})
    assert refusals(WantedState(), [], current) == []
    used = replace(current, environments={"batchml-dev-gpu": {}})
    (said,) = refusals(WantedState(), [], used)
    assert "PrivateSubnet1" in said and "teardown" in said


def test_without_aws_the_zones_are_placeholders_that_no_step_sends() -> None:
    parameters = blueprint(spec(environment(gpu=["g5"]), None), CurrentState())
    assert not is_known(parameters) and parameters["PublicRange"] == "10.42.224.0/19"


def test_a_compute_environment_keeps_its_subnets_where_the_offers_are_not_known() -> None:
    """One person may ask, and another not: their plans do not undo each other."""
    stack = replace(old_stack(2))
    there = {"batchml-dev-gpu": {"computeResources": {"subnets": ["subnet-2"]}}}
    current = CurrentState(stacks={NETWORK: stack}, environments=there)
    wanted = wanted_state(spec(environment(gpu=["g5"]), Offers(why="denied")), current)
    assert wanted.environments["batchml-dev-gpu"]["computeResources"]["subnets"] == ["subnet-2"]


def test_a_command_uses_the_subnets_that_are_there_or_is_refused() -> None:
    current = CurrentState(stacks={NETWORK: old_stack(2)})
    wanted = wanted_by_command(spec(environment(new=["g5"]), offers("g5")), current)
    subnets = wanted.environments["batchml-dev-new"]["computeResources"]["subnets"]
    assert subnets == ["subnet-1", "subnet-2"] and wanted.mistakes == ()
    (said,) = wanted_by_command(
        spec(environment(new=["p5.48xlarge"]), offers("p5.48xlarge")), current
    ).mistakes
    assert f"offered in {D}" in said and f"subnets in {A}, {B}" in said and "batchml setup" in said


# --- mistakes -----------------------------------------------------------------------------------


def mistakes(made: Environment, found: Offers, zones: tuple[str, ...] = ALL) -> list[str]:
    return list(zone_mistakes(made, found, zones, builds_image=False))


def test_a_type_that_no_zone_offers_is_refused_with_those_that_are_there() -> None:
    there = ("g5.xlarge", "g6.xlarge", "p5.48xlarge", "m5.large", "m6i.xlarge", "c5.large")
    found = replace(offers("g6e.xlarge", "m9", "optimal", "g5"), others=there)
    made = environment(gpu=["g6e.xlarge", "g5"], cpu=["m9", "optimal"])
    assert mistakes(made, found) == [
        "compute.gpu.instance_types: no zone of us-east-1 offers g6e.xlarge. Did you mean "
        "'g6.xlarge'? Families with GPUs there: g5, g6, p5.",
        "compute.cpu.instance_types: no zone of us-east-1 offers m9. Families that begin with m "
        "there: m5, m6i.",
    ]
    wanted = wanted_state(spec(made, found), CurrentState())
    assert refusals(wanted, [], CurrentState()) == mistakes(made, found)


def test_of_many_families_the_nearest_with_the_same_processor_are_named() -> None:
    near = ["m5", "m5a", "m5ad", "m5d", "m5dn", "m6a", "m6i", "m6id", "m7a", "m7i-flex"]
    near += ["m8a", "m8i"]
    there = tuple(f"{name}.large" for name in ["m1", "m2", "m4", *near, "m6g", "m7g", "mac2"])
    (said,) = mistakes(environment(cpu=["m7i"]), replace(offers("m7i"), others=there))
    assert said.endswith(f"Families that begin with m there: {', '.join(near)}.")


def test_a_limit_that_leaves_a_compute_environment_without_a_zone_is_told() -> None:
    made = environment({"zones": 1}, gpu=["p5.48xlarge"], far=["g6"])
    found = make_offers("us-east-1", ["p5.48xlarge", "g6"], [("p5.48xlarge", D), ("g6.xlarge", E)])
    (said,) = wanted_state(spec(made, found), CurrentState()).mistakes
    assert "Raise network.zones, which is 1" in said and f"offered in {E}" in said


def test_zones_of_which_nothing_is_known_are_refused_and_not_guessed() -> None:
    found = Offers(why="AWS denies ec2:DescribeInstanceTypeOfferings.")
    (said,) = wanted_state(spec(environment(gpu=["g5"]), found), CurrentState()).mistakes
    assert "Allow ec2:DescribeInstanceTypeOfferings" in said
    there = CurrentState(stacks={NETWORK: old_stack(2)})
    assert wanted_state(spec(environment(gpu=["g5"]), found), there).mistakes == ()


# --- the conversation with EC2 --------------------------------------------------------------------


def asked(world: World, *names: str) -> Offers:
    world.account.calls.clear()
    return fetch_offers(world.account, "us-east-1", names)  # type: ignore[arg-type]


def test_one_call_tells_what_all_zones_offer_and_a_second_one_what_else_there_is(
    world: World,
) -> None:
    world.account.offered = {"g5.xlarge": (A, "us-east-1-bos-1a"), "m6i.xlarge": (A, B)}
    found = asked(world, "g5", "m6i.xlarge")
    assert world.account.calls == ["DescribeInstanceTypeOfferings"]
    assert found.zones_of(["g5"]) == {A} and found.zones == (A, B) and found.others == ()
    wrong = asked(world, "p9")
    assert world.account.calls == ["DescribeInstanceTypeOfferings"] * 2
    assert wrong.missing(["p9"]) == ("p9",) and wrong.others == ("g5.xlarge", "m6i.xlarge")


def test_more_types_than_one_filter_takes_are_asked_in_several_calls(world: World) -> None:
    found = asked(world, *(f"g5.size{number}" for number in range(450)), "g5.xlarge")
    assert found.zones_of(["g5.xlarge"]) == {A, B}
    assert world.account.calls == ["DescribeInstanceTypeOfferings"] * 4, "three, and all types"


def test_without_the_permission_the_names_of_the_zones_are_asked(world: World) -> None:
    denied = ("UnauthorizedOperation", "You are not authorized to perform this operation.")
    world.account.refusals["DescribeInstanceTypeOfferings"] = [denied, denied]
    found = asked(world, "g5")
    assert found.zones == (A, B) and not found.is_known and "authorized" in found.why
    world.account.refusals["DescribeAvailabilityZones"] = [denied]
    assert asked(world, "g5").zones == ()


def test_a_network_grows_by_zones_in_place_and_settles(ready: World) -> None:
    ready.account.offered["g5.xlarge"] = ALL[:4]
    steps = {step.name: step for step in ready.plan()}
    assert steps[NETWORK].action is Action.UPDATE
    ready.setup()
    assert ready.plan() == []
    resources, *_ = ready.account.snapshot()["environments"]["batchml-dev-gpu"]
    assert len(resources["subnets"]) == 4
    storage = ready.account.stack("batchml-dev-storage")
    assert storage is not None
    assert storage.content["parameters"]["SubnetIds"].split(",") == resources["subnets"]
