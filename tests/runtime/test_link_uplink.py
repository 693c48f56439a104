"""A child node that looks for its main node: it goes on listening meanwhile, and says so."""

import selectors
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.nodes.launcher import SupervisorWatch
from batchml.runtime.nodes.link.connection import Heartbeats, LinkClosed, candidate_ports, dial
from batchml.runtime.nodes.link.uplink import ConnectLimits, MainNode, Uplink
from batchml.runtime.nodes.supervisor.settings import report_limit
from batchml.runtime.telemetry.usage import memory_kills, memory_left

ALL = candidate_ports("key")


class Away:
    """A main node's host that answers nothing, or refuses; the clock is told."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.called: list[int] = []
        self.said: list[str] = []
        self.made: list[socket.socket] = []
        self.selector = selectors.DefaultSelector()
        self.uplink = Uplink(
            MainNode("10.0.0.9", ALL, "token"), {}, "", Heartbeats(),
            ConnectLimits(100.0, 60.0, 10.0), self.selector, lambda _: None, lambda: None,
            self.said.append, self.dial,
        )  # fmt: skip
        self.begin = time.monotonic()

    def dial(self, _address: str, port: int, _source: str) -> socket.socket:
        self.called.append(port)
        if self.refuses:
            raise LinkClosed("[Errno 111] Connection refused")
        self.made.append(socket.socket())
        return self.made[-1]

    def tick(self, after: float, may_join: bool = True) -> None:
        self.uplink.tick(self.begin + after, may_join)


@pytest.fixture
def away() -> Iterator[Away]:
    made = Away()
    yield made
    made.uplink.close()
    assert not made.selector.get_map() and all(each.fileno() < 0 for each in made.made)
    made.selector.close()


def test_the_ports_of_a_silent_host_are_dialled_in_turn_without_waiting(away: Away) -> None:
    away.tick(0.0)
    away.tick(1.0)
    assert away.called == ALL[:1], "the loop turns while the call is out"
    assert 0 < away.uplink.until_due(away.begin + 1.0) <= 1.0
    away.tick(2.0)
    assert away.called == ALL[:2]
    for turn in range(2, 60):
        away.tick(2.0 * turn)
    assert away.called[:7] == [*ALL, ALL[0]]
    assert away.uplink.given_up == (
        "the main node (10.0.0.9) could not be reached within 100 s: timed out"
    )


def test_a_line_about_the_wait_for_the_main_node_comes_every_half_minute(away: Away) -> None:
    for second in range(100):
        away.tick(float(second))
    assert away.said == ["waiting for the main node at 10.0.0.9: timed out"] * 3


def test_a_host_that_refuses_all_ports_is_not_tried_again_at_once(away: Away) -> None:
    away.refuses = True
    away.tick(0.0)
    away.tick(0.4)
    assert away.called == ALL
    away.uplink.hurry()
    away.tick(0.45)
    assert away.called == ALL * 2, "there is something to tell"
    away.tick(40.0, may_join=False)
    assert away.called == ALL * 2
    assert away.said == ["waiting for the main node at 10.0.0.9: nothing answers at this address"]
    assert away.uplink.until_due(away.begin + 40.0) > 0, "its own ranks are still being ended"
    assert not away.uplink.given_up


def test_dial_does_not_wait_for_an_answer() -> None:
    """A listener whose queue is full lets Linux drop what comes, as a host does that is gone."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        made = [dial("127.0.0.1", full.getsockname()[1], "127.0.0.1") for _ in range(3)]
        for each in made:
            assert not each.getblocking()
            each.close()
    with pytest.raises(LinkClosed):
        dial("127.0.0.1", 1, "203.0.113.1")  # not an address of this machine


def test_a_stop_waits_for_a_silent_main_node_only_on_nodes_with_ranks() -> None:
    assert report_limit(True, 27.0) == 5.0
    assert report_limit(True, 2.0) == 2.0
    assert report_limit(False, 27.0) < 1.0


def test_a_stopped_supervisor_is_woken_once_and_then_ended() -> None:
    said: list[str] = []
    sent: list[tuple[int, int]] = []
    states = iter("S" * 20 + "T" * 16 + "t" * 20 + "S" + "T" * 16 + "" + "T" * 20)
    watch = SupervisorWatch(7, said.append, lambda _: next(states), lambda *what: sent.append(what))
    for second in range(73):
        watch.tick(float(second))
    assert sent == [], "no stop has taken more than 15 s yet"
    for second in range(73, 93):
        watch.tick(float(second))
    assert sent[:2] == [(7, signal.SIGCONT), (7, signal.SIGKILL)]
    assert said[0] == "batchml: the supervisor of the ranks was stopped for 15 s, so it is woken"


V1 = "{n} 30 0:{n} {seen} {root}/{name} rw - cgroup cgroup rw,{name}\n"


@pytest.mark.parametrize(
    ("groups", "seen", "file"),
    [
        ("0::/\n", "", "memory.events"),
        ("0::/jobs/a\n", "", "jobs/a/memory.events"),
        ("0::/../b\n", "", "memory.events"),
        ("4:memory:/\n0::/\n", "/", "memory/memory.oom_control"),
        ("4:memory:/jobs/a\n0::/\n", "/", "memory/jobs/a/memory.oom_control"),
        ("4:memory:/docker/ab\n", "/docker/ab", "memory/memory.oom_control"),
        ("4:memory:/docker/ab/c\n", "/docker/ab", "memory/c/memory.oom_control"),
        ("4:memory:/docker/ab\n", "/docker/a", "memory/memory.oom_control"),
        ("", "", "memory.events"),
    ],
)
def test_only_memory_kills_of_this_control_group_count(
    tmp_path: Path, groups: str, seen: str, file: str
) -> None:
    own, root = tmp_path / "proc" / "self", tmp_path / "sys"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(groups)
    (own / "mountinfo").write_text(V1.format(n=4, seen=seen, root=root, name="memory"))
    assert memory_kills(str(tmp_path / "proc"), str(root)) == 0
    for place, count in (("", 7), ("memory/", 8)):  # of the whole machine
        (root / place).mkdir(exist_ok=True)
        name = "memory.oom_control" if place else "memory.events"
        (root / place / name).write_text(f"oom_kill {count}\n")
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text("oom 5\noom_kill 3\n")
    assert memory_kills(str(tmp_path / "proc"), str(root)) == 3


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("0::/\n", {}, 8 << 20),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, 8 << 20),
        ("0::/\n", {"memory.max": "70\n", "memory.current": "50\n"}, 30),
        ("0::/a\n", {"a/memory.max": "70\n", "a/memory.current": "50\n"}, 20),
        ("0::/\n", {"memory.max": "40\n", "memory.current": "80\n"}, 0),
        ("4:memory:/\n0::/\n", {"memory/memory.limit_in_bytes": "90\n",
                                "memory/memory.usage_in_bytes": "50\n"}, 40),
    ],
)  # fmt: skip
def test_memory_is_left_on_the_host_and_in_the_control_group(
    tmp_path: Path, groups: str, files: dict[str, str], left: int
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(groups)
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable: 8192 kB\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 10\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_left(str(tmp_path), str(tmp_path)) == left
