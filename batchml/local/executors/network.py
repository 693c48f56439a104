"""Network addresses for the nodes of multi-node jobs that run as processes of this machine.

With the rights to make namespaces (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2 each node
gets a network namespace: all ports are its own, and two jobs never conflict, whatever they bind.
The namespaces of a server are connected by a bridge inside one more namespace, the switch. So
nothing of the machine's own network, such as its firewall, lies between two nodes, and a single
interface leads outside.

    node -- eth0 -- [v2, v3, ... br0, up0: the switch] -- bml<home> -- the machine, NAT

A node's host name is `ip-10-77-0-2`, as on EC2, for which it gets a UTS namespace; in its mount
namespace `/etc/hosts` has the names of all nodes.

Without the rights each node gets a loopback address (127.77.x.y): then only programs that bind
their own address avoid conflicts, and a stand-in for `hostname` prints that address.

Names contain the identity of the state folder, so that servers do not touch each other's. A file
beside the journal records the owner of each address: no two live nodes share one, and leftovers of
a killed server are found.
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
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from batchml.local.home import read_record
from batchml.runtime.storage.files import write_json

log = logging.getLogger("batchml.local")

T = TypeVar("T")

AUTO, NAMESPACES, LOOPBACK = "auto", "namespace", "loopback"
MAX_NODES = 16_000  # addresses

_FIRST = 2  # the first address is the bridge's
_CALL_LIMIT = 15.0  # seconds for one command
_RUN = "/run/netns"
_CLONE_NEWNET = 0x40000000
_CANDIDATES = (
    *(f"10.{part}.0.0/16" for part in range(77, 96)),
    *(f"172.{part}.0.0/16" for part in range(20, 32)),
)


class NodeNetworkError(Exception):
    """A node's network cannot be made; the text is the reason."""


class NodeAddress(Struct, frozen=True):
    """A node's address on the network."""

    address: str
    namespace: str = ""  # the name of its namespace; empty on the machine's own loopback
    hosts: str = ""  # the file with the names of all nodes; empty: the node has no name of its own
    tools: str = ""  # a folder with a stand-in for `hostname`; empty where none is needed

    def command(self, command: list[str]) -> list[str]:
        """The command, run in the node's namespaces."""
        if not self.namespace:
            return command
        if self.hosts:
            command = [
                *_named(),
                "sh",
                "-c",
                _NAME,
                "sh",
                host_name(self.address),
                self.hosts,
                *command,
            ]
        return [_tool("nsenter"), f"--net={_RUN}/{self.namespace}", "--", *command]

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of the node, with those in `environ`."""
        found = {**environ, "BATCHML_NODE_ADDRESS": self.address}
        if self.tools:
            found["PATH"] = os.pathsep.join(filter(None, (self.tools, environ.get("PATH"))))
        return found


# A program that gives the namespaces their content, and then becomes the node's command.
_NAME = 'echo "$1" > /proc/sys/kernel/hostname; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
_STAND_IN = '#!/bin/sh\necho "$BATCHML_NODE_ADDRESS"\n'


def _named() -> list[str]:
    """The program that runs a command with a host name and `/etc/hosts` of its own."""
    return [_tool("unshare"), "--uts", "--mount", "--propagation", "slave"]


class AddressTable(Struct):
    """The addresses that are in use, as stored in a file."""

    indexes: dict[str, int] = field(name="places", default_factory=dict)  # task id -> index
    subnet: str = ""  # of the switch; empty without namespaces


# --- Names and addresses: pure --------------------------------------------------------------------


def lowest_free(taken: Collection[int]) -> int:
    """The lowest index of a free address. Raises NodeNetworkError."""
    free = next((index for index in range(_FIRST, MAX_NODES) if index not in taken), None)
    if free is None:
        raise NodeNetworkError(f"more than {MAX_NODES - _FIRST} nodes at once")
    return free


def free_network(routes: Iterable[str]) -> str:
    """The first candidate network that overlaps with no route of the machine."""
    from ipaddress import IPv4Network

    used = [IPv4Network(route, strict=False) for route in routes]
    for candidate in map(IPv4Network, _CANDIDATES):
        if not any(candidate.overlaps(other) for other in used):
            return str(candidate)
    raise NodeNetworkError("no private network is free on this machine")


def free_link(tag: str, routes: Iterable[str]) -> str:
    """A free network of four addresses between the switch and the machine, different for each
    server.

    It is in 169.254.64.0/19, far from the metadata services of clouds (169.254.169.254 and .170.2).
    """
    from ipaddress import IPv4Network

    used = [IPv4Network(route, strict=False) for route in routes]
    links = list(IPv4Network("169.254.64.0/19").subnets(new_prefix=30))
    first = int(tag, 16) % len(links)
    for link in (*links[first:], *links[:first]):
        if not any(link.overlaps(other) for other in used if other.prefixlen > 16):
            return str(link)
    raise NodeNetworkError("no link network is free on this machine")


def address_in(subnet: str, index: int) -> str:
    from ipaddress import IPv4Network

    return str(IPv4Network(subnet)[index])


def host_name(address: str) -> str:
    """The name of the node with this address, as EC2 names hosts."""
    return f"ip-{address.replace('.', '-')}"


def loopback_address(tag: str, index: int) -> str:
    """127.77.x.y; different servers begin with different addresses."""
    number = (int(tag[:4], 16) + index) % 65_536
    return f"127.77.{number // 256}.{number % 256}"


# --- The network of one server --------------------------------------------------------------------


class NodeNetwork:
    """Assigns and releases addresses. One thread makes all changes of the system, in order."""

    def __init__(self, identity: str, path: Path, kind: str = AUTO, port: int = 0) -> None:
        """`port` is the server's: each node reaches it there, on its own loopback.

        Names contain the first eight digits of the state folder's `identity`.
        """
        self._tag = identity[:8]
        self._path = path
        self._port = port
        self._switch = f"batchml-{self._tag}"
        self._uplink = f"bml{self._tag}"
        self._hosts = path.with_name("hosts")
        self._tools = path.with_name("node-tools")
        self._has_names: bool | None = None  # None: not tried yet
        self._table = read_record(path, AddressTable) or AddressTable()
        # Whether namespaces are used; None: not decided yet.
        self._namespaces = {AUTO: None, NAMESPACES: True, LOOPBACK: False}[kind]
        self._thread = ThreadPoolExecutor(1, "network")
        self._relays: dict[str, asyncio.AbstractServer] = {}
        self._assigned = set(self._table.indexes)  # task ids; used by the event loop only

    # --- Called from the event loop ---------------------------------------------------------------

    async def assign(self, task_id: str) -> NodeAddress:
        """Return an attempt's address, after making its namespace. Raises NodeNetworkError."""
        loop = asyncio.get_running_loop()
        self._assigned.add(task_id)
        node = await loop.run_in_executor(self._thread, self._make, task_id)
        if task_id in self._assigned:  # else the attempt was stopped meanwhile
            await self._open_relay(task_id, node)
        return node

    def release(self, task_id: str) -> None:
        """An attempt has ended: its address, if it had one, is free again."""
        if task_id not in self._assigned:
            return
        self._assigned.discard(task_id)
        relay = self._relays.pop(task_id, None)
        if relay is not None:
            relay.close()
        # In the thread, which may be making the address now.
        self._submit(self._remove, task_id)

    async def restore(self, live: Collection[str]) -> None:
        """Take over from an earlier server: keep the addresses of live attempts, remove the
        rest.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._remove_except, set(live))
        self._assigned = set(self._table.indexes)
        for task_id in self._assigned:
            node = self._address_of(task_id)
            if node.namespace and os.path.exists(f"{_RUN}/{node.namespace}"):
                await self._open_relay(task_id, node)

    def clear(self) -> None:
        """Remove everything, for a state folder without attempts."""
        self._thread.submit(self._remove_except, set()).result()
        self.close()

    def close(self) -> None:
        """Close the relays; the nodes continue."""
        for relay in self._relays.values():
            relay.close()
        self._thread.shutdown()

    def _submit(self, work: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call a function. Its errors are logged."""

        def run() -> None:
            try:
                work(*arguments)
            except Exception as error:
                log.warning("network: %s", error)

        self._thread.submit(run)

    # --- The server's port in a namespace -----------------------------------------------------

    async def _open_relay(self, task_id: str, node: NodeAddress) -> None:
        """Let the node reach the server at the server's own address, through a relay."""
        port = self._port
        if not node.namespace or not port or task_id in self._relays:
            return
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.run_in_executor(
                self._thread, lambda: run_in_namespace(node.namespace, lambda: _listen(port))
            )
            self._relays[task_id] = await asyncio.start_server(self._relay, sock=listener)
        except OSError as error:
            log.warning("%s does not reach the server: %s", node.namespace, error)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))

    # --- In the thread ------------------------------------------------------------------------

    def _address_of(self, task_id: str) -> NodeAddress:
        index = self._table.indexes[task_id]
        if not self._table.subnet:
            return NodeAddress(loopback_address(self._tag, index), tools=self._put_tools())
        address = address_in(self._table.subnet, index)
        return NodeAddress(address, f"{self._switch}-{index}", self._put_name(address))

    def _put_name(self, address: str) -> str:
        """Add a node to the file of host names; "" if nodes cannot have names here.

        Nodes that run have the file mounted, so it is written in place and only grows.
        """
        if self._has_names is None:
            try:
                _run(*_named(), "true")
                self._has_names = True
            except NodeNetworkError as error:
                self._has_names = False
                log.warning("all nodes have this machine's host name: %s", error)
        if not self._has_names:
            return ""
        line = f"{address} {host_name(address)}\n"
        if not self._hosts.exists():
            self._hosts.write_text(Path("/etc/hosts").read_text("utf-8", "replace"), "utf-8")
        if line not in self._hosts.read_text("utf-8"):
            with self._hosts.open("a", encoding="utf-8") as file:
                file.write(line)
        return str(self._hosts)

    def _put_tools(self) -> str:
        """The folder with the stand-in for `hostname`."""
        program = self._tools / "hostname"
        if not program.exists():
            self._tools.mkdir(exist_ok=True)
            program.write_text(_STAND_IN, "ascii")
            program.chmod(0o755)
        return str(self._tools)

    def _make(self, task_id: str) -> NodeAddress:
        if self._wants_namespaces():
            self._make_switch()
        indexes = self._table.indexes
        if task_id not in indexes:
            indexes[task_id] = lowest_free(set(indexes.values()))
            self._save()
        node = self._address_of(task_id)
        if node.namespace:
            try:
                self._make_namespace(node, indexes[task_id])
            except NodeNetworkError:
                self._remove(task_id)
                raise
        return node

    def _wants_namespaces(self) -> bool:
        """Whether nodes get namespaces. In doubt, this is decided once, by trying to make the
        switch.
        """
        if self._namespaces is None:
            if self._table.indexes:  # nodes of an earlier server continue with its kind
                self._namespaces = bool(self._table.subnet)
            else:
                try:
                    self._make_switch()
                    self._namespaces = True
                except NodeNetworkError as error:
                    self._namespaces = False
                    log.warning(
                        "no network namespaces (%s): the nodes of multi-node jobs share this "
                        "machine's ports, each with a loopback address of its own", error,
                    )  # fmt: skip
        return self._namespaces

    def _make_switch(self) -> None:
        if self._table.subnet and os.path.exists(f"{_RUN}/{self._switch}"):
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
        except NodeNetworkError:
            self._remove_switch()
            raise
        self._table.subnet = subnet
        self._save()
        try:
            self._make_uplink(free_link(self._tag, routes))
        except (NodeNetworkError, OSError) as error:
            log.warning("the nodes of multi-node jobs reach nothing but each other: %s", error)

    def _make_uplink(self, link: str) -> None:
        ours, theirs = address_in(link, 1), address_in(link, 2)
        _ip("", f"link add {self._uplink} type veth peer name up0 netns {self._switch}",
            f"addr add {ours}/30 dev {self._uplink}", f"link set {self._uplink} up")  # fmt: skip
        _ip(self._switch, f"addr add {theirs}/30 dev up0", "link set up0 up",
            f"route add default via {ours}")  # fmt: skip
        run_in_namespace(self._switch, _enable_forwarding)
        _run(*_masquerade("up0", self._switch))
        if Path("/proc/sys/net/ipv4/ip_forward").read_text("ascii").strip() != "1":
            raise NodeNetworkError("net.ipv4.ip_forward is 0 on this machine")
        # Each rule names this server's uplink, by which `_remove_rules` finds it again.
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

    def _make_namespace(self, node: NodeAddress, index: int) -> None:
        self._remove_namespace(index)
        subnet = self._table.subnet
        _run("ip", "netns", "add", node.namespace)
        _ip(self._switch, f"link add v{index} type veth peer name eth0 netns {node.namespace}",
            f"link set v{index} master br0 up")  # fmt: skip
        _ip(node.namespace, "link set lo up", f"addr add {node.address}/16 dev eth0",
            "link set eth0 up", f"route add default via {address_in(subnet, 1)}")  # fmt: skip

    def _remove_namespace(self, index: int) -> None:
        name = f"{self._switch}-{index}"
        if os.path.exists(f"{_RUN}/{name}"):
            # The link first: the namespace itself may last as long as a socket in it.
            _run("ip", "-n", self._switch, "link", "del", f"v{index}", ignore=True)
            _run("ip", "netns", "del", name, ignore=True)

    def _remove(self, task_id: str) -> None:
        index = self._table.indexes.get(task_id)
        if index is None:
            return
        self._remove_namespace(index)
        del self._table.indexes[task_id]
        if not self._table.indexes:
            self._remove_switch()
        self._save()

    def _remove_switch(self) -> None:
        """Remove the switch and everything that leads to it. Missing parts do not matter."""
        self._table.subnet = ""
        if os.path.exists(f"/sys/class/net/{self._uplink}"):
            try:
                self._remove_rules()
            except NodeNetworkError as error:
                log.warning("network: %s", error)
            _run("ip", "link", "del", self._uplink, ignore=True)
        if os.path.exists(f"{_RUN}/{self._switch}"):
            _run("ip", "netns", "del", self._switch, ignore=True)

    def _remove_except(self, live: set[str]) -> None:
        gone = [task_id for task_id in self._table.indexes if task_id not in live]
        for task_id in gone:
            self._remove_namespace(self._table.indexes.pop(task_id))
        kept = set(self._table.indexes.values())
        for name in os.listdir(_RUN) if os.path.isdir(_RUN) else ():
            index = name.removeprefix(f"{self._switch}-")
            if index != name and index.isdecimal() and int(index) not in kept:
                self._remove_namespace(int(index))
        if not kept:
            self._remove_switch()
        if gone:
            self._save()

    def _save(self) -> None:
        write_json(str(self._path), msgspec.to_builtins(self._table))


# --- The system -----------------------------------------------------------------------------------


def run_in_namespace(namespace: str, work: Callable[[], T]) -> T:
    """Run a function in a namespace, in a thread of its own that ends with it. Raises OSError."""
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
    import ctypes  # os.setns exists from Python 3.12 on

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


def _enable_forwarding() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1", "ascii")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one side has disconnected; the other one is closed
    finally:
        writer.close()


def _masquerade(interface: str, namespace: str) -> list[str]:
    rule = ["-t", "nat", "-A", "POSTROUTING", "-o", interface, "-j", "MASQUERADE"]
    return [_tool("nsenter"), f"--net={_RUN}/{namespace}", "--", _tool("iptables"), "-w", *rule]


def _routes() -> list[str]:
    """The routes of this machine, except the default route."""
    routes = json.loads(_run("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    return [
        route["dst"]
        for route in routes
        if route["dst"] != "default" and route.get("type") not in ("broadcast", "local")
    ]


def _ip(namespace: str, *lines: str) -> None:
    """Run commands of ip(8) in a namespace; "": in the machine's own."""
    inside = ["-n", namespace] if namespace else []
    _run("ip", *inside, "-batch", "-", stdin="".join(f"{line}\n" for line in lines))


def _tool(name: str) -> str:
    """The path of a program. Raises NodeNetworkError."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is None:
        raise NodeNetworkError(f"the program `{name}` is not installed")
    return path


def _run(*command: str, stdin: str = "", ignore: bool = False) -> str:
    """Run a program to its end; its output. `ignore`: a failure does not matter. Raises
    NodeNetworkError.
    """
    words = [_tool(command[0]), *command[1:]]
    try:
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=_CALL_LIMIT,
            env={"PATH": os.defpath, "LC_ALL": "C"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeNetworkError(f"{command[0]}: {error}") from None
    if done.returncode and not ignore:
        lines = done.stderr.strip().splitlines()
        raise NodeNetworkError(
            f"{command[0]}: {lines[0] if lines else f'exit code {done.returncode}'}"
        )
    return done.stdout
