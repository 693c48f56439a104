"""Quote what a run will cost an hour, and how long it may run for a budget (pure).

Runs share hosts. A run pays for the largest of its shares of the host's vCPUs, memory and GPUs,
because no other run can use that share of the scarcest resource. Amounts are exact US dollars.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.hosts import HostPool
from batchml.aws.pricing.prices import InstanceType, InstanceTypes, Price, PriceTable
from batchml.cost.estimate import DISK, MONTH, host_item, reason_unknown
from batchml.errors import UsageError
from batchml.model.group import resources_of
from batchml.model.job import JobSpec

HOUR = 3600  # seconds
MILLIONTH = Decimal("0.000001")
LOCAL_PRICE = "batchml.toml"  # `Price.source` of this machine's price, which a user wrote there
DISKS = "disks"  # key in `Quote.unknown`, if the price of disks is unknown
MOST_SECONDS = 999_999_999  # the largest value that the runtime accepts
NOT_COUNTED = (
    "hosts while they boot, fetch the image or idle; storage, traffic and logs; discounts and taxes"
)


class Usd(Struct, frozen=True):
    """An amount between two bounds, which are equal where it is known exactly."""

    low: Decimal = Decimal(0)
    high: Decimal = Decimal(0)

    def __add__(self, other: "Usd") -> "Usd":
        return Usd(self.low + other.low, self.high + other.high)

    def __repr__(self) -> str:
        low, high = (f"{bound:.6f}".rstrip("0").rstrip(".") for bound in (self.low, self.high))
        return f"Usd({low})" if low == high else f"Usd({low} to {high})"

    def round(self) -> "Usd":
        """Both bounds, rounded to the nearest millionth of a dollar, halves to even."""
        return Usd(
            self.low.quantize(MILLIONTH, ROUND_HALF_EVEN),
            self.high.quantize(MILLIONTH, ROUND_HALF_EVEN),
        )

    def times(self, factor: Decimal | int) -> "Usd":
        """Multiply both bounds."""
        return Usd(self.low * factor, self.high * factor)


class ContainerNeed(Struct, frozen=True):
    """The resources that one container of a run requests, and the number of containers."""

    vcpus: int
    memory_mib: int
    gpus: int = 0
    nodes: int = 0  # nodes of a multi-node run, each with its own host; 0 for any other run
    children: int = 0  # children of an array; 0 for any other run
    timeout: int | None = None  # seconds of one attempt
    attempts: int = 1

    @property
    def copies(self) -> int:
        return max(1, self.nodes) * max(1, self.children)


class ComputeChoice(Struct, frozen=True):
    """A compute environment of the run's queue, with the disk size of its hosts."""

    pool: HostPool
    disk_gib: int = 0  # 0 if unknown


class Candidate(Struct, frozen=True):
    """An instance type that a run may get, and the share of the host that the run takes."""

    instance: InstanceType
    share: Decimal
    spot: bool = False
    disk_gib: int = 0

    @property
    def item(self) -> str:
        """The key of its price: `spot:g5.xlarge`."""
        return host_item(self.instance.name, spot=self.spot)

    @property
    def words(self) -> str:
        return f"{self.instance.name}{' spot' if self.spot else ''}"


class Offer(Struct, frozen=True):
    """The hourly cost of one container on a candidate: its share of host and disk."""

    candidate: Candidate
    hour: Usd
    price: Price


class Quote(Struct, frozen=True):
    """The hourly cost of a run on each candidate, the cheapest first.

    `unknown`: thing without a price -> the reason. `is_free`: the machine has no price.
    """

    need: ContainerNeed
    offers: tuple[Offer, ...] = ()
    unknown: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    is_free: bool = False
    parts: "Mapping[str, Quote]" = {}  # of a group run's head: group -> quote of its workers

    @property
    def copies(self) -> int:
        """The number of containers, with all workers."""
        return self.need.copies + sum(part.copies for part in self.parts.values())

    @property
    def hour(self) -> Usd | None:
        """The hourly cost of all containers; None if no price is known."""
        if self.is_free:
            return Usd()
        if not self.offers:
            return None
        least = min(offer.hour.low for offer in self.offers)
        most = max(offer.hour.high for offer in self.offers)
        total = Usd(least, most).times(self.need.copies)
        for part in self.parts.values():
            if part.hour is None:
                return None
            total += part.hour
        return total

    @property
    def most(self) -> Usd | None:
        """The cost if every attempt runs to its timeout; None without a timeout."""
        if self.hour is None or not self.need.timeout:
            return None
        return self.hour.times(Decimal(self.need.timeout * self.need.attempts) / HOUR)

    @property
    def dates(self) -> tuple[str, ...]:
        """The first and the last day of the prices; a single day if both are the same."""
        found = sorted({offer.price.date for offer in self.offers} - {""})
        return tuple(dict.fromkeys((found[0], found[-1]))) if found else ()


class RunBudget(Struct, frozen=True):
    """A budget as running seconds of each container, all attempts together.

    0 seconds: no limit, because the machine has no price. `price`: the hourly cost of one container
    on the dearest host.
    """

    seconds: int
    price: Decimal
    copies: int = 1

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell the runtime the limit."""
        if not self.seconds:
            return {}
        return {"BATCHML_MAX_SECONDS": str(self.seconds), "BATCHML_PRICE": f"{self.price:.6f}"}


def share_of(need: ContainerNeed, instance: InstanceType) -> Decimal | None:
    """The share of a host that one container takes; None if it does not fit.

    A node of a multi-node run has a host of its own: AWS Batch User Guide, "Multi-node parallel
    jobs". A container counts as the whole host, too, if its request is unknown: batchml's first
    version did not record requests, and AWS Batch does not describe those on EKS.
    """
    pairs = (
        (need.vcpus, instance.vcpus),
        (need.memory_mib, instance.memory_mib),
        (need.gpus, instance.gpus),
    )
    if any(requested > size for requested, size in pairs):
        return None
    if need.nodes:
        return Decimal(1)
    return max((Decimal(part) / size for part, size in pairs if part), default=Decimal(1))


def find_candidates(
    need: ContainerNeed, choices: Iterable[ComputeChoice], instances: InstanceTypes
) -> tuple[list[Candidate], dict[str, str]]:
    """The instance types that a run fits on, and the names of unknown types with the reasons."""
    found: dict[Candidate, None] = {}
    missing: dict[str, str] = {}
    for choice in choices:
        if choice.pool.why:
            missing[choice.pool.name] = choice.pool.why
        for name in choice.pool.types:
            known = instances.types.get(name, ())
            if not known:
                missing[name] = reason_unknown(instances, name)
            for each in known:
                share = share_of(need, each)
                # AWS Batch also places runs without GPUs on hosts with GPUs.
                if share is not None:
                    found[Candidate(each, share, choice.pool.spot, choice.disk_gib)] = None
    return list(found), missing


def price_items(candidates: Sequence[Candidate]) -> list[str]:
    """The price items of hosts and their disks, each once."""
    disks = [DISK] if any(each.disk_gib for each in candidates) else []
    return list(dict.fromkeys([each.item for each in candidates] + disks))


def disk_hour(gib: int, price_table: PriceTable) -> Decimal:
    """The hourly cost of a host's disk; 0 if its price is unknown."""
    price = price_table.prices.get(DISK)
    return price.low * gib / MONTH if price else Decimal(0)


def make_quote(
    need: ContainerNeed,
    candidates: Sequence[Candidate],
    missing: Mapping[str, str],
    price_table: PriceTable,
) -> Quote:
    """Quote the hourly cost of a run on each candidate from known prices.

    `missing`: instance types that AWS does not describe -> the reason.
    """
    unknown = dict(missing)
    offers = []
    for each in candidates:
        price = price_table.prices.get(each.item)
        if price is None:
            unknown[each.words] = reason_unknown(price_table, each.item)
            continue
        disk = disk_hour(each.disk_gib, price_table)
        hour = Usd(price.low + disk, price.high + disk).times(each.share)
        offers.append(Offer(each, hour, price))
    if any(each.disk_gib for each in candidates) and DISK not in price_table.prices:
        unknown[DISKS] = reason_unknown(price_table, DISK)
    offers.sort(key=lambda offer: (offer.hour.low, offer.candidate.instance.name))
    if not candidates and not missing:
        unknown["every host"] = "the run fits on no instance type of the queue"
    return Quote(need, tuple(offers), unknown, price_table.notes)


def make_budget(quote: Quote, usd: Decimal | float) -> RunBudget:
    """Limit the running time of each container, so that all together cost at most `usd`.

    The price is that of the dearest candidate, for spot hosts in the dearest zone now. Raises
    UsageError if the price of a candidate is unknown.
    """
    copies = quote.copies
    usd = Decimal(str(usd))
    if quote.is_free:
        return RunBudget(0, Decimal(0), copies)
    jobs = (quote, *quote.parts.values())
    unpriced = [(name, why) for job in jobs for name, why in job.unknown.items() if name != DISKS]
    if unpriced or not all(job.offers for job in jobs):
        name, why = unpriced[0] if unpriced else ("every host", "there is none")
        raise UsageError(
            f"--max-cost: the price of {name} is unknown: {why}. To limit the time of an attempt "
            "instead: --timeout"
        )
    dearest = max(offer.hour.high for offer in quote.offers)
    total = sum(max(o.hour.high for o in job.offers) * job.need.copies for job in jobs)
    if not total:
        return RunBudget(0, Decimal(0), copies)
    seconds = int(usd / total * HOUR)
    if seconds < 1:
        of_each = f" for each of {copies} containers" if copies > 1 else ""
        raise UsageError(f"--max-cost {usd} buys less than a second{of_each}. Give a higher one.")
    return RunBudget(min(seconds, MOST_SECONDS), dearest, copies)


def need_of_job(spec: JobSpec, children: int = 0) -> ContainerNeed:
    """The request of each container of a job. `children`: size of the array; 0 without one."""
    return ContainerNeed(
        vcpus=spec.resources.vcpus,
        memory_mib=spec.resources.memory_mib,
        gpus=spec.resources.gpu_count,
        nodes=spec.nodes if spec.nodes > 1 else 0,
        children=children,
        timeout=spec.timeout_seconds,
        attempts=spec.retry.attempts,
    )


def needs_of_group_run(spec: JobSpec) -> list[tuple[str, str, ContainerNeed]]:
    """Each job of a group run, the head first: group, queue, request.

    An empty queue means that job.toml names none.
    """
    found = []
    for group in spec.groups:
        job = replace(spec, resources=resources_of(spec, group), nodes=1, groups=())
        need = need_of_job(job, group.count if group.count > 1 else 0)
        found.append((group.name, group.queue or spec.queue, need))
    return found
