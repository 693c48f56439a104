"""Fit a job to this machine: reduce its resources to those that the machine has."""

from msgspec import Struct
from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import ConfigError
from batchml.jobs.gpus import on_machine
from batchml.model.group import min_workers, resources_of
from batchml.model.job import JobSpec, Resources


class Capacity(Struct, frozen=True):
    """The resources of this machine. Memory in MiB."""

    vcpus: int
    memory_mib: int
    gpus: int
    neurons: int = 0


class FittedJob(Struct, frozen=True):
    """A job that fits, and a description of each reduction: "1 GPU instead of 4"."""

    spec: JobSpec
    cuts: tuple[str, ...]


def fit_to_machine(context: Context, spec: JobSpec, strict: bool, notices: list[str]) -> JobSpec:
    """The job with no more resources than this machine has; a notice says what was reduced.

    `gpus = "auto"` becomes a number. Raises ConfigError for more nodes, or groups, than can run at
    once, and with `strict` (`--strict-resources`) for each reduction.
    """
    from batchml.local import machine
    from batchml.local.executors.choice import server_vcpus

    requested = [spec.resources, *(resources_of(spec, group) for group in spec.groups)]
    gpus = len(machine.find_gpus()) if any(each.gpus for each in requested) else 0
    spec = on_machine(spec, gpus)
    neurons = machine.count_neurons() if any(each.neurons for each in requested) else 0
    capacity = Capacity(server_vcpus(context.home), machine.memory_mib(), gpus, neurons)
    fitted = fit_groups(spec, capacity) if spec.groups else fit_job(spec, capacity)
    if strict and fitted.cuts:
        cuts = [f"resources: this machine would give {cut}." for cut in fitted.cuts]
        raise ConfigError(spec.name, cuts)
    if fitted.cuts:
        notices.append(f"Fitted to this machine: {', '.join(fitted.cuts)}.")
    return fitted.spec


def fit_job(spec: JobSpec, capacity: Capacity) -> FittedJob:
    """Reduce the resources of a job so that all its nodes run on the machine at once.

    Raises ConfigError for more nodes than there are vCPUs.
    """
    if spec.nodes > max(1, capacity.vcpus):
        raise ConfigError(
            spec.name,
            [
                f"nodes: {spec.nodes} at once, and this machine has "
                f"{_count(capacity.vcpus, 'vCPU')}: each node takes at least one. Ask for fewer, "
                f"or let them share: batchml local stop, then batchml local start "
                f"--vcpus {spec.nodes}."
            ],
        )
    requested, nodes = spec.resources, spec.nodes
    cuts: list[str] = []
    vcpus = min(requested.vcpus, capacity.vcpus // nodes)
    if vcpus < requested.vcpus:
        cuts.append(f"{_count(vcpus, 'vCPU')} instead of {requested.vcpus}")
    memory, most = requested.memory, capacity.memory_mib // nodes
    if requested.memory_mib > most:
        memory = f"{most} MiB"
        cuts.append(f"{_gib(most)} of memory instead of {_gib(requested.memory_mib)}")
    gpus = min(requested.gpu_count, capacity.gpus // nodes)
    if gpus < requested.gpu_count:
        cuts.append(f"{_count(gpus, 'GPU') if gpus else 'no GPU'} instead of {requested.gpus}")
    # A definition names the chips by their numbers, so that nodes here would share them.
    neurons = min(requested.neurons, capacity.neurons if nodes == 1 else 0)
    if neurons < requested.neurons:
        given = _count(neurons, "Neuron chip") if neurons else "no Neuron chip"
        cuts.append(f"{given} instead of {requested.neurons}")
    if nodes > 1:
        cuts = [f"{cut} on each node" for cut in cuts]
    if neurons:  # with all vCPUs, no other run takes the same chips meanwhile
        vcpus = capacity.vcpus
    resources = replace(requested, vcpus=vcpus, memory=memory, gpus=gpus, neurons=neurons)
    return FittedJob(replace(spec, resources=resources), tuple(cuts))


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def fit_groups(spec: JobSpec, capacity: Capacity) -> FittedJob:
    """Reduce the resources of groups until all of them run on one machine at once.

    Each container keeps at least one vCPU and an equal part of the memory. If they still do
    not all fit, as many as possible run at once, and the others later.

    Raises ConfigError if the head and its `min` workers do not fit.
    """
    needed = 1 + sum(min_workers(group) for group in spec.groups[1:])
    if needed > capacity.vcpus:
        raise ConfigError(
            spec.name,
            [
                f"groups: the head and the workers that it waits for are {needed} containers, and "
                f"this machine has {capacity.vcpus} vCPUs. Ask for fewer, set min = 0, or let them "
                f"share: batchml local stop, then batchml local start --vcpus {needed}."
            ],
        )
    total = min(capacity.vcpus, sum(group.count for group in spec.groups))
    most = Capacity(capacity.vcpus // total, capacity.memory_mib // total, capacity.gpus)
    groups, cuts = [], list[str]()
    requested = [(group, resources_of(spec, group)) for group in spec.groups]
    is_shared = (
        sum(group.count * each.vcpus for group, each in requested) > capacity.vcpus
        or sum(group.count * each.memory_mib for group, each in requested) > capacity.memory_mib
    )
    for group, asked in requested:
        resources = _limit(asked, most) if is_shared else asked
        if resources.gpu_count > capacity.gpus:
            resources = replace(resources, gpus=capacity.gpus)
        if resources.neurons:  # the jobs of a group run are on this machine at the same time
            resources = replace(resources, neurons=0)
        if resources != asked:
            cuts.append(f"{group.name} with {_describe(resources)} instead of {_describe(asked)}")
        groups.append(replace(group, resources=resources))
    return FittedJob(replace(spec, groups=tuple(groups)), tuple(cuts))


def _limit(asked: Resources, most: Capacity) -> Resources:
    memory = asked.memory if asked.memory_mib <= most.memory_mib else f"{most.memory_mib} MiB"
    return replace(asked, vcpus=min(asked.vcpus, most.vcpus), memory=memory)


def _describe(resources: Resources) -> str:
    chips = f", {resources.gpus} GPU" if resources.gpus else ""
    chips += f", {resources.neurons} Neuron chips" if resources.neurons else ""
    return f"{resources.vcpus} vCPU, {resources.memory_mib} MiB{chips}"
