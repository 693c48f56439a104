"""Nodes of a gang, simulated: the rules of the supervisors, without processes and sockets."""

from collections.abc import Iterator

from batchml.runtime.nodes.supervisor.events import (
    BeginGeneration,
    ClockTick,
    Event,
    NodeJoined,
    RankExited,
    RankFailure,
    RanksGone,
    RunNode,
)
from batchml.runtime.nodes.supervisor.rules import NodesState, SupervisorLimits, begin, step
from benchmarks.curves.cost import cpu, each
from benchmarks.rows import Curve

SIZES = (10, 100, 1_000)  # AWS Batch has no larger multi-node jobs


def nodes(full: bool) -> Iterator[Curve]:
    joins, restarts, ticks = [], [], []
    for size in SIZES:
        state = begin(SupervisorLimits(nodes=size), 0.0)
        events: list[Event] = [
            NodeJoined(1.0, RunNode(index, 8, f"10.0.{index // 256}.{index % 256}"))
            for index in range(size)
        ]
        joined = _All(state, events)
        joins.append((size, cpu(joined.apply) / size * 1e6))
        if not joined.has_begun:
            raise RuntimeError("the gang did not begin")
        ticks.append((size, each(lambda: step(joined.state, ClockTick(20.0)))))  # noqa: B023
        failure = RankFailure(0, 0, 1, ("Error",), 10.0)
        ends: list[Event] = [RankExited(10.0, 1, failure)]
        ends += [RanksGone(11.0, 1, index) for index in range(size)]
        restarted = _All(joined.state, ends)
        restarts.append((size, cpu(restarted.apply) / size * 1e6))
        if not restarted.has_begun:
            raise RuntimeError("the gang did not begin again")
    for name, title, unit, points in (
        ("join", "Nodes connect, and the ranks start", "us of CPU a node", joins),
        ("restart", "A rank fails, and all start again", "us of CPU a node", restarts),
        ("tick", "The clock ticks", "us of CPU", ticks),
    ):
        yield Curve(
            name=f"curves/nodes_{name}", title=title, axis="nodes", unit=unit,
            how="the rules of the supervisors, simulated", points=points,
        )  # fmt: skip


class _All:
    """Events one after the other, and whether a generation has begun with them."""

    def __init__(self, state: NodesState, events: list[Event]) -> None:
        self.state, self.has_begun = state, False
        self._events = events

    def apply(self) -> None:
        for event in self._events:
            self.state, actions = step(self.state, event)
            self.has_begun |= any(isinstance(action, BeginGeneration) for action in actions)
