"""Values of the metrics of a run, and conditions for them: `max(accuracy)>0.98`. Pure."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import fsum

from msgspec import Struct

from batchml.errors import UsageError, did_you_mean
from batchml.model.run import MetricRange, Record

_CONDITION = r"\s*([^\s<>=!]+)\s*(>=|<=|==|!=|=|>|<)\s*(\S+)\s*"
_FUNCTION = r"([a-z]\w*)\((.+)\)"
FUNCTIONS = ("first", "last", "best", "min", "max")  # of the values of a metric
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


NO_METRICS = (
    "No metrics: the program called no report(), and no pattern of [metrics] in a job.toml matched "
    "its output. `batchml adopt SCRIPT` proposes patterns."
)


def child_of(metric: str) -> tuple[str, int | None]:
    """The name and the child of a metric: `("loss", 3)` for `loss:3`, `("loss", None)` else."""
    name, _, child = metric.rpartition(":")
    is_child = bool(name) and child.isascii() and child.isdecimal()
    return (name, int(child)) if is_child else (metric, None)


def first_values(ranges: Mapping[str, MetricRange]) -> dict[str, float]:
    """The first value of each metric."""
    return {name: each.first for name, each in ranges.items()}


def best_values(
    ranges: Mapping[str, MetricRange], directions: Mapping[str, str]
) -> dict[str, float]:
    """The best value of each metric whose direction is known, also for children (`loss:3`)."""
    return {
        name: each.greatest if direction == "max" else each.least
        for name, each in ranges.items()
        if (direction := directions.get(name) or directions.get(child_of(name)[0]))
    }


class MetricValue(Struct, frozen=True):
    """One value of a metric in a run: the last, or `function`, one of FUNCTIONS."""

    name: str
    function: str = "last"

    def read(self, record: Record | None) -> float | None:
        """The value in a run; None if it is not known.

        Of an array, the mean of its children, or the greatest, least or best value of a child.
        """
        values = self._values(record or Record())
        if self.name in values:
            return values[self.name]
        of_children = [each for name, each in values.items() if child_of(name)[0] == self.name]
        directions = record.directions if record else {}
        word = directions.get(self.name, "") if self.function == "best" else self.function
        merge = {"max": max, "min": min}.get(word, _mean)
        return merge(of_children) if of_children else None

    def _values(self, record: Record) -> Mapping[str, float]:
        """The value of each metric, also of children: `loss:3`."""
        if self.function == "last":
            return record.metrics
        if self.function == "best":
            return best_values(record.ranges, record.directions)
        field = {"first": "first", "min": "least", "max": "greatest"}[self.function]
        return {name: getattr(each, field) for name, each in record.ranges.items()}


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


class MetricCondition(Struct, frozen=True):
    """A condition for a value of a metric: `max(val_accuracy) > 0.98`."""

    name: str
    sign: str
    bound: float
    function: str = "last"

    @property
    def value(self) -> MetricValue:
        return MetricValue(self.name, self.function)

    def holds(self, record: Record | None) -> bool:
        value = self.value.read(record)
        return value is not None and _OPERATORS[self.sign](value, self.bound)


def read_condition(text: str, flag: str) -> MetricCondition:
    """Parse `val_accuracy>0.98` or `max(val_accuracy)>0.98`. Raises UsageError."""
    found = re.fullmatch(_CONDITION, text)
    if found:
        value = read_metric_value(found[1], flag)
        with suppress(ValueError):
            return MetricCondition(value.name, found[2], float(found[3]), value.function)
    raise UsageError(
        f"{flag} {text}: write a condition such as 'val_accuracy>0.98' or "
        "'max(val_accuracy)>0.98', in quotes."
    )


def read_metric_value(text: str, flag: str) -> MetricValue:
    """Parse `loss` or `min(loss)`. Raises UsageError for a function that does not exist."""
    found = re.fullmatch(_FUNCTION, text)
    if found is None:
        return MetricValue(text)
    if found[1] not in FUNCTIONS:
        raise UsageError(
            f"{flag} {text}: no such function.{did_you_mean(found[1], FUNCTIONS)} "
            f"Functions: {', '.join(FUNCTIONS)}."
        )
    return MetricValue(found[2], found[1])
