"""A file system that is linked to a bucket: export all of it and know so, import, release.

AWS takes no export task for a link that exports by itself. So that is held while a task runs, and
goes on afterwards whatever became of it; a command that was killed in between is put right by the
next one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batchml.aws.fsx import EVENTS, FileSystems, Link, Task, TaskType, task_request
from batchml.clock import Clock
from batchml.errors import BatchmlError
from batchml.ops.watch import Pace, backoff

See = Callable[[Task], None]

PACE = Pace(first=2.0, most=30.0)
_SETTLES = 900.0  # seconds that AWS is given to change a link


class TaskFailed(BatchmlError):
    """AWS did not carry everything; the text says what, and what next."""


class Linked:
    """One file system of FSx for Lustre, and its link."""

    def __init__(
        self, files: FileSystems, file_system: str, clock: Clock, token: Callable[[], str]
    ) -> None:
        self._files, self._id, self._clock = files, file_system, clock
        self._token = token  # a new one: AWS carries out what has the same one once

    def link(self) -> Link:
        return self._files.link(self._id)

    def export(self, see: See) -> Task:
        """Write all that changed to the bucket; the task at its end, which may have failures.

        Raises TaskFailed where the link cannot be changed, and what AWS's refusals become.
        """
        with self._held() as link:
            return self._run("EXPORT_TO_REPOSITORY", link, see)

    def import_names(self, see: See, paths: Sequence[str] = ()) -> Task:
        """Let everything in the bucket be seen; contents are loaded when first read."""
        return self._run("IMPORT_METADATA_FROM_REPOSITORY", self.link(), see, paths)

    def release(self, see: See, days: int) -> Task:
        """Free the room of files that are in the bucket and that nobody opened for so many days."""
        return self._run("RELEASE_DATA_FROM_FILESYSTEM", self.link(), see, (), days)

    @contextmanager
    def _held(self) -> Iterator[Link]:
        """Nothing is exported by itself meanwhile."""
        link = self.link()
        exports = link.exports or EVENTS  # none: an earlier command was killed here
        try:
            yield self._exporting(link, ())
        finally:
            self._exporting(self.link(), exports)

    def _exporting(self, link: Link, exports: Sequence[str]) -> Link:
        """Let a link export these by itself, and wait until that holds."""
        if link.status == "AVAILABLE" and set(link.exports) == set(exports):
            return link
        end, pauses = self._clock.monotonic() + _SETTLES, backoff(PACE)
        asked = False
        while True:
            if link.status == "AVAILABLE" and set(link.exports) == set(exports):
                return link
            if link.status == "AVAILABLE" and not asked:  # it takes no change while it changes
                self._files.change(link, exports, self._token())
                asked = True
            elif link.status in ("MISCONFIGURED", "FAILED") or self._clock.monotonic() > end:
                raise TaskFailed(
                    f"The link {link.id} of the file system {self._id} to {link.repository} is "
                    f"{link.status}: {link.reason or 'it takes longer than 15 minutes'}. Nothing "
                    f"was deleted. Type the same again once that is mended."
                )
            self._clock.sleep(next(pauses))
            link = self.link()

    def _run(
        self, kind: TaskType, link: Link, see: See, paths: Sequence[str] = (), days: int = 0
    ) -> Task:
        request = task_request(
            kind, self._id, link, token=self._token(), paths=paths, release_days=days
        )
        # One that a killed command began is as good as another: it is gone on with.
        task = next((each for each in self._files.running(self._id) if each.type == kind), None)
        task = task or self._files.begin(request)
        pauses = backoff(PACE)
        while True:
            see(task)
            if task.is_over:
                break
            self._clock.sleep(next(pauses))
            task = self._files.task(task.id)
        if task.status != "SUCCEEDED" and not task.failed:
            raise TaskFailed(
                f"{kind} of {self._id} ended {task.status}: {task.reason or 'AWS says no more'}. "
                f"Nothing was deleted. Type the same again."
            )
        return task
