"""Steps that change compute environments, queues, job definitions and their parts."""

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from batchml.aws.batch.requests import dated_registration
from batchml.errors import ServiceError, SetupFailed
from batchml.model.polling import backoff
from batchml.setup.plan import (
    current_name,
    decide_environment,
    decide_queue,
    differences,
    is_version_of,
    queues_of,
)
from batchml.setup.tools import (
    BATCH_LIMIT,
    PACE,
    SetupTools,
    Steps,
    check_time,
    invalid_fix,
    refuse_unknown,
)
from batchml.setup.values import TAG_ENV, Action, CurrentState, PlanStep, ResourceKind, WantedState

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
