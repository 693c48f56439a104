"""Environments that share a workspace: the values that one takes from the other, and refusals.

Pure.

`docs/decisions/032-sharing.md`
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from batchml.aws.cloudformation import Blueprint, ChangeSet, Drift, Stack
from batchml.aws.ec2 import LaunchTemplate
from batchml.aws.naming import stack_name

# --- values ---------------------------------------------------------------------------------------
# The types of a plan: the wanted state, the current state, and a step for each resource.


# Begins a placeholder in a request for a value that another resource will have:
# "«network.SubnetIds»".
UNKNOWN = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}"
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
    """One resource and the action on it. `loses`: the data that the action deletes for good."""

    action: Action
    kind: ResourceKind
    name: str
    reasons: tuple[str, ...] = ()
    loses: str = ""
    how: str = ""  # for a stack: wait, recreate, ..., without-files; after a replacement: drain

    @property
    def changes(self) -> bool:
        return self.action is not Action.KEEP


class WantedState(Struct, frozen=True):
    """The resources that are to exist: name in AWS -> the request that creates it.

    The data in unwanted `data_stacks` is deleted only with `deletes_data`. `is_backwards`, for a
    teardown: stacks are changed after the resources that depend on them are gone.
    """

    stacks: tuple[Blueprint, ...] = ()
    data_stacks: tuple[str, ...] = ()
    deletes_data: bool = False
    deletes_files: bool = False  # delete only the file system of the data stacks
    held: dict[str, str] = {}  # stacks that stay unchanged because others need them -> why
    is_backwards: bool = False
    shared_with: str = ""  # the environment whose workspace and network this one uses
    is_all: bool = True  # delete resources that are not wanted; False: leave them alone
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, dict[str, Any]] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    definitions: dict[str, dict[str, Any]] = {}


class CurrentState(Struct, frozen=True):
    """The resources of an environment that exist, by name in AWS."""

    stacks: dict[str, Stack] = {}
    proposals: dict[str, ChangeSet] = {}  # stack -> the changes that an update would make
    drifts: dict[str, tuple[Drift, ...]] = {}  # stack -> manual changes to its resources
    causes: dict[str, str] = {}  # stack whose last operation failed -> the first cause
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, LaunchTemplate] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    users: dict[str, tuple[str, ...]] = {}  # compute environment -> queues that are not ours
    busy: dict[str, int] = {}  # queue -> the least number of runs in it that have not ended
    definitions: frozenset[str] = frozenset()
    lent: dict[str, Stack] = {}  # short name -> stack of the environment whose workspace is shared
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
PARAMETER = "SharedWith"  # of the stack `storage`

# Outputs that are taken from the other environment's stacks; not its bucket and key.
_NEEDED = (
    "VpcId", "SubnetIds", "SecurityGroupId", "BuildSubnetId",
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
    lent = {
        short: found[stack_name(owner, short)]
        for short in SHARED_STACKS
        if owner and stack_name(owner, short) in found
    }
    sharers = {
        stack.parameters.get("EnvironmentName", stack.name)
        for stack in found.values()
        if is_sharer(env, stack)
    }
    return lent, tuple(sorted(sharers))


def with_shared_outputs(outputs: Mapping[str, str], facts: CurrentState) -> dict[str, str]:
    """The outputs of an environment's stacks, with the other's network and file system."""
    own = {key: value for key, value in outputs.items() if key not in _NEEDED}
    lent = {
        key: stack.outputs[key]
        for stack in facts.lent.values()
        for key in _NEEDED
        if stack.outputs.get(key)
    }
    return {**own, **lent}


def sharing_refusals(
    wanted: WantedState, steps: Iterable[PlanStep], facts: CurrentState
) -> Iterator[str]:
    """Reasons to refuse a plan because of a shared workspace."""
    if wanted.shared_with:
        yield from _of_sharer(wanted.shared_with, facts)
    if facts.sharers:
        yield from _of_owner(wanted, steps, facts)


def _of_sharer(owner: str, facts: CurrentState) -> Iterator[str]:
    """The other environment must have a file system, and a network with egress."""
    storage, network = facts.lent.get("storage"), facts.lent.get("network")
    where, fix = "storage.shared_with", f"First: batchml setup --env {owner}"
    if storage is None:
        yield f"{where}: the environment {owner} does not exist. {fix}"
    elif not storage.outputs.get("FileSystemId"):
        yield f"{where}: the stack {storage.name} has no file system ({storage.status}). {fix}"
    elif network is not None and network.parameters.get("Egress") == "none":
        yield f"{where}: {owner} is torn down, and its network has no egress. {fix}"


def _of_owner(wanted: WantedState, steps: Iterable[PlanStep], facts: CurrentState) -> Iterator[str]:
    """Refuse to remove a file system that others use.

    AWS refuses too: their stacks import its id.
    """
    names = ", ".join(facts.sharers)
    first = " and ".join(f"batchml teardown --env {name}" for name in facts.sharers)
    for step in steps:
        if step.kind is not ResourceKind.STACK or not step.name.endswith("-storage"):
            continue
        goes = step.action is Action.DELETE or step.how == "without-files"
        if goes or _changes_file_system(step.name, wanted, facts):
            yield (
                f"stack {step.name}: its file system is also the workspace of {names}, so it is "
                f"not removed. First: {first}"
            )


def _changes_file_system(name: str, wanted: WantedState, facts: CurrentState) -> bool:
    stack = facts.stacks.get(name)
    asked = next((each.parameters for each in wanted.stacks if each.name == name), None)
    if stack is None or asked is None:
        return False
    return stack.parameters.get("Workspace") != asked.get("Workspace")
