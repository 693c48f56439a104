"""Addresses for the nodes of multi-node jobs that run as processes of this machine.

With the rights for it (root, or the capabilities, and iproute2) each node gets a network namespace:
all ports are its own, and two jobs at once do not meet, whatever they bind. The namespaces of a
server hang on a bridge inside one more namespace, the switch, so that nothing of the machine's own
network, its firewall included, lies between two nodes, and a single interface leads outside.

    node -- eth0 -- [v2, v3, ... br0, up0: the switch] -- bml<home> -- the machine, NAT

Without the rights each node gets a loopback address (127.77.x.y): then only those that bind their
own address are out of each other's way. Names are made of the state folder, so that servers leave
each other's alone; a ledger beside the journal says whose address is whose, so that no two live
nodes share one, and what a killed server left behind is found.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from batchml.local.home import read_record
from batchml.runtime.storage.files import write_json

log = logging.getLogger("batchml.local")

T = TypeVar("T")

AUTO, NAMESPACES, LOOPBACK = "auto", "namespace", "loopback"
MOST = 16_000  # places

_FIRST = 2  # the first address is the bridge's
_CALL_LIMIT = 15.0  # seconds for one command
_RUN = "/run/netns"
_CLONE_NEWNET = 0x40000000
_CANDIDATES = (
    *(f"10.{part}.0.0/16" for part in range(77, 96)),
    *(f"172.{part}.0.0/16" for part in range(20, 32)),
)


class NoNetwork(Exception):
    """A node's network cannot be made; the text says why."""


class Place(Struct, frozen=True):
    """Where a node lives on the network."""

    address: str
    namespace: str = ""  # its name; empty on the machine's own loopback

    def command(self, command: list[str]) -> list[str]:
        """The command, run there."""
        if not self.namespace:
            return command
        return [_tool("nsenter"), f"--net={_RUN}/{self.namespace}", "--", *command]


class Ledger(Struct):
    """Who has which place. `subnet` belongs to the switch, while there is one."""

    places: dict[str, int] = {}  # by task id
    subnet: str = ""


# --- names and addresses: pure ------------------------------------------------------------------


def lowest_free(taken: Collection[int]) -> int:
    free = next((index for index in range(_FIRST, MOST) if index not in taken), None)
    if free is None:
        raise NoNetwork(f"more than {MOST - _FIRST} nodes at once")
    return free


def free_network(routes: Iterable[str]) -> str:
    """The first of our candidates that overlaps with nothing that the machine routes."""
    from ipaddress import IPv4Network

    used = [IPv4Network(route, strict=False) for route in routes]
    for candidate in map(IPv4Network, _CANDIDATES):
        if not any(candidate.overlaps(other) for other in used):
            return str(candidate)
    raise NoNetwork("no private network is free on this machine")


def free_link(tag: str, routes: Iterable[str]) -> str:
    """Four addresses between the switch and the machine, each server's own: 169.254.64.0/19, far
    from the clouds' metadata services (169.254.169.254 and .170.2).
    """
    from ipaddress import IPv4Network

    used = [IPv4Network(route, strict=False) for route in routes]
    links = list(IPv4Network("169.254.64.0/19").subnets(new_prefix=30))
    first = int(tag, 16) % len(links)
    for link in (*links[first:], *links[:first]):
        if not any(link.overlaps(other) for other in used if other.prefixlen > 16):
            return str(link)
    raise NoNetwork("no link network is free on this machine")


def address_in(subnet: str, index: int) -> str:
    from ipaddress import IPv4Network

    return str(IPv4Network(subnet)[index])


def loopback_address(tag: str, index: int) -> str:
    """127.77.x.y; servers begin in different places."""
    number = (int(tag[:4], 16) + index) % 65_536
    return f"127.77.{number // 256}.{number % 256}"


# --- the network of one server ------------------------------------------------------------------


class Network:
    """Gives places and takes them back. What touches the system is done by one thread, in order."""

    def __init__(self, identity: str, ledger: Path, kind: str = AUTO, port: int = 0) -> None:
        """`port` is where the server answers: each node reaches it there, on its own loopback.

        What belongs to a state folder has the first eight digits of its identity in its name.
        """
        self._tag = identity[:8]
        self._path = ledger
        self._port = port
        self._switch = f"batchml-{self._tag}"
        self._uplink = f"bml{self._tag}"
        self._ledger = read_record(ledger, Ledger) or Ledger()
        self._namespaces = {AUTO: None, NAMESPACES: True, LOOPBACK: False}[kind]  # do we use them?
        self._thread = ThreadPoolExecutor(1, "network")
        self._relays: dict[str, asyncio.AbstractServer] = {}
        self._given = set(self._ledger.places)  # as the event loop knows it

    # From the event loop.

    async def place(self, task_id: str) -> Place:
        """Where an attempt is to run; made if need be. Raises NoNetwork."""
        loop = asyncio.get_running_loop()
        self._given.add(task_id)
        place = await loop.run_in_executor(self._thread, self._make, task_id)
        if task_id in self._given:  # else it was stopped meanwhile
            await self._open(task_id, place)
        return place

    def release(self, task_id: str) -> None:
        """An attempt is over: its place, if it had one, is free again."""
        if task_id not in self._given:
            return
        self._given.discard(task_id)
        relay = self._relays.pop(task_id, None)
        if relay is not None:
            relay.close()
        # Asked of the thread, which may just be making the place.
        self._submit(self._remove, task_id)

    async def restore(self, live: Collection[str]) -> None:
        """Take over from an earlier server: keep what live attempts have, remove the rest."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._sweep, set(live))
        self._given = set(self._ledger.places)
        for task_id in self._given:
            place = self._place_of(task_id)
            if place.namespace and os.path.exists(f"{_RUN}/{place.namespace}"):
                await self._open(task_id, place)

    def clear(self) -> None:
        """Remove everything, for a state folder without attempts."""
        self._thread.submit(self._sweep, set()).result()
        self.close()

    def close(self) -> None:
        """Let go of everything; the nodes go on."""
        for relay in self._relays.values():
            relay.close()
        self._thread.shutdown()

    def _submit(self, work: Callable[..., object], *arguments: Any) -> None:
        def quietly() -> None:
            try:
                work(*arguments)
            except Exception as error:
                log.warning("network: %s", error)

        self._thread.submit(quietly)

    # --- the server's port in a namespace -----------------------------------------------------

    async def _open(self, task_id: str, place: Place) -> None:
        """Let the node reach the server by the server's own address."""
        port = self._port
        if not place.namespace or not port or task_id in self._relays:
            return
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.run_in_executor(
                self._thread, lambda: within(place.namespace, lambda: _listen(port))
            )
            self._relays[task_id] = await asyncio.start_server(self._relay, sock=listener)
        except OSError as error:
            log.warning("%s does not reach the server: %s", place.namespace, error)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    # --- in the thread ------------------------------------------------------------------------

    def _place_of(self, task_id: str) -> Place:
        index = self._ledger.places[task_id]
        if not self._ledger.subnet:
            return Place(loopback_address(self._tag, index))
        return Place(address_in(self._ledger.subnet, index), f"{self._switch}-{index}")

    def _make(self, task_id: str) -> Place:
        if self._wants_namespaces():
            self._make_switch()
        places = self._ledger.places
        if task_id not in places:
            places[task_id] = lowest_free(set(places.values()))
            self._save()
        place = self._place_of(task_id)
        if place.namespace:
            try:
                self._make_namespace(place, places[task_id])
            except NoNetwork:
                self._remove(task_id)
                raise
        return place

    def _wants_namespaces(self) -> bool:
        """Found out once: by making what all nodes share."""
        if self._namespaces is None:
            if self._ledger.places:  # nodes of an earlier server go on: as they are
                self._namespaces = bool(self._ledger.subnet)
            else:
                try:
                    self._make_switch()
                    self._namespaces = True
                except NoNetwork as error:
                    self._namespaces = False
                    log.warning(
                        "no network namespaces (%s): the nodes of multi-node jobs share this "
                        "machine's ports, each with a loopback address of its own", error,
                    )  # fmt: skip
        return self._namespaces

    def _make_switch(self) -> None:
        if self._ledger.subnet and os.path.exists(f"{_RUN}/{self._switch}"):
            return
        for tool in ("ip", "nsenter"):
            _tool(tool)
        self._remove_switch()
        routes = _routes()
        subnet = free_network(routes)
        bridge = address_in(subnet, 1)
        _run("ip", "netns", "add", self._switch)
        try:
            _ip(
                self._switch,
                "link set lo up",
                "link add br0 type bridge",
                f"addr add {bridge}/16 dev br0",
                "link set br0 up",
            )
        except NoNetwork:
            self._remove_switch()
            raise
        self._ledger.subnet = subnet
        self._save()
        try:
            self._make_uplink(free_link(self._tag, routes))
        except (NoNetwork, OSError) as error:
            log.warning("the nodes of multi-node jobs reach nothing but each other: %s", error)

    def _make_uplink(self, link: str) -> None:
        ours, theirs = address_in(link, 1), address_in(link, 2)
        _ip("", f"link add {self._uplink} type veth peer name up0 netns {self._switch}",
            f"addr add {ours}/30 dev {self._uplink}", f"link set {self._uplink} up")  # fmt: skip
        _ip(self._switch, f"addr add {theirs}/30 dev up0", "link set up0 up",
            f"route add default via {ours}")  # fmt: skip
        within(self._switch, _forward)
        _run(*_masquerade("up0", self._switch))
        if Path("/proc/sys/net/ipv4/ip_forward").read_text("ascii").strip() != "1":
            raise NoNetwork("net.ipv4.ip_forward is 0 on this machine")
        # Each rule names our own interface, by which it is found again.
        up = self._uplink
        back = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
        for table, rule in (
            ("nat", ["POSTROUTING", "-s", link, "!", "-o", up, "-j", "MASQUERADE"]),
            ("filter", ["FORWARD", "-i", up, "-j", "ACCEPT"]),
            ("filter", ["FORWARD", "-o", up, *back, "-j", "ACCEPT"]),
        ):
            _run("iptables", "-w", "-t", table, "-I", *rule)

    def _remove_rules(self) -> None:
        for table, chain in (("nat", "POSTROUTING"), ("filter", "FORWARD")):
            for line in _run("iptables", "-w", "-t", table, "-S", chain).splitlines():
                words = line.split()
                if self._uplink in words and words[0] == "-A":
                    _run("iptables", "-w", "-t", table, "-D", *words[1:], ignore=True)

    def _make_namespace(self, place: Place, index: int) -> None:
        self._remove_namespace(index)
        subnet = self._ledger.subnet
        _run("ip", "netns", "add", place.namespace)
        _ip(self._switch, f"link add v{index} type veth peer name eth0 netns {place.namespace}",
            f"link set v{index} master br0 up")  # fmt: skip
        _ip(place.namespace, "link set lo up", f"addr add {place.address}/16 dev eth0",
            "link set eth0 up", f"route add default via {address_in(subnet, 1)}")  # fmt: skip

    def _remove_namespace(self, index: int) -> None:
        name = f"{self._switch}-{index}"
        if os.path.exists(f"{_RUN}/{name}"):
            # First: the namespace itself may last as long as a socket of it.
            _run("ip", "-n", self._switch, "link", "del", f"v{index}", ignore=True)
            _run("ip", "netns", "del", name, ignore=True)

    def _remove(self, task_id: str) -> None:
        index = self._ledger.places.get(task_id)
        if index is None:
            return
        self._remove_namespace(index)
        del self._ledger.places[task_id]
        if not self._ledger.places:
            self._remove_switch()
        self._save()

    def _remove_switch(self) -> None:
        """The switch and all that leads to it. What is not there does not matter."""
        self._ledger.subnet = ""
        if os.path.exists(f"/sys/class/net/{self._uplink}"):
            try:
                self._remove_rules()
            except NoNetwork as error:
                log.warning("network: %s", error)
            _run("ip", "link", "del", self._uplink, ignore=True)
        if os.path.exists(f"{_RUN}/{self._switch}"):
            _run("ip", "netns", "del", self._switch, ignore=True)

    def _sweep(self, live: set[str]) -> None:
        gone = [task_id for task_id in self._ledger.places if task_id not in live]
        for task_id in gone:
            self._remove_namespace(self._ledger.places.pop(task_id))
        kept = set(self._ledger.places.values())
        for name in os.listdir(_RUN) if os.path.isdir(_RUN) else ():
            index = name.removeprefix(f"{self._switch}-")
            if index != name and index.isdecimal() and int(index) not in kept:
                self._remove_namespace(int(index))
        if not kept:
            self._remove_switch()
        if gone:
            self._save()

    def _save(self) -> None:
        write_json(str(self._path), {
            "places": self._ledger.places, "subnet": self._ledger.subnet,
        })  # fmt: skip


# --- the system ---------------------------------------------------------------------------------


def within(namespace: str, work: Callable[[], T]) -> T:
    """Do something in a namespace: in a thread of its own, which ends there. Raises OSError."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _enter(f"{_RUN}/{namespace}")
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _enter(path: str) -> None:
    import ctypes  # os.setns is there from Python 3.12 on

    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(file, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(file)


def _listen(port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    listener.setblocking(False)
    return listener


def _forward() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", "ascii")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side has gone: the other is told
    finally:
        writer.close()


def _masquerade(interface: str, namespace: str) -> list[str]:
    rule = ["-t", "nat", "-A", "POSTROUTING", "-o", interface, "-j", "MASQUERADE"]
    return [_tool("nsenter"), f"--net={_RUN}/{namespace}", "--", _tool("iptables"), "-w", *rule]


def _routes() -> list[str]:
    """What this machine routes, but for the way to everything else."""
    found = json.loads(_run("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    return [
        route["dst"]
        for route in found
        if route["dst"] != "default" and route.get("type") not in ("broadcast", "local")
    ]


def _ip(namespace: str, *lines: str) -> None:
    inside = ["-n", namespace] if namespace else []
    _run("ip", *inside, "-batch", "-", given="".join(f"{line}\n" for line in lines))


def _tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if found is None:
        raise NoNetwork(f"there is no `{name}` here")
    return found


def _run(*command: str, given: str = "", ignore: bool = False) -> str:
    """Run a program to its end; its output. Raises NoNetwork."""
    words = [_tool(command[0]), *command[1:]]
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=_CALL_LIMIT,
            env={"PATH": os.defpath, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNetwork(f"{command[0]}: {error}") from None
    if done.returncode and not ignore:
        told = done.stderr.strip().splitlines()
        raise NoNetwork(f"{command[0]}: {told[0] if told else f'exit code {done.returncode}'}")
    return done.stdout
