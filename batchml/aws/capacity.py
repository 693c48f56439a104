"""Capacity reservations and capacity blocks as EC2 has them: how many hosts, where, until when.

Source: EC2 API Reference, DescribeCapacityReservations.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import translated
from batchml.aws.pricing import Clients, why_not
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError

_TRIES = 2
_GONE = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
BLOCK = "capacity-block"
OVER = ("expired", "cancelled", "failed", "payment-failed", "unsupported")  # states: no host comes
_MINUTES_OF_A_BLOCK = 30  # before its end EC2 begins to end its hosts: EC2 User Guide


class Reservation(Struct, frozen=True):
    """Times in seconds since the epoch; 0 where there is none."""

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
        """Until when hosts run in it; 0: until somebody cancels it."""
        early = _MINUTES_OF_A_BLOCK * 60 if self.is_block else 0
        return self.end - early if self.end else 0.0


class Reservations(Struct, frozen=True):
    """What is known of some of them, by id; `why` where EC2 did not say it."""

    found: Mapping[str, Reservation] = {}
    why: str = ""


def reservations(session: Clients, ids: Iterable[str]) -> Reservations:
    """Ask for these, which are few: a call each, because one that is gone fails the whole call.

    It raises nothing.
    """
    found, why = {}, ""
    for each in sorted(set(ids) - {""}):
        try:
            with translated("ec2:DescribeCapacityReservations"):
                client = session.client("ec2", attempts=_TRIES)
                answer = client.describe_capacity_reservations(CapacityReservationIds=[each])
                for entry in answer["CapacityReservations"]:
                    found[each] = _reservation(entry)
        except BatchmlError as error:
            if getattr(error, "code", "") in _GONE:
                found[each] = Reservation(each, state="gone")
            else:
                why = why_not("ec2:DescribeCapacityReservations", error)
    return Reservations(found, why)


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


# --- spot placement scores ------------------------------------------------------------------------
# How likely spot hosts are to be had: EC2's placement score, of regions or of their zones.
#
# A score from 1 to 10 is for now and says nothing of how long hosts stay. Source: EC2 API
# Reference, GetSpotPlacementScores; EC2 User Guide, "Spot placement score" (10 regions a call; an
# account's new configurations in 24 hours are limited; fewer than three instance types score low).


MOST_REGIONS = 10  # of one call
FEW_TYPES = 3  # fewer of them score low, whatever there is
_TOO_MANY = "MaxConfigLimitExceeded"

Unit = Literal["units", "vcpu"]  # hosts, or vCPUs


class Score(Struct, frozen=True):
    """`zone` is a zone's id, such as use1-az4, which is the same place in every account."""

    region: str
    score: int
    zone: str = ""


def score_requests(
    types: Sequence[str], target: int, unit: Unit, regions: Sequence[str], *, zones: bool
) -> list[dict[str, Any]]:
    """The GetSpotPlacementScores arguments: one for each ten regions; without any, for all."""
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


def placement_scores(session: Session, requests: Sequence[dict[str, Any]]) -> list[Score]:
    """The scores, the best first; a call for each page. Raises what EC2 refuses."""
    found = []
    for request in requests:
        try:
            with translated("ec2:GetSpotPlacementScores"):
                client = session.client("ec2")
                pages = client.get_paginator("get_spot_placement_scores").paginate(**request)
                found += [
                    Score(each["Region"], each["Score"], each.get("AvailabilityZoneId", ""))
                    for page in pages
                    for each in page.get("SpotPlacementScores", ())
                ]
        except ServiceError as error:
            if error.code != _TOO_MANY:
                raise
            raise BatchmlError(
                "AWS scores only so many different questions in 24 hours, and this account has "
                "asked them. Ask one of those again (the same types, target and regions), or wait."
            ) from error
    return sorted(found, key=lambda each: (-each.score, each.region, each.zone))
