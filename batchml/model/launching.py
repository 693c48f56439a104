"""`[launch]` and `[health]` of a job -> the variables that tell its nodes."""

import json

from batchml.model.job import Health, JobSpec
from batchml.model.reading import parse_duration, parse_size
from batchml.runtime.protocol.launch import TOKEN, TORCHRUN, VARIABLE, VCPUS, Plan

HEALTH = "BATCHML_HEALTH"


def launch_plan(spec: JobSpec) -> Plan | None:
    """What the nodes of a run do together; None for a command that is simply run on each.

    Of a Ray gang this is what all its jobs have in common: role and groups are for whoever knows
    the jobs (`model/gang.py`).
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
