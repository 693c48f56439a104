"""Take one step of a plan: the edge between a decision and AWS.

Each function does what a step says, waits until AWS has done it, and returns the facts as they are
then. While it waits it yields what is worth saying.
"""

from collections.abc import Callable

from batchml.ops.setup import batch_steps, stack_steps
from batchml.ops.setup.tools import Steps, Tools
from batchml.ops.setup.values import Facts, Kind, Step, Wanted


def perform(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    """Take a step. Raises SetupFailed, or what a refusal is translated to."""
    return (yield from _PERFORMERS[step.kind](step, wanted, facts, tools))


_PERFORMERS: dict[Kind, Callable[[Step, Wanted, Facts, Tools], Steps]] = {
    Kind.STACK: stack_steps.change_stack,
    Kind.PLACEMENT_GROUP: batch_steps.change_placement_group,
    Kind.LAUNCH_TEMPLATE: batch_steps.change_launch_template,
    Kind.POLICY: batch_steps.change_policy,
    Kind.ENVIRONMENT: batch_steps.change_environment,
    Kind.QUEUE: batch_steps.change_queue,
    Kind.DEFINITION: batch_steps.change_definition,
}
