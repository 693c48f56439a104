"""The zones and ranges of an environment's subnets, and the subnets of a compute environment. Pure.

Subnets are free, so a network has one in every zone that offers an instance type of the
environment, and a compute environment uses those whose zones offer its types. A change of a
subnet's zone or range would replace it under its hosts. So subnets that exist stay as they are, and
zones are only added at the end.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Network

from msgspec import Struct

from batchml.aws.capacity import BUILD_TYPE, MOST_ZONES, Offers
from batchml.aws.cloudformation import Stack
from batchml.aws.naming import unknown_output
from batchml.errors import did_you_mean
from batchml.model.environment import Environment, is_arm_type, is_gpu_type
from batchml.setup.sharing import CurrentState, WantedState, is_known

_FEW_ZONES = 3  # at most, if it is not known what they offer
_PARTS = (3, 4)  # a private subnet has an eighth of the range, or else a sixteenth


class SubnetLayout(Struct, frozen=True):
    """The private subnets by zone, in the order of the stack, and the range of the public one.

    The first zone also has the NAT gateway or the endpoints, and FSx for Lustre.
    """

    zones: tuple[str, ...]
    ranges: tuple[str, ...]
    public: str

    def to_parameters(self) -> dict[str, str]:
        """The parameters of `cfn/network.yaml`."""
        return {
            "Zones": ",".join(self.zones),
            "SubnetRanges": ",".join(self.ranges),
            "PublicRange": self.public,
        }


def plan_layout(
    environment: Environment, offers: Offers | None, existing: Stack | None, *, builds_image: bool
) -> SubnetLayout:
    """The subnets that the network should have: placeholders if no zone is known."""
    network = environment.network
    there = existing_layout(existing) if existing is not None else None
    if existing is not None and existing.parameters.get("VpcCidr") != network.cidr:
        there = None  # a new VPC
    start = there.zones if there is not None else ()
    groups = [compute.instance_types for compute in environment.compute.values()]
    zones = choose_zones(groups, offers or Offers(), start, network.zones, builds_image)
    whole = IPv4Network(network.cidr, strict=False)
    ranges = there.ranges if there is not None else ()
    public = there.public if there is not None else str([*whole.subnets(_PARTS[0])][-1])
    if not zones:
        unknown = (unknown_output("network", "Zones"),)
        return SubnetLayout(unknown, unknown, public)
    ranges += tuple(_free_ranges(whole, [*ranges, public], len(zones) - len(ranges)))
    return SubnetLayout(zones[: len(ranges)], ranges, public)


def existing_layout(stack: Stack) -> SubnetLayout | None:
    """The subnets of a network stack; None if its zones are not known.

    A template of an earlier version cut the range into quarters: up to three private subnets, and
    the last quarter for the public one.
    """
    found = stack.parameters
    if "SubnetRanges" in found:
        zones, ranges = found["Zones"].split(","), found["SubnetRanges"].split(",")
        return SubnetLayout(tuple(zones), tuple(ranges), found["PublicRange"])
    named = stack.outputs.get("AvailabilityZones", "")
    if not named or "VpcCidr" not in found:
        return None
    zones = named.split(",")
    bits = int(found.get("SubnetBits", "8"))
    parts = IPv4Network(found["VpcCidr"], strict=False).subnets(new_prefix=32 - bits)
    quarters = [str(next(parts)) for _ in range(4)]
    return SubnetLayout(tuple(zones), tuple(quarters[: len(zones)]), quarters[3])


def choose_zones(
    groups: Sequence[Sequence[str]], offers: Offers, start: tuple[str, ...], limit: int,
    builds_image: bool,
) -> tuple[str, ...]:  # fmt: skip
    """The zones of `start`, then those that offer types of a group: the most useful first.

    A group is the instance types of a compute environment. At most `limit` zones, or those of
    `start` if they are more.
    """
    if not offers.is_known:
        return start or offers.zones[: min(limit, _FEW_ZONES)]
    needs = [offers.zones_of(group) for group in groups]
    # A plan with a type that is offered nowhere is refused; the others of the plan are shown.
    offering = frozenset().union(*needs) or frozenset(offers.zones)
    build = offers.zones_of([BUILD_TYPE]) if builds_image else frozenset()
    if builds_image:
        needs.append(build)
        if build and build.isdisjoint(offering) and build.isdisjoint(start):
            offering |= {min(build)}
    chosen = list(start)

    def rank(zone: str) -> tuple[int, int, str]:
        unserved = sum(zone in need for need in needs if not need.intersection(chosen))
        names = {name for group in groups for name in group}
        offered = sum(zone in offers.zones_of([name]) for name in names)
        return (-unserved, -offered, zone)

    while len(chosen) < limit and offering.difference(chosen):
        chosen.append(min(offering.difference(chosen), key=rank))
    return tuple(chosen)


def _free_ranges(whole: IPv4Network, taken: Iterable[str], count: int) -> Iterator[str]:
    """Up to `count` ranges in `whole` that are not taken, all of one size.

    The size leaves room for six subnets, if possible.
    """
    used = [IPv4Network(each) for each in taken]
    missing = MOST_ZONES - (len(used) - 1)
    for part in _PARTS:
        free = [
            each for each in whole.subnets(part) if not any(each.overlaps(other) for other in used)
        ]
        if len(free) >= missing or part == _PARTS[-1]:
            yield from map(str, free[: max(0, count)])
            return


def usable_subnets(
    types: Iterable[str], subnets: Sequence[str], zones: Sequence[str], offers: Offers | None,
    limit: int,
) -> tuple[str, ...]:  # fmt: skip
    """The subnets for these instance types, at most `limit`; all if their zones are not known.

    `zones` has the zone of each subnet.
    """
    if len(zones) != len(subnets) or not is_known(zones):
        return tuple(subnets)
    offering = offers.zones_of(types) if offers is not None and offers.is_known else set(zones)
    fitting = [subnet for subnet, zone in zip(subnets, zones, strict=True) if zone in offering]
    return tuple(fitting[:limit] or subnets)


def build_subnet(subnets: Sequence[str], zones: Sequence[str], offers: Offers | None) -> str:
    """The subnet in which an image is built: the first whose zone offers its instance type."""
    return usable_subnets([BUILD_TYPE], subnets, zones, offers, 1)[0]


def subnet_ids(stack: Stack) -> Mapping[str, str]:
    """The ids of the private subnets that a network stack has, by zone."""
    layout = existing_layout(stack)
    zones = layout.zones if layout is not None else ()
    return dict(
        zip(zones, filter(None, stack.outputs.get("SubnetIds", "").split(",")), strict=False)
    )


# --- Mistakes -------------------------------------------------------------------------------------


def zone_mistakes(
    environment: Environment, offers: Offers | None, zones: Collection[str], *, builds_image: bool
) -> Iterator[str]:
    """The instance types that AWS does not offer, each as `key: text`.

    `zones`: those of the subnets; empty if they are not known.
    """
    if offers is None:
        return
    if offers.why and not offers.zones and zones and not is_known(list(zones)):
        yield (
            f"network: the zones of {environment.region} are unknown ({offers.why}) Allow "
            "ec2:DescribeInstanceTypeOfferings, or give subnets in network.subnets."
        )
    if not offers.is_known:
        return
    for name, compute in environment.compute.items():
        for each in offers.missing(compute.instance_types):
            yield (
                f"compute.{name}.instance_types: no zone of {environment.region} offers {each}."
                f"{_alternatives(each, offers.others)}"
            )
        offering = offers.zones_of(compute.instance_types)
        if offering and zones and is_known(list(zones)) and not offering.intersection(zones):
            yield (
                f"compute.{name}: its instance types are offered in {_listed(offering)}, and the "
                f"network has subnets in {_listed(zones)}. {_advice(environment, zones)}"
            )
    building = offers.zones_of([BUILD_TYPE])
    if builds_image and zones and is_known(list(zones)) and not building.intersection(zones):
        yield (
            f"ami: an image is built on {BUILD_TYPE}, which "
            f"{_listed(building) or 'no zone of the region'} offers, and the network has subnets "
            f'in {_listed(zones)}. Use ami = "ecs-gpu".'
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _advice(environment: Environment, zones: Collection[str]) -> str:
    limit = environment.network.zones
    if len(zones) >= limit and limit < MOST_ZONES and not environment.network.is_given:
        return f"Raise network.zones, which is {limit}, or choose other instance types."
    if environment.storage.shared_with:
        owner = environment.storage.shared_with
        return f"Choose other instance types, or add these to {owner}, which owns the network."
    return "Choose other instance types, or add these to batchml.toml and run batchml setup."


def _alternatives(name: str, others: Sequence[str]) -> str:
    """The closest name, and a dozen families of the region that are like it, by generation."""
    arm = is_arm_type(name)
    families = sorted({each.partition(".")[0] for each in others if is_arm_type(each) == arm})
    meant = did_you_mean(name, others if "." in name else families)
    if is_gpu_type(name):
        alike, kind = [each for each in families if is_gpu_type(each)], "Families with GPUs"
    else:
        letters, generation = _series(name)
        alike = [each for each in families if _series(each)[0] == letters]
        alike.sort(key=lambda each: abs(_series(each)[1] - generation))
        alike, kind = sorted(alike[:_MOST_FAMILIES]), f"Families that begin with {letters}"
    return f"{meant} {kind} there: {', '.join(alike)}." if alike else meant


_MOST_FAMILIES = 12  # in a message: EC2 has some forty that begin with m


def _series(name: str) -> tuple[str, int]:
    """The letters and the generation of an instance type or family: m7i-flex -> ("m", 7)."""
    found = re.match("([a-z]*)([0-9]*)", name)
    return (found[1], int(found[2] or 0)) if found else ("", 0)


# --- Changes that hosts do not allow --------------------------------------------------------------


def moved_networks(wanted: WantedState, current: CurrentState) -> Iterator[str]:
    """A new address range needs a new VPC, and the old one cannot be deleted while it is in use."""
    for blueprint in wanted.stacks:
        stack, key = current.stacks.get(blueprint.name), "VpcCidr"
        asked = blueprint.parameters.get(key)
        there = stack.parameters.get(key) if stack is not None else None
        if asked and there and asked != there and (current.environments or current.sharers):
            yield (
                f"stack {blueprint.name}: network.cidr cannot be changed from {there} while there "
                "are compute environments in it: batchml teardown first, or keep the old value."
            )


def replaced_subnets(current: CurrentState) -> Iterator[str]:
    """A subnet cannot be replaced or removed while compute environments use it."""
    if not (current.environments or current.sharers):
        return
    for name, change_set in current.change_sets.items():
        replaced = [
            change.resource
            for change in change_set.changes
            if change.type == "AWS::EC2::Subnet"
            and change.resource.startswith("Private")
            and (change.replacement == "True" or change.action == "Remove")
        ]
        if replaced:
            yield (
                f"stack {name}: AWS would replace or remove {', '.join(replaced)}, which compute "
                "environments use: batchml teardown first, or keep the old values of network."
            )
