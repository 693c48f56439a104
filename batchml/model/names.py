"""Names, ARNs and job ids of AWS Batch: parse and format.

Source: AWS Batch API reference (name patterns of CreateJobQueue, RegisterJobDefinition, SubmitJob).
"""

import base64
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from decimal import Decimal

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_ARN = re.compile(r"arn:aws[a-z-]*:batch:([a-z0-9-]+):(\d{12}):([a-z-]+)/(.+)")

# One digit, so that no word of a name is taken for a key, then 80 random bits.
_KEY = re.compile(r"[2-7][a-z2-7]{16}")
_KEY_DIGITS = "234567"
_KEY_BYTES = 10

MAX_NAME = 128
KEY_LENGTH = 17


class Arn(NamedTuple):
    region: str
    account: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"arn:aws:batch:{self.region}:{self.account}:{self.kind}/{self.name}"


def parse_arn(text: str) -> Arn | None:
    """Return the parts of a Batch ARN, or None when `text` is not one."""
    match = _ARN.fullmatch(text)
    return Arn(*match.groups()) if match else None


def is_valid_name(text: str) -> bool:
    """True for 1-128 letters, digits, hyphens and underscores, the first a letter or digit."""
    return _NAME.fullmatch(text) is not None


def to_name(text: str) -> str:
    """Make a valid Batch name out of any text, as close to it as can be."""
    kept = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")
    return kept[:MAX_NAME] or "job"


def bare_name(name_or_arn: str) -> str:
    """`my-queue` for both `my-queue` and its ARN."""
    arn = parse_arn(name_or_arn)
    return arn.name if arn else name_or_arn


def short_id(job_id: str) -> str:
    """The first block of a job id: what people see in tables, and enough to name a run."""
    return job_id.split("-", 1)[0] if len(job_id) == 36 else job_id


def new_key(random_bytes: Callable[[int], bytes]) -> str:
    """A key for one submission: `random_bytes` is `os.urandom`, or what a test gives instead.

    Lower-case, because the JOB_NAME filter of ListJobs does not tell cases apart.
    """
    drawn = random_bytes(_KEY_BYTES + 1)
    digit = _KEY_DIGITS[drawn[0] % len(_KEY_DIGITS)]
    return digit + base64.b32encode(drawn[1:]).decode().lower()


def new_token(random_bytes: Callable[[int], bytes]) -> str:
    """A secret for one submission, by which its nodes know each other: 32 hex digits."""
    return random_bytes(16).hex()


def is_key(text: str) -> bool:
    """True for what `new_key` makes."""
    return _KEY.fullmatch(text) is not None


def keyed_name(name: str, key: str) -> str:
    """The job's name in AWS, `<name>-<key>`; the name is cut where both would be over 128."""
    return f"{name[: MAX_NAME - KEY_LENGTH - 1]}-{key}"


def split_key(job_name: str) -> tuple[str, str]:
    """A job's name in AWS -> the name that people see, and the key; "" where there is none."""
    name, dash, key = job_name.rpartition("-")
    return (name, key) if dash and name and is_key(key) else (job_name, "")


# --- words ----------------------------------------------------------------------------------------
# Times and amounts as people read them: the same wherever they are shown.


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
