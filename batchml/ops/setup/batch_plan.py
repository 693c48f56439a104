"""What becomes of compute environments, queues and what they are made with. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from batchml.aws.ec2 import content_of
from batchml.model.names import bare_name
from batchml.ops.setup.differences import Difference, differences
from batchml.ops.setup.values import Action, Facts, Kind, Step, Wanted

# Changes of these replace no instance and hold for any compute environment.
# Source: AWS Batch User Guide, "Updating compute environments".
_SCALING = {"state", "maxvCpus", "minvCpus", "desiredvCpus", "minScaleDownDelayMinutes"}
Requests = Mapping[str, dict[str, Any]]


def decided(kind: Kind, wanted: Requests, found: Requests, decide: Any) -> Iterator[Step]:
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


def keep(request: dict[str, Any], found: dict[str, Any]) -> Verdict:
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
    on_instances = "instanceRole" in found.get("computeResources", {})  # none on `local`
    if on_instances and any(
        each.key.rpartition(".")[2] not in _SCALING | {"tags"} for each in changed
    ):
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


def queues(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for step in decided(Kind.QUEUE, queues_of(wanted, facts), facts.queues, decide_queue):
        replaced = step.action is Action.REPLACE
        yield msgspec.structs.replace(step, loses=_runs(step.name, facts)) if replaced else step


def _runs(queue: str, facts: Facts) -> str:
    count = facts.busy.get(queue, 0)
    return f"{count} run{'s' if count > 1 else ''} in it" if count else ""


def environments(wanted: Wanted, facts: Facts) -> Iterator[Step]:
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


def unwanted_environments(wanted: Wanted, facts: Facts) -> Iterator[Step]:
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


def templates(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for name, request in wanted.templates.items():
        there = facts.templates.get(name)
        if there is None:
            yield Step(Action.CREATE, Kind.LAUNCH_TEMPLATE, name, ("it does not exist",))
        elif there.content != content_of(request):
            reason = f"its content has changed: version {there.version + 1}"
            yield Step(Action.UPDATE, Kind.LAUNCH_TEMPLATE, name, (reason,))
        else:
            yield Step(Action.KEEP, Kind.LAUNCH_TEMPLATE, name)


def definitions(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for name in wanted.definitions:
        if name in facts.definitions:
            yield Step(Action.KEEP, Kind.DEFINITION, name)
        else:
            yield Step(Action.CREATE, Kind.DEFINITION, name, ("none has this content",))


def unwanted_queues(wanted: Wanted, facts: Facts) -> Iterator[Step]:
    for step in unwanted(Kind.QUEUE, wanted.queues, facts.queues):
        yield msgspec.structs.replace(step, loses=_runs(step.name, facts))


def unwanted(kind: Kind, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Step]:
    for name in found:
        if name not in wanted:
            yield Step(Action.DELETE, kind, name, ("it is not described any more",))
