"""Launch plans for the nodes of a run, group runs (several jobs that are one run), held runs.

The jobs of a group run can have different hosts. The first of `[[groups]]` is the head, which runs
the command; each other group is a job of workers, an array job for several workers. AWS Batch does
not know that these jobs are one run: their names, tags and variables connect them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.model.fallback import WATCHES_TAG
from batchml.model.names import keyed_name, to_name
from batchml.model.run import SWEEP_TAG, RunName
from batchml.model.tables import parse_duration, parse_size
from batchml.runtime.protocol.launch import (
    HEAD,
    RAY,
    TOKEN,
    VARIABLE,
    WORKER,
    LaunchPlan,
    WorkerGroup,
)

if TYPE_CHECKING:
    from batchml.model.job import Group, Health, JobSpec, Resources

# --- The launch of the nodes: `[launch]` and `[health]` of a job ----------------------------------


HEALTH = "BATCHML_HEALTH"  # the variable with the host checks


def launch_plan(spec: "JobSpec") -> LaunchPlan | None:
    """The launch plan of a run; None for a command that is started once on each node.

    For a group run it has no role and no groups yet: `group_jobs` adds them for each job.
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


def launch_variables(spec: "JobSpec", token: str) -> dict[str, str]:
    """The variables for the nodes of a run. `token` is their secret: hex digits, new for each run.

    The jobs of a group run get theirs from `group_jobs`.
    """
    found = health_variable(spec.health)
    plan = launch_plan(spec)
    if plan is not None and plan.is_supervised:
        found[VARIABLE] = plan.to_json()
        if token:
            found[TOKEN] = token
    return found


def health_variable(health: "Health") -> dict[str, str]:
    """The variable with the host checks of a job; empty where the job has no `[health]`."""
    if health == type(health)():
        return {}
    settings = {
        "checks": health.checks,
        "bandwidth": _bytes(health.bandwidth),  # bytes a second; 0: not measured
        "tries": health.tries,
        "quarantine": health.quarantine,
    }
    return {HEALTH: json.dumps(settings, separators=(",", ":"))}


def _bytes(size: str | int | None) -> int:
    return 0 if size is None else parse_size(size) or 0


# --- Group runs -----------------------------------------------------------------------------------


GANG_TAG = "batchml:gang"  # the key of the head, on all jobs of a group run
GROUP_TAG = "batchml:group"  # the name of the job's group
RENDEZVOUS = "BATCHML_GANG"  # the s3:// URL of the rendezvous; without it, the workspace is used
GANG_KEY = "BATCHML_GANG_KEY"  # the key of the head
GANG_HEAD = "BATCHML_GANG_HEAD"  # QUEUE/NAME of the head's job, in AWS
GANG_ATTEMPTS = "BATCHML_GANG_ATTEMPTS"  # the most attempts of the head

LINGER = 600  # seconds that workers wait for a lost head to start again: docs/ray.md


class GroupJob(Struct, frozen=True):
    """One job of a group run. `env` and `tags` are added to those of its `spec`."""

    group: str
    spec: "JobSpec"
    key: str
    plan: LaunchPlan
    queue: str  # its name in AWS
    env: dict[str, str]
    tags: dict[str, str]
    array: int | None = None  # the size of the array job; None for a single job

    @property
    def is_head(self) -> bool:
        return self.plan.role == HEAD


def group_jobs(
    spec: "JobSpec",
    keys: Sequence[str],
    token: str,
    *,
    queue: Callable[[str, int], str] = lambda name, gpus: name,
    rendezvous: str = "",
) -> list[GroupJob]:
    """The jobs that a job with groups is submitted as, the head first.

    `keys` has a submission key for each group. `token` is the secret of all nodes. `queue` returns
    the name of a queue in AWS, given its name in job.toml and the job's GPUs. `rendezvous` is the
    s3:// URL by which head and workers find each other; if it is empty, they use the workspace.
    """
    head, *groups = zip(spec.groups, keys, strict=True)
    worker_jobs = [(group, key, _worker_spec(spec, group)) for group, key in groups]
    head_job = _group_spec(spec, head[0])
    workers = tuple(
        WorkerGroup(
            name=group.name,
            size=group.count,
            least=min_workers(group),
            job_name=keyed_name(to_name(job.name), key),
            queue=queue(job.queue, job.resources.gpu_count),
        )
        for group, key, job in worker_jobs
    )
    head_name = keyed_name(to_name(spec.name), head[1])
    shared = {
        TOKEN: token,
        GANG_KEY: head[1],
        GANG_HEAD: f"{queue(head_job.queue, head_job.resources.gpu_count)}/{head_name}",
        GANG_ATTEMPTS: str(spec.retry.attempts),
        **({RENDEZVOUS: rendezvous} if rendezvous else {}),
    }
    plan = launch_plan(spec) or LaunchPlan(RAY)
    jobs = [(*head, head_job, plan._replace(groups=workers))]
    jobs += [(*each, plan._replace(role=WORKER)) for each in worker_jobs]
    return [
        GroupJob(
            group=group.name,
            spec=job,
            key=key,
            plan=job_plan,
            queue=queue(job.queue, job.resources.gpu_count),
            env={VARIABLE: job_plan.to_json(), **shared},
            tags={GANG_TAG: head[1], GROUP_TAG: group.name},
            array=group.count if group.count > 1 else None,
        )
        for group, key, job, job_plan in jobs
    ]


def min_workers(group: "Group") -> int:
    """The number of workers of a group that must join before the program starts."""
    return group.count if group.min is None else min(group.min, group.count)


def resources_of(spec: "JobSpec", group: "Group") -> "Resources":
    """The resources of each container of a group."""
    return group.resources or spec.resources


def is_worker(tags: Mapping[str, str]) -> bool:
    """Whether a job with these tags is a worker of a group run."""
    return bool(tags.get(GANG_TAG)) and tags.get("batchml:key") != tags[GANG_TAG]


def is_listed(run: RunName) -> bool:
    """Whether `ls` lists a run: not trials, controllers and workers, which no user submits."""
    is_of_sweep_or_watcher = SWEEP_TAG in run.tags or WATCHES_TAG in run.tags
    return not (run.gang or is_of_sweep_or_watcher or is_worker(run.tags))


def _group_spec(spec: "JobSpec", group: "Group") -> "JobSpec":
    """The job of one group."""
    queue = group.queue or spec.queue
    return replace(spec, groups=(), queue=queue, resources=resources_of(spec, group))


def _worker_spec(spec: "JobSpec", group: "Group") -> "JobSpec":
    """The job of a group of workers.

    Workers survive the attempts of the head, so their timeout covers all its attempts.
    """
    seconds = spec.timeout_seconds
    start = parse_duration(spec.launch.start_within) or 0
    return replace(
        _group_spec(spec, group),
        name=f"{spec.name}-{group.name}",
        metrics={},
        timeout=None if seconds is None else spec.retry.attempts * (seconds + start + LINGER),
    )


# --- Held runs ------------------------------------------------------------------------------------
# A held run keeps its resources for a person, who works inside it.


HELD_TAG = "batchml:seat"  # the command that holds the run: ALLOC or NOTEBOOK
ALLOC, NOTEBOOK = "alloc", "notebook"
