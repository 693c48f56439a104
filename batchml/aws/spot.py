"""What spot hosts cost over a span of the past: DescribeSpotPriceHistory, and its mean (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from msgspec import Struct

from batchml.aws.errors import translated
from batchml.aws.pricing import Clients, number, why_not
from batchml.errors import BatchmlError

MAX_AGE = 90 * 86_400_000  # ms for which AWS keeps the history: DescribeSpotPriceHistory
_TRIES = 2

# (type, zone) -> when a price began, ms since the epoch, and dollars an hour; in order of time
Changes = Mapping[tuple[str, str], Sequence[tuple[int, Decimal]]]


class SpotHistory(Struct, frozen=True):
    """What AWS said about some types over a span; `why` when it said nothing."""

    changes: Changes = {}
    why: str = ""

    def mean(self, name: str, zone: str, start: int, stop: int) -> tuple[Decimal, Decimal] | None:
        """Dollars an hour over a span, in the cheapest and in the dearest zone that it may be."""
        means = [
            found
            for (each, where), changes in self.changes.items()
            if each == name and zone in ("", where)
            for found in [mean(changes, start, stop)]
            if found is not None
        ]
        return (min(means), max(means)) if means else None


def mean(changes: Sequence[tuple[int, Decimal]], start: int, stop: int) -> Decimal | None:
    """The mean price over a span, by time; the price at `start` for a span of no length.

    A price holds from its time to the next one's. None when it is not known at `start`.
    """
    held = [change for change in changes if change[0] <= start]
    if not held:
        return None
    if stop <= start:
        return held[-1][1]
    steps = [(start, held[-1][1]), *(change for change in changes if start < change[0] < stop)]
    ends = [at for at, _ in steps[1:]] + [stop]
    total = sum(
        ((end - at) * usd for (at, usd), end in zip(steps, ends, strict=True)), start=Decimal(0)
    )
    return total / (stop - start)


def spot_history(
    session: Clients, names: Iterable[str], zones: Iterable[str], start: int, stop: int
) -> SpotHistory:
    """Ask for the prices of Linux spot hosts from `start` to `stop`, in ms since the epoch.

    `zones`: those that matter; empty for all. AWS also sends what held at `start`. It raises
    nothing: what cannot be had is unknown, with the reason.
    """
    types, places = sorted(set(names)), sorted(set(zones))
    if not types:
        return SpotHistory()
    request = {
        "InstanceTypes": types,
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": datetime.fromtimestamp(start / 1000, UTC),
        "EndTime": datetime.fromtimestamp(stop / 1000, UTC),
    }
    if places:
        request["Filters"] = [{"Name": "availability-zone", "Values": places}]
    found: dict[tuple[str, str], dict[int, Decimal]] = {}
    try:
        with translated("ec2:DescribeSpotPriceHistory"):
            client = session.client("ec2", attempts=_TRIES)
            pages = client.get_paginator("describe_spot_price_history").paginate(**request)
            for page in pages:
                for entry in page["SpotPriceHistory"]:
                    usd = number(entry["SpotPrice"])
                    if usd:
                        at = int(entry["Timestamp"].timestamp() * 1000)
                        place = entry["InstanceType"], entry["AvailabilityZone"]
                        found.setdefault(place, {})[at] = usd
    except BatchmlError as error:
        return SpotHistory(why=why_not("ec2:DescribeSpotPriceHistory", error))
    return SpotHistory({place: sorted(changes.items()) for place, changes in found.items()})
