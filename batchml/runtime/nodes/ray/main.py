"""The launch kind `ray`: the supervisor of one node of a Ray cluster.

`python -m batchml.runtime.nodes.ray.main -- COMMAND ...`

The entry starts it instead of the command. The head starts Ray, waits for workers and runs the
command; a worker joins, and stays until the head ends. docs/ray.md describes it for users.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from batchml.runtime.entry.stopping import Signals
from batchml.runtime.nodes.launcher import VERDICT
from batchml.runtime.nodes.ray.head import lead
from batchml.runtime.nodes.ray.rules import LeaveCluster
from batchml.runtime.nodes.ray.worker import RayMissing, work
from batchml.runtime.processes import become_reaper
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import TOKEN, WORKER, LaunchPlan
from batchml.runtime.storage.files import write_atomically
from batchml.runtime.storage.store import StoreError


def supervise(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> LeaveCluster:
    """Do the part of this node, and return how it ends."""
    try:
        plan, token = LaunchPlan.read(environ), environ.get(TOKEN, "")
        if plan is None or not token:
            return LeaveCluster(
                CONFIGURATION_ERROR, f"no launch plan and {TOKEN}: who started this?"
            )
        if plan.role == WORKER:
            return work(environ, plan, token, signals, say)
        return lead(command, environ, plan, token, signals, say)
    except RayMissing as error:
        return LeaveCluster(CONFIGURATION_ERROR, str(error))
    except StoreError as error:
        return LeaveCluster(TRY_ELSEWHERE if error.temporary else CONFIGURATION_ERROR, str(error))
    except (ValueError, OSError) as error:
        return LeaveCluster(CONFIGURATION_ERROR, str(error))


def say(text: str) -> None:
    """Write one line for people."""
    line = " ".join(text.splitlines())
    os.write(1, f"batchml: {line}\n".encode("utf-8", "replace"))


def write_verdict(leave: LeaveCluster, environ: Mapping[str, str]) -> None:
    """Write why the node ends, for people and for the entry."""
    if not leave.why:
        return
    say(leave.why)
    path = environ.get(VERDICT)
    if path and leave.code not in (126, 127):  # a command that cannot be run is the user's
        verdict = {"code": leave.code, "why": leave.why}
        write_atomically(path, json.dumps(verdict).encode())


def main() -> None:
    if sys.path[:1] in ([""], [os.getcwd()]):  # the job's own modules come first there
        del sys.path[0]
    words = sys.argv[1:]
    signals = Signals()
    signals.listen()
    become_reaper()
    leave = supervise(words[1:] if words[:1] == ["--"] else words, os.environ, signals)
    write_verdict(leave, os.environ)
    signals.ignore()
    os._exit(leave.code)


if __name__ == "__main__":
    main()
