"""Compute environments and hosts as table rows: their resources, usage and runs. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import reduce

from msgspec import Struct
from msgspec.structs import replace

from batchml.cost.estimate import host_item
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostResources, HostState
from batchml.model.run import Run


class ClusterState(Struct, frozen=True):
    """Queues, compute environments and hosts, as AWS last described them.

    `computes` or `hosts` is None if AWS refused the call for it. `is_local`: this machine is the
    only host.
    """

    queues: dict[str, QueueState] = {}
    computes: dict[str, ComputeState] | None = None
    hosts: tuple[ClusterHost, ...] | None = None
    fronts: dict[str, tuple[str, ...]] = {}  # queue -> job ids at its head, in order
    missing: tuple[str, ...] = ()  # calls that AWS refused
    is_local: bool = False
    held: dict[str, int] = {}  # queue -> vCPUs of its runs that hold a host

    def computes_of(self, name: str) -> list[ComputeState]:
        """The compute environments of a queue, in the order in which AWS Batch tries them."""
        queue = self.queues.get(name)
        computes = self.computes or {}
        return [
            computes[each] for each in (queue.environments if queue else ()) if each in computes
        ]

    def hosts_of(self, compute: ComputeState) -> list[ClusterHost]:
        return [each for each in self.hosts or () if belongs_to(each, compute)]

    def vcpus_held_in(self, computes: Iterable[ComputeState]) -> int:
        """vCPUs held by the runs of queues that use only these compute environments."""
        names = {each.name for each in computes}
        return sum(
            vcpus for queue, vcpus in self.held.items()
            if queue in self.queues and names.issuperset(self.queues[queue].environments)
        )  # fmt: skip


class HostRow(Struct, frozen=True):
    """A host. `computes`: the names of its compute environments. `price`: USD an hour.

    `usage`: cpu in cores, gpu in whole GPUs, memory and gpu_memory in MiB, as its runs report;
    empty if no run reports it.
    """

    host: ClusterHost
    computes: tuple[str, ...]
    spot: bool = False
    runs: tuple[Run, ...] = ()
    usage: dict[str, float] = {}
    price: Decimal | None = None


class ComputeRow(Struct, frozen=True):
    """A compute environment. `resources`: those of its hosts; on `local` those of this machine."""

    state: ComputeState
    hosts: dict[HostState, int] = {}
    resources: HostResources = HostResources()


class HostTotal(Struct, frozen=True):
    """All hosts together, each counted once.

    `cpu` and `gpu`: the fraction in use; None if no run reports it. `price`: USD an hour; None
    unless the price of each host is known.
    """

    hosts: dict[HostState, int] = {}
    resources: HostResources = HostResources()
    cpu: float | None = None
    gpu: float | None = None
    price: Decimal | None = None


def belongs_to(host: ClusterHost, compute: ComputeState) -> bool:
    return host.cluster == compute.cluster if host.cluster else host.compute == compute.name


def host_rows(
    cluster: ClusterState, runs: Iterable[Run], usage: Mapping[str, Mapping[str, float]]
) -> tuple[HostRow, ...]:
    """Rows of hosts, by compute environment and state. `runs`: containers that hold a host."""
    by_host: dict[str, list[Run]] = {}
    for run in runs:
        by_host.setdefault(run.host, []).append(run)
    rows = []
    for host in cluster.hosts or ():
        ids = (host.id, host.instance) if host.instance else (host.id,)
        on_host = [run for each in ids for run in by_host.get(each, ())]
        computes = [each for each in (cluster.computes or {}).values() if belongs_to(host, each)]
        rows.append(
            HostRow(
                host,
                tuple(sorted(each.name for each in computes)),
                any(each.is_spot for each in computes),
                tuple(on_host),
                _sum_usage([(run, usage.get(run.job_id, {})) for run in on_host]),
            )
        )
    order = list(HostState)
    return tuple(
        sorted(rows, key=lambda row: (row.computes, order.index(row.host.state), row.host.name))
    )


def _sum_usage(runs: Iterable[tuple[Run, Mapping[str, float]]]) -> dict[str, float]:
    """Sum the usage that runs report. Percent of a run's GPUs become a number of GPUs."""
    total: dict[str, float] = {}
    for run, used in runs:
        for name in ("cpu", "memory", "gpu_memory", "gpu"):
            if name in used:
                value = used[name] / 100 * max(1, run.gpus) if name == "gpu" else used[name]
                total[name] = total.get(name, 0.0) + value
    return total


def with_prices(rows: Iterable[HostRow], usd_an_hour: Mapping[str, Decimal]) -> tuple[HostRow, ...]:
    """Rows with prices. `usd_an_hour`: price item -> USD an hour."""
    return tuple(replace(row, price=usd_an_hour.get(price_item(row))) for row in rows)


def price_item(row: HostRow) -> str:
    """The key of a host's price in aws/pricing."""
    return host_item(row.host.type, spot=row.spot)


def compute_rows(cluster: ClusterState, names: Sequence[str] = ()) -> tuple[ComputeRow, ...]:
    """Rows of all compute environments, or of those of some queues, by name."""
    computes = cluster.computes or {}
    if names:
        computes = {each.name: each for name in names for each in cluster.computes_of(name)}
    return tuple(
        ComputeRow(each, count_states(hosts), sum_resources(hosts))
        for _, each in sorted(computes.items())
        for hosts in [cluster.hosts_of(each)]
    )


def sum_hosts(rows: Sequence[HostRow]) -> HostTotal:
    """Sum the resources, usage and prices of hosts."""
    hosts = [row.host for row in rows]
    resources = sum_resources(hosts)
    cpu = [row.usage["cpu"] for row in rows if "cpu" in row.usage]
    gpu = [row.usage["gpu"] for row in rows if "gpu" in row.usage]
    prices = [row.price for row in rows]
    known = [price for price in prices if price is not None]
    return HostTotal(
        count_states(hosts),
        resources,
        min(1.0, sum(cpu) / resources.vcpus) if cpu and resources.vcpus else None,
        min(1.0, sum(gpu) / resources.gpus) if gpu and resources.gpus else None,
        sum(known, Decimal()) if known and len(known) == len(prices) else None,
    )


def sum_resources(hosts: Iterable[ClusterHost]) -> HostResources:
    """Sum the resources of hosts."""
    return reduce(HostResources.plus, (host.resources for host in hosts), HostResources())


def vcpus_now(state: ComputeState, resources: HostResources, *, is_local: bool = False) -> int:
    """vCPUs now, up to maxvCpus: desiredvCpus in AWS, those of this machine on `local`."""
    now = round(resources.vcpus) if is_local else state.desired_vcpus
    return min(now, state.max_vcpus)


def count_states(hosts: Iterable[ClusterHost]) -> dict[HostState, int]:
    """The number of hosts in each state, in the order of `HostState`."""
    states = [host.state for host in hosts]
    return {each: states.count(each) for each in HostState if each in states}
