"""What a job of several nodes may say: `nodes`, `[launch]`, `[health]` and `[[groups]]`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchml.model.names import is_valid_name
from batchml.model.reading import parse_duration, parse_size

if TYPE_CHECKING:
    from batchml.model.job import Group, JobSpec, Resources

ResourceMistakes = Callable[["Resources", str], Iterable[str]]  # and what they are called

_DURATION = 'Write a duration such as "10m", "90s" or "1h30m".'


def node_mistakes(
    spec: "JobSpec", table: Mapping[str, Any], of_resources: ResourceMistakes
) -> Iterator[str]:
    """What no part of it says by itself. `of_resources` finds the mistakes of a group's.

    `table` is what was read: what depends on a key that was refused already is not told.
    """
    is_known = _is_kind_known(spec, table.get("launch"))
    yield from _launch(spec, is_known)
    yield from _health(spec, is_known)
    yield from _groups(spec, table.get("groups"), is_known, of_resources)


def _is_kind_known(spec: "JobSpec", given: Any) -> bool:
    """False where another kind than the default was meant, and refused."""
    if isinstance(given, Mapping):
        return bool(given.get("kind", spec.launch.kind) == spec.launch.kind)
    return given is None or given == spec.launch


def _launch(spec: "JobSpec", is_known: bool) -> Iterator[str]:
    launch, kind = spec.launch, spec.launch.kind
    for key, text in (("hang_after", launch.hang_after), ("start_within", launch.start_within)):
        if text is not None and not parse_duration(text):
            yield f"launch.{key}: found {text!r}. {_DURATION}"
    processes = launch.processes_per_node
    if processes != "auto" and processes < 1:
        yield f'launch.processes_per_node: found {processes}. At least 1, or "auto".'
    if not is_known:
        return
    if kind != "torchrun":
        for key, given in (
            ("processes_per_node", processes != "auto"),
            ("logs", launch.logs != "all"),
            ("hang_after", launch.hang_after is not None),
        ):
            if given:
                yield f'launch.{key}: needs kind = "torchrun", found {kind!r}.'
    if kind == "plain" and launch.start_within != type(launch)().start_within:
        yield 'launch.start_within: needs kind = "torchrun" or "ray", found "plain".'


def _health(spec: "JobSpec", is_known: bool) -> Iterator[str]:
    floor = spec.health.bandwidth
    if floor is None:
        return
    if not parse_size(floor):
        yield (
            f"health.bandwidth: found {floor!r}. Write what nodes must send each other in a "
            f'second, such as "100 MiB".'
        )
    elif is_known and spec.launch.kind != "torchrun":
        yield (
            f'health.bandwidth: is measured between the nodes of launch.kind = "torchrun", found '
            f"{spec.launch.kind!r}."
        )


def _groups(
    spec: "JobSpec", given: Any, is_known: bool, of_resources: ResourceMistakes
) -> Iterator[str]:
    groups, is_ray = spec.groups, spec.launch.kind == "ray"
    if groups and is_known and not is_ray:
        yield f'groups: need launch.kind = "ray", found {spec.launch.kind!r}.'
    if is_ray and not given:
        yield (
            'launch.kind: "ray" needs [[groups]], the head first, for example: [[groups]] '
            'name = "head", then [[groups]] name = "workers", count = 4, queue = "cpu".'
        )
    if groups and spec.nodes > 1:
        yield f"nodes: found {spec.nodes} beside groups, whose own count says how many there are."
    for place, group in enumerate(groups):
        where, before = f"groups[{place}]", [each.name for each in groups[:place]]
        yield from _group(where, group, place == 0, before)
        if _is_count_known(group, given, place):
            yield from _counts(where, group, place == 0)
        if group.resources is not None:
            yield from of_resources(group.resources, f"groups[{place}].resources")


def _is_count_known(group: "Group", given: Any, place: int) -> bool:
    """False where another count than the default was meant, and refused."""
    table = given[place] if isinstance(given, Sequence) and place < len(given) else None
    return not isinstance(table, Mapping) or table.get("count", group.count) == group.count


def _group(where: str, group: "Group", is_head: bool, before: Sequence[str]) -> Iterator[str]:
    if not group.name:
        yield f'{where}.name: missing. For example name = "{"head" if is_head else "workers"}".'
    elif not is_valid_name(group.name):
        yield (
            f"{where}.name: found {group.name!r}. Allowed: 1-128 letters, digits, - and _, "
            f"starting with a letter or digit."
        )
    elif group.name in before:
        yield f"{where}.name: {group.name!r} is the name of another group, too."


def _counts(where: str, group: "Group", is_head: bool) -> Iterator[str]:
    if is_head and group.count != 1:
        yield f"{where}.count: found {group.count}. The first group is the head, and there is one."
    if is_head and group.min is not None:
        yield f"{where}.min: the first group is the head, without which nothing begins."
    elif group.min is not None and group.min > group.count:
        yield f"{where}.min: found {group.min}, more than its count, {group.count}."
