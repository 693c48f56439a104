"""Rungs: the steps at which trials are compared, and how those of one rung are ranked.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (ASHA), MLSys 2020.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.protocol.sweep_store import ASHA, MEDIAN, Course, rung_prefix

LEAST = 27  # by default the first rung is at this part of a full training
_SIGN = 1 << 63


def default_min(most: int) -> int:
    """The first rung, where the file does not say it, of a full training of `most` steps."""
    return max(1, -(-most // LEAST))


def rung_steps(least: int, most: int, eta: int) -> Tuple[int, ...]:
    """least, least * eta, ...: those below `most`, where a training ends anyway."""
    steps: List[int] = []
    step = least
    while 0 < step < most:
        steps.append(step)
        if eta < 2:
            break
        step *= eta
    return tuple(steps)


def rung_passed(rungs: Sequence[int], before: int, step: int) -> Optional[int]:
    """Which rung, counted from 0, a trial has come to by going from `before` to `step`.

    A trial that reports every other step may pass over some: it is judged at the deepest of them,
    once. None where there is none between.
    """
    found = None
    for number, rung in enumerate(rungs):
        if before < rung <= step:
            found = number
    return found


def rank(loss: float) -> str:
    """16 hexadecimal digits that sort as the number does: the bits of an IEEE 754 double, with the
    sign bit turned, and of negative numbers all bits turned. NaN sorts behind everything."""
    if loss != loss:
        return "f" * 16
    (bits,) = struct.unpack(">Q", struct.pack(">d", loss + 0.0))  # -0.0 + 0.0 is 0.0
    return f"{bits ^ (2 * _SIGN - 1) if bits & _SIGN else bits | _SIGN:016x}"


def mark_key(rung: int, loss: float, trial: int) -> str:
    """The key whose presence says that a trial finished a rung, counted from 0, with this loss."""
    return f"{rung_prefix(rung)}{rank(loss)}-{trial:06d}"


def ranked(keys: Iterable[str]) -> List[int]:
    """The trials in the marks of one rung, best first; equal ones by their number.

    One that is there twice, because an attempt was repeated, counts with its better result.
    """
    found: List[int] = []
    seen = set()
    for key in sorted(keys):
        number = key.rpartition("-")[2]
        if number.isdigit() and int(number) not in seen:
            seen.add(int(number))
            found.append(int(number))
    return found


# --- the pruner's decision ------------------------------------------------------------------------
# Whether a trial goes on: it looks at its own values and at the cut-offs that were published.
#
# Pure: the decisions are recorded with what they were made by, so that they can be looked at later.


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
