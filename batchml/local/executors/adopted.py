"""Runners that an earlier server started: they hear nothing but signals, and say nothing."""

import asyncio
import os
import signal
from collections.abc import Callable

from batchml.local.executors.record import Record
from batchml.runtime.processes import start_time


class Inherited:
    """By task id. `gone` is called with one whose runner has died, unless it is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gone: Callable[[str], None]) -> None:
        self._loop = loop
        self._gone = gone
        self._pidfds: dict[str, int] = {}

    def watch(self, task_id: str, record: Record) -> None:
        """Wait for the end of an attempt's runner, which may be over already."""
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            self._loop.call_soon(self._gone, task_id)
            return
        if record.start_time not in (None, start_time(record.pid)):
            os.close(pidfd)
            self._loop.call_soon(self._gone, task_id)
            return
        self._pidfds[task_id] = pidfd
        self._loop.add_reader(pidfd, self._ended, task_id)

    def signal(self, task_id: str, number: int) -> None:
        """To the runner of an attempt, if it is one of these."""
        pidfd = self._pidfds.get(task_id)
        if pidfd is not None:
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                pass  # it is ending already

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _ended(self, task_id: str) -> None:
        pidfd = self._pidfds.pop(task_id)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._gone(task_id)
