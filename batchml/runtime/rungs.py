"""Rungs: the steps at which trials are compared, and how those of one rung are ranked.

Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning" (ASHA), MLSys 2020.
"""

from __future__ import annotations

import struct
from typing import Iterable, List, Optional, Sequence, Tuple

from batchml.runtime.board import rung_prefix

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
