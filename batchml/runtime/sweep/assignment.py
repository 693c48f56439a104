"""Find and claim the trial that this container runs, and determine its command and variables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.entry.fetch import NotStarted, claim, describe_duplicate
from batchml.runtime.protocol import sweep as protocol
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
    TrialContract,
    claim_key,
    deadline_in,
    ranked,
    rung_prefix,
    stop_key,
)
from batchml.runtime.protocol.variables import (
    RuntimeEnv,
    Scalar,
    fill_command,
    is_main_node,
    parameter_variables,
)
from batchml.runtime.storage.store import Store

_OUT_OF_MEMORY_CODE = 137  # of a program that the kernel killed because memory ran out


class StopRequest(NamedTuple):
    """The stop request for one trial, from `stop/` in the sweep store."""

    why: str  # why the trial must stop; empty: nobody has stopped it
    deadline: float  # when all trials stop, in seconds since the epoch; 0: never

    def reason_at(self, now: float) -> str:
        """Why the trial must stop now; empty: it may continue."""
        return self.why or ("the sweep's time is over" if 0 < self.deadline <= now else "")


class TrialProgress(NamedTuple):
    """How far a trial is."""

    step: int  # its last step
    shift: Optional[int]  # its steps minus the numbers that it prints; None: it prints none


class TrialAssignment(NamedTuple):
    """The trial that this container runs."""

    contract: TrialContract
    entry: protocol.TrialEntry
    sender: MessageSender
    is_main: bool  # whether this node is the main node, which sends the messages
    after: int  # the step from whose checkpoint the trial continues; 0: it starts from scratch
    shift: Optional[int] = None  # see `TrialProgress`
    deadline: float = 0.0  # as it was at the start; see `StopRequest`

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
        """Whether the trial may be stopped early because other trials do better."""
        contract = self.contract
        by_rungs = contract.method == ASHA and not contract.resume
        return (by_rungs or contract.method == MEDIAN) and not self.entry.full

    def command(self) -> List[str]:
        return fill_command(self.contract.command, self._params())

    def variables(self) -> Dict[str, str]:
        """The environment variables of the program."""
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
            found["BATCHML_GOAL"] = contract.goals[0][0]  # a report of it waits for the decision
        return found

    def _params(self) -> Dict[str, Scalar]:
        return {**self.contract.params, **self.entry.params}


def claim_trial(store: Store, env: RuntimeEnv, environ: Mapping[str, str]) -> TrialAssignment:
    """Find out which trial this container runs, and claim it.

    Raises NotStarted, and StoreError if the sweep store cannot be read or written.
    """
    index, is_main = env.array_index or 0, is_main_node(environ)
    sender = MessageSender(
        env.wave, protocol.unknown_trial(index), env.attempt, index, env.run, time.time()
    )
    try:
        contract, entry = _read(store, env, index)
    except (BadTrialContract, protocol.BadManifest) as error:
        _send_end(store, sender, time.time(), FAILED, CONFIGURATION_ERROR, str(error))
        raise NotStarted(CONFIGURATION_ERROR, f"{error} The sweep store is {env.sweep}.") from error
    sender = sender._replace(trial=entry.trial)
    holder = claim(store, env, claim_key(env.wave, entry.trial))
    if holder is not None:
        raise NotStarted(DUPLICATE, describe_duplicate(holder))
    stop = read_stop_request(store, entry.trial)
    why = stop.reason_at(time.time())
    if why:
        code = exit_code_when_stopped(contract)
        if is_main:
            _send_end(store, sender, time.time(), KILLED, code, why)
        raise NotStarted(code, f"trial {entry.trial} does not start: {why}")
    earlier = [step for step in contract.rungs if step < (entry.target or contract.max)]
    after = max(earlier, default=0) if entry.resumes else 0
    return TrialAssignment(contract, entry, sender, is_main, after, deadline=stop.deadline)


def read_stop_request(store: Store, trial: int) -> StopRequest:
    """Read the stop request for a trial. Raises StoreError."""
    keys = store.keys(STOP)  # one request to S3; reading keys that may be missing takes more
    deadline = deadline_in(keys)
    for key in (STOP_ALL, stop_key(trial)):
        if key in keys:
            words = (store.get(key) or b"")[: protocol.MAX_LINE].decode("utf-8", "replace")
            return StopRequest(" ".join(words.split()) or "the sweep was stopped", deadline)
    return StopRequest("", deadline)


def exit_code_when_stopped(contract: TrialContract) -> int:
    """The exit code of a trial that was stopped by a limit or by the user.

    It is 0 if the jobs of rungs depend on each other, because a failed job would fail its
    dependents, and if AWS Batch retries programs that failed.
    """
    return 0 if contract.shape == RUNGS or APP_ERROR in contract.retries else STOPPED


def may_be_retried(contract: TrialContract, attempt: int, code: int, was_signalled: bool) -> bool:
    """Whether AWS Batch may make another attempt after this exit code.

    The rules are those of `retry_strategy` in aws/batch/requests.py. `was_signalled`: a signal
    ended the program, perhaps because the host was lost, which the trial does not know.
    """
    retries = contract.retries
    if code == 0 or attempt >= contract.attempts:
        return False
    if HOST_LOST in retries and (was_signalled or code == TRY_ELSEWHERE):
        return True
    if OUT_OF_MEMORY in retries and code == _OUT_OF_MEMORY_CODE:
        return True
    return APP_ERROR in retries and not TRY_ELSEWHERE <= code <= CONFIGURATION_ERROR


def _read(store: Store, env: RuntimeEnv, index: int) -> Tuple[TrialContract, protocol.TrialEntry]:
    data = store.get(CONTRACT)
    if data is None:
        raise BadTrialContract("course.json is missing from the sweep store.")
    contract = TrialContract.from_json(data)
    if not env.rung:
        return contract, protocol.read(store, contract.key, env.wave, index, env.wave_width)
    best = ranked(store.keys(rung_prefix(env.rung - 1)))
    if index >= len(best):
        raise NotStarted(
            0, f"{len(best)} trials finished the rung before this one: there is nothing to run."
        )
    # All trials of such a sweep are in its first batch, by their number.
    entry = protocol.read(store, contract.key, 1, best[index], env.wave_width)
    return contract, entry._replace(target=contract.target_of(env.rung), resumes=True)


def _send_end(
    store: Store, sender: MessageSender, now: float, state: str, code: int, why: str
) -> None:
    message = protocol.add_end(
        protocol.make_message(sender, 0, protocol.END, now), state, code, why
    )
    store.put(protocol.message_key(*sender[:3], 0), protocol.encode_message(message))
