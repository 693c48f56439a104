"""What a job with Neuron chips needs of its queue: hosts that have them, and all of a host.

AWS Batch counts vCPUs, memory and GPUs, but no Neuron chips, and a definition names its chips by
their numbers. So a run has its chips to itself only if no other run fits on its host. Sources: AWS
Batch API Reference, ResourceRequirement; ECS API Reference, ResourceRequirement (NeuronDevice is
for ECS Managed Instances only).
"""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from batchml.context import Context, EnvironmentCache
from batchml.errors import ConfigError
from batchml.jobs.gpus import job_containers, queue_types, with_neuron_queue
from batchml.model.environment import is_neuron_type
from batchml.model.job import JobSpec, Resources
from batchml.runtime.protocol.instance_types import InstanceDevices, family_types, vcpus_of


def take_whole_hosts(
    context: Context, spec: JobSpec, cache: EnvironmentCache | None, notices: list[str]
) -> JobSpec:
    """The job in a queue with the Neuron chips that it requests, with all vCPUs of a host.

    A job that names no queue gets the first one that has the chips. Nothing changes on `local`, and
    for a job without chips. Raises ConfigError for a queue that has no such hosts, or not so many
    chips.
    """
    if context.settings.is_local:
        return spec
    spec = with_neuron_queue(context, spec)
    mistakes, changed = list[str](), dict[str, Resources]()
    for name, queue, resources in job_containers(spec):
        where = f"groups.{name}.resources" if name else "resources"
        if not resources.neurons:
            notices += _unused_notices(context, name, queue, resources)
            continue
        queue = context.bare(context.queue(queue))
        types = queue_types(context, queue, cache)
        rows = [row for each in types for row in family_types(each)]
        found = _neuron_mistakes(context, queue, types)
        vcpus = resources.vcpus
        if rows and not found:
            vcpus = whole_vcpus(rows, resources.neurons, resources.vcpus) or 0
            found += [] if vcpus else [_count_mistake(queue, rows, resources)]
        mistakes += [f"{where}.{each}" for each in found]
        if not found:
            changed[name] = replace(resources, vcpus=vcpus)
            notices += _whole_notice(name, resources, vcpus, known=bool(rows))
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    return _with_resources(spec, changed)


def whole_vcpus(rows: Iterable[InstanceDevices], neurons: int, vcpus: int) -> int | None:
    """The least vCPUs, at least `vcpus`, with which a run has its host to itself; None for none.

    `rows`: the types of the queue. On each type on which the run fits, it must find its chips, and
    no second run may fit beside it.
    """
    sizes = {row.instance_type: vcpus_of(row.instance_type) for row in rows}
    by_name = {row.instance_type: row for row in rows}

    def is_alone(requested: int) -> bool:
        hosts = [name for name, size in sizes.items() if size >= requested]
        return bool(hosts) and all(
            neurons in by_name[name].job_counts and 2 * requested > sizes[name] for name in hosts
        )

    candidates = [vcpus, *sorted(size for size in sizes.values() if size > vcpus)]
    return next((each for each in candidates if is_alone(each)), None)


def _neuron_mistakes(context: Context, queue: str, types: Iterable[str]) -> list[str]:
    """The mistake of a queue with hosts that lack Neuron chips."""
    others = [each for each in types if not is_neuron_type(each)]
    if not others:
        return []
    fit = [each for each in context.settings.environment.queues_with_neurons if each != queue]
    step = "Describe a queue with trn1, trn2 or inf2 types in batchml.toml, and run batchml setup."
    step = f"Choose --queue {fit[0]}." if fit else step
    what = f"hosts of the queue {queue} have no Neuron chips: {', '.join(others)}"
    return [f"neurons: {what}. {step}"]


def _count_mistake(queue: str, rows: Iterable[InstanceDevices], resources: Resources) -> str:
    largest = max(rows, key=lambda row: vcpus_of(row.instance_type))
    most = vcpus_of(largest.instance_type)
    if resources.vcpus > most:
        return (
            f"vcpus: found {resources.vcpus}. The largest host of the queue {queue}, "
            f"{largest.instance_type}, has {most}."
        )
    offers = "; ".join(f"{row.instance_type}: {_listed(row.job_counts)}" for row in rows)
    return f"neurons: found {resources.neurons}. A run may have, in the queue {queue}: {offers}."


def _listed(counts: tuple[int, ...]) -> str:
    if counts == tuple(range(1, len(counts) + 1)):
        return f"1 to {counts[-1]}" if len(counts) > 1 else "1"
    return f"{', '.join(map(str, counts[:-1]))} or {counts[-1]}"


def _whole_notice(name: str, resources: Resources, vcpus: int, *, known: bool) -> Iterator[str]:
    who = f"{name}: " if name else ""
    if vcpus != resources.vcpus:
        yield (
            f"{who}{vcpus} vCPUs instead of {resources.vcpus}, all of a host: AWS Batch does not "
            "count Neuron chips, and a second run there would use the same ones."
        )
    elif not known:
        yield (
            f"{who}AWS Batch does not count Neuron chips: request the vCPUs of a whole host, or a "
            "second run there uses the same ones."
        )


def _unused_notices(context: Context, name: str, queue: str, resources: Resources) -> Iterator[str]:
    """A line for a container without chips in a queue of batchml.toml whose hosts have some."""
    queue = context.bare(context.queue(context.choose_queue(queue, resources.gpus)))
    if queue in context.settings.environment.queues_with_neurons:
        yield (
            f"{f'{name}: ' if name else ''}hosts of the queue {queue} have Neuron chips, and this "
            "run reaches none of them: it requests none. --neurons N, or neurons under [resources]."
        )


def _with_resources(spec: JobSpec, changed: dict[str, Resources]) -> JobSpec:
    """The job with other resources of its containers, by the names of groups; "" without groups."""
    groups = tuple(
        replace(each, resources=changed[each.name]) if each.name in changed else each
        for each in spec.groups
    )
    return replace(spec, resources=changed.get("", spec.resources), groups=groups)
