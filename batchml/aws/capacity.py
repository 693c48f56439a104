"""EC2 capacity: capacity reservations and blocks, and spot placement scores.

A score from 1 to 10 tells how likely spot hosts are available in a region or zone now; it does not
tell how long they stay.

Sources: EC2 API Reference, DescribeCapacityReservations, GetSpotPlacementScores; EC2 User Guide,
"Spot placement score" (10 regions a call; an account's new configurations in 24 hours are limited;
fewer than three instance types score low).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.aws.pricing.prices import ClientFactory, describe_failure
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError

_TRIES = 2
_GONE = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
BLOCK = "capacity-block"
ENDED_STATES = ("expired", "cancelled", "failed", "payment-failed", "unsupported")
_MINUTES_OF_A_BLOCK = 30  # EC2 begins to end a block's hosts so long before its end


# --- Reservations ---------------------------------------------------------------------------------


class Reservation(Struct, frozen=True):
    """A capacity reservation or block. Times are in seconds since the epoch, or 0."""

    id: str
    type: str = ""
    zone: str = ""
    state: str = ""
    total: int = 0
    free: int = 0
    start: float = 0.0
    end: float = 0.0
    is_block: bool = False

    @property
    def last(self) -> float:
        """The time until which hosts run in it; 0 if it has no end."""
        early = _MINUTES_OF_A_BLOCK * 60 if self.is_block else 0
        return self.end - early if self.end else 0.0


class ReservationTable(Struct, frozen=True):
    """Reservations by id. `why` is the reason if some are missing."""

    found: Mapping[str, Reservation] = {}
    why: str = ""


def fetch_reservations(session: ClientFactory, ids: Iterable[str]) -> ReservationTable:
    """Describe each reservation in a call of its own: a missing id fails a whole call.

    Failures are not raised.
    """
    found, why = {}, ""
    for each in sorted(set(ids) - {""}):
        try:
            with translate_errors("ec2:DescribeCapacityReservations"):
                client = session.client("ec2", attempts=_TRIES)
                answer = client.describe_capacity_reservations(CapacityReservationIds=[each])
                for entry in answer["CapacityReservations"]:
                    found[each] = _reservation(entry)
        except BatchmlError as error:
            if getattr(error, "code", "") in _GONE:
                found[each] = Reservation(each, state="gone")
            else:
                why = describe_failure("ec2:DescribeCapacityReservations", error)
    return ReservationTable(found, why)


def _reservation(entry: Mapping[str, object]) -> Reservation:
    def text(name: str) -> str:
        return str(entry.get(name) or "")

    def when(name: str) -> float:
        at = entry.get(name)
        stamp = getattr(at, "timestamp", None)
        return float(stamp()) if stamp else 0.0

    def count(name: str) -> int:
        number = entry.get(name)
        return number if isinstance(number, int) else 0

    return Reservation(
        text("CapacityReservationId"),
        text("InstanceType"),
        text("AvailabilityZone") or text("AvailabilityZoneId"),
        text("State"),
        count("TotalInstanceCount"),
        count("AvailableInstanceCount"),
        when("StartDate"),
        when("EndDate"),
        text("ReservationType") == BLOCK,
    )


# --- Spot placement scores ------------------------------------------------------------------------


MOST_REGIONS = 10  # of one call
FEW_TYPES = 3  # fewer instance types always score low
_TOO_MANY = "MaxConfigLimitExceeded"

CapacityUnit = Literal["units", "vcpu"]  # hosts, or vCPUs


class PlacementScore(Struct, frozen=True):
    """`zone` is a zone's id, such as use1-az4: the same zone in every account."""

    region: str
    score: int
    zone: str = ""


def score_requests(
    types: Sequence[str], target: int, unit: CapacityUnit, regions: Sequence[str], *, zones: bool
) -> list[dict[str, Any]]:
    """The GetSpotPlacementScores requests: one for ten regions, or one for all regions."""
    request: dict[str, Any] = {
        "InstanceTypes": sorted(set(types)),
        "TargetCapacity": target,
        "TargetCapacityUnitType": unit,
        "SingleAvailabilityZone": zones,
    }
    named = list(dict.fromkeys(regions))
    if not named:
        return [request]
    return [
        {**request, "RegionNames": named[start : start + MOST_REGIONS]}
        for start in range(0, len(named), MOST_REGIONS)
    ]


def fetch_placement_scores(
    session: Session, requests: Sequence[dict[str, Any]]
) -> list[PlacementScore]:
    """The scores, the best first. Raises AccessError, ServiceError, ServiceUnreachable."""
    found = []
    for request in requests:
        try:
            with translate_errors("ec2:GetSpotPlacementScores"):
                client = session.client("ec2")
                pages = client.get_paginator("get_spot_placement_scores").paginate(**request)
                found += [
                    PlacementScore(
                        each["Region"], each["Score"], each.get("AvailabilityZoneId", "")
                    )
                    for page in pages
                    for each in page.get("SpotPlacementScores", ())
                ]
        except ServiceError as error:
            if error.code != _TOO_MANY:
                raise
            raise BatchmlError(
                "AWS limits the number of different score requests of an account in 24 hours. "
                "Repeat an earlier request (the same types, target and regions), or wait."
            ) from error
    return sorted(found, key=lambda each: (-each.score, each.region, each.zone))
