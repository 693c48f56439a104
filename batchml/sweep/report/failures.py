"""What went wrong, grouped by the last line that the trials printed."""

import re
from collections.abc import Iterable
from typing import Any

from batchml.model.sweep import Trial, TrialState

_BAD = (TrialState.FAILED, TrialState.LOST, TrialState.DIVERGED)
_GROUPS = 24
_NAMED = 12  # trials that are named of each group
_LINES = 20
_LONGEST = 240  # characters of a line

# What differs between trials that failed for the same reason: numbers, addresses, quoted words.
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def failures(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """The largest group first. `line` and `tail` are the first trial's own words."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        if trial.state in _BAD:
            groups.setdefault((trial.state.value, _VARIES.sub("#", last_line(trial))), []).append(
                trial
            )
    largest = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0].number))
    return [
        {
            "state": state,
            "line": last_line(alike[0])[:_LONGEST] or "(no output)",
            "why": alike[0].why[:_LONGEST],
            "count": len(alike),
            "trials": [trial.number for trial in alike[:_NAMED]],
            "tail": [line[:_LONGEST] for line in alike[0].tail[-_LINES:]],
        }
        for (state, _), alike in largest[:_GROUPS]
    ]


def last_line(trial: Trial) -> str:
    """What it said last; without output, why it ended."""
    said = next((line.strip() for line in reversed(trial.tail) if line.strip()), "")
    return said or trial.why
