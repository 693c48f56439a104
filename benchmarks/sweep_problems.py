"""Problems with a known best answer, on which a search is measured.

A problem has a space and a loss for each step of training; a function is a training of one step.
`mnist` is a table of real trainings of small networks; the others are synthetic.
"""

import csv
import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, Params, Space
from batchml.sweeps.samplers.points import from_unit
from benchmarks import sweep_table


class Problem(NamedTuple):
    name: str
    space: Space
    steps: int  # of a full training
    noise: float  # standard deviation of what a training prints
    loss: Callable[[Params, int], float]  # without noise
    best: float  # the lowest loss after the last step
    grid: Space  # a grid over it, as people lay one


def _number(params: Params, name: str) -> float:
    value: Scalar = params[name]
    assert not isinstance(value, str)
    return float(value)


def _vector(params: Params, count: int) -> list[float]:
    return [_number(params, f"x{index}") for index in range(count)]


def _cube(count: int, low: float = 0.0, high: float = 1.0) -> Space:
    return {f"x{index}": Dimension("float", low, high) for index in range(count)}


def _levels(space: Space, counts: dict[str, int]) -> Space:
    """The space with each range cut into a few values, evenly and away from its ends."""
    return {
        name: Dimension(
            "choice",
            values=tuple(
                dict.fromkeys(
                    from_unit(dimension, (place + 0.5) / counts.get(name, 1))
                    for place in range(counts.get(name, 1))
                )
            ),
            when=dimension.when,
        )
        if dimension.kind in ("float", "int")
        else dimension
        for name, dimension in space.items()
    }


_H6_A = (
    (10, 3, 17, 3.5, 1.7, 8),
    (0.05, 10, 17, 0.1, 8, 14),
    (3, 3.5, 1.7, 10, 17, 8),
    (17, 8, 0.05, 10, 0.1, 14),
)
_H6_P = (
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
)
_H6_C = (1.0, 1.2, 3.0, 3.2)
HARTMANN6 = -3.32237  # its minimum


def hartmann6(x: list[float]) -> float:
    return -sum(
        c * math.exp(-sum(a * (v - p) ** 2 for a, v, p in zip(row, x, centre, strict=True)))
        for c, row, centre in zip(_H6_C, _H6_A, _H6_P, strict=True)
    )


def branin(x: float, y: float) -> float:
    """x from -5 to 10, y from 0 to 15."""
    a = y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6
    return a * a + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def rosenbrock(x: list[float]) -> float:
    return sum(100 * (b - a * a) ** 2 + (1 - a) ** 2 for a, b in pairwise(x))


def _h6curves(params: Params, step: int) -> float:
    """Eight parameters; what learns slowly ends lower, so early steps mislead a little."""
    end = 1 + hartmann6(_vector(params, 6)) / -HARTMANN6
    end += 0.4 * (_number(params, "x6") - 0.3) ** 2 + 0.1 * _number(params, "x7")
    rate = 3 + 5 * _number(params, "x7")
    return end + (1.5 - end) * math.exp(-rate * step / STEPS)


STEPS = 27

_MIXED: Space = {
    "lr": Dimension("float", 1e-5, 1.0, log=True),
    "width": Dimension("int", 8, 512, log=True),
    "layers": Dimension("int", 1, 6),
    "optimizer": Dimension("choice", values=("sgd", "adam", "rmsprop")),
    "momentum": Dimension("float", 0.0, 0.99, when={"optimizer": ("sgd",)}),
    "activation": Dimension("choice", values=("relu", "tanh", "gelu", "silu")),
    "dropout": Dimension("float", 0.0, 0.7),
    "batch": Dimension("choice", values=(32, 64, 128, 256)),
}
_BEST_LR = {"sgd": -1.2, "adam": -3.0, "rmsprop": -3.4}
_OPTIMIZER = {"sgd": 0.0, "adam": 0.03, "rmsprop": 0.08}
_ACTIVATION = {"relu": 0.03, "tanh": 0.12, "gelu": 0.0, "silu": 0.02}


def _mixed8(params: Params) -> float:
    """Numbers, whole numbers, choices and a condition, that depend on each other."""
    optimizer = str(params["optimizer"])
    batch = math.log2(_number(params, "batch") / 32)
    best_lr = _BEST_LR[optimizer] + 0.15 * (batch - 1)
    loss = _OPTIMIZER[optimizer] + _ACTIVATION[str(params["activation"])]
    loss += 0.25 * min((math.log10(_number(params, "lr")) - best_lr) ** 2, 4)
    width = math.log2(_number(params, "width"))
    loss += 0.02 * (width - 7.5) ** 2 + 0.02 * (_number(params, "layers") - 3) ** 2
    loss += 0.8 * (_number(params, "dropout") - 0.1 - 0.03 * (width - 3)) ** 2
    loss += 0.02 * (batch - 1) ** 2
    if optimizer == "sgd":
        loss += 0.5 * (_number(params, "momentum") - 0.9) ** 2
    return loss


# lr 10**-1.2, width 181, layers 3, sgd, momentum 0.9, gelu, dropout 0.235, batch 64.
_MIXED_BEST: Params = {
    "lr": 10**-1.2, "width": 181, "layers": 3, "optimizer": "sgd", "momentum": 0.9,
    "activation": "gelu", "dropout": 0.1 + 0.03 * (math.log2(181) - 3), "batch": 64,
}  # fmt: skip


def _mixed8curves(params: Params, step: int) -> float:
    """As mixed8; a low learning rate takes longer to get there, a high one gains a little time."""
    end = _mixed8(params)
    above = math.log10(_number(params, "lr")) - _BEST_LR[str(params["optimizer"])]
    rate = 6 * (2.0 if above < 0 else 1.25) ** max(-2.0, min(above, 1.0))
    return end + (2.5 - end) * math.exp(-rate * step / STEPS)


def _h6curves_best() -> float:
    x = [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573]
    point: Params = {f"x{index}": value for index, value in enumerate([*x, 0.3])}
    return min(_h6curves({**point, "x7": place / 1000}, STEPS) for place in range(1001))


def _mixed8curves_best() -> float:
    lrs = (10 ** (-1.3 + place / 1000) for place in range(300))
    return min(_mixed8curves({**_MIXED_BEST, "lr": lr}, STEPS) for lr in lrs)


_TABLE: Space = {
    name: Dimension("int", 0, len(values) - 1)
    for name, values in zip(
        ("lr", "momentum", "l2", "dropout", "width", "batch"), sweep_table.LEVELS, strict=True
    )
}


@cache
def _table() -> list[list[float]]:
    with sweep_table.FILE.open(newline="") as file:
        return [[float(error) for error in row] for row in csv.reader(file)]


def _mnist(params: Params, step: int) -> float:
    row = 0
    for name, dimension in _TABLE.items():
        row = row * (int(dimension.high) + 1) + int(_number(params, name))
    return _table()[row][sweep_table.EPOCHS.index(step)]


@cache
def mnist() -> Problem:
    """Validation error of one hidden layer, by levels of six parameters: 1,728 trainings."""
    return Problem(
        "mnist", _TABLE, sweep_table.EPOCHS[-1], 0.0, _mnist, min(row[-1] for row in _table()),
        _levels(_TABLE, {"lr": 4, "momentum": 2, "dropout": 2, "width": 2, "batch": 2}),
    )  # fmt: skip


_TEN = _cube(10, -5, 10)
_PLANE = {"x0": Dimension("float", -5, 10), "x1": Dimension("float", 0, 15)}

H6CURVES = Problem(
    "h6curves", _cube(8), STEPS, 0.005, _h6curves, _h6curves_best(),
    _levels(_cube(8), {"x0": 2, "x1": 2, "x2": 2, "x3": 2, "x4": 2, "x5": 2, "x6": 2, "x7": 2}),
)  # fmt: skip
MIXED8CURVES = Problem(
    "mixed8curves", _MIXED, STEPS, 0.005, _mixed8curves, _mixed8curves_best(),
    _levels(_MIXED, {"lr": 4, "width": 2, "layers": 2, "momentum": 1, "dropout": 2}),
)  # fmt: skip
BRANIN = Problem(
    "branin", _PLANE, 1, 0.0,
    lambda params, _: branin(*_vector(params, 2)), 0.397887, _levels(_PLANE, {"x0": 16, "x1": 16}),
)  # fmt: skip
HARTMANN = Problem(
    "hartmann6", _cube(6), 1, 0.0,
    lambda params, _: hartmann6(_vector(params, 6)), HARTMANN6,
    _levels(_cube(6), {"x0": 3, "x1": 3, "x2": 3, "x3": 3, "x4": 2, "x5": 2}),
)  # fmt: skip
ROSENBROCK = Problem(
    "rosenbrock10", _TEN, 1, 0.0,
    lambda params, _: rosenbrock(_vector(params, 10)), 0.0,
    _levels(_TEN, dict.fromkeys(_TEN, 2)),
)  # fmt: skip
MIXED8 = Problem(
    "mixed8", _MIXED, 1, 0.0,
    lambda params, _: _mixed8(params), _mixed8(_MIXED_BEST),
    MIXED8CURVES.grid,
)  # fmt: skip

CURVES = (H6CURVES, MIXED8CURVES)
FUNCTIONS = (BRANIN, HARTMANN, ROSENBROCK, MIXED8)
