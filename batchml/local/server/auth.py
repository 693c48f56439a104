"""Authentication: signatures (Signature Version 4), keys of jobs, and protection against replays.

Every request must be signed. Loopback alone protects nothing: any program of any user of this
machine, and any web page in a browser, can reach a local port, and this server runs commands.
Source of the algorithm: AWS General Reference, "Signature Version 4 signing process"; of the rules
beyond it: docs/security.md.
"""

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from collections.abc import Collection, Mapping, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote

from msgspec import Struct

from batchml.local.batch.state import ACCOUNT, REGION
from batchml.local.home import AccessKeys
from batchml.local.server.protocol import ApiError, HttpRequest

MAX_SKEW = 300  # seconds between the signer's clock and ours

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/, ]+)/(\d{8})/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})"
)


class SignedCaller(Struct, frozen=True):
    """The signer of a request, and the service and region that it was signed for."""

    access_key_id: str
    region: str
    service: str
    signature: str
    signed_at: float


def claimed_service(request: HttpRequest) -> str:
    """The service that a request claims, which determines the form of the answer; "" without a
    claim.
    """
    match = _AUTHORIZATION.fullmatch(request.header("authorization"))
    return match[4] if match else ""


def claimed_key(request: HttpRequest) -> str:
    """The access key id that a request claims; "" without a claim."""
    match = _AUTHORIZATION.fullmatch(request.header("authorization"))
    return match[1] if match else ""


def verify(request: HttpRequest, keys: AccessKeys, now: float) -> SignedCaller:
    """Return the signer of a correctly signed request; `now` in seconds since the epoch.

    Raises ApiError (403, in AWS's shape) for any other request. A wrong key and a wrong signature
    take the same path and get the same answer.
    """
    names = [name for name, _ in request.headers]
    match = _AUTHORIZATION.fullmatch(request.header("authorization"))
    if not match:
        raise ApiError(
            "MissingAuthenticationTokenException",
            "Missing Authentication Token. Requests to the embedded AWS Batch are signed "
            "(Signature Version 4); `batchml local env` prints the keys.",
            403,
        )
    key_id, date, region, service, signed_headers, signature = match.groups()
    signed_names = signed_headers.split(";")
    if len(signed_names) > len(names):
        raise ApiError("InvalidSignatureException", "A signed header is missing.", 403)
    if any(names.count(name) > 1 for name in ("authorization", *signed_names)):
        raise ApiError("InvalidSignatureException", "A signed header was sent twice.", 403)
    # x-amz-target names the operation: if it were not signed, another program could change it.
    to_sign = {"host", "x-amz-date", *(name for name in names if name.startswith("x-amz-"))}
    if not to_sign <= set(signed_names):
        raise ApiError(
            "InvalidSignatureException", "host and every x-amz-* header must be signed.", 403
        )
    stamp = request.header("x-amz-date")
    signed_at = _check_time(stamp, date, now)
    body_hash = hashlib.sha256(request.body).hexdigest()
    if request.header("x-amz-content-sha256") not in ("", body_hash):
        raise ApiError("InvalidSignatureException", "The body does not match its hash.", 403)
    expected = _signature(
        request, body_hash, signed_names, _signing_key(keys, date, region, service),
        stamp, f"{date}/{region}/{service}/aws4_request",
    )  # fmt: skip
    right_key = hmac.compare_digest(key_id.encode(), keys.access_key_id.encode())
    if not (hmac.compare_digest(expected, signature) and right_key):
        raise ApiError(
            "InvalidSignatureException",
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS access key and signing method; `batchml local env` prints the keys.",
            403,
        )
    return SignedCaller(key_id, region, service, signature, signed_at)


def _check_time(stamp: str, date: str, now: float) -> float:
    try:
        read = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise ApiError("InvalidSignatureException", "x-amz-date is not a date.", 403) from None
    skew = now - read.timestamp()
    if abs(skew) > MAX_SKEW or not stamp.startswith(date):
        raise ApiError(
            "InvalidSignatureException",
            f"Signature expired: {stamp} is {abs(skew):.0f} seconds from the server's clock.",
            403,
        )
    return read.timestamp()


def _signature(
    request: HttpRequest, body_hash: str, signed: list[str], key: bytes, stamp: str, scope: str
) -> str:
    headers = "".join(f"{name}:{_fold_spaces(request.header(name))}\n" for name in signed)
    canonical = "\n".join(
        (
            request.method,
            # Services other than S3 escape the escaped path once more.
            quote(_normalize_path(request.path), safe="/~"),
            _sort_query(request.query),
            headers,
            ";".join(signed),
            body_hash,
        )
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _normalize_path(path: str) -> str:
    """The path without empty and dot segments (RFC 3986, 5.2.4), as signers normalize it."""
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in ("", "."):
            kept.append(part)
    trailing_slash = "/" if path.endswith("/") and kept else ""
    return f"/{'/'.join(kept)}{trailing_slash}"


def _sort_query(query: str) -> str:
    """Sort by name, then by value; a name alone has an empty value."""
    if not query:
        return ""
    pairs = sorted(part.partition("=")[::2] for part in query.split("&"))
    return "&".join(f"{name}={value}" for name, value in pairs)


def _fold_spaces(value: str) -> str:
    return " ".join(value.split())


@lru_cache(maxsize=64)
def _signing_key(keys: AccessKeys, date: str, region: str, service: str) -> bytes:
    key = b"AWS4" + keys.secret_access_key.encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


# --- Keys of jobs ---------------------------------------------------------------------------------
# The keys of an attempt are derived from the server's, so they need not be stored. They are valid
# while the attempt lives (docs/decisions/013-job-credentials.md).

ROLE = "batchml-job"  # the role of a job, as STS reports it

_HOST = "127.0.0.1"
_PREFIX = "BMLJOB"
_OURS = (_PREFIX, "BMLLOCAL")

# The services of the server. The plain AWS_ENDPOINT_URL is not among them, so that S3 clients of a
# job still call AWS's S3.
ENDPOINTS = (
    "AWS_ENDPOINT_URL_BATCH", "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", "AWS_ENDPOINT_URL_ECS",
    "AWS_ENDPOINT_URL_STS",
)  # fmt: skip
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

# A job that sets one of these has credentials, and the server's would be used instead of them.
_CREDENTIALS = {
    *_KEYS, "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE",
    "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}  # fmt: skip

# Operations that change where and how jobs run are allowed to the user, not to a job.
_REFUSED_TO_JOBS = ("Create", "Update", "Delete")


def job_keys(server: AccessKeys, task_id: str) -> AccessKeys:
    """The keys of one attempt."""
    secret = server.secret_access_key.encode()
    digest = hmac.digest(secret, f"batchml job credentials\n{task_id}".encode(), "sha256")
    return AccessKeys(_PREFIX + task_id.upper(), urlsafe_b64encode(digest).decode().rstrip("="))


def task_of(access_key_id: str) -> str:
    """The task id of an attempt's key; "" for the server's own key and any other."""
    task_id = access_key_id.removeprefix(_PREFIX)
    return task_id.lower() if task_id != access_key_id else ""


def access_variables(
    endpoint: str,
    keys: AccessKeys,
    set_by_job: Collection[str],
    *,
    has_role: bool,
    has_user_credentials: bool,
) -> dict[str, str]:
    """The variables by which an attempt reaches the server. `set_by_job` are names that the job
    sets itself.

    `has_user_credentials`: programs find credentials of the user in files, which these variables
    would hide. Only a job with a role gets the variables then, as in AWS.
    """
    variables = {
        "BATCHML_ENDPOINT_URL": endpoint,
        "BATCHML_ACCESS_KEY_ID": keys.access_key_id,
        "BATCHML_SECRET_ACCESS_KEY": keys.secret_access_key,
    }
    if not _CREDENTIALS.isdisjoint(set_by_job) or (has_user_credentials and not has_role):
        return variables
    variables |= dict.fromkeys(ENDPOINTS, endpoint)
    variables |= {_KEYS[0]: keys.access_key_id, _KEYS[1]: keys.secret_access_key}
    if set(_REGIONS).isdisjoint(set_by_job):
        variables |= dict.fromkeys(_REGIONS, REGION)
    return variables


def identity(access_key_id: str, user: str) -> dict[str, str]:
    """The caller's identity, as STS returns it."""
    task_id = task_of(access_key_id)
    if not task_id:
        arn = f"arn:aws:iam::{ACCOUNT}:user/{user}"
        return {"Arn": arn, "UserId": access_key_id, "Account": ACCOUNT}
    arn = f"arn:aws:sts::{ACCOUNT}:assumed-role/{ROLE}/{task_id}"
    return {"Arn": arn, "UserId": f"{access_key_id}:{task_id}", "Account": ACCOUNT}


def check_permitted(access_key_id: str, service: str, operation: str) -> None:
    """Refuse operations that a job's keys do not permit. Raises ApiError."""
    if task_of(access_key_id) and operation.startswith(_REFUSED_TO_JOBS):
        who = identity(access_key_id, "")["Arn"]
        raise ApiError(
            "AccessDeniedException",
            f"User: {who} is not authorized to perform: {service}:{operation}. "
            f"A job's credentials do not allow Create, Update and Delete operations.",
            403,
        )


def drop_own_credentials(environ: MutableMapping[str, str]) -> None:
    """Remove variables of `batchml local env` from the server's own environment, which point at a
    server like this one: secrets must come from the user's AWS account.
    """
    if environ.get(_KEYS[0], "").startswith(_OURS):
        for name in (*_KEYS, *ENDPOINTS, *_REGIONS):
            environ.pop(name, None)


def proxy_exceptions(env: Mapping[str, str], set_by_job: Collection[str]) -> dict[str, str]:
    """Variables that exclude the server from the job's proxies, if it has any."""
    if not {"http_proxy", "HTTP_PROXY"} & {*env} or {"no_proxy", "NO_PROXY"} & {*set_by_job}:
        return {}
    names = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*names[:1], _HOST]))


# --- Replays --------------------------------------------------------------------------------------
# A call that arrives twice is answered twice and applied once: by the id that an SDK keeps when it
# sends a call again, else by its signature (`Core.request`). But SDKs do not sign that id, and two
# equal calls within one second have the same signature. So a new id with a known signature is a
# second call or a forged one. It counts as a call while the signature is fresh. Later it gets an
# error that makes SDKs sign again, which an eavesdropper cannot do. The same applies to requests
# that were signed before this server's start.

FRESH = 2.0  # seconds; the time of a signature is in whole seconds
# seconds; no signature is valid for longer: MAX_SKEW before its time to MAX_SKEW after
_LIFE = 600.0
_MAX_SIGNATURES = 500_000


class ReplayGuard:
    """Remembers the signatures of calls that change something, to refuse replays."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._rotated = now
        self._seen: set[int] = set()  # the first digits of signatures
        self._seen_before: set[int] = set()  # of the period before

    def check(self, signature: str, signed_at: float, now: float) -> None:
        """Note the signature of a call that changes something; `signed_at` in whole seconds. Raises
        ApiError.
        """
        if now - self._rotated > _LIFE:
            self._seen_before, self._seen = self._seen, set()
            self._rotated = now
        mark = int(signature[:15], 16)
        if abs(now - signed_at) > FRESH and (
            signed_at < int(self._since) or mark in self._seen or mark in self._seen_before
        ):
            raise _sign_again("This signature has been used, or is older than the server.")
        if len(self._seen) >= _MAX_SIGNATURES:
            raise _sign_again("Too many requests.")
        self._seen.add(mark)


def _sign_again(why: str) -> ApiError:
    return ApiError("TooManyRequestsException", f"{why} Sign the request again.", 429)
