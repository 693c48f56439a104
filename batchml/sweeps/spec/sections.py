"""Read the sections of a sweep file: space, early_stop, limits, confirm, points. Pure.

Every function returns the mistakes of its section, as sentences, beside the result.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from batchml.errors import did_you_mean
from batchml.model.conditions import satisfies
from batchml.model.job import Scalar
from batchml.model.sweep import (
    PARALLEL,
    SLACK,
    ConfirmSettings,
    Dimension,
    EarlyStop,
    Params,
    Space,
    StopMethod,
    SweepLimits,
    active_parameters,
    as_value,
    count_levels,
    is_finite,
    is_one_of,
    is_same,
    sort_parents_first,
)
from batchml.model.tables import is_text, parse_duration
from batchml.runtime.protocol.sweep import default_first_rung
from batchml.runtime.protocol.variables import ALL, parameter_variable

LARGEST = 2**53  # the largest whole number; beyond it, neighbours are the same float

KINDS = ("float", "int", "log", "normal", "lognormal", "choice", "constant")
_OPTIONS = ("step", "log", "when")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_KEYS_OF_OTHER_TOOLS = {
    "values": "choice = [...]", "categorical": "choice = [...]", "value": "constant = ...",
    "uniform": "float = [low, high]", "loguniform": "log = [low, high]",
    "log_uniform": "log = [low, high]", "randint": "int = [low, high]",
    "quniform": "float = [low, high], step = ...", "min": "float = [low, high]",
    "max": "float = [low, high]", "low": "float = [low, high]", "high": "float = [low, high]",
    "distribution": "for example log = [low, high]", "type": "for example log = [low, high]",
}  # fmt: skip


class SpaceError(ValueError):
    """A mistake of a parameter; the text follows the parameter's name."""


def read_space(table: Mapping[str, Any]) -> tuple[Space, list[str]]:
    """The valid parameters, parents first, and the mistakes of the others."""
    mistakes: list[str] = []
    space: Space = {}
    for name, value in table.items():
        mistakes += [f"space.{name}: {text}" for text in _name_mistakes(name, list(space))]
        try:
            space[name] = _dimension(value)
        except SpaceError as error:
            mistakes.append(f"space.{name}{error}")
    for name, dimension in space.items():
        texts = _when_mistakes(name, dimension, space, table)
        mistakes += [f"space.{name}.when: {text}" for text in texts]
    ordered, cycle = sort_parents_first(space)
    if cycle and not any(name in each.when for name, each in space.items()):
        mistakes.append(f"space: {', '.join(cycle)} depend on each other in a cycle (when).")
    elif not cycle and not mistakes:
        ordered = {name: _with_exact_conditions(each, ordered) for name, each in ordered.items()}
        mistakes += _impossible_parameters(ordered)
    return ordered, mistakes


def _with_exact_conditions(dimension: Dimension, space: Space) -> Dimension:
    """The parameter with the exact values of its parents in `when`: 0.3 for 0.30000001 with steps
    of 0.1."""
    when = {
        parent: tuple(
            known for value in values if (known := as_value(space[parent], value)) is not None
        )
        for parent, values in dimension.when.items()
    }
    return msgspec.structs.replace(dimension, when=when)


def _as_written(value: object) -> str:
    """A value as it is written in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_written, value))}]"
    return f"{value:g}" if isinstance(value, float) and value == value // 1 else str(value)


def _name_mistakes(name: str, others: list[str]) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield "not a name: up to 100 letters, digits, _ - and ., the first a letter or _."
    elif name == ALL:
        yield "this name is reserved: {params} stands for all parameters."
    for other in others:
        if parameter_variable(other) == parameter_variable(name):
            both = parameter_variable(name)
            yield f"{other} is there too, and both would be the variable {both}."


def _dimension(value: Any) -> Dimension:
    """Read one parameter. Raises SpaceError."""
    if isinstance(value, Mapping):
        return _read_table(value)
    if isinstance(value, list | tuple):
        return _choice(value)
    return Dimension("constant", values=(as_scalar(value),))


def _read_table(table: Mapping[str, Any]) -> Dimension:
    kinds = [kind for kind in KINDS if kind in table and not (kind == "log" and _is_flag(table))]
    _check_keys(table, kinds)
    kind, value = kinds[0], table[kinds[0]]
    match kind:
        case "choice":
            if not isinstance(value, list | tuple):
                raise SpaceError(f".choice: found {_as_written(value)}. Expected a list of values.")
            dimension = _choice(value, ".choice")
        case "constant":
            dimension = Dimension("constant", values=(as_scalar(value, ".constant"),))
        case "normal" | "lognormal":
            dimension = _normal(kind, value)
        case _:
            dimension = _range(kind, value, table)
    if dimension.kind not in ("float", "int"):
        for option in ("step", "log"):
            if option in table:
                raise SpaceError(f".{option}: only for float and int ranges.")
    return msgspec.structs.replace(dimension, when=_when(table.get("when", {})))


def _is_flag(table: Mapping[str, Any]) -> bool:
    """Whether `log` is `log = true` beside `float` or `int`, and not the range `log = [...]`."""
    return isinstance(table["log"], bool) or any(kind in table for kind in ("float", "int"))


def _check_keys(table: Mapping[str, Any], kinds: list[str]) -> None:
    for key in table:
        if key not in KINDS and key not in _OPTIONS:
            meant = did_you_mean(key, [*KINDS, *_OPTIONS])
            if key in _KEYS_OF_OTHER_TOOLS:
                meant = f" Write {_KEYS_OF_OTHER_TOOLS[key]}."
            known = ", ".join(dict.fromkeys((*KINDS, *_OPTIONS)))
            raise SpaceError(f".{key}: unknown key.{meant or f' Known: {known}.'}")
    if not kinds:
        expected = ", ".join(KINDS)
        raise SpaceError(f": has no kind. Give one of {expected}; for example float = [0, 1].")
    if len(kinds) > 1:
        raise SpaceError(f": {' and '.join(kinds)} are both given; a parameter has one kind.")


def _choice(values: Any, key: str = "") -> Dimension:
    if len(values) < 2:
        alone = f" Write {_as_written(values[0])} alone for a constant." if values else ""
        raise SpaceError(
            f"{key}: found {_as_written(values)}. A choice has 2 values or more.{alone}"
        )
    scalars = tuple(as_scalar(value, f"{key}[{index}]") for index, value in enumerate(values))
    for index, value in enumerate(scalars):
        if any(is_same(value, earlier) for earlier in scalars[:index]):
            raise SpaceError(f"{key}: {_as_written(value)} is there twice.")
    return Dimension("choice", values=scalars)


def as_scalar(value: Any, key: str = "") -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        raise SpaceError(f"{key}: found {value}. Expected a finite number.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise SpaceError(f"{key}: is a number of more than 64 bits.")
    if isinstance(value, str) and ("\0" in value or not is_text(value)):
        raise SpaceError(f"{key}: {value[:80]!r} cannot be an argument of a program.")
    if isinstance(value, str | int | float):
        return value
    raise SpaceError(
        f"{key}: found {_as_written(value)}. Expected a text, a number, or true or false."
    )


def _pair(value: Any, key: str, names: str) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise SpaceError(
            f".{key}: found {_as_written(value)}. Expected two numbers, {key} = [{names}]."
        )
    return _number(value[0], f"{key}[0]"), _number(value[1], f"{key}[1]")


def _number(value: Any, key: str) -> float:
    if isinstance(value, str):  # "1e-4" means the number
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise SpaceError(f".{key}: found {_as_written(value)}. Expected a number.")
    return value


def _normal(kind: str, value: Any) -> Dimension:
    mu, sigma = _pair(value, kind, "mu, sigma")
    if sigma <= 0:
        raise SpaceError(f".{kind}: sigma is {_as_written(sigma)}; it must be greater than 0.")
    if kind == "lognormal" and abs(mu) + 8 * sigma > 700:  # e^709 is the greatest float
        raise SpaceError(
            f".{kind}: the values are too great: mu and sigma are of the natural logarithm."
        )
    return Dimension("normal", mu=float(mu), sigma=float(sigma), log=kind == "lognormal")


def _range(kind: str, value: Any, table: Mapping[str, Any]) -> Dimension:
    low, high = _pair(value, kind, "low, high")
    log = kind == "log" or table.get("log", False)
    if not isinstance(log, bool):
        raise SpaceError(f".log: found {_as_written(log)}. Expected true or false beside {kind}.")
    if not low < high and not (log and low <= 0):
        raise SpaceError(f".{kind}: found {_as_written(value)}. Expected low < high.")
    if log and not 0 < low < high:
        raise SpaceError(f".{kind}: log range needs 0 < low < high, got {_as_written(value)}.")
    if kind == "int":
        _check_whole(low, high, value)
    step = _step(kind, log, high - low, table)
    return Dimension("int" if kind == "int" else "float", float(low), float(high), log, step)


def _check_whole(low: float, high: float, value: Any) -> None:
    if low % 1 or high % 1:
        raise SpaceError(
            f".int: found {_as_written(value)}. Expected whole numbers; or write float."
        )
    if max(abs(low), abs(high)) > LARGEST:
        raise SpaceError(f".int: found {_as_written(value)}. At most 2**53 in size.")


def _step(kind: str, log: bool, span: float, table: Mapping[str, Any]) -> float | None:
    if "step" not in table:
        return None
    if log:
        raise SpaceError(".step: not with log, which has no equal steps.")
    step = _number(table["step"], "step")
    if not 0 < step <= span + SLACK * step:
        raise SpaceError(
            f".step: found {_as_written(step)}. Expected more than 0 and at most high - low."
        )
    if kind == "int" and step % 1:
        raise SpaceError(f".step: found {_as_written(step)}. Expected a whole number beside int.")
    if span / step > LARGEST:
        raise SpaceError(f".step: found {_as_written(step)}, too small for this range.")
    return float(step)


def _when(table: Any) -> dict[str, tuple[Scalar, ...]]:
    if not isinstance(table, Mapping):
        example = 'when = { optimizer = "sgd" }'
        raise SpaceError(f".when: found {_as_written(table)}. Expected a table such as {example}.")
    when = {}
    for name, values in table.items():
        several = values if isinstance(values, list | tuple) else [values]
        if not several:
            raise SpaceError(f".when.{name}: is empty, so the parameter would never be active.")
        when[str(name)] = tuple(as_scalar(value, f".when.{name}") for value in several)
    return when


def _when_mistakes(
    name: str, dimension: Dimension, space: Space, table: Mapping[str, Any]
) -> Iterator[str]:
    for parent, values in dimension.when.items():
        if parent == name:
            yield f"{name} depends on itself."
        elif parent not in table:
            yield f"there is no parameter {parent}.{did_you_mean(parent, table)}"
        elif parent in space:
            yield from _impossible_values(parent, space[parent], values)


def _impossible_values(
    parent: str, dimension: Dimension, values: tuple[Scalar, ...]
) -> Iterator[str]:
    if count_levels(dimension) is None:
        yield f"{parent} is continuous, without single values; use a choice, an int or a step."
        return
    for value in values:
        if as_value(dimension, value) is None:
            match dimension.kind:
                case "choice":
                    possible = f"choices are {', '.join(map(_as_written, dimension.values))}"
                case "constant":
                    possible = f"it is always {_as_written(dimension.values[0])}"
                case _:
                    ends = map(_as_written, (dimension.low, dimension.high))
                    possible = f"it goes from {' to '.join(ends)}"
            meant = did_you_mean(str(value), [v for v in dimension.values if isinstance(v, str)])
            yield f"{parent}={_as_written(value)} can never happen; {possible}.{meant}"


def _impossible_parameters(space: Space) -> Iterator[str]:
    """Parameters that can never be active, because their conditions and their parents' conflict."""
    needs: dict[str, dict[str, tuple[Scalar, ...]]] = {}
    for name, dimension in space.items():
        need = dict(dimension.when)
        for parent in dimension.when:
            for above, values in needs[parent].items():
                known = need.get(above, values)
                need[above] = tuple(v for v in known if any(is_same(v, each) for each in values))
        needs[name] = need
        empty = [above for above, values in need.items() if not values]
        if empty:
            other = f"its parents need other values of {empty[0]}"
            yield f"space.{name}.when: can never be met: {other}."


# --- [early_stop], [limits] and [confirm] ---------------------------------------------------------


# Trials of a sweep. 100,000 trials with 9 reports each were measured: 0.6 GiB, and 6 s to read the
# ledger. A controller that is a run has 1 GiB.
MAX_TRIALS = 50_000
MAX_PARALLEL = 10_000
NEEDED = ("trials", "hours", "cost")  # a sweep needs one of these limits, or it would never end

_COST = re.compile(r"\s*\$?\s*([0-9]+(?:\.[0-9]+)?)\s*(usd|\$|dollars?)?\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_PLAIN = re.compile(r"\s*[0-9]+(?:\.[0-9]+)?\s*")

_Steps = Annotated[int, Meta(ge=1, le=2**53)]  # the most that runtime/sweep/readings.py counts


class EarlyStopTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[early_stop]` of the file."""

    method: StopMethod | UnsetType = UNSET
    step: str | UnsetType = UNSET
    max: _Steps | UnsetType = UNSET
    min: _Steps | UnsetType = UNSET
    eta: Annotated[int, Meta(ge=2, le=10)] = 3
    resume: bool | UnsetType = UNSET


class LimitsTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[limits]` of the file. Fields of type Any are read by hand for better messages."""

    trials: Annotated[int, Meta(ge=1, le=MAX_TRIALS)] | UnsetType = UNSET
    parallel: Annotated[int, Meta(ge=1, le=MAX_PARALLEL)] = PARALLEL
    hours: Any = None
    cost: Any = None
    failed: Any = None
    target: Any = None


class ConfirmTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[confirm]` of the file."""

    top: Annotated[int, Meta(ge=1, le=1000)] = ConfirmSettings().top
    seeds: Annotated[int, Meta(ge=1, le=1000)] = ConfirmSettings().seeds

    def to_settings(self) -> ConfirmSettings:
        return ConfirmSettings(self.top, self.seeds)


def read_early_stop(
    table: EarlyStopTable, goals: int, keys: frozenset[str]
) -> tuple[EarlyStop, list[str]]:
    """Read `[early_stop]`. `goals`: the number of goals; `keys`: the keys that the file has.

    The default method is `asha` if `max` is given and there is one goal, otherwise `none`.
    """
    method = table.method
    if method is UNSET:
        method = "asha" if table.max is not UNSET and goals < 2 else "none"
    stop_max = 0 if table.max is UNSET else table.max
    stop_min = default_first_rung(stop_max) if table.min is UNSET else table.min
    mistakes = [
        f"early_stop.{text}" for text in _stop_mistakes(method, table, stop_min, stop_max, keys)
    ]
    if goals > 1 and method != "none":
        mistakes.append("early_stop.method: several goals have no early stopping.")
    # Trials of `halving` always end at rungs; trials of `asha` do with `resume`.
    resume = table.resume is True and method == "asha"
    step, is_given = (EarlyStop().step, False) if table.step is UNSET else (table.step, True)
    stop = EarlyStop(method, step, stop_max, stop_min, table.eta, resume, is_given)
    return stop, mistakes


def _stop_mistakes(
    method: StopMethod, table: EarlyStopTable, low: int, high: int, keys: frozenset[str]
) -> Iterator[str]:
    if table.step is not UNSET and not table.step.strip():
        yield 'step: is empty. Give the name that is printed beside the metric: "epoch".'
    if table.resume is True and method in ("median", "none") and table.method is not UNSET:
        yield f"resume: {method} has no rungs; asha has them, and halving always resumes."
    if method == "none":
        if keys & {"min", "eta", "resume"} and table.method is UNSET and "max" not in keys:
            yield "max: missing. Without the steps of a full training nothing is stopped early."
        return
    if table.max is UNSET and "max" not in keys:
        yield "max: missing. Give the number of steps of a full training, for example max = 27."
    elif high and low >= high:
        yield f"{'min' if 'min' in keys else 'max'}: min {low} is not below max {high}."


def read_limits(table: LimitsTable) -> tuple[SweepLimits, list[str]]:
    hours, cost = _read_hours(table.hours), _read_cost(table.cost)
    target = _finite_number(table.target)
    share, count = _read_failed(table.failed)
    failed = share if count is None else count
    expected = {
        "hours": (hours, 'hours, more than 0: 12, 1.5 or "90m"'),
        "cost": (cost, 'US dollars, more than 0: 50 or "50 USD"'),
        "target": (target, "a number, of the first goal's metric"),
        "failed": (failed, 'a share of the trials, "20%", or how many, 5'),
    }
    mistakes = [
        f"limits.{key}: found {getattr(table, key)!r}. Expected {text}."
        for key, (value, text) in expected.items()
        if value is None and getattr(table, key) is not None
    ]
    trials = None if table.trials is UNSET else table.trials
    return SweepLimits(trials, table.parallel, hours, cost, share, count, target), mistakes


def _finite_number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and is_finite(value) else None


def _positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < 1e12 else None


def _read_hours(value: Any) -> float | None:
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        seconds = parse_duration(value)
        return _positive(None if seconds is None else seconds / 3600)
    return _positive(float(value) if isinstance(value, str) else _finite_number(value))


def _read_cost(value: Any) -> float | None:
    if isinstance(value, str):
        match = _COST.fullmatch(value)
        return _positive(float(match[1])) if match else None
    return _positive(_finite_number(value))


def _read_failed(value: Any) -> tuple[float | None, int | None]:
    """The share or the number of trials that may fail; both None for an invalid value."""
    if value is None:
        return SweepLimits().failed_share, None
    if isinstance(value, str):
        match = _SHARE.fullmatch(value)
        share = float(match[1]) / 100 if match else 2.0
        return (share, None) if share <= 1 else (None, None)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TRIALS:
        return None, value
    return None, None


# --- [[points]]: sets of parameters that the sweep must try ---------------------------------------


def add_listed_parameters(
    table: Mapping[str, Any], points: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """`[space]` for the method `list`: also the parameters that only points name, as constants or
    choices."""
    values_of: dict[str, list[Scalar]] = {}
    for point in points:
        for name, value in point.items():
            is_listed = name not in table and not did_you_mean(name, table)
            if not is_listed or not isinstance(value, str | int | float):
                continue
            values = values_of.setdefault(name, [])
            if not is_one_of(value, tuple(values)):
                values.append(value)
    listed = {name: values if len(values) > 1 else values[0] for name, values in values_of.items()}
    return {**table, **listed}


def read_points(
    points: Sequence[Mapping[str, Any]], space: Space, where: Sequence[str]
) -> tuple[tuple[Params, ...], list[str]]:
    """The points with constants filled in, and the mistakes of all points."""
    all_params: list[Params] = []
    mistakes: list[str] = []
    for index, point in enumerate(points):
        params, wrong = _read_point(point, space)
        if not wrong and not satisfies(where, params):
            wrong = [": does not satisfy `where`."]
        if not wrong and params in all_params:
            wrong = [f": is the same as points[{all_params.index(params)}]."]
        mistakes += [f"points[{index}]{text}" for text in wrong]
        all_params.append(params)
    return tuple(all_params), mistakes


def _read_point(point: Mapping[str, Any], space: Space) -> tuple[Params, list[str]]:
    mistakes = []
    params: Params = {}
    for name, value in point.items():
        if name not in space:
            mistakes.append(f".{name}: there is no such parameter.{did_you_mean(name, space)}")
            continue
        try:
            scalar = as_scalar(value)
        except SpaceError as error:
            mistakes.append(f".{name}{error}")
            continue
        exact = as_value(space[name], scalar)
        if exact is None:
            mistakes.append(f".{name}: {_as_written(value)} is not in the space.")
        else:
            params[name] = exact
    for name, dimension in space.items():
        if dimension.kind == "constant":
            params.setdefault(name, dimension.values[0])
    if mistakes:
        return params, mistakes
    names = active_parameters(space, params)
    mistakes += [f".{name}: missing." for name in names if name not in params]
    inactive = [name for name in point if name not in names]
    mistakes += [f".{name}: is not active with the other values (when)." for name in inactive]
    return {name: params[name] for name in names if name in params}, mistakes
