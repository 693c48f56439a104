"""What became of a SubmitJob that failed: whether it may be sent again without looking first."""

from typing import Any

import pytest

from batchml.aws.credentials_help import AwsCaller
from batchml.aws.errors import (
    ErrorClass,
    classify_error,
    exception_kinds,
    translate_credential_errors,
    translate_errors,
)
from batchml.aws.session import Access, Session
from batchml.errors import BatchmlError, LocalServerError
from tests.aws.test_failures import all_kinds, client_error, make, named

URL = {"endpoint_url": "https://batch.us-east-1.amazonaws.com"}


def after(error: Exception) -> ErrorClass:
    """The fate of a call that botocore ended with `error`."""
    with pytest.raises(BatchmlError) as told, translate_errors("SubmitJob"):
        raise error
    return classify_error(told.value)


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: kind.__name__)
def test_only_what_is_known_not_to_have_left_counts_as_not_sent(kind: type[Exception]) -> None:
    found = after(make(kind))
    name = next(c.__name__ for c in kind.__mro__ if c.__name__ in exception_kinds())
    lost = exception_kinds()[name] == "lost"
    if kind.__name__ in ("EndpointConnectionError", "ConnectTimeoutError"):
        assert found is ErrorClass.UNREACHED
    elif lost or exception_kinds()[name] == "answer" or name == "BotoCoreError":
        assert found is ErrorClass.UNKNOWN, "whoever cannot say for sure has to look"
    else:
        assert found is ErrorClass.REFUSED


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("ClientException", 400, ErrorClass.REFUSED),
        ("AccessDeniedException", 403, ErrorClass.REFUSED),
        ("ExpiredTokenException", 403, ErrorClass.REFUSED),
        ("404", 404, ErrorClass.REFUSED),
        ("TooManyRequestsException", 429, ErrorClass.BUSY),
        ("ThrottlingException", 400, ErrorClass.BUSY),
        ("429", 429, ErrorClass.BUSY),
        ("408", 408, ErrorClass.UNKNOWN),
        ("ServerException", 500, ErrorClass.UNKNOWN),
        ("502", 502, ErrorClass.UNKNOWN),
        ("ServiceUnavailable", 503, ErrorClass.UNKNOWN),
        ("504", 504, ErrorClass.UNKNOWN),
        ("301", 301, ErrorClass.UNKNOWN),
    ],
)
def test_answers(code: str, status: int, expected: ErrorClass) -> None:
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
    assert after(error) is (ErrorClass.UNKNOWN if expected == "unknown" else ErrorClass.UNREACHED)


def test_what_fails_on_the_way_to_credentials_was_never_sent() -> None:
    def caller() -> Any:
        return AwsCaller()

    with (
        pytest.raises(BatchmlError) as told,
        translate_errors("SubmitJob"),
        translate_credential_errors(caller),
    ):
        raise named("ReadTimeoutError", endpoint_url="https://sts.amazonaws.com")
    assert classify_error(told.value) is ErrorClass.UNREACHED


def test_a_server_of_our_own_that_cannot_start_again_may_have_done_it() -> None:
    assert classify_error(LocalServerError("words")) is ErrorClass.UNKNOWN


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
