"""Which accelerators a compute environment may have, and with which AMI."""

import pytest

from batchml.config.environments import read_compute, read_config
from batchml.errors import ConfigError
from batchml.model.environment import Compute

DEV = {"region": "us-east-1"}


def mistakes(*types: str, ami: str = "ecs-gpu") -> list[str]:
    """The mistakes in a file with one compute environment."""
    compute = {"gpu": {"instance_types": list(types), "max_vcpus": 8}}
    queues = {"default": {"compute": ["gpu"]}}
    table = {"env": {"dev": {**DEV, "ami": ami, "compute": compute, "queues": queues}}}
    return read_config(table).mistakes_of("dev")


@pytest.mark.parametrize(
    ("instance_type", "words"),
    [
        ("g4ad.xlarge", "has AMD GPUs (Radeon Pro V520)"),
        ("g4ad", "has AMD GPUs"),
        ("dl1.24xlarge", "has accelerators of Habana (Gaudi)"),
        ("dl2q.24xlarge", "has accelerators of Qualcomm (AI100)"),
        ("vt1.3xlarge", "has accelerators of Xilinx (Alveo U30)"),
        ("f2.6xlarge", "has accelerators of Xilinx (FPGA)"),
        ("p6e-gb200.36xlarge", "has Arm processors beside its GPUs"),
        ("p7.48xlarge", "batchml does not know the accelerators of p7.48xlarge. Update batchml"),
        ("trn3", "batchml does not know the accelerators of trn3"),
    ],
)
def test_accelerators_that_jobs_could_not_reach_are_refused_with_what_to_name(
    instance_type: str, words: str
) -> None:
    (mistake,) = mistakes(instance_type)
    assert mistake.startswith("env.dev.compute.gpu.instance_types: ")
    assert words in mistake and ("Name " in mistake or "name types" in mistake)


@pytest.mark.parametrize(
    "types",
    [
        ("g5.xlarge", "g6", "g6e.48xlarge", "p4d.24xlarge"), ("p5.48xlarge",), ("p3.2xlarge",),
        ("p6-b200.48xlarge",), ("g7e.2xlarge",), ("g5g.xlarge",), ("trn1", "trn1n.32xlarge"),
        ("inf2.xlarge",), ("trn2.48xlarge",), ("c7i.large", "optimal"), ("m7g",),
    ],
)  # fmt: skip
def test_others_are_taken(types: tuple[str, ...]) -> None:
    assert mistakes(*types) == []


@pytest.mark.parametrize(
    ("instance_type", "words"),
    [
        ("p3.2xlarge", "the driver of the AMI that batchml builds does not support p3.2xlarge"),
        ("g3", "does not support g3"),
        ("p6-b200.48xlarge", "need NVIDIA's nvlsm on the host"),
        ("p6-b300", "need NVIDIA's nvlsm on the host"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["of its own", "of the environment"])
def test_types_that_our_ami_does_not_support_are_told_the_other_one(
    instance_type: str, words: str, own: bool
) -> None:
    compute = {"instance_types": [instance_type], "max_vcpus": 8, "ami": "build" if own else ""}
    dev = {**DEV, "ami": "ecs-gpu" if own else "build", "compute": {"gpu": compute}}
    (mistake,) = read_config({"env": {"dev": dev}}).mistakes_of("dev")
    assert mistake.startswith("env.dev.compute.gpu.instance_types: ") and words in mistake
    assert mistake.endswith('set ami = "ecs-gpu" in compute.gpu.')


@pytest.mark.parametrize("instance_type", ["p6-b200.48xlarge", "p3dn.24xlarge"])
def test_efa_with_gpus_that_our_ami_does_not_support_is_not_advised_in_a_circle(
    instance_type: str,
) -> None:
    said = []
    for ami in ("build", "ecs-gpu"):
        compute = {"instance_types": [instance_type], "max_vcpus": 192, "efa": True, "ami": ami}
        dev = {**DEV, "compute": {"gpu": compute}}
        said.append(" ".join(read_config({"env": {"dev": dev}}).mistakes_of("dev")))
    assert 'ami = "ecs-gpu" in compute.gpu, with a bootstrap script that installs EFA' in said[0]
    assert "Name an AMI with the driver, or let a bootstrap" in said[1]
    assert '"build"' not in said[1]
    works = {"instance_types": [instance_type], "max_vcpus": 192, "efa": True, "ami": "ecs-gpu"}
    works["bootstrap"] = "efa.sh"
    dev = {**DEV, "compute": {"gpu": works}}
    assert not read_config({"env": {"dev": dev}}).mistakes_of("dev")


@pytest.mark.parametrize(
    ("instance_type", "words"),
    [
        ("g6.xlrge", "does not know g6.xlrge. Did you mean 'g6.xlarge'? It knows g6.xlarge, g6.2x"),
        ("g6.6xlarge", "does not know g6.6xlarge."), ("c7i.lage", "Did you mean 'c7i.large'?"),
        ("trn1.16xlarge", "It knows trn1.2xlarge, trn1.32xlarge."),
        ("g6f.xlarge", "has a part of a GPU (L4)"), ("gr6f", "gr6f has a part of a GPU (L4)"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_exist_and_parts_of_gpus_are_refused(
    instance_type: str, words: str
) -> None:
    (mistake,) = mistakes(instance_type)
    assert words in mistake


def test_our_ami_is_not_for_neuron_chips_and_the_environments_choice_does_not_apply() -> None:
    compute = {"gpu": {"instance_types": ["trn1"], "max_vcpus": 8, "ami": "build"}}
    (mistake,) = read_config({"env": {"dev": {**DEV, "compute": compute}}}).mistakes_of("dev")
    assert mistake.startswith("env.dev.compute.gpu.ami: ") and "Remove ami" in mistake
    assert mistakes("trn1", ami="build") == []
    assert mistakes("trn1", ami="ami-01234567") == [], "the user's own may have the driver"


def test_hosts_with_neuron_chips_share_neither_an_environment_nor_a_queue_with_others() -> None:
    (mixed,) = mistakes("g5.xlarge", "trn1.2xlarge", "inf2")
    assert "trn1.2xlarge needs the AMI for Neuron chips, g5.xlarge another one" in mixed
    compute = {
        name: {"instance_types": [kind], "max_vcpus": 8}
        for name, kind in (("cpu", "c7i"), ("trn", "trn1"), ("inf", "inf2"))
    }
    queues = {"one": {"compute": ["cpu", "trn"]}, "two": {"compute": ["trn", "inf"]}}
    table = {"env": {"dev": {**DEV, "compute": compute, "queues": queues}}}
    (mistake,) = read_config(table).mistakes_of("dev")
    assert mistake.startswith("env.dev.queues.one.compute: AWS Batch does not count Neuron chips")


def test_all_mistakes_come_at_once_also_from_flags() -> None:
    given = {"instance_types": ["g4ad", "p7", "dl1", "trn1", "p3.2xlarge"], "max_vcpus": 8}
    with pytest.raises(ConfigError) as error:
        read_compute("x", {**given, "ami": "build", "disk": "1 GiB"}, "flags")
    found = error.value.mistakes
    keys = [mistake.partition(":")[0] for mistake in found]
    assert keys == ["instance_types"] * 4 + ["ami", "instance_types", "disk"], found
    assert Compute(instance_types=("p7",)).has_gpus is False


@pytest.mark.parametrize(
    ("ami", "own", "bootstrap", "count"),
    [
        ("ecs-gpu", "", "", 1), ("build", "ecs-gpu", "", 1), ("build", "", "", 0),
        ("ecs-gpu", "build", "", 0), ("ecs-gpu", "ami-01234567", "", 0),
        ("ecs-gpu", "", "lay-out.sh", 0),
    ],
)  # fmt: skip
def test_a_driver_mount_needs_an_ami_with_the_drivers_folder(
    ami: str, own: str, bootstrap: str, count: int
) -> None:
    compute = {"instance_types": ["g6.xlarge"], "max_vcpus": 8, "ami": own, "bootstrap": bootstrap}
    cpu = {"instance_types": ["c7i"], "max_vcpus": 8}
    dev = {**DEV, "ami": ami, "gpu_access": "driver-mount", "compute": {"gpu": compute, "cpu": cpu}}
    found = read_config({"env": {"dev": dev}}).mistakes_of("dev")
    assert len(found) == count, found
    assert all("compute.gpu" in each and '"toolkit"' in each for each in found)
