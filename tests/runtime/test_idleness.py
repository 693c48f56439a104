"""Since when an attempt does nothing, and what its processes wait for."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from batchml.runtime.protocol.exit_codes import IDLE
from batchml.runtime.protocol.log_marks import MARK, idle_mark, parse_mark
from batchml.runtime.protocol.variables import IDLE_AFTER, RuntimeEnv
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.telemetry.idle import (
    ESTABLISHED,
    LISTEN,
    MOST_CPU,
    MOST_TRAFFIC,
    SYN_SENT,
    Activity,
    Address,
    IdleRecord,
    IdleWatch,
    TcpSocket,
    WaitingProcess,
    answers,
    describe_waits,
    disk_bytes,
    failed_connections,
    find_waiting,
    idle_since,
    read_idle_record,
    read_sockets,
)

NOTHING = Activity(0.02, 0.0, gpu=4.9)
MAIN: Address = ("10.0.0.1", 29500)


@pytest.mark.parametrize(
    "activity",
    [
        Activity(MOST_CPU + 0.01),
        Activity(0.0, MOST_TRAFFIC + 1),
        Activity(0.0, 0.0, disk=1e6),
        Activity(0.0, 0.0, gpu=5.0),
    ],
)
def test_cpu_network_disk_or_a_gpu_alone_is_work(activity: Activity) -> None:
    assert idle_since(0.0, activity, 500.0, 0.0) == 500.0


def test_nothing_is_idle_since_the_last_work_line_or_report() -> None:
    assert idle_since(100.0, NOTHING, 500.0, 0.0) == 100.0
    assert idle_since(100.0, NOTHING, 500.0, 480.0) == 480.0
    assert idle_since(100.0, Activity(0.0), 500.0, 0.0) == 100.0  # network and GPU are unknown


def test_what_is_read_from_a_disk_is_counted() -> None:
    texts = {"/proc/7/io": "rchar: 9\nread_bytes: 4096\nwrite_bytes: 100\n"}
    assert disk_bytes([7, 8], lambda path: texts.get(path, "")) == 4196


# --- connections ----------------------------------------------------------------------------------

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid inode
   0: 0100007F:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1
   1: 0200000A:A000 0100000A:733C 02 00000001:00000000 01:00000000 00000000     0        0 12 1
"""
TCP6 = """  sl  local_address                         remote_address                        st
   0: 0000000000000000FFFF00000100007F:1F90 00000000000000000000000001000000:0001 01 0:0 0:0 0 0 0 9
"""


def test_the_kernels_table_of_connections_is_read() -> None:
    assert read_sockets(TCP) == [
        TcpSocket(("127.0.0.1", 29500), ("0.0.0.0", 0), LISTEN, "11"),
        TcpSocket(("10.0.0.2", 40960), MAIN, SYN_SENT, "12"),
    ]
    (six,) = read_sockets(TCP6)
    assert (six.own, six.peer) == (("127.0.0.1", 8080), ("::1", 1))
    assert read_sockets("") == []


def test_connections_that_could_not_be_opened_are_counted() -> None:
    text = "Ip: A\nIp: 1\nTcp: RtoMin AttemptFails X\nTcp: 200 17 3\n"
    assert failed_connections(text) == 17
    assert failed_connections("") == 0


def listener(*clients: TcpSocket, port: int = MAIN[1]) -> tuple[TcpSocket, ...]:
    return (TcpSocket((MAIN[0], port), ("0.0.0.0", 0), LISTEN, "1"), *clients)


def client(host: str) -> TcpSocket:
    return TcpSocket(MAIN, (host, 40000), ESTABLISHED, "2")


WAITS = [
    (
        [WaitingProcess("rank 0", listener(), MAIN)],
        "rank 0 listens on port 29500, and nobody else is connected",
    ),
    (
        [WaitingProcess("rank 0", listener(client("10.0.0.2")), MAIN)],
        "rank 0 listens on port 29500, connected: 10.0.0.2",
    ),
    (
        [WaitingProcess("rank 1", (TcpSocket(("10.0.0.2", 1), MAIN, SYN_SENT, "1"),), MAIN)],
        "rank 1 waits to connect to 10.0.0.1:29500, which does not answer",
    ),
    (
        [WaitingProcess("rank 1", (TcpSocket(("10.0.0.2", 1), MAIN, ESTABLISHED, "1"),), MAIN)],
        "rank 1 is connected to 10.0.0.1:29500 and waits for the others",
    ),
    (
        [WaitingProcess("rank 1", (), MAIN)],
        "rank 1 waits to connect to 10.0.0.1:29500, where nobody listens",
    ),
    (
        [WaitingProcess("python", listener(port=8000))],
        "python listens on port 8000, and nobody else is connected",
    ),
    ([WaitingProcess("rank 0", listener(port=8000), None)], ""),  # one rank waits for no other
    ([WaitingProcess("sleep")], ""),
]


@pytest.mark.parametrize(("processes", "says"), WAITS)
def test_what_waits_for_whom_is_seen_by_the_connections(
    processes: list[WaitingProcess], says: str
) -> None:
    assert describe_waits(processes, True, lambda _: False) == says


def test_a_rank_that_does_not_try_to_connect_is_not_said_to() -> None:
    """`time.sleep` in a rank: the port is not asked, and nothing is said of it."""

    def never(address: Address) -> bool:
        raise AssertionError(address)

    assert describe_waits([WaitingProcess("rank 1", (), MAIN)], False, never) == ""


def test_the_connections_of_real_processes_are_theirs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (found,) = find_waiting([os.getpid()])
        own = [row for row in found.sockets if row.state == LISTEN and row.own[1] == port]
        assert [row.own for row in own] == [("127.0.0.1", port)]
        assert answers(("127.0.0.1", port)) is True
    assert answers(("127.0.0.1", port)) is False
    assert find_waiting([2**22 + 1]) == [WaitingProcess("a process")]  # it has ended


def test_a_rank_is_known_by_its_variables() -> None:
    environ = "RANK=1\0WORLD_SIZE=2\0MASTER_ADDR=10.0.0.1\0MASTER_PORT=29500\0"
    texts = {"/proc/0/environ": environ, "/proc/1/comm": "sh\n"}
    texts |= {"/proc/2/environ": environ, "/proc/2/comm": "batchml-spare\n"}  # of its next start
    found = find_waiting([1, 2, 0], lambda path: texts.get(path, ""))
    assert found == [WaitingProcess("rank 1", (), MAIN)]  # `sh` only started it


def test_clients_read_the_mark_as_it_was_written() -> None:
    text = "rank 1 waits to connect to 10.0.0.1:29500, where nobody listens"
    assert parse_mark(idle_mark(f"{text}\n")) == ("idle", {"waits": text})


# --- the end of an idle run -----------------------------------------------------------------------


class Node:
    """An attempt on one of several nodes, which prints nothing, at a time of the test's."""

    last_output, notice = 0.0, ""

    def __init__(self, folder: Path, node: int = 0, nodes: int = 1, limit: str = "600") -> None:
        self.environ: Mapping[str, str] = {
            IDLE_AFTER: limit,
            "AWS_BATCH_JOB_NUM_NODES": str(nodes),
            "AWS_BATCH_JOB_NODE_INDEX": str(node),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "BATCHML_METRICS": str(folder / "metrics"),
        }
        self.env = RuntimeEnv.read(self.environ)
        self.store = FolderStore(str(folder / "store"))
        self.marks: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        self.now = 0.0
        self.watch = IdleWatch(cast(Any, self), 0.0, lambda: 1e9 + self.now)

    def mark(self, text: str) -> None:
        self.marks.append(MARK + text)

    def stop(self, reason: str, code: int, within: float = 0.0) -> None:
        self.stopped.append((reason, code))

    def at(self, now: float, activity: Activity = NOTHING, progress_at: float = 0.0) -> float:
        self.now = now
        return self.watch.measure(now, activity, [], progress_at)


def test_an_idle_run_is_told_after_two_minutes_and_ended_after_its_limit(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert [node.at(float(now)) for now in (60, 119, 120, 599)] == [0, 0, 120, 599]
    assert node.stopped == []
    node.at(600.0)
    ((why, code),) = node.stopped
    assert code == IDLE
    assert why.startswith("idle for 10 min, since 01:46:40 UTC: no CPU, network, disk or GPU use")
    assert "saves and stops" in why


def test_work_output_metrics_and_progress_keep_a_run(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert node.at(500.0, Activity(1.0)) == 0
    assert node.at(700.0) == 200
    node.last_output = 690.0
    assert node.at(820.0) == 130
    assert node.at(950.0, progress_at=830.0) == 120
    (tmp_path / "metrics").write_text("{}\n")
    assert node.at(1000.0) == 0
    assert node.at(1599.0) == 599 and node.stopped == []


def test_without_a_limit_a_run_is_only_told(tmp_path: Path) -> None:
    for limit in ("", "0", "nan", "-3", "soon"):
        node = Node(tmp_path, limit=limit)
        assert node.at(90_000.0) == 90_000 and node.stopped == []


def test_nodes_that_have_not_joined_are_named_by_their_supervisor(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.notice = "waiting for node 1: 1 of 2 are connected"
    node.at(130.0)
    assert node.marks == [idle_mark(node.notice)]


def test_a_run_of_several_nodes_ends_when_all_of_them_are_idle(tmp_path: Path) -> None:
    main, other = Node(tmp_path, 0, 2), Node(tmp_path, 1, 2)
    main.at(700.0)
    assert main.stopped == []  # nothing is known of the other
    other.notice = "waiting for the main node at 10.0.0.1: nothing answers at this address"
    other.at(650.0)
    main.at(720.0)
    ((why, code),) = main.stopped
    assert code == IDLE and f"no progress; {other.notice}. The run saves" in why
    assert other.stopped == []


@pytest.mark.parametrize("data", [None, b"", b"[]", b"{", b'{"idle": "x"}', b'{"idle": 900}'])
def test_a_record_that_cannot_be_read_is_that_of_a_busy_node(data: bytes | None) -> None:
    assert read_idle_record(data) == IdleRecord()


def test_a_node_that_works_again_keeps_the_others(tmp_path: Path) -> None:
    main, other = Node(tmp_path, 0, 2), Node(tmp_path, 1, 2)
    other.at(650.0)
    other.at(680.0, Activity(1.0))
    main.at(700.0)
    assert main.stopped == []
    other.at(1290.0)
    main.at(1600.0)  # what the other node has recorded is too old: it may have ended
    assert main.stopped == []
