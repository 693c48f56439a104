"""What takes time before some attempts can start, done beside the event loop.

Secrets are looked up and become variables of the job as its runner is told of it; nodes that run
as processes get a place on the network. All other attempts have nothing to wait for.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from batchml.local import secrets
from batchml.local.batch.state import Attempt, Job
from batchml.local.executors.network import Network, NoNetwork, Place
from batchml.local.executors.record import PROCESS
from batchml.local.executors.spec import NoEnvironment, SpecOf

T = TypeVar("T")

_SECRETS = "ResourceInitializationError: unable to pull secrets or registry auth: "
_NETWORK = "ResourceInitializationError: unable to set up the network of this node: "


class Ahead:
    """Called with an attempt: the making of its spec, if that takes time, or None."""

    def __init__(self, root: Path, spec_of: SpecOf, network: Network) -> None:
        self._root = root
        self._spec_of = spec_of
        self._network = network

    def __call__(
        self, kind: str, job: Job, attempt: Attempt
    ) -> Coroutine[Any, Any, dict[str, Any]] | None:
        if job.container.get("secrets") or job.node is not None:
            return self._make(kind, job, attempt)
        return None

    async def _make(self, kind: str, job: Job, attempt: Attempt) -> dict[str, Any]:
        """Raises NoEnvironment."""
        entries = job.container.get("secrets")
        if entries:
            try:
                found = await beside(
                    lambda: secrets.resolve(entries, self._root), secrets.LIMIT, "secrets"
                )
            except TimeoutError:
                names = ", ".join(entry["name"] for entry in entries)
                text = f"{_SECRETS}{names}: no answer within {secrets.LIMIT:.0f} s"
                raise NoEnvironment(text) from None
            except secrets.Unresolved as error:
                raise NoEnvironment(f"{_SECRETS}{error}") from None
            job = with_variables(job, found)
        spec = self._spec_of(kind, job, attempt)
        if job.node is None or kind != PROCESS:
            return spec
        try:
            return in_place(spec, await self._network.place(attempt.task_id))
        except NoNetwork as error:
            raise NoEnvironment(f"{_NETWORK}{error}") from None


def with_variables(job: Job, found: Mapping[str, str]) -> Job:
    """The job with more variables of its own. For a runner's ears only: never kept."""
    given = [entry for entry in job.container["environment"] if entry["name"] not in found]
    given += [{"name": name, "value": value} for name, value in found.items()]
    return replace(job, spec=replace(job.spec, container={**job.container, "environment": given}))


def in_place(spec: dict[str, Any], place: Place) -> dict[str, Any]:
    kind = "namespace" if place.namespace else "loopback"
    return {
        **spec,
        "command": place.command(spec["command"]) if spec["command"] else [],
        "env": {**spec["env"], "BATCHML_NODE_ADDRESS": place.address},
        "address": place.address,
        "preamble": spec["preamble"]
        and f"{spec['preamble']} network={kind} address={place.address}",
    }


async def beside(work: Callable[[], T], limit: float, name: str) -> T:
    """Do something in a thread of its own, that nobody waits for longer than `limit` seconds.

    Not in a pool: one that hangs would hold up others, and the server's end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(outcome: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            outcome(value)

    def run() -> None:
        try:
            outcome, value = done.set_result, work()
        except BaseException as error:
            outcome, value = done.set_exception, error  # type: ignore[assignment]
        try:
            loop.call_soon_threadsafe(tell, outcome, value)
        except RuntimeError:
            pass  # the server has ended meanwhile

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wait_for(done, limit)
