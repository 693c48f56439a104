"""Names, ARNs and job ids of AWS Batch: parse and format.

Source: AWS Batch API reference (name patterns of CreateJobQueue, RegisterJobDefinition, SubmitJob).
"""

import re
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_ARN = re.compile(r"arn:aws[a-z-]*:batch:([a-z0-9-]+):(\d{12}):([a-z-]+)/(.+)")

MAX_NAME = 128


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
