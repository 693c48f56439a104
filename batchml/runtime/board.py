"""Keys on a sweep's board, the store through which its trials and its controller speak.

Numbers are padded so that a list of keys is in their order.
"""

from __future__ import annotations

from collections.abc import Iterable

COURSE = "course.json"  # what all trials must know
CUTOFFS = "cutoffs.json"  # the controller's word about who may go on
INBOX = "inbox/"  # messages of the trials
STOP = "stop/"
STOP_ALL = f"{STOP}all"  # presence: save and stop; the content says why
DEADLINE = f"{STOP}at-"


def stop_key(trial: int) -> str:
    return f"{STOP}{trial}"


def deadline_key(at: float) -> str:
    """Its name says when all trials save and stop: who lists `stop/` need read nothing more."""
    return f"{DEADLINE}{int(at):011d}"


def deadline_in(keys: Iterable[str]) -> float:
    """Seconds since the epoch; 0 where there is none. Of two, for a moment, the later one."""
    found = (key[len(DEADLINE) :] for key in keys if key.startswith(DEADLINE))
    return float(max((int(each) for each in found if each.isdigit()), default=0))


def wave_key(wave: int) -> str:
    """The manifest of a wave: what each child of its array is to run."""
    return f"waves/{wave:06d}.jsonl"


def claim_key(wave: int, trial: int) -> str:
    """Its value is the id of the job that runs this trial of this wave."""
    return f"claims/{wave:06d}-{trial:06d}"


def rung_prefix(rung: int) -> str:
    """The marks of trials that finished a rung, from 0: see `rungs.mark_key`."""
    return f"rungs/{rung}/"


def checkpoint_prefix(trial: int) -> str:
    """Where a trial's checkpoints are, if they are on the board."""
    return f"checkpoints/{trial}/"
