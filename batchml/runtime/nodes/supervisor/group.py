"""Notice that the ranks of a run never connect to each other: each may do the whole work alone.

A program that does not call `init_process_group`, or whose own launcher starts a world of one rank,
trains once for each rank, and no rank fails. Its connections show that: ranks meet at
MASTER_ADDR:MASTER_PORT, or wherever else the program lets them meet (another port, a shared file,
JAX, Horovod); then they exchange their data over TCP, or at least agree over TCP on how to.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Callable, NamedTuple, Optional

from batchml.runtime.nodes.supervisor.settings import RankLayout
from batchml.runtime.processes import descendants
from batchml.runtime.telemetry.idle import (
    ESTABLISHED,
    FIRST_EPHEMERAL,
    TcpSocket,
    WaitingProcess,
    find_waiting,
    read_connections,
)

_EVERY = 5.0  # seconds between two looks; the kernel shows a closed connection for a minute

CONNECTED = "the ranks are connected to each other now."


class RankConnections(NamedTuple):
    """What the kernel of a node shows of TCP connections."""

    rows: Sequence[TcpSocket]  # of the whole network namespace
    ranks: Sequence[WaitingProcess]  # the ranks of this node, with their processes' sockets


def read_rank_connections() -> RankConnections:
    """The connections of the ranks that this process has started."""
    return RankConnections(read_connections(), find_waiting(descendants(os.getpid())))


def form_group(seen: RankConnections, port: int, others: Collection[str]) -> Optional[bool]:
    """Whether the ranks of the main node have found other ranks; None if nothing can be seen.

    `port`: MASTER_PORT. `others`: the addresses of the other nodes; without any, ranks of this node
    count. Any trace of the port is enough: rank 0 that listens, or a rank that tries to connect.
    """
    if not seen.rows:
        return None
    if any(port in (row.own[1], row.peer[1]) for row in seen.rows):
        return True
    owners = {row.own: rank.name for rank in seen.ranks for row in rank.sockets}
    return any(
        _leads_to_other(row, rank.name, owners.get(row.peer, ""), others)
        for rank in seen.ranks
        for row in rank.sockets
        if row.state == ESTABLISHED
    )


def _leads_to_other(row: TcpSocket, rank: str, owner: str, others: Collection[str]) -> bool:
    """Whether a connection leads to another node, or on a run's only node to another rank.

    `owner`: the rank of this node that has its other end.
    """
    if owner:
        return owner != rank and not others
    if row.peer[0] in others:
        return True
    # Another network interface: NCCL and gloo listen on ports that the kernel chooses, and services
    # such as S3, a tracking server or a database do not.
    is_chosen = min(row.own[1], row.peer[1]) >= FIRST_EPHEMERAL
    return (
        is_chosen and bool(others) and not row.peer[0].startswith("127.") and row.peer[0] != "::1"
    )


def describe_lone_ranks(layout: RankLayout, seconds: float) -> str:
    """The notice about ranks that have not connected to each other after `seconds`."""
    where = f" of {layout.nodes} nodes" if layout.nodes > 1 else ""
    return (
        f"the {layout.world} ranks{where} have run for {seconds:.0f} s and are not connected to "
        f"each other: nobody listens on MASTER_ADDR:MASTER_PORT ({layout.master}:{layout.port}). "
        f"Each rank may do the whole work alone, {layout.world} times in all. To train together, "
        "call torch.distributed.init_process_group() in the program, and give the command without "
        "a launcher of its own. If the ranks divide the work by RANK, "
        'nothing is wrong; if each is to work alone, set launch.kind = "plain".'
    )


class GroupWatch:
    """Watches the ranks of the main node. It writes at most one notice, and takes it back with
    another line if the ranks connect later.

    `alone_after`: seconds from the start of the ranks to the earliest notice.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        alone_after: float,
        look: Callable[[], RankConnections] = read_rank_connections,
    ) -> None:
        self._say, self._alone_after, self._look = say, alone_after, look
        self._layout: Optional[RankLayout] = None  # of ranks that have not connected yet
        self._began = self._looked = 0.0
        self._has_warned = False

    def begin(self, layout: RankLayout, now: float) -> None:
        """The ranks of a generation have started."""
        self._layout = layout if layout.world > 1 else None
        self._began = self._looked = now

    def tick(self, now: float, last_sign: float) -> None:
        """Look, if that is due. Called while ranks run.

        `last_sign`: when a rank last printed a line or reported a metric or progress, by the clock
        of `now`. Only a sign after `alone_after` counts: a rank that loads its data is silent.
        """
        layout, pause = self._layout, min(_EVERY, self._alone_after)
        if layout is None or now - self._looked < pause:
            return
        self._looked = now
        others = [address for address, _ in layout.members[1:]]
        are_connected = form_group(self._look(), layout.port, others)
        if are_connected:
            self._layout = None
            if self._has_warned:
                self._say(CONNECTED)
            return
        is_time = last_sign - self._began >= self._alone_after
        if are_connected is False and is_time and not self._has_warned:
            self._has_warned = True
            self._say(describe_lone_ranks(layout, now - self._began))
