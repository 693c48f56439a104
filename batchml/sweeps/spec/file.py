"""Read a sweep file into a SweepSpec, with every mistake of the file at once. Pure."""

import copy
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from batchml.errors import ConfigError, did_you_mean
from batchml.model.conditions import ConditionError, as_identifier, check_condition, condition_names
from batchml.model.names import is_valid_name, to_name
from batchml.model.sweep import (
    Goal,
    Method,
    Params,
    Space,
    SweepSpec,
)
from batchml.model.tables import is_text, read_struct
from batchml.sweeps.spec.rules import bound_trials, method_mistakes
from batchml.sweeps.spec.sections import (
    KINDS,
    NEEDED,
    ConfirmTable,
    EarlyStopTable,
    LimitsTable,
    add_listed_parameters,
    read_early_stop,
    read_limits,
    read_points,
    read_space,
)

# --- Changes: `--set space.lr.log=[1e-5,1e-1]` ----------------------------------------------------


_BARE_WORD = re.compile(r"(?<=[\[,])\s*([A-Za-z_][^,\[\]\"']*?)\s*(?=[,\]])")


def apply_changes(
    table: Mapping[str, Any], changes: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Apply the changes of `--set`, one after the other; the new table and the mistakes."""
    changed = copy.deepcopy(dict(table))
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
        if not text.strip():
            mistakes.append(f'--set {change}: the value is empty; "" is the empty text.')
            continue
        mistake = _set(changed, keys, parse_value(text))
        if mistake:
            mistakes.append(f"--set {change}: {mistake}")
    return changed, mistakes


def parse_value(text: str) -> Any:
    """Parse a value as TOML; words need no quotes: `sgd`, `[sgd,adamw]`."""
    for attempt in (text, _BARE_WORD.sub(_quoted, text)):
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
    """Make one change. Returns the mistake in it; "" if there is none."""
    if keys[0] == "space" and len(keys) > 1:
        return _set_parameter(table.setdefault("space", {}), keys[1:], value)
    if keys[0] == "goal" and len(keys) == 2:
        goal = table.get("goal")
        # Another direction replaces the goal; the same direction gets another metric.
        has_direction = isinstance(goal, dict) and keys[1] in goal
        table["goal"] = {**goal, keys[1]: value} if has_direction and goal else {keys[1]: value}
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
    """Change a parameter or a part of it. Returns the mistake; "" if there is none."""
    if not isinstance(space, dict):
        return "space is not a table."
    name, rest = _split_name(space, keys)
    if name not in space:
        meant = did_you_mean(name, space)
        if meant:
            return f"the file has no parameter {name}.{meant}"
    if not rest:
        space[name] = value
        return ""
    if len(rest) > 1 and rest[0] != "when":
        return f"{'.'.join(rest)} is not a part of a parameter."
    old = space.get(name)
    parts = dict(old) if isinstance(old, dict) else {}
    if rest[0] in KINDS and not (rest[0] == "log" and isinstance(value, bool)):
        # A new kind replaces the old one; `when` stays.
        parts = {key: part for key, part in parts.items() if key == "when" or key in rest}
        if rest[0] in ("float", "int") and isinstance(old, dict):
            ranges = {key for key in old if isinstance(old[key], list)}  # a `log` here is a kind
            parts |= {key: old[key] for key in ("step", "log") if key in old.keys() - ranges}
    if rest[0] == "when" and len(rest) > 1:
        parts["when"] = {**parts.get("when", {}), ".".join(rest[1:]): value}
    else:
        parts[rest[0]] = value
    space[name] = parts
    return ""


def _split_name(space: Mapping[str, Any], keys: list[str]) -> tuple[str, list[str]]:
    """The parameter that the keys begin with, and the rest of the keys. A name may have dots."""
    for count in range(len(keys), 0, -1):
        name = ".".join(keys[:count])
        if name in space:
            return name, keys[count:]
    return keys[0], keys[1:]


# --- The file -------------------------------------------------------------------------------------


MAX_NAME = 48  # characters of a sweep's name; names of jobs are longer
MAX_METRIC = 100  # characters, as in runtime/protocol/log_marks.py

# Keys of other tools, and keys at a wrong place, with the place where a sweep file has them.
_MOVED_KEYS = {
    "parameters": "in [space]", "params": "in [space]", "search_space": "in [space]",
    "metric": 'in goal = { max = "val_accuracy" }',
    "objective": 'in goal = { max = "val_accuracy" }',
    "direction": 'in goal = { max = "val_accuracy" }',
    "budget": "in [limits]", "seeds": "under [confirm]",
}  # fmt: skip
_GOAL = 'goal = { max = "val_accuracy" } or goal = { min = "loss" }'


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. Fields of type Any are read by hand, for better messages."""

    job: str = ""
    goal: Any = None
    method: Method = "tpe"
    space: dict[str, Any] = {}
    early_stop: EarlyStopTable = EarlyStopTable()
    limits: LimitsTable = LimitsTable()
    confirm: ConfirmTable | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | UnsetType = UNSET
    where: Any = ()
    points: tuple[dict[str, Any], ...] = ()
    name: str = ""


def read_sweep(
    table: Mapping[str, Any], where: str, *, text: str = "", changes: Sequence[str] = ()
) -> SweepSpec:
    """The sweep of a parsed file. `where`: the file's name in messages; `text`: its content;
    `changes`: the values of `--set`.

    Raises ConfigError with every mistake. The default seed follows from the name and the text: so
    the same file gives the same suggestions.
    """
    unreadable = list(_invalid_texts("", table))
    if unreadable:
        raise ConfigError(where, unreadable)
    changed, mistakes = apply_changes(table, changes)
    spec, others = _read(changed, text or json.dumps(table, sort_keys=True, default=str))
    mistakes += others
    if mistakes:
        raise ConfigError(where, mistakes)
    return spec


def _invalid_texts(path: str, value: Any) -> Iterator[str]:
    """Mistakes that only tables of the Python API have: no text as a key, text that is no UTF-8."""
    if isinstance(value, str):
        if not is_text(value):
            yield f"{path}: {value[:80]!r} is not UTF-8."
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, str) and is_text(key):
                yield from _invalid_texts(f"{path}.{key}".removeprefix("."), each)
            else:
                yield f"{path or 'the table'}: the key {key!r} is not a text."
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _invalid_texts(f"{path}[{number}]", each)


def _read(table: Mapping[str, Any], text: str) -> tuple[SweepSpec, list[str]]:
    """The sweep, with defaults where the table has mistakes, and the mistakes."""
    file, mistakes = read_struct(table, _File, tables=_MOVED_KEYS)
    goals, wrong_goals = _goals(table.get("goal"))
    is_list = file.method == "list"
    all_parameters = add_listed_parameters(file.space, file.points) if is_list else file.space
    misplaced = find_misplaced_keys(table)
    parameters = {name: value for name, value in all_parameters.items() if name not in misplaced}
    space, wrong_space = read_space(parameters)
    where, wrong_where = _where(file.where, set(all_parameters))
    mistakes += [*_name_mistakes(file, table), *wrong_goals, *misplaced.values()]
    mistakes += [*wrong_space, *wrong_where]
    is_valid = not wrong_space and not wrong_where and _is_table(table, "space")
    points: tuple[Params, ...] = ()
    if is_valid:
        points, wrong_points = read_points(file.points, space, where)
        mistakes += [*wrong_points, *_empty_space(file, space)]
        is_valid = not wrong_points
    stop, wrong_stop = read_early_stop(file.early_stop, len(goals), _keys(table, "early_stop"))
    limits, wrong_limits = read_limits(file.limits)
    name = file.name or to_name(file.job.rstrip("/").rpartition("/")[2])[:MAX_NAME]
    spec = SweepSpec(
        name=name,
        job=file.job,
        goals=goals,
        space=space,
        method=file.method,
        early_stop=stop,
        limits=limits,
        confirm=None if file.confirm is UNSET else file.confirm.to_settings(),
        seed=_seed(name, text) if file.seed is UNSET else file.seed,
        where=where,
        points=points,
    )
    mistakes += [*wrong_stop, *wrong_limits, *_missing_limit(file, table)]
    if is_valid:
        spec, others = bound_trials(spec)
        mistakes += others
    return spec, [*mistakes, *method_mistakes(spec)]


def _is_table(table: Mapping[str, Any], key: str) -> bool:
    return isinstance(table.get(key, {}), Mapping)


def _empty_space(file: _File, space: Space) -> Iterator[str]:
    if file.method != "list" and all(each.kind == "constant" for each in space.values()):
        yield "space: nothing to search; give a parameter a range or a list of values."


def _missing_limit(file: _File, table: Mapping[str, Any]) -> Iterator[str]:
    """A missing limit; a grid and a list need none, because they end by themselves."""
    is_endless = file.method not in ("grid", "list") and _is_table(table, "limits")
    if is_endless and not _keys(table, "limits") & set(NEEDED):
        yield "limits: give at least one of trials, hours, cost; for example trials = 64."


def _keys(table: Mapping[str, Any], key: str) -> frozenset[str]:
    inner = table.get(key)
    return frozenset(inner) if isinstance(inner, Mapping) else frozenset()


def _seed(name: str, text: str) -> int:
    """A seed of 31 bits, which every random generator accepts."""
    digest = hashlib.sha256(f"{name}\0{text}".encode(errors="replace")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _name_mistakes(file: _File, table: Mapping[str, Any]) -> Iterator[str]:
    """Mistakes of `job` and `name`. `read_struct` reports values of a wrong type."""
    if not file.job.strip() and table.get("job", "") == file.job:
        yield 'job: missing. A job\'s folder or name, as `submit` finds it: job = "lenet".'
    is_named = is_valid_name(file.name) and len(file.name) <= MAX_NAME
    if table.get("name") == file.name and not is_named:
        yield (
            f"name: found {file.name!r}. Allowed: 1-{MAX_NAME} letters, digits, - and _, "
            f"starting with a letter or digit."
        )


def _goals(raw: Any) -> tuple[tuple[Goal, ...], list[str]]:
    if raw is None:
        return (), [f"goal: missing. Say {_GOAL}; there is no default."]
    if isinstance(raw, str):
        both = f'goal = {{ max = "{raw}" }} or goal = {{ min = "{raw}" }}'
        return (), [f"goal: found {raw!r}. Say {both}; there is no default."]
    if not isinstance(raw, Mapping) or not raw:
        return (), [f"goal: found {raw!r}. Say {_GOAL}."]
    goals: list[Goal] = []
    mistakes = []
    for direction, value in raw.items():
        if direction not in ("max", "min"):
            meant = did_you_mean(str(direction), ("max", "min"))
            mistakes.append(f"goal.{direction}: unknown key.{meant or ' Known: max, min.'}")
            continue
        for metric in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(metric, str) or not 0 < len(metric.strip()) <= MAX_METRIC:
                mistakes.append(f"goal.{direction}: found {metric!r}. Expected a metric's name.")
            elif any(goal.metric == metric for goal in goals):
                mistakes.append(f"goal.{direction}: {metric} is named twice.")
            else:
                goals.append(Goal(metric, direction))
    if not goals and not mistakes:
        mistakes.append(f"goal: names no metric. Say {_GOAL}.")
    return tuple(goals), mistakes


def _where(raw: Any, parameters: set[str]) -> tuple[tuple[str, ...], list[str]]:
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        example = 'where = ["width <= 4 * batch_size"]'
        return (), [f"where: found {raw!r}. Expected a list of conditions: {example}."]
    mistakes = []
    spellings = {*parameters, *map(as_identifier, parameters)}
    for index, text in enumerate(texts):
        try:
            check_condition(text)
        except ConditionError as error:
            mistakes.append(f"where[{index}]: {text[:80]!r}: {error}.")
            continue
        for name in condition_names(text):
            if name not in spellings:
                meant = did_you_mean(name, parameters) or f" Texts have quotes: '{name}'."
                mistakes.append(f"where[{index}]: there is no parameter {name}.{meant}")
    return tuple(texts), mistakes


# --- Keys of the sweep that are written below [space] ---------------------------------------------
# In TOML a key belongs to the table above it: what is written after `[space]` is a parameter.


_COMPARISON = re.compile(r"[<>]|[=!]=")


def find_misplaced_keys(table: Mapping[str, Any]) -> dict[str, str]:
    """The keys of the sweep that are written below `[space]`, each with a message.

    A job may have a parameter `seed`: a key below `[space]` is a parameter if the sweep has the
    same key above, or if the parameter is written as a table.
    """
    space = table.get("space")
    if not isinstance(space, Mapping):
        return {}
    return {
        key: f"space.{key}: is below [space]; write it above. {_parameter_hint(key)}"
        for key, is_value_of_key in _SWEEP_KEYS.items()
        if key in space and key not in table and is_value_of_key(space[key])
    }


def _parameter_hint(key: str) -> str:
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
    """Whether a value is `{ max = "val_accuracy" }`, and not a range as other tools write it."""
    if not isinstance(value, Mapping) or not value or not set(value) <= {"max", "min"}:
        return False
    return all(
        isinstance(name, str)
        for names in value.values()
        for name in (names if isinstance(names, list | tuple) else [names])
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


# The keys that may be misplaced, with a test whether a value is one of the sweep's key.
_SWEEP_KEYS: Mapping[str, Callable[[Any], bool]] = {
    "job": _is_str,
    "goal": _is_goal,
    "method": _is_method,
    "seed": _is_integer,
    "where": _is_condition,
    "name": _is_str,
}
