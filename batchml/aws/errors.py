"""Call AWS, and turn the exceptions of botocore into batchml's own (batchml/errors.py).

`call` and `read_pages` call an operation by its name in AWS. `translate_errors` is around every
call. `classify_error` says whether a failed call may be sent again. The texts about credentials are
in `credentials_help`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any

from batchml.aws.credentials_help import (
    CREDENTIAL_HELP,
    MAX_SKEW,
    AwsCaller,
    clock_skew,
    explain_clock_skew,
    explain_denial,
    explain_expired,
    explain_missing_role,
    explain_no_subscription,
    explain_unreadable,
    explain_wrong_keys,
    explain_wrong_signature,
    parse_denial,
)
from batchml.clock import SystemClock
from batchml.errors import AccessError, BatchmlError, CallNotSent, ServiceError, ServiceUnreachable

# The exceptions of botocore by subject. They are listed by name, because not every version of
# botocore has all of them. A class that is not listed counts as its nearest listed base class.
# CREDENTIAL_HELP lists the exceptions about credentials. A test fails for a class of botocore that
# is in no list.
_UNREACHABLE = ("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError")
# If one of these is the cause of a ProxyConnectionError, the call never reached AWS.
_NOT_CONNECTED = (
    "NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ConnectionRefusedError",
    "gaierror",
)  # fmt: skip
_LOST = """ConnectionError EndpointConnectionError SSLError ConnectionClosedError ReadTimeoutError
    ConnectTimeoutError ProxyConnectionError ResponseStreamingError HTTPClientError
    IncompleteReadError ResponseParserError CapacityNotAvailableError
    ChecksumError FlexibleChecksumError AwsChunkedWrapperError"""
_REQUEST = """ParamValidationError ValidationError MissingParametersError UnknownKeyError
    RangeError UnknownParameterError AliasConflictParameterError UnsupportedS3ArnError
    UnsupportedS3ControlArnError UnsupportedOutpostResourceError InvalidDNSNameError
    InvalidHostLabelError UnsupportedS3AccesspointConfigurationError InvalidExpressionError
    UnseekableStreamError PaginationError OperationNotPageableError WaiterError"""
_SETTINGS = """EndpointVariantError UnknownFIPSEndpointError UnknownEndpointError
    BaseEndpointResolverError ServiceNotInRegionError EndpointProviderError EndpointResolutionError
    UnknownEndpointResolutionBuiltInName InvalidEndpointConfigurationError InvalidProxiesConfigError
    InvalidS3AddressingStyleError UnsupportedS3ConfigurationError
    UnsupportedS3ControlConfigurationError InvalidEndpointDiscoveryConfigurationError
    InvalidRetryConfigurationError InvalidMaxRetryAttemptsError InvalidRetryModeError
    InvalidS3UsEast1RegionalEndpointConfigError InvalidSTSRegionalEndpointsConfigError
    InvalidDefaultsMode InvalidChecksumConfigError UnknownSignatureVersionError
    UnsupportedSignatureVersionError"""
_SDK = """BotoCoreError DataNotFoundError UnknownServiceError ApiVersionNotFoundError
    UnknownServiceStyle WaiterConfigError UnknownClientMethodError StubResponseError
    StubAssertionError UnStubbedResponseError MD5UnavailableError UndefinedModelAttributeError
    MissingServiceIdError UnsupportedServiceProtocolsError"""
NO_OPERATION = "Credentials"  # instead of an operation, if credentials fail before any call

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
_WRONG_KEYS = (
    "InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "InvalidToken",
    "AuthFailure", "NotSignedUp",
)  # fmt: skip
_SIGNATURE = (
    "SignatureDoesNotMatch", "InvalidSignatureException", "InvalidSignature", "RequestExpired",
    "RequestTimeTooSkewed", "RequestInTheFuture", "IncompleteSignature",
    "IncompleteSignatureException", "MissingAuthenticationToken",
    "MissingAuthenticationTokenException",
)  # fmt: skip
_DENIED = (
    "AccessDenied", "AccessDeniedException", "UnauthorizedOperation",
    "Client.UnauthorizedOperation", "NotAuthorized", "AuthorizationError",
    "UnauthorizedException", "ForbiddenException",
)  # fmt: skip
_NOT_SUBSCRIBED = ("OptInRequired", "SubscriptionRequiredException")
ACCESS_CODES = frozenset((*_EXPIRED, *_WRONG_KEYS, *_SIGNATURE, *_DENIED, *_NOT_SUBSCRIBED))
_TOO_MANY_CODES = (
    "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException",
    "SlowDown", "PriorRequestNotComplete",
)  # fmt: skip
_TOO_MANY = 429  # the HTTP status of a throttled call
_REQUEST_TIMEOUT = 408


class ErrorClass(Enum):
    """Whether a call that failed was carried out, and whether it may be sent again."""

    REFUSED = "refused"  # not carried out, and it would be refused again
    BUSY = "busy"  # not carried out, because it was throttled
    UNREACHED = "unreached"  # not carried out, because it did not reach the service
    UNKNOWN = "unknown"  # it may have been carried out


def classify_error(error: BatchmlError) -> ErrorClass:
    """Classify an error that `translate_errors` raised.

    The call may have been carried out (`UNKNOWN`) if the answer never came, was cut off, came from
    another program, or had a status of 500 or more.
    """
    cause = error.__cause__
    if isinstance(error, CallNotSent):
        return ErrorClass.UNREACHED
    if isinstance(error, AccessError):
        return ErrorClass.REFUSED
    if isinstance(error, ServiceError):
        if error.status == _TOO_MANY:
            return ErrorClass.BUSY
        if not error.status:
            return _classify_unsent(cause)
        is_refusal = 400 <= error.status < 500 and error.status != _REQUEST_TIMEOUT
        return ErrorClass.REFUSED if is_refusal else ErrorClass.UNKNOWN
    if isinstance(error, ServiceUnreachable) and isinstance(cause, Exception):
        return _classify_lost(cause)
    return ErrorClass.UNKNOWN


def _classify_unsent(cause: BaseException | None) -> ErrorClass:
    """Classify a call that the SDK gave up without an answer. Unlisted exceptions are UNKNOWN."""
    name, kind = (_kind(cause) if isinstance(cause, Exception) else None) or ("", "")
    is_refusal = kind in ("request", "sdk") and name != "BotoCoreError"
    return ErrorClass.REFUSED if is_refusal else ErrorClass.UNKNOWN


def _classify_lost(cause: Exception) -> ErrorClass:
    """Classify a call without a usable answer."""
    name, kind = _kind(cause) or ("", "")
    if kind == "answer":  # the only answer that becomes ServiceUnreachable is a throttled call
        return ErrorClass.BUSY
    if name == "ProxyConnectionError":
        # An old urllib3 raises it also for a connection through a proxy that breaks later.
        inner = getattr(cause, "kwargs", {}).get("error")
        inner = getattr(inner, "original_error", inner)
        tunnel = "Tunnel connection failed" in str(inner)
        named = type(inner).__name__ in _NOT_CONNECTED
        return ErrorClass.UNREACHED if tunnel or named else ErrorClass.UNKNOWN
    if name == "SSLError" and "CERTIFICATE_VERIFY_FAILED" in str(cause):
        return ErrorClass.UNREACHED  # the handshake comes before the call
    return ErrorClass.UNREACHED if name in _UNREACHABLE else ErrorClass.UNKNOWN


@cache
def exception_kinds() -> Mapping[str, str]:
    """Map the name of an exception to credentials, settings, lost, request, sdk or answer."""
    return {
        "ClientError": "answer",
        "EventStreamError": "answer",
        **dict.fromkeys(CREDENTIAL_HELP, "credentials"),
        **dict.fromkeys(_LOST.split(), "lost"),
        **dict.fromkeys(_REQUEST.split(), "request"),
        **dict.fromkeys(_SETTINGS.split(), "settings"),
        **dict.fromkeys(_SDK.split(), "sdk"),
    }


@contextmanager
def translate_errors(operation: str) -> Iterator[None]:
    """Turn botocore's exceptions into AccessError, ServiceError or ServiceUnreachable.

    Read the answer inside as well: a missing member means that the answer was cut off.
    """
    try:
        yield
    except BatchmlError:
        raise
    except KeyError as error:
        raise ServiceUnreachable(f"{operation}: the answer was cut off: no {error}") from error
    except Exception as error:
        if _kind(error) is None:
            raise
        raise translate(operation, error) from error


def call(client: Any, operation: str, /, **request: Any) -> dict[str, Any]:
    """Call an operation such as "DescribeJobs" or "ecs:DescribeTasks", and return its answer.

    Raises AccessError, ServiceError or ServiceUnreachable; the latter also when a member of the
    answer is read that is missing.
    """
    with translate_errors(operation):
        answer: dict[str, Any] = getattr(client, _method_name(operation))(**request)
    return _Answer(operation, answer)


def read_pages(client: Any, operation: str, /, **request: Any) -> Iterator[dict[str, Any]]:
    """Yield the pages of an operation's answer. It raises what `call` does."""
    with translate_errors(operation):
        for page in client.get_paginator(_method_name(operation)).paginate(**request):
            yield _Answer(operation, page)


def read_token_pages(client: Any, operation: str, /, **request: Any) -> Iterator[dict[str, Any]]:
    """Yield the pages of an operation for which botocore has no paginator."""
    while True:
        page = call(client, operation, **request)
        yield page
        if not page.get("NextToken"):
            return
        request["NextToken"] = page["NextToken"]


def read_entries(client: Any, operation: str, member: str, /, **request: Any) -> Iterator[Any]:
    """Yield the entries of the list `member` of all pages. It raises what `call` does."""
    for page in read_pages(client, operation, **request):
        yield from page[member]


class _Answer(dict[str, Any]):
    """A structure in an answer of AWS. A missing member means that the answer was cut off."""

    def __init__(self, operation: str, structure: Mapping[str, Any]) -> None:
        super().__init__(structure)
        self._operation = operation

    def __getitem__(self, member: str) -> Any:
        value = super().__getitem__(member)
        return self._with_answers(value) if isinstance(value, (dict, list)) else value

    def __missing__(self, member: str) -> Any:
        raise ServiceUnreachable(f"{self._operation}: the answer was cut off: no {member!r}")

    def get(self, member: str, default: Any = None, /) -> Any:
        value = super().get(member, default)
        return self._with_answers(value) if isinstance(value, (dict, list)) else value

    def _with_answers(self, value: Any) -> Any:
        """Structures become answers when they are read: most are never read."""
        if isinstance(value, dict):
            return _Answer(self._operation, value)
        if isinstance(value, list):
            return [self._with_answers(entry) for entry in value]
        return value


@cache
def _method_name(operation: str) -> str:
    """The SDK's name of an operation: `describe_jobs` for `batch:DescribeJobs`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", operation.rpartition(":")[2]).lower()


@contextmanager
def translate_credential_errors(caller: Callable[[], AwsCaller]) -> Iterator[None]:
    """Turn exceptions of code that only reads credentials into AccessError or CallNotSent.

    The message says how to mend the credentials. `caller` is called only after a failure.
    """
    try:
        yield
    except BatchmlError:
        raise
    except Exception as error:
        who = caller()
        if _kind(error) is None:  # such as a missing credential_process or a cache that is no JSON
            message = explain_unreadable(who, str(error))
            raise AccessError(message, code=type(error).__name__) from error
        translated = translate(getattr(error, "operation_name", NO_OPERATION), error, who)
        if isinstance(translated, ServiceUnreachable):
            raise CallNotSent(str(translated)) from error
        raise translated from error


def translate(
    operation: str, error: Exception, caller: AwsCaller | None = None, now: float | None = None
) -> BatchmlError:
    """Return the error that explains a botocore exception to the user.

    `now`, in seconds since the epoch, is compared with the server's time if AWS refused the
    signature.
    """
    name, kind = _kind(error) or ("", "sdk")
    if kind == "answer":
        return _translate_refusal(operation, getattr(error, "response", {}), caller, now)
    if kind == "lost":
        return ServiceUnreachable(_describe_lost(operation, name, error))
    if kind == "request":
        return ServiceError(operation, name.removesuffix("Error"), str(error), 0)
    if kind == "settings":
        text = f"{operation}: the AWS settings are wrong ({name}): {error} They are in "
        return AccessError(f"{text}~/.aws/config and AWS_... variables.", code=name)
    if kind == "credentials":
        details = getattr(error, "kwargs", {})
        text = CREDENTIAL_HELP[name](caller or AwsCaller(), str(error), details)
        where = "" if operation == NO_OPERATION else f"{operation}: "
        return AccessError(f"{where}{text}", code=name)
    text = f"the AWS SDK failed ({type(error).__name__}): {error} It may be too old: "
    return ServiceError(operation, name, f"{text}pip install -U boto3", 0)


def no_credentials(caller: AwsCaller) -> AccessError:
    """The error if no credential provider has credentials."""
    return AccessError(
        CREDENTIAL_HELP["NoCredentialsError"](caller, "", {}), code="NoCredentialsError"
    )


def _kind(error: Exception) -> tuple[str, str] | None:
    """The nearest listed base class and its kind; None for an exception that is not botocore's."""
    for parent in type(error).__mro__:
        if parent.__module__.startswith("botocore.") and parent.__name__ in exception_kinds():
            return parent.__name__, exception_kinds()[parent.__name__]
    return None


def _describe_lost(operation: str, name: str, error: Exception) -> str:
    if name == "ResponseParserError":
        return f"{operation}: the answer did not come from AWS: {error}"
    if name == "SSLError":
        return (
            f"{operation}: the server's certificate is not trusted: {error} Behind a company's "
            "proxy, set AWS_CA_BUNDLE to the file with its certificates."
        )
    if name in _UNREACHABLE:
        return (
            f"{operation}: no answer from the service: {error}\n  The cause may be the network, a "
            "proxy (HTTPS_PROXY), or a region that does not exist."
        )
    return f"{operation}: no answer from the service: {error}"


def _translate_refusal(
    operation: str, response: Mapping[str, Any], caller: AwsCaller | None, now: float | None
) -> BatchmlError:
    found, about = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, message = str(found.get("Code", "Unknown")), str(found.get("Message", ""))
    if code in _TOO_MANY_CODES:  # nothing was done, and a later call may succeed
        return ServiceUnreachable(f"{operation}: the service is too busy ({code}): {message}")
    if code not in ACCESS_CODES:
        return ServiceError(operation, code, message, int(about.get("HTTPStatusCode", 0)))
    date = str(about.get("HTTPHeaders", {}).get("date", ""))
    who = caller or about.get("Caller") or AwsCaller()
    ahead = clock_skew(date, message, SystemClock().now() if now is None else now)
    return AccessError(_explain_access(operation, code, message, who, ahead), code=code)


def _explain_access(
    operation: str, code: str, message: str, caller: AwsCaller, ahead: float | None
) -> str:
    if code in _DENIED:
        return _explain_denied(operation, code, message, caller)
    start = f"{operation} is not allowed ({code})"
    if code not in _NOT_SUBSCRIBED and ahead is not None and abs(ahead) > MAX_SKEW:
        return f"{start}: {explain_clock_skew(ahead)}"
    if code in _EXPIRED or code == "RequestExpired":
        return f"{start}: {explain_expired(caller)}"
    if code in _WRONG_KEYS:
        return f"{start}: {explain_wrong_keys(caller)}"
    if code in _SIGNATURE:
        return f"{start}: {explain_wrong_signature(caller, message)}"
    return f"{start}: {explain_no_subscription(message)}"


def _explain_denied(operation: str, code: str, message: str, caller: AwsCaller) -> str:
    denial = parse_denial(message)
    if denial is not None:
        return f"{operation}: {explain_denial(operation, denial)}"
    if operation == "GetRoleCredentials":
        return f"{operation}: {explain_missing_role(caller, message)}"
    return (
        f"{operation} is not allowed ({code}): {message}\n"
        "  batchml doctor   # prints the missing permission as a policy statement"
    )
