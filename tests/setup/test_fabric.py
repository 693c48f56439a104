"""What doctor says of the Elastic Fabric Adapter, and what it asks EC2 for that."""

from typing import Any

import pytest

from batchml.model.environment import Compute, Environment, Network
from batchml.setup.doctor import Finding
from batchml.setup.fabric import FabricCheck, ask_fabric, check_fabric, fabric_mistakes
from tests.support.wire import NOW, Refusal, Script, Wire
from tests.support.wire import keys as keys

pytestmark = pytest.mark.usefixtures("keys")

P5 = Compute(instance_types=("p5.48xlarge",), max_vcpus=384, efa=True)
OWN = Network(vpc="vpc-1", subnets=("subnet-1", "subnet-2"), security_groups=("sg-1", "sg-2"))
SELF = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-2"}]}]


def types(count: int = 32) -> dict[str, Any]:
    network = {"EfaInfo": {"MaximumEfaInterfaces": count}}
    return {"InstanceTypes": [{"InstanceType": "p5.48xlarge", "NetworkInfo": network}]}


def groups(ingress: Any, egress: Any) -> dict[str, Any]:
    return {"SecurityGroups": [
        {"GroupId": "sg-1", "IpPermissions": [], "IpPermissionsEgress": []},
        {"GroupId": "sg-2", "IpPermissions": ingress, "IpPermissionsEgress": egress},
    ]}  # fmt: skip


def routes(*gateways: str) -> dict[str, Any]:
    """The main route table, then one of subnet-2."""
    places: list[dict[str, Any]] = [{"Main": True}, {"SubnetId": "subnet-2", "Main": False}]
    return {"RouteTables": [
        {"Associations": [place],
         "Routes": [{"DestinationCidrBlock": "10.0.0.0/16", "GatewayId": "local"},
                    {"DestinationCidrBlock": "0.0.0.0/0", (gateway[:2] == "ig" and "GatewayId")
                     or "NatGatewayId": gateway}]}
        for place, gateway in zip(places, gateways, strict=True)
    ]}  # fmt: skip


def ask(
    script: Script, compute: Compute = P5, network: Network = Network(),  # noqa: B008
) -> tuple[FabricCheck, list[str]]:  # fmt: skip
    environment = Environment(
        region="us-east-1", ami="build", network=network, compute={"gpu": compute}
    )
    wire = Wire(script, NOW)
    found = ask_fabric(wire.session(), environment)
    assert wire.wrong == []
    return found, wire.operations


def examine(script: Script, *more: Any, **named: Any) -> tuple[list[Finding], list[str]]:
    found, asked = ask(script, *more, **named)
    return list(check_fabric(found)), asked


def test_hosts_with_efa_are_one_line() -> None:
    (found,), asked = examine({"DescribeInstanceTypes": types()})
    assert (found.check, found.mark) == ("efa", "ok")
    assert found.text.startswith("each host of compute gpu has 32 EFA interfaces, 3,200 Gbps")
    assert asked == ["DescribeInstanceTypes"]


def test_without_efa_there_is_no_line_and_no_call() -> None:
    assert examine({}, Compute(instance_types=("p5.48xlarge",), max_vcpus=384)) == ([], [])


def test_where_auto_finds_an_obstacle_there_is_a_warning_and_no_call() -> None:
    (found,), asked = examine({}, Compute(instance_types=("g6.xlarge",), max_vcpus=4, efa="auto"))
    assert (found.mark, asked) == ("warning", [])
    assert "g6.xlarge has no Elastic Fabric Adapter" in found.text


def test_ec2_s_number_of_interfaces_is_the_true_one() -> None:
    (_, found), _ = examine({"DescribeInstanceTypes": types(16)})
    assert found.mark == "problem"
    assert found.text == "EC2 says that p5.48xlarge has 16 EFA interfaces, and batchml 32"


def test_a_network_of_one_s_own_is_right_if_one_group_lets_its_members_talk() -> None:
    script = {
        "DescribeInstanceTypes": types(), "DescribeSecurityGroups": groups(SELF, SELF),
        "DescribeRouteTables": routes("nat-1", "nat-1"),
    }  # fmt: skip
    found, asked = examine(script, network=OWN)
    assert [each.mark for each in found] == ["ok"]
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("ingress", "egress"),
    [
        ([], SELF),
        (SELF, []),
        (SELF, [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]),
        (SELF, [{**SELF[0], "IpProtocol": "tcp"}]),
        ([{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}], SELF),
    ],
)
def test_a_group_that_is_not_open_to_itself_is_named_with_the_commands(
    ingress: Any, egress: Any
) -> None:
    script = {
        "DescribeInstanceTypes": types(), "DescribeSecurityGroups": groups(ingress, egress),
        "DescribeRouteTables": routes("nat-1", "nat-1"),
    }  # fmt: skip
    (_, found), _ = examine(script, network=OWN)
    assert found.mark == "problem" and "(sg-1, sg-2)" in found.text
    assert found.fix[0] == (
        "aws ec2 authorize-security-group-ingress --group-id sg-1 --ip-permissions "
        "'IpProtocol=-1,UserIdGroupPairs=[{GroupId=sg-1}]' --region us-east-1"
    )
    assert "egress" in found.fix[1]


@pytest.mark.parametrize(
    ("gateways", "public"),
    [(("igw-1", "nat-1"), ["subnet-1"]), (("nat-1", "igw-1"), ["subnet-2"]),
     (("igw-1", "igw-1"), ["subnet-1", "subnet-2"])],
)  # fmt: skip
def test_public_subnets_are_named(gateways: tuple[str, ...], public: list[str]) -> None:
    script = {
        "DescribeInstanceTypes": types(), "DescribeSecurityGroups": groups(SELF, SELF),
        "DescribeRouteTables": routes(*gateways),
    }  # fmt: skip
    (_, *found), _ = examine(script, network=OWN)
    assert [each.text.partition(" ")[0] for each in found] == public
    assert {each.mark for each in found} == {"problem"}


def test_what_may_not_be_asked_is_a_warning() -> None:
    (_, found), _ = examine({"DescribeInstanceTypes": Refusal("UnauthorizedOperation", "no")})
    assert found.mark == "warning" and "is unknown" in found.text


def test_setup_refuses_a_network_in_which_efa_cannot_work() -> None:
    script = {
        "DescribeInstanceTypes": types(), "DescribeSecurityGroups": groups([], []),
        "DescribeRouteTables": routes("igw-1", "nat-1"),
    }  # fmt: skip
    closed, public = fabric_mistakes(ask(script, network=OWN)[0])
    assert closed.startswith("network: no group of network.security_groups (sg-1, sg-2) lets")
    assert "; aws ec2 authorize-security-group-egress" in closed
    assert public.startswith("network: subnet-1 reaches the internet through an internet gateway")
    assert list(fabric_mistakes(ask({"DescribeInstanceTypes": types()})[0])) == []
