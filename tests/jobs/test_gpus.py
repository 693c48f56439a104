"""`gpus = "auto"`: how many GPUs each container of a job gets."""

import re
from pathlib import Path

import pytest

from batchml.errors import ConfigError
from batchml.jobs.find import find_source
from batchml.jobs.gpus import describe_container, in_queues, on_machine, unfit, with_gpus_of
from batchml.model.environment import Compute, Environment, Queue, choose_queue
from batchml.model.group import resources_of
from batchml.model.image import GpuLimits, Recipe, make_recipe
from batchml.model.job import AUTO, Group, JobSpec, Resources, read_job

ROOT = Path(__file__).parents[2]
ASKS = Resources(gpus=AUTO)


def counts(spec: JobSpec) -> list[int]:
    """The GPUs of each group, or of the job."""
    groups = [resources_of(spec, each).gpu_count for each in spec.groups]
    return groups or [spec.resources.gpu_count]


@pytest.mark.parametrize(
    ("nodes", "gpus", "given"), [(1, 0, 0), (1, 1, 1), (1, 8, 1), (2, 1, 0), (2, 2, 1), (3, 2, 0)]
)
def test_on_a_machine_each_node_gets_a_gpu_or_none_does(nodes: int, gpus: int, given: int) -> None:
    assert counts(on_machine(JobSpec(nodes=nodes, resources=ASKS), gpus)) == [given]


@pytest.mark.parametrize(
    ("gpus", "given"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 0])]
)
def test_groups_share_the_gpus_of_a_machine_and_the_head_comes_first(
    gpus: int, given: list[int]
) -> None:
    groups = (Group("head"), Group("two", count=2), Group("one", resources=ASKS))
    assert counts(on_machine(JobSpec(resources=ASKS, groups=groups), gpus)) == given


def test_groups_that_ask_for_a_number_have_it_before_those_that_do_without() -> None:
    groups = (Group("head", resources=ASKS), Group("w", count=2, resources=Resources(gpus=1)))
    assert counts(on_machine(JobSpec(groups=groups), 2)) == [0, 1]
    assert counts(on_machine(JobSpec(groups=groups), 3)) == [1, 1]


def test_each_group_follows_its_own_queue() -> None:
    groups = (Group("head", queue="gpu"), Group("workers", count=4), Group("own", queue="cpu"))
    spec = JobSpec(queue="cpu", resources=ASKS, groups=groups)
    resolved = in_queues(spec, lambda queue: int(queue == "gpu"))
    assert counts(resolved) == [1, 0, 0]
    assert with_gpus_of(spec, resolved) == resolved


def test_numbers_stay_as_they_are() -> None:
    spec = JobSpec(resources=Resources(gpus=4))
    assert on_machine(spec, 1) is spec
    assert with_gpus_of(spec, JobSpec()) is spec


def test_no_request_can_have_the_word() -> None:
    with pytest.raises(ValueError, match="auto"):
        _ = ASKS.gpu_count


@pytest.mark.parametrize(
    ("given", "expected"),
    [("some", "a whole number or auto"), (1.5, "a whole number or auto"),
     (True, "a whole number or auto"), (-1, "a whole number >= 0 or auto"),
     (2000, "a whole number <= 1000 or auto")],
)  # fmt: skip
def test_a_wrong_value_is_said_with_both_forms(given: object, expected: str) -> None:
    table = {"image": "python", "command": ["train"], "resources": {"gpus": given}}
    with pytest.raises(Exception, match=f"resources.gpus: found {given!r}. Expected {expected}."):
        read_job(table, "job.toml")


def test_a_run_that_can_do_without_a_gpu_stays_in_the_queue_default() -> None:
    computes = {"c": Compute(("c7i",), 8), "g": Compute(("g6",), 8)}
    queues = {"default": Queue(compute=("c",)), "gpu": Queue(compute=("g",))}
    environment = Environment(compute=computes, queues=queues)
    assert choose_queue(environment, AUTO) == choose_queue(environment, 0) == "default"
    assert choose_queue(environment, 1) == "gpu"
    assert environment.queues_with_gpus == ("gpu",)


def recipe(flavor: str, **settings: bytes) -> Recipe:
    files = {"requirements.txt": b"a", "requirements-cuda.txt": b"b"}
    settings = {name.replace("_", "."): text for name, text in settings.items()}
    return make_recipe("x", {**files, **settings}, {}, flavor)


def test_the_container_is_said_in_words() -> None:
    assert describe_container(0, {}, None) == ""
    assert describe_container(0, {}, recipe("cpu")) == "no GPU; CPU image"
    assert describe_container(2, {}, None) == "2 GPUs, unprivileged, by NVIDIA's container toolkit"
    cuda = recipe("cuda", image_toml=b"[gpu]\ndriver = 580")
    assert describe_container(1, {"privileged": True}, cuda) == (
        "1 GPU, privileged, with the NVIDIA driver of the host mounted at /usr/local/nvidia; "
        "CUDA image, for driver 580 or later"
    )


def limits_of(image: str) -> GpuLimits:
    source = find_source(image, [ROOT / "images"], ROOT / "jobs/lenet")
    assert source is not None
    return source.recipe("cuda").gpu


@pytest.mark.parametrize("name", ["p5.48xlarge", "p5en", "p6-b200.48xlarge", "g7e.2xlarge"])
def test_mxnet_has_no_code_for_hopper_and_blackwell(name: str) -> None:
    (found,) = unfit([name, "c7i", "g4ad.xlarge"], limits_of("mxnet"))
    assert found.startswith(f"{name} (")
    assert not list(unfit([name], limits_of("pytorch")))


def test_every_older_card_runs_mxnet_and_volta_runs_no_cuda_13() -> None:
    older = ["p3.2xlarge", "g4dn.xlarge", "p4d.24xlarge", "g5.xlarge", "g6.xlarge", "g6e.xlarge"]
    assert not list(unfit(older, limits_of("mxnet")))
    for image in ("pytorch", "nlp", "ray", "pytorch + requirements.txt"):
        where = ROOT / "jobs/translate"
        source = find_source(image, [ROOT / "images"], where)
        assert source is not None
        assert list(unfit(older, source.recipe("cuda").gpu)) == ["p3.2xlarge (V100, 7.0)"]


def test_the_driver_of_our_ami_is_new_enough_for_every_image() -> None:
    template = (ROOT / "cfn/ami.yaml").read_text()
    branch = re.search(r'DriverVersion:\n(?:.*\n)*?    Default: "(\d+)', template)
    assert branch is not None
    for folder in sorted((ROOT / "images").iterdir()):
        assert limits_of(folder.name).driver <= int(branch[1]), folder.name


def test_limits_of_an_image_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"gpu.max_capability: found \'90\'. Write a compute"):
        recipe("cpu", image_toml=b'[gpu]\nmax_capability = "90"')
    both = GpuLimits("7.5", "8.9")
    assert [both.allows(each) for each in ((7, 0), (7, 5), (8, 9), (9, 0))] == [
        False, True, True, False,
    ]  # fmt: skip
    assert both.describe() == "compute capability 7.5 to 8.9"


def test_limits_do_not_change_the_image() -> None:
    assert recipe("cuda", image_toml=b"[gpu]\ndriver = 580").tag == recipe("cuda").tag
