"""Forget a state folder's jobs and end their attempts, while no server holds the folder.

In a copy of another state folder no process is signalled: its files name the original's processes.
"""

import shutil
import signal

from batchml.clock import Clock
from batchml.local.executors import cgroup, record, sweeper
from batchml.local.executors.choice import read_choice
from batchml.local.executors.network import NodeNetwork
from batchml.local.home import Home, read_record
from batchml.local.store import identity
from batchml.model.names import is_key
from batchml.runtime.processes import send


def forget(home: Home, clock: Clock) -> int:
    """Forget every job, sweep, log and output. Returns the number of attempts that were alive.

    A sweep cannot go on without its code and the checkpoints of its trials.
    """
    own = identity.read_identity(home)  # None for a copy
    killed = 0
    if own is not None:
        killed = kill_attempts(home, own.id, clock)
        NodeNetwork(own.id, home.network).clear()
    may_have_containers = read_choice(home).had_docker
    for folder in (home.local, home.runs, home.code, home.sweeps):
        shutil.rmtree(folder, ignore_errors=True)
    if may_have_containers and own is not None:
        sweeper.clear(own.id)
    return killed


def count_sweeps(home: Home) -> int:
    """The number of sweeps that were started on this machine."""
    return sum(is_key(path.parent.name) for path in home.sweeps.glob("*/spec.json"))


def kill_attempts(home: Home, folder_id: str, clock: Clock) -> int:
    """Kill the runners and processes of all attempts of a state folder; `folder_id` is the folder's
    identity. Returns the number of attempts that were alive.
    """
    count = 0
    for folder in home.attempts.iterdir() if home.attempts.is_dir() else ():
        if (folder / "exit.json").exists():
            continue
        runner = record.read(folder)
        lives = runner is not None and record.is_held(folder) and runner.is_alive
        if runner is not None and lives:
            send([runner.pid], signal.SIGKILL)
        slots = record.groups_of(runner, folder_id)
        for left in record.kill_processes(record.mark_of(folder_id, folder.name), slots):
            lives |= bool(left)
            clock.sleep(record.PAUSE)
        count += lives
    groups = cgroup.ours(read_record(home.groups, dict[str, str]) or {}, folder_id)
    cgroup.remove_dead_slots(groups)  # idle runners have control groups, too
    cgroup.forget(groups)
    return count
