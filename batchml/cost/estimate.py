"""Estimate what an environment will cost: idle, and with every host running (pure).

Amounts are millionths of a US dollar an hour. Each line is rounded by itself to the nearest, halves
to even. A month has 730 hours, as in AWS's own calculator.
"""

from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_HALF_EVEN, Decimal

from msgspec import Struct

from batchml.aws.pricing.price_list import find_charge
from batchml.aws.pricing.prices import InstanceType, InstanceTypes, Price, PriceSource, PriceTable
from batchml.model.environment import Compute, Environment

MONTH = 730  # hours
LEAST_MICROS = 5_000  # millionths of a dollar: half a cent, the least amount that is written
DISK = "gp3-gb-month"  # price item of the disks of hosts

# The VPC endpoints that cfn/network.yaml makes for `egress = "endpoints"`. S3's gateway is free.
ENDPOINTS = (
    "batch", "ecs", "ecs-agent", "ecs-telemetry", "ecr.api", "ecr.dkr", "logs", "ssm",
    "ssmmessages", "ec2messages", "secretsmanager", "sts",
)  # fmt: skip
# The templates with a KMS key of their own.
KEYS = ("storage", "observability")
NETWORK_KEYS = ("network",)


class EstimateLine(Struct, frozen=True):
    """One charge by the hour. Without a price its amount is 0."""

    what: str
    item: str
    quantity: int
    unit: str
    price: Decimal | None
    micros: int  # millionths of a dollar an hour
    date: str = ""  # day on which AWS was asked for the price
    since: str = ""  # day from which AWS lists the price
    source: str = ""


class CapacityCost(Struct, frozen=True):
    """The cost of a number of vCPUs, with the cheapest and with the dearest instance type.

    A type without a price could be the cheapest or the dearest. Then `cheapest` is empty and
    `dearest` is the dearest known type, so both bound the true amounts from below.
    """

    cheapest: tuple[EstimateLine, ...] = ()
    dearest: tuple[EstimateLine, ...] = ()


class ComputeEstimate(Struct, frozen=True):
    """The cost of a compute environment with minvCpus (`idle`) and with maxvCpus (`full`)."""

    name: str
    spot: bool
    idle: CapacityCost
    full: CapacityCost


class Estimate(Struct, frozen=True):
    """The cost of an environment. `unknown`: charge without a price -> the reason.

    `idle_is_lower_bound`: a charge of the idle hour has no known price, so that the true cost may
    be higher.
    """

    fixed: tuple[EstimateLine, ...] = ()
    computes: tuple[ComputeEstimate, ...] = ()
    unknown: Mapping[str, str] = {}
    idle_is_lower_bound: bool = False
    full_is_lower_bound: bool = False
    left_out: tuple[str, ...] = ()  # charges that are not counted
    notes: tuple[str, ...] = ()

    @property
    def idle(self) -> tuple[int, int]:
        """The lowest and highest cost of an hour in which no job runs."""
        return self._range(each.idle for each in self.computes)

    @property
    def full(self) -> tuple[int, int]:
        """The lowest and highest cost of an hour in which every compute environment is full."""
        return self._range(each.full for each in self.computes)

    def _range(self, costs: Iterable[CapacityCost]) -> tuple[int, int]:
        low = high = _sum(self.fixed)
        for cost in costs:
            low, high = low + _sum(cost.cheapest), high + _sum(cost.dearest)
        return low, high

    @property
    def priced(self) -> tuple[EstimateLine, ...]:
        """Every line that has a price."""
        of_hosts = [
            line
            for each in self.computes
            for cost in (each.idle, each.full)
            for line in (*cost.cheapest, *cost.dearest)
        ]
        return tuple(line for line in (*self.fixed, *of_hosts) if line.price is not None)


def estimate_environment(environment: Environment, prices: PriceSource) -> Estimate:
    """Ask for the prices that an environment needs, and estimate its cost. `local` is free."""
    if not environment.region:
        return Estimate()
    names = [name for each in environment.compute.values() for name in each.instance_types]
    instances = prices.instances(environment.region, names)
    price_table = prices.ask(environment.region, items_needed(environment, instances))
    return make_estimate(environment, price_table, instances)


def estimate_computes(
    region: str, computes: Mapping[str, Compute], prices: PriceSource
) -> tuple[dict[str, ComputeEstimate], dict[str, str]]:
    """The cost of compute environments alone, and the reasons for each unknown price."""
    names = [name for each in computes.values() for name in each.instance_types]
    instances = prices.instances(region, names)
    items = list(dict.fromkeys(_compute_items(computes.values(), instances)))
    price_table = prices.ask(region, items)
    found, unknown = {}, dict[str, str]()
    for name, compute in computes.items():
        found[name], missing = _compute_estimate(name, compute, price_table, instances)
        unknown |= missing
    return found, unknown


def _compute_items(computes: Iterable[Compute], instances: InstanceTypes) -> Iterator[str]:
    for compute in computes:
        if compute.capacity_block:  # a capacity block is paid when it is reserved
            continue
        found, _ = _types(compute, instances)
        yield from (host_item(each, spot=compute.spot) for each in found)
        if found:
            yield DISK


def items_needed(environment: Environment, instances: InstanceTypes) -> list[str]:
    """The items to ask prices for, each once."""
    items = [item for _, item, _ in _fixed(environment)] + [item for _, item in _usage(environment)]
    items += _compute_items(environment.compute.values(), instances)
    return list(dict.fromkeys(items))


def make_estimate(
    environment: Environment, prices: PriceTable, instances: InstanceTypes
) -> Estimate:
    """Estimate the cost of an environment from known prices."""
    if not environment.region:
        return Estimate()
    fixed = tuple(
        _line(what, item, quantity, prices.prices.get(item))
        for what, item, quantity in _fixed(environment)
    )
    unknown = {line.what: reason_unknown(prices, line.item) for line in fixed if line.price is None}
    idle_is_lower_bound = full_is_lower_bound = bool(unknown)
    computes = []
    for name, compute in environment.compute.items():
        if compute.capacity_block:
            continue
        estimate, missing = _compute_estimate(name, compute, prices, instances)
        computes.append(estimate)
        unknown |= missing
        idle_is_lower_bound |= bool(missing) and compute.min_vcpus > 0
        full_is_lower_bound |= bool(missing) and compute.max_vcpus > 0
    return Estimate(
        fixed, tuple(computes), unknown, idle_is_lower_bound, full_is_lower_bound,
        tuple(_left_out(environment, prices)), prices.notes,
    )  # fmt: skip


# --- charges --------------------------------------------------------------------------------


def _fixed(environment: Environment) -> Iterator[tuple[str, str, int]]:
    """The charges that do not depend on use: description, price item, quantity."""
    network, storage = environment.network, environment.storage
    if not network.is_given and network.egress == "nat":
        yield "NAT gateway", "nat-hour", 1
        yield "public IPv4 address of the NAT gateway", "ipv4-hour", 1
    elif not network.is_given:
        # All endpoints are in the first zone: cfn/network.yaml.
        yield f"{len(ENDPOINTS)} VPC endpoints", "endpoint-hour", len(ENDPOINTS)
    if storage.workspace == "fsx-lustre":
        what = f"FSx for Lustre, {storage.size_gib} GiB at {storage.throughput} MB/s for each TiB"
        yield what, f"fsx-{storage.throughput}-gb-month", storage.size_gib
    keys = len(KEYS if network.is_given else (*KEYS, *NETWORK_KEYS))
    yield f"{keys} KMS keys", "kms-key-month", keys


def _usage(environment: Environment) -> Iterator[tuple[str, str]]:
    """The charges that depend on use, for which no amount is estimated: description, price item."""
    if not environment.network.is_given and environment.network.egress == "nat":
        yield "traffic through the NAT gateway", "nat-gb"
    if environment.storage.workspace == "efs":
        yield "files in EFS", "efs-gb-month"
    yield "log ingestion", "logs-gb"


def _left_out(environment: Environment, price_table: PriceTable) -> Iterator[str]:
    """The charges that the estimate leaves out."""
    for what, item in _usage(environment):
        price = price_table.prices.get(item)
        rate = f"${price.low.normalize():f} a {price.per}" if price else "price unknown"
        yield f"{what} ({rate})"
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
    compute: Compute, instances: InstanceTypes
) -> tuple[dict[str, InstanceType], dict[str, str]]:
    """The types that a compute environment may start, and the names without a type and why."""
    found, missing = {}, {}
    for name in compute.instance_types:
        for each in instances.types.get(name, ()):
            found[each.name] = each
        if not instances.types.get(name):
            missing[name] = reason_unknown(instances, name)
    return found, missing


# --- compute --------------------------------------------------------------------------------


def _compute_estimate(
    name: str, compute: Compute, price_table: PriceTable, instances: InstanceTypes
) -> tuple[ComputeEstimate, dict[str, str]]:
    """The cost of a compute environment, and the reasons for each unknown price."""
    types, missing = _types(compute, instances)
    unknown = {f"compute.{name}: {each}": why for each, why in missing.items()}
    usable = []
    for each in types.values():
        item = host_item(each.name, spot=compute.spot)
        if item in price_table.prices:
            usable.append(each)
        else:
            unknown[describe_item(item)] = reason_unknown(price_table, item)
    is_partial = bool(unknown)
    if types and DISK not in price_table.prices:
        unknown["gp3 disk"] = reason_unknown(price_table, DISK)
    idle, full = (
        _capacity_cost(
            compute, [(each, _count(compute, each.vcpus, is_full)) for each in usable], price_table
        )
        for is_full in (False, True)
    )
    if is_partial:
        idle, full = CapacityCost((), idle.dearest), CapacityCost((), full.dearest)
    return ComputeEstimate(name, compute.spot, idle, full), unknown


def _count(compute: Compute, vcpus: int, is_full: bool) -> int:
    """The number of hosts of a size that AWS Batch keeps at minvCpus, or starts up to maxvCpus.

    BEST_FIT stays within maxvCpus; the other strategies may pass it by a part of one host: AWS
    Batch User Guide, "Allocation strategies".
    """
    most = compute.max_vcpus // vcpus
    if compute.strategy != "BEST_FIT":
        most = -(-compute.max_vcpus // vcpus)
    return most if is_full else min(most, -(-compute.min_vcpus // vcpus))


def _capacity_cost(
    compute: Compute, counts: Iterable[tuple[InstanceType, int]], price_table: PriceTable
) -> CapacityCost:
    low = [_host_charges(compute, each, count, price_table, is_low=True) for each, count in counts]
    high = [
        _host_charges(compute, each, count, price_table, is_low=False) for each, count in counts
    ]
    return CapacityCost(min(low, key=_sum, default=()), max(high, key=_sum, default=()))


def _host_charges(
    compute: Compute, instance: InstanceType, count: int, price_table: PriceTable, *, is_low: bool
) -> tuple[EstimateLine, ...]:
    """The charges for hosts of one type and their disks, in the cheapest or the dearest zone."""
    if not count:
        return ()
    item = host_item(instance.name, spot=compute.spot)
    what = f"{count} x {instance.name}{' spot' if compute.spot else ''}"
    return (
        _line(what, item, count, price_table.prices[item], is_low=is_low),
        _line(
            f"{count} x {compute.disk_gib} GiB of disk", DISK, count * compute.disk_gib,
            price_table.prices.get(DISK),
        ),
    )  # fmt: skip


def host_item(instance_type: str, *, spot: bool) -> str:
    """The price item of a host: `spot:g5.xlarge`; its prefix selects the source in aws/pricing."""
    return f"{'spot' if spot else 'on-demand'}:{instance_type}"


def describe_item(item: str) -> str:
    """An item in words."""
    kind, _, name = item.partition(":")
    return f"{name} spot" if kind == "spot" else find_charge(item).words


# --- amounts --------------------------------------------------------------------------------


def _line(
    what: str, item: str, quantity: int, price: Price | None, *, is_low: bool = True
) -> EstimateLine:
    if price is None:
        return EstimateLine(what, item, quantity, "", None, 0)
    usd = price.low if is_low else price.high
    hourly = usd * quantity * 1_000_000
    if price.per.endswith("month"):
        hourly /= MONTH
    micros = int(hourly.to_integral_value(ROUND_HALF_EVEN))
    return EstimateLine(
        what, item, quantity, price.per, usd, micros, price.date, price.since, price.source
    )


def _sum(lines: Iterable[EstimateLine]) -> int:
    return sum(line.micros for line in lines)


def format_cents(micros: int) -> str:
    """Millionths of a dollar as dollars and cents; `less than $0.01` below half a cent."""
    if 0 < micros < LEAST_MICROS:
        return "less than $0.01"
    return f"${Decimal((micros + 5_000) // 10_000) / 100:,.2f}"


def reason_unknown(answer: PriceTable | InstanceTypes, name: str) -> str:
    """Why a price item has no price, or an instance type no description."""
    return answer.unknown.get(name, "AWS was not asked about it")
