"""A gang: one run that is several jobs of AWS Batch, because their hosts are not alike. Pure.

The first of `[[groups]]` is the head, which runs the command; each other group is a job of workers,
an array where they are several. AWS Batch knows nothing of it: names, tags and variables do.
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
    TORCHRUN,
    VARIABLE,
    VCPUS,
    WORKER,
    Plan,
    Workers,
)

# --- how the nodes of a run are started -----------------------------------------------------------
# `[launch]` and `[health]` of a job -> the variables that tell its nodes.


HEALTH = "BATCHML_HEALTH"


def launch_plan(spec: JobSpec) -> Plan | None:
    """What the nodes of a run do together; None for a command that is simply run on each.

    Of a Ray gang this is what all its jobs have in common: role and groups are for whoever knows
    the jobs (`model/group.py`).
    """
    launch = spec.launch
    if launch.kind == "plain":
        return None
    processes = launch.processes_per_node
    return Plan(
        kind=launch.kind,
        processes=0 if processes == "auto" else processes,
        logs=launch.logs,
        hang_after=float(parse_duration(launch.hang_after) or 0) if launch.hang_after else 0.0,
        start_within=float(parse_duration(launch.start_within) or 0),
        bandwidth=float(_bytes(spec.health.bandwidth)),
    )


def launch_variables(spec: JobSpec, token: str) -> dict[str, str]:
    """The variables of a run with these nodes. `token`: hex digits that no other run has.

    A job of a Ray gang is told its part by whoever knows the others: nothing is said of it here.
    """
    found = health_variable(spec.health)
    plan = launch_plan(spec)
    if plan is not None and plan.kind == TORCHRUN:
        found[VARIABLE] = plan.to_json()
        found[VCPUS] = str(spec.resources.vcpus)
        if token:
            found[TOKEN] = token
    return found


def health_variable(health: Health) -> dict[str, str]:
    """What the runtime checks of a host, where the job says it; nothing where it does not."""
    if health == Health():
        return {}
    told = {
        "checks": health.checks,
        "bandwidth": _bytes(health.bandwidth),  # a second; 0: not measured
        "tries": health.tries,
        "quarantine": health.quarantine,
    }
    return {HEALTH: json.dumps(told, separators=(",", ":"))}


def _bytes(size: str | int | None) -> int:
    return 0 if size is None else parse_size(size) or 0


# --- group runs -----------------------------------------------------------------------------------


GANG_TAG = "batchml:gang"  # the key of the head, on all jobs of a gang
GROUP_TAG = "batchml:group"  # whose job it is
RENDEZVOUS = "BATCHML_GANG"  # where head and workers find each other; without it, the workspace
GANG_KEY = "BATCHML_GANG_KEY"  # the head's
GANG_HEAD = "BATCHML_GANG_HEAD"  # QUEUE/NAME of the head's job, in AWS
GANG_ATTEMPTS = "BATCHML_GANG_ATTEMPTS"  # that the head has at most
ENDED_BY_HEAD = "The head of its gang has ended"  # why jobs of workers were terminated

LINGER = 600  # seconds that workers wait for a head that has gone: docs/ray.md


class Member(Struct, frozen=True):
    """One job of a gang. `spec` is what it asks for, `env` and `tags` what makes it a member."""

    group: str
    spec: JobSpec
    key: str
    plan: Plan
    queue: str  # in AWS
    env: dict[str, str]
    tags: dict[str, str]
    array: int | None = None  # workers, where they are several

    @property
    def is_head(self) -> bool:
        return self.plan.role == HEAD


def members(
    spec: JobSpec,
    keys: Sequence[str],
    token: str,
    *,
    queue: Callable[[str], str] = lambda name: name,
    rendezvous: str = "",
) -> list[Member]:
    """The jobs that a job with groups comes to, the head first.

    `keys` has one for each group. `token` is the secret by which members know each other, `queue`
    gives a queue's name in AWS, and `rendezvous` is an s3:// URL, or empty for the workspace.
    """
    head, *groups = zip(spec.groups, keys, strict=True)
    jobs = [(group, key, _worker(spec, group)) for group, key in groups]
    workers = tuple(
        Workers(
            name=group.name,
            size=group.count,
            least=least(group),
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
    plan = launch_plan(spec) or Plan(RAY)
    made = [(*head, _placed(spec, head[0]), plan._replace(groups=workers))]
    made += [(*each, plan._replace(role=WORKER)) for each in jobs]
    return [
        Member(
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


def least(group: Group) -> int:
    """So many have to be there before the program starts."""
    return group.count if group.min is None else min(group.min, group.count)


def resources_of(spec: JobSpec, group: Group) -> Resources:
    """What one container of a group has: its own, or the job's."""
    return group.resources or spec.resources


def is_worker(tags: Mapping[str, str]) -> bool:
    """True for the tags of a job that belongs to another run."""
    return bool(tags.get(GANG_TAG)) and tags.get("batchml:key") != tags[GANG_TAG]


def _placed(spec: JobSpec, group: Group) -> JobSpec:
    """The job of one group by itself."""
    return replace(
        spec,
        groups=(),
        queue=group.queue or spec.queue,
        resources=resources_of(spec, group),
    )


def _worker(spec: JobSpec, group: Group) -> JobSpec:
    """The job of workers. They outlive attempts of the head, so their time is that of them all."""
    seconds = spec.timeout_seconds
    start = parse_duration(spec.launch.start_within) or 0
    return replace(
        _placed(spec, group),
        name=f"{spec.name}-{group.name}",
        metrics={},
        timeout=None if seconds is None else spec.retry.attempts * (seconds + start + LINGER),
    )


# --- tags of a held run ---------------------------------------------------------------------------
# Seats: runs that hold a machine for a person to sit at, and do nothing of their own. No I/O.


SEAT_TAG = "batchml:seat"  # "alloc" or "notebook": what the run is held for
