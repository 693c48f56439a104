"""Find and claim the trial that this container runs, and work out its command and variables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.entry.fetch import claim, describe_duplicate
from batchml.runtime.protocol import sweep as manifest
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    DUPLICATE,
    STOPPED,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.sweep import (
    APP_ERROR,
    ASHA,
    CONTRACT,
    FAILED,
    HOST_LOST,
    KILLED,
    MEDIAN,
    OUT_OF_MEMORY,
    RUNGS,
    STOP,
    STOP_ALL,
    BadTrialContract,
    MessageSender,
    Scalar,
    TrialContract,
    claim_key,
    deadline_in,
    ranked,
    rung_prefix,
    stop_key,
)
from batchml.runtime.protocol.variables import (
    RuntimeEnv,
    fill_command,
    is_main_node,
    parameter_variables,
)
from batchml.runtime.storage.store import Store

_OUT_OF_MEMORY = 137  # the exit code of a program that the kernel killed


class NothingToRun(Exception):
    """The container ends without running a command, with this exit code. The text is for people."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class StopRequest(NamedTuple):
    """The stop request for one trial, from `stop/` in the sweep store."""

    why: str  # why the trial must stop; empty: it need not
    deadline: float  # seconds since the epoch; 0: none

    def at(self, now: float) -> str:
        """Why the trial must stop now; empty: it need not."""
        late = "the sweep's time is over" if 0 < self.deadline <= now else ""
        return self.why or late


class TrialProgress(NamedTuple):
    """The last step of a trial, and the difference between its steps and the numbers it prints."""

    step: int
    shift: Optional[int]  # None: it prints no step numbers


class TrialAssignment(NamedTuple):
    """What this container runs."""

    contract: TrialContract
    entry: manifest.TrialEntry
    sender: MessageSender
    is_main: bool  # whether this node sends the messages
    after: int  # the step from whose checkpoint the trial continues; 0: it begins anew
    shift: Optional[int] = None  # see `TrialProgress`
    deadline: float = 0.0  # at the start; see `StopRequest`

    @property
    def limit(self) -> int:
        """The step at which the program must end; 0: unknown."""
        return self.entry.target or self.contract.max

    @property
    def may_continue(self) -> bool:
        """Whether the trial may continue in a later batch."""
        return 0 < self.entry.target < self.contract.max

    @property
    def may_be_pruned(self) -> bool:
        """Whether the trial may be stopped early because others do better."""
        contract = self.contract
        by_rungs = contract.method == ASHA and not contract.resume
        return (by_rungs or contract.method == MEDIAN) and not self.entry.full

    def command(self) -> List[str]:
        return fill_command(self.contract.command, self._params())

    def variables(self) -> Dict[str, str]:
        """The variables of the program."""
        contract, entry = self.contract, self.entry
        found = {
            **parameter_variables(self._params()),
            "BATCHML_TRIAL": str(entry.trial),
            "BATCHML_SEED": str(entry.seed),
        }
        if self.limit:
            found["BATCHML_STEPS"] = str(self.limit)
        if self.after:
            found["BATCHML_RESUME"] = "1"
        if contract.rungs:
            found["BATCHML_RUNGS"] = ",".join(map(str, contract.rungs))
        if self.may_be_pruned or self.may_continue:
            found["BATCHML_GOAL"] = contract.goals[0][0]  # `report` of it waits for the decision
        return found

    def _params(self) -> Dict[str, Scalar]:
        return {**self.contract.params, **self.entry.params}


def claim_trial(
    store: Store,
    env: RuntimeEnv,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.time,
) -> TrialAssignment:
    """Find out what this container runs, and claim it.

    Raises NothingToRun, and StoreError if the sweep store cannot be read or written.
    """
    index, is_main = env.array_index or 0, is_main_node(environ)
    sender = MessageSender(
        env.wave, messages.unknown_trial(index), env.attempt, index, env.run, clock()
    )
    try:
        contract, entry = _read(store, env, index)
    except (BadTrialContract, manifest.BadManifest) as error:
        _send_end(store, sender, clock(), FAILED, CONFIGURATION_ERROR, str(error))
        raise NothingToRun(
            CONFIGURATION_ERROR, f"{error} The sweep store is {env.sweep}."
        ) from error
    sender = sender._replace(trial=entry.trial)
    holder = claim(store, env, claim_key(env.wave, entry.trial))
    if holder is not None:
        raise NothingToRun(DUPLICATE, describe_duplicate(holder))
    stop = read_stop_request(store, entry.trial)
    why = stop.at(clock())
    if why:
        code = exit_code_when_stopped(contract)
        if is_main:
            _send_end(store, sender, clock(), KILLED, code, why)
        raise NothingToRun(code, f"trial {entry.trial} does not begin: {why}")
    after = max(
        (step for step in contract.rungs if step < (entry.target or contract.max)), default=0
    )
    after = after if entry.resumes else 0
    return TrialAssignment(contract, entry, sender, is_main, after, deadline=stop.deadline)


def read_stop_request(store: Store, trial: int) -> StopRequest:
    """The present stop request for a trial. Raises StoreError."""
    found = store.keys(STOP)  # one request; to get missing keys would take four
    deadline = deadline_in(found)
    for key in (STOP_ALL, stop_key(trial)):
        if key in found:
            words = (store.get(key) or b"")[: messages.MAX_LINE].decode("utf-8", "replace")
            return StopRequest(" ".join(words.split()) or "the sweep was stopped", deadline)
    return StopRequest("", deadline)


def exit_code_when_stopped(contract: TrialContract) -> int:
    """The exit code of a trial that was stopped by a limit or by the user.

    It is 0 where rungs depend on each other, because a failed job would end its dependents, and
    where AWS Batch retries programs that failed.
    """
    return 0 if contract.shape == RUNGS or APP_ERROR in contract.retries else STOPPED


def may_be_retried(contract: TrialContract, attempt: int, code: int, was_signalled: bool) -> bool:
    """Whether AWS Batch may make another attempt after an exit code.

    By the rules of `retry_strategy` in aws/batch/requests.py. `was_signalled`: a signal ended the
    program, perhaps because the host was lost; AWS Batch knows the reason, the trial does not.
    """
    retries = contract.retries
    if code == 0 or attempt >= contract.attempts:
        return False
    if HOST_LOST in retries and (was_signalled or code == TRY_ELSEWHERE):
        return True
    if OUT_OF_MEMORY in retries and code == _OUT_OF_MEMORY:
        return True
    return APP_ERROR in retries and not TRY_ELSEWHERE <= code <= CONFIGURATION_ERROR


def _read(store: Store, env: RuntimeEnv, index: int) -> Tuple[TrialContract, manifest.TrialEntry]:
    data = store.get(CONTRACT)
    if data is None:
        raise BadTrialContract("course.json is missing from the sweep store.")
    contract = TrialContract.from_json(data)
    if not env.rung:
        return contract, manifest.read(store, contract.key, env.wave, index, env.wave_width)
    best = ranked(store.keys(rung_prefix(env.rung - 1)))
    if index >= len(best):
        raise NothingToRun(
            0, f"{len(best)} trials finished the rung before this one: there is nothing to run."
        )
    # All trials of such a sweep are in its first batch, by their number.
    entry = manifest.read(store, contract.key, 1, best[index], env.wave_width)
    return contract, entry._replace(target=contract.target_of(env.rung), resumes=True)


def _send_end(
    store: Store, sender: MessageSender, now: float, state: str, code: int, why: str
) -> None:
    message = messages.add_end(
        messages.make_message(sender, 0, messages.END, now), state, code, why
    )
    store.put(messages.message_key(*sender[:3], 0), messages.encode_message(message))
