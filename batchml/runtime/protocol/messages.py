"""What a trial tells its sweep: small JSON objects in the board's inbox.

Every message says when its attempt began, and has all that is new since the one before: one that
ends within a second sends its end alone. `points` are `[step, [a value for each goal], at]`,
`decisions` `[step, value, cutoff or null, version, goes on]`; times are seconds since the epoch.
All numbers are finite. An end has a state, a code, why, and of a failure the last lines of output;
it is `again` where AWS Batch may make another attempt, so that it counts once the job has ended.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.protocol.sweep_store import INBOX

START, REPORT, END = "start", "report", "end"

DONE, PRUNED, PAUSED = "DONE", "PRUNED", "PAUSED"
FAILED, DIVERGED, KILLED = "FAILED", "DIVERGED", "KILLED"
STATES = (DONE, PRUNED, PAUSED, FAILED, DIVERGED, KILLED)

TAIL = 20  # last lines of output
MAX_LINE = 500  # characters of each, and of `why`
MAX_METRICS = 50  # other metrics that are told

_NAME = re.compile(r"(\d+)-(-?\d+)-(\d+)-(\d+)\.json")


class Sender(NamedTuple):
    """One attempt at a trial of a wave."""

    wave: int
    trial: int  # see `unknown`
    attempt: int
    child: int  # its index: the place in the wave
    job: str  # AWS Batch's id, with `:INDEX` for the child of an array
    began: float


def unknown(index: int) -> int:
    """Stands for the trial of a child that could not learn which one it is to run: negative.

    The wave's event knows which trial is in this place.
    """
    return -1 - index


def message_key(wave: int, trial: int, attempt: int, seq: int) -> str:
    return f"{INBOX}{wave:06d}-{trial:06d}-{attempt:02d}-{seq:06d}.json"


def parse_key(key: str) -> Optional[Tuple[int, int, int, int]]:
    """(wave, trial, attempt, seq), by which messages are told apart; None for any other key."""
    found = _NAME.fullmatch(key[len(INBOX) :]) if key.startswith(INBOX) else None
    if found is None:
        return None
    wave, trial, attempt, seq = map(int, found.groups())
    return wave, trial, attempt, seq


def make(
    sender: Sender,
    seq: int,
    kind: str,
    at: float,
    points: Sequence[Sequence[Any]] = (),
    decisions: Sequence[Sequence[Any]] = (),
    metrics: Optional[Dict[str, float]] = None,
) -> Dict[str, Any]:
    """A message. Of what is empty nothing is said."""
    message: Dict[str, Any] = {
        "wave": sender.wave, "trial": sender.trial, "attempt": sender.attempt, "seq": seq,
        "index": sender.child, "job": sender.job, "began": round(sender.began, 3),
        "at": round(at, 3), "kind": kind,
    }  # fmt: skip
    if points:
        message["points"] = [list(point) for point in points]
    if decisions:
        message["decisions"] = [list(decision) for decision in decisions]
    if metrics:
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        message["metrics"] = dict(list(finite.items())[:MAX_METRICS])
    return message


def with_end(
    message: Dict[str, Any],
    state: str,
    code: int,
    why: str = "",
    tail: Sequence[str] = (),
    again: bool = False,
) -> Dict[str, Any]:
    """The message as the last of its attempt; `again`: AWS Batch may make another."""
    ended = {**message, "kind": END, "state": state, "code": code}
    if again:
        ended["again"] = True
    if why:
        ended["why"] = why[:MAX_LINE]
    if tail:
        ended["tail"] = [line[:MAX_LINE] for line in tail[-TAIL:]]
    return ended


def write(message: Dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")


def read(data: bytes) -> Optional[Dict[str, Any]]:
    """The message, or None for anything else: whoever may write to the board may write nonsense."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_message(found) else None


def _is_message(found: Dict[str, Any]) -> bool:
    return (
        all(_is_int(found.get(name)) for name in ("wave", "trial", "attempt", "seq", "index"))
        and all(_is_finite(found.get(name)) for name in ("at", "began"))
        and isinstance(found.get("job"), str)
        and found.get("kind") in (START, REPORT, END)
        and all(_is_point(each) for each in _list(found, "points"))
        and all(_is_decision(each) for each in _list(found, "decisions"))
        and all(isinstance(each, str) for each in _list(found, "tail"))
        and _are_metrics(found.get("metrics", {}))
        and isinstance(found.get("why", ""), str)
        and isinstance(found.get("again", False), bool)
        and (found["kind"] != END or _is_end(found))
    )


def _is_end(found: Dict[str, Any]) -> bool:
    return found.get("state") in STATES and _is_int(found.get("code"))


def _list(found: Dict[str, Any], name: str) -> List[Any]:
    value = found.get(name, [])
    return value if isinstance(value, list) else [None]  # which is nothing that is looked for


def _is_point(found: Any) -> bool:
    return (
        isinstance(found, list)
        and len(found) == 3
        and _is_int(found[0])
        and isinstance(found[1], list)
        and bool(found[1])
        and all(map(_is_finite, found[1]))
        and _is_finite(found[2])
    )


def _is_decision(found: Any) -> bool:
    return (
        isinstance(found, list)
        and len(found) == 5
        and _is_int(found[0])
        and _is_finite(found[1])
        and (found[2] is None or _is_finite(found[2]))
        and _is_int(found[3])
        and isinstance(found[4], bool)
    )


def _are_metrics(found: Any) -> bool:
    return isinstance(found, dict) and all(map(_is_finite, found.values()))


def _is_int(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool)


def _is_finite(found: Any) -> bool:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return False
    try:
        return math.isfinite(found)
    except OverflowError:  # a whole number that no float holds
        return False
