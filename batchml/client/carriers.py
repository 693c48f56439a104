"""Carriers: short runs that reach a workspace in AWS, which this machine cannot mount.

One is an ordinary run, in the cheapest queue that there is, tagged `batchml:carry`. What it is to
do travels in a variable, what it has done comes back in the bucket, under its own key.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from batchml.errors import BatchmlError, NotFound
from batchml.model.environment import Environment
from batchml.model.job import JobSpec, Resources, Retry
from batchml.model.workspace import Progress, Watch
from batchml.runtime.transfer.worker import DONE, ORDER, UNDER_WAY

if TYPE_CHECKING:
    from batchml.aws.s3 import Bucket
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.model.run import Run

CARRY_TAG = "batchml:carry"  # what it carries: `archive`, `push`
IMAGE = "python"  # below images/

_MEMORY = "3 GiB"  # eight files at a time, 16 MiB of each, and a list of all
_ATTEMPTS = 5  # one that lost its host goes on where it was


class CarrierFailed(BatchmlError):
    """A carrier ended without having done its work."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class Carriers(Protocol):
    """Something that carries out an order in the workspace."""

    def carry(self, order: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
        """Do what the order says; the report. Raises CarrierFailed."""

    def fetch(self, name: str) -> bytes:
        """A paper that the last one left beside its report."""

    def cost(self) -> str:
        """What the last one cost, in words; empty where that is not known."""


def cheapest_queue(environment: Environment) -> str:
    """The queue for a run of one vCPU: without GPUs, and where a host is kept, there. Pure.

    Raises NotFound where the environment has no queue.
    """
    if environment.controller_queue:
        return environment.controller_queue

    def dear(name: str) -> tuple[bool, bool, int, str]:
        known = [environment.compute[each] for each in environment.queues[name].compute]
        warm = any(each.min_vcpus for each in known)
        return any(each.has_gpus for each in known), not warm, len(known), name

    if not environment.queues:
        raise NotFound("Job queue", "for carriers", [], "Describe one in batchml.toml.")
    return min(environment.queues, key=dear)


def carrier_order(environment: Environment, order: Mapping[str, Any]) -> "Order":
    """The order for a carrier's run. Pure."""
    from batchml.client.order import Order

    verb = str(order["verb"])
    spec = JobSpec(
        name=f"workspace-{verb}",
        image=IMAGE,
        command=("python", "-m", "batchml.runtime.transfer.worker"),
        code=False,
        queue=cheapest_queue(environment),
        resources=Resources(vcpus=1, memory=_MEMORY),
        retry=Retry(attempts=_ATTEMPTS, on=("host-lost",)),
        env={ORDER: json.dumps(order, sort_keys=True)},
    )
    return Order(spec=spec, own_tags={CARRY_TAG: verb})


def progress_of(found: bytes | None) -> Progress | None:
    """How far a carrier says it is; None where it says nothing yet. Pure."""
    try:
        return msgspec.json.decode(found or b"", type=Progress)
    except msgspec.MsgspecError:
        return None


class Runs:
    """Carriers that are runs of an environment in AWS."""

    def __init__(
        self, place: "Place", bucket: "Bucket", tell: Callable[[str], None] = lambda words: None
    ) -> None:
        self._place, self._bucket, self._tell = place, bucket, tell
        self._key = self._job_id = ""

    def carry(self, order: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
        from batchml.client.submission import prepare, send

        place, tell = self._place, self._tell
        prepared = prepare(place, carrier_order(place.settings.environment, order), dry_run=False)
        self._key = prepared.record.key
        self._job_id = send(place, prepared, tell)
        tell(
            f"A run does it: {self._job_id} in {prepared.requests.submit['jobQueue']}. "
            f"{self._price(prepared.spec)}Where no host is up, that takes some minutes. It goes on "
            f"without this terminal."
        )
        try:
            run = self._wait(watch, str(order["verb"]))
        except KeyboardInterrupt:
            if order["verb"] == "list":  # nobody waits for it any more
                self._cancel()
            raise
        found = self._paper(DONE)
        if found is None:
            raise self._failed(run)
        return dict(json.loads(found))

    def fetch(self, name: str) -> bytes:
        return self._paper(name) or b""

    def cost(self) -> str:
        from batchml.client.holding import last_words

        return last_words(self._place, self._job_id) if self._job_id else ""

    def _price(self, spec: JobSpec) -> str:
        from batchml.client.costs import quote_of_job
        from batchml.model.names import dollars

        try:
            hour = quote_of_job(self._place, spec).hour
        except BatchmlError:
            return ""
        if hour is None or not hour.high or not math.isfinite(float(hour.high)):
            return ""
        return f"About {dollars(hour.high)} an hour. "

    def _wait(self, watch: Watch, verb: str) -> "Run":
        from batchml.client.waiting import wait_and_keep

        def see(found: "Mapping[str, Run]") -> None:
            run = found.get(self._job_id)
            if run is None:
                return
            told = progress_of(self._paper(UNDER_WAY)) if run.status.value == "RUNNING" else None
            watch(told or Progress(f"{verb}: the run is {run.status.value}"))

        (run,) = wait_and_keep(self._place, [self._job_id], tell=self._tell, see=see)
        return run

    def _cancel(self) -> None:
        from contextlib import suppress

        from batchml.client.holding import cancel

        with suppress(BatchmlError):
            cancel(self._place, self._job_id, "Nobody waits for it")

    def _failed(self, run: "Run") -> CarrierFailed:
        from batchml.model.outcome import describe_outcome

        option = f" --env {self._place.env}"
        return CarrierFailed(
            f"The run that carries, {self._job_id}, ended: {describe_outcome(run)}.\n"
            f"  batchml explain {self._job_id}{option}\n"
            f"  batchml logs {self._job_id}{option}",
            run.exit_code or 1,
        )

    def _paper(self, name: str) -> bytes | None:
        return self._bucket.get(f"runs/{self._key}/{name}")
