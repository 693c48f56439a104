"""The sweep store: keys and documents through which a sweep's trials and controller communicate.

A batch of trials is what the controller submits at once, mostly as one array job. Keys and fields
call it a wave. Numbers in keys are padded, so that sorted keys are sorted by number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Dict, NamedTuple, Tuple, Union

CONTRACT = "course.json"  # the `TrialContract`
CUTOFFS = "cutoffs.json"  # the values that trials must reach: `rungs.Cutoffs`
INBOX = "inbox/"  # messages of the trials
STOP = "stop/"
STOP_ALL = f"{STOP}all"  # if it exists, all trials save and stop; the content is the reason
DEADLINE = f"{STOP}at-"


def stop_key(trial: int) -> str:
    return f"{STOP}{trial}"


def deadline_key(at: float) -> str:
    """The key that says when all trials save and stop. A list of `stop/` is enough to read it."""
    return f"{DEADLINE}{int(at):011d}"


def deadline_in(keys: Iterable[str]) -> float:
    """The deadline, in seconds since the epoch; 0 without one. The later one of two."""
    found = (key[len(DEADLINE) :] for key in keys if key.startswith(DEADLINE))
    return float(max((int(each) for each in found if each.isdigit()), default=0))


def batch_key(wave: int) -> str:
    """The manifest of a batch of trials: what each child of its array job runs."""
    return f"waves/{wave:06d}.jsonl"


def claim_key(wave: int, trial: int) -> str:
    """The claim of a trial in a batch: the id of the job that runs it."""
    return f"claims/{wave:06d}-{trial:06d}"


def rung_prefix(rung: int) -> str:
    """The marks of trials that finished a rung, counted from 0: `rungs.mark_key`."""
    return f"rungs/{rung}/"


def checkpoint_prefix(trial: int) -> str:
    """The prefix of a trial's checkpoints, if the sweep store has them."""
    return f"checkpoints/{trial}/"


# --- The trial contract ---------------------------------------------------------------------------


Scalar = Union[str, int, float, bool]

MAX, MIN = "max", "min"  # directions of a goal
ARRAY, RUNGS, WAVES = "array", "rungs", "waves"  # how trials become jobs
HOST_LOST, APP_ERROR, OUT_OF_MEMORY = "host-lost", "app-error", "out-of-memory"  # of `retry.on`
ASHA, HALVING, MEDIAN, NONE = "asha", "halving", "median", "none"  # methods of early stopping

EVERY = 60.0  # seconds between two messages of a trial
LOOK = 15.0  # seconds between two polls of `stop/`


class BadTrialContract(ValueError):
    """The sweep store's `course.json` is missing or invalid."""


class TrialContract(NamedTuple):
    """What the client tells all trials of a sweep, as `course.json`."""

    key: str  # of the sweep
    goals: Tuple[Tuple[str, str], ...]  # metric, direction; early stopping uses the first
    command: Tuple[str, ...]  # with {placeholders}
    params: Dict[str, Scalar]  # of the job; a trial's parameters replace them
    patterns: Dict[str, str]  # `[metrics]` of the job: name -> expression with one group
    step: str = "epoch"  # the name of the step in the program's output
    method: str = NONE  # of early stopping
    rungs: Tuple[int, ...] = ()  # steps at which trials are compared, rising, all below `max`
    max: int = 0  # steps of a full training; 0: unknown
    eta: int = 3
    resume: bool = False  # trials end at rungs, and continue later from their checkpoints
    shape: str = ARRAY  # how trials become jobs
    grace: float = 30.0  # seconds from the stop signal to the kill
    every: float = EVERY  # seconds between two messages; at rungs they are sent at once
    look: float = LOOK  # seconds between two polls of `stop/`
    attempts: int = 1  # the most attempts that AWS Batch makes of a job
    retries: Tuple[str, ...] = ()  # `retry.on`: the failures after which it makes another

    def loss(self, value: float) -> float:
        """A value of the first goal as a loss: smaller is better, so `max` goals are negated."""
        return -value if self.goals[0][1] == MAX else value

    def target_of(self, rung: int) -> int:
        """The step at which trials of a rung end, counted from 0; after the last, the full one."""
        return self.rungs[rung] if rung < len(self.rungs) else self.max

    def to_json(self) -> bytes:
        return json.dumps(self._asdict(), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> TrialContract:
        """Read `course.json`. Fields of later versions are ignored. Raises BadTrialContract."""
        try:
            found = json.loads(data)
            known = {name: found[name] for name in cls._fields if name in found}
            known["goals"] = tuple((str(name), str(to)) for name, to in known["goals"])
            known["command"] = tuple(str(word) for word in known["command"])
            known = {"params": {}, "patterns": {}, **known}
            known["rungs"] = tuple(int(step) for step in known.get("rungs", ()))
            known["retries"] = tuple(str(end) for end in known.get("retries", ()))
            contract = cls(**known)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadTrialContract(f"course.json is not valid: {error}") from error
        if not _is_valid(contract):
            raise BadTrialContract("course.json is not valid: a field has the wrong type")
        return contract


def _is_valid(contract: TrialContract) -> bool:
    numbers: Tuple[Any, ...] = (
        contract.max, contract.eta, contract.grace, contract.every, contract.look,
        contract.attempts,
    )  # fmt: skip
    return (
        bool(contract.goals)
        and all(direction in (MAX, MIN) for _, direction in contract.goals)
        and all(isinstance(each, (int, float)) for each in numbers)
        and isinstance(contract.params, dict)
        and isinstance(contract.patterns, dict)
        and isinstance(contract.key, str)
    )
