"""What of a resource is not as a request asks for."""

from typing import Any

import pytest

from batchml.setup.plan import differences

ARN = "arn:aws:batch:us-east-1:123456789012:compute-environment/gpu"


def shown(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [f"{each.key} | {each}" for each in differences(wanted, found)]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),  # what is not asked for is AWS's to choose
        ({"a": 1}, {"a": 1.0}),
        ({"computeEnvironment": "gpu"}, {"computeEnvironment": ARN}),
        ({"subnets": ["a", "b"]}, {"subnets": ["b", "a"]}),
        ({"r": {"instanceTypes": ["a", "b"]}}, {"r": {"instanceTypes": ["b", "a"], "x": 1}}),
        (
            {"shareDistribution": [{"s": "a", "w": 1}, {"s": "b", "w": 2}]},
            {"shareDistribution": [{"w": 2.0, "s": "b"}, {"s": "a", "w": 1.0}]},
        ),
        ({}, {"a": 1}),
        ({"a": {}}, {}),
        ({"minScaleDownDelayMinutes": 0, "shareDistribution": []}, {}),
        # Once instances have started AWS adds how new their AMI is.
        ({"l": [{"imageType": "A"}]}, {"l": [{"imageType": "A", "batchImageStatus": "LATEST"}]}),
    ],
)
def test_what_means_the_same_to_aws_is_no_difference(
    wanted: dict[str, Any], found: dict[str, Any]
) -> None:
    assert shown(wanted, found) == []


@pytest.mark.parametrize(
    ("wanted", "found", "said"),
    [
        ({"a": 1}, {"a": 2}, ["a | a: 2 -> 1"]),
        ({"a": 1}, {}, ["a | a: none -> 1"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": 5}}, ["a.b.c | c: none -> 1"]),
        ({"order": ["a", "b"]}, {"order": ["b", "a"]}, ["order | order: [b, a] -> [a, b]"]),
        ({"subnets": ["a"]}, {"subnets": ["a", "b"]}, ["subnets | subnets: [a, b] -> [a]"]),
        ({"a": "x"}, {"a": ARN}, ["a | a: gpu -> x"]),
        (
            {"l": [{"imageType": "A"}]},
            {"l": [{"imageType": "B"}]},
            ["l | l: [imageType B] -> [imageType A]"],
        ),
        (
            {"l": [{"imageType": "A"}]},
            {"l": [{"imageType": "A", "imageIdOverride": "ami-1"}]},
            ["l | l: [imageType A, imageIdOverride ami-1] -> [imageType A]"],
        ),
        ({"a": 1, "b": 2}, {"a": 0, "b": 0}, ["a | a: 0 -> 1", "b | b: 0 -> 2"]),
    ],
)
def test_a_difference_is_told_by_its_key_with_both_values(
    wanted: dict[str, Any], found: dict[str, Any], said: list[str]
) -> None:
    assert shown(wanted, found) == said
