"""Authenticated messages between the nodes of a run: JSON lines over TCP, each with an HMAC.

The token of the run is never sent. Each side proves that it has the token by HMAC-SHA256 over two
random numbers. Each later line has an HMAC of its own, made with a key of the connection and the
number of the line, so no line can be forged, repeated or left out.

The side that connects is called a member: it describes itself in the handshake.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import selectors
import socket
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

MAX_LINE = 1 << 20  # bytes; the last lines of a rank are sent in one message
_MAX_GREETING = 16_384
_READ = 1 << 18
HELLO = "batchml-nodes-1"
MEASURED = 8 << 20  # bytes that are sent and returned to measure a connection

Message = Dict[str, Any]


class LinkClosed(OSError):
    """The other side has closed the connection, or does not belong to the run.

    `final`: another try would fail the same way.
    """

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


def proof(token: str, *parts: str) -> str:
    """The HMAC-SHA256 of the parts, in hex digits."""
    return hmac.new(token.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def dump(message: Message) -> str:
    return json.dumps(message, separators=(",", ":"), sort_keys=True)


class NodeLink:
    """A connection whose two sides have proved that they belong to the run. No method blocks.

    Every method raises LinkClosed once the other side is gone.
    """

    def __init__(
        self, connection: socket.socket, key: str, is_main: bool, rest: bytes = b""
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._key = key
        self._ours, self._theirs = ("main", "node") if is_main else ("node", "main")
        self._sent = self._received = 0
        self._in = bytearray(rest)
        self._out = bytearray()
        self._raw = 0  # bytes of a measurement that have not been received yet
        self._returns_raw = False  # whether this side sends those bytes back
        self._held: List[Message] = []  # messages to send after those bytes

    def send(self, message: Message) -> None:
        if self._raw and self._returns_raw:  # else it would be sent amid the returned bytes
            self._held.append(message)
            return
        text = dump(message)
        code = proof(self._key, self._ours, str(self._sent), text)[:32]
        self._sent += 1
        self._out += f"{code} {text}\n".encode()
        self.flush()

    def measure(self) -> None:
        """Send a block of bytes, which the other side sends back.

        Once it is back, `messages` returns `{"do": "measured"}`.
        """
        self.send({"do": "measure", "bytes": MEASURED})
        self._out += bytes(MEASURED)
        self.flush()

    def flush(self) -> None:
        """Send as much of the waiting data as the connection takes now."""
        try:
            while self._out:
                del self._out[: self.socket.send(memoryview(self._out)[:_READ].tobytes())]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def messages(self) -> List[Message]:
        """Read and return the messages that have arrived."""
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not data:
            raise LinkClosed("the connection was closed")
        self._in += data
        return self.waiting()

    def waiting(self) -> List[Message]:
        """Return the complete messages of the data that was read, as after the handshake."""
        found: List[Message] = []
        while True:
            if self._raw:
                count = min(self._raw, len(self._in))
                if self._returns_raw:
                    self._out += self._in[:count]
                    self.flush()
                del self._in[:count]
                self._raw -= count
                if self._raw:
                    return found
                if not self._returns_raw:
                    found.append({"do": "measured"})
                held, self._held = self._held, []
                for message in held:
                    self.send(message)
            end = self._in.find(b"\n")
            if end < 0:
                if len(self._in) > MAX_LINE:
                    raise LinkClosed(f"it sent a line of more than {MAX_LINE} bytes")
                return found
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            message = self._read(line)
            if message.get("do") in ("measure", "echo"):
                if message["do"] == "measure":
                    self.send({"do": "echo", "bytes": message["bytes"]})
                self._raw = int(message["bytes"])
                self._returns_raw = message["do"] == "measure"
            else:
                found.append(message)

    def _read(self, line: bytes) -> Message:
        code, _, text = line.decode("utf-8", "replace").partition(" ")
        expected = proof(self._key, self._theirs, str(self._received), text)[:32]
        if not hmac.compare_digest(code, expected):
            raise LinkClosed("it sent a line without the proof that it belongs to this run")
        self._received += 1
        message: Message = json.loads(text)
        return message

    def watch(self, selector: selectors.BaseSelector, ready: Callable[[], None]) -> None:
        """Let the selector call `ready` when data arrives, or when waiting data can be sent.

        Call this after each `send` and `flush`.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        registered = selector.get_map().get(self.socket)
        if registered is None:
            selector.register(self.socket, events, ready)
        elif registered.events != events:
            selector.modify(self.socket, events, registered.data)

    def close(self) -> None:
        self.socket.close()


# --- The main node's side of a new connection -----------------------------------------------------


class Handshake:
    """A new connection whose other side has not proved yet that it belongs to the run.

    No method blocks.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._token = token
        self._nonce = os.urandom(16).hex()
        self._in = b""
        self._theirs = ""  # the random number of the other side
        connection.send(dump({"hello": HELLO, "nonce": self._nonce}).encode() + b"\n")

    def read(self) -> Optional[Message]:
        """Return the member's description once it has proved that it belongs to the run.

        None while data is missing. Raises LinkClosed.
        """
        try:
            data = self.socket.recv(_MAX_GREETING)
        except BlockingIOError:
            return None
        except OSError as error:
            raise LinkClosed(str(error)) from error
        self._in += data
        if not data or len(self._in) > _MAX_GREETING:
            raise LinkClosed("it sent no greeting")
        if b"\n" not in self._in:
            return None
        line, _, self._in = self._in.partition(b"\n")
        try:
            found = json.loads(line)
            code, nonce, member = found["proof"], str(found["nonce"]), dict(found["member"])
        except (ValueError, TypeError, KeyError):
            raise LinkClosed("it did not send the greeting of a batchml node") from None
        expected = proof(self._token, "member", self._nonce, nonce, dump(member))
        if not hmac.compare_digest(str(code), expected):
            raise LinkClosed("it does not have the token of this run")
        self._theirs = nonce
        return member

    def refuse(self, why: str, final: bool) -> None:
        """Tell the member why it may not join, and close. `final`: it need not try again."""
        self._answer({"refused": why, "final": final})
        self.socket.close()

    def welcome(self) -> NodeLink:
        """Accept the member, and return the link to it."""
        self._answer({"welcome": True})
        key = proof(self._token, "session", self._nonce, self._theirs)
        return NodeLink(self.socket, key, is_main=True, rest=self._in)

    def _answer(self, answer: Message) -> None:
        code = proof(self._token, "main", self._theirs, self._nonce, dump(answer))
        try:
            self.socket.send(dump({"proof": code, "answer": answer}).encode() + b"\n")
        except OSError as error:
            raise LinkClosed(str(error)) from error


# --- The other nodes' side ------------------------------------------------------------------------


def join(
    address: str, port: int, token: str, member: Message, source: str = "", limit: float = 2.0
) -> NodeLink:
    """Connect, describe this node as `member`, and wait for the answer. Raises LinkClosed.

    Each step may take `limit` seconds. `source`: the address of this node to connect from.
    """
    try:
        connection = socket.create_connection(
            (address, port), limit, source_address=(source, 0) if source else None
        )
    except OSError as error:
        raise LinkClosed(str(error)) from error
    return greet(connection, token, member, limit)


def dial(address: str, port: int, source: str = "") -> socket.socket:
    """Begin to connect, without waiting: a host that has vanished never answers.

    Once the socket can be written to, pass it to `greet`. Raises LinkClosed.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if source:
            connection.bind((source, 0))
        connection.connect((address, port))
    except BlockingIOError:
        pass  # the connection is being made
    except OSError as error:
        connection.close()
        raise LinkClosed(str(error)) from error
    return connection


def greet(connection: socket.socket, token: str, member: Message, limit: float = 2.0) -> NodeLink:
    """Do the member's side of the handshake. Raises LinkClosed, after closing the connection."""
    try:
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        connection.settimeout(limit)
        until = time.monotonic() + limit
        greeting = _read_line(connection, until)
        if greeting.get("hello") != HELLO:
            raise LinkClosed("another program answers at this port, not a batchml node")
        theirs, ours = str(greeting.get("nonce")), os.urandom(16).hex()
        code = proof(token, "member", theirs, ours, dump(member))
        reply = {"proof": code, "nonce": ours, "member": member}
        connection.sendall(dump(reply).encode() + b"\n")
        found = _read_line(connection, until)
        answer: Message = dict(found.get("answer") or {})
        expected = proof(token, "main", ours, theirs, dump(answer))
        if not hmac.compare_digest(str(found.get("proof")), expected):
            raise LinkClosed("the main node of another run answers at this port")
        if answer.get("refused"):
            raise LinkClosed(str(answer["refused"]), final=bool(answer.get("final")))
        return NodeLink(connection, proof(token, "session", theirs, ours), is_main=False)
    except LinkClosed:
        connection.close()
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        connection.close()
        raise LinkClosed(str(error)) from error


def _read_line(connection: socket.socket, until: float) -> Message:
    """Read one line, and no byte after it: later bytes belong to the link."""
    found = b""
    while not found.endswith(b"\n"):
        if len(found) > _MAX_GREETING or time.monotonic() > until:
            raise LinkClosed("it did not answer")
        data = connection.recv(1)
        if not data:
            raise LinkClosed("the connection was closed")
        found += data
    message: Message = json.loads(found)
    return message


def candidate_ports(key: str) -> List[int]:
    """The ports of a run's main node: it listens on the first of these that is free there.

    They are derived from the run's key, so two runs on one host rarely use the same ports. They are
    below the ports that Linux gives to outgoing connections (32768 and up,
    net.ipv4.ip_local_port_range).
    """
    digest = hashlib.sha256(key.encode()).digest()
    return [15_000 + int.from_bytes(digest[2 * i : 2 * i + 2], "big") % 5_000 for i in range(6)]


# --- Heartbeats -----------------------------------------------------------------------------------
# Both sides of a link send `{"do": "beat"}` regularly. Everything happens in the loop of the
# owner: the selector calls when data arrives, and the owner calls `tick`.


# If a loop does not turn for so many seconds, its own process was stopped. That time does not count
# as silence of the peer.
FROZEN = 5.0


def dispatch(selector: selectors.BaseSelector, pause: float) -> None:
    """Wait for at most `pause` seconds, and call the function registered for each ready file."""
    for key, _ in selector.select(pause):
        # An earlier call may have closed the file, and another file may have its number by now.
        current = selector.get_map().get(key.fd)
        if current is not None and current.data is key.data:
            key.data()


class Heartbeats(NamedTuple):
    """The times of a link, in seconds."""

    every: float = 2.0  # between two signs of life of one side
    silent: float = 15.0  # without one, after which that side is lost


class Peer:
    """The other side of a link. `info`: how it described itself in the handshake.

    `hear` receives each message. `lost` is called once, with the reason and whether the peer fell
    silent, unless the owner of this object closed the link.
    """

    def __init__(
        self,
        link: NodeLink,
        selector: selectors.BaseSelector,
        beats: Heartbeats,
        hear: Callable[[Peer, Message], None],
        lost: Callable[[Peer, str, bool], None],
        info: Optional[Message] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info: Message = info or {}
        self.silent_after = beats.silent
        self.heard = self._last_turn = clock()  # `heard`: when the peer sent something last
        self.is_open = True
        self._link, self._selector, self._every = link, selector, beats.every
        self._hear, self._lost, self._clock = hear, lost, clock
        self._next_beat = self.heard + beats.every

    def start(self) -> None:
        """Begin to read. Messages that arrived with the handshake are received at once."""
        self._watch()
        self._take(self._link.waiting)

    def send(self, message: Message) -> None:
        """Send a message, unless the link is closed. If sending fails, the peer is lost."""
        self._try(lambda: self._link.send(message))

    def measure(self) -> None:
        """Measure the connection: `hear` receives `{"do": "measured"}` once the block is back."""
        self._try(self._link.measure)

    def until_due(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        return max(0.0, self._next_beat - now)

    def tick(self, now: float, state: Mapping[str, object] = {}) -> None:
        """Send a sign of life when it is due, with `state` in it; give up a silent peer."""
        if now - self._last_turn > FROZEN:
            self.heard += now - self._last_turn
        self._last_turn = now
        if now - self.heard > self.silent_after:
            self._lose(f"it was silent for {self.silent_after:.0f} s", silent=True)
        elif now >= self._next_beat:
            self._next_beat = now + self._every
            self.send({"do": "beat", **state})

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            if self._link.socket in self._selector.get_map():
                self._selector.unregister(self._link.socket)
            self._link.close()

    def _try(self, act: Callable[[], None]) -> None:
        if self.is_open:
            try:
                act()
                self._watch()
            except LinkClosed as closed:
                self._lose(str(closed), silent=False)

    def _watch(self) -> None:
        self._link.watch(self._selector, self._read)

    def _read(self) -> None:
        self._try(self._link.flush)
        if self.is_open:
            self._take(self._link.messages)

    def _take(self, source: Callable[[], Sequence[Message]]) -> None:
        try:
            messages = source()
        except (LinkClosed, ValueError, KeyError) as error:
            self._lose(str(error), silent=False)
            return
        self.heard = self._clock()
        for message in messages:
            if self.is_open:  # an earlier message may have led to its end
                self._hear(self, message)
        if self.is_open:
            self._watch()

    def _lose(self, why: str, silent: bool) -> None:
        self.close()
        self._lost(self, why, silent)
