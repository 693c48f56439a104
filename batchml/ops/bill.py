"""What runs have cost: each attempt's time on its host, by the host's price then (pure).

What is not known is a range: of the hosts that the attempt may have been on, or of the zones.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.hosts import Host
from batchml.aws.pricing import InstanceType, Price
from batchml.model.run import Attempt, OutcomeClass, Run, classify, ran_seconds
from batchml.ops.cost import HOUR, OWN, Candidate, Need, Usd
from batchml.ops.rates import Rate, Rates, flat

MILLIONTH = Decimal("0.000001")


class Piece(Struct, frozen=True):
    """What one attempt cost. `usd` is None where no price is known; `why` says why."""

    attempt: int
    job_id: str  # the child's, of an array
    host: str  # in words
    seconds: float
    share: Usd  # of the host, from the least to the most
    usd: Usd | None
    hour: Usd | None  # what an hour of it costs
    is_running: bool = False
    has_failed: bool = False
    why: str = ""
    rates: tuple[Rate, ...] = ()


class Bill(Struct, frozen=True):
    """What a run, or a whole array, has cost until now."""

    job_id: str
    pieces: tuple[Piece, ...] = ()
    is_free: bool = False  # on a machine without a price
    is_kept: bool = False  # as it was kept of a run that AWS Batch has forgotten

    @property
    def usd(self) -> Usd:
        """All attempts with a known price."""
        return _sum(self.pieces)

    @property
    def failed(self) -> Usd:
        """Attempts that failed: what was paid for nothing but their checkpoints."""
        return _sum(piece for piece in self.pieces if piece.has_failed)

    @property
    def hour(self) -> Usd:
        """What an hour of what runs now costs."""
        found = [piece.hour for piece in self.pieces if piece.is_running and piece.hour]
        return Usd(sum((each.low for each in found), Decimal(0)),
                   sum((each.high for each in found), Decimal(0)))  # fmt: skip

    @property
    def seconds(self) -> float:
        return sum(piece.seconds for piece in self.pieces)

    @property
    def is_running(self) -> bool:
        return any(piece.is_running for piece in self.pieces)

    @property
    def unknown(self) -> dict[str, str]:
        """What has no price, and why."""
        return {piece.host: piece.why for piece in self.pieces if piece.why}

    @property
    def is_least(self) -> bool:
        """True when something has no known price: the truth is as much, or more."""
        return bool(self.unknown)

    @property
    def figure(self) -> float | None:
        """One number to keep: US dollars, the most it can be. None when a price is unknown."""
        return None if self.is_least else amount(self.usd.high)

    @property
    def rates(self) -> tuple[Rate, ...]:
        """The prices that it is made of, each once."""
        if self.is_free:
            return ()
        return tuple(dict.fromkeys(rate for piece in self.pieces for rate in piece.rates))


def bill(
    run: Run,
    kinds: Sequence[Candidate],
    hosts: Mapping[str, Host],
    rates: Rates,
    now: int,
    why: str = "",
) -> Bill:
    """The bill of one run that is no array. `now` is in ms since the epoch.

    `kinds` are the hosts that it may have been on; `hosts` what is known of those that it was on.
    `why` says why there are no kinds.
    """
    pieces = []
    for number, attempt in enumerate(run.attempts, 1):
        if attempt.started_at is None:
            continue  # it was never placed, or could not be started: nobody counts that time
        host = hosts.get(attempt.host, Host())
        pieces.append(_piece(run, number, attempt, _likely(kinds, host), host, rates, now, why))
    return Bill(run.job_id, tuple(pieces))


def together(job_id: str, bills: Iterable[Bill], forgotten: int = 0) -> Bill:
    """The bill of an array: those of its children, and how many more AWS Batch has forgotten."""
    found = list(bills)
    pieces = tuple(piece for each in found for piece in each.pieces)
    is_free = bool(found) and all(each.is_free for each in found)
    if forgotten and not is_free:
        pieces += (_unknown_piece(job_id, forgotten),)
    return Bill(job_id, pieces, is_free)


def _unknown_piece(job_id: str, children: int) -> Piece:
    """For the children of an array that ended long before the others did."""
    return Piece(
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
    """The bill of a run on a machine without a price: its attempts, which cost nothing."""
    nothing = Candidate(InstanceType(machine, 0, 0, 0, ""), Decimal(0))
    zero = Price(Decimal(0), Decimal(0), "hour", 0, "", OWN)
    return replace(bill(run, [nothing], {}, flat(zero, nothing.item), now), is_free=True)


def kept_bill(run: Run, usd: float) -> Bill:
    """The bill of a run of which no more is known than what it cost."""
    cost = Usd(Decimal(str(usd)), Decimal(str(usd)))
    whole = Piece(
        attempt=max(1, len(run.attempts)),
        job_id=run.job_id,
        host="",
        seconds=ran_seconds(run.attempts),
        share=Usd(),
        usd=cost,
        hour=None,
    )
    return Bill(run.job_id, (whole,), is_kept=True)


def need_of(run: Run) -> Need:
    """What a run asks of each host."""
    return Need(run.vcpus, run.memory_mib, run.gpus, nodes=run.nodes, timeout=run.timeout)


def span(run: Run, now: int) -> tuple[int, int] | None:
    """From the start of the first attempt to the end of the last, in ms; None without any."""
    begun = [attempt.started_at for attempt in run.attempts if attempt.started_at]
    return (min(begun), max(_end(run, attempt, now) for attempt in run.attempts)) if begun else None


def amount(usd: Decimal) -> float:
    """Dollars to the nearest millionth, halves to even."""
    return float(usd.quantize(MILLIONTH, ROUND_HALF_EVEN))


def _likely(kinds: Sequence[Candidate], host: Host) -> list[Candidate]:
    """The kinds that a host can be, by what is known of it."""
    return [
        each
        for each in kinds
        if host.type in ("", each.instance.name) and host.spot in (None, each.spot)
    ]


def _piece(
    run: Run,
    number: int,
    attempt: Attempt,
    kinds: Sequence[Candidate],
    host: Host,
    rates: Rates,
    now: int,
    why: str,
) -> Piece:
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
    return Piece(
        attempt=number,
        job_id=run.job_id,
        host=_words([each.words for each in kinds], host),
        seconds=seconds,
        share=Usd(min(shares), max(shares)) if shares else Usd(),
        # A kind without a price could be the dearest: what is known is no upper bound then.
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
    """An attempt that another one followed, or with which the run failed.

    The last one of a run that its user stopped has not failed, nor one whose budget was spent.
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


def _words(kinds: Sequence[str], host: Host, shown: int = 3) -> str:
    names = list(dict.fromkeys(kinds)) or [host.type or "an unknown host"]
    more = f" or {len(names) - shown} more" if len(names) > shown else ""
    return " or ".join(names[:shown]) + more + (f" in {host.zone}" if host.zone else "")


def _sum(pieces: Iterable[Piece]) -> Usd:
    total = Usd()
    for piece in pieces:
        total += piece.usd or Usd()
    return total
