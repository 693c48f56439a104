"""Check a value against a botocore shape: types, members, enums, lengths, ranges, patterns.

botocore itself checks required members, types and minima, and only in the client. Which further
checks apply to requests, and their evidence, is in docs/behaviours.md ("Checks that are stricter
than botocore's"). In the tests the same function checks the server's answers, strictly.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

_MAX_DEPTH = 32
# "The values aren't case sensitive": AWS Batch API, EvaluateOnExit.
_ANY_CASE = ("RetryAction",)
# Unicode categories, which Python's patterns lack, and their closest equivalents.
_CATEGORIES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}


class ShapeProblem(NamedTuple):
    path: str
    text: str


def clean(shape: Any, value: Any) -> Any:
    """Return `value` without nulls and unknown members, as AWS drops them.

    Values of a wrong type are returned unchanged; `problems` reports them.
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


class _Rules(NamedTuple):
    strict: bool
    maxima: bool


def problems(
    shape: Any, value: Any, *, strict: bool = False, maxima: bool = True
) -> Iterator[ShapeProblem]:
    """Yield the mistakes in `value`; nothing when it satisfies the shape.

    With `strict`, unknown members are mistakes. Without `maxima`, maximal lengths, maximal values
    and patterns are not checked. The minimal length of a map never is: AWS accepts empty `tags`,
    although its model requires one tag.
    """
    return _problems(shape, value, "", _Rules(strict, maxima))


def _problems(shape: Any, value: Any, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    if path.count(".") + path.count("[") > _MAX_DEPTH:
        yield ShapeProblem(path, "is nested too deeply")
        return
    kind = shape.type_name
    if not _is_type(kind, value):
        yield ShapeProblem(path, f"must be of type {kind}, found {type(value).__name__}")
    elif kind == "structure":
        yield from _structure(shape, value, path, rules)
    elif kind == "list":
        yield from _size(shape, len(value), path, rules)
        for index, inner in enumerate(value):
            yield from _problems(shape.member, inner, f"{path}[{index}]", rules)
    elif kind == "map":
        yield from _size(shape, max(1, len(value)), path, rules)
        for key, inner in value.items():
            yield from _problems(shape.key, key, f"{path}.{key}", rules)
            yield from _problems(shape.value, inner, f"{path}.{key}", rules)
    elif kind == "string":
        yield from _string(shape, value, path, rules)
    elif kind in ("integer", "long", "float", "double"):
        yield from _range(shape, value, path, rules)


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


def _structure(
    shape: Any, value: dict[str, Any], path: str, rules: _Rules
) -> Iterator[ShapeProblem]:
    dot = f"{path}." if path else ""
    for name in shape.required_members:
        if value.get(name) is None:
            yield ShapeProblem(f"{dot}{name}", "must not be null")
    for name, inner in value.items():
        member = shape.members.get(name)
        if member is not None:
            yield from _problems(member, inner, f"{dot}{name}", rules)
        elif rules.strict:
            yield ShapeProblem(f"{dot}{name}", "is not a member of the shape")


def _string(shape: Any, value: str, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        yield ShapeProblem(path, "must be valid Unicode")
        return
    known = value.upper() if shape.name in _ANY_CASE else value
    if shape.enum and known not in shape.enum:
        yield ShapeProblem(path, f"must satisfy enum value set: [{', '.join(shape.enum)}]")
    yield from _size(shape, len(value), path, rules)
    pattern = shape.metadata.get("pattern") if rules.maxima else None
    compiled = _compile(pattern) if pattern else None
    if compiled is not None and not compiled.fullmatch(value):
        yield ShapeProblem(path, f"must satisfy regular expression pattern: {pattern}")


def _size(shape: Any, size: int, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    low, high = _bounds(shape, rules)
    if low is not None and size < low:
        yield ShapeProblem(path, f"must have length greater than or equal to {low}")
    if high is not None and size > high:
        yield ShapeProblem(path, f"must have length less than or equal to {high}")


def _range(shape: Any, value: float, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    low, high = _bounds(shape, rules)
    if low is not None and value < low:
        yield ShapeProblem(path, f"must have value greater than or equal to {low}")
    if high is not None and value > high:
        yield ShapeProblem(path, f"must have value less than or equal to {high}")
    if shape.type_name in ("integer", "long"):
        bits = 31 if shape.type_name == "integer" else 63
        if not -(2**bits) <= value < 2**bits:
            yield ShapeProblem(path, f"must fit {bits + 1} bits")


def _bounds(shape: Any, rules: _Rules) -> tuple[Any, Any]:
    return shape.metadata.get("min"), shape.metadata.get("max") if rules.maxima else None


@lru_cache(maxsize=512)
def _compile(pattern: str) -> re.Pattern[str] | None:
    """The pattern, or None for one that only Java understands, which is then not enforced."""
    for category, near in _CATEGORIES.items():
        pattern = pattern.replace(category, near)
    try:
        return re.compile(pattern)
    except re.error:
        return None
