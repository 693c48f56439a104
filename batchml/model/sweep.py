"""A sweep as its file defines it (SweepSpec), its trials and its search space.

`sweeps/spec/file.py` reads the file.
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from random import Random
from typing import Literal

from msgspec import Struct, field

from batchml.model.job import Scalar
from batchml.runtime.protocol.sweep import rung_steps

Params = dict[str, Scalar]  # the active parameters of a trial

Method = Literal["tpe", "random", "sobol", "grid", "list", "gp", "cmaes", "nsga2"]
MODELS = ("tpe", "gp", "cmaes", "nsga2")  # methods that learn from results

StopMethod = Literal["asha", "halving", "median", "none"]

PARALLEL = 16  # trials at once, by default


class Goal(Struct, frozen=True):
    """One objective: a metric, and whether greater or smaller values are better."""

    metric: str
    direction: Literal["max", "min"]

    def loss(self, value: float) -> float:
        """The value, negated where greater is better: a smaller loss is always better."""
        return -value if self.direction == "max" else value


class Dimension(Struct, frozen=True):
    """One parameter of the space.

    float, int: from `low` to `high`, both included, uniform or `log`-uniform, in steps of `step`.
    normal: the value (with `log`: its logarithm) is normally distributed with `mu` and `sigma`.
    choice: one of `values`. constant: `values[0]`. `when`: the parameter is active only if each
    parameter that `when` names has one of the listed values.
    """

    kind: Literal["float", "int", "normal", "choice", "constant"]
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    mu: float = 0.0
    sigma: float = 1.0
    values: tuple[Scalar, ...] = ()
    when: dict[str, tuple[Scalar, ...]] = {}


Space = dict[str, Dimension]  # parents come before the parameters that depend on them


class EarlyStop(Struct, frozen=True):
    """When bad trials are stopped early. `min` and `max` are numbers of steps."""

    method: StopMethod = "none"
    step: str = "epoch"  # the name printed beside the metric
    max: int = 0  # steps of a full training; 0 (unknown) only with the method `none`
    min: int = 1
    eta: int = 3
    resume: bool = False  # trials end at rungs, and promoted ones continue from their checkpoints
    is_step_given: bool = False  # False: `step` is a default; lines may count something else

    @property
    def rungs(self) -> tuple[int, ...]:
        """The steps below `max` at which trials are compared; empty for methods without rungs."""
        has_rungs = self.method in ("asha", "halving")
        return rung_steps(self.min, self.max, self.eta) if has_rungs else ()

    @property
    def ends_at_rungs(self) -> bool:
        """Whether trials end at rungs, and the best of them continue later."""
        return self.method == "halving" or self.resume


class SweepLimits(Struct, frozen=True):
    """Limits that end a sweep, whichever is reached first; None: no such limit."""

    trials: int | None = None
    parallel: int = PARALLEL  # trials at once; this limit ends no sweep
    hours: float | None = None
    cost: float | None = None  # USD
    failed_share: float | None = 0.2  # failed trials, as a part of the trials that have ended
    failed_count: int | None = None  # failed trials, instead of failed_share
    target: float | None = None  # the value of the first goal that is good enough


class ConfirmSettings(Struct, frozen=True):
    """Run the best `top` trials again, each with `seeds` other seeds."""

    top: int = 3
    seeds: int = 3


class SweepSpec(Struct, frozen=True):
    """A sweep. `space` has all parameters of the file. `seed` decides all random choices."""

    name: str
    job: str
    goals: tuple[Goal, ...]
    space: Space
    method: Method = "tpe"
    early_stop: EarlyStop = EarlyStop()
    limits: SweepLimits = SweepLimits()
    confirm: ConfirmSettings | None = None
    seed: int = 0
    where: tuple[str, ...] = ()  # conditions that the parameters of every trial must meet
    points: tuple[Params, ...] = ()  # for the method `list` all points, else the first points

    @property
    def goal(self) -> Goal:
        """The first goal."""
        return self.goals[0]


# --- Trials ---------------------------------------------------------------------------------------


class TrialState(StrEnum):
    """A trial's state. The first three may continue; the others are final."""

    WAITING = "WAITING"  # planned or queued
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"  # ended at a rung; may be promoted and continue
    DONE = "DONE"
    PRUNED = "PRUNED"  # stopped early, because others do better
    FAILED = "FAILED"  # its program failed, or never reported the metric
    DIVERGED = "DIVERGED"  # its metric was NaN or infinite
    KILLED = "KILLED"  # stopped by a limit, or by the user
    LOST = "LOST"  # its job has ended in AWS Batch, and the trial never reported its end

    @property
    def is_ended(self) -> bool:
        return self not in _GOING_ON

    @property
    def is_in_flight(self) -> bool:
        return self in _IN_FLIGHT

    @property
    def is_failure(self) -> bool:
        return self in (TrialState.FAILED, TrialState.LOST)


_IN_FLIGHT = frozenset((TrialState.WAITING, TrialState.RUNNING))
_GOING_ON = _IN_FLIGHT | {TrialState.PAUSED}


class TrialReport(Struct, frozen=True, array_like=True, gc=False):
    """The goals' metrics at one step; `at` in seconds since the epoch."""

    step: int
    values: tuple[float, ...]
    at: float = 0.0


class RecordedDecision(Struct, frozen=True, array_like=True, gc=False):
    """The decision of a trial at a rung, as the ledger records it.

    `version` is the version of the cut-offs that the trial used.
    """

    step: int
    value: float
    cutoff: float | None  # None: too few results to compare with
    version: int
    goes_on: bool


class Trial(Struct):
    """A trial: one set of parameters and its results. Only `SweepState.apply` changes it."""

    number: int  # from 0
    params: Params
    seed: int
    origin: str = ""  # what proposed the parameters: a method, "list", "confirm", ...
    confirms: int | None = None  # the trial whose parameters this one runs again
    state: TrialState = TrialState.WAITING
    wave: int = 0  # the number of the last batch of trials that it was in
    index: int = 0  # its index in this batch
    target: int = 0  # the step at which it ends in this batch; 0: at the end of the training
    attempt: int = 0  # the last attempt of its job, from 1
    job_id: str = ""  # its job in this batch, with `:INDEX` for the child of an array
    reports: list[TrialReport] = field(default_factory=list)  # one for each step, by rising step
    decisions: list[RecordedDecision] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # the last values of other metrics
    planned_at: float = 0.0  # seconds since the epoch, as all times of a trial
    started_at: float | None = None  # the start of its first container
    stopped_at: float | None = None
    seconds: float = 0.0  # the running time of all containers that have ended
    resumed_at: float | None = None  # the start of the container that runs now
    exit_code: int | None = None
    why: str = ""  # the reason of its end, for users
    tail: tuple[str, ...] = ()  # the last lines of output of a failed trial
    counter: str = ""  # what its lines count, if the sweep file names no step
    other: str = ""  # what they count, and what does not count; NO_COUNTER: nothing

    @property
    def step(self) -> int:
        """The last step with a report; 0 without reports."""
        return self.reports[-1].step if self.reports else 0

    @property
    def values(self) -> tuple[float, ...] | None:
        """The goals' metrics at the last step."""
        return self.reports[-1].values if self.reports else None

    def ran(self, now: float) -> float:
        """The seconds that its containers have run until `now`."""
        running = max(0.0, now - self.resumed_at) if self.resumed_at is not None else 0.0
        return self.seconds + running


# --- The search space -----------------------------------------------------------------------------


SLACK = 1e-6  # the tolerance for rounding, in steps: 0.1 + 2 * 0.1 is not quite 0.3


def is_active(dimension: Dimension, params: Mapping[str, Scalar]) -> bool:
    """Whether a parameter is active with these values of its parents."""
    return not dimension.when or all(
        parent in params and is_one_of(params[parent], values)
        for parent, values in dimension.when.items()
    )


def active_parameters(space: Space, params: Mapping[str, Scalar]) -> list[str]:
    """The parameters that are active in a point, parents first; `params` may have more or fewer."""
    taken: Params = {}
    found = []
    for name, dimension in space.items():
        if is_active(dimension, taken):
            found.append(name)
            if name in params:
                taken[name] = params[name]
    return found


def is_one_of(value: Scalar, values: tuple[Scalar, ...]) -> bool:
    """Whether a value is in the list: 1 and 1.0 are the same value, 1 and true are not."""
    return any(is_same(value, each) for each in values)


def is_same(one: Scalar, other: Scalar) -> bool:
    """Whether two values are equal, where true and 1 differ."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def count_levels(dimension: Dimension) -> int | None:
    """The number of values of a parameter; None: infinitely many."""
    match dimension.kind:
        case "choice" | "constant":
            return len(dimension.values)
        case "int" | "float" if dimension.kind == "int" or dimension.step:
            span = (dimension.high - dimension.low) / (dimension.step or 1)
            return math.floor(span + SLACK) + 1
    return None


def level(dimension: Dimension, index: int) -> Scalar:
    """The value with an index of a parameter with `count_levels` values."""
    if dimension.kind in ("choice", "constant"):
        return dimension.values[index]
    step = dimension.step or 1
    value = dimension.low + index * step
    if dimension.kind == "int":
        return round(value)
    if index == 0:
        return dimension.low
    is_end = abs(value - dimension.high) <= SLACK * step
    return dimension.high if is_end else float(f"{value:.12g}")


def as_value(dimension: Dimension, value: Scalar) -> Scalar | None:
    """`value` with the type of the parameter, such as 1.0 for 1; None if it is not allowed."""
    if dimension.kind in ("choice", "constant"):
        return next((each for each in dimension.values if is_same(each, value)), None)
    if isinstance(value, str | bool) or not is_finite(value):
        return None
    if dimension.kind == "normal":
        return None if dimension.log and value <= 0 else float(value)
    if not dimension.low <= value <= dimension.high:
        return None
    if count_levels(dimension) is None:
        return float(value)
    index = (value - dimension.low) / (dimension.step or 1)
    return level(dimension, round(index)) if abs(index - round(index)) < SLACK else None


def is_finite(value: float) -> bool:
    """False for NaN, infinity, and an integer too great for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_discrete(space: Space) -> bool:
    """Whether the number of points is finite."""
    return all(count_levels(dimension) is not None for dimension in space.values())


def count_points(space: Space) -> int | None:
    """The number of points, without the conditions of `where`; None: infinitely many."""
    if not is_discrete(space):
        return None
    deciding = {
        parent: _deciding_values(space, parent) for each in space.values() for parent in each.when
    }
    return _count(list(space.items()), {}, deciding)


def _deciding_values(space: Space, parent: str) -> list[Scalar]:
    """The values of the parameter `parent` that other parameters depend on."""
    found: list[Scalar] = []
    for dimension in space.values():
        for value in dimension.when.get(parent, ()):
            known = as_value(space[parent], value)
            if known is not None and not is_one_of(known, tuple(found)):
                found.append(known)
    return found


def _count(
    rest: list[tuple[str, Dimension]], params: Params, deciding: Mapping[str, list[Scalar]]
) -> int:
    """The number of points of the parameters `rest`, with the earlier parameters in `params`.

    A parameter on which no other depends multiplies the count by the number of its values. For each
    value in `deciding`, the rest is counted separately.
    """
    count = 1
    for index, (name, dimension) in enumerate(rest):
        if not is_active(dimension, params):
            continue
        number = count_levels(dimension) or 0
        if name not in deciding:
            count *= number
            continue
        below = rest[index + 1 :]
        found = sum(_count(below, {**params, name: value}, deciding) for value in deciding[name])
        alike = number - len(deciding[name])
        return count * (found + (alike * _count(below, params, deciding) if alike else 0))
    return count


def every_point(space: Space) -> Iterator[Params]:
    """All points of a discrete space. The last parameter changes fastest."""
    yield from _points(list(space.items()), {})


def _points(rest: list[tuple[str, Dimension]], params: Params) -> Iterator[Params]:
    if not rest:
        yield params
        return
    (name, dimension), below = rest[0], rest[1:]
    if not is_active(dimension, params):
        yield from _points(below, params)
        return
    for index in range(count_levels(dimension) or 0):
        yield from _points(below, {**params, name: level(dimension, index)})


def draw_point(space: Space, random: Random) -> Params:
    """Draw a point to test conditions. Samplers draw the points of trials."""
    params: Params = {}
    for name, dimension in space.items():
        if is_active(dimension, params):
            params[name] = _draw_value(dimension, random)
    return params


def _draw_value(dimension: Dimension, random: Random) -> Scalar:
    count = count_levels(dimension)
    if dimension.kind == "normal":
        value = random.gauss(dimension.mu, dimension.sigma)
        return math.exp(min(value, 700.0)) if dimension.log else value
    if count is not None and not (dimension.log and dimension.kind != "choice"):
        return level(dimension, random.randrange(count))
    low, high = dimension.low, dimension.high
    if not dimension.log:
        return float(f"{random.uniform(low, high):.6g}")
    value = math.exp(random.uniform(math.log(low), math.log(high)))
    return round(value) if dimension.kind == "int" else float(f"{value:.6g}")


def sort_parents_first(space: Space) -> tuple[Space, list[str]]:
    """The space with parents before their dependents, and the parameters that form a cycle."""
    done: Space = {}
    left = dict(space)
    while left:
        ready = [
            name
            for name, dimension in left.items()
            if not any(parent in left for parent in dimension.when)
        ]
        if not ready:
            return {**done, **left}, list(left)
        name = ready[0]
        done[name] = left.pop(name)
    return done, []
