"""Names and addresses of nodes. docs/behaviours.md B230-B234."""

import asyncio
import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.local.executors.network import (
    LOOPBACK,
    MAX_NODES,
    NodeAddress,
    NodeNetwork,
    NodeNetworkError,
    address_in,
    free_link,
    free_network,
    loopback_address,
    lowest_free,
)
from batchml.local.executors.spec import with_address

TAG = st.text("0123456789abcdef", min_size=8, max_size=8)


@given(st.sets(st.integers(2, 40)))
def test_a_place_is_never_given_twice(taken: set[int]) -> None:
    assert lowest_free(taken) not in taken


def test_places_come_to_an_end_with_a_word() -> None:
    with pytest.raises(NodeNetworkError):
        lowest_free(range(MAX_NODES))


@given(TAG)
def test_loopback_addresses_are_distinct_and_ours(tag: str) -> None:
    found = {loopback_address(tag, index) for index in range(2, MAX_NODES)}
    assert len(found) == MAX_NODES - 2
    assert all(address.startswith("127.77.") for address in found)


def test_a_network_overlaps_with_nothing_that_the_machine_routes() -> None:
    assert free_network([]) == "10.77.0.0/16"
    routes = ["10.77.3.0/24", "10.78.0.1", "172.17.0.0/16"]
    assert free_network(routes) == "10.79.0.0/16"
    with pytest.raises(NodeNetworkError):
        free_network(["10.0.0.0/8", "172.16.0.0/12"])
    assert ipaddress.ip_address(address_in("10.77.0.0/16", MAX_NODES - 1))


@given(TAG)
def test_a_link_is_a_server_s_own_and_no_metadata_service_s(tag: str) -> None:
    link = ipaddress.ip_network(free_link(tag, ["169.254.0.0/16"]))
    assert link.num_addresses == 4
    assert link.subnet_of(ipaddress.IPv4Network("169.254.64.0/19"))  # type: ignore[arg-type]
    assert free_link(tag, [str(link)]) != str(link)


def test_a_ledger_keeps_the_places_of_live_nodes(tmp_path: Path) -> None:
    """(B234)"""

    async def over() -> None:
        first = NodeNetwork("0123456789abcdef", tmp_path / "network.json", LOOPBACK)
        places = {task: await first.assign(task) for task in ("a", "b", "c")}
        assert await first.assign("a") == places["a"]
        assert len({place.address for place in places.values()}) == 3
        first.close()
        second = NodeNetwork("0123456789abcdef", tmp_path / "network.json", LOOPBACK)
        await second.restore({"a", "c"})
        assert await second.assign("c") == places["c"]
        assert await second.assign("d") == places["b"]
        second.release("a")
        second.release("never seen")
        assert await second.assign("e") == places["a"]
        second.close()

    asyncio.run(over())


def test_a_node_gets_its_address_and_runs_in_its_namespace() -> None:
    spec = {"command": ["python", "x.py"], "env": {"A": "1"}, "preamble": "::batchml host e=p"}
    there = with_address(spec, NodeAddress("127.77.0.2"))
    assert there["command"] == ["python", "x.py"]
    assert there["env"] == {"A": "1", "BATCHML_NODE_ADDRESS": "127.77.0.2"}
    assert there["preamble"] == "::batchml host e=p network=loopback address=127.77.0.2"
    assert there["address"] == "127.77.0.2"
