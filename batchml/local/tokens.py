"""`nextToken`: where the next page goes on, as a text that clients hand back unread.

A position, never a snapshot: a token is small, lives as long as what it points into, and means the
same to a restarted server.
"""

import base64
from typing import Any

import msgspec


def encode(value: Any) -> str:
    """The token of a position: anything that msgspec can write as JSON."""
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def decode(token: str, kind: Any) -> Any:
    """The position in `token`, of the type `kind`. Raises ValueError for what is none."""
    padded = token + "=" * (-len(token) % 4)
    try:
        return msgspec.json.decode(base64.b64decode(padded, b"-_", validate=True), type=kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None
