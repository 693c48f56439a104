"""The embedded AWS Batch by both ways in: in this process, and over HTTP with real processes.

A `Scene` is the same to a test whichever it is: checked clients, and jobs that run to their end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from tests.support.local_server import client_for, define, wait_for_job
from tests.support.server_rig import Checked, Rig, furnish

SCRIPT = "echo one; echo two; exit 3"


class Scene:
    """A queue `q` on an environment `ce`, a definition `d` whose jobs print two lines and fail.

    `make` gives a client of a service, `end` runs a job to its end.
    """

    def __init__(self, make: Callable[[str], Any], end: Callable[[str], None]) -> None:
        self.checked = Checked()
        self.batch = self.checked.watch(make("batch"))
        self.logs = self.checked.watch(make("logs"))
        self.ecs = self.checked.watch(make("ecs"))
        self.sts = make("sts")
        self._end = end
        furnish(self.batch)
        self.definition = define(self.batch, ["sh", "-c", SCRIPT], name="prints")

    def submit(self, **more: Any) -> str:
        asked = {"jobName": "j", "jobQueue": "q", "jobDefinition": self.definition, **more}
        return str(self.batch.submit_job(**asked)["jobId"])

    def ended(self, job_id: str) -> dict[str, Any]:
        """The record of a job once it has ended."""
        self._end(job_id)
        return wait_for_job(self.batch, job_id)


@contextmanager
def in_process(folder: Path) -> Iterator[Scene]:
    rig = Rig(folder)

    def end(job_id: str) -> None:
        job = rig.core.state.jobs[job_id]
        assert job.attempt is not None, f"{job_id} has no attempt"
        with open(rig.log_of(job.attempt.task_id), "ab") as file:
            file.write(b"1 one\n2 two\n")
        rig.start(job_id)
        rig.end(job_id, 3)

    try:
        yield Scene(rig.client, end)
    finally:
        rig.close()


@contextmanager
def over_http(folder: Path) -> Iterator[Scene]:
    home = Home(folder / "home")
    home.prepare()
    endpoint = control.ensure_server(home, SystemClock())
    try:
        yield Scene(lambda service: client_for(home, endpoint, service), lambda job_id: None)
    finally:
        control.stop_server(home, SystemClock())


TRANSPORTS = {"in process": in_process, "over HTTP": over_http}
