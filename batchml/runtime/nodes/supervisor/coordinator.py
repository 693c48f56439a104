"""The coordinator on the main node: it collects reports, applies the rules, and sends orders."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Mapping
from typing import Callable, Deque, Dict, List, Optional, Set

from batchml.runtime.nodes.link.address import RunIdentity, free_port_for
from batchml.runtime.nodes.link.connection import (
    MEASURED,
    Heartbeats,
    Message,
    Peer,
    candidate_ports,
)
from batchml.runtime.nodes.link.remote_start import StartRelay
from batchml.runtime.nodes.link.server import MemberServer, Refusal
from batchml.runtime.nodes.supervisor import events, rules
from batchml.runtime.nodes.supervisor.network_check import NetworkCheck
from batchml.runtime.nodes.supervisor.restarts import (
    CheckpointWatch,
    NewestCheckpoint,
    RestartHistory,
    close_last,
)
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR

_CHECK_EVERY = 1.0  # seconds between two checks for a new checkpoint


class _Node:
    """A connected node other than the main node."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.measured_at = 0.0  # when the measurement began; 0: it is not being measured
        self.has_joined = False  # it may run ranks


class Coordinator:
    """The coordinator of one run.

    `own` describes the main node as other nodes describe themselves. `bandwidth`: bytes a second
    that the network needs; 0: it is not measured. `folder`: the checkpoint folder. `order` gives an
    order to the main node's own agent. With a launcher, such as mpirun, programs on the main node
    may start commands on other nodes.
    """

    def __init__(
        self,
        identity: RunIdentity,
        own: Message,
        limits: rules.SupervisorLimits,
        beats: Heartbeats,
        bandwidth: float,
        folder: str,
        history: RestartHistory,
        selector: selectors.BaseSelector,
        order: Callable[[Message], None],
        say: Callable[[str], None],
        network: NetworkCheck,
        has_spares: bool,
    ) -> None:
        self._network, self._has_spares = network, has_spares
        self._identity, self._own = identity, own
        self._limits, self._beats, self._bandwidth = limits, beats, bandwidth
        self._checkpoints, self._history = CheckpointWatch(folder), history
        self._order, self._say = order, say
        self._nodes: Dict[int, _Node] = {}
        self._server = MemberServer(
            identity.token, selector, beats, self._admit, self._connected, self._heard, self._lost
        )
        self._relay = StartRelay(self._send)
        self._checked_at = 0.0
        self._newest = self._began_with = NewestCheckpoint()
        self._state: Optional[rules.NodesState] = None
        self._events: Deque[events.Event] = deque()
        self._fetching: Set[int] = set()  # nodes that still fetch the checkpoints of rank 0
        self._is_stepping = False  # `_post` is applying the rules now
        self._has_warned = False  # about a record that cannot be written

    def start(self, address: str, now: float) -> None:
        """Listen, and begin with the record of earlier attempts. Raises OSError."""
        past, began_with = self._history.read()
        self._newest = self._began_with = self._checkpoints.newest()
        past = close_last(past, self._newest.is_after(began_with))
        self._state = rules.begin(self._limits, now, past, bool(self._newest))
        if self._limits.nodes > 1:
            ports = candidate_ports(self._identity.key)
            self._server.listen((host, port) for port in ports for host in (address, ""))
        self._post(events.NodeJoined(now, _run_node(0, self._own), str(self._own.get("unfit", ""))))

    # --- Reports -------------------------------------------------------------------------------

    def hear(self, index: int, message: Message) -> None:
        """Take the report of a node, which may be the main node itself."""
        now, kind = time.monotonic(), message["do"]
        if kind == "beat":
            if "pulse" in message:
                self._post(events.SignOfLife(now - float(message["pulse"])))
        elif kind == "exited":
            self._post(events.RankExited(now, message["generation"], failure_of(index, message)))
        elif kind == "ended":
            self._check_checkpoints(now)  # a checkpoint that was saved last still counts
            self._post(events.RanksGone(now, message["generation"], index, message["unfit"]))
        elif kind == "asked":
            self._post(events.StopAsked(
                now, index, message["code"], message["why"], message["softly"], message["grace"]
            ))  # fmt: skip
        elif kind == "not_begun":
            self._post(events.StartFailed(now, index, message["code"], message["why"]))
        elif kind == "measured":
            self._measured(index, now)
        elif kind == "network":
            self._network_answered(index, message, now)
        elif kind == "unfit":
            node = self._own if index == 0 else self._nodes[index].peer.info
            self._post(events.NodeJoined(now, _run_node(index, node), message["why"]))
        elif kind == "ready":
            if self._state and message["generation"] == self._state.generation:
                self._fetching.discard(index)
                if not self._fetching:
                    self._order_all({"do": "go"})
        else:
            self._relay.hear_node(index, message)

    def until_due(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        return max(0.0, min(self._server.until_due(now), self._checked_at + _CHECK_EVERY - now))

    def tick(self, now: float) -> None:
        self._server.tick(now)
        if now - self._checked_at >= _CHECK_EVERY:
            self._check_checkpoints(now)
            self._post(events.ClockTick(now))

    def is_alone(self) -> bool:
        """Whether no other node is connected any more."""
        return not self._nodes

    def close(self) -> None:
        self._server.close()

    def _check_checkpoints(self, now: float) -> None:
        self._checked_at = now
        newest = self._checkpoints.newest()
        if newest.is_after(self._newest):
            self._newest = newest
            self._post(events.CheckpointSaved(now))

    def _post(self, event: events.Event) -> None:
        """Apply the rules to an event. If an action causes another event, such as a lost node, that
        event waits until all actions are done.
        """
        self._events.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        while self._events:
            assert self._state is not None
            self._state, actions = rules.step(self._state, self._events.popleft())
            for action in actions:
                self._do(action)
        self._is_stepping = False

    # --- Actions -------------------------------------------------------------------------------

    def _do(self, action: events.Action) -> None:
        if isinstance(action, events.SayLine):
            self._say(action.text)
        elif isinstance(action, events.KeepRecord):
            self._keep(action)
        elif isinstance(action, events.CheckNetwork):
            self._check_network(action)
        elif isinstance(action, events.LeaveNetworkCheck):
            self._network.leave()
            self._order_all({"do": "leave_network_check"})
        elif isinstance(action, events.BeginGeneration):
            self._begin(action)
        elif isinstance(action, events.EndRanks):
            self._order_all({"do": "end", "grace": action.grace, "stacks": action.stacks})
        elif isinstance(action, events.StopRanks):
            self._order_all({"do": "stop", **action._asdict()})
        elif isinstance(action, events.EndRun):
            self._order_all({"do": "exit", **action._asdict(), "grace": self._limits.end_grace})

    def _begin(self, action: events.BeginGeneration) -> None:
        nodes, ranks = len(action.nodes), sum(node.processes for node in action.nodes)
        self._say(
            f"generation {action.generation}: {nodes} node{'s' if nodes > 1 else ''}, "
            f"{ranks} rank{'s' if ranks > 1 else ''}{self._newest.describe()}."
        )
        fetching = {i for i, node in self._nodes.items() if node.peer.info.get("brings")}
        self._fetching = fetching if action.restarts else set()
        self._order_all({
            "do": "begin",
            "generation": action.generation,
            "restarts": action.restarts,
            "nodes": [[node.number, node.processes, node.address] for node in action.nodes],
            "waits": bool(self._fetching),
            "saved": self._checkpoints.to_message() if self._fetching else {},
            "master": str(self._own["address"]),
            "port": self._free_port(action.generation),
            "next_port": self._free_port(action.generation + 1) if self._has_spares else 0,
            "control": self._server.port,
        })  # fmt: skip

    def _free_port(self, generation: int) -> int:
        return free_port_for(f"{self._identity.key}/{os.getpid()}/{generation}")

    def _keep(self, action: events.KeepRecord) -> None:
        if action.past[-1].kind == "open":
            self._began_with = self._newest
        try:
            self._history.write(action.past, self._began_with)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._say(f"later attempts will not know how earlier starts ended: {error}")

    def _order_all(self, order: Message) -> None:
        for index in list(self._nodes):
            if self._nodes[index].has_joined or order["do"] == "exit":
                self._send(index, order)
        self._order(order)

    def _send(self, index: int, message: Message) -> bool:
        """Send a message to a node, maybe the main node. Return whether the node is connected."""
        if index == 0:
            self._order(message)
            return True
        node = self._nodes.get(index)
        if node is not None:
            node.peer.send(message)
        return node is not None

    # --- Connections ---------------------------------------------------------------------------

    def _admit(self, info: Message) -> Optional[Refusal]:
        """Refuse a node of another attempt, and a node whose number another node has already."""
        if info.get("starts") and self._limits.launcher:
            return None
        index = int(info["index"])
        theirs, ours = (info["job"], info["attempt"]), self._identity[:2]
        if theirs != ours:
            words = "this is attempt {1} of job {0}, and that node runs attempt {3} of job {2}"
            return Refusal(words.format(*ours, *theirs), final=True)
        if not 0 < index < self._limits.nodes:
            return Refusal(f"there is no node {index} of {self._limits.nodes}", final=True)
        if "not_begun" in info or "lost" in info:
            return None
        node = self._nodes.get(index)
        is_other = node is not None and node.peer.info["instance"] != info["instance"]
        silence = time.monotonic() - node.peer.heard if node else 0.0
        if is_other and silence < self._beats.silent:
            return Refusal(f"another node {index} is still connected", final=False)
        _run_node(index, info), dict(info["versions"])  # raises for a node of another version
        return None

    def _connected(self, peer: Peer) -> None:
        now, info = time.monotonic(), peer.info
        if info.get("starts"):
            self._relay.add(peer)
            return
        index = int(info["index"])
        if "lost" in info:
            self._server.drop(peer)
            self._post(events.SupervisorLost(now, index, info["lost"]))
            return
        if "not_begun" in info:
            self._server.drop(peer)
            self._post(events.StartFailed(now, index, *info["not_begun"]))
            return
        earlier = self._nodes.get(index)
        if earlier is not None:
            self._server.drop(earlier.peer)
        self._nodes[index] = _Node(peer)
        differences = _describe_differences(self._own, info)
        if differences:
            self._post(events.StartFailed(now, index, CONFIGURATION_ERROR, differences))
        elif self._bandwidth and not info.get("unfit"):
            self._measure_next(now)
        else:
            self._join(index, now, str(info.get("unfit", "")))

    def _join(self, index: int, now: float, unfit: str = "") -> None:
        node = self._nodes[index]
        node.has_joined = True
        self._post(events.NodeJoined(now, _run_node(index, node.peer.info), unfit))

    def _heard(self, peer: Peer, message: Message) -> None:
        if self._relay.has(peer):
            self._relay.hear(peer, message)
            return
        index = int(peer.info["index"])
        node = self._nodes.get(index)
        if node is not None and node.peer is peer:
            self.hear(index, message)

    def _lost(self, peer: Peer, silent: bool) -> None:
        if self._relay.has(peer):
            self._relay.lose(peer)
            return
        index = int(peer.info["index"])
        node = self._nodes.get(index)
        if node is None or node.peer is not peer:
            return
        del self._nodes[index]
        self._relay.lose_node(index, _run_node(index, peer.info).describe())
        if node.has_joined:
            self._post(events.NodeLeft(time.monotonic(), index, silent))
        if self._bandwidth:
            self._measure_next(time.monotonic())

    # --- The network ---------------------------------------------------------------------------

    def _check_network(self, action: events.CheckNetwork) -> None:
        others = [self._nodes[node.number].peer.info for node in action.nodes if node.number]
        order = self._network.order([self._own, *others], [n.describe() for n in action.nodes])
        if order is None:
            self._post(events.NetworkChecked(time.monotonic()))
        else:
            self._order_all(order)

    def _network_answered(self, index: int, message: Message, now: float) -> None:
        had_failed = self._network.has_failed
        decision = self._network.answer(index, message)
        if decision is None:
            if self._network.has_failed and not had_failed:
                self._order_all({"do": "end_network_check"})
            return
        for node, check in decision.unfit.items():
            self._send(node, {"do": "leave_host", "checks": [list(check)]})
        if decision.misconfigured:
            checked = events.NetworkChecked(now, CONFIGURATION_ERROR, decision.misconfigured)
            self._post(checked)
        elif not decision.unfit:
            self._post(events.NetworkChecked(now))

    def _measure_next(self, now: float) -> None:
        """Measure one node at a time: together they would share the bandwidth."""
        new = [node for _, node in sorted(self._nodes.items()) if not node.has_joined]
        if not new or any(node.measured_at for node in new):
            return
        node = new[0]
        node.measured_at = now
        node.peer.measure()

    def _measured(self, index: int, now: float) -> None:
        node = self._nodes[index]
        rate = 2 * MEASURED / max(1e-6, now - node.measured_at)
        name = _run_node(index, node.peer.info).describe()
        measured = f"{rate / (1 << 20):.0f} MiB/s"
        self._say(f"{measured} between {name} and the main node")
        node.measured_at = 0.0
        unfit = ""
        if rate < self._bandwidth:
            floor = f"{self._bandwidth / (1 << 20):.0f} MiB/s"
            unfit = f"this host is unfit: {measured} to the main node, and {floor} are required"
        self._join(index, now, unfit)
        self._measure_next(now)


def _run_node(index: int, info: Mapping[str, object]) -> events.RunNode:
    return events.RunNode(
        index, int(str(info["processes"])), str(info["address"]), str(info.get("host", ""))
    )


def failure_of(index: int, message: Message) -> events.RankFailure:
    """Read a node's report of a rank that has ended."""
    return events.RankFailure(
        index, message["rank"], message["code"], tuple(message["tail"]), message["stamp"],
        message["was_sent"], message["is_memory"],
    )  # fmt: skip


def _describe_differences(own: Message, info: Message) -> str:
    """Describe the versions of a node that differ from the main node's; "" if none does.

    Ranks with different versions would fail late, and strangely.
    """
    differences: List[str] = []
    for name, version in own["versions"].items():
        theirs = info["versions"].get(name)
        if version and theirs and theirs != version:
            differences.append(f"{name} is {theirs}, and {version} on the main node")
    return f"{'; '.join(differences)}: give all nodes the same image" if differences else ""
