"""Describe the outcome of a finished run in one sentence: how each attempt ended, and where."""

import re
import signal

from batchml.model.names import short_duration
from batchml.model.run import (
    NO_DEVICE,
    Attempt,
    JobStatus,
    OutcomeClass,
    Run,
    array_size,
    class_of,
    classify,
    idle_limit,
    is_out_of_budget,
)
from batchml.runtime.protocol.exit_codes import (
    CRASH_LOOP,
    CRASH_LOOP_STARTS,
    LOG_TOO_LARGE,
    TRY_ELSEWHERE,
)
from batchml.runtime.protocol.launch import LaunchPlan

_LOCAL_HOST = "this-machine"  # the only host of `local`

# Messages of pip and uv about a package or version that the index does not have.
MISSING_PACKAGE = (
    r"(?:No matching distribution found for|"
    r"Could not find a version that satisfies the requirement|"
    r"Because there (?:is|are) no versions? of|Because only \S+ is available and you require|"
    r"Because(?= \S+ (?:was not found in|has no wheels))) ([^\s,]+[^\s,.])"
)
# Messages of pip about a line of a requirements.txt.
UNREADABLE_LINE = r"Invalid (?:requirement|marker): (\"[^\"]+\"|'[^']+')"
REQUIREMENTS = "requirements.txt"
# The classes that `[retry] on` has to name: by default only a lost host is retried.
_NOT_RETRIED = (OutcomeClass.APP_ERROR, OutcomeClass.OUT_OF_MEMORY, OutcomeClass.IMAGE_ERROR)
_OF_CHILDREN = (OutcomeClass.SUCCEEDED, OutcomeClass.APP_ERROR)  # of arrays: children decide


def describe_outcome(run: Run) -> str:
    """`app-error: attempt 2 of 2 ended with code 1 on i-0abc; attempt 1 lost its host i-0def`.

    The text has parts from AWS, the image and users: make it printable before showing it.
    """
    outcome = classify(run).outcome
    return f"{outcome.value}: {_sentence(run, outcome)}"


def describe_attempt(attempt: Attempt, *, is_ours: bool = False, restarts: bool = False) -> str:
    """Describe how a failed attempt ended: `lost its host i-0abc`.

    `is_ours`: batchml submitted the run. `restarts`: its ranks restart in place.
    """
    outcome = class_of(attempt.status_reason, attempt.reason, attempt.exit_code, is_ours=is_ours)
    on = on_host(attempt.host)
    if outcome is OutcomeClass.HOST_LOST:
        return _describe_lost_host(
            attempt.host, attempt.status_reason, attempt.reason, attempt.exit_code
        )
    if outcome is OutcomeClass.OUT_OF_MEMORY:
        return f"was killed for memory{on}"
    if outcome is OutcomeClass.TIMED_OUT:
        return f"ran past its timeout{on}"
    if outcome is OutcomeClass.IMAGE_ERROR:
        return f"could not be started{on}"
    if outcome is OutcomeClass.APP_ERROR and restarts and attempt.exit_code == CRASH_LOOP:
        return f"was {_describe_crash_loop()}{on}"
    if outcome is OutcomeClass.APP_ERROR:
        return f"ended with code {attempt.exit_code}{signal_name(attempt.exit_code)}{on}"
    return f"was stopped{on}"


def is_supervised(run: Run) -> bool:
    """Whether the run's nodes have ranks that work together, as with torchrun or MPI."""
    plan = _plan(run)
    return plan is not None and plan.is_supervised


def restarts_in_place(run: Run) -> bool:
    """Whether failed ranks start again in the same attempt, until a crash loop ends the run."""
    plan = _plan(run)
    return plan is not None and plan.restarts


def _plan(run: Run) -> LaunchPlan | None:
    """The launch plan of the run; None if it has none."""
    try:
        return LaunchPlan.read(run.environment)
    except ValueError:  # written by another version
        return None


def _describe_crash_loop() -> str:
    return f"given up after {CRASH_LOOP_STARTS} starts without a new checkpoint ({CRASH_LOOP})"


def on_host(host: str) -> str:
    """` on i-0abc`; "" if the host is unknown or this machine."""
    return f" on {host}" if host and host != _LOCAL_HOST else ""


def _describe_lost_host(host: str, status_reason: str, reason: str, code: int | None) -> str:
    """`lost its host i-0abc`, with the reason that the embedded server gives.

    `gave up with code 75` if the runtime asked for another host.
    """
    if reason.startswith(NO_DEVICE):
        return f"could not be started{on_host(host)}, which lacks a device"
    if code == TRY_ELSEWHERE and not status_reason.startswith("Host EC2"):
        return f"gave up with code {code}{on_host(host)}"
    why = status_reason.partition(" terminated")[2].strip(" .:")
    named = f" {host}" if host and host != _LOCAL_HOST else ""
    return f"lost its host{named}{f' ({why})' if why else ''}"


def signal_name(code: int | None) -> str:
    """`, signal SIGKILL` for 137, the exit code of a program that this signal ended; or ""."""
    if code is None or not 128 < code < 128 + signal.NSIG:
        return ""
    try:
        return f", signal {signal.Signals(code - 128).name}"
    except ValueError:  # an unused number
        return ""


def describe_children(run: Run) -> str:
    """`2 FAILED, 40 SUCCEEDED, 958 RUNNABLE of 1000` for an array; "" for other runs.

    If children failed in different ways: `3 FAILED (2 out-of-memory, 1 app-error)`.
    """
    if not run.children:
        return ""
    known = sorted(run.children.items(), key=lambda item: -JobStatus(item[0]).order)
    how = ", ".join(f"{count} {name}" for name, count in run.failures.items())
    more = {JobStatus.FAILED.value: f" ({how})"} if len(run.failures) > 1 else {}
    listed = ", ".join(f"{count} {status}{more.get(status, '')}" for status, count in known)
    return f"{listed} of {array_size(run)}"


def _sentence(run: Run, outcome: OutcomeClass) -> str:
    if run.children and (run.failures or outcome in _OF_CHILDREN):
        return f"children {describe_children(run)}"
    if outcome is OutcomeClass.DEPENDENCY_FAILED:
        return "a run that it depends on failed, so it was never started"
    if outcome is OutcomeClass.UNSCHEDULABLE:
        return f"could never be placed: {run.status_reason}"
    if outcome is OutcomeClass.UNKNOWN:
        return run.status_reason or "AWS Batch gives no reason"
    last = _describe_last_attempt(run, outcome)
    return last + _describe_earlier_attempts(run) + _describe_left_attempts(run, outcome)


def _describe_last_attempt(run: Run, outcome: OutcomeClass) -> str:
    """The end of the last attempt, which is the end of the run."""
    code = classify(run).exit_code
    on = on_host(run.host)
    which = _name_attempt(run)
    if outcome is OutcomeClass.SUCCEEDED:
        return f"{which} ended with code 0{on}"
    if outcome is OutcomeClass.APP_ERROR and code == CRASH_LOOP and restarts_in_place(run):
        return f"{_describe_crash_loop()}{on}"
    if outcome is OutcomeClass.APP_ERROR and idle_limit(run):
        idle = short_duration(idle_limit(run))
        return f"{which} did nothing for {idle} and was ended ({code}){on}"
    if outcome is OutcomeClass.APP_ERROR:
        why = f": {run.reason}" if run.reason.startswith(LOG_TOO_LARGE) else ""
        return f"{which} ended with code {code}{signal_name(code)}{on}{why}"
    if outcome is OutcomeClass.OUT_OF_MEMORY:
        had = f"; it had {run.memory_mib} MiB" if run.memory_mib else ""
        return f"{which} was killed for memory{on}{had}"
    if outcome is OutcomeClass.TIMED_OUT:
        limit = f" of {run.timeout} s" if run.timeout else ""
        return f"{which} ran past its timeout{limit}{on}"
    if outcome is OutcomeClass.CANCELLED:
        return _cancelled(run, on)
    if outcome is OutcomeClass.HOST_LOST:
        left = ", and no attempt is left" if len(run.attempts) >= run.max_attempts else ""
        lost = _describe_lost_host(run.host, run.status_reason, run.reason, run.exit_code)
        return f"{which} {lost}{left}"
    return f"{which} could not be started{on}: {_why_not_started(run)}"


def _why_not_started(run: Run) -> str:
    """The reason that AWS Batch gives; if pip failed, the package or line that is its cause."""
    reason = run.reason or run.status_reason
    package, line = re.search(MISSING_PACKAGE, reason), re.search(UNREADABLE_LINE, reason)
    if package is None and line is None:
        return reason
    why = f"no index has {package[1]}" if package else f"pip cannot read {line[1] if line else ''}"
    return f"{why} ({REQUIREMENTS}): correct the file, and submit the job again"


def _cancelled(run: Run, on: str) -> str:
    """The end of a run that was cancelled or terminated, by a user, its queue or its budget."""
    why = f": {run.status_reason}" if run.status_reason else ""
    if run.status_reason.startswith("JobQueue deleted") and not run.is_terminated:
        why = ": its queue was deleted"
    if is_out_of_budget(run):
        why = ": its budget (--max-cost) was spent"
    if not run.attempts:
        return f"stopped before it was started{why}"
    return f"{_name_attempt(run)} was stopped{on}{why}"


def _name_attempt(run: Run) -> str:
    """Name the last attempt: `attempt 2 of 3`; `the program` if only one attempt was possible."""
    tries = len(run.attempts)
    if tries <= 1 and run.max_attempts <= 1:
        return "the program"
    of = f" of {run.max_attempts}" if run.max_attempts >= tries else ""
    return f"attempt {max(1, tries)}{of}"


def _describe_earlier_attempts(run: Run) -> str:
    """The ends of the earlier attempts. Equal ends are listed once."""
    ends: dict[str, list[int]] = {}
    for number, attempt in enumerate(run.attempts[:-1], 1):
        text = describe_attempt(attempt, is_ours=bool(run.key), restarts=restarts_in_place(run))
        ends.setdefault(text, []).append(number)
    return "".join(f"; {_numbered(numbers)} {text}" for text, numbers in ends.items())


def _describe_left_attempts(run: Run, outcome: OutcomeClass) -> str:
    """Why attempts were left: no rule of the run retries ends of this class; "" if none were."""
    left = run.max_attempts - len(run.attempts)
    code = classify(run).exit_code
    ends_the_run = code is not None and str(code).startswith("7")  # aws/batch/requests.py
    if not run.attempts or left < 1 or outcome not in _NOT_RETRIED or ends_the_run:
        return ""
    attempts = "1 attempt was" if left == 1 else f"{left} attempts were"
    return f"; {attempts} left, but {outcome.value} is only retried with --retry-on {outcome.value}"


def _numbered(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"attempt {listed}" if len(numbers) == 1 else f"attempts {listed} each"
