"""Forget a state folder's jobs and end their attempts, once no server holds it any more."""

import shutil
import signal

from batchml.clock import Clock
from batchml.local.executors import cgroup, record, remains, sweeper
from batchml.local.executors.choice import read_choice
from batchml.local.executors.network import Network
from batchml.local.home import Home, read_record
from batchml.runtime.processes import send


def forget(home: Home, clock: Clock) -> int:
    """Forget every job, log and output; the number of attempts that were alive."""
    killed = kill_attempts(home, clock)
    Network(home.root, home.network).clear()
    has_containers = read_choice(home).had_docker
    for folder in (home.local, home.runs, home.code):
        shutil.rmtree(folder, ignore_errors=True)
    if has_containers:
        sweeper.clear(home)
    return killed


def kill_attempts(home: Home, clock: Clock) -> int:
    """Kill the runners and processes of all attempts; the number of attempts that were alive."""
    killed = 0
    for folder in home.attempts.iterdir() if home.attempts.is_dir() else ():
        if (folder / "exit.json").exists():
            continue
        found = record.read(folder)
        lives = found is not None and found.is_alive
        if found is not None and lives:
            send([found.pid], signal.SIGKILL)
        for left in remains.kill(folder.name, found):
            lives |= bool(left)
            clock.sleep(remains.PAUSE)
        killed += lives
    groups = read_record(home.groups, dict[str, str]) or {}
    cgroup.sweep(groups)  # idle runners have slots too
    cgroup.forget(groups)
    return killed
