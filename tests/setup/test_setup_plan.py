"""setup and teardown against an AWS account in this process: what fails, what is interrupted."""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import boto3
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from moto import mock_aws

from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.cloudformation import Stacks
from batchml.aws.ec2 import LaunchApi
from batchml.aws.leftovers import PolicyApi
from batchml.aws.s3 import empty_bucket
from batchml.config.environments import read_environments
from batchml.errors import (
    AccessError,
    BatchmlError,
    NotConverging,
    ServiceError,
    ServiceUnreachable,
    SetupFailed,
    WouldLoseData,
)
from batchml.model.environment import Environment
from batchml.resources import shipped_folder
from batchml.setup import apply
from batchml.setup.desired import (
    STACKS,
    SetupSpec,
    state_after_teardown,
    wanted_state,
    with_deletable_files,
)
from batchml.setup.plan import make_plan
from batchml.setup.sharing import CurrentState, PlanStep, WantedState
from batchml.setup.tools import SetupTools
from tests.support.aws_world import Account, Interrupted, Trouble, parsed, reduced
from tests.support.fakes import FakeClock
from tests.support.generate import TORTURE

Point = TypeVar("Point")

DEFINITION = {
    "jobDefinitionName": "lenet-0123456789abcdef",
    "type": "container",
    "containerProperties": {
        "image": "i", "command": ["true"],
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"},
        ],
    },
}  # fmt: skip

SMALL: dict[str, Any] = {
    "region": "us-east-1",
    "ami": "build",
    "compute": {
        "gpu": {"instance_types": ["g5.xlarge"], "max_vcpus": 64, "placement_group": "cluster"},
    },
    "queues": {
        "default": {"priority": 10, "compute": ["gpu"]},
        "urgent": {"priority": 100, "compute": ["gpu"], "fair_share": {"shares": {"a": 2}}},
    },
}
# Against SMALL, something of every kind is made, changed, replaced or deleted.
CHANGED: dict[str, Any] = {
    "region": "us-east-1",
    "ami": "ecs-gpu",
    "network": {"egress": "endpoints"},
    "logs": {"retention_days": 30},
    "compute": {
        "gpu": {"instance_types": ["g5.xlarge"], "max_vcpus": 128, "disk": "200 GiB"},
        "spot": {"instance_types": ["g6"], "spot": True, "max_vcpus": 32},
    },
    "queues": {
        "default": {"priority": 20, "compute": ["spot", "gpu"], "fair_share": {}},
        "late": {"priority": 1, "compute": ["spot"]},
    },
}


def environment(table: Mapping[str, Any]) -> Environment:
    _, found = read_environments({"env": {"dev": table}}, "batchml.toml")
    return found["dev"]


class World:
    """An account, and the commands that are given to it."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.account = Account(folder, self.clock)
        self.account.event_every = 0.5
        self.table: Mapping[str, Any] = SMALL
        self.templates = {
            short: reduced((shipped_folder("cfn") / f"{short}.yaml").read_text())
            for short in STACKS
        }
        self.stuck_at = ""
        self.nothing = self.account.save()

    @property
    def spec(self) -> SetupSpec:
        made = environment(self.table)
        names = [each for one in made.compute.values() for each in one.instance_types]
        return SetupSpec(
            "dev", made, self.templates, lambda _: {"lenet-0123456789abcdef": DEFINITION},
            offers=self.account.offers(names),
        )  # fmt: skip

    def tools(self, **more: Any) -> SetupTools:
        account = self.account
        given: dict[str, Any] = {
            "stacks": Stacks(account),  # type: ignore[arg-type]
            "compute": ComputeApi(account),  # type: ignore[arg-type]
            "batch": JobApi(account),  # type: ignore[arg-type]
            "clock": self.clock,
            "launch": LaunchApi(account),  # type: ignore[arg-type]
            "policies": PolicyApi(account),  # type: ignore[arg-type]
            "empty_bucket": lambda bucket: account.objects.pop(bucket, None) and None,
        }
        return SetupTools(**given | more)

    def plan(self, planner: Callable[[CurrentState], WantedState] | None = None) -> list[PlanStep]:
        """What `--plan` shows: only what would change."""
        tools, planner = self.tools(), planner or self.wanted
        current = apply.read_state_for_plan(self.spec, tools, planner)
        apply.discard_change_sets(current, tools)
        return [step for step in make_plan(planner(current), current) if step.changes]

    def run(
        self, planner: Callable[[CurrentState], WantedState], *, agrees: bool = True, **more: Any
    ) -> list[str]:
        """What the command does that `--yes` is given to; its words."""
        tools = self.tools(**more)
        current = apply.read_state_for_plan(self.spec, tools, planner)
        agreed = {step for step in make_plan(planner(current), current) if step.changes and agrees}
        said = []
        for progress in apply.apply_plan(planner, current, tools, agreed):
            step = progress.step
            said.append(f"{step.action} {step.kind} {step.name}: {progress.text or 'done'}")
        return said

    def wanted(self, current: CurrentState) -> WantedState:
        return wanted_state(self.spec, current)

    def setup(self, **more: Any) -> list[str]:
        return self.run(self.wanted, **more)

    def teardown(self) -> list[str]:
        return self.run(lambda current: state_after_teardown(self.spec, current, delete_data=False))

    def teardown_with_files(self) -> list[str]:
        return self.run(
            lambda current: state_after_teardown(
                self.spec, current, delete_data=False, delete_files=True
            )
        )

    def teardown_with_data(self) -> list[str]:
        return self.run(lambda current: state_after_teardown(self.spec, current, delete_data=True))

    def status(self, short: str) -> str:
        found = self.account.stack(f"batchml-dev-{short}")
        return found.status if found else "none"

    def first_resource(self, short: str, place: int = 0) -> str:
        return str(list(parsed(self.templates[short])["Resources"])[place])


@pytest.fixture(scope="module")
def only_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("account"))
    yield made
    made.account.close()


@pytest.fixture
def world(only_world: World, new: dict[str, Any]) -> World:
    """An account with nothing in it: the same one, set back, as clients take long to make."""
    only_world.account.restore(new)
    only_world.account.after_call = lambda operation: None
    only_world.account.interrupt_at = None
    only_world.account.event_every = 0.5
    only_world.table = SMALL
    return only_world


@pytest.fixture(scope="module")
def new(only_world: World) -> dict[str, Any]:
    return only_world.nothing


@pytest.fixture(scope="module")
def made(only_world: World, new: dict[str, Any]) -> dict[str, Any]:
    """The account after a setup of SMALL."""
    only_world.account.restore(new)
    only_world.table = SMALL
    only_world.setup()
    return only_world.account.save()


@pytest.fixture
def ready(world: World, made: dict[str, Any]) -> World:
    """An environment that is set up."""
    world.account.restore(made)
    return world


# --- interruption -----------------------------------------------------------------------------


def moments(world: World, command: Callable[[], Any]) -> list[tuple[str, dict[str, Any]]]:
    """Carry out a command; what AWS held at each moment of it that differs from the one before.

    A command remembers nothing outside of AWS, so one that is killed at any moment leaves one of
    these.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    last: list[Any] = [None]

    def look(operation: str) -> None:
        now = world.account.mark()
        if now != last[0]:
            last[0] = now
            found.append((f"{len(found)} {operation}", world.account.save()))

    world.account.after_call = look
    command()
    world.account.after_call = lambda operation: None
    return found


def kill_points(points: Sequence[Point], seed: str) -> Sequence[Point]:
    """One point in four, chosen by `seed`, in their order; all if BATCHML_TORTURE is above 1."""
    if TORTURE > 1:
        return points
    chosen = random.Random(seed).sample(range(len(points)), -(-len(points) // 4))
    return [points[index] for index in sorted(chosen)]


STORAGE = "batchml-dev-storage"
NETWORK = "batchml-dev-network"
LOSING: dict[str, Any] = {**SMALL, "storage": {"workspace": "none"}}
REMOVED = [{
    "Action": "Remove", "LogicalResourceId": "Efs", "ResourceType": "AWS::EFS::FileSystem",
    "Details": [],
}]  # fmt: skip


def lose_data(world: World) -> None:
    """An update that takes the file system out of its stack, as `--allow-loss` allows."""
    if world.status("storage") == "CREATE_COMPLETE":
        world.account.replacements[STORAGE] = REMOVED
    world.setup(replacing=frozenset({STORAGE}))


COMMANDS: dict[str, tuple[Mapping[str, Any], Callable[[World], Any]]] = {
    "setup": (SMALL, World.setup),
    "update": (CHANGED, World.setup),
    "update --allow-loss": (LOSING, lose_data),
    "teardown": (SMALL, World.teardown),
    "teardown --delete-file-system": (SMALL, World.teardown_with_files),
    "teardown --delete-data": (SMALL, World.teardown_with_data),
}


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_was_killed_at_any_moment_goes_on_when_it_is_typed_again(
    world: World, new: dict[str, Any], made: dict[str, Any], name: str
) -> None:
    table, command = COMMANDS[name]
    world.account.restore(new if name == "setup" else made)
    world.table = table
    before = moments(world, lambda: command(world))
    end = world.account.snapshot()
    assert end["change sets"] == []
    assert len(before) > 8, "so many moments differ"
    for moment, saved in kill_points(before, name):
        world.account.restore(saved)
        command(world)
        assert world.account.snapshot() == end, moment


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_command_leaves_the_account_as_its_calls_did(
    world: World, new: dict[str, Any], when: str
) -> None:
    """The walk above restores what AWS held; here the command itself is cut off."""
    world.setup()
    end, calls = world.account.snapshot(), len(world.account.calls)
    for place in kill_points(range(1, calls, 13), when):
        world.account.restore(new)
        world.account.interrupt_at = (place, when)
        with pytest.raises(Interrupted):
            world.setup()
        world.account.interrupt_at = None
        world.setup()
        assert world.account.snapshot() == end, f"{when} call {place}"


def test_setting_up_twice_changes_nothing_the_second_time(ready: World) -> None:
    before = ready.account.snapshot()
    assert ready.plan() == []
    assert ready.setup() == []
    assert ready.account.snapshot() == before


def test_a_plan_of_a_finished_environment_takes_few_calls_that_only_read(ready: World) -> None:
    ready.account.calls.clear()
    assert ready.plan() == []
    calls = ready.account.calls
    assert len(calls) <= 20
    assert {call for call in calls if not call.startswith(("Describe", "List", "Get"))} == set()


def test_a_plan_leaves_no_change_set(ready: World) -> None:
    ready.table = CHANGED
    assert {step.name for step in ready.plan() if step.kind == "stack"} >= {NETWORK}
    assert "CreateChangeSet" in ready.account.calls
    assert ready.account.change_sets == {}


# --- stacks that fail -------------------------------------------------------------------------


def fails(world: World, command: Callable[[], Any]) -> str:
    with pytest.raises(SetupFailed) as error:
        command()
    return str(error.value)


def trouble(world: World, short: str, reason: str, on: str = "CREATE", more: str = "") -> str:
    """Let the next operation of a stack fail at its second resource, whose name this is."""
    name = world.first_resource(short, 1)
    stack = f"batchml-dev-{short}"
    world.account.troubles[stack] = [Trouble(name, reason, on, more)]
    return name


def test_a_stack_that_cannot_be_made_tells_its_first_cause_and_the_fix(world: World) -> None:
    reason = "The maximum number of addresses has been reached. (AddressLimitExceeded)"
    name = trouble(world, "network", reason)
    said = fails(world, world.setup)
    assert said.startswith(f"stack {NETWORK}: ROLLBACK_COMPLETE. First cause: {name} (AWS::")
    assert reason in said and "release one" in said
    assert "cancelled" not in said
    assert world.status("roles") == "none", "nothing was done after the failure"


def test_after_a_failed_creation_the_stack_is_made_anew(world: World, made: dict[str, Any]) -> None:
    name = trouble(world, "roles", "no such thing")
    fails(world, world.setup)
    (step,) = [step for step in world.plan() if step.name == "batchml-dev-roles"]
    assert step.action == "replace"
    assert name in step.reasons[0] and "no such thing" in step.reasons[0]
    world.setup()
    end = world.account.snapshot()
    world.account.restore(made)
    assert end == world.account.snapshot()


def test_a_creation_whose_rollback_failed_is_made_anew(world: World) -> None:
    trouble(world, "network", "no such thing", more="it is in use")
    fails(world, world.setup)
    assert world.status("network") == "ROLLBACK_FAILED"
    world.setup()
    assert world.status("network") == "CREATE_COMPLETE"
    assert world.plan() == []


def test_a_stack_that_was_begun_and_is_empty_is_made_anew(world: World) -> None:
    from tests.support.aws_world import FakeStack

    params = {"StackName": NETWORK, "TemplateBody": "Resources: {}", "Parameters": [], "Tags": []}
    world.account.stacks.append(FakeStack(world.account, params, 0))
    assert world.status("network") == "REVIEW_IN_PROGRESS"
    assert [step.how for step in world.plan() if step.name == NETWORK] == ["recreate"]
    world.setup()
    assert world.status("network") == "CREATE_COMPLETE"


def test_a_deletion_that_fails_is_told_and_tried_again(ready: World) -> None:
    name = trouble(ready, "roles", "resource sg-1 has a dependent object", "DELETE")
    said = fails(ready, ready.teardown)
    assert f"DELETE_FAILED. First cause: {name}" in said and "dependent object" in said
    ready.teardown()
    assert ready.status("roles") == "none"


def test_a_deletion_that_failed_is_made_anew_by_setup(ready: World) -> None:
    end = ready.account.snapshot()
    trouble(ready, "roles", "in use", "DELETE")
    fails(ready, ready.teardown)
    ready.setup()
    assert names(ready) == [stack[0] for stack in end["stacks"]]
    assert ready.plan() == []


def names(world: World) -> list[str]:
    return [stack[0] for stack in world.account.snapshot()["stacks"]]


def test_an_update_that_fails_is_rolled_back_told_and_tried_again(ready: World) -> None:
    ready.table = CHANGED
    name = trouble(ready, "network", "The zone is full", "UPDATE")
    said = fails(ready, ready.setup)
    assert f"UPDATE_ROLLBACK_COMPLETE. First cause: {name}" in said and "The zone is full" in said
    assert ready.status("network") == "UPDATE_ROLLBACK_COMPLETE"
    ready.setup()
    assert ready.status("network") == "UPDATE_COMPLETE"
    assert ready.plan() == []


@pytest.fixture
def stuck(ready: World) -> World:
    """An update has failed, and so has its rollback."""
    ready.table = CHANGED
    ready.stuck_at = trouble(ready, "network", "no", "UPDATE", "the endpoint is in use")
    fails(ready, ready.setup)
    assert ready.status("network") == "UPDATE_ROLLBACK_FAILED"
    return ready


def test_a_rollback_that_is_stuck_names_what_it_is_stuck_at_and_both_ways_out(stuck: World) -> None:
    (step,) = [step for step in stuck.plan() if step.name == NETWORK]
    assert (step.action, step.how) == ("update", "continue-rollback")
    said = fails(stuck, stuck.setup)
    assert f"stuck at {stuck.stuck_at}: the endpoint is in use" in said
    assert f"--continue-rollback --skip-resource {stuck.stuck_at}" in said


def test_a_rollback_goes_on_once_its_cause_is_mended(stuck: World) -> None:
    said = fails(stuck, lambda: stuck.setup(continue_rollback=()))
    assert "UPDATE_ROLLBACK_FAILED" in said and "the endpoint is in use" in said
    stuck.account.stuck.clear()
    stuck.setup(continue_rollback=())
    assert stuck.status("network") == "UPDATE_COMPLETE"
    assert stuck.plan() == []


def test_a_rollback_goes_on_without_a_resource_that_is_skipped(stuck: World) -> None:
    stuck.setup(continue_rollback=(stuck.stuck_at,))
    assert stuck.status("network") == "UPDATE_COMPLETE"
    assert stuck.plan() == []


def test_continuing_a_rollback_survives_every_interruption(stuck: World) -> None:
    saved = stuck.account.save()

    def command() -> None:
        stuck.setup(continue_rollback=(stuck.stuck_at,))

    before = moments(stuck, command)
    stuck.account.restore(saved)
    command()
    end = stuck.account.snapshot()
    # After the first 20 points, the command is an update like any other.
    for moment, saved in kill_points(before[:20], "rollback"):
        stuck.account.restore(saved)
        command()
        assert stuck.account.snapshot() == end, moment


def test_an_operation_that_somebody_else_began_is_waited_for(ready: World) -> None:
    stack = ready.account.stack(NETWORK)
    assert stack is not None
    ready.account.event_every = 20.0
    stack.run("UPDATE")
    (step,) = ready.plan()
    assert (step.name, step.how) == (NETWORK, "wait")
    said = ready.setup()
    assert said[-1] == f"update stack {NETWORK}: done"
    assert ready.plan() == []


def test_what_aws_says_of_a_template_or_a_parameter_is_told(world: World) -> None:
    world.templates = {**world.templates, "network": "Parameters: {}\nResources: {}\n"}
    try:
        with pytest.raises(ServiceError, match=r"EnvironmentName.*do not exist in the template"):
            world.setup()
    finally:
        world.templates["network"] = reduced((shipped_folder("cfn") / "network.yaml").read_text())


def test_a_change_set_that_aws_refuses_is_told_and_thrown_away(ready: World) -> None:
    ready.table = CHANGED
    ready.account.refused_changes[NETWORK] = "Template error: unresolved Quota (LimitExceeded)"
    said = fails(ready, ready.plan)
    assert "AWS refuses: Template error" in said and "Service Quotas" in said
    assert ready.account.change_sets == {}


def test_what_is_no_change_to_aws_is_none_to_the_plan(ready: World) -> None:
    texts = dict(ready.templates)
    ready.templates["roles"] = texts["roles"] + "# a comment\n"
    try:
        assert ready.plan() == []
        assert "CreateChangeSet" in ready.account.calls
    finally:
        ready.templates = texts


def test_what_turns_out_to_be_no_change_while_it_is_made_ends_well(ready: World) -> None:
    """The network is made anew, so nothing could be asked about the storage before."""
    texts = dict(ready.templates)
    ready.templates["storage"] = texts["storage"] + "# a comment\n"
    try:
        current = apply.read_state(ready.spec, ready.tools())  # without asking AWS
        said = list(apply.apply_plan(ready.wanted, current, ready.tools(), set()))
        assert STORAGE in {progress.step.name for progress in said}
    finally:
        ready.templates = texts


def test_what_aws_said_of_an_update_counts_only_while_the_update_is_the_same(ready: World) -> None:
    """The network's update gives other subnets, after AWS was asked about the storage's."""
    ready.table = {**CHANGED, "storage": {"workspace": "none"}}
    subnets = "subnet-0bbbbbbbbbbbbbbb1,subnet-0bbbbbbbbbbbbbbb2"

    def renumber(operation: str) -> None:
        if operation == "ExecuteChangeSet":
            ready.account.outputs["network.SubnetIds"] = subnets

    ready.account.after_call = renumber
    ready.account.calls.clear()
    ready.setup()
    storage = ready.account.stack(STORAGE)
    assert storage is not None and storage.content["parameters"]["SubnetIds"] == subnets
    updates = [s for s in ready.account.stacks if s.updated is not None]
    assert ready.account.calls.count("ExecuteChangeSet") == len(updates), "one each"
    assert ready.plan() == []


def test_what_was_changed_by_hand_is_shown_where_an_update_meets_it(ready: World) -> None:
    ready.table = CHANGED
    ready.account.drifted[NETWORK] = [{
        "LogicalResourceId": "Nat", "ResourceType": "AWS::EC2::NatGateway",
        "StackResourceDriftStatus": "MODIFIED",
        "PropertyDifferences": [{
            "PropertyPath": "/Tags", "ExpectedValue": "1", "ActualValue": "2",
            "DifferenceType": "NOT_EQUAL",
        }],
    }]  # fmt: skip
    (step,) = [step for step in ready.plan() if step.name == NETWORK]
    assert "Nat was changed by hand (/Tags)" in step.reasons


# --- data -------------------------------------------------------------------------------------


def test_an_update_that_would_lose_data_is_not_made_unless_it_was_agreed_to(ready: World) -> None:
    ready.table = LOSING
    ready.account.replacements[STORAGE] = REMOVED
    before = ready.account.snapshot()
    (step,) = [step for step in ready.plan() if step.name == STORAGE]
    assert step.loses == "Efs (AWS::EFS::FileSystem)"
    with pytest.raises(WouldLoseData, match=f"--allow-loss {STORAGE}"):
        ready.setup(agrees=False)
    assert ready.account.snapshot()["stacks"] == before["stacks"]


def test_the_stack_policy_stands_against_an_update_that_was_not_foreseen(ready: World) -> None:
    ready.table = LOSING
    ready.account.replacements[STORAGE] = REMOVED
    said = fails(ready, ready.setup)  # agreed to, and not `replacing`
    assert "Action denied by stack policy" in said and "--allow-loss" in said


def test_after_a_loss_that_was_allowed_the_stack_is_guarded_again(ready: World) -> None:
    ready.table = LOSING
    lose_data(ready)
    stack = ready.account.stack(STORAGE)
    assert stack is not None and stack.protected and "Deny" in stack.policy


def test_a_teardown_leaves_the_data_and_setup_finds_it_again(ready: World) -> None:
    end, objects = ready.account.snapshot(), dict(ready.account.objects)
    ready.teardown()
    assert names(ready) == [NETWORK, "batchml-dev-observability", STORAGE]
    assert ready.account.objects == objects and objects
    assert ready.account.retained == []
    network = ready.account.stack(NETWORK)
    assert network is not None and network.content["parameters"]["Egress"] == "none"
    assert (
        ready.run(lambda current: state_after_teardown(ready.spec, current, delete_data=False))
        == []
    )
    ready.setup()
    assert ready.account.snapshot()["environments"] == end["environments"]
    assert ready.plan() == []


def test_a_file_system_that_is_archived_goes_alone_and_setup_makes_a_new_one(ready: World) -> None:
    objects = dict(ready.account.objects)
    ready.teardown_with_files()
    assert names(ready) == ["batchml-dev-observability", STORAGE]
    assert ready.account.objects == objects and ready.account.retained == []
    storage = ready.account.stack(STORAGE)
    assert storage is not None and storage.protected and "Deny" in storage.policy
    assert storage.content["parameters"]["Workspace"] == "none"
    # The bucket and its key would stay, whatever becomes of the stack; the file system did not.
    policies = {
        name: body.get("DeletionPolicy")
        for name, body in parsed(storage.content["template"])["Resources"].items()
    }
    assert (policies["Efs"], policies["Bucket"]) == ("Delete", "RetainExceptOnCreate")
    assert policies["Key"] == "RetainExceptOnCreate"
    ready.setup()
    storage = ready.account.stack(STORAGE)
    assert storage is not None and storage.content["parameters"]["Workspace"] == "efs"
    assert "batchml:data" not in storage.content["tags"]
    assert ready.plan() == [] and ready.account.objects == objects


def test_only_a_file_system_is_let_go_of_in_the_template_that_ships() -> None:
    from batchml.aws.cloudformation import Stack

    text = (shipped_folder("cfn") / "storage.yaml").read_text()
    doomed = with_deletable_files(Stack("id", "s", "CREATE_COMPLETE", template=text)).template
    before, after = parsed(text)["Resources"], parsed(doomed)["Resources"]
    gone = {name for name, body in after.items() if body != before[name]}
    assert gone == {"Efs", "EfsAccess", "Lustre", "LustreGroup", "LustreLink"}
    assert {after[name]["DeletionPolicy"] for name in gone} == {"Delete"}
    assert {name for name, body in after.items() if "DeletionPolicy" in body} - gone == {
        "Key", "Bucket", "BucketPolicy", "AccessLogs", "AccessLogsPolicy",
    }  # fmt: skip


def test_a_teardown_with_its_data_leaves_nothing_at_all(ready: World) -> None:
    definitions = ready.account.snapshot()["definitions"]
    ready.teardown_with_data()
    left = {key: value for key, value in ready.account.snapshot().items() if value}
    assert left == {"definitions": definitions}
    ready.setup()
    assert ready.plan() == []


def test_the_data_of_a_stack_whose_rollback_is_stuck_goes_once_that_is_undone(ready: World) -> None:
    ready.table = LOSING
    trouble(ready, "storage", "no", "UPDATE", "it is mounted")
    fails(ready, ready.setup)
    said = fails(ready, ready.teardown_with_data)
    assert "--continue-rollback" in said
    ready.account.stuck.clear()
    ready.run(
        lambda current: state_after_teardown(ready.spec, current, delete_data=True),
        continue_rollback=(),
    )
    assert names(ready) == [] and ready.account.retained == []


@pytest.mark.parametrize("more", ["", "it is in use"])
def test_a_stack_with_data_that_could_not_be_made_goes_without_more_ado(
    world: World, more: str
) -> None:
    trouble(world, "storage", "no such thing", more=more)
    fails(world, world.setup)
    world.teardown_with_data()
    assert names(world) == []


def test_data_that_came_while_it_was_deleted_is_deleted_the_next_time(ready: World) -> None:
    bucket = next(iter(ready.account.objects))
    said = fails(ready, lambda: ready.run(
        lambda current: state_after_teardown(ready.spec, current, delete_data=True),
        empty_bucket=lambda bucket: None,  # a job goes on writing
    ))  # fmt: skip
    assert "BucketNotEmpty" in said and "--delete-data empties it" in said
    assert ready.account.objects[bucket] and ready.status("storage") == "DELETE_FAILED"
    ready.teardown_with_data()
    assert names(ready) == [] and ready.account.retained == []


# --- AWS Batch --------------------------------------------------------------------------------

GPU = "batchml-dev-gpu"


def test_a_compute_environment_that_aws_finds_invalid_is_told_with_the_way_out(
    world: World,
) -> None:
    reason = "CLIENT_ERROR - The instance profile batchml-dev does not exist"
    world.account.invalid[GPU] = reason
    world.account.stay_invalid.add(GPU)
    said = fails(world, world.setup)
    assert f"compute environment {GPU}: AWS made it INVALID: {reason}" in said
    assert "batchml setup creates the roles again" in said
    assert world.account.snapshot()["queues"] == {}
    assert reason in fails(world, world.setup)
    world.account.stay_invalid.clear()
    world.setup()  # an update is what makes AWS look again
    assert world.plan() == []


def test_a_compute_environment_that_became_invalid_is_updated(ready: World) -> None:
    ready.account.invalid[GPU] = "CLIENT_ERROR - the launch template is gone"
    (step,) = ready.plan()
    assert step.action == "update" and "the launch template is gone" in step.reasons[0]
    ready.setup()
    assert ready.plan() == []


def test_one_with_best_fit_is_replaced_before_the_old_one_goes(ready: World) -> None:
    ready.table = with_gpu(allocation_strategy="BEST_FIT")
    ready.setup()
    ready.table = SMALL
    ready.setup()
    saved = ready.account.snapshot()
    generations = sorted(saved["environments"])
    assert len(generations) == 1 and generations[0].startswith(f"{GPU}-r")
    for queue in saved["queues"].values():
        (entry,) = queue["computeEnvironmentOrder"]
        assert entry["computeEnvironment"].endswith(generations[0])
    assert ready.plan() == []


def with_gpu(**changed: Any) -> dict[str, Any]:
    """SMALL with another compute environment gpu."""
    return {**SMALL, "compute": {"gpu": {**SMALL["compute"]["gpu"], **changed}}}


def test_replacing_survives_every_interruption(ready: World) -> None:
    ready.table = with_gpu(allocation_strategy="BEST_FIT")
    ready.setup()
    ready.table = SMALL
    before = moments(ready, ready.setup)
    end = ready.account.snapshot()
    for moment, saved in kill_points(before, "replace"):
        ready.account.restore(saved)
        ready.setup()
        assert ready.account.snapshot() == end, moment


def test_a_change_of_the_scaling_alone_replaces_no_instance(ready: World) -> None:
    ready.table = with_gpu(max_vcpus=128)
    (step,) = ready.plan()
    assert step.reasons == ("maxvCpus: 64 -> 128",)
    requests = sent(ready, "UpdateComputeEnvironment")
    assert [request["computeResources"] for request in requests] == [{"maxvCpus": 128}]


def test_efa_comes_and_goes_with_its_image_interfaces_and_group(world: World) -> None:
    world.templates["ami"] = (shipped_folder("cfn") / "ami.yaml").read_text()
    gpu = {"instance_types": ["g6.48xlarge"], "max_vcpus": 384}
    tables = {
        efa: {**SMALL, "compute": {"gpu": {**gpu, "efa": efa}}} for efa in (False, True)
    }  # fmt: skip
    world.table = tables[False]
    world.setup()
    before = world.account.snapshot()

    world.table = tables[True]
    changes = {(step.action.value, step.kind.value, step.name) for step in world.plan()}
    assert changes == {
        ("update", "stack", "batchml-dev-ami"),
        ("create", "placement group", "batchml-dev-gpu"),
        ("update", "launch template", "batchml-dev-gpu"),
        ("update", "compute environment", "batchml-dev-gpu"),
    }
    world.setup()
    assert world.plan() == []
    world.table = tables[False]
    world.setup()
    assert world.plan() == []
    assert without_generations(world.account.snapshot()) == without_generations(before)


def sent(world: World, operation: str) -> list[dict[str, Any]]:
    """The requests of an operation while setup runs."""
    found: list[dict[str, Any]] = []

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        if model.name == operation:
            found.append(dict(params))

    events = world.account.client("batch").meta.events
    events.register("before-parameter-build.batch.*", note, unique_id="note")
    try:
        world.setup()
    finally:
        events.unregister("before-parameter-build.batch.*", unique_id="note")
    return found


def test_names_that_begin_alike_are_not_taken_for_one_another(world: World) -> None:
    gpu = SMALL["compute"]["gpu"]
    world.table = {**SMALL, "compute": {"gpu": gpu, "gpu-research": {**gpu, "max_vcpus": 8}}}
    world.setup()
    limits = {
        name: resources["maxvCpus"]
        for name, (resources, _, _) in world.account.snapshot()["environments"].items()
    }
    assert limits == {GPU: 64, "batchml-dev-gpu-research": 8}


class Forgetful(ComputeApi):
    """AWS takes what it is told, and then has something else."""

    def queue(self, name: str) -> dict[str, Any] | None:
        found = super().queue(name)
        return {**found, "priority": 999} if found else None


def test_a_change_that_does_not_take_ends_instead_of_going_round(ready: World) -> None:
    ready.table = {**SMALL, "queues": {"default": {"priority": 11, "compute": ["gpu"]}}}
    compute = Forgetful(ready.account)  # type: ignore[arg-type]
    with pytest.raises(NotConverging, match="job queue batchml-dev-default"):
        ready.setup(compute=compute)


# --- refusals ---------------------------------------------------------------------------------


REFUSALS: list[tuple[str, type[BatchmlError]]] = [
    ("Throttling", ServiceUnreachable), ("AccessDenied", AccessError),
]  # fmt: skip


@pytest.mark.full
def test_whatever_call_is_refused_is_named_and_the_next_run_goes_on(
    ready: World, made: dict[str, Any]
) -> None:
    """Each call in one of two ways by turns; in both where they differ, and in torture."""
    ready.table = CHANGED
    ready.account.calls.clear()
    ready.setup()
    end, operations = ready.account.snapshot(), sorted(set(ready.account.calls))
    assert len(operations) > 15
    for number, operation in enumerate(operations):
        both = TORTURE > 1 or "Drift" in operation
        for code, error in REFUSALS if both else [REFUSALS[number % 2]]:
            ready.account.restore(made)
            ready.account.refusals[operation] = [(code, "You may not, or not so often")]
            if "Drift" in operation and code == "AccessDenied":
                ready.setup()  # it is only told
            else:
                with pytest.raises(error, match=operation):
                    ready.setup()
                ready.setup()
            assert not ready.account.refusals[operation]
            assert ready.account.snapshot() == end, operation


# --- any two configurations -------------------------------------------------------------------

COMPUTES = st.fixed_dictionaries(
    {
        "instance_types": st.sampled_from(
            [["g5"], ["g6.xlarge", "g5"], ["c7i"], ["g6.48xlarge", "g5.48xlarge"]]
        ),
        "max_vcpus": st.sampled_from([8, 64]),
    },
    optional={
        "allocation_strategy": st.just("BEST_FIT"),
        "ami": st.sampled_from(["ecs-gpu", "ami-0123456789abcdef0"]),
        "disk": st.just("200 GiB"),
        "placement_group": st.sampled_from(["cluster", "mine"]),
        "efa": st.just("auto"),
        "capacity_reservation": st.just("open"),
        "scale_down_delay": st.just("1h"),
        "min_vcpus": st.just(4),
        "tags": st.just({"team": "vision"}),
    },
)
SPOTS = st.fixed_dictionaries(
    {"instance_types": st.just(["g5", "g6"]), "max_vcpus": st.just(16), "spot": st.just(True)},
    optional={"bid_percentage": st.sampled_from([60, 80])},
)


@st.composite
def tables(draw: Any) -> dict[str, Any]:
    """An environment as batchml.toml may describe it."""
    names = st.sampled_from(["gpu", "gpu-r", "spot", "cpu"])
    compute = draw(st.dictionaries(names, COMPUTES | SPOTS, max_size=3))
    queue = st.fixed_dictionaries(
        {
            "priority": st.integers(0, 3),
            "compute": st.permutations(sorted(compute)).flatmap(
                lambda found: st.integers(1, max(1, len(found))).map(lambda n: found[:n])
            ),
        },
        optional={
            "fair_share": st.sampled_from([{}, {"shares": {"a": 2.0}}, {"reservation": 50}]),
            "time_limits": st.sampled_from([{}, {"no-capacity": "6h"}]),
        },
    )
    queues = draw(st.dictionaries(st.sampled_from(["default", "urgent"]), queue)) if compute else {}
    ami = draw(st.sampled_from(["build", "ecs-gpu"]))
    egress = st.just("nat" if ami == "build" else "endpoints")
    own = st.fixed_dictionaries({}, optional={"egress": egress, "zones": st.just(3)})
    given = {
        "vpc": "vpc-0aaaaaaaaaaaaaaa9", "subnets": ["subnet-0aaaaaaaaaaaaaaa9"],
        "security_groups": ["sg-0aaaaaaaaaaaaaaa9"],
    }  # fmt: skip
    return {
        "region": "us-east-1",
        "ami": ami,
        "gpu_access": "toolkit",
        "network": draw(own | st.just(given)),
        "storage": {"workspace": draw(st.sampled_from(["efs", "none"]))},
        "tags": draw(st.sampled_from([{}, {"team": "a"}])),
        "compute": compute,
        "queues": queues,
    }


def without_generations(snapshot: Mapping[str, Any]) -> Any:
    """What is there, whichever version or generation of it this is, and however it came about."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            # An old limit of the price means nothing to instances that are not spot's any more.
            unused = {"bidPercentage"} if value.get("type") == "EC2" else set()
            return {
                plain(key): plain(inner)
                for key, inner in value.items()
                if key not in HISTORY | unused
            }
        if isinstance(value, list | tuple):
            return [plain(inner) for inner in value]
        if isinstance(value, str):
            return re.sub(r"-r\d+$", "", value).replace("UPDATE_COMPLETE", "CREATE_COMPLETE")
        return value

    return plain({key: value for key, value in snapshot.items() if key != "retained"})


# `team` is a tag: of AWS Batch's resources those that are not described are let be.
HISTORY = {"version", "VersionNumber", "team"}


@pytest.mark.full
@settings(
    max_examples=10 if TORTURE == 1 else 25 * TORTURE,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(first=tables(), second=tables())
def test_any_configuration_after_any_other_is_as_if_there_had_been_none_before(
    world: World, first: dict[str, Any], second: dict[str, Any]
) -> None:
    world.account.restore(world.nothing)
    world.table = second
    world.setup()
    alone = without_generations(world.account.snapshot())
    world.account.restore(world.nothing)
    world.table = first
    world.setup()
    world.table = second
    world.setup()
    assert without_generations(world.account.snapshot()) == alone
    assert world.setup() == []
    world.teardown()
    left = world.account.snapshot()
    assert {key for key, value in left.items() if value} <= {
        "stacks", "definitions", "objects", "retained",
    }  # fmt: skip
    data = {STORAGE, "batchml-dev-observability"}
    assert data <= set(names(world)) <= data | {NETWORK}
    world.teardown_with_data()
    assert world.account.snapshot()["stacks"] == []


# --- buckets ----------------------------------------------------------------------------------


BUCKET = "batchml-dev"


class S3:
    """A session whose S3 is moto's."""

    def __init__(self) -> None:
        self.made = boto3.client(
            "s3", region_name="us-east-1", aws_access_key_id="A", aws_secret_access_key="S"
        )

    def client(self, service: str) -> Any:
        return self.made


def test_a_bucket_is_emptied_of_every_version_and_of_what_was_deleted_before() -> None:
    with mock_aws():
        session = S3()
        s3 = session.made
        s3.create_bucket(Bucket=BUCKET)
        s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        for key in ("a", "a", "b/c", "gone"):
            s3.put_object(Bucket=BUCKET, Key=key, Body=b"x")
        s3.delete_object(Bucket=BUCKET, Key="gone")
        with pytest.raises(Exception, match="BucketNotEmpty"):
            s3.delete_bucket(Bucket=BUCKET)
        assert empty_bucket(session, BUCKET) == 5  # type: ignore[arg-type]
        assert empty_bucket(session, BUCKET) == 0  # type: ignore[arg-type]
        s3.delete_bucket(Bucket=BUCKET)
        assert empty_bucket(session, BUCKET) == 0  # type: ignore[arg-type]


def test_an_object_that_s3_keeps_is_told() -> None:
    with mock_aws():
        session = S3()
        session.made.create_bucket(Bucket=BUCKET)
        session.made.put_object(Bucket=BUCKET, Key="locked", Body=b"x")

        def keep(parsed: dict[str, Any], **_: Any) -> None:
            parsed["Errors"] = [{"Key": "locked", "Code": "AccessDenied", "Message": "it is held"}]

        session.made.meta.events.register("after-call.s3.DeleteObjects", keep)
        with pytest.raises(ServiceError, match="locked: it is held"):
            empty_bucket(session, BUCKET)  # type: ignore[arg-type]
