"""Environments that share a workspace: what one needs of the other, and what neither may do. Pure.

`docs/decisions/032-sharing.md`
"""

from collections.abc import Iterable, Iterator, Mapping

from batchml.aws.cloudformation import Stack
from batchml.aws.naming import stack_name
from batchml.ops.setup.values import Action, Facts, Kind, Step, Wanted

LENT_STACKS = ("network", "storage")
PARAMETER = "SharedWith"  # of the stack `storage`

# What is taken from the other's outputs. The bucket and its key are not among them.
_NEEDED = (
    "VpcId", "SubnetIds", "SecurityGroupId", "BuildSubnetId",
    "FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId",
)  # fmt: skip


def is_lent(owner: str, stack: Stack) -> bool:
    """Whether a stack is one of those that the environment `owner` lends."""
    return bool(owner) and stack.name in {stack_name(owner, short) for short in LENT_STACKS}


def is_sharer(env: str, stack: Stack) -> bool:
    """Whether a stack is the storage of an environment that works in the workspace of `env`."""
    return stack.parameters.get(PARAMETER) == env


def beside(
    env: str, owner: str, found: Mapping[str, Stack]
) -> tuple[dict[str, Stack], tuple[str, ...]]:
    """Of the stacks of a region: those lent to `env`, by short name; who shares its workspace."""
    lent = {
        short: found[stack_name(owner, short)]
        for short in LENT_STACKS
        if owner and stack_name(owner, short) in found
    }
    sharers = {
        stack.parameters.get("EnvironmentName", stack.name)
        for stack in found.values()
        if is_sharer(env, stack)
    }
    return lent, tuple(sorted(sharers))


def with_lent(outputs: Mapping[str, str], facts: Facts) -> dict[str, str]:
    """The outputs of an environment's stacks, the other's network and file system among them."""
    own = {key: value for key, value in outputs.items() if key not in _NEEDED}
    lent = {
        key: stack.outputs[key]
        for stack in facts.lent.values()
        for key in _NEEDED
        if stack.outputs.get(key)
    }
    return {**own, **lent}


def refusals(wanted: Wanted, steps: Iterable[Step], facts: Facts) -> Iterator[str]:
    """Why a plan cannot be carried out for the sake of a workspace that is shared."""
    if wanted.shared_with:
        yield from _of_sharer(wanted.shared_with, facts)
    if facts.sharers:
        yield from _of_owner(wanted, steps, facts)


def _of_sharer(owner: str, facts: Facts) -> Iterator[str]:
    """The other's file system and network must be there, and have a way out."""
    storage, network = facts.lent.get("storage"), facts.lent.get("network")
    where, fix = "storage.shared_with", f"First: batchml setup --env {owner}"
    if storage is None:
        yield f"{where}: the environment {owner} is not there. {fix}"
    elif not storage.outputs.get("FileSystemId"):
        yield f"{where}: the stack {storage.name} has no file system ({storage.status}). {fix}"
    elif network is not None and network.parameters.get("Egress") == "none":
        yield f"{where}: {owner} is torn down, and its network has no way out. {fix}"


def _of_owner(wanted: Wanted, steps: Iterable[Step], facts: Facts) -> Iterator[str]:
    """Nobody takes away what others work in. AWS holds to it too: their stacks import its id."""
    names = ", ".join(facts.sharers)
    first = " and ".join(f"batchml teardown --env {name}" for name in facts.sharers)
    for step in steps:
        if step.kind is not Kind.STACK or not step.name.endswith("-storage"):
            continue
        goes = step.action is Action.DELETE or step.how == "without-files"
        if goes or _changes_file_system(step.name, wanted, facts):
            yield (
                f"stack {step.name}: its file system is the workspace of {names}, too. Nothing "
                f"takes it away under them. First: {first}"
            )


def _changes_file_system(name: str, wanted: Wanted, facts: Facts) -> bool:
    stack = facts.stacks.get(name)
    asked = next((each.parameters for each in wanted.stacks if each.name == name), None)
    if stack is None or asked is None:
        return False
    return stack.parameters.get("Workspace") != asked.get("Workspace")
