"""What has to be done so that AWS has what `batchml.toml` describes. A pure function of the two.

The plan that is shown, the next step that is taken and the check at the end are the same function,
asked again with what is known by then. So nothing has to be remembered between two commands: one
that was interrupted goes on from what AWS has.
"""

from collections.abc import Iterable, Iterator

from batchml.ops.setup import batch_plan as batch
from batchml.ops.setup import sharing
from batchml.ops.setup.stack_plan import decide_stack, unwanted_stacks
from batchml.ops.setup.values import Action, Facts, Kind, Step, Wanted


def make_plan(wanted: Wanted, facts: Facts) -> list[Step]:
    """Every resource with its step, in the order in which the steps are taken.

    What others stand on comes first; what is not wanted any more goes last, in AWS's order: a
    queue before its compute environments, and those before the roles that they work with.
    """
    stacks = [decide_stack(blueprint, facts) for blueprint in wanted.stacks]
    return [
        *([] if wanted.is_backwards else stacks),
        *_made(wanted, facts),
        *(_unmade(wanted, facts) if wanted.is_all else ()),
        *(stacks[::-1] if wanted.is_backwards else []),
    ]


def _made(wanted: Wanted, facts: Facts) -> list[Step]:
    return [
        *batch.decided(Kind.PLACEMENT_GROUP, wanted.groups, facts.groups, batch.keep),
        *batch.templates(wanted, facts),
        *batch.decided(Kind.POLICY, wanted.policies, facts.policies, batch.decide_policy),
        *batch.environments(wanted, facts),
        *batch.queues(wanted, facts),
        *batch.definitions(wanted, facts),
    ]


def _unmade(wanted: Wanted, facts: Facts) -> list[Step]:
    return [
        *batch.unwanted_queues(wanted, facts),
        *batch.unwanted_environments(wanted, facts),
        *batch.unwanted(Kind.POLICY, wanted.policies, facts.policies),
        *batch.unwanted(Kind.LAUNCH_TEMPLATE, wanted.templates, facts.templates),
        *batch.unwanted(Kind.PLACEMENT_GROUP, wanted.groups, facts.groups),
        *unwanted_stacks(wanted, facts),
    ]


def refusals(wanted: Wanted, steps: Iterable[Step], facts: Facts) -> list[str]:
    """What AWS would refuse halfway through a plan, so that none of it is begun."""
    steps = list(steps)
    return [
        *_used_by_others(steps, facts),
        *_moved_networks(wanted, facts),
        *sharing.refusals(wanted, steps, facts),
    ]


def _used_by_others(steps: Iterable[Step], facts: Facts) -> Iterator[str]:
    """AWS Batch does not delete a compute environment that a queue uses, for as long as it does."""
    for step in steps:
        users = facts.users.get(step.name)
        if step.kind is Kind.ENVIRONMENT and step.action is Action.DELETE and users:
            yield (
                f"{step.kind} {step.name} is used by queues that setup did not make: "
                f"{', '.join(users)}. Delete those first (batchml queue delete NAME), or give them "
                "others (batchml queue update NAME --compute OTHER)."
            )


def _moved_networks(wanted: Wanted, facts: Facts) -> Iterator[str]:
    """Another range is another VPC, and the old one cannot go while anything is in it."""
    for blueprint in wanted.stacks:
        stack, key = facts.stacks.get(blueprint.name), "VpcCidr"
        asked = blueprint.parameters.get(key)
        there = stack.parameters.get(key) if stack is not None else None
        if asked and there and asked != there and (facts.environments or facts.sharers):
            yield (
                f"stack {blueprint.name}: network.cidr cannot be changed from {there} while there "
                "are compute environments in it: batchml teardown first, or leave it as it was."
            )
