"""Take one step of a plan: the edge between a decision and AWS.

Each function does what a step says, waits until AWS has done it, and returns the facts as they are
then. While it waits it yields what is worth saying.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch import BatchApi
from batchml.aws.compute import ComputeApi
from batchml.aws.launch import LaunchApi
from batchml.aws.requests import registration
from batchml.aws.stacks import NO_CHANGES, Blueprint, ChangeSet, Drift, Stack, StackEvent, Stacks
from batchml.clock import Clock
from batchml.errors import AccessError, BatchmlError, ServiceError
from batchml.ops.causes import Failure, failure_of, fix_for, invalid_fix
from batchml.ops.desired import TAG_DATA, doomed
from batchml.ops.plan import (
    TAG_ENV,
    Action,
    Facts,
    Kind,
    Step,
    Wanted,
    decide_environment,
    decide_queue,
    generation,
    is_generation,
    is_known,
    queues_of,
)

Steps = Generator[str, None, Facts]

_STACK_LIMIT = 3 * 3600.0  # seconds; an AMI takes most of an hour
_BATCH_LIMIT = 900.0  # seconds for a compute environment or queue to settle
_DRIFT_LIMIT = 300.0
_UPDATE_LIMIT = 3 * 3600.0  # an update that replaces instances waits for the jobs on them
_JOB_MINUTES = 30  # for runs on instances that are replaced
_TRAILING = 30.0  # seconds for which AWS Batch may still describe what was before an update
_UNDER_WAY = ("CREATING", "UPDATING", "DELETING")
_PAUSE = 0.5
_BUSY_PAUSE = 2.0  # while there is something to tell
_MAX_PAUSE = 10.0


class SetupFailed(BatchmlError):
    """A step failed in AWS: what, the first cause, and what to do."""

    def __init__(self, kind: Kind, name: str, what: str, fix: str) -> None:
        super().__init__(f"{kind} {name}: {what}\n  {fix}")


class Tools(Struct, frozen=True):
    """What steps are taken with. On `local` there are no stacks and no launch templates."""

    stacks: Stacks
    compute: ComputeApi
    batch: BatchApi
    clock: Clock
    launch: LaunchApi | None = None
    empty_bucket: Callable[[str], None] | None = None
    continue_rollback: Sequence[str] | None = None  # None: ask first; else resources to skip
    command: str = "setup"  # what to type again, for messages
    replacing: frozenset[str] = frozenset()  # stacks whose data may be replaced now

    def propose(self, blueprint: Blueprint, stack: Stack) -> ChangeSet:
        """What AWS says an update would do; waits for it."""
        change_set = self.stacks.propose(blueprint, stack)
        end, pause = self.clock.monotonic() + _BATCH_LIMIT, _PAUSE
        while (found := self.stacks.proposal(change_set)).is_pending:
            if self.clock.monotonic() > end:
                raise BatchmlError(f"CloudFormation is still working on {change_set}.")
            self.clock.sleep(pause)
            pause = min(_MAX_PAUSE, pause * 1.5)
        if not found.is_ready and not found.is_empty:
            self.stacks.discard(change_set)
            fix = fix_for(found.reason)
            raise SetupFailed(Kind.STACK, stack.name, f"AWS refuses: {found.reason}", fix)
        if found.is_empty:
            self.stacks.discard(change_set)
        return replace(found, token=_update_token(blueprint, stack))

    def drifts(self, name: str) -> tuple[Drift, ...]:
        """What was changed by hand; nothing where AWS cannot say."""
        try:
            detection = self.stacks.detect_drift(name)
            end, pause = self.clock.monotonic() + _DRIFT_LIMIT, _PAUSE
            while not self.stacks.drift_is_known(detection):
                if self.clock.monotonic() > end:
                    return ()
                self.clock.sleep(pause)
                pause = min(_MAX_PAUSE, pause * 1.5)
            return tuple(self.stacks.drifts(name))
        except (ServiceError, AccessError):
            return ()

    def first_cause(self, stack: Stack) -> str:
        found = failure_of(self.stacks.operation(stack.id))
        return str(found) if found else stack.reason


def perform(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    """Take a step. Raises SetupFailed, or what a refusal is translated to."""
    return (yield from _PERFORMERS[step.kind](step, wanted, facts, tools))


# --- stacks ---------------------------------------------------------------------------------


def _stack(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    stack = facts.stacks.get(step.name)
    blueprint = next((each for each in wanted.stacks if each.name == step.name), None)
    if step.how == "wait" and stack is not None:
        found = yield from _follow(stack, tools, after=None)
        return _with_stack(facts, step.name, found)
    if step.how == "continue-rollback" and stack is not None:
        found = yield from _unstick(stack, tools)
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
            # The access log is written late: what came meanwhile goes, too.
            yield from _empty(stack, tools)
            yield from _delete_stack(left, tools)
        return _with_stack(facts, step.name, None)
    assert blueprint is not None
    if stack is None:
        found = yield from _create_stack(blueprint, tools)
    else:
        found = yield from _update_stack(blueprint, stack, facts, tools)
        if found is not None and found.changed_at == stack.changed_at:
            # To AWS it was no change; nor is it to the next plan.
            facts = _with_stack(facts, step.name, found)
            return replace(facts, proposals={**facts.proposals, step.name: NO_CHANGES})
    return _with_stack(facts, step.name, found)


def _with_stack(facts: Facts, name: str, stack: Stack | None) -> Facts:
    """The facts with one stack as it is now, in the place that it had."""
    without = {key: value for key, value in facts.stacks.items() if key != name}
    stacks = {**facts.stacks, name: stack} if stack is not None else without
    proposals = {key: value for key, value in facts.proposals.items() if key != name}
    causes = {key: value for key, value in facts.causes.items() if key != name}
    return replace(facts, stacks=stacks, proposals=proposals, causes=causes)


def _create_stack(blueprint: Blueprint, tools: Tools) -> Generator[str, None, Stack | None]:
    _refuse_unknown(Kind.STACK, blueprint.name, blueprint.parameters)
    stack_id = tools.stacks.create(blueprint)
    begun = Stack(stack_id, blueprint.name, "CREATE_IN_PROGRESS")
    return (yield from _follow(begun, tools, after=None))


def _update_stack(
    blueprint: Blueprint, stack: Stack, facts: Facts, tools: Tools
) -> Generator[str, None, Stack | None]:
    _refuse_unknown(Kind.STACK, blueprint.name, blueprint.parameters)
    proposal = facts.proposals.get(stack.name)
    if proposal is None or proposal.token != _update_token(blueprint, stack):
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


def _update_token(blueprint: Blueprint, stack: Stack) -> str:
    return blueprint.token("update", stack.changed_at)


def _without_retention(
    stack: Stack, facts: Facts, tools: Tools
) -> Generator[str, None, Stack | None]:
    """Let a stack's data go with it: its policies are changed first, then its bucket is emptied."""
    found: Stack | None = stack
    if stack.status == "UPDATE_ROLLBACK_FAILED":
        yield from _unstick(stack, tools)  # it takes no update before that
    if stack.tags.get(TAG_DATA) != "delete" and not _is_left_over(stack):
        freed = replace(tools, replacing=frozenset({stack.name}))
        found = yield from _update_stack(doomed(stack), stack, facts, freed)
    yield from _empty(stack, tools)
    return found


def _empty(stack: Stack, tools: Tools) -> Generator[str, None, None]:
    """Empty a stack's buckets: its data's, and that of the access log."""
    bucket = stack.outputs.get("BucketName", "")
    if bucket and tools.empty_bucket is not None:
        for each in (bucket, f"{bucket}-logs"):
            yield f"emptying {each}"
            tools.empty_bucket(each)


def _is_left_over(stack: Stack) -> bool:
    """Whether an earlier failure left nothing of a stack that could be updated."""
    return stack.status in (
        "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "DELETE_FAILED",
        "REVIEW_IN_PROGRESS",
    )  # fmt: skip


def _delete_stack(stack: Stack, tools: Tools) -> Generator[str, None, None]:
    if stack.outputs.get("ImageId") and tools.launch is not None:
        # The image itself goes with its stack; earlier ones stayed for what started from them.
        env = stack.tags.get(TAG_ENV, "")
        for image in tools.launch.delete_images(env, keep=stack.outputs["ImageId"]) if env else ():
            yield f"{image} deregistered"
    newest = tools.stacks.events(stack.id)
    tools.stacks.delete(stack)
    yield from _follow(stack, tools, after=newest[-1].id if newest else "")


def _unstick(stack: Stack, tools: Tools) -> Generator[str, None, Stack | None]:
    """Continue a rollback that failed, if that was asked for."""
    stuck = _stuck(tools.stacks.operation(stack.id), stack)
    if tools.continue_rollback is None:
        names = ", ".join(dict.fromkeys(event.resource for event in stuck)) or "a resource"
        why = stuck[-1].reason if stuck else stack.reason
        raise SetupFailed(
            Kind.STACK, stack.name,
            f"undoing its last update is stuck at {names}: {why}",
            f"Mend what that says, then: batchml {tools.command} --continue-rollback. Or leave the "
            f"resource as it is: batchml {tools.command} --continue-rollback --skip-resource "
            f"{names.split(',')[0]}",
        )  # fmt: skip
    newest = tools.stacks.events(stack.id)
    tools.stacks.continue_rollback(stack, tools.continue_rollback)
    return (yield from _follow(stack, tools, after=newest[-1].id if newest else ""))


def _stuck(events: Sequence[StackEvent], stack: Stack) -> list[StackEvent]:
    """What failed while an update was undone; what failed in the update itself came before."""
    found: list[StackEvent] = []
    for event in events:
        if event.physical_id == stack.id and event.status == "UPDATE_ROLLBACK_IN_PROGRESS":
            found = []
        elif event.physical_id != stack.id and event.status == "UPDATE_FAILED":
            found.append(event)
    return found


def _follow(stack: Stack, tools: Tools, after: str | None) -> Generator[str, None, Stack | None]:
    """Watch an operation on a stack to its end; the stack then, None once it is gone.

    The events tell all: what happens to each resource, and by the stack's own that it is over. So
    this is one call a look. Without `after` the operation that is under way is followed from its
    beginning. Raises SetupFailed with the first cause when it failed.
    """
    end = tools.clock.monotonic() + _STACK_LIMIT
    seen: list[StackEvent] = tools.stacks.operation(stack.id) if after is None else []
    last, pause, over = after or "", _PAUSE, False
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
        pause = min(_BUSY_PAUSE if new else _MAX_PAUSE, pause * 1.5)
        new = tools.stacks.events(stack.id, last)
        seen += new
    return _outcome(stack, tools, seen)


def _is_final(status: str) -> bool:
    return not status.endswith("IN_PROGRESS")


def _outcome(stack: Stack, tools: Tools, seen: Sequence[StackEvent]) -> Stack | None:
    status = seen[-1].status
    found = None if status == "DELETE_COMPLETE" else tools.stacks.read(stack.id)
    if status in ("CREATE_COMPLETE", "UPDATE_COMPLETE", "DELETE_COMPLETE", "IMPORT_COMPLETE"):
        return found
    was_stuck = stack.status == "UPDATE_ROLLBACK_FAILED" or tools.continue_rollback is not None
    if status == "UPDATE_ROLLBACK_COMPLETE" and was_stuck and "ROLLBACK" in stack.status:
        return found  # that is what was asked for
    failure = failure_of(seen) or Failure(stack.name, "", seen[-1].reason or status)
    raise SetupFailed(Kind.STACK, stack.name, f"{status}. First cause: {failure}", failure.fix)


# --- EC2 ------------------------------------------------------------------------------------


def _placement_group(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    assert tools.launch is not None
    groups = dict(facts.groups)
    if step.action is Action.DELETE:
        yield from _delete_group(step.name, tools)
        groups.pop(step.name)
    else:
        tools.launch.create_placement_group(wanted.groups[step.name])
        groups[step.name] = {}
    return replace(facts, groups=groups)


def _delete_group(name: str, tools: Tools) -> Generator[str, None, None]:
    """Delete a placement group, once the instances of its compute environment have ended."""
    assert tools.launch is not None
    end, pause = tools.clock.monotonic() + _BATCH_LIMIT, _PAUSE
    while not tools.launch.delete_placement_group(name):
        if pause == _PAUSE:
            yield "waiting for its instances to end"
        _check_time(end, Kind.PLACEMENT_GROUP, name, "in use", tools)
        tools.clock.sleep(pause)
        pause = min(_MAX_PAUSE, pause * 1.5)


def _launch_template(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    yield from ()
    assert tools.launch is not None
    templates = dict(facts.templates)
    if step.action is Action.DELETE:
        tools.launch.delete_template(step.name)
        templates.pop(step.name)
        return replace(facts, templates=templates)
    request = wanted.templates[step.name]
    _refuse_unknown(step.kind, step.name, request)
    make = tools.launch.add_version if step.name in templates else tools.launch.create_template
    templates[step.name] = make(request)
    return replace(facts, templates=templates)


# --- AWS Batch ------------------------------------------------------------------------------


def _policy(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
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


def _environment(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    environments = dict(facts.environments)
    if step.action is Action.DELETE:
        yield from _delete_environment(step.name, tools, drains=step.how == "drain")
        environments.pop(step.name, None)
        return replace(facts, environments=environments)
    if step.how == "wait":
        environments[step.name] = yield from _settled(
            lambda: tools.compute.environment(step.name), step.kind, step.name, tools,
            _UPDATE_LIMIT,
        )  # fmt: skip
        return replace(facts, environments=environments)
    base, request = _request_of(step, wanted, facts)
    _refuse_unknown(step.kind, step.name, request)
    name = step.name
    if step.action is Action.UPDATE:
        there = environments[name]
        tools.compute.update_environment(_environment_update(name, request, there))
        if any((there.get("tags") or {}).get(k) != v for k, v in request["tags"].items()):
            tools.compute.tag(there["computeEnvironmentArn"], request["tags"])
    else:
        name = generation(wanted, facts, base)
        made = {**request, "computeEnvironmentName": name}
        _create(lambda: tools.compute.create_environment(made),
                lambda: tools.compute.environment(name), request)  # fmt: skip
    environments[name] = yield from _settled(
        lambda: tools.compute.environment(name), step.kind, name, tools, _UPDATE_LIMIT,
        is_stale=lambda found: decide_environment(request, found)[0] is not Action.KEEP,
    )  # fmt: skip
    return replace(facts, environments=environments)


def _request_of(step: Step, wanted: Wanted, facts: Facts) -> tuple[str, dict[str, Any]]:
    """The request of the compute environment that is there under a step's name."""
    base = next(base for base in wanted.environments if is_generation(step.name, base))
    return base, wanted.environments[base]


# What UpdateComputeEnvironment does not take, of what CreateComputeEnvironment does.
_CREATE_ONLY = {"spotIamFleetRole"}
_SCALING = {"minvCpus", "maxvCpus", "scalingPolicy"}  # no instance is replaced for these


def _environment_update(
    name: str, request: dict[str, Any], there: dict[str, Any]
) -> dict[str, Any]:
    """The UpdateComputeEnvironment arguments: of the resources what differs, and nothing else.

    Whatever of the infrastructure is named makes AWS replace instances, changed or not.
    """
    from batchml.ops.differences import differences

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
    name: str, tools: Tools, *, drains: bool = False
) -> Generator[str, None, None]:
    """Its instances end with it. `drains`: runs on them get as long as an update would give."""
    yield from _gone(
        lambda: tools.compute.environment(name),
        lambda: tools.compute.update_environment(_disabling(name, drains)),
        lambda: tools.compute.delete_environment(name),
        Kind.ENVIRONMENT, name, tools, _JOB_MINUTES * 60.0 if drains else 0.0,
    )  # fmt: skip


def _disabling(name: str, drains: bool) -> dict[str, Any]:
    """A disabled compute environment keeps its least instances, unless that is none."""
    request: dict[str, Any] = {"computeEnvironment": name, "state": "DISABLED"}
    return {**request, "computeResources": {"minvCpus": 0}} if drains else request


def _queue(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    queues = dict(facts.queues)
    if step.action in (Action.DELETE, Action.REPLACE):
        yield from _delete_queue(step.name, tools)
        queues.pop(step.name, None)
    if step.action is Action.DELETE:
        return replace(facts, queues=queues)
    if step.how == "wait":
        queues[step.name] = yield from _settled(
            lambda: tools.compute.queue(step.name), step.kind, step.name, tools, _BATCH_LIMIT
        )
        return replace(facts, queues=queues)
    request = queues_of(wanted, facts)[step.name]
    _refuse_unknown(step.kind, step.name, request)
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
    queues[step.name] = yield from _settled(
        lambda: tools.compute.queue(step.name), step.kind, step.name, tools, _BATCH_LIMIT,
        is_stale=lambda found: decide_queue(request, found)[0] is not Action.KEEP,
    )  # fmt: skip
    return replace(facts, queues=queues)


def _delete_queue(name: str, tools: Tools) -> Generator[str, None, None]:
    yield from _gone(
        lambda: tools.compute.queue(name),
        lambda: tools.compute.update_queue({"jobQueue": name, "state": "DISABLED"}),
        lambda: tools.compute.delete_queue(name),
        Kind.QUEUE, name, tools,
    )  # fmt: skip


def _definition(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    yield from ()
    request = wanted.definitions[step.name]
    _refuse_unknown(step.kind, step.name, request)
    tools.batch.register(registration(request, tools.clock.now()))
    return replace(facts, definitions=facts.definitions | {step.name})


def settle(kind: Kind, name: str, tools: Tools, report: Callable[[str], None]) -> dict[str, Any]:
    """Wait until an update of a queue or compute environment has been taken; what it is then.

    Raises SetupFailed when AWS finds it INVALID.
    """
    read = tools.compute.queue if kind is Kind.QUEUE else tools.compute.environment
    return _drained(_settled(lambda: read(name), kind, name, tools, _UPDATE_LIMIT), report)


def remove(kind: Kind, name: str, tools: Tools, report: Callable[[str], None]) -> None:
    """Delete a queue, or a compute environment with what was made for it alone."""
    if kind is Kind.QUEUE:
        _drained(_delete_queue(name, tools), report)
        policy = tools.compute.policies().get(name)
        if policy is not None:
            tools.compute.delete_policy(policy["arn"])
        return
    _drained(_delete_environment(name, tools), report)
    if tools.launch is not None:
        tools.launch.delete_template(name)
        _drained(_delete_group(name, tools), report)


Ended = TypeVar("Ended")


def _drained(run: Generator[str, None, Ended], report: Callable[[str], None]) -> Ended:
    """What a wait returns in the end; what it yields meanwhile is reported."""
    while True:
        try:
            report(next(run))
        except StopIteration as end:
            found: Ended = end.value
            return found


Read = Callable[[], dict[str, Any] | None]


def _create(make: Callable[[], None], read: Read, request: dict[str, Any]) -> None:
    """Make what has no token. A call whose answer was lost is sent again, and then refused, since
    what it asks for is there."""
    try:
        make()
    except ServiceError as error:
        there = read() if "already exists" in error.message else None
        if there is None or (there.get("tags") or {}).get(TAG_ENV) != request["tags"][TAG_ENV]:
            raise


def _settled(
    read: Read, kind: Kind, name: str, tools: Tools, limit: float,
    is_stale: Callable[[dict[str, Any]], bool] = lambda _: False,
) -> Generator[str, None, dict[str, Any]]:  # fmt: skip
    """Wait until a resource is VALID. Raises SetupFailed when AWS finds it INVALID.

    A description may trail what was asked for, so one that is not there yet is waited for as well,
    and one that `is_stale` for a while.
    """
    began = tools.clock.monotonic()
    end, before, pause = began + limit, "", 0.5
    while True:
        found = read()
        status = str(found.get("status", "VALID")) if found else "not there yet"
        is_over = before in _UNDER_WAY or tools.clock.monotonic() > began + _TRAILING
        if found is not None and not is_over and status not in _UNDER_WAY and is_stale(found):
            status = "not seen yet"
        elif found is not None and status == "VALID":
            return found
        if status == "INVALID":
            reason = str((found or {}).get("statusReason", ""))
            raise SetupFailed(kind, name, f"AWS finds it INVALID: {reason}", invalid_fix(reason))
        if status != before:
            yield status
            before = status
        _check_time(end, kind, name, status, tools)
        tools.clock.sleep(pause)
        pause = min(_MAX_PAUSE, pause * 1.5)


def _gone(
    read: Read, disable: Callable[[], None], delete: Callable[[], None],
    kind: Kind, name: str, tools: Tools, patience: float = 0.0,
) -> Generator[str, None, None]:  # fmt: skip
    """Disable it, wait, delete it, wait until it is gone: the order that AWS asks for.

    For `patience` seconds, or until its instances have ended, it is left disabled.
    """
    began = tools.clock.monotonic()
    end, before, pause = began + _UPDATE_LIMIT, "", 0.5
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
            except ServiceError as error:
                # What came before it has not settled yet, as AWS sees it.
                if not tools.compute.is_still_related(error):
                    raise
                status = "waiting for what uses it"
        if status != before:
            yield status
            before = status
        _check_time(end, kind, name, status, tools)
        tools.clock.sleep(pause)
        pause = min(_MAX_PAUSE, pause * 1.5)


def _has_instances(found: dict[str, Any]) -> bool:
    resources = found.get("computeResources") or {}
    return bool(resources.get("desiredvCpus", 0) > resources.get("minvCpus", 0))


def _check_time(end: float, kind: Kind, name: str, status: str, tools: Tools) -> None:
    if tools.clock.monotonic() > end:
        raise BatchmlError(
            f"{kind} {name} is still {status}. It goes on in AWS; run the command again to follow."
        )


def _refuse_unknown(kind: Kind, name: str, request: Any) -> None:
    if not is_known(request):
        raise AssertionError(f"{kind} {name} needs what is not made yet: {request}")


_PERFORMERS: dict[Kind, Callable[[Step, Wanted, Facts, Tools], Steps]] = {
    Kind.STACK: _stack,
    Kind.PLACEMENT_GROUP: _placement_group,
    Kind.LAUNCH_TEMPLATE: _launch_template,
    Kind.POLICY: _policy,
    Kind.ENVIRONMENT: _environment,
    Kind.QUEUE: _queue,
    Kind.DEFINITION: _definition,
}
