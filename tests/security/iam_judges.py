"""Two IAM databases over policies: run by the Python of `.venv-scan`, which has them.

Reads `{name: [policy document, ...]}` from stdin and prints `[judge, name, finding]`s. The policies
of a name hold together. Both databases, which are of different dates, are asked whether an action
exists, whether each of its required resources is allowed, and whether each resource fits an action.
parliament also checks grammar and conditions.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import parliament  # type: ignore[import-not-found]
from policy_sentry.shared.iam_data import (  # type: ignore[import-not-found]
    get_service_prefix_data,
)

Policy = Mapping[str, Any]
# Its own comparison of resources looks at each statement alone, so `fit` does that.
NOT_ASKED = ("RESOURCE_MISMATCH",)


class Resource(NamedTuple):
    """A kind of resource of an action. `arn`: with `*` for the free parts."""

    arn: str
    is_required: bool


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def overlap(one: str, other: str) -> bool:
    """Whether there is a text that both patterns match; `*` and `?` as in IAM."""

    @cache
    def rest(i: int, j: int) -> bool:
        if i == len(one) or j == len(other):
            return not (one[i:].strip("*") or other[j:].strip("*"))
        if "*" in (one[i], other[j]):
            return rest(i + 1, j) or rest(i, j + 1)  # the star ends, or takes a character
        return (one[i] == other[j] or "?" in (one[i], other[j])) and rest(i + 1, j + 1)

    return rest(0, 0)


def fits(arn: str, target: str) -> bool:
    """Whether two ARN patterns have a common ARN: each part of theirs, since `*` has no colon."""
    parts = arn.split(":", 5), target.split(":", 5)
    return len(parts[0]) == len(parts[1]) and all(map(overlap, *parts))


def in_policy_sentry(service: str, action: str) -> list[Resource] | None:
    """The resources of an action; None if it is unknown."""
    data = get_service_prefix_data(service) or {}
    names = {name.lower(): each for name, each in data.get("privileges", {}).items()}
    if action.lower() not in names:
        return None
    return [
        Resource(_pattern(data["resources"][kind]["arn"]), bool(each["required"]))
        for kind, each in names[action.lower()]["resource_types"].items()
        if kind
    ]


def in_parliament(service: str, action: str) -> list[Resource] | None:
    """The resources of an action; None if it is unknown."""
    for data in parliament.iam_definition:
        for each in data["privileges"] if data["prefix"] == service else ():
            if each["privilege"].lower() == action.lower():
                arns = {found["resource"]: found["arn"] for found in data["resources"]}
                kinds = [kind["resource_type"] for kind in each["resource_types"]]
                return [
                    Resource(_pattern(arns[kind.rstrip("*")]), kind.endswith("*"))
                    for kind in kinds
                    if kind.rstrip("*") in arns
                ]
    return None


def _pattern(arn: str) -> str:
    return re.sub(r"\$\{[^}]+\}", "*", arn)


def fit(
    database: Callable[[str, str], list[Resource] | None], policies: list[Policy]
) -> Iterator[str]:
    """The actions that are unknown, that lack a resource, and the resources of no action."""
    targets: dict[str, set[str]] = defaultdict(set)
    users: dict[str, set[str]] = defaultdict(set)
    for policy in policies:
        for statement in policy["Statement"]:
            if statement["Effect"] == "Allow":
                for action in listed(statement["Action"]):
                    targets[action] |= {*listed(statement["Resource"])}
                    for target in listed(statement["Resource"]):
                        users[target].add(action)
    known = {action: database(*action.split(":")) for action in targets}
    for action, resources in known.items():
        if resources is None:
            yield f"unknown action {action}"
        elif "*" not in targets[action]:
            if not resources:
                yield f"{action} takes no resource"
            for arn, is_required in resources:
                if is_required and not any(fits(arn, each) for each in targets[action]):
                    yield f"{action} lacks {arn}"
    for target, actions in users.items():
        arns = [arn for action in actions for arn, _ in known[action] or ()]
        is_known = any(known[action] is not None for action in actions)
        if target != "*" and is_known and not any(fits(arn, target) for arn in arns):
            yield f"no action fits {target}"


def dependents(policies: list[Policy]) -> Iterator[str]:
    """The actions that an allowed action needs beside itself, and that are not allowed."""
    allowed = {
        action
        for policy in policies
        for statement in policy["Statement"]
        if statement["Effect"] == "Allow"
        for action in listed(statement["Action"])
    }
    for action in sorted(allowed):
        service, name = action.split(":")
        privileges = (get_service_prefix_data(service) or {}).get("privileges", {})
        for kind in privileges.get(name, {}).get("resource_types", {}).values():
            for each in {*kind["dependent_actions"]} - allowed:
                yield f"{action} needs {each}"


def grammar(policies: list[Policy]) -> Iterator[str]:
    """What parliament finds beside resources."""
    for policy in policies:
        for finding in parliament.analyze_policy_string(json.dumps(policy)).findings:
            if finding.issue not in NOT_ASKED:
                yield f"{finding.issue}: {finding.detail}"


JUDGES: Mapping[str, Callable[[list[Policy]], Iterator[str]]] = {
    "policy_sentry": lambda policies: fit(in_policy_sentry, policies),
    "parliament": lambda policies: fit(in_parliament, policies),
    "policy_sentry's dependent actions": dependents,
    "parliament's grammar": grammar,
}

if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    given: Mapping[str, list[Policy]] = json.load(sys.stdin)
    found = [
        [judge, name, finding]
        for judge, check in JUDGES.items()
        for name, policies in given.items()
        for finding in check(policies)
    ]
    print(json.dumps(found))
