"""The entry's side of a supervisor: how it is started, and what it has decided."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.package import package_root
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.launch import RAY, TORCHRUN, Plan

VERDICT = "BATCHML_VERDICT"  # the file by which it says that the runtime chose the exit code
ASKED = ".asked"  # after its name: with what code the entry asks for a stop
UNFIT = "BATCHML_UNFIT"  # why this host should have no command
OWN_PYTHONPATH = "BATCHML_OWN_PYTHONPATH"  # the command's, which is not ours

_FROZEN = 15.0  # seconds
_MODULES = {TORCHRUN: "batchml.runtime.nodes.torchrun.main", RAY: "batchml.runtime.nodes.ray.main"}


def state_of(pid: int) -> str:
    """One letter, such as T; empty where the process is gone."""
    from batchml.runtime.telemetry.host import read

    return read(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1]


class Verdict(NamedTuple):
    """The exit code, where the runtime chose it and not the program."""

    code: int
    why: str
    news: Optional[Dict[str, Any]] = None  # for the main node, where it has not heard of it
    is_said: bool = True  # there is a line about it


class Led(NamedTuple):
    """A supervisor that is started instead of the command."""

    command: List[str]
    environ: Dict[str, str]
    file: str  # of its verdict
    asked: str
    makes_stop_file: bool

    def verdict(self, code: int) -> Optional[Verdict]:
        """None: the program chose the exit code. `code` as Popen has it."""
        try:
            with open(self.file, encoding="utf-8") as file:
                told = json.load(file)
            verdict = Verdict(int(told["code"]), str(told["why"]))
            news = {"not_begun": [verdict.code, verdict.why]}
            return verdict._replace(news=news) if told.get("untold") else verdict
        except (OSError, ValueError, TypeError, KeyError):
            if code >= 0:
                return None
        why = f"the supervisor of its ranks is gone: signal {-code} ended it"
        return Verdict(TRY_ELSEWHERE, why, {"lost": why}, is_said=False)


class Frozen:
    """A companion: a supervisor that was stopped, and not by us, is to go on, or to end. The other
    nodes and every rank would wait for it without end.

    Source: proc(5), the state in /proc/PID/stat.
    """

    def __init__(
        self,
        pid: int,
        say: Callable[[str], None],
        state: Callable[[int], str] = state_of,
        send: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._pid, self._say, self._state, self._send = pid, say, state, send
        self._since: Optional[float] = None
        self._was_woken = False

    def tick(self, now: float) -> None:
        if self._state(self._pid) != "T":  # which is not that of one that is traced
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now - self._since <= _FROZEN:
            return
        self._since = None
        number = signal.SIGKILL if self._was_woken else signal.SIGCONT
        deed = "ended" if self._was_woken else "woken"
        self._was_woken = True
        self._say(f"batchml: the supervisor of the ranks was stopped for {_FROZEN:.0f} s: {deed}")
        self._send(self._pid, number)

    def finish(self) -> None:
        pass


def plan_of(environ: Mapping[str, str]) -> Optional[Plan]:
    """The plan of this run, if it has one. Raises ValueError for one that cannot be followed."""
    plan = Plan.read(environ)
    if plan is not None and plan.kind not in _MODULES:
        raise ValueError(f"launch.kind {plan.kind!r} is not known to this image: build it anew")
    return plan


def led(plan: Plan, command: Sequence[str], environ: Mapping[str, str], folder: str) -> Led:
    """`folder` is the attempt's own."""
    file = os.path.join(folder, "verdict")
    ours = package_root()
    given = environ.get("PYTHONPATH", "")
    return Led(
        [sys.executable, "-m", _MODULES[plan.kind], "--", *command],
        {
            **environ,
            VERDICT: file,
            OWN_PYTHONPATH: given,
            "PYTHONPATH": os.pathsep.join([ours, given] if given else [ours]),
        },
        file,
        file + ASKED,
        plan.kind == TORCHRUN,
    )


def told_main(
    environ: Mapping[str, str], news: Dict[str, Any], stops_within: Callable[[float], bool]
) -> bool:
    """Tell the main node of a gang that this one ends: `{"not_begun": [code, why]}` before its
    command, or `{"lost": why}`. Best effort: the main node may not listen yet, so it is tried for
    half a minute, but not while a stop is due.
    """
    if "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS" not in environ:
        return False  # this is the main node, or there is one alone
    try:
        plan = Plan.read(environ)
    except ValueError:
        return False
    if plan is None or plan.kind != TORCHRUN:
        return False
    from batchml.runtime.nodes.torchrun.settings import Where
    from batchml.runtime.nodes.torchrun.uplink import tell

    where = Where.read(environ)
    limit = 1.0 if stops_within(0.0) else 30.0
    return tell(environ, where.main, where.identity, where.node, news, limit, stops_within)
