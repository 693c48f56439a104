"""What the runner of a sweep's controller is told: this Python, with batchml's own command.

The same for who looks after a run that may move to another queue.

Whatever its job says beside the key is not looked at. So a job that may submit others, from
inside a container for instance, cannot run a command of its own on this machine by asking for the
queue of controllers.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchml.local.executors.spec import Host, NoEnvironment, batch_variables, preamble, work_folder
from batchml.local.state import Attempt, Job
from batchml.model.environment import LOCAL
from batchml.model.names import is_key
from batchml.runtime.protocol.variables import DEFAULT_GRACE

COMMAND = ("sweeps", "attend")  # and the key
WATCH = ("attend",)  # and the key of a run that may move to another queue


def controller_spec(host: Host, job: Job, attempt: Attempt) -> dict[str, Any]:
    """As `runner_spec`. Raises NoEnvironment for a command that is neither a controller's nor a
    watcher's."""
    command = tuple(job.container["command"])
    if command[:-1] not in (COMMAND, WATCH) or not is_key(command[-1]):
        raise NoEnvironment(
            f"CannotCreateContainerError: the queue {job.queue} runs controllers of sweeps and "
            f"nothing else but who moves runs, as `batchml sweep FILE --detach` and "
            f"`batchml submit --fallback QUEUE` submit them"
        )
    return {
        "task_id": attempt.task_id,
        "cwd": work_folder(host, attempt),
        "command": [sys.executable, "-m", "batchml", *command],
        "env": _variables(host, job, attempt),
        "grace": float(DEFAULT_GRACE),
        "folders": [],
        "own": "",
        "shared": [],
        "needs": {"memory": job.needs.memory, "vcpus": job.needs.vcpus},
        "preamble": preamble(job, "executor=process environment=batchml"),
    }


def _variables(host: Host, job: Job, attempt: Attempt) -> Mapping[str, str]:
    """The server's state folder, and this installation wherever it was imported from."""
    return {
        **batch_variables(host, job, attempt),
        "BATCHML_HOME": str(host.home.root),
        "BATCHML_ENV": LOCAL,
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        "PYTHONSAFEPATH": "1",  # nothing of the working directory is imported
        "PYTHONUNBUFFERED": "1",
    }
