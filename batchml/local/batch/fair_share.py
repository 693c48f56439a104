"""Fair share: which share of a queue is served next. Pure.

Source: AWS Batch User Guide, "Fair-share scheduling policies"; API reference, FairsharePolicy. AWS
says which share is preferred (the one that has used least, by its weight), not by which sum; ours
is in docs/decisions/008-fair-share.md.
"""

from collections.abc import Iterable, Mapping
from math import exp
from typing import Any

from batchml.local.batch.state import Usage

MIN_WINDOW = 600  # seconds; what shareDecaySeconds = 0 stands for
DEFAULT_WEIGHT = 1.0
AHEAD = 1000  # ms


def weights_of(policy: Mapping[str, Any]) -> dict[str, float]:
    """The weight factors that a policy gives to shares: a lower one gets more."""
    return {
        entry["shareIdentifier"]: float(entry.get("weightFactor", DEFAULT_WEIGHT))
        for entry in policy.get("shareDistribution", ())
    }


def weight_of(weights: Mapping[str, float], share: str) -> float:
    """The weight factor of a share. Those that end with `*` do not overlap with any other."""
    if share in weights:
        return weights[share]
    starts = (f"{share[:length]}*" for length in range(len(share) + 1))
    return next((weights[start] for start in starts if start in weights), DEFAULT_WEIGHT)


def faded(usage: Usage, now: int, policy: Mapping[str, Any]) -> Usage:
    """The usage as of `now`: what was used before has faded, what runs has been added."""
    window = _window(policy)
    kept = exp(-max(0, now - usage.as_of) / window)
    return Usage(usage.faded * kept + usage.vcpus * window * (1 - kept), now, usage.vcpus)


def matters(usage: Usage, now: int, policy: Mapping[str, Any]) -> bool:
    """False once what a share has used makes no difference any more: less than 1 vCPU for 1 ms."""
    return usage.vcpus > 0 or faded(usage, now, policy).faded >= 1


def score(usage: Usage, now: int, policy: Mapping[str, Any], weight: float) -> float:
    """vCPUs that a share will have used on average of late, a little from now, times its weight.

    Looking ahead counts what runs already: without it the first of several shares that begin
    together would get all there is.
    """
    soon = now + AHEAD
    return faded(usage, soon, policy).faded / _window(policy) * weight


def _window(policy: Mapping[str, Any]) -> float:
    """Milliseconds in which past usage fades to 1/e."""
    return float(policy.get("shareDecaySeconds", 0) or MIN_WINDOW) * 1000


def next_share(
    waiting: Iterable[tuple[str, Any]],
    usage: Mapping[str, Usage],
    now: int,
    policy: Mapping[str, Any],
) -> str:
    """The share to serve next, of those `waiting`, each with the key of its first job.

    The key, priority and then age, decides between shares that have used the same.
    """
    none = Usage()
    weights = weights_of(policy)

    def place(item: tuple[str, Any]) -> tuple[float, Any]:
        share, key = item
        return score(usage.get(share, none), now, policy, weight_of(weights, share)), key

    return min(waiting, key=place)[0]


def reserved(policy: Mapping[str, Any], active: int) -> float:
    """The part of maxvCpus that is kept for shares that are not active yet."""
    return float((policy.get("computeReservation", 0) / 100) ** active) if active else 0.0
