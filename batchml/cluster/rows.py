"""Compute environments and hosts as table rows: their resources, use and runs. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from msgspec import Struct
from msgspec.structs import replace

from batchml.cost.estimate import host_item
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostResources, HostState
from batchml.model.run import Run


class ClusterState(Struct, frozen=True):
    """Queues, compute environments and hosts, as AWS last described them.

    `computes` and `hosts` are None if AWS refused the call; then `missing` names it. `is_local`:
    this machine is the only host.
    """

    queues: dict[str, QueueState] = {}
    computes: dict[str, ComputeState] | None = None
    hosts: tuple[ClusterHost, ...] | None = None
    fronts: dict[str, tuple[str, ...]] = {}  # queue -> job ids at its head, in order
    missing: tuple[str, ...] = ()
    is_local: bool = False
    held: dict[str, int] = {}  # queue -> vCPUs of its runs that hold a host

    def of_queue(self, name: str) -> list[ComputeState]:
        """The compute environments of a queue, in the order in which AWS Batch tries them."""
        queue = self.queues.get(name)
        computes = self.computes or {}
        return [
            computes[each] for each in (queue.environments if queue else ()) if each in computes
        ]

    def hosts_of(self, compute: ComputeState) -> list[ClusterHost]:
        return [each for each in self.hosts or () if belongs_to(each, compute)]

    def held_of(self, computes: Iterable[ComputeState]) -> int:
        """vCPUs that runs of queues with no other compute environments hold."""
        names = {each.name for each in computes}
        return sum(
            vcpus for queue, vcpus in self.held.items()
            if queue in self.queues and names.issuperset(self.queues[queue].environments)
        )  # fmt: skip


class HostRow(Struct, frozen=True):
    """A host. `computes`: the names of its compute environments. `price`: USD an hour.

    `usage`: cpu in cores, gpu in whole GPUs, gpu_memory in MiB, as its runs report; empty if no run
    reports it.
    """

    host: ClusterHost
    computes: tuple[str, ...]
    spot: bool = False
    runs: tuple[Run, ...] = ()
    usage: dict[str, float] = {}
    price: Decimal | None = None


class ComputeRow(Struct, frozen=True):
    """A compute environment. `room`: resources of its hosts, which those of `local` share."""

    state: ComputeState
    hosts: dict[HostState, int] = {}
    room: HostResources = HostResources()


class HostTotal(Struct, frozen=True):
    """All hosts together, each counted once.

    `cpu` and `gpu`: the fraction in use; None if no run reports it. `price`: USD an hour; None
    unless the price of each host is known.
    """

    hosts: dict[HostState, int] = {}
    room: HostResources = HostResources()
    cpu: float | None = None
    gpu: float | None = None
    price: Decimal | None = None


def belongs_to(host: ClusterHost, compute: ComputeState) -> bool:
    return host.cluster == compute.cluster if host.cluster else host.compute == compute.name


def host_rows(
    cluster: ClusterState, runs: Iterable[Run], usage: Mapping[str, Mapping[str, float]]
) -> tuple[HostRow, ...]:
    """Rows of hosts, by compute environment and state. `runs`: containers that hold a host."""
    there: dict[str, list[Run]] = {}
    for run in runs:
        there.setdefault(run.host, []).append(run)
    rows = []
    for host in cluster.hosts or ():
        own = [*there.get(host.id, ()), *(there.get(host.instance, ()) if host.instance else ())]
        serves = [each for each in (cluster.computes or {}).values() if belongs_to(host, each)]
        rows.append(
            HostRow(
                host,
                tuple(sorted(each.name for each in serves)),
                any(each.is_spot for each in serves),
                tuple(own),
                _usage([(run, usage.get(run.job_id, {})) for run in own]),
            )
        )
    order = list(HostState)
    return tuple(
        sorted(rows, key=lambda row: (row.computes, order.index(row.host.state), row.host.name))
    )


def _usage(runs: Sequence[tuple[Run, Mapping[str, float]]]) -> dict[str, float]:
    """The sum of the usage that runs report. Percent of a run's GPUs become whole GPUs."""
    total: dict[str, float] = {}
    for run, used in runs:
        for name in ("cpu", "memory", "gpu_memory"):
            if name in used:
                total[name] = total.get(name, 0.0) + used[name]
        if "gpu" in used:
            total["gpu"] = total.get("gpu", 0.0) + used["gpu"] / 100 * max(1, run.gpus)
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
    wanted = {each.name for name in names for each in cluster.of_queue(name)} if names else computes
    return tuple(
        ComputeRow(each, states_of(hosts), room_of(hosts))
        for name, each in sorted(computes.items())
        if name in wanted
        for hosts in [cluster.hosts_of(each)]
    )


def sum_hosts(rows: Sequence[HostRow]) -> HostTotal:
    """Sum the resources, usage and prices of hosts."""
    hosts = [row.host for row in rows]
    room = room_of(hosts)
    cpu = [row.usage["cpu"] for row in rows if "cpu" in row.usage]
    gpu = [row.usage["gpu"] for row in rows if "gpu" in row.usage]
    prices = [row.price for row in rows]
    known = [price for price in prices if price is not None]
    return HostTotal(
        states_of(hosts),
        room,
        min(1.0, sum(cpu) / room.vcpus) if cpu and room.vcpus else None,
        min(1.0, sum(gpu) / room.gpus) if gpu and room.gpus else None,
        sum(known, Decimal()) if known and len(known) == len(prices) else None,
    )


def room_of(hosts: Iterable[ClusterHost]) -> HostResources:
    """Sum the resources of hosts."""
    found = HostResources()
    for host in hosts:
        found = found.plus(host.room)
    return found


def vcpus_now(state: ComputeState, room: HostResources, *, is_local: bool = False) -> int:
    """vCPUs now, up to maxvCpus: those that AWS Batch desires, on `local` those of this machine."""
    now = round(room.vcpus) if is_local else state.desired_vcpus
    return min(now, state.max_vcpus)


def states_of(hosts: Iterable[ClusterHost]) -> dict[HostState, int]:
    """The number of hosts in each state, in the order of `HostState`."""
    states = [host.state for host in hosts]
    return {each: states.count(each) for each in HostState if each in states}


def names_of_hosts(cluster: ClusterState) -> dict[str, str]:
    """Host id, as a run has it -> host name."""
    return {host.id: host.name for host in cluster.hosts or ()}
