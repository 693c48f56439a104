"""Attempts as processes of this machine: the server's own user, limits where there are any."""

import asyncio
from collections.abc import Callable

from batchml.clock import Clock
from batchml.local.executors.spec import Host, runner_spec
from batchml.local.executors.supervisor import RUNNER_LOST, Ahead, Executor, SpecOf, tagged
from batchml.local.messages import Event

__all__ = ["RUNNER_LOST", "ProcessExecutor", "tagged"]


class ProcessExecutor(Executor):
    def __init__(
        self,
        host: Host,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        report: Callable[[Event], None],
        spec_of: SpecOf | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        chosen = spec_of or (lambda job, attempt: runner_spec(host, job, attempt))
        super().__init__(host.home, host.environ, loop, clock, report, chosen, ahead)
