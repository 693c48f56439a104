"""The steps of `setup` and `teardown`: AWS Batch things, their parts, and CloudFormation stacks."""

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
    SetupTools,
    StackFailure,
    Steps,
    check_time,
    first_failure,
    invalid_fix,
    refuse_unknown,
    update_token,
)

_UPDATE_LIMIT = 3 * 3600.0  # seconds: replacing instances waits for the jobs on them
_JOB_MINUTES = 30  # minutes for runs on instances that are replaced
_TRAILING = 30.0  # seconds in which AWS Batch may still describe the state before an update
_UNDER_WAY = ("CREATING", "UPDATING", "DELETING")


def change_placement_group(
    step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools
) -> Steps:
    assert tools.launch is not None
    groups = dict(facts.groups)
    if step.action is Action.DELETE:
        yield from _delete_group(step.name, tools)
        groups.pop(step.name)
    else:
        tools.launch.create_placement_group(wanted.groups[step.name])
        groups[step.name] = {}
    return replace(facts, groups=groups)


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
    step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools
) -> Steps:
    yield from ()
    assert tools.launch is not None
    templates = dict(facts.templates)
    if step.action is Action.DELETE:
        tools.launch.delete_template(step.name)
        templates.pop(step.name)
        return replace(facts, templates=templates)
    request = wanted.templates[step.name]
    refuse_unknown(step.kind, step.name, request)
    make = tools.launch.add_version if step.name in templates else tools.launch.create_template
    templates[step.name] = make(request)
    return replace(facts, templates=templates)


def change_policy(
    step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools
) -> Steps:
    yield from ()
    there = facts.policies.get(step.name)
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
    others = {key: value for key, value in facts.policies.items() if key != step.name}
    found = tools.compute.policies().get(step.name)
    return replace(facts, policies={**others, step.name: found} if found else others)


def change_environment(
    step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools
) -> Steps:
    environments = dict(facts.environments)
    if step.action is Action.DELETE:
        yield from _delete_environment(step.name, tools, drains=step.how == "drain")
        environments.pop(step.name, None)
        return replace(facts, environments=environments)
    if step.how == "wait":
        environments[step.name] = yield from _wait_until_valid(
            lambda: tools.compute.environment(step.name), step.kind, step.name, tools,
            _UPDATE_LIMIT,
        )  # fmt: skip
        return replace(facts, environments=environments)
    base, request = _request_of(step, wanted, facts)
    refuse_unknown(step.kind, step.name, request)
    name = step.name
    if step.action is Action.UPDATE:
        there = environments[name]
        tools.compute.update_environment(_environment_update(name, request, there))
        if any((there.get("tags") or {}).get(k) != v for k, v in request["tags"].items()):
            tools.compute.tag(there["computeEnvironmentArn"], request["tags"])
    else:
        name = current_name(wanted, facts, base)
        made = {**request, "computeEnvironmentName": name}
        _create(lambda: tools.compute.create_environment(made),
                lambda: tools.compute.environment(name), request)  # fmt: skip
    environments[name] = yield from _wait_until_valid(
        lambda: tools.compute.environment(name), step.kind, name, tools, _UPDATE_LIMIT,
        is_stale=lambda found: decide_environment(request, found)[0] is not Action.KEEP,
    )  # fmt: skip
    return replace(facts, environments=environments)


def _request_of(
    step: PlanStep, wanted: WantedState, facts: CurrentState
) -> tuple[str, dict[str, Any]]:
    """The name in batchml.toml, and the request, of the compute environment of a step."""
    base = next(base for base in wanted.environments if is_version_of(step.name, base))
    return base, wanted.environments[base]


# Members of CreateComputeEnvironment that UpdateComputeEnvironment does not accept.
_CREATE_ONLY = {"spotIamFleetRole"}
_SCALING = {"minvCpus", "maxvCpus", "scalingPolicy"}  # no instance is replaced for these


def _environment_update(
    name: str, request: dict[str, Any], there: dict[str, Any]
) -> dict[str, Any]:
    """The UpdateComputeEnvironment request, with only the resources that differ.

    AWS replaces instances for each infrastructure member in the request, even an unchanged one.
    """

    asked, found = request["computeResources"], there.get("computeResources", {})
    changed = {each.key.partition(".")[0] for each in differences(asked, found)}
    resources = {key: asked[key] for key in asked if key in changed - _CREATE_ONLY}
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
    """Delete a compute environment and its instances. `drains`: give runs the time of an update."""
    yield from _delete_and_wait(
        lambda: tools.compute.environment(name),
        lambda: tools.compute.update_environment(_disabling(name, drains)),
        lambda: tools.compute.delete_environment(name),
        ResourceKind.ENVIRONMENT, name, tools, _JOB_MINUTES * 60.0 if drains else 0.0,
    )  # fmt: skip


def _disabling(name: str, drains: bool) -> dict[str, Any]:
    """The request that disables a compute environment; one that drains keeps no minimum."""
    request: dict[str, Any] = {"computeEnvironment": name, "state": "DISABLED"}
    return {**request, "computeResources": {"minvCpus": 0}} if drains else request


def change_queue(
    step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools
) -> Steps:
    queues = dict(facts.queues)
    if step.action in (Action.DELETE, Action.REPLACE):
        yield from _delete_queue(step.name, tools)
        queues.pop(step.name, None)
    if step.action is Action.DELETE:
        return replace(facts, queues=queues)
    if step.how == "wait":
        queues[step.name] = yield from _wait_until_valid(
            lambda: tools.compute.queue(step.name), step.kind, step.name, tools, BATCH_LIMIT
        )
        return replace(facts, queues=queues)
    request = queues_of(wanted, facts)[step.name]
    refuse_unknown(step.kind, step.name, request)
    there = queues.get(step.name)
    if there is None:
        _create(lambda: tools.compute.create_queue(request),
                lambda: tools.compute.queue(step.name), request)  # fmt: skip
    else:
        tools.compute.update_queue(
            {
                "jobQueue": step.name,
                **{
                    key: value
                    for key, value in request.items()
                    if key not in ("jobQueueName", "tags")
                },
            }
        )
        if any((there.get("tags") or {}).get(k) != v for k, v in request["tags"].items()):
            tools.compute.tag(there["jobQueueArn"], request["tags"])
    queues[step.name] = yield from _wait_until_valid(
        lambda: tools.compute.queue(step.name), step.kind, step.name, tools, BATCH_LIMIT,
        is_stale=lambda found: decide_queue(request, found)[0] is not Action.KEEP,
    )  # fmt: skip
    return replace(facts, queues=queues)


def _delete_queue(name: str, tools: SetupTools) -> Generator[str, None, None]:
    yield from _delete_and_wait(
        lambda: tools.compute.queue(name),
        lambda: tools.compute.update_queue({"jobQueue": name, "state": "DISABLED"}),
        lambda: tools.compute.delete_queue(name),
        ResourceKind.QUEUE, name, tools,
    )  # fmt: skip


def change_definition(
    step: PlanStep, wanted: WantedState, facts: CurrentState, tools: SetupTools
) -> Steps:
    yield from ()
    request = wanted.definitions[step.name]
    refuse_unknown(step.kind, step.name, request)
    tools.batch.register(dated_registration(request, tools.clock.now()))
    return replace(facts, definitions=facts.definitions | {step.name})


Read = Callable[[], dict[str, Any] | None]


def _create(make: Callable[[], None], read: Read, request: dict[str, Any]) -> None:
    """Create a resource by a call without a client token.

    A call whose answer was lost is repeated, and refused because the resource exists.
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

    A description may lag behind. So this also waits for a resource that is not listed yet, and for
    a while for one whose description `is_stale`.
    """
    began = tools.clock.monotonic()
    end, before, pauses = began + limit, "", backoff(PACE)
    while True:
        found = read()
        status = str(found.get("status", "VALID")) if found else "not listed yet"
        is_over = before in _UNDER_WAY or tools.clock.monotonic() > began + _TRAILING
        if found is not None and not is_over and status not in _UNDER_WAY and is_stale(found):
            status = "not updated yet"
        elif found is not None and status == "VALID":
            return found
        if status == "INVALID":
            reason = str((found or {}).get("statusReason", ""))
            raise SetupFailed(kind, name, f"AWS made it INVALID: {reason}", invalid_fix(reason))
        if status != before:
            yield status
            before = status
        check_time(end, kind, name, status, tools)
        tools.clock.sleep(next(pauses))


def _delete_and_wait(
    read: Read, disable: Callable[[], None], delete: Callable[[], None],
    kind: ResourceKind, name: str, tools: SetupTools, patience: float = 0.0,
) -> Generator[str, None, None]:  # fmt: skip
    """Disable a resource, wait, delete it, and wait until it is gone, as AWS requires.

    It stays disabled for `patience` seconds, or until its instances have ended.
    """
    began = tools.clock.monotonic()
    end, before, pauses = began + _UPDATE_LIMIT, "", backoff(PACE)
    while (found := read()) is not None:
        status = str(found.get("status", "VALID"))
        if status not in _UNDER_WAY:
            try:
                if found.get("state") != "DISABLED":
                    disable()
                    status = "disabling"
                elif _has_instances(found) and tools.clock.monotonic() < began + patience:
                    status = f"waiting up to {_JOB_MINUTES} minutes for runs on it"
                else:
                    delete()
                    status = "deleting"
            except ServiceError as error:
                # AWS has not finished the steps before it.
                if not tools.compute.is_still_related(error):
                    raise
                status = "waiting for resources that use it"
        if status != before:
            yield status
            before = status
        check_time(end, kind, name, status, tools)
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


# --- stack steps ----------------------------------------------------------------------------------
# Steps that create, update or delete a CloudFormation stack, and follow its events to the end.


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
    last, pause, over = after or "", PACE.shortest, False
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
        pause = min(_BUSY_PAUSE if new else PACE.longest, pause * 1.5)
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
