"""The head's door: who comes in, and who is missed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from batchml.runtime.nodes.ray.head import Door
from batchml.runtime.nodes.ray.rules import SILENT, HeadEvent, Joined, Left, Member
from batchml.runtime.nodes.torchrun.link import Link, join
from batchml.runtime.protocol.launch import Workers
from tests.conftest import wait_for

TOKEN = "0" * 32
GROUP = Workers("cpu", 2, 1, "x-cpu-wk", "q")


@pytest.fixture
def door() -> Iterator[Door]:
    with closing(Door("127.0.0.1", TOKEN, ("2.60.0", "3.11.7"), [GROUP])) as made:
        yield made


def enter(door: Door, number: int, now: float) -> Link:
    """A worker comes in, and says that it has joined."""
    told = {"key": "wk", "index": number, "address": "a", "ray": "2.60.0", "python": "3.11.9"}
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(join, "127.0.0.1", door.port, TOKEN, told, limit=30.0)
        wait_for(lambda: not door.look(now) and coming.done(), "it is in", 30)
    link = coming.result()
    link.send({"do": "joined"})
    return link


def events(door: Door, count: int, now: float) -> list[HeadEvent]:
    found: list[HeadEvent] = []

    def have_come() -> bool:
        found.extend(door.look(now))
        return len(found) >= count

    wait_for(have_come, f"{count} events", 30)
    return found


def test_a_worker_that_is_back_before_it_was_missed_is_there(door: Door) -> None:
    """Its first host was lost without a word, and Batch was faster than our patience."""
    member = Member("cpu", 1, "a")
    with closing(enter(door, 1, 0.0)):
        assert events(door, 1, 0.0) == [Joined(member)]
        with closing(enter(door, 1, SILENT)) as second:
            assert events(door, 1, SILENT) == [Joined(member)]
            assert door.look(SILENT + 1) == []  # the first is gone, its successor is not
            assert not door.is_empty
            second.close()
            assert events(door, 1, SILENT + 1) == [Left(member)]
            assert door.is_empty
