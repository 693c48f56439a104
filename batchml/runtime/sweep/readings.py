"""From lines of output, and the metrics file, to the values of a trial's goals, step by step.

Of each line, the first that there is: a JSON object with the metric's key, `name=value` or
`name: value`, the job's own pattern for it (alone, for a metric that has one). The last match of a
line counts, as a progress bar shows it. The step is what stands beside it (`epoch=3`, `Epoch 3/27`,
`Epoch[3]`), or else the metric's n-th value is of step n.
"""

from __future__ import annotations

import json
import math
import re
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.protocol.log_marks import STEP, TIME, TOTAL
from batchml.runtime.protocol.variables import variable

LONGEST = 16_384  # bytes of a line that are read: its last ones
MAX_SEEN = 100  # metrics whose names and last values are kept
MAX_STEP = 1 << 53

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
# A name begins where no name goes on, so that a long word is looked at once and not from each of
# its letters. Quotes are those of a printed dict.
_PAIR = re.compile(
    rf"(?<![\w./|-])([A-Za-z_][\w./|-]*)['\"]? {{0,9}}[=:]\s{{0,9}}['\"]?({_NUMBER})(?!\w|\.\d)",
    re.IGNORECASE,
)
_OURS = (TIME, TOTAL)  # of a point of the metrics file


class Point(NamedTuple):
    """All goals' values at one step."""

    step: int
    values: Tuple[float, ...]


class Readings:
    """What one attempt has printed and reported so far.

    `after` is the step from whose checkpoint the trial goes on, 0 if it begins anew: values without
    a printed step are counted from there. `params` are the trial's: many programs print them first,
    and they are no metrics.
    """

    def __init__(
        self,
        goals: Sequence[str],
        patterns: Mapping[str, str],
        step: str,
        after: int = 0,
        shift: Optional[int] = None,
        params: Optional[Mapping[str, object]] = None,
    ) -> None:
        self.seen: Dict[str, float] = {}  # the last value of each metric that is no goal
        self._goals = tuple(goals)
        self._params = {variable(name): value for name, value in (params or {}).items()}
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._step = step
        self._step_name = step.lower()
        # `Epoch 3`, `epoch [3/27]`, `Epoch(3)`: pairs are found with the others.
        self._beside = re.compile(
            rf"(?<!\w){re.escape(step)} {{0,9}}[\[(]? {{0,9}}(\d{{1,15}})(?!\w)", re.IGNORECASE
        )
        self._after = after
        self._counts = dict.fromkeys(self._goals, after)
        self.shift = shift  # 1 for a program that counts from 0; None: not known
        self._told: Optional[float] = None  # the step that a pattern of the job found last
        self._parts: Dict[int, Dict[str, float]] = {}  # steps of which not all goals are known
        self._is_reported = False  # in the metrics file: what is printed without a step is the same
        self._last = 0
        self._never = set(self._goals)

    @property
    def missing(self) -> List[str]:
        """The goals that were never printed."""
        return [name for name in self._goals if name in self._never]

    @property
    def printed(self) -> List[str]:
        """All metrics that were printed, goals among them."""
        return [*(name for name in self._goals if name not in self._never), *self.seen]

    def line(self, line: bytes) -> List[Point]:
        """What a line of output completes: often nothing, one point at most."""
        if not self._patterns and not (b"=" in line or b":" in line):
            return []
        text = line[-LONGEST:].decode("utf-8", "replace")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        found = _json_object(text) or self._found_in(text)
        return self._take(found, lambda: self._step_in(text, found)) if found else []

    def reported(self, point: Mapping[str, float]) -> List[Point]:
        """What a point of the metrics file completes."""
        found = {name: value for name, value in point.items() if name not in _OURS}
        names = [name for name in self._goals if name in found]
        self._is_reported = self._is_reported or bool(names)
        return self._take(found, lambda: found.get(self._step), is_report=True)

    def _found_in(self, text: str) -> Dict[str, float]:
        found = {name: float(value) for name, value in _PAIR.findall(text)}
        for name, pattern in self._patterns.items():
            found.pop(name, None)
            for match in pattern.finditer(text):
                value = _number(match[1])
                if value is not None:
                    found[name] = value
        if STEP in self._patterns and STEP in found:
            self._told = found[STEP]
        return found

    def _step_in(self, text: str, found: Mapping[str, float]) -> Optional[float]:
        for name, value in found.items():
            if name.lower() == self._step_name:
                return value
        steps = self._beside.findall(text)
        return float(steps[-1]) if steps else self._told

    def _take(
        self,
        found: Mapping[str, float],
        find_step: Callable[[], Optional[float]],
        is_report: bool = False,
    ) -> List[Point]:
        names = [name for name in self._goals if name in found]
        self._look_at(found)
        said = _step(find_step()) if names else None
        if said is None and self._is_reported and not is_report:
            return []
        points = []
        for name in names:
            self._counts[name] += 1
            step = self._counts[name] if said is None else self._shifted(said)
            points += self._complete(step, name, found[name])
        return points

    def _look_at(self, found: Mapping[str, float]) -> None:
        for name, value in found.items():
            if name in self._goals:
                self._never.discard(name)
            elif self._is_no_metric(name, value):
                continue
            elif name in self.seen or len(self.seen) < MAX_SEEN:
                self.seen[name] = value

    def _is_no_metric(self, name: str, value: float) -> bool:
        """The step, a parameter of the trial with the value that it has, or no number."""
        is_own = self._params.get(variable(name)) == value
        return is_own or name.lower() == self._step_name or not math.isfinite(value)

    def _shifted(self, said: float) -> int:
        """Steps that are done: a program whose first is 0, or that goes on with the number that it
        ended with, counts from 0."""
        if self.shift is None:
            self.shift = 1 if said == self._after else 0
        return int(said) + self.shift

    def _complete(self, step: int, name: str, value: float) -> List[Point]:
        if step <= self._last or step > MAX_STEP:  # the first of a step counts
            return []
        part = self._parts.setdefault(step, {})
        part.setdefault(name, value)
        if len(part) < len(self._goals) and math.isfinite(value):
            return []
        self._last = step
        self._parts = {each: values for each, values in self._parts.items() if each > step}
        return [Point(step, tuple(part.get(each, value) for each in self._goals))]


def closest(missing: Sequence[str], seen: Iterable[str]) -> str:
    """`metrics seen: loss, acc`, what looks like the missing first; empty where nothing was."""
    from difflib import SequenceMatcher

    def likeness(name: str) -> float:
        return max(SequenceMatcher(None, name.lower(), each.lower()).ratio() for each in missing)

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
    """Of a JSON value, or of what a pattern found."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _step(value: Optional[float]) -> Optional[float]:
    return value if value is not None and 0 <= value <= MAX_STEP else None
