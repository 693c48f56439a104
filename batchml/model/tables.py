"""Read a table (TOML or JSON) into a frozen struct, and report every mistake, not just the first.

msgspec stops at the first mistake. So each mistake is recorded and removed from the table, and the
rest is read again, until no mistake is left.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from batchml.errors import did_you_mean

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = r"Object contains unknown field `(.*)`$"
_STEP = r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]"
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = r"(?i)\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b)?\s*"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = r"(?:[0-9]+(?:\.[0-9]+)?\s*[smhd]\s*)+"


def read_struct(
    table: Mapping[str, Any], kind: type[T], within: str = "", tables: Mapping[str, str] = {}
) -> tuple[T, list[str]]:
    """Return the struct, with defaults in place of wrong values, and the text of every mistake.

    The text names the key, its value and the allowed values. `within` is the table's name in its
    file. `tables` says where keys belong that are neither in `kind` nor in its tables, such as
    "under [limits]".
    """
    try:
        return msgspec.convert(table, kind), []
    except msgspec.ValidationError:
        left = copy.deepcopy(dict(table))
    mistakes: list[str] = []
    while True:
        try:
            return msgspec.convert(left, kind), mistakes
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `")
            steps = _parse_path(path.removesuffix("`"))
            steps = _fill_in_keys(left, kind, str(error), steps)
            unknown = re.match(_UNKNOWN, text)
            if unknown and unknown[1] in _at(left, steps):
                steps = [*steps, unknown[1]]
                mistakes.append(_unknown_key(steps, kind, within, tables))
            else:
                value, choices = _at(left, steps), _choices(steps, kind)
                expected = _expected(text, choices, is_number=_is_number(_type_at(kind, steps)))
                meant = did_you_mean(value, choices) if isinstance(value, str) else ""
                mistakes.append(f"{_dotted(steps)}: found {value!r}. {expected}.{meant}")
            if not _remove(left, steps):
                raise


def parse_size(text: str | int) -> int | None:
    """Return bytes for `"15 GiB"`, `"512m"`, `"8GB"` (all powers of 1024) or None.

    A bare number is MiB, as in AWS Batch.
    """
    match = re.fullmatch(_SIZE, str(text))
    if not match:
        return None
    number, unit, suffix = match.groups()
    scale = 1024**2 if not unit and not suffix else _UNITS[unit.lower()]
    size = float(number) * scale
    return int(size) if size < 2**63 else None


def parse_duration(text: str | int) -> int | None:
    """Return seconds for `"4h"`, `"1h30m"`, `"90s"` or a bare number of seconds, else None."""
    text = str(text).strip().lower()
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    if len(text) > 100 or not re.fullmatch(_DURATION, text):
        return None
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])", text)
    return int(sum(float(number) * _SECONDS[unit] for number, unit in parts))


_SOME_KEY = ""  # `[...]` in a path of msgspec: an unnamed key of a table with free keys


def _parse_path(path: str) -> list[str | int]:
    """The keys and indices of a path in a message of msgspec, such as `$.env[...].queues`."""
    found = re.findall(_STEP, path.removeprefix("$"))
    return [name or (int(index) if index else _SOME_KEY) for name, index in found]


def _fill_in_keys(
    table: dict[str, Any], kind: type[msgspec.Struct], text: str, steps: list[str | int]
) -> list[str | int]:
    """Fill in the keys that msgspec leaves out: a key is right if it gives the error alone."""
    while _SOME_KEY in steps:
        index = steps.index(_SOME_KEY)
        keys = (key for key in _at(table, steps[:index]) if key != _SOME_KEY)
        found = next(
            (key for key in keys if _gives_error(table, kind, [*steps[:index], key], text)), None
        )
        if found is None:
            return steps[:index]
        steps = [*steps[:index], found, *steps[index + 1 :]]
    return steps


def _gives_error(
    table: dict[str, Any], kind: type[msgspec.Struct], steps: list[str | int], text: str
) -> bool:
    """Whether the error is `text` if the key is the only one in its table."""
    alone = copy.deepcopy(table)
    free = _at(alone, steps[:-1])
    for key in [key for key in free if key != steps[-1]]:
        del free[key]
    try:
        msgspec.convert(alone, kind)
    except msgspec.ValidationError as error:
        return str(error) == text
    return False


def _dotted(steps: list[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".") or "the file"


def _at(table: Any, steps: list[str | int]) -> Any:
    for step in steps:
        table = table[step]
    return table


def _remove(table: Any, steps: list[str | int]) -> bool:
    if not steps:
        return False
    del _at(table, steps[:-1])[steps[-1]]
    return True


def _unknown_key(
    steps: list[str | int], kind: type[msgspec.Struct], within: str, tables: Mapping[str, str]
) -> str:
    key = str(steps[-1])
    right_table = tables.get(key) or _table_of(key, kind, within)
    if right_table:
        return f"{_dotted(steps)}: unknown key here. It belongs {right_table}."
    known = _field_names(_type_at(kind, steps[:-1]))
    meant = did_you_mean(key, known)
    return f"{_dotted(steps)}: unknown key.{meant or ' Known: ' + ', '.join(known) + '.'}"


def _table_of(key: str, kind: type[msgspec.Struct], within: str) -> str:
    """Where a key belongs: in the table `within` or in a table below it; "" for unknown keys."""
    fields = msgspec.structs.fields(kind)
    if any(field.encode_name == key for field in fields):
        return f"under [{within}]" if within else "at the top of the file, before the first [table]"
    for field in fields:
        if _is_struct(field.type) and key in _field_names(field.type):
            return f"under [{f'{within}.' if within else ''}{field.encode_name}]"
    return ""


def _expected(text: str, choices: list[str], *, is_number: bool) -> str:
    """`Expected a text`, `Expected one of a, b`, or for numbers `Expected a whole number or a`."""
    plain = _plain(text)
    if choices and is_number:
        limits = plain if plain.startswith("Expected a") else "Expected a whole number"
        return " or ".join([limits, *choices])
    return f"Expected one of {', '.join(choices)}" if choices else plain


def _is_number(annotation: Any) -> bool:
    """Whether a type allows whole numbers beside other values: `int | Literal["auto"]`."""
    parts = get_args(annotation)
    return any(part is int or get_args(part)[:1] == (int,) for part in parts)


def _choices(steps: list[str | int], kind: Any) -> list[str]:
    """The allowed words of a value; none if it is not limited to words."""
    annotation = _type_at(kind, steps)
    words = [word for word in _literals(annotation) if word]
    return ["true", "false", *words] if words and bool in get_args(annotation) else words


def _literals(annotation: Any) -> list[str]:
    """The values of all Literals in a type, as texts."""
    arguments = getattr(annotation, "__args__", ())
    return [
        part
        for inner in arguments
        if inner is not Ellipsis
        for part in ([str(inner)] if isinstance(inner, str | int) else _literals(inner))
    ]


def _type_at(annotation: Any, steps: list[str | int]) -> Any:
    """The type of the value at `steps`; None if it is unknown."""
    for step in steps:
        annotation = _type_below(annotation, step)
    return annotation


def _type_below(annotation: Any, step: str | int) -> Any:
    """The type of a key or element of a value of this type; None if it is unknown."""
    if _is_struct(annotation):
        fields = msgspec.structs.fields(annotation)
        return next((field.type for field in fields if field.encode_name == step), None)
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    if isinstance(step, int) and get_origin(annotation) in (tuple, list):
        return arguments[0]
    return next((found for part in arguments if (found := _type_below(part, step))), None)


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _field_names(annotation: Any) -> list[str]:
    """The keys of a table of this type, in the file's spelling."""
    kind = _struct_inside(annotation)
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _struct_inside(annotation: Any) -> Any:
    if _is_struct(annotation):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = _struct_inside(part)
        if found is not None:
            return found
    return None


_WORDS = {
    "`bool | int | float | str`": "a text, a number, or true or false",
    "`int`": "a whole number",
    "`str`": "a text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
    "`float`": "a number",
}


def _plain(text: str) -> str:
    """A message of msgspec in plain words, without the type of the wrong value."""
    for word, meaning in _WORDS.items():
        text = text.replace(word, meaning)
    return re.sub(r", got .*$", "", re.sub(r"^Invalid enum value .*$", "Expected", text))


def is_text(text: str) -> bool:
    """Whether an argument was valid UTF-8: Python keeps other bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
