"""botocore's service models as the judge of requests."""

from typing import Any

from batchml.local.server.protocol import problems, service_model


def faults(service: str, operation: str, request: Any) -> list[str]:
    """What is wrong with a request: members, types, enums, lengths, ranges, patterns."""
    shape = service_model(service).operation_model(operation).input_shape
    return [f"{path} {text}" for path, text in problems(shape, request, strict=True)]


def ec2(max_vcpus: int, **more: Any) -> dict[str, Any]:
    """The least that CreateComputeEnvironment takes as computeResources."""
    least = {"type": "EC2", "minvCpus": 0, "maxvCpus": max_vcpus, "instanceRole": "r"}
    return {**least, "subnets": ["subnet-1"], **more}
