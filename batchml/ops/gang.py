"""Submit the jobs of a gang, each exactly once, and all of them or none.

The whole intent is on disk before the first call: keys and names in the history, and beside it the
requests that are not sent yet. So a client that is killed between two of its jobs leaves a gang
that the next one finishes, and never half of one.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import BatchApi
from batchml.aws.batch.requests import Submission
from batchml.clock import Clock
from batchml.errors import BatchmlError, ConfigError, Unsettled
from batchml.model.group import least, resources_of
from batchml.model.job import JobSpec, Resources
from batchml.model.record import Name, Record
from batchml.model.run import Run
from batchml.ops.cancel import is_stopping
from batchml.ops.flights import Flights
from batchml.ops.history import History
from batchml.ops.ratelimit import Bucket
from batchml.ops.reconcile import settle_abandoned
from batchml.ops.submit import Capacity, Fitted, Interrupted, carry
from batchml.ops.unsent import Unsent

NO_HEAD = "the head of its gang was not submitted"
OVER = "its gang was over before it was submitted"
INCOMPLETE = "batchml: the gang could not be submitted whole"

Tell = Callable[[str], None]


class Intent(Struct, frozen=True):
    """A job that is to be submitted, and what is kept of it."""

    requests: Submission
    record: Record


def submit_gang(
    api: BatchApi,
    head: Intent,
    workers: Sequence[Intent],
    history: History,
    *,
    clock: Clock,
    bucket: Bucket | None = None,
    share: str = "",
    tell: Tell = lambda _: None,
) -> str:
    """Send the jobs of a gang, each exactly once, the head first; the head's job id.

    A head that was refused leaves nothing. Workers that are refused end what was sent before them.
    Raises as `submit` does; Interrupted and Unsettled speak of the head. Of workers of which nobody
    knows yet it is only told: the head waits for them.
    """
    settle_abandoned(api, history, head.record.env, clock, tell)
    everyone = [*workers, head]  # the head is the newest: @last
    flights = Flights.beside(history, head.record.env)
    sending = _Sending(api, head, workers, history, clock, bucket, share, tell)
    with ExitStack() as stack:
        for each in everyone:
            stack.enter_context(flights.flight(each.record.key))
        sending.unsent.keep(head.record.key, {each.record.key: each.requests for each in workers})
        history.intend(*(each.record for each in everyone))
        head_id = sending.head()
        try:
            sending.workers(head_id)
        except KeyboardInterrupt as stop:
            tell("Its workers are not all submitted yet: batchml reconcile does that.")
            raise Interrupted(head.record.key, head_id) from stop
        finally:
            sending.clean()
        return head_id


class _Sending:
    """A gang on its way: all of it is on disk."""

    def __init__(
        self,
        api: BatchApi,
        head: Intent,
        workers: Sequence[Intent],
        history: History,
        clock: Clock,
        bucket: Bucket | None,
        share: str,
        tell: Tell,
    ) -> None:
        self._api = api
        self._head = head
        self._workers = workers
        self._history = history
        self._clock = clock
        self._bucket = bucket
        self._share = share
        self._tell = tell
        self.unsent = Unsent.beside(history, head.record.env)

    def head(self) -> str:
        """Send it; no worker is sent without."""
        try:
            return self._send(self._head)
        except Unsettled:
            raise
        except BatchmlError:
            self._give_up(self._workers, NO_HEAD)
            raise
        except Interrupted as stop:
            if not stop.job_id and not stop.is_open:
                self._give_up(self._workers, NO_HEAD)
            raise

    def workers(self, head_id: str) -> None:
        """Send them. Where some are refused, end what was sent before."""
        sent = [head_id]
        for number, each in enumerate(self._workers):
            try:
                sent.append(self._send(each))
            except Unsettled as error:
                self._tell(f"{error} The head waits for them.")
            except BatchmlError as error:
                self._give_up(self._workers[number + 1 :], str(error))
                end_all(self._api, sent, INCOMPLETE, self._tell)
                raise

    def clean(self) -> None:
        """Forget the requests once nobody will send them any more."""
        record = self._head.record
        with suppress(OSError):
            if not any(each.gang == record.key for each in self._history.open(record.env)):
                self.unsent.drop(record.key)

    def _send(self, each: Intent) -> str:
        return carry(
            self._api, each.requests, self._history, each.record,
            clock=self._clock, bucket=self._bucket, share=self._share, tell=self._tell,
        )  # fmt: skip

    def _give_up(self, left: Iterable[Intent], why: str) -> None:
        record = self._head.record
        flights = Flights.beside(self._history, record.env)
        with suppress(OSError):  # a full disk: they stay open, and `reconcile` says the same
            for each in left:
                self._history.refused(each.record.key, why)
                flights.landed(each.record.key)
            self.unsent.drop(record.key)


def finish(api: BatchApi, history: History, record: Record, clock: Clock, tell: Tell) -> str:
    """Send workers that a client which was killed has left, and that were looked for in vain.

    The job's id; empty where the gang has no use for them any more. `record` is theirs. Whoever
    does the same at once finds it done. Where they are refused, the gang is ended, which is told.
    Raises Unsettled, and what AWS Batch raises when it is asked for the head.
    """
    flights, unsent = Flights.beside(history, record.env), Unsent.beside(history, record.env)
    with flights.flight(record.key):
        own = next((each for each in _jobs(history, record) if each.key == record.key), None)
        if own is not None and (own.job_id or own.refused):
            return own.job_id
        head = _head(api, history, record)
        requests = unsent.find(record.gang, record.key)
        if head is None or is_stopping(head):
            history.refused(record.key, OVER if head else NO_HEAD)
            return ""
        if requests is None:
            history.refused(record.key, INCOMPLETE)
            _end_gang(api, history, record, tell)
            return ""
        try:
            return carry(api, requests, history, record, clock=clock, share=head.share, tell=tell)
        except Unsettled:
            raise
        except BatchmlError as error:
            tell(f"{record.name}: {error}")
            _end_gang(api, history, record, tell)
            return ""


def end_left_over(api: BatchApi, history: History, record: Record, job_id: str, tell: Tell) -> None:
    """End workers that were found only now, if their gang was given up meanwhile."""
    head = _head(api, history, record)
    if head is None or is_stopping(head):
        end_all(api, [job_id], OVER, tell)


def _jobs(history: History, record: Record) -> list[Name]:
    """The jobs of the gang that these workers belong to, as far as they are known here."""
    names = history.names(record.env)
    return [each for each in names if record.gang in (each.key, each.gang)]


def _head(api: BatchApi, history: History, record: Record) -> Run | None:
    jobs = _jobs(history, record)
    job_id = next((each.job_id for each in jobs if each.key == record.gang), "")
    return api.describe([job_id]).get(job_id) if job_id else None


def _end_gang(api: BatchApi, history: History, record: Record, tell: Tell) -> None:
    known = [each.job_id for each in _jobs(history, record) if each.job_id]
    end_all(api, known, INCOMPLETE, tell)


def end_all(api: BatchApi, job_ids: Iterable[str], reason: str, tell: Tell) -> None:
    """Stop jobs, whatever state they are in; what cannot be stopped is told."""
    for job_id in job_ids:
        try:
            api.terminate(job_id, reason)
        except BatchmlError as error:
            tell(f"It could not be stopped: batchml cancel {job_id}\n  {error}")


def fit_groups(spec: JobSpec, capacity: Capacity) -> Fitted:
    """Cut what the groups of a gang ask for until all of them run on one machine at once.

    Each container keeps one vCPU and an equal part of the memory at least. Where even then not all
    fit, as many run at once as do; the others come when those have ended. Raises ConfigError where
    the head could not start: with fewer than the head and its `min` workers.
    """
    needed = 1 + sum(least(group) for group in spec.groups[1:])
    if needed > capacity.vcpus:
        raise ConfigError(
            spec.name,
            [
                f"groups: the head and the workers that it waits for are {needed} containers, and "
                f"this machine has {capacity.vcpus} vCPUs. Ask for fewer, set min = 0, or let them "
                f"share: batchml local stop, then batchml local start --vcpus {needed}."
            ],
        )
    total = min(capacity.vcpus, sum(group.count for group in spec.groups))
    most = Capacity(capacity.vcpus // total, capacity.memory_mib // total, capacity.gpus)
    groups, cuts = [], list[str]()
    wanted = [(group, resources_of(spec, group)) for group in spec.groups]
    share_out = (
        sum(group.count * each.vcpus for group, each in wanted) > capacity.vcpus
        or sum(group.count * each.memory_mib for group, each in wanted) > capacity.memory_mib
    )
    for group, asked in wanted:
        given = _cut(asked, most) if share_out else asked
        if given.gpus > capacity.gpus:
            given = replace(given, gpus=capacity.gpus)
        if given != asked:
            cuts.append(f"{group.name} with {_words(given)} instead of {_words(asked)}")
        groups.append(replace(group, resources=given))
    return Fitted(replace(spec, groups=tuple(groups)), tuple(cuts))


def _cut(asked: Resources, most: Capacity) -> Resources:
    memory = asked.memory if asked.memory_mib <= most.memory_mib else f"{most.memory_mib} MiB"
    return replace(asked, vcpus=min(asked.vcpus, most.vcpus), memory=memory)


def _words(resources: Resources) -> str:
    gpus = f", {resources.gpus} GPU" if resources.gpus else ""
    return f"{resources.vcpus} vCPU, {resources.memory_mib} MiB{gpus}"
