"""EC2 capacity: reservations and blocks, zones that offer instance types, scores, and quotas.

A score from 1 to 10 says how likely EC2 has spot capacity in a region or zone now. It does not say
how long the hosts stay.

Sources: EC2 API Reference, DescribeCapacityReservations, DescribeInstanceTypeOfferings,
GetSpotPlacementScores; EC2 User Guide, "List and filter your resources" (wildcards, 200 values in a
filter), "Spot placement score" (10 regions a call; a limit on different requests of an account in
24 hours; fewer than three instance types score low).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import call, read_entries, read_pages
from batchml.aws.pricing.prices import ClientFactory, describe_failure
from batchml.aws.session import Session
from batchml.errors import AccessError, BatchmlError, ServiceError
from batchml.model.environment import Compute, Environment
from batchml.runtime.protocol.instance_types import vcpus_of

_TRIES = 2  # of a call
_GONE = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
BLOCK = "capacity-block"
ENDED_STATES = ("expired", "cancelled", "failed", "payment-failed", "unsupported")
_BLOCK_SHUTDOWN = 30 * 60  # seconds before a block's end at which EC2 begins to end its hosts


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
        """The time until which hosts can run in it; 0 if it has no end."""
        return self.end - _BLOCK_SHUTDOWN if self.end and self.is_block else self.end


class ReservationTable(Struct, frozen=True):
    """Reservations by id. `why` is the reason if some are missing."""

    found: Mapping[str, Reservation] = {}
    why: str = ""


def fetch_reservations(session: ClientFactory, ids: Iterable[str]) -> ReservationTable:
    """Describe each reservation in its own call, because one missing id would fail a common call.

    Failures are not raised.
    """
    found, why = {}, ""
    for each in sorted(set(ids) - {""}):
        client = session.client("ec2", attempts=_TRIES)
        request = {"CapacityReservationIds": [each]}
        try:
            answer = call(client, "ec2:DescribeCapacityReservations", **request)
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


# --- Zones ----------------------------------------------------------------------------------------
# The zones that offer instance types.

MOST_ZONES = 6  # us-east-1, which has the most
BUILD_TYPE = "m6i.xlarge"  # the default of BuildInstanceType in cfn/ami.yaml

_MOST_VALUES = 200  # in one filter

# AWS Batch chooses among these families for the names that it expands itself. Source: AWS Batch API
# Reference, ComputeResource, `instanceTypes`.
_X86 = ("c6i", "c7i", "m6i", "r6i")
EXPANDED = {
    "optimal": _X86, "default_x86_64": _X86, "default_arm64": ("c6g", "c7g", "m6g", "r6g"),
}  # fmt: skip


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
            if name not in EXPANDED and self.is_known and not self.by_name.get(name)
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
        found = _fetch_offerings(session, "availability-zone", patterns)
        offers = make_offers(region, wanted, found)
        if offers.missing(set(wanted).intersection(names)):
            others = tuple(sorted({kind for kind, _ in _fetch_offerings(session, "region", ())}))
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
        name: frozenset(zone for kind, zone in known if _offers_name(kind, name)) for name in names
    }
    return Offers(tuple(sorted({zone for _, zone in known})), by_name)


def _fetch_offerings(
    session: Session, location: str, patterns: Sequence[str]
) -> list[tuple[str, str]]:
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
    return tuple(f"{family}.*" for family in EXPANDED.get(name, (name,)))


def _offers_name(kind: str, name: str) -> bool:
    family = kind.partition(".")[0]
    return kind == name or family in EXPANDED.get(name, (name,))


# --- Spot placement scores ------------------------------------------------------------------------


MOST_REGIONS = 10  # in one call
FEW_TYPES = 3  # requests with fewer instance types always score low
_SCORES = "ec2:GetSpotPlacementScores"
_TOO_MANY = "MaxConfigLimitExceeded"

CapacityUnit = Literal["units", "vcpu"]  # hosts, or vCPUs


class PlacementScore(Struct, frozen=True):
    """A score. `zone` is a zone id such as use1-az4, which is the same zone in every account."""

    region: str
    score: int
    zone: str = ""


def score_requests(
    types: Sequence[str], target: int, unit: CapacityUnit, regions: Sequence[str], *, zones: bool
) -> list[dict[str, Any]]:
    """The GetSpotPlacementScores requests: one for each ten of `regions`, or one for all regions.

    `target` is the capacity in `unit`. With `zones`, each zone gets a score.
    """
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
            found += [
                PlacementScore(each["Region"], each["Score"], each.get("AvailabilityZoneId", ""))
                for page in read_pages(session.client("ec2"), _SCORES, **request)
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


# --- Quotas ---------------------------------------------------------------------------------------
# EC2's vCPU quotas that an environment needs, and their values in the account.
#
# New accounts have a quota of 0 for GPU instances, and AWS Batch then waits without a message.
# Quotas are found by their names; the answer has their codes.
#
# Sources: EC2 User Guide, "Amazon EC2 service quotas"; Service Quotas API Reference,
# ListServiceQuotas.


# The classes of instance families, with a pattern for their types. The name of a quota contains its
# class, such as "P" in "Running On-Demand P instances".
_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_CLASSES = {
    "P": r"p\d",
    "G and VT": r"(g|gr|vt)\d",
    "DL": r"dl\d",
    "Trn": r"trn\d",
    "Inf": r"inf\d",
    "F": r"f\d",
    "X": r"x\d",
    "High Memory": r"u(-|\d)",
    "HPC": r"hpc\d",
}
# Spot P instances have two quotas; earlier they had one.
_SPOT_P = ("All P5 Spot Instance Requests", "All P4, P3 and P2 Spot Instance Requests")
_SPOT_ANY_P = "All P Spot Instance Requests"


class Quota(Struct, frozen=True):
    """A quota of the account. The values of EC2's quotas are vCPUs."""

    name: str
    code: str
    value: float


class QuotaNeed(Struct, frozen=True):
    """The vCPUs that compute sections of batchml.toml need of a quota."""

    quota: str  # its name in Service Quotas
    names: tuple[str, ...]  # its present and former names, the present name first
    compute: tuple[str, ...]  # the names of the sections
    smallest: int  # vCPUs to start one instance
    least: int  # vCPUs of the instances that always run (`min_vcpus`)
    most: int  # vCPUs with every section at its `max_vcpus`


def quota_class(instance_type: str) -> str:
    """The quota class of an instance type or family, such as P, or "G and VT"."""
    for name, pattern in _CLASSES.items():
        if re.match(pattern, instance_type):
            return name
    return _STANDARD


def quota_names(instance_type: str, *, spot: bool) -> tuple[str, ...]:
    """The present and former names of a type's quota, the present name first."""
    instance_class = quota_class(instance_type)
    if not spot:
        return (f"Running On-Demand {instance_class} instances",)
    if instance_class == "P":
        return (_SPOT_P[instance_type[1] in "234"], _SPOT_ANY_P)
    return (f"All {instance_class} Spot Instance Requests",)


def needed_quotas(environment: Environment) -> tuple[QuotaNeed, ...]:
    """The quotas that the compute sections need, by name.

    A section with types of several classes may take all its vCPUs from any one of them.
    """
    found: dict[str, QuotaNeed] = {}
    for name, compute in environment.compute.items():
        by_quota: dict[tuple[str, ...], list[str]] = {}
        for each in compute.instance_types:
            by_quota.setdefault(quota_names(each, spot=compute.spot), []).append(each)
        for names, types in by_quota.items():
            need = QuotaNeed(
                quota=names[0],
                names=names,
                compute=(name,),
                smallest=min(map(vcpus_of, types)),
                # With several quotas, the instances that always run may be of another one.
                least=compute.min_vcpus if len(by_quota) == 1 else 0,
                most=compute.max_vcpus,
            )
            found[need.quota] = _sum(found[need.quota], need) if need.quota in found else need
    return tuple(found[name] for name in sorted(found))


def _sum(one: QuotaNeed, other: QuotaNeed) -> QuotaNeed:
    return QuotaNeed(
        quota=one.quota,
        names=one.names,
        compute=(*one.compute, *other.compute),
        # Each section must be able to start one instance.
        smallest=max(one.smallest, other.smallest),
        least=one.least + other.least,
        most=one.most + other.most,
    )


_NEW_ACCOUNT = 5  # vCPUs of Standard instances, on demand and spot; none of other classes


def new_account_quotas(needs: Iterable[QuotaNeed]) -> dict[str, Quota]:
    """The quotas with which an account begins. Source: AWS General Reference, "EC2 quotas"."""
    values = {each.quota: _NEW_ACCOUNT if _STANDARD in each.quota else 0 for each in needs}
    return {name: Quota(name, "", value) for name, value in values.items()}


def startable_queues(
    environment: Environment, quotas: Mapping[str, Quota]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The queues for which a host can start, and those whose quotas are less than one host.

    A quota that is not known counts as large enough.
    """
    values = {_plain(name): quota.value for name, quota in quotas.items()}

    def can_start(compute: Compute) -> bool:
        for each in compute.instance_types:
            names = map(_plain, quota_names(each, spot=compute.spot))
            value = next((values[name] for name in names if name in values), None)
            if value is None or value >= vcpus_of(each):
                return True
        return False

    able = {name for name, compute in environment.compute.items() if can_start(compute)}
    ready = tuple(name for name, queue in environment.queues.items() if able & set(queue.compute))
    return ready, tuple(name for name in environment.queues if name not in ready)


def find_quota(need: QuotaNeed, quotas: Mapping[str, Quota]) -> Quota | None:
    """The account's quota with one of the need's names, ignoring case and repeated spaces."""
    by_name = {_plain(name): quota for name, quota in quotas.items()}
    return next((by_name[_plain(name)] for name in need.names if _plain(name) in by_name), None)


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


def read_quotas(session: Session) -> dict[str, Quota]:
    """The account's quotas of EC2 by name. It raises what `call` does."""
    request = {"ServiceCode": "ec2", "PaginationConfig": {"PageSize": 100}}
    client = session.client("service-quotas")
    return {
        raw["QuotaName"]: Quota(raw["QuotaName"], raw["QuotaCode"], float(raw["Value"]))
        for raw in read_entries(client, "ListServiceQuotas", "Quotas", **request)
    }
