"""The cost of warm capacity (hosts that stay between jobs), and placement scores of spot hosts.

Amounts are millionths of a US dollar an hour, as in `estimate`.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from batchml.aws.pricing.prices import InstanceTypes
from batchml.aws.session import Access, Session
from batchml.cost.estimate import (
    ComputeEstimate,
    EstimateLine,
    PriceSource,
    estimate_computes,
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

    vcpus: int
    low: int = 0  # millionths of a dollar an hour
    high: int = 0
    hosts: str = ""  # `2 x g5.xlarge`
    why: str = ""  # reason why the price is unknown
    is_prepaid: bool = False

    @property
    def words(self) -> str:
        """`$2.01 an hour, $48.29 a day`; empty without hosts."""
        if not self.vcpus:
            return ""
        if self.is_prepaid:
            return "paid when the block was reserved"
        if self.why:
            return f"price unknown: {self.why}"
        day = dollar_range(self.low, self.high, HOURS)
        return f"{dollar_range(self.low, self.high)} an hour, {day} a day"


class WarmCapacity(Struct, frozen=True):
    """The hosts that a compute environment always keeps (`warm`), and its hosts now."""

    name: str
    warm: HostsCost
    now: HostsCost
    delay: int = 0  # minutes for which an idle host stays
    reservation: str = ""


def dollar_range(low: int, high: int, hours: int = 1) -> str:
    """`$1.01`, `$0.45 to $1.01`, `less than $0.01`."""
    ends = (_cents(low * hours), _cents(high * hours))
    return " to ".join(dict.fromkeys(ends))


def _cents(micros: int) -> str:
    if 0 < micros < 5_000:
        return "less than $0.01"
    return f"${(micros + 5_000) // 10_000 / 100:,.2f}"


def read_compute_detail(detail: Mapping[str, Any], described: Compute | None = None) -> Compute:
    """A compute environment from DescribeComputeEnvironments; the rest as in `batchml.toml`."""
    resources = detail.get("computeResources") or {}
    spot = resources.get("type") == "SPOT"
    return replace(
        described or Compute(),
        instance_types=tuple(resources.get("instanceTypes", ())),
        min_vcpus=resources.get("minvCpus", 0),
        max_vcpus=resources.get("maxvCpus", 0),
        spot=spot,
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
    wanted: dict[str, Compute] = {}
    for name, compute in computes.items():
        desired = _desired(details[name])
        if compute.min_vcpus:
            wanted[f"{name} warm"] = compute
        if desired:
            wanted[f"{name} now"] = replace(compute, min_vcpus=desired, max_vcpus=desired)
    payable = {name: each for name, each in wanted.items() if not each.capacity_block}
    filled, unknown = estimate_computes(region, payable, prices) if payable else ({}, {})

    def cost_of(key: str, compute: Compute) -> HostsCost:
        if key not in filled:
            vcpus = wanted[key].min_vcpus if key in wanted else 0
            return HostsCost(vcpus, is_prepaid=bool(vcpus))
        return _hosts_cost(filled[key], wanted[key].min_vcpus, _why(unknown, compute))

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
    filled, unknown = estimate_computes(region, {"": compute}, prices)
    return _hosts_cost(filled[""], compute.min_vcpus, _why(unknown, compute))


def _desired(detail: Mapping[str, Any]) -> int:
    return int((detail.get("computeResources") or {}).get("desiredvCpus", 0))


def _why(unknown: Mapping[str, str], compute: Compute) -> str:
    about = [why for what, why in unknown.items() if _is_about(what, compute)]
    return about[0] if about else ""


def _is_about(what: str, compute: Compute) -> bool:
    return "disk" in what or any(name in what for name in compute.instance_types)


def _hosts_cost(filled: ComputeEstimate, vcpus: int, why: str) -> HostsCost:
    idle = filled.idle
    if not idle.cheapest:
        return HostsCost(vcpus, why=why or "AWS does not describe its instance types")
    low, high = (sum(line.micros for line in fill) for fill in (idle.cheapest, idle.dearest))
    return HostsCost(vcpus, low, high, _hosts((idle.cheapest, idle.dearest)))


def _hosts(fills: Iterable[tuple[EstimateLine, ...]]) -> str:
    return " or ".join(dict.fromkeys(fill[0].what for fill in fills if fill))


def warm_vcpus(hosts: int, compute: Compute, instances: InstanceTypes) -> tuple[int, str]:
    """The vCPUs of a number of hosts of the compute environment's first type, and the type's name.

    Raises UsageError if AWS does not describe the type.
    """
    name = compute.instance_types[0] if compute.instance_types else ""
    types = instances.types.get(name, ())
    if hosts and not types:
        why = instances.unknown.get(name, "AWS does not describe its instance types")
        raise UsageError(f"--warm {hosts}: {name}: {why}. Give --min-vcpus instead.")
    first = types[0] if types else None
    return (hosts * first.vcpus, first.name) if first else (0, name)


def describe_delay(minutes: int) -> str:
    """A sentence on scale_down_delay; empty without a delay."""
    if not minutes:
        return ""
    delay = short_duration(minutes * 60)
    return f"an idle host stays {delay} after its last job, and is paid for: scale_down_delay"


def delay_price(region: str, compute: Compute, prices: PriceSource) -> str:
    """The highest cost of one host during the delay; empty if the price is unknown."""
    if compute.capacity_block:
        return ""
    paid = warm_cost(region, replace(compute, min_vcpus=1), prices)
    if paid.why:
        return ""
    low, high = (amount * compute.scale_down_minutes // 60 for amount in (paid.low, paid.high))
    return f"{dollar_range(low, high)} each time"


def describe_reservation(found: Reservation, now: float) -> str:
    """`capacity block cr-0123: 4 x p5.48xlarge in us-east-1a, 4 free, ends 2026-11-30 11:30 UTC`"""
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


MAX_PRICED_REGIONS = 10  # each region is one call
_ANYWHERE = "us-east-1"  # EC2 here scores all regions


class ScoreQuestion(Struct, frozen=True):
    """Instance types or families, the capacity, and the regions (none: all) to score."""

    types: tuple[str, ...]
    target: int
    unit: CapacityUnit
    regions: tuple[str, ...] = ()
    zones: bool = False


class ScoreRow(Struct, frozen=True):
    """A score and the hourly price of one host there in US dollars, or `why` it is unknown."""

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
    for chosen in ([each.spot for each in computes], [each.has_gpus for each in computes]):
        if any(chosen):
            computes = [each for each, is_one in zip(computes, chosen, strict=True) if is_one]
            break
    return tuple(dict.fromkeys(name for each in computes for name in each.instance_types))


def ask_scores(
    context: "Context", question: ScoreQuestion, connect: "Connect | None" = None
) -> ScoreAnswer:
    """Ask EC2 for placement scores. Raises UsageError for unknown types, and EC2's errors."""
    connect = connect or aws_session
    session = connect(context, question.regions[:1])
    names = [each for each in question.types if "." not in each]
    known = _prices(context, session).instances(session.region, names)
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
    return ScoreAnswer(list(_priced(context, scores, types, connect)), types)


def _priced(
    context: "Context", scores: Sequence[PlacementScore], types: Sequence[str], connect: "Connect"
) -> Iterable[ScoreRow]:
    regions = list(dict.fromkeys(each.region for each in scores))[:MAX_PRICED_REGIONS]
    price_tables = {
        region: _prices(context, connect(context, (region,))).ask(
            region, [host_item(name, spot=True) for name in types]
        )
        for region in regions
    }
    for score in scores:
        price_table = price_tables.get(score.region)
        found = list(price_table.prices.values()) if price_table else []
        why = (
            ""
            if found
            else next(iter(price_table.unknown.values()), "")
            if price_table
            else "not asked"
        )
        low = min((price.low for price in found), default=None)
        high = max((price.high for price in found), default=None)
        yield ScoreRow(score, low, high, why)


def aws_session(context: "Context", regions: Sequence[str]) -> Session:
    """A session of the environment, or of the default credentials if there is no environment."""
    environment = context.settings.environment
    usual = environment.region or os.environ.get("AWS_REGION") or _ANYWHERE
    return Session(Access(regions[0] if regions else usual, environment.profile))


def _prices(context: "Context", session: Session) -> Prices:
    home = context.home
    home.prepare()
    return Prices(session, home.root / "prices.json", context.clock)
