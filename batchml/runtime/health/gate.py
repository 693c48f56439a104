"""The gate: is this host fit for the run? docs/health.md.

Asked before a command starts, and by the supervisor of ranks between two generations of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.health.checks import (
    LIMIT,
    MONITOR,
    NOT_CHECKED,
    NOTICE,
    REPLACE,
    RETRY,
    Check,
    NoFitHost,
    quick,
    within,
    worst,
)
from batchml.runtime.health.host_records import Books, Unfit, host_id, reason
from batchml.runtime.protocol.launch import VARIABLE as PLAN
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import StoreError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.health.host_records import Unfit

VARIABLE = "BATCHML_HEALTH"
FAULTS = "BATCHML_FAULT_FILE"
OFF, QUICK, DEEP = "off", "quick", "deep"

Say = Callable[[str], None]


class Settings(NamedTuple):
    """`[health]` of a job."""

    checks: str = QUICK
    tries: int = 3  # hosts
    quarantine: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """What the client wrote; the defaults where it wrote nothing that can be read."""
        try:
            told: Dict[str, Any] = json.loads(environ.get(VARIABLE) or "{}")
            return cls(
                str(told.get("checks", QUICK)),
                int(told.get("tries", 3)),
                bool(told.get("quarantine", False)),
            )
        except (ValueError, TypeError, AttributeError):
            return cls()


def gate(env: RuntimeEnv, environ: Mapping[str, str], say: Say) -> Optional[str]:
    """None for a host that is fit; else why it is not, and what comes next: exit with 75.

    `say` gets whole lines: what is to be watched, what could not be checked, what became of the
    host. Raises NoFitHost, for exit code 78, when too many hosts were unfit. Nothing else: trouble
    with asking keeps no run from a host.
    """
    settings = Settings.read(environ)
    if not env.is_run or settings.checks == OFF:
        return None
    try:
        return _pass(env, environ, say, settings)
    except NoFitHost:
        raise
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        say(f"{NOTICE}this host was not checked: {words[:300]}")
        return None


def _pass(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, settings: Settings
) -> Optional[str]:
    before = _found_before(env, environ, say)
    checks = [] if before else ask(env, environ, settings.checks)
    if before or worst(checks) >= RETRY:
        if before is not None:
            known = Check("found before", REPLACE, before.why)
            return refuse(env, environ, say, settings.tries, False, [known], was_known=True)
        return refuse(env, environ, say, settings.tries, settings.quarantine, checks)
    for check in checks:
        if check.severity == MONITOR:
            say(f"{NOTICE}this host: {check.words()}")
    unknown = [check.words() for check in checks if check.severity == NOT_CHECKED]
    if unknown:
        say(f"{NOTICE}not checked on this host: {'; '.join(unknown)}")
    return None


def ask(env: RuntimeEnv, environ: Mapping[str, str], depth: str) -> List[Check]:
    """All checks of this depth, the worst answers first."""
    fault = _fault(environ)
    checks = [fault] if fault else []
    checks += quick(env, environ, has_gpus(environ) or bool(environ.get(PLAN)))
    if has_gpus(environ):
        from batchml.runtime.health.gpus import check as check_gpus

        checks += within("GPUs", LIMIT, REPLACE, check_gpus, environ)
    if depth == DEEP and worst(checks) < RETRY:
        from batchml.runtime.health.deep import check as check_deeply

        checks += check_deeply(environ)
    return sorted(checks, key=lambda check: -check.severity)


def has_gpus(environ: Mapping[str, str]) -> bool:
    """Whether this container was given any, or sees those of its host."""
    return os.path.exists("/dev/nvidiactl") or "GPU-" in environ.get("NVIDIA_VISIBLE_DEVICES", "")


def _fault(environ: Mapping[str, str]) -> Optional[Check]:
    """What BATCHML_FAULT_FILE says, so that every way from here can be tried out.

    Its text is the reason, after `monitor:` or `retry:` for something milder than broken hardware.
    `{host}` in the file's name stands for this host's id.
    """
    path = environ.get(FAULTS, "")
    if not path:
        return None
    if "{host}" in path:
        from batchml.runtime.health.host_records import host_id

        path = path.replace("{host}", host_id(environ))
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = " ".join(file.read(4096).split())
    except OSError:
        return None
    word, _, rest = text.partition(":")
    severity = {"monitor": MONITOR, "retry": RETRY}.get(word.strip().lower())
    if severity is None:
        return Check("fault file", REPLACE, text or "it is there")
    return Check("fault file", severity, rest.strip())


def _found_before(env: RuntimeEnv, environ: Mapping[str, str], say: Say) -> Optional[Unfit]:
    """What an earlier attempt, or another child of the array, found wrong with this very host.

    What may have been put right since is asked again instead.
    """
    if not env.store or (env.attempt == 1 and env.array_index is None):
        return None
    from batchml.runtime.health.host_records import Books, host_id

    try:
        books = Books.open(env, environ)
        # In AWS who asks for the host's id leaves the container: only where it may matter.
        found = books.find(host_id(environ)) if books.has_any() else None
    except StoreError as error:
        say(f"{NOTICE}whether this host was unfit before is not known: {error}")
        return None
    return found if found and found.is_for_good else None


# --- hosts that are unfit -------------------------------------------------------------------------
# What becomes of a host that is unfit: it is written down, taken out of service where that is
# wanted, and left for another one, so many times and no more.


def refuse(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    say: Say,
    tries: int,
    quarantine: bool,
    checks: Sequence[Check],
    was_known: bool = False,
) -> str:
    """Why the run ends here, for exit code 75. Raises NoFitHost.

    `was_known`: it is in the books already, and all that was to be done about it was done.
    """
    host, why = host_id(environ), reason(checks)
    if not was_known:
        enter(env, environ, say, host, checks)
        if quarantine and worst(checks) >= REPLACE:
            take_out(env, environ, say, host)
    tried = _count(env, environ, say, host, why)
    if len(tried) > tries:
        raise NoFitHost(hopeless(tried, tries))
    counted = f" ({len(tried)} of {tries})" if tried else ""
    return f"this host ({host}) is unfit: {why}; another one is tried{counted}"


def enter(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, host: str, checks: Sequence[Check]
) -> None:
    """Write a host down as unfit, so that the run's later attempts leave it at once."""
    if not env.store:
        return
    try:
        Books.open(env, environ).enter(host, checks, time.time())
    except StoreError as error:
        say(f"{NOTICE}that this host is unfit is not kept, it may be tried again: {error}")


def take_out(env: RuntimeEnv, environ: Mapping[str, str], say: Say, host: str) -> None:
    """Take it out of service, and tell what became of that."""
    from batchml.runtime.health.drain import drain

    say(NOTICE + drain(env, environ, host, time.time()))


def _count(
    env: RuntimeEnv, environ: Mapping[str, str], say: Say, host: str, why: str
) -> List[Unfit]:
    """All tries in vain of this run, or this child of it; none where nothing remembers."""
    if not env.store:
        return []
    try:
        return Books.open(env, environ).count(host, why)
    except StoreError as error:
        say(f"{NOTICE}tries are not counted: {error}")
        return []


def hopeless(tried: Sequence[Unfit], tries: int) -> str:
    """Said when there were too many: with everything that was found."""
    hosts: List[str] = []
    for each in tried:
        if each.host not in hosts:
            hosts.append(each.host)
    told = "; ".join(f"{host}: {_first(tried, host)}" for host in hosts)
    many = (
        f"{len(hosts)} hosts were unfit" if len(hosts) > 1 else "the only host there is was unfit"
    )
    return (
        f"{many} in {len(tried)} tries, more than `tries = {tries}` in [health]: {told}. "
        "A bad image or driver looks like bad hardware: see whether these have one cause. "
        '`checks = "off"` in [health] starts the run all the same.'
    )


def _first(tried: Sequence[Unfit], host: str) -> str:
    return next(each.why for each in tried if each.host == host)
