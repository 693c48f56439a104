"""The supervisor of one node of a Ray gang.

`python -m batchml.runtime.nodes.ray.main -- COMMAND ...`

`run.py` starts it in the place of the command when BATCHML_LAUNCH says `"kind":"ray"`. The head
starts Ray, waits for workers and runs the command; a worker joins, and stays until the head ends.
docs/ray.md says it for users.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from batchml.runtime.entry.stopping import Signals
from batchml.runtime.nodes.ray.node import NoRay
from batchml.runtime.nodes.ray.rules import Leave
from batchml.runtime.nodes.torchrun.child import VERDICT
from batchml.runtime.processes import become_reaper
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR, TRY_ELSEWHERE
from batchml.runtime.protocol.launch import TOKEN, WORKER, Plan
from batchml.runtime.storage.files import write_atomically
from batchml.runtime.storage.store import StoreError


def supervise(command: Sequence[str], environ: Mapping[str, str], signals: Signals) -> Leave:
    """Do the part of this node, and say how it ends."""
    try:
        plan, token = Plan.read(environ), environ.get(TOKEN, "")
        if plan is None or not token:
            return Leave(CONFIGURATION_ERROR, f"no launch plan and {TOKEN}: who started this?")
        if plan.role == WORKER:
            from batchml.runtime.nodes.ray.worker import work

            return work(environ, plan, token, signals, say)
        from batchml.runtime.nodes.ray.head import lead

        return lead(command, environ, plan, token, signals, say)
    except NoRay as error:
        return Leave(CONFIGURATION_ERROR, str(error))
    except StoreError as error:
        return Leave(TRY_ELSEWHERE if error.temporary else CONFIGURATION_ERROR, str(error))
    except (ValueError, OSError) as error:
        return Leave(CONFIGURATION_ERROR, str(error))


def say(text: str) -> None:
    """One line for people."""
    line = " ".join(text.splitlines())
    os.write(1, f"batchml: {line}\n".encode("utf-8", "replace"))


def tell_verdict(leave: Leave, environ: Mapping[str, str]) -> None:
    """Say why, and leave it to the parent to say that it was not the program."""
    if not leave.why:
        return
    say(leave.why)
    path = environ.get(VERDICT)
    if path and leave.code not in (126, 127):  # a command that cannot be run is the user's
        told = {"code": leave.code, "why": leave.why}
        write_atomically(path, json.dumps(told).encode())


def main() -> None:
    if sys.path[:1] in ([""], [os.getcwd()]):  # the job's own modules are not ours
        del sys.path[0]
    words = sys.argv[1:]
    signals = Signals()
    signals.listen()
    become_reaper()
    leave = supervise(words[1:] if words[:1] == ["--"] else words, os.environ, signals)
    tell_verdict(leave, os.environ)
    signals.deafen()
    os._exit(leave.code)


if __name__ == "__main__":
    main()
