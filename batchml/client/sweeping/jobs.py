"""The jobs of a sweep in AWS Batch: `batchml.sweep.jobs.Jobs` over the calls that `submit` uses."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchml.aws.batch.jobs import failed
from batchml.aws.batch.resources import Consumables
from batchml.client.submission import Tell, own_share
from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.recoding import with_code
from batchml.client.sweeping.waves import held_name, wave_record, wave_requests
from batchml.errors import BatchmlError, ServiceError
from batchml.model.run import Run
from batchml.ops.reconcile import adopt, lag, look_up
from batchml.ops.submit import submit
from batchml.sweep.events import Wave
from batchml.sweep.jobs import Child, Look

if TYPE_CHECKING:
    from batchml.aws.batch.requests import Submission
    from batchml.client.place import Place
    from batchml.model.record import Record
    from batchml.ops.ratelimit import Bucket
    from batchml.runtime.storage.store import Store

HELD = "held"  # on the board from before the consumable resource is made until it is deleted
_REASON = 1024  # characters that AWS Batch takes of a reason


class BatchJobs:
    """The jobs of one sweep. `board` is where it is kept that a wave may have been sent."""

    def __init__(
        self, place: "Place", frozen: Frozen, board: "Store", tell: Tell = lambda _: None
    ) -> None:
        self._place = place
        self._frozen = frozen
        self._board = board
        self._tell = tell
        self._held = 0
        self.hourly = frozen.hourly
        self.timeout = float(seconds) if (seconds := frozen.job_spec.timeout_seconds) else None

    def submit(self, wave: Wave, size: int, width: int, after: str = "") -> str:
        frozen = with_code(self._frozen, self._board)
        requests = wave_requests(frozen, wave, size, width, after=after, is_held=self._held > 0)
        record = wave_record(frozen, wave, size, requests)
        if not self._is_first(wave):
            job_id = self._sent_before(record, wave)
            if job_id:
                return job_id
        return self._send(requests, record)

    def _is_first(self, wave: Wave) -> bool:
        """Whether nobody can have sent this wave before: it is on the board before it is sent."""
        token = os.urandom(16).hex().encode()
        return self._board.create(f"waves/{wave.number:06}.sent", token)

    def _sent_before(self, record: "Record", wave: Wave) -> str:
        """The job of a wave whose sender was killed, or lost the answer; "" where there is none.

        It is looked for until AWS Batch certainly shows what was sent.
        """
        api, clock = self._place.batch, self._place.clock
        age = max(0.0, clock.now() - wave.at)
        found = look_up(api, record, clock, max(0.0, lag(api) - age))
        return adopt(api, found, self._tell) if found else ""

    def _send(self, requests: "Submission", record: "Record") -> str:
        from msgspec.structs import replace

        place = self._place
        if requests.document is not None:
            from batchml.client.luggage import Depot, put

            bucket = self._frozen.runs.removeprefix("s3://").partition("/")[0]
            put(place, Depot(self._frozen.documents, bucket), None, requests.document, self._tell)
        return submit(
            place.batch,
            requests,
            place.history,
            replace(record, at=int(place.clock.now() * 1000)),
            clock=place.clock,
            bucket=self._rate(),
            share=own_share(),
            tell=self._tell,
        )

    def _rate(self) -> "Bucket | None":
        if self._place.settings.is_local:
            return None
        from batchml.ops.ratelimit import Bucket

        self._place.home.prepare()
        return Bucket(self._place.home.root / "submits")

    def look(self, job_ids: Sequence[str]) -> dict[str, Look]:
        return {job_id: _look(run) for job_id, run in self._place.describe(job_ids).items()}

    def failed_children(self, job_id: str) -> list[Child]:
        return [
            Child(
                run.array_index or 0, run.job_id, run.exit_code, run.reason or run.status_reason,
                _seconds(run.started_at), _seconds(run.stopped_at),
            )
            for run in failed(self._place.connect(), job_id)
        ]  # fmt: skip

    def terminate(self, job_ids: Sequence[str], why: str) -> None:
        """Raises the first error, after all of them were tried."""
        first: BatchmlError | None = None
        for job_id in job_ids:
            try:
                self._place.batch.terminate(job_id, why[:_REASON])
            except BatchmlError as error:
                first = first or error
        if first is not None:
            raise first

    def hold(self, quantity: int) -> None:
        if quantity == self._held:
            return
        consumables = Consumables(self._place.connect())
        self._board.put(HELD, str(quantity).encode())
        consumables.hold(held_name(self._frozen.key), quantity, _held_tags(self._frozen))
        self._held = quantity

    def release(self, *, is_patient: bool = False) -> bool:
        if self._board.get(HELD) is None:
            return True
        try:
            Consumables(self._place.connect()).release(held_name(self._frozen.key))
        except ServiceError as error:
            if not is_patient:
                self._tell(f"A consumable resource is left behind: {error}")
            return False
        self._board.delete(HELD)
        self._held = 0
        return True


def _held_tags(frozen: Frozen) -> dict[str, str]:
    return {name: value for name, value in frozen.tags.items() if name != "batchml:job"}


def _look(run: Run) -> Look:
    return Look(
        status=run.status,
        children=run.children,
        started_at=_seconds(run.started_at),
        stopped_at=_seconds(run.stopped_at),
        exit_code=run.exit_code,
        reason=run.reason or run.status_reason,
    )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
