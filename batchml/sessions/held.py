"""Held runs, of `alloc` and `notebook`: prepare a run for a person, wait for it, end it.

A held run ends itself when nobody uses it (`runtime/sessions/alloc.py`). So after a killed client
or a closed laptop it costs no more than its idle limit.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from batchml.cli.render import printable
from batchml.context import backoff
from batchml.cost.service import bill_of, quote_of_job
from batchml.errors import BatchmlError, HeldRunEnded
from batchml.explain.ask import waiting_reason
from batchml.model.group import HELD_TAG
from batchml.model.names import dollar_range
from batchml.model.outcome import describe_outcome
from batchml.model.run import JobStatus, Run, classify, is_step
from batchml.runs.groups.members import terminate_all
from batchml.runs.options import RunRequest, resolve_job
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runs.watch.events import ContactLost
from batchml.runs.watch.poller import Outages, ReasonReporter, RunPoller
from batchml.runs.watch.wait import wait_for_runs
from batchml.runtime.exec.presence import HELD_FOR
from batchml.runtime.sessions.alloc import LIMIT, RATE, format_seconds
from batchml.sessions.exec.backends import capture_output
from batchml.sessions.exec.session_manager import find_plugin
from batchml.sessions.exec.target import ExecTarget, find_target

if TYPE_CHECKING:
    from batchml.context import Context, Notify
    from batchml.cost.quote import Usd

_REASON_AFTER = 10.0  # seconds of waiting until the reason is looked up
_REASON_MOST = 300.0  # seconds between later look-ups, at most
_END_LIMIT = 60.0  # seconds for a run to end on request
_TRIES, _PAUSE = 20, 0.2  # checks for srun in a run of several nodes, and seconds between them
_GIVES_REASON = (JobStatus.RUNNABLE, JobStatus.STARTING)  # states whose statusReason is shown
_FIND_SRUN = ("/bin/sh", "-c", "command -v srun")
_PRINT_LOST_FILES = "python3 -m batchml.runtime.sessions.alloc --left 2>/dev/null"
_STOP = ("/bin/sh", "-c", f'{_PRINT_LOST_FILES}; : > "$BATCHML_STOP_FILE"')


# --- Preparing ------------------------------------------------------------------------------------


def prepare_held_run(
    context: "Context",
    request: RunRequest,
    *,
    kind: str,
    idle_s: float | None,
    notify: "Notify",
) -> PreparedRun:
    """Prepare a run that is held; nothing is submitted.

    `kind` is the value of the tag of held runs: ALLOC or NOTEBOOK. The run ends itself after
    `idle_s` seconds without use (None: never). Raises the errors of `prepare`.
    """
    hour = hourly_cost(context, request)
    if hour is not None and hour.high:
        notify(f"About {dollar_range(hour.low, hour.high)} an hour, for as long as it is held.")
    held = hold_request(request, kind, idle_s, float(hour.high) if hour is not None else 0.0)
    prepared = prepare(context, held, dry_run=False)
    # Notices about retries are for programs that train: a person simply starts another run.
    notices = tuple(notice for notice in prepared.notices if "[retry]" not in notice)
    return msgspec.structs.replace(prepared, notices=notices)


def check_plugin(context: "Context", environ: Mapping[str, str] = os.environ) -> None:
    """Check, before the run costs anything, that this machine can enter it.

    Raises ExecUnavailable with the command that installs the plugin.
    """
    if not context.settings.is_local:
        find_plugin(environ)


def hold_request(request: RunRequest, kind: str, idle_s: float | None, rate: float) -> RunRequest:
    """Add the tag of held runs, the idle limit, and the cost in USD an hour if it is known."""
    variables = {HELD_FOR: kind}
    if idle_s is not None and idle_s < math.inf:
        variables[LIMIT] = f"{idle_s:g}"
    if rate > 0:
        variables[RATE] = f"{rate:.6g}"
    env = {**variables, **request.changes.get("env", {})}
    return msgspec.structs.replace(
        request,
        changes={**request.changes, "env": env},
        own_tags={**request.own_tags, HELD_TAG: kind},
    )


def hourly_cost(context: "Context", request: RunRequest) -> "Usd | None":
    """Estimate the cost of an hour of the run; None if it has no known price."""
    spec = resolve_job(context, request).spec
    try:
        return quote_of_job(context, spec).hour
    except BatchmlError:
        return None


# --- Waiting --------------------------------------------------------------------------------------


def wait_until_running(
    context: "Context",
    job_id: str,
    notify: "Notify",
    *,
    see: Callable[[Mapping[str, Run]], None] | None = None,
    reason: Callable[[], str] | None = None,
) -> Run:
    """Wait until the run is RUNNING, and return it.

    `notify` gets each new state, and after ten seconds each new reason for waiting. `see` gets the
    run at every poll. `reason` returns the reason for waiting, by default that of `explain`.

    Raises HeldRunEnded if the run ends before it is RUNNING, and BatchmlError when contact stays
    lost.
    """
    poller = RunPoller(context.describe, context.clock, context.pace, renew=context.renew)
    outages, delays = Outages(context.clock, notify), backoff(context.pace)
    messages = _WaitMessages(context, notify, reason or (lambda: waiting_reason(context, job_id)))
    while True:
        (found,) = poller.poll([job_id])
        if isinstance(found, ContactLost):
            outages.lost(found.error)
        else:
            if see is not None:
                see({job_id: found})
            if found.status.is_terminal:
                raise _ended_early(context, found)
            if messages.see(found):
                delays = backoff(context.pace)
            if found.status is JobStatus.RUNNING:
                return found
        context.clock.sleep(next(delays))


class _WaitMessages:
    """The messages to the user while a run waits."""

    def __init__(self, context: "Context", notify: "Notify", reason: Callable[[], str]) -> None:
        self._notify = notify
        self._reasons = ReasonReporter(
            context.clock,
            lambda text: notify(f"  {text}"),
            reason,
            first=_REASON_AFTER,
            most=_REASON_MOST,
        )
        self._status = self._status_reason = ""

    def see(self, run: Run) -> bool:
        """Report a new state or reason; return whether there was one."""
        is_new = run.status.value != self._status
        if is_new:
            self._status = run.status.value
            self._notify(f"Job [{run.name} - {run.job_id}] is {self._status}.")
        news = "" if is_step(run.status_reason) else run.status_reason
        if run.status in _GIVES_REASON and news not in ("", self._status_reason):
            is_new, self._status_reason = True, news
            self._notify(f"  {self._status_reason}")
        self._reasons.see(not run.status.holds_resources)
        return is_new


def wait_for_srun(context: "Context", target: ExecTarget) -> None:
    """Wait until shells inside find `srun`: AWS Batch says RUNNING before the program is ready."""
    for _ in range(_TRIES):
        if not capture_output(context, target, _FIND_SRUN).code:
            return
        context.clock.sleep(_PAUSE)


def _ended_early(context: "Context", run: Run) -> HeldRunEnded:
    ended = classify(run)
    return HeldRunEnded(
        f"{run.name} ended before it could be used, {ended.outcome}: {describe_outcome(run)}.\n"
        f"  batchml explain {run.job_id}{context.env_option}\n"
        f"  batchml logs {run.job_id}{context.env_option}",
        ended.exit_code or 1,
    )


# --- Ending ---------------------------------------------------------------------------------------


def end_held_run(context: "Context", job_id: str, notify: "Notify" = lambda _: None) -> Run | None:
    """End the run so that it is SUCCEEDED, and return it; None if it does not end in time.

    The run ends itself when it sees its stop file, and `notify` gets the files that are lost with
    it. A run that does not end within a minute, or that cannot be entered, is terminated. A waiting
    run is cancelled.
    """
    run = context.describe([job_id]).get(job_id)
    if run is None or run.status.is_terminal:
        return run
    if run.status.value == "RUNNING" and _request_stop(context, job_id, notify):
        ended = _wait_for_end(context, job_id)
        if ended is not None:
            return ended
        notify("The run does not end by itself, and is terminated.")
    terminate_all(context, [job_id], "Ended by its user")
    return _wait_for_end(context, job_id)


def _request_stop(context: "Context", job_id: str, notify: "Notify") -> bool:
    """Write the stop file of the run; return whether that succeeded."""
    try:
        result = capture_output(context, find_target(context, job_id), _STOP)
    except BatchmlError:
        return False
    lost = result.out.decode("utf-8", "replace").strip()
    if lost:
        notify(printable(lost))
    return result.code == 0


def _wait_for_end(context: "Context", job_id: str) -> Run | None:
    try:
        (run,) = wait_for_runs(context, [job_id], timeout=_END_LIMIT)
    except TimeoutError:
        return None
    return run


def describe_run_cost(context: "Context", job_id: str) -> str:
    """`It ran 63 h 12 min and cost $63.50.`, or `... so far.` for a run that has not ended.

    The cost is left out if this machine has no price, and the text is "" if AWS gives no answer.
    """
    try:
        run, bill = bill_of(context, job_id)
    except BatchmlError:
        return ""
    if not bill.seconds:
        return "It never ran, and cost nothing."
    is_over = run.status.is_terminal
    text = f"{'It ran' if is_over else 'It has run'} {format_seconds(bill.seconds)}"
    if bill.is_free or not bill.usd.high:
        return f"{text}."
    least = "at least " if bill.is_lower_bound else ""
    cost = f"{least}{dollar_range(bill.usd.low, bill.usd.high)}"
    return f"{text} and cost {cost}{'' if is_over else ' so far'}."
