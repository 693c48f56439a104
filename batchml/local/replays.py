"""Requests that somebody has seen and sends again.

A call that arrives twice is answered twice and done once: by the id that an SDK keeps over its
re-sends, else by its signature (`Core.request`). But SDKs do not sign that id, and the same call
made twice in one second is signed the same, so a new id under a known signature is a second call
or a forged one. It is taken for a call while the signature is fresh, as a client's own is. After
that it is put off with an answer that makes SDKs sign again, which whoever has only seen the
request cannot do. The same goes for what was signed before this server could have seen it.
"""

from batchml.local.wire import Refused

FRESH = 2.0  # seconds; a signature's own time is in whole seconds
_LIFE = 600.0  # seconds; longer than any signature is good for, from 300 ahead to 300 behind
_MOST = 500_000


class Replays:
    def __init__(self, now: float) -> None:
        self._since = now
        self._rotated = now
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()

    def check(self, signature: str, signed_at: float, now: float) -> None:
        """Note a signature that makes a change; `signed_at` in whole seconds. Raises Refused."""
        if now - self._rotated > _LIFE:
            self._seen_before, self._seen = self._seen, set()
            self._rotated = now
        mark = int(signature[:15], 16)
        if abs(now - signed_at) > FRESH and (
            signed_at < int(self._since) or mark in self._seen or mark in self._seen_before
        ):
            raise _again("This signature has been used, or is older than the server.")
        if len(self._seen) >= _MOST:
            raise _again("Too many requests.")
        self._seen.add(mark)


def _again(why: str) -> Refused:
    return Refused("TooManyRequestsException", f"{why} Sign the request again.", 429)
