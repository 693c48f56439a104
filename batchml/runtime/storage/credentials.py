"""AWS credentials of a container, and signed requests (Signature Version 4).

Credentials come from the job role, from variables, or from the instance. The role comes first,
unlike in AWS's SDKs: it may use the environment's bucket, but keys in a job's variables often
belong to another account that has the job's data. Sources: AWS SDKs and Tools Reference Guide,
"Container credential provider" and "IMDS credential provider".
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple
from urllib.parse import quote, urlsplit

from batchml.runtime.host_metadata import (
    FetchUrl,
    InstanceMetadata,
    fetch_url,
    instance_address,
    parse_time,
)
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.storage.store import StoreError

# --- Signature Version 4 --------------------------------------------------------------------------
# Source: Amazon S3 API Reference, "Authenticating Requests: Using the Authorization Header".


EMPTY_HASH = hashlib.sha256(b"").hexdigest()


class Credentials(NamedTuple):
    """Access keys; temporary ones have a token and an expiry."""

    access_key_id: str
    secret_access_key: str
    token: str = ""
    expires: float = float("inf")  # seconds since the epoch


def domain_of(region: str) -> str:
    """The domain of AWS's endpoints in a region: only China has its own."""
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def escape_path(path: str) -> str:
    """A path as S3 expects it in a request and its signature: escaped once, with its dots."""
    return quote(path, safe="/~-_.")


def escape_query(pairs: Sequence[Tuple[str, str]]) -> str:
    """A query string as AWS expects it in a request and its signature: escaped and sorted."""
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
    """All headers of a signed request, except `host`.

    `path` and `query` are escaped already; `now` is in seconds since the epoch.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    signed = {name.lower(): " ".join(value.split()) for name, value in headers.items()}
    signed["x-amz-date"] = stamp
    signed["x-amz-content-sha256"] = body_hash
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    with_host = dict(signed, host=host)
    names = ";".join(sorted(with_host))
    lines = "".join(f"{name}:{with_host[name]}\n" for name in sorted(with_host))
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


# --- Credentials ----------------------------------------------------------------------------------


_RENEW = 300.0  # seconds before their expiry at which credentials are fetched again
_CONTAINER = "http://169.254.170.2"
# The only hosts whose credentials AWS's SDKs accept over plain HTTP: ECS, EKS, this machine.
_TRUSTED_HOSTS = {
    "169.254.170.2", "169.254.170.23", "fd00:ec2::23", "127.0.0.1", "::1", "localhost",
}  # fmt: skip


class CredentialsProvider:
    """Credentials that are valid now. They are fetched again before they expire."""

    def __init__(
        self,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        fetch: FetchUrl = fetch_url,
        prefers_variables: bool = False,
    ) -> None:
        """`prefers_variables`: keys in variables come before the role, and keys in the user's file
        of credentials after it: for the user's data, not for the environment's bucket.
        """
        self._environ = environ
        self._prefers_variables = prefers_variables
        self._clock = clock
        self._fetch = fetch
        self._cached: Optional[Credentials] = None

    def forget(self) -> None:
        """Make the next `get` fetch new credentials, because these were refused as expired."""
        self._cached = None

    def get(self) -> Credentials:
        """Raises StoreError without credentials."""
        found = self._cached
        if found is None or found.expires - self._clock() < _RENEW:
            self._cached = found = self._find()
        return found

    def _find(self) -> Credentials:
        environ = self._environ
        key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        try:
            if key and secret and self._prefers_variables:
                return Credentials(key, secret, environ.get("AWS_SESSION_TOKEN", ""))
            address = self._container_address()
            if address:
                answer = self._fetch("GET", address, self._container_token(), 5.0)
                return _parse(json.loads(answer))
            if key and secret:
                return Credentials(key, secret, environ.get("AWS_SESSION_TOKEN", ""))
            found = self._from_file() if self._prefers_variables else None
            if found is not None:
                return found
            if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
                return self._from_instance()
        except StoreError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"no AWS credentials: {error_line(error)}", temporary=True) from error
        raise StoreError("no AWS credentials: neither variables nor a job role")

    def _container_address(self) -> str:
        relative = self._environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        if relative:
            return _CONTAINER + relative
        full = self._environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
        parts = urlsplit(full)
        if full and parts.scheme != "https" and parts.hostname not in _TRUSTED_HOSTS:
            raise StoreError(f"no AWS credentials: {full} is neither https nor this machine")
        return full

    def _container_token(self) -> Dict[str, str]:
        token = self._environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
        path = self._environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        if path:
            with open(path, encoding="utf-8") as file:
                token = file.read().strip()
        return {"Authorization": token} if token else {}

    def _from_file(self) -> Optional[Credentials]:
        """The keys in the user's file of credentials; None without them.

        Source: AWS SDKs and Tools Reference Guide, "Shared config and credentials files".
        """
        environ = self._environ
        path = environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.join(
            environ.get("HOME") or "/nonexistent", ".aws", "credentials"
        )
        if not os.path.isfile(path):
            return None
        from configparser import RawConfigParser

        parser = RawConfigParser()
        parser.read(path, encoding="utf-8")
        profile = environ.get("AWS_PROFILE") or "default"
        found = dict(parser.items(profile)) if parser.has_section(profile) else {}
        key, secret = found.get("aws_access_key_id"), found.get("aws_secret_access_key")
        if not (key and secret):
            return None
        return Credentials(key, secret, found.get("aws_session_token", ""))

    def _from_instance(self) -> Credentials:
        service = InstanceMetadata(instance_address(self._environ), self._fetch)
        roles = "iam/security-credentials/"
        role = service.get(roles).decode().split("\n")[0]
        return _parse(json.loads(service.get(roles + role)))


def _parse(found: Any) -> Credentials:
    """Read the answer of the agent or the instance. Raises KeyError, TypeError or ValueError."""
    expires = parse_time(found["Expiration"])
    return Credentials(found["AccessKeyId"], found["SecretAccessKey"], found["Token"], expires)
