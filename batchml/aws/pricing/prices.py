"""The types and helpers that all sources of prices share; the sizes of instance types."""

import re
import time
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.errors import AccessError, BatchmlError, ServiceError

_TRIES = 2  # of a call: a price is not worth a long wait
_PAGE_SIZE = 100
_PAGE = r"(?i)<(!doctype|html|\?xml)"
_MOST = 300  # characters of a reason
_DENIED = ("UnauthorizedOperation", "AccessDeniedException", "AccessDenied")


class Price(Struct, frozen=True):
    """US dollars for one `per`. Spot prices differ by zone; for others, `low` is `high`."""

    low: Decimal
    high: Decimal
    per: str  # "hour", "GB", "month" or "GB-month"
    asked: int  # the time of the call, in seconds since the epoch; 0 for a price that is not AWS's
    since: str  # the day from which the price is valid
    source: str

    @property
    def date(self) -> str:
        """The day of the call to AWS, or ""."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.asked)) if self.asked else ""


class PriceTable(Struct, frozen=True):
    """Prices by item. `unknown` has the reason for each missing price; `notes` are for users."""

    prices: Mapping[str, Price] = {}
    unknown: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


class PriceSource(Protocol):
    """A source of prices: AWS (`cache.Prices`), or the list that comes with batchml (`listed`)."""

    def instances(self, region: str, names: Iterable[str]) -> "InstanceTypes": ...

    def ask(self, region: str, items: Iterable[str]) -> PriceTable: ...


class ClientFactory(Protocol):
    """The part of `batchml.aws.session.Session` that the sources use."""

    def client(self, service: str, attempts: int = 5, region: str = "") -> Any: ...


def paginate(
    session: ClientFactory, service: str, operation: str, request: Mapping[str, Any],
    *, region: str = "", has_page_size: bool = True,
) -> Any:  # fmt: skip
    """The pages of an operation's answer."""
    client = session.client(service, attempts=_TRIES, region=region)
    size = {"PageSize": _PAGE_SIZE} if has_page_size else {}
    return client.get_paginator(operation).paginate(**request, PaginationConfig=size)


def describe_failure(operation: str, error: BatchmlError) -> str:
    """The reason for a missing answer: one line, short if a permission is missing.

    A proxy or a server that is not AWS's may answer with a page.
    """
    if isinstance(error, AccessError | ServiceError) and error.code in _DENIED:
        return f"{operation} is not allowed"
    line = str(error).lstrip().partition("\n")[0]
    if re.search(_PAGE, line):
        return f"{operation}: the answer is a web page, which did not come from AWS"
    return line.rstrip().rstrip(".") if len(line) <= _MOST else f"{line[:_MOST].rstrip()} ..."


def parse_decimal(text: Any) -> Decimal | None:
    """Parse a finite number; None for other values."""
    try:
        found = Decimal(str(text))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


# --- Instance types -------------------------------------------------------------------------------


# Names in `instanceTypes` for which AWS Batch chooses types itself: CreateComputeEnvironment.
CHOSEN_BY_BATCH = ("optimal", "default_x86_64", "default_arm64")


class InstanceType(Struct, frozen=True):
    """The size of an EC2 instance type."""

    name: str
    vcpus: int
    memory_mib: int
    gpus: int  # NVIDIA GPUs, the only GPUs that containers can use
    arch: str


class InstanceTypes(Struct, frozen=True):
    """The types of each name (a type or a family), or the reason why they are unknown."""

    types: Mapping[str, tuple[InstanceType, ...]] = {}
    unknown: Mapping[str, str] = {}


def fetch_instance_types(
    session: ClientFactory, region: str, names: Iterable[str]
) -> dict[str, tuple[InstanceType, ...]]:
    """The types of each name (type or family), the smallest first. It raises what `call` does."""
    patterns = [name if "." in name else f"{name}.*" for name in names]
    request = {"Filters": [{"Name": "instance-type", "Values": patterns}]}
    with translate_errors("ec2:DescribeInstanceTypes"):
        found = [
            _to_instance_type(entry)
            for page in paginate(session, "ec2", "describe_instance_types", request)
            for entry in page["InstanceTypes"]
        ]
    return {
        name: tuple(sorted((each for each in found if _is_of(each.name, name)), key=_by_size))
        for name in names
    }


def _to_instance_type(entry: Mapping[str, Any]) -> InstanceType:
    gpus = entry.get("GpuInfo", {}).get("Gpus", ())
    architectures = entry["ProcessorInfo"]["SupportedArchitectures"]
    return InstanceType(
        name=entry["InstanceType"],
        vcpus=entry["VCpuInfo"]["DefaultVCpus"],
        memory_mib=entry["MemoryInfo"]["SizeInMiB"],
        gpus=sum(gpu.get("Count", 0) for gpu in gpus if gpu.get("Manufacturer") == "NVIDIA"),
        arch="arm64" if "arm64" in architectures else "x86_64",
    )


def _is_of(instance_type: str, name: str) -> bool:
    return name in (instance_type, instance_type.partition(".")[0])


def _by_size(instance: InstanceType) -> tuple[int, str]:
    return instance.vcpus, instance.name
