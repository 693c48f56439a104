"""Spot prices: the present prices, and the history with its mean."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.aws.pricing.prices import (
    ClientFactory,
    Price,
    describe_failure,
    paginate,
    parse_decimal,
)
from batchml.errors import BatchmlError

MAX_AGE = 90 * 86_400_000  # ms for which AWS keeps the history: DescribeSpotPriceHistory

# (type, zone) -> the changes in order of time: ms since the epoch, and the new dollars an hour
Changes = Mapping[tuple[str, str], Sequence[tuple[int, Decimal]]]


# --- Present prices -------------------------------------------------------------------------------


def fetch_spot_prices(
    session: ClientFactory, region: str, items: Sequence[str], now: int
) -> tuple[dict[str, Price], dict[str, str]]:
    """The prices of items `spot:TYPE`, and the reason for each missing price.

    A price ranges from the cheapest zone to the dearest. For a history that begins `now`, AWS
    returns the last change before, which has the present price.
    """
    request = {
        "InstanceTypes": [item.partition(":")[2] for item in items],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": now,
        "EndTime": now,
    }
    newest: dict[tuple[str, str], tuple[float, Decimal]] = {}
    try:
        with translate_errors("ec2:DescribeSpotPriceHistory"):
            for page in _pages(session, request):
                for entry in page["SpotPriceHistory"]:
                    key = (f"spot:{entry['InstanceType']}", entry["AvailabilityZone"])
                    at, usd = entry["Timestamp"].timestamp(), parse_decimal(entry["SpotPrice"])
                    if usd and at <= now and at >= newest.get(key, (0.0, usd))[0]:
                        newest[key] = (at, usd)
    except BatchmlError as error:
        return {}, dict.fromkeys(items, describe_failure("ec2:DescribeSpotPriceHistory", error))
    prices, missing = {}, {}
    for item in items:
        zones = [found for (each, _), found in newest.items() if each == item]
        if not zones:
            missing[item] = f"AWS has no spot price for it in {region}"
            continue
        since = time.strftime("%Y-%m-%d", time.gmtime(max(at for at, _ in zones)))
        usds = [usd for _, usd in zones]
        prices[item] = Price(min(usds), max(usds), "hour", now, since, "EC2 spot")
    return prices, missing


def _pages(session: ClientFactory, request: Mapping[str, Any]) -> Any:
    return paginate(session, "ec2", "describe_spot_price_history", request, has_page_size=False)


# --- History --------------------------------------------------------------------------------------


class SpotHistory(Struct, frozen=True):
    """The spot prices of some types over a span of time. `why` is the reason if there are none."""

    changes: Changes = {}
    why: str = ""

    def mean(self, name: str, zone: str, start: int, stop: int) -> tuple[Decimal, Decimal] | None:
        """The mean dollars an hour over a span, in the cheapest and in the dearest zone.

        `zone`: one zone, or "" for all zones.
        """
        means = [
            found
            for (each, where), changes in self.changes.items()
            if each == name and zone in ("", where)
            for found in [mean_price(changes, start, stop)]
            if found is not None
        ]
        return (min(means), max(means)) if means else None


def mean_price(changes: Sequence[tuple[int, Decimal]], start: int, stop: int) -> Decimal | None:
    """The mean price over a span, weighted by time; for an empty span, the price at `start`.

    A price holds until the next change. None if the price at `start` is unknown.
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


def fetch_spot_history(
    session: ClientFactory, names: Iterable[str], zones: Iterable[str], start: int, stop: int
) -> SpotHistory:
    """Fetch the prices of Linux spot hosts from `start` to `stop`, in ms since the epoch.

    Without `zones`, all zones are fetched. AWS adds the price that held at `start`. A failure is
    returned as `why` instead of being raised.
    """
    types, wanted = sorted(set(names)), sorted(set(zones))
    if not types:
        return SpotHistory()
    request = {
        "InstanceTypes": types,
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": datetime.fromtimestamp(start / 1000, UTC),
        "EndTime": datetime.fromtimestamp(stop / 1000, UTC),
    }
    if wanted:
        request["Filters"] = [{"Name": "availability-zone", "Values": wanted}]
    found: dict[tuple[str, str], dict[int, Decimal]] = {}
    try:
        with translate_errors("ec2:DescribeSpotPriceHistory"):
            for page in _pages(session, request):
                for entry in page["SpotPriceHistory"]:
                    usd = parse_decimal(entry["SpotPrice"])
                    if usd:
                        at = int(entry["Timestamp"].timestamp() * 1000)
                        key = entry["InstanceType"], entry["AvailabilityZone"]
                        found.setdefault(key, {})[at] = usd
    except BatchmlError as error:
        return SpotHistory(why=describe_failure("ec2:DescribeSpotPriceHistory", error))
    return SpotHistory({key: sorted(changes.items()) for key, changes in found.items()})
