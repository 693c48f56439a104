"""Signature Version 4, verified. Every request to the embedded server must carry one.

Loopback is not a gate: any program of any user of this machine, and any web page in a browser, can
reach a local port, and this server runs commands. Source of the algorithm: AWS General Reference,
"Signature Version 4 signing process"; of the rules beyond it: docs/security.md.
"""

import hashlib
import hmac
import re
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote

from msgspec import Struct

from batchml.local.wire import Refused, Request

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
