"""Whether there are credentials: no call to AWS, and no wait for a metadata service."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from batchml.aws.session import Access, Session, accepts_connections
from batchml.errors import AccessError
from tests.support.wire import keys as keys

_ROLE = {
    "Code": "Success", "AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "secret", "Token": "t",
    "Expiration": "2099-01-01T00:00:00Z",
}  # fmt: skip


class _Metadata(BaseHTTPRequestHandler):
    """The metadata service of EC2, version 2, of an instance with a role."""

    def log_message(self, *_: object) -> None: ...

    def do_PUT(self) -> None:
        self._send("a-token")

    def do_GET(self) -> None:
        is_list = self.path.endswith("/security-credentials/")
        self._send("a-role" if is_list else json.dumps(_ROLE))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def metadata_service() -> Iterator[str]:
    """The URL of a metadata service that answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metadata)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def nothing(keys: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A user without variables and files, on a machine that may be one of EC2."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a port where connections are never established: its queue is full."""
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(8)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}"
        for each in waiting:
            each.close()


def test_keys_in_variables_are_found(keys: None) -> None:
    assert Session(Access("us-east-1")).has_credentials()


def test_the_embedded_server_has_its_own(nothing: pytest.MonkeyPatch) -> None:
    assert Session(Access("us-east-1", endpoint="http://127.0.0.1:1")).has_credentials()


def test_half_a_key_is_an_error(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessError, match="AWS_SECRET_ACCESS_KEY is missing"):
        Session(Access("us-east-1")).has_credentials()


def test_a_profile_without_credentials_has_none(
    nothing: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text("[profile empty]\nregion = eu-west-1\n")
    nothing.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    nothing.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert not Session(Access("us-east-1", "empty")).has_credentials()
    with pytest.raises(AccessError, match="'other' is not in"):
        Session(Access("us-east-1", "other")).has_credentials()


def test_the_role_of_an_instance_is_found(nothing: pytest.MonkeyPatch) -> None:
    with metadata_service() as url:
        nothing.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        session = Session(Access("us-east-1"))
        assert session.has_credentials()
        assert session.keys() == ("ASIAEXAMPLE", "secret", "t")


def test_a_silent_metadata_service_counts_as_none_after_one_short_try(
    nothing: pytest.MonkeyPatch, silent: str
) -> None:
    """botocore itself would try twice a second long, whenever it is asked."""
    tries = list[str]()

    def answers(url: str) -> bool:
        tries.append(url)
        return accepts_connections(url, 0.02)

    nothing.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", silent)
    session = Session(Access("us-east-1"), answers)
    assert not session.has_credentials()
    with pytest.raises(AccessError, match="no AWS credentials were found"):
        session.keys()
    assert [each.rstrip("/") for each in tries] == [silent]


def test_only_a_port_that_answers_counts() -> None:
    with metadata_service() as url:
        assert accepts_connections(url, 5)
    assert not accepts_connections(url, 5)
    assert not accepts_connections("http://127.0.0.1:99999", 5)
    assert not accepts_connections("nonsense", 5)
