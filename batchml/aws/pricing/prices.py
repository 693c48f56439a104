"""The types that all sources of prices share, and helpers for their calls."""

import time
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

from msgspec import Struct

from batchml.errors import AccessError, BatchmlError, ServiceError

_TRIES = 2  # of a call: a price is not worth a long wait
_PAGE_SIZE = 100
_DENIED = ("UnauthorizedOperation", "AccessDeniedException", "AccessDenied")


class Price(Struct, frozen=True):
    """US dollars for one `per`. Spot prices differ by zone; for others, `low` is `high`."""

    low: Decimal
    high: Decimal
    per: str  # "hour", "GB", "month" or "GB-month"
    asked: int  # when AWS was asked, in seconds since the epoch; 0 for a price that is not AWS's
    since: str  # the day from which AWS lists it
    source: str

    @property
    def date(self) -> str:
        """The day on which AWS was asked, or ""."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.asked)) if self.asked else ""


class PriceTable(Struct, frozen=True):
    """Prices by item. `unknown` has the reason for each missing price; `notes` are for people."""

    prices: Mapping[str, Price] = {}
    unknown: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


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
    """The reason for a missing answer. It is short for a missing permission."""
    if isinstance(error, AccessError | ServiceError) and error.code in _DENIED:
        return f"{operation} is not allowed"
    return str(error).rstrip(".")


def parse_decimal(text: Any) -> Decimal | None:
    """A finite number, or None."""
    try:
        found = Decimal(str(text))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
