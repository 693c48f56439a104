"""Times and amounts as people read them: the same wherever they are shown."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal


def duration(seconds: float) -> str:
    """`0:42`, `12:03`, `3:05:00`"""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def spelled(seconds: float) -> str:
    """`5 seconds`, `90 minutes`, `1.5 hours`: in the greatest unit of which there is one at least;
    minutes where they are whole and hours are not, up to two hours."""
    minutes = seconds / 60
    if minutes >= 60 and not (minutes < 120 and minutes % 60 and minutes % 1 == 0):
        return _counted(seconds / 3600, "hour")
    return _counted(minutes, "minute") if minutes >= 1 else _counted(seconds, "second")


def in_words(seconds: float) -> str:
    """`1 h 30 min`, `45 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def _counted(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number} {unit}{'' if number == '1' else 's'}"


def amounts(low: "Decimal", high: "Decimal") -> str:
    """`$0.52`, or `$0.25 to $1.01`."""
    return " to ".join(dict.fromkeys((dollars(low), dollars(high))))


def dollars(usd: "Decimal") -> str:
    """Cents from a dollar on, three digits from a cent on, four below."""
    if 0 < usd * 10_000 < 1:
        return "less than $0.0001"
    digits = 2 if usd >= 1 or not usd else 3 if usd * 100 >= 1 else 4
    return f"${usd:,.{digits}f}"
