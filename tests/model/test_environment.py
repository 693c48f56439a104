"""The queue of a run that names none."""

import pytest

from batchml.model.environment import Compute, Environment, Queue, choose_queue

CPU = Compute(instance_types=("m7i.large",), max_vcpus=8)
GPU = Compute(instance_types=("g6.xlarge",), max_vcpus=16)


def environment(**queues: tuple[str, ...]) -> Environment:
    found = {name: Queue(compute=compute) for name, compute in queues.items()}
    return Environment(region="us-east-1", compute={"cpu": CPU, "gpu": GPU}, queues=found)


@pytest.mark.parametrize(
    ("queues", "of_gpu"),
    [
        ({"default": ("cpu",), "night": ("cpu",), "big": ("gpu",), "gpu": ("gpu",)}, "big"),
        ({"default": ("gpu",), "cpu": ("cpu",)}, "default"),
        ({"default": ("cpu", "gpu"), "gpu": ("gpu",)}, "default"),
        ({"default": ("cpu",)}, "default"),
        ({"gpu": ("gpu",)}, "default"),  # one that was made by other means may be named so
        ({}, "default"),
    ],
)
def test_a_run_goes_to_default_unless_it_could_never_start_there(
    queues: dict[str, tuple[str, ...]], of_gpu: str
) -> None:
    assert choose_queue(environment(**queues), 0) == "default"
    assert choose_queue(environment(**queues), 1) == of_gpu
