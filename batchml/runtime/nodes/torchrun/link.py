"""How supervisors of a gang talk: JSON lines over TCP, each with a code that only members can make.

The token of the run is never sent. Both sides prove that they have it by HMAC-SHA256 over two
numbers that were not used before, and every line after that carries a code of its own, made with a
key of this connection and the count of lines, so that none can be forged, repeated or left out.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import selectors
import socket
import time
from typing import Any, Callable, Dict, List, Optional

MAX_LINE = 1 << 20  # bytes; the last lines of a rank travel in one
_MAX_GREETING = 16_384
_READ = 1 << 18
HELLO = "batchml-gang-1"
MEASURED = 8 << 20  # bytes that go there and back to measure a connection

Message = Dict[str, Any]


class Gone(OSError):
    """The other side has closed, or is none of ours; `final` where a next try is in vain."""

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


def proof(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def dump(message: Message) -> str:
    return json.dumps(message, separators=(",", ":"), sort_keys=True)


class Link:
    """A connection whose two sides know each other. Nothing in it waits.

    Raises Gone from any method once the other side is gone.
    """

    def __init__(
        self, connection: socket.socket, key: str, is_main: bool, rest: bytes = b""
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._key = key
        self._ours, self._theirs = ("main", "node") if is_main else ("node", "main")
        self._sent = self._heard = 0
        self._in = bytearray(rest)
        self._out = bytearray()
        self._raw = 0  # bytes that are still to come of what is measured
        self._echo = False
        self._held: List[Message] = []

    def send(self, message: Message) -> None:
        if self._raw and self._echo:  # it would come in the middle of what is sent back
            self._held.append(message)
            return
        text = dump(message)
        code = proof(self._key, self._ours, str(self._sent), text)[:32]
        self._sent += 1
        self._out += f"{code} {text}\n".encode()
        self.flush()

    def measure(self) -> None:
        """Send a block that the other side sends back, after which comes `{"do": "measured"}`."""
        self.send({"do": "measure", "bytes": MEASURED})
        self._out += bytes(MEASURED)
        self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.socket.send(memoryview(self._out)[:_READ].tobytes())]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Gone(str(error)) from error

    def messages(self) -> List[Message]:
        """What has come."""
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Gone(str(error)) from error
        if not data:
            raise Gone("the connection was closed")
        self._in += data
        return self._whole()

    def waiting(self) -> List[Message]:
        """What had come with the greeting already."""
        return self._whole()

    def _whole(self) -> List[Message]:
        found: List[Message] = []
        while True:
            if self._raw:
                taken = min(self._raw, len(self._in))
                if self._echo:
                    self._out += self._in[:taken]
                del self._in[:taken]
                self._raw -= taken
                if self._echo:
                    self.flush()
                if self._raw:
                    return found
                if not self._echo:
                    found.append({"do": "measured"})
                held, self._held = self._held, []
                for message in held:
                    self.send(message)
            end = self._in.find(b"\n")
            if end < 0:
                if len(self._in) > MAX_LINE:
                    raise Gone("a line without an end")
                return found
            line = bytes(self._in[:end])
            del self._in[: end + 1]
            message = self._read(line)
            if message.get("do") in ("measure", "echo"):
                if message["do"] == "measure":
                    self.send({"do": "echo", "bytes": message["bytes"]})
                self._raw, self._echo = int(message["bytes"]), message["do"] == "measure"
            else:
                found.append(message)

    def _read(self, line: bytes) -> Message:
        code, _, text = line.decode("utf-8", "replace").partition(" ")
        wanted = proof(self._key, self._theirs, str(self._heard), text)[:32]
        if not hmac.compare_digest(code, wanted):
            raise Gone("a line that is not of this run")
        self._heard += 1
        message: Message = json.loads(text)
        return message

    def watch(self, selector: selectors.BaseSelector, ready: Callable[[], None]) -> None:
        """Have `ready` called when something comes, or what waits can be sent. After each `send`
        and `flush`.
        """
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        known = selector.get_map().get(self.socket)
        if known is None:
            selector.register(self.socket, wanted, ready)
        elif known.events != wanted:
            selector.modify(self.socket, wanted, known.data)

    def close(self) -> None:
        self.socket.close()


class Greeting:
    """The main node's side of a connection that has not shown yet whose it is. Nothing waits."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._token = token
        self._nonce = os.urandom(16).hex()
        self._in = b""
        self._theirs = ""
        connection.send(dump({"hello": HELLO, "nonce": self._nonce}).encode() + b"\n")

    def heard(self) -> Optional[Message]:
        """Who it says it is, once that is proved; None while more has to come. Raises Gone."""
        try:
            data = self.socket.recv(_MAX_GREETING)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Gone(str(error)) from error
        self._in += data
        if not data or len(self._in) > _MAX_GREETING:
            raise Gone("no greeting")
        if b"\n" not in self._in:
            return None
        line, _, self._in = self._in.partition(b"\n")
        try:
            found = json.loads(line)
            code, nonce, member = found["proof"], str(found["nonce"]), dict(found["member"])
        except (ValueError, TypeError, KeyError):
            raise Gone("no greeting of ours") from None
        wanted = proof(self._token, "member", self._nonce, nonce, dump(member))
        if not hmac.compare_digest(str(code), wanted):
            raise Gone("it does not have the token of this run")
        self._theirs = nonce
        return member

    def refuse(self, why: str, final: bool) -> None:
        self._answer({"refused": why, "final": final})
        self.socket.close()

    def welcome(self) -> Link:
        self._answer({"welcome": True})
        key = proof(self._token, "session", self._nonce, self._theirs)
        return Link(self.socket, key, is_main=True, rest=self._in)

    def _answer(self, answer: Message) -> None:
        code = proof(self._token, "main", self._theirs, self._nonce, dump(answer))
        try:
            self.socket.send(dump({"proof": code, "answer": answer}).encode() + b"\n")
        except OSError as error:
            raise Gone(str(error)) from error


def join(
    address: str, port: int, token: str, member: Message, source: str = "", limit: float = 2.0
) -> Link:
    """Become a member. Takes `limit` seconds at most for each step; raises Gone.

    `source` is this node's own address, which the connection is to come from.
    """
    try:
        connection = socket.create_connection(
            (address, port), limit, source_address=(source, 0) if source else None
        )
    except OSError as error:
        raise Gone(str(error)) from error
    return greet(connection, token, member, limit)


def call(address: str, port: int, source: str = "") -> socket.socket:
    """A connection in the making, for `greet` once it can be written to. Waits for nothing, for a
    host that has vanished answers nothing. Raises Gone.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        if source:
            made.bind((source, 0))
        made.connect((address, port))
    except BlockingIOError:
        pass  # it is on its way
    except OSError as error:
        made.close()
        raise Gone(str(error)) from error
    return made


def greet(connection: socket.socket, token: str, member: Message, limit: float = 2.0) -> Link:
    """The node's side of a connection that is made. Closes it where it raises Gone."""
    try:
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        connection.settimeout(limit)
        until = time.monotonic() + limit
        greeting = _line(connection, until)
        if greeting.get("hello") != HELLO:
            raise Gone("something else answers there")
        theirs, ours = str(greeting.get("nonce")), os.urandom(16).hex()
        code = proof(token, "member", theirs, ours, dump(member))
        told = {"proof": code, "nonce": ours, "member": member}
        connection.sendall(dump(told).encode() + b"\n")
        found = _line(connection, until)
        answer: Message = dict(found.get("answer") or {})
        wanted = proof(token, "main", ours, theirs, dump(answer))
        if not hmac.compare_digest(str(found.get("proof")), wanted):
            raise Gone("the main node of another run answers there")
        if answer.get("refused"):
            raise Gone(str(answer["refused"]), final=bool(answer.get("final")))
        return Link(connection, proof(token, "session", theirs, ours), is_main=False)
    except Gone:
        connection.close()
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        connection.close()
        raise Gone(str(error)) from error


def _line(connection: socket.socket, until: float) -> Message:
    """One line, and not a byte of what follows it: that is the link's."""
    found = b""
    while not found.endswith(b"\n"):
        if len(found) > _MAX_GREETING or time.monotonic() > until:
            raise Gone("no answer")
        data = connection.recv(1)
        if not data:
            raise Gone("the connection was closed")
        found += data
    message: Message = json.loads(found)
    return message


def ports(key: str, count: int = 6) -> List[int]:
    """Where a run's main node listens: the first of these that is free there.

    From the run's key, so that two runs on one host do not meet; below the ports that Linux gives
    to outgoing connections (32768 and up, net.ipv4.ip_local_port_range).
    """
    digest = hashlib.sha256(key.encode()).digest()
    return [15_000 + int.from_bytes(digest[2 * i : 2 * i + 2], "big") % 5_000 for i in range(count)]
