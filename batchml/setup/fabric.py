"""Check hosts with EFA, for doctor and setup: their interfaces, and a network of your own.

Sources: EC2 API reference, DescribeInstanceTypes; EC2 User Guide, "Get started with EFA and NCCL"
(all traffic from and to the security group itself: a rule for all addresses does not suffice),
"Maximize network bandwidth on Amazon EC2 instances with multiple network cards" (no public
address for hosts with several interfaces).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from batchml.aws.errors import call, read_entries
from batchml.aws.session import Session
from batchml.errors import BatchmlError
from batchml.model.environment import Compute, Environment, Network
from batchml.model.fabric import describe_fabric, fabric_layout
from batchml.runtime.protocol.instance_types import devices_of
from batchml.setup.doctor import Finding, aws_cli_flags

_ALL = "-1"  # the protocol of a rule for all traffic
_ANYWHERE = ("0.0.0.0/0", "::/0")


class FabricCheck(Struct, frozen=True):
    """The answers of EC2. `why`: the reason for not knowing them.

    `interfaces`: EFA interfaces by instance type. `open_groups`: security groups of batchml.toml
    whose members reach each other by all protocols. `public`: its subnets that use an internet
    gateway.
    """

    environment: Environment
    interfaces: Mapping[str, int] = {}
    open_groups: frozenset[str] = frozenset()
    public: tuple[str, ...] = ()
    why: str = ""


def ask_fabric(session: Session, environment: Environment) -> FabricCheck:
    """Ask EC2, if hosts have EFA: one call, three with a network of your own."""
    types = sorted({name for each in _with_efa(environment) for name in each.instance_types})
    if not types:
        return FabricCheck(environment)
    network = environment.network
    client = session.client("ec2")
    try:
        return FabricCheck(
            environment,
            _interfaces(client, types),
            _open_groups(client, network) if network.security_groups else frozenset(),
            tuple(_public_subnets(client, network)) if network.subnets else (),
        )
    except BatchmlError as error:
        return FabricCheck(environment, why=str(error).splitlines()[0])


def _with_efa(environment: Environment) -> list[Compute]:
    computes = environment.compute.values()
    return [each for each in computes if fabric_layout(each, environment.ami) is not None]


def _interfaces(client: Any, types: Iterable[str]) -> dict[str, int]:
    """By a filter, because a call with types fails if the region lacks one of them."""
    filters = [{"Name": "instance-type", "Values": list(types)}]
    found = read_entries(client, "DescribeInstanceTypes", "InstanceTypes", Filters=filters)
    return {
        each["InstanceType"]: each.get("NetworkInfo", {})
        .get("EfaInfo", {})
        .get("MaximumEfaInterfaces", 0)
        for each in found
    }


def _open_groups(client: Any, network: Network) -> frozenset[str]:
    answer = call(client, "DescribeSecurityGroups", GroupIds=list(network.security_groups))
    return frozenset(
        group["GroupId"]
        for group in answer["SecurityGroups"]
        if all(
            _names_itself(group["GroupId"], group.get(side, ()))
            for side in ("IpPermissions", "IpPermissionsEgress")
        )
    )


def _names_itself(group: str, rules: Iterable[Mapping[str, Any]]) -> bool:
    return any(
        rule.get("IpProtocol") == _ALL
        and group in [pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", ())]
        for rule in rules
    )


def _public_subnets(client: Any, network: Network) -> Iterator[str]:
    """The subnets of batchml.toml whose route table, or the main one, has an internet gateway."""
    filters = [{"Name": "vpc-id", "Values": [network.vpc]}]
    tables = [*read_entries(client, "DescribeRouteTables", "RouteTables", Filters=filters)]
    used: dict[str, Mapping[str, Any]] = {}
    for table in tables:
        for each in table.get("Associations", ()):
            used["main" if each.get("Main") else each.get("SubnetId", "")] = table
    for subnet in network.subnets:
        table = used.get(subnet) or used.get("main") or {}
        if any(
            str(route.get("GatewayId", "")).startswith("igw-")
            and (route.get("DestinationCidrBlock") or route.get("DestinationIpv6CidrBlock"))
            in _ANYWHERE
            for route in table.get("Routes", ())
        ):
            yield subnet


def check_fabric(check: FabricCheck) -> Iterator[Finding]:
    """The findings on EFA; none for an environment without the key."""
    for line in describe_fabric(check.environment):
        yield Finding("efa", "ok" if line.is_used else "warning", line.text)
    if check.why:
        yield Finding("efa", "warning", f"the network of hosts with EFA is unknown: {check.why}")
        return
    for name, count in sorted(check.interfaces.items()):
        known = devices_of(name)
        if known is not None and known.efa_cards != count:
            text = f"EC2 says that {name} has {count} EFA interfaces, and batchml {known.efa_cards}"
            yield Finding("efa", "problem", text, ("install a newer version of batchml",))
    if check.interfaces:
        yield from _check_network(check)


def fabric_mistakes(check: FabricCheck) -> Iterator[str]:
    """Why setup must not make hosts with EFA, each as `key: text`, with what to type."""
    for each in check_fabric(check):
        if each.mark == "problem":
            yield f"network: {each.text}. To fix it: {'; '.join(each.fix)}"


def _check_network(check: FabricCheck) -> Iterator[Finding]:
    environment, groups = check.environment, check.environment.network.security_groups
    if groups and not check.open_groups:
        text = (
            f"no group of network.security_groups ({', '.join(groups)}) lets its members reach "
            "each other by all protocols, in and out, so EFA fails"
        )
        pair = f"IpProtocol={_ALL},UserIdGroupPairs=[{{GroupId={groups[0]}}}]"
        rule = f"--group-id {groups[0]} --ip-permissions '{pair}'{aws_cli_flags(environment)}"
        fix = [f"aws ec2 authorize-security-group-{way} {rule}" for way in ("ingress", "egress")]
        yield Finding("efa", "problem", text, tuple(fix))
    for subnet in check.public:
        text = (
            f"{subnet} reaches the internet through an internet gateway, and hosts with EFA have "
            "no public address, so they cannot reach AWS"
        )
        advice = "name private subnets with a NAT gateway or endpoints in network.subnets"
        yield Finding("efa", "problem", text, (advice,))
