"""Fair-share scheduling: the share of a queue whose job starts next. Pure.

Source: AWS Batch User Guide, "Fair-share scheduling policies"; API reference, FairsharePolicy. AWS
prefers the share with the least weighted usage, but does not document the formula; this one is
described in docs/decisions/008-fair-share.md.
"""

from collections.abc import Iterable, Mapping
from math import exp
from typing import Any

from batchml.local.batch.state import ShareUsage

MIN_WINDOW = 600  # seconds; used for shareDecaySeconds = 0
DEFAULT_WEIGHT = 1.0
AHEAD = 1000  # ms that `score` looks ahead


def weights_of(policy: Mapping[str, Any]) -> dict[str, float]:
    """The weight factor of each share in a policy: a lower factor gets more."""
    return {
        entry["shareIdentifier"]: float(entry.get("weightFactor", DEFAULT_WEIGHT))
        for entry in policy.get("shareDistribution", ())
    }


def weight_of(weights: Mapping[str, float], share: str) -> float:
    """The weight factor of a share. At most one entry applies: entries that end with `*` are
    prefixes, and do not overlap with other entries.
    """
    if share in weights or not weights:
        return weights.get(share, DEFAULT_WEIGHT)
    starts = (f"{share[:length]}*" for length in range(len(share) + 1))
    return next((weights[start] for start in starts if start in weights), DEFAULT_WEIGHT)


def decay(usage: ShareUsage, now: int, policy: Mapping[str, Any]) -> ShareUsage:
    """The usage as of `now`: past usage has decayed, and running vCPUs are added."""
    window = _window(policy)
    left = exp(-max(0, now - usage.as_of) / window)
    return ShareUsage(usage.decayed * left + usage.vcpus * window * (1 - left), now, usage.vcpus)


def is_significant(usage: ShareUsage, now: int, policy: Mapping[str, Any]) -> bool:
    """False once a share's past usage is negligible: less than 1 vCPU for 1 ms."""
    return usage.vcpus > 0 or decay(usage, now, policy).decayed >= 1


def score(usage: ShareUsage, now: int, policy: Mapping[str, Any], weight: float) -> float:
    """The weighted average of vCPUs that a share will have used shortly after now.

    Looking ahead counts jobs that have just started: without it the first of several new shares
    would get all capacity.
    """
    soon = now + AHEAD
    return decay(usage, soon, policy).decayed / _window(policy) * weight


def _window(policy: Mapping[str, Any]) -> float:
    """Milliseconds in which past usage decays to 1/e."""
    return float(policy.get("shareDecaySeconds", 0) or MIN_WINDOW) * 1000


def next_share(
    waiting: Iterable[tuple[str, Any]],
    usage: Mapping[str, ShareUsage],
    now: int,
    policy: Mapping[str, Any],
) -> str:
    """The share to serve next, from the `waiting` shares with the keys of their first jobs.

    The key, priority and then age, decides between shares with equal usage.
    """
    none = ShareUsage()
    weights = weights_of(policy)

    def rank(item: tuple[str, Any]) -> tuple[float, Any]:
        share, key = item
        return score(usage.get(share, none), now, policy, weight_of(weights, share)), key

    return min(waiting, key=rank)[0]


def reserved_fraction(policy: Mapping[str, Any], active: int) -> float:
    """The fraction of maxvCpus that is reserved for shares that are not active yet."""
    return float((policy.get("computeReservation", 0) / 100) ** active) if active else 0.0
