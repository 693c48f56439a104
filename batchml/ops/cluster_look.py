"""Looks at queues, compute environments and hosts now and then: they change slower than runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from batchml.aws.batch.cluster import ClusterApi
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostState
from batchml.ops.cluster import Cluster, is_of, room_of

EVERY = 15.0  # seconds between two looks; hosts take minutes to come and go


class ClusterLook:
    """Asks at most every 15 seconds. `look` is asked with the queues that have runs which wait:
    only of these the order is of interest.
    """

    def __init__(
        self, api: ClusterApi, now: Callable[[], float], *, is_local: bool = False
    ) -> None:
        self._api = api
        self._now = now
        self._is_local = is_local
        self._at: float | None = None
        self._hosts_at: float | None = None
        self._queues: dict[str, QueueState] = {}
        self._computes: dict[str, ComputeState] | None = None
        self._hosts: tuple[ClusterHost, ...] | None = None
        self._fronts: dict[str, tuple[str, ...]] = {}
        self._asked: dict[str, float] = {}  # queue -> when its front was asked for

    @property
    def calls(self) -> int:
        return self._api.calls

    def queues(self) -> list[str]:
        """The names of all. Here the round begins: all is asked again if it is time.

        Raises AccessError, ServiceError, ServiceUnreachable.
        """
        now = self._now()
        if self._at is None or now - self._at >= EVERY:
            self._api.missing.clear()
            self._queues = self._api.queues()
            self._computes = self._api.computes()
            self._at = now
        return list(self._queues)

    def look(
        self, queues: Sequence[str], waiting: Iterable[str], *, with_hosts: bool = True
    ) -> Cluster:
        """How it is, for these queues; in `waiting` of them there are runs that wait.

        Without `with_hosts` those are asked about only where something waits.
        """
        self.queues()
        waiting = list(waiting)
        for queue in waiting:
            if self._asked.get(queue, -EVERY) + EVERY <= self._now():
                self._fronts[queue] = self._api.front(queue) or ()
                self._asked[queue] = self._now()
        known = Cluster(self._queues, self._computes)
        wanted = {
            each.name: each for name in queues or self._queues for each in known.of_queue(name)
        }
        if not queues:  # those too that no queue uses
            wanted = dict(self._computes or {})
        if self._hosts_at != self._at and (with_hosts or waiting):
            self._hosts_at, self._hosts = self._at, self._look_at_hosts(wanted)
        return Cluster(
            self._queues,
            self._computes,
            self._hosts,
            {queue: self._fronts[queue] for queue in waiting if self._fronts.get(queue)},
            tuple(dict.fromkeys(self._api.missing.values())),
            self._is_local,
        )

    def _look_at_hosts(
        self, computes: Mapping[str, ComputeState]
    ) -> tuple[ClusterHost, ...] | None:
        if self._computes is None:
            return None
        joined = self._api.hosts(each.cluster for each in computes.values())
        if joined is None:
            return None
        short = [each for each in computes.values() if _is_short(each, joined)]
        if self._is_local or not short:
            return joined
        there = {host.instance for host in joined}
        coming = self._api.launched(each.name for each in short)
        return (*joined, *(host for host in coming if host.instance not in there))


def _is_short(compute: ComputeState, joined: Sequence[ClusterHost]) -> bool:
    """Whether more vCPUs are asked for than have joined."""
    own = [host for host in joined if is_of(host, compute)]
    coming = any(host.state is HostState.STARTING for host in own)
    return coming or compute.desired_vcpus > room_of(own).vcpus
