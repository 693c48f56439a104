"""How the entry of a container starts the supervisor of its node, and how it reads that
supervisor's result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.package import package_root
from batchml.runtime.processes import state_of
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.launch import KINDS, LaunchPlan

# the file in which the supervisor records that the runtime chose the exit code
VERDICT = "BATCHML_VERDICT"
ASKED = ".asked"  # suffix of the file in which the entry records the exit code of a stop
UNFIT = "BATCHML_UNFIT"  # why this host should run no command
OWN_PYTHONPATH = "BATCHML_OWN_PYTHONPATH"  # the command's PYTHONPATH; the supervisor's is another

_FROZEN = 15.0  # seconds


class SupervisorVerdict(NamedTuple):
    """The exit code, where the runtime chose it and not the program."""

    code: int
    why: str
    # what the main node must be told, if it does not know of this end yet
    news: Optional[Dict[str, Any]] = None
    is_said: bool = True  # the log has a line about it


class SupervisedCommand(NamedTuple):
    """A supervisor, to be started instead of the command."""

    command: List[str]
    environ: Dict[str, str]
    file: str  # of its verdict
    asked: str
    makes_stop_file: bool

    def verdict(self, code: int) -> Optional[SupervisorVerdict]:
        """None: the program chose the exit code. `code`: the supervisor's, as Popen has it."""
        try:
            with open(self.file, encoding="utf-8") as file:
                found = json.load(file)
            verdict = SupervisorVerdict(int(found["code"]), str(found["why"]))
            news = {"not_begun": [verdict.code, verdict.why]}
            return verdict._replace(news=news) if found.get("untold") else verdict
        except (OSError, ValueError, TypeError, KeyError):
            if code >= 0:
                return None
        why = f"the supervisor of its ranks is gone: signal {-code} ended it"
        return SupervisorVerdict(TRY_ELSEWHERE, why, {"lost": why}, is_said=False)


class SupervisorWatch:
    """An attempt plug-in: wake a supervisor that was stopped by SIGSTOP or a debugger.

    The other nodes and every rank would wait for it forever. The second time it is killed.
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
        if self._state(self._pid) != "T":  # a process that is traced has another state
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


def read_plan(environ: Mapping[str, str]) -> Optional[LaunchPlan]:
    """The plan of this run, if it has one. Raises ValueError for a plan that cannot be followed."""
    plan = LaunchPlan.read(environ)
    if plan is not None and plan.kind not in KINDS:
        raise ValueError(f"launch.kind {plan.kind!r} is not known to this image: build it anew")
    return plan


def supervise(
    plan: LaunchPlan, command: Sequence[str], environ: Mapping[str, str], folder: str
) -> SupervisedCommand:
    """The supervisor of a command. `folder` is the attempt's own."""
    file = os.path.join(folder, "verdict")
    ours = package_root()
    given = environ.get("PYTHONPATH", "")
    return SupervisedCommand(
        [sys.executable, "-m", KINDS[plan.kind].module, "--", *command],
        {
            **environ,
            VERDICT: file,
            OWN_PYTHONPATH: given,
            "PYTHONPATH": os.pathsep.join([ours, given] if given else [ours]),
        },
        file,
        file + ASKED,
        plan.is_supervised,
    )


def tell_main_node(
    environ: Mapping[str, str], news: Dict[str, Any], stops_within: Callable[[float], bool]
) -> bool:
    """Tell the supervisor of the main node that this node ends. Whether it was told.

    `news`: `{"not_begun": [code, why]}` before the command started, or `{"lost": why}`. The main
    node may not listen yet, so it is tried for half a minute, unless a stop is due.
    """
    from batchml.runtime.nodes.link.address import NodePosition, has_main_elsewhere
    from batchml.runtime.nodes.link.uplink import send_once

    if not has_main_elsewhere(environ):
        return False
    try:
        plan = LaunchPlan.read(environ)
    except ValueError:
        return False
    if plan is None or not plan.is_supervised:
        return False
    position = NodePosition.read(environ)
    identity = position.identity
    info = {"index": position.node, "job": identity.job, "attempt": identity.attempt, **news}
    limit = 1.0 if stops_within(0.0) else 30.0
    source = environ.get("BATCHML_NODE_ADDRESS", "")
    return send_once(position.main_node, info, source, limit, stops_within)
