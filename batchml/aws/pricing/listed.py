"""Prices without AWS: the dated price list that ships with batchml, `list_prices.json`.

It has list prices of Linux hosts on demand in some regions, and of what an environment costs
beside them. The file names its sources. Nothing is asked of the network.
"""

from calendar import timegm
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from time import strptime

import msgspec
from msgspec import Struct

from batchml.aws.pricing.price_list import find_charge
from batchml.aws.pricing.prices import (
    CHOSEN_BY_BATCH,
    InstanceType,
    InstanceTypes,
    Price,
    PriceTable,
)
from batchml.errors import did_you_mean

LISTED = "price list of batchml"  # `Price.source`
_PATH = Path(__file__).with_name("list_prices.json")


class _Family(Struct, frozen=True):
    arch: str
    sizes: dict[str, tuple[int, int, int]]  # vCPUs, memory in MiB, NVIDIA GPUs


class _Region(Struct, frozen=True):
    charges: dict[str, Decimal]
    types: dict[str, dict[str, Decimal]]  # family -> size -> dollars an hour


class _List(Struct, frozen=True):
    """The content of the file. `everywhere`: charges that are the same in all regions."""

    date: str
    sources: dict[str, str]
    everywhere: dict[str, Decimal]
    families: dict[str, _Family]
    regions: dict[str, _Region]


class ListedPrices:
    """The price list that comes with batchml, with the methods of `cache.Prices`."""

    @cached_property
    def _list(self) -> _List:
        return msgspec.json.decode(_PATH.read_bytes(), type=_List)

    @property
    def date(self) -> str:
        return self._list.date

    def instances(self, region: str, names: Iterable[str]) -> InstanceTypes:
        """The types of each name (a type or a family) that the list has for the region."""
        types, unknown = dict[str, tuple[InstanceType, ...]](), dict[str, str]()
        for name in dict.fromkeys(names):
            found = self._types(region, name)
            if found:
                types[name] = found
            elif name in CHOSEN_BY_BATCH:
                unknown[name] = "AWS Batch chooses the instance types itself"
            else:
                unknown[name] = self._why_unknown(region)
        return InstanceTypes(types, unknown)

    def ask(self, region: str, items: Iterable[str]) -> PriceTable:
        """The price of each item, as `cache.Prices.ask`.

        Spot hosts have their on-demand price: AWS Batch pays at most that (`bidPercentage`).
        """
        prices, unknown = {}, {}
        for item in dict.fromkeys(items):
            usd = self._usd(region, item)
            if usd is None:
                unknown[item] = self._why_unknown(region)
            else:
                asked = timegm(strptime(self.date, "%Y-%m-%d"))
                per = "hour" if ":" in item else find_charge(item).per
                prices[item] = Price(usd, usd, per, asked, self.date, LISTED)
        notes = [f"These list prices of {self.date} come with batchml; today's prices may differ."]
        if any(item.startswith("spot:") for item in prices):
            notes.append(
                "Spot hosts are counted at their on-demand price, which is the most that they cost."
            )
        return PriceTable(prices, unknown, tuple(notes) if prices else ())

    def _types(self, region: str, name: str) -> tuple[InstanceType, ...]:
        """The types of a name; none for a family if the region's list lacks some of its sizes."""
        listed = self._listed(region, name.partition(".")[0])
        found = self.sizes(name)
        has_all = all(each.name.partition(".")[2] in listed for each in found)
        return found if has_all else ()

    def sizes(self, name: str) -> tuple[InstanceType, ...]:
        """The type of a name, or all types of a family, whether or not a region has prices."""
        family, _, size = name.partition(".")
        about = self._list.families.get(family)
        if about is None:
            return ()
        return tuple(
            InstanceType(f"{family}.{each}", *numbers, about.arch)
            for each, numbers in about.sizes.items()
            if size in ("", each)
        )

    def _listed(self, region: str, family: str) -> Mapping[str, Decimal]:
        there = self._list.regions.get(region)
        return there.types.get(family, {}) if there else {}

    def _usd(self, region: str, item: str) -> Decimal | None:
        _, is_host, name = item.partition(":")
        if is_host:
            family, _, size = name.partition(".")
            return self._listed(region, family).get(size)
        there = self._list.regions.get(region)
        return (there.charges.get(item) if there else None) or self._list.everywhere.get(item)

    def _why_unknown(self, region: str) -> str:
        known = self._list.regions
        if region in known:
            return f"batchml's price list does not have it for {region}"
        hint = did_you_mean(region, known)
        return f"batchml's price list has no prices for {region}.{hint}".rstrip(".")
