"""Steps that create, update or delete a CloudFormation stack, and follow its events to the end."""

from collections.abc import Generator, Sequence

from msgspec.structs import replace

from batchml.aws.cloudformation import NO_CHANGES, Blueprint, Stack, StackEvent
from batchml.errors import BatchmlError, SetupFailed
from batchml.setup.desired import TAG_DATA, with_deletable_data, with_deletable_files, without_files
from batchml.setup.tools import (
    PACE,
    SetupTools,
    StackFailure,
    Steps,
    first_failure,
    refuse_unknown,
    update_token,
)
from batchml.setup.values import TAG_ENV, Action, CurrentState, PlanStep, ResourceKind, WantedState

_STACK_LIMIT = 3 * 3600.0  # seconds; an AMI takes most of an hour
_BUSY_PAUSE = 2.0  # seconds between two polls while events come


def change_stack(
    step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools
) -> Steps:
    """Take a step on a stack."""
    stack = facts.stacks.get(step.name)
    blueprint = next((each for each in wanted.stacks if each.name == step.name), None)
    if step.how == "wait" and stack is not None:
        found = yield from _follow(stack, tools, after=None)
        return _with_stack(facts, step.name, found)
    if step.how == "continue-rollback" and stack is not None:
        found = yield from _unstick(stack, tools)
        return _with_stack(facts, step.name, found)
    if step.how == "without-files" and stack is not None:
        found = yield from _without_files(stack, facts, tools)
        return _with_stack(facts, step.name, found)
    if step.how == "with-data" and stack is not None:
        stack = yield from _without_retention(stack, facts, tools)
    if stack is not None and (step.action is Action.DELETE or step.how == "recreate"):
        try:
            yield from _delete_stack(stack, tools)
        except SetupFailed:
            left = tools.stacks.read(stack.id) if step.how == "with-data" else None
            if left is None:
                raise
            # AWS writes the access log late: empty the buckets again.
            yield from _empty(stack, tools)
            yield from _delete_stack(left, tools)
        return _with_stack(facts, step.name, None)
    assert blueprint is not None
    if stack is None:
        found = yield from _create_stack(blueprint, tools)
    else:
        found = yield from _update_stack(blueprint, stack, facts, tools)
        if found is not None and found.changed_at == stack.changed_at:
            # AWS saw no change, so the next plan must see none.
            facts = _with_stack(facts, step.name, found)
            return replace(facts, proposals={**facts.proposals, step.name: NO_CHANGES})
    return _with_stack(facts, step.name, found)


def _with_stack(facts: CurrentState, name: str, stack: Stack | None) -> CurrentState:
    """The state with one stack replaced, in its place in the order."""
    without = {key: value for key, value in facts.stacks.items() if key != name}
    stacks = {**facts.stacks, name: stack} if stack is not None else without
    proposals = {key: value for key, value in facts.proposals.items() if key != name}
    causes = {key: value for key, value in facts.causes.items() if key != name}
    return replace(facts, stacks=stacks, proposals=proposals, causes=causes)


def _create_stack(blueprint: Blueprint, tools: SetupTools) -> Generator[str, None, Stack | None]:
    refuse_unknown(ResourceKind.STACK, blueprint.name, blueprint.parameters)
    stack_id = tools.stacks.create(blueprint)
    begun = Stack(stack_id, blueprint.name, "CREATE_IN_PROGRESS")
    return (yield from _follow(begun, tools, after=None))


def _update_stack(
    blueprint: Blueprint, stack: Stack, facts: CurrentState, tools: SetupTools
) -> Generator[str, None, Stack | None]:
    refuse_unknown(ResourceKind.STACK, blueprint.name, blueprint.parameters)
    proposal = facts.proposals.get(stack.name)
    if proposal is None or proposal.token != update_token(blueprint, stack):
        proposal = tools.propose(blueprint, stack)
    if proposal.is_empty:
        tools.stacks.guard(blueprint)
        return tools.stacks.read(stack.id)
    if stack.name in tools.replacing:
        tools.stacks.unguard(stack.name)
    newest = tools.stacks.events(stack.id)
    tools.stacks.execute(proposal.id)
    found = yield from _follow(stack, tools, after=newest[-1].id if newest else "")
    tools.stacks.guard(blueprint)
    return tools.stacks.read(stack.id) if blueprint.is_protected else found


def _without_retention(
    stack: Stack, facts: CurrentState, tools: SetupTools
) -> Generator[str, None, Stack | None]:
    """Change a stack's policies so that its deletion deletes its data, and empty its buckets."""
    found: Stack | None = stack
    if stack.status == "UPDATE_ROLLBACK_FAILED":
        yield from _unstick(stack, tools)  # AWS refuses an update before that
    if stack.tags.get(TAG_DATA) != "delete" and not _is_left_over(stack):
        freed = replace(tools, replacing=frozenset({stack.name}))
        found = yield from _update_stack(with_deletable_data(stack), stack, facts, freed)
    yield from _empty(stack, tools)
    return found


def _without_files(
    stack: Stack, facts: CurrentState, tools: SetupTools
) -> Generator[str, None, Stack | None]:
    """Delete the file system of a stack: first change its deletion policy, then remove it."""
    found: Stack | None = stack
    if stack.status == "UPDATE_ROLLBACK_FAILED":
        found = yield from _unstick(stack, tools)
    freed = replace(tools, replacing=frozenset({stack.name}))
    if stack.tags.get(TAG_DATA) != "files":
        found = yield from _update_stack(with_deletable_files(stack), stack, facts, freed)
    if found is None:
        return None
    return (yield from _update_stack(without_files(found), found, facts, freed))


def _empty(stack: Stack, tools: SetupTools) -> Generator[str, None, None]:
    """Empty a stack's buckets: the data and the access log."""
    bucket = stack.outputs.get("BucketName", "")
    if bucket and tools.empty_bucket is not None:
        for each in (bucket, f"{bucket}-logs"):
            yield f"emptying {each}"
            tools.empty_bucket(each)


def _is_left_over(stack: Stack) -> bool:
    """Whether an earlier failure left a stack that cannot be updated."""
    return stack.status in (
        "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "DELETE_FAILED",
        "REVIEW_IN_PROGRESS",
    )  # fmt: skip


def _delete_stack(stack: Stack, tools: SetupTools) -> Generator[str, None, None]:
    if stack.outputs.get("ImageId") and tools.launch is not None:
        # The current image is deleted with its stack; older images stayed for their instances.
        env = stack.tags.get(TAG_ENV, "")
        for image in tools.launch.delete_images(env, keep=stack.outputs["ImageId"]) if env else ():
            yield f"{image} deregistered"
    newest = tools.stacks.events(stack.id)
    tools.stacks.delete(stack)
    yield from _follow(stack, tools, after=newest[-1].id if newest else "")


def _unstick(stack: Stack, tools: SetupTools) -> Generator[str, None, Stack | None]:
    """Continue a failed rollback, if the user asked for it."""
    stuck = _stuck(tools.stacks.operation(stack.id), stack)
    if tools.continue_rollback is None:
        names = ", ".join(dict.fromkeys(event.resource for event in stuck)) or "a resource"
        why = stuck[-1].reason if stuck else stack.reason
        raise SetupFailed(
            ResourceKind.STACK, stack.name,
            f"the rollback of its last update is stuck at {names}: {why}",
            f"Fix the named cause, then: batchml {tools.command} --continue-rollback. Or leave the "
            f"resource as it is: batchml {tools.command} --continue-rollback --skip-resource "
            f"{names.split(',')[0]}",
        )  # fmt: skip
    newest = tools.stacks.events(stack.id)
    tools.stacks.continue_rollback(stack, tools.continue_rollback)
    return (yield from _follow(stack, tools, after=newest[-1].id if newest else ""))


def _stuck(events: Sequence[StackEvent], stack: Stack) -> list[StackEvent]:
    """The failures of the rollback, without the earlier failures of the update itself."""
    found: list[StackEvent] = []
    for event in events:
        if event.physical_id == stack.id and event.status == "UPDATE_ROLLBACK_IN_PROGRESS":
            found = []
        elif event.physical_id != stack.id and event.status == "UPDATE_FAILED":
            found.append(event)
    return found


def _follow(
    stack: Stack, tools: SetupTools, after: str | None
) -> Generator[str, None, Stack | None]:
    """Follow an operation on a stack to its end; return the stack, or None if it is deleted.

    Each poll is one call: the events name each change of a resource, and the end. `after`: the last
    event before the operation; None follows the operation under way from its beginning. Raises
    SetupFailed with the first cause if it failed.
    """
    end = tools.clock.monotonic() + _STACK_LIMIT
    seen: list[StackEvent] = tools.stacks.operation(stack.id) if after is None else []
    last, pause, over = after or "", PACE.first, False
    new = seen
    while True:
        for event in new:
            last = event.id
            over = event.physical_id == stack.id and _is_final(event.status)
            if event.physical_id != stack.id:
                yield f"{event.resource} {event.status}"
        if over:
            break
        if tools.clock.monotonic() > end:
            raise BatchmlError(f"stack {stack.name} is not done after {_STACK_LIMIT / 3600:.0f} h.")
        tools.clock.sleep(pause)
        pause = min(_BUSY_PAUSE if new else PACE.most, pause * 1.5)
        new = tools.stacks.events(stack.id, last)
        seen += new
    return _outcome(stack, tools, seen)


def _is_final(status: str) -> bool:
    return not status.endswith("IN_PROGRESS")


def _outcome(stack: Stack, tools: SetupTools, seen: Sequence[StackEvent]) -> Stack | None:
    status = seen[-1].status
    found = None if status == "DELETE_COMPLETE" else tools.stacks.read(stack.id)
    if status in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "DELETE_COMPLETE", "IMPORT_COMPLETE"):
        return found
    was_stuck = stack.status == "UPDATE_ROLLBACK_FAILED" or tools.continue_rollback is not None
    if status == "UPDATE_ROLLBACK_COMPLETE" and was_stuck and "ROLLBACK" in stack.status:
        return found  # the rollback was asked for
    failure = first_failure(seen) or StackFailure(stack.name, "", seen[-1].reason or status)
    raise SetupFailed(
        ResourceKind.STACK, stack.name, f"{status}. First cause: {failure}", failure.fix
    )
