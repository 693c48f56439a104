"""The pollers of an environment, and the prices of its hosts."""

from collections.abc import Sequence
from decimal import Decimal

from msgspec.structs import replace

from batchml.aws.batch.cluster import ClusterApi
from batchml.aws.batch.jobs import LiveApi
from batchml.aws.pricing.prices import describe_failure
from batchml.cluster.poller import ClusterPoller, ComputePoller
from batchml.cluster.rows import price_item, with_prices
from batchml.cluster.snapshot import ClusterSnapshot, QueueRow
from batchml.context import Context
from batchml.errors import AccessError


def open_poller(context: Context) -> ClusterPoller:
    """A poller of queues, runs, compute environments and hosts."""
    return _open_poller(context, _open_computes(context))


def _open_computes(context: Context) -> ComputePoller:
    api = ClusterApi(context.connect(), context.env)
    return ComputePoller(api, context.clock.now, is_local=context.settings.is_local)


def _open_poller(context: Context, computes: ComputePoller) -> ClusterPoller:
    return ClusterPoller(context.batch, LiveApi(context.connect()), context.clock.now, computes)


def poll_queues(context: Context) -> tuple[ClusterSnapshot, str]:
    """Poll all queues with their runs, and hosts if a run waits.

    If ListJobs is denied, only the queues, and the reason. Raises the errors of DescribeJobQueues.
    """
    computes = _open_computes(context)
    computes.queues()  # raises errors that do not concern runs
    try:
        return _open_poller(context, computes).poll(with_hosts=False, with_usage=False), ""
    except AccessError as error:
        states = computes.poll((), (), with_hosts=False).queues
        rows = tuple(QueueRow(name, {}, state=state) for name, state in states.items())
        return ClusterSnapshot(int(context.clock.now() * 1000), rows), describe_failure(
            "batch:ListJobs", error
        )


class HostPrices:
    """Adds prices to the hosts of a snapshot.

    AWS is asked once for each instance type. The price of `local` is in batchml.toml.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._known: dict[str, Decimal] = {}
        self._asked: set[str] = set()

    def add_to(self, found: ClusterSnapshot) -> ClusterSnapshot:
        """Add the known prices. Raises nothing: prices that AWS does not tell stay unknown."""
        if not found.hosts:
            return found
        items = sorted({price_item(row) for row in found.hosts if row.host.type})
        self._ask([item for item in items if item not in self._asked])
        return replace(found, hosts=with_prices(found.hosts, self._known))

    def _ask(self, items: Sequence[str]) -> None:
        if not items:
            return
        self._asked.update(items)
        environment = self._context.settings.environment
        if self._context.settings.is_local:
            if environment.usd_per_hour:
                usd = Decimal(str(environment.usd_per_hour))
                self._known |= dict.fromkeys(items, usd)
            return
        price_table = self._context.prices.ask(environment.region, items)
        # Spot prices differ by zone: take the dearest.
        self._known |= {item: price.high for item, price in price_table.prices.items()}
