"""Bill what runs have cost, and sum the bills of many runs (pure).

An attempt costs its time on a host at the price of that time. Where the host or its zone is
unknown, the cost is a range over the hosts or zones that it may have had.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from itertools import islice
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.hosts import RunHost
from batchml.aws.pricing.prices import InstanceType, Price, PriceTable
from batchml.aws.pricing.spot import MAX_AGE, SpotHistory
from batchml.cost.estimate import reason_unknown
from batchml.cost.quote import HOUR, OWN_PRICE, Candidate, ContainerNeed, Usd, disk_hour
from batchml.model.run import Attempt, OutcomeClass, Record, Run, classify, ran_seconds

# --- rates ----------------------------------------------------------------------------------


class Rate(Struct, frozen=True):
    """The hourly cost of a whole host.

    `date`: the day on which AWS was asked for it; of spot prices, the days of the time span.
    """

    hour: Usd
    date: str
    source: str


class Rates(Struct, frozen=True):
    """The prices for bills: the present list prices on demand, and the history of spot prices."""

    price_table: PriceTable
    spot: SpotHistory = SpotHistory()
    now: int = 0  # ms since the epoch

    def rate(self, kind: Candidate, zone: str, start: int, stop: int) -> Rate | str:
        """The hourly cost of a host over a time span in ms, or the reason why it is unknown.

        Without a `zone` it ranges from the cheapest zone to the dearest.
        """
        found = self._spot(kind, zone, start, stop) if kind.spot else self._listed(kind)
        if isinstance(found, str):
            return found
        disk = disk_hour(kind.disk_gib, self.price_table)
        return Rate(found.hour + Usd(disk, disk), found.date, found.source)

    def _listed(self, kind: Candidate) -> Rate | str:
        price = self.price_table.prices.get(kind.item)
        if price is None:
            return reason_unknown(self.price_table, kind.item)
        return Rate(Usd(price.low, price.high), price.date, price.source)

    def _spot(self, kind: Candidate, zone: str, start: int, stop: int) -> Rate | str:
        means = self.spot.mean(kind.instance.name, zone, start, stop)
        if means is None:
            if self.now - start > MAX_AGE:
                return "AWS keeps spot prices for 90 days"
            where = f" in {zone}" if zone else ""
            return self.spot.why or f"AWS has no spot price for it{where} then"
        days = " to ".join(dict.fromkeys((_day(start), _day(stop))))
        return Rate(Usd(*means), days, "EC2 spot history")


def describe_sources(rates: Iterable[Rate]) -> list[str]:
    """The sources of prices and their days, a text for each source."""
    days: dict[str, list[str]] = {}
    for rate in rates:
        if rate.date:
            days.setdefault(rate.source, []).extend(rate.date.split(" to "))
        else:
            days.setdefault(rate.source, [])
    return [_describe_source(source, sorted(found)) for source, found in days.items()]


def fixed_rates(usd_per_hour: Price, item: str) -> Rates:
    """The rates of a single machine with a fixed price."""
    prices: Mapping[str, Price] = {item: usd_per_hour}
    return Rates(PriceTable(prices))


def _describe_source(source: str, days: list[str]) -> str:
    return f"{source} of {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else source


def _day(ms: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(ms / 1000))


# --- the bill of a run ----------------------------------------------------------------------


MILLIONTH = Decimal("0.000001")


class AttemptCost(Struct, frozen=True):
    """The cost of an attempt. `usd` is None if no price is known; `why` gives the reason."""

    attempt: int
    job_id: str  # of an array, the child's
    host: str  # a description
    seconds: float
    share: Usd  # share of the host: lowest and highest
    usd: Usd | None
    hour: Usd | None  # hourly cost
    is_running: bool = False
    has_failed: bool = False
    why: str = ""
    rates: tuple[Rate, ...] = ()


class Bill(Struct, frozen=True):
    """The cost of a run, or of a whole array, until now."""

    job_id: str
    attempts: tuple[AttemptCost, ...] = ()
    is_free: bool = False  # the machine has no price
    is_kept: bool = False  # from the history, of a run that AWS Batch has forgotten

    @property
    def usd(self) -> Usd:
        """The cost of all attempts with a known price."""
        return _sum(self.attempts)

    @property
    def failed(self) -> Usd:
        """The cost of attempts that failed."""
        return _sum(each for each in self.attempts if each.has_failed)

    @property
    def hour(self) -> Usd:
        """The hourly cost of attempts that run now."""
        found = [each.hour for each in self.attempts if each.is_running and each.hour]
        return Usd(sum((each.low for each in found), Decimal(0)),
                   sum((each.high for each in found), Decimal(0)))  # fmt: skip

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.attempts)

    @property
    def is_running(self) -> bool:
        return any(each.is_running for each in self.attempts)

    @property
    def unknown(self) -> dict[str, str]:
        """RunHost without a price -> the reason."""
        return {each.host: each.why for each in self.attempts if each.why}

    @property
    def is_least(self) -> bool:
        """Whether a price is unknown, so that the true cost may be higher."""
        return bool(self.unknown)

    @property
    def figure(self) -> float | None:
        """The highest cost in US dollars, for the history. None if a price is unknown."""
        return None if self.is_least else round_usd(self.usd.high)

    @property
    def rates(self) -> tuple[Rate, ...]:
        """The prices that the bill uses, each once."""
        if self.is_free:
            return ()
        return tuple(dict.fromkeys(rate for each in self.attempts for rate in each.rates))


def make_bill(
    run: Run,
    kinds: Sequence[Candidate],
    hosts: Mapping[str, RunHost],
    rates: Rates,
    now: int,
    why: str = "",
) -> Bill:
    """The bill of one run that is not an array. `now` is in ms since the epoch.

    `kinds`: the hosts that it may have had; `why` explains an empty list. `hosts`: host id -> what
    AWS knows of the host.
    """
    costs = []
    for number, attempt in enumerate(run.attempts, 1):
        if attempt.started_at is None:
            continue  # it was never placed, or could not be started: AWS bills no time
        host = hosts.get(attempt.host, RunHost())
        costs.append(
            _attempt_cost(run, number, attempt, _matching(kinds, host), host, rates, now, why)
        )
    return Bill(run.job_id, tuple(costs))


def merge_bills(job_id: str, bills: Iterable[Bill], forgotten: int = 0) -> Bill:
    """Merge the bills of an array's children; AWS Batch has `forgotten` more children."""
    found = list(bills)
    costs = tuple(cost for each in found for cost in each.attempts)
    is_free = bool(found) and all(each.is_free for each in found)
    if forgotten and not is_free:
        costs += (_forgotten_children(job_id, forgotten),)
    return Bill(job_id, costs, is_free)


def _forgotten_children(job_id: str, children: int) -> AttemptCost:
    """The entry for children of an array that AWS Batch has forgotten."""
    return AttemptCost(
        attempt=0,
        job_id=job_id,
        host="1 child" if children == 1 else f"{children} children",
        seconds=0,
        share=Usd(),
        usd=None,
        hour=None,
        why="AWS Batch has forgotten them",
    )


def free_bill(run: Run, machine: str, now: int) -> Bill:
    """The bill of a run on a machine without a price: attempts without cost."""
    nothing = Candidate(InstanceType(machine, 0, 0, 0, ""), Decimal(0))
    zero = Price(Decimal(0), Decimal(0), "hour", 0, "", OWN_PRICE)
    return replace(
        make_bill(run, [nothing], {}, fixed_rates(zero, nothing.item), now), is_free=True
    )


def kept_bill(run: Run, usd: float) -> Bill:
    """The bill of a run of which only the total cost is known."""
    cost = Usd(Decimal(str(usd)), Decimal(str(usd)))
    whole = AttemptCost(
        attempt=max(1, len(run.attempts)),
        job_id=run.job_id,
        host="",
        seconds=ran_seconds(run.attempts),
        share=Usd(),
        usd=cost,
        hour=None,
    )
    return Bill(run.job_id, (whole,), is_kept=True)


def need_of(run: Run) -> ContainerNeed:
    """The resources that a run requests of each host."""
    return ContainerNeed(run.vcpus, run.memory_mib, run.gpus, nodes=run.nodes, timeout=run.timeout)


def time_span(run: Run, now: int) -> tuple[int, int] | None:
    """From the start of the first attempt to the end of the last, in ms; None without attempts."""
    begun = [attempt.started_at for attempt in run.attempts if attempt.started_at]
    return (min(begun), max(_end(run, attempt, now) for attempt in run.attempts)) if begun else None


def round_usd(usd: Decimal) -> float:
    """Round dollars to the nearest millionth, halves to even."""
    return float(usd.quantize(MILLIONTH, ROUND_HALF_EVEN))


def _matching(kinds: Sequence[Candidate], host: RunHost) -> list[Candidate]:
    """The candidates that match what AWS knows of a host."""
    return [
        each
        for each in kinds
        if host.type in ("", each.instance.name) and host.spot in (None, each.spot)
    ]


def _attempt_cost(
    run: Run,
    number: int,
    attempt: Attempt,
    kinds: Sequence[Candidate],
    host: RunHost,
    rates: Rates,
    now: int,
    why: str,
) -> AttemptCost:
    assert attempt.started_at is not None
    stop = max(attempt.started_at, _end(run, attempt, now))
    seconds = (stop - attempt.started_at) / 1000
    is_running = attempt.stopped_at is None and not run.status.is_terminal
    found: list[tuple[Candidate, Rate]] = []
    reason = "" if kinds else why or f"no instance type is known for {host.type or 'its host'}"
    for each in kinds:
        rate = rates.rate(each, host.zone, attempt.started_at, stop)
        if isinstance(rate, str):
            reason = rate
        else:
            found.append((each, rate))
    hours = [rate.hour.times(each.share * max(1, run.nodes)) for each, rate in found]
    hour = _range(hours) if hours else None
    shares = [each.share for each in kinds]
    return AttemptCost(
        attempt=number,
        job_id=run.job_id,
        host=_words([each.words for each in kinds], host),
        seconds=seconds,
        share=Usd(min(shares), max(shares)) if shares else Usd(),
        # A candidate without a price could be the dearest. Then this is no upper bound.
        usd=hour.times(Decimal(str(seconds)) / HOUR) if hour else None,
        hour=hour,
        is_running=is_running,
        has_failed=_has_failed(run, number),
        why=reason,
        rates=tuple(dict.fromkeys(rate for _, rate in found)),
    )


def _end(run: Run, attempt: Attempt, now: int) -> int:
    if attempt.stopped_at is not None:
        return attempt.stopped_at
    return run.stopped_at or now if run.status.is_terminal else now


def _has_failed(run: Run, number: int) -> bool:
    """Whether another attempt followed this one, or the run failed with it.

    The last attempt of a run that its user stopped, or whose budget was spent, has not failed.
    """
    if number < len(run.attempts):
        return True
    outcome = classify(run).outcome
    return run.status.is_terminal and outcome not in (
        OutcomeClass.SUCCEEDED,
        OutcomeClass.CANCELLED,
    )


def _range(amounts: Sequence[Usd]) -> Usd:
    return Usd(min(each.low for each in amounts), max(each.high for each in amounts))


def _words(kinds: Sequence[str], host: RunHost, most: int = 3) -> str:
    names = list(dict.fromkeys(kinds)) or [host.type or "an unknown host"]
    more = f" or {len(names) - most} more" if len(names) > most else ""
    return " or ".join(names[:most]) + more + (f" in {host.zone}" if host.zone else "")


def _sum(costs: Iterable[AttemptCost]) -> Usd:
    total = Usd()
    for each in costs:
        total += each.usd or Usd()
    return total


# --- totals of many runs --------------------------------------------------------------------


USUAL = 10  # last runs of a job from which its usual duration is taken


class RunCost(Struct, frozen=True):
    """The cost of one run. `seconds`: running time of all containers together."""

    job_id: str
    name: str
    queue: str
    at: int  # ms since the epoch
    usd: Usd
    failed: Usd = Usd()
    seconds: float = 0
    is_running: bool = False
    unknown: tuple[str, ...] = ()  # reasons why prices are unknown


class CostTotal(Struct, frozen=True):
    """The cost of several runs together."""

    name: str
    runs: int = 0
    usd: Usd = Usd()
    failed: Usd = Usd()
    seconds: float = 0
    is_least: bool = False  # a price is unknown, so the true cost may be higher


class UsualDuration(Struct, frozen=True):
    """The median running time of a job's last successful runs, in seconds."""

    runs: int
    seconds: float


def usual_duration(records: Iterable[Record], name: str) -> UsualDuration | None:
    """The usual duration of a job's runs; None if no successful run is in the history."""
    ended = (
        ran_seconds(record.attempts)
        for record in records
        if record.name == name and record.status == "SUCCEEDED" and not record.array_size
    )
    took = [seconds for seconds in islice(ended, USUAL) if seconds]
    return UsualDuration(len(took), median(took)) if took else None


def cost_of_bill(run: Run, bill: Bill) -> RunCost:
    return RunCost(
        job_id=run.job_id,
        name=run.name,
        queue=run.queue,
        at=run.created_at or 0,
        usd=bill.usd,
        failed=bill.failed,
        seconds=bill.seconds,
        is_running=bill.is_running,
        unknown=tuple(f"{why} ({what})" for what, why in bill.unknown.items()),
    )


def cost_of_record(record: Record, cost: float) -> RunCost:
    """The cost of a run that AWS Batch has forgotten, from the history."""
    usd = Decimal(str(cost))
    return RunCost(
        job_id=record.job_id,
        name=record.name,
        queue=record.queue,
        at=record.at,
        usd=Usd(usd, usd),
        seconds=ran_seconds(record.attempts),
    )


def sum_costs(name: str, spent: Iterable[RunCost]) -> CostTotal:
    found = list(spent)
    usd, failed = Usd(), Usd()
    for each in found:
        usd, failed = usd + each.usd, failed + each.failed
    seconds = sum(each.seconds for each in found)
    return CostTotal(name, len(found), usd, failed, seconds, any(each.unknown for each in found))


def group_costs(spent: Iterable[RunCost], key: Callable[[RunCost], str]) -> list[CostTotal]:
    """A total for each value of `key`, the dearest first."""
    groups: dict[str, list[RunCost]] = {}
    for each in spent:
        groups.setdefault(key(each), []).append(each)
    totals = [sum_costs(name, found) for name, found in groups.items()]
    return sorted(totals, key=lambda each: (-each.usd.high, -each.seconds, each.name))
