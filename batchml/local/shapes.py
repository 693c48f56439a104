"""Check a value against a botocore shape: types, members, enums, lengths, ranges, patterns.

botocore itself checks only required members, types and minima, and only in the client. The same
walk, strict about unknown members, checks our own answers in the tests.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

_MAX_DEPTH = 32
# "The values aren't case sensitive": AWS Batch API, EvaluateOnExit.
_ANY_CASE = ("RetryAction",)
# Unicode categories, which Python's patterns lack, by what comes closest.
_CATEGORIES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}


class Problem(NamedTuple):
    path: str
    text: str


def clean(shape: Any, value: Any) -> Any:
    """Return `value` without nulls and without members that the shape does not have, as AWS does.

    Values of a wrong type come back unchanged, for `problems` to name.
    """
    if shape.type_name == "structure" and isinstance(value, dict):
        members = shape.members
        return {
            name: clean(members[name], inner)
            for name, inner in value.items()
            if name in members and inner is not None
        }
    if shape.type_name == "list" and isinstance(value, list):
        return [clean(shape.member, inner) for inner in value if inner is not None]
    if shape.type_name == "map" and isinstance(value, dict):
        return {key: clean(shape.value, inner) for key, inner in value.items() if inner is not None}
    return value


def problems(shape: Any, value: Any, path: str = "", *, strict: bool = False) -> Iterator[Problem]:
    """Yield what is wrong with `value`; nothing when it satisfies the shape.

    With `strict`, members that the shape does not have are problems too.
    """
    if path.count(".") + path.count("[") > _MAX_DEPTH:
        yield Problem(path, "is nested too deeply")
        return
    kind = shape.type_name
    if not _is_type(kind, value):
        yield Problem(path, f"must be of type {kind}, found {type(value).__name__}")
    elif kind == "structure":
        yield from _structure(shape, value, path, strict)
    elif kind == "list":
        yield from _size(shape, len(value), path)
        for place, inner in enumerate(value):
            yield from problems(shape.member, inner, f"{path}[{place}]", strict=strict)
    elif kind == "map":
        yield from _size(shape, len(value), path)
        for key, inner in value.items():
            yield from problems(shape.key, key, f"{path}.{key}", strict=strict)
            yield from problems(shape.value, inner, f"{path}.{key}", strict=strict)
    elif kind == "string":
        yield from _string(shape, value, path)
    elif kind in ("integer", "long", "float", "double"):
        yield from _range(shape, value, path)


_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
    "timestamp": (int, float, str),
}


def _is_type(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))


def _structure(shape: Any, value: dict[str, Any], path: str, strict: bool) -> Iterator[Problem]:
    dot = f"{path}." if path else ""
    for name in shape.required_members:
        if value.get(name) is None:
            yield Problem(f"{dot}{name}", "must not be null")
    for name, inner in value.items():
        member = shape.members.get(name)
        if member is not None:
            yield from problems(member, inner, f"{dot}{name}", strict=strict)
        elif strict:
            yield Problem(f"{dot}{name}", "is not a member of the shape")


def _string(shape: Any, value: str, path: str) -> Iterator[Problem]:
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        yield Problem(path, "must be valid Unicode")
        return
    known = value.upper() if shape.name in _ANY_CASE else value
    if shape.enum and known not in shape.enum:
        yield Problem(path, f"must satisfy enum value set: [{', '.join(shape.enum)}]")
    yield from _size(shape, len(value), path)
    pattern = shape.metadata.get("pattern")
    compiled = _compiled(pattern) if pattern else None
    if compiled is not None and not compiled.fullmatch(value):
        yield Problem(path, f"must satisfy regular expression pattern: {pattern}")


def _size(shape: Any, size: int, path: str) -> Iterator[Problem]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and size < low:
        yield Problem(path, f"must have length greater than or equal to {low}")
    if high is not None and size > high:
        yield Problem(path, f"must have length less than or equal to {high}")


def _range(shape: Any, value: float, path: str) -> Iterator[Problem]:
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    if low is not None and value < low:
        yield Problem(path, f"must have value greater than or equal to {low}")
    if high is not None and value > high:
        yield Problem(path, f"must have value less than or equal to {high}")
    if shape.type_name in ("integer", "long"):
        bits = 31 if shape.type_name == "integer" else 63
        if not -(2**bits) <= value < 2**bits:
            yield Problem(path, f"must fit {bits + 1} bits")


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """The pattern, or None for one that only Java reads, which is then not enforced."""
    for category, near in _CATEGORIES.items():
        pattern = pattern.replace(category, near)
    try:
        return re.compile(pattern)
    except re.error:
        return None
