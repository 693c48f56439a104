"""The program of `batchml alloc`: it holds the run's resources until they are no longer needed.

    python -m batchml.runtime.sessions.alloc [--left]

It ends with code 0 when the stop file exists, or when no shell was open in the run
(`exec/presence.py`) for BATCHML_IDLE seconds. In a run of several nodes it runs on the first node,
where shells open; the other nodes execute the steps of `srun` (`nodes/slurm/steps.py`).

With `--left` it only prints the new and changed files of its working folder, which are kept.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Callable, List, Optional

from batchml.runtime.entry.script import attempt_folder, slurm_environment
from batchml.runtime.entry.stopping import should_stop
from batchml.runtime.entry.working_folder import WorkingFolder
from batchml.runtime.exec.presence import count
from batchml.runtime.nodes.slurm.steps import FOLDER
from batchml.runtime.processes import process_age
from batchml.runtime.protocol.variables import SLURM, RuntimeEnv

# --- The end of idle runs -------------------------------------------------------------------------
# An allocation or a notebook ends when it was not used for too long. The caller decides what counts
# as use, such as an open shell or a busy kernel. Times are seconds of a monotonic clock.


LIMIT = "BATCHML_IDLE"  # seconds without use after which the run ends; unset: never
RATE = "BATCHML_RATE"  # price of the whole run in USD an hour; unset: the client did not know it


class IdleTimer:
    """Measures how long the run has not been used. Its start counts as use."""

    def __init__(self, limit: float) -> None:
        """`limit` in seconds; `math.inf` for no limit."""
        self.limit = limit
        self._last_use: Optional[float] = None

    def seconds_left(self, is_used: bool, now: float) -> float:
        """Return the seconds until the run has to end; 0 when it has to end now."""
        if is_used or self._last_use is None:
            self._last_use = now
        return max(0.0, self._last_use + self.limit - now)


class Lifetime:
    """Measures for how long this process has run, which is about as long as its run."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        age: Optional[float] = None,
    ) -> None:
        """`age`: the seconds that the process has run already; None: read them from /proc."""
        self._monotonic = monotonic
        self._start = monotonic() - (process_age() if age is None else age)

    def seconds(self) -> float:
        return self._monotonic() - self._start


def read_limit(environ: Mapping[str, str]) -> float:
    """Return the idle limit of the run in seconds; `math.inf` if it has none."""
    return _positive_number(environ.get(LIMIT)) or math.inf


def describe_idle_end(name: str, limit: float, ran: float, environ: Mapping[str, str]) -> str:
    """`NAME was idle for 1 h 0 min and is ended. It ran 63 h 12 min, about 63.50 USD at 1.005 USD
    an hour.`"""
    return (
        f"{name} was idle for {format_seconds(limit)} and is ended. {describe_cost(ran, environ)}"
    )


def describe_cost(ran: float, environ: Mapping[str, str]) -> str:
    """`It ran 63 h 12 min, about 63.50 USD at 1.005 USD an hour.` Without a price, no cost."""
    rate = _positive_number(environ.get(RATE))
    usd = rate * ran / 3600
    money = f", about {usd:.{2 if usd >= 1 else 4}f} USD at {rate:.4g} USD an hour" if rate else ""
    return f"It ran {format_seconds(ran)}{money}."


def format_seconds(seconds: float) -> str:
    """`40 s`, `12 min`, `1 h 0 min`"""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _positive_number(text: Optional[str]) -> float:
    """Parse a number above 0; 0 for anything else, since users may set any value."""
    try:
        number = float(text or 0)
    except ValueError:
        return 0.0
    return number if 0 < number < math.inf else 0.0


# --- The allocation -------------------------------------------------------------------------------


LEFT = "--left"

_CHECK_EVERY = 0.5  # seconds between two checks whether it is used, or over
_FILES_AT_START = "working-folder.json"


def keep_open(
    environ: Mapping[str, str],
    count_users: Callable[[], int],
    is_over: Callable[[], bool],
    log: Callable[[str], None],
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Keep the run open until `is_over` or the idle limit; return the exit code 0.

    `count_users` counts the shells and commands inside the run, `log` writes a line to the log.
    """
    timer, lifetime = IdleTimer(read_limit(environ)), Lifetime(monotonic)
    run = environ.get("BATCHML_RUN", "RUN")
    end = ""
    if timer.limit < math.inf:
        end = f"; it ends by itself when nobody has been inside for {format_seconds(timer.limit)}"
    log(f"allocated; open a shell in it with: batchml shell {run}{end}")
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
        files = WorkingFolder(os.getcwd(), _kept_folders(environ)).before
        if files is not None:
            with open(os.path.join(folder, _FILES_AT_START), "w", encoding="utf-8") as file:
                json.dump(files, file)


def describe_new_files(environ: Mapping[str, str], folder: str) -> str:
    """Name the new and changed files of the current folder; "" if there are none, or unknown."""
    try:
        with open(os.path.join(folder, _FILES_AT_START), encoding="utf-8") as file:
            before = {name: (size, mtime) for name, (size, mtime) in json.load(file).items()}
        working = WorkingFolder(os.getcwd(), _kept_folders(environ), before)
    except (OSError, ValueError):
        return ""
    run = RuntimeEnv.read(environ).run.partition("#")[0]
    return working.describe_leftovers(f"and can be copied from there: batchml get {run}")


def _kept_folders(environ: Mapping[str, str]) -> List[str]:
    """The folders whose files outlive the run."""
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
        # Restart this program with the variables of Slurm: shells inside the run take over the
        # variables with which this process was executed.
        command = [sys.executable, "-m", "batchml.runtime.sessions.alloc"]
        os.execve(sys.executable, command, slurm_environment(os.environ, gathered=False))
    remember_folder(os.environ, attempt_folder())
    return keep_open(os.environ, lambda: count(os.environ), should_stop, _log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
