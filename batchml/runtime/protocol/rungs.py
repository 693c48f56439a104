"""Early stopping: the rungs at which trials are compared, their ranking, and a trial's decision.

A rung is a step at which trials are compared. Source: Li et al., "A System for Massively Parallel
Hyperparameter Tuning" (ASHA), MLSys 2020.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.protocol.sweep_store import ASHA, MEDIAN, TrialContract, rung_prefix

LEAST = 27  # by default the first rung is at 1/27 of a full training
_SIGN = 1 << 63


def default_min(most: int) -> int:
    """The default first rung of a full training of `most` steps."""
    return max(1, -(-most // LEAST))


def rung_steps(least: int, most: int, eta: int) -> Tuple[int, ...]:
    """least, least * eta, ...: the steps below `most`, where a training ends anyway."""
    steps: List[int] = []
    step = least
    while 0 < step < most:
        steps.append(step)
        if eta < 2:
            break
        step *= eta
    return tuple(steps)


def rung_passed(rungs: Sequence[int], before: int, step: int) -> Optional[int]:
    """The rung, counted from 0, that a trial has reached between the steps `before` and `step`.

    A trial that does not report every step may pass several: the last of them counts. None if it
    passed none.
    """
    found = None
    for number, rung in enumerate(rungs):
        if before < rung <= step:
            found = number
    return found


def rank(loss: float) -> str:
    """16 hexadecimal digits that sort like the number.

    They are the bits of an IEEE 754 double with the sign bit inverted; of a negative number all
    bits are inverted. NaN sorts last.
    """
    if loss != loss:
        return "f" * 16
    (bits,) = struct.unpack(">Q", struct.pack(">d", loss + 0.0))  # -0.0 + 0.0 is 0.0
    return f"{bits ^ (2 * _SIGN - 1) if bits & _SIGN else bits | _SIGN:016x}"


def mark_key(rung: int, loss: float, trial: int) -> str:
    """The key which marks that a trial finished a rung, counted from 0, with this loss."""
    return f"{rung_prefix(rung)}{rank(loss)}-{trial:06d}"


def ranked(keys: Iterable[str]) -> List[int]:
    """The trials in the marks of one rung, best first; trials with equal losses by number.

    A trial with two marks, because an attempt was repeated, counts with its better result.
    """
    found: List[int] = []
    seen = set()
    for key in sorted(keys):
        number = key.rpartition("-")[2]
        if number.isdigit() and int(number) not in seen:
            seen.add(int(number))
            found.append(int(number))
    return found


# --- The pruner's decision ------------------------------------------------------------------------
# A trial decides by its own values and by the cutoffs that the controller has published. Decisions
# are recorded with the values on which they are based.


# The median rule begins after this part of a training, if so many other results are known.
# Source: Golovin et al., "Google Vizier", KDD 2017; the part is ours (the first rungs of three).
MEDIAN_AFTER = 4 / 27
MEDIAN_OTHERS = 5


class Cutoffs(NamedTuple):
    """`cutoffs.json`: the number of known results, and the value that a trial must reach.

    `rungs` by the number of the rung, from 0; `medians` by step. Values are in the metric's unit.
    """

    version: int
    rungs: Dict[int, Tuple[int, float]]
    medians: Dict[int, Tuple[int, float]]

    def to_json(self) -> bytes:
        return json.dumps(self._asdict(), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: Optional[bytes]) -> Cutoffs:
        """Read `cutoffs.json`. A missing or invalid file means no cutoffs, version 0."""
        try:
            found = json.loads(data or b"{}")
            return cls(
                int(found.get("version", 0)),
                _table(found.get("rungs", {})),
                _table(found.get("medians", {})),
            )
        except (ValueError, TypeError, AttributeError):
            return cls(0, {}, {})


class PrunerDecision(NamedTuple):
    """Whether a trial goes on. The fields are in the order of a message's `decisions`."""

    step: int
    value: float
    cutoff: Optional[float]  # None: too few results were known
    version: int
    goes_on: bool


def decide(
    contract: TrialContract,
    cutoffs: Cutoffs,
    step: int,
    value: float,
    best: float,
    rung: Optional[int],
) -> Optional[PrunerDecision]:
    """What a trial decides at `step`, at which it has reached `rung` (from 0) or no rung.

    None if nothing is to be decided. `best` is its best value so far, including this one.
    """
    if not needs_cutoffs(contract, step, rung):
        return None
    if contract.method == ASHA and rung is not None:
        count, cutoff = cutoffs.rungs.get(rung, (0, math.nan))
        if count < contract.eta:
            return PrunerDecision(step, value, None, cutoffs.version, True)
        is_good = _is_as_good(contract, value, cutoff)
        return PrunerDecision(step, value, cutoff, cutoffs.version, is_good)
    count, cutoff = cutoffs.medians.get(step, (0, math.nan))
    if count < MEDIAN_OTHERS:
        return None
    return PrunerDecision(step, best, cutoff, cutoffs.version, _is_as_good(contract, best, cutoff))


def needs_cutoffs(contract: TrialContract, step: int, rung: Optional[int]) -> bool:
    """Whether `decide` needs the cutoffs."""
    if contract.method == ASHA:  # with `resume` a trial ends at each rung, whatever its value
        return not contract.resume and rung is not None
    return contract.method == MEDIAN and step >= MEDIAN_AFTER * contract.max


def best_of(contract: TrialContract, one: Optional[float], other: float) -> float:
    """The better of two values of the first goal."""
    if one is None or contract.loss(other) < contract.loss(one):
        return other
    return one


def _is_as_good(contract: TrialContract, value: float, cutoff: float) -> bool:
    return contract.loss(value) <= contract.loss(cutoff)


def _table(found: Any) -> Dict[int, Tuple[int, float]]:
    pairs: List[Tuple[int, Tuple[int, float]]] = []
    for name, (count, value) in found.items():
        if math.isfinite(value):
            pairs.append((int(name), (int(count), float(value))))
    return dict(pairs)
