"""Environments that share a workspace: the values that one takes from the other, and refusals.

Pure.

`docs/decisions/032-sharing.md`
"""

from collections.abc import Iterable, Iterator, Mapping

from batchml.aws.cloudformation import Stack
from batchml.aws.naming import stack_name
from batchml.setup.values import Action, CurrentState, PlanStep, ResourceKind, WantedState

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
