"""A trial before its command begins: which one it is, its claim, its command and its variables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.entry.fetch import claim, refusal
from batchml.runtime.protocol import manifest, messages
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, DUPLICATE, STOPPED
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE as TRY_ELSEWHERE
from batchml.runtime.protocol.messages import FAILED, KILLED, Sender
from batchml.runtime.protocol.rungs import ranked
from batchml.runtime.protocol.sweep_store import (
    APP_ERROR,
    ASHA,
    COURSE,
    HOST_LOST,
    MEDIAN,
    OUT_OF_MEMORY,
    RUNGS,
    STOP,
    STOP_ALL,
    BadCourse,
    Course,
    Scalar,
    claim_key,
    deadline_in,
    rung_prefix,
    stop_key,
)
from batchml.runtime.protocol.variables import RuntimeEnv, fill, variables
from batchml.runtime.storage.store import Store
from batchml.runtime.telemetry.budget import is_main_node

_OUT_OF_MEMORY = 137  # the exit code of a program that the kernel killed


class Over(Exception):
    """The child ends before its command, with a line for people and this code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class StopWord(NamedTuple):
    """What `stop/` on the board says to one trial."""

    why: str  # why it is to stop; empty while it is not
    deadline: float  # seconds since the epoch; 0: none

    def at(self, now: float) -> str:
        """Why it is to stop at this moment; empty while it is not."""
        late = "the sweep's time is over" if 0 < self.deadline <= now else ""
        return self.why or late


class Work(NamedTuple):
    """What this container is to do."""

    course: Course
    entry: manifest.Entry
    sender: Sender
    is_main: bool  # of several nodes, the one that speaks for the trial
    after: int  # the step from whose checkpoint it goes on; 0: it begins anew
    shift: Optional[int] = None  # see Place of sweep_checkpoints.py
    deadline: float = 0.0  # as it was known at first; see StopWord

    @property
    def limit(self) -> int:
        """The step at which the program is to end; 0 where nobody knows."""
        return self.entry.target or self.course.max

    @property
    def is_part(self) -> bool:
        """Whether more of the trial may follow in a later wave."""
        return 0 < self.entry.target < self.course.max

    @property
    def is_judged(self) -> bool:
        """Whether it may be stopped because others do better."""
        course = self.course
        by_rungs = course.method == ASHA and not course.resume
        return (by_rungs or course.method == MEDIAN) and not self.entry.full

    def command(self) -> List[str]:
        return fill(self.course.command, self._params())

    def variables(self) -> Dict[str, str]:
        """What the program sees of it."""
        course, entry = self.course, self.entry
        found = {
            **variables(self._params()),
            "BATCHML_TRIAL": str(entry.trial),
            "BATCHML_SEED": str(entry.seed),
        }
        if self.limit:
            found["BATCHML_STEPS"] = str(self.limit)
        if self.after:
            found["BATCHML_RESUME"] = "1"
        if course.rungs:
            found["BATCHML_RUNGS"] = ",".join(map(str, course.rungs))
        if self.is_judged or self.is_part:
            found["BATCHML_GOAL"] = course.goals[0][0]  # `report` of it waits for the judge
        return found

    def _params(self) -> Dict[str, Scalar]:
        return {**self.course.params, **self.entry.params}


def begin(
    board: Store,
    env: RuntimeEnv,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
) -> Work:
    """Find out what this child is to run, and claim it.

    Raises Over where nothing is to be run, StoreError when the board cannot be had.
    """
    index, is_main = env.array_index or 0, is_main_node(environ)
    sender = Sender(env.wave, messages.unknown(index), env.attempt, index, env.run, clock())
    try:
        course, entry = _read(board, env, index)
    except (BadCourse, manifest.BadManifest) as error:
        _tell_end(board, sender, clock(), FAILED, CONFIGURATION_ERROR, str(error))
        raise Over(CONFIGURATION_ERROR, f"{error} The sweep's board is {env.sweep}.") from error
    sender = sender._replace(trial=entry.trial)
    holder = claim(board, env, claim_key(env.wave, entry.trial))
    if holder is not None:
        raise Over(DUPLICATE, refusal(holder)[len("batchml: ") :])
    word = stop_word(board, entry.trial)
    why = word.at(clock())
    if why:
        code = stopped_code(course)
        if is_main:
            _tell_end(board, sender, clock(), KILLED, code, why)
        raise Over(code, f"trial {entry.trial} does not begin: {why}")
    after = max((step for step in course.rungs if step < (entry.target or course.max)), default=0)
    after = after if entry.resumes else 0
    return Work(course, entry, sender, is_main, after, deadline=word.deadline)


def stop_word(board: Store, trial: int) -> StopWord:
    """What is said to this trial now. Raises StoreError."""
    found = board.keys(STOP)  # one request, where to get what is not there would take four
    deadline = deadline_in(found)
    for key in (STOP_ALL, stop_key(trial)):
        if key in found:
            words = (board.get(key) or b"")[: messages.MAX_LINE].decode("utf-8", "replace")
            return StopWord(" ".join(words.split()) or "the sweep was stopped", deadline)
    return StopWord("", deadline)


def stopped_code(course: Course) -> int:
    """The exit code of a trial that a limit or its user stopped.

    Where rungs wait for each other, a job that failed would end those that depend on it. Where AWS
    Batch tries programs again that failed, it would try this one.
    """
    return 0 if course.shape == RUNGS or APP_ERROR in course.retries else STOPPED


def comes_again(course: Course, attempt: int, code: int, was_asked: bool) -> bool:
    """Whether AWS Batch may make another attempt after one that exits with `code`.

    As `retry_strategy` of aws/batch/requests.py tells it to. `was_asked`: a signal from outside
    ended it, as one does when a host goes; Batch knows which it was, the trial does not.
    """
    retries = course.retries
    if code == 0 or attempt >= course.attempts:
        return False
    if HOST_LOST in retries and (was_asked or code == TRY_ELSEWHERE):
        return True
    if OUT_OF_MEMORY in retries and code == _OUT_OF_MEMORY:
        return True
    return APP_ERROR in retries and not TRY_ELSEWHERE <= code <= CONFIGURATION_ERROR


def _read(board: Store, env: RuntimeEnv, index: int) -> Tuple[Course, manifest.Entry]:
    data = board.get(COURSE)
    if data is None:
        raise BadCourse("course.json is missing from the sweep's board.")
    course = Course.from_json(data)
    if not env.rung:
        return course, manifest.read(board, course.key, env.wave, index, env.wave_width)
    best = ranked(board.keys(rung_prefix(env.rung - 1)))
    if index >= len(best):
        raise Over(
            0, f"{len(best)} trials finished the rung before this one: nothing is to be run."
        )
    # All trials of such a sweep are in its first wave, by their number.
    entry = manifest.read(board, course.key, 1, best[index], env.wave_width)
    return course, entry._replace(target=course.target_of(env.rung), resumes=True)


def _tell_end(board: Store, sender: Sender, now: float, state: str, code: int, why: str) -> None:
    message = messages.with_end(messages.make(sender, 0, messages.END, now), state, code, why)
    board.put(messages.message_key(*sender[:3], 0), messages.write(message))
