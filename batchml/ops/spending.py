"""What many runs have cost together, by queue and by job (pure)."""

from collections.abc import Callable, Iterable
from decimal import Decimal
from itertools import islice
from statistics import median

from msgspec import Struct

from batchml.model.record import Record
from batchml.model.run import Run, ran_seconds
from batchml.ops.bill import Bill
from batchml.ops.cost import Usd

USUAL = 10  # runs of a job that are looked back on


class Spent(Struct, frozen=True):
    """One run in the totals. `seconds` are of running, all containers together."""

    job_id: str
    name: str
    queue: str
    at: int  # ms since the epoch
    usd: Usd
    failed: Usd = Usd()
    seconds: float = 0
    is_running: bool = False
    unknown: tuple[str, ...] = ()  # why something has no price


class Total(Struct, frozen=True):
    """Some runs together."""

    name: str
    runs: int = 0
    usd: Usd = Usd()
    failed: Usd = Usd()
    seconds: float = 0
    is_least: bool = False  # something has no known price


class Usual(Struct, frozen=True):
    """How long the last runs of a job took that succeeded: the median, in seconds."""

    runs: int
    seconds: float


def usual(records: Iterable[Record], name: str) -> Usual | None:
    """What to expect of a job's next run; None without a run of the name that was seen to end."""
    ended = (
        ran_seconds(record.attempts)
        for record in records
        if record.name == name and record.status == "SUCCEEDED" and not record.array_size
    )
    took = [seconds for seconds in islice(ended, USUAL) if seconds]
    return Usual(len(took), median(took)) if took else None


def of_bill(run: Run, bill: Bill) -> Spent:
    return Spent(
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


def of_record(record: Record, cost: float) -> Spent:
    """A run that AWS Batch has forgotten, with the cost that was kept of it."""
    usd = Decimal(str(cost))
    return Spent(
        job_id=record.job_id,
        name=record.name,
        queue=record.queue,
        at=record.at,
        usd=Usd(usd, usd),
        seconds=ran_seconds(record.attempts),
    )


def total(name: str, spent: Iterable[Spent]) -> Total:
    found = list(spent)
    usd, failed = Usd(), Usd()
    for each in found:
        usd, failed = usd + each.usd, failed + each.failed
    seconds = sum(each.seconds for each in found)
    return Total(name, len(found), usd, failed, seconds, any(each.unknown for each in found))


def grouped(spent: Iterable[Spent], key: Callable[[Spent], str]) -> list[Total]:
    """A total for each value of `key`, the dearest first."""
    groups: dict[str, list[Spent]] = {}
    for each in spent:
        groups.setdefault(key(each), []).append(each)
    totals = [total(name, found) for name, found in groups.items()]
    return sorted(totals, key=lambda each: (-each.usd.high, -each.seconds, each.name))
