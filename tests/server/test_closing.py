"""The end of the core: none of its threads uses the journal any more."""

import asyncio
import threading
from pathlib import Path
from typing import Any

from tests.support.server_rig import Rig, furnish, sign


def test_a_core_that_is_cancelled_ends_after_the_commit_that_is_under_way(tmp_path: Path) -> None:
    """SQLite's module crashes the process when a connection is closed under a statement."""
    rig = Rig(tmp_path)
    furnish(rig.client("batch"))
    commit, begun, ended = rig.store.commit, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        ended.wait(0.2)  # the time in which the task below would end, were it not to wait
        commit(*arguments)
        ended.set()

    rig.store.commit = slow  # type: ignore[assignment, method-assign]

    async def cut_off() -> bool:
        body = b'{"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}'
        asking = asyncio.create_task(rig.server.handle(sign("/v1/submitjob", body)))
        await asyncio.to_thread(begun.wait)
        rig.running.cancel()
        await asyncio.gather(rig.running, return_exceptions=True)
        asking.cancel()
        return ended.is_set()

    assert rig.loop.run_until_complete(cut_off())
    rig.close()
