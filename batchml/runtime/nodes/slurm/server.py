"""The server of a Slurm script on several nodes, to which the other nodes and `srun` connect.

It is a process of its own on the first node, because the script replaces the process that starts
the server. It ends with the run.
"""

from __future__ import annotations

import math
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
from batchml.runtime.package import module_command
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store

# signals on which the script decides, not the server
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_CHECK_EVERY = 0.005  # seconds between two checks whether the process that started this one ended
_NOTICE_AFTER = 60.0  # seconds of waiting for the other nodes, until a line names the missing ones


def start_server(environ: Mapping[str, str], tools: str) -> None:
    """Start the server if the run has several nodes, and wait until it listens. Raises OSError.

    `tools`: the folder of this node's Slurm programs, in which the server writes its address.
    """
    if count_nodes(environ) < 2:
        return
    words = [*module_command(sys.executable, "batchml.runtime.nodes.slurm.server"), tools]
    if subprocess.run(words, env=dict(environ), stdin=subprocess.DEVNULL).returncode:
        raise OSError("the server for srun could not be started: its error is printed above")


def gather(environ: Mapping[str, str], tools: str) -> List[str]:
    """Wait until all nodes are connected; return their addresses in the order of their numbers.

    The node of a single-node run has the loopback address. Raises OSError and ValueError.
    """
    count = count_nodes(environ)
    if count < 2:
        return [LOOPBACK]
    control = ControlAddress.read(control_file(tools))
    link = join(control.address, control.port, control.token, {"asks": True})
    notice_at = time.monotonic() + _NOTICE_AFTER
    addresses: Dict[str, str] = {}
    try:
        while len(addresses) < count:
            if not select.select([link.socket], [], [], 1.0)[0]:
                if time.monotonic() >= notice_at:
                    notice_at = math.inf  # once is enough
                    missing = ", ".join(str(n) for n in range(count) if str(n) not in addresses)
                    print(f"batchml notice: waiting for node {missing} of {count}", flush=True)
                continue
            for message in [*link.waiting(), *link.messages()]:
                addresses = message.get("addresses", addresses)
    finally:
        link.close()
    return [addresses[str(number)] for number in range(count)]


class StepServer:
    """The nodes and programs that are connected to the first node.

    A node describes itself by `index` and `address` in the handshake, an `srun` by `starts`, and a
    program that waits for all nodes (`gather`) by `asks`.
    """

    def __init__(
        self, token: str, address: str, count: int, selector: selectors.BaseSelector
    ) -> None:
        self._addresses = {"0": address}  # by the number of the node
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
            if index in self._nodes:  # the node noticed the loss of its link before this side did
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
    """Listen, write down the address, and serve in a process of its own. Raises OSError."""
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
    # `_loop` watches the process that adopts this one, so wait for the adoption. An end of file
    # would come too early: a process that ends closes its files before its children are adopted.
    while os.getppid() == starter:
        time.sleep(_CHECK_EVERY)
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    _loop(steps.server, selector)


def _loop(server: MemberServer, selector: selectors.BaseSelector) -> None:
    """Serve until the process that has adopted this one, which watches the run, has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        dispatch(selector, min(1.0, server.until_due(time.monotonic())))
        server.tick(time.monotonic())


def main() -> None:
    try:
        serve(os.environ, sys.argv[1])
    except (OSError, LinkClosed) as error:
        print(
            f"batchml: the other nodes cannot connect to this one: {error}",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(1)
