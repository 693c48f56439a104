"""What an estimate says, in words and as JSON."""

from decimal import Decimal
from typing import Any

from batchml.ops.estimate import MONTH, Estimate, Fill, Line


def lines(estimate: Estimate) -> list[str]:
    """The estimate for people: the two amounts, what is unknown and why, what is not in it."""
    if not estimate.fixed:
        return []
    dates = sorted({line.date for line in estimate.priced})
    when = f" (prices of {' to '.join(dict.fromkeys((dates[0], dates[-1])))})" if dates else ""
    month = " to ".join(dict.fromkeys(_month(micros) for micros in estimate.idle))
    idle = _amount(estimate.idle, estimate.idle_is_least)
    idle += f" ({month} a month)" if any(estimate.idle) else ""
    full = _amount(estimate.full, estimate.full_is_least)
    said = [f"Idle: {idle}. Full: {full}{when}."]
    by_reason: dict[str, list[str]] = {}
    for what, why in estimate.unknown.items():
        by_reason.setdefault(why, []).append(what)
    said += [f"Price unknown: {why} ({_some(what)})." for why, what in by_reason.items()]
    if any(each.spot for each in estimate.computes):
        said.append("Spot machines are counted at today's spot prices, which change.")
    return [*said, *estimate.notes, f"Not counted: {'; '.join(estimate.left_out)}."]


def _amount(ends: tuple[int, int], is_least: bool) -> str:
    if is_least and not any(ends):
        return "unknown"
    amounts = " to ".join(dict.fromkeys(_dollars(micros) for micros in ends))
    return f"{'at least ' if is_least else ''}{amounts} an hour"


def _dollars(micros: int) -> str:
    """Two places, the nearest cent; what is less than half of one is not shown as nothing."""
    if 0 < micros < 5_000:
        return "less than $0.01"
    return f"${Decimal((micros + 5_000) // 10_000) / 100:,.2f}"


def _month(micros: int) -> str:
    """Whole dollars from ten on."""
    dollars = Decimal(micros * MONTH) / 1_000_000
    return f"${dollars:,.0f}" if dollars >= 10 else f"${dollars:,.2f}"


def _some(names: list[str], shown: int = 4) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def to_json(estimate: Estimate) -> dict[str, Any]:
    """The estimate for programs: US dollars, and every line that makes it up."""
    return {
        "currency": "USD",
        "hoursPerMonth": MONTH,
        "idle": _ends(estimate.idle, estimate.idle_is_least),
        "full": _ends(estimate.full, estimate.full_is_least),
        "lines": [_line_json(line) for line in estimate.fixed],
        "compute": {
            each.name: {
                "spot": each.spot,
                "idle": _fill_json(each.idle),
                "full": _fill_json(each.full),
            }
            for each in estimate.computes
        },
        "unknown": dict(estimate.unknown),
        "notCounted": list(estimate.left_out),
        "notes": list(estimate.notes),
    }


def _ends(ends: tuple[int, int], is_least: bool) -> dict[str, Any]:
    low, high = ends
    return {
        "perHour": {"low": _usd(low), "high": _usd(high)},
        "perMonth": {"low": _usd(low * MONTH), "high": _usd(high * MONTH)},
        "isLowerBound": is_least,
    }


def _fill_json(fill: Fill) -> dict[str, Any]:
    return {
        "cheapest": [_line_json(line) for line in fill.cheapest],
        "dearest": [_line_json(line) for line in fill.dearest],
    }


def _line_json(line: Line) -> dict[str, Any]:
    if line.price is None:
        return {"what": line.what, "quantity": line.quantity, "unitPrice": None, "perHour": None}
    return {
        "what": line.what,
        "quantity": line.quantity,
        "unit": line.unit,
        "unitPrice": float(line.price),
        "perHour": _usd(line.micros),
        "date": line.date,
        "since": line.since,
        "source": line.source,
    }


def _usd(micros: int) -> float:
    return micros / 1_000_000
