"""Steps that change compute environments, queues and what they are made with."""

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from batchml.aws.batch.requests import registration
from batchml.errors import ServiceError
from batchml.ops.setup.batch_plan import (
    decide_environment,
    decide_queue,
    generation,
    is_generation,
    queues_of,
)
from batchml.ops.setup.causes import invalid_fix
from batchml.ops.setup.differences import differences
from batchml.ops.setup.tools import (
    BATCH_LIMIT,
    PACE,
    SetupFailed,
    Steps,
    Tools,
    check_time,
    refuse_unknown,
)
from batchml.ops.setup.values import TAG_ENV, Action, Facts, Kind, Step, Wanted
from batchml.ops.watch import backoff

_UPDATE_LIMIT = 3 * 3600.0  # an update that replaces instances waits for the jobs on them
_JOB_MINUTES = 30  # for runs on instances that are replaced
_TRAILING = 30.0  # seconds for which AWS Batch may still describe what was before an update
_UNDER_WAY = ("CREATING", "UPDATING", "DELETING")


def change_placement_group(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
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
    end, pauses = tools.clock.monotonic() + BATCH_LIMIT, backoff(PACE)
    is_gone = tools.launch.delete_placement_group(name)
    if not is_gone:
        yield "waiting for its instances to end"
    while not is_gone:
        check_time(end, Kind.PLACEMENT_GROUP, name, "in use", tools)
        tools.clock.sleep(next(pauses))
        is_gone = tools.launch.delete_placement_group(name)


def change_launch_template(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
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


def change_policy(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
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


def change_environment(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
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
    refuse_unknown(step.kind, step.name, request)
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


def change_queue(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    queues = dict(facts.queues)
    if step.action in (Action.DELETE, Action.REPLACE):
        yield from _delete_queue(step.name, tools)
        queues.pop(step.name, None)
    if step.action is Action.DELETE:
        return replace(facts, queues=queues)
    if step.how == "wait":
        queues[step.name] = yield from _settled(
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
    queues[step.name] = yield from _settled(
        lambda: tools.compute.queue(step.name), step.kind, step.name, tools, BATCH_LIMIT,
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


def change_definition(step: Step, wanted: Wanted, facts: Facts, tools: Tools) -> Steps:
    yield from ()
    request = wanted.definitions[step.name]
    refuse_unknown(step.kind, step.name, request)
    tools.batch.register(registration(request, tools.clock.now()))
    return replace(facts, definitions=facts.definitions | {step.name})


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
    end, before, pauses = began + limit, "", backoff(PACE)
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
        check_time(end, kind, name, status, tools)
        tools.clock.sleep(next(pauses))


def _gone(
    read: Read, disable: Callable[[], None], delete: Callable[[], None],
    kind: Kind, name: str, tools: Tools, patience: float = 0.0,
) -> Generator[str, None, None]:  # fmt: skip
    """Disable it, wait, delete it, wait until it is gone: the order that AWS asks for.

    For `patience` seconds, or until its instances have ended, it is left disabled.
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
                # What came before it has not settled yet, as AWS sees it.
                if not tools.compute.is_still_related(error):
                    raise
                status = "waiting for what uses it"
        if status != before:
            yield status
            before = status
        check_time(end, kind, name, status, tools)
        tools.clock.sleep(next(pauses))


def _has_instances(found: dict[str, Any]) -> bool:
    resources = found.get("computeResources") or {}
    return bool(resources.get("desiredvCpus", 0) > resources.get("minvCpus", 0))


def settle(
    request: Mapping[str, Any], tools: Tools, report: Callable[[str], None]
) -> dict[str, Any]:
    """Wait until an UpdateJobQueue or UpdateComputeEnvironment request has been taken; what there
    is then. Raises SetupFailed when AWS finds it INVALID.
    """
    asked = dict(request)
    if "jobQueue" in asked:
        kind, name, read = Kind.QUEUE, asked.pop("jobQueue"), tools.compute.queue
    else:
        kind, name = Kind.ENVIRONMENT, asked.pop("computeEnvironment")
        read = tools.compute.environment
    waiting = _settled(
        lambda: read(name), kind, name, tools, _UPDATE_LIMIT,
        is_stale=lambda found: any(differences(asked, found)),
    )  # fmt: skip
    return _drained(waiting, report)


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
