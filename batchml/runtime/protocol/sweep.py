"""What a sweep's trials and its controller send each other: keys, messages, manifest, decisions."""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.protocol.variables import Scalar
from batchml.runtime.storage.store import Store

# --- The sweep store ------------------------------------------------------------------------------
# The store through which a sweep's trials and controller communicate: its keys and documents.
#
# A batch of trials is all trials that the controller submits at once, mostly as one array job. Keys
# and fields call it a wave. Numbers in keys are padded, so that sorted keys are sorted by number.


CONTRACT = "course.json"  # the `TrialContract`
CUTOFFS = "cutoffs.json"  # the values that trials must reach: `Cutoffs`
INBOX = "inbox/"  # messages of the trials
STOP = "stop/"
STOP_ALL = f"{STOP}all"  # if it exists, all trials save and stop; the content is the reason
DEADLINE = f"{STOP}at-"


def stop_key(trial: int) -> str:
    return f"{STOP}{trial}"


def deadline_key(at: float) -> str:
    """The key whose name has the time when all trials save and stop: a list of keys shows it."""
    return f"{DEADLINE}{int(at):011d}"


def deadline_in(keys: Iterable[str]) -> float:
    """The deadline, in seconds since the epoch: the latest in these keys; 0 without one."""
    found = (key[len(DEADLINE) :] for key in keys if key.startswith(DEADLINE))
    return float(max((int(each) for each in found if each.isdigit()), default=0))


def batch_key(wave: int) -> str:
    """The key of a batch's manifest, which has the trial of each child of the array job."""
    return f"waves/{wave:06d}.jsonl"


def claim_key(wave: int, trial: int) -> str:
    """The key of a trial's claim in a batch. The value is the id of the job that runs the trial."""
    return f"claims/{wave:06d}-{trial:06d}"


def rung_prefix(rung: int) -> str:
    """The prefix of the marks of trials that finished a rung, counted from 0: `mark_key`."""
    return f"rungs/{rung}/"


def checkpoint_prefix(trial: int) -> str:
    """The prefix of a trial's checkpoints, if the sweep store has them."""
    return f"checkpoints/{trial}/"


# --- The trial contract ---------------------------------------------------------------------------


MAX, MIN = "max", "min"  # directions of a goal
ARRAY, RUNGS = "array", "rungs"  # values of `shape`; the third, "waves", needs nothing of a trial
HOST_LOST, APP_ERROR, OUT_OF_MEMORY = "host-lost", "app-error", "out-of-memory"  # of `retry.on`
# Methods of early stopping. With the fourth, "halving", the controller alone decides.
ASHA, MEDIAN, NONE = "asha", "median", "none"

EVERY = 60.0  # seconds between two messages of a trial
POLL_EVERY = 15.0  # seconds between two polls of `stop/`


class BadTrialContract(ValueError):
    """The sweep store's `course.json` is missing or invalid."""


class TrialContract(NamedTuple):
    """The settings of a sweep that its trials read, as `course.json`."""

    key: str  # of the sweep
    goals: Tuple[Tuple[str, str], ...]  # metric, direction; early stopping uses the first
    command: Tuple[str, ...]  # with {placeholders}
    params: Dict[str, Scalar]  # of the job; a trial's parameters replace them
    patterns: Dict[str, str]  # `[metrics]` of the job: name -> expression with one group
    step: str = "epoch"  # the name of the step in the program's output
    method: str = NONE  # of early stopping
    rungs: Tuple[int, ...] = ()  # steps at which trials are compared, rising, all below `max`
    max: int = 0  # steps of a full training; 0: unknown
    eta: int = 3  # ASHA's reduction factor: one of so many trials goes on from a rung to the next
    resume: bool = False  # trials end at rungs, and continue later from their checkpoints
    shape: str = ARRAY  # how trials become jobs
    grace: float = 30.0  # seconds from the stop signal to the kill
    every: float = EVERY  # seconds between two messages; at rungs they are sent at once
    look: float = POLL_EVERY  # seconds between two polls of `stop/`
    attempts: int = 1  # the most attempts that AWS Batch makes of a job
    is_step_given: bool = True  # False: `step` is a default, and lines may count something else
    retries: Tuple[str, ...] = ()  # `retry.on`: the failures after which AWS Batch tries again

    def loss(self, value: float) -> float:
        """A value of the first goal as a loss: smaller is better, so `max` goals are negated."""
        return -value if self.goals[0][1] == MAX else value

    def target_of(self, rung: int) -> int:
        """The step at which trials of rung `rung`, from 0, end; after the last rung it is `max`."""
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


# --- Messages -------------------------------------------------------------------------------------
# Messages of a trial to its sweep's controller: small JSON objects in the sweep store's inbox.
#
# Each message has the start time of its attempt, and everything new since the message before. A
# trial that ends within a second sends only one message, of the kind END. `points` are `[step, [a
# value for each goal], at]`, `decisions` are `[step, value, cutoff or null, version, goes on]`;
# times are in seconds since the epoch. All numbers are finite. `counter` is what the lines of the
# program count if the sweep names no step, `other` is what they count if it does not count. An END
# message has a state, an exit code, the reason, and after a failure the last lines of output. It
# has `again` if AWS Batch may make another attempt; then it counts only after the job has ended.


START, REPORT, END = "start", "report", "end"

DONE, PRUNED, PAUSED = "DONE", "PRUNED", "PAUSED"
FAILED, DIVERGED, KILLED = "FAILED", "DIVERGED", "KILLED"
STATES = (DONE, PRUNED, PAUSED, FAILED, DIVERGED, KILLED)

# `why` of an END with KILLED whose cause the trial does not know; AWS Batch may.
SIGNALLED = "a signal stopped it: it was cancelled, its time was over, or its host is lost"

TAIL = 20  # last lines of output in a message
MAX_LINE = 500  # characters of each line, and of `why`
NO_COUNTER = "none"  # `other`, if lines have no counter at all
MAX_METRICS = 50  # metrics in a message that are not goals


class MessageSender(NamedTuple):
    """The attempt at a trial that sends a message."""

    wave: int
    trial: int  # negative if the trial could not be read: `unknown_trial`
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


def make_message(
    sender: MessageSender,
    seq: int,
    kind: str,
    at: float,
    points: Sequence[Sequence[Any]] = (),
    decisions: Sequence[Sequence[Any]] = (),
    metrics: Optional[Dict[str, float]] = None,
    counters: Tuple[str, str] = ("", ""),
) -> Dict[str, Any]:
    """A message. Empty fields are left out. `counters`: `counter` and `other` of the program."""
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
    learned = {"counter": counters[0], "other": counters[1]}
    message.update({key: name for key, name in learned.items() if name})
    return message


def add_end(
    message: Dict[str, Any],
    state: str,
    code: int,
    why: str = "",
    tail: Sequence[str] = (),
    again: bool = False,
) -> Dict[str, Any]:
    """Make this the last message of its attempt. `again`: AWS Batch may make another attempt."""
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
        and isinstance(found.get("metrics", {}), dict)
        and all(map(_is_finite, found.get("metrics", {}).values()))
        and all(isinstance(found.get(name, ""), str) for name in ("why", "counter", "other"))
        and isinstance(found.get("again", False), bool)
        and (found["kind"] != END or (found.get("state") in STATES and _is_int(found.get("code"))))
    )


def _list(found: Dict[str, Any], name: str) -> List[Any]:
    value = found.get(name, [])
    return value if isinstance(value, list) else [None]  # a value that no check accepts


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


def _is_int(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool)


def _is_finite(found: Any) -> bool:
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return False
    try:
        return math.isfinite(found)
    except OverflowError:  # a whole number that is too large for a float
        return False


# --- The manifest ---------------------------------------------------------------------------------
# The manifest of a batch of trials: line i is what child i of its array job runs.
#
# All lines have the same width, so that a child reads only its own line. Each line begins with a
# checksum over sweep, batch, index and content: a line that was cut or changed, or that belongs
# elsewhere, is refused.


_CRC = 8  # characters of a checksum, which a space follows


class BadManifest(ValueError):
    """The manifest is missing, or has changed since the controller wrote it."""


class TrialEntry(NamedTuple):
    """A line of the manifest: the trial that one child runs."""

    trial: int
    params: Dict[str, Scalar]
    seed: int
    target: int = 0  # the step at which the trial ends; 0: it ends with its program
    resumes: bool = False  # the trial continues from its checkpoint, not from the beginning
    full: bool = False  # no early stopping: the trial runs to its target whatever the others reach


def encode(key: str, wave: int, entries: Iterable[TrialEntry]) -> Tuple[bytes, int]:
    """The manifest of a batch of the sweep `key`, and the width of its lines in bytes."""
    contents = [json.dumps(_fields(entry), separators=(",", ":")) for entry in entries]
    longest = max(map(len, contents), default=0)
    lines = []
    for index, content in enumerate(contents):
        padded = content.ljust(longest)
        lines.append(f"{_checksum(key, wave, index, padded)} {padded}\n")
    return "".join(lines).encode("ascii"), longest + _CRC + 2


def read(store: Store, key: str, wave: int, index: int, width: int) -> TrialEntry:
    """Read the trial of child `index`. Raises BadManifest and StoreError."""
    where = f"{batch_key(wave)}, line {index + 1}"
    if width <= _CRC + 2:
        raise BadManifest(f"{where}: a line cannot have {width} bytes. Check BATCHML_WAVE_WIDTH.")
    line = store.read(batch_key(wave), index * width, width)
    if line is None:
        raise BadManifest(f"{where}: the manifest is missing from the sweep's store.")
    return decode(line, key, wave, index, width)


def decode(line: bytes, key: str, wave: int, index: int, width: int) -> TrialEntry:
    """The trial in a line. Raises BadManifest."""
    where = f"{batch_key(wave)}, line {index + 1}"
    if len(line) < width or not line.endswith(b"\n"):
        raise BadManifest(f"{where}: the manifest ends before this line, or was changed.")
    try:
        text = line[:-1].decode("ascii")
        if text[: _CRC + 1] != _checksum(key, wave, index, text[_CRC + 1 :]) + " ":
            raise BadManifest(f"{where}: the checksum is wrong: the manifest was changed.")
        return _entry(json.loads(text[_CRC + 1 :]))
    except BadManifest:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadManifest(f"{where}: the manifest was changed: {error}") from error


def _fields(entry: TrialEntry) -> Dict[str, Any]:
    """The fields without those that have their default value."""
    return {
        name: value
        for name, value in entry._asdict().items()
        if name not in TrialEntry._field_defaults or value != TrialEntry._field_defaults[name]
    }


def _entry(found: Dict[str, Any]) -> TrialEntry:
    return TrialEntry(
        **{name: value for name, value in found.items() if name in TrialEntry._fields}
    )


def _checksum(key: str, wave: int, index: int, content: str) -> str:
    return f"{zlib.crc32(f'{key}/{wave}/{index}/{content}'.encode()):08x}"


# --- Rungs ----------------------------------------------------------------------------------------
# A rung is a step at which early stopping compares trials. Source: Li et al., "A System for
# Massively Parallel Hyperparameter Tuning" (ASHA), MLSys 2020.


_SIGN = 1 << 63


def default_first_rung(most: int) -> int:
    """The default first rung: at 1/27 of a full training of `most` steps, rounded up."""
    return max(1, math.ceil(most / 27))


def rung_steps(least: int, most: int, eta: int) -> Tuple[int, ...]:
    """The rungs least, least * eta, ... below `most`, the step at which a training ends anyway."""
    steps: List[int] = []
    step = least
    while 0 < step < most:
        steps.append(step)
        if eta < 2:
            break
        step *= eta
    return tuple(steps)


def rung_passed(rungs: Sequence[int], before: int, step: int) -> Optional[int]:
    """The rung, counted from 0, that a trial has reached between the steps `before` and `step`.

    A trial that does not report every step may pass several rungs: the last of them counts. None if
    it passed none.
    """
    passed = [number for number, rung in enumerate(rungs) if before < rung <= step]
    return passed[-1] if passed else None


def to_sortable_hex(loss: float) -> str:
    """16 hexadecimal digits that sort like the number.

    They are the bits of an IEEE 754 double: of a negative number all bits are inverted, else only
    the sign bit. NaN sorts last.
    """
    if loss != loss:
        return "f" * 16
    (bits,) = struct.unpack(">Q", struct.pack(">d", loss + 0.0))  # -0.0 + 0.0 is 0.0
    return f"{bits ^ (2 * _SIGN - 1) if bits & _SIGN else bits | _SIGN:016x}"


def mark_key(rung: int, loss: float, trial: int) -> str:
    """The key which marks that a trial finished a rung, counted from 0, with this loss."""
    return f"{rung_prefix(rung)}{to_sortable_hex(loss)}-{trial:06d}"


def ranked(keys: Iterable[str]) -> List[int]:
    """The trials in the marks of one rung, best first; trials with equal losses by number.

    A trial with two marks, because an attempt was repeated, counts with its better result.
    """
    found: List[int] = []
    seen = set()
    for key in sorted(keys):
        number = key.rpartition("-")[2]
        if number.isdigit() and int(number) not in seen:
            seen.add(int(number))
            found.append(int(number))
    return found


# --- The pruner's decision ------------------------------------------------------------------------
# A trial decides by its own values and by the cutoffs that the controller has published. Decisions
# are recorded with the values on which they are based.


# The median rule begins after the part MEDIAN_AFTER of a training, if results of MEDIAN_OTHERS
# other trials are known. Source: Golovin et al., "Google Vizier", KDD 2017; the fraction is our own
# choice: the first two rungs at eta 3, 1/27 + 3/27.
MEDIAN_AFTER = 4 / 27
MEDIAN_OTHERS = 5


class Cutoffs(NamedTuple):
    """`cutoffs.json`: the values that trials must reach.

    `rungs`, by the number of a rung, from 0, and `medians`, by step, have the number of known
    results, and the value to reach, in the metric's unit.
    """

    version: int
    rungs: Dict[int, Tuple[int, float]]
    medians: Dict[int, Tuple[int, float]]

    def to_json(self) -> bytes:
        return json.dumps(self._asdict(), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: Optional[bytes]) -> Cutoffs:
        """Read `cutoffs.json`. A missing or invalid file means no cutoffs, version 0."""
        try:
            found = json.loads(data or b"{}")
            return cls(
                int(found.get("version", 0)),
                _table(found.get("rungs", {})),
                _table(found.get("medians", {})),
            )
        except (ValueError, TypeError, AttributeError):
            return cls(0, {}, {})


class PrunerDecision(NamedTuple):
    """Whether a trial goes on. The fields are in the order of a message's `decisions`."""

    step: int
    value: float
    cutoff: Optional[float]  # None: the results of too few trials were known
    version: int
    goes_on: bool


def decide(
    contract: TrialContract,
    cutoffs: Cutoffs,
    step: int,
    value: float,
    best: float,
    rung: Optional[int],
) -> Optional[PrunerDecision]:
    """Decide whether a trial goes on at `step`, at which it has reached `rung` (from 0) or no rung.

    None if there is nothing to decide. `best` is the trial's best value so far, including `value`.
    """
    if not needs_cutoffs(contract, step, rung):
        return None
    if contract.method == ASHA and rung is not None:
        count, cutoff = cutoffs.rungs.get(rung, (0, math.nan))
        if count < contract.eta:
            return PrunerDecision(step, value, None, cutoffs.version, True)
        is_good = _is_as_good(contract, value, cutoff)
        return PrunerDecision(step, value, cutoff, cutoffs.version, is_good)
    count, cutoff = cutoffs.medians.get(step, (0, math.nan))
    if count < MEDIAN_OTHERS:
        return None
    return PrunerDecision(step, best, cutoff, cutoffs.version, _is_as_good(contract, best, cutoff))


def needs_cutoffs(contract: TrialContract, step: int, rung: Optional[int]) -> bool:
    """Whether `decide` needs the cutoffs."""
    if contract.method == ASHA:  # with `resume` a trial ends at each rung, whatever its value is
        return not contract.resume and rung is not None
    return contract.method == MEDIAN and step >= MEDIAN_AFTER * contract.max


def best_of(contract: TrialContract, one: Optional[float], other: float) -> float:
    """The better of two values of the first goal."""
    if one is None or contract.loss(other) < contract.loss(one):
        return other
    return one


def _is_as_good(contract: TrialContract, value: float, cutoff: float) -> bool:
    return contract.loss(value) <= contract.loss(cutoff)


def _table(found: Any) -> Dict[int, Tuple[int, float]]:
    return {
        int(name): (int(count), float(value))
        for name, (count, value) in found.items()
        if math.isfinite(value)
    }
