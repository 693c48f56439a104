"""`[retry]` of a job -> AWS Batch's rules. Pure.

Source: AWS Batch API Reference, RetryStrategy and EvaluateOnExit: five rules at most, the first
that matches decides, and what no rule matches is tried again.
"""

from collections.abc import Iterator
from typing import Any

from batchml.model.job import JobSpec
from batchml.runtime.protocol.exit_codes import (
    CONFIGURATION_ERROR,
    CRASH_LOOP,
    DUPLICATE,
    STOPPED,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import TORCHRUN

MOST = 5  # rules

_FINAL = (CRASH_LOOP, DUPLICATE, CONFIGURATION_ERROR)  # another try would end the same way
_FINAL_SHORT = "7*"  # all of them, and 7, 70-75 and 79, which a program may have for itself

_LOST = ("onStatusReason", "Host EC2*")
_IMAGE = ("onStatusReason", "Task failed to start")
_MEMORY = ("onReason", "OutOfMemoryError*")
_KILLED = "137"  # of a run of ranks: whoever killed its main process, it was no rank
_EXITED = "Essential container in task exited*"  # not by the loss of its host, which may leave 143

Rule = dict[str, str]


def retry_strategy(
    spec: JobSpec, *, has_budget: bool = False, has_runtime: bool = False
) -> dict[str, Any]:
    """`[retry]` as the retryStrategy of SubmitJob.

    Exit codes of our runtime (`runtime/protocol/exit_codes.py`) are understood if the image has it:

    - 75 is a lost host: another one may do;
    - 76, 77 and 78 end the run, also where an app-error is worth another try;
    - 137 of ranks that our runtime leads is a lost host, unless it was for memory: what kills a
      rank never becomes the code of the run. Where five rules are too few it is an app-error;
    - a budget that is spent (143) is no error to try again after.
    """
    retries = "app-error" in spec.retry.on
    if not (has_runtime or has_budget):
        rules = [*_classes(spec), _rule(spec, ("onExitCode", "*"), "app-error"), _rest()]
    elif retries:
        rules = _but_final(spec, has_budget)
    else:
        rules = _but_lost(spec)
    return {"attempts": spec.retry.attempts, "evaluateOnExit": rules}


def _but_lost(spec: JobSpec) -> list[Rule]:
    """What is tried again, and then that nothing else is."""
    lost, image, memory = _classes(spec)
    rules = [lost, _elsewhere(spec), image, memory, _rest()]
    if spec.launch.kind == TORCHRUN:
        # An image that cannot be had leaves no code, so the last rule may stand for it.
        rules = [rule for rule in rules if rule is not image or rule["action"] == "RETRY"]
        killed = _rule(spec, ("onExitCode", _KILLED), "host-lost")
        rules[-1:] = [killed, _rest()] if len(rules) < MOST else [_rest()]
    return rules


def _but_final(spec: JobSpec, has_budget: bool) -> list[Rule]:
    """Only what is not tried again: no rule has to say that all else is.

    Where five rules are too few, one stands for the codes that end a run: then a program's own 7,
    70 to 74 and 79 end it, too.
    """
    others = [rule for rule in _classes(spec) if rule["action"] == "EXIT"]
    if has_budget:
        others.append({**_exit(str(STOPPED)), "onStatusReason": _EXITED})
    elsewhere = _elsewhere(spec)
    ends = [elsewhere] if elsewhere["action"] == "EXIT" else []
    whole = [*others, *ends, *(_exit(str(code)) for code in _FINAL)]
    if len(whole) <= MOST:
        return whole
    first = [] if ends else [elsewhere]  # which "7*" stands for as well
    return [*others, *first, _exit(_FINAL_SHORT)]


def _classes(spec: JobSpec) -> Iterator[Rule]:
    yield _rule(spec, _LOST, "host-lost")
    yield _rule(spec, _IMAGE, "image-error")
    yield _rule(spec, _MEMORY, "out-of-memory")


def _elsewhere(spec: JobSpec) -> Rule:
    return _rule(spec, ("onExitCode", str(TRY_ELSEWHERE)), "host-lost")


def _rule(spec: JobSpec, condition: tuple[str, str], outcome: str) -> Rule:
    name, pattern = condition
    return {name: pattern, "action": "RETRY" if outcome in spec.retry.on else "EXIT"}


def _exit(code: str) -> Rule:
    return {"onExitCode": code, "action": "EXIT"}


def _rest() -> Rule:
    return {"onReason": "*", "action": "EXIT"}
