"""Carry out one step of `setup` or `teardown`, and wait until AWS has finished it."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from batchml.aws.batch.requests import dated_registration
from batchml.aws.cloudformation import NO_CHANGES, Blueprint, Stack, StackEvent
from batchml.context import backoff
from batchml.errors import BatchmlError, ServiceError, SetupFailed
from batchml.setup.desired import TAG_DATA, with_deletable_data, with_deletable_files, without_files
from batchml.setup.plan import (
    current_name,
    decide_environment,
    decide_queue,
    differences,
    is_version_of,
    queues_of,
)
from batchml.setup.sharing import TAG_ENV, Action, CurrentState, PlanStep, ResourceKind, WantedState
from batchml.setup.tools import (
    BATCH_LIMIT,
    PACE,
    POLICY_OUTPUT,
    SetupTools,
    StackFailure,
    Steps,
    check_time,
    first_failure,
    invalid_fix,
    refuse_unknown,
)

_UPDATE_LIMIT = 3 * 3600.0  # seconds: the replacement of instances waits for the jobs on them
_JOB_MINUTES = 30  # minutes that jobs on instances to replace get to end
_STALE_TIME = 30.0  # seconds in which AWS Batch may still describe the state before an update
_UNDER_WAY = ("CREATING", "UPDATING", "DELETING")


def change_placement_group(
    step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools
) -> Steps:
    assert tools.launch is not None
    groups = dict(current.groups)
    if step.action is Action.DELETE:
        yield from _delete_group(step.name, tools)
        groups.pop(step.name)
    else:
        tools.launch.create_placement_group(wanted.groups[step.name])
        groups[step.name] = {}
    return replace(current, groups=groups)


def _delete_group(name: str, tools: SetupTools) -> Generator[str, None, None]:
    """Delete a placement group, once the instances of its compute environment have ended."""
    assert tools.launch is not None
    end, pauses = tools.clock.monotonic() + BATCH_LIMIT, backoff(PACE)
    is_gone = tools.launch.delete_placement_group(name)
    if not is_gone:
        yield "waiting for its instances to end"
    while not is_gone:
        check_time(end, ResourceKind.PLACEMENT_GROUP, name, "in use", tools)
        tools.clock.sleep(next(pauses))
        is_gone = tools.launch.delete_placement_group(name)


def change_launch_template(
    step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools
) -> Steps:
    yield from ()
    assert tools.launch is not None
    templates = dict(current.templates)
    if step.action is Action.DELETE:
        tools.launch.delete_template(step.name)
        templates.pop(step.name)
        return replace(current, templates=templates)
    request = wanted.templates[step.name]
    refuse_unknown(step.kind, step.name, request)
    make = tools.launch.add_version if step.name in templates else tools.launch.create_template
    templates[step.name] = make(request)
    return replace(current, templates=templates)


def change_policy(
    step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools
) -> Steps:
    yield from ()
    there = current.policies.get(step.name)
    if step.action is Action.DELETE and there is not None:
        tools.compute.delete_policy(there["arn"])
    elif there is None:
        request = wanted.policies[step.name]
        _create(lambda: tools.compute.create_policy(request),
                lambda: tools.compute.policies().get(step.name), request)  # fmt: skip
    else:
        request = wanted.policies[step.name]
        tools.compute.update_policy(there["arn"], request["fairsharePolicy"])
        tools.compute.tag(there["arn"], request["tags"])
    others = {key: value for key, value in current.policies.items() if key != step.name}
    found = tools.compute.policies().get(step.name)
    return replace(current, policies={**others, step.name: found} if found else others)


def change_environment(
    step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools
) -> Steps:
    environments = dict(current.environments)
    if step.action is Action.DELETE:
        yield from _delete_environment(step.name, tools, drains=step.how == "drain")
        environments.pop(step.name, None)
        return replace(current, environments=environments)
    if step.how == "wait":
        environments[step.name] = yield from _wait_until_valid(
            lambda: tools.compute.environment(step.name), step.kind, step.name, tools,
            _UPDATE_LIMIT,
        )  # fmt: skip
        return replace(current, environments=environments)
    base = next(base for base in wanted.environments if is_version_of(step.name, base))
    request = wanted.environments[base]
    refuse_unknown(step.kind, step.name, request)
    name = step.name
    if step.action is Action.UPDATE:
        there = environments[name]
        tools.compute.update_environment(_environment_update(name, request, there))
        if any((there.get("tags") or {}).get(k) != v for k, v in request["tags"].items()):
            tools.compute.tag(there["computeEnvironmentArn"], request["tags"])
    else:
        name = current_name(wanted, current, base)
        named = {**request, "computeEnvironmentName": name}
        _create(lambda: tools.compute.create_environment(named),
                lambda: tools.compute.environment(name), request)  # fmt: skip
    environments[name] = yield from _wait_until_valid(
        lambda: tools.compute.environment(name), step.kind, name, tools, _UPDATE_LIMIT,
        is_stale=lambda found: decide_environment(request, found)[0] is not Action.KEEP,
    )  # fmt: skip
    return replace(current, environments=environments)


_SCALING = {"minvCpus", "maxvCpus", "scalingPolicy"}  # no instance is replaced for these


def _environment_update(
    name: str, request: dict[str, Any], there: dict[str, Any]
) -> dict[str, Any]:
    """The UpdateComputeEnvironment request, with only the resources that differ.

    AWS replaces instances for each infrastructure member in the request, even an unchanged one.
    """

    asked, found = request["computeResources"], there.get("computeResources", {})
    changed = {each.key.partition(".")[0] for each in differences(asked, found)}
    resources = {key: asked[key] for key in asked if key in changed}
    update: dict[str, Any] = {"computeEnvironment": name, "state": "ENABLED"}
    if resources:
        update["computeResources"] = resources
    if set(resources) - _SCALING:
        update["updatePolicy"] = {
            "terminateJobsOnUpdate": False,
            "jobExecutionTimeoutMinutes": _JOB_MINUTES,
        }
    return update


def _delete_environment(
    name: str, tools: SetupTools, *, drains: bool = False
) -> Generator[str, None, None]:
    """Delete a compute environment and its instances. `drains`: first give its jobs time to end."""
    disable: dict[str, Any] = {"computeEnvironment": name, "state": "DISABLED"}
    if drains:
        disable["computeResources"] = {"minvCpus": 0}  # so that instances without jobs end
    yield from _delete_and_wait(
        lambda: tools.compute.environment(name),
        lambda: tools.compute.update_environment(disable),
        lambda: tools.compute.delete_environment(name),
        ResourceKind.ENVIRONMENT, name, tools, _JOB_MINUTES * 60.0 if drains else 0.0,
    )  # fmt: skip


def change_queue(
    step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools
) -> Steps:
    queues = dict(current.queues)
    if step.action in (Action.DELETE, Action.REPLACE):
        yield from _delete_queue(step.name, tools)
        queues.pop(step.name, None)
    if step.action is Action.DELETE:
        return replace(current, queues=queues)
    if step.how == "wait":
        queues[step.name] = yield from _wait_until_valid(
            lambda: tools.compute.queue(step.name), step.kind, step.name, tools, BATCH_LIMIT
        )
        return replace(current, queues=queues)
    request = queues_of(wanted, current)[step.name]
    refuse_unknown(step.kind, step.name, request)
    there = queues.get(step.name)
    if there is None:
        _create(lambda: tools.compute.create_queue(request),
                lambda: tools.compute.queue(step.name), request)  # fmt: skip
    else:
        update = {key: request[key] for key in request if key not in ("jobQueueName", "tags")}
        tools.compute.update_queue({"jobQueue": step.name, **update})
        if any((there.get("tags") or {}).get(k) != v for k, v in request["tags"].items()):
            tools.compute.tag(there["jobQueueArn"], request["tags"])
    queues[step.name] = yield from _wait_until_valid(
        lambda: tools.compute.queue(step.name), step.kind, step.name, tools, BATCH_LIMIT,
        is_stale=lambda found: decide_queue(request, found)[0] is not Action.KEEP,
    )  # fmt: skip
    return replace(current, queues=queues)


def _delete_queue(name: str, tools: SetupTools) -> Generator[str, None, None]:
    yield from _delete_and_wait(
        lambda: tools.compute.queue(name),
        lambda: tools.compute.update_queue({"jobQueue": name, "state": "DISABLED"}),
        lambda: tools.compute.delete_queue(name),
        ResourceKind.QUEUE, name, tools,
    )  # fmt: skip


def change_definition(
    step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools
) -> Steps:
    yield from ()
    request = wanted.definitions[step.name]
    refuse_unknown(step.kind, step.name, request)
    tools.batch.register(dated_registration(request, tools.clock.now()))
    return replace(current, definitions=current.definitions | {step.name})


Read = Callable[[], dict[str, Any] | None]


def _create(make: Callable[[], None], read: Read, request: dict[str, Any]) -> None:
    """Create a resource by a call without a client token.

    boto3 repeats a call whose answer was lost, and AWS then refuses it because the resource exists.
    """
    try:
        make()
    except ServiceError as error:
        there = read() if "already exists" in error.message else None
        if there is None or (there.get("tags") or {}).get(TAG_ENV) != request["tags"][TAG_ENV]:
            raise


def _wait_until_valid(
    read: Read, kind: ResourceKind, name: str, tools: SetupTools, limit: float,
    is_stale: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> Generator[str, None, dict[str, Any]]:  # fmt: skip
    """Wait until a resource is VALID. Raises SetupFailed if AWS makes it INVALID.

    AWS's descriptions lag behind. So this also waits for a resource that is not listed yet, and for
    some seconds for a resource whose description `is_stale`.
    """
    began = tools.clock.monotonic()
    end, previous, pauses = began + limit, "", backoff(PACE)
    while True:
        found = read()
        status = str(found.get("status", "VALID")) if found else "not listed yet"
        is_fresh = previous in _UNDER_WAY or tools.clock.monotonic() > began + _STALE_TIME
        if found is not None and not is_fresh and status not in _UNDER_WAY and is_stale(found):
            status = "not updated yet"
        elif found is not None and status == "VALID":
            return found
        if status == "INVALID":
            reason = str((found or {}).get("statusReason", ""))
            raise SetupFailed(kind, name, f"AWS made it INVALID: {reason}", invalid_fix(reason))
        if status != previous:
            yield status
            previous = status
        check_time(end, kind, name, status, tools)
        tools.clock.sleep(next(pauses))


def _delete_and_wait(
    read: Read, disable: Callable[[], None], delete: Callable[[], None],
    kind: ResourceKind, name: str, tools: SetupTools, patience: float = 0.0,
) -> Generator[str, None, None]:  # fmt: skip
    """Disable a resource, wait, delete it, and wait until it is gone, as AWS requires.

    It stays disabled for `patience` seconds, or until its instances have ended. It is read at once
    after each change; a description that is older than the change counts from the next one on.
    """
    began = tools.clock.monotonic()
    end, previous, pauses = began + _UPDATE_LIMIT, "", backoff(PACE)
    change = ""
    while (found := read()) is not None:
        status, last, change = str(found.get("status", "VALID")), change, ""
        if status in _UNDER_WAY:
            pass
        elif last == "deleting" or (last and found.get("state") != "DISABLED"):
            status = last
        else:
            try:
                if found.get("state") != "DISABLED":
                    disable()
                    status = change = "disabling"
                elif _has_instances(found) and tools.clock.monotonic() < began + patience:
                    status = f"waiting up to {_JOB_MINUTES} minutes for runs on it"
                else:
                    delete()
                    status = change = "deleting"
            except ServiceError as error:
                # AWS has not finished an earlier change.
                if not tools.compute.is_still_related(error):
                    raise
                status = "waiting for resources that use it"
        if status != previous:
            yield status
            previous = status
        check_time(end, kind, name, status, tools)
        if not change:
            tools.clock.sleep(next(pauses))


def _has_instances(found: dict[str, Any]) -> bool:
    resources = found.get("computeResources") or {}
    return bool(resources.get("desiredvCpus", 0) > resources.get("minvCpus", 0))


def settle(
    request: Mapping[str, Any], tools: SetupTools, report: Callable[[str], None]
) -> dict[str, Any]:
    """Wait until AWS has applied an UpdateJobQueue or UpdateComputeEnvironment request.

    Returns the description after it. Raises SetupFailed if AWS makes the resource INVALID.
    """
    asked = dict(request)
    if "jobQueue" in asked:
        kind, name, read = ResourceKind.QUEUE, asked.pop("jobQueue"), tools.compute.queue
    else:
        kind, name = ResourceKind.ENVIRONMENT, asked.pop("computeEnvironment")
        read = tools.compute.environment
    waiting = _wait_until_valid(
        lambda: read(name), kind, name, tools, _UPDATE_LIMIT,
        is_stale=lambda found: any(differences(asked, found)),
    )  # fmt: skip
    return _run_and_report(waiting, report)


def remove(kind: ResourceKind, name: str, tools: SetupTools, report: Callable[[str], None]) -> None:
    """Delete a queue or compute environment, with its scheduling policy or launch template."""
    if kind is ResourceKind.QUEUE:
        _run_and_report(_delete_queue(name, tools), report)
        policy = tools.compute.policies().get(name)
        if policy is not None:
            tools.compute.delete_policy(policy["arn"])
        return
    _run_and_report(_delete_environment(name, tools), report)
    if tools.launch is not None:
        tools.launch.delete_template(name)
        _run_and_report(_delete_group(name, tools), report)


Result = TypeVar("Result")


def _run_and_report(run: Generator[str, None, Result], report: Callable[[str], None]) -> Result:
    """Run a wait to its end, report its messages, and return its result."""
    while True:
        try:
            report(next(run))
        except StopIteration as end:
            found: Result = end.value
            return found


# --- CloudFormation stacks ------------------------------------------------------------------------
_STACK_LIMIT = 3 * 3600.0  # seconds; an AMI takes most of an hour
_BUSY_PAUSE = 2.0  # seconds between two polls while events come


def change_stack(
    step: PlanStep, wanted: WantedState, current: CurrentState, tools: SetupTools
) -> Steps:
    """Create, update or delete a stack, and follow its events to the end."""
    stack = current.stacks.get(step.name)
    blueprint = next((each for each in wanted.stacks if each.name == step.name), None)
    if stack is not None and step.how in ("wait", "continue-rollback", "without-files"):
        if step.how == "wait":
            found = yield from _follow(stack, tools, after=None)
        elif step.how == "continue-rollback":
            found = yield from _continue_rollback(stack, tools)
        else:
            found = yield from _delete_file_system(stack, current, tools)
        return _with_stack(current, step.name, found)
    if step.how == "with-data" and stack is not None:
        stack = yield from _prepare_deletion_of_data(stack, current, tools)
    if stack is not None and (step.action is Action.DELETE or step.how == "recreate"):
        if wanted.detaches:
            yield from _detach_policy(stack, tools)
        try:
            yield from _delete_stack(stack, tools)
        except SetupFailed:
            left = tools.stacks.read(stack.id) if step.how == "with-data" else None
            if left is None:
                raise
            # AWS has written to the access log since: empty the buckets again.
            yield from _empty_buckets(stack, tools)
            yield from _delete_stack(left, tools)
        return _with_stack(current, step.name, None)
    assert blueprint is not None
    if stack is None:
        found = yield from _create_stack(blueprint, tools)
    else:
        found = yield from _update_stack(blueprint, stack, current, tools)
        if found is not None and found.changed_at == stack.changed_at:
            # AWS saw no change, so the next plan must see none.
            current = _with_stack(current, step.name, found)
            return replace(current, change_sets={**current.change_sets, step.name: NO_CHANGES})
    return _with_stack(current, step.name, found)


def _with_stack(current: CurrentState, name: str, stack: Stack | None) -> CurrentState:
    """The state after a stack has changed, without its old change set and failure cause."""
    without = {key: value for key, value in current.stacks.items() if key != name}
    stacks = {**current.stacks, name: stack} if stack is not None else without
    change_sets = {key: value for key, value in current.change_sets.items() if key != name}
    failure_causes = {key: value for key, value in current.failure_causes.items() if key != name}
    return replace(current, stacks=stacks, change_sets=change_sets, failure_causes=failure_causes)


def _create_stack(blueprint: Blueprint, tools: SetupTools) -> Generator[str, None, Stack | None]:
    refuse_unknown(ResourceKind.STACK, blueprint.name, blueprint.parameters)
    stack_id = tools.stacks.create(blueprint)
    begun = Stack(stack_id, blueprint.name, "CREATE_IN_PROGRESS")
    return (yield from _follow(begun, tools, after=None))


def _update_stack(
    blueprint: Blueprint, stack: Stack, current: CurrentState, tools: SetupTools
) -> Generator[str, None, Stack | None]:
    refuse_unknown(ResourceKind.STACK, blueprint.name, blueprint.parameters)
    change_set = current.change_sets.get(stack.name)
    if change_set is None or change_set.token != blueprint.update_token(stack):
        change_set = tools.create_change_set(blueprint, stack)
    if change_set.is_empty:
        tools.stacks.guard(blueprint)
        return tools.stacks.read(stack.id)
    if stack.name in tools.replacing:
        tools.stacks.unguard(stack.name)
    newest = _newest_event(stack, tools)
    tools.stacks.execute(change_set.id, stack.name)
    found = yield from _follow(stack, tools, after=newest)
    tools.stacks.guard(blueprint)
    return tools.stacks.read(stack.id) if blueprint.is_protected else found


def _prepare_deletion_of_data(
    stack: Stack, current: CurrentState, tools: SetupTools
) -> Generator[str, None, Stack | None]:
    """Change a stack's policies so that its deletion deletes its data, and empty its buckets."""
    found: Stack | None = stack
    if stack.status == "UPDATE_ROLLBACK_FAILED":
        yield from _continue_rollback(stack, tools)  # AWS refuses an update before that
    if stack.tags.get(TAG_DATA) != "delete" and not _is_left_over(stack):
        unguarded = replace(tools, replacing=frozenset({stack.name}))
        found = yield from _update_stack(with_deletable_data(stack), stack, current, unguarded)
    yield from _empty_buckets(stack, tools)
    return found


def _delete_file_system(
    stack: Stack, current: CurrentState, tools: SetupTools
) -> Generator[str, None, Stack | None]:
    """Delete the file system of a stack: first change its deletion policy, then remove it."""
    found: Stack | None = stack
    if stack.status == "UPDATE_ROLLBACK_FAILED":
        found = yield from _continue_rollback(stack, tools)
    unguarded = replace(tools, replacing=frozenset({stack.name}))
    if stack.tags.get(TAG_DATA) != "files":
        found = yield from _update_stack(with_deletable_files(stack), stack, current, unguarded)
    if found is None:
        return None
    return (yield from _update_stack(without_files(found), found, current, unguarded))


def _empty_buckets(stack: Stack, tools: SetupTools) -> Generator[str, None, None]:
    """Empty a stack's buckets: the data and the access log."""
    bucket = stack.outputs.get("BucketName", "")
    if bucket and tools.empty_bucket is not None:
        for each in (bucket, f"{bucket}-logs"):
            yield f"emptying {each}"
            tools.empty_bucket(each)


def _detach_policy(stack: Stack, tools: SetupTools) -> Generator[str, None, None]:
    """Take a stack's policy from the people who have it."""
    policy = stack.outputs.get(POLICY_OUTPUT, "")
    if policy and tools.policies is not None:
        for each in tools.policies.attachments(policy):
            tools.policies.detach(policy, each)
            yield f"policy detached from {each}"


def _is_left_over(stack: Stack) -> bool:
    """Whether an earlier failure left a stack that cannot be updated."""
    return stack.status in (
        "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "DELETE_FAILED",
        "REVIEW_IN_PROGRESS",
    )  # fmt: skip


def _delete_stack(stack: Stack, tools: SetupTools) -> Generator[str, None, None]:
    if stack.outputs.get("ImageId") and tools.launch is not None:
        # The current image is deleted with its stack. Older images were kept for their instances.
        env = stack.tags.get(TAG_ENV, "")
        for image in tools.launch.delete_images(env, keep=stack.outputs["ImageId"]) if env else ():
            yield f"{image} deregistered"
    newest = _newest_event(stack, tools)
    tools.stacks.delete(stack)
    yield from _follow(stack, tools, after=newest)


def _continue_rollback(stack: Stack, tools: SetupTools) -> Generator[str, None, Stack | None]:
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
    newest = _newest_event(stack, tools)
    tools.stacks.continue_rollback(stack, tools.continue_rollback)
    return (yield from _follow(stack, tools, after=newest))


def _stuck(events: Sequence[StackEvent], stack: Stack) -> list[StackEvent]:
    """The failures of the rollback, without the earlier failures of the update itself."""
    found: list[StackEvent] = []
    for event in events:
        if event.physical_id == stack.id and event.status == "UPDATE_ROLLBACK_IN_PROGRESS":
            found = []
        elif event.physical_id != stack.id and event.status == "UPDATE_FAILED":
            found.append(event)
    return found


def _newest_event(stack: Stack, tools: SetupTools) -> str:
    events = tools.stacks.events(stack.id)
    return events[-1].id if events else ""


def _follow(
    stack: Stack, tools: SetupTools, after: str | None
) -> Generator[str, None, Stack | None]:
    """Follow an operation on a stack to its end; return the stack, or None if it is deleted.

    Each poll is one call: the events name each change of a resource, and the end. `after`: the last
    event before the operation; None follows the operation under way from its beginning. Raises
    SetupFailed with the first cause if it failed.
    """
    end = tools.clock.monotonic() + _STACK_LIMIT
    last, pause, is_over = after or "", PACE.shortest, False
    stacks = tools.stacks
    events = stacks.operation(stack.id) if after is None else stacks.events(stack.id, last)
    new = events
    while True:
        for event in new:
            last = event.id
            is_own = event.physical_id == stack.id
            is_over = is_own and not event.status.endswith("IN_PROGRESS")
            if not is_own:
                yield f"{event.resource} {event.status}"
        if is_over:
            return _outcome(stack, tools, events)
        if tools.clock.monotonic() > end:
            raise BatchmlError(f"stack {stack.name} is not done after {_STACK_LIMIT / 3600:.0f} h.")
        tools.clock.sleep(pause)
        pause = min(_BUSY_PAUSE if new else PACE.longest, pause * 1.5)
        new = stacks.events(stack.id, last)
        events += new


def _outcome(stack: Stack, tools: SetupTools, events: Sequence[StackEvent]) -> Stack | None:
    """The stack after its operation; None if it is deleted. Raises SetupFailed."""
    status = events[-1].status
    found = None if status == "DELETE_COMPLETE" else tools.stacks.read(stack.id)
    if status in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "DELETE_COMPLETE", "IMPORT_COMPLETE"):
        return found
    was_stuck = stack.status == "UPDATE_ROLLBACK_FAILED" or tools.continue_rollback is not None
    if status == "UPDATE_ROLLBACK_COMPLETE" and was_stuck and "ROLLBACK" in stack.status:
        return found  # the rollback was asked for
    failure = first_failure(events) or StackFailure(stack.name, "", events[-1].reason or status)
    raise SetupFailed(
        ResourceKind.STACK, stack.name, f"{status}. First cause: {failure}", failure.fix
    )
