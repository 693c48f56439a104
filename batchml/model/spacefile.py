"""`[space]` of a sweep file -> Space, with every mistake of it in words (pure)."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from batchml.errors import did_you_mean
from batchml.model.job import Scalar
from batchml.model.sweep import SLACK, Dimension, Space, as_value, in_order, is_finite, levels, same
from batchml.model.tables import is_text
from batchml.runtime.protocol.variables import ALL, variable

LARGEST = 2**53  # of a whole number: beyond it floats do not tell neighbours apart

KINDS = ("float", "int", "log", "normal", "lognormal", "choice", "constant")
_OPTIONS = ("step", "log", "when")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
_ELSEWHERE = {  # how other tools call it
    "values": "choice = [...]", "categorical": "choice = [...]", "value": "constant = ...",
    "uniform": "float = [low, high]", "loguniform": "log = [low, high]",
    "log_uniform": "log = [low, high]", "randint": "int = [low, high]",
    "quniform": "float = [low, high], step = ...", "min": "float = [low, high]",
    "max": "float = [low, high]", "low": "float = [low, high]", "high": "float = [low, high]",
    "distribution": "for example log = [low, high]", "type": "for example log = [low, high]",
}  # fmt: skip


class Wrong(ValueError):
    """What is wrong with a parameter, in words that follow its name."""


def read_space(table: Mapping[str, Any]) -> tuple[Space, list[str]]:
    """The parameters that can be read, parents first, and what is wrong with the others."""
    mistakes: list[str] = []
    space: Space = {}
    for name, value in table.items():
        mistakes += [f"space.{name}: {text}" for text in _name_mistakes(name, list(space))]
        try:
            space[name] = _dimension(value)
        except Wrong as error:
            mistakes.append(f"space.{name}{error}")
    for name, dimension in space.items():
        texts = _when_mistakes(name, dimension, space, table)
        mistakes += [f"space.{name}.when: {text}" for text in texts]
    ordered, circle = in_order(space)
    if circle and not any(name in each.when for name, each in space.items()):
        mistakes.append(f"space: {', '.join(circle)} depend on each other in a circle (when).")
    elif not circle and not mistakes:
        ordered = {name: _exact(each, ordered) for name, each in ordered.items()}
        mistakes += _never(ordered)
    return ordered, mistakes


def _exact(dimension: Dimension, space: Space) -> Dimension:
    """With `when` as the parents have it: 0.3 where the file says 0.30000001 of steps of 0.1."""
    when = {
        parent: tuple(
            known for value in values if (known := as_value(space[parent], value)) is not None
        )
        for parent, values in dimension.when.items()
    }
    return msgspec.structs.replace(dimension, when=when)


def shown(value: object) -> str:
    """A value as the file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:g}" if isinstance(value, float) and value == value // 1 else str(value)


def _name_mistakes(name: str, others: list[str]) -> Iterator[str]:
    if not _NAME.fullmatch(name):
        yield "not a name: up to 100 letters, digits, _ - and ., the first a letter or _."
    elif name == ALL:
        yield "this name is taken: {params} stands for all parameters."
    for other in others:
        if variable(other) == variable(name):
            yield f"{other} is there too, and both would be the variable {variable(name)}."


def _dimension(value: Any) -> Dimension:
    """Raises Wrong."""
    if isinstance(value, Mapping):
        return _described(value)
    if isinstance(value, list | tuple):
        return _choice(value)
    return Dimension("constant", values=(as_scalar(value),))


def _described(table: Mapping[str, Any]) -> Dimension:
    kinds = [kind for kind in KINDS if kind in table and not (kind == "log" and _is_flag(table))]
    _check_keys(table, kinds)
    kind, given = kinds[0], table[kinds[0]]
    match kind:
        case "choice":
            if not isinstance(given, list | tuple):
                raise Wrong(f".choice: found {shown(given)}. Expected a list of values.")
            found = _choice(given, ".choice")
        case "constant":
            found = Dimension("constant", values=(as_scalar(given, ".constant"),))
        case "normal" | "lognormal":
            found = _normal(kind, given)
        case _:
            found = _range(kind, given, table)
    if kind in ("choice", "constant", "normal", "lognormal"):
        for option in ("step", "log"):
            if option in table:
                raise Wrong(f".{option}: only for float and int ranges.")
    return msgspec.structs.replace(found, when=_when(table.get("when", {})))


def _is_flag(table: Mapping[str, Any]) -> bool:
    """`log = true` beside `float` or `int`, not the range `log = [...]`."""
    return isinstance(table["log"], bool) or any(kind in table for kind in ("float", "int"))


def _check_keys(table: Mapping[str, Any], kinds: list[str]) -> None:
    for key in table:
        if key not in KINDS and key not in _OPTIONS:
            meant = did_you_mean(key, [*KINDS, *_OPTIONS])
            if key in _ELSEWHERE:
                meant = f" Write {_ELSEWHERE[key]}."
            raise Wrong(f".{key}: unknown key.{meant or f' Known: {_known()}.'}")
    if not kinds:
        raise Wrong(f": says no kind. One of {', '.join(KINDS)}, for example float = [0, 1].")
    if len(kinds) > 1:
        raise Wrong(f": {' and '.join(kinds)} are both given; one parameter has one kind.")


def _known() -> str:
    return ", ".join(dict.fromkeys((*KINDS, *_OPTIONS)))


def _choice(values: Any, key: str = "") -> Dimension:
    if len(values) < 2:
        alone = f" Write {shown(values[0])} alone for a constant." if values else ""
        raise Wrong(f"{key}: found {shown(values)}. A choice has 2 values or more.{alone}")
    scalars = tuple(as_scalar(value, f"{key}[{place}]") for place, value in enumerate(values))
    for place, value in enumerate(scalars):
        if any(same(value, earlier) for earlier in scalars[:place]):
            raise Wrong(f"{key}: {shown(value)} is there twice.")
    return Dimension("choice", values=scalars)


def as_scalar(value: Any, key: str = "") -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        raise Wrong(f"{key}: found {value}. Expected a finite number.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise Wrong(f"{key}: is a number of more than 64 bits.")
    if isinstance(value, str) and ("\0" in value or not is_text(value)):
        raise Wrong(f"{key}: {value[:80]!r} is nothing that an argument can carry.")
    if isinstance(value, str | int | float):
        return value
    raise Wrong(f"{key}: found {shown(value)}. Expected a text, a number, or true or false.")


def _pair(given: Any, key: str) -> tuple[float, float]:
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise Wrong(f".{key}: found {shown(given)}. Expected two numbers, {key} = [low, high].")
    return _number(given[0], f"{key}[0]"), _number(given[1], f"{key}[1]")


def _number(value: Any, key: str) -> float:
    if isinstance(value, str):  # who writes "1e-4" means the number
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        raise Wrong(f".{key}: found {shown(value)}. Expected a number.")
    return value


def _normal(kind: str, given: Any) -> Dimension:
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise Wrong(f".{kind}: found {shown(given)}. Expected {kind} = [mu, sigma].")
    mu, sigma = _number(given[0], f"{kind}[0]"), _number(given[1], f"{kind}[1]")
    if sigma <= 0:
        raise Wrong(f".{kind}: sigma is {shown(sigma)}; it must be greater than 0.")
    if kind == "lognormal" and abs(mu) + 8 * sigma > 700:  # e^709 is the greatest float
        raise Wrong(f".{kind}: mu and sigma are of the natural logarithm; these are too great.")
    return Dimension("normal", mu=float(mu), sigma=float(sigma), log=kind == "lognormal")


def _range(kind: str, given: Any, table: Mapping[str, Any]) -> Dimension:
    low, high = _pair(given, kind)
    log = table.get("log", False) if kind != "log" else True
    if not isinstance(log, bool):
        raise Wrong(f".log: found {shown(log)}. Expected true or false beside {kind}.")
    if not low < high and not (log and low <= 0):
        raise Wrong(f".{kind}: found {shown(given)}. Expected low < high.")
    if log and not 0 < low < high:
        raise Wrong(f".{kind}: log range needs 0 < low < high, got {shown(given)}.")
    if kind == "int":
        _check_whole(low, high, given)
    step = _step(kind, log, high - low, table)
    return Dimension("int" if kind == "int" else "float", float(low), float(high), log, step)


def _check_whole(low: float, high: float, given: Any) -> None:
    if low % 1 or high % 1:
        raise Wrong(f".int: found {shown(given)}. Expected whole numbers; or write float.")
    if max(abs(low), abs(high)) > LARGEST:
        raise Wrong(f".int: found {shown(given)}. At most 2**53 in size.")


def _step(kind: str, log: bool, span: float, table: Mapping[str, Any]) -> float | None:
    if "step" not in table:
        return None
    if log:
        raise Wrong(".step: not with log: equal steps and a log scale exclude each other.")
    step = _number(table["step"], "step")
    if not 0 < step <= span + SLACK * step:
        raise Wrong(f".step: found {shown(step)}. Expected more than 0 and at most high - low.")
    if kind == "int" and step % 1:
        raise Wrong(f".step: found {shown(step)}. Expected a whole number beside int.")
    if span / step > LARGEST:
        raise Wrong(f".step: found {shown(step)}, too small for this range.")
    return float(step)


def _when(given: Any) -> dict[str, tuple[Scalar, ...]]:
    if not isinstance(given, Mapping):
        example = 'when = { optimizer = "sgd" }'
        raise Wrong(f".when: found {shown(given)}. Expected a table such as {example}.")
    found = {}
    for name, values in given.items():
        several = values if isinstance(values, list | tuple) else [values]
        if not several:
            raise Wrong(f".when.{name}: is empty, so it can never happen.")
        found[str(name)] = tuple(as_scalar(value, f".when.{name}") for value in several)
    return found


def _when_mistakes(
    name: str, dimension: Dimension, space: Space, table: Mapping[str, Any]
) -> Iterator[str]:
    for parent, values in dimension.when.items():
        if parent == name:
            yield f"{name} depends on itself."
        elif parent not in table:
            yield f"there is no parameter {parent}.{did_you_mean(parent, table)}"
        elif parent in space:
            yield from _impossible(parent, space[parent], values)


def _impossible(parent: str, dimension: Dimension, values: tuple[Scalar, ...]) -> Iterator[str]:
    if levels(dimension) is None:
        yield f"{parent} is continuous and hits no single value; use a choice, an int or a step."
        return
    for value in values:
        if as_value(dimension, value) is None:
            known = f"choices are {', '.join(map(shown, dimension.values))}"
            if dimension.kind not in ("choice", "constant"):
                known = f"it goes from {shown(dimension.low)} to {shown(dimension.high)}"
            elif dimension.kind == "constant":
                known = f"it is always {shown(dimension.values[0])}"
            meant = did_you_mean(str(value), [v for v in dimension.values if isinstance(v, str)])
            yield f"{parent}={shown(value)} can never happen; {known}.{meant}"


def _never(space: Space) -> Iterator[str]:
    """Parameters whose conditions exclude each other, by way of their parents' own."""
    needs: dict[str, dict[str, tuple[Scalar, ...]]] = {}
    for name, dimension in space.items():
        need = dict(dimension.when)
        for parent in dimension.when:
            for above, values in needs[parent].items():
                known = need.get(above, values)
                need[above] = tuple(v for v in known if any(same(v, each) for each in values))
        needs[name] = need
        empty = [above for above, values in need.items() if not values]
        if empty:
            yield f"space.{name}.when: can never happen: its parents want {empty[0]} otherwise."
