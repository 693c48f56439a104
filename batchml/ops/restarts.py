"""When the ranks of a run began again in place, and why: from its main node's log. Pure."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from batchml.aws.batch.jobs import Mark
from batchml.runtime.nodes.torchrun.restarts import AGAIN

PATTERN = f'"{AGAIN}"'  # of CloudWatch Logs
SHOWN = 5  # the last ones
_OURS = "batchml: "


class Restart(Struct, frozen=True):
    at: int  # ms since the epoch
    why: str  # "node 1 does not answer any more"


def restarts(marks: Iterable[Mark]) -> list[Restart]:
    """Those that our runtime tells of; by time."""
    found = []
    for mark in marks:
        text = mark.message.strip()
        if text.startswith(_OURS) and text.endswith(AGAIN):
            why = text.removeprefix(_OURS).removesuffix(AGAIN).strip().rstrip(".")
            found.append(Restart(mark.at, why[:1].lower() + why[1:]))
    return sorted(found, key=lambda each: each.at)


def restarts_text(found: Sequence[Restart], is_whole: bool = True) -> str:
    """`2 times in place: node 1 is gone, at 10:42; rank 3 on node 1 ended with 1, at 11:05 UTC`.

    The day is said where there are several. Not `is_whole`: a long log was read in part.
    """
    if not found:
        return ""
    days = len({_time(each.at, "%F") for each in found}) > 1
    form = "%m-%d %H:%M" if days else "%H:%M"
    count = f"{'' if is_whole else 'at least '}{_times(len(found))}"
    last = ", the last of them" if len(found) > SHOWN else ""
    told = "; ".join(f"{each.why}, at {_time(each.at, form)}" for each in found[-SHOWN:])
    return f"{count} in place{last}: {told} UTC"


def restarts_json(found: Sequence[Restart]) -> dict[str, Any]:
    """For programs; nothing for a run that has none."""
    return {"restarts": [{"at": each.at, "why": each.why} for each in found]} if found else {}


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _time(ms: int, form: str) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime(form)
