"""Prices of AWS's Price List: on-demand prices of instances, disks, NAT gateways and others.

AWS publishes hundreds of products for each service. A `Charge` describes one of them by its usage
type and a few attributes. If products with different prices match, the price is unknown.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import product as combinations
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
from batchml.errors import BatchmlError, ServiceError

PRICING_REGION = "us-east-1"  # answers for all regions of the partition `aws`
MAX_VALUE = 1024  # characters of one filter's value; Price List API, Filter

# A usage type may begin with the code of its region: USE1-, EU-, and for KMS keys us-east-1-.
_REGION_CODE = r"(?:[A-Z]{2,4}[0-9]?-|[a-z]{2}(?:-[a-z]+)+-[0-9]-)?"


class Charge(Struct, frozen=True):
    """A product that AWS charges for.

    GetProducts filters by `field`, batchml by `usage`, `unit` and `attributes`.
    """

    words: str  # the product's name for users
    service: str
    field: str
    value: str
    usage: str  # the usage type without its region's code; "" for any
    unit: str  # in the words of the Price List
    per: str  # the unit: "hour", "GB", "month" or "GB-month"
    attributes: Mapping[str, str] = {}  # patterns for attributes of the product


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
    # The throughput also excludes PERSISTENT_1, which has other throughputs.
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


def find_charge(item: str) -> Charge:
    """The charge of an item such as `"nat-hour"` or `"on-demand:g5.xlarge"`."""
    kind, _, name = item.partition(":")
    if kind != "on-demand":
        return CHARGES[item]
    return Charge(
        f"{name} on demand", "AmazonEC2", "instanceType", name, f"BoxUsage:{name}", "Hrs", "hour"
    )


class Query(Struct, frozen=True):
    """A call of GetProducts. Its answer has the prices of `items`."""

    service: str
    filters: Mapping[str, tuple[str, ...]]
    items: tuple[str, ...]

    def request(self) -> dict[str, Any]:
        """The arguments. A field with several values becomes an ANY_OF filter."""
        filters = [
            {
                "Type": "ANY_OF" if len(values) > 1 else "TERM_MATCH",
                "Field": field,
                "Value": ",".join(values),
            }
            for field, values in self.filters.items()
        ]
        return {"ServiceCode": self.service, "FormatVersion": "aws_v1", "Filters": filters}

    def split(self) -> list["Query"]:
        """Queries with the same answers without ANY_OF; none if this query has no ANY_OF."""
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


def plan_queries(region: str, items: Iterable[str]) -> list[Query]:
    """The fewest queries for all items: one for each service and filter field."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for item in dict.fromkeys(items):
        charge = find_charge(item)
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
    """The values in groups, each of which fits into one filter with its commas."""
    group: list[str] = []
    for value in values:
        if group and len(",".join([*group, value])) > MAX_VALUE:
            yield tuple(group)
            group = []
        group.append(value)
    yield tuple(group)


def find_price(charge: Charge, price_list: Iterable[str], now: str) -> tuple[Decimal, str] | str:
    """Return the US dollars and the day since which they hold, or the reason for having none.

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
        return f"AWS lists several prices ({amounts}), and it is unclear which one holds"
    return fitting[0] if fitting else "AWS lists no price in US dollars for it there"


def _read(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _inner(value: Any, *keys: str) -> Mapping[str, Any]:
    """The mapping at a path of keys; an empty one if there is none."""
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
    """The newest term that has begun: the price of its first tier that is not free, and its day."""
    terms = [
        (str(term.get("effectiveDate", "")), term)
        for term in _inner(product, "terms", "OnDemand").values()
        if isinstance(term, dict) and str(term.get("effectiveDate", "")) <= now
    ]
    if not terms:
        return None
    since, term = max(terms, key=lambda pair: pair[0])
    tiers = [
        (parse_decimal(tier.get("beginRange")) or Decimal(0), usd)
        for tier in _inner(term, "priceDimensions").values()
        if isinstance(tier, dict) and unit in ("", tier.get("unit"))
        for usd in [parse_decimal(_inner(tier, "pricePerUnit").get("USD"))]
        if usd is not None and usd > 0
    ]
    return (min(tiers)[1], since[:10]) if tiers else None


# --- Calls ----------------------------------------------------------------------------------------


def fetch_list_prices(
    session: ClientFactory, region: str, items: Sequence[str], now: int
) -> tuple[dict[str, Price], dict[str, str]]:
    """The prices, and the reason for each missing price. `now`: seconds since the epoch."""
    if region.startswith(("cn-", "us-gov-", "us-iso")):
        return {}, dict.fromkeys(items, f"the Price List API does not answer for {region}")
    prices: dict[str, Price] = {}
    missing: dict[str, str] = {}
    for query in plan_queries(region, items):
        try:
            found, why = _read_products(query, _products(session, query), now)
            prices, missing = prices | found, missing | why
        except ServiceError as error:
            missing |= dict.fromkeys(query.items, describe_failure("pricing:GetProducts", error))
        except BatchmlError as error:
            # Every further query would fail in the same way, after as long a wait.
            reason = describe_failure("pricing:GetProducts", error)
            left = [item for item in items if item not in prices]
            return prices, dict.fromkeys(left, reason) | missing
    return prices, missing


def _products(session: ClientFactory, query: Query) -> list[str]:
    """The products of a query, as JSON texts; value by value if AWS does not accept ANY_OF."""
    try:
        found = _get(session, query)
    except ServiceError as error:
        if error.code != "InvalidParameterException" or not query.split():
            raise
        found = []
    return found or [text for each in query.split() for text in _get(session, each)]


def _get(session: ClientFactory, query: Query) -> list[str]:
    with translate_errors("pricing:GetProducts"):
        pages = paginate(session, "pricing", "get_products", query.request(), region=PRICING_REGION)
        return [str(text) for page in pages for text in page["PriceList"]]


def _read_products(
    query: Query, products: list[str], now: int
) -> tuple[dict[str, Price], dict[str, str]]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    prices, missing = {}, {}
    for item in query.items:
        charge = find_charge(item)
        found = find_price(charge, products, stamp)
        if isinstance(found, str):
            missing[item] = found
        else:
            usd, since = found
            prices[item] = Price(usd, usd, charge.per, now, since, "AWS Price List")
    return prices, missing
