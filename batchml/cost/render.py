"""Render quotes, bills, totals and estimates as text and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from batchml.aws.pricing.listed import LISTED
from batchml.cli.render import printable, table, time_json
from batchml.config.project import short_project
from batchml.cost.bill import (
    AttemptCost,
    Bill,
    CostTotal,
    Rate,
    RunCost,
    UsualDuration,
    describe_sources,
    group_costs,
    round_usd,
    sum_costs,
    unused_cost,
)
from batchml.cost.estimate import (
    LEAST_MICROS,
    MONTH,
    CapacityCost,
    Estimate,
    EstimateLine,
    format_cents,
)
from batchml.cost.quote import HOUR, LOCAL_PRICE, NOT_COUNTED, Offer, Quote, Usd
from batchml.model.names import dollar_range, dollars, duration
from batchml.model.run import Run, max_seconds

_MENTIONED = 0.005  # the least part of a request that is said to be unused
ATTEMPTS_SHOWN = 20  # attempts of a run; for more, only their number and total are shown
FREE = "This machine costs nothing. `usd_per_hour` in [env.local] of batchml.toml gives it a price."
_FRACTIONS = {1: "", 2: "half of ", 3: "a third of ", 4: "a quarter of "}
_UNKNOWN = "unknown"
_SPOT_NOTE = "Spot hosts are counted at today's spot prices, which change."


def money(usd: Usd, *, is_lower_bound: bool = False) -> str:
    """`$0.52`, `$0.25 to $1.01`, `at least $3.10`; `unknown` for a lower bound of 0."""
    if is_lower_bound and not usd.high:
        return "unknown"
    return f"{'at least ' if is_lower_bound else ''}{dollar_range(usd.low, usd.high)}"


# --- quote ----------------------------------------------------------------------------------


def quote_lines(quote: Quote, before: UsualDuration | None = None) -> list[str]:
    """A quote as text. `before`: how long the last runs of the job took."""
    jobs = (quote, *quote.parts.values())
    unknown = {what: why for job in jobs for what, why in job.unknown.items()}
    if quote.hour is None:
        return [f"Its cost is unknown. {line}" for line in _unknown_lines(unknown)]
    many = f", {quote.copies} containers" if quote.copies > 1 else ""
    when = f" (prices of {' to '.join(quote.dates)})" if quote.dates else ""
    offers = [offer for job in jobs for offer in job.offers]
    where = _join_some(map(_describe_candidate, offers)) or "this machine"
    lines = [f"It costs {money(quote.hour)} an hour{many}, on {where}{when}."]
    if before is not None:
        whose = "Its last run" if before.runs == 1 else f"Its last {before.runs} runs"
        took = f"took {duration(before.seconds)}{' (the median)' if before.runs > 1 else ''}"
        lines.append(f"{whose} {took}: that is {money(_usual_cost(quote.hour, before))}.")
    if quote.most is not None:
        tries = f" in all of {quote.need.attempts} attempts" if quote.need.attempts > 1 else ""
        lines.append(f"At most {dollars(quote.most.high)}, if it runs to its timeout{tries}.")
    lines += _unknown_lines(unknown)
    if any(offer.candidate.spot and offer.price.source != LISTED for offer in offers):
        lines.append(_SPOT_NOTE)
    return [*lines, *quote.notes, *([FREE] if quote.is_free else ())]


def _describe_candidate(offer: Offer) -> str:
    """`g5.xlarge spot`; for this machine also the share of its price: `half of this machine`."""
    words, share = offer.candidate.words, offer.candidate.share
    if offer.price.source != LOCAL_PRICE:
        return words
    part = next((text for parts, text in _FRACTIONS.items() if share * parts == 1), None)
    return f"{share * 100:.0f} % of {words}" if part is None else part + words


def _usual_cost(hour: Usd, before: UsualDuration) -> Usd:
    return hour.times(Decimal(str(before.seconds)) / HOUR)


def quote_json(quote: Quote, before: UsualDuration | None = None) -> dict[str, Any]:
    return {
        "currency": "USD",
        "perHour": _bounds_json(quote.hour) if quote.hour else None,
        "most": _bounds_json(quote.most) if quote.most else None,
        "usual": _usual_json(quote, before),
        "containers": quote.copies,
        "hosts": [_offer_json(offer) for offer in quote.offers],
        "unknown": dict(quote.unknown),
        "notes": list(quote.notes),
        "notCounted": _left_out(offer.price.source for offer in quote.offers),
        **({"groups": {k: quote_json(v) for k, v in quote.parts.items()}} if quote.parts else {}),
    }


def _usual_json(quote: Quote, before: UsualDuration | None) -> dict[str, Any] | None:
    if before is None or quote.hour is None:
        return None
    usd = _bounds_json(_usual_cost(quote.hour, before))
    return {"runs": before.runs, "seconds": before.seconds, **usd}


def _offer_json(offer: Offer) -> dict[str, Any]:
    return {
        "type": offer.candidate.instance.name,
        "spot": offer.candidate.spot,
        "share": _number(offer.candidate.share),
        "perHour": _bounds_json(offer.hour),
        "date": offer.price.date if offer.price.asked else None,
        "since": offer.price.since or None,
        "source": offer.price.source,
    }


# --- bill -----------------------------------------------------------------------------------


def bill_lines(run: Run, bill: Bill, unused: float | None = None) -> list[str]:
    """A bill as text. `unused`: the part of the request that the run did not use, if known."""
    if bill.is_from_history:
        return [f"Cost: {money(bill.usd)}, from the history: AWS Batch has forgotten the run."]
    free = [FREE] if bill.is_free else []
    if not bill.attempts:
        return ["It has cost nothing: no attempt has started.", *free]
    lines = []
    if len(bill.attempts) <= ATTEMPTS_SHOWN:
        lines.append(table(_rows(bill)))
    else:
        count = sum(1 for attempt in bill.attempts if attempt.attempt)
        lines.append(f"{count} attempts, {duration(bill.seconds)} of running.")
    cost = money(bill.usd, is_lower_bound=bill.is_lower_bound)
    if bill.is_running:
        lines.append(f"So far: {cost}, and {money(bill.hour)} an hour.")
    else:
        lines.append(f"Cost: {cost}.")
    if bill.failed.high:
        count = sum(1 for attempt in bill.attempts if attempt.has_failed)
        what = "1 attempt" if count == 1 else f"{count} attempts"
        lines.append(f"Of this, {money(bill.failed)} went into {what} that failed.")
    lines += _unused_lines(run, bill, unused)
    lines += _budget_lines(run, bill)
    lines += _unknown_lines(bill.unknown)
    return lines + _source_lines(bill.rates) + free


def _unused_lines(run: Run, bill: Bill, unused: float | None) -> list[str]:
    """What the requested GPUs, or else the requested vCPUs, cost while nothing used them."""
    if unused is None or unused < _MENTIONED:
        return []
    many = f"{run.gpus} GPU" if run.gpus else f"{run.vcpus} vCPU"
    what = f"{unused * 100:.0f} % of {many}{'' if many.startswith('1 ') else 's'}"
    if bill.is_free:
        return [f"It does not use {what}." if bill.is_running else f"It did not use {what}."]
    return [f"Of this, {money(unused_cost(bill, unused))} paid for {what} that it did not use."]


def _budget_lines(run: Run, bill: Bill) -> list[str]:
    limit = max_seconds(run.environment)
    if not limit or run.array_size:
        return []
    used = sum(attempt.seconds for attempt in bill.attempts if attempt.job_id == run.job_id)
    left = max(0.0, limit - used)
    return [f"--max-cost allows {duration(limit)} of running time; {duration(left)} is left."]


def bill_json(run: Run, bill: Bill, unused: float | None = None) -> dict[str, Any]:
    rest: dict[str, float] | None = None
    if unused is not None:
        rest = {"part": round(unused, 3), **_bounds_json(unused_cost(bill, unused))}
    return {
        "jobId": run.job_id,
        "jobName": run.job_name or run.name,
        "status": run.status.value,
        "cost": cost_json(bill),
        "unused": rest,
    }


def cost_json(bill: Bill) -> dict[str, Any]:
    """The value of `cost` in a run's JSON."""
    return {
        "currency": "USD",
        "usd": bill.upper_bound,
        **_bounds_json(bill.usd),
        "isLowerBound": bill.is_lower_bound,
        "isFinal": not bill.is_running,
        "perHour": _bounds_json(bill.hour) if bill.is_running else None,
        "failed": _bounds_json(bill.failed),
        "seconds": bill.seconds,
        "attempts": [_attempt_json(attempt) for attempt in bill.attempts],
        "unknown": bill.unknown,
        "prices": [_rate_json(rate) for rate in bill.rates],
        "notCounted": _left_out(rate.source for rate in bill.rates),
    }


def _rows(bill: Bill) -> list[list[str]]:
    rows = [["ATTEMPT", "HOST", "RAN", "SHARE", "COST", "STATE"]]
    for attempt in bill.attempts:
        child = f"{attempt.child}/" if attempt.child else ""
        usd, is_lower_bound = attempt.usd, bool(attempt.why)
        cost = "unknown" if usd is None else money(usd, is_lower_bound=is_lower_bound)
        state = "failed" if attempt.has_failed else "ended"
        state = "running" if attempt.is_running else state if attempt.attempt else ""
        host = printable(attempt.host)
        number = f"{child}{attempt.attempt}" if attempt.attempt else ""
        rows.append([number, host, duration(attempt.seconds), _share(attempt), cost, state])
    return rows


def _share(attempt: AttemptCost) -> str:
    if not attempt.share.high:
        return ""
    bounds = (f"{float(each) * 100:.0f}" for each in (attempt.share.low, attempt.share.high))
    return f"{' to '.join(dict.fromkeys(bounds))} %"


def _attempt_json(attempt: AttemptCost) -> dict[str, Any]:
    return {
        "jobId": attempt.job_id,
        "attempt": attempt.attempt,
        "host": attempt.host,
        "seconds": attempt.seconds,
        "share": {"low": _number(attempt.share.low), "high": _number(attempt.share.high)},
        "usd": _bounds_json(attempt.usd) if attempt.usd else None,
        "isRunning": attempt.is_running,
        "hasFailed": attempt.has_failed,
        "unknown": attempt.why or None,
    }


# --- many runs ------------------------------------------------------------------------------


def spending_lines(spent: Sequence[RunCost], rates: Sequence[Rate], since: str) -> list[str]:
    """The cost of runs as text: by queue, by job, and all together."""
    if not spent:
        return [f"No runs in the last {since}."]
    lines = []
    tables = [("QUEUE", _by_queue(spent)), ("JOB", _by_job(spent))]
    if len({each.project for each in spent}) > 1:
        tables.append(("PROJECT", _by_project(spent)))
    for heading, groups in tables:
        rows = [[heading, "RUNS", "RAN", "COST", "FAILED"]]
        rows += [_total_row(each) for each in groups]
        lines += [table(rows), ""]
    total = sum_costs("", spent)
    cost = money(total.usd, is_lower_bound=total.is_lower_bound)
    runs = "1 run" if total.runs == 1 else f"{total.runs} runs"
    lines.append(f"The last {since}: {cost} for {runs}, {duration(total.seconds)} of running.")
    running = sum(each.is_running for each in spent)
    if running:
        lines.append(f"{running} still running, counted up to now.")
    reasons = dict.fromkeys(why for each in spent for why in each.unknown)
    lines += [f"Price unknown: {printable(why)}." for why in list(reasons)[:4]]
    return lines + _source_lines(rates)


def spending_json(
    spent: Sequence[RunCost], rates: Sequence[Rate], since: int, project: str = ""
) -> dict[str, Any]:
    return {
        "currency": "USD",
        "project": project or None,
        "since": time_json(since),
        "total": _total_json(sum_costs("", spent)),
        "queues": {each.name: _total_json(each) for each in _by_queue(spent)},
        "jobs": {each.name: _total_json(each) for each in _by_job(spent)},
        "runs": [_spent_json(each) for each in spent],
        "prices": [_rate_json(rate) for rate in rates],
        "notCounted": _left_out(rate.source for rate in rates),
    }


def _by_queue(spent: Iterable[RunCost]) -> list[CostTotal]:
    return group_costs(spent, lambda each: each.queue)


def _by_job(spent: Iterable[RunCost]) -> list[CostTotal]:
    return group_costs(spent, lambda each: each.job)


def _by_project(spent: Sequence[RunCost]) -> list[CostTotal]:
    known = [each.project for each in spent]
    return group_costs(spent, lambda each: short_project(each.project, known) or "none")


def _total_row(each: CostTotal) -> list[str]:
    cost = money(each.usd, is_lower_bound=each.is_lower_bound)
    failed = money(each.failed) if each.failed.high else ""
    return [printable(each.name), str(each.runs), duration(each.seconds), cost, failed]


def _total_json(each: CostTotal) -> dict[str, Any]:
    return {
        "runs": each.runs,
        **_bounds_json(each.usd),
        "isLowerBound": each.is_lower_bound,
        "failed": _bounds_json(each.failed),
        "seconds": each.seconds,
    }


def _spent_json(each: RunCost) -> dict[str, Any]:
    return {
        "jobId": each.job_id,
        "jobName": each.name,
        "jobQueue": each.queue,
        "project": each.project or None,
        "createdAt": time_json(each.at),
        **_bounds_json(each.usd),
        "failed": _bounds_json(each.failed),
        "seconds": each.seconds,
        "isRunning": each.is_running,
        "unknown": list(each.unknown),
    }


# --- an environment -------------------------------------------------------------------------


def estimate_lines(estimate: Estimate) -> list[str]:
    """The estimate as text: both amounts, unknown prices with reasons, charges left out."""
    if not estimate.fixed:
        return []
    dates = sorted({line.date for line in estimate.priced})
    when = f" (prices of {' to '.join(dict.fromkeys((dates[0], dates[-1])))})" if dates else ""
    month = " to ".join(dict.fromkeys(map(_month, estimate.idle)))
    idle = _hourly(estimate.idle, estimate.idle_is_lower_bound)
    idle += f" ({month} a month)" if any(estimate.idle) and idle != _UNKNOWN else ""
    full = _hourly(estimate.full, estimate.full_is_lower_bound)
    lines = [
        f"Idle: {idle}. With all compute at max_vcpus: {full}{when}.",
        *_unknown_lines(estimate.unknown, most=4),
    ]
    is_listed = any(line.source == LISTED for line in estimate.priced)
    if any(each.spot for each in estimate.computes) and not is_listed:
        lines.append(_SPOT_NOTE)
    return [*lines, *estimate.notes, f"Not counted: {'; '.join(estimate.left_out)}."]


def _hourly(micros: tuple[int, int], is_lower_bound: bool) -> str:
    if not is_lower_bound:
        return f"{' to '.join(dict.fromkeys(map(format_cents, micros)))} an hour"
    if max(micros) < LEAST_MICROS:  # only the least charges are known
        return _UNKNOWN
    amounts = (f"${Decimal(each) / 1_000_000:,.2f}" for each in micros)
    return f"at least {' to '.join(dict.fromkeys(amounts))} an hour"


def _month(micros: int) -> str:
    """The cost of a month: in cents below ten dollars, in whole dollars above."""
    usd = Decimal(micros * MONTH) / 1_000_000
    return f"${usd:,.0f}" if usd >= 10 else f"${usd:,.2f}"


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """The estimate as JSON: US dollars, and every line."""
    return {
        "currency": "USD",
        "hoursPerMonth": MONTH,
        "idle": _hourly_json(estimate.idle, estimate.idle_is_lower_bound),
        "full": _hourly_json(estimate.full, estimate.full_is_lower_bound),
        "lines": list(map(_line_json, estimate.fixed)),
        "compute": {
            each.name: {
                "spot": each.spot,
                "idle": _capacity_json(each.idle),
                "full": _capacity_json(each.full),
            }
            for each in estimate.computes
        },
        "unknown": dict(estimate.unknown),
        "notCounted": list(estimate.left_out),
        "notes": list(estimate.notes),
    }


def _hourly_json(micros: tuple[int, int], is_lower_bound: bool) -> dict[str, Any]:
    low, high = micros
    return {
        "perHour": {"low": low / 1e6, "high": high / 1e6},
        "perMonth": {"low": low * MONTH / 1e6, "high": high * MONTH / 1e6},
        "isLowerBound": is_lower_bound,
    }


def _capacity_json(cost: CapacityCost) -> dict[str, Any]:
    return {
        "cheapest": list(map(_line_json, cost.cheapest)),
        "dearest": list(map(_line_json, cost.dearest)),
    }


def _line_json(line: EstimateLine) -> dict[str, Any]:
    if line.price is None:
        return {"what": line.what, "quantity": line.quantity, "unitPrice": None, "perHour": None}
    return {
        "what": line.what,
        "quantity": line.quantity,
        "unit": line.unit,
        "unitPrice": float(line.price),
        "perHour": line.micros / 1e6,
        "date": line.date,
        "since": line.since,
        "source": line.source,
    }


# --- shared ---------------------------------------------------------------------------------


def _unknown_lines(unknown: Mapping[str, str], most: int = 3) -> list[str]:
    """A line for each reason, with some of the things whose price is unknown."""
    by_reason: dict[str, list[str]] = {}
    for what, why in unknown.items():
        by_reason.setdefault(why, []).append(what)
    return [
        f"Price unknown: {printable(why)} ({printable(_join_some(what, ', ', most))})."
        for why, what in by_reason.items()
    ]


def _source_lines(rates: Sequence[Rate]) -> list[str]:
    if not rates:
        return []
    left_out = _left_out(rate.source for rate in rates)
    words = [f"Not counted: {left_out}."] if left_out else []
    return [f"Prices: {'; '.join(describe_sources(rates))}.", *words]


def _left_out(sources: Iterable[str]) -> str:
    """The charges that are left out; none for this machine."""
    return NOT_COUNTED if any(source != LOCAL_PRICE for source in sources) else ""


def _join_some(texts: Iterable[str], joint: str = " or ", most: int = 3) -> str:
    """`a or b or c or 2 more`, `a, b, c and 2 more`: the first texts, and how many others."""
    unique = list(dict.fromkeys(texts))
    more, last = len(unique) - most, " and " if joint == ", " else joint
    return joint.join(unique[:most]) + (f"{last}{more} more" if more > 0 else "")


def _rate_json(rate: Rate) -> dict[str, Any]:
    return {"perHour": _bounds_json(rate.hour), "date": rate.date or None, "source": rate.source}


def _bounds_json(usd: Usd) -> dict[str, float]:
    return {"low": round_usd(usd.low), "high": round_usd(usd.high)}


def _number(value: Decimal) -> float:
    return round(float(value), 6)
