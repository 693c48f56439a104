"""What a sweep file says below `[space]` and means for the whole sweep (pure).

In TOML a key belongs to the table above it: what is written after `[space]` is a parameter.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from batchml.model.sweep import Method

_COMPARISON = re.compile(r"[<>]|[=!]=")


def misplaced(table: Mapping[str, Any]) -> dict[str, str]:
    """Keys of the file that stand below `[space]` with values that they would take -> the mistake.

    A job may well have a parameter `seed`: where the file has one of its own above, or the
    parameter is written in full, that is what is meant.
    """
    space = table.get("space")
    if not isinstance(space, Mapping):
        return {}
    return {
        key: f"space.{key}: stands below [space]; write it above. {_otherwise(key)}"
        for key, is_meant in _MEANT.items()
        if key in space and key not in table and is_meant(space[key])
    }


def _otherwise(key: str) -> str:
    kind = "choice = [...]" if key == "where" else "constant = ..."
    return f"For a parameter of that name: {key} = {{ {kind} }}."


def _is_condition(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list | tuple)
        and bool(texts)
        and all(isinstance(text, str) and _COMPARISON.search(text) for text in texts)
    )


def _is_method(value: Any) -> bool:
    return isinstance(value, str) and value in get_args(Method)


def _is_goal(value: Any) -> bool:
    """`{ max = "val_accuracy" }`, and no range in the words of another tool."""
    if not isinstance(value, Mapping) or not value or not set(value) <= {"max", "min"}:
        return False
    return all(
        isinstance(name, str)
        for names in value.values()
        for name in (names if isinstance(names, list | tuple) else [names])
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_MEANT: Mapping[str, Callable[[Any], bool]] = {
    "job": _is_text,
    "goal": _is_goal,
    "method": _is_method,
    "seed": _is_whole,
    "where": _is_condition,
    "name": _is_text,
}
