"""Find out for how long an attempt has done nothing, say what it waits for, and end it if the job
asks for that (`idle_after`).

An attempt is idle while it uses almost no CPU, network, disk and GPU, prints nothing and reports
neither metrics nor progress. docs/seeing.md has the thresholds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.processes import SPARE, read
from batchml.runtime.protocol.exit_codes import IDLE, IDLE_END
from batchml.runtime.protocol.log_marks import MARK, idle_mark
from batchml.runtime.protocol.variables import IDLE_AFTER, is_main_node, seconds_of
from batchml.runtime.storage.store import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.attempt import AttemptHandle

SHOWN_AFTER = 120.0  # seconds without activity after which clients are told

# At most so much counts as nothing. The runtime itself uses about 0.02 cores and 300 B/s.
MOST_CPU = 0.05  # cores
MOST_TRAFFIC = 10_000.0  # bytes a second, received or sent
MOST_DISK = 10_000.0  # bytes a second, read or written
MOST_GPU = 5.0  # percent, of the busiest GPU
_OUTDATED = 120.0  # seconds after which a node's record does not count; it writes one every 30 s

# --- Activity -------------------------------------------------------------------------------------


class Activity(NamedTuple):
    """What an attempt did between two measurements. None: unknown."""

    cpu: float  # cores
    traffic: Optional[float] = None  # bytes a second, the larger of received and sent
    disk: float = 0.0  # bytes a second
    gpu: Optional[float] = None  # percent

    @property
    def is_none(self) -> bool:
        return (
            self.cpu <= MOST_CPU
            and (self.traffic or 0.0) <= MOST_TRAFFIC
            and self.disk <= MOST_DISK
            and (self.gpu or 0.0) < MOST_GPU
        )


def idle_since(before: float, activity: Activity, at: float, last_sign: float) -> float:
    """The time since which an attempt is idle, after a measurement that ended at `at`.

    `before`: the result of the preceding measurement. `last_sign`: when the program last printed a
    line, or reported a metric or progress. All are times of one clock, in seconds.
    """
    return max(before, last_sign) if activity.is_none else at


def disk_bytes(pids: Iterable[int], read: Callable[[str], str] = read) -> int:
    """Bytes that these processes have read from and written to disks and network file systems.

    Source: proc(5), /proc/PID/io.
    """
    total = 0
    for pid in pids:
        for line in read(f"/proc/{pid}/io").splitlines():
            name, _, count = line.partition(": ")
            if name in ("read_bytes", "write_bytes") and count.isdigit():
                total += int(count)
    return total


# --- What the processes wait for ------------------------------------------------------------------
# Which process has which TCP connection, by the inodes of its sockets.
#
# Sources: proc(5), /proc/net/tcp; include/net/tcp_states.h of Linux; RFC 1213, tcpAttemptFails.

ESTABLISHED, SYN_SENT, LISTEN = "01", "02", "0A"
FIRST_EPHEMERAL = 32_768  # the kernel gives ports from here on to listeners that ask for any port
_MOST_NAMED = 4  # waits in a sentence
_GATHERING = "waiting for"  # begins the supervisor's lines about nodes that are not connected
_PROBE_LIMIT = 1.0  # seconds that a connection for trial may take

Address = Tuple[str, int]  # an IP address, or a name, and a port


class TcpSocket(NamedTuple):
    """A row of /proc/net/tcp."""

    own: Address
    peer: Address
    state: str
    inode: str


class WaitingProcess(NamedTuple):
    """A process of an idle attempt."""

    name: str  # "rank 1", or its program
    sockets: Tuple[TcpSocket, ...] = ()
    master: Optional[Address] = None  # MASTER_ADDR and MASTER_PORT, of one of several ranks


def read_sockets(text: str) -> List[TcpSocket]:
    """The rows of /proc/net/tcp or /proc/net/tcp6."""
    rows = (line.split() for line in text.splitlines()[1:])
    return [
        TcpSocket(_address(row[1]), _address(row[2]), row[3], row[9])
        for row in rows
        if len(row) >= 10
    ]


def read_connections(read: Callable[[str], str] = read) -> List[TcpSocket]:
    """All TCP sockets of this network namespace."""
    return [row for name in ("tcp", "tcp6") for row in read_sockets(read(f"/proc/net/{name}"))]


def _address(text: str) -> Address:
    """`0100007F:1F90` is ("127.0.0.1", 8080): words of 32 bits in the byte order of the machine."""
    host, _, port = text.partition(":")
    data = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    if len(data) == 16 and data.startswith(b"\0" * 10 + b"\xff\xff"):  # IPv4 in IPv6
        data = data[12:]
    import socket  # takes longer to import than all that is done before a command starts

    family = socket.AF_INET if len(data) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, data), int(port, 16)


def failed_connections(text: str) -> int:
    """How many connections of this network could not be opened, from the text of /proc/net/snmp."""
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp: ")]
    if len(rows) != 2 or "AttemptFails" not in rows[0]:
        return 0
    return int(rows[1][rows[0].index("AttemptFails")])


def find_waiting(pids: Sequence[int], read: Callable[[str], str] = read) -> List[WaitingProcess]:
    """The ranks among these processes, or all of them if there are no ranks."""
    by_inode = {row.inode: row for row in read_connections(read) if row.inode != "0"}
    found, ranks = [], []
    for pid in pids:
        name = read(f"/proc/{pid}/comm").strip()
        if name.startswith(SPARE):
            continue
        words = (word.partition("=") for word in read(f"/proc/{pid}/environ").split("\0"))
        variables = {name: value for name, _, value in words}
        own = tuple(by_inode[each] for each in _socket_inodes(pid) if each in by_inode)
        if "RANK" in variables:
            ranks.append(WaitingProcess(f"rank {variables['RANK']}", own, _master(variables)))
        else:
            found.append(WaitingProcess(name or "a process", own))
    return ranks or found


def _socket_inodes(pid: int) -> List[str]:
    inodes = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.append(target[8:-1])
    except OSError:  # the process has ended, or belongs to another user
        pass
    return inodes


def _master(variables: Mapping[str, str]) -> Optional[Address]:
    host, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    is_alone = variables.get("WORLD_SIZE", "") in ("", "1")
    return (host, int(port)) if host and port.isdigit() and not is_alone else None


def answers(address: Address) -> Optional[bool]:
    """Whether a connection to this address is accepted; None if nothing answers in a second."""
    try:
        import socket

        socket.create_connection(address, _PROBE_LIMIT).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def describe_waits(
    processes: Sequence[WaitingProcess],
    has_failures: bool,
    answers: Callable[[Address], Optional[bool]] = answers,
) -> str:
    """What idle processes wait for, as their connections show it; empty if they show nothing.

    `has_failures`: connections could not be opened since the last measurement. Only then does a
    rank without a connection to its master count as one that tries to connect.
    """
    owners = {row.own: one.name for one in processes for row in one.sockets}
    found: Dict[str, None] = {}  # in order, without repetitions
    for one in processes:
        for wait in _waits_of(one, owners, has_failures, answers):
            found[wait] = None
    return "; ".join(list(found)[:_MOST_NAMED])


def _waits_of(
    one: WaitingProcess,
    owners: Mapping[Address, str],
    has_failures: bool,
    answers: Callable[[Address], Optional[bool]],
) -> List[str]:
    opening = next((row.peer for row in one.sockets if row.state == SYN_SENT), None)
    if opening is not None:
        return [f"{one.name} waits to connect to {_text(opening)}, which does not answer"]
    listening = {row.own[1] for row in one.sockets if row.state == LISTEN}
    port = one.master[1] if one.master else 0
    found = []
    for each in sorted(listening):
        if each == port or (each < FIRST_EPHEMERAL and not one.name.startswith("rank ")):
            found.append(f"{one.name} listens on port {each}{_clients(one, each, owners)}")
    if one.master is None or found:
        return found
    if any(row.state == ESTABLISHED and row.peer[1] == port for row in one.sockets):
        return [f"{one.name} is connected to {_text(one.master)} and waits for the others"]
    answer = answers(one.master) if has_failures else True
    if answer is False:
        return [f"{one.name} waits to connect to {_text(one.master)}, where nobody listens"]
    if answer is None:
        return [f"{one.name} waits to connect to {_text(one.master)}, which does not answer"]
    return []


def _clients(one: WaitingProcess, port: int, owners: Mapping[Address, str]) -> str:
    """Who is connected to a port on which a process listens, other than this process itself."""
    rows = (row for row in one.sockets if row.state == ESTABLISHED and row.own[1] == port)
    names = dict.fromkeys(owners.get(row.peer, row.peer[0]) for row in rows)
    others = [name for name in names if name != one.name]
    if not others:
        return ", and nobody else is connected"
    return f", connected: {', '.join(others[:_MOST_NAMED])}"


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


# --- The watch ------------------------------------------------------------------------------------


class IdleWatch:
    """Watches one attempt. The usage reporter calls `measure` after each of its measurements."""

    def __init__(
        self, attempt: AttemptHandle, now: float, wall: Callable[[], float] = time.time
    ) -> None:
        environ = attempt.environ
        self._attempt, self._wall = attempt, wall
        self._limit = seconds_of(environ.get(IDLE_AFTER), least=1.0, default=0.0)
        self._shown_after = min(SHOWN_AFTER, self._limit or SHOWN_AFTER)
        self._at = self._since = self._last_sign = now
        self._disk = self._failures = self._metrics = 0
        self._nodes = NodesIdleness(attempt, wall)

    def measure(self, now: float, activity: Activity, pids: List[int], progress_at: float) -> float:
        """The seconds for which the attempt is idle; 0 if they are not worth mentioning.

        `progress_at`: when a rank last reported progress, by the monotonic clock; 0: never. Writes
        a mark with what the processes wait for, and ends the run if it is idle for too long.
        """
        failures = failed_connections(read("/proc/net/snmp"))
        activity = activity._replace(disk=self._disk_rate(now, pids))
        metrics = _size(self._attempt.env.metrics)
        if metrics != self._metrics:
            self._metrics, self._last_sign = metrics, now
        last_sign = max(self._last_sign, self._attempt.last_output, progress_at)
        self._since = idle_since(self._since, activity, now, last_sign)
        idle = now - self._since
        has_failures, self._failures = failures > self._failures, failures
        self._at = now
        waits = ""
        if idle >= self._shown_after:
            notice = self._attempt.notice
            is_gathering = notice.startswith(_GATHERING)
            waits = notice if is_gathering else describe_waits(find_waiting(pids), has_failures)
            if waits:
                self._attempt.mark(idle_mark(waits)[len(MARK) :])
        if self._limit and self._nodes.are_idle(idle, self._limit, waits):
            waits = "; ".join(filter(None, (waits, *self._nodes.waits)))
            self._attempt.stop(self._describe_end(idle, waits), IDLE)
        return idle if idle >= self._shown_after else 0.0

    def _disk_rate(self, now: float, pids: List[int]) -> float:
        before, self._disk = self._disk, disk_bytes(pids)
        return max(0, self._disk - before) / max(1e-3, now - self._at)

    def _describe_end(self, idle: float, waits: str) -> str:
        since = time.strftime("%H:%M:%S", time.gmtime(self._wall() - idle))
        return (
            f"{IDLE_END} {idle / 60:.0f} min, since {since} UTC: no CPU, network, disk or GPU use, "
            f"no output, no progress{'; ' if waits else ''}{waits}. The run saves and stops "
            f"(idle_after)."
        )


class NodesIdleness:
    """Whether all nodes of a run are idle.

    Each node other than the main node records its idleness in the run's store, which the main node
    reads: nodes of the kind `plain` have no other connection.
    """

    def __init__(self, attempt: AttemptHandle, wall: Callable[[], float]) -> None:
        environ = attempt.environ
        self._store, self._wall = attempt.store, wall
        self._is_main = is_main_node(environ)
        self._folder = f"idle/{attempt.env.attempt}"
        self._node = environ.get("AWS_BATCH_JOB_NODE_INDEX", "0")
        count = environ.get("AWS_BATCH_JOB_NUM_NODES", "")
        nodes = range(int(count) if count.isdigit() else 1)
        self._others = [f"{self._folder}/{i}" for i in nodes if str(i) != self._node]
        self._has_record = False
        self.waits: List[str] = []  # what the other nodes wait for, once they are idle

    def are_idle(self, idle: float, limit: float, waits: str) -> bool:
        """Whether this is the main node, and it and all others are idle for `limit` seconds.

        `waits`: what the processes of this node wait for.
        """
        try:
            if not self._is_main:
                self._record(idle, waits, idle >= limit)
                return False
            if idle < limit or not self._others:
                return idle >= limit
            if self._store is None:
                return False
            now = self._wall()
            found = [read_idle_record(each) for each in self._store.get_many(self._others)]
            self.waits = list(dict.fromkeys(each.waits for each in found if each.waits))
            return all(each.idle >= limit and abs(now - each.at) < _OUTDATED for each in found)
        except StoreError:  # at the next measurement the store may answer
            return False

    def _record(self, idle: float, waits: str, is_idle: bool) -> None:
        if self._store is not None and (is_idle or self._has_record):
            record = IdleRecord(idle if is_idle else 0.0, self._wall(), waits)
            document = json.dumps(record._asdict()).encode()
            self._store.put(f"{self._folder}/{self._node}", document)
            self._has_record = is_idle


class IdleRecord(NamedTuple):
    """What a node has recorded of itself."""

    idle: float = 0.0  # seconds
    at: float = 0.0  # when it was written, in seconds since 1970
    waits: str = ""


def read_idle_record(data: Optional[bytes]) -> IdleRecord:
    """A node's record; that of a busy node if it has none, or an invalid one."""
    try:
        found = json.loads(data or b"{}")
        return IdleRecord(float(found["idle"]), float(found["at"]), str(found["waits"]))
    except (ValueError, TypeError, KeyError):
        return IdleRecord()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0
