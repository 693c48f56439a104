"""What became of a SubmitJob that failed: whether it may be sent again without looking first."""

from typing import Any

import pytest

from batchml.aws.credentials_help import Caller
from batchml.aws.errors import Fate, fate, kinds, signing, translated
from batchml.aws.session import Access, Session
from batchml.errors import BatchmlError, LocalServerError
from tests.unit.test_failures import all_kinds, client_error, make, named

URL = {"endpoint_url": "https://batch.us-east-1.amazonaws.com"}


def after(error: Exception) -> Fate:
    """The fate of a call that botocore ended with `error`."""
    with pytest.raises(BatchmlError) as told, translated("SubmitJob"):
        raise error
    return fate(told.value)


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_only_what_is_known_not_to_have_left_counts_as_not_sent(kind: type[Exception]) -> None:
    found = after(make(kind))
    name = next(c.__name__ for c in kind.__mro__ if c.__name__ in kinds())
    lost = kinds()[name] == "lost"
    if kind.__name__ in ("EndpointConnectionError", "ConnectTimeoutError"):
        assert found is Fate.UNREACHED
    elif lost or kinds()[name] == "answer" or name == "BotoCoreError":
        assert found is Fate.UNKNOWN, "whoever cannot say for sure has to look"
    else:
        assert found is Fate.REFUSED


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ClientException", 400, Fate.REFUSED),
        ("AccessDeniedException", 403, Fate.REFUSED),
        ("ExpiredTokenException", 403, Fate.REFUSED),
        ("404", 404, Fate.REFUSED),
        ("TooManyRequestsException", 429, Fate.BUSY),
        ("ThrottlingException", 400, Fate.BUSY),
        ("429", 429, Fate.BUSY),
        ("408", 408, Fate.UNKNOWN),
        ("ServerException", 500, Fate.UNKNOWN),
        ("502", 502, Fate.UNKNOWN),
        ("ServiceUnavailable", 503, Fate.UNKNOWN),
        ("504", 504, Fate.UNKNOWN),
        ("301", 301, Fate.UNKNOWN),
    ],
)
def test_answers(code: str, status: int, expected: Fate) -> None:
    assert after(client_error(code, status)) is expected


def proxy(below: Exception) -> Exception:
    from urllib3.exceptions import ProxyError

    return named("ProxyConnectionError", proxy_url="http://p", error=ProxyError("words", below))


def new_connection() -> Exception:
    from urllib3.connection import HTTPConnection
    from urllib3.exceptions import NewConnectionError

    return NewConnectionError(HTTPConnection("p"), "refused")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (named("SSLError", error="[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", **URL), "sent"),
        (named("SSLError", error="[SSL: BAD_RECORD_MAC] while it read", **URL), "unknown"),
        (proxy(new_connection()), "sent"),
        (proxy(ConnectionRefusedError()), "sent"),
        (proxy(OSError("Tunnel connection failed: 407 Proxy Authentication Required")), "sent"),
        (proxy(ConnectionResetError()), "unknown"),
        (KeyError("jobId"), "unknown"),
    ],
)
def test_connections(error: Exception, expected: str) -> None:
    assert after(error) is (Fate.UNKNOWN if expected == "unknown" else Fate.UNREACHED)


def test_what_fails_on_the_way_to_credentials_was_never_sent() -> None:
    def caller() -> Any:
        return Caller()

    with pytest.raises(BatchmlError) as told, translated("SubmitJob"), signing(caller):
        raise named("ReadTimeoutError", endpoint_url="https://sts.amazonaws.com")
    assert fate(told.value) is Fate.UNREACHED


def test_a_server_of_our_own_that_cannot_start_again_may_have_done_it() -> None:
    assert fate(LocalServerError("words")) is Fate.UNKNOWN


@pytest.mark.parametrize(
    ("endpoint", "submits", "asks"),
    [("", ("standard", 1), ("adaptive", 5)),
     ("http://127.0.0.1:1", ("standard", 5), ("standard", 5))],
)  # fmt: skip
def test_aws_gets_a_submission_once_and_slower_questions_once_it_throttles(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, submits: tuple[str, int], asks: tuple[str, int]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    session = Session(Access("us-east-1", "", endpoint, "AKIAEXAMPLE", "secret"))

    def retries(client: Any) -> tuple[str, int]:
        found = client.meta.config.retries
        return found["mode"], found["total_max_attempts"]

    assert retries(session.submitting_client()) == submits
    assert retries(session.client("batch")) == asks
    assert retries(session.client("batch", 1))[0] == "standard"
