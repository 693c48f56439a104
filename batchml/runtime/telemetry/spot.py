"""Spot notices: EC2 announces about two minutes ahead that it takes a spot instance back.

A plug-in asks the instance metadata service every 5 s, as EC2 advises, in a thread, so that a
service that does not answer does not block the output. On hosts whose containers cannot reach the
service, the host writes the service's answer into a file, BATCHML_NOTICE_FILE: batchml/aws/ec2.py.
Sources: EC2 User Guide, "Spot Instance interruption notices", "Rebalance recommendations".
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Callable, NamedTuple, Optional, Union

from batchml.runtime.entry.attempt import AttemptHandle
from batchml.runtime.host_metadata import (
    ECS_TASK,
    InstanceMetadata,
    instance_address,
    parse_time,
)
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE

EVERY = 5.0  # seconds between two polls
FILE = "BATCHML_NOTICE_FILE"
_TIMEOUT = 1.0  # seconds: the service is on the host itself
_TRIES = 3  # calls without an answer, after which the service counts as closed to containers


class SpotNotice(NamedTuple):
    """A notice that EC2 takes the host back."""

    action: str  # terminate, stop or hibernate
    at: float  # seconds since the epoch; 0 if unknown


def read_notice(body: bytes) -> Optional[SpotNotice]:
    """Read `{"action": "terminate", "time": "2026-09-18T08:22:00Z"}`; None for any other text."""
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
    kind = environ.get("AWS_EXECUTION_ENV", "")
    is_on_ec2 = kind.startswith("AWS_ECS") and "FARGATE" not in kind and environ.get(ECS_TASK)
    is_named = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    return instance_address(environ) if is_on_ec2 or is_named else ""


class NoticeService:
    """The instance metadata service, asked for notices."""

    def __init__(self, address: str) -> None:
        self._service = InstanceMetadata(address, timeout=_TIMEOUT)

    def notice(self) -> Optional[SpotNotice]:
        """Raises OSError."""
        return read_notice(self._get("spot/instance-action"))

    def recommends_rebalance(self) -> bool:
        """Raises OSError."""
        return bool(self._get("events/recommendations/rebalance"))

    def _get(self, path: str) -> bytes:
        """The content of a path; empty if the service does not have it, which is the usual case."""
        from urllib.error import HTTPError

        self._service.fetch_token()
        try:
            return self._service.get(path)
        except HTTPError as error:
            error.close()
            return b""


class NoticeFile:
    """The file into which the host writes notices. For a rebalance it makes `FILE.rebalance`."""

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
    """The notice file, and without a notice there the service, unless it counts as closed."""

    def __init__(self, file: NoticeFile, service: NoticeService) -> None:
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
    ) -> None:
        self._attempt, self._interval, self._now = attempt, interval, now
        self._source = find_source(attempt.environ)
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
                "batchml notice: EC2 recommends leaving this host, because it may soon take the "
                "host back. The run goes on until a spot notice comes."
            )

    def finish(self) -> None:
        self._over.set()

    def poll(self) -> None:
        """Ask the source once. Raises OSError without an answer."""
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
    environ: Mapping[str, str],
) -> Optional[Union[NoticeService, NoticeFile, FileOrService]]:
    """Where to look for notices on this host; None if it has neither a file nor a service."""
    address = service_of(environ)
    service = NoticeService(address) if address else None
    if not environ.get(FILE):
        return service
    file = NoticeFile(environ[FILE])
    return file if service is None else FileOrService(file, service)


def _seconds(text: object) -> float:
    """A notice's time as seconds since the epoch; 0 if it is missing or invalid."""
    try:
        return parse_time(str(text))
    except ValueError:
        return 0.0
