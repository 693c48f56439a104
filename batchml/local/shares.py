"""Fair share: which share of a queue is served next. Pure.

Source: AWS Batch User Guide, "Fair-share scheduling policies"; API reference, FairsharePolicy. AWS
says which share is preferred (the one that has used least, by its weight), not by which sum; ours
is in docs/decisions/008-fair-share.md.
"""

from collections.abc import Iterable, Mapping
from math import exp
from typing import Any

from batchml.local.state import Usage

MIN_WINDOW = 600  # seconds; what shareDecaySeconds = 0 stands for
DEFAULT_WEIGHT = 1.0
AHEAD = 0.1  # of the window


def weight_of(policy: Mapping[str, Any], share: str) -> float:
    """The weight factor of a share: a lower one gets more. Entries do not overlap."""
    for entry in policy.get("shareDistribution", ()):
        name = entry["shareIdentifier"]
        if name == share or (name.endswith("*") and share.startswith(name[:-1])):
            return float(entry.get("weightFactor", DEFAULT_WEIGHT))
    return DEFAULT_WEIGHT


def faded(usage: Usage, now: int, policy: Mapping[str, Any]) -> Usage:
    """The usage as of `now`: what was used before has faded, what runs has been added."""
    window = _window(policy)
    kept = exp(-max(0, now - usage.as_of) / window)
    return Usage(usage.faded * kept + usage.vcpus * window * (1 - kept), now, usage.vcpus)


def score(usage: Usage, now: int, policy: Mapping[str, Any], share: str) -> float:
    """vCPUs that a share will have used on average of late, a little from now, times its weight.

    Looking ahead counts what runs already: without it the first of several shares that begin
    together would get all there is.
    """
    soon = now + int(AHEAD * _window(policy))
    return faded(usage, soon, policy).faded / _window(policy) * weight_of(policy, share)


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
    return min(
        waiting, key=lambda item: (score(usage.get(item[0], none), now, policy, item[0]), item[1])
    )[0]


def reserved(policy: Mapping[str, Any], active: int) -> float:
    """The part of maxvCpus that is kept for shares that are not active yet."""
    return float((policy.get("computeReservation", 0) / 100) ** active) if active else 0.0
