"""The server of a Slurm script on several nodes: the other nodes and `srun` connect to it.

It is a process of its own on the first node, because the script replaces the process that starts
it. It ends with the run.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Dict, List, Optional

from batchml.runtime.nodes.link.address import LOOPBACK, own_address
from batchml.runtime.nodes.link.connection import (
    Heartbeats,
    LinkClosed,
    Message,
    Peer,
    dispatch,
    join,
)
from batchml.runtime.nodes.link.remote_start import ControlAddress, StartRelay
from batchml.runtime.nodes.link.server import MemberServer, Refusal, Rendezvous
from batchml.runtime.nodes.slurm.steps import control_file, count_nodes, server_document
from batchml.runtime.package import package_root
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # the script decides
# seconds between two checks whether the process that started this one has ended
_FIRST_LOOK = 0.005
_NOTICE_AFTER = 60.0  # seconds of waiting for the other nodes
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from batchml.runtime.nodes.slurm.server import main
main(sys.argv[2])
"""


def start_server(environ: Mapping[str, str], tools: str) -> None:
    """Start the server of a run of several nodes, and wait until it listens. Raises OSError."""
    if count_nodes(environ) < 2:
        return
    # Without the job's own modules, and whatever it did to its Python.
    words = [sys.executable, "-I", "-c", _PROGRAM, package_root(), tools]
    if subprocess.run(words, env=dict(environ), stdin=subprocess.DEVNULL).returncode:
        raise OSError("the server for srun cannot be started")


def gather(environ: Mapping[str, str], tools: str) -> List[str]:
    """The addresses of all nodes, the first node's first, once all are connected.

    A run of one node has the loopback's. Raises OSError and ValueError.
    """
    count = count_nodes(environ)
    if count < 2:
        return [LOOPBACK]
    control = ControlAddress.read(control_file(tools))
    link = join(control.address, control.port, control.token, {"asks": True})
    notice_at: Optional[float] = time.monotonic() + _NOTICE_AFTER
    known: Dict[str, str] = {}
    try:
        while len(known) < count:
            if not select.select([link.socket], [], [], 1.0)[0]:
                if notice_at is not None and time.monotonic() >= notice_at:
                    notice_at = None
                    missing = ", ".join(str(n) for n in range(count) if str(n) not in known)
                    print(f"batchml notice: node {missing} of {count} is waited for", flush=True)
                continue
            for message in [*link.waiting(), *link.messages()]:
                known = message.get("addresses", known)
    finally:
        link.close()
    return [known[str(number)] for number in range(count)]


class StepServer:
    """The nodes and programs that are connected to the first node."""

    def __init__(
        self, token: str, address: str, count: int, selector: selectors.BaseSelector
    ) -> None:
        self._addresses = {"0": address}
        self._count = count
        self._nodes: Dict[int, Peer] = {}
        self._asking: List[Peer] = []
        self._relay = StartRelay(self._send)
        self.server = MemberServer(
            token, selector, Heartbeats(), self._admit, self._connected, self._hear, self._lost
        )

    def _admit(self, info: Message) -> Optional[Refusal]:
        if info.get("starts") or info.get("asks"):
            return None
        index = int(info["index"])
        if not 0 < index < self._count or not info["address"]:
            return Refusal(f"there is no node {index} of {self._count}", final=True)
        return None

    def _connected(self, peer: Peer) -> None:
        if peer.info.get("starts"):
            self._relay.add(peer)
        elif peer.info.get("asks"):
            peer.silent_after = float("inf")
            self._asking.append(peer)
            self._answer(peer)
        else:
            index = int(peer.info["index"])
            if index in self._nodes:  # it has noticed that the link was lost before this side
                self._lost(self._nodes[index], silent=False)
            self._nodes[index] = peer
            self._addresses[str(index)] = str(peer.info["address"])
            for program in list(self._asking):
                self._answer(program)

    def _answer(self, program: Peer) -> None:
        program.send({"do": "members", "addresses": self._addresses})

    def _hear(self, peer: Peer, message: Message) -> None:
        if self._relay.has(peer):
            self._relay.hear(peer, message)
        elif "index" in peer.info:
            self._relay.hear_node(int(peer.info["index"]), message)

    def _lost(self, peer: Peer, silent: bool) -> None:
        if self._relay.has(peer):
            self._relay.lose(peer)
        elif peer in self._asking:
            self._asking.remove(peer)
        else:
            index = int(peer.info["index"])
            if self._nodes.get(index) is peer:
                del self._nodes[index]
                self.server.drop(peer)
                self._relay.lose_node(index, f"node {index} ({peer.info['address']})")

    def _send(self, node: int, message: Message) -> bool:
        peer = self._nodes.get(node)
        if peer is not None:
            peer.send(message)
        return peer is not None


def serve(environ: Mapping[str, str], tools: str) -> None:
    """Listen, say where, and serve in a process of its own. Raises OSError."""
    selector = selectors.DefaultSelector()
    address, token = own_address(environ) or LOOPBACK, os.urandom(16).hex()
    steps = StepServer(token, address, count_nodes(environ), selector)
    steps.server.listen([(address, 0), ("", 0)])
    control = ControlAddress(address, steps.server.port, token)
    control.write(control_file(tools))
    env = RuntimeEnv.read(environ)
    documents = Rendezvous(open_store(env.store, environ))
    documents.write(server_document(env.attempt), control._asdict())
    starter = os.getpid()
    if os.fork():
        return
    # `_loop` watches the process that adopts this one. A process that ends closes its files, and
    # would so be noticed, before its children have a new parent.
    while os.getppid() == starter:
        time.sleep(_FIRST_LOOK)
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _loop(steps.server, selector)


def _loop(server: MemberServer, selector: selectors.BaseSelector) -> None:
    """Serve until the process that watches this run has ended."""
    watcher = os.getppid()
    while os.getppid() == watcher:
        dispatch(selector, min(1.0, server.until_due(time.monotonic())))
        server.tick(time.monotonic())


def main(tools: str) -> None:
    try:
        serve(os.environ, tools)
    except (OSError, LinkClosed) as error:
        print(f"batchml: the nodes cannot meet: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
