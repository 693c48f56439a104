"""The cost of hosts that run without jobs (warm capacity), and placement scores of spot hosts.

Amounts are millionths of a US dollar an hour, as in `estimate`.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.capacity import (
    CapacityUnit,
    PlacementScore,
    Reservation,
    fetch_placement_scores,
    score_requests,
)
from batchml.aws.pricing.cache import Prices
from batchml.aws.pricing.prices import InstanceTypes, PriceSource, PriceTable
from batchml.aws.session import Access, Session
from batchml.cost.estimate import (
    ComputeEstimate,
    estimate_computes,
    format_cents,
    host_item,
)
from batchml.errors import UsageError
from batchml.model.environment import Compute
from batchml.model.names import short_duration

if TYPE_CHECKING:
    from batchml.context import Context

    Connect = Callable[[Context, Sequence[str]], Session]

HOURS = 24


class HostsCost(Struct, frozen=True):
    """The cost of running hosts, with the cheapest and with the dearest instance types."""

    vcpus: int  # 0 without hosts
    low: int = 0  # millionths of a dollar an hour
    high: int = 0
    hosts: str = ""  # `2 x g5.xlarge`
    why: str = ""  # reason why the price is unknown
    is_prepaid: bool = False  # a capacity block is paid when it is reserved

    @property
    def words(self) -> str:
        """`$2.01 an hour, $48.29 a day`; empty without hosts."""
        if not self.vcpus:
            return ""
        if self.is_prepaid:
            return "paid when the block was reserved"
        if self.why:
            return f"price unknown: {self.why}"
        day = cents_range(self.low, self.high, HOURS)
        return f"{cents_range(self.low, self.high)} an hour, {day} a day"


class WarmCapacity(Struct, frozen=True):
    """The hosts that a compute environment keeps without jobs (`warm`), and its present hosts."""

    name: str
    warm: HostsCost
    now: HostsCost
    delay: int = 0  # minutes for which an idle host stays
    reservation: str = ""


def cents_range(low: int, high: int, hours: int = 1) -> str:
    """`$1.01`, `$0.45 to $1.01`, `less than $0.01`."""
    return " to ".join(dict.fromkeys((format_cents(low * hours), format_cents(high * hours))))


def read_compute_detail(detail: Mapping[str, Any], described: Compute | None = None) -> Compute:
    """Read a compute environment of DescribeComputeEnvironments.

    `described`: its table in batchml.toml, for values that AWS does not return.
    """
    resources = detail.get("computeResources") or {}
    return replace(
        described or Compute(),
        instance_types=tuple(resources.get("instanceTypes", ())),
        min_vcpus=resources.get("minvCpus", 0),
        max_vcpus=resources.get("maxvCpus", 0),
        spot=resources.get("type") == "SPOT",
        scale_down_delay=resources.get("scalingPolicy", {}).get("minScaleDownDelayMinutes", 0) * 60,
    )


def list_warm_capacity(
    region: str, details: Mapping[str, Mapping[str, Any]], computes: Mapping[str, Compute],
    prices: PriceSource,
) -> list[WarmCapacity]:  # fmt: skip
    """The warm and the present hosts of compute environments, with their cost.

    `details` are AWS's descriptions of `computes`, by the same names. Prices are asked for only if
    there are hosts.
    """
    running: dict[str, Compute] = {}  # "NAME warm" or "NAME now"; min_vcpus is that of these hosts
    for name, compute in computes.items():
        desired = (details[name].get("computeResources") or {}).get("desiredvCpus", 0)
        if compute.min_vcpus:
            running[f"{name} warm"] = compute
        if desired:
            running[f"{name} now"] = replace(compute, min_vcpus=desired, max_vcpus=desired)
    payable = {key: each for key, each in running.items() if not each.capacity_block}
    estimates, unknown = estimate_computes(region, payable, prices) if payable else ({}, {})

    def cost_of(key: str, compute: Compute) -> HostsCost:
        if key not in estimates:
            vcpus = running[key].min_vcpus if key in running else 0
            return HostsCost(vcpus, is_prepaid=bool(vcpus))
        return _hosts_cost(estimates[key], running[key].min_vcpus, unknown, compute)

    return [
        WarmCapacity(
            name, cost_of(f"{name} warm", compute), cost_of(f"{name} now", compute),
            compute.scale_down_minutes, compute.reservation,
        )
        for name, compute in computes.items()
    ]  # fmt: skip


def warm_cost(region: str, compute: Compute, prices: PriceSource) -> HostsCost:
    """The cost of a compute environment without jobs."""
    if not compute.min_vcpus or compute.capacity_block:
        return HostsCost(compute.min_vcpus, is_prepaid=bool(compute.capacity_block))
    estimates, unknown = estimate_computes(region, {"": compute}, prices)
    return _hosts_cost(estimates[""], compute.min_vcpus, unknown, compute)


def _hosts_cost(
    estimate: ComputeEstimate, vcpus: int, unknown: Mapping[str, str], compute: Compute
) -> HostsCost:
    """The cost of the hosts at minvCpus. `unknown`: charge without a price -> the reason."""
    cheapest, dearest = estimate.idle.cheapest, estimate.idle.dearest
    if not cheapest:
        about = ("disk", *compute.instance_types)
        reasons = (why for what, why in unknown.items() if any(each in what for each in about))
        return HostsCost(vcpus, why=next(reasons, "AWS does not describe its instance types"))
    low, high = (sum(line.micros for line in lines) for lines in (cheapest, dearest))
    hosts = dict.fromkeys(lines[0].what for lines in (cheapest, dearest) if lines)
    return HostsCost(vcpus, low, high, " or ".join(hosts))


def warm_vcpus(hosts: int, compute: Compute, instances: InstanceTypes) -> int:
    """The vCPUs of a number of hosts of the compute environment's first type.

    Raises UsageError if AWS does not describe the type.
    """
    name = compute.instance_types[0] if compute.instance_types else ""
    types = instances.types.get(name, ())
    if not types:
        why = instances.unknown.get(name, "AWS does not describe its instance types")
        raise UsageError(f"--warm {hosts}: {name}: {why}. Give --min-vcpus instead.")
    return hosts * types[0].vcpus


def describe_delay(minutes: int) -> str:
    """A sentence on scale_down_delay; empty without a delay."""
    if not minutes:
        return ""
    delay = short_duration(minutes * 60)
    return f"an idle host stays {delay} after its last job, and is paid for: scale_down_delay"


def delay_price(region: str, compute: Compute, prices: PriceSource) -> str:
    """The cost of one idle host during scale_down_delay; empty if its price is unknown."""
    if compute.capacity_block:
        return ""
    cost = warm_cost(region, replace(compute, min_vcpus=1), prices)
    if cost.why:
        return ""
    low, high = (amount * compute.scale_down_minutes // 60 for amount in (cost.low, cost.high))
    return f"{cents_range(low, high)} each time"


def describe_reservation(found: Reservation, now: float) -> str:
    """`capacity reservation cr-0123: 4 x g5.xlarge in us-east-1a, 4 free, until DATE (in 3 h)`"""
    kind = "capacity block" if found.is_block else "capacity reservation"
    if not found.type:
        return f"{kind} {found.id}: {found.state or 'unknown'}"

    def at(when: float) -> str:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(when))

    words = f"{kind} {found.id}: {found.total} x {found.type} in {found.zone}, {found.free} free"
    if found.state != "active":
        words += f", {found.state}"
    if found.start > now:
        return f"{words}, begins {at(found.start)}"
    if not found.last:
        return f"{words}, until it is cancelled"
    if found.last <= now:
        return f"{words}, over since {at(found.last)}"
    left = short_duration((found.last - now) // 60 * 60)
    early = ", when EC2 begins to end its hosts" if found.is_block else ""
    return f"{words}, until {at(found.last)}{early} (in {left})"


# --- placement scores -----------------------------------------------------------------------
# `compute score`: how likely EC2 has spot hosts in each region, and their prices.


MAX_PRICED_REGIONS = 10  # the prices of each region take one call
_DEFAULT_REGION = "us-east-1"  # EC2 scores all regions in any region


class ScoreQuestion(Struct, frozen=True):
    """Instance types or families, the capacity, and the regions (none: all) to score."""

    types: tuple[str, ...]
    target: int
    unit: CapacityUnit
    regions: tuple[str, ...] = ()
    zones: bool = False


class ScoreRow(Struct, frozen=True):
    """A score, and the hourly price of one host in US dollars, or `why` the price is unknown."""

    score: PlacementScore
    low: Decimal | None = None
    high: Decimal | None = None
    why: str = ""


class ScoreAnswer(Struct, frozen=True):
    """Scores with prices, and the instance types of the families that were asked for."""

    rows: list[ScoreRow]
    types: tuple[str, ...]


def default_types(context: "Context") -> tuple[str, ...]:
    """The types of spot compute environments; without any, of those with GPUs; else all types."""
    computes = list(context.settings.environment.compute.values())
    spot = [each for each in computes if each.spot]
    chosen = spot or [each for each in computes if each.has_gpus] or computes
    return tuple(dict.fromkeys(name for each in chosen for name in each.instance_types))


def ask_scores(
    context: "Context", question: ScoreQuestion, connect: "Connect | None" = None
) -> ScoreAnswer:
    """Ask EC2 for placement scores. Raises UsageError for unknown types, and EC2's errors."""
    connect = connect or aws_session
    session = connect(context, question.regions[:1])
    families = [each for each in question.types if "." not in each]
    known = _prices(context, session).instances(session.region, families)
    mistakes = [f"{name}: {why}." for name, why in known.unknown.items()]
    if mistakes:
        raise UsageError("--instance-type " + " ".join(mistakes))
    types = tuple(
        dict.fromkeys(
            each
            for name in question.types
            for each in ([name] if "." in name else [t.name for t in known.types.get(name, ())])
        )
    )
    requests = score_requests(
        types, question.target, question.unit, question.regions, zones=question.zones
    )
    scores = fetch_placement_scores(session, requests)
    return ScoreAnswer(list(_add_prices(context, scores, types, connect)), types)


def _add_prices(
    context: "Context", scores: Sequence[PlacementScore], types: Sequence[str], connect: "Connect"
) -> Iterator[ScoreRow]:
    regions = list(dict.fromkeys(each.region for each in scores))[:MAX_PRICED_REGIONS]
    price_tables = {
        region: _prices(context, connect(context, (region,))).ask(
            region, [host_item(name, spot=True) for name in types]
        )
        for region in regions
    }
    not_asked = PriceTable(unknown={"": "not asked"})
    for score in scores:
        price_table = price_tables.get(score.region, not_asked)
        prices = price_table.prices.values()
        if prices:
            yield ScoreRow(score, min(p.low for p in prices), max(p.high for p in prices))
        else:
            yield ScoreRow(score, why=next(iter(price_table.unknown.values()), ""))


def aws_session(context: "Context", regions: Sequence[str]) -> Session:
    """A session of the environment, or of the default credentials if there is no environment."""
    environment = context.settings.environment
    usual = environment.region or os.environ.get("AWS_REGION") or _DEFAULT_REGION
    return Session(Access(regions[0] if regions else usual, environment.profile))


def _prices(context: "Context", session: Session) -> Prices:
    home = context.home
    home.prepare()
    return Prices(session, home.root / "prices.json", context.clock)
