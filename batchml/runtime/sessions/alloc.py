"""Hold what a run was given until nobody needs it: `python -m batchml.runtime.sessions.alloc`.

It is the program of `batchml alloc`. It does nothing but look: it ends with 0 once its stop file is
there, or once no seat (`seats.py`) has been held for BATCHML_IDLE seconds. On several nodes that is
the first, where the shells are; the others do the steps of their `srun` (`nodes/slurm/steps.py`).

`--left` beside it, before its end, prints what is new or changed in its working folder.
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

from batchml.runtime.entry.folders import WorkingFolder
from batchml.runtime.entry.stopping import should_stop
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.telemetry.budget import process_age

# --- the idle timeout -----------------------------------------------------------------------------
# When a run that is held for a person, an allocation or a notebook, has been left idle.
#
# The decision and its words are here; what counts as use is said by whoever looks: a held seat
# (`exec/prompt.py`), a kernel that computes, a request. Times are seconds of a clock that never
# jumps.


LIMIT = "BATCHML_IDLE"  # seconds without use after which the run ends itself; none: never
RATE = "BATCHML_RATE"  # USD an hour of the whole run, where the client knew it


class Idle:
    """How long nobody has used the run. It counts as used when it begins."""

    def __init__(self, limit: float) -> None:
        """`limit` in seconds; `math.inf` for no limit."""
        self.limit = limit
        self._used: Optional[float] = None

    def seen(self, active: bool, now: float) -> float:
        """Seconds that are left, 0 once it is to end; `active`: whether it is used now."""
        if active or self._used is None:
            self._used = now
        return max(0.0, self._used + self.limit - now)


class Life:
    """How long this process has lived, which is about how long its run has."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        age: Optional[float] = None,
    ) -> None:
        self._monotonic = monotonic
        self._began = monotonic() - (process_age() if age is None else age)

    def seconds(self) -> float:
        return self._monotonic() - self._began


def limit_of(environ: Mapping[str, str]) -> float:
    """The limit that the run was given, in seconds; `math.inf` where there is none."""
    return _number(environ.get(LIMIT)) or math.inf


def last_words(what: str, limit: float, ran: float, environ: Mapping[str, str]) -> str:
    """`WHAT was idle for 1 h 0 min: it is ended. It ran 63 h 12 min, about 63.50 USD at 1.005 USD
    an hour`; times in seconds."""
    return f"{what} was idle for {spelled(limit)}: it is ended. {cost_words(ran, environ)}"


def cost_words(ran: float, environ: Mapping[str, str]) -> str:
    """`It ran 63 h 12 min, about 63.50 USD at 1.005 USD an hour.` Without a rate, no money."""
    rate = _number(environ.get(RATE))
    usd = rate * ran / 3600
    money = f", about {usd:.{2 if usd >= 1 else 4}f} USD at {rate:.4g} USD an hour" if rate else ""
    return f"It ran {spelled(ran)}{money}."


def spelled(seconds: float) -> str:
    """`40 s`, `12 min`, `1 h 0 min`"""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _number(text: Optional[str]) -> float:
    """A number above 0; 0 for anything else, which a user may have set."""
    try:
        found = float(text or 0)
    except ValueError:
        return 0.0
    return found if 0 < found < math.inf else 0.0


# --- the program of an allocation -----------------------------------------------------------------


LEFT = "--left"

_EVERY = 0.5  # seconds between two looks
_FOUND = "working-folder.json"  # what was in the folder as it began


def hold(
    environ: Mapping[str, str],
    count: Callable[[], int],
    is_over: Callable[[], bool],
    say: Callable[[str], None],
    *,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Hold until `is_over`, or until it was idle for too long: 0. `count` says how many seats are
    held now, `say` takes a line for the log."""
    idle, life = Idle(limit_of(environ)), Life(monotonic)
    run = environ.get("BATCHML_RUN", "RUN")
    ends = f"; it ends itself after {spelled(idle.limit)} without one" if _ends(idle) else ""
    say(f"held for a shell: batchml shell {run}{ends}")
    while not is_over():
        if not idle.seen(count() > 0, monotonic()):
            say(last_words("the allocation", idle.limit, life.seconds(), environ))
            return 0
        sleep(_EVERY)
    return 0


def _ends(idle: Idle) -> bool:
    return idle.limit != float("inf")


def remember_folder(environ: Mapping[str, str], place: str) -> None:
    """Write down what the current folder has, into the folder `place`, for `left_in`. Where that
    cannot be done, nothing will be said of it."""
    with suppress(OSError, UnicodeError):
        found = WorkingFolder(os.getcwd(), _kept(environ)).found
        if found is not None:
            with open(os.path.join(place, _FOUND), "w", encoding="utf-8") as file:
                json.dump(found, file)


def left_in(environ: Mapping[str, str], place: str) -> str:
    """A line that names what is new or changed in the current folder since it was remembered;
    empty where that is nothing, or is not known."""
    try:
        with open(os.path.join(place, _FOUND), encoding="utf-8") as file:
            before = {name: (size, mtime) for name, (size, mtime) in json.load(file).items()}
        working = WorkingFolder(os.getcwd(), _kept(environ), before)
    except (OSError, ValueError):
        return ""
    there = "BATCHML_WORKSPACE" if environ.get("BATCHML_WORKSPACE") else "BATCHML_OUTPUT_DIR"
    return working.told(f"which is gone now: ${there} would have kept {{}}")


def _kept(environ: Mapping[str, str]) -> List[str]:
    env = RuntimeEnv.read(environ)
    return [env.output_dir, env.checkpoint_dir, env.workspace, environ.get("BATCHML_DATA_DIR", "")]


def _say(text: str) -> None:
    print(f"batchml notice: {text}", flush=True)


def main(words: Sequence[str] = ()) -> int:
    from batchml.runtime.entry.script import SLURM, on_a_cluster, own_folder
    from batchml.runtime.exec.prompt import count
    from batchml.runtime.nodes.slurm.steps import FOLDER

    if list(words) == [LEFT]:
        said = left_in(os.environ, own_folder())
        if said:
            print(said)
        return 0
    if os.environ.get(SLURM) and FOLDER not in os.environ:
        # A shell takes the variables with which this process began.
        again = [sys.executable, "-m", "batchml.runtime.sessions.alloc"]
        os.execve(sys.executable, again, on_a_cluster(os.environ, gathered=False))
    remember_folder(os.environ, own_folder())
    return hold(os.environ, lambda: count(os.environ), should_stop, _say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
