"""Plan the steps from the current state to the wanted state. Pure.

The plan that users see, the choice of the next step and the check at the end are the same function,
called with the state of that moment. So nothing is stored between two commands, and a command that
was interrupted continues from the state of AWS.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from batchml.aws.batch.requests import container_properties
from batchml.aws.cloudformation import Blueprint, ChangeSet, Stack
from batchml.aws.ec2 import content_hash
from batchml.model.names import bare_name
from batchml.setup import sharing
from batchml.setup.network import moved_networks, replaced_subnets
from batchml.setup.sharing import Action, CurrentState, PlanStep, ResourceKind, WantedState

# --- stacks ---------------------------------------------------------------------------------


def decide_stack(blueprint: Blueprint, current: CurrentState) -> PlanStep:
    """The step for a wanted stack."""
    stack = current.stacks.get(blueprint.name)
    if stack is None:
        return PlanStep(Action.CREATE, ResourceKind.STACK, blueprint.name, ("it does not exist",))
    if stack.is_busy:
        return _wait_for_stack(stack)
    cause = current.failure_causes.get(stack.name) or stack.reason
    because = f": {cause}" if cause else ""
    match stack.status:
        case "ROLLBACK_COMPLETE" | "ROLLBACK_FAILED" | "CREATE_FAILED" | "DELETE_FAILED":
            return _recreate_stack(blueprint, stack, because)
        case "REVIEW_IN_PROGRESS":
            reason = "its creation was begun, and it is empty"
            return PlanStep(
                Action.REPLACE, ResourceKind.STACK, stack.name, (reason,), how="recreate"
            )
        case "UPDATE_ROLLBACK_FAILED":
            reason = f"its last update failed, and the rollback is stuck{because}"
            return PlanStep(
                Action.UPDATE, ResourceKind.STACK, stack.name, (reason,), how="continue-rollback"
            )
    reasons = tuple(_stack_reasons(blueprint, stack, current.change_sets.get(stack.name)))
    if not reasons:
        return PlanStep(Action.KEEP, ResourceKind.STACK, stack.name)
    reasons += tuple(
        f"{drift.resource} was changed by hand ({', '.join(drift.properties) or 'deleted'})"
        for drift in current.drifts.get(stack.name, ())
    )
    # The other stacks hold no data of users.
    loses = _lost_data(current.change_sets.get(stack.name)) if blueprint.is_protected else ""
    return PlanStep(Action.UPDATE, ResourceKind.STACK, stack.name, reasons, loses)


def _recreate_stack(blueprint: Blueprint, stack: Stack, because: str) -> PlanStep:
    """The step for a stack that must be deleted and created anew."""
    if stack.status != "DELETE_FAILED":
        reason, loses = f"its creation failed earlier{because}; nothing in it is in use", ""
    else:
        reason = f"its deletion failed earlier{because}"
        loses = "its remaining data" if blueprint.is_protected else ""
    return PlanStep(
        Action.REPLACE, ResourceKind.STACK, stack.name, (reason,), loses, how="recreate"
    )


def _wait_for_stack(stack: Stack) -> PlanStep:
    """The step that waits for an operation under way, whoever began it."""
    actions = {"CREATE": Action.CREATE, "DELETE": Action.DELETE}
    action = actions.get(stack.status.partition("_")[0], Action.UPDATE)
    return PlanStep(
        action, ResourceKind.STACK, stack.name, (f"{stack.status}: it is waited for",), how="wait"
    )


def _stack_reasons(
    blueprint: Blueprint, stack: Stack, change_set: ChangeSet | None
) -> Iterator[str]:
    if blueprint.is_protected and not stack.is_protected:
        # An interrupted update or deletion has lifted the protection, and the stack policy.
        yield "its termination protection is off"
    if change_set is not None and change_set.is_empty:
        return
    if blueprint.template.strip() != stack.template.strip():
        yield "its template has changed"
    for key, value in sorted(blueprint.parameters.items()):
        there = stack.parameters.get(key)
        if there != value and (there or value):  # a new empty parameter changes nothing
            yield f"{key}: {there or 'none'} -> {value or 'none'}"
    for key, value in sorted(blueprint.tags.items()):
        if stack.tags.get(key) != value:
            yield f"tag {key}: {stack.tags.get(key, 'none')} -> {value}"
    for key in sorted(set(stack.tags) - set(blueprint.tags)):
        if not key.startswith("aws:"):
            yield f"tag {key}: {stack.tags[key]} -> none"
    for change in change_set.changes if change_set is not None else ():
        if change.replacement == "True":
            yield f"AWS replaces {change.resource} ({change.type}): {', '.join(change.causes)}"
        elif change.action == "Remove":
            stays = "; it stays in the account, and is billed" if change.type in DATA_TYPES else ""
            yield f"AWS removes {change.resource} ({change.type}) from the stack{stays}"


# Resources with data, which are replaced or removed only with --allow-loss.
DATA_TYPES = {
    "AWS::EFS::FileSystem", "AWS::FSx::FileSystem", "AWS::KMS::Key", "AWS::Logs::LogGroup",
    "AWS::S3::Bucket",
}  # fmt: skip


def _lost_data(change_set: ChangeSet | None) -> str:
    """The resources with data that an update would remove from the stack."""
    changes = change_set.changes if change_set is not None else ()
    lost: list[str] = [
        f"{change.resource} ({change.type})"
        for change in changes
        if change.type in DATA_TYPES
        and (change.action == "Remove" or change.replacement in ("True", "Conditional"))
    ]
    return ", ".join(lost)


def unwanted_stacks(wanted: WantedState, current: CurrentState) -> Iterator[PlanStep]:
    """The steps for stacks that are not wanted, in the reverse order of creation."""
    kept = {blueprint.name for blueprint in wanted.stacks}
    for name, stack in reversed(current.stacks.items()):
        if name in kept:
            continue
        if name in wanted.needed_by_others:
            yield PlanStep(Action.KEEP, ResourceKind.STACK, name, (wanted.needed_by_others[name],))
        elif name in wanted.data_stacks:
            yield _data_stack(stack, wanted)
        elif stack.is_busy and not stack.status.startswith("DELETE"):
            yield _wait_for_stack(stack)
        else:
            how = "wait" if stack.is_busy else ""
            reasons = [wanted.why_unwanted]
            if wanted.detaches and current.attached.get(name):
                names = ", ".join(map(str, current.attached[name]))
                reasons.append(f"its policy is detached from {names}")
            yield PlanStep(Action.DELETE, ResourceKind.STACK, name, tuple(reasons), how=how)


def _data_stack(stack: Stack, wanted: WantedState) -> PlanStep:
    file_system = stack.outputs.get("FileSystemId", "")
    if wanted.deletes_files and not wanted.deletes_data and file_system:
        reasons = ("its file system is deleted; its bucket, with the archive, stays",)
        how = "wait" if stack.is_busy else "without-files"
        return PlanStep(Action.UPDATE, ResourceKind.STACK, stack.name, reasons, file_system, how)
    if wanted.deletes_files and not wanted.deletes_data and stack.is_busy:
        return _wait_for_stack(stack)
    if not wanted.deletes_data:
        reason = "its data stays; --delete-data deletes it"
        return PlanStep(Action.KEEP, ResourceKind.STACK, stack.name, (reason,))
    keys = ("BucketName", "FileSystemId", "LogGroupName")
    loses = ", ".join(filter(None, map(stack.outputs.get, keys)))
    how = "wait" if stack.is_busy else "with-data"
    reasons = ("its data is deleted too",)
    return PlanStep(Action.DELETE, ResourceKind.STACK, stack.name, reasons, loses, how)


# --- differences between a request and a resource --------------------------------------------

# Lists that AWS treats as sets, so that the order makes no difference.
_SETS = {"subnets", "securityGroupIds", "instanceTypes", "shareDistribution"}

# Members that AWS adds to a request. It adds this one to an `ec2Configuration` once instances have
# started from the AMI: AWS Batch API reference, Ec2Configuration, `batchImageStatus`.
_ADDED = {"batchImageStatus"}


class RequestDifference(tuple[str, Any, Any]):
    """`(key, found, wanted)`; the key is a path such as `computeResources.maxvCpus`."""

    __slots__ = ()

    @property
    def key(self) -> str:
        return str(self[0])

    def __str__(self) -> str:
        key, found, wanted = self
        return f"{key.rpartition('.')[2]}: {_value_text(found)} -> {_value_text(wanted)}"


def differences(
    wanted: Mapping[str, Any], found: Mapping[str, Any], path: str = ""
) -> Iterator[RequestDifference]:
    """Every key of `wanted` with another value in `found`. AWS chooses the values of other keys.

    The name and the ARN of a resource count as equal. A key that AWS does not return equals 0 or an
    empty value: AWS removes a `minScaleDownDelayMinutes` of 0.
    """
    for key, value in wanted.items():
        there = found.get(key)
        inner_path = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from differences(value, there if isinstance(there, Mapping) else {}, inner_path)
        elif (there or value) and _normalize(key, value) != _normalize(key, there):
            yield RequestDifference((inner_path, there, value))


def _normalize(key: str, value: Any) -> Any:
    """Convert a value so that values with the same meaning for AWS are equal."""
    if isinstance(value, Mapping):
        return {name: _normalize(name, v) for name, v in value.items() if name not in _ADDED}
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = [_normalize("", each) for each in value]
        return sorted(items, key=repr) if key in _SETS else items
    if isinstance(value, str):
        return bare_name(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value


def _value_text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(inner)}" for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_value_text, value))}]"
    return bare_name(value) if isinstance(value, str) else str(value)


# --- compute environments, queues and their parts --------------------------------------------

# Changes of these replace no instance, in any compute environment.
# Source: AWS Batch User Guide, "Updating compute environments".
_SCALING = {"state", "maxvCpus", "minvCpus", "desiredvCpus", "minScaleDownDelayMinutes"}
Requests = Mapping[str, dict[str, Any]]


def plan_requests(
    kind: ResourceKind, wanted: Requests, found: Requests, decide: Any
) -> Iterator[PlanStep]:
    for name, request in wanted.items():
        there = found.get(name)
        if there is None:
            yield PlanStep(Action.CREATE, kind, name, ("it does not exist",))
        elif there.get("status") in _SETTLING:
            yield _wait_for_resource(kind, name, there)
        else:
            action, reasons = decide(request, there)
            yield PlanStep(action, kind, name, tuple(reasons))


# AWS Batch refuses changes of resources in these states, and queues that use them.
_SETTLING = {"CREATING", "UPDATING"}


def _wait_for_resource(kind: ResourceKind, name: str, there: Mapping[str, Any]) -> PlanStep:
    return PlanStep(
        Action.UPDATE, kind, name, (f"{there['status']}: it is waited for",), how="wait"
    )


Decision = tuple[Action, list[str]]


def decide_group(request: dict[str, Any], found: dict[str, Any]) -> Decision:
    """The action for a placement group, which cannot be changed."""
    return Action.KEEP, []


def decide_policy(request: dict[str, Any], found: dict[str, Any]) -> Decision:
    asked = {"fairsharePolicy": request["fairsharePolicy"]}
    return _update_if_changed([*differences(asked, found), *_tags(request, found)])


def decide_environment(request: dict[str, Any], found: dict[str, Any]) -> Decision:
    """The action for a compute environment. AWS Batch updates most properties in place."""
    status = found.get("status", "VALID")
    if status == "DELETING":
        return Action.REPLACE, ["it is being deleted"]
    asked: dict[str, Any] = {"state": "ENABLED", "computeResources": request["computeResources"]}
    changed = list(differences(asked, found))
    group = found.get("computeResources", {}).get("placementGroup")
    if group and not asked["computeResources"].get("placementGroup"):
        # AWS documents no way to remove a placement group.
        return Action.REPLACE, [*map(str, changed), f"placementGroup: {group} -> none"]
    cannot = _cannot_be_updated(changed, found)
    if cannot:
        return Action.REPLACE, [*map(str, changed), cannot]
    action, reasons = _update_if_changed([*changed, *_tags(request, found)])
    if status == "INVALID":
        why = f"it is INVALID: {found.get('statusReason', '')}"
        return Action.UPDATE, [why, *reasons]
    on_instances = "instanceRole" in found.get("computeResources", {})  # none on `local`
    if on_instances and any(
        each.key.rpartition(".")[2] not in _SCALING | {"tags"} for each in changed
    ):
        reasons.append("its instances are replaced; their jobs get 30 minutes to end")
    return action, reasons


def current_name(wanted: WantedState, current: CurrentState, name: str) -> str:
    """The name in AWS that a compute environment has or will have.

    A name cannot be used again while a queue uses the old compute environment. So the replacement
    of `gpu` is `gpu-r2`, which the queues use before `gpu` is deleted.
    """
    newest = _newest(current.environments, name)
    request = wanted.environments.get(name)
    if not newest or request is None:
        return newest or name
    action, _ = decide_environment(request, current.environments[newest])
    return _next_name(current.environments, name) if action is Action.REPLACE else newest


def _newest(environments: Mapping[str, Any], name: str) -> str:
    """The name of the newest version of a compute environment; empty without one."""
    return max(_versions(environments, name), default=(0, ""))[1]


def _next_name(environments: Mapping[str, Any], name: str) -> str:
    return f"{name}-r{max(_versions(environments, name), default=(0, ''))[0] + 1}"


def is_version_of(name: str, base: str) -> bool:
    """Whether a name is the base or a replacement of it: `gpu` or `gpu-r2`, not `gpu-research`."""
    return any(_versions([name], base))


def _versions(environments: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    for each in environments:
        number = each.removeprefix(f"{name}-r")
        if each == name:
            yield 1, each
        elif number != each and number.isdecimal():
            yield int(number), each


def queues_of(wanted: WantedState, current: CurrentState) -> dict[str, dict[str, Any]]:
    """The requests of the wanted queues, with the current names of their compute environments."""
    return {
        name: {
            **request,
            "computeEnvironmentOrder": [
                {
                    **entry,
                    "computeEnvironment": current_name(
                        wanted, current, entry["computeEnvironment"]
                    ),
                }
                for entry in request["computeEnvironmentOrder"]
            ],
        }
        for name, request in wanted.queues.items()
    }


def plan_queues(wanted: WantedState, current: CurrentState) -> Iterator[PlanStep]:
    for step in plan_requests(
        ResourceKind.QUEUE, queues_of(wanted, current), current.queues, decide_queue
    ):
        replaced = step.action is Action.REPLACE
        yield (
            msgspec.structs.replace(step, loses=_lost_runs(step.name, current))
            if replaced
            else step
        )


def _lost_runs(queue: str, current: CurrentState) -> str:
    """The unfinished runs of a queue, which its deletion ends: `2 runs in it`."""
    count = current.unfinished_runs.get(queue, 0)
    return f"{count} run{'s' if count > 1 else ''} in it" if count else ""


def plan_environments(wanted: WantedState, current: CurrentState) -> Iterator[PlanStep]:
    for name, request in wanted.environments.items():
        there = _newest(current.environments, name)
        if not there:
            yield PlanStep(Action.CREATE, ResourceKind.ENVIRONMENT, name, ("it does not exist",))
            continue
        if current.environments[there].get("status") in _SETTLING:
            yield _wait_for_resource(ResourceKind.ENVIRONMENT, there, current.environments[there])
            continue
        action, reasons = decide_environment(request, current.environments[there])
        if action is Action.REPLACE:
            reasons.append(f"it becomes {_next_name(current.environments, name)}")
        yield PlanStep(action, ResourceKind.ENVIRONMENT, there, tuple(reasons))


def unwanted_environments(wanted: WantedState, current: CurrentState) -> Iterator[PlanStep]:
    kept = {current_name(wanted, current, name) for name in wanted.environments}
    for name in current.environments:
        if name in kept:
            continue
        replaced = any(
            name == each for base in wanted.environments
            for _, each in _versions(current.environments, base)
        )  # fmt: skip
        reason = "it was replaced" if replaced else wanted.why_unwanted
        how = "drain" if replaced else ""
        yield PlanStep(Action.DELETE, ResourceKind.ENVIRONMENT, name, (reason,), how=how)


def _cannot_be_updated(changed: list[RequestDifference], found: Mapping[str, Any]) -> str:
    """Why AWS refuses an update; empty if it accepts it.

    Source: AWS Batch API reference, UpdateComputeEnvironment, `allocationStrategy`.
    """
    there = found.get("computeResources", {})
    keys = {each.key.rpartition(".")[2] for each in changed}
    if not keys - _SCALING - {"tags"}:
        return ""
    if there.get("allocationStrategy", "BEST_FIT") == "BEST_FIT":
        return "a compute environment with BEST_FIT cannot be updated in place"
    if any(each.key.endswith("allocationStrategy") and each[2] == "BEST_FIT" for each in changed):
        return "AWS refuses to change an existing compute environment to BEST_FIT"
    return ""


def decide_queue(request: dict[str, Any], found: dict[str, Any]) -> Decision:
    """The action for a queue. AWS Batch updates all but the scheduling policy in place."""
    asked = {
        "state": "ENABLED",
        "priority": request["priority"],
        "computeEnvironmentOrder": _ordered(request["computeEnvironmentOrder"]),
        "time limits": _limits(request),
    }
    there = {
        **found,
        "computeEnvironmentOrder": _ordered(found.get("computeEnvironmentOrder", [])),
        "time limits": _limits(found),
    }
    if found.get("status") == "DELETING":
        return Action.REPLACE, ["it is being deleted"]
    changed = list(differences(asked, there))
    before, after = found.get("schedulingPolicyArn"), request.get("schedulingPolicyArn")
    if bool(before) != bool(after):
        # Source: AWS Batch API reference, UpdateJobQueue, `schedulingPolicyArn`.
        why = "fair share cannot be given to a queue that exists, nor taken from it"
        return Action.REPLACE, [*map(str, changed), why]
    if after and before != after:
        changed.append(RequestDifference(("schedulingPolicyArn", before, after)))
    action, reasons = _update_if_changed([*changed, *_tags(request, found)])
    if found.get("status") == "INVALID":
        return Action.UPDATE, [f"it is INVALID: {found.get('statusReason', '')}", *reasons]
    return action, reasons


def _ordered(order: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of compute environments by their `order`, whose numbers AWS may change."""
    entries = sorted(order, key=lambda entry: entry["order"])
    return [bare_name(entry["computeEnvironment"]) for entry in entries]


def _limits(queue: Mapping[str, Any]) -> list[str]:
    """The jobStateTimeLimitActions of a queue in words, sorted."""
    return sorted(
        f"{action['reason']} after {action['maxTimeSeconds']} s"
        for action in queue.get("jobStateTimeLimitActions") or ()
    )


def _tags(request: Mapping[str, Any], found: Mapping[str, Any]) -> list[RequestDifference]:
    there = found.get("tags") or {}
    return [
        RequestDifference((f"tags.tag {key}", there.get(key), value))
        for key, value in request.get("tags", {}).items()
        if there.get(key) != value
    ]


def _update_if_changed(changed: list[RequestDifference]) -> Decision:
    return (Action.UPDATE if changed else Action.KEEP), [str(each) for each in changed]


def plan_templates(wanted: WantedState, current: CurrentState) -> Iterator[PlanStep]:
    for name, request in wanted.templates.items():
        there = current.templates.get(name)
        if there is None:
            yield PlanStep(
                Action.CREATE, ResourceKind.LAUNCH_TEMPLATE, name, ("it does not exist",)
            )
        elif there.content != content_hash(request):
            reason = f"its content has changed: version {there.version + 1}"
            yield PlanStep(Action.UPDATE, ResourceKind.LAUNCH_TEMPLATE, name, (reason,))
        else:
            yield PlanStep(Action.KEEP, ResourceKind.LAUNCH_TEMPLATE, name)


def plan_definitions(wanted: WantedState, current: CurrentState) -> Iterator[PlanStep]:
    for name in wanted.definitions:
        if name in current.definitions:
            yield PlanStep(Action.KEEP, ResourceKind.DEFINITION, name)
        else:
            reasons = ["no definition has this content"]
            if container_properties(wanted.definitions[name]).get("privileged"):
                reasons.append("privileged, for GPUs: the host's NVIDIA driver is mounted")
            yield PlanStep(Action.CREATE, ResourceKind.DEFINITION, name, tuple(reasons))


def unwanted_queues(wanted: WantedState, current: CurrentState) -> Iterator[PlanStep]:
    why = wanted.why_unwanted
    for step in plan_deletions(ResourceKind.QUEUE, wanted.queues, current.queues, why):
        yield msgspec.structs.replace(step, loses=_lost_runs(step.name, current))


def plan_deletions(
    kind: ResourceKind, wanted: Mapping[str, Any], found: Mapping[str, Any], why: str
) -> Iterator[PlanStep]:
    for name in found:
        if name not in wanted:
            yield PlanStep(Action.DELETE, kind, name, (why,))


# --- the whole plan -------------------------------------------------------------------------


def make_plan(wanted: WantedState, current: CurrentState) -> list[PlanStep]:
    """A step for every resource, in the order of execution.

    Dependencies come first. Resources that are not wanted come last, in the order that AWS needs:
    a queue before its compute environments, and these before their roles.
    """
    stacks = [decide_stack(blueprint, current) for blueprint in wanted.stacks]
    return [
        *([] if wanted.stacks_last else stacks),
        *_changes(wanted, current),
        *(_deletions(wanted, current) if wanted.deletes_unwanted else ()),
        *(stacks[::-1] if wanted.stacks_last else []),
    ]


def _changes(wanted: WantedState, current: CurrentState) -> list[PlanStep]:
    return [
        *plan_requests(ResourceKind.PLACEMENT_GROUP, wanted.groups, current.groups, decide_group),
        *plan_templates(wanted, current),
        *plan_requests(ResourceKind.POLICY, wanted.policies, current.policies, decide_policy),
        *plan_environments(wanted, current),
        *plan_queues(wanted, current),
        *plan_definitions(wanted, current),
    ]


def _deletions(wanted: WantedState, current: CurrentState) -> list[PlanStep]:
    why, templates = wanted.why_unwanted, ResourceKind.LAUNCH_TEMPLATE
    return [
        *unwanted_queues(wanted, current),
        *unwanted_environments(wanted, current),
        *plan_deletions(ResourceKind.POLICY, wanted.policies, current.policies, why),
        *plan_deletions(templates, wanted.templates, current.templates, why),
        *plan_deletions(ResourceKind.PLACEMENT_GROUP, wanted.groups, current.groups, why),
        *unwanted_stacks(wanted, current),
    ]


def refusals(wanted: WantedState, steps: Iterable[PlanStep], current: CurrentState) -> list[str]:
    """Reasons to refuse a plan of which AWS would refuse a later step."""
    steps = list(steps)
    return [
        *wanted.mistakes,
        *_used_by_others(steps, current),
        *_attached_policies(wanted, current),
        *moved_networks(wanted, current),
        *replaced_subnets(current),
        *sharing.sharing_refusals(wanted, steps, current),
    ]


def _used_by_others(steps: Iterable[PlanStep], current: CurrentState) -> Iterator[str]:
    """AWS Batch does not delete a compute environment that a queue uses."""
    for step in steps:
        users = current.foreign_users.get(step.name)
        if step.kind is ResourceKind.ENVIRONMENT and step.action is Action.DELETE and users:
            yield (
                f"{step.kind} {step.name} is used by queues that setup did not make: "
                f"{', '.join(users)}. First delete these queues (batchml queue delete NAME), or "
                "give them another one (batchml queue update NAME --compute OTHER)."
            )


def _attached_policies(wanted: WantedState, current: CurrentState) -> Iterator[str]:
    """IAM does not delete a policy that is attached to entities outside the stack."""
    for name, attached in current.attached.items():
        stuck = [each for each in attached if each.permission_set or not wanted.detaches]
        sets = [each for each in stuck if each.permission_set]
        if not stuck:
            continue
        fix = "To detach it from them: batchml teardown --detach-policy"
        if sets:
            fix = "Remove it from the permission sets in IAM Identity Center first" + (
                f". {fix}" if len(sets) < len(stuck) else "."
            )
        yield f"stack {name}: its policy is attached to {', '.join(map(str, stuck))}. {fix}"
