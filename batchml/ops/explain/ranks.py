"""The log of a run whose command ran as several ranks: which lines say why it ended. Pure."""

import re
from collections.abc import Sequence

# As our supervisor writes it (runtime/nodes/torchrun/main.py), when a rank has ended a run.
_REPEATED = "batchml: its last lines were:"
_INDENT = "  "

_LABEL = re.compile(r"\[r[0-9]+\] ")
_BEGAN = re.compile(r"batchml: generation [0-9]+: [^,]*, [0-9]+ ranks?(, from .*)?\.")
_ENDED = re.compile(r"batchml: (Rank [0-9]+ on node [0-9]+.*)")


def of_first(lines: Sequence[str]) -> tuple[str, ...]:
    """What the rank printed last that failed first, and what our supervisor says after it.

    Before it the lines that say how ranks were started. Without such an end all lines, without the
    labels of their ranks. Those of several ranks come mixed, so that a traceback can only be read
    in what is repeated of one.
    """
    found = [place for place, line in enumerate(lines) if line == _REPEATED]
    if not found:
        return tuple(_LABEL.sub("", line, count=1) for line in lines)
    begun = [line for line in lines[: found[-1]] if _BEGAN.fullmatch(line)]
    rest = lines[found[-1] + 1 :]
    return (*begun, *(line.removeprefix(_INDENT) for line in rest))


def never_saved(lines: Sequence[str]) -> bool:
    """Whether the last start in the log had no checkpoint to go on from; False if it has none."""
    begun = [began for line in lines if (began := _BEGAN.fullmatch(line))]
    return bool(begun) and not begun[-1][1]


def who_ended(lines: Sequence[str]) -> str:
    """`Rank 3 on node 1 (10.0.0.7) ended with 9.`; empty where no rank ended the run."""
    found = [ended[1] for line in lines if (ended := _ENDED.fullmatch(line))]
    return found[-1] if found else ""
