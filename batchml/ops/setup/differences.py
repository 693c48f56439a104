"""What of a resource in AWS is not as a request asks for: key by key, in words. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchml.model.names import bare_name

# Lists that AWS treats as sets, so another order is no difference.
_SETS = {"subnets", "securityGroupIds", "instanceTypes", "shareDistribution"}

# What AWS adds to what was asked for: of the AMI of an `ec2Configuration`, once there are instances
# that started from it. Source: AWS Batch API reference, Ec2Configuration, `batchImageStatus`.
_ADDED = {"batchImageStatus"}


class Difference(tuple[str, Any, Any]):
    """`(key, found, wanted)`; the key is a path such as `computeResources.maxvCpus`."""

    __slots__ = ()

    @property
    def key(self) -> str:
        return str(self[0])

    def __str__(self) -> str:
        key, found, wanted = self
        return f"{key.rpartition('.')[2]}: {_shown(found)} -> {_shown(wanted)}"


def differences(
    wanted: Mapping[str, Any], found: Mapping[str, Any], path: str = ""
) -> Iterator[Difference]:
    """Every key of `wanted` that `found` has otherwise. What is not asked for is AWS's to choose.

    Names and ARNs of the same thing are the same, and so are 0 or nothing and what AWS does not
    mention: a `minScaleDownDelayMinutes` of 0 unsets it.
    """
    for key, value in wanted.items():
        there = found.get(key)
        place = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from differences(value, there if isinstance(there, Mapping) else {}, place)
        elif there is None and not value:
            continue
        elif _comparable(key, value) != _comparable(key, there):
            yield Difference((place, there, value))


def _comparable(key: str, value: Any) -> Any:
    """A form in which equal means the same to AWS."""
    if isinstance(value, Mapping):
        kept = {name: inner for name, inner in value.items() if name not in _ADDED}
        return {name: _comparable(name, inner) for name, inner in kept.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = [_comparable("", each) for each in value]
        return sorted(items, key=repr) if key in _SETS else items
    if isinstance(value, str):
        return bare_name(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_shown, value))}]"
    return bare_name(value) if isinstance(value, str) else str(value)
