"""Prices and instance types: from the cache file, or from AWS if the cache is too old."""

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.pricing.price_list import fetch_list_prices
from batchml.aws.pricing.prices import (
    CHOSEN_BY_BATCH,
    ClientFactory,
    InstanceType,
    InstanceTypes,
    Price,
    PriceTable,
    describe_failure,
    fetch_instance_types,
)
from batchml.aws.pricing.spot import fetch_spot_prices
from batchml.clock import Clock
from batchml.errors import BatchmlError

FRESH = 7 * 86_400  # seconds for which a price is taken from the cache
SPOT_FRESH = 3_600


class PricingSource(Struct, frozen=True):
    """A source of prices, for the items that begin with `prefix`."""

    prefix: str
    fresh: float  # seconds for which a price is taken from the cache
    fetch: Callable[
        [ClientFactory, str, Sequence[str], int], tuple[dict[str, Price], dict[str, str]]
    ]


SOURCES = (  # the first source that fits an item is used
    PricingSource("spot:", SPOT_FRESH, fetch_spot_prices),
    PricingSource("", FRESH, fetch_list_prices),
)


class _Offer(Struct, frozen=True):
    """The types that a region offers for a name (a type or a family), at the time `asked`."""

    asked: int
    types: tuple[InstanceType, ...]


class _Content(Struct, frozen=True):
    """The content of the cache file. The keys are REGION/ITEM and REGION/NAME."""

    version: int = 1
    prices: dict[str, Price] = {}
    instances: dict[str, _Offer] = {}


class Prices:
    """Asks AWS for prices and instance types, and caches the answers in a file.

    Failures are not raised: a missing price is in `unknown`, with the reason.
    """

    def __init__(self, session: ClientFactory, cache_path: Path, clock: Clock) -> None:
        self._session = session
        self._path = cache_path
        self._clock = clock
        self._kept = _load(cache_path)

    def instances(self, region: str, names: Iterable[str]) -> InstanceTypes:
        """The types of each name (a type or a family). Names that are not cached take one call."""
        wanted = list(dict.fromkeys(names))
        unknown = {
            name: "AWS Batch chooses the instance types itself"
            for name in wanted
            if name in CHOSEN_BY_BATCH
        }
        keys = {name: f"{region}/{name}" for name in wanted if name not in unknown}
        offers = self._kept.instances
        stale = [
            name
            for name, key in keys.items()
            if key not in offers or not self._is_fresh(offers[key].asked, FRESH)
        ]
        reason = self._refresh_instances(region, stale) if stale else ""
        offers = self._kept.instances
        types = {name: offers[key].types for name, key in keys.items() if key in offers}
        for name in keys:
            if not types.get(name):
                unknown[name] = reason or f"{region} has no such instance type"
        return InstanceTypes({name: found for name, found in types.items() if found}, unknown)

    def ask(self, region: str, items: Iterable[str]) -> PriceTable:
        """The price of each item: `"on-demand:TYPE"`, `"spot:TYPE"`, or a key of CHARGES.

        A price that is too old is still used if AWS does not answer, with a note.
        """
        wanted = list(dict.fromkeys(items))
        stale = [item for item in wanted if not self._has_fresh(region, item)]
        missing = self._refresh_prices(region, stale) if stale else {}
        found = {item: self._kept.prices.get(f"{region}/{item}") for item in wanted}
        prices = {item: price for item, price in found.items() if price is not None}
        unknown = {item: missing[item] for item, price in found.items() if price is None}
        return PriceTable(prices, unknown, _notes(prices, missing))

    def _is_fresh(self, asked: int, limit: float) -> bool:
        return 0 <= self._clock.now() - asked <= limit

    def _has_fresh(self, region: str, item: str) -> bool:
        price = self._kept.prices.get(f"{region}/{item}")
        return price is not None and self._is_fresh(price.asked, _source_of(item).fresh)

    def _refresh_instances(self, region: str, names: list[str]) -> str:
        """Fetch and cache the types of the names. Return the reason for a failure, or ""."""
        try:
            found = fetch_instance_types(self._session, region, names)
        except BatchmlError as error:
            return describe_failure("ec2:DescribeInstanceTypes", error)
        now, offers = int(self._clock.now()), dict(self._kept.instances)
        for name, types in found.items():
            if types:
                offers[f"{region}/{name}"] = _Offer(now, types)
            else:
                offers.pop(f"{region}/{name}", None)
        self._kept = replace(self._kept, instances=offers)
        self._save()
        return ""

    def _refresh_prices(self, region: str, items: Sequence[str]) -> dict[str, str]:
        """Fetch and cache prices. Return the reason for each missing price."""
        missing: dict[str, str] = {}
        for source in reversed(SOURCES):
            wanted = [item for item in items if _source_of(item) is source]
            if wanted:
                now = int(self._clock.now())
                found, why = source.fetch(self._session, region, wanted, now)
                missing |= why
                kept = {f"{region}/{item}": price for item, price in found.items()}
                self._kept = replace(self._kept, prices=self._kept.prices | kept)
        self._save()
        return missing

    def _save(self) -> None:
        """Replace the cache file, which only its owner can read. Failures are ignored."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".prices-")
        except OSError:
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(self._kept))
            os.replace(temporary, self._path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)


def _source_of(item: str) -> PricingSource:
    return next(source for source in SOURCES if item.startswith(source.prefix))


def _load(path: Path) -> _Content:
    """The content of the cache file; empty if it cannot be read."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Content)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return _Content()
    return kept if kept.version == 1 else _Content()


def _notes(prices: Mapping[str, Price], missing: Mapping[str, str]) -> tuple[str, ...]:
    """A note for each date of old prices and reason why AWS has no newer prices."""
    old = {(missing[item], price.date): None for item, price in prices.items() if item in missing}
    return tuple(f"Prices of {date} are used: {reason}." for reason, date in old)
