"""Spot notices: EC2 announces about two minutes ahead that it takes a spot instance back.

A plug-in asks the instance's metadata service every 5 s, as EC2 advises, in a thread, so that a
service that does not answer does not block the output. Where containers cannot reach the service,
the host writes the same text into a file, BATCHML_NOTICE_FILE: batchml/aws/ec2.py.
Sources: EC2 User Guide, "Spot Instance interruption notices", "Rebalance recommendations", "Use
the Instance Metadata Service".
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Callable, Dict, NamedTuple, Optional, Union

from batchml.runtime.entry.attempt import AttemptHandle
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.storage.credentials import FetchUrl

EVERY = 5.0  # seconds between two polls
FILE = "BATCHML_NOTICE_FILE"
_SERVICE = "http://169.254.169.254"
_ECS = "ECS_CONTAINER_METADATA_URI_V4"  # only a real ECS agent sets it
_TOKEN_SECONDS = 21_600
_TIMEOUT = 1.0  # seconds: the service is on the host itself
_TRIES = 3  # calls without an answer, after which the service is taken to be closed
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


def _fetch(method: str, url: str, headers: Dict[str, str], timeout: float) -> bytes:
    """Call `fetch_url`, imported late: its imports take longer than all else before a command."""
    from batchml.runtime.storage.credentials import fetch_url

    return fetch_url(method, url, headers, timeout)


class SpotNotice(NamedTuple):
    """A notice that EC2 takes the host back."""

    action: str  # terminate, stop or hibernate
    at: float  # seconds since the epoch; 0 if unknown


def read_notice(body: bytes) -> Optional[SpotNotice]:
    """`{"action": "terminate", "time": "2026-09-18T08:22:00Z"}`; None for anything else."""
    try:
        found = json.loads(body)
        return SpotNotice(str(found["action"]), _seconds(found.get("time", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def describe(notice: SpotNotice, now: float) -> str:
    if not notice.at:
        return f"spot notice: EC2 will {notice.action} this host. The run saves and stops."
    at = time.strftime("%H:%M:%SZ", time.gmtime(notice.at))
    left = max(0.0, notice.at - now)
    return (
        f"spot notice: EC2 will {notice.action} this host in {left:.0f} s, at {at}. "
        "The run saves and stops."
    )


def service_of(environ: Mapping[str, str]) -> str:
    """The address of the metadata service; empty if the host has none.

    The embedded AWS Batch sets AWS_EXECUTION_ENV like ECS, so that variable alone does not prove
    that this is an EC2 instance.
    """
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return ""
    named = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")
    kind = environ.get("AWS_EXECUTION_ENV", "")
    is_on_ec2 = kind.startswith("AWS_ECS") and "FARGATE" not in kind and bool(environ.get(_ECS))
    return (named or (_SERVICE if is_on_ec2 else "")).rstrip("/")


class MetadataService:
    """The instance metadata service, version 2."""

    def __init__(self, base: str, fetch: FetchUrl = _fetch) -> None:
        self._base, self._fetch = base, fetch
        self._token = ""

    def notice(self) -> Optional[SpotNotice]:
        """Raises OSError."""
        body = self._get(_ACTION)
        return read_notice(body) if body else None

    def recommends_rebalance(self) -> bool:
        return bool(self._get(_REBALANCE))

    def _get(self, path: str) -> bytes:
        """The content of a path; empty if the service does not have it, which is the usual case."""
        from urllib.error import HTTPError

        if not self._token:
            self._fetch_token()
        try:
            headers = {"X-aws-ec2-metadata-token": self._token}
            return self._fetch("GET", self._base + path, headers, _TIMEOUT)
        except HTTPError as error:
            with error:
                if error.code == 401:  # the token has expired
                    self._token = ""
                return b""

    def _fetch_token(self) -> None:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        found = self._fetch("PUT", f"{self._base}/latest/api/token", lifetime, _TIMEOUT)
        self._token = found.decode("ascii", "replace").strip()


class NoticeFile:
    """The file into which the host writes notices; for a rebalance, it makes `FILE.rebalance`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def notice(self) -> Optional[SpotNotice]:
        try:
            with open(self._path, "rb") as file:
                return read_notice(file.read(65_536))
        except OSError:
            return None

    def recommends_rebalance(self) -> bool:
        return os.path.exists(f"{self._path}.rebalance")


class FileOrService:
    """The file if the host writes one, else the service, until it is clear that it is closed."""

    def __init__(self, file: NoticeFile, service: MetadataService) -> None:
        self._file, self._service = file, service
        self._tries = 0

    def notice(self) -> Optional[SpotNotice]:
        found = self._file.notice()
        if found is None and self._tries < _TRIES:
            try:
                found = self._service.notice()
                self._tries = 0
            except Exception:
                self._tries += 1
        return found

    def recommends_rebalance(self) -> bool:
        if self._file.recommends_rebalance():
            return True
        return not self._tries and self._service.recommends_rebalance()


class SpotWatcher:
    """An attempt plug-in. It does nothing on a host without spot notices."""

    def __init__(
        self,
        attempt: AttemptHandle,
        interval: float = EVERY,
        now: Callable[[], float] = time.time,
        fetch: FetchUrl = _fetch,
    ) -> None:
        self._attempt, self._interval, self._now = attempt, interval, now
        self._source = find_source(attempt.environ, fetch)
        self._notice: Optional[SpotNotice] = None
        self._is_at_risk = self._has_warned = False
        self._over = threading.Event()
        if self._source is not None:
            threading.Thread(target=self._run, daemon=True).start()

    def tick(self, now: float) -> None:
        if self._notice is not None:
            now = self._now()
            left = self._notice.at - now if self._notice.at else float("inf")
            self._attempt.stop(describe(self._notice, now), TRY_ELSEWHERE, left)
        elif self._is_at_risk and not self._has_warned:
            self._has_warned = True
            self._attempt.say(
                "batchml notice: EC2 recommends to leave this host, because it is now likelier to "
                "take it back. The run goes on until then."
            )

    def finish(self) -> None:
        self._over.set()

    def poll(self) -> None:
        """Ask once. Raises OSError without an answer."""
        if self._source is not None and self._notice is None:
            self._notice = self._source.notice()
            if self._notice is None and not self._is_at_risk:
                self._is_at_risk = self._source.recommends_rebalance()

    def _run(self) -> None:
        has_answered, tries = False, 0
        while has_answered or tries < _TRIES:
            try:
                self.poll()
                has_answered = True
            except Exception:
                tries += 1
            if self._notice is not None or self._over.wait(self._interval):
                return


def find_source(
    environ: Mapping[str, str], fetch: FetchUrl = _fetch
) -> Optional[Union[MetadataService, NoticeFile, FileOrService]]:
    """What to poll for notices on this host; None without a source."""
    base = service_of(environ)
    service = MetadataService(base, fetch) if base else None
    if not environ.get(FILE):
        return service
    file = NoticeFile(environ[FILE])
    return file if service is None else FileOrService(file, service)


def _seconds(text: object) -> float:
    """`2026-09-18T08:22:00Z` as seconds since the epoch; 0 for anything else."""
    import calendar

    try:
        return float(calendar.timegm(time.strptime(str(text)[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return 0.0
