"""Hold what a run was given until nobody needs it: `python -m batchml.runtime.hold`.

It is the program of `batchml alloc`. It does nothing but look: it ends with 0 once its stop file is
there, or once no seat (`seats.py`) has been held for BATCHML_IDLE seconds. On several nodes that is
the first, where the shells are; the others do the steps of their `srun` (`slurm_steps.py`).

`--left` beside it, before its end, prints what is new or changed in its working folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Callable, List

from batchml.runtime.env import RuntimeEnv
from batchml.runtime.idle import Idle, Life, last_words, limit_of, spelled
from batchml.runtime.leftovers import WorkingFolder
from batchml.runtime.stopping import should_stop

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
    from batchml.runtime.script import SLURM, on_a_cluster, own_folder
    from batchml.runtime.seats import count
    from batchml.runtime.slurm_steps import FOLDER

    if list(words) == [LEFT]:
        said = left_in(os.environ, own_folder())
        if said:
            print(said)
        return 0
    if os.environ.get(SLURM) and FOLDER not in os.environ:
        # A shell takes the variables with which this process began.
        again = [sys.executable, "-m", "batchml.runtime.hold"]
        os.execve(sys.executable, again, on_a_cluster(os.environ, gathered=False))
    remember_folder(os.environ, own_folder())
    return hold(os.environ, lambda: count(os.environ), should_stop, _say)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
