"""Whose turn it is in a queue, and in a few words why a run waits: squeue's REASON. Pure.

`batchml explain` says it at length. Sources: AWS Batch User Guide, "Job scheduling" (first in,
first out by the time of submission, unless the queue has a scheduling policy; the head of a queue
holds up those behind it) and "Jobs stuck in RUNNABLE" (what AWS Batch writes as a status reason).
"""

import math
from collections.abc import Iterable, Sequence

from batchml.model.explanation import ComputeState
from batchml.model.fallback import FALLBACK_TAG
from batchml.model.hosts import ClusterHost, HostState, Room
from batchml.model.names import in_words, short_id
from batchml.model.run import JobStatus, Run
from batchml.ops.cluster import Cluster, room_of

FRONT = 100  # runs of a queue's snapshot

_SAID = {
    "INSUFFICIENT_INSTANCE_CAPACITY": "no capacity",
    "COMPUTE_ENVIRONMENT_MAX_RESOURCE": "too large for its compute",
    "JOB_RESOURCE_REQUIREMENT": "too large for any host",
    "SERVICE_ROLE_PERMISSIONS": "service role may not start hosts",
    "EC2_INSTANCE_CONFIGURATION_UNSUPPORTED": "hosts cannot be started so",
}


def waits(run: Run) -> int:
    """How many containers of a run are RUNNABLE: placed as soon as there is room, in turn."""
    if run.children:
        return run.children.get(JobStatus.RUNNABLE.value, 0)
    return int(run.status is JobStatus.RUNNABLE)


def positions(
    runs: Sequence[Run], front: Sequence[str] | None, *, is_fair: bool = False
) -> dict[str, int]:
    """Job id -> its place among the containers of a queue that wait, from 1.

    `front` is AWS Batch's own order, which also knows of tries again; who is not in it comes behind
    by age. Without it, by age alone. With a scheduling policy age says nothing, and who is not in
    the front has no place.
    """
    waiting = {run.job_id: run for run in runs if waits(run)}
    found: dict[str, int] = {}
    place = 0
    for each in front or ():
        owner = each.partition(":")[0].partition("#")[0]
        if owner in waiting:  # the others have started since
            place += 1
            found.setdefault(owner, place)
    if is_fair:
        return found
    rest = [run for job_id, run in waiting.items() if job_id not in found]
    for run in sorted(rest, key=lambda run: (run.created_at or 0, run.job_id)):
        found[run.job_id] = place + 1
        place += waits(run)
    return found


def reason_of(run: Run, place: int | None, cluster: Cluster) -> str:
    """Why a run waits, in a few words; empty for one that does not, or where nothing is known."""
    if run.status.is_terminal or run.status.holds_resources:
        return ""
    if not waits(run):
        return _not_runnable(run)
    if run.status_reason and not run.children:
        return said(run.status_reason)
    if place is None:
        return "waits for its share's turn" if _is_fair(run.queue, cluster) else ""
    if place > 1:
        return f"{place - 1} before it"
    return _of_queue(run.queue, cluster) or _of_hosts(run, cluster)


def move_of(run: Run, now: float) -> str:
    """Of a run that waits and may move (`--fallback`), where to and when: `moves to gpu in 17 s`.

    Empty for any other, and where it cannot be told: of a run that waited for other runs nobody
    knows since when it finds no host. `now` in ms.
    """
    queue, _, after = run.tags.get(FALLBACK_TAG, "").rpartition(":")
    if run.status is not JobStatus.RUNNABLE or queue in ("", run.queue) or not after.isdecimal():
        return ""
    ends = [each.stopped_at or 0 for each in run.attempts]
    since = max(ends, default=0) or (0 if run.depends_on else run.created_at or 0)
    if not since:
        return ""
    left = int(after) - (now - since) / 1000
    return f"moves to {queue} in {in_words(math.ceil(left))}" if left > 0 else f"moves to {queue}"


def said(status_reason: str) -> str:
    """AWS Batch's words for a run that cannot be placed, in fewer."""
    code = status_reason.partition(" - ")[0].rpartition(":")[2].strip()
    if code in _SAID:
        return _SAID[code]
    is_code = code.replace("_", "").isalnum() and code == code.upper()
    return code.replace("_", " ").lower() if is_code else status_reason


def _not_runnable(run: Run) -> str:
    if run.status is JobStatus.SUBMITTED:
        return "just submitted"
    if run.children:  # its children run, or are about to
        return ""
    if not run.depends_on:
        return "waits for other runs"
    more = len(run.depends_on) - 1
    return f"after {short_id(run.depends_on[0])}{f' and {more} more' if more else ''}"


def _is_fair(queue: str, cluster: Cluster) -> bool:
    known = cluster.queues.get(queue)
    return known is not None and bool(known.policy)


def _of_queue(name: str, cluster: Cluster) -> str:
    """What is wrong with the queue or with every compute environment of it."""
    queue = cluster.queues.get(name)
    if queue is None:
        return ""
    if queue.status not in ("VALID", "UPDATING"):
        return f"queue is {queue.status}"
    if not queue.is_enabled:
        return "queue is DISABLED"
    if not queue.environments:
        return "queue has no compute"
    computes = cluster.of_queue(name)
    if not computes or any(_is_usable(each) for each in computes):
        return ""
    bad = computes[0]
    return f"compute is {bad.status if bad.is_enabled else 'DISABLED'}"


def _is_usable(compute: ComputeState) -> bool:
    return compute.is_enabled and compute.status in ("VALID", "UPDATING")


def _of_hosts(run: Run, cluster: Cluster) -> str:
    """What the head of a queue waits for, given that there is nothing wrong."""
    computes = [each for each in cluster.of_queue(run.queue) if _is_usable(each)]
    if not computes or not run.vcpus:
        return ""
    asked = run.vcpus * max(1, run.nodes)
    most = max(each.max_vcpus for each in computes)
    if asked > most and all(each.max_vcpus for each in computes):
        return f"needs {asked} vCPUs, compute has {most} at most"
    if cluster.hosts is None:
        return ""
    hosts = _hosts_of(computes, cluster)
    fit = [
        host for host in hosts
        if host.takes_runs and host.room.holds(run.vcpus, run.memory_mib, run.gpus)
    ]  # fmt: skip
    if len(fit) >= max(1, run.nodes):
        return _of_maximum(asked, computes, cluster) or "next to start"
    if any(host.state is HostState.STARTING for host in hosts) or _grows(computes, cluster):
        return "hosts are starting"
    if hosts and (cluster.is_local or not any(each.is_managed for each in computes)):
        return _lacking(run, hosts)
    used = room_of(hosts).used_vcpus
    if all(_used(each, cluster) + asked > each.max_vcpus for each in computes):
        return f"compute is full: {used:g} of {sum(each.max_vcpus for each in computes)} vCPUs"
    return "waits for a host"


def _of_maximum(asked: int, computes: Sequence[ComputeState], cluster: Cluster) -> str:
    """On `local` an environment may be full though the machine has room. A host of AWS that is
    there takes runs whatever the maximum is, which bounds new ones.
    """
    total, held = sum(each.max_vcpus for each in computes), cluster.held_of(computes)
    if not cluster.is_local or not total or held + asked <= total:
        return ""
    return f"compute is full: {held:g} of {total} vCPUs"


def _hosts_of(computes: Iterable[ComputeState], cluster: Cluster) -> list[ClusterHost]:
    """Each once: environments on `local` share the machine."""
    return list({host.id: host for each in computes for host in cluster.hosts_of(each)}.values())


def _grows(computes: Iterable[ComputeState], cluster: Cluster) -> bool:
    """Whether vCPUs are asked for that no host has brought yet."""
    return any(each.desired_vcpus > room_of(cluster.hosts_of(each)).vcpus for each in computes)


def _used(compute: ComputeState, cluster: Cluster) -> float:
    return room_of(cluster.hosts_of(compute)).used_vcpus


def _lacking(run: Run, hosts: Iterable[ClusterHost]) -> str:
    """Of what there is too little: GPUs are the scarcest, memory is thought of last."""
    if run.nodes > 1:
        return f"needs {run.nodes} times {run.vcpus} vCPUs at once"
    rooms: list[Room] = [host.room for host in hosts if host.takes_runs]
    asked: dict[str, tuple[int, list[float]]] = {
        "GPU": (run.gpus, [room.gpus - room.used_gpus for room in rooms]),
        "vCPU": (run.vcpus, [room.vcpus - room.used_vcpus for room in rooms]),
        "MiB": (run.memory_mib, [room.memory_mib - room.used_memory_mib for room in rooms]),
    }
    for unit, (wanted, free) in asked.items():
        most = max(free, default=0)
        if wanted > most:
            return (
                f"needs {wanted} {unit}{'s' if wanted > 1 and unit != 'MiB' else ''}, {most:g} free"
            )
    return "no host has room for it"
