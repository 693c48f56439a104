"""Old environments are removed, unless they are in use, being made, or young."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from batchml.local.environments import COMPLETE
from batchml.local.home import Home
from batchml.local.pruning import find_old, remove

NOW = 1_800_000_000.0


def made(folder: Path, age: float) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("x" * 100)
    (folder / COMPLETE).write_text("")
    os.utime(folder / COMPLETE, (NOW - age, NOW - age))
    os.utime(folder, (NOW - age, NOW - age))
    return folder


def names(home: Home, before: float = NOW - 100) -> list[str]:
    return [old.path.name for old in find_old(home, before)]


def test_what_was_made_long_ago_goes(home: Home) -> None:
    old = made(home.envs / "old-1", 200)
    made(home.envs / "new-2", 50)
    made(home.images / "image-3", 200)  # a run that waits, or that is rerun, is made of it
    (first,) = find_old(home, NOW - 100)
    assert first.size == 100
    assert remove(first)
    assert not old.exists()
    assert [path.name for path in home.envs.iterdir() if path.is_dir()] == ["new-2"]


def test_what_a_process_runs_in_stays(home: Home) -> None:
    by_variable, by_command = made(home.envs / "a-1", 200), made(home.envs / "b-2", 200)
    made(home.envs / "c-3", 200)
    found = find_old(home, NOW - 100)
    command = [sys.executable, "-c", "print(flush=True); input()", f"{by_command}/bin/x"]
    with subprocess.Popen(
        command, env={"PATH": f"{by_variable}/bin:/bin"}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()  # /proc tells nothing of one that is just being started
        assert names(home) == ["c-3"]
        assert [remove(each) for each in found] == [False, False, True]
        process.communicate(b"\n")
    assert names(home) == ["a-1", "b-2"]


def test_what_is_being_made_stays(home: Home) -> None:
    made(home.envs / "a-1", 200)
    (old,) = find_old(home, NOW - 100)
    with open(f"{old.path}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not remove(old)
    assert remove(old)
