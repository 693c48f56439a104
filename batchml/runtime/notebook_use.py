"""Whether somebody works in a JupyterLab, by what its own API says.

A kernel that computes is use, for however long, and so is a terminal that prints, a cell that was
run, a file that was saved, a `batchml shell`. An open browser tab is not: what it asks for by
itself counts for nothing. Source: jupyter_server's `/api/kernels` (`execution_state`,
`last_activity`, which moves with what a user sends to a kernel) and `/api/terminals`
(`last_activity`, which moves with output).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, List, NamedTuple, Optional

from batchml.runtime import seats

_PATIENCE = 10.0  # seconds for an answer
_DEAD = ("idle", "dead", "unknown", "starting")  # states of a kernel that computes nothing


class Look(NamedTuple):
    """What JupyterLab says at one moment. Moments as it writes them: they are only compared."""

    busy: int  # kernels that compute
    moments: "tuple[str, ...]"  # of the last use of each kernel and terminal
    saved: float  # when a file was saved last


class Jupyter:
    """One server, asked over HTTP."""

    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._headers = {"Authorization": f"token {token}"}

    def look(self, saved: float) -> Optional[Look]:
        """None where it does not answer, or not as a Jupyter server does."""
        try:
            kernels, terminals = self._get("kernels"), self._get("terminals")
            return Look(
                sum(each.get("execution_state") not in _DEAD for each in kernels),
                tuple(str(each.get("last_activity")) for each in [*kernels, *terminals]),
                saved,
            )
        except (OSError, HTTPException, ValueError, AttributeError):
            return None

    def _get(self, what: str) -> List[Any]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE)
        try:
            connection.request("GET", f"/api/{what}", headers=self._headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == 404 and what == "terminals":
            return []  # an image without them
        found = json.loads(content)
        if answer.status != 200 or not isinstance(found, list):
            raise ValueError(f"{answer.status} for {what}")
        return found


class Use:
    """Tells use from its absence by what has changed since the look before."""

    def __init__(self) -> None:
        self._before: Optional[Look] = None

    def see(self, look: Optional[Look], environ: Mapping[str, str]) -> bool:
        """Whether there was use since the last look. A server that does not answer is not used."""
        if look is None:
            return seats.count(environ) > 0
        before, self._before = self._before, look
        return is_used(look, before) or seats.count(environ) > 0


def is_used(look: Look, before: Optional[Look]) -> bool:
    """Pure. Something ended, such as a kernel that is shut down, is use, too: somebody did it."""
    return before is None or look.busy > 0 or look[1:] != before[1:]
