"""Every exception that botocore can raise becomes one of ours, at the border."""

from typing import Any

import pytest

from batchml.aws.failures import translate, translated
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable


def client_error(code: str, status: int = 400) -> Exception:
    from botocore.exceptions import ClientError

    response: dict[str, Any] = {
        "Error": {"Code": code, "Message": "words"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error: Exception = ClientError(response, "SubmitJob")
    return error


def all_kinds() -> list[type[Exception]]:
    from botocore import exceptions

    found = [kind for kind in vars(exceptions).values() if isinstance(kind, type)]
    return [
        kind
        for kind in found
        if issubclass(kind, exceptions.BotoCoreError) or kind is exceptions.ClientError
    ]


def make(kind: type[Exception]) -> Exception:
    from botocore.exceptions import ClientError

    if issubclass(kind, ClientError):
        return client_error("SomethingException")
    error = kind.__new__(kind)
    Exception.__init__(error, "words")
    return error


@pytest.mark.parametrize("code", ["TooManyRequestsException", "ThrottlingException"])
def test_a_service_that_is_too_busy_is_one_to_ask_again_later(code: str) -> None:
    error = translate("DescribeJobs", client_error(code, 429))
    assert isinstance(error, ServiceUnreachable)
    assert code in str(error)


@pytest.mark.parametrize("kind", all_kinds(), ids=lambda kind: str(kind.__name__))
def test_no_exception_of_the_sdk_gets_through(kind: type[Exception]) -> None:
    with pytest.raises(BatchmlError, match="SubmitJob"), translated("SubmitJob"):
        raise make(kind)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NoCredentialsError", AccessError),
        ("PartialCredentialsError", AccessError),
        ("ProfileNotFound", AccessError),
        ("TokenRetrievalError", AccessError),
        ("EndpointConnectionError", ServiceUnreachable),
        ("ReadTimeoutError", ServiceUnreachable),
        ("ConnectionClosedError", ServiceUnreachable),
    ],
)
def test_kinds_tell_credentials_from_lost_contact(name: str, expected: type[Exception]) -> None:
    from botocore import exceptions

    assert type(translate("SubmitJob", make(getattr(exceptions, name)))) is expected


def test_codes_of_the_service_tell_a_refusal_from_missing_permission() -> None:
    refused = translate("SubmitJob", client_error("ClientException"))
    assert isinstance(refused, ServiceError)
    assert (refused.code, refused.status, refused.exit_code) == ("ClientException", 400, 1)
    denied = translate("SubmitJob", client_error("AccessDeniedException", 403))
    assert isinstance(denied, AccessError)
    assert denied.exit_code == 77
