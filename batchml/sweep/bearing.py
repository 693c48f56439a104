"""For how long a controller bears that the board, or AWS Batch, cannot be had."""

from collections.abc import Iterator
from contextlib import contextmanager

from batchml.clock import Clock
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable
from batchml.runtime.storage.store import StoreError

_TOO_MANY = 429  # the HTTP status of a call that was throttled


@contextmanager
def reached() -> Iterator[None]:
    """What needs the board: raises ServiceUnreachable when it cannot be had."""
    try:
        yield
    except StoreError as error:
        raise away(error) from error


def away(error: StoreError) -> ServiceUnreachable:
    return ServiceUnreachable(f"The sweep's board cannot be had: {error}")


class Bearing:
    """Failures in a row: passing ones are borne for `patience` seconds."""

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock = clock
        self._patience = patience
        self._since: float | None = None
        self._was_well = False

    def went_well(self) -> None:
        self._since, self._was_well = None, True

    def failed(self, error: BatchmlError | StoreError) -> bool:
        """Bear it, or raise it as what people should read. True for the first of them in a row."""
        now = self._clock.monotonic()
        is_first = self._since is None
        self._since = now if self._since is None else self._since
        if not self._is_passing(error) or now - self._since >= self._patience:
            if isinstance(error, BatchmlError):
                raise error
            raise away(error) from error
        return is_first

    def _is_passing(self, error: BatchmlError | StoreError) -> bool:
        """True for what says nothing about what was asked. A user can sign in again."""
        match error:
            case StoreError():
                return error.temporary
            case ServiceError():
                return error.status >= 500 or error.status == _TOO_MANY
            case AccessError():
                return self._was_well
        return isinstance(error, ServiceUnreachable)
