"""Compute environments and hosts as rows: what is there, what is taken, what runs on it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from msgspec import Struct
from msgspec.structs import replace

from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostState, Room
from batchml.model.run import Run


class Cluster(Struct, frozen=True):
    """Where runs go, as AWS told it last. `computes` and `hosts` are None where it may not be
    asked, and `missing` says what was refused. `is_local`: this machine is the only host.
    """

    queues: dict[str, QueueState] = {}
    computes: dict[str, ComputeState] | None = None
    hosts: tuple[ClusterHost, ...] | None = None
    fronts: dict[str, tuple[str, ...]] = {}  # queue -> job ids, in the order of their start
    missing: tuple[str, ...] = ()
    is_local: bool = False
    held: dict[str, int] = {}  # queue -> vCPUs of its runs that hold a host

    def of_queue(self, name: str) -> list[ComputeState]:
        """The compute environments of a queue, in the order in which they are tried."""
        queue = self.queues.get(name)
        computes = self.computes or {}
        return [
            computes[each] for each in (queue.environments if queue else ()) if each in computes
        ]

    def hosts_of(self, compute: ComputeState) -> list[ClusterHost]:
        return [each for each in self.hosts or () if is_of(each, compute)]

    def held_of(self, computes: Iterable[ComputeState]) -> int:
        """vCPUs that runs surely hold of these: of queues that have no other."""
        names = {each.name for each in computes}
        return sum(
            vcpus for queue, vcpus in self.held.items()
            if queue in self.queues and names.issuperset(self.queues[queue].environments)
        )  # fmt: skip


class HostRow(Struct, frozen=True):
    """`computes` are the names of the environments that it serves. `usage`: cpu in cores, gpu in
    GPUs' worth, gpu_memory in MiB, as the runs there tell it; empty if none does. `price`: USD an
    hour.
    """

    host: ClusterHost
    computes: tuple[str, ...]
    spot: bool = False
    runs: tuple[Run, ...] = ()
    usage: dict[str, float] = {}
    price: Decimal | None = None


class ComputeRow(Struct, frozen=True):
    """A compute environment; `room` is that of its hosts, which a `local` one shares."""

    state: ComputeState
    hosts: dict[HostState, int] = {}
    room: Room = Room()


class Total(Struct, frozen=True):
    """All hosts together, each counted once. `cpu` and `gpu`: the part that is in use, of all there
    are; None where no run tells it. `price`: USD an hour, None unless that of each host is known.
    """

    hosts: dict[HostState, int] = {}
    room: Room = Room()
    cpu: float | None = None
    gpu: float | None = None
    price: Decimal | None = None


def is_of(host: ClusterHost, compute: ComputeState) -> bool:
    return host.cluster == compute.cluster if host.cluster else host.compute == compute.name


def host_rows(
    cluster: Cluster, runs: Iterable[Run], usage: Mapping[str, Mapping[str, float]]
) -> tuple[HostRow, ...]:
    """By compute environment, what is free last. `runs` are containers that hold a host."""
    there: dict[str, list[Run]] = {}
    for run in runs:
        there.setdefault(run.host, []).append(run)
    rows = []
    for host in cluster.hosts or ():
        own = [*there.get(host.id, ()), *(there.get(host.instance, ()) if host.instance else ())]
        serves = [each for each in (cluster.computes or {}).values() if is_of(host, each)]
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
    """The sum of what runs tell of themselves. Percent of a run's GPUs become GPUs' worth."""
    found: dict[str, float] = {}
    for run, told in runs:
        for name in ("cpu", "memory", "gpu_memory"):
            if name in told:
                found[name] = found.get(name, 0.0) + told[name]
        if "gpu" in told:
            found["gpu"] = found.get("gpu", 0.0) + told["gpu"] / 100 * max(1, run.gpus)
    return found


def with_prices(rows: Iterable[HostRow], usd_an_hour: Mapping[str, Decimal]) -> tuple[HostRow, ...]:
    """`usd_an_hour`: by `item_of` a host."""
    return tuple(replace(row, price=usd_an_hour.get(item_of(row))) for row in rows)


def item_of(row: HostRow) -> str:
    """What a host is called in a list of prices: aws/prices."""
    return f"{'spot' if row.spot else 'on-demand'}:{row.host.type}"


def compute_rows(cluster: Cluster, names: Sequence[str] = ()) -> tuple[ComputeRow, ...]:
    """All compute environments, or those of some queues, by name."""
    computes = cluster.computes or {}
    wanted = {each.name for name in names for each in cluster.of_queue(name)} if names else computes
    return tuple(
        ComputeRow(each, states_of(hosts), room_of(hosts))
        for name, each in sorted(computes.items())
        if name in wanted
        for hosts in [cluster.hosts_of(each)]
    )


def total(rows: Sequence[HostRow]) -> Total:
    hosts = [row.host for row in rows]
    room = room_of(hosts)
    cpu = [row.usage["cpu"] for row in rows if "cpu" in row.usage]
    gpu = [row.usage["gpu"] for row in rows if "gpu" in row.usage]
    prices = [row.price for row in rows]
    known = [price for price in prices if price is not None]
    return Total(
        states_of(hosts),
        room,
        min(1.0, sum(cpu) / room.vcpus) if cpu and room.vcpus else None,
        min(1.0, sum(gpu) / room.gpus) if gpu and room.gpus else None,
        sum(known, Decimal()) if known and len(known) == len(prices) else None,
    )


def room_of(hosts: Iterable[ClusterHost]) -> Room:
    found = Room()
    for host in hosts:
        found = found.plus(host.room)
    return found


def vcpus_now(state: ComputeState, room: Room, *, is_local: bool = False) -> int:
    """vCPUs that an environment has now, at most its maximum: those that AWS Batch wants of it;
    on `local` those of this machine.
    """
    now = round(room.vcpus) if is_local else state.desired_vcpus
    return min(now, state.max_vcpus)


def states_of(hosts: Iterable[ClusterHost]) -> dict[HostState, int]:
    """How many are in which state, in the order of the states."""
    states = [host.state for host in hosts]
    return {each: states.count(each) for each in HostState if each in states}


def names_of_hosts(cluster: Cluster) -> dict[str, str]:
    """A host's id, as a run has it -> what it is called."""
    return {host.id: host.name for host in cluster.hosts or ()}
