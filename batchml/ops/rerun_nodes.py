"""Runs of many nodes, and gangs, again: what AWS tells of how their nodes were started. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from batchml.errors import UsageError
from batchml.model.group import GROUP_TAG, HEALTH, is_worker
from batchml.model.job import Group, Health, JobSpec, Launch, Resources
from batchml.model.run import Run
from batchml.runtime.protocol.launch import Plan

PLAIN = Launch()


def refuse_parts(run: Run | None, tags: Mapping[str, str], job_id: str, head: str = "") -> None:
    """Raise UsageError for what does not run by itself: one node, or the workers of a gang.

    `head` names the run of these workers.
    """
    if run is not None and run.node_index is not None:
        whole = job_id.partition("#")[0]
        raise UsageError(
            f"{job_id}: one node does not run alone. All of them again: batchml rerun {whole}"
        )
    if is_worker(tags):
        whole = head or tags["batchml:gang"]
        raise UsageError(
            f"{job_id}: workers do not run without their head. All again: batchml rerun {whole}"
        )


def launch_of(run: Run) -> dict[str, Any]:
    """Fields of a JobSpec, by name: `nodes`, `launch` and `health` of a run that AWS describes.

    Raises UsageError where its variables are of another version, and for nodes that may not all be
    alike: of somebody else's run.
    """
    if run.nodes and not run.key:
        raise UsageError(
            f"{run.job_id}: batchml did not submit it, and its nodes may not all be alike. "
            f"Submit its job: batchml submit JOB."
        )
    try:
        plan = Plan.read(run.environment)
        told = json.loads(run.environment.get(HEALTH) or "{}")
        health = {name: value for name, value in told.items() if value or name != "bandwidth"}
        if "bandwidth" in health:
            health["bandwidth"] = f"{health['bandwidth']} B"
        checks = msgspec.convert(health, Health)
    except (AttributeError, ValueError) as error:
        raise UsageError(f"{run.job_id}: how its nodes start cannot be read: {error}") from None
    launch = PLAIN if plan is None else _launch(plan)
    return {"nodes": run.nodes or 1, "launch": launch, "health": checks}


def _launch(plan: Plan) -> Launch:
    table = {
        "kind": plan.kind,
        "processes_per_node": plan.processes or "auto",
        "logs": plan.logs,
        "hang_after": f"{plan.hang_after:g}s" if plan.hang_after else None,
        "start_within": f"{plan.start_within:g}s",
    }
    return msgspec.convert(table, Launch)


def groups_of(head: Run, workers: Mapping[str, Run]) -> tuple[Group, ...]:
    """The groups of a gang, from its head and the jobs of its workers; none for another run.

    Raises UsageError for workers that AWS does not know any more.
    """
    plan = Plan.read(head.environment)
    if plan is None or not plan.groups:
        return ()
    own = Group(head.tags.get(GROUP_TAG, "head"), queue=head.queue, resources=_resources(head))
    found = [own]
    for group in plan.groups:
        run = workers.get(group.name)
        if run is None:
            raise UsageError(
                f"{head.job_id}: AWS Batch has forgotten its workers {group.name}, and what they "
                f"were is not known here. Submit its job again: batchml submit JOB."
            )
        found.append(
            Group(
                group.name,
                count=group.size,
                min=group.least,
                queue=run.queue,
                resources=_resources(run),
            )
        )
    return tuple(found)


def _resources(run: Run) -> Resources:
    return Resources(vcpus=run.vcpus or 1, memory=f"{run.memory_mib or 2048} MiB", gpus=run.gpus)


def on_nodes(spec: JobSpec, run: Run, groups: Sequence[Group]) -> JobSpec:
    """A job with the nodes and groups that a run had."""
    return replace(spec, **launch_of(run), groups=tuple(groups))
