"""The network check of a run of several nodes, before its ranks start: docs/health.md.

`NetworkProbe` is its part on each node: it runs `health/all_reduce.py`. `NetworkCheck` is the part
of the main node: it makes the order, collects the answers of all nodes, and acts on the decision of
`health/network.py`.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.health import network
from batchml.runtime.health.efa import (
    asked_interfaces,
    counted_since,
    efa_counters,
    sys_folder,
)
from batchml.runtime.health.gate import DEEP, OFF, HealthSettings, network_delay
from batchml.runtime.health.network import EarlierRate, MeasuredRate, NcclNetwork, NodeAnswer
from batchml.runtime.health.rate_history import RateHistory, RateKind
from batchml.runtime.nodes.link.address import free_port_for, interface_variables
from batchml.runtime.nodes.link.connection import Message
from batchml.runtime.nodes.supervisor.ranks import RankProcesses
from batchml.runtime.nodes.supervisor.settings import prepend_path
from batchml.runtime.package import package_root
from batchml.runtime.processes import read
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import StoreError

SECONDS = 10.0  # that the measurement takes at most, once PyTorch is imported on all nodes
_LIMIT = 150.0  # seconds until a node gives up, with the import from a cold disk
_MODULE = "batchml.runtime.health.all_reduce"


def is_checked(environ: Mapping[str, str], nodes: int, has_launcher: bool) -> bool:
    """Whether the network of this run may be checked. `plan_order` decides on the devices."""
    return nodes > 1 and not has_launcher and HealthSettings.read(environ).checks != OFF


# --- On each node ---------------------------------------------------------------------------------


class NetworkProbe:
    """The program of one node that measures with those of the other nodes.

    `environ`: the variables of the ranks. `interface`: the network interface that has the node's
    address. `temporary`: a folder. `tell` sends a message to the main node.
    """

    def __init__(
        self,
        ranks: RankProcesses,
        environ: Mapping[str, str],
        interface: str,
        temporary: str,
        tell: Callable[[Message], None],
    ) -> None:
        self._ranks, self._environ, self._tell = ranks, environ, tell
        self._interface = interface
        self._path = os.path.join(temporary, "all-reduce")
        self._sys = sys_folder(environ)
        self._before: Dict[str, int] = {}
        self._kill_at = float("inf")
        self._is_running = False

    def start(self, order: Message, node: int, now: float) -> None:
        """Start the program, and tell the main node its answer when it has ended."""
        document = {**order["all_reduce"], "node": node, "delay": network_delay(self._environ)}
        environ = {**interface_variables(self._interface), **self._environ}
        environ["PYTHONPATH"] = prepend_path(environ, "PYTHONPATH", package_root())
        self._is_running, self._kill_at = True, now + _LIMIT
        self._before = efa_counters(self._sys)
        try:
            with open(self._path, "w", encoding="utf-8") as file:
                json.dump(document, file)
            self._ranks.run_first(
                [sys.executable, "-m", _MODULE, self._path], environ, self._ended,
                output=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            self._answer({"error": str(error)})

    def tick(self, now: float) -> None:
        if now >= self._kill_at:
            self._kill_at = float("inf")
            self._ranks.signal(signal.SIGKILL)
            self._answer({"error": f"no answer within {_LIMIT:.0f} s"})

    def cancel(self) -> None:
        """End the program without an answer."""
        if self._is_running:
            self._is_running, self._kill_at = False, float("inf")
            self._ranks.signal(signal.SIGKILL)

    def end(self) -> None:
        """End the program, because another node has failed: its answer has NCCL's log so far."""
        if self._is_running:
            self._ranks.signal(signal.SIGKILL)

    def _ended(self, code: int) -> None:
        try:
            found = json.loads(read(f"{self._path}.answer"))
        except ValueError:
            how = f"by signal {-code}" if code < 0 else f"with code {code}"
            found = {"error": f"the program that measures ended {how}"}
        self._answer(found)

    def _answer(self, found: Mapping[str, Any]) -> None:
        if not self._is_running:
            return  # it was cancelled
        self._is_running, self._kill_at = False, float("inf")
        logs = map(read, sorted(glob.glob(glob.escape(self._path) + ".*.nccl")))
        read_logs = list(map(network.read_nccl_log, logs))
        # Any process that uses something else than EFA tells most.
        nccl = next((each for each in read_logs if each.name and not each.uses_efa), None)
        if nccl is None:
            nccl = next((each for each in read_logs if each.name), NcclNetwork())
        counted = counted_since(self._before, efa_counters(self._sys))
        self._tell({"do": "network", "nccl": list(nccl), "counters": counted, **found})


# --- On the main node -----------------------------------------------------------------------------


class CheckPlan(NamedTuple):
    """How the network of a run is measured."""

    kind: RateKind
    gbps: float  # of one node's network cards; 0: unknown
    bytes: int

    @property
    def bound(self) -> float:
        """GB/s that the instance type allows; 0 if that is unknown."""
        return network.bus_bound(self.gbps, self.kind.nodes, self.kind.processes)


def plan_check(infos: Sequence[Message], checks: str) -> Optional[CheckPlan]:
    """How to measure; None if the run starts without: on CPUs that is a deep check.

    PyTorch takes seconds to import, which runs on GPUs do not notice. `infos`: how the nodes
    describe themselves.
    """
    from batchml.runtime.protocol.instance_types import devices_of  # late: most runs do not need it

    if not all("torch" in info["versions"] for info in infos):
        return None
    gpus = [int(info.get("gpus", 0)) for info in infos]
    has_gpus = all(gpus)
    if not has_gpus and checks != DEEP:
        return None
    types = {str(info.get("type", "")) for info in infos}
    instance_type = types.pop() if len(types) == 1 else ""
    devices = devices_of(instance_type) if instance_type else None
    gbps = float(devices.gbps or 0.0) if devices is not None else 0.0
    backend = "nccl" if has_gpus else "gloo"
    processes = sum(gpus) if has_gpus else len(infos)
    kind = RateKind(instance_type, len(infos), processes, backend)
    return CheckPlan(kind, gbps, network.choose_bytes(backend, gbps, len(infos)))


class NetworkCheck:
    """The network check of an attempt. `say` and `notice` write a line for people."""

    def __init__(
        self,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._environ, self._env = environ, RuntimeEnv.read(environ)
        self._say, self._notice, self._clock = say, notice, clock
        self._plan: Optional[CheckPlan] = None
        self._history: Optional[RateHistory] = None
        self._earlier: List[EarlierRate] = []
        self._infos: Sequence[Message] = ()
        self._answers: Dict[int, Message] = {}

    def order(self, infos: Sequence[Message], names: Sequence[str]) -> Optional[Message]:
        """The order for all nodes; None if the network is not measured.

        `infos` and `names`: of the nodes, in their order.
        """
        plan = plan_check(infos, HealthSettings.read(self._environ).checks)
        if plan is None:
            return None
        self._plan, self._infos, self._names = plan, infos, names
        self._read_history(plan)
        members = [int(info["gpus"]) if plan.kind.backend == "nccl" else 1 for info in infos]
        master = str(infos[0]["address"])
        return {
            "do": "check_network",
            "all_reduce": {
                "master": master,
                "port": free_port_for(f"{self._env.run}/{os.getpid()}/network"),
                "members": members,
                "backend": plan.kind.backend,
                "bytes": plan.bytes,
                "seconds": SECONDS,
                "rates": [list(each) for each in self._earlier],
                "bound": plan.bound,
            },
        }

    @property
    def has_failed(self) -> bool:
        """Whether a node could not measure, so that the others wait for it in vain."""
        return any(message.get("error") for message in self._answers.values())

    def leave(self) -> None:
        """Decide nothing any more: a node is gone, and its answer may come late."""
        self._plan = None

    def answer(self, index: int, message: Message) -> Optional[network.NetworkDecision]:
        """Take the answer of a node. Return the decision once all have answered."""
        plan = self._plan
        if plan is None:
            return None
        self._answers[index] = message
        if len(self._answers) < plan.kind.nodes:
            return None
        self._plan = None
        facts = self._facts(plan)
        decision = network.decide(facts)
        for number, line in enumerate(decision.lines):
            is_rate = number == 0 and facts.measured is not None
            (self._say if is_rate else self._notice)(line)
        if decision.keeps_rate and facts.measured is not None and self._history is not None:
            try:
                self._history.add(facts.measured, self._env.run, self._clock())
            except StoreError as error:
                self._notice(f"later runs cannot compare their network with this one: {error}")
        return decision

    def _facts(self, plan: CheckPlan) -> network.NetworkFacts:
        main = self._answers[0]
        answers = []
        for index, name in enumerate(self._names):
            message = self._answers[index]
            answers.append(NodeAnswer(
                name, str(message.get("error", "")), NcclNetwork(*message["nccl"]),
                dict(message["counters"]),
            ))  # fmt: skip
        failed = [index for index, message in self._answers.items() if message.get("error")]
        return network.NetworkFacts(
            answers=answers,
            failed_first=failed[0] if failed else -1,  # the answers are in the order they came in
            processes=plan.kind.processes,
            efa=0 if _has_own_network(self._environ) else asked_interfaces(self._environ),
            instance_type=plan.kind.instance_type,
            bound=plan.bound,
            measured=MeasuredRate(*main["rate"]) if main.get("rate") else None,
            pairs=[network.PairRate(*pair) for pair in main.get("pairs", ())],
            earlier=self._earlier,
        )

    def _read_history(self, plan: CheckPlan) -> None:
        try:
            self._history = RateHistory.open(self._env, self._environ, plan.kind)
            if self._history is not None:
                self._earlier = self._history.read()
        except StoreError as error:
            self._notice(f"the network is not compared with that of earlier runs: {error}")


def _has_own_network(environ: Mapping[str, str]) -> bool:
    """Whether the job or its image chose NCCL's network: a definition with EFA has no NCCL_NET."""
    return bool(environ.get("NCCL_NET")) or environ.get("NCCL_NET_PLUGIN") == "none"
