"""How long it is borne that the service does not answer. A failed call is no news of a run."""

from collections.abc import Callable

from batchml.aws.logs import Page, StreamReader
from batchml.clock import Clock
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable
from batchml.ops.watch.pace import Limiter, Pace

_TRIES = 5  # at least, before the service is given up


def is_passing(error: BatchmlError) -> bool:
    """True for a failure that says nothing about what was asked: it may be gone at the next call.

    A user can sign in again, and a service that failed (5xx) recovers.
    """
    if isinstance(error, ServiceError):
        return error.status >= 500
    return isinstance(error, ServiceUnreachable | AccessError)


class Contact:
    """Failures of one kind of call. `renew` is called so that the next one finds new credentials.

    Who was never let in is told at once; who was, has `absence` seconds to sign in again. That long
    the service may be out of reach, too, once it was reached; `patience` seconds before.

    `is_known` is for the log of a run that could be asked about: it may be away for `no_log`.
    """

    def __init__(
        self,
        clock: Clock,
        pace: Pace,
        renew: Callable[[], None] | None = None,
        *,
        is_known: bool = False,
    ) -> None:
        self._clock = clock
        self._pace = pace
        self._renew = renew
        self._is_known = is_known
        self._was_made = is_known
        self._unreached = _Spell()
        self._signed_out = _Spell()

    def made(self) -> None:
        self._was_made = True
        self._unreached = _Spell()
        self._signed_out = _Spell()

    def lost(self, error: BatchmlError) -> None:
        """Bear a failure. Raises it when it is not a passing one, or has lasted for too long."""
        now = self._clock.monotonic()
        if isinstance(error, AccessError):
            self._unreached = _Spell()  # the service answers
            if not self._was_made or self._signed_out.is_over(now, self._pace.absence):
                raise error
            if self._renew is not None:
                self._renew()
            return
        limit = self._pace.absence if self._was_made else self._pace.patience
        limit = self._pace.no_log if self._is_known else limit
        if not is_passing(error):
            raise error
        if self._unreached.is_over(now, limit):
            raise given_up(str(error), limit) from error


_TELL = 10.0  # seconds without contact before it is worth a word
_APART = 40.0  # seconds: longer than any pause between two tries


class Outages:
    """Tells of each time without contact, once, when it lasts. `lost` is called at each failure."""

    def __init__(self, clock: Clock, tell: Callable[[str], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._since = self._last = float("-inf")
        self._is_told = False

    def lost(self, error: str) -> None:
        now = self._clock.monotonic()
        if now - self._last > _APART:
            self._since, self._is_told = now, False
        self._last = now
        if not self._is_told and now - self._since >= _TELL:
            self._is_told = True
            self._tell(error)


class _Spell:
    """Failures in a row."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._tries = 0

    def is_over(self, now: float, limit: float) -> bool:
        """Count one more: True when they have lasted for `limit` seconds, and are some."""
        self._since = now if self._since is None else self._since
        self._tries += 1
        return now - self._since >= limit and self._tries >= _TRIES


class Gate:
    """The way to the logs, shared by all streams that are read."""

    def __init__(self, limiter: Limiter, contact: Contact) -> None:
        self._limiter = limiter
        self._contact = contact

    def page(self, reader: StreamReader) -> Page:
        """The next page of a stream, when it is its turn."""
        self._limiter.take()
        page = reader.page()
        self._limiter.went_well()
        self._contact.made()
        return page

    def run_ended(self) -> None:
        """For how long no log could be read counts from here."""
        self._contact.made()

    def failed(self, error: BatchmlError) -> None:
        """Bear a failure of `page`, or raise it: see Contact.lost."""
        self._limiter.failed()
        self._contact.lost(error)


class Invisible:
    """Jobs that the service does not know so far, which just after a submission may be."""

    def __init__(self, clock: Clock, pace: Pace) -> None:
        self._clock = clock
        self._pace = pace
        self._since: dict[str, float] = {}

    def seen(self, job_id: str) -> None:
        self._since.pop(job_id, None)

    def is_over(self, job_id: str) -> bool:
        """To be asked each time that the job is missing: True once it was for too long."""
        now = self._clock.monotonic()
        return now - self._since.setdefault(job_id, now) >= self._pace.patience

    def given_up(self, job_id: str) -> ServiceUnreachable:
        return given_up(
            f"{unknown(job_id)}: it forgets a run some days after its end", self._pace.patience
        )


def unknown(job_id: str) -> str:
    return f"Job {job_id} is not known to the service"


def given_up(problem: str, limit: float) -> ServiceUnreachable:
    return ServiceUnreachable(f"{problem}, for {limit:.0f} seconds now. The job itself may go on.")
