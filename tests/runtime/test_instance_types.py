"""The table of instance types agrees with EC2's own description and with itself."""

import gzip
import json
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from batchml.runtime.protocol.instance_types import (
    NEURON,
    NVIDIA,
    UNKNOWN,
    accelerator_of_card,
    devices_of,
    family_accelerator,
    family_types,
    vcpus_of,
)

# EC2 says 0 of fractional cards, and no number of the chips of f2 and vt1. Of trn2u it says nothing
# but EFA, and of trn2 the memory of all chips for each.
UNSAID = ("f2", "vt1", "trn2u")
NOT_A_HOST = ("mac", "c1.", "m1.", "m2.", "t1.")  # AWS Batch starts none of these


@cache
def described() -> dict[str, Any]:
    """What EC2's DescribeInstanceTypes says, as moto keeps it."""
    kept = files("moto").joinpath("ec2/resources/instance_types.json.gz").read_bytes()
    every = json.loads(gzip.decompress(kept))
    return {name: entry for name, entry in every.items() if not name.startswith(NOT_A_HOST)}


def chips(entry: dict[str, Any]) -> tuple[int, float]:
    """The number of accelerators and the GiB of each."""
    found = [
        *entry.get("GpuInfo", {}).get("Gpus", ()),
        *entry.get("NeuronInfo", {}).get("NeuronDevices", ()),
        *entry.get("InferenceAcceleratorInfo", {}).get("Accelerators", ()),
    ]
    first = found[0] if found else {}
    return first.get("Count", 0), first.get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024


def test_the_table_has_each_type_of_ec2_with_its_chips_and_interfaces() -> None:
    wrong: list[object] = []
    for name, entry in described().items():
        network, (count, _) = entry["NetworkInfo"], chips(entry)
        efa = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
        expected = (count, efa, network["MaximumNetworkCards"])
        row = devices_of(name)
        if row is None:
            wrong.append((name, "missing"))
        elif name.startswith(UNSAID):
            assert row.efa_cards == efa, name
        elif (row.count, row.efa_cards, row.network_cards) != expected:
            wrong.append((name, row, expected))
    assert not wrong, wrong
    assert len(described()) > 1300


def test_chips_have_the_memory_that_ec2_says() -> None:
    for name, entry in described().items():
        count, memory = chips(entry)
        accelerator = family_accelerator(name)
        if count and memory and not name.startswith("trn2"):
            assert accelerator is not None, name
            assert accelerator.memory_gib == pytest.approx(memory, rel=0.01), name


def test_gpus_have_the_maker_that_ec2_says() -> None:
    for name, entry in described().items():
        gpus = entry.get("GpuInfo", {}).get("Gpus", ())
        accelerator = family_accelerator(name)
        makers = {each["Manufacturer"].lower() for each in gpus}
        if gpus:
            assert accelerator is not None and makers == {accelerator.maker}, name
            assert (accelerator.capability is None) == (accelerator.maker != NVIDIA)
        elif entry.get("NeuronInfo"):
            assert accelerator is not None and accelerator.maker == NEURON, name
            cores = entry["NeuronInfo"]["NeuronDevices"][0]["CoreInfo"]["Count"]
            assert accelerator.cores == cores, name


def test_names_tell_the_vcpus_of_all_types_but_those_of_single_threads() -> None:
    odd = {
        name for name, entry in described().items()
        if "xlarge" in name and vcpus_of(name) != entry["VCpuInfo"]["DefaultVCpus"]
    }  # fmt: skip
    assert {name.partition(".")[0] for name in odd} <= {
        "c4", "d2", "hpc6a", "hpc6id", "hpc7a", "hpc8a",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["p7.48xlarge", "p7", "g8.xlarge", "trn9", "dl3.24xlarge", "gr7"])
def test_a_family_of_accelerators_that_the_table_lacks_is_unknown_and_not_without(
    name: str,
) -> None:
    accelerator = family_accelerator(name)
    assert accelerator is not None and accelerator.maker == UNKNOWN
    assert devices_of(name) is None and family_types(name) == ()


@pytest.mark.parametrize(
    "name", ["optimal", "default_x86_64", "default_arm64", "m7i", "", "q9.big"]
)
def test_other_names_have_no_accelerator(name: str) -> None:
    assert family_accelerator(name) is None and devices_of(name) is None


def test_a_family_has_its_types_smallest_first_and_a_type_itself() -> None:
    assert [each.instance_type for each in family_types("trn1")] == [
        "trn1.2xlarge",
        "trn1.32xlarge",
    ]
    assert [each.instance_type for each in family_types("p5.4xlarge")] == ["p5.4xlarge"]
    assert {each.efa_cards for each in family_types("c7i")} == {1}
    for family in ("g5", "g6e", "p3", "inf2", "trn2"):
        sizes = [vcpus_of(each.instance_type) for each in family_types(family)]
        assert sizes == sorted(sizes)


def test_a_job_takes_neighbours_of_trainium() -> None:
    counts = {name: row.job_counts for name in ("trn1.2xlarge", "trn1.32xlarge", "inf2.24xlarge")
              if (row := devices_of(name))}  # fmt: skip
    assert counts == {
        "trn1.2xlarge": (1,), "trn1.32xlarge": (1, 4, 8, 16), "inf2.24xlarge": (1, 2, 3, 4, 5, 6),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("product", "memory", "expected"),
    [
        ("NVIDIA H200", 0, "p5en.48xlarge"), ("NVIDIA H100 80GB HBM3", 0, "p5.48xlarge"),
        ("NVIDIA A100-SXM4-40GB", 0, "p4d.24xlarge"), ("NVIDIA A100-SXM4-80GB", 79, "p4de"),
        ("Tesla V100-SXM2-16GB", 0, "p3"), ("Tesla V100-SXM2-32GB", 0, "p3dn"),
        ("Tesla T4", 0, "g4dn"), ("NVIDIA A10G", 0, "g5"), ("NVIDIA L4", 0, "g6"),
        ("NVIDIA L40S", 0, "g6e"), ("NVIDIA B200", 0, "p6-b200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 0, "g7e"),
        ("NVIDIA H100 PCIe", 0, None), ("NVIDIA GeForce RTX 4090", 0, None), ("", 0, None),
    ],
)  # fmt: skip
def test_a_card_is_found_by_the_name_that_its_driver_says(
    product: str, memory: float, expected: str | None
) -> None:
    found = accelerator_of_card(product, memory)
    assert found == (family_accelerator(expected) if expected else None)


def test_old_and_new_cards_have_the_limits_of_cuda() -> None:
    def limits(family: str) -> tuple[int | None, int | None, bool, bool]:
        found = family_accelerator(family)
        assert found is not None
        return found.last_cuda, found.last_driver, found.needs_open_modules, found.needs_nvlsm

    assert limits("p3") == limits("g3") == (12, 580, False, False)
    assert limits("g4dn") == limits("p5en") == limits("trn1") == (None, None, False, False)
    assert limits("g7e") == (None, None, True, False)
    assert limits("p6-b200") == limits("p6-b300") == (None, None, True, True)
