"""botocore's exceptions -> ours, at the border."""

from collections.abc import Iterator
from contextlib import contextmanager

from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable

_ACCESS_CODES = (
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "UnrecognizedClientException",
)
_TOO_MANY_CODES = ("RequestLimitExceeded", "ThrottlingException", "TooManyRequestsException")


@contextmanager
def translated(operation: str) -> Iterator[None]:
    """Turn what botocore raises inside into errors of ours; take answers apart inside as well.

    Raises AccessError, ServiceError or ServiceUnreachable.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        raise translate(operation, error) from error
    except KeyError as error:  # a member that is always there
        raise ServiceUnreachable(f"{operation}: the answer was cut off: no {error}") from error


def translate(operation: str, error: Exception) -> BatchmlError:
    """The error of ours that says what a botocore exception means to a user."""
    from botocore import exceptions as botocore
    from botocore.parsers import ResponseParserError

    if isinstance(error, botocore.ClientError):
        found = error.response.get("Error", {})
        code, message = str(found.get("Code", "Unknown")), str(found.get("Message", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in _ACCESS_CODES:
            return AccessError(f"{operation} is not allowed ({code}): {message}")
        if code in _TOO_MANY_CODES:  # nothing was done, and it passes: whoever follows goes on
            return ServiceUnreachable(f"{operation}: the service is too busy ({code}): {message}")
        return ServiceError(operation, code, message, status)
    if isinstance(error, botocore.ParamValidationError):
        return ServiceError(operation, "ParamValidation", str(error), 0)
    lost = (botocore.HTTPClientError, botocore.ConnectionError, botocore.IncompleteReadError)
    if isinstance(error, lost):
        return ServiceUnreachable(f"{operation}: no answer from the service: {error}")
    if isinstance(error, ResponseParserError):
        return ServiceUnreachable(f"{operation}: what answers is not the service: {error}")
    # What is left is about credentials and configuration: missing, partial, expired, a profile
    # that does not exist, a region that is not set.
    return AccessError(f"{operation}: {error}")
