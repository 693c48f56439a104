"""Forget a state folder's jobs and end their attempts, once no server holds it any more.

In a copy of another state folder nothing is signalled: what its files name belongs to that one.
"""

import shutil
import signal

from batchml.clock import Clock
from batchml.local.executors import cgroup, record, sweeper
from batchml.local.executors import record as remains
from batchml.local.executors.choice import read_choice
from batchml.local.executors.network import Network
from batchml.local.home import Home, read_record
from batchml.local.store import identity
from batchml.runtime.processes import send


def forget(home: Home, clock: Clock) -> int:
    """Forget every job, sweep, log and output; the number of attempts that were alive.

    A sweep cannot go on without its code and what its trials have saved.
    """
    own = identity.of(home)
    killed = 0 if own is None else kill_attempts(home, own.id, clock)
    if own is not None:
        Network(own.id, home.network).clear()
    has_containers = read_choice(home).had_docker
    for folder in (home.local, home.runs, home.code, home.sweeps):
        shutil.rmtree(folder, ignore_errors=True)
    if has_containers and own is not None:
        sweeper.clear(own.id)
    return killed


def kill_attempts(home: Home, own: str, clock: Clock) -> int:
    """Kill the runners and processes of all attempts of the state folder whose identity is `own`;
    the number of attempts that were alive.
    """
    killed = 0
    for folder in home.attempts.iterdir() if home.attempts.is_dir() else ():
        if (folder / "exit.json").exists():
            continue
        found = record.read(folder)
        lives = found is not None and record.is_held(folder) and found.is_alive
        if found is not None and lives:
            send([found.pid], signal.SIGKILL)
        slots = remains.groups_of(found, own)
        for left in remains.kill(remains.mark_of(own, folder.name), slots):
            lives |= bool(left)
            clock.sleep(remains.PAUSE)
        killed += lives
    groups = cgroup.ours(read_record(home.groups, dict[str, str]) or {}, own)
    cgroup.sweep(groups)  # idle runners have slots too
    cgroup.forget(groups)
    return killed
