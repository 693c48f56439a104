"""Follow runs to their end: one poller, and logs that lose no line.

`follow` yields what happens to one run, its children and nodes, as values; `wait` waits for many
with a call for each hundred; `printed` reads what there is. The caller decides what to show.

Whoever submits needs the pace alone, so the rest is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from batchml.ops.watch.pace import LOCAL_PACE, Pace, backoff

if TYPE_CHECKING:
    from batchml.ops.watch.contact import Outages
    from batchml.ops.watch.following import follow
    from batchml.ops.watch.happenings import (
        CUT,
        DAMAGED,
        MARKED,
        PROVEN,
        QUIET,
        SHORT,
        Closed,
        Ended,
        Happening,
        Hosted,
        Line,
        Lost,
        Measured,
        Opened,
        Paused,
        Progress,
        StatusChanged,
        Used,
    )
    from batchml.ops.watch.part import OpenLog
    from batchml.ops.watch.poller import Describe, Poller, Recall, wait
    from batchml.ops.watch.reading import Printed, printed
    from batchml.ops.watch.recall import recalling

_HOMES = {
    "Outages": "contact",
    "follow": "following",
    **dict.fromkeys(("Describe", "Poller", "Recall", "wait"), "poller"),
    **dict.fromkeys(("Printed", "printed"), "reading"),
    "OpenLog": "part",
    "recalling": "recall",
}

__all__ = [
    "CUT", "Closed", "DAMAGED", "Describe", "Ended", "Happening", "Hosted", "LOCAL_PACE",
    "Line", "Lost", "MARKED", "Measured", "OpenLog", "Opened", "Outages", "PROVEN", "Pace",
    "Paused", "Poller", "Printed", "Progress", "QUIET", "Recall", "SHORT", "StatusChanged",
    "Used", "backoff", "follow", "printed", "recalling", "wait",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'happenings')}"), name)
