"""Submit one job: fit it to a machine, and send it exactly once.

SubmitJob has no client token: sent twice, it makes two jobs. So a key is part of the job's name,
the intent is on disk before the call, the call goes out once, and when its answer is lost the job
is looked up by its name before anything is sent again.
"""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import BatchApi
from batchml.aws.batch.requests import Submission, registration
from batchml.aws.errors import Fate, fate
from batchml.clock import Clock
from batchml.errors import BatchmlError, ConfigError, NoQueue, ServiceError, Unsettled
from batchml.model.job import JobSpec
from batchml.model.names import bare_name
from batchml.model.record import Record
from batchml.ops.flights import Flights
from batchml.ops.history import History
from batchml.ops.ratelimit import Bucket
from batchml.ops.reconcile import adopt, lag, look_up, settle_abandoned

RESENDS = 2  # times that a submission without a trace is sent again
PATIENCE = 300.0  # seconds for which a throttled submission is tried
TRIES = 4  # to reach anybody at all
LONGEST_PAUSE = 20.0  # seconds
FRESH = 2.0  # seconds for which the time of an intent is near enough to that of the call


class Capacity(Struct, frozen=True):
    """What a single machine has. Memory in MiB."""

    vcpus: int
    memory_mib: int
    gpus: int


class Fitted(Struct, frozen=True):
    """A job that fits, and what had to be cut for it, in words."""

    spec: JobSpec
    cuts: tuple[str, ...]


def fit(spec: JobSpec, capacity: Capacity) -> Fitted:
    """Cut what a job asks for down to what the machine has: all its nodes are there at once.

    Raises ConfigError for more nodes than there are vCPUs.
    """
    if spec.nodes > max(1, capacity.vcpus):
        raise ConfigError(
            spec.name,
            [
                f"nodes: {spec.nodes} at once, and this machine has "
                f"{_count(capacity.vcpus, 'vCPU')}: each node takes one at least. Ask for fewer, "
                f"or let them share: batchml local stop, then batchml local start "
                f"--vcpus {spec.nodes}."
            ],
        )
    wanted, nodes = spec.resources, spec.nodes
    cuts: list[str] = []
    vcpus = min(wanted.vcpus, capacity.vcpus // nodes)
    if vcpus < wanted.vcpus:
        cuts.append(f"{_count(vcpus, 'vCPU')} instead of {wanted.vcpus}")
    memory, most = wanted.memory, capacity.memory_mib // nodes
    if wanted.memory_mib > most:
        memory = f"{most} MiB"
        cuts.append(f"{_gib(most)} of memory instead of {_gib(wanted.memory_mib)}")
    gpus = min(wanted.gpus, capacity.gpus // nodes)
    if gpus < wanted.gpus:
        cuts.append(f"{_count(gpus, 'GPU') if gpus else 'no GPU'} instead of {wanted.gpus}")
    if nodes > 1:
        cuts = [f"{cut} on each node" for cut in cuts]
    resources = replace(wanted, vcpus=vcpus, memory=memory, gpus=gpus)
    return Fitted(replace(spec, resources=resources), tuple(cuts))


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def refuse_cuts(fitted: Fitted) -> None:
    """Raise ConfigError when anything had to be cut (`--strict-resources`)."""
    if fitted.cuts:
        name = fitted.spec.name
        raise ConfigError(
            name, [f"resources: this machine would give {cut}." for cut in fitted.cuts]
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a submission. `job_id` is its run, if it is known to have become one.

    `is_open` is True while nobody knows: then `batchml reconcile KEY` finds out.
    """

    def __init__(self, key: str, job_id: str = "", is_open: bool = False) -> None:
        self.key = key
        self.job_id = job_id
        self.is_open = is_open
        super().__init__(key)


def submit(
    api: BatchApi,
    requests: Submission,
    history: History,
    record: Record,
    *,
    clock: Clock,
    bucket: Bucket | None = None,
    share: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Send the run exactly once; its job id. One call, when AWS has the definition already.

    `record` has the key that is in the name of `requests.submit`. It is on disk when the call
    leaves, and so is afterwards what became of it. A queue with fair share takes only runs that
    say whose they are: what names none is then sent again for `share`. `bucket` is the rate that
    all processes share, None where there is no limit. `tell` hears what takes long, in words.

    Raises ServiceError, AccessError, NoQueue or ServiceUnreachable when there is no run; Unsettled
    when nobody knows; Interrupted after Ctrl-C; OSError when the intent could not be kept, and then
    nothing was sent.
    """
    flights = Flights.beside(history, record.env)
    settle_abandoned(api, history, record.env, clock, tell)
    with flights.flight(record.key):
        history.intend(record)
        return carry(
            api, requests, history, record,
            clock=clock, bucket=bucket, share=share, tell=tell,
        )  # fmt: skip


def carry(
    api: BatchApi,
    requests: Submission,
    history: History,
    record: Record,
    *,
    clock: Clock,
    bucket: Bucket | None = None,
    share: str = "",
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """`submit` for an intent that is on disk already, and in flight."""
    flights = Flights.beside(history, record.env)
    sender = _Sender(api, requests, history, record, clock, bucket, share, tell)
    try:
        job_id = sender.send()
        _settle(history, flights, record.key, tell, job_id)
    except Unsettled:
        raise
    except BatchmlError as error:
        _settle(history, flights, record.key, tell, why=str(error))
        raise
    except KeyboardInterrupt:
        stop = sender.interrupted()
        if not stop.is_open:
            why = "" if stop.job_id else "interrupted before it was sent"
            _settle(history, flights, record.key, tell, stop.job_id, why)
        raise stop from None
    return job_id


def _settle(
    history: History,
    flights: Flights,
    key: str,
    tell: Callable[[str], None],
    job_id: str = "",
    why: str = "",
) -> None:
    """Write down how it ended. A full disk then must not hide the job's id from the user."""
    try:
        if job_id:
            history.submitted(key, job_id)
        else:
            history.refused(key, why)
    except OSError as error:
        tell(f"This could not be kept on disk ({error.strerror}): `batchml reconcile` will.")
    else:
        flights.landed(key)


class _Sender:
    """One submission on its way."""

    def __init__(
        self,
        api: BatchApi,
        requests: Submission,
        history: History,
        record: Record,
        clock: Clock,
        bucket: Bucket | None,
        share: str,
        tell: Callable[[str], None],
    ) -> None:
        self._api = api
        self._requests = requests
        self._history = history
        self._record = record
        self._clock = clock
        self._bucket = bucket
        self._share = share
        self._tell = tell
        self._is_open = False  # a call may have been carried out
        self._job_id = ""
        self._was_lost = 0  # calls of which nobody knew
        self._unreached = 0
        self._pauses = 0
        self._mended: set[str] = set()
        self._end = clock.monotonic() + PATIENCE

    def send(self) -> str:
        while True:
            if self._bucket is not None:
                self._bucket.take(self._clock, self._tell)
            self._renew()
            self._is_open = True
            try:
                self._job_id = self._api.submit(self._requests.submit)
            except BatchmlError as error:
                self._job_id = self._after(error)
                if self._job_id:
                    return self._job_id
                continue
            return self._only(self._job_id) if self._was_lost else self._job_id

    def interrupted(self) -> Interrupted:
        """What to tell after Ctrl-C: looks the run up once. Ctrl-C again ends that, too."""
        if self._job_id or not self._is_open:
            return Interrupted(self._record.key, self._job_id)
        try:
            found = self._api.called(self._record.queue, self._record.job_name, hurry=True)
        except (BatchmlError, KeyboardInterrupt):
            found = []
        job_id = found[0].job_id if found else ""
        return Interrupted(self._record.key, job_id, is_open=not job_id)

    def _renew(self) -> None:
        """Before a call that leaves later than the intent says: say on the disk when it does.

        Whoever finds the intent of a client that was killed waits so long, counted from there.
        """
        now = int(self._clock.now() * 1000)
        if abs(now - self._record.at) > FRESH * 1000:
            self._record = replace(self._record, at=now)
            self._history.intend(self._record)

    def _after(self, error: BatchmlError) -> str:
        """After a call that failed: the id of its run all the same, or "" to send it again."""
        what = fate(error)
        if what is Fate.UNREACHED and self._api.is_local:
            what = Fate.UNKNOWN  # that was the last of several tries, of which others were lost
        if what is Fate.UNKNOWN:
            return self._look_up(error)
        self._is_open = False
        if what is Fate.REFUSED:
            self._requests = self._mend(error)
        elif what is Fate.BUSY:
            if self._bucket is not None:
                self._bucket.throttled(self._clock)
            self._pause(error, "AWS Batch is too busy; waiting for a turn.")
        else:
            self._unreached += 1
            if self._unreached >= TRIES:
                raise error
            self._pause(error, "AWS Batch cannot be reached; trying again.")
        return ""

    def _look_up(self, error: BatchmlError) -> str:
        if not self._was_lost:
            self._tell("The answer was lost; looking whether the run is there.")
        self._was_lost += 1
        try:
            found = look_up(self._api, self._record, self._clock, lag(self._api))
        except BatchmlError as then:
            raise Unsettled(self._record.name, self._record.key, f"{error} {then}") from then
        if found:
            return adopt(self._api, found, self._tell)
        self._is_open = False
        if self._was_lost > RESENDS:
            raise error
        return ""

    def _only(self, job_id: str) -> str:
        """The run that stays when an earlier call was carried out late, after it was looked for."""
        try:
            found = self._api.called(self._record.queue, self._record.job_name)
        except BatchmlError:
            return job_id
        return adopt(self._api, found, self._tell) if len(found) > 1 else job_id

    def _pause(self, error: BatchmlError, words: str) -> None:
        """Wait, longer each time and never as long as others. Raises `error` at the end."""
        from random import random

        if self._clock.monotonic() >= self._end:
            raise error
        if not self._pauses:
            self._tell(words)
        longest = min(LONGEST_PAUSE, 2.0**self._pauses)
        self._pauses += 1
        self._clock.sleep(longest * (0.5 + random() / 2))

    def _mend(self, error: BatchmlError) -> Submission:
        """What to send instead of what was refused. Raises `error` where nothing can be done."""
        submit, register = self._requests.submit, self._requests.register
        if not isinstance(error, ServiceError):
            raise error
        if self._share and "shareIdentifier" not in submit and _asks_for_share(error):
            return replace(self._requests, submit={**submit, "shareIdentifier": self._share})
        if error.code != "ClientException":
            raise error
        told = error.message.lower()
        if "queue" in told:  # before a definition is registered for nothing
            self._check_queue(error)
        if "definition" in self._mended:
            raise error
        self._mended.add("definition")
        if not self._api.has_definition(register["jobDefinitionName"]):
            self._api.register(registration(register, self._clock.now()))
            return self._requests
        if "queue" not in told:
            self._check_queue(error)
        if "definition" not in told:
            raise error
        return self._requests  # another process has registered it just now

    def _check_queue(self, refusal: ServiceError) -> None:
        """Raise NoQueue where the queue is not there, as far as AWS lets us look."""
        queue = bare_name(self._requests.submit["jobQueue"])
        try:
            queues = self._api.queues()
        except BatchmlError:
            return
        if queue not in queues:
            hint = "Choose one with --queue, or make it: batchml queue create."
            raise NoQueue(queue, queues, hint) from refusal


def _asks_for_share(error: ServiceError) -> bool:
    text = error.message.lower()
    return "shareidentifier" in text or "share identifier" in text
