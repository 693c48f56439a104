"""What commands that look at a cluster need: one poller of everything, and what hosts cost."""

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.cluster import ClusterApi
from batchml.aws.batch.jobs import LiveApi
from batchml.aws.pricing import why_not
from batchml.errors import AccessError
from batchml.ops.cluster import item_of, with_prices
from batchml.ops.cluster_look import ClusterLook
from batchml.ops.top import Poller, QueueRow, Snapshot

if TYPE_CHECKING:
    from batchml.client.place import Place


def poller(place: "Place") -> Poller:
    return _poller(place, _look(place))


def _look(place: "Place") -> ClusterLook:
    api = ClusterApi(place.connect(), place.env)
    return ClusterLook(api, place.clock.now, is_local=place.settings.is_local)


def _poller(place: "Place", look: ClusterLook) -> Poller:
    return Poller(place.batch, LiveApi(place.connect()), place.clock.now, look)


def look_at_queues(place: "Place") -> tuple[Snapshot, str]:
    """All queues with their runs; hosts only where something waits. Where runs may not be listed,
    the queues alone, and why. Raises what DescribeJobQueues raises.
    """
    look = _look(place)
    look.queues()  # what it raises is no matter of runs
    try:
        return _poller(place, look).look(with_hosts=False, with_usage=False), ""
    except AccessError as error:
        states = look.look((), (), with_hosts=False).queues
        rows = tuple(QueueRow(name, {}, state=state) for name, state in states.items())
        return Snapshot(int(place.clock.now() * 1000), rows), why_not("batch:ListJobs", error)


class HostPrices:
    """Gives the hosts of a snapshot their price. AWS is asked for each kind of host once; on
    `local` it is what batchml.toml says of this machine.
    """

    def __init__(self, place: "Place") -> None:
        self._place = place
        self._known: dict[str, Decimal] = {}
        self._asked: set[str] = set()

    def put(self, found: Snapshot) -> Snapshot:
        """It raises nothing: what AWS does not say stays unknown."""
        if not found.hosts:
            return found
        items = sorted({item_of(row) for row in found.hosts if row.host.type})
        self._ask([item for item in items if item not in self._asked])
        return replace(found, hosts=with_prices(found.hosts, self._known))

    def _ask(self, items: Sequence[str]) -> None:
        if not items:
            return
        self._asked.update(items)
        environment = self._place.settings.environment
        if self._place.settings.is_local:
            if environment.usd_per_hour:
                usd = Decimal(str(environment.usd_per_hour))
                self._known |= dict.fromkeys(items, usd)
            return
        book = self._place.prices.ask(environment.region, items)
        # Of spot hosts the price differs by zone: none costs more than the dearest.
        self._known |= {item: price.high for item, price in book.prices.items()}
