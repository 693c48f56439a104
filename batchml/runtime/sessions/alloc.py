"""The program of `batchml alloc`: it holds the run's resources until they are no longer needed.

    python -m batchml.runtime.sessions.alloc

It ends with 0 when its stop file exists, or when nobody has been inside the run
(`exec/presence.py`) for BATCHML_IDLE seconds. In a run of several nodes it runs on the first node,
where the shells are; the other nodes execute the steps of `srun` (`nodes/slurm/steps.py`).

`--left` prints the new and changed files of its working folder, which are about to be lost.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Callable, List

from batchml.runtime.entry.folders import WorkingFolder
from batchml.runtime.entry.script import attempt_folder, slurm_environment
from batchml.runtime.entry.stopping import should_stop
from batchml.runtime.exec.presence import count
from batchml.runtime.nodes.slurm.steps import FOLDER
from batchml.runtime.protocol.variables import SLURM, RuntimeEnv
from batchml.runtime.sessions.idle import (
    IdleTimer,
    Lifetime,
    describe_idle_end,
    format_seconds,
    read_limit,
)

LEFT = "--left"

_CHECK_EVERY = 0.5  # seconds
_FILES_AT_START = "working-folder.json"


def hold(
    environ: Mapping[str, str],
    count_users: Callable[[], int],
    is_over: Callable[[], bool],
    log: Callable[[str], None],
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Hold until `is_over`, or until the idle limit; return 0.

    `count_users` counts who is inside the run, `log` writes a line to the log.
    """
    timer, lifetime = IdleTimer(read_limit(environ)), Lifetime(monotonic)
    run = environ.get("BATCHML_RUN", "RUN")
    end = ""
    if timer.limit < math.inf:
        end = f"; it ends itself when nobody has been in for {format_seconds(timer.limit)}"
    log(f"held for a shell: batchml shell {run}{end}")
    while not is_over():
        if not timer.seconds_left(count_users() > 0, monotonic()):
            log(describe_idle_end("the allocation", timer.limit, lifetime.seconds(), environ))
            return 0
        sleep(_CHECK_EVERY)
    return 0


def remember_folder(environ: Mapping[str, str], folder: str) -> None:
    """Record the files of the current folder in `folder`, for `describe_new_files`.

    If that fails, new files are not reported later.
    """
    with suppress(OSError, UnicodeError):
        found = WorkingFolder(os.getcwd(), _kept_folders(environ)).found
        if found is not None:
            with open(os.path.join(folder, _FILES_AT_START), "w", encoding="utf-8") as file:
                json.dump(found, file)


def describe_new_files(environ: Mapping[str, str], folder: str) -> str:
    """Name the new and changed files of the current folder; "" if there are none, or unknown."""
    try:
        with open(os.path.join(folder, _FILES_AT_START), encoding="utf-8") as file:
            before = {name: (size, mtime) for name, (size, mtime) in json.load(file).items()}
        working = WorkingFolder(os.getcwd(), _kept_folders(environ), before)
    except (OSError, ValueError):
        return ""
    variable = "BATCHML_WORKSPACE" if environ.get("BATCHML_WORKSPACE") else "BATCHML_OUTPUT_DIR"
    return working.describe_leftovers(f"which is gone now: ${variable} would have kept {{}}")


def _kept_folders(environ: Mapping[str, str]) -> List[str]:
    env = RuntimeEnv.read(environ)
    return [env.output_dir, env.checkpoint_dir, env.workspace, environ.get("BATCHML_DATA_DIR", "")]


def _log(text: str) -> None:
    print(f"batchml notice: {text}", flush=True)


def main(arguments: Sequence[str] = ()) -> int:
    if list(arguments) == [LEFT]:
        text = describe_new_files(os.environ, attempt_folder())
        if text:
            print(text)
        return 0
    if os.environ.get(SLURM) and FOLDER not in os.environ:
        # Shells inside the run get the variables with which this process was executed.
        command = [sys.executable, "-m", "batchml.runtime.sessions.alloc"]
        os.execve(sys.executable, command, slurm_environment(os.environ, gathered=False))
    remember_folder(os.environ, attempt_folder())
    return hold(os.environ, lambda: count(os.environ), should_stop, _log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
