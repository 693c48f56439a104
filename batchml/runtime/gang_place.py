"""What a supervisor finds around it: its place among the nodes, its times, what it is asked for."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Mapping
from typing import Dict, NamedTuple

from batchml.runtime.codes import STOPPED
from batchml.runtime.env import RuntimeEnv
from batchml.runtime.gang_child import ASKED, OWN_PYTHONPATH, UNFIT, VERDICT
from batchml.runtime.gang_main import Identity
from batchml.runtime.launch import TOKEN

_LIMITS = "BATCHML_GANG_LIMITS"  # JSON: seconds of `Times`, for tests and slow networks

_UNTOLD = 5.0
_ONE_TRY = 0.5


class Times(NamedTuple):
    """Seconds; what they mean is said where they are used."""

    beat: float = 2.0
    silent: float = 15.0
    regroup: float = 60.0
    gone: float = 10.0
    end_grace: float = 3.0
    bring: float = 600.0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Times:
        try:
            found = json.loads(environ.get(_LIMITS) or "{}")
            return cls(**{name: float(value) for name, value in found.items()})
        except (ValueError, TypeError, AttributeError):
            return cls()


class Where(NamedTuple):
    """A node among the nodes, as AWS Batch tells it."""

    node: int  # 0: the main node
    nodes: int
    main: str  # its address; empty on the main node
    identity: Identity

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Where:
        """Ranks go by index, but the main node comes first whatever its index is."""
        number = int(environ.get("AWS_BATCH_JOB_NODE_INDEX", "0"))
        main = int(environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"))
        index = 0 if number == main else number + 1 if number < main else number
        env = RuntimeEnv.read(environ)
        job = env.run.partition("#")[0]
        return cls(
            index,
            int(environ.get("AWS_BATCH_JOB_NUM_NODES", "1")),
            environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", ""),
            Identity(job, env.attempt, environ.get(TOKEN, ""), env.key or job),
        )


def versions() -> Dict[str, str]:
    """Of what nodes have to have alike."""
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


def quickly(environ: Mapping[str, str]) -> Dict[str, str]:
    """As `environ`, but the host is looked at quickly: all other nodes wait meanwhile."""
    found = dict(environ)
    try:
        told = json.loads(environ.get("BATCHML_HEALTH") or "{}")
        if told.get("checks") == "deep":
            found["BATCHML_HEALTH"] = json.dumps({**told, "checks": "quick"})
    except (ValueError, AttributeError):
        pass
    return found


class Stop(NamedTuple):
    code: int
    why: str
    grace: float  # seconds that the ranks have


def ranks_grace(seconds: float) -> float:
    """Of the ranks: less than that after which the container is killed."""
    return max(seconds * 0.9 - 1.0, seconds / 2)


def until_untold(is_busy: bool, grace: float) -> float:
    """Seconds that a stop waits for a main node that is away, to be told there: where nothing runs
    nothing can be saved either, so for one try.
    """
    return min(_UNTOLD if is_busy else _ONE_TRY, grace)


def asked_for(environ: Mapping[str, str], number: int, grace: float) -> Stop:
    """What a stop signal means: what the entry wrote down before it, or a plain stop.

    `grace`: seconds that the run has, unless the host has less.
    """
    try:
        with open(environ.get(VERDICT, "") + ASKED, encoding="utf-8") as file:
            found = json.load(file)
        within = min(grace, float(found["grace"]))
        return Stop(int(found["code"]), str(found["why"]), ranks_grace(within))
    except (OSError, ValueError, TypeError, KeyError):
        return Stop(STOPPED, f"stopped ({signal.Signals(number).name})", ranks_grace(grace))


def write_verdict(environ: Mapping[str, str], code: int, why: str, is_untold: bool) -> None:
    """Say that the exit code to come was chosen by the runtime; `is_untold`: the main node has not
    heard of it.
    """
    path = environ.get(VERDICT)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"code": code, "why": why, "untold": is_untold}, file)


def rank_base(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of the ranks, without what is between us and the entry."""
    found = {k: v for k, v in environ.items() if k not in (VERDICT, TOKEN, UNFIT)}
    own = found.pop(OWN_PYTHONPATH, None)
    if own is not None:
        found.pop("PYTHONPATH", None)
        if own:
            found["PYTHONPATH"] = own
    return found
