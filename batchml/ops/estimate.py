"""What an environment costs before it is there: at rest, and with every machine running (pure).

Amounts are millionths of a US dollar an hour, each line rounded by itself to the nearest, halves to
even. A month has 730 hours, as in AWS's own calculator.
"""

from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Protocol

from msgspec import Struct

from batchml.aws.pricing import Book, Instances, InstanceType, Price, charge_of
from batchml.model.environment import Compute, Environment

MONTH = 730  # hours

# What cfn/network.yaml makes for `egress = "endpoints"`; S3's gateway costs nothing.
ENDPOINTS = (
    "ecs", "ecs-agent", "ecs-telemetry", "ecr.api", "ecr.dkr", "logs", "ssm", "ssmmessages",
    "ec2messages", "secretsmanager", "sts",
)  # fmt: skip
# The templates with a KMS key of their own.
KEYS = ("storage", "observability")
NETWORK_KEYS = ("network",)


class Line(Struct, frozen=True):
    """One thing that is paid for by the hour. Without a price its amount is 0."""

    what: str
    item: str
    quantity: int
    unit: str
    price: Decimal | None
    micros: int  # millionths of a dollar an hour
    date: str = ""  # when AWS said the price
    since: str = ""  # from when AWS lists it
    source: str = ""


class Fill(Struct, frozen=True):
    """A number of vCPUs made of the type that comes cheapest, and of that which comes dearest.

    A type without a price could be either: then `cheapest` is nothing, and `dearest` the dearest
    known, so that both bound the true amounts from below.
    """

    cheapest: tuple[Line, ...] = ()
    dearest: tuple[Line, ...] = ()


class Filled(Struct, frozen=True):
    """A compute environment with its least and its most vCPUs."""

    name: str
    spot: bool
    idle: Fill
    full: Fill


class Estimate(Struct, frozen=True):
    """Millionths of a dollar an hour. `unknown` says, for each thing without a price, why."""

    fixed: tuple[Line, ...] = ()
    computes: tuple[Filled, ...] = ()
    unknown: Mapping[str, str] = {}
    idle_is_least: bool = (
        False  # something of the idle cost is unknown: the truth is as much or more
    )
    full_is_least: bool = False
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def idle(self) -> tuple[int, int]:
        """The least and the most of an hour in which nothing runs."""
        return self._range([each.idle for each in self.computes])

    @property
    def full(self) -> tuple[int, int]:
        """The least and the most of an hour in which every compute environment is full."""
        return self._range([each.full for each in self.computes])

    def _range(self, fills: Iterable[Fill]) -> tuple[int, int]:
        low = high = _sum(self.fixed)
        for fill in fills:
            low, high = low + _sum(fill.cheapest), high + _sum(fill.dearest)
        return low, high

    @property
    def priced(self) -> tuple[Line, ...]:
        """Every line that has a price."""
        ends = [
            line
            for each in self.computes
            for fill in (each.idle, each.full)
            for line in (*fill.cheapest, *fill.dearest)
        ]
        return tuple(line for line in (*self.fixed, *ends) if line.price is not None)


class Source(Protocol):
    """Who is asked: `batchml.aws.pricing.Prices`."""

    def instances(self, region: str, names: Iterable[str]) -> Instances: ...

    def ask(self, region: str, items: Iterable[str]) -> Book: ...


def quote(environment: Environment, prices: Source) -> Estimate:
    """Ask for what the estimate needs, and make it. `local` needs nothing and costs nothing."""
    if not environment.region:
        return Estimate()
    names = [name for each in environment.compute.values() for name in each.instance_types]
    instances = prices.instances(environment.region, names)
    book = prices.ask(environment.region, needs(environment, instances))
    return estimate(environment, book, instances)


def quote_computes(
    region: str, computes: Mapping[str, Compute], prices: Source
) -> tuple[dict[str, Filled], dict[str, str]]:
    """Compute environments alone, at their least and most, and what is unknown about them."""
    names = [name for each in computes.values() for name in each.instance_types]
    instances = prices.instances(region, names)
    items = list(dict.fromkeys(_compute_items(computes.values(), instances)))
    book = prices.ask(region, items)
    found, unknown = {}, dict[str, str]()
    for name, compute in computes.items():
        found[name], missing = _filled(name, compute, book, instances)
        unknown |= missing
    return found, unknown


def _compute_items(computes: Iterable[Compute], instances: Instances) -> Iterator[str]:
    for compute in computes:
        if compute.capacity_block:  # paid when it is reserved
            continue
        found, _ = _types(compute, instances)
        yield from (_item(compute, each) for each in found)
        if found:
            yield "gp3-gb-month"


def needs(environment: Environment, instances: Instances) -> list[str]:
    """The items to ask prices of: each once."""
    items = [item for _, item, _ in _fixed(environment)] + [item for _, item in _usage(environment)]
    items += _compute_items(environment.compute.values(), instances)
    return list(dict.fromkeys(items))


def estimate(environment: Environment, prices: Book, instances: Instances) -> Estimate:
    """What the environment costs, by the prices at hand."""
    if not environment.region:
        return Estimate()
    fixed = tuple(
        _line(what, item, quantity, prices.prices.get(item))
        for what, item, quantity in _fixed(environment)
    )
    unknown = {line.what: _reason(prices, line.item) for line in fixed if line.price is None}
    idle_is_least = full_is_least = bool(unknown)
    computes = []
    for name, compute in environment.compute.items():
        if compute.capacity_block:
            continue
        filled, missing = _filled(name, compute, prices, instances)
        computes.append(filled)
        unknown |= missing
        idle_is_least |= bool(missing) and compute.min_vcpus > 0
        full_is_least |= bool(missing) and compute.max_vcpus > 0
    return Estimate(
        fixed, tuple(computes), unknown, idle_is_least, full_is_least,
        tuple(_left_out(environment, prices)), prices.notes,
    )  # fmt: skip


# --- what there is to pay for ---------------------------------------------------------------


def _fixed(environment: Environment) -> Iterator[tuple[str, str, int]]:
    """What is paid whether anything runs or not: in words, its price's item, how many."""
    network, storage = environment.network, environment.storage
    if not network.is_given and network.egress == "nat":
        yield "NAT gateway", "nat-hour", 1
        yield "public IPv4 address of the NAT gateway", "ipv4-hour", 1
    elif not network.is_given:
        # All in the first zone: cfn/network.yaml.
        yield f"{len(ENDPOINTS)} VPC endpoints", "endpoint-hour", len(ENDPOINTS)
    if storage.workspace == "fsx-lustre":
        what = f"FSx for Lustre, {storage.size_gib} GiB at {storage.throughput} MB/s for each TiB"
        yield what, f"fsx-{storage.throughput}-gb-month", storage.size_gib
    keys = len(KEYS if network.is_given else (*KEYS, *NETWORK_KEYS))
    yield f"{keys} KMS keys", "kms-key-month", keys


def _usage(environment: Environment) -> Iterator[tuple[str, str]]:
    """What is paid by use, so that no amount can be said: in words, its price's item."""
    if not environment.network.is_given and environment.network.egress == "nat":
        yield "traffic through the NAT gateway", "nat-gb"
    if environment.storage.workspace == "efs":
        yield "files in EFS", "efs-gb-month"
    yield "log ingestion", "logs-gb"


def _left_out(environment: Environment, book: Book) -> Iterator[str]:
    for what, item in _usage(environment):
        price = book.prices.get(item)
        said = f"${price.low.normalize():f} a {price.per}" if price else "price unknown"
        yield f"{what} ({said})"
    network = environment.network
    if network.is_given:
        yield "the network that exists"
    elif network.egress == "endpoints":
        yield "traffic through the VPC endpoints"
    yield "traffic between zones and out of AWS"
    yield "data in the bucket, and requests"
    if environment.storage.workspace == "efs":
        yield "reading and writing in EFS, and its backups"
    yield "use and rotation of keys"
    if environment.ami == "build" or any(
        each.ami == "build" for each in environment.compute.values()
    ):
        yield "the hour in which an image is built, and the storage of its snapshots"
    if any(
        each.capacity_reservation.startswith(("cr-", "arn:"))
        for each in environment.compute.values()
    ):
        yield "capacity reservations while nothing runs in them"
    for name, each in environment.compute.items():
        if each.capacity_block:
            yield f"the hosts of compute.{name}: a capacity block is paid when it is reserved"
    yield "taxes, discounts and free allowances"


def _types(
    compute: Compute, instances: Instances
) -> tuple[dict[str, InstanceType], dict[str, str]]:
    """The types that a compute environment may start, and the names that say none, with why."""
    found, missing = {}, {}
    for name in compute.instance_types:
        for each in instances.types.get(name, ()):
            found[each.name] = each
        if not instances.types.get(name):
            missing[name] = instances.unknown.get(name, "nobody has asked AWS about it")
    return found, missing


# --- compute --------------------------------------------------------------------------------


def _filled(
    name: str, compute: Compute, book: Book, instances: Instances
) -> tuple[Filled, dict[str, str]]:
    """A compute environment at its least and its most, and what is unknown about it."""
    types, missing = _types(compute, instances)
    unknown = {f"compute.{name}: {each}": why for each, why in missing.items()}
    usable = []
    for each in types.values():
        item = _item(compute, each.name)
        if item in book.prices:
            usable.append(each)
        else:
            unknown[charge_words(item)] = _reason(book, item)
    is_partial = bool(unknown)
    if types and "gp3-gb-month" not in book.prices:
        unknown["gp3 disk"] = _reason(book, "gp3-gb-month")
    idle, full = (
        _fill(compute, [(each, _count(compute, each.vcpus, is_full)) for each in usable], book)
        for is_full in (False, True)
    )
    if is_partial:
        idle, full = Fill((), idle.dearest), Fill((), full.dearest)
    return Filled(name, compute.spot, idle, full), unknown


def _count(compute: Compute, vcpus: int, is_full: bool) -> int:
    """How many machines of a size AWS Batch has at its least, or at its most.

    BEST_FIT stays within maxvCpus; the other strategies may pass it by a part of one machine:
    AWS Batch User Guide, "Allocation strategies".
    """
    most = compute.max_vcpus // vcpus
    if compute.strategy != "BEST_FIT":
        most = -(-compute.max_vcpus // vcpus)
    return most if is_full else min(most, -(-compute.min_vcpus // vcpus))


def _fill(compute: Compute, counts: Iterable[tuple[InstanceType, int]], book: Book) -> Fill:
    low = [_machines(compute, each, count, book, is_low=True) for each, count in counts]
    high = [_machines(compute, each, count, book, is_low=False) for each, count in counts]
    return Fill(min(low, key=_sum, default=()), max(high, key=_sum, default=()))


def _machines(
    compute: Compute, instance: InstanceType, count: int, book: Book, *, is_low: bool
) -> tuple[Line, ...]:
    """Some machines of one type, and their disks; in the cheapest zone or the dearest."""
    if not count:
        return ()
    item = _item(compute, instance.name)
    what = f"{count} x {instance.name}{' spot' if compute.spot else ''}"
    return (
        _line(what, item, count, book.prices[item], is_low=is_low),
        _line(
            f"{count} x {compute.disk_gib} GiB of disk", "gp3-gb-month", count * compute.disk_gib,
            book.prices.get("gp3-gb-month"),
        ),
    )  # fmt: skip


def _item(compute: Compute, name: str) -> str:
    return f"{'spot' if compute.spot else 'on-demand'}:{name}"


def charge_words(item: str) -> str:
    """What an item is, for people."""
    kind, _, name = item.partition(":")
    return f"{name} spot" if kind == "spot" else charge_of(item).words


# --- amounts --------------------------------------------------------------------------------


def _line(what: str, item: str, quantity: int, price: Price | None, *, is_low: bool = True) -> Line:
    if price is None:
        return Line(what, item, quantity, "", None, 0)
    usd = price.low if is_low else price.high
    hourly = usd * quantity * 1_000_000
    if price.per.endswith("month"):
        hourly /= MONTH
    micros = int(hourly.to_integral_value(ROUND_HALF_EVEN))
    return Line(what, item, quantity, price.per, usd, micros, price.date, price.since, price.source)


def _sum(lines: Iterable[Line]) -> int:
    return sum(line.micros for line in lines)


def _reason(book: Book, item: str) -> str:
    return book.unknown.get(item, "nobody has asked AWS about it")
