"""Prices over a span of time, from the price list and the spot history (pure)."""

import time
from collections.abc import Iterable, Mapping

from msgspec import Struct

from batchml.aws.pricing import Book, Price
from batchml.aws.spot import MAX_AGE, SpotHistory
from batchml.ops.cost import Candidate, Usd, disk_hour


class Rate(Struct, frozen=True):
    """What an hour of a whole host costs.

    `date` is the day on which AWS said so; for spot prices, the days of the span.
    """

    hour: Usd
    date: str
    source: str


class Rates(Struct, frozen=True):
    """The prices that bills are made with. On demand it is the list price of now."""

    book: Book
    spot: SpotHistory = SpotHistory()
    now: int = 0  # ms since the epoch

    def rate(self, kind: Candidate, zone: str, start: int, stop: int) -> Rate | str:
        """An hour of a host over a span in ms since the epoch; in words why that is not known.

        `zone` may be empty: then it is from the cheapest zone to the dearest.
        """
        found = self._spot(kind, zone, start, stop) if kind.spot else self._listed(kind)
        if isinstance(found, str):
            return found
        disk = disk_hour(kind.disk_gib, self.book)
        return Rate(found.hour + Usd(disk, disk), found.date, found.source)

    def _listed(self, kind: Candidate) -> Rate | str:
        price = self.book.prices.get(kind.item)
        if price is None:
            return self.book.unknown.get(kind.item, "nobody has asked AWS about it")
        return Rate(Usd(price.low, price.high), price.date, price.source)

    def _spot(self, kind: Candidate, zone: str, start: int, stop: int) -> Rate | str:
        means = self.spot.mean(kind.instance.name, zone, start, stop)
        if means is None:
            if self.now - start > MAX_AGE:
                return "AWS keeps spot prices for 90 days"
            where = f" in {zone}" if zone else ""
            return self.spot.why or f"AWS has no spot price for it{where} then"
        days = " to ".join(dict.fromkeys((_day(start), _day(stop))))
        return Rate(Usd(*means), days, "EC2 spot history")


def said(rates: Iterable[Rate]) -> list[str]:
    """Where prices are from and of which days, in words: one for each source."""
    days: dict[str, list[str]] = {}
    for rate in rates:
        if rate.date:
            days.setdefault(rate.source, []).extend(rate.date.split(" to "))
        else:
            days.setdefault(rate.source, [])
    return [_said(source, sorted(found)) for source, found in days.items()]


def flat(usd_per_hour: Price, item: str) -> Rates:
    """The rates of one machine with one price."""
    prices: Mapping[str, Price] = {item: usd_per_hour}
    return Rates(Book(prices))


def _said(source: str, days: list[str]) -> str:
    return f"{source} of {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else source


def _day(ms: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(ms / 1000))
