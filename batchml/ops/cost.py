"""What a run will cost: its share of each host that it may land on, and what a budget buys (pure).

A host is shared by runs. The share of one is the largest of its parts of the vCPUs, the memory and
the GPUs: what it takes of the scarcest, nobody else can use. Amounts are US dollars, exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.hosts import Pool
from batchml.aws.pricing import Book, Instances, InstanceType, Price
from batchml.errors import UsageError
from batchml.model.job import JobSpec
from batchml.ops.estimate import MONTH

HOUR = 3600
DISK = "gp3-gb-month"
OWN = "batchml.toml"  # the source of a price that is not AWS's
DISKS = "disks"  # among what is unknown
MOST_SECONDS = 999_999_999  # that the runtime reads
NOT_COUNTED = (
    "hosts while they boot, fetch the image or idle; storage, traffic and logs; discounts and taxes"
)


class Usd(Struct, frozen=True):
    """An amount that is known to lie between two; both are the same where it is known exactly."""

    low: Decimal = Decimal(0)
    high: Decimal = Decimal(0)

    def __add__(self, other: "Usd") -> "Usd":
        return Usd(self.low + other.low, self.high + other.high)

    def times(self, factor: Decimal | int) -> "Usd":
        """The amount of `factor` as much."""
        return Usd(self.low * factor, self.high * factor)


class Need(Struct, frozen=True):
    """What one container of a run asks of its host, and how many containers there will be."""

    vcpus: int
    memory_mib: int
    gpus: int = 0
    nodes: int = 0  # of a multi-node run, each with a host of its own; 0 for any other
    children: int = 0  # of an array; 0 for any other
    timeout: int | None = None  # seconds, of one attempt
    attempts: int = 1

    @property
    def copies(self) -> int:
        return max(1, self.nodes) * max(1, self.children)


class Landing(Struct, frozen=True):
    """A compute environment of the run's queue, and the disk that each of its hosts has."""

    pool: Pool
    disk_gib: int = 0  # 0 where nobody says


class Candidate(Struct, frozen=True):
    """A kind of host that a run may land on, and the part of it that the run takes."""

    instance: InstanceType
    share: Decimal
    spot: bool = False
    disk_gib: int = 0

    @property
    def item(self) -> str:
        """What its price is asked for by."""
        return f"{'spot' if self.spot else 'on-demand'}:{self.instance.name}"

    @property
    def words(self) -> str:
        return f"{self.instance.name}{' spot' if self.spot else ''}"


class Offer(Struct, frozen=True):
    """What an hour of one container costs on a kind of host: its share of host and disk."""

    candidate: Candidate
    hour: Usd
    price: Price


class Quote(Struct, frozen=True):
    """What an hour of a run costs, cheapest kind of host first.

    `unknown` says, for each thing without a price, why. `is_free` is a machine without a price.
    """

    need: Need
    offers: tuple[Offer, ...] = ()
    unknown: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    is_free: bool = False
    parts: "Mapping[str, Quote]" = {}  # of a gang: group -> its workers; this is the head's

    @property
    def copies(self) -> int:
        """All containers."""
        return self.need.copies + sum(part.copies for part in self.parts.values())

    @property
    def hour(self) -> Usd | None:
        """An hour of all containers; None when no price is known."""
        if self.is_free:
            return Usd()
        if not self.offers:
            return None
        least = min(offer.hour.low for offer in self.offers)
        most = max(offer.hour.high for offer in self.offers)
        whole = Usd(least, most).times(self.need.copies)
        for part in self.parts.values():
            if part.hour is None:
                return None
            whole += part.hour
        return whole

    @property
    def most(self) -> Usd | None:
        """What the run costs if every attempt runs to its timeout; None where nothing bounds it."""
        if self.hour is None or not self.need.timeout:
            return None
        return self.hour.times(Decimal(self.need.timeout * self.need.attempts) / HOUR)

    @property
    def dates(self) -> tuple[str, ...]:
        """The first and the last day on which the prices were said; one when they are the same."""
        found = sorted({offer.price.date for offer in self.offers} - {""})
        return tuple(dict.fromkeys((found[0], found[-1]))) if found else ()


class MaxSeconds(Struct, frozen=True):
    """What a budget comes to: running seconds of each container, all its attempts together.

    0 seconds: no limit, for there is nothing to pay. `price` is what an hour of one container
    costs on the dearest host.
    """

    seconds: int
    price: Decimal
    copies: int = 1

    @property
    def variables(self) -> dict[str, str]:
        """What the runtime is told, as variables of the run."""
        if not self.seconds:
            return {}
        return {"BATCHML_MAX_SECONDS": str(self.seconds), "BATCHML_PRICE": f"{self.price:.6f}"}


def share_of(need: Need, instance: InstanceType) -> Decimal | None:
    """The part of a host that one container takes; None when it does not fit.

    All of it where nobody says what it asks for, as of a run of the first version or on EKS. A node
    of a multi-node run has its host alone: AWS Batch User Guide, "Multi-node parallel jobs".
    """
    asked = (need.vcpus, need.memory_mib, need.gpus)
    has = (instance.vcpus, instance.memory_mib, instance.gpus)
    if any(part > whole for part, whole in zip(asked, has, strict=True)):
        return None
    if need.nodes:
        return Decimal(1)
    parts = (
        Decimal(part) / whole for part, whole in zip(asked, has, strict=True) if part and whole
    )
    return max(parts, default=Decimal(1))


def candidates(
    need: Need, landings: Iterable[Landing], instances: Instances
) -> tuple[list[Candidate], dict[str, str]]:
    """The kinds of host that a run fits on, and the names of types about which nothing is known."""
    found: dict[Candidate, None] = {}
    missing: dict[str, str] = {}
    for landing in landings:
        if landing.pool.why:
            missing[landing.pool.name] = landing.pool.why
        for name in landing.pool.types:
            known = instances.types.get(name, ())
            if not known:
                missing[name] = instances.unknown.get(name, "nobody has asked AWS about it")
            for each in known:
                share = share_of(need, each)
                # Where no GPU is asked for, hosts with GPUs are as good as any other to AWS Batch.
                if share is not None:
                    found[Candidate(each, share, landing.pool.spot, landing.disk_gib)] = None
    return list(found), missing


def items_of(found: Iterable[Candidate]) -> list[str]:
    """The items to ask prices of: each once."""
    kinds = list(found)
    disks = [DISK] if any(each.disk_gib for each in kinds) else []
    return list(dict.fromkeys([each.item for each in kinds] + disks))


def disk_hour(gib: int, book: Book) -> Decimal:
    """What the disk of a host costs an hour; nothing where its price is not known."""
    price = book.prices.get(DISK)
    return price.low * gib / MONTH if price else Decimal(0)


def quote(need: Need, found: Sequence[Candidate], missing: Mapping[str, str], book: Book) -> Quote:
    """What an hour of the run costs on each kind of host, by the prices at hand."""
    unknown = dict(missing)
    offers = []
    for each in found:
        price = book.prices.get(each.item)
        if price is None:
            unknown[each.words] = book.unknown.get(each.item, "nobody has asked AWS about it")
            continue
        disk = disk_hour(each.disk_gib, book)
        hour = Usd(price.low + disk, price.high + disk).times(each.share)
        offers.append(Offer(each, hour, price))
    if any(each.disk_gib for each in found) and DISK not in book.prices:
        unknown[DISKS] = book.unknown.get(DISK, "nobody has asked AWS about it")
    offers.sort(key=lambda offer: (offer.hour.low, offer.candidate.instance.name))
    if not found and not missing:
        unknown["every host"] = "the run fits on no instance type of the queue"
    return Quote(need, tuple(offers), unknown, book.notes)


def budget(quote: Quote, usd: Decimal | float) -> MaxSeconds:
    """How long each container may run, so that all together cost no more than `usd`.

    By the hourly price of the dearest host that it may land on; spot prices are those of the
    dearest zone now. Raises UsageError when a host that it may land on has no known price.
    """
    copies = quote.copies
    usd = Decimal(str(usd))
    if quote.is_free:
        return MaxSeconds(0, Decimal(0), copies)
    jobs = (quote, *quote.parts.values())
    without = [(name, why) for job in jobs for name, why in job.unknown.items() if name != DISKS]
    if without or not all(job.offers for job in jobs):
        name, why = without[0] if without else ("every host", "there is none")
        raise UsageError(
            f"--max-cost: the price of {name} is unknown: {why}. `--timeout` limits an attempt "
            "without prices."
        )
    dearest = max(offer.hour.high for offer in quote.offers)
    whole = sum(max(o.hour.high for o in job.offers) * job.need.copies for job in jobs)
    if not whole:
        return MaxSeconds(0, Decimal(0), copies)
    seconds = int(usd / whole * HOUR)
    if seconds < 1:
        each = f" for each of {copies} containers" if copies > 1 else ""
        raise UsageError(f"--max-cost {usd}: buys less than a second{each}.")
    return MaxSeconds(min(seconds, MOST_SECONDS), dearest, copies)


def need_of_job(spec: JobSpec, children: int = 0) -> Need:
    """What each container of a job asks for. `children` of an array; 0 for any other run."""
    return Need(
        vcpus=spec.resources.vcpus,
        memory_mib=spec.resources.memory_mib,
        gpus=spec.resources.gpus,
        nodes=spec.nodes if spec.nodes > 1 else 0,
        children=children,
        timeout=spec.timeout_seconds,
        attempts=spec.retry.attempts,
    )


def needs_of_gang(spec: JobSpec) -> list[tuple[str, str, Need]]:
    """Group, queue (empty: the job's) and need of each job of a gang, the head first."""
    found = []
    for group in spec.groups:
        job = replace(spec, resources=group.resources or spec.resources, nodes=1, groups=())
        need = need_of_job(job, group.count if group.count > 1 else 0)
        found.append((group.name, group.queue or spec.queue, need))
    return found
