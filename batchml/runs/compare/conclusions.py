"""What the figures of compared runs show: what a dearer run brings, and what a wait costs. Pure.

**Two runs.** A run that costs r times as much an hour pays if it is more than r times as fast: the
dollars for a step are the dollars for an hour times the hours for a step. "Price for performance"
may mean steps for a dollar or dollars for a step, which are different figures, so both are given.

**A wait for data.** A training that waits the share W of its time for data can be at most
1 / (1 - W) times as fast without the wait: Amdahl's law, where the wait is the part that vanishes.
Its CPUs prepare data for the share 1 - W of the training's speed; for the rest it needs
W / (1 - W) times as many CPUs in addition. That is the number of workers which is considered. They
pay from 1 + (their price) / (the run's price) times as fast.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from batchml.runs.compare.figures import DATA_WAIT, RunGroup

MIN_WAIT = 0.2  # the share of the time from which a wait for data is worth workers
BUSY = 0.9  # the share of its CPUs that a run uses if they limit it
MOST_WAIT = 0.99  # a longer wait allows no estimate


class WorkerOffer(Struct, frozen=True):
    """A CPU worker that could be added to a run, and its price; None if that is unknown."""

    vcpus: int
    hour: float | None = None  # US dollars


class Conclusion(Struct, frozen=True):
    """A sentence, and the figures in it by name."""

    text: str
    figures: dict[str, float | str]


def conclude(groups: Sequence[RunGroup], offers: Mapping[str, WorkerOffer]) -> list[Conclusion]:
    """The conclusions that the figures allow. `offers`: label of a group -> a worker."""
    first, *others = groups
    found = [_compare_prices(first, other) for other in others]
    for group in groups:
        offer = offers.get(group.label)
        found.append(_weigh_workers(group, offer) if offer else None)
    return [each for each in found if each is not None]


def wait_share(group: RunGroup) -> tuple[float, str] | None:
    """The share of its time that a training waits for data, and what shows it.

    That is the metric `data_wait`, in percent; without it, the share of the time that the GPU is
    idle, if the CPUs are busy. None if neither is known, or if the wait is short.
    """
    printed = group.value("metrics", DATA_WAIT, "last")
    gpu, cpu, cores = (group.value("use", name) for name in ("gpu", "cpu", "vcpus"))
    is_gpu = bool(group.first.run and group.first.run.gpus) or gpu is not None
    if printed is not None:
        share, words = printed / 100, f"{'the GPU' if is_gpu else 'the training'} waited"
    elif gpu is not None and cpu and cores and cpu >= BUSY * cores:
        share, words = 1 - gpu / 100, "the CPUs were busy and the GPU waited"
    else:
        return None
    return (share, words) if MIN_WAIT <= share <= MOST_WAIT else None


def _compare_prices(first: RunGroup, other: RunGroup) -> Conclusion | None:
    """Compare speed and price of two groups; None for other jobs, whose steps are others."""
    if first.first.name != other.first.name:
        return None
    faster = _ratio(first, other, "speed", "secondsPerStep")
    if faster is None:
        faster = _ratio(other, first, "speed", "epochsPerHour")
    dearer = _ratio(other, first, "cost", "usdPerHour")
    if faster is None or dearer is None:
        return None
    per_dollar = faster / dearer
    price, pays = f"for {dearer:.2f} times the price of an hour", ""
    if round(dearer, 2) == 1:
        price = "at the same price of an hour"
    elif dearer > 1:
        pays = f"; it pays from {dearer:.2f} times as fast"
    return Conclusion(
        f"{other.label}, compared with {first.label}: {faster:.2f} times as fast {price}: "
        f"{100 * (per_dollar - 1):+.0f} % steps for a dollar, "
        f"{100 * (1 / per_dollar - 1):+.0f} % dollars for a step{pays}.",
        {
            "run": other.label, "baseline": first.label, "timesAsFast": faster,
            "timesThePrice": dearer, "stepsPerDollarPercent": 100 * (per_dollar - 1),
            "dollarsPerStepPercent": 100 * (1 / per_dollar - 1),
        },
    )  # fmt: skip


def _ratio(above: RunGroup, below: RunGroup, *name: str) -> float | None:
    one, other = above.value(*name), below.value(*name)
    return one / other if one and other else None


def _weigh_workers(group: RunGroup, offer: WorkerOffer) -> Conclusion | None:
    known, cores = wait_share(group), group.value("use", "vcpus") or _vcpus(group)
    if known is None or not cores or offer.vcpus < 1:
        return None
    share, words = known
    most = 1 / (1 - share)
    count = math.ceil(share / (1 - share) * cores / offer.vcpus - 1e-9)
    workers = f"{count} CPU worker{'' if count == 1 else 's'} of {offer.vcpus} vCPU"
    figures: dict[str, float | str] = {
        "run": group.label, "waitPercent": 100 * share, "workers": count,
        "workerVcpus": offer.vcpus, "timesAsFastAtMost": most,
    }  # fmt: skip
    start = f"{group.label}: {words} {100 * share:.0f} % of the time for data"
    hour = group.value("cost", "usdPerHour")
    if not hour or offer.hour is None:
        text = f"{start}: with {workers} it could be up to {most:.2f} times as fast."
        return Conclusion(text, figures)
    pays = 1 + count * offer.hour / hour
    figures |= {"paysFrom": pays, "workersUsdPerHour": count * offer.hour}
    if pays >= most:
        end = f"would not pay: they pay from {pays:.2f}, and it can be {most:.2f}"
    else:
        end = f"would pay from {pays:.2f}; it can be up to {most:.2f}"
    return Conclusion(f"{start}: {workers} {end} times as fast.", figures)


def _vcpus(group: RunGroup) -> float:
    run = group.first.run
    return float(run.vcpus * max(1, run.nodes)) if run else 0.0
