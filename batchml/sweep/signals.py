"""`stop/` on the board: `all` makes every trial save and end, `at-SECONDS` does so later."""

from collections.abc import Iterable

from batchml.runtime.protocol.sweep_store import DEADLINE, STOP_ALL, deadline_key, stop_key
from batchml.runtime.storage.store import Store


def call_off(board: Store, why: str) -> None:
    """Ask all trials, and the controller, to end. Raises StoreError."""
    board.put(STOP_ALL, why.encode())


def called_off(board: Store) -> str | None:
    """Why all are asked to end; None when nobody asked. Raises StoreError."""
    found = board.get(STOP_ALL)
    return None if found is None else found.decode("utf-8", "replace") or "it was stopped"


def call_back(board: Store, trials: Iterable[int] = ()) -> None:
    """The sweep goes on: trials may begin again, also these if they were stopped one by one.

    Raises StoreError.
    """
    board.delete(STOP_ALL, *map(stop_key, trials))


def say_deadline(board: Store, at: float) -> None:
    """When all trials are to end, in seconds since the epoch; in the place of what was said before.

    Raises StoreError.
    """
    key = deadline_key(at)
    board.put(key, b"the sweep's time is over")
    board.delete(*(old for old in board.keys(DEADLINE) if old != key))
