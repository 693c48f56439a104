"""What becomes of a host that is unfit: it is written down, taken out of service where that is
wanted, and left for another one, so many times and no more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Callable, List

from batchml.runtime.env import RuntimeEnv
from batchml.runtime.health_checks import NOTICE, REPLACE, Check, NoFitHost, worst
from batchml.runtime.hosts import Books, Unfit, host_id, reason
from batchml.runtime.store import StoreError

Say = Callable[[str], None]


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
    from batchml.runtime.health_drain import drain

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
