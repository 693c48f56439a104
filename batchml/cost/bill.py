"""Bill what runs have cost, and sum the bills of many runs (pure).

An attempt costs its time on a host at the price of that time. Where the host or its zone is
unknown, the cost is a range over the hosts or zones that it may have had.
"""

import re
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
from batchml.cost.quote import (
    HOUR,
    LOCAL_PRICE,
    MILLIONTH,
    Candidate,
    ContainerNeed,
    Usd,
    disk_hour,
)
from batchml.model.numbering import shown_id
from batchml.model.run import (
    SWEEP_TAG,
    Attempt,
    OutcomeClass,
    Record,
    Run,
    attempt_end,
    classify,
    ran_seconds,
)

# --- rates ----------------------------------------------------------------------------------


class Rate(Struct, frozen=True):
    """The hourly cost of a whole host.

    `date`: the day on which AWS was asked for it; of spot prices, the days of the time span.
    """

    hour: Usd
    date: str
    source: str


class Rates(Struct, frozen=True):
    """The prices for bills: present list prices of on-demand hosts, and the spot price history."""

    price_table: PriceTable
    spot: SpotHistory = SpotHistory()
    now: int = 0  # ms since the epoch

    def rate(self, candidate: Candidate, zone: str, start: int, stop: int) -> Rate | str:
        """The hourly cost of a host over a time span in ms, or the reason why it is unknown.

        Without a `zone` the cost ranges from the cheapest zone to the dearest.
        """
        if candidate.spot:
            rate = self._spot_rate(candidate, zone, start, stop)
        else:
            rate = self._list_rate(candidate)
        if isinstance(rate, str):
            return rate
        disk = disk_hour(candidate.disk_gib, self.price_table)
        return replace(rate, hour=rate.hour + Usd(disk, disk))

    def _list_rate(self, candidate: Candidate) -> Rate | str:
        price = self.price_table.prices.get(candidate.item)
        if price is None:
            return reason_unknown(self.price_table, candidate.item)
        return Rate(Usd(price.low, price.high), price.date, price.source)

    def _spot_rate(self, candidate: Candidate, zone: str, start: int, stop: int) -> Rate | str:
        means = self.spot.mean(candidate.instance.name, zone, start, stop)
        if means is None:
            if self.now - start > MAX_AGE:
                return "AWS keeps spot prices for 90 days"
            where = f" in {zone}" if zone else ""
            return self.spot.why or f"AWS has no spot price for it{where} then"
        days = " to ".join(dict.fromkeys((_day(start), _day(stop))))
        return Rate(Usd(*means), days, "EC2 spot history")


def describe_sources(rates: Iterable[Rate]) -> list[str]:
    """A text for each source of prices: its name, and the first and last day of its prices."""
    days: dict[str, list[str]] = {}
    for rate in rates:
        days.setdefault(rate.source, []).extend(rate.date.split(" to ") if rate.date else ())
    return [
        f"{source} of {' to '.join(dict.fromkeys((min(found), max(found))))}" if found else source
        for source, found in days.items()
    ]


def fixed_rates(price: Price, item: str) -> Rates:
    """The rates of a single machine with a fixed price."""
    return Rates(PriceTable({item: price}))


def _day(ms: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(ms / 1000))


# --- the bill of a run ----------------------------------------------------------------------


class AttemptCost(Struct, frozen=True):
    """The cost of an attempt. If a price is unknown, `why` gives the reason."""

    attempt: int  # from 1; 0 if it stands for several children of an array
    job_id: str  # for an array, the child's id
    host: str  # a description: `g5.xlarge spot or g6.xlarge spot in us-east-1a`
    seconds: float
    share: Usd  # the lowest and highest share of the host; no amount of money
    usd: Usd | None  # None if no price is known
    hour: Usd | None  # hourly cost
    is_running: bool = False
    has_failed: bool = False
    why: str = ""
    rates: tuple[Rate, ...] = ()
    child: str = ""  # its number as users see it, for the child of an array


class Bill(Struct, frozen=True):
    """The cost of a run, or of a whole array, until now."""

    job_id: str
    attempts: tuple[AttemptCost, ...] = ()
    is_free: bool = False  # the machine has no price
    is_from_history: bool = False  # AWS Batch has forgotten the run: only the total is known

    def __repr__(self) -> str:
        count = f"{len(self.attempts)} attempt{'s'[: len(self.attempts) != 1]}"
        return f"Bill({self.job_id!r}, {self.usd!r}, {count})"

    def round(self) -> "Bill":
        """The bill with the amounts of each attempt in whole millionths of a dollar."""
        attempts = (
            replace(each, usd=each.usd and each.usd.round(), hour=each.hour and each.hour.round())
            for each in self.attempts
        )
        return replace(self, attempts=tuple(attempts))

    @property
    def usd(self) -> Usd:
        """The cost of all attempts with a known price."""
        return sum_usd(each.usd for each in self.attempts)

    @property
    def failed(self) -> Usd:
        """The cost of attempts that failed."""
        return sum_usd(each.usd for each in self.attempts if each.has_failed)

    @property
    def hour(self) -> Usd:
        """The hourly cost of attempts that run now."""
        return sum_usd(each.hour for each in self.attempts if each.is_running)

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.attempts)

    @property
    def is_running(self) -> bool:
        return any(each.is_running for each in self.attempts)

    @property
    def unknown(self) -> dict[str, str]:
        """Host without a price -> the reason."""
        return {each.host: each.why for each in self.attempts if each.why}

    @property
    def is_lower_bound(self) -> bool:
        """Whether a price is unknown, so that the true cost may be higher."""
        return bool(self.unknown)

    @property
    def upper_bound(self) -> float | None:
        """The highest cost in US dollars, for the history. None if a price is unknown."""
        return None if self.is_lower_bound else round_usd(self.usd.high)

    @property
    def rates(self) -> tuple[Rate, ...]:
        """The prices that the bill uses, each once."""
        if self.is_free:
            return ()
        return tuple(dict.fromkeys(rate for each in self.attempts for rate in each.rates))


def make_bill(
    run: Run,
    candidates: Sequence[Candidate],
    hosts: Mapping[str, RunHost],
    rates: Rates,
    now: int,
    why: str = "",
) -> Bill:
    """The bill of one run that is not an array. `now` is in ms since the epoch.

    `candidates`: the hosts that it may have had; `why` explains an empty list. `hosts`: host id ->
    its instance type and zone, as far as AWS still describes them.
    """
    costs = []
    for number, attempt in enumerate(run.attempts, 1):
        if attempt.started_at is None:
            continue  # it was never placed, or could not be started, so it took no time
        host = hosts.get(attempt.host, RunHost())
        matching = [
            each
            for each in candidates
            if host.type in ("", each.instance.name) and host.spot in (None, each.spot)
        ]
        costs.append(_attempt_cost(run, number, attempt, matching, host, rates, now, why))
    return Bill(run.job_id, tuple(costs))


def merge_bills(job_id: str, bills: Iterable[Bill], forgotten: int = 0) -> Bill:
    """Merge the bills of an array's children. `forgotten`: the number of further children.

    AWS Batch does not describe those any more, so that their cost is unknown.
    """
    bills = list(bills)
    costs = tuple(cost for each in bills for cost in each.attempts)
    is_free = bool(bills) and all(each.is_free for each in bills)
    if forgotten and not is_free:
        children = "1 child" if forgotten == 1 else f"{forgotten} children"
        why = "AWS Batch has forgotten them"
        costs += (AttemptCost(0, job_id, children, 0, Usd(), None, None, why=why),)
    return Bill(job_id, costs, is_free)


def free_bill(run: Run, machine: str, now: int) -> Bill:
    """The bill of a run on a machine without a price: attempts without cost."""
    host = Candidate(InstanceType(machine, 0, 0, 0, ""), Decimal(0))
    zero = Price(Decimal(0), Decimal(0), "hour", 0, "", LOCAL_PRICE)
    return replace(make_bill(run, [host], {}, fixed_rates(zero, host.item), now), is_free=True)


def bill_from_history(run: Run, usd: float) -> Bill:
    """The bill of a run of which only the total cost is known."""
    seconds, cost = ran_seconds(run.attempts), Usd(Decimal(str(usd)), Decimal(str(usd)))
    total = AttemptCost(max(1, len(run.attempts)), run.job_id, "", seconds, Usd(), cost, None)
    return Bill(run.job_id, (total,), is_from_history=True)


def need_of(run: Run) -> ContainerNeed:
    """The resources that a run requests of each host."""
    return ContainerNeed(run.vcpus, run.memory_mib, run.gpus, nodes=run.nodes, timeout=run.timeout)


def time_span(run: Run, now: int) -> tuple[int, int] | None:
    """From the start of the first attempt to the end of the last, in ms; None without attempts."""
    starts = [attempt.started_at for attempt in run.attempts if attempt.started_at]
    if not starts:
        return None
    return min(starts), max(attempt_end(run, attempt, now) for attempt in run.attempts)


def round_usd(usd: Decimal) -> float:
    """Round dollars to the nearest millionth, halves to even."""
    return float(usd.quantize(MILLIONTH, ROUND_HALF_EVEN))


def _attempt_cost(
    run: Run,
    number: int,
    attempt: Attempt,
    candidates: Sequence[Candidate],
    host: RunHost,
    rates: Rates,
    now: int,
    why: str,
) -> AttemptCost:
    assert attempt.started_at is not None
    stop = max(attempt.started_at, attempt_end(run, attempt, now))
    seconds = (stop - attempt.started_at) / 1000
    is_running = attempt.stopped_at is None and not run.status.is_terminal
    priced: list[tuple[Candidate, Rate]] = []
    reason = "" if candidates else why or f"no instance type is known for {host.type or 'its host'}"
    for each in candidates:
        rate = rates.rate(each, host.zone, attempt.started_at, stop)
        if isinstance(rate, str):
            reason = rate
        else:
            priced.append((each, rate))
    hours = [rate.hour.times(each.share * max(1, run.nodes)) for each, rate in priced]
    # A candidate without a price could be the dearest: then `hour` is no upper bound.
    hour = Usd(min(h.low for h in hours), max(h.high for h in hours)) if hours else None
    shares = [each.share for each in candidates]
    return AttemptCost(
        attempt=number,
        job_id=run.job_id,
        host=_describe_hosts([each.words for each in candidates], host),
        seconds=seconds,
        share=Usd(min(shares), max(shares)) if shares else Usd(),
        usd=hour.times(Decimal(str(seconds)) / HOUR) if hour else None,
        hour=hour,
        is_running=is_running,
        has_failed=_has_failed(run, number),
        why=reason,
        rates=tuple(dict.fromkeys(rate for _, rate in priced)),
        child=shown_id(run).partition(":")[2],
    )


def _has_failed(run: Run, number: int) -> bool:
    """Whether another attempt followed this attempt, or the run failed with it.

    The last attempt of a run that its user stopped, or whose budget was spent, has not failed.
    """
    if number < len(run.attempts):
        return True
    outcome = classify(run).outcome
    return run.status.is_terminal and outcome not in (
        OutcomeClass.SUCCEEDED,
        OutcomeClass.CANCELLED,
    )


def _describe_hosts(candidates: Sequence[str], host: RunHost) -> str:
    names = list(dict.fromkeys(candidates)) or [host.type or "an unknown host"]
    more = f" or {len(names) - 3} more" if len(names) > 3 else ""
    return " or ".join(names[:3]) + more + (f" in {host.zone}" if host.zone else "")


def unused_cost(bill: Bill, part: float) -> Usd:
    """The cost of a part, from 0 to 1, of what a run requested."""
    return bill.usd.times(Decimal(str(round(part, 4))))


def sum_usd(amounts: Iterable[Usd | None]) -> Usd:
    """The sum of amounts, without those that are unknown."""
    known = [each for each in amounts if each is not None]
    zero = Decimal()
    return Usd(sum((each.low for each in known), zero), sum((each.high for each in known), zero))


# --- totals of many runs --------------------------------------------------------------------


# The end of the names of the jobs of a sweep: sweeps/jobs.py, sweeps/run.py.
_BATCH = r"-(w\d+|controller)$"
OWNER_TAG = "owner"  # a tag that users give their runs
USUAL = 10  # last runs of a job from which its usual duration is taken


class RunCost(Struct, frozen=True):
    """The cost of one run. `seconds`: running time of all attempts together."""

    job_id: str
    name: str
    queue: str
    at: int  # ms since the epoch
    usd: Usd
    failed: Usd = Usd()
    seconds: float = 0
    is_running: bool = False
    unknown: tuple[str, ...] = ()  # hosts without a price, with the reasons
    project: str = ""  # its identity
    sweep: str = ""  # the name of its sweep
    owner: str = ""  # its tag `owner`, else its share of a queue with fair share

    @property
    def job(self) -> str:
        """The row of tables by job: `lenet`; `sweep lenet` for all trials of the sweep."""
        return f"sweep {self.sweep}" if self.sweep else self.name


class CostTotal(Struct, frozen=True):
    """The cost of several runs together."""

    name: str
    runs: int = 0
    usd: Usd = Usd()
    failed: Usd = Usd()
    seconds: float = 0
    is_lower_bound: bool = False  # a price is unknown, so the true cost may be higher


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
        project=run.project,
        sweep=_sweep_name(run.name, run.tags),
        owner=run.tags.get(OWNER_TAG, "") or run.share,
    )


def _sweep_name(name: str, tags: Mapping[str, str]) -> str:
    """The name of the sweep of a run: `lenet` for `lenet-w12`; "" for other runs."""
    return re.sub(_BATCH, "", name) if SWEEP_TAG in tags else ""


def cost_of_record(record: Record, cost: float) -> RunCost:
    """The cost of a run that AWS Batch has forgotten, from the history."""
    usd, seconds = Decimal(str(cost)), ran_seconds(record.attempts)
    return RunCost(
        record.job_id, record.name, record.queue, record.at, Usd(usd, usd), seconds=seconds,
        project=record.project, sweep=_sweep_name(record.name, record.tags),
        owner=record.tags.get(OWNER_TAG, ""),
    )  # fmt: skip


def sum_costs(name: str, spent: Iterable[RunCost]) -> CostTotal:
    costs = list(spent)
    return CostTotal(
        name,
        len(costs),
        sum_usd(each.usd for each in costs),
        sum_usd(each.failed for each in costs),
        sum(each.seconds for each in costs),
        any(each.unknown for each in costs),
    )


def group_costs(spent: Iterable[RunCost], key: Callable[[RunCost], str]) -> list[CostTotal]:
    """A total for each value of `key`, the dearest first."""
    groups: dict[str, list[RunCost]] = {}
    for each in spent:
        groups.setdefault(key(each), []).append(each)
    totals = [sum_costs(name, costs) for name, costs in groups.items()]
    return sorted(totals, key=lambda each: (-each.usd.high, -each.seconds, each.name))
