"""Render quotes, bills and totals as text and as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from batchml.cli.render import printable, table
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
)
from batchml.cost.quote import HOUR, NOT_COUNTED, OWN_PRICE, Offer, Quote, Usd
from batchml.model.names import dollar_range, duration
from batchml.model.names import dollars as dollars
from batchml.model.run import Run, max_seconds

ATTEMPTS_SHOWN = 20
FREE = "This machine costs nothing. `usd_per_hour` in [env.local] of batchml.toml gives it a price."
_PARTS = {1: "", 2: "half of ", 3: "a third of ", 4: "a quarter of "}


def money(usd: Usd, *, is_least: bool = False) -> str:
    """`$0.52`, `$0.25 to $1.01`, `at least $3.10`; `unknown` for at least nothing."""
    if is_least and not usd.high:
        return "unknown"
    ends = dollar_range(usd.low, usd.high)
    return f"at least {ends}" if is_least else ends


# --- quote ----------------------------------------------------------------------------------


def quote_lines(quote: Quote, before: UsualDuration | None = None) -> list[str]:
    """A quote as text. `before`: how long the last runs of the job took."""
    unknown = {**quote.unknown}
    for part in quote.parts.values():
        unknown |= part.unknown
    if quote.hour is None:
        return [f"Its cost is unknown. {line}" for line in _unknown(unknown)]
    many = f", {quote.copies} containers" if quote.copies > 1 else ""
    when = f" (prices of {' to '.join(quote.dates)})" if quote.dates else ""
    offers = [offer for each in (quote, *quote.parts.values()) for offer in each.offers]
    where = _hosts(list(dict.fromkeys(map(_where, offers)))) or "this machine"
    lines = [f"It costs {money(quote.hour)} an hour{many}, on {where}{when}."]
    if before is not None:
        whose = "Its last run" if before.runs == 1 else f"Its last {before.runs} runs"
        took = f"took {duration(before.seconds)}{' (the median)' if before.runs > 1 else ''}"
        lines.append(f"{whose} {took}: that is {money(_of_usual(quote.hour, before))}.")
    if quote.most is not None:
        tries = f" in all of {quote.need.attempts} attempts" if quote.need.attempts > 1 else ""
        lines.append(f"At most {dollars(quote.most.high)}, if it runs to its timeout{tries}.")
    lines += _unknown(unknown)
    if any(offer.candidate.spot for offer in offers):
        lines.append("Spot hosts are counted at today's spot prices, which change.")
    return [*lines, *quote.notes, *([FREE] if quote.is_free else ())]


def _where(offer: Offer) -> str:
    """The candidate in words; of this machine also the share that is counted."""
    words, share = offer.candidate.words, offer.candidate.share
    if offer.price.source != OWN_PRICE:
        return words
    part = next((text for of, text in _PARTS.items() if share * of == 1), None)
    return f"{share * 100:.0f} % of {words}" if part is None else part + words


def _of_usual(hour: Usd, before: UsualDuration) -> Usd:
    return hour.times(Decimal(str(before.seconds)) / HOUR)


def quote_json(quote: Quote, before: UsualDuration | None = None) -> dict[str, Any]:
    return {
        "currency": "USD",
        "perHour": _ends(quote.hour) if quote.hour else None,
        "most": _ends(quote.most) if quote.most else None,
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
    usd = _ends(_of_usual(quote.hour, before))
    return {"runs": before.runs, "seconds": before.seconds, **usd}


def _offer_json(offer: Offer) -> dict[str, Any]:
    return {
        "type": offer.candidate.instance.name,
        "spot": offer.candidate.spot,
        "share": _number(offer.candidate.share),
        "perHour": _ends(offer.hour),
        "date": offer.price.date if offer.price.asked else None,
        "since": offer.price.since or None,
        "source": offer.price.source,
    }


# --- bill -----------------------------------------------------------------------------------


def bill_lines(run: Run, bill: Bill) -> list[str]:
    """A bill as text."""
    if bill.is_kept:
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
    cost = money(bill.usd, is_least=bill.is_least)
    if bill.is_running:
        lines.append(f"So far: {cost}, and {money(bill.hour)} an hour.")
    else:
        lines.append(f"Cost: {cost}.")
    if bill.failed.high:
        count = sum(1 for attempt in bill.attempts if attempt.has_failed)
        what = "1 attempt" if count == 1 else f"{count} attempts"
        lines.append(f"Of this, {money(bill.failed)} went into {what} that failed.")
    lines += _budget(run, bill)
    lines += _unknown(bill.unknown)
    return lines + _sources(bill.rates) + free


def _budget(run: Run, bill: Bill) -> list[str]:
    limit = max_seconds(run.environment)
    if not limit or run.array_size:
        return []
    own = sum(attempt.seconds for attempt in bill.attempts if attempt.job_id == run.job_id)
    left = max(0.0, limit - own)
    return [f"--max-cost allows {duration(limit)} of running time; {duration(left)} is left."]


def bill_json(run: Run, bill: Bill) -> dict[str, Any]:
    return {
        "jobId": run.job_id,
        "jobName": run.job_name or run.name,
        "status": run.status.value,
        "cost": cost_json(bill),
    }


def cost_json(bill: Bill) -> dict[str, Any]:
    """The value of `cost` in a run's JSON."""
    return {
        "currency": "USD",
        "usd": bill.figure,
        **_ends(bill.usd),
        "isLowerBound": bill.is_least,
        "isFinal": not bill.is_running,
        "perHour": _ends(bill.hour) if bill.is_running else None,
        "failed": _ends(bill.failed),
        "seconds": bill.seconds,
        "attempts": [_attempt_json(attempt) for attempt in bill.attempts],
        "unknown": bill.unknown,
        "prices": [_rate_json(rate) for rate in bill.rates],
        "notCounted": _left_out(rate.source for rate in bill.rates),
    }


def _rows(bill: Bill) -> list[list[str]]:
    rows = [["ATTEMPT", "HOST", "RAN", "SHARE", "COST", ""]]
    for attempt in bill.attempts:
        child = attempt.job_id.rpartition(":")[2] + "/" if ":" in attempt.job_id else ""
        cost = "unknown" if attempt.usd is None else money(attempt.usd, is_least=bool(attempt.why))
        state = "running" if attempt.is_running else "failed" if attempt.has_failed else ""
        host = printable(attempt.host)
        number = f"{child}{attempt.attempt}" if attempt.attempt else ""
        rows.append([number, host, duration(attempt.seconds), _share(attempt), cost, state])
    return rows


def _share(attempt: AttemptCost) -> str:
    if not attempt.share.high:
        return ""
    ends = dict.fromkeys(
        f"{float(each) * 100:.0f}" for each in (attempt.share.low, attempt.share.high)
    )
    return f"{' to '.join(ends)} %"


def _attempt_json(attempt: AttemptCost) -> dict[str, Any]:
    return {
        "jobId": attempt.job_id,
        "attempt": attempt.attempt,
        "host": attempt.host,
        "seconds": attempt.seconds,
        "share": {"low": _number(attempt.share.low), "high": _number(attempt.share.high)},
        "usd": _ends(attempt.usd) if attempt.usd else None,
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
    for heading, groups in (("QUEUE", _by_queue(spent)), ("JOB", _by_job(spent))):
        rows = [[heading, "RUNS", "RAN", "COST", "FAILED"]]
        rows += [_total_row(each) for each in groups]
        lines += [table(rows), ""]
    whole = sum_costs("", spent)
    cost = money(whole.usd, is_least=whole.is_least)
    runs = "1 run" if whole.runs == 1 else f"{whole.runs} runs"
    lines.append(f"The last {since}: {cost} for {runs}, {duration(whole.seconds)} of running.")
    going = sum(1 for each in spent if each.is_running)
    if going:
        lines.append(f"{going} still running, counted up to now.")
    reasons = dict.fromkeys(why for each in spent for why in each.unknown)
    lines += [f"Price unknown: {printable(why)}." for why in list(reasons)[:4]]
    return lines + _sources(rates)


def spending_json(spent: Sequence[RunCost], rates: Sequence[Rate], since: int) -> dict[str, Any]:
    return {
        "currency": "USD",
        "since": since,
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
    return group_costs(spent, lambda each: each.name)


def _total_row(each: CostTotal) -> list[str]:
    cost = money(each.usd, is_least=each.is_least)
    failed = money(each.failed) if each.failed.high else ""
    return [printable(each.name), str(each.runs), duration(each.seconds), cost, failed]


def _total_json(each: CostTotal) -> dict[str, Any]:
    return {
        "runs": each.runs,
        **_ends(each.usd),
        "isLowerBound": each.is_least,
        "failed": _ends(each.failed),
        "seconds": each.seconds,
    }


def _spent_json(each: RunCost) -> dict[str, Any]:
    return {
        "jobId": each.job_id,
        "jobName": each.name,
        "jobQueue": each.queue,
        "createdAt": each.at,
        **_ends(each.usd),
        "failed": _ends(each.failed),
        "seconds": each.seconds,
        "isRunning": each.is_running,
        "unknown": list(each.unknown),
    }


# --- shared ---------------------------------------------------------------------------------


def _unknown(unknown: Mapping[str, str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for what, why in unknown.items():
        by_reason.setdefault(why, []).append(what)
    return [
        f"Price unknown: {printable(why)} ({printable(_hosts(what, ', '))})."
        for why, what in by_reason.items()
    ]


def _sources(rates: Sequence[Rate]) -> list[str]:
    if not rates:
        return []
    left_out = _left_out(rate.source for rate in rates)
    words = [f"Not counted: {left_out}."] if left_out else []
    return [f"Prices: {'; '.join(describe_sources(rates))}.", *words]


def _left_out(sources: Iterable[str]) -> str:
    """The charges that are left out; none for this machine."""
    return NOT_COUNTED if any(source != OWN_PRICE for source in sources) else ""


def _hosts(names: Sequence[str], joint: str = " or ", most: int = 3) -> str:
    kinds = list(dict.fromkeys(names))
    more = len(kinds) - most
    return joint.join(kinds[:most]) + (f"{joint}{more} more" if more > 0 else "")


def _rate_json(rate: Rate) -> dict[str, Any]:
    return {"perHour": _ends(rate.hour), "date": rate.date or None, "source": rate.source}


def _ends(usd: Usd) -> dict[str, float]:
    return {"low": round_usd(usd.low), "high": round_usd(usd.high)}


def _number(value: Decimal) -> float:
    return round(float(value), 6)
