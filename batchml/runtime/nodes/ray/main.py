"""The launch kind `ray`: the supervisor of one node of a Ray cluster.

`python -m batchml.runtime.nodes.ray.main -- COMMAND ...`

The entry of the container starts it instead of the command. The head starts Ray, waits for workers
and runs the command; a worker joins, and stays until the head ends. docs/ray.md describes it for
users.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from batchml.runtime.entry.stopping import Signals
from batchml.runtime.nodes.ray.head import run_head
from batchml.runtime.nodes.ray.rules import LeaveCluster
from batchml.runtime.nodes.ray.worker import RayMissing, run_worker
from batchml.runtime.nodes.supervisor.settings import write_verdict
from batchml.runtime.package import drop_working_folder
from batchml.runtime.processes import become_reaper
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import TOKEN, WORKER, LaunchPlan
from batchml.runtime.storage.store import StoreError


def supervise(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> LeaveCluster:
    """Be the head or a worker, as the launch plan says, and return how this node ends."""
    try:
        plan, token = LaunchPlan.read(environ), environ.get(TOKEN, "")
        if plan is None or not token:
            return LeaveCluster(
                CONFIGURATION_ERROR, f"no launch plan or no {TOKEN}: submit the job with batchml"
            )
        if plan.role == WORKER:
            return run_worker(environ, plan, token, signals, say)
        return run_head(command, environ, plan, token, signals, say)
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


def main() -> None:
    drop_working_folder()
    words = sys.argv[1:]
    signals = Signals()
    signals.listen()
    become_reaper()
    leave = supervise(words[1:] if words[:1] == ["--"] else words, os.environ, signals)
    if leave.why:
        say(leave.why)
        if leave.code not in (126, 127):  # the user's command cannot be run
            write_verdict(os.environ, leave.code, leave.why)
    signals.ignore()
    os._exit(leave.code)


if __name__ == "__main__":
    main()
