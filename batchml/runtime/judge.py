"""Whether a trial goes on: it looks at its own values and at the cut-offs that were published.

Pure: the decisions are recorded with what they were made by, so that they can be looked at later.
"""

from __future__ import annotations

import json
import math
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.course import ASHA, MEDIAN, Course

# The rule of medians speaks after this part of a training, and if as many others are known.
# Source: Golovin et al., "Google Vizier", KDD 2017; the part is ours (the first rungs of three).
MEDIAN_AFTER = 4 / 27
MEDIAN_OTHERS = 5


class Cutoffs(NamedTuple):
    """`cutoffs.json`: how many results are known, and the value that one must have.

    `rungs` by the number of the rung, from 0; `medians` by step. Values are in the metric's unit.
    """

    version: int
    rungs: Dict[int, Tuple[int, float]]
    medians: Dict[int, Tuple[int, float]]

    def to_json(self) -> bytes:
        return json.dumps(self._asdict(), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: Optional[bytes]) -> Cutoffs:
        """What is not there, or not one of ours, stops nobody: no cut-offs, version 0."""
        try:
            found = json.loads(data or b"{}")
            return cls(
                int(found.get("version", 0)),
                _table(found.get("rungs", {})),
                _table(found.get("medians", {})),
            )
        except (ValueError, TypeError, AttributeError):
            return cls(0, {}, {})


class Decision(NamedTuple):
    """In the order of a message's `decisions`."""

    step: int
    value: float
    cutoff: Optional[float]  # None: too few results were known
    version: int
    goes_on: bool


def decide(
    course: Course, cutoffs: Cutoffs, step: int, value: float, best: float, rung: Optional[int]
) -> Optional[Decision]:
    """What a trial decides at `step`, where it has come to `rung` (from 0), if to any.

    None where nothing is to decide. `best` is its best value so far, this one among them.
    """
    if not asks(course, step, rung):
        return None
    if course.method == ASHA and rung is not None:
        count, cutoff = cutoffs.rungs.get(rung, (0, math.nan))
        if count < course.eta:
            return Decision(step, value, None, cutoffs.version, True)
        return Decision(step, value, cutoff, cutoffs.version, _is_as_good(course, value, cutoff))
    count, cutoff = cutoffs.medians.get(step, (0, math.nan))
    if count < MEDIAN_OTHERS:
        return None
    return Decision(step, best, cutoff, cutoffs.version, _is_as_good(course, best, cutoff))


def asks(course: Course, step: int, rung: Optional[int]) -> bool:
    """Whether `decide` will want to see the cut-offs."""
    if course.method == ASHA:  # the promoting type ends at rungs, whatever the value
        return not course.resume and rung is not None
    return course.method == MEDIAN and step >= MEDIAN_AFTER * course.max


def best_of(course: Course, one: Optional[float], other: float) -> float:
    """The better of two values of the first goal."""
    if one is None or course.loss(other) < course.loss(one):
        return other
    return one


def _is_as_good(course: Course, value: float, cutoff: float) -> bool:
    return course.loss(value) <= course.loss(cutoff)


def _table(found: Any) -> Dict[int, Tuple[int, float]]:
    pairs: List[Tuple[int, Tuple[int, float]]] = []
    for name, (count, value) in found.items():
        if math.isfinite(value):
            pairs.append((int(name), (int(count), float(value))))
    return dict(pairs)
