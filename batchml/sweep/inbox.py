"""The inbox: what trials say of themselves, until it is in the ledger.

Take messages, append them to the ledger, then discard them. One who is killed between leaves them
to be taken again; the fold bears that.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from batchml.runtime.protocol.messages import read
from batchml.runtime.protocol.sweep_store import INBOX
from batchml.runtime.storage.store import Store
from batchml.sweep.many import first_keys, get_many

MOST = 1000  # messages of one round

_FIELDS = (
    "wave", "trial", "attempt", "seq", "index", "job", "began", "at", "kind", "points", "decisions",
    "metrics", "state", "code", "why", "tail", "again",
)  # fmt: skip


class Taken(NamedTuple):
    messages: list[dict[str, Any]]
    keys: list[str]  # of these messages, and of what is none


def take(board: Store, most: int = MOST) -> Taken:
    """Some of the messages that wait. Raises StoreError."""
    keys = first_keys(board, INBOX, most)
    found = get_many(board, keys)
    messages = [message for data in found if data and (message := read(data)) is not None]
    return Taken([_kept(message) for message in messages], keys)


def discard(board: Store, keys: Sequence[str]) -> None:
    """Delete messages that are in the ledger. Raises StoreError."""
    board.delete(*keys)


def _kept(message: Mapping[str, Any]) -> dict[str, Any]:
    """What of a message the ledger takes: the fields that are known, in text that UTF-8 can say.

    A name that a program printed as JSON may hold half of a surrogate pair. One such message must
    not stop a controller, and the one after it.
    """
    kept = {name: message[name] for name in _FIELDS if name in message}
    try:
        msgspec.json.encode(kept)
    except UnicodeEncodeError:
        return {name: _said(value) for name, value in kept.items()}
    return kept


def _said(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_said(each) for each in value]
    if isinstance(value, dict):
        return {_said(name): _said(each) for name, each in value.items()}
    return value
