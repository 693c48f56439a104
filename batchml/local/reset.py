"""End every attempt of a state folder that no server holds any more."""

import signal

from batchml.local.executors.process import tagged
from batchml.local.home import Home
from batchml.runtime.files import read_json
from batchml.runtime.processes import boot_id, send, start_time

_TRIES = 1000


def kill_attempts(home: Home) -> int:
    """Kill the runners and processes of all attempts; the number of attempts that were alive."""
    killed = 0
    for folder in home.attempts.iterdir() if home.attempts.is_dir() else ():
        if (folder / "exit.json").exists():
            continue
        identity = read_json(str(folder / "runner.json")) or {}
        pid = int(identity.get("pid", 0))
        # A pid alone may belong to someone else by now.
        mine = bool(pid) and (boot_id(), start_time(pid)) == (
            identity["boot_id"],
            identity["start_time"],
        )
        if mine:
            send([pid], signal.SIGKILL)
        left = tagged(folder.name)
        killed += mine or bool(left)
        for _ in range(_TRIES):  # a process that is stuck in the kernel cannot be killed
            if not left:
                break
            send(left, signal.SIGKILL)
            left = tagged(folder.name)
    return killed
