"""The settings of a supervisor: its times, the meaning of a stop signal, the ranks' environment."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Mapping
from typing import Dict, NamedTuple

from batchml.runtime.nodes.launcher import ASKED, OWN_PYTHONPATH, UNFIT, VERDICT
from batchml.runtime.protocol.exit_codes import STOPPED
from batchml.runtime.protocol.launch import TOKEN

_LIMITS = "BATCHML_GANG_LIMITS"  # JSON: seconds of `SupervisorTimes`, for tests and slow networks

_UNREACHED = 5.0
_ONE_TRY = 0.5


class SupervisorTimes(NamedTuple):
    """Seconds."""

    beat: float = 2.0  # between two signs of life of a node
    silent: float = 15.0  # without one, until a node is lost
    regroup: float = 60.0  # until a node that fell silent is back
    gone: float = 10.0  # until a node whose connection was closed is back
    end_grace: float = 3.0  # from SIGTERM to SIGKILL for ranks that cannot save any more
    bring: float = 600.0  # until the checkpoints of rank 0 are fetched

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SupervisorTimes:
        try:
            found = json.loads(environ.get(_LIMITS) or "{}")
            return cls(**{name: float(value) for name, value in found.items()})
        except (ValueError, TypeError, AttributeError):
            return cls()


class StopOrder(NamedTuple):
    """The exit code of a stopped run, the reason, and the seconds that the ranks have."""

    code: int
    why: str
    grace: float


def versions() -> Dict[str, str]:
    """The versions that all nodes need to have alike."""
    found = {"python": platform.python_version()}
    try:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found["torch"] = version("torch")
        except PackageNotFoundError:
            pass
    except ImportError:  # pragma: no cover
        pass
    return found


def quick_checks(environ: Mapping[str, str]) -> Dict[str, str]:
    """`environ` with quick health checks instead of deep ones: all other nodes wait meanwhile."""
    found = dict(environ)
    try:
        health = json.loads(environ.get("BATCHML_HEALTH") or "{}")
        if health.get("checks") == "deep":
            found["BATCHML_HEALTH"] = json.dumps({**health, "checks": "quick"})
    except (ValueError, AttributeError):
        pass
    return found


def ranks_grace(seconds: float) -> float:
    """The grace of the ranks: shorter than that after which the container is killed."""
    return max(seconds * 0.9 - 1.0, seconds / 2)


def report_limit(is_busy: bool, grace: float) -> float:
    """Seconds for which a stop waits for a main node that does not answer.

    A node on which nothing runs has nothing to save, so it waits for one try.
    """
    return min(_UNREACHED if is_busy else _ONE_TRY, grace)


def read_stop(environ: Mapping[str, str], number: int, grace: float) -> StopOrder:
    """The meaning of a stop signal: what the entry wrote down before it, or a plain stop.

    `grace`: seconds that the run has, unless the host has less.
    """
    try:
        with open(environ.get(VERDICT, "") + ASKED, encoding="utf-8") as file:
            found = json.load(file)
        within = min(grace, float(found["grace"]))
        return StopOrder(int(found["code"]), str(found["why"]), ranks_grace(within))
    except (OSError, ValueError, TypeError, KeyError):
        return StopOrder(STOPPED, f"stopped ({signal.Signals(number).name})", ranks_grace(grace))


def write_verdict(environ: Mapping[str, str], code: int, why: str, is_untold: bool) -> None:
    """Record that the runtime chose the exit code. `is_untold`: the main node does not know it."""
    path = environ.get(VERDICT)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"code": code, "why": why, "untold": is_untold}, file)


def command_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of the ranks, without the variables between the entry and the supervisor."""
    found = {k: v for k, v in environ.items() if k not in (VERDICT, TOKEN, UNFIT)}
    own = found.pop(OWN_PYTHONPATH, None)
    if own is not None:
        found.pop("PYTHONPATH", None)
        if own:
            found["PYTHONPATH"] = own
    return found
