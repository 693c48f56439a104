"""How the entry of a container starts the supervisor of its node, and reads how it ended."""

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
UNFIT = "BATCHML_UNFIT"  # why this host is unfit to run a command
OWN_PYTHONPATH = "BATCHML_OWN_PYTHONPATH"  # PYTHONPATH of the command; the supervisor has another

_STOPPED_LIMIT = 15.0  # seconds after which a supervisor in the state "stopped" is woken


class SupervisorVerdict(NamedTuple):
    """The exit code, if the runtime chose it and not the program."""

    code: int
    why: str
    # a message for the main node, if it does not know of this end yet
    news: Optional[Dict[str, Any]] = None
    is_said: bool = True  # the log has a line about this end


class SupervisedCommand(NamedTuple):
    """A supervisor that is started instead of the command."""

    command: List[str]
    environ: Dict[str, str]
    file: str  # in which the supervisor writes its verdict
    stop_request: str  # the file in which the entry records the exit code of a stop
    makes_stop_file: bool  # the supervisor makes the stop file, not the entry

    def verdict(self, code: int) -> Optional[SupervisorVerdict]:
        """Return how the supervisor ended the run; None if the program chose the exit code.

        `code`: the supervisor's exit code, -N after signal N.
        """
        try:
            with open(self.file, encoding="utf-8") as file:
                document = json.load(file)
            verdict = SupervisorVerdict(int(document["code"]), str(document["why"]))
            news = {"not_begun": [verdict.code, verdict.why]}
            return verdict._replace(news=news) if document.get("untold") else verdict
        except (OSError, ValueError, TypeError, KeyError):
            if code >= 0:
                return None
        why = f"the supervisor of its ranks is gone: signal {-code} ended it"
        return SupervisorVerdict(TRY_ELSEWHERE, why, {"lost": why}, is_said=False)


class SupervisorWatch:
    """An attempt plug-in that wakes a supervisor which SIGSTOP has stopped.

    Otherwise the other nodes and every rank would wait for it forever. The second time the
    supervisor is killed. Source: proc(5), the state in /proc/PID/stat.
    """

    def __init__(
        self,
        pid: int,
        say: Callable[[str], None],
        state: Callable[[int], str] = state_of,
        send: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._pid, self._say, self._state, self._send = pid, say, state, send
        self._since: Optional[float] = None  # when it was first seen stopped
        self._was_woken = False

    def tick(self, now: float) -> None:
        if self._state(self._pid) != "T":  # a process that is traced has another state
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now - self._since <= _STOPPED_LIMIT:
            return
        self._since = None
        number, how = (signal.SIGKILL, "ended") if self._was_woken else (signal.SIGCONT, "woken")
        self._was_woken = True
        self._say(
            f"batchml: the supervisor of the ranks was stopped for {_STOPPED_LIMIT:.0f} s, so it "
            f"is {how}"
        )
        self._send(self._pid, number)

    def finish(self) -> None:
        """Required by the plug-in interface. Does nothing."""


def read_plan(environ: Mapping[str, str]) -> Optional[LaunchPlan]:
    """The plan of this run, or None. Raises ValueError if this image cannot follow the plan."""
    plan = LaunchPlan.read(environ)
    if plan is not None and plan.kind not in KINDS:
        raise ValueError(f"this image does not know launch.kind {plan.kind!r}: build it again")
    return plan


def supervise(
    plan: LaunchPlan, command: Sequence[str], environ: Mapping[str, str], folder: str
) -> SupervisedCommand:
    """Return the supervisor of a command. `folder`: a folder that is removed with the attempt."""
    file = os.path.join(folder, "verdict")
    python_path = environ.get("PYTHONPATH", "")
    return SupervisedCommand(
        [sys.executable, "-m", KINDS[plan.kind].module, "--", *command],
        {
            **environ,
            VERDICT: file,
            OWN_PYTHONPATH: python_path,
            "PYTHONPATH": os.pathsep.join(filter(None, (package_root(), python_path))),
        },
        file,
        file + ASKED,
        plan.is_supervised,
    )


def tell_main_node(
    environ: Mapping[str, str], news: Dict[str, Any], stops_within: Callable[[float], bool]
) -> bool:
    """Tell the supervisor of the main node that this node ends. Return whether it heard that.

    `news`: `{"not_begun": [code, why]}` before the command started, or `{"lost": why}`. The main
    node may not listen yet, so this tries for half a minute, or for a second if a stop was
    requested. `stops_within` waits, and returns True once a stop was requested.
    """
    from batchml.runtime.nodes.link.address import OWN_ADDRESS, NodePosition, has_main_elsewhere
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
    source = environ.get(OWN_ADDRESS, "")
    return send_once(position.main_node, info, source, limit, stops_within)
