"""What AWS charges, and what its instance types have: asked for in few calls, kept with their date.

There is no price in this program. One that AWS does not say is unknown, with the reason.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import product as combinations
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.errors import translated
from batchml.clock import Clock
from batchml.errors import AccessError, BatchmlError, ServiceError

# --- AWS's price list -----------------------------------------------------------------------------
# AWS's Price List: what a charge is called there, and which price of an answer is the one (pure).
#
# AWS publishes hundreds of products a service. A charge here is one of them, told by its usage type
# and a few attributes. When two products that differ in price fit, none is taken.


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


# --- prices ---------------------------------------------------------------------------------------


PRICING_REGION = "us-east-1"  # answers for every region of the partition
FRESH = 7 * 86_400  # seconds for which a price is taken from the cache
SPOT_FRESH = 3_600

# Names that AWS Batch takes for instance types, and fills in itself: CreateComputeEnvironment.
CHOSEN_BY_BATCH = ("optimal", "default_x86_64", "default_arm64")

_TRIES = 2  # of a call: a plan is not worth a minute's wait for its price
_DENIED = ("UnauthorizedOperation", "AccessDeniedException", "AccessDenied")


class InstanceType(Struct, frozen=True):
    """What an instance type has. `gpus` counts those that a container can be given."""

    name: str
    vcpus: int
    memory_mib: int
    gpus: int
    arch: str


class Price(Struct, frozen=True):
    """US dollars for one `per`; spot prices differ by zone, others have low and high alike."""

    low: Decimal
    high: Decimal
    per: str
    asked: int  # seconds since the epoch
    since: str  # the day from which AWS lists it
    source: str

    @property
    def date(self) -> str:
        """The day on which AWS said so; empty for a price that is not AWS's."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.asked)) if self.asked else ""


class Book(Struct, frozen=True):
    """The answer for some items: a price or, in words, why there is none. Notes are for people."""

    prices: Mapping[str, Price] = {}
    unknown: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


class Instances(Struct, frozen=True):
    """The types behind each name (a type or a family), or why they are not known."""

    types: Mapping[str, tuple[InstanceType, ...]] = {}
    unknown: Mapping[str, str] = {}


class _Offer(Struct, frozen=True):
    asked: int
    types: tuple[InstanceType, ...]


class _Kept(Struct, frozen=True):
    version: int = 1
    prices: dict[str, Price] = {}
    instances: dict[str, _Offer] = {}


class Clients(Protocol):
    """What is needed of `batchml.aws.session.Session`. It is that of the region asked for."""

    def client(self, service: str, attempts: int = 5, region: str = "") -> Any: ...


class Prices:
    """Asks AWS and remembers in one file.

    It raises nothing, whatever AWS answers: what cannot be had is unknown, with the reason.
    """

    def __init__(self, session: Clients, cache_path: Path, clock: Clock) -> None:
        self._session = session
        self._path = cache_path
        self._clock = clock
        self._kept = _load(cache_path)

    def instances(self, region: str, names: Iterable[str]) -> Instances:
        """The types of each name: one DescribeInstanceTypes a hundred of them, or none at all."""
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
        reason = self._ask_instances(region, stale) if stale else ""
        offers = self._kept.instances
        types = {name: offers[key].types for name, key in keys.items() if key in offers}
        for name in keys:
            if not types.get(name):
                unknown[name] = reason or f"{region} has no such instance type"
        return Instances({name: found for name, found in types.items() if found}, unknown)

    def ask(self, region: str, items: Iterable[str]) -> Book:
        """The price of each item: `"on-demand:TYPE"`, `"spot:TYPE"`, or a key of CHARGES.

        From the cache while fresh. One that is older is used, with a note, when AWS does not say.
        """
        wanted = list(dict.fromkeys(items))
        stale = [item for item in wanted if not self._has_fresh(region, item)]
        spot = [item for item in stale if item.startswith("spot:")]
        listed = [item for item in stale if not item.startswith("spot:")]
        why = self._ask_list(region, listed) | self._ask_spot(region, spot)
        if stale:
            self._save()
        found = {item: self._kept.prices.get(f"{region}/{item}") for item in wanted}
        prices = {item: price for item, price in found.items() if price is not None}
        unknown = {item: why[item] for item, price in found.items() if price is None}
        return Book(prices, unknown, _notes(prices, why))

    # --- the cache --------------------------------------------------------------------------

    def _is_fresh(self, asked: int, limit: int) -> bool:
        return 0 <= self._clock.now() - asked <= limit

    def _has_fresh(self, region: str, item: str) -> bool:
        price = self._kept.prices.get(f"{region}/{item}")
        limit = SPOT_FRESH if item.startswith("spot:") else FRESH
        return price is not None and self._is_fresh(price.asked, limit)

    def _keep(self, region: str, item: str, price: Price) -> None:
        self._kept = replace(self._kept, prices=self._kept.prices | {f"{region}/{item}": price})

    def _save(self) -> None:
        """Put the file in place whole, readable by its owner only; without it nothing is lost."""
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

    # --- AWS --------------------------------------------------------------------------------

    def _ask_instances(self, region: str, names: list[str]) -> str:
        """Keep what AWS says of these names; in words why it does not."""
        patterns = [name if "." in name else f"{name}.*" for name in names]
        request = {"Filters": [{"Name": "instance-type", "Values": patterns}]}
        try:
            with translated("ec2:DescribeInstanceTypes"):
                found = [
                    _instance(entry)
                    for page in self._pages("ec2", "describe_instance_types", request)
                    for entry in page["InstanceTypes"]
                ]
        except BatchmlError as error:
            return why_not("ec2:DescribeInstanceTypes", error)
        now, offers = int(self._clock.now()), dict(self._kept.instances)
        for name in names:
            types = sorted((each for each in found if _is_of(each.name, name)), key=_by_size)
            if types:
                offers[f"{region}/{name}"] = _Offer(now, tuple(types))
            else:
                offers.pop(f"{region}/{name}", None)
        self._kept = replace(self._kept, instances=offers)
        self._save()
        return ""

    def _ask_list(self, region: str, items: list[str]) -> dict[str, str]:
        """Keep what the Price List says of these; why not, for each of the others."""
        if region.startswith(("cn-", "us-gov-", "us-iso")):
            return dict.fromkeys(items, f"the Price List API does not answer for {region}")
        why: dict[str, str] = {}
        for query in queries(region, items):
            try:
                why |= self._take(region, query, self._products(query))
            except ServiceError as error:
                why |= dict.fromkeys(query.items, why_not("pricing:GetProducts", error))
            except BatchmlError as error:
                # What one question meets, the next would meet as well, after as long a wait.
                reason = why_not("pricing:GetProducts", error)
                left = [item for item in items if not self._has_fresh(region, item)]
                return dict.fromkeys(left, reason) | why
        return why

    def _products(self, query: Query) -> list[str]:
        """The products of one question; asked value by value where AWS makes nothing of ANY_OF."""
        try:
            found = self._get(query)
        except ServiceError as error:
            if error.code != "InvalidParameterException" or not query.one_by_one():
                raise
            found = []
        return found or [text for each in query.one_by_one() for text in self._get(each)]

    def _get(self, query: Query) -> list[str]:
        with translated("pricing:GetProducts"):
            pages = self._pages("pricing", "get_products", query.request(), PRICING_REGION)
            return [str(text) for page in pages for text in page["PriceList"]]

    def _take(self, region: str, query: Query, answer: list[str]) -> dict[str, str]:
        asked = int(self._clock.now())
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(asked))
        why = {}
        for item in query.items:
            charge = charge_of(item)
            found = price_in(charge, answer, now)
            if isinstance(found, str):
                why[item] = found
            else:
                usd, since = found
                price = Price(usd, usd, charge.per, asked, since, "AWS Price List")
                self._keep(region, item, price)
        return why

    def _ask_spot(self, region: str, items: list[str]) -> dict[str, str]:
        """Keep the spot prices of now, from the cheapest zone's to the dearest's.

        Asked for from now on, AWS answers with the last change before, which is what holds.
        """
        if not items:
            return {}
        now = int(self._clock.now())
        request = {
            "InstanceTypes": [item.partition(":")[2] for item in items],
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": now,
            "EndTime": now,
        }
        newest: dict[tuple[str, str], tuple[float, Decimal]] = {}
        try:
            with translated("ec2:DescribeSpotPriceHistory"):
                for page in self._pages("ec2", "describe_spot_price_history", request):
                    for entry in page["SpotPriceHistory"]:
                        place = (f"spot:{entry['InstanceType']}", entry["AvailabilityZone"])
                        at, usd = entry["Timestamp"].timestamp(), number(entry["SpotPrice"])
                        if usd and at <= now and at >= newest.get(place, (0.0, usd))[0]:
                            newest[place] = (at, usd)
        except BatchmlError as error:
            return dict.fromkeys(items, why_not("ec2:DescribeSpotPriceHistory", error))
        why = {}
        for item in items:
            zones = [found for (each, _), found in newest.items() if each == item]
            if not zones:
                why[item] = f"AWS has no spot price for it in {region}"
                continue
            since = time.strftime("%Y-%m-%d", time.gmtime(max(at for at, _ in zones)))
            usds = [usd for _, usd in zones]
            self._keep(region, item, Price(min(usds), max(usds), "hour", now, since, "EC2 spot"))
        return why

    def _pages(self, service: str, operation: str, request: Any, region: str = "") -> Any:
        client = self._session.client(service, attempts=_TRIES, region=region)
        size = {} if operation == "describe_spot_price_history" else {"PageSize": 100}
        return client.get_paginator(operation).paginate(**request, PaginationConfig=size)


def _load(path: Path) -> _Kept:
    """The file's content; nothing when there is none, or not one of ours."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return _Kept()
    return kept if kept.version == 1 else _Kept()


def _instance(entry: Mapping[str, Any]) -> InstanceType:
    """EC2's InstanceTypeInfo in our words."""
    gpus = entry.get("GpuInfo", {}).get("Gpus", ())
    architectures = entry["ProcessorInfo"]["SupportedArchitectures"]
    return InstanceType(
        name=entry["InstanceType"],
        vcpus=entry["VCpuInfo"]["DefaultVCpus"],
        memory_mib=entry["MemoryInfo"]["SizeInMiB"],
        gpus=sum(gpu.get("Count", 0) for gpu in gpus if gpu.get("Manufacturer") == "NVIDIA"),
        arch="arm64" if "arm64" in architectures else "x86_64",
    )


def _is_of(instance_type: str, name: str) -> bool:
    return name in (instance_type, instance_type.partition(".")[0])


def _by_size(instance: InstanceType) -> tuple[int, str]:
    return instance.vcpus, instance.name


def why_not(operation: str, error: BatchmlError) -> str:
    """Why there is no answer, short where it is a permission."""
    if isinstance(error, AccessError | ServiceError) and error.code in _DENIED:
        return f"{operation} is not allowed"
    return str(error).rstrip(".")


def _notes(prices: Mapping[str, Price], why: Mapping[str, str]) -> tuple[str, ...]:
    """That old prices had to do, once for each reason and date."""
    old = {(why[item], price.date): None for item, price in prices.items() if item in why}
    return tuple(f"Prices of {date} are used: {reason}." for reason, date in old)
