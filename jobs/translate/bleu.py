"""BLEU of a test set by sacrebleu, from counts that can be added across processes."""

from __future__ import annotations

from collections.abc import Sequence

from sacrebleu.metrics import BLEU

ORDER = 4  # the most words of an n-gram
FIELDS = 2 * ORDER + 4  # of `counts`

_METRIC = BLEU(effective_order=True)


def counts(found: str, wanted: str) -> list[int]:
    """Count, for one line, right and all n-grams of 1 to 4 words, words of both texts, equal lines,
    and lines.
    """
    score = _METRIC.sentence_score(found, [wanted])
    agree = int(found.split() == wanted.split())
    return [*score.counts, *score.totals, score.sys_len, score.ref_len, agree, 1]


def bleu(counted: Sequence[float]) -> float:
    """Compute BLEU, 0 to 100, from the sum of the `counts` of all lines."""
    whole = [int(number) for number in counted]
    right, every = whole[:ORDER], whole[ORDER : 2 * ORDER]
    found, wanted = whole[2 * ORDER : 2 * ORDER + 2]
    return float(BLEU.compute_bleu(right, every, found, wanted, effective_order=True).score)


def exact(counted: Sequence[float]) -> float:
    """Compute the fraction of lines with exactly the right words."""
    return counted[-2] / counted[-1] if counted[-1] else 0.0
