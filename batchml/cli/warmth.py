"""What `compute list` and `update` say of hosts that run without jobs, and of reservations."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from batchml.cli.output import say
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.aws.capacity import Reservations
    from batchml.client.place import Place
    from batchml.model.environment import Compute
    from batchml.ops.warm import Kept, Paid

Details = Mapping[str, Mapping[str, Any]]


class Warmth:
    """Of all compute environments of a place, by their names in AWS. Nothing of `local`."""

    def __init__(
        self, kept: "Mapping[str, Kept]", known: "Reservations | None", now: float
    ) -> None:
        self._kept = kept
        self._known = known
        self._now = now

    @property
    def heads(self) -> list[str]:
        return ["WARM", "NOW"] if self._kept else []

    def cells(self, name: str) -> list[str]:
        if not self._kept:
            return []
        each = self._kept.get(name)
        return [_cell(each.warm), _cell(each.now)] if each else ["", ""]

    def lines(self) -> Iterator[str]:
        from batchml.ops.warm import delay_words, reservation_words

        for each in self._kept.values():
            if each.warm.vcpus:
                yield f"{each.name}: kept warm, without jobs too: {_hosts(each.warm)}"
            if each.delay:
                yield f"{each.name}: {delay_words(each.delay)}"
            found = self._known.found.get(each.reservation) if self._known else None
            if found:
                yield f"{each.name}: {reservation_words(found, self._now)}"
            elif each.reservation and self._known and self._known.why:
                yield f"{each.name}: reservation {each.reservation}: {self._known.why}"

    def json(self, name: str) -> dict[str, Any]:
        each = self._kept.get(name)
        if each is None:
            return {}
        found = self._known.found.get(each.reservation) if self._known else None
        return {
            "warm": _json(each.warm),
            "now": _json(each.now),
            "reservation": None
            if found is None
            else {
                "capacityReservationId": found.id,
                "state": found.state,
                "totalInstanceCount": found.total,
                "availableInstanceCount": found.free,
                "endDate": int(found.end * 1000) or None,
                "isBlock": found.is_block,
            },
        }


def warmth(place: "Place", details: Details) -> Warmth:
    """Ask for prices and reservations, where something is kept or runs; nothing on `local`."""
    from batchml.cli.single import bare
    from batchml.ops.warm import keeping, read_compute_detail

    if place.settings.is_local:
        return Warmth({}, None, 0.0)
    from batchml.aws.capacity import reservations

    described = place.settings.environment.compute
    computes = {
        name: read_compute_detail(detail, described.get(bare(place, name)))
        for name, detail in details.items()
        if detail.get("computeResources", {}).get("instanceTypes")
    }
    region = place.settings.environment.region
    kept = {each.name: each for each in keeping(region, details, computes, place.prices)}
    known = reservations(place.connect(), [each.reservation for each in kept.values()])
    from msgspec.structs import replace

    shown = {name: replace(each, name=bare(place, name)) for name, each in kept.items()}
    return Warmth(shown, known, place.clock.now())


def warm_hosts(place: "Place", hosts: int, min_vcpus: int | None, detail: Mapping[str, Any]) -> int:
    """`--warm HOSTS` as vCPUs. Raises UsageError."""
    from batchml.ops.warm import read_compute_detail, warm_vcpus

    if min_vcpus is not None:
        raise UsageError("--warm and --min-vcpus say the same: give one of them.")
    if hosts < 0:
        raise UsageError(f"--warm {hosts}: 0 or more hosts.")
    if place.settings.is_local:
        raise UsageError("--warm: local has one host, this machine, which is always there.")
    if not hosts:
        return 0
    compute = read_compute_detail(detail)
    region = place.settings.environment.region
    instances = place.prices.instances(region, compute.instance_types[:1])
    return warm_vcpus(hosts, compute, instances)[0]


def say_kept(
    place: "Place",
    name: str,
    there: str,
    before: Mapping[str, Any],
    checked: "Compute",
    table: Mapping[str, Any],
) -> None:
    """What the change costs by the hour and the day, and the command that undoes it."""
    from msgspec.structs import replace

    from batchml.ops.warm import delay_price, delay_words, price_of, read_compute_detail

    if place.settings.is_local:
        return
    if "min_vcpus" in table and checked.min_vcpus:
        known = read_compute_detail(before, place.settings.environment.compute.get(name))
        compute = replace(
            known, min_vcpus=checked.min_vcpus, max_vcpus=checked.max_vcpus,
            instance_types=checked.instance_types,
        )  # fmt: skip
        paid = price_of(place.settings.environment.region, compute, place.prices)
        undo = before.get("computeResources", {}).get("minvCpus", 0)
        say(f"Kept warm, without jobs too: {_hosts(paid)}.")
        say(f"  until:  batchml compute update {name} --min-vcpus {undo} --env {place.env}")
    if "scale_down_delay" in table and checked.scale_down_minutes:
        compute = replace(
            read_compute_detail(before, place.settings.environment.compute.get(name)),
            instance_types=checked.instance_types, scale_down_delay=checked.scale_down_delay,
        )  # fmt: skip
        price = delay_price(place.settings.environment.region, compute, place.prices)
        words = delay_words(checked.scale_down_minutes)
        say(f"From now on {words}{', ' if price else ''}{price}.")


def _hosts(paid: "Paid") -> str:
    hosts = f", {paid.hosts}" if paid.hosts else ""
    return f"{paid.vcpus} vCPUs{hosts}: {paid.words}"


def _cell(paid: "Paid") -> str:
    from batchml.ops.warm import usd

    if not paid.vcpus:
        return "-"
    if paid.is_prepaid:
        return "prepaid"
    return "price unknown" if paid.why else f"{usd(paid.low, paid.high)}/h"


def _json(paid: "Paid") -> dict[str, Any]:
    known = bool(paid.vcpus) and not paid.why and not paid.is_prepaid
    return {
        "vcpus": paid.vcpus,
        "usdPerHour": {"low": paid.low / 1e6, "high": paid.high / 1e6} if known else None,
        "why": paid.why or ("prepaid" if paid.is_prepaid else None),
    }
