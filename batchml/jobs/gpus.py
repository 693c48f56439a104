"""What the hosts of a job's queue decide: the number behind `gpus = "auto"`, its image's processor.

The queue is the one that the job names, else `default`. Its instance types are those in
batchml.toml; for other queues AWS Batch is asked, once an hour.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from batchml.aws.batch.hosts import fetch_host_pools
from batchml.aws.batch.requests import DRIVER
from batchml.context import Context, EnvironmentCache
from batchml.errors import AccessError
from batchml.model.environment import Environment, is_gpu_type, processor_of
from batchml.model.group import resources_of
from batchml.model.job import AUTO, JobSpec, Resources

# --- The hosts of a queue -------------------------------------------------------------------------


def queue_types(context: Context, queue: str, cache: EnvironmentCache | None) -> tuple[str, ...]:
    """The instance types and families of a queue in AWS. `queue`: its name in batchml.toml.

    A queue that batchml.toml does not describe is looked up in AWS, in two calls. Where that is
    not allowed, and for a queue that does not exist, there are none.
    """
    environment = context.settings.environment
    name = context.queue(queue)
    described = environment.queues.get(context.bare(name))
    if described is not None:
        found = (environment.compute[each].instance_types for each in described.compute)
        return tuple(dict.fromkeys(name for types in found for name in types))

    def ask() -> tuple[str, ...]:
        try:
            pools = fetch_host_pools(context.connect()).get(name, ())
        except AccessError:
            return ()
        return tuple(dict.fromkeys(each for pool in pools for each in pool.types))

    if context.is_offline:
        return ()
    return ask() if cache is None else cache.types(name, ask)


def queue_processor(context: Context, queue: str, cache: EnvironmentCache | None) -> str:
    """The processor of a queue's hosts in AWS: `amd64`, `arm64`.

    It is the first processor of the file's hosts if the queue's types are not known.
    """
    types = queue_types(context, queue, cache)
    return processor_of(types) if types else context.settings.environment.processors[0]


# --- gpus = "auto" --------------------------------------------------------------------------------


def resolve_gpus(
    context: Context, spec: JobSpec, cache: EnvironmentCache | None, notices: list[str]
) -> JobSpec:
    """The job with a number in place of each `gpus = "auto"`, of the job and of its groups.

    On `local` it is 1 if the machine has a GPU for each node; in AWS, 1 if a compute environment of
    the queue has GPUs; else 0. A notice says which, where that is worth a line.
    """
    if not _has_auto(spec):
        return spec
    if context.settings.is_local:
        from batchml.local import machine

        return on_machine(spec, len(machine.find_gpus()))

    def decide(queue: str) -> int:
        types = queue_types(context, context.choose_queue(queue, AUTO), cache)
        return int(any(map(is_gpu_type, types)))

    resolved = in_queues(spec, decide)
    notices += _notices(context, spec, resolved)
    return resolved


def _has_auto(spec: JobSpec) -> bool:
    groups = (resources_of(spec, each).gpus for each in spec.groups)
    return AUTO in (spec.resources.gpus, *groups)


def variants(context: Context, spec: JobSpec, cache: EnvironmentCache | None) -> list[JobSpec]:
    """The job as its runs may be submitted: with "auto" and no queue, without GPUs and with one.

    The second one is that of `--queue NAME`, for the first queue with GPUs in batchml.toml.
    """
    first = resolve_gpus(context, spec, cache, [])
    others = context.settings.environment.queues_with_gpus
    if context.settings.is_local or first == spec or spec.queue or spec.groups or not others:
        return [first]
    second = resolve_gpus(context, replace(spec, queue=others[0]), cache, [])
    return [first] if first.resources == second.resources else [first, second]


def on_machine(spec: JobSpec, gpus: int) -> JobSpec:
    """The job with one GPU for each container that asks for "auto", as far as `gpus` reach.

    The nodes of a job are alike, and so are the jobs of a group: all of them get one, or none.
    """
    if not _has_auto(spec):
        return spec
    left = gpus

    def take(resources: Resources, count: int) -> Resources:
        nonlocal left
        if resources.gpus != AUTO:
            return resources
        given = int(left >= count)
        left -= given * count
        return replace(resources, gpus=given)

    for group in spec.groups:
        asked = resources_of(spec, group)
        left -= 0 if asked.gpus == AUTO else asked.gpu_count * group.count
    groups = tuple(
        replace(each, resources=take(resources_of(spec, each), each.count)) for each in spec.groups
    )
    return replace(spec, resources=take(spec.resources, spec.nodes), groups=groups)


def in_queues(spec: JobSpec, decide: Callable[[str], int]) -> JobSpec:
    """The job with the GPUs that `decide` returns for the queue of each container with "auto"."""

    def take(resources: Resources, queue: str) -> Resources:
        return replace(resources, gpus=decide(queue)) if resources.gpus == AUTO else resources

    groups = tuple(
        replace(each, resources=take(resources_of(spec, each), each.queue or spec.queue))
        for each in spec.groups
    )
    return replace(spec, resources=take(spec.resources, spec.queue), groups=groups)


def with_gpus_of(asked: JobSpec, given: JobSpec) -> JobSpec:
    """The job `asked`, with the numbers of `given`, the same job, in place of "auto"."""
    if not _has_auto(asked):
        return asked

    def take(resources: Resources, other: Resources) -> Resources:
        return replace(resources, gpus=other.gpus) if resources.gpus == AUTO else resources

    groups = tuple(
        replace(each, resources=take(resources_of(asked, each), resources_of(given, other)))
        for each, other in zip(asked.groups, given.groups, strict=True)
    )
    return replace(asked, resources=take(asked.resources, given.resources), groups=groups)


def _notices(context: Context, asked: JobSpec, given: JobSpec) -> Iterator[str]:
    """A line for the queue of each container with "auto"."""
    with_gpus = context.settings.environment.queues_with_gpus
    seen = [("", asked.queue, asked.resources, given.resources)] if not asked.groups else []
    seen += [
        (f"{before.name}: ", before.queue or asked.queue, resources_of(asked, before), now)
        for before, after in zip(asked.groups, given.groups, strict=True)
        for now in [resources_of(given, after)]
    ]
    for who, named, before, now in seen:
        if before.gpus != AUTO:
            continue
        queue = context.choose_queue(named, AUTO)
        if now.gpu_count:
            each = " on each node" if asked.nodes > 1 else ""
            yield f'{who}gpus = "auto" is 1 GPU{each}: hosts of the queue {queue} have GPUs.'
        elif with_gpus:
            yield (
                f'{who}gpus = "auto" is no GPU: hosts of the queue {queue} have none. On a GPU: '
                f"--queue {with_gpus[0]}"
            )


# --- How containers reach GPUs, in words ----------------------------------------------------------

_ACCESS = {
    "driver-mount": "privileged, with the NVIDIA driver of the host mounted at " + DRIVER,
    "toolkit": "unprivileged, by NVIDIA's container toolkit",
}


def describe_access(environment: Environment) -> str:
    """How the jobs of an environment in AWS reach GPUs; "" if none of its hosts has GPUs."""
    if not environment.queues_with_gpus:
        return ""
    mode = environment.gpu_mode
    return f'Jobs with GPUs run {_ACCESS[mode]} (gpu_access = "{mode}").'


def describe_container(gpus: int, container: Mapping[str, Any], flavor: str) -> str:
    """The GPUs of a container, how it reaches them, and the flavor of its image.

    `container`: the containerProperties of its definition in AWS. `flavor`: "" for an image that
    has no flavors.
    """
    mode = "driver-mount" if container.get("privileged") else "toolkit"
    words = f"{gpus} GPU{'s' if gpus > 1 else ''}, {_ACCESS[mode]}" if gpus else "no GPU"
    image = {"cuda": "; CUDA image", "cpu": "; CPU image"}.get(flavor, "")
    return f"{words}{image}" if gpus or image else ""
