"""Parse and format names, ARNs and job ids of AWS Batch; format durations, amounts, commands.

Source: AWS Batch API reference (name patterns of CreateJobQueue, RegisterJobDefinition, SubmitJob).
"""

import base64
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from decimal import Decimal

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}"
_ARN = r"arn:aws[a-z-]*:batch:([a-z0-9-]+):(\d{12}):([a-z-]+)/(.+)"

# A key begins with a digit, so that no word of a name looks like it. 80 random bits follow.
_KEY = r"[2-7][a-z2-7]{16}"
_KEY_DIGITS = "234567"
_KEY_BYTES = 10

MAX_NAME = 128
KEY_LENGTH = 17


class Arn(NamedTuple):
    """The ARN of a resource of AWS Batch. `kind` is `job`, `job-queue` or another of its types."""

    region: str
    account: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"arn:aws:batch:{self.region}:{self.account}:{self.kind}/{self.name}"


def parse_arn(text: str) -> Arn | None:
    """The parts of an ARN of AWS Batch; None for other texts."""
    match = re.fullmatch(_ARN, text)
    return Arn(*match.groups()) if match else None


def is_valid_name(text: str) -> bool:
    """Whether a text has 1-128 letters, digits, - and _, and begins with a letter or digit."""
    return re.fullmatch(_NAME, text) is not None


def to_name(text: str) -> str:
    """Change a text as little as possible to make it a valid name."""
    kept = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")
    return kept[:MAX_NAME] or "job"


def bare_name(name_or_arn: str) -> str:
    """Return `my-queue` for both `my-queue` and its ARN."""
    arn = parse_arn(name_or_arn)
    return arn.name if arn else name_or_arn


def distinct_names(names: Iterable[str], shorten: Callable[[str], str]) -> dict[str, str]:
    """The short names of resources by their names in AWS; two that are equal stay long."""
    short = {name: shorten(name) for name in names}
    counts = Counter(short.values())
    return {name: each if counts[each] == 1 else name for name, each in short.items()}


def short_id(job_id: str) -> str:
    """The first block of a job id, with its child `:3` or node `#1`, which commands accept."""
    whole, part = job_id[:36], job_id[36:]
    is_id = len(whole) == 36 and part[:1] in ("", ":", "#")
    return whole.split("-", 1)[0] + part if is_id else job_id


def new_key(random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """Make a key for a submission or a sweep. Tests pass their own `random_bytes`.

    It is in lower case, because the JOB_NAME filter of ListJobs ignores the case.
    """
    drawn = random_bytes(_KEY_BYTES + 1)
    digit = _KEY_DIGITS[drawn[0] % len(_KEY_DIGITS)]
    return digit + base64.b32encode(drawn[1:]).decode().lower()


def new_token(random_bytes: Callable[[int], bytes]) -> str:
    """Make the secret by which the nodes of a run recognize each other: 32 hex digits."""
    return random_bytes(16).hex()


def is_key(text: str) -> bool:
    """Whether a text has the form of `new_key`."""
    return re.fullmatch(_KEY, text) is not None


def keyed_name(name: str, key: str) -> str:
    """The job's name in AWS, `<name>-<key>`, with the name cut to fit into 128 characters."""
    return f"{name[: MAX_NAME - KEY_LENGTH - 1]}-{key}"


def split_key(job_name: str) -> tuple[str, str]:
    """Split a job's name in AWS into the run's name and the key, which may be ""."""
    name, dash, key = job_name.rpartition("-")
    return (name, key) if dash and name and is_key(key) else (job_name, "")


# --- Durations and amounts ------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Format seconds as `0:42`, `12:03` or `3:05:00`."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def format_used(amount: float) -> str:
    """Format cores or GPUs in use as `0.93` or `3.1`."""
    return f"{amount:.2f}" if amount < 1 else f"{amount:.1f}"


def long_duration(seconds: float) -> str:
    """Format seconds as `5 seconds`, `90 minutes` or `1.5 hours`.

    The unit is the largest that gives at least 1. Below two hours, whole minutes are preferred to a
    fraction of hours.
    """
    minutes = seconds / 60
    if minutes >= 60 and not (minutes < 120 and minutes % 60 and minutes % 1 == 0):
        return _counted(seconds / 3600, "hour")
    return _counted(minutes, "minute") if minutes >= 1 else _counted(seconds, "second")


def idle_text(seconds: float) -> str:
    """`idle 14 min`; empty for a run that is not idle (0)."""
    return f"idle {short_duration(seconds // 60 * 60)}" if seconds else ""


def short_duration(seconds: float) -> str:
    """Format seconds as `1 h 30 min` or `45 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def _counted(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number} {unit}{'' if number == '1' else 's'}"


def dollar_range(low: "Decimal", high: "Decimal") -> str:
    """Format a range as `$0.25 to $1.01`, or `$0.52` if both ends read the same."""
    return " to ".join(dict.fromkeys((dollars(low), dollars(high))))


def dollars(usd: "Decimal") -> str:
    """Format an amount with two decimals from $1, three from 1 cent, and four below that."""
    if 0 < usd * 10_000 < 1:
        return "less than $0.0001"
    digits = 2 if usd >= 1 or not usd else 3 if usd * 100 >= 1 else 4
    return f"${usd:,.{digits}f}"


# --- Commands -------------------------------------------------------------------------------------


def join_shell(words: Sequence[str]) -> str:
    """Join words to one printable line that a POSIX shell runs as exactly these words."""
    return to_one_line(shlex.join(words))


def to_one_line(command: str) -> str:
    """Write a command with newlines, tabs and other control characters in one printable line.

    POSIX has no escape for a control character in a word, and `$(...)` cuts newlines at its end. So
    the whole command is written with printf's escapes, and evaluated.
    """
    if command.isprintable():
        return command
    escaped = "".join(
        char if char.isprintable() and char not in "\\'%" else _octal(char) for char in command
    )
    return f"""eval "$(printf '{escaped}')\""""


def _octal(char: str) -> str:
    if char == "%":
        return "%%"
    return "".join(f"\\{byte:03o}" for byte in char.encode(errors="surrogateescape"))
