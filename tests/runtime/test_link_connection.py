"""Supervisors that talk: who is let in, and what a line has to have."""

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from batchml.runtime.nodes.link.connection import (
    MEASURED,
    Handshake,
    LinkClosed,
    Message,
    NodeLink,
    candidate_ports,
    dump,
    join,
    proof,
)

TOKEN = "00112233445566778899aabbccddeeff"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(10)
        yield made


def welcomed(listener: socket.socket, found: list[object], refusal: str = "") -> None:
    """As the main node does, for one connection."""
    connection, _ = listener.accept()
    greeting = Handshake(connection, TOKEN)
    try:
        member = None
        while member is None:
            member = greeting.read()
        if refusal:
            greeting.refuse(refusal, final=True)
        else:
            found += [greeting.welcome(), member]
    except LinkClosed as gone:
        found.append(gone)
        connection.close()


def meet(
    listener: socket.socket, token: str = TOKEN, refusal: str = ""
) -> tuple[NodeLink, list[object]]:
    found: list[object] = []
    main = threading.Thread(target=welcomed, args=(listener, found, refusal))
    main.start()
    try:
        return join("127.0.0.1", listener.getsockname()[1], token, {"index": 1}), found
    finally:
        main.join(10)


def heard(link: NodeLink) -> list[Message]:
    found: list[Message] = []
    while not found:
        found = link.messages()
    return found


def test_nodes_with_the_token_exchange_messages_both_ways(listener: socket.socket) -> None:
    node, found = meet(listener)
    main, member = found
    assert isinstance(main, NodeLink) and member == {"index": 1}
    node.send({"do": "exited", "rank": 3, "why": "ümläut"})
    assert heard(main) == [{"do": "exited", "rank": 3, "why": "ümläut"}]
    main.send({"do": "end"})
    main.send({"do": "beat"})
    assert heard(node)[0] == {"do": "end"}
    node.close()
    with pytest.raises(LinkClosed):
        heard(main)
    main.close()


def test_a_node_without_the_token_cannot_join(listener: socket.socket) -> None:
    with pytest.raises(LinkClosed):
        meet(listener, token="f" * 32)


def test_a_refusal_has_a_reason_and_says_whether_it_is_final(listener: socket.socket) -> None:
    with pytest.raises(LinkClosed, match="of attempt 2") as refused:
        meet(listener, refusal="this is of attempt 2")
    assert refused.value.final


def test_a_program_that_is_no_batchml_node_is_not_greeted(listener: socket.socket) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    other = threading.Thread(target=answer)
    other.start()
    with pytest.raises(LinkClosed):
        join("127.0.0.1", listener.getsockname()[1], TOKEN, {"index": 1})
    other.join()


def test_a_node_rejects_the_main_node_of_another_run(listener: socket.socket) -> None:
    """It has another token, and so cannot answer for what it was sent."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(dump({"hello": "batchml-nodes-1", "nonce": "n"}).encode() + b"\n")
            told = json.loads(connection.makefile().readline())
            said = {"welcome": True}
            code = proof("f" * 32, "main", told["nonce"], "n", dump(said))
            connection.sendall(dump({"proof": code, "answer": said}).encode() + b"\n")

    other = threading.Thread(target=answer)
    other.start()
    with pytest.raises(LinkClosed, match="another run"):
        join("127.0.0.1", listener.getsockname()[1], TOKEN, {"index": 1})
    other.join()


@pytest.mark.parametrize("deed", ["forged", "changed", "repeated", "endless"])
def test_a_line_that_is_not_the_next_of_this_connection_ends_it(deed: str) -> None:
    """Forged, changed, or sent a second time."""
    ours, theirs = socket.socketpair()
    key = "key"
    text = dump({"do": "end"})
    good = f"{proof(key, 'main', '0', text)[:32]} {text}\n"
    lines = {
        "forged": f"{'0' * 32} {text}\n",
        "changed": good.replace("end", "sit"),
        "repeated": good + good,
        "endless": "x" * (2 << 20),
    }
    link = NodeLink(Fake(ours), key, is_main=False)  # type: ignore[arg-type]
    sender = threading.Thread(target=lambda: _send(theirs, lines[deed]))
    sender.start()
    with pytest.raises(LinkClosed, match=r"belongs to this run|more than \d+ bytes"):
        while True:
            link.messages()
    link.close()
    sender.join()
    theirs.close()


def _send(connection: socket.socket, text: str) -> None:
    try:
        connection.sendall(text.encode())
    except OSError:
        pass  # it has heard enough


class Fake:
    """A socket that takes TCP's options."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real

    def setsockopt(self, *_: int) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


def test_a_measured_block_comes_back_among_other_messages(listener: socket.socket) -> None:
    node, found = meet(listener)
    main = found[0]
    assert isinstance(main, NodeLink)
    main.measure()
    main.send({"do": "beat"})
    got: list[Message] = []
    beats: list[Message] = []
    while not got:
        beats += node.messages()
        if beats == []:
            node.send({"do": "beat"})  # which is not to come in the middle
        node.flush()
        main.flush()
        got = main.messages()
    assert got[0] == {"do": "measured"} and beats == [{"do": "beat"}]
    assert MEASURED == 8 << 20
    node.close()
    main.close()


def test_ports_follow_from_the_run_and_are_below_those_of_outgoing_connections() -> None:
    assert candidate_ports("a") == candidate_ports("a") != candidate_ports("b")
    assert all(15_000 <= port < 20_000 for key in "abc" for port in candidate_ports(key))
