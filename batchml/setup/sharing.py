"""The values of a plan (wanted state, current state, steps), and the sharing of a workspace.

Pure. Why sharing is as it is: docs/decisions/032-sharing.md
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from batchml.aws.cloudformation import Blueprint, ChangeSet, Drift, Stack
from batchml.aws.ec2 import LaunchTemplate
from batchml.aws.leftovers import Attachment
from batchml.aws.naming import UNKNOWN, stack_name

# --- values ---------------------------------------------------------------------------------------


TAG_ENV = "batchml:env"
TAG_SOURCE = "batchml:source"  # `setup`, or `command`: then setup does not delete the resource


class Action(StrEnum):
    """The effect of a step on its resource."""

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    KEEP = "keep"
    DELETE = "delete"


class ResourceKind(StrEnum):
    """The kinds of resources that setup makes."""

    STACK = "stack"
    PLACEMENT_GROUP = "placement group"
    LAUNCH_TEMPLATE = "launch template"
    POLICY = "scheduling policy"
    ENVIRONMENT = "compute environment"
    QUEUE = "job queue"
    DEFINITION = "job definition"


class PlanStep(Struct, frozen=True):
    """One resource and the action on it. `loses`: the data or runs that are lost by the action.

    `how`: the way to do it, if there are several. For a stack: wait, recreate, continue-rollback,
    with-data, without-files. For a compute environment: wait, drain. For a queue: wait.
    """

    action: Action
    kind: ResourceKind
    name: str
    reasons: tuple[str, ...] = ()
    loses: str = ""
    how: str = ""

    @property
    def changes(self) -> bool:
        return self.action is not Action.KEEP


class WantedState(Struct, frozen=True):
    """The resources that are to exist: name in AWS -> the request that creates it."""

    stacks: tuple[Blueprint, ...] = ()
    data_stacks: tuple[str, ...] = ()  # stacks that are not wanted, but whose data is
    deletes_data: bool = False  # delete the data stacks, too
    deletes_files: bool = False  # delete only the file system of the data stacks
    needed_by_others: dict[str, str] = {}  # stack to leave unchanged -> who needs it
    detaches: bool = False  # detach policies that people have from the stacks to delete
    stacks_last: bool = False  # change stacks after the resources that depend on them
    shared_with: str = ""  # the environment whose workspace and network this one uses
    mistakes: tuple[str, ...] = ()  # reasons for which AWS cannot make it, each as `key: text`
    why_unwanted: str = "it is not described any more"  # the reason of deletions, for users
    deletes_unwanted: bool = True  # delete resources that are not wanted; False: leave them alone
    groups: dict[str, dict[str, Any]] = {}  # placement groups
    templates: dict[str, dict[str, Any]] = {}  # launch templates
    policies: dict[str, dict[str, Any]] = {}  # scheduling policies
    environments: dict[str, dict[str, Any]] = {}  # compute environments
    queues: dict[str, dict[str, Any]] = {}
    definitions: dict[str, dict[str, Any]] = {}  # job definitions


class CurrentState(Struct, frozen=True):
    """The resources of an environment that exist, by name in AWS."""

    stacks: dict[str, Stack] = {}
    change_sets: dict[str, ChangeSet] = {}  # stack -> the changes that an update would make
    drifts: dict[str, tuple[Drift, ...]] = {}  # stack -> manual changes to its resources
    failure_causes: dict[str, str] = {}  # stack whose last operation failed -> the first cause
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, LaunchTemplate] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    foreign_users: dict[str, tuple[str, ...]] = {}  # compute environment -> others' queues
    unfinished_runs: dict[str, int] = {}  # queue -> unfinished runs in it, at least
    definitions: frozenset[str] = frozenset()
    attached: dict[str, tuple[Attachment, ...]] = {}  # stack to delete -> who has its policy
    owner_stacks: dict[str, Stack] = {}  # short name -> stack of the workspace's owner
    sharers: tuple[str, ...] = ()  # the environments that use this one's workspace


def is_known(request: Any) -> bool:
    """Whether a request has no placeholder for a value that another resource will have."""
    if isinstance(request, Mapping):
        return all(is_known(value) for value in request.values())
    if isinstance(request, list | tuple):
        return all(is_known(value) for value in request)
    return not (isinstance(request, str) and UNKNOWN in request)


# --- sharing --------------------------------------------------------------------------------------


SHARED_STACKS = ("network", "storage")
PARAMETER = "SharedWith"  # parameter of the stack `storage`: the environment that it shares with

# Outputs to take from the other environment's stacks. Its bucket and key are not shared.
_NEEDED = (
    "VpcId", "SubnetIds", "AvailabilityZones", "SecurityGroupId", "BuildSubnetId",
    "FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId",
)  # fmt: skip


def is_shared_stack(owner: str, stack: Stack) -> bool:
    """Whether a stack is one that the environment `owner` shares."""
    return bool(owner) and stack.name in {stack_name(owner, short) for short in SHARED_STACKS}


def is_sharer(env: str, stack: Stack) -> bool:
    """Whether a stack is the storage of an environment that uses the workspace of `env`."""
    return stack.parameters.get(PARAMETER) == env


def find_shared_stacks(
    env: str, owner: str, found: Mapping[str, Stack]
) -> tuple[dict[str, Stack], tuple[str, ...]]:
    """In the stacks of a region, find those shared with `env` and the users of its workspace.

    Returns short name -> stack, and the names of environments.
    """
    owner_stacks = {
        short: found[stack_name(owner, short)]
        for short in SHARED_STACKS
        if owner and stack_name(owner, short) in found
    }
    sharers = {
        stack.parameters.get("EnvironmentName", stack.name)
        for stack in found.values()
        if is_sharer(env, stack)
    }
    return owner_stacks, tuple(sorted(sharers))


def with_shared_outputs(outputs: Mapping[str, str], current: CurrentState) -> dict[str, str]:
    """The outputs of an environment's stacks, with the other's network and file system."""
    own = {key: value for key, value in outputs.items() if key not in _NEEDED}
    shared = {
        key: stack.outputs[key]
        for stack in current.owner_stacks.values()
        for key in _NEEDED
        if stack.outputs.get(key)
    }
    return {**own, **shared}


def sharing_refusals(
    wanted: WantedState, steps: Iterable[PlanStep], current: CurrentState
) -> Iterator[str]:
    """Reasons to refuse a plan because of a shared workspace."""
    if wanted.shared_with:
        yield from _check_owner(wanted.shared_with, current)
    if current.sharers:
        yield from _check_sharers(wanted, steps, current)


def _check_owner(owner: str, current: CurrentState) -> Iterator[str]:
    """The other environment must have a file system, and a network with egress."""
    storage, network = current.owner_stacks.get("storage"), current.owner_stacks.get("network")
    where, fix = "storage.shared_with", f"First: batchml setup --env {owner}"
    if storage is None:
        yield f"{where}: the environment {owner} does not exist. {fix}"
    elif not storage.outputs.get("FileSystemId"):
        yield f"{where}: the stack {storage.name} has no file system ({storage.status}). {fix}"
    elif network is not None and network.parameters.get("Egress") == "none":
        yield f"{where}: {owner} was torn down, and its network has no egress. {fix}"


def _check_sharers(
    wanted: WantedState, steps: Iterable[PlanStep], current: CurrentState
) -> Iterator[str]:
    """Refuse to remove a file system that other environments use.

    AWS would refuse it too: their stacks import the file system's id.
    """
    names = ", ".join(current.sharers)
    first = " and ".join(f"batchml teardown --env {name}" for name in current.sharers)
    for step in steps:
        if step.kind is not ResourceKind.STACK or not step.name.endswith("-storage"):
            continue
        is_removed = step.action is Action.DELETE or step.how == "without-files"
        if is_removed or _changes_file_system(step.name, wanted, current):
            yield (
                f"stack {step.name}: its file system is also the workspace of {names}, so it is "
                f"not removed. First: {first}"
            )


def _changes_file_system(name: str, wanted: WantedState, current: CurrentState) -> bool:
    stack = current.stacks.get(name)
    asked = next((each.parameters for each in wanted.stacks if each.name == name), None)
    if stack is None or asked is None:
        return False
    return stack.parameters.get("Workspace") != asked.get("Workspace")
