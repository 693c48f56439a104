"""`sweep.toml` -> SweepSpec, with every mistake of the file at once (pure)."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from batchml.errors import ConfigError, did_you_mean
from batchml.model.names import is_valid_name, to_name
from batchml.model.spacefile import read_space
from batchml.model.sweep import (
    ConditionError,
    Goal,
    Method,
    Params,
    Space,
    SweepSpec,
    check,
    names,
    plain,
)
from batchml.model.sweepchanges import changed
from batchml.model.sweepjob import check_with_job as check_with_job
from batchml.model.sweepjob import notices as notices
from batchml.model.sweeplimits import (
    NEEDED,
    ConfirmTable,
    EarlyStopTable,
    LimitsTable,
    read_early_stop,
    read_limits,
)
from batchml.model.sweepplaces import misplaced
from batchml.model.sweeppoints import read_points, with_listed
from batchml.model.sweeprules import bounded, method_mistakes
from batchml.model.tables import is_text, read_struct

MAX_NAME = 48  # of a sweep; what follows it in the names of jobs needs room, too
MAX_METRIC = 100  # characters, as in runtime/protocol/log_marks.py

_HOMES = {
    "parameters": "in [space]", "params": "in [space]", "search_space": "in [space]",
    "metric": 'in goal = { max = "val_accuracy" }',
    "objective": 'in goal = { max = "val_accuracy" }',
    "direction": 'in goal = { max = "val_accuracy" }',
    "budget": "in [limits]", "seeds": "under [confirm]",
}  # fmt: skip
_GOAL = 'goal = { max = "val_accuracy" } or goal = { min = "loss" }'


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; what is Any is read by hand, with better words."""

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
    """The sweep of a parsed file; `text` is the file's, `changes` are those of `--set`.

    Raises ConfigError with every mistake at once. The seed, unless it is given, follows from
    the name and the text: the same file makes the same suggestions.
    """
    unreadable = list(_not_texts("", table))
    if unreadable:
        raise ConfigError(where, unreadable)
    table_now, mistakes = changed(table, changes)
    spec, found = _read(table_now, text or json.dumps(table, sort_keys=True, default=str))
    mistakes += found
    if mistakes:
        raise ConfigError(where, mistakes)
    return spec


def _not_texts(place: str, value: Any) -> Iterator[str]:
    """What no file can say, but a program's table can: keys that are no texts, broken texts."""
    if isinstance(value, str):
        if not is_text(value):
            yield f"{place}: {value[:80]!r} is not UTF-8."
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, str) and is_text(key):
                yield from _not_texts(f"{place}.{key}".removeprefix("."), each)
            else:
                yield f"{place or 'the table'}: the key {key!r} is no text."
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _not_texts(f"{place}[{number}]", each)


def _read(table: Mapping[str, Any], text: str) -> tuple[SweepSpec, list[str]]:
    """The sweep, with defaults where the table is wrong, and every mistake in words."""
    file, mistakes = read_struct(table, _File, homes=_HOMES)
    goals, wrong_goals = _goals(table.get("goal"))
    is_list = file.method == "list"
    described = with_listed(file.space, file.points) if is_list else file.space
    strays = misplaced(table)
    parameters = {name: value for name, value in described.items() if name not in strays}
    space, wrong_space = read_space(parameters)
    where, wrong_where = _where(file.where, set(described))
    mistakes += [*_head_mistakes(file, table), *wrong_goals, *strays.values()]
    mistakes += [*wrong_space, *wrong_where]
    is_whole = not wrong_space and not wrong_where and _is_table(table, "space")
    points: tuple[Params, ...] = ()
    if is_whole:
        points, wrong_points = read_points(file.points, space, where)
        mistakes += [*wrong_points, *_nothing_to_search(file, space)]
        is_whole = not wrong_points
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
        confirm=None if file.confirm is UNSET else file.confirm.as_said(),
        seed=_seed(name, text) if file.seed is UNSET else file.seed,
        where=where,
        points=points,
    )
    mistakes += [*wrong_stop, *wrong_limits, *_no_limit(file, table)]
    if is_whole:
        spec, found = bounded(spec)
        mistakes += found
    return spec, [*mistakes, *method_mistakes(spec)]


def _is_table(table: Mapping[str, Any], key: str) -> bool:
    return isinstance(table.get(key, {}), Mapping)


def _nothing_to_search(file: _File, space: Space) -> Iterator[str]:
    if file.method != "list" and all(each.kind == "constant" for each in space.values()):
        yield "space: nothing to search; give a parameter a range or a list of values."


def _no_limit(file: _File, table: Mapping[str, Any]) -> Iterator[str]:
    """A grid and a list end by themselves."""
    is_endless = file.method not in ("grid", "list") and _is_table(table, "limits")
    if is_endless and not _keys(table, "limits") & set(NEEDED):
        yield "limits: give at least one of trials, hours, cost; for example trials = 64."


def _keys(table: Mapping[str, Any], key: str) -> frozenset[str]:
    inner = table.get(key)
    return frozenset(inner) if isinstance(inner, Mapping) else frozenset()


def _seed(name: str, text: str) -> int:
    """31 bits, which any program's generator takes."""
    digest = hashlib.sha256(f"{name}\0{text}".encode(errors="replace")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _head_mistakes(file: _File, table: Mapping[str, Any]) -> Iterator[str]:
    """A value of a wrong type was refused already: then the file has the default instead."""
    if not file.job.strip() and table.get("job", "") == file.job:
        yield 'job: missing. A job\'s folder or name, as `submit` finds it: job = "lenet".'
    is_named = is_valid_name(file.name) and len(file.name) <= MAX_NAME
    if table.get("name") == file.name and not is_named:
        yield (
            f"name: found {file.name!r}. Allowed: 1-{MAX_NAME} letters, digits, - and _, "
            f"starting with a letter or digit."
        )


def _goals(given: Any) -> tuple[tuple[Goal, ...], list[str]]:
    if given is None:
        return (), [f"goal: missing. Say {_GOAL}; there is no default."]
    if isinstance(given, str):
        both = f'goal = {{ max = "{given}" }} or goal = {{ min = "{given}" }}'
        return (), [f"goal: found {given!r}. Say {both}; there is no default."]
    if not isinstance(given, Mapping) or not given:
        return (), [f"goal: found {given!r}. Say {_GOAL}."]
    goals: list[Goal] = []
    mistakes = []
    for direction, value in given.items():
        if direction not in ("max", "min"):
            meant = did_you_mean(str(direction), ("max", "min"))
            mistakes.append(f"goal.{direction}: unknown key.{meant or ' Known: max, min.'}")
            continue
        for metric in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(metric, str) or not 0 < len(metric.strip()) <= MAX_METRIC:
                mistakes.append(f"goal.{direction}: found {metric!r}. Expected a metric's name.")
            elif any(goal.metric == metric for goal in goals):
                mistakes.append(f"goal.{direction}: {metric} is there twice.")
            else:
                goals.append(Goal(metric, direction))
    if not goals and not mistakes:
        mistakes.append(f"goal: names no metric. Say {_GOAL}.")
    return tuple(goals), mistakes


def _where(given: Any, known: set[str]) -> tuple[tuple[str, ...], list[str]]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        example = 'where = ["width <= 4 * batch_size"]'
        return (), [f"where: found {given!r}. Expected a list of conditions: {example}."]
    mistakes = []
    spellings = {*known, *map(plain, known)}
    for place, text in enumerate(texts):
        try:
            check(text)
        except ConditionError as error:
            mistakes.append(f"where[{place}]: {text[:80]!r}: {error}.")
            continue
        for name in names(text):
            if name not in spellings:
                meant = did_you_mean(name, known) or f" Texts have quotes: '{name}'."
                mistakes.append(f"where[{place}]: there is no parameter {name}.{meant}")
    return tuple(texts), mistakes
