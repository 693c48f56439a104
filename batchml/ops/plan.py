"""What has to be done so that AWS has what `batchml.toml` describes. A pure function of the two.

The plan that is shown, the next step that is taken and the check at the end are the same function,
asked again with what is known by then. So nothing has to be remembered between two commands: one
that was interrupted goes on from what AWS has.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from batchml.aws.launch import Template, content_of
from batchml.aws.stacks import Blueprint, ChangeSet, Drift, Stack
from batchml.model.names import bare_name
from batchml.ops.differences import Difference, differences

# Stands in a request for what is known only once something else is made: "«network.SubnetIds»".
UNKNOWN = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}"

TAG_ENV = "batchml:env"
TAG_SOURCE = "batchml:source"  # `setup`; what single commands made is theirs to delete

# Changes of these replace no instance and hold for any compute environment.
# Source: AWS Batch User Guide, "Updating compute environments".
_SCALING = {"state", "maxvCpus", "minvCpus", "desiredvCpus", "minScaleDownDelayMinutes"}


class Action(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    KEEP = "keep"
    DELETE = "delete"


class Kind(StrEnum):
    STACK = "stack"
    PLACEMENT_GROUP = "placement group"
    LAUNCH_TEMPLATE = "launch template"
    POLICY = "scheduling policy"
    ENVIRONMENT = "compute environment"
    QUEUE = "job queue"
    DEFINITION = "job definition"


class Step(Struct, frozen=True):
    """One resource and what becomes of it. `loses` says what would be gone for good."""

    action: Action
    kind: Kind
    name: str
    reasons: tuple[str, ...] = ()
    loses: str = ""
    how: str = ""  # of a stack: wait, recreate, continue-rollback; of what was replaced: drain

    @property
    def changes(self) -> bool:
        return self.action is not Action.KEEP


class Wanted(Struct, frozen=True):
    """What is to be there, each as the request that makes it, by its name in AWS.

    Of stacks that hold data and are not wanted, `data_stacks`, what is in them is deleted only
    with `deletes_data`. `is_backwards` for a teardown: stacks are changed after what stands on
    them is gone.
    """

    stacks: tuple[Blueprint, ...] = ()
    data_stacks: tuple[str, ...] = ()
    deletes_data: bool = False
    is_backwards: bool = False
    is_all: bool = True  # what is not among these is not wanted; else it is nobody's business
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, dict[str, Any]] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    definitions: dict[str, dict[str, Any]] = {}


class Facts(Struct, frozen=True):
    """What is there, by its name in AWS. Of Batch's resources those of this environment alone."""

    stacks: dict[str, Stack] = {}
    proposals: dict[str, ChangeSet] = {}  # what AWS says an update of a stack would do
    drifts: dict[str, tuple[Drift, ...]] = {}  # what somebody changed by hand
    causes: dict[str, str] = {}  # of stacks whose last operation failed: its first cause
    groups: dict[str, dict[str, Any]] = {}
    templates: dict[str, Template] = {}
    policies: dict[str, dict[str, Any]] = {}
    environments: dict[str, dict[str, Any]] = {}
    queues: dict[str, dict[str, Any]] = {}
    users: dict[str, tuple[str, ...]] = {}  # compute environments -> queues that are not ours
    busy: dict[str, int] = {}  # queues with runs that have not ended: how many, at least
    definitions: frozenset[str] = frozenset()


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
        *_decided(Kind.PLACEMENT_GROUP, wanted.groups, facts.groups, _keep),
        *_templates(wanted, facts),
        *_decided(Kind.POLICY, wanted.policies, facts.policies, decide_policy),
        *_environments(wanted, facts),
        *_queues(wanted, facts),
        *_definitions(wanted, facts),
    ]


def _unmade(wanted: Wanted, facts: Facts) -> list[Step]:
    return [
        *_unwanted_queues(wanted, facts),
        *_unwanted_environments(wanted, facts),
        *_unwanted(Kind.POLICY, wanted.policies, facts.policies),
        *_unwanted(Kind.LAUNCH_TEMPLATE, wanted.templates, facts.templates),
        *_unwanted(Kind.PLACEMENT_GROUP, wanted.groups, facts.groups),
        *_unwanted_stacks(wanted, facts),
    ]


def refusals(wanted: Wanted, steps: Iterable[Step], facts: Facts) -> list[str]:
    """What AWS would refuse halfway through a plan, so that none of it is begun."""
    return [*_used_by_others(steps, facts), *_moved_networks(wanted, facts)]


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
        if asked and there and asked != there and facts.environments:
            yield (
                f"stack {blueprint.name}: network.cidr cannot be changed from {there} while there "
                "are compute environments in it: batchml teardown first, or leave it as it was."
            )


def is_known(request: Any) -> bool:
    """True when nothing in a request waits for something else to be made."""
    if isinstance(request, Mapping):
        return all(is_known(value) for value in request.values())
    if isinstance(request, list | tuple):
        return all(is_known(value) for value in request)
    return not (isinstance(request, str) and UNKNOWN in request)


# --- stacks ---------------------------------------------------------------------------------


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
        if there != value:
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


def _unwanted_stacks(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    """Newest dependents first: the reverse of the order in which they are made."""
    kept = {blueprint.name for blueprint in wanted.stacks}
    for name, stack in reversed(facts.stacks.items()):
        if name in kept:
            continue
        if name in wanted.data_stacks:
            yield _data_stack(stack, wanted.deletes_data)
        elif stack.is_busy and not stack.status.startswith("DELETE"):
            yield _busy(stack)
        else:
            how = "wait" if stack.is_busy else ""
            yield Step(Action.DELETE, Kind.STACK, name, ("it is not described any more",), how=how)


def _data_stack(stack: Stack, deletes_data: bool) -> Step:
    if not deletes_data:
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


# --- AWS Batch ------------------------------------------------------------------------------

Requests = Mapping[str, dict[str, Any]]


def _decided(kind: Kind, wanted: Requests, found: Requests, decide: Any) -> Iterator[Step]:
    for name, request in wanted.items():
        there = found.get(name)
        if there is None:
            yield Step(Action.CREATE, kind, name, ("it does not exist",))
        elif there.get("status") in _SETTLING:
            yield _settling(kind, name, there)
        else:
            action, reasons, loses = decide(request, there)
            yield Step(action, kind, name, tuple(reasons), loses)


# AWS Batch changes nothing that is in one of these, nor may a queue be given such an environment.
_SETTLING = {"CREATING", "UPDATING"}


def _settling(kind: Kind, name: str, there: Mapping[str, Any]) -> Step:
    return Step(Action.UPDATE, kind, name, (f"{there['status']}: it is waited for",), how="wait")


Verdict = tuple[Action, list[str], str]


def _keep(request: dict[str, Any], found: dict[str, Any]) -> Verdict:
    return Action.KEEP, [], ""


def decide_policy(request: dict[str, Any], found: dict[str, Any]) -> Verdict:
    asked = {key: request[key] for key in ("fairsharePolicy",) if key in request}
    return _verdict([*differences(asked, found), *_tags(request, found)])


def decide_environment(request: dict[str, Any], found: dict[str, Any]) -> Verdict:
    """What to do about a compute environment: AWS Batch updates all but a few things in place."""
    status = found.get("status", "VALID")
    if status == "DELETING":
        return Action.REPLACE, ["it is being deleted"], ""
    asked: dict[str, Any] = {
        "state": "ENABLED",
        **{key: request[key] for key in ("state", "serviceRole") if key in request},
        "computeResources": request.get("computeResources", {}),
    }
    changed = list(differences(asked, found))
    group = found.get("computeResources", {}).get("placementGroup")
    if group and not asked["computeResources"].get("placementGroup"):
        # AWS documents no way to take it away.
        return Action.REPLACE, [*map(str, changed), f"placementGroup: {group} -> none"], ""
    cannot = _cannot_be_updated(changed, found)
    if cannot:
        return Action.REPLACE, [*map(str, changed), cannot], ""
    action, reasons, loses = _verdict([*changed, *_tags(request, found)])
    if status == "INVALID":
        why = f"it is INVALID: {found.get('statusReason', '')}"
        return Action.UPDATE, [why, *reasons], loses
    if any(each.key.rpartition(".")[2] not in _SCALING | {"tags"} for each in changed):
        reasons.append("its instances are replaced; jobs on them get 30 minutes to end")
    return action, reasons, loses


def generation(wanted: Wanted, facts: Facts, name: str) -> str:
    """The name under which a compute environment is there, or will be.

    Its name cannot be given to another while it exists, and it exists for as long as a queue uses
    it. So what replaces `gpu` is `gpu-r2`, which the queues take before `gpu` is deleted.
    """
    newest = _newest(facts.environments, name)
    request = wanted.environments.get(name)
    if not newest or request is None:
        return newest or name
    verdict = decide_environment(request, facts.environments[newest])
    return _next(facts.environments, name) if verdict[0] is Action.REPLACE else newest


def _newest(environments: Mapping[str, Any], name: str) -> str:
    return max(_generations(environments, name), default=(0, ""))[1]


def _next(environments: Mapping[str, Any], name: str) -> str:
    return f"{name}-r{max(_generations(environments, name), default=(0, ''))[0] + 1}"


def is_generation(name: str, base: str) -> bool:
    """True for `gpu` and what replaced it, such as `gpu-r2`; not for `gpu-research`."""
    return any(_generations([name], base))


def _generations(environments: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    for each in environments:
        number = each.removeprefix(f"{name}-r")
        if each == name:
            yield 1, each
        elif number != each and number.isdecimal():
            yield int(number), each


def queues_of(wanted: Wanted, facts: Facts) -> dict[str, dict[str, Any]]:
    """The queues as they are wanted, with the names that their compute environments have."""
    return {
        name: {
            **request,
            "computeEnvironmentOrder": [
                {
                    **entry,
                    "computeEnvironment": generation(wanted, facts, entry["computeEnvironment"]),
                }
                for entry in request["computeEnvironmentOrder"]
            ],
        }
        for name, request in wanted.queues.items()
    }


def _queues(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for step in _decided(Kind.QUEUE, queues_of(wanted, facts), facts.queues, decide_queue):
        replaced = step.action is Action.REPLACE
        yield msgspec.structs.replace(step, loses=_runs(step.name, facts)) if replaced else step


def _runs(queue: str, facts: Facts) -> str:
    count = facts.busy.get(queue, 0)
    return f"{count} run{'s' if count > 1 else ''} in it" if count else ""


def _environments(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for name, request in wanted.environments.items():
        there = _newest(facts.environments, name)
        if not there:
            yield Step(Action.CREATE, Kind.ENVIRONMENT, name, ("it does not exist",))
            continue
        if facts.environments[there].get("status") in _SETTLING:
            yield _settling(Kind.ENVIRONMENT, there, facts.environments[there])
            continue
        action, reasons, loses = decide_environment(request, facts.environments[there])
        if action is Action.REPLACE:
            reasons.append(f"it becomes {_next(facts.environments, name)}")
        yield Step(action, Kind.ENVIRONMENT, there, tuple(reasons), loses)


def _unwanted_environments(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    current = {generation(wanted, facts, name) for name in wanted.environments}
    for name in facts.environments:
        if name in current:
            continue
        replaced = any(
            name == each for base in wanted.environments
            for _, each in _generations(facts.environments, base)
        )  # fmt: skip
        reason = "it has been replaced" if replaced else "it is not described any more"
        how = "drain" if replaced else ""
        yield Step(Action.DELETE, Kind.ENVIRONMENT, name, (reason,), how=how)


def _cannot_be_updated(changed: list[Difference], found: Mapping[str, Any]) -> str:
    """Source: AWS Batch API reference, UpdateComputeEnvironment, `allocationStrategy`."""
    there = found.get("computeResources", {})
    keys = {each.key.rpartition(".")[2] for each in changed}
    if not keys - _SCALING - {"tags"}:
        return ""
    if there.get("allocationStrategy", "BEST_FIT") == "BEST_FIT":
        return "one with BEST_FIT cannot be updated in place"
    if "allocationStrategy" in keys and any(
        each.key.endswith("allocationStrategy") and each[2] == "BEST_FIT" for each in changed
    ):
        return "BEST_FIT cannot be given to one that exists"
    return ""


def decide_queue(request: dict[str, Any], found: dict[str, Any]) -> Verdict:
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
        return Action.REPLACE, ["it is being deleted"], ""
    changed = list(differences(asked, there))
    before, after = found.get("schedulingPolicyArn"), request.get("schedulingPolicyArn")
    if bool(before) != bool(after):
        # Source: AWS Batch API reference, UpdateJobQueue, `schedulingPolicyArn`.
        what = "fair share cannot be given to a queue that exists, nor taken from it"
        return Action.REPLACE, [*map(str, changed), what], ""
    if after and before != after:
        changed.append(Difference(("schedulingPolicyArn", before, after)))
    action, reasons, loses = _verdict([*changed, *_tags(request, found)])
    if found.get("status") == "INVALID":
        return Action.UPDATE, [f"it is INVALID: {found.get('statusReason', '')}", *reasons], loses
    return action, reasons, loses


def _ordered(order: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of compute environments, first choice first: AWS may number them otherwise."""
    entries = sorted(order, key=lambda entry: entry["order"])
    return [bare_name(entry["computeEnvironment"]) for entry in entries]


def _limits(queue: Mapping[str, Any]) -> list[str]:
    """The jobStateTimeLimitActions of a queue in words, in an order of their own."""
    return sorted(
        f"{action['reason']} after {action['maxTimeSeconds']} s"
        for action in queue.get("jobStateTimeLimitActions") or ()
    )


def _tags(request: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    there = found.get("tags") or {}
    return [
        Difference((f"tags.tag {key}", there.get(key), value))
        for key, value in request.get("tags", {}).items()
        if there.get(key) != value
    ]


def _verdict(changed: list[Difference]) -> Verdict:
    return (Action.UPDATE if changed else Action.KEEP), [str(each) for each in changed], ""


def _templates(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for name, request in wanted.templates.items():
        there = facts.templates.get(name)
        if there is None:
            yield Step(Action.CREATE, Kind.LAUNCH_TEMPLATE, name, ("it does not exist",))
        elif there.content != content_of(request):
            reason = f"its content has changed: version {there.version + 1}"
            yield Step(Action.UPDATE, Kind.LAUNCH_TEMPLATE, name, (reason,))
        else:
            yield Step(Action.KEEP, Kind.LAUNCH_TEMPLATE, name)


def _definitions(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for name in wanted.definitions:
        if name in facts.definitions:
            yield Step(Action.KEEP, Kind.DEFINITION, name)
        else:
            yield Step(Action.CREATE, Kind.DEFINITION, name, ("none has this content",))


def _unwanted_queues(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for step in _unwanted(Kind.QUEUE, wanted.queues, facts.queues):
        yield msgspec.structs.replace(step, loses=_runs(step.name, facts))


def _unwanted(kind: Kind, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Step]:
    for name in found:
        if name not in wanted:
            yield Step(Action.DELETE, kind, name, ("it is not described any more",))
