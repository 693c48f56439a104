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
from batchml.aws.naming import qualified
from batchml.errors import BatchmlError, NotConverging, WouldLoseData
from batchml.model.names import bare_name
from batchml.setup import sharing
from batchml.setup import steps as batch_steps
from batchml.setup import steps as stack_steps
from batchml.setup.desired import SetupSpec
from batchml.setup.plan import make_plan
from batchml.setup.sharing import (
    TAG_ENV,
    TAG_SOURCE,
    Action,
    CurrentState,
    PlanStep,
    ResourceKind,
    WantedState,
    is_known,
)
from batchml.setup.tools import SetupTools, Steps

# --- one step -------------------------------------------------------------------------------
# Each function takes a step, waits until AWS has finished, and returns the state after it. While it
# waits it yields messages for the user.


def perform(step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools) -> Steps:
    """Take a step. Raises SetupFailed, or AWS's error."""
    return (yield from _PERFORMERS[step.kind](step, wanted, facts, tools))


_PERFORMERS: dict[
    ResourceKind, Callable[[PlanStep, WantedState, CurrentState, SetupTools], Steps]
] = {
    ResourceKind.STACK: stack_steps.change_stack,
    ResourceKind.PLACEMENT_GROUP: batch_steps.change_placement_group,
    ResourceKind.LAUNCH_TEMPLATE: batch_steps.change_launch_template,
    ResourceKind.POLICY: batch_steps.change_policy,
    ResourceKind.ENVIRONMENT: batch_steps.change_environment,
    ResourceKind.QUEUE: batch_steps.change_queue,
    ResourceKind.DEFINITION: batch_steps.change_definition,
}


# --- a whole plan ---------------------------------------------------------------------------


Planner = Callable[[CurrentState], WantedState]

BEGUN = "..."


class StepProgress(Struct, frozen=True):
    """A message on a step: BEGUN at first, then texts, and an empty text at the end."""

    step: PlanStep
    text: str = ""


def read_state_for_plan(scheme: SetupSpec, tools: SetupTools, planner: Planner) -> CurrentState:
    """Read the current state, and what AWS says about the changes that a plan would make."""
    facts = with_causes(read_state(scheme, tools), tools)
    facts = with_definitions(facts, planner(facts), tools.batch)
    facts = with_runs(facts, planner(facts), tools.compute)
    return with_proposals(facts, planner(facts), tools)


def read_state(scheme: SetupSpec, tools: SetupTools) -> CurrentState:
    """Read the current state by at most 4 calls, and 3 for each stack and launch template."""
    stacks, lent, sharers = _stacks(scheme, tools)
    return replace(
        _batch_facts(scheme, tools.compute),
        stacks=stacks,
        lent=lent,
        sharers=sharers,
        groups={name: {} for name in tools.launch.groups(scheme.name)} if tools.launch else {},
        templates=tools.launch.templates(scheme.name) if tools.launch else {},
        definitions=frozenset(),
    )


def _stacks(
    scheme: SetupSpec, tools: SetupTools
) -> tuple[dict[str, Stack], dict[str, Stack], tuple[str, ...]]:
    """The environment's stacks, stacks shared with it, and environments that share with it."""
    if not scheme.stack_names:
        return {}, {}, ()
    owner = scheme.environment.storage.shared_with
    found = tools.stacks.read_all(
        scheme.stack_names,
        lambda stack: (
            sharing.is_shared_stack(owner, stack) or sharing.is_sharer(scheme.name, stack)
        ),
    )
    return _in_order(scheme, found), *sharing.find_shared_stacks(scheme.name, owner, found)


def _in_order(scheme: SetupSpec, stacks: Mapping[str, Stack]) -> dict[str, Stack]:
    return {name: stacks[name] for name in scheme.stack_names if name in stacks}


def _batch_facts(scheme: SetupSpec, compute: ComputeApi) -> CurrentState:
    """The resources that `setup` made, and resources with a name that it would use."""

    def ours(
        found: Mapping[str, dict[str, Any]], described: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        names = {qualified(scheme.name, each) for each in described}
        return {
            name: detail
            for name, detail in found.items()
            if name in names or _is_ours(scheme, detail.get("tags") or {})
        }

    # For each kind: a queue made by hand may have the name of a described compute environment.
    described = scheme.environment
    there = compute.queues()
    queues = ours(there, described.queues)
    return CurrentState(
        environments=ours(compute.environments(), described.compute),
        queues=queues,
        policies=ours(compute.policies(), described.queues),
        users=_users({name: there[name] for name in there.keys() - queues.keys()}),
    )


def _users(queues: Mapping[str, dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Compute environment -> the queues that use it."""
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(queues):
        for entry in queues[name].get("computeEnvironmentOrder", ()):
            used = bare_name(entry["computeEnvironment"])
            found[used] = (*found.get(used, ()), name)
    return found


def _is_ours(scheme: SetupSpec, tags: Mapping[str, str]) -> bool:
    return tags.get(TAG_ENV) == scheme.name and tags.get(TAG_SOURCE) == "setup"


def with_runs(facts: CurrentState, wanted: WantedState, compute: ComputeApi) -> CurrentState:
    """Add the number of runs in the queues that the plan deletes or replaces."""
    doomed = [
        step.name for step in make_plan(wanted, facts)
        if step.kind is ResourceKind.QUEUE and step.action in (Action.DELETE, Action.REPLACE)
        and facts.queues[step.name].get("status") != "DELETING"
    ]  # fmt: skip
    counts = {name: compute.unfinished(name) for name in doomed}
    return replace(facts, busy={name: count for name, count in counts.items() if count})


def with_definitions(facts: CurrentState, wanted: WantedState, batch: JobApi) -> CurrentState:
    """Add the wanted job definitions that exist: one call for each."""
    known = [name for name in wanted.definitions if batch.has_definition(name)]
    return replace(facts, definitions=frozenset(known))


def with_proposals(facts: CurrentState, wanted: WantedState, tools: SetupTools) -> CurrentState:
    """Ask AWS for the changes that stack updates would make, and for manual changes to stacks.

    The change sets stay until they are executed or `discard_proposals` is called.
    """
    for blueprint in wanted.stacks:
        stack = facts.stacks.get(blueprint.name)
        if stack is None or not is_known(blueprint.parameters):
            continue
        step = next(
            step for step in make_plan(wanted, facts)
            if step.kind is ResourceKind.STACK and step.name == blueprint.name
        )  # fmt: skip
        if step.action is Action.UPDATE and not step.how:
            proposal = tools.propose(blueprint, stack)
            facts = replace(facts, proposals={**facts.proposals, stack.name: proposal})
            if not proposal.is_empty:
                drifts = tools.drifts(stack.name)
                facts = replace(facts, drifts={**facts.drifts, stack.name: drifts})
    return facts


def with_causes(facts: CurrentState, tools: SetupTools) -> CurrentState:
    """Add the first cause for each stack whose last operation failed."""
    causes = {
        stack.name: tools.first_cause(stack)
        for stack in facts.stacks.values()
        if "FAILED" in stack.status or stack.status == "ROLLBACK_COMPLETE"
    }
    return replace(facts, causes=causes)


def discard_proposals(facts: CurrentState, tools: SetupTools) -> None:
    """Delete the change sets of a plan that is not carried out."""
    for proposal in facts.proposals.values():
        try:
            tools.stacks.discard(proposal.id)
        except BatchmlError:
            continue  # it is gone, or another program executed it


def apply_plan(
    planner: Planner, facts: CurrentState, tools: SetupTools, agreed: set[PlanStep]
) -> Iterator[StepProgress]:
    """Take every step in order, and yield messages.

    `agreed`: the steps that the user has confirmed. Another step that would lose data raises
    WouldLoseData. Raises AWS's errors, SetupFailed and NotConverging.
    """
    taken: set[tuple[ResourceKind, str, Action, tuple[str, ...], str]] = set()
    agreed_losses = {(step.kind, step.name, step.loses) for step in agreed}
    while True:
        wanted = planner(facts)
        step = next((step for step in make_plan(wanted, facts) if step.changes), None)
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
        run = perform(step, wanted, facts, tools)
        try:
            while True:
                yield StepProgress(step, next(run))
        except StopIteration as end:
            facts = end.value
        yield StepProgress(step)
