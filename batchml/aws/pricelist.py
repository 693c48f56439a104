"""AWS's Price List: what a charge is called there, and which price of an answer is the one (pure).

AWS publishes hundreds of products a service. A charge here is one of them, told by its usage type
and a few attributes. When two products that differ in price fit, none is taken.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import product as combinations
from typing import Any

from msgspec import Struct

MAX_VALUE = 1024  # characters of one filter's value; Price List API, Filter

# A usage type begins with its region's code, or none: USE1-, EU-, and for keys us-east-1-.
_REGION_CODE = r"(?:[A-Z]{2,4}[0-9]?-|[a-z]{2}(?:-[a-z]+)+-[0-9]-)?"


class Charge(Struct, frozen=True):
    """One thing that AWS asks money for. `field` and `value` find it, the rest tells it apart."""

    words: str
    service: str
    field: str
    value: str
    usage: str  # the usage type without its region's code; any when empty
    unit: str  # how the Price List counts it
    per: str  # the same in words: "hour", "GB", "month" or "GB-month"
    attributes: Mapping[str, str] = {}  # patterns


CHARGES = {
    "nat-hour": Charge(
        "NAT gateway", "AmazonEC2", "productFamily", "NAT Gateway", "NatGateway-Hours",
        "Hrs", "hour",
    ),
    "nat-gb": Charge(
        "NAT gateway traffic", "AmazonEC2", "productFamily", "NAT Gateway", "NatGateway-Bytes",
        "GB", "GB",
    ),
    "gp3-gb-month": Charge(
        "gp3 disk", "AmazonEC2", "productFamily", "Storage", "EBS:VolumeUsage.gp3", "GB-Mo",
        "GB-month", {"volumeApiName": "gp3"},
    ),
    "ipv4-hour": Charge(
        "public IPv4 address", "AmazonVPC", "group", "VPCPublicIPv4Address",
        "PublicIPv4:InUseAddress", "Hrs", "hour",
    ),
    "endpoint-hour": Charge(
        "interface VPC endpoint", "AmazonVPC", "productFamily", "VpcEndpoint", "VpcEndpoint-Hours",
        "Hrs", "hour",
    ),
    "efs-gb-month": Charge(
        "EFS", "AmazonEFS", "storageClass", "General Purpose", "TimedStorage-ByteHrs", "GB-Mo",
        "GB-month",
    ),
    "kms-key-month": Charge(
        "KMS key", "awskms", "productFamily", "Encryption Key", "KMS-Keys", "", "month"
    ),
    "logs-gb": Charge(
        "log ingestion", "AmazonCloudWatch", "productFamily", "Data Payload",
        "DataProcessing-Bytes", "GB", "GB",
    ),
} | {
    # PERSISTENT_1 has other throughputs, so the throughput tells the two apart.
    f"fsx-{speed}-gb-month": Charge(
        f"FSx for Lustre, {speed} MB/s for each TiB", "AmazonFSx", "fileSystemType", "Lustre", "",
        "GB-Mo", "GB-month",
        {"storageType": "SSD", "throughputCapacity": rf"{speed}(?![0-9]).*"},
    )
    for speed in (125, 250, 500, 1000)
}  # fmt: skip

_INSTANCE = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}


def charge_of(item: str) -> Charge:
    """The charge behind `"nat-hour"`, `"on-demand:g5.xlarge"` and the like."""
    kind, _, name = item.partition(":")
    if kind != "on-demand":
        return CHARGES[item]
    return Charge(
        f"{name} on demand", "AmazonEC2", "instanceType", name, f"BoxUsage:{name}", "Hrs", "hour"
    )


class Query(Struct, frozen=True):
    """One question to GetProducts. `items` are what the answer is looked through for."""

    service: str
    filters: Mapping[str, tuple[str, ...]]
    items: tuple[str, ...]

    def request(self) -> dict[str, Any]:
        """The arguments of GetProducts; a field with several values becomes an ANY_OF."""
        filters = [
            {
                "Type": "ANY_OF" if len(values) > 1 else "TERM_MATCH",
                "Field": field,
                "Value": ",".join(values),
            }
            for field, values in self.filters.items()
        ]
        return {"ServiceCode": self.service, "FormatVersion": "aws_v1", "Filters": filters}

    def one_by_one(self) -> list["Query"]:
        """The same question without ANY_OF; nothing when there is none in it."""
        if all(len(values) == 1 for values in self.filters.values()):
            return []
        chosen = combinations(*self.filters.values())
        return [
            Query(
                self.service,
                {field: (value,) for field, value in zip(self.filters, values, strict=True)},
                self.items,
            )
            for values in chosen
        ]


def queries(region: str, items: Iterable[str]) -> list[Query]:
    """As few questions as answer for all the items: one for each service and kind of filter."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for item in dict.fromkeys(items):
        charge = charge_of(item)
        values = groups.setdefault((charge.service, charge.field), {})
        values.setdefault(charge.value, []).append(item)
    found = []
    for (service, field), by_value in groups.items():
        extra = _INSTANCE if field == "instanceType" else {}
        always = {name: (value,) for name, value in {**extra, "regionCode": region}.items()}
        for chosen in _packed(list(by_value)):
            asked = tuple(item for value in chosen for item in by_value[value])
            found.append(Query(service, {field: chosen, **always}, asked))
    return found


def _packed(values: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The values in groups that fit one filter, commas included."""
    group: list[str] = []
    for value in values:
        if group and len(",".join([*group, value])) > MAX_VALUE:
            yield tuple(group)
            group = []
        group.append(value)
    yield tuple(group)


def price_in(charge: Charge, price_list: Iterable[str], now: str) -> tuple[Decimal, str] | str:
    """US dollars and the day since when, or in words why there is no price.

    `price_list` has products as JSON texts; `now` is like `2026-11-21T19:02:57Z`.
    """
    fitting = [
        price
        for text in price_list
        if _fits(charge, product := _read(text))
        for price in [_in_force(product, charge.unit, now)]
        if price is not None
    ]
    if len({usd for usd, _ in fitting}) > 1:
        amounts = ", ".join(sorted(f"${usd.normalize():f}" for usd, _ in fitting))
        return f"AWS lists several prices ({amounts}), and which one holds is not clear"
    return fitting[0] if fitting else "AWS lists no price in US dollars for it there"


def _read(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _inner(value: Any, *keys: str) -> Mapping[str, Any]:
    """What is at a path of keys; an empty mapping where the path breaks off."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _fits(charge: Charge, product: Mapping[str, Any]) -> bool:
    found = _inner(product, "product", "attributes")
    usage = _REGION_CODE + re.escape(charge.usage)
    if charge.usage and not re.fullmatch(usage, str(found.get("usagetype", ""))):
        return False
    # Capacity blocks and reservations are products of the same usage type.
    if found.get("marketoption", "OnDemand") != "OnDemand":
        return False
    return all(
        re.fullmatch(pattern, str(found.get(name, "")))
        for name, pattern in charge.attributes.items()
    )


def _in_force(product: Mapping[str, Any], unit: str, now: str) -> tuple[Decimal, str] | None:
    """The price of the newest term that has begun: its first tier that is not free."""
    terms = [
        (str(term.get("effectiveDate", "")), term)
        for term in _inner(product, "terms", "OnDemand").values()
        if isinstance(term, dict) and str(term.get("effectiveDate", "")) <= now
    ]
    if not terms:
        return None
    since, term = max(terms, key=lambda pair: pair[0])
    tiers = [
        (number(tier.get("beginRange")) or Decimal(0), usd)
        for tier in _inner(term, "priceDimensions").values()
        if isinstance(tier, dict) and unit in ("", tier.get("unit"))
        for usd in [number(_inner(tier, "pricePerUnit").get("USD"))]
        if usd is not None and usd > 0
    ]
    return (min(tiers)[1], since[:10]) if tiers else None


def number(text: Any) -> Decimal | None:
    """A finite number, or None."""
    try:
        found = Decimal(str(text))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
