"""Commands that a program of the main node starts on other nodes: output, codes, signals, ends."""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchml.runtime.nodes.link import remote_start
from batchml.runtime.nodes.link.connection import (
    Heartbeats,
    LinkClosed,
    Message,
    NodeLink,
    Peer,
    dispatch,
    join,
)
from batchml.runtime.nodes.link.remote_start import (
    ControlAddress,
    PreparedTasks,
    RemoteCommand,
    RemoteTasks,
    StartRelay,
    TaskCommand,
)
from batchml.runtime.nodes.link.server import MemberServer
from tests.process.test_processes import is_alive
from tests.support.local_server import wait_for

TOKEN = "00112233445566778899aabbccddeeff"


class Loop:
    """A selector that is turned by a thread, as the loops of a server and of a node are."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.each: list[Callable[[], None]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            dispatch(self.selector, 0.02)
            for act in self.each:
                act()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join(10)


class Main:
    """A main node: a server with a relay."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.nodes: dict[int, Peer] = {}
        self.relay = StartRelay(self._send)
        self.server = MemberServer(
            TOKEN, self.loop.selector, Heartbeats(), lambda info: None, self._joined, self._hear,
            self._lost,
        )  # fmt: skip
        self.server.listen([("127.0.0.1", 0)])
        self.control = ControlAddress("127.0.0.1", self.server.port, TOKEN)

    def _send(self, node: int, message: Message) -> bool:
        if node in self.nodes:
            self.nodes[node].send(message)
        return node in self.nodes

    def _joined(self, peer: Peer) -> None:
        if peer.info.get("starts"):
            self.relay.add(peer)
        else:
            self.nodes[peer.info["index"]] = peer

    def _hear(self, peer: Peer, message: Message) -> None:
        if self.relay.has(peer):
            self.relay.hear(peer, message)
        else:
            self.relay.hear_node(peer.info["index"], message)

    def _lost(self, peer: Peer, silent: bool) -> None:
        if self.relay.has(peer):
            self.relay.lose(peer)
        else:
            self.relay.lose_node(peer.info["index"], "node 1 (here)")


class Node:
    """A node with one task for each order: a shell line."""

    def __init__(self, main: Main, returns: bool = True) -> None:
        self.loop = Loop()
        self.children: dict[int, tuple[subprocess.Popen[bytes], Callable[[int], None]]] = {}
        link = join("127.0.0.1", main.server.port, TOKEN, {"index": 1})
        self.peer = Peer(
            link, self.loop.selector, Heartbeats(), lambda _, m: self.tasks.hear(m), lambda *_: None
        )
        self.tasks = RemoteTasks(self.loop.selector, self.peer.send, self._prepare, self._adopt)
        self.loop.each += [self._reap, lambda: self.tasks.tick(time.monotonic())]
        self._returns = returns
        self.peer.start()

    def _prepare(self, order: Message) -> PreparedTasks:
        command = TaskCommand(order["words"], dict(os.environ), label=order["label"].encode())
        return PreparedTasks([command] * order["count"], self._returns, joins_errors=True)

    def _adopt(self, process: "subprocess.Popen[bytes]", on_exit: Callable[[int], None]) -> None:
        self.children[process.pid] = process, on_exit

    def _reap(self) -> None:
        for pid, (process, on_exit) in list(self.children.items()):
            if process.poll() is not None:
                del self.children[pid]
                on_exit(process.returncode)


@pytest.fixture
def main() -> Iterator[Main]:
    made = Main()
    made.loop.start()
    yield made
    made.loop.stop()
    made.server.close()
    made.loop.selector.close()


@pytest.fixture
def node(main: Main) -> Iterator[Node]:
    made = Node(main)
    made.loop.start()
    wait_for(lambda: 1 in main.nodes, "the node is connected")
    yield made
    made.loop.stop()
    made.peer.close()
    made.loop.selector.close()


def start(main: Main, *words: str, label: str = "", count: int = 1, node: int = 1) -> RemoteCommand:
    return RemoteCommand(main.control, node, {"words": words, "label": label, "count": count})


def codes(command: RemoteCommand) -> list[int]:
    wait_for(lambda: command.poll() is not None, "the tasks have ended")
    found = command.poll()
    assert found is not None
    return found


@pytest.mark.usefixtures("node")
def test_output_and_codes_come_back(main: Main, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    command = start(main, "sh", "-c", "echo one; echo two >&2; printf end; exit 3", label="7: ")
    assert codes(command) == [3]
    assert capfdbinary.readouterr().out == b"7: one\n7: two\n7: end\n"


@pytest.mark.usefixtures("node")
def test_more_output_than_fits_on_the_way_waits_for_the_program(
    main: Main, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(remote_start, "WINDOW", 100_000)
    monkeypatch.setattr(remote_start, "OUTPUT_LIMIT", 0.5)
    text = "import sys; sys.stdout.write('x' * 9 + '\\n'); sys.stdout.write('y' * 3_000_000)"
    command = start(main, sys.executable, "-c", text)
    assert codes(command) == [0]
    assert capfdbinary.readouterr().out == b"x" * 9 + b"\n" + b"y" * 3_000_000


@pytest.mark.usefixtures("node")
def test_a_signal_reaches_all_tasks_and_the_codes_are_a_shells(main: Main) -> None:
    command = start(main, "sleep", "600", count=2)
    assert command.poll() is None
    command.signal(signal.SIGTERM)
    assert codes(command) == [143, 143] and command.was_one_killed()


@pytest.mark.usefixtures("node")
def test_a_program_that_is_missing_there_is_named(
    main: Main, capfd: pytest.CaptureFixture[str]
) -> None:
    assert codes(start(main, "no-such-program", count=2)) == [127]
    assert "no-such-program: No such file or directory" in capfd.readouterr().err


@pytest.mark.usefixtures("node")
def test_processes_that_a_task_leaves_behind_are_not_waited_for(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_start, "OUTPUT_LIMIT", 0.1)
    left = tmp_path / "left"
    try:
        assert codes(start(main, "sh", "-c", f"sleep 600 & echo $! > {left}")) == [0]
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_program_that_dies_takes_its_tasks_with_it(main: Main, node: Node) -> None:
    command = start(main, "sleep", "600")
    wait_for(lambda: node.children, "the task runs")
    (pid,) = node.children
    link: NodeLink = command._link
    link.close()
    wait_for(lambda: not is_alive(pid), "the task is ended")
    wait_for(lambda: node.tasks.is_empty, "the node knows it")


def test_a_node_that_dies_ends_its_tasks_for_the_program(
    main: Main, node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    command = start(main, "sleep", "600")
    wait_for(lambda: node.children, "the task runs")
    node.loop.stop()
    node.peer.close()
    assert codes(command) == [75]
    assert "node 1 (here) is gone" in capfd.readouterr().err
    node.tasks.signal(signal.SIGKILL)


@pytest.mark.usefixtures("node")
def test_a_node_that_is_not_there_is_named(main: Main, capfd: pytest.CaptureFixture[str]) -> None:
    assert codes(start(main, "true", node=5)) == [75]
    assert "node 5 is gone" in capfd.readouterr().err


@pytest.mark.usefixtures("node")
def test_who_lacks_the_token_starts_nothing(main: Main) -> None:
    stranger = main.control._replace(token="f" * 32)
    with pytest.raises(LinkClosed):
        RemoteCommand(stranger, 1, {"words": ["true"]})


def test_the_address_of_the_server_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    written = ControlAddress("10.0.0.1", 4000, TOKEN)
    written.write(str(path))
    assert ControlAddress.read(str(path)) == written
    assert path.stat().st_mode & 0o777 == 0o600
