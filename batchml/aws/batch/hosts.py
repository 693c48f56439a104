"""The hosts on which runs can be placed, and the hosts on which they ran, with type and zone.

AWS Batch reports a run's host as an ECS container instance. ECS and EC2 have the instance type and
zone of a host until about an hour after its end.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from batchml.aws.batch.resources import ComputeApi
from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError
from batchml.model.names import bare_name

MAX_CONTAINER_INSTANCES = 100  # in one DescribeContainerInstances
_MAX_FILTER_VALUES = 200  # in one filter of EC2
TRIES = 2  # of a call to ECS and EC2
_EC2_ID = r"i-[0-9a-f]+"


class HostPool(Struct, frozen=True):
    """A compute environment, with the properties that decide its price."""

    name: str
    types: tuple[str, ...] = ()  # instance types and families
    spot: bool = False
    cluster: str = ""  # the ARN of its ECS cluster
    why: str = ""  # the reason for having no types


class RunHost(Struct, frozen=True):
    """The host of a run. Unknown properties are empty."""

    type: str = ""
    zone: str = ""
    spot: bool | None = None


def fetch_host_pools(session: Session) -> dict[str, tuple[HostPool, ...]]:
    """The compute environments of each queue, in two calls. It raises what the calls raise."""
    api = ComputeApi(session)
    found = {name: _pool(detail) for name, detail in api.environments().items()}
    return {
        name: tuple(
            found[each]
            for entry in detail.get("computeEnvironmentOrder", ())
            for each in [bare_name(entry["computeEnvironment"])]
            if each in found
        )
        for name, detail in api.queues().items()
    }


def _pool(detail: Mapping[str, Any]) -> HostPool:
    """Convert a ComputeEnvironmentDetail."""
    name = detail["computeEnvironmentName"]
    resources = detail.get("computeResources") or {}
    kind = resources.get("type", "")
    if kind.startswith("FARGATE"):
        return HostPool(name, why="Fargate has no hosts, and its prices are not supported")
    if not resources.get("instanceTypes"):
        return HostPool(name, why=f"the compute environment {name} is unmanaged")
    types = tuple(resources["instanceTypes"])
    return HostPool(name, types, kind == "SPOT", detail.get("ecsClusterArn", ""))


def find_hosts(
    session: Session, ids: Iterable[str], pools: Sequence[HostPool]
) -> dict[str, RunHost]:
    """The hosts with these ids that AWS still knows. Failures are not raised.

    `ids` are ids of EC2 instances or of ECS container instances. EC2 is asked for 200 ids in a
    call; the clusters are asked one after the other, for 100 ids in a call, until all are found.
    """
    wanted = set(ids) - {""}
    instances = sorted(each for each in wanted if re.fullmatch(_EC2_ID, each))
    left = wanted - set(instances)
    found: dict[str, RunHost] = {}
    with suppress(BatchmlError):
        for start in range(0, len(instances), _MAX_FILTER_VALUES):
            found |= _of_ec2(session, instances[start : start + _MAX_FILTER_VALUES])
    with suppress(BatchmlError):
        for pool in pools:
            if left and pool.cluster:
                with suppress(ServiceError):  # the cluster was deleted
                    found |= _of_cluster(session, pool, sorted(left))
                left -= set(found)
    return found


def _of_cluster(session: Session, pool: HostPool, ids: list[str]) -> dict[str, RunHost]:
    found = {}
    for start in range(0, len(ids), MAX_CONTAINER_INSTANCES):
        with translate_errors("ecs:DescribeContainerInstances"):
            answer = session.client("ecs", attempts=TRIES).describe_container_instances(
                cluster=pool.cluster,
                containerInstances=ids[start : start + MAX_CONTAINER_INSTANCES],
            )
        for entry in answer["containerInstances"]:
            named = {each["name"]: each.get("value", "") for each in entry.get("attributes", ())}
            host = RunHost(
                named.get("ecs.instance-type", ""),
                named.get("ecs.availability-zone", ""),
                pool.spot,
            )
            found[entry["containerInstanceArn"].rpartition("/")[2]] = host
    return found


def _of_ec2(session: Session, ids: list[str]) -> dict[str, RunHost]:
    """Use a filter, because a call with ids fails if one id does not exist."""
    request = {"Filters": [{"Name": "instance-id", "Values": ids}]}
    with translate_errors("ec2:DescribeInstances"):
        paginator = session.client("ec2", attempts=TRIES).get_paginator("describe_instances")
        return {
            entry["InstanceId"]: RunHost(
                entry["InstanceType"],
                entry["Placement"]["AvailabilityZone"],
                entry.get("InstanceLifecycle") == "spot",
            )
            for entry in _instances(paginator.paginate(**request))
        }


def _instances(pages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for page in pages:
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]
