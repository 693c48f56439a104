"""Ranks that never connect to each other, as their connections show it."""

import pytest

from batchml.runtime.nodes.supervisor.group import (
    CONNECTED,
    GroupWatch,
    RankConnections,
    describe_lone_ranks,
    form_group,
)
from batchml.runtime.nodes.supervisor.settings import RankLayout
from batchml.runtime.telemetry.idle import ESTABLISHED, LISTEN, SYN_SENT, TcpSocket, WaitingProcess

MAIN, OTHER, PORT = "10.0.0.1", "10.0.0.2", 23456
TIME_WAIT = "06"
CONTROL = TcpSocket((MAIN, 15001), (OTHER, 41000), ESTABLISHED, "1")  # the supervisors' own
LAYOUT = RankLayout(
    node=0, nodes=2, first=0, here=1, world=2, master=MAIN, port=PORT, generation=1, restarts=0,
    run="job", members=((MAIN, 1), (OTHER, 1)),
)  # fmt: skip


def row(own: int, host: str, peer: int, state: str = ESTABLISHED, at: str = MAIN) -> TcpSocket:
    return TcpSocket((at, own), (host, peer), state, "9")


def seen(*sockets: TcpSocket, of_nobody: tuple[TcpSocket, ...] = ()) -> RankConnections:
    """Of a node whose rank 0 has these sockets."""
    return RankConnections(
        [CONTROL, *of_nobody, *sockets], [WaitingProcess("rank 0", sockets, (MAIN, PORT))]
    )


@pytest.mark.parametrize(
    "sockets",
    [
        [row(PORT, "0.0.0.0", 0, LISTEN)],  # rank 0 waits for the others
        [row(40000, MAIN, PORT, SYN_SENT)],
        [row(2345, OTHER, 41000)],  # a port of the program's own
        [row(41000, OTHER, 2345)],
        [row(41000, OTHER, 42000)],  # gloo after a rendezvous in a shared file
        [row(41000, "192.168.7.2", 42000, at="192.168.7.1")],  # NCCL on another interface
    ],
)
def test_ranks_that_have_met_anywhere_are_a_group(sockets: list[TcpSocket]) -> None:
    assert form_group(seen(*sockets), PORT, [OTHER]) is True


def test_a_group_that_has_ended_between_two_looks_has_left_a_trace() -> None:
    closed = row(PORT, OTHER, 41000, TIME_WAIT)
    assert form_group(seen(of_nobody=(closed,)), PORT, [OTHER]) is True


@pytest.mark.parametrize(
    "sockets",
    [
        [],
        [row(41000, "52.216.1.1", 443)],  # S3
        [row(41000, "10.0.9.9", 5000)],  # a tracking server
        [row(6006, "0.0.0.0", 0, LISTEN)],  # TensorBoard
        [row(41000, "127.0.0.1", 42000, at="127.0.0.1")],  # a helper of its own
        [row(2345, OTHER, 41000, SYN_SENT)],
    ],
)
def test_other_connections_are_no_group(sockets: list[TcpSocket]) -> None:
    assert form_group(seen(*sockets), PORT, [OTHER]) is False


def test_what_belongs_to_no_rank_is_no_group() -> None:
    """The supervisors' connection, or another run's on the same host."""
    assert form_group(seen(of_nobody=(row(41000, OTHER, 42000),)), PORT, [OTHER]) is False


def test_without_the_kernels_table_nothing_is_claimed() -> None:
    assert form_group(RankConnections([], [WaitingProcess("rank 0")]), PORT, [OTHER]) is None


def test_ranks_of_one_node_are_a_group_if_two_of_them_are_connected() -> None:
    ends = [row(41000, MAIN, 42000), row(42000, MAIN, 41000)]
    both = [WaitingProcess(f"rank {i}", (end,)) for i, end in enumerate(ends)]
    assert form_group(RankConnections(ends, both), PORT, []) is True
    # On several nodes each node would be a group of its own, and do the whole work.
    assert form_group(RankConnections(ends, both), PORT, [OTHER]) is False
    alone = [WaitingProcess("rank 0", tuple(ends)), WaitingProcess("rank 1")]
    assert form_group(RankConnections(ends, alone), PORT, []) is False


# --- the watch ------------------------------------------------------------------------------------


class Ranks:
    """Ranks that start at 100 s, with the lines that the watch has said."""

    def __init__(self, layout: RankLayout = LAYOUT) -> None:
        self.connections, self.looks, self.said = seen(), 0, list[str]()
        self.watch = GroupWatch(self.said.append, 60.0, self.look)
        self.watch.begin(layout, 100.0)

    def look(self) -> RankConnections:
        self.looks += 1
        return self.connections

    def run(self, since: int, until: int, sign: float | None = None) -> None:
        """Let seconds pass. `sign`: when the last sign of life came; None: each second."""
        for second in range(since, until):
            self.watch.tick(second, second if sign is None else sign)


def test_ranks_that_work_alone_for_a_minute_are_named_once() -> None:
    ranks = Ranks()
    ranks.run(100, 160)
    assert ranks.said == []
    ranks.run(160, 1000)
    (notice,) = ranks.said
    assert notice == describe_lone_ranks(LAYOUT, 60)
    assert notice.startswith(
        "the 2 ranks of 2 nodes have run for 60 s and are not connected to each other: nobody "
        "listens on MASTER_ADDR:MASTER_PORT (10.0.0.1:23456). Each rank may do the whole work alone"
    )
    ranks.watch.begin(LAYOUT._replace(generation=2), 1000.0)
    ranks.run(1000, 2000)
    assert ranks.said == [notice]


def test_ranks_that_are_silent_may_still_be_loading() -> None:
    ranks = Ranks()
    ranks.run(100, 1000, sign=159.0)
    assert ranks.said == []
    ranks.run(1000, 1010, sign=1001.0)
    assert len(ranks.said) == 1


def test_a_notice_is_taken_back_when_the_ranks_connect_later() -> None:
    ranks = Ranks()
    ranks.run(100, 200)
    ranks.connections = seen(row(PORT, "0.0.0.0", 0, LISTEN))
    ranks.run(200, 300)
    assert ranks.said[1:] == [CONNECTED]


def test_once_ranks_were_connected_nobody_looks_any_more() -> None:
    ranks = Ranks()
    ranks.connections = seen(row(PORT, OTHER, 41000))
    ranks.run(100, 110)
    ranks.connections, before = seen(), ranks.looks
    ranks.run(110, 1000)
    assert (ranks.said, ranks.looks) == ([], before)


def test_one_rank_has_nobody_to_connect_to() -> None:
    ranks = Ranks(LAYOUT._replace(nodes=1, world=1, members=((MAIN, 1),)))
    ranks.run(100, 1000)
    assert (ranks.said, ranks.looks) == ([], 0)
