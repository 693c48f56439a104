"""The conditions of `where` in a sweep's file: expressions over the parameters.

Python's parser reads them. Only the functions, constants and operators below are evaluated.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from batchml.model.job import Scalar

MAX_LENGTH = 1000  # characters of a condition

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": round, "floor": math.floor, "ceil": math.ceil,
    "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10,
}  # fmt: skip
_CONSTANTS = {"true": True, "false": False}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: lambda base, power: math.pow(base, power),  # with floats: integers could grow huge
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}  # fmt: skip


class ConditionError(ValueError):
    """A condition that cannot be read; the text is the reason."""


class _Inactive(Exception):
    """A parameter that is not active in a point."""


def satisfies(where: Iterable[str], params: Mapping[str, Scalar]) -> bool:
    """Whether a point meets all conditions, each of which `check_condition` accepts.

    A condition that names an inactive parameter is met. A condition that cannot be computed, such
    as `1 / 0 > x`, is not met.
    """
    return all(_is_met(_parse(text), params) for text in where)


def check_condition(text: str) -> None:
    """Raise ConditionError for a text that is not a condition."""
    _parse(text)


def condition_names(text: str) -> list[str]:
    """The parameters that a condition names, in the order of their first use."""
    return list(dict.fromkeys(_names(_parse(text))))


def as_identifier(name: str) -> str:
    """A parameter's name in a condition: `weight_decay` for `weight-decay`."""
    return re.sub(r"\W", "_", name)


def _names(node: ast.AST) -> Iterator[str]:
    name = _dotted(node)
    if name is not None:
        yield name
        return
    for child in node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node):
        yield from _names(child)


@lru_cache(256)
def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ConditionError(f"longer than {MAX_LENGTH} characters")
    try:
        node = ast.parse(text.strip(), mode="eval").body
        _check(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConditionError(_why(text, error)) from error
    if not isinstance(node, ast.Compare | ast.BoolOp) and not _is_not(node):
        raise ConditionError("not a comparison such as width <= 4 * batch_size")
    return node


def _why(text: str, error: Exception) -> str:
    if isinstance(error, ConditionError):
        return str(error)
    for wrong, right in (("&&", "and"), ("||", "or"), ("!", "not")):
        if wrong in text.replace("!=", ""):
            return f"write {right} instead of {wrong}"
    if re.search(r"(?<![=<>!])=(?!=)", text):
        return "write == to compare"
    return "not an expression"


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _check(node: ast.expr) -> None:
    """Raise ConditionError for an expression that a condition cannot have."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str()) | ast.Name():
            return
        case ast.Attribute() if _dotted(node) is not None:
            return
        case ast.Call(func=ast.Name(id=name), args=inner, keywords=[]) if name in _FUNCTIONS:
            pass
        case ast.Call(func=called):
            known = ", ".join(_FUNCTIONS)
            raise ConditionError(f"{ast.unparse(called)}() is unknown; the functions are {known}")
        case ast.BoolOp(values=inner) | ast.List(elts=inner) | ast.Tuple(elts=inner):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
            inner = [operand]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            inner = [left, right]
        case ast.Compare(left=left, ops=ops, comparators=others) if _are_known(ops):
            inner = [left, *others]
        case _:
            raise ConditionError(f"{ast.unparse(node)} cannot be part of a condition")
    for each in inner:
        _check(each)


def _are_known(ops: list[ast.cmpop]) -> bool:
    return all(type(op) in _COMPARISONS for op in ops)


def _dotted(node: ast.AST) -> str | None:
    """The parameter's name: `lr`, or `model.lr`; None for anything else."""
    if isinstance(node, ast.Name):
        return None if node.id in _CONSTANTS else node.id
    if isinstance(node, ast.Attribute):
        below = _dotted(node.value)
        return None if below is None else f"{below}.{node.attr}"
    return None


def _is_met(node: ast.expr, params: Mapping[str, Scalar]) -> bool:
    try:
        return bool(_value(node, params))
    except _Inactive:
        return True
    except (ArithmeticError, ValueError, TypeError):
        return False


def _value(node: ast.expr, params: Mapping[str, Scalar]) -> Any:
    """Evaluate an expression. Raises _Inactive, and operators' errors for unsuitable values."""
    name = _dotted(node)
    if name is not None:
        return _look_up(name, params)
    match node:
        case ast.Name(id=word):
            return _CONSTANTS[word]
        case ast.Constant(value=value):
            return value
        case ast.BoolOp(op=op, values=values):
            # A part about an inactive parameter is met, however it is combined.
            parts = (_is_met(each, params) for each in values)
            return all(parts) if isinstance(op, ast.And) else any(parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, params)
        case ast.UnaryOp(op=op, operand=operand):
            value = _number(_value(operand, params))
            return -value if isinstance(op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right):
            ends = _number(_value(left, params)), _number(_value(right, params))
            return _ARITHMETIC[type(op)](*ends)
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compare([_value(each, params) for each in (left, *others)], ops)
        case ast.Call(func=ast.Name(id=called), args=arguments):
            return _FUNCTIONS[called](*(_value(each, params) for each in arguments))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(each, params) for each in elements]
    raise TypeError(ast.unparse(node))


def _compare(values: list[Any], ops: list[ast.cmpop]) -> bool:
    pairs = zip(values, ops, values[1:], strict=False)
    return all(_COMPARISONS[type(op)](left, right) for left, op, right in pairs)


def _number(value: Any) -> int | float:
    """Return a number. Refuse texts and lists: they could be multiplied to any size."""
    if isinstance(value, int | float):
        return value
    raise TypeError(value)


def _look_up(name: str, params: Mapping[str, Scalar]) -> Scalar:
    if name in params:
        return params[name]
    for known, value in params.items():
        if as_identifier(known) == name:
            return value
    raise _Inactive
