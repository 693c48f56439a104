"""Signature Version 4, verified. Every request to the embedded server must carry one.

Loopback is not a gate: any program of any user of this machine, and any web page in a browser, can
reach a local port, and this server runs commands. Source of the algorithm: AWS General Reference,
"Signature Version 4 signing process"; of the rules beyond it: docs/security.md.
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
from batchml.local.server.protocol import Refused, Request

MAX_SKEW = 300  # seconds between the signer's clock and ours

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/, ]+)/(\d{8})/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})"
)


class Keys(Struct, frozen=True):
    access_key_id: str
    secret_access_key: str


class Caller(Struct, frozen=True):
    """Who signed, and for which service and region."""

    access_key_id: str
    region: str
    service: str
    signature: str
    signed_at: float


def claimed_service(request: Request) -> str:
    """The service that a request says it is for, to answer in its shape; "" when it says none."""
    match = _AUTHORIZATION.fullmatch(request.header("authorization"))
    return match[4] if match else ""


def claimed_key(request: Request) -> str:
    """The access key id that a request says it is signed with; "" when it says none."""
    match = _AUTHORIZATION.fullmatch(request.header("authorization"))
    return match[1] if match else ""


def verify(request: Request, keys: Keys, now: float) -> Caller:
    """Return the caller of a correctly signed request; `now` in seconds since the epoch.

    Raises Refused (403, in AWS's shape) for anything else. A wrong key and a wrong signature take
    the same path and get the same answer.
    """
    names = [name for name, _ in request.headers]
    match = _AUTHORIZATION.fullmatch(request.header("authorization"))
    if not match:
        raise Refused(
            "MissingAuthenticationTokenException",
            "Missing Authentication Token. Requests to the embedded AWS Batch are signed "
            "(Signature Version 4); `batchml local env` prints the keys.",
            403,
        )
    key_id, date, region, service, signed, signature = match.groups()
    signed_names = signed.split(";")
    if len(signed_names) > len(names):
        raise Refused("InvalidSignatureException", "A signed header is missing.", 403)
    if any(names.count(name) > 1 for name in ("authorization", *signed_names)):
        raise Refused("InvalidSignatureException", "A signed header was sent twice.", 403)
    # x-amz-target names the operation: what is not signed could be exchanged.
    to_sign = {"host", "x-amz-date", *(name for name in names if name.startswith("x-amz-"))}
    if not to_sign <= set(signed_names):
        raise Refused(
            "InvalidSignatureException", "host and every x-amz-* header must be signed.", 403
        )
    stamp = request.header("x-amz-date")
    signed_at = _check_time(stamp, date, now)
    body_hash = hashlib.sha256(request.body).hexdigest()
    if request.header("x-amz-content-sha256") not in ("", body_hash):
        raise Refused("InvalidSignatureException", "The body does not match its hash.", 403)
    expected = _signature(
        request, body_hash, signed_names, _signing_key(keys, date, region, service),
        stamp, f"{date}/{region}/{service}/aws4_request",
    )  # fmt: skip
    right_key = hmac.compare_digest(key_id.encode(), keys.access_key_id.encode())
    if not (hmac.compare_digest(expected, signature) and right_key):
        raise Refused(
            "InvalidSignatureException",
            "The request signature we calculated does not match the signature you provided. "
            "Check your AWS access key and signing method; `batchml local env` prints the keys.",
            403,
        )
    return Caller(key_id, region, service, signature, signed_at)


def _check_time(stamp: str, date: str, now: float) -> float:
    try:
        read = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise Refused("InvalidSignatureException", "x-amz-date is not a date.", 403) from None
    skew = now - read.timestamp()
    if abs(skew) > MAX_SKEW or not stamp.startswith(date):
        raise Refused(
            "InvalidSignatureException",
            f"Signature expired: {stamp} is {abs(skew):.0f} seconds from the server's clock.",
            403,
        )
    return read.timestamp()


def _signature(
    request: Request, body_hash: str, signed: list[str], key: bytes, stamp: str, scope: str
) -> str:
    headers = "".join(f"{name}:{_folded(request.header(name))}\n" for name in signed)
    canonical = "\n".join(
        (
            request.method,
            # Services other than S3 escape the escaped path once more.
            quote(_normalized(request.path), safe="/~"),
            _sorted_query(request.query),
            headers,
            ";".join(signed),
            body_hash,
        )
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _normalized(path: str) -> str:
    """The path without empty and dot segments (RFC 3986, 5.2.4), as signers make it."""
    kept: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del kept[-1:]
        elif part not in ("", "."):
            kept.append(part)
    ends_open = "/" if path.endswith("/") and kept else ""
    return f"/{'/'.join(kept)}{ends_open}"


def _sorted_query(query: str) -> str:
    """By name, then by value; a name alone counts as one with an empty value."""
    if not query:
        return ""
    pairs = sorted(part.partition("=")[::2] for part in query.split("&"))
    return "&".join(f"{name}={value}" for name, value in pairs)


def _folded(value: str) -> str:
    return " ".join(value.split())


@lru_cache(maxsize=64)
def _signing_key(keys: Keys, date: str, region: str, service: str) -> bytes:
    key = b"AWS4" + keys.secret_access_key.encode()
    for part in (date, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


# --- keys and tokens ------------------------------------------------------------------------------
# How a job calls the server that runs it: the server's address, and keys of its own. Pure.
#
# The keys of an attempt are worked out from the server's, so that nobody has to keep them; they are
# good for as long as the attempt lives (docs/decisions/013-job-credentials.md).


ROLE = "batchml-job"  # where a definition names none

_HOST = "127.0.0.1"
_PREFIX = "BMLJOB"
_OURS = (_PREFIX, "BMLLOCAL")

# The services that the server speaks. Without the plain AWS_ENDPOINT_URL: S3 stays S3.
ENDPOINTS = (
    "AWS_ENDPOINT_URL_BATCH", "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", "AWS_ENDPOINT_URL_ECS",
    "AWS_ENDPOINT_URL_STS",
)  # fmt: skip
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

# Whoever sets one of these has credentials in mind, and ours would be taken before or with them.
_CREDENTIALS = {
    *_KEYS, "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE",
    "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
}  # fmt: skip

# What changes where and how jobs run is its user's to do, not a job's.
_KEPT_FROM_JOBS = ("Create", "Update", "Delete")


def job_keys(server: Keys, task_id: str) -> Keys:
    """The keys of one attempt."""
    secret = server.secret_access_key.encode()
    made = hmac.digest(secret, f"batchml job credentials\n{task_id}".encode(), "sha256")
    return Keys(_PREFIX + task_id.upper(), urlsafe_b64encode(made).decode().rstrip("="))


def task_of(access_key_id: str) -> str:
    """Whose attempt's keys these are; "" for the server's own and any other."""
    task_id = access_key_id.removeprefix(_PREFIX)
    return task_id.lower() if task_id != access_key_id else ""


def variables(
    endpoint: str, keys: Keys, given: Collection[str], *, has_role: bool, has_others: bool
) -> dict[str, str]:
    """What an attempt is told. `given` are the names of the variables that the job sets itself.

    `has_others`: programs of this machine find credentials of the user's in files, which ours
    would hide. Only a job with a role wants that, as in AWS.
    """
    told = {
        "BATCHML_ENDPOINT_URL": endpoint,
        "BATCHML_ACCESS_KEY_ID": keys.access_key_id,
        "BATCHML_SECRET_ACCESS_KEY": keys.secret_access_key,
    }
    if not _CREDENTIALS.isdisjoint(given) or (has_others and not has_role):
        return told
    told |= dict.fromkeys(ENDPOINTS, endpoint)
    told |= {_KEYS[0]: keys.access_key_id, _KEYS[1]: keys.secret_access_key}
    if set(_REGIONS).isdisjoint(given):
        told |= dict.fromkeys(_REGIONS, REGION)
    return told


def identity(access_key_id: str, user: str) -> dict[str, str]:
    """Who a caller is, as STS says it."""
    task_id = task_of(access_key_id)
    if not task_id:
        arn = f"arn:aws:iam::{ACCOUNT}:user/{user}"
        return {"Arn": arn, "UserId": access_key_id, "Account": ACCOUNT}
    arn = f"arn:aws:sts::{ACCOUNT}:assumed-role/{ROLE}/{task_id}"
    return {"Arn": arn, "UserId": f"{access_key_id}:{task_id}", "Account": ACCOUNT}


def check_permitted(access_key_id: str, service: str, operation: str) -> None:
    """Refuse what is not a job's to do. Raises Refused."""
    if task_of(access_key_id) and operation.startswith(_KEPT_FROM_JOBS):
        who = identity(access_key_id, "")["Arn"]
        raise Refused(
            "AccessDeniedException",
            f"User: {who} is not authorized to perform: {service}:{operation}. "
            f"A job's own credentials submit, look and cancel.",
            403,
        )


def forget_ourselves(environ: MutableMapping[str, str]) -> None:
    """Take out of the server's environment what points at a server like it, as `batchml local env`
    prints it: its user's AWS is meant where it asks for secrets.
    """
    if environ.get(_KEYS[0], "").startswith(_OURS):
        for name in (*_KEYS, *ENDPOINTS, *_REGIONS):
            environ.pop(name, None)


def past_proxies(env: Mapping[str, str], given: Collection[str]) -> dict[str, str]:
    """The variables that keep calls to the server from proxies, where there are any."""
    if not {"http_proxy", "HTTP_PROXY"} & {*env} or {"no_proxy", "NO_PROXY"} & {*given}:
        return {}
    names = [env[name] for name in ("no_proxy", "NO_PROXY") if env.get(name)]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join([*names[:1], _HOST]))


# --- signatures seen before -----------------------------------------------------------------------
# Requests that somebody has seen and sends again.
#
# A call that arrives twice is answered twice and done once: by the id that an SDK keeps over its
# re-sends, else by its signature (`Core.request`). But SDKs do not sign that id, and the same call
# made twice in one second is signed the same, so a new id under a known signature is a second call
# or a forged one. It is taken for a call while the signature is fresh, as a client's own is. After
# that it is put off with an answer that makes SDKs sign again, which whoever has only seen the
# request cannot do. The same goes for what was signed before this server could have seen it.


FRESH = 2.0  # seconds; a signature's own time is in whole seconds
_LIFE = 600.0  # seconds; longer than any signature is good for, from 300 ahead to 300 behind
_MOST = 500_000


class Replays:
    def __init__(self, now: float) -> None:
        self._since = now
        self._rotated = now
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()

    def check(self, signature: str, signed_at: float, now: float) -> None:
        """Note a signature that makes a change; `signed_at` in whole seconds. Raises Refused."""
        if now - self._rotated > _LIFE:
            self._seen_before, self._seen = self._seen, set()
            self._rotated = now
        mark = int(signature[:15], 16)
        if abs(now - signed_at) > FRESH and (
            signed_at < int(self._since) or mark in self._seen or mark in self._seen_before
        ):
            raise _again("This signature has been used, or is older than the server.")
        if len(self._seen) >= _MOST:
            raise _again("Too many requests.")
        self._seen.add(mark)


def _again(why: str) -> Refused:
    return Refused("TooManyRequestsException", f"{why} Sign the request again.", 429)
