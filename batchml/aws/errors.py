"""botocore's exceptions -> ours, at the border.

The words are in `advice` and `denials`, imported when something has failed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from batchml.clock import SystemClock
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable

if TYPE_CHECKING:
    from batchml.aws.credentials_help import Caller

# What every exception of botocore is about, by name, so that any version of it will do. A class
# that is not here is judged by the nearest class above it that is; ADVICE has those about
# credentials. The test of this table fails for a class that nobody thought about.
_UNREACHABLE = ("EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError")
# Of what failed below a ProxyConnectionError: the proxy was not there, or let nobody through.
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
SIGNING = "Credentials"  # the operation, where credentials fail before there is one

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
_TOO_MANY = 429  # the HTTP status of the same
_REQUEST_TIMEOUT = 408


class Fate(Enum):
    """What became of a call that failed: whether it may be sent again."""

    REFUSED = "refused"  # not carried out, and it would be refused again
    BUSY = "busy"  # not carried out, for want of time: it was throttled
    UNREACHED = "unreached"  # not carried out: there was nobody to send it to
    UNKNOWN = "unknown"  # it may have been carried out


class NotSent(ServiceUnreachable):
    """What failed was the way to credentials: the call itself was never sent."""


def fate(error: BatchmlError) -> Fate:
    """What became of a call to AWS that raised `error`, which `translated` made.

    Whatever is not known to be safe is `UNKNOWN`: an answer that never came, was cut off, was not
    the service's, or was a 5xx, behind which the call may have been carried out.
    """
    cause = error.__cause__
    if isinstance(error, NotSent):
        return Fate.UNREACHED
    if isinstance(error, AccessError):
        return Fate.REFUSED
    if isinstance(error, ServiceError):
        if error.status == _TOO_MANY:
            return Fate.BUSY
        if not error.status:
            return _unsent_fate(cause)
        is_no = 400 <= error.status < 500 and error.status != _REQUEST_TIMEOUT
        return Fate.REFUSED if is_no else Fate.UNKNOWN
    if isinstance(error, ServiceUnreachable) and isinstance(cause, Exception):
        return _lost_fate(cause)
    return Fate.UNKNOWN


def _unsent_fate(cause: BaseException | None) -> Fate:
    """The fate of a call that the SDK itself gave up; what this version does not know is unsure."""
    name, kind = (_kind(cause) if isinstance(cause, Exception) else None) or ("", "")
    return Fate.REFUSED if kind in ("request", "sdk") and name != "BotoCoreError" else Fate.UNKNOWN


def _lost_fate(cause: Exception) -> Fate:
    """The fate of a call that got no answer that could be used."""
    name, kind = _kind(cause) or ("", "")
    if kind == "answer":  # of those, only being too busy is told as ServiceUnreachable
        return Fate.BUSY
    if name == "ProxyConnectionError":
        # Of an old urllib3 a connection that broke later, through a proxy, is one too.
        below = getattr(cause, "kwargs", {}).get("error")
        below = getattr(below, "original_error", below)
        tunnel = "Tunnel connection failed" in str(below)
        named = type(below).__name__ in _NOT_CONNECTED
        return Fate.UNREACHED if tunnel or named else Fate.UNKNOWN
    if name == "SSLError" and "CERTIFICATE_VERIFY_FAILED" in str(cause):
        return Fate.UNREACHED  # the handshake comes before the call
    return Fate.UNREACHED if name in _UNREACHABLE else Fate.UNKNOWN


@cache
def kinds() -> Mapping[str, str]:
    """Name of an exception -> credentials, settings, lost, request, sdk, or answer."""
    from batchml.aws.credentials_help import ADVICE

    return {
        "ClientError": "answer",
        "EventStreamError": "answer",
        **dict.fromkeys(ADVICE, "credentials"),
        **dict.fromkeys(_LOST.split(), "lost"),
        **dict.fromkeys(_REQUEST.split(), "request"),
        **dict.fromkeys(_SETTINGS.split(), "settings"),
        **dict.fromkeys(_SDK.split(), "sdk"),
    }


@contextmanager
def translated(operation: str) -> Iterator[None]:
    """Turn what botocore raises inside into errors of ours; take answers apart inside as well.

    Raises AccessError, ServiceError or ServiceUnreachable.
    """
    try:
        yield
    except BatchmlError:
        raise
    except KeyError as error:  # a member that is always there
        raise ServiceUnreachable(f"{operation}: the answer was cut off: no {error}") from error
    except Exception as error:
        if _kind(error) is None:
            raise
        raise translate(operation, error) from error


@contextmanager
def signing(caller: Callable[[], "Caller"]) -> Iterator[None]:
    """What fails inside fails for credentials: whatever it raises is told with the way to mend it.

    `caller` is asked when something has failed. Raises AccessError or ServiceUnreachable.
    """
    try:
        yield
    except BatchmlError:
        raise
    except Exception as error:
        who = caller()
        if _kind(error) is None:  # a credential_process that is not there, a cache that is no JSON
            from batchml.aws.credentials_help import unreadable

            raise AccessError(unreadable(who, str(error)), code=type(error).__name__) from error
        told = translate(getattr(error, "operation_name", SIGNING), error, who)
        if isinstance(told, ServiceUnreachable):
            raise NotSent(str(told)) from error
        raise told from error


def translate(
    operation: str, error: Exception, caller: "Caller | None" = None, now: float | None = None
) -> BatchmlError:
    """The error of ours that says what a botocore exception means to a user.

    `now`, in seconds since 1970, is compared with the server's time where a signature was refused.
    """
    name, kind = _kind(error) or ("", "sdk")
    if kind == "answer":
        return _refused(operation, getattr(error, "response", {}), caller, now)
    if kind == "lost":
        return ServiceUnreachable(_lost(operation, name, error))
    if kind == "request":
        return ServiceError(operation, name.removesuffix("Error"), str(error), 0)
    if kind == "settings":
        text = f"{operation}: the AWS settings are wrong ({name}): {error} They are in "
        return AccessError(f"{text}~/.aws/config and AWS_... variables.", code=name)
    if kind == "credentials":
        from batchml.aws.credentials_help import ADVICE, Caller

        details = getattr(error, "kwargs", {})
        told = ADVICE[name](caller or Caller(), str(error), details)
        where = "" if operation == SIGNING else f"{operation}: "
        return AccessError(f"{where}{told}", code=name)
    text = f"the AWS SDK failed ({type(error).__name__}): {error} Its version may be too old: "
    return ServiceError(operation, name, f"{text}pip install -U boto3", 0)


def no_credentials(caller: "Caller") -> AccessError:
    """For a chain of providers that ended without any."""
    from batchml.aws.credentials_help import ADVICE

    return AccessError(ADVICE["NoCredentialsError"](caller, "", {}), code="NoCredentialsError")


def _kind(error: Exception) -> tuple[str, str] | None:
    """The nearest class of `kinds` and its kind; None for what is none of botocore's."""
    for parent in type(error).__mro__:
        if parent.__module__.startswith("botocore.") and parent.__name__ in kinds():
            return parent.__name__, kinds()[parent.__name__]
    return None


def _lost(operation: str, name: str, error: Exception) -> str:
    if name == "ResponseParserError":
        return f"{operation}: what answers is not the service: {error}"
    if name == "SSLError":
        return (
            f"{operation}: the connection is not trusted: {error} Behind a company's proxy, set "
            "AWS_CA_BUNDLE to the file of its certificates."
        )
    if name in _UNREACHABLE:
        return (
            f"{operation}: no answer from the service: {error}\n  In the way may be the network, a "
            "proxy (HTTPS_PROXY), or a region that does not exist."
        )
    return f"{operation}: no answer from the service: {error}"


def _refused(
    operation: str, response: Mapping[str, Any], caller: "Caller | None", now: float | None
) -> BatchmlError:
    from batchml.aws import credentials_help as advice

    found, about = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, message = str(found.get("Code", "Unknown")), str(found.get("Message", ""))
    if code in _TOO_MANY_CODES:  # nothing was done, and it passes: whoever follows goes on
        return ServiceUnreachable(f"{operation}: the service is too busy ({code}): {message}")
    if code not in ACCESS_CODES:
        return ServiceError(operation, code, message, int(about.get("HTTPStatusCode", 0)))
    date = str(about.get("HTTPHeaders", {}).get("date", ""))
    who = caller or about.get("Caller") or advice.Caller()
    ahead = advice.skew(date, message, SystemClock().now() if now is None else now)
    told = _told(operation, code, message, who, ahead)
    return AccessError(told, code=code)


def _told(operation: str, code: str, message: str, caller: "Caller", ahead: float | None) -> str:
    from batchml.aws import credentials_help as advice

    if code in _DENIED:
        return _denied(operation, code, message, caller)
    said = f"{operation} is not allowed ({code})"
    if code not in _NOT_SUBSCRIBED and ahead is not None and abs(ahead) > advice.MAX_SKEW:
        return f"{said}: {advice.clock_is_off(ahead)}"
    if code in _EXPIRED or code == "RequestExpired":
        return f"{said}: {advice.expired(caller)}"
    if code in _WRONG_KEYS:
        return f"{said}: {advice.wrong_keys(caller)}"
    if code in _SIGNATURE:
        return f"{said}: {advice.wrong_signature(caller, message)}"
    return f"{said}: {advice.not_subscribed(message)}"


def _denied(operation: str, code: str, message: str, caller: "Caller") -> str:
    from batchml.aws.credentials_help import explain_denial, no_such_role, parse_denial

    denial = parse_denial(message)
    if denial is not None:
        return f"{operation}: {explain_denial(operation, denial)}"
    if operation == "GetRoleCredentials":
        return f"{operation}: {no_such_role(caller, message)}"
    return (
        f"{operation} is not allowed ({code}): {message}\n"
        "  batchml doctor   # says which permission is missing, as a policy statement"
    )
