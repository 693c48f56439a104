"""Read the values of a trial's goals, step by step, from lines of output and the metrics file.

A line is a JSON object whose keys are metrics, or contains `name=value` or `name: value`. In lines
that are not JSON, a metric with a pattern of the job is found by the pattern alone. Of several
values in a line the last one counts, as in a progress bar. The step is a number in the same line
(`epoch=3`, `Epoch 3/27`, `Epoch[3]`); without one, the n-th value of a metric belongs to step n.
Once a metric had a step, its values without one are ignored: many programs print a last result.
"""

from __future__ import annotations

import json
import math
import re
from typing import (
    Callable,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from batchml.runtime.protocol.log_marks import STEP, TIME, TOTAL
from batchml.runtime.protocol.sweep import NO_COUNTER
from batchml.runtime.protocol.variables import parameter_variable

LONGEST = 16_384  # bytes of a line; of a longer line the last bytes are read
MAX_SEEN = 100  # metrics that are no goals and whose last values are kept
MAX_STEP = 1 << 53

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
# The lookbehind lets a name begin only at the start of a word, so that a long word is tried once.
# The quotes are those of a printed dict.
_PAIR = re.compile(
    rf"(?<![\w./|-])([A-Za-z_][\w./|-]*)['\"]? {{0,9}}[=:]\s{{0,9}}['\"]?({_NUMBER})(?!\w|\.\d)",
    re.IGNORECASE,
)
# Names of counters, by which a line is found that counts something else than the named step.
_COUNTERS = ("epoch", "iteration", "iter", "global_step", "step")
_ANY_COUNTER = re.compile(
    rf"(?<!\w)({'|'.join(_COUNTERS)}) {{0,9}}[\[(]? {{0,9}}(\d{{1,15}})(?!\w)", re.IGNORECASE
)
_OWN_FIELDS = (TIME, TOTAL)  # fields of the metrics file that are not metrics


class Point(NamedTuple):
    """The values of all goals at one step."""

    step: int
    values: Tuple[float, ...]


class Readings:
    """The values that one attempt has printed and reported so far.

    `patterns`: regular expressions by metric. `step`: the name of the step, such as `epoch`.
    `after`: the step from whose checkpoint the trial continues, 0 if it starts from scratch; values
    without a printed step are counted from there. `shift`: see `TrialProgress`. `params`: the
    trial's parameters, which many programs print first, and which are no metrics. `limit`: the
    steps of a full training, 0 if unknown. With `may_learn` the lines may count something else than
    `step`, if each has a single counter that is not beyond the limit: then that is `counter`.
    """

    def __init__(
        self,
        goals: Sequence[str],
        patterns: Mapping[str, str],
        step: str,
        after: int = 0,
        shift: Optional[int] = None,
        params: Optional[Mapping[str, object]] = None,
        limit: int = 0,
        may_learn: bool = False,
    ) -> None:
        self.counter = ""  # what the lines count, if it was learned
        self.other_counter = ""  # what they count, if it is not the step and does not count
        self._limit, self._may_learn, self._knows_counter = limit, may_learn, False
        self.seen: Dict[str, float] = {}  # the last value of each metric that is no goal
        self._goals = tuple(goals)
        self._params = {parameter_variable(name): value for name, value in (params or {}).items()}
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._name_step(step)
        self._after = after
        self._counts = dict.fromkeys(self._goals, after)  # values of each goal so far
        self._stepped: Set[str] = set()  # goals that were printed or reported with a step
        self.shift = shift  # 1 for a program that counts 0, 1, 2; None: unknown
        self._is_from_zero = False  # the first step was 0, or the number of the last step before
        self._pattern_step: Optional[float] = None  # the last step that a pattern of the job found
        self._parts: Dict[int, Dict[str, float]] = {}  # step -> its goals, while some are missing
        # Once goals are in the metrics file, printed values without a step are ignored.
        self._is_reported = False
        self._last = 0  # the last step with all goals
        self._never = set(self._goals)  # goals that were never printed or reported

    def _name_step(self, step: str) -> None:
        self._step = step
        self._step_name = step.lower()
        # `Epoch 3`, `epoch [3/27]`, `Epoch(3)`; `epoch=3` is found as a pair.
        self._beside = re.compile(
            rf"(?<!\w){re.escape(step)} {{0,9}}[\[(]? {{0,9}}(\d{{1,15}})(?!\w)", re.IGNORECASE
        )

    @property
    def counters(self) -> Tuple[str, str]:
        return self.counter, self.other_counter

    @property
    def missing(self) -> List[str]:
        """The goals that were never printed or reported."""
        return [name for name in self._goals if name in self._never]

    @property
    def printed(self) -> List[str]:
        """All metrics that were printed or reported, goals included."""
        return [*(name for name in self._goals if name not in self._never), *self.seen]

    def read_line(self, line: bytes) -> List[Point]:
        """Read a line of output. Return the points that this line completes, often none."""
        if not self._patterns and not (b"=" in line or b":" in line):
            return []
        text = line[-LONGEST:].decode("utf-8", "replace")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        found = _json_object(text) or self._find_metrics(text)
        self._learn_counter(found, text)
        return self._take(found, lambda: self._find_step(text, found)) if found else []

    def read_report(self, point: Mapping[str, float]) -> List[Point]:
        """Read a report from the metrics file. Return the points that this report completes."""
        found = {name: value for name, value in point.items() if name not in _OWN_FIELDS}
        names = [name for name in self._goals if name in found]
        self._is_reported = self._is_reported or bool(names)
        self._learn_counter(found, "")
        return self._take(found, lambda: found.get(self._step), is_report=True)

    def _find_metrics(self, text: str) -> Dict[str, float]:
        found = {name: float(value) for name, value in _PAIR.findall(text)}
        for name, pattern in self._patterns.items():
            found.pop(name, None)
            for match in pattern.finditer(text):
                value = _number(match[1])
                if value is not None:
                    found[name] = value
        if STEP in self._patterns and STEP in found:
            self._pattern_step = found[STEP]
        return found

    def _find_step(self, text: str, found: Mapping[str, float]) -> Optional[float]:
        for name, value in found.items():
            if name.lower() == self._step_name:
                return value
        steps = self._beside.findall(text)
        return float(steps[-1]) if steps else self._pattern_step

    def _learn_counter(self, found: Mapping[str, float], text: str) -> None:
        """Find out what the lines of the goals count, at the first that does not count from 0."""
        if self._knows_counter or not any(name in found for name in self._goals):
            return
        if self._find_step(text, found) is not None:
            self._knows_counter = True
            return
        counters = {name: value for name, value in found.items() if name.lower() in _COUNTERS}
        for name, number in _ANY_COUNTER.findall(text):
            if name.lower() not in map(str.lower, counters):
                counters[name.lower()] = float(number)
        if len(counters) == 1 and 0 in counters.values():
            self._is_from_zero = self._after == 0  # the next line decides
            return
        self._knows_counter = True
        if len(counters) == 1 and self._may_learn:
            [(name, value)] = counters.items()
            if not self._limit or value <= self._limit:
                self.counter = name
                self._name_step(name)
                return
        if not self._may_learn or len(counters) == 1:
            self.other_counter = ", ".join(counters) or NO_COUNTER

    def _take(
        self,
        found: Mapping[str, float],
        find_step: Callable[[], Optional[float]],
        is_report: bool = False,
    ) -> List[Point]:
        names = [name for name in self._goals if name in found]
        self._note_metrics(found)
        printed_step = _valid_step(find_step()) if names else None
        if printed_step is None and self._is_reported and not is_report:
            return []
        if printed_step is not None:
            self._stepped.update(names)
        points = []
        for name in names:
            if printed_step is None and name in self._stepped:
                continue
            self._counts[name] += 1
            step = self._counts[name] if printed_step is None else self._to_done_steps(printed_step)
            points += self._complete(step, name, found[name])
        return points

    def _note_metrics(self, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            if name in self._goals:
                self._never.discard(name)
            elif self._is_no_metric(name, value):
                continue
            elif name in self.seen or len(self.seen) < MAX_SEEN:
                self.seen[name] = value

    def _is_no_metric(self, name: str, value: float) -> bool:
        """Whether this is the step, a parameter with its value, or a value that is not finite."""
        is_parameter = self._params.get(parameter_variable(name)) == value
        return is_parameter or name.lower() == self._step_name or not math.isfinite(value)

    def _to_done_steps(self, printed_step: float) -> int:
        """The number of completed steps.

        A first step that is 0, or the number of the last step before, is the first point. The next
        number decides: a program that counts 0, 1, 2 has completed one step more than it prints;
        the numbers of one that prints each twentieth step, 0, 20, 40, are the completed steps.
        """
        if self.shift is None:
            if printed_step == self._after:
                self._is_from_zero = True
                return self._after + 1
            self.shift = int(self._is_from_zero and printed_step == self._after + 1)
        return int(printed_step) + self.shift

    def _complete(self, step: int, name: str, value: float) -> List[Point]:
        if step <= self._last or step > MAX_STEP:  # only the first value of a step counts
            return []
        part = self._parts.setdefault(step, {})
        part.setdefault(name, value)
        if len(part) < len(self._goals) and math.isfinite(value):
            return []
        self._last = step
        self._parts = {each: values for each, values in self._parts.items() if each > step}
        return [Point(step, tuple(part.get(each, value) for each in self._goals))]


def list_likely_names(missing: Sequence[str], seen: Iterable[str]) -> str:
    """List printed metrics for a message, the names most similar to the missing goals first."""
    from difflib import SequenceMatcher

    def likeness(name: str) -> float:
        return max(SequenceMatcher(None, name.lower(), goal.lower()).ratio() for goal in missing)

    names = sorted(seen, key=likeness, reverse=True) if missing else list(seen)
    return ", ".join(names[:10])


def _json_object(text: str) -> Dict[str, float]:
    stripped = text.strip()
    if not (stripped.startswith("{") and stripped.endswith("}")):
        return {}
    try:
        found = json.loads(stripped)
    except (ValueError, RecursionError):
        return {}
    numbers = {name: _number(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _number(value: object) -> Optional[float]:
    """The number in a JSON value or in a match of a pattern; None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _valid_step(value: Optional[float]) -> Optional[float]:
    return value if value is not None and 0 <= value <= MAX_STEP else None
