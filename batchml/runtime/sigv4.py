"""Signature Version 4: which headers a request gets so that AWS knows who sent it. Pure.

Source: Amazon S3 API Reference, "Authenticating Requests: Using the Authorization Header".
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Dict, NamedTuple, Tuple
from urllib.parse import quote

EMPTY_HASH = hashlib.sha256(b"").hexdigest()


class Credentials(NamedTuple):
    """Keys, with a token and an end where they are lent."""

    access_key_id: str
    secret_access_key: str
    token: str = ""
    expires: float = float("inf")  # seconds since the epoch


def escape_path(path: str) -> str:
    """A path as it is sent and signed: S3 escapes it once and leaves its dots alone."""
    return quote(path, safe="/~-_.")


def escape_query(pairs: Sequence[Tuple[str, str]]) -> str:
    """A query string as it is sent and signed: sorted."""
    escaped = sorted((quote(name, safe="~-_."), quote(value, safe="~-_.")) for name, value in pairs)
    return "&".join(f"{name}={value}" for name, value in escaped)


def sign(
    credentials: Credentials,
    region: str,
    method: str,
    host: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    body_hash: str,
    now: float,
    service: str = "s3",
) -> Dict[str, str]:
    """All headers of a request but `host`. `path` and `query` are escaped; `now` is since 1970."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    signed = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    signed["x-amz-date"] = stamp
    signed["x-amz-content-sha256"] = body_hash
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    every = dict(signed, host=host)
    names = ";".join(sorted(every))
    lines = "".join(f"{name}:{every[name]}\n" for name in sorted(every))
    canonical = "\n".join((method, path, query, lines, names, body_hash))
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    key = b"AWS4" + credentials.secret_access_key.encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return signed
