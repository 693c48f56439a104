"""Which hosts a queue's runs land on, and on which they were: two calls for all queues, then few.

A run's host is told as its ECS container instance. Its compute environment's cluster tells the
instance type and the zone while it lives, and about an hour longer; so does EC2.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from batchml.aws.batch.resources import ComputeApi
from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceError
from batchml.model.names import bare_name

_MOST = 100  # container instances of one DescribeContainerInstances
_MOST_IN_EC2 = 200  # values of a filter
_TRIES = 2
_EC2_ID = re.compile(r"i-[0-9a-f]+")


class Pool(Struct, frozen=True):
    """A compute environment as far as its price goes. `types` are instance types and families."""

    name: str
    types: tuple[str, ...] = ()
    spot: bool = False
    cluster: str = ""  # of ECS
    why: str = ""  # there are no types


class Host(Struct, frozen=True):
    """A host, as far as AWS still tells. Empty where it does not."""

    type: str = ""
    zone: str = ""
    spot: bool | None = None


def pools(session: Session) -> dict[str, tuple[Pool, ...]]:
    """Queue -> its compute environments, for all queues. Raises what the two calls raise."""
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


def _pool(detail: Mapping[str, Any]) -> Pool:
    """A Pool from a ComputeEnvironmentDetail."""
    name = detail["computeEnvironmentName"]
    resources = detail.get("computeResources") or {}
    kind = resources.get("type", "")
    if kind.startswith("FARGATE"):
        return Pool(name, why="Fargate has no hosts, and its prices are not asked for")
    if not resources.get("instanceTypes"):
        return Pool(name, why=f"the compute environment {name} is managed by others")
    types = tuple(resources["instanceTypes"])
    return Pool(name, types, kind == "SPOT", detail.get("ecsClusterArn", ""))


def find_hosts(session: Session, ids: Iterable[str], pools: Sequence[Pool]) -> dict[str, Host]:
    """What is still known of these hosts; nothing of those for which AWS refuses to say it.

    `ids` are of EC2 or of ECS container instances. One call to EC2 for each 200; one for each
    cluster, until all are found, and each 100. It raises nothing.
    """
    wanted = set(ids) - {""}
    machines = sorted(each for each in wanted if _EC2_ID.fullmatch(each))
    left = wanted - set(machines)
    found: dict[str, Host] = {}
    with suppress(BatchmlError):
        for start in range(0, len(machines), _MOST_IN_EC2):
            found |= _of_ec2(session, machines[start : start + _MOST_IN_EC2])
    with suppress(BatchmlError):
        for pool in pools:
            if left and pool.cluster:
                with suppress(ServiceError):  # a cluster that is gone
                    found |= _of_cluster(session, pool, sorted(left))
                left -= set(found)
    return found


def _of_cluster(session: Session, pool: Pool, ids: list[str]) -> dict[str, Host]:
    found = {}
    for start in range(0, len(ids), _MOST):
        with translated("ecs:DescribeContainerInstances"):
            answer = session.client("ecs", attempts=_TRIES).describe_container_instances(
                cluster=pool.cluster, containerInstances=ids[start : start + _MOST]
            )
        for entry in answer["containerInstances"]:
            named = {each["name"]: each.get("value", "") for each in entry.get("attributes", ())}
            host = Host(
                named.get("ecs.instance-type", ""),
                named.get("ecs.availability-zone", ""),
                pool.spot,
            )
            found[entry["containerInstanceArn"].rpartition("/")[2]] = host
    return found


def _of_ec2(session: Session, ids: list[str]) -> dict[str, Host]:
    """A filter, because asking by id fails for all when one of them is gone."""
    request = {"Filters": [{"Name": "instance-id", "Values": ids}]}
    with translated("ec2:DescribeInstances"):
        pages = session.client("ec2", attempts=_TRIES).get_paginator("describe_instances")
        return {
            entry["InstanceId"]: Host(
                entry["InstanceType"],
                entry["Placement"]["AvailabilityZone"],
                entry.get("InstanceLifecycle") == "spot",
            )
            for entry in _instances(pages.paginate(**request))
        }


def _instances(pages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for page in pages:
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]
