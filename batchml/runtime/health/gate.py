"""Check whether this host is fit for the run, and leave an unfit host: docs/health.md.

The check happens before a command starts. The supervisor of ranks repeats it between generations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Protocol

from batchml.runtime.entry.attempt import AttemptHandle
from batchml.runtime.health.checks import (
    LIMIT,
    MONITOR,
    NOT_CHECKED,
    NOTICE,
    REPLACE,
    RETRY,
    HostCheck,
    NoFitHost,
    quick_checks,
    run_with_limit,
    worst,
)
from batchml.runtime.health.host_records import (
    HostRecords,
    UnfitHost,
    describe_unfit,
    host_id,
)
from batchml.runtime.health.neurons import asked_neurons, check_neurons
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.launch import VARIABLE as PLAN
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import EFA, RuntimeEnv, seconds_of
from batchml.runtime.storage.store import StoreError
from batchml.runtime.telemetry.gpus import asked_gpus, has_gpus

VARIABLE = "BATCHML_HEALTH"
FAULTS = "BATCHML_FAULT_FILE"
SLOW = "slow"  # the first word of a fault file that makes the network slow
OFF, QUICK, DEEP = "off", "quick", "deep"

Say = Callable[[str], None]


class HealthSettings(NamedTuple):
    """`[health]` of a job."""

    checks: str = QUICK
    tries: int = 3  # unfit hosts that the run leaves for another one
    quarantine: bool = False  # whether broken hosts are taken out of service

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> HealthSettings:
        """Read the client's JSON; the defaults if it is missing or invalid."""
        try:
            found: Dict[str, Any] = json.loads(environ.get(VARIABLE) or "{}")
            return cls(
                str(found.get("checks", QUICK)),
                int(found.get("tries", 3)),
                bool(found.get("quarantine", False)),
            )
        except (ValueError, TypeError, AttributeError):
            return cls()


def check_host(env: RuntimeEnv, environ: Mapping[str, str], say: Say) -> Optional[str]:
    """Check this host. Return None if it is fit, else the reason: the run then exits with 75.

    `say` gets lines: warnings, the checks that were not possible, and the result of a quarantine.
    Raises only NoFitHost, for exit code 78, if too many hosts were unfit: a host is not refused
    because a check itself fails.
    """
    settings = HealthSettings.read(environ)
    if not env.is_run or settings.checks == OFF:
        return None
    try:
        return _check(env, environ, say, settings)
    except NoFitHost:
        raise
    except Exception as error:
        say(f"{NOTICE}this host was not checked: {error_line(error)}")
        return None


def _check(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, settings: HealthSettings
) -> Optional[str]:
    before = _find_record(env, environ, say)
    if before is not None:  # the attempt that recorded the host has quarantined it, too
        why = f"found unfit before: {before.why}"
        return _refuse_host(env, environ, say, settings.tries, why)
    checks = run_checks(env, environ, settings.checks)
    if worst(checks) >= RETRY:
        return leave_host(env, environ, say, checks)
    for check in checks:
        if check.severity == MONITOR:
            say(f"{NOTICE}this host: {check.describe()}")
    unknown = [check.describe() for check in checks if check.severity == NOT_CHECKED]
    if unknown:
        say(f"{NOTICE}not checked on this host: {'; '.join(unknown)}")
    return None


def leave_host(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, checks: Sequence[HostCheck]
) -> str:
    """Record this host as unfit. Return the reason, with which the run exits with 75.

    Raises NoFitHost if too many hosts were unfit.
    """
    settings, host = HealthSettings.read(environ), host_id(environ)
    record_unfit(env, environ, say, host, checks)
    if settings.quarantine and worst(checks) >= REPLACE:
        quarantine_host(env, environ, say, host)
    setup = "; ".join(check.text for check in checks if check.is_setup and check.severity >= RETRY)
    return _refuse_host(env, environ, say, settings.tries, describe_unfit(checks), setup)


def run_checks(env: RuntimeEnv, environ: Mapping[str, str], depth: str) -> List[HostCheck]:
    """All checks of this depth, the worst results first."""
    fault = _fault(environ)
    checks = [fault] if fault else []
    with_gpus = has_gpus(environ)
    checks += quick_checks(env, environ, with_gpus or bool(environ.get(PLAN)))
    if environ.get(EFA):
        from batchml.runtime.health.efa import check_efa

        checks += check_efa(environ)
    if with_gpus:
        from batchml.runtime.health.gpus import check_gpus

        checks += run_with_limit("GPUs", LIMIT, REPLACE, check_gpus, environ)
    if asked_neurons(environ):
        checks += run_with_limit("Neuron chips", LIMIT, REPLACE, check_neurons, environ)
    if asked_gpus(environ) and worst(checks) < RETRY:
        from batchml.runtime.health.cuda import check_cuda

        checks += check_cuda(environ)
    if depth == DEEP and worst(checks) < RETRY:
        from batchml.runtime.health.deep import check_by_computing

        checks += check_by_computing(environ)
    return sorted(checks, key=lambda check: -check.severity)


def _fault(environ: Mapping[str, str]) -> Optional[HostCheck]:
    """A fault from BATCHML_FAULT_FILE, with which people and tests simulate unfit hosts.

    The text of the file is the reason. It begins with `monitor:` or `retry:` for faults milder than
    broken hardware; `slow:` only makes the network slow. `{host}` in the file's name stands for
    this host's id.
    """
    text = _fault_text(environ)
    word, _, rest = (text or "").partition(":")
    if text is None or word.strip().lower() == SLOW:
        return None
    severity = {"monitor": MONITOR, "retry": RETRY}.get(word.strip().lower())
    if severity is None:
        return HostCheck("fault file", REPLACE, text or "it exists")
    return HostCheck("fault file", severity, rest.strip())


def network_delay(environ: Mapping[str, str]) -> float:
    """Seconds that this node waits before each all-reduce of the network check: a simulated fault.

    The fault file has `slow: SECONDS`.
    """
    word, _, rest = (_fault_text(environ) or "").partition(":")
    return seconds_of(rest.strip(), 0.0, 0.0) if word.strip().lower() == SLOW else 0.0


def _fault_text(environ: Mapping[str, str]) -> Optional[str]:
    """The text of the fault file in one line; None without a file."""
    path = environ.get(FAULTS, "")
    if not path:
        return None
    if "{host}" in path:
        path = path.replace("{host}", host_id(environ))
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return " ".join(file.read(4096).split())
    except OSError:
        return None


def _find_record(env: RuntimeEnv, environ: Mapping[str, str], say: Say) -> Optional[UnfitHost]:
    """The record of this host by an earlier attempt, or by another child of the array.

    None if the fault may have been repaired since then: the host is checked again.
    """
    if not env.store or (env.attempt == 1 and env.array_index is None):
        return None
    try:
        records = HostRecords.open(env, environ)
        # Only if there are records, because in AWS the host's id needs a call to a service.
        found = records.find(host_id(environ)) if records.has_any() else None
    except StoreError as error:
        say(f"{NOTICE}cannot read whether this host was unfit before: {error}")
        return None
    return found if found and found.is_for_good else None


# --- Unfit hosts ----------------------------------------------------------------------------------
# An unfit host is recorded, quarantined if the job asks for that, and left for another host, but
# only `tries` times.


def _refuse_host(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, tries: int, why: str, setup: str = ""
) -> str:
    """The reason why the run ends on this host with exit code 75. Raises NoFitHost.

    `setup`: the faults of which the image, the AMI or the job may be the cause. If a second host
    has the same, they are.
    """
    host = host_id(environ)
    tried = _record_try(env, environ, say, UnfitHost(host, why, setup=setup))
    same = sorted({each.host for each in tried if setup and each.setup == setup})
    if len(same) > 1:
        raise NoFitHost(describe_setup(same, setup))
    if len(tried) > tries:
        raise NoFitHost(describe_tries(tried, tries))
    counted = f" ({len(tried)} of {tries})" if tried else ""
    return f"this host ({host}) is unfit: {why}; another one is tried{counted}"


class EndingAttempt(AttemptHandle, Protocol):
    """An attempt that tells how its command has ended."""

    code: Optional[int]  # the command's exit code, once it has ended

    def last_lines(self) -> List[str]:
        """The last lines of the program."""


def end_on_unfit_host(attempt: EndingAttempt, found: HostCheck) -> None:
    """Stop a run whose host has become unfit, so that it goes on elsewhere.

    This does not count as a try, because the run may have done much here.
    """
    host = host_id(attempt.environ)
    record_unfit(attempt.env, attempt.environ, attempt.say, host, [found])
    saves = "" if attempt.code else "saves and "
    attempt.stop(
        f"this host ({host}) is unfit: {found.describe()}; the run {saves}goes on elsewhere",
        TRY_ELSEWHERE,
    )
    if HealthSettings.read(attempt.environ).quarantine and found.severity >= REPLACE:
        quarantine_host(attempt.env, attempt.environ, attempt.say, host)


def record_unfit(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, host: str, checks: Sequence[HostCheck]
) -> None:
    """Record a host as unfit, so that later attempts of the run leave it at once."""
    if not env.store:
        return
    try:
        HostRecords.open(env, environ).add(host, checks, time.time())
    except StoreError as error:
        say(f"{NOTICE}cannot record that this host is unfit, the run may try it again: {error}")


def quarantine_host(env: RuntimeEnv, environ: Mapping[str, str], say: Say, host: str) -> None:
    """Take a host out of service, and print the result."""
    from batchml.runtime.health.drain import drain

    say(NOTICE + drain(env, environ, host, time.time()))


def _record_try(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, unfit: UnfitHost
) -> List[UnfitHost]:
    """Record this try. Return all tries of the run, or of this child, on unfit hosts.

    Empty without a store.
    """
    if not env.store:
        return []
    try:
        return HostRecords.open(env, environ).add_try(unfit)
    except StoreError as error:
        say(f"{NOTICE}cannot count the tries on unfit hosts: {error}")
        return []


def describe_setup(hosts: Sequence[str], setup: str) -> str:
    """The message after the same fault of setup on several hosts."""
    return (
        f"{len(hosts)} hosts ({', '.join(hosts)}) were unfit for the same reason, so another one "
        f"would be, too: {setup}. Correct the image, the AMI or the job. "
        '`checks = "off"` in [health] starts the run all the same.'
    )


def describe_tries(tried: Sequence[UnfitHost], tries: int) -> str:
    """The message after too many tries, with all hosts and reasons."""
    hosts: Dict[str, str] = {}  # id -> the first reason
    for unfit in tried:
        hosts.setdefault(unfit.host, unfit.why)
    reasons = "; ".join(f"{host}: {why}" for host, why in hosts.items())
    many = f"{len(hosts)} hosts were unfit" if len(hosts) > 1 else "one host was unfit"
    return (
        f"{many} in {len(tried)} tries, more than `tries = {tries}` in [health]: {reasons}. "
        "A bad image or driver looks like bad hardware: see whether these have one cause. "
        '`checks = "off"` in [health] starts the run all the same.'
    )
