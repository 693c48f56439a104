"""What becomes of a stack. Pure."""

from collections.abc import Iterator

from batchml.aws.cloudformation import Blueprint, ChangeSet, Stack
from batchml.ops.setup.values import Action, Facts, Kind, Step, Wanted


def decide_stack(blueprint: Blueprint, facts: Facts) -> Step:
    stack = facts.stacks.get(blueprint.name)
    if stack is None:
        return Step(Action.CREATE, Kind.STACK, blueprint.name, ("it does not exist",))
    if stack.is_busy:
        return _busy(stack)
    cause = facts.causes.get(stack.name) or stack.reason
    because = f": {cause}" if cause else ""
    match stack.status:
        case "ROLLBACK_COMPLETE" | "ROLLBACK_FAILED" | "CREATE_FAILED" | "DELETE_FAILED":
            return _failed(blueprint, stack, because)
        case "REVIEW_IN_PROGRESS":
            reason = "it was begun and is empty"
            return Step(Action.REPLACE, Kind.STACK, stack.name, (reason,), how="recreate")
        case "UPDATE_ROLLBACK_FAILED":
            reason = f"its last update failed, and undoing that is stuck{because}"
            return Step(Action.UPDATE, Kind.STACK, stack.name, (reason,), how="continue-rollback")
    reasons = tuple(_stack_reasons(blueprint, stack, facts.proposals.get(stack.name)))
    if not reasons:
        return Step(Action.KEEP, Kind.STACK, stack.name)
    reasons += tuple(
        f"somebody has changed {drift.resource} by hand ({', '.join(drift.properties) or 'gone'})"
        for drift in facts.drifts.get(stack.name, ())
    )
    # In the others there is nothing but records of their own, such as a build's.
    loses = _loses(facts.proposals.get(stack.name)) if blueprint.is_protected else ""
    return Step(Action.UPDATE, Kind.STACK, stack.name, reasons, loses)


def _failed(blueprint: Blueprint, stack: Stack, because: str) -> Step:
    """A stack that can only be deleted and made anew. One that was being deleted may hold data."""
    if stack.status != "DELETE_FAILED":
        reason, loses = f"making it failed earlier{because}; nothing in it is in use", ""
    else:
        reason = f"deleting it failed earlier{because}"
        loses = "what is left in it" if blueprint.is_protected else ""
    return Step(Action.REPLACE, Kind.STACK, stack.name, (reason,), loses, how="recreate")


def _busy(stack: Stack) -> Step:
    """Something is under way: whoever began it, its end is waited for."""
    actions = {"CREATE": Action.CREATE, "DELETE": Action.DELETE}
    action = actions.get(stack.status.partition("_")[0], Action.UPDATE)
    return Step(action, Kind.STACK, stack.name, (f"{stack.status}: it is waited for",), how="wait")


def _stack_reasons(blueprint: Blueprint, stack: Stack, proposal: ChangeSet | None) -> Iterator[str]:
    if blueprint.is_protected and not stack.is_protected:
        # Lifted for an update or a deletion that did not come to its end; its policy is, too.
        yield "its protection is off"
    if proposal is not None and proposal.is_empty:
        return
    if blueprint.template.strip() != stack.template.strip():
        yield "its template has changed"
    for key, value in sorted(blueprint.parameters.items()):
        there = stack.parameters.get(key)
        if there != value and (there or value):  # a new one that is empty changes nothing
            yield f"{key}: {there or 'none'} -> {value or 'none'}"
    for key, value in sorted(blueprint.tags.items()):
        if stack.tags.get(key) != value:
            yield f"tag {key}: {stack.tags.get(key, 'none')} -> {value}"
    for key in sorted(set(stack.tags) - set(blueprint.tags)):
        if not key.startswith("aws:"):
            yield f"tag {key}: {stack.tags[key]} -> none"
    for change in proposal.changes if proposal is not None else ():
        if change.replacement == "True":
            yield f"AWS replaces {change.resource} ({change.type}): {', '.join(change.causes)}"
        elif change.action == "Remove":
            stays = "; it stays in the account, and is billed" if change.type in DATA_TYPES else ""
            yield f"AWS removes {change.resource} ({change.type}) from the stack{stays}"


# What holds data: replaced or removed only when that is said explicitly.
DATA_TYPES = {
    "AWS::EFS::FileSystem", "AWS::FSx::FileSystem", "AWS::KMS::Key", "AWS::Logs::LogGroup",
    "AWS::S3::Bucket",
}  # fmt: skip


def _loses(proposal: ChangeSet | None) -> str:
    """The data that an update would take out of the stack."""
    changes = proposal.changes if proposal is not None else ()
    lost: list[str] = [
        f"{change.resource} ({change.type})"
        for change in changes
        if change.type in DATA_TYPES
        and (change.action == "Remove" or change.replacement in ("True", "Conditional"))
    ]
    return ", ".join(lost)


def unwanted_stacks(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    """Newest dependents first: the reverse of the order in which they are made."""
    kept = {blueprint.name for blueprint in wanted.stacks}
    for name, stack in reversed(facts.stacks.items()):
        if name in kept:
            continue
        if name in wanted.held:
            yield Step(Action.KEEP, Kind.STACK, name, (wanted.held[name],))
        elif name in wanted.data_stacks:
            yield _data_stack(stack, wanted)
        elif stack.is_busy and not stack.status.startswith("DELETE"):
            yield _busy(stack)
        else:
            how = "wait" if stack.is_busy else ""
            yield Step(Action.DELETE, Kind.STACK, name, ("it is not described any more",), how=how)


def _data_stack(stack: Stack, wanted: Wanted) -> Step:
    file_system = stack.outputs.get("FileSystemId", "")
    if wanted.deletes_files and not wanted.deletes_data and file_system:
        reasons = ("its file system goes; its bucket, with the archive, stays",)
        how = "wait" if stack.is_busy else "without-files"
        return Step(Action.UPDATE, Kind.STACK, stack.name, reasons, file_system, how)
    if wanted.deletes_files and not wanted.deletes_data and stack.is_busy:
        return _busy(stack)
    if not wanted.deletes_data:
        reason = "what it holds stays; --delete-data deletes it"
        return Step(Action.KEEP, Kind.STACK, stack.name, (reason,))
    what = [
        stack.outputs[key]
        for key in ("BucketName", "FileSystemId", "LogGroupName")
        if stack.outputs.get(key)
    ]
    how = "wait" if stack.is_busy else "with-data"
    reasons = ("its data goes with it",)
    return Step(Action.DELETE, Kind.STACK, stack.name, reasons, ", ".join(what), how)
