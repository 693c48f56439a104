"""The launch of a run on its nodes, and group runs: several jobs that are one run. Pure.

The hosts of the jobs of a group run differ. The first of `[[groups]]` is the head, which runs the
command; each other group is a job of workers, an array job where there are several. AWS Batch does
not know that they belong together: their names, tags and variables say it.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from batchml.model.job import Group, Health, JobSpec, Resources
from batchml.model.names import keyed_name, to_name
from batchml.model.tables import parse_duration, parse_size
from batchml.runtime.protocol.launch import (
    HEAD,
    RAY,
    TOKEN,
    VARIABLE,
    VCPUS,
    WORKER,
    LaunchPlan,
    WorkerGroup,
)

# --- The launch of the nodes ----------------------------------------------------------------------
# The variables of the nodes, from `[launch]` and `[health]` of a job.


HEALTH = "BATCHML_HEALTH"


def launch_plan(spec: JobSpec) -> LaunchPlan | None:
    """The launch plan of a run; None for a command that simply runs on each node.

    For a group run this is the part that all its jobs share, without role and groups.
    """
    launch = spec.launch
    if launch.kind == "plain":
        return None
    processes = launch.processes_per_node
    return LaunchPlan(
        kind=launch.kind,
        processes=0 if processes == "auto" else processes,
        logs=launch.logs,
        hang_after=float(parse_duration(launch.hang_after) or 0) if launch.hang_after else 0.0,
        start_within=float(parse_duration(launch.start_within) or 0),
        bandwidth=float(_bytes(spec.health.bandwidth)),
    )


def launch_variables(spec: JobSpec, token: str) -> dict[str, str]:
    """The variables of a run. `token`: the secret of its nodes, hex digits that no other run has.

    The jobs of a group run have theirs from `group_jobs`.
    """
    found = health_variable(spec.health)
    plan = launch_plan(spec)
    if plan is not None and plan.is_supervised:
        found[VARIABLE] = plan.to_json()
        found[VCPUS] = str(spec.resources.vcpus)
        if token:
            found[TOKEN] = token
    return found


def health_variable(health: Health) -> dict[str, str]:
    """The variable with the host checks of a job; empty where the job has no `[health]`."""
    if health == Health():
        return {}
    settings = {
        "checks": health.checks,
        "bandwidth": _bytes(health.bandwidth),  # a second; 0: not measured
        "tries": health.tries,
        "quarantine": health.quarantine,
    }
    return {HEALTH: json.dumps(settings, separators=(",", ":"))}


def _bytes(size: str | int | None) -> int:
    return 0 if size is None else parse_size(size) or 0


# --- Group runs -----------------------------------------------------------------------------------


GANG_TAG = "batchml:gang"  # the key of the head, on all jobs of a group run
GROUP_TAG = "batchml:group"  # the name of the group
RENDEZVOUS = "BATCHML_GANG"  # where head and workers find each other; without it, the workspace
GANG_KEY = "BATCHML_GANG_KEY"  # the head's
GANG_HEAD = "BATCHML_GANG_HEAD"  # QUEUE/NAME of the head's job, in AWS
GANG_ATTEMPTS = "BATCHML_GANG_ATTEMPTS"  # that the head has at most
ENDED_BY_HEAD = "The head of its gang has ended"  # the reason of terminated jobs of workers

LINGER = 600  # seconds that workers wait for a lost head to start again: docs/ray.md


class GroupJob(Struct, frozen=True):
    """One job of a group run. `env` and `tags` are added to those of its `spec`."""

    group: str
    spec: JobSpec
    key: str
    plan: LaunchPlan
    queue: str  # in AWS
    env: dict[str, str]
    tags: dict[str, str]
    array: int | None = None  # the number of workers, if more than one

    @property
    def is_head(self) -> bool:
        return self.plan.role == HEAD


def group_jobs(
    spec: JobSpec,
    keys: Sequence[str],
    token: str,
    *,
    queue: Callable[[str], str] = lambda name: name,
    rendezvous: str = "",
) -> list[GroupJob]:
    """The jobs of a job with groups, the head first.

    `keys` has a key for each group. `token` is the secret of all nodes, `queue` returns the name of
    a queue in AWS, and `rendezvous` is an s3:// URL, or empty for the workspace.
    """
    head, *groups = zip(spec.groups, keys, strict=True)
    jobs = [(group, key, _worker(spec, group)) for group, key in groups]
    workers = tuple(
        WorkerGroup(
            name=group.name,
            size=group.count,
            least=min_workers(group),
            job_name=keyed_name(to_name(job.name), key),
            queue=queue(job.queue),
        )
        for group, key, job in jobs
    )
    head_name = keyed_name(to_name(spec.name), head[1])
    shared = {
        TOKEN: token,
        GANG_KEY: head[1],
        GANG_HEAD: f"{queue(head[0].queue or spec.queue)}/{head_name}",
        GANG_ATTEMPTS: str(spec.retry.attempts),
        **({RENDEZVOUS: rendezvous} if rendezvous else {}),
    }
    plan = launch_plan(spec) or LaunchPlan(RAY)
    made = [(*head, _placed(spec, head[0]), plan._replace(groups=workers))]
    made += [(*each, plan._replace(role=WORKER)) for each in jobs]
    return [
        GroupJob(
            group=group.name,
            spec=job,
            key=key,
            plan=own,
            queue=queue(job.queue),
            env={VARIABLE: own.to_json(), VCPUS: str(job.resources.vcpus), **shared},
            tags={GANG_TAG: head[1], GROUP_TAG: group.name},
            array=group.count if group.count > 1 else None,
        )
        for group, key, job, own in made
    ]


def min_workers(group: Group) -> int:
    """The workers of a group that have to join before the program starts."""
    return group.count if group.min is None else min(group.min, group.count)


def resources_of(spec: JobSpec, group: Group) -> Resources:
    """The resources of a container of a group: the group's own, or the job's."""
    return group.resources or spec.resources


def is_worker(tags: Mapping[str, str]) -> bool:
    """Whether a job with these tags belongs to another run, as a worker."""
    return bool(tags.get(GANG_TAG)) and tags.get("batchml:key") != tags[GANG_TAG]


def _placed(spec: JobSpec, group: Group) -> JobSpec:
    """The job of one group."""
    return replace(
        spec,
        groups=(),
        queue=group.queue or spec.queue,
        resources=resources_of(spec, group),
    )


def _worker(spec: JobSpec, group: Group) -> JobSpec:
    """The job of workers. They outlive attempts of the head, so they have the time of all."""
    seconds = spec.timeout_seconds
    start = parse_duration(spec.launch.start_within) or 0
    return replace(
        _placed(spec, group),
        name=f"{spec.name}-{group.name}",
        metrics={},
        timeout=None if seconds is None else spec.retry.attempts * (seconds + start + LINGER),
    )


# --- Held runs ------------------------------------------------------------------------------------
# A held run keeps its resources for a person, who works inside it.


HELD_TAG = "batchml:seat"  # what the run is held for: ALLOC or NOTEBOOK
ALLOC, NOTEBOOK = "alloc", "notebook"
