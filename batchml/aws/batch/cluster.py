"""Read queues, compute environments and their hosts, in few calls.

Two calls read all queues and compute environments. Two calls read a hundred hosts of a cluster. One
call reads the instances that EC2 has started, so that hosts outside a cluster are found, too. A
failed call is recorded in `missing`, and the other calls are made.

Sources: API References of AWS Batch, ECS (ListContainerInstances lists all states but INACTIVE;
DescribeContainerInstances takes 100) and EC2.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from batchml.aws.batch.hosts import MAX_CONTAINER_INSTANCES, TRIES
from batchml.aws.diagnosis import to_compute, to_queue, to_snapshot
from batchml.aws.errors import translate_errors
from batchml.aws.naming import owner_tags, qualified
from batchml.aws.pricing.prices import describe_failure
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceUnreachable
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostResources

_UNITS = 1024  # the CPU units of ECS in a vCPU

T = TypeVar("T")


class ClusterApi:
    """`calls` counts the calls. `missing` has the reason for each action that failed."""

    def __init__(self, session: Session, env: str) -> None:
        self._session = session
        self._env = env
        self.calls = 0
        self.missing: dict[str, str] = {}

    def queues(self) -> dict[str, QueueState]:
        """The queues by name. Raises AccessError, ServiceError, ServiceUnreachable."""
        with translate_errors("DescribeJobQueues"):
            pages = self._pages("batch", "describe_job_queues")
            found = [to_queue(detail) for page in pages for detail in page["jobQueues"]]
        return {each.name: each for each in found if each.status != "DELETED"}

    def computes(self) -> dict[str, ComputeState] | None:
        """The compute environments by name; None if the call fails."""

        def ask() -> dict[str, ComputeState]:
            pages = self._pages("batch", "describe_compute_environments")
            found = [to_compute(each) for page in pages for each in page["computeEnvironments"]]
            return {each.name: each for each in found if each.status != "DELETED"}

        return self._try("batch:DescribeComputeEnvironments", ask)

    def front(self, queue: str) -> tuple[str, ...] | None:
        """The job ids of the first hundred waiting runs, in the order in which they will start.

        Each child of an array is listed. None if the call fails.
        """

        def ask() -> tuple[str, ...]:
            self.calls += 1
            answer = self._session.client("batch").get_job_queue_snapshot(jobQueue=queue)
            return tuple(waiting.job_id for waiting in to_snapshot(answer).front)

        return self._try("batch:GetJobQueueSnapshot", ask)

    def hosts(self, clusters: Iterable[str]) -> tuple[ClusterHost, ...] | None:
        """The hosts in these clusters; None if none of them could be read."""
        found = [self._hosts_of(cluster) for cluster in dict.fromkeys(clusters) if cluster]
        known = [hosts for hosts in found if hosts is not None]
        return tuple(host for hosts in known for host in hosts) if known or not found else None

    def _hosts_of(self, cluster: str) -> list[ClusterHost] | None:
        def list_arns() -> list[str]:
            pages = self._pages("ecs", "list_container_instances", cluster=cluster)
            return [arn for page in pages for arn in page["containerInstanceArns"]]

        def describe(arns: list[str]) -> list[ClusterHost]:
            self.calls += 1
            answer = self._session.client("ecs", attempts=TRIES).describe_container_instances(
                cluster=cluster, containerInstances=arns
            )
            return [to_host(entry, cluster) for entry in answer["containerInstances"]]

        arns = self._try("ecs:ListContainerInstances", list_arns)
        if arns is None:
            return None
        hosts: list[ClusterHost] = []
        for start in range(0, len(arns), MAX_CONTAINER_INSTANCES):
            ask = partial(describe, arns[start : start + MAX_CONTAINER_INSTANCES])
            some = self._try("ecs:DescribeContainerInstances", ask)
            if some is None:
                return hosts or None
            hosts += some
        return hosts

    def launched(self, computes: Iterable[str]) -> tuple[ClusterHost, ...]:
        """The running instances of these compute environments, in a cluster or not yet."""
        names = tuple(computes)

        def ask() -> tuple[ClusterHost, ...]:
            (tag, value), *_ = owner_tags(self._env).items()
            filters = [
                {"Name": f"tag:{tag}", "Values": [value]},
                {"Name": "instance-state-name", "Values": ["pending", "running"]},
            ]
            pages = self._pages("ec2", "describe_instances", Filters=filters)
            found = [
                to_launched(each, self._env, names)
                for page in pages
                for group in page["Reservations"]
                for each in group["Instances"]
            ]
            return tuple(each for each in found if each.compute)

        return self._try("ec2:DescribeInstances", ask) or ()

    def _pages(self, service: str, operation: str, **request: Any) -> Iterable[Any]:
        attempts = 5 if service == "batch" else TRIES
        client = self._session.client(service, attempts=attempts)
        for page in client.get_paginator(operation).paginate(**request):
            self.calls += 1
            yield page

    def _try(self, action: str, ask: Callable[[], T]) -> T | None:
        """The answer; None after a failure, which is recorded in `missing`."""
        try:
            with translate_errors(action):
                return ask()
        except ServiceUnreachable:
            self.missing[action] = f"{action} was not answered"
        except BatchmlError as error:
            if getattr(error, "code", "") != "ClusterNotFoundException":  # just deleted
                self.missing[action] = describe_failure(action, error)
        return None


# --- From AWS's JSON ------------------------------------------------------------------------------


def to_host(entry: Mapping[str, Any], cluster: str) -> ClusterHost:
    """Convert a ContainerInstance of ECS."""
    named = {each["name"]: each.get("value", "") for each in entry.get("attributes", ())}
    registered = _resources(entry.get("registeredResources", ()))
    remaining = _resources(entry.get("remainingResources", ()))
    used = {name: max(0, amount - remaining.get(name, 0)) for name, amount in registered.items()}
    joined = entry.get("registeredAt")
    return ClusterHost(
        id=entry["containerInstanceArn"].rpartition("/")[2],
        cluster=cluster,
        instance=entry.get("ec2InstanceId", ""),
        type=named.get("ecs.instance-type", ""),
        zone=named.get("ecs.availability-zone", ""),
        status=entry.get("status", "ACTIVE"),
        is_connected=entry.get("agentConnected", True),
        tasks=entry.get("runningTasksCount", 0) + entry.get("pendingTasksCount", 0),
        since=int(joined.timestamp() * 1000) if joined else 0,
        resources=HostResources(
            vcpus=registered.get("CPU", 0) / _UNITS,
            memory_mib=registered.get("MEMORY", 0),
            gpus=registered.get("GPU", 0),
            used_vcpus=used.get("CPU", 0) / _UNITS,
            used_memory_mib=used.get("MEMORY", 0),
            used_gpus=used.get("GPU", 0),
        ),
    )


def _resources(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The amounts by name. GPUs are a set of names, which are counted."""
    return {
        each["name"]: len(each.get("stringSetValue", ()))
        if each.get("type") == "STRINGSET"
        else int(each.get("integerValue", 0))
        for each in entries
    }


def to_launched(entry: Mapping[str, Any], env: str, computes: Iterable[str]) -> ClusterHost:
    """Convert an Instance of EC2.

    Its tag names the compute environment `gpu`. After a replacement, the compute environment is
    `gpu-r2`, and the tag still says `gpu`.
    """
    tags = {tag["Key"]: tag["Value"] for tag in entry.get("Tags", ())}
    base = qualified(env, tags.get("batchml:name", ""))
    named = [name for name in computes if re.fullmatch(rf"{re.escape(base)}(-r[0-9]+)?", name)]
    began = entry.get("LaunchTime")
    return ClusterHost(
        id=entry["InstanceId"],
        compute=named[-1] if tags.get("batchml:name") and named else "",
        instance=entry["InstanceId"],
        type=entry.get("InstanceType", ""),
        zone=(entry.get("Placement") or {}).get("AvailabilityZone", ""),
        status="REGISTERING",
        since=int(began.timestamp() * 1000) if began else 0,
    )
