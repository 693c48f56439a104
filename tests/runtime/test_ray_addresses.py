"""Where a node of a Ray gang is, and what it has."""

from typing import Any

from batchml.runtime.nodes.link.address import free_port, own_address
from batchml.runtime.nodes.link.server import Rendezvous
from batchml.runtime.nodes.ray.rules import HeadRecord, HeadRendezvous
from batchml.runtime.nodes.ray.worker import (
    count_vcpus,
    describe_mismatch,
    make_folder,
    ray_variables,
)
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import StoreError

ECS = {"ECS_CONTAINER_METADATA_URI_V4": "http://169.254.170.2/v4/x"}


def says(answer: Any) -> Any:
    return lambda url: answer


def test_the_address_that_the_server_set_is_used() -> None:
    assert own_address({"BATCHML_NODE_ADDRESS": "10.9.8.7", **ECS}) == "10.9.8.7"


def test_programs_of_one_machine_have_addresses_of_their_own_in_the_loopback_network() -> None:
    local = {"BATCHML_ENDPOINT_URL": "http://127.0.0.1:4000"}
    found = {own_address({**local, "BATCHML_TASK": f"task-{i}"}) for i in range(50)}
    assert len(found) == 50
    assert all(each.startswith("127.") and not each.startswith("127.0.0.") for each in found)
    assert free_port(found.pop())


def test_a_container_of_ecs_asks_for_its_address_and_its_share() -> None:
    answer = {"Networks": [{"IPv4Addresses": ["172.17.0.5"]}], "Limits": {"CPU": 4096}}
    assert own_address(ECS, says(answer)) == "172.17.0.5"
    assert count_vcpus(ECS, says(answer)) == 4


def test_with_host_networking_the_kernel_chooses_the_address() -> None:
    found = own_address(ECS, says({"Networks": [{"NetworkMode": "host"}]}))
    assert found.count(".") == 3


def test_the_vcpus_of_the_job_win_and_may_be_unknown() -> None:
    assert count_vcpus({"BATCHML_VCPUS": "2", **ECS}, says({"Limits": {"CPU": 4096}})) == 2
    assert count_vcpus({}) is None

    def fails(url: str) -> Any:
        raise OSError("no such service")

    assert count_vcpus(ECS, fails) is None


def test_head_and_workers_meet_in_a_folder(tmp_path: Any) -> None:
    environ = {"BATCHML_WORKSPACE": str(tmp_path), "BATCHML_GANG_KEY": "key"}
    card = HeadRecord("j", 1, "10.0.0.1", 1, 2, "2.60.0", "3.11.7", 0.0)
    head, worker = HeadRendezvous.of(environ), HeadRendezvous.of(environ)
    assert worker.head() is None and worker.end_code() is None
    head.publish(card)
    assert worker.head() == card
    assert (tmp_path / ".batchml" / "gangs" / "key" / "gang" / "head.json").exists()
    head.end(3, 1.0)
    assert worker.end_code() == 3
    head.publish(card._replace(attempt=2))  # it came again after all
    assert worker.end_code() is None


def test_a_missing_or_damaged_rendezvous_is_named(tmp_path: Any) -> None:
    for make in (
        lambda: HeadRendezvous.of({}),
        lambda: HeadRendezvous(spoilt(tmp_path, b"not JSON")).head(),
        lambda: HeadRendezvous(spoilt(tmp_path, b'{"other": 1}')).head(),
        lambda: HeadRendezvous(spoilt(tmp_path, b"[]")).head(),
    ):
        try:
            make()
        except StoreError as error:
            assert "find each other" in str(error) or "head.json" in str(error)
        else:
            raise AssertionError("nothing was said")


def spoilt(folder: Any, data: bytes) -> Rendezvous:
    store = FolderStore(str(folder))
    store.put("gang/head.json", data)
    return Rendezvous(store)


def test_head_and_workers_need_the_same_versions() -> None:
    head = ("2.60.0", "3.11.7")
    assert describe_mismatch(head, ("2.60.0", "3.11.2")) == ""
    assert "Ray 2.60.0 and this worker 2.59.1" in describe_mismatch(head, ("2.59.1", "3.11.7"))
    assert "Python 3.11.7 and this worker 3.12.1" in describe_mismatch(head, ("2.60.0", "3.12.1"))


def test_the_users_variables_win_except_for_the_token() -> None:
    given = {"RAY_AUTH_TOKEN": "theirs", "RAY_gcs_rpc_server_reconnect_timeout_s": "99"}
    found = ray_variables(given, "ours", "127.1.2.3")
    assert found["RAY_AUTH_TOKEN"] == "ours"
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" not in found


def test_rays_folder_has_a_short_path_whatever_the_temporary_folder(tmp_path: Any) -> None:
    folder = make_folder({"TMPDIR": "/" + "long/" * 30})
    assert len(folder) <= 40
    import os

    os.rmdir(folder)
