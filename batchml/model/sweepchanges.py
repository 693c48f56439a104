"""`--set space.lr.log=[1e-5,1e-1]`: changes to a sweep file's table (pure)."""

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from batchml.errors import did_you_mean
from batchml.model.spacefile import KINDS
from batchml.model.tables import is_text

_BARE = re.compile(r"(?<=[\[,])\s*([A-Za-z_][^,\[\]\"']*?)\s*(?=[,\]])")


def changed(table: Mapping[str, Any], changes: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The table with the changes made, one after the other, and what is wrong with them."""
    found = copy.deepcopy(dict(table))
    mistakes = []
    for change in changes:
        if not is_text(change):
            mistakes.append(f"--set {change!r}: not UTF-8.")
            continue
        path, equals, text = change.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            mistakes.append(f"--set {change}: write KEY=VALUE, for example limits.trials=8.")
            continue
        wrong = _set(found, keys, value_of(text))
        if wrong:
            mistakes.append(f"--set {change}: {wrong}")
    return found, mistakes


def value_of(text: str) -> Any:
    """What TOML makes of a value; words need no quotes: `sgd`, `[sgd,adamw]`."""
    for attempt in (text, _BARE.sub(_quoted, text)):
        try:
            table = tomllib.loads(f"value = {attempt}")
        except (tomllib.TOMLDecodeError, RecursionError):
            continue
        if list(table) == ["value"]:
            return table["value"]
    return text.strip()


def _quoted(match: re.Match[str]) -> str:
    word = match[1]
    return word if word in ("true", "false", "inf", "nan") else f'"{word}"'


def _set(table: dict[str, Any], keys: list[str], value: Any) -> str:
    """Make one change; what is wrong with it, or the empty string."""
    if keys[0] == "space" and len(keys) > 1:
        return _set_parameter(table.setdefault("space", {}), keys[1:], value)
    if keys[0] == "goal" and len(keys) == 2:
        goal = table.get("goal")
        is_there = isinstance(goal, dict) and keys[1] in goal
        table["goal"] = {**goal, keys[1]: value} if is_there and goal else {keys[1]: value}
        return ""
    *above, last = keys
    inner: Any = table
    for key in above:
        inner = inner.setdefault(key, {})
        if not isinstance(inner, dict):
            return f"{key} is not a table."
    inner[last] = value
    return ""


def _set_parameter(space: Any, keys: list[str], value: Any) -> str:
    if not isinstance(space, dict):
        return "space is not a table."
    name, rest = _named(space, keys)
    if name not in space:
        meant = did_you_mean(name, space)
        if meant:
            return f"the file has no parameter {name}.{meant}"
    if not rest:
        space[name] = value
        return ""
    if len(rest) > 1 and rest[0] != "when":
        return f"{'.'.join(rest)} is no part of a parameter."
    old = space.get(name)
    parts = dict(old) if isinstance(old, dict) else {}
    if rest[0] in KINDS and not (rest[0] == "log" and isinstance(value, bool)):
        # Another kind takes the place of the one there was; `when` stays.
        parts = {key: part for key, part in parts.items() if key == "when" or key in rest}
        if rest[0] in ("float", "int") and isinstance(old, dict):
            parts |= {key: old[key] for key in ("step", "log") if _is_option(old, key)}
    if rest[0] == "when" and len(rest) > 1:
        parts["when"] = {**parts.get("when", {}), ".".join(rest[1:]): value}
    else:
        parts[rest[0]] = value
    space[name] = parts
    return ""


def _is_option(old: Mapping[str, Any], key: str) -> bool:
    return key in old and not isinstance(old[key], list)


def _named(space: Mapping[str, Any], keys: list[str]) -> tuple[str, list[str]]:
    """The parameter that the keys begin with, the longest there is, and what is left of them."""
    for count in range(len(keys), 0, -1):
        name = ".".join(keys[:count])
        if name in space:
            return name, keys[count:]
    return keys[0], keys[1:]
