"""Queues, compute environments and their hosts as they are now, in few calls.

Two calls for all queues and compute environments; of each cluster two for every hundred hosts; one
for hosts that EC2 has started and that have not joined yet. What may not be asked is noted, and the
rest is told. Sources: API References of AWS Batch, ECS (ListContainerInstances lists all states but
INACTIVE; DescribeContainerInstances takes 100) and EC2.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from batchml.aws.batch.hosts import _MOST, _TRIES
from batchml.aws.diagnosis import to_compute, to_queue, to_snapshot
from batchml.aws.errors import translated
from batchml.aws.naming import owner_tags, qualified
from batchml.aws.pricing import why_not
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceUnreachable
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, Room

_UNITS = 1024  # of CPU, in ECS, for one vCPU

T = TypeVar("T")


class ClusterApi:
    """`calls` counts what was asked of AWS; `missing` says what could not be asked, and why."""

    def __init__(self, session: Session, env: str) -> None:
        self._session = session
        self._env = env
        self.calls = 0
        self.missing: dict[str, str] = {}

    def queues(self) -> dict[str, QueueState]:
        """Raises AccessError, ServiceError, ServiceUnreachable: without it there is nothing."""
        with translated("DescribeJobQueues"):
            pages = self._pages("batch", "describe_job_queues")
            found = [to_queue(detail) for page in pages for detail in page["jobQueues"]]
        return {each.name: each for each in found if each.status != "DELETED"}

    def computes(self) -> dict[str, ComputeState] | None:
        """By name; None where it may not be asked."""

        def ask() -> dict[str, ComputeState]:
            pages = self._pages("batch", "describe_compute_environments")
            found = [to_compute(each) for page in pages for each in page["computeEnvironments"]]
            return {each.name: each for each in found if each.status != "DELETED"}

        return self._try("batch:DescribeComputeEnvironments", ask)

    def front(self, queue: str) -> tuple[str, ...] | None:
        """Job ids of the first hundred runs that wait, in the order in which they would start.

        None where it may not be asked. Children of an array stand for themselves.
        """

        def ask() -> tuple[str, ...]:
            self.calls += 1
            answer = self._session.client("batch").get_job_queue_snapshot(jobQueue=queue)
            return tuple(waiting.job_id for waiting in to_snapshot(answer).front)

        return self._try("batch:GetJobQueueSnapshot", ask)

    def hosts(self, clusters: Iterable[str]) -> tuple[ClusterHost, ...] | None:
        """Those that have joined these clusters; None where none of them may be asked about."""
        found = [self._hosts_of(cluster) for cluster in dict.fromkeys(clusters) if cluster]
        known = [hosts for hosts in found if hosts is not None]
        return tuple(host for hosts in known for host in hosts) if known or not found else None

    def _hosts_of(self, cluster: str) -> list[ClusterHost] | None:
        def list_() -> list[str]:
            pages = self._pages("ecs", "list_container_instances", cluster=cluster)
            return [arn for page in pages for arn in page["containerInstanceArns"]]

        def describe(arns: list[str]) -> list[ClusterHost]:
            self.calls += 1
            answer = self._session.client("ecs", attempts=_TRIES).describe_container_instances(
                cluster=cluster, containerInstances=arns
            )
            return [to_host(entry, cluster) for entry in answer["containerInstances"]]

        arns = self._try("ecs:ListContainerInstances", list_)
        if arns is None:
            return None
        hosts: list[ClusterHost] = []
        for start in range(0, len(arns), _MOST):
            asked = partial(describe, arns[start : start + _MOST])
            some = self._try("ecs:DescribeContainerInstances", asked)
            if some is None:
                return hosts or None
            hosts += some
        return hosts

    def launched(self, computes: Iterable[str]) -> tuple[ClusterHost, ...]:
        """Hosts that EC2 has started for the environment, of these compute environments; those that
        have joined a cluster are among them.
        """
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

    def _pages(self, service: str, operation: str, **asked: Any) -> Iterable[Any]:
        attempts = 5 if service == "batch" else _TRIES
        client = self._session.client(service, attempts=attempts)
        for page in client.get_paginator(operation).paginate(**asked):
            self.calls += 1
            yield page

    def _try(self, action: str, ask: Callable[[], T]) -> T | None:
        """The answer; None, noted, where there is none."""
        try:
            with translated(action):
                return ask()
        except ServiceUnreachable:
            self.missing[action] = f"{action} was not answered"
        except BatchmlError as error:
            if getattr(error, "code", "") != "ClusterNotFoundException":  # deleted a moment ago
                self.missing[action] = why_not(action, error)
        return None


# --- AWS JSON -> our nouns --------------------------------------------------------------------


def to_host(entry: Mapping[str, Any], cluster: str) -> ClusterHost:
    """From a ContainerInstance of ECS."""
    named = {each["name"]: each.get("value", "") for each in entry.get("attributes", ())}
    had = _resources(entry.get("registeredResources", ()))
    left = _resources(entry.get("remainingResources", ()))
    used = {name: max(0, amount - left.get(name, 0)) for name, amount in had.items()}
    joined = entry.get("registeredAt")
    return ClusterHost(
        id=entry["containerInstanceArn"].rpartition("/")[2],
        cluster=cluster,
        instance=entry.get("ec2InstanceId", ""),
        type=named.get("ecs.instance-type", ""),
        zone=named.get("ecs.availability-zone", ""),
        status=entry.get("status", "ACTIVE"),
        is_heard=entry.get("agentConnected", True),
        tasks=entry.get("runningTasksCount", 0) + entry.get("pendingTasksCount", 0),
        since=int(joined.timestamp() * 1000) if joined else 0,
        room=Room(
            vcpus=had.get("CPU", 0) / _UNITS,
            memory_mib=had.get("MEMORY", 0),
            gpus=had.get("GPU", 0),
            used_vcpus=used.get("CPU", 0) / _UNITS,
            used_memory_mib=used.get("MEMORY", 0),
            used_gpus=used.get("GPU", 0),
        ),
    )


def _resources(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """By name. GPUs are a set of names, of which the number counts."""
    return {
        each["name"]: len(each.get("stringSetValue", ()))
        if each.get("type") == "STRINGSET"
        else int(each.get("integerValue", 0))
        for each in entries
    }


def to_launched(entry: Mapping[str, Any], env: str, computes: Iterable[str]) -> ClusterHost:
    """From an Instance of EC2. Its compute environment is the one that tagged it with its name:
    one that was replaced has a number behind it, and goes on under the same tag.
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
