"""Ask the HTTP services that a host offers to its containers: EC2's instance metadata, ECS's agent.

Sources: EC2 User Guide, "Use the Instance Metadata Service" (version 2); ECS Developer Guide, "Task
metadata endpoint version 4".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Callable, Dict

ECS_TASK = "ECS_CONTAINER_METADATA_URI_V4"  # only the ECS agent sets this variable
_INSTANCE = "http://169.254.169.254"
_TOKEN_SECONDS = 21_600  # how long a token is valid; six hours, the service's limit

# method, address, headers, seconds -> body
FetchUrl = Callable[[str, str, Dict[str, str], float], bytes]


def fetch_url(method: str, url: str, headers: Dict[str, str], timeout: float) -> bytes:
    """Send one request without proxies, because these addresses are on the host. Raises OSError."""
    # Imported late: this takes longer than all else before a command.
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, method=method, headers=headers)
    with opener.open(request, timeout=timeout) as answer:
        return bytes(answer.read(65_536))


def instance_address(environ: Mapping[str, str]) -> str:
    """The address of EC2's instance metadata service. It may be closed to containers."""
    return (environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _INSTANCE).rstrip("/")


class InstanceMetadata:
    """EC2's instance metadata service at an address. It needs a token, which is kept."""

    def __init__(self, address: str, fetch: FetchUrl = fetch_url, timeout: float = 2.0) -> None:
        self._address, self._fetch, self._timeout = address, fetch, timeout
        self._token = ""

    def fetch_token(self) -> None:
        """Get a token, unless there is one. Raises OSError."""
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            url = f"{self._address}/latest/api/token"
            token = self._fetch("PUT", url, lifetime, self._timeout)
            self._token = token.decode("ascii", "replace").strip()

    def get(self, path: str) -> bytes:
        """The content of a path below `/latest/meta-data/`. Raises OSError.

        The error is an HTTPError if the service does not have the path.
        """
        from urllib.error import HTTPError

        self.fetch_token()
        url = f"{self._address}/latest/meta-data/{path}"
        try:
            return self._fetch("GET", url, {"X-aws-ec2-metadata-token": self._token}, self._timeout)
        except HTTPError as error:
            if error.code == 401:  # the token has expired
                self._token = ""
            raise


def parse_time(text: str) -> float:
    """`2026-09-18T08:22:00Z` as seconds since the epoch. Raises ValueError."""
    import calendar  # which imports datetime

    return float(calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")))
