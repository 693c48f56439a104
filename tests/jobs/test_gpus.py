"""`gpus = "auto"`: how many GPUs each container of a job gets."""

import pytest

from batchml.jobs.gpus import describe_container, in_queues, on_machine, with_gpus_of
from batchml.model.environment import Compute, Environment, Queue, choose_queue
from batchml.model.group import resources_of
from batchml.model.job import AUTO, Group, JobSpec, Resources, read_job

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


def test_the_container_is_said_in_words() -> None:
    assert describe_container(0, {}, "") == ""
    assert describe_container(0, {}, "cpu") == "no GPU; CPU image"
    assert describe_container(2, {}, "") == "2 GPUs, unprivileged, by NVIDIA's container toolkit"
    assert describe_container(1, {"privileged": True}, "cuda") == (
        "1 GPU, privileged, with the NVIDIA driver of the host mounted at /usr/local/nvidia; "
        "CUDA image"
    )
