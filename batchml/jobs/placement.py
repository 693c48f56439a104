"""Whether the hosts of a queue can hold a run, and whether its compute may have enough of them.

AWS Batch accepts a job for which no host is large enough, and the job stays in RUNNABLE. Source:
AWS Batch User Guide, "Jobs stuck in a RUNNABLE status". The hosts are those of batchml.toml.
Nothing is refused for a queue that is not there, nor for types whose sizes are not known.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from batchml.aws.pricing.listed import ListedPrices
from batchml.context import Context
from batchml.errors import ConfigError
from batchml.jobs.gpus import job_containers
from batchml.model.environment import Compute, Environment, is_gpu_type
from batchml.model.job import JobSpec, Resources
from batchml.runtime.protocol.instance_types import family_types, vcpus_of

_UNKNOWN = 1_000_000_000  # of a size that is not known: any request fits


class HostSize(Struct, frozen=True):
    """The size of an instance type, or of a family whose types are not known."""

    name: str
    vcpus: int = _UNKNOWN
    memory_mib: int = _UNKNOWN
    gpus: int = 0
    neurons: int = 0

    def holds(self, asked: Resources) -> bool:
        return (
            asked.vcpus <= self.vcpus
            and asked.memory_mib <= self.memory_mib
            and asked.gpu_count <= self.gpus
            and asked.neurons <= self.neurons
        )


def check_placement(context: Context, spec: JobSpec) -> JobSpec:
    """The job itself. Raises ConfigError if no host of its queue can hold one of its containers, or
    if its hosts together have more vCPUs than `max_vcpus` allows.

    `spec` has numbers in place of `gpus = "auto"`. On `local`, jobs are fitted instead.
    """
    if context.settings.is_local:
        return spec
    mistakes = list[str]()
    for name, queue, asked in job_containers(spec):
        where = f"groups.{name}.resources" if name else "resources"
        queue = context.choose_queue(queue, asked.gpu_count, asked.neurons)
        bare = context.bare(context.queue(queue))
        environment = context.settings.environment
        computes = _computes(environment, bare)
        if computes is None:
            continue
        found = [f"{where}{each}" for each in _size_mistakes(environment, bare, asked)]
        if not found:
            found = list(_total_mistakes(computes, asked, where, spec.nodes))
        mistakes += found
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    return spec


def idle_gpus_notice(context: Context, spec: JobSpec) -> list[str]:
    """A line if nodes, each with a host to itself, leave GPUs of every such host idle."""
    asked = spec.resources
    if context.settings.is_local or spec.nodes == 1 or not asked.gpu_count:
        return []
    queue = context.bare(context.queue(context.choose_queue(spec.queue, asked.gpu_count)))
    fit = [each for each in _queue_sizes(context.settings.environment, queue) if each.holds(asked)]
    least = min(fit, key=lambda each: (each.gpus, each.vcpus), default=HostSize(""))
    if least.gpus == _UNKNOWN or least.gpus <= asked.gpu_count:
        return []
    return [
        f"Each node has a host to itself: {least.gpus - asked.gpu_count} of the {least.gpus} GPUs "
        f"of a {least.name} stay idle. --gpus {least.gpus} takes all of them."
    ]


def host_sizes(names: Iterable[str]) -> list[HostSize]:
    """The sizes of instance types and of all types of families, each once."""
    found: dict[str, HostSize] = {}
    for name in names:
        for size in _sizes(name):
            found[size.name] = size
    return list(found.values())


def too_small_computes(environment: Environment) -> Iterator[str]:
    """A line for each compute environment whose `max_vcpus` is below its smallest host's vCPUs."""
    for name, compute in environment.compute.items():
        sizes = host_sizes(compute.instance_types)
        least = min(sizes, key=lambda each: each.vcpus, default=HostSize(""))
        if least.vcpus != _UNKNOWN and compute.max_vcpus < least.vcpus:
            yield (
                f"compute {name}: max_vcpus is {compute.max_vcpus}, and its smallest host, "
                f"{least.name}, has {least.vcpus} vCPUs: runs that need a whole host never start. "
                f"Set max_vcpus = {least.vcpus} or more"
            )


def _sizes(name: str) -> Iterator[HostSize]:
    listed = {each.name: each for each in ListedPrices().sizes(name)}
    rows = {each.instance_type: each for each in family_types(name)}
    family_is_known = bool(listed) or any(each.accelerator for each in rows.values())
    if "." not in name and not family_is_known:  # the table has only some of its types
        yield HostSize(name, gpus=_UNKNOWN if is_gpu_type(name) else 0)
        return
    for each in dict.fromkeys([*rows, *listed] or [name]):
        row, size = rows.get(each), listed.get(each)
        chips = row.accelerator if row else None
        is_gpu = is_gpu_type(each)
        yield HostSize(
            each,
            size.vcpus if size else vcpus_of(each) if row else _UNKNOWN,
            size.memory_mib if size else _UNKNOWN,
            (row.count if row else _UNKNOWN) if is_gpu else 0,
            row.count if row and chips and not is_gpu else 0,
        )


def _computes(environment: Environment, queue: str) -> dict[str, Compute] | None:
    """The compute environments of a queue; None if batchml.toml does not describe all of them."""
    described = environment.queues.get(queue)
    if described is None or not set(described.compute) <= environment.compute.keys():
        return None
    return {name: environment.compute[name] for name in described.compute}


def _queue_names(environment: Environment, queue: str) -> list[str]:
    """The instance types and families of a queue, each once."""
    computes = (_computes(environment, queue) or {}).values()
    return list(dict.fromkeys(name for each in computes for name in each.instance_types))


def _queue_sizes(environment: Environment, queue: str) -> list[HostSize]:
    return host_sizes(_queue_names(environment, queue))


def _surely_holds(environment: Environment, queue: str, asked: Resources) -> bool:
    """Whether a host of a queue, of a known size, can hold a container."""
    sizes = _queue_sizes(environment, queue)
    known = (each for each in sizes if _UNKNOWN not in (each.vcpus, each.memory_mib))
    return any(each.holds(asked) for each in known)


# --- One container on one host --------------------------------------------------------------------


def _size_mistakes(environment: Environment, queue: str, asked: Resources) -> Iterator[str]:
    """Why no host of a queue can hold a container: `.gpus: text`."""
    sizes = _queue_sizes(environment, queue)
    if not sizes or any(each.holds(asked) for each in sizes):
        return
    others = (name for name in environment.queues if name != queue)
    fit = next((name for name in others if _surely_holds(environment, name, asked)), "")
    instead = f", or choose --queue {fit}" if fit else ""
    pairs = (
        ("gpus", "GPU", asked.gpu_count, {each: each.gpus for each in sizes}),
        ("vcpus", "vCPU", asked.vcpus, {each: each.vcpus for each in sizes}),
        ("memory", "MiB", asked.memory_mib, {each: each.memory_mib for each in sizes}),
        ("neurons", "Neuron chip", asked.neurons, {each: each.neurons for each in sizes}),
    )
    is_said = False
    for key, unit, wanted, has in pairs:
        largest = max(sizes, key=lambda each: (has[each], each.vcpus))
        most = has[largest]
        if wanted <= most:
            continue
        is_said = True
        number = _gib(wanted) if key == "memory" else str(wanted)
        if not most:
            names = ", ".join(_queue_names(environment, queue))
            chips = max(each.neurons for each in sizes)
            own = f" --neurons 1 to {chips} requests their Neuron chips." if chips else ""
            yield (
                f".{key}: found {number}. Hosts of the queue {queue} have no {unit}s ({names}). "
                f"Give --{key} 0{instead}.{own}"
            )
        elif key == "memory":
            yield (
                f".{key}: found {number}. The largest host of the queue {queue}, {largest.name}, "
                f"has {_gib(most)}, of which its system takes a part. Request less{instead}."
            )
        else:
            yield (
                f".{key}: found {number}. The largest host of the queue {queue}, {largest.name}, "
                f"has {_count(most, unit)}. Request at most {most}{instead}."
            )
    if not is_said:
        words = [_count(asked.gpu_count, "GPU")] if asked.gpu_count else []
        words += [_count(asked.vcpus, "vCPU"), _gib(asked.memory_mib)]
        able = [each for each in sizes if each.gpus >= asked.gpu_count]
        largest = max(able or sizes, key=lambda each: (each.vcpus, each.memory_mib))
        memory = f" and {_gib(largest.memory_mib)}" if largest.memory_mib != _UNKNOWN else ""
        yield (
            f": no host of the queue {queue} has {', '.join(words)} at once. The largest, "
            f"{largest.name}, has {_count(largest.vcpus, 'vCPU')}{memory}. Request less{instead}."
        )


# --- All hosts of a run ---------------------------------------------------------------------------


def _total_mistakes(
    computes: dict[str, Compute], asked: Resources, where: str, nodes: int
) -> Iterator[str]:
    """Why no compute environment may have all hosts of a run at once.

    A multi-node run takes a host for each node, all in one compute environment: AWS Batch User
    Guide, "Multi-node parallel jobs".
    """
    hosts: dict[str, HostSize] = {}
    for name, compute in computes.items():
        fit = [each for each in host_sizes(compute.instance_types) if each.holds(asked)]
        if not fit:
            continue
        least = min(fit, key=lambda each: each.vcpus)
        each_takes = least.vcpus if nodes > 1 and least.vcpus != _UNKNOWN else asked.vcpus
        if nodes * each_takes <= compute.max_vcpus:
            return
        hosts[name] = HostSize(least.name, each_takes)
    if not hosts:
        return
    name = max(hosts, key=lambda each: computes[each].max_vcpus)
    limit, host = computes[name].max_vcpus, hosts[name]
    total = nodes * host.vcpus
    step = f"set max_vcpus = {total} in compute.{name} of batchml.toml and run batchml setup"
    if nodes == 1:
        yield (
            f"{where}.vcpus: found {total}, and compute {name} may have {limit} vCPUs "
            f"(max_vcpus). Request less, or {step}."
        )
        return
    fits = limit // host.vcpus
    fewer = f"Request at most {fits}" if fits > 1 else "Request fewer"
    yield (
        f"nodes: found {nodes}. Each takes a host, {host.name} at least, with {host.vcpus} vCPUs: "
        f"{total} in all, and compute {name} may have {limit} (max_vcpus), which is "
        f"{_count(fits, 'host') if fits else 'no host'}. {fewer}, or {step}."
    )


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _gib(mib: int) -> str:
    return f"{mib / 1024:,.1f}".removesuffix(".0").replace(",", "") + " GiB"
