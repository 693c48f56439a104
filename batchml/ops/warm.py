"""What hosts cost that are kept running between jobs, by the hour and by the day (pure).

Amounts are millionths of a US dollar an hour, as in `estimate`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.capacity import Reservation
from batchml.aws.pricing import Instances
from batchml.errors import UsageError
from batchml.model.environment import Compute
from batchml.model.names import in_words
from batchml.ops.estimate import Filled, Line, Source, quote_computes

HOURS = 24


class Paid(Struct, frozen=True):
    """Hosts that run and what they cost: from the cheapest choice of types to the dearest."""

    vcpus: int
    low: int = 0  # micros an hour
    high: int = 0
    hosts: str = ""  # `2 x g5.xlarge`
    why: str = ""  # it is not known
    is_prepaid: bool = False

    @property
    def words(self) -> str:
        """`$2.01 an hour, $48.29 a day`; nothing where nothing runs."""
        if not self.vcpus:
            return ""
        if self.is_prepaid:
            return "paid when the block was reserved"
        if self.why:
            return f"price unknown: {self.why}"
        return f"{usd(self.low, self.high)} an hour, {usd(self.low, self.high, HOURS)} a day"


class Kept(Struct, frozen=True):
    """A compute environment: what it always keeps, and what runs now."""

    name: str
    warm: Paid
    now: Paid
    delay: int = 0  # minutes that an idle host stays
    reservation: str = ""


def usd(low: int, high: int, hours: int = 1) -> str:
    """`$1.01`, `$0.45 to $1.01`: two places, as in AWS's bills; what is less is not nothing."""
    ends = (_cents(low * hours), _cents(high * hours))
    return " to ".join(dict.fromkeys(ends))


def _cents(micros: int) -> str:
    if 0 < micros < 5_000:
        return "less than $0.01"
    return f"${(micros + 5_000) // 10_000 / 100:,.2f}"


def read_compute_detail(detail: Mapping[str, Any], described: Compute | None = None) -> Compute:
    """A compute environment as AWS has it; what AWS does not tell as `batchml.toml` says it."""
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


def keeping(
    region: str, details: Mapping[str, Mapping[str, Any]], computes: Mapping[str, Compute],
    prices: Source,
) -> list[Kept]:  # fmt: skip
    """What each keeps and has. Prices are asked for only where something runs or is kept.

    `details` are AWS's, `computes` the same in our words, by the same names.
    """
    wanted: dict[str, Compute] = {}
    for name, compute in computes.items():
        desired = _desired(details[name])
        if compute.min_vcpus:
            wanted[f"{name} warm"] = compute
        if desired:
            wanted[f"{name} now"] = replace(compute, min_vcpus=desired, max_vcpus=desired)
    payable = {name: each for name, each in wanted.items() if not each.capacity_block}
    filled, unknown = quote_computes(region, payable, prices) if payable else ({}, {})

    def paid(key: str, compute: Compute) -> Paid:
        if key not in filled:
            vcpus = wanted[key].min_vcpus if key in wanted else 0
            return Paid(vcpus, is_prepaid=bool(vcpus))
        return _paid(filled[key], wanted[key].min_vcpus, _why(unknown, compute))

    return [
        Kept(
            name, paid(f"{name} warm", compute), paid(f"{name} now", compute),
            compute.scale_down_minutes, compute.reservation,
        )
        for name, compute in computes.items()
    ]  # fmt: skip


def price_of(region: str, compute: Compute, prices: Source) -> Paid:
    """What a compute environment keeps, and costs without jobs."""
    if not compute.min_vcpus or compute.capacity_block:
        return Paid(compute.min_vcpus, is_prepaid=bool(compute.capacity_block))
    filled, unknown = quote_computes(region, {"": compute}, prices)
    return _paid(filled[""], compute.min_vcpus, _why(unknown, compute))


def _desired(detail: Mapping[str, Any]) -> int:
    return int((detail.get("computeResources") or {}).get("desiredvCpus", 0))


def _why(unknown: Mapping[str, str], compute: Compute) -> str:
    about = [why for what, why in unknown.items() if _is_about(what, compute)]
    return about[0] if about else ""


def _is_about(what: str, compute: Compute) -> bool:
    return "disk" in what or any(name in what for name in compute.instance_types)


def _paid(filled: Filled, vcpus: int, why: str) -> Paid:
    idle = filled.idle
    if not idle.cheapest:
        return Paid(vcpus, why=why or "AWS says nothing of its types")
    low, high = (sum(line.micros for line in fill) for fill in (idle.cheapest, idle.dearest))
    return Paid(vcpus, low, high, _hosts((idle.cheapest, idle.dearest)))


def _hosts(fills: Iterable[tuple[Line, ...]]) -> str:
    return " or ".join(dict.fromkeys(fill[0].what for fill in fills if fill))


def warm_vcpus(hosts: int, compute: Compute, instances: Instances) -> tuple[int, str]:
    """The vCPUs of so many hosts of its first type, and that type's name.

    Raises UsageError where AWS does not say what the type has.
    """
    name = compute.instance_types[0] if compute.instance_types else ""
    types = instances.types.get(name, ())
    if hosts and not types:
        why = instances.unknown.get(name, "AWS says nothing of its types")
        raise UsageError(f"--warm {hosts}: {name}: {why}. Give --min-vcpus instead.")
    first = types[0] if types else None
    return (hosts * first.vcpus, first.name) if first else (0, name)


def delay_words(minutes: int) -> str:
    """What an idle host costs that stays; empty where none does."""
    if not minutes:
        return ""
    kept = in_words(minutes * 60)
    return f"an idle host stays {kept} after its last job, and is paid for: scale_down_delay"


def delay_price(region: str, compute: Compute, prices: Source) -> str:
    """What the delay of one host costs at most; empty where the price is not known."""
    if compute.capacity_block:
        return ""
    paid = price_of(region, replace(compute, min_vcpus=1), prices)
    if paid.why:
        return ""
    low, high = (amount * compute.scale_down_minutes // 60 for amount in (paid.low, paid.high))
    return f"{usd(low, high)} each time"


def reservation_words(found: Reservation, now: float) -> str:
    """`capacity block cr-0123: 4 x p5.48xlarge in us-east-1a, 4 free, ends 2026-11-30 11:30 UTC`"""
    import time

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
    left = in_words((found.last - now) // 60 * 60)
    early = ", when EC2 begins to end its hosts" if found.is_block else ""
    return f"{words}, until {at(found.last)}{early} (in {left})"
