"""The availability zones of a region, and the instance types that each of them offers.

Sources: EC2 API Reference, DescribeInstanceTypeOfferings, DescribeAvailabilityZones; EC2 User
Guide, "List and filter your resources" (wildcards, 200 values in a filter); AWS Batch User Guide,
"Compute resource": the families of `optimal`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.aws.errors import call, read_entries
from batchml.aws.session import Session
from batchml.errors import AccessError

MOST_ZONES = 6  # us-east-1, which has the most
BUILD_TYPE = "m6i.xlarge"  # the default of BuildInstanceType in cfn/ami.yaml

_MOST_VALUES = 200  # in one filter

# AWS Batch chooses among these families for the names that it expands itself.
_EXPANDED = {
    "optimal": ("c4", "m4", "r4", "c5", "m5", "r5"),
    "default_x86_64": ("c5", "m5", "r5", "c6i", "m6i", "r6i"),
    "default_arm64": ("c6g", "m6g", "r6g"),
}


class Offers(Struct, frozen=True):
    """The instance types that the zones of a region offer.

    `zones`: the names of the region's zones, as far as they are known. `by_name`: a type or family
    of batchml.toml -> the zones that offer it; empty if it is unknown. `others`: all types of the
    region, if a name is offered nowhere. `why`: the reason if `by_name` is unknown.
    """

    zones: tuple[str, ...] = ()
    by_name: Mapping[str, frozenset[str]] = {}
    others: tuple[str, ...] = ()
    why: str = ""

    @property
    def is_known(self) -> bool:
        return bool(self.by_name)

    def zones_of(self, names: Iterable[str]) -> frozenset[str]:
        """The zones that offer at least one of these types or families."""
        return frozenset().union(*(self.by_name.get(name, frozenset()) for name in names))

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """The types and families that no zone offers. AWS Batch expands other names itself."""
        return tuple(
            name
            for name in names
            if name not in _EXPANDED and self.is_known and not self.by_name.get(name)
        )


def is_zone_of(region: str, zone: str) -> bool:
    """Whether a zone is a usual one, `us-east-1a`; not a Local Zone or Wavelength Zone."""
    return re.fullmatch(rf"{re.escape(region)}[a-z]", zone) is not None


def fetch_offers(session: Session, region: str, names: Iterable[str]) -> Offers:
    """Ask which zones offer these types and families: one call, a second one for a wrong name.

    Without the permission, it asks for the names of the zones, and returns none if it may not do
    that either. Raises ServiceError, ServiceUnreachable.
    """
    names = set(names)
    wanted = sorted({*names, BUILD_TYPE, "default_x86_64"})
    patterns = sorted({pattern for name in wanted for pattern in _patterns(name)})
    try:
        found = _fetch(session, "availability-zone", patterns)
        offers = make_offers(region, wanted, found)
        if offers.missing(set(wanted).intersection(names)):
            others = tuple(sorted({kind for kind, _ in _fetch(session, "region", ())}))
            offers = Offers(offers.zones, offers.by_name, others)
        return offers
    except AccessError as error:
        why = str(error).splitlines()[0]
    try:
        answer = call(session.client("ec2"), "DescribeAvailabilityZones")
        zones = [each["ZoneName"] for each in answer["AvailabilityZones"]]
    except AccessError:
        zones = []
    return Offers(tuple(sorted(each for each in zones if is_zone_of(region, each))), why=why)


def make_offers(region: str, names: Iterable[str], found: Iterable[tuple[str, str]]) -> Offers:
    """The offers for names of batchml.toml, from pairs of an instance type and a zone."""
    known = [(kind, zone) for kind, zone in found if is_zone_of(region, zone)]
    by_name = {
        name: frozenset(zone for kind, zone in known if _is_of(kind, name)) for name in names
    }
    return Offers(tuple(sorted({zone for _, zone in known})), by_name)


def _fetch(session: Session, location: str, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of instance type and location that match one of the patterns; all without any."""
    found = []
    for start in range(0, len(patterns) or 1, _MOST_VALUES):
        request: dict[str, Any] = {"LocationType": location}
        if patterns:
            values = list(patterns[start : start + _MOST_VALUES])
            request["Filters"] = [{"Name": "instance-type", "Values": values}]
        entries = read_entries(
            session.client("ec2"), "DescribeInstanceTypeOfferings", "InstanceTypeOfferings",
            **request,
        )  # fmt: skip
        found += [(each["InstanceType"], each["Location"]) for each in entries]
    return found


def _patterns(name: str) -> tuple[str, ...]:
    if "." in name:
        return (name,)
    return tuple(f"{family}.*" for family in _EXPANDED.get(name, (name,)))


def _is_of(kind: str, name: str) -> bool:
    family = kind.partition(".")[0]
    return kind == name or family in _EXPANDED.get(name, (name,))
