"""The keys that a container has in AWS: from its job role, its variables, or its instance.

The role comes first, other than in AWS's SDKs: it is what may use the environment's bucket, and the
keys in the variables of a job are often another account's, for its data. Sources: AWS SDKs and
Tools Reference Guide, "Container credential provider" and "IMDS credential provider".
"""

from __future__ import annotations

import calendar
import json
import time
import urllib.request
from collections.abc import Mapping
from typing import Any, Callable, Dict, Optional
from urllib.parse import urlsplit

from batchml.runtime.sigv4 import Credentials
from batchml.runtime.store import StoreError

_RENEW = 300.0  # seconds before their end at which keys are asked for again
_CONTAINER = "http://169.254.170.2"
_INSTANCE = "http://169.254.169.254"
# The SDKs take keys over plain HTTP from these alone: ECS's, EKS's, and the machine itself.
_TRUSTED_HOSTS = {
    "169.254.170.2",
    "169.254.170.23",
    "fd00:ec2::23",
    "127.0.0.1",
    "::1",
    "localhost",
}

# method, address, headers, seconds -> body
Ask = Callable[[str, str, Dict[str, str], float], bytes]


def ask(method: str, url: str, headers: Dict[str, str], timeout: float) -> bytes:
    """One request without proxies: these addresses are the host's own. Raises OSError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, method=method, headers=headers)
    with opener.open(request, timeout=timeout) as answer:
        return bytes(answer.read(65_536))


class Keyring:
    """The keys that are valid now, asked for again before they end."""

    def __init__(
        self, environ: Mapping[str, str], clock: Callable[[], float], ask: Ask = ask
    ) -> None:
        self._environ = environ
        self._clock = clock
        self._ask = ask
        self._kept: Optional[Credentials] = None

    def forget(self) -> None:
        """The keys were refused as expired: the next call asks for others."""
        self._kept = None

    def get(self) -> Credentials:
        """Raises StoreError when there are none."""
        kept = self._kept
        if kept is None or kept.expires - self._clock() < _RENEW:
            self._kept = kept = self._look()
        return kept

    def _look(self) -> Credentials:
        environ = self._environ
        key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        try:
            address = self._container_address()
            if address:
                return _read(json.loads(self._ask("GET", address, self._container_token(), 5.0)))
            if key and secret:
                return Credentials(key, secret, environ.get("AWS_SESSION_TOKEN", ""))
            if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
                return self._from_instance()
        except StoreError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"no AWS credentials: {_words(error)}", temporary=True) from error
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

    def _from_instance(self) -> Credentials:
        base = self._environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _INSTANCE).rstrip("/")
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
        token = self._ask("PUT", f"{base}/latest/api/token", lifetime, 2.0).decode()
        headers = {"X-aws-ec2-metadata-token": token}
        roles = f"{base}/latest/meta-data/iam/security-credentials/"
        role = self._ask("GET", roles, headers, 2.0).decode().split("\n")[0]
        return _read(json.loads(self._ask("GET", roles + role, headers, 2.0)))


def _read(found: Any) -> Credentials:
    """Keys as both services give them. Raises KeyError, TypeError or ValueError for other JSON."""
    expires = calendar.timegm(time.strptime(found["Expiration"][:19], "%Y-%m-%dT%H:%M:%S"))
    return Credentials(
        found["AccessKeyId"], found["SecretAccessKey"], found["Token"], float(expires)
    )


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
