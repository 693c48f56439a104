"""How likely spot hosts are to be had: EC2's placement score, of regions or of their zones.

A score from 1 to 10 is for now and says nothing of how long hosts stay. Source: EC2 API Reference,
GetSpotPlacementScores; EC2 User Guide, "Spot placement score" (10 regions a call; an account's new
configurations in 24 hours are limited; fewer than three instance types score low).
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError

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
