"""What the hosts of a job's queue decide: the number behind `gpus = "auto"`, its image's processor.

The queue is the one that the job names, else `default`. Its instance types are those in
batchml.toml; for other queues AWS Batch is asked, once an hour.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.hosts import fetch_host_pools
from batchml.aws.batch.requests import DRIVER
from batchml.context import Context, EnvironmentCache
from batchml.errors import AccessError, ConfigError
from batchml.jobs.find import ImageSource
from batchml.model.environment import Environment, is_gpu_type, processor_of
from batchml.model.group import resources_of
from batchml.model.image import GpuLimits, Recipe
from batchml.model.job import AUTO, JobSpec, Resources
from batchml.runtime.protocol.instance_types import NVIDIA, family_accelerator

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
    context: Context,
    spec: JobSpec,
    source: ImageSource | None,
    cache: EnvironmentCache | None,
    notices: list[str],
) -> JobSpec:
    """The job with a number in place of each `gpus = "auto"`, of the job and of its groups.

    On `local` it is 1 if the machine has a GPU for each node; in AWS, 1 if a compute environment of
    the queue has GPUs for which the image of `source` has code; else 0. A notice says which, where
    that is worth a line. Raises ConfigError for a number of GPUs for which the image has no code.
    """
    if context.settings.is_local:
        if not _has_auto(spec):
            return spec
        from batchml.local import machine

        return on_machine(spec, len(machine.find_gpus()))
    if not any(resources.gpus for _, _, resources in job_containers(spec)):
        return spec
    look = _QueueReader(context, source, cache)
    mistakes = list(_image_mistakes(spec, look))
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    if not _has_auto(spec):
        return spec
    resolved = in_queues(spec, lambda queue: look.auto(queue).count)
    notices += _notices(spec, resolved, look)
    return resolved


class QueueGpus(Struct, frozen=True):
    """The GPUs of a queue's hosts for an image. `unfit`: those for which it has no code.

    `is_known`: whether the instance types of the queue are known.
    """

    queue: str
    has_gpus: bool
    unfit: tuple[str, ...] = ()
    is_known: bool = True

    @property
    def count(self) -> int:
        """The GPUs of a container with "auto"."""
        return int(self.has_gpus and not self.unfit)


def unfit(types: Iterable[str], limits: GpuLimits) -> Iterator[str]:
    """Yield the types and families with GPUs outside of an image's limits, with the reason:
    `p5 (H100, 9.0)`.
    """
    for name in types:
        card = family_accelerator(name)
        if card is None or card.maker != NVIDIA or card.capability is None:
            continue
        if not limits.allows(card.capability):
            yield f"{name} ({card.name}, {'.'.join(map(str, card.capability))})"


def with_neuron_queue(context: Context, spec: JobSpec) -> JobSpec:
    """The job with the queue for its Neuron chips, where it names none."""
    groups = tuple(
        replace(each, queue=context.choose_queue("", 0, neurons))
        if (neurons := resources_of(spec, each).neurons) and not (each.queue or spec.queue)
        else each
        for each in spec.groups
    )
    if spec.resources.neurons and not spec.queue and not spec.groups:
        spec = replace(spec, queue=context.choose_queue("", 0, spec.resources.neurons))
    return replace(spec, groups=groups)


def _has_auto(spec: JobSpec) -> bool:
    groups = (resources_of(spec, each).gpus for each in spec.groups)
    return AUTO in (spec.resources.gpus, *groups)


def variants(context: Context, spec: JobSpec, source: ImageSource | None) -> list[JobSpec]:
    """The job as its runs may be submitted: with "auto" and no queue, without GPUs and with one.

    The second one is that of `--queue NAME`, for the first queue with GPUs in batchml.toml.
    """
    spec = with_neuron_queue(context, spec)
    first = resolve_gpus(context, spec, source, None, [])
    others = context.settings.environment.queues_with_gpus
    if context.settings.is_local or first == spec or spec.queue or spec.groups or not others:
        return [first]
    second = resolve_gpus(context, replace(spec, queue=others[0]), source, None, [])
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


def job_containers(spec: JobSpec) -> Iterator[tuple[str, str, Resources]]:
    """The name of each group, "" without groups; the queue that it names; its resources."""
    if not spec.groups:
        yield "", spec.queue, spec.resources
    for group in spec.groups:
        yield group.name, group.queue or spec.queue, resources_of(spec, group)


class _QueueReader:
    """Reads which GPUs the queues of a job have for its image, each queue once."""

    def __init__(
        self, context: Context, source: ImageSource | None, cache: EnvironmentCache | None
    ) -> None:
        self.context = context
        self.limits = GpuLimits() if source is None else source.recipe("cuda").gpu
        self.image = "" if source is None else source.name
        self._cache = cache
        self._known: dict[str, QueueGpus] = {}

    def auto(self, queue: str) -> QueueGpus:
        """The queue of a container with "auto" that names `queue`."""
        return self.read(self.context.choose_queue(queue, AUTO))

    def read(self, queue: str) -> QueueGpus:
        if queue not in self._known:
            types = queue_types(self.context, queue, self._cache)
            has_gpus = any(map(is_gpu_type, types))
            without_code = tuple(unfit(types, self.limits))
            self._known[queue] = QueueGpus(queue, has_gpus, without_code, bool(types))
        return self._known[queue]

    def describe_unfit(self, queue: QueueGpus) -> str:
        return (
            f"the image {self.image} has code for {self.limits.describe()}, and not for GPUs of "
            f"the queue {queue.queue}: {', '.join(queue.unfit)}."
        )


def _image_mistakes(spec: JobSpec, look: _QueueReader) -> Iterator[str]:
    """The GPUs that a job asks for by number, and for which its image has no code."""
    if look.limits == GpuLimits():
        return
    for name, queue, resources in job_containers(spec):
        if resources.gpus in (0, AUTO):
            continue
        found = look.read(look.context.choose_queue(queue, resources.gpus))
        if found.unfit:
            yield (
                f"{f'groups.{name}.' if name else ''}resources.gpus: {look.describe_unfit(found)} "
                "Choose a queue without these types, or --gpus 0, which takes the image for CPUs."
            )


def _notices(asked: JobSpec, given: JobSpec, look: _QueueReader) -> Iterator[str]:
    """A line for each container with "auto"."""
    with_gpus = look.context.settings.environment.queues_with_gpus
    pairs = zip(job_containers(asked), job_containers(given), strict=True)
    for (name, queue, before), (_, _, after) in pairs:
        if before.gpus != AUTO:
            continue
        found, who = look.auto(queue), f"{name}: " if name else ""
        if after.gpu_count:
            each = " on each node" if asked.nodes > 1 else ""
            yield f'{who}gpus = "auto" is 1 GPU{each}: hosts of the queue {found.queue} have GPUs.'
        elif found.unfit:
            yield (
                f'{who}gpus = "auto" is no GPU, with the image for CPUs: '
                f"{look.describe_unfit(found)}"
            )
        elif found.queue not in look.context.settings.environment.queues:
            are = "have no GPUs" if found.is_known else "are not known here"
            yield (
                f'{who}gpus = "auto" is no GPU: batchml.toml does not describe the queue '
                f"{found.queue}, and its hosts {are}. On a GPU: --gpus 1"
            )
        elif not found.is_known:
            yield (
                f'{who}gpus = "auto" is no GPU: the instance types of the queue {found.queue} are '
                "not known here. On a GPU: --gpus 1"
            )
        elif with_gpus:
            yield (
                f'{who}gpus = "auto" is no GPU: hosts of the queue {found.queue} have none. On a '
                f"GPU: --queue {with_gpus[0]}"
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


def describe_container(gpus: int, container: Mapping[str, Any], recipe: Recipe | None) -> str:
    """The GPUs of a container, how it reaches them, and the flavor of its image.

    `container`: the containerProperties of its definition in AWS. `recipe`: that of its image; None
    for an image of a registry. "" for a container about which there is nothing to say.
    """
    mode = "driver-mount" if container.get("privileged") else "toolkit"
    words = f"{gpus} GPU{'s' if gpus > 1 else ''}, {_ACCESS[mode]}" if gpus else "no GPU"
    image = ""
    if recipe is not None and recipe.has_flavors:
        image = "; CUDA image" if recipe.flavor == "cuda" else "; CPU image"
    if gpus and recipe is not None and recipe.gpu.driver:
        image += f", for driver {recipe.gpu.driver} or later"
    return f"{words}{image}" if gpus or image else ""
