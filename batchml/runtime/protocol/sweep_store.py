"""Keys on a sweep's board, the store through which its trials and its controller speak.

Numbers are padded so that a list of keys is in their order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Dict, NamedTuple, Tuple, Union

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


# --- what every trial must know -------------------------------------------------------------------
# Course: what every trial of a sweep must know, as the client writes it to the board.


Scalar = Union[str, int, float, bool]

MAX, MIN = "max", "min"  # directions of a goal
ARRAY, RUNGS, WAVES = "array", "rungs", "waves"  # shapes of a sweep: how its trials become jobs
HOST_LOST, APP_ERROR, OUT_OF_MEMORY = "host-lost", "app-error", "out-of-memory"  # of `retry.on`
ASHA, HALVING, MEDIAN, NONE = "asha", "halving", "median", "none"  # ways of early stopping

# Seconds between two messages of a trial, and between two looks at whether it is to stop.
EVERY, LOOK = 60.0, 15.0


class BadCourse(ValueError):
    """The board's `course.json` is not one of ours."""


class Course(NamedTuple):
    """What a trial must know, the same for all of a sweep."""

    key: str  # the sweep's
    goals: Tuple[Tuple[str, str], ...]  # metric, direction; the first is what early stopping reads
    command: Tuple[str, ...]  # with {placeholders}
    params: Dict[str, Scalar]  # the job's own; a trial's replace them
    patterns: Dict[str, str]  # `[metrics]` of the job: name -> expression with one group
    step: str = "epoch"  # the name that is printed beside the metric
    method: str = NONE
    rungs: Tuple[int, ...] = ()  # steps at which trials are judged, rising, all below `max`
    max: int = 0  # steps of a full training; 0: unknown
    eta: int = 3
    resume: bool = False  # trials end at rungs, and go on later from their checkpoints
    shape: str = ARRAY
    grace: float = 30.0  # seconds from the stop signal to the kill
    every: float = EVERY  # seconds between two messages; at rungs they are sent at once
    look: float = LOOK  # seconds between two looks at `stop/`
    attempts: int = 1  # that AWS Batch makes at most of a job
    retries: Tuple[str, ...] = ()  # after which ends it does: those of `retry.on`

    def loss(self, value: float) -> float:
        """A value of the first goal with its sign turned where needed: less is always better."""
        return -value if self.goals[0][1] == MAX else value

    def target_of(self, rung: int) -> int:
        """The step at which a rung's trials end, rungs counted from 0; the last is the full one."""
        return self.rungs[rung] if rung < len(self.rungs) else self.max

    def to_json(self) -> bytes:
        return json.dumps(self._asdict(), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Course:
        """Fields of a later version are passed over. Raises BadCourse."""
        try:
            found = json.loads(data)
            known = {name: found[name] for name in cls._fields if name in found}
            known["goals"] = tuple((str(name), str(way)) for name, way in known["goals"])
            known["command"] = tuple(str(word) for word in known["command"])
            known = {"params": {}, "patterns": {}, **known}
            known["rungs"] = tuple(int(step) for step in known.get("rungs", ()))
            known["retries"] = tuple(str(end) for end in known.get("retries", ()))
            course = cls(**known)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadCourse(f"course.json is not one of ours: {error}") from error
        if not _is_sound(course):
            raise BadCourse("course.json is not one of ours: a field has another type")
        return course


def _is_sound(course: Course) -> bool:
    numbers: Tuple[Any, ...] = (
        course.max, course.eta, course.grace, course.every, course.look, course.attempts,
    )  # fmt: skip
    return (
        bool(course.goals)
        and all(way in (MAX, MIN) for _, way in course.goals)
        and all(isinstance(each, (int, float)) for each in numbers)
        and isinstance(course.params, dict)
        and isinstance(course.patterns, dict)
        and isinstance(course.key, str)
    )
