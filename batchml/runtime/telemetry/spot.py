"""A companion that hears that the host goes: a spot instance is taken back about two minutes ahead.

It asks the instance's metadata service each 5 s, from a thread: an address that does not answer
must not hold up the output. Sources: EC2 User Guide, "Spot Instance interruption notices",
"Rebalance recommendations", "Use the Instance Metadata Service"; polling each 5 s is its advice.
BATCHML_NOTICE_FILE names a file in which the host writes the same words, where containers cannot
reach the service: batchml/aws/ec2.py. A host that writes none may let its containers ask.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Callable, Dict, NamedTuple, Optional, Union

from batchml.runtime.entry.attempt import Attempt
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.storage.credentials import Ask

EVERY = 5.0  # seconds between two looks
FILE = "BATCHML_NOTICE_FILE"
_SERVICE = "http://169.254.169.254"
_ECS = "ECS_CONTAINER_METADATA_URI_V4"  # only a real ECS agent sets it
_TOKEN_SECONDS = 21_600
_TIMEOUT = 1.0  # seconds: the service is on the host itself
_TRIES = 3  # in vain from the start, and nobody is there
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


def ask(method: str, url: str, headers: Dict[str, str], timeout: float) -> bytes:
    """As `credentials.ask`, whose imports take longer than all else before a command starts."""
    from batchml.runtime.storage import credentials

    return credentials.ask(method, url, headers, timeout)


class Announced(NamedTuple):
    """What the host said."""

    action: str  # terminate, stop or hibernate; empty for a recommendation to rebalance
    at: float  # seconds since the epoch; 0 where it did not say


def read_notice(body: bytes) -> Optional[Announced]:
    """`{"action": "terminate", "time": "2026-09-18T08:22:00Z"}`; None for anything else."""
    try:
        told = json.loads(body)
        return Announced(str(told["action"]), _seconds(told.get("time", "")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def words(notice: Announced, now: float) -> str:
    if not notice.at:
        return f"spot notice: EC2 will {notice.action} this host. The run saves and stops."
    at = time.strftime("%H:%M:%SZ", time.gmtime(notice.at))
    left = max(0.0, notice.at - now)
    return (
        f"spot notice: EC2 will {notice.action} this host in {left:.0f} s, at {at}. "
        "The run saves and stops."
    )


def service_of(environ: Mapping[str, str]) -> str:
    """The address of the metadata service; empty where there is none to be asked.

    The embedded AWS Batch says that it is ECS, as far as a program can see, so AWS_EXECUTION_ENV
    alone is no sign of a host of EC2.
    """
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return ""
    named = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "")
    kind = environ.get("AWS_EXECUTION_ENV", "")
    is_on_ec2 = kind.startswith("AWS_ECS") and "FARGATE" not in kind and bool(environ.get(_ECS))
    return (named or (_SERVICE if is_on_ec2 else "")).rstrip("/")


class Service:
    """The metadata service, by version 2 of its protocol."""

    def __init__(self, base: str, ask: Ask = ask) -> None:
        self._base, self._ask = base, ask
        self._token = ""

    def notice(self) -> Optional[Announced]:
        """That this host goes. Raises OSError."""
        body = self._get(_ACTION)
        return read_notice(body) if body else None

    def recommends_rebalance(self) -> bool:
        return bool(self._get(_REBALANCE))

    def _get(self, path: str) -> bytes:
        """Empty for what is not there, which is the usual answer."""
        from urllib.error import HTTPError

        if not self._token:
            self._begin()
        try:
            headers = {"X-aws-ec2-metadata-token": self._token}
            return self._ask("GET", self._base + path, headers, _TIMEOUT)
        except HTTPError as error:
            with error:
                if error.code == 401:  # the token has ended
                    self._token = ""
                return b""

    def _begin(self) -> None:
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        found = self._ask("PUT", f"{self._base}/latest/api/token", lifetime, _TIMEOUT)
        self._token = found.decode("ascii", "replace").strip()


class File:
    """What the host writes into a file that its containers see, and beside it `.rebalance`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def notice(self) -> Optional[Announced]:
        try:
            with open(self._path, "rb") as file:
                return read_notice(file.read(65_536))
        except OSError:
            return None

    def recommends_rebalance(self) -> bool:
        return os.path.exists(f"{self._path}.rebalance")


class Both:
    """A file that may be there, and the service, until it is plain that nobody answers."""

    def __init__(self, file: File, service: Service) -> None:
        self._file, self._service = file, service
        self._tries = 0

    def notice(self) -> Optional[Announced]:
        heard = self._file.notice()
        if heard is None and self._tries < _TRIES:
            try:
                heard = self._service.notice()
                self._tries = 0
            except Exception:
                self._tries += 1
        return heard

    def recommends_rebalance(self) -> bool:
        if self._file.recommends_rebalance():
            return True
        return not self._tries and self._service.recommends_rebalance()


class Notice:
    """The companion. It does nothing where there is nobody to ask."""

    def __init__(
        self,
        attempt: Attempt,
        every: float = EVERY,
        now: Callable[[], float] = time.time,
        ask: Ask = ask,
    ) -> None:
        self._attempt, self._every, self._now = attempt, every, now
        self._source = source_of(attempt.environ, ask)
        self._heard: Optional[Announced] = None
        self._advised = self._said = False
        self._over = threading.Event()
        if self._source is not None:
            threading.Thread(target=self._listen, daemon=True).start()

    def tick(self, now: float) -> None:
        if self._heard is not None:
            now = self._now()
            left = self._heard.at - now if self._heard.at else float("inf")
            self._attempt.stop(words(self._heard, now), TRY_ELSEWHERE, left)
        elif self._advised and not self._said:
            self._said = True
            self._attempt.say(
                "batchml notice: EC2 recommends to leave this host, which it is likelier to take "
                "back now. The run goes on until it does."
            )

    def finish(self) -> None:
        self._over.set()

    def look(self) -> None:
        """Ask once. Raises OSError where nobody answers."""
        if self._source is not None and self._heard is None:
            self._heard = self._source.notice()
            if self._heard is None and not self._advised:
                self._advised = self._source.recommends_rebalance()

    def _listen(self) -> None:
        has_answered, tries = False, 0
        while has_answered or tries < _TRIES:
            try:
                self.look()
                has_answered = True
            except Exception:
                tries += 1
            if self._heard is not None or self._over.wait(self._every):
                return


def source_of(environ: Mapping[str, str], ask: Ask = ask) -> Optional[Union[Service, File, Both]]:
    """Who is to be asked on this host; None for nobody."""
    base = service_of(environ)
    service = Service(base, ask) if base else None
    if not environ.get(FILE):
        return service
    file = File(environ[FILE])
    return file if service is None else Both(file, service)


def _seconds(text: object) -> float:
    """`2026-09-18T08:22:00Z` as seconds since the epoch; 0 for anything else."""
    import calendar

    try:
        return float(calendar.timegm(time.strptime(str(text)[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return 0.0
