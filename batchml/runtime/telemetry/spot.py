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
from typing import Callable, NamedTuple, Optional

from batchml.runtime.entry.attempt import AttemptHandle
from batchml.runtime.host_metadata import (
    ECS_TASK,
    FetchUrl,
    InstanceMetadata,
    fetch_url,
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
    """The reason why a run is stopped. `now` is in seconds since the epoch."""
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


class NoticeSource:
    """Where notices come from on this host: the host's file, EC2's service, both or neither.

    The host writes notices into the file. When EC2 recommends a rebalance, the host makes a file
    with the same name and `.rebalance`. The service counts as closed to containers if the first
    calls fail.
    """

    def __init__(self, environ: Mapping[str, str], fetch: FetchUrl = fetch_url) -> None:
        self._file, address = environ.get(FILE, ""), service_of(environ)
        self._service = InstanceMetadata(address, fetch, _TIMEOUT) if address else None
        self._failures = 0  # calls in a row without an answer
        self._has_answered = False

    def __bool__(self) -> bool:
        return bool(self._file or self._service)

    def notice(self) -> Optional[SpotNotice]:
        try:
            with open(self._file, "rb") as file:
                found = read_notice(file.read(65_536))
        except OSError:
            found = None
        return found or read_notice(self._ask("spot/instance-action"))

    def recommends_rebalance(self) -> bool:
        if self._file and os.path.exists(f"{self._file}.rebalance"):
            return True
        return not self._failures and bool(self._ask("events/recommendations/rebalance"))

    def _ask(self, path: str) -> bytes:
        """Ask the service. Usually it does not have the path: then the answer is empty."""
        if self._service is None:
            return b""
        from urllib.error import HTTPError

        body = b""
        try:
            self._service.fetch_token()
            try:
                body = self._service.get(path)
            except HTTPError as error:
                error.close()
            self._has_answered, self._failures = True, 0
        except Exception:
            self._failures += 1
            if self._failures == _TRIES and not self._has_answered:
                self._service = None
        return body


class SpotWatcher:
    """An attempt plug-in. It does nothing on a host without spot notices."""

    def __init__(
        self,
        attempt: AttemptHandle,
        interval: float = EVERY,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._attempt, self._interval, self._now = attempt, interval, now
        self._source = NoticeSource(attempt.environ)
        self._notice: Optional[SpotNotice] = None
        self._is_at_risk = self._has_warned = False
        self._over = threading.Event()
        if self._source:
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
        """Look for a notice once."""
        if self._notice is None:
            self._notice = self._source.notice()
            if self._notice is None and not self._is_at_risk:
                self._is_at_risk = self._source.recommends_rebalance()

    def _run(self) -> None:
        while self._source:
            self.poll()
            if self._notice is not None or self._over.wait(self._interval):
                return


def _seconds(text: object) -> float:
    """A notice's time as seconds since the epoch; 0 if it is missing or invalid."""
    try:
        return parse_time(str(text))
    except ValueError:
        return 0.0
