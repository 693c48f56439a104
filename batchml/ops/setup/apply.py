"""Make AWS what `batchml.toml` describes: look, plan, take the next step, look again.

Nothing is remembered between two commands. What was under way when one was interrupted is waited
for by the next; what was done is there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import BatchApi
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.cloudformation import Stack
from batchml.aws.naming import qualified
from batchml.errors import BatchmlError
from batchml.model.names import bare_name
from batchml.ops.setup import sharing
from batchml.ops.setup.desired import Scheme
from batchml.ops.setup.plan import make_plan
from batchml.ops.setup.steps import perform
from batchml.ops.setup.tools import Tools
from batchml.ops.setup.values import (
    TAG_ENV,
    TAG_SOURCE,
    Action,
    Facts,
    Kind,
    Step,
    Wanted,
    is_known,
)

Planner = Callable[[Facts], Wanted]

BEGUN = "..."


class Progress(Struct, frozen=True):
    """What is said while a step is taken: BEGUN at first, and nothing when it is done."""

    step: Step
    text: str = ""


def look_closely(scheme: Scheme, tools: Tools, planner: Planner) -> Facts:
    """All that a plan can be made from: what is there, and what AWS says of what would change."""
    facts = with_causes(look(scheme, tools), tools)
    facts = with_definitions(facts, planner(facts), tools.batch)
    facts = with_runs(facts, planner(facts), tools.compute)
    return with_proposals(facts, planner(facts), tools)


def look(scheme: Scheme, tools: Tools) -> Facts:
    """What is there of an environment. At most 4 calls and 3 for each stack and launch template."""
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
    scheme: Scheme, tools: Tools
) -> tuple[dict[str, Stack], dict[str, Stack], tuple[str, ...]]:
    """The environment's stacks, those lent to it, and who shares its workspace."""
    if not scheme.stack_names:
        return {}, {}, ()
    owner = scheme.environment.storage.shared_with
    found = tools.stacks.read_all(
        scheme.stack_names,
        lambda stack: sharing.is_lent(owner, stack) or sharing.is_sharer(scheme.name, stack),
    )
    return _in_order(scheme, found), *sharing.beside(scheme.name, owner, found)


def _in_order(scheme: Scheme, stacks: Mapping[str, Stack]) -> dict[str, Stack]:
    return {name: stacks[name] for name in scheme.stack_names if name in stacks}


def _batch_facts(scheme: Scheme, compute: ComputeApi) -> Facts:
    """What `setup` made, and what has the name of something that it would make."""

    def ours(
        found: Mapping[str, dict[str, Any]], described: Iterable[str]
    ) -> dict[str, dict[str, Any]]:
        names = {qualified(scheme.name, each) for each in described}
        return {
            name: detail
            for name, detail in found.items()
            if name in names or _is_ours(scheme, detail.get("tags") or {})
        }

    # Per kind: a queue made by hand may have the name of a compute environment that is described.
    described = scheme.environment
    there = compute.queues()
    queues = ours(there, described.queues)
    return Facts(
        environments=ours(compute.environments(), described.compute),
        queues=queues,
        policies=ours(compute.policies(), described.queues),
        users=_users({name: there[name] for name in there.keys() - queues.keys()}),
    )


def _users(queues: Mapping[str, dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Compute environments by the queues that use them."""
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted(queues):
        for entry in queues[name].get("computeEnvironmentOrder", ()):
            used = bare_name(entry["computeEnvironment"])
            found[used] = (*found.get(used, ()), name)
    return found


def _is_ours(scheme: Scheme, tags: Mapping[str, str]) -> bool:
    return tags.get(TAG_ENV) == scheme.name and tags.get(TAG_SOURCE) == "setup"


def with_runs(facts: Facts, wanted: Wanted, compute: ComputeApi) -> Facts:
    """How many runs there are in the queues that the plan deletes or replaces."""
    doomed = [
        step.name for step in make_plan(wanted, facts)
        if step.kind is Kind.QUEUE and step.action in (Action.DELETE, Action.REPLACE)
        and facts.queues[step.name].get("status") != "DELETING"
    ]  # fmt: skip
    counts = {name: compute.unfinished(name) for name in doomed}
    return replace(facts, busy={name: count for name, count in counts.items() if count})


def with_definitions(facts: Facts, wanted: Wanted, batch: BatchApi) -> Facts:
    """Which of the wanted job definitions are there. One call each."""
    known = [name for name in wanted.definitions if batch.has_definition(name)]
    return replace(facts, definitions=frozenset(known))


def with_proposals(facts: Facts, wanted: Wanted, tools: Tools) -> Facts:
    """Ask AWS what the updates of stacks would do, and what was changed by hand beneath them.

    The change sets stay until they are carried out or `forget` is called.
    """
    for blueprint in wanted.stacks:
        stack = facts.stacks.get(blueprint.name)
        if stack is None or not is_known(blueprint.parameters):
            continue
        step = next(
            step for step in make_plan(wanted, facts)
            if step.kind is Kind.STACK and step.name == blueprint.name
        )  # fmt: skip
        if step.action is Action.UPDATE and not step.how:
            proposal = tools.propose(blueprint, stack)
            facts = replace(facts, proposals={**facts.proposals, stack.name: proposal})
            if not proposal.is_empty:
                drifts = tools.drifts(stack.name)
                facts = replace(facts, drifts={**facts.drifts, stack.name: drifts})
    return facts


def with_causes(facts: Facts, tools: Tools) -> Facts:
    """Why the last operation on a stack failed, for those where it did."""
    causes = {
        stack.name: tools.first_cause(stack)
        for stack in facts.stacks.values()
        if "FAILED" in stack.status or stack.status == "ROLLBACK_COMPLETE"
    }
    return replace(facts, causes=causes)


def forget(facts: Facts, tools: Tools) -> None:
    """Throw away the change sets of a plan that is not carried out."""
    for proposal in facts.proposals.values():
        try:
            tools.stacks.discard(proposal.id)
        except BatchmlError:
            continue  # it is gone, or carried out by somebody else; the next plan finds it else


class NotConverging(BatchmlError):
    def __init__(self, step: Step) -> None:
        super().__init__(
            f"{step.kind} {step.name}: AWS took the {step.action.value}, and still it is not as "
            f"asked: {'; '.join(step.reasons)}. Nothing more was done. Run batchml setup --plan."
        )


def carry_out(
    planner: Planner, facts: Facts, tools: Tools, agreed: set[Step]
) -> Iterator[Progress]:
    """Take every step, one after the other; yields what happens.

    `agreed` are the steps that the user has seen: one that would lose something and is not among
    them ends this. Raises what AWS's refusals are translated to, SetupFailed and NotConverging.
    """
    taken: set[tuple[Kind, str, Action, tuple[str, ...], str]] = set()
    agreed_losses = {(step.kind, step.name, step.loses) for step in agreed}
    while True:
        wanted = planner(facts)
        step = next((step for step in make_plan(wanted, facts) if step.changes), None)
        if step is None:
            return
        key = (step.kind, step.name, step.action, step.reasons, step.how)
        if key in taken:
            raise NotConverging(step)
        taken.add(key)
        if step.loses and (step.kind, step.name, step.loses) not in agreed_losses:
            raise LosesData(step)
        yield Progress(step, BEGUN)
        run = perform(step, wanted, facts, tools)
        try:
            while True:
                yield Progress(step, next(run))
        except StopIteration as end:
            facts = end.value
        yield Progress(step)


class LosesData(BatchmlError):
    def __init__(self, step: Step) -> None:
        super().__init__(
            f"{step.kind} {step.name}: to {step.action.value} it would lose {step.loses} "
            f"({'; '.join(step.reasons)}). Nothing was done to it. If that is meant: "
            f"batchml setup --allow-loss {step.name}"
        )
