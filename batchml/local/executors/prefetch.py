"""Steps that take time before some attempts can start, done outside the event loop.

Secrets are fetched and become variables of the job, only for its runner. Nodes that run as
processes get a network address. All other attempts have nothing to wait for.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from batchml.local import secrets
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.executors.network import NodeAddress, NodeNetwork, NodeNetworkError
from batchml.local.executors.record import PROCESS
from batchml.local.executors.spec import RunnerSpecError, SpecMaker

T = TypeVar("T")

_SECRETS = "ResourceInitializationError: unable to pull secrets or registry auth: "
_NETWORK = "ResourceInitializationError: unable to set up the network of this node: "


class SpecPrefetch:
    """Called with an attempt: the coroutine that makes its spec if that takes time, else None."""

    def __init__(self, root: Path, make_spec: SpecMaker, network: NodeNetwork) -> None:
        self._root = root
        self._make_spec = make_spec
        self._network = network

    def __call__(
        self, kind: str, job: Job, attempt: JobAttempt
    ) -> Coroutine[Any, Any, dict[str, Any]] | None:
        if job.container.get("secrets") or job.node is not None:
            return self._make(kind, job, attempt)
        return None

    async def _make(self, kind: str, job: Job, attempt: JobAttempt) -> dict[str, Any]:
        """Make the spec of an attempt. Raises RunnerSpecError."""
        entries = job.container.get("secrets")
        if entries:
            try:
                found = await run_in_thread(
                    lambda: secrets.resolve(entries, self._root), secrets.LIMIT, "secrets"
                )
            except TimeoutError:
                names = ", ".join(entry["name"] for entry in entries)
                text = f"{_SECRETS}{names}: no answer within {secrets.LIMIT:.0f} s"
                raise RunnerSpecError(text) from None
            except secrets.SecretError as error:
                raise RunnerSpecError(f"{_SECRETS}{error}") from None
            job = with_variables(job, found)
        spec = self._make_spec(kind, job, attempt)
        if job.node is None or kind != PROCESS:
            return spec
        try:
            return with_address(spec, await self._network.assign(attempt.task_id))
        except NodeNetworkError as error:
            raise RunnerSpecError(f"{_NETWORK}{error}") from None


def with_variables(job: Job, found: Mapping[str, str]) -> Job:
    """The job with further variables of its own. Only for its runner: never stored."""
    given = [entry for entry in job.container["environment"] if entry["name"] not in found]
    given += [{"name": name, "value": value} for name, value in found.items()]
    return replace(job, spec=replace(job.spec, container={**job.container, "environment": given}))


def with_address(spec: dict[str, Any], node: NodeAddress) -> dict[str, Any]:
    kind = "namespace" if node.namespace else "loopback"
    return {
        **spec,
        "command": node.command(spec["command"]) if spec["command"] else [],
        "env": {**spec["env"], "BATCHML_NODE_ADDRESS": node.address},
        "address": node.address,
        "preamble": spec["preamble"]
        and f"{spec['preamble']} network={kind} address={node.address}",
    }


async def run_in_thread(work: Callable[[], T], limit: float, name: str) -> T:
    """Run a function in a thread of its own, and wait for at most `limit` seconds.

    Not in a pool: a function that hangs would delay others, and the server's end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(outcome: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            outcome(value)

    def run() -> None:
        try:
            outcome, value = done.set_result, work()
        except BaseException as error:
            outcome, value = done.set_exception, error  # type: ignore[assignment]
        try:
            loop.call_soon_threadsafe(finish, outcome, value)
        except RuntimeError:
            pass  # the server has ended meanwhile

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wait_for(done, limit)
