"""The server of a Ray head: which workers join, and which are missed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from batchml.runtime.nodes.link.connection import NodeLink, join
from batchml.runtime.nodes.ray.head import WorkerServer
from batchml.runtime.nodes.ray.rules import SILENT, HeadEvent, WorkerId, WorkerJoined, WorkerLeft
from batchml.runtime.protocol.launch import WorkerGroup
from tests.support.local_server import wait_for

TOKEN = "0" * 32
GROUP = WorkerGroup("cpu", 2, 1, "x-cpu-wk", "q")


class Server(WorkerServer):
    """A server with a clock of the test's, which looks once for each second of it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__("127.0.0.1", TOKEN, ("2.60.0", "3.11.7"), [GROUP], lambda: self.now)

    def events(self) -> list[HeadEvent]:
        return self.look(self.now)

    def pass_time(self, seconds: float) -> list[HeadEvent]:
        found: list[HeadEvent] = []
        for _ in range(int(seconds)):
            self.now += 1.0
            found += self.events()
        return found

    def connect(self, number: int) -> NodeLink:
        """A worker connects, and reports that its Ray has joined."""
        info = {"key": "wk", "index": number, "address": "a", "ray": "2.60.0", "python": "3.11.9"}
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(join, "127.0.0.1", self.port, TOKEN, info, limit=30.0)
            wait_for(lambda: not self.events() and coming.done(), "it is connected", 30)
        link = coming.result()
        link.send({"do": "joined"})
        return link

    def until(self, count: int) -> list[HeadEvent]:
        found: list[HeadEvent] = []

        def have_come() -> bool:
            found.extend(self.events())
            return len(found) >= count

        wait_for(have_come, f"{count} events", 30)
        return found


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as made:
        yield made


def test_a_worker_that_joins_again_before_its_loss_is_noticed_stays_joined(server: Server) -> None:
    """Its first host was lost silently, and AWS Batch was faster than the limit."""
    worker = WorkerId("cpu", 1, "a")
    with closing(server.connect(1)):
        assert server.until(1) == [WorkerJoined(worker)]
        assert server.pass_time(SILENT) == []
        with closing(server.connect(1)) as second:
            assert server.until(1) == [WorkerJoined(worker)]
            assert server.pass_time(1) == []  # the first is lost, the second is not
            assert not server.is_empty
            second.close()
            assert server.until(1) == [WorkerLeft(worker)]
            assert server.is_empty


def test_a_silent_worker_is_lost(server: Server) -> None:
    with closing(server.connect(0)):
        server.until(1)
        assert server.pass_time(SILENT) == []
        assert server.pass_time(1) == [WorkerLeft(WorkerId("cpu", 0, "a"))]
