"""A controller's side of a sweep's store: the stop signal, the deadline, and the inbox.

The inbox has the messages of the trials until they are in the ledger: read them, append them to the
ledger, then delete them. After a crash between these steps they are read again, which does no harm.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from batchml.runtime.protocol.messages import decode_message
from batchml.runtime.protocol.sweep_store import DEADLINE, INBOX, STOP_ALL, deadline_key, stop_key
from batchml.runtime.storage.store import Store

# --- The stop signal and the deadline -------------------------------------------------------------


def signal_stop(store: Store, why: str) -> None:
    """Signal all trials, and the controller, to end. Raises StoreError."""
    store.put(STOP_ALL, why.encode())


def read_stop_signal(store: Store) -> str | None:
    """Why the sweep was stopped; None if it was not. Raises StoreError."""
    found = store.get(STOP_ALL)
    return None if found is None else found.decode("utf-8", "replace") or "it was stopped"


def clear_stop_signal(store: Store, trials: Iterable[int] = ()) -> None:
    """Let trials begin again, and these also if they were stopped one by one. Raises StoreError."""
    store.delete(STOP_ALL, *map(stop_key, trials))


def publish_deadline(store: Store, at: float) -> None:
    """Publish when all trials must end, in seconds since the epoch. It replaces an earlier one.

    Raises StoreError.
    """
    key = deadline_key(at)
    store.put(key, b"the sweep's time is over")
    store.delete(*(old for old in store.keys(DEADLINE) if old != key))


# --- The inbox ------------------------------------------------------------------------------------


MAX_MESSAGES = 1000  # that are read at once

_FIELDS = (
    "wave", "trial", "attempt", "seq", "index", "job", "began", "at", "kind", "points", "decisions",
    "metrics", "state", "code", "why", "tail", "again",
)  # fmt: skip


class InboxMessages(NamedTuple):
    messages: list[dict[str, Any]]
    keys: list[str]  # of the messages, and of unreadable objects


def read_inbox(store: Store, limit: int = MAX_MESSAGES) -> InboxMessages:
    """The first messages in the inbox. Raises StoreError."""
    keys = store.keys(INBOX, limit)
    found = store.get_many(keys)
    messages = [message for data in found if data and (message := decode_message(data)) is not None]
    return InboxMessages([_known_fields(message) for message in messages], keys)


def delete_messages(store: Store, keys: Sequence[str]) -> None:
    """Delete messages that are in the ledger. Raises StoreError."""
    store.delete(*keys)


def _known_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of a message, with text that UTF-8 can encode.

    A name that a program printed as JSON may have half of a surrogate pair. Such a message must not
    stop a controller, and then each of its successors.
    """
    kept = {name: message[name] for name in _FIELDS if name in message}
    try:
        msgspec.json.encode(kept)
    except UnicodeEncodeError:
        return {name: _encodable(value) for name, value in kept.items()}
    return kept


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return value
