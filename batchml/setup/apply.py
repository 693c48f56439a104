"""Make AWS match `batchml.toml`: read the current state, plan, take the next step, plan again.

Nothing is stored between two commands. The next command waits for operations that an interrupted
one began.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.cloudformation import Stack
from batchml.aws.naming import owner_tags, qualified
from batchml.errors import AccessError, BatchmlError, NotConverging, WouldLoseData
from batchml.model.names import bare_name
from batchml.setup import sharing, steps
from batchml.setup.desired import SetupSpec
from batchml.setup.plan import make_plan
from batchml.setup.sharing import (
    TAG_SOURCE,
    Action,
    CurrentState,
    PlanStep,
    ResourceKind,
    WantedState,
    is_known,
)
from batchml.setup.tools import POLICY_OUTPUT, SetupTools, Steps

_PERFORMERS: dict[
    ResourceKind, Callable[[PlanStep, WantedState, CurrentState, SetupTools], Steps]
] = {
    ResourceKind.STACK: steps.change_stack,
    ResourceKind.PLACEMENT_GROUP: steps.change_placement_group,
    ResourceKind.LAUNCH_TEMPLATE: steps.change_launch_template,
    ResourceKind.POLICY: steps.change_policy,
    ResourceKind.ENVIRONMENT: steps.change_environment,
    ResourceKind.QUEUE: steps.change_queue,
    ResourceKind.DEFINITION: steps.change_definition,
}


def perform(step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools) -> Steps:
    """Take a step, wait until AWS has finished, and return the state after it.

    While it waits it yields messages for the user. Raises SetupFailed, or AWS's error.
    """
    return _PERFORMERS[step.kind](step, wanted, current, tools)


Planner = Callable[[CurrentState], WantedState]  # the wanted state, given the current state

BEGUN = "..."


class StepProgress(Struct, frozen=True):
    """A message on a step: BEGUN at first, then texts, and an empty text at the end."""

    step: PlanStep
    text: str = ""


def read_state_for_plan(spec: SetupSpec, tools: SetupTools, planner: Planner) -> CurrentState:
    """Read the current state, and what AWS says about the changes that a plan would make."""
    current = with_failure_causes(read_state(spec, tools), tools)
    current = with_definitions(current, planner(current), tools.batch)
    current = with_runs(current, planner(current), tools.compute)
    current = with_attachments(current, planner(current), tools)
    return with_change_sets(current, planner(current), tools)


def read_state(spec: SetupSpec, tools: SetupTools) -> CurrentState:
    """Read the current state by at most 7 calls, and 1 for each stack and launch template."""
    stacks, owner_stacks, sharers = _read_stacks(spec, tools)
    return replace(
        _read_batch(spec, tools.compute),
        stacks=stacks,
        owner_stacks=owner_stacks,
        sharers=sharers,
        groups={name: {} for name in tools.launch.groups(spec.name)} if tools.launch else {},
        templates=tools.launch.templates(spec.name) if tools.launch else {},
    )


def _read_stacks(
    spec: SetupSpec, tools: SetupTools
) -> tuple[dict[str, Stack], dict[str, Stack], tuple[str, ...]]:
    """The environment's stacks, stacks shared with it, and environments that share with it."""
    if not spec.stack_names:
        return {}, {}, ()
    owner = spec.environment.storage.shared_with
    found = tools.stacks.read_all(
        spec.stack_names,
        lambda stack: sharing.is_shared_stack(owner, stack) or sharing.is_sharer(spec.name, stack),
    )
    stacks = {name: found[name] for name in spec.stack_names if name in found}  # in their order
    return stacks, *sharing.find_shared_stacks(spec.name, owner, found)


def _read_batch(spec: SetupSpec, compute: ComputeApi) -> CurrentState:
    """The resources that `setup` made, and resources with a name that it would use."""

    def ours(
        found: Mapping[str, dict[str, Any]], described: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        names = {qualified(spec.name, each, spec.project) for each in described}
        tags = {**owner_tags(spec.name, spec.project), TAG_SOURCE: "setup"}
        return {
            name: detail
            for name, detail in found.items()
            if name in names or tags.items() <= (detail.get("tags") or {}).items()
        }

    # A name is unique only in its kind: a queue made by hand may be named like an environment.
    described, queues = spec.environment, compute.queues()
    our_queues = ours(queues, described.queues)
    users: dict[str, tuple[str, ...]] = {}
    for name in sorted(queues.keys() - our_queues.keys()):
        for entry in queues[name].get("computeEnvironmentOrder", ()):
            used = bare_name(entry["computeEnvironment"])
            users[used] = (*users.get(used, ()), name)
    return CurrentState(
        environments=ours(compute.environments(), described.compute),
        queues=our_queues,
        policies=ours(compute.policies(), described.queues),
        foreign_users=users,
    )


def with_runs(current: CurrentState, wanted: WantedState, compute: ComputeApi) -> CurrentState:
    """Add the number of runs in the queues that the plan deletes or replaces."""
    names = [
        step.name for step in make_plan(wanted, current)
        if step.kind is ResourceKind.QUEUE and step.action in (Action.DELETE, Action.REPLACE)
        and current.queues[step.name].get("status") != "DELETING"
    ]  # fmt: skip
    counts = {name: count for name in names if (count := compute.unfinished(name))}
    return replace(current, unfinished_runs=counts)


def with_attachments(current: CurrentState, wanted: WantedState, tools: SetupTools) -> CurrentState:
    """Add who has the policy of each stack that the plan deletes: a call for that stack."""
    attached = {}
    for step in make_plan(wanted, current):
        is_deleted = step.action is Action.DELETE or step.how == "recreate"
        if step.kind is not ResourceKind.STACK or not is_deleted or tools.policies is None:
            continue
        policy = current.stacks[step.name].outputs.get(POLICY_OUTPUT, "")
        if policy:
            try:
                attached[step.name] = tools.policies.attachments(policy)
            except AccessError:
                continue  # then AWS says it when the stack is deleted
    return replace(current, attached=attached)


def with_definitions(current: CurrentState, wanted: WantedState, batch: JobApi) -> CurrentState:
    """Add the wanted job definitions that exist: one call for each."""
    known = [name for name in wanted.definitions if batch.has_definition(name)]
    return replace(current, definitions=frozenset(known))


def with_change_sets(current: CurrentState, wanted: WantedState, tools: SetupTools) -> CurrentState:
    """Create a change set for each stack to update, and ask for manual changes to its resources.

    The change sets exist until they are executed or `discard_change_sets` is called.
    """
    for blueprint in wanted.stacks:
        stack = current.stacks.get(blueprint.name)
        if stack is None or not is_known(blueprint.parameters):
            continue
        step = next(
            step for step in make_plan(wanted, current)
            if step.kind is ResourceKind.STACK and step.name == blueprint.name
        )  # fmt: skip
        if step.action is Action.UPDATE and not step.how:
            change_set = tools.create_change_set(blueprint, stack)
            current = replace(current, change_sets={**current.change_sets, stack.name: change_set})
            if not change_set.is_empty:
                drifts = tools.drifts(stack.name)
                current = replace(current, drifts={**current.drifts, stack.name: drifts})
    return current


def with_failure_causes(current: CurrentState, tools: SetupTools) -> CurrentState:
    """Add the first cause for each stack whose last operation failed."""
    failure_causes = {
        stack.name: tools.first_cause(stack)
        for stack in current.stacks.values()
        if "FAILED" in stack.status or stack.status == "ROLLBACK_COMPLETE"
    }
    return replace(current, failure_causes=failure_causes)


def discard_change_sets(current: CurrentState, tools: SetupTools) -> None:
    """Delete the change sets of a plan that is not carried out."""
    for stack, change_set in current.change_sets.items():
        try:
            tools.stacks.discard(change_set.id, stack)
        except BatchmlError:
            continue  # it does not exist any more, or another program executed it


def apply_plan(
    planner: Planner, current: CurrentState, tools: SetupTools, agreed: set[PlanStep]
) -> Iterator[StepProgress]:
    """Take every step in order, and yield messages.

    `agreed`: the steps that the user has confirmed. Another step that would lose data raises
    WouldLoseData. Raises AWS's errors, SetupFailed and NotConverging.
    """
    taken: set[tuple[ResourceKind, str, Action, tuple[str, ...], str]] = set()
    agreed_losses = {(step.kind, step.name, step.loses) for step in agreed}
    while True:
        wanted = planner(current)
        step = next((step for step in make_plan(wanted, current) if step.changes), None)
        if step is None:
            return
        key = (step.kind, step.name, step.action, step.reasons, step.how)
        if key in taken:
            resource = f"{step.kind} {step.name}"
            raise NotConverging(resource, step.action.value, step.reasons)
        taken.add(key)
        if step.loses and (step.kind, step.name, step.loses) not in agreed_losses:
            raise WouldLoseData(step.kind, step.name, step.action.value, step.loses, step.reasons)
        yield StepProgress(step, BEGUN)
        performing = perform(step, wanted, current, tools)
        try:
            while True:
                yield StepProgress(step, next(performing))
        except StopIteration as end:
            current = end.value
        yield StepProgress(step)
