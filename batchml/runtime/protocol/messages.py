"""Messages of a trial to its sweep's controller: small JSON objects in the sweep store's inbox.

Each message has the start time of its attempt, and everything new since the message before. A
trial that ends within a second sends only its end. `points` are `[step, [a value for each goal],
at]`, `decisions` are `[step, value, cutoff or null, version, goes on]`; times are in seconds since
the epoch. All numbers are finite. An end has a state, an exit code, the reason, and after a failure
the last lines of output. It has `again` if AWS Batch may make another attempt; then it counts only
after the job has ended.
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
MAX_LINE = 500  # characters of each line, and of `why`
MAX_METRICS = 50  # metrics that are no goals

_NAME = re.compile(r"(\d+)-(-?\d+)-(\d+)-(\d+)\.json")


class MessageSender(NamedTuple):
    """The attempt at a trial that sends a message."""

    wave: int
    trial: int  # negative if it is not known: `unknown_trial`
    attempt: int
    child: int  # index in the wave
    job: str  # AWS Batch's id, with `:INDEX` for the child of an array
    began: float


def unknown_trial(index: int) -> int:
    """A negative number instead of the trial's, for a child that could not read its trial.

    The controller finds the trial by the child's index in the wave.
    """
    return -1 - index


def message_key(wave: int, trial: int, attempt: int, seq: int) -> str:
    return f"{INBOX}{wave:06d}-{trial:06d}-{attempt:02d}-{seq:06d}.json"


def parse_key(key: str) -> Optional[Tuple[int, int, int, int]]:
    """(wave, trial, attempt, seq), which identify a message; None for any other key."""
    found = _NAME.fullmatch(key[len(INBOX) :]) if key.startswith(INBOX) else None
    if found is None:
        return None
    wave, trial, attempt, seq = map(int, found.groups())
    return wave, trial, attempt, seq


def make_message(
    sender: MessageSender,
    seq: int,
    kind: str,
    at: float,
    points: Sequence[Sequence[Any]] = (),
    decisions: Sequence[Sequence[Any]] = (),
    metrics: Optional[Dict[str, float]] = None,
) -> Dict[str, Any]:
    """A message. Empty fields are left out."""
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


def add_end(
    message: Dict[str, Any],
    state: str,
    code: int,
    why: str = "",
    tail: Sequence[str] = (),
    again: bool = False,
) -> Dict[str, Any]:
    """The message as the last one of its attempt. `again`: AWS Batch may make another attempt."""
    ended = {**message, "kind": END, "state": state, "code": code}
    if again:
        ended["again"] = True
    if why:
        ended["why"] = why[:MAX_LINE]
    if tail:
        ended["tail"] = [line[:MAX_LINE] for line in tail[-TAIL:]]
    return ended


def encode_message(message: Dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_message(data: bytes) -> Optional[Dict[str, Any]]:
    """The message; None for anything else, because other programs may write to the store, too."""
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
    return value if isinstance(value, list) else [None]  # which no check accepts


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
