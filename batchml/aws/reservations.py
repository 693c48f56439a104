"""Capacity reservations and capacity blocks as EC2 has them: how many hosts, where, until when.

Source: EC2 API Reference, DescribeCapacityReservations.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from batchml.aws.failures import translated
from batchml.aws.prices import Clients, why_not
from batchml.errors import BatchmlError

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
