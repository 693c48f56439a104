"""`--fallback`: a run that may move to another queue, from its submission to who looks after it.

Whoever waits for it (`submit --wait`, `wait`, `logs -f`) follows it there. So that it moves while
nobody waits, a small run in the queue of controllers looks after it: on `local` a process of this
installation, in AWS a container of images/controller.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.errors import Fate, fate
from batchml.errors import (
    AccessError,
    BatchmlError,
    ConfigError,
    NoQueue,
    ServiceError,
    ServiceUnreachable,
)
from batchml.model.fallback import FALLBACK_TAG, moved_to, said_gone_on
from batchml.model.names import in_words
from batchml.ops.fallback import (
    OVERDUE,
    Mover,
    Plan,
    Plans,
    Step,
    followed,
    lending,
    successor,
)
from batchml.ops.select import bare_id

if TYPE_CHECKING:
    from batchml.aws.batch.requests import Submission, Travel
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.model.job import JobSpec
    from batchml.model.record import Name, Record
    from batchml.model.run import Run
    from batchml.ops.watch import Happening

Make = Callable[["JobSpec", "Travel"], "tuple[Submission, str]"]
Tell = Callable[[str], None]
Describe = Callable[[Sequence[str]], "dict[str, Run]"]

_LOCAL_LOOK = 1.0  # seconds between two looks at a run that waits
_AWS_LOOK = 30.0
_LOST = 3600.0  # seconds without an answer after which AWS Batch may start another watcher


# --- submitting -----------------------------------------------------------------------------


def may_move(place: "Place", order: "Order", spec: "JobSpec", travel: "Travel") -> "Travel":
    """What a run that may move takes along: a tag that says so. Raises ConfigError."""
    if order.array is not None:
        raise ConfigError(
            spec.name,
            [
                "fallback: with --array. Children of an array begin one by one, and only a whole "
                "job can move: submit without --fallback, into a queue whose `compute` names both "
                "(docs/capacity.md)."
            ],
        )
    from batchml.client.submission import DEFAULT_QUEUE

    goal = place.queue(spec.fallback.queue)
    if goal == place.queue(spec.queue or DEFAULT_QUEUE):
        raise ConfigError(spec.name, [f"fallback.queue: {goal} is the run's own queue."])
    return replace(travel, tags={**travel.tags, FALLBACK_TAG: f"{goal}:{spec.fallback.seconds}"})


def make_plan(
    spec: "JobSpec",
    travel: "Travel",
    budget: Mapping[str, str],
    record: "Record",
    make: Make,
    notices: list[str],
) -> tuple["Record", Plan]:
    """The record of a run that may move, and the plan of its move.

    `budget` are the variables of `--max-cost` at the prices of the other queue.
    """
    fallback = spec.fallback
    # What it depends on has succeeded by then, and AWS Batch may have forgotten it.
    there = replace(travel, depends_on=(), env={**travel.env, **budget})
    requests, lent = lending(make(replace(spec, queue=fallback.queue), there)[0], spec.env)
    goal = requests.submit["jobQueue"]
    record = replace(record, fallback=f"{goal}:{fallback.seconds}")
    notices.append(
        f"Moves to the queue {fallback.queue} when it finds no host within "
        f"{in_words(fallback.seconds)}."
    )
    plan = Plan(travel.key, fallback.seconds, requests, record, bool(travel.store), lent)
    return record, plan.about(record)


def check_goal(place: "Place", given: str) -> None:
    """Before anything is sent: a word that is mistyped would be found when the run is to move."""
    if place.batch.takes_jobs(place.queue(given)):
        return
    hint = "The fallback goes to a queue that is there and takes jobs: batchml queue list."
    known = place.batch.queues()
    if place.queue(given) in known:
        raise ConfigError("fallback", [f"queue: {given} takes no jobs now. {hint}"])
    raise NoQueue(given, known, hint)


def look_after(place: "Place", plan: Plan, job_id: str, tell: Tell) -> None:
    """Start the run that moves `job_id` while nobody waits for it. What fails is told: then only
    a command that waits moves it."""
    from batchml.client.watcher import start_watcher

    try:
        watcher = start_watcher(place, plan, job_id)
    except BatchmlError as error:
        tell(
            f"It moves only while a command of this machine waits for it (batchml wait {job_id}): "
            f"{error}"
        )
        return
    plans_of(place).watched(plan.key, watcher)


def plans_of(place: "Place") -> Plans:
    return Plans.beside(place.history, place.env)


# --- looking after it -----------------------------------------------------------------------


def attend(place: "Place", plan: Plan, job_id: str, tell: Tell) -> str:
    """Look after a run until it has moved, or can move no more; the job that it is then.

    Raises what the calls do: what was begun, the next one ends.
    """
    from batchml.client.submission import own_share

    mover = Mover(lambda: place.batch, place.history, plan, place.clock, tell, own_share())
    most = _LOCAL_LOOK if place.settings.is_local else _AWS_LOOK
    seen = place.clock.monotonic()
    while True:
        try:
            run = place.describe([job_id]).get(job_id)
            now = mover.step(run) if run is not None else ""
            seen = place.clock.monotonic()
        except BatchmlError as error:
            is_lost = isinstance(error, ServiceUnreachable) or getattr(error, "status", 0) >= 500
            if not is_lost or place.clock.monotonic() - seen > _LOST:
                raise
            tell(f"Trying again: {error}")
            now = ""
        if now:
            plans_of(place).drop(plan.key)
            return now
        place.clock.sleep(most)


class Moves:
    """How runs are, for who waits for them: who asks for one that has moved is told of where it is.

    It stands for `describe`. A run is told under the id that was asked for; `true` gives its own.
    Where nobody else looks after a run that this machine submitted, it is moved on the way.
    """

    def __init__(self, place: "Place", describe: Describe) -> None:
        self._place = place
        self._describe = describe
        self._now: dict[str, str] = {}  # asked for -> the job that goes on
        self._movers: dict[str, Mover | None] = {}
        self.news: list[str] = []

    def __call__(self, job_ids: Sequence[str]) -> "dict[str, Run]":
        told = self._describe([self._own(each) for each in job_ids])
        found = {}
        for asked in job_ids:
            run = told.get(self._own(asked))
            if run is not None:
                whole = asked == bare_id(asked)
                found[asked] = self._seen(asked, run) if whole else run
        return found

    def true(self, run: "Run") -> "Run":
        now = self._now.get(run.job_id)
        return replace(run, job_id=now) if now else run

    def _own(self, asked: str) -> str:
        whole = bare_id(asked)
        return self._now.get(whole, whole) + asked.removeprefix(whole)

    def _seen(self, asked: str, run: "Run") -> "Run":
        from batchml.model.run import JobStatus

        goal = moved_to(run)
        mover = self._mover(run) if goal or not run.status.is_terminal else None
        age = self._place.clock.now() - (run.stopped_at or 0) / 1000
        step = mover.see(run, self._patience(run.key)).step if mover else Step.WAIT
        if goal:
            now = successor(self._place.batch, run)
            if now:
                self.news.append(said_gone_on(goal, now))
            elif mover and age >= self._patience(run.key):
                now = self._moved(mover, run)
            if now and now != run.job_id:
                return self._follow(asked, run, now)
            if age < OVERDUE:  # whoever has cancelled it is about to submit it again
                return replace(run, job_id=asked, status=JobStatus.RUNNABLE, stopped_at=None)
        elif step is Step.LEAVE and mover:
            now = self._moved(mover, run)
            if now != run.job_id:
                return self._follow(asked, run, now)
        elif run.status.is_terminal and run.key:
            plans_of(self._place).drop(run.key)
        return replace(run, job_id=asked)

    def _moved(self, mover: Mover, run: "Run") -> str:
        """The job that the run is now. A move that AWS refuses is told of, and not tried again
        here: the run is waited for where it is."""
        try:
            return mover.move(run)
        except AccessError as error:
            refused: BatchmlError = error
        except ServiceError as error:
            if fate(error) is not Fate.REFUSED:
                raise
            refused = error
        self._movers[run.key] = None
        self.news.append(f"It is not moved: {refused}")
        return run.job_id

    def _follow(self, asked: str, run: "Run", now: str) -> "Run":
        from batchml.model.run import JobStatus

        self._now[asked] = now
        learn(self._place, run, now)
        told = self._describe([now]).get(now)
        waiting = replace(run, status=JobStatus.SUBMITTED, status_reason="", stopped_at=None)
        return replace(told or waiting, job_id=asked)

    def _mover(self, run: "Run") -> Mover | None:
        if run.key not in self._movers:
            from batchml.client.submission import own_share

            plan, place = plans_of(self._place).find(run.key), self._place
            self._movers[run.key] = None
            if plan is not None:
                self._movers[run.key] = Mover(
                    lambda: place.batch, place.history, plan, place.clock, self.news.append,
                    own_share(),
                )  # fmt: skip
        return self._movers[run.key]

    def _patience(self, key: str) -> int:
        """Seconds that are left to the run that looks after it; 0 where there is none."""
        return OVERDUE if plans_of(self._place).watcher(key) else 0


def following(moves: Moves, happenings: "Iterable[Happening]") -> "Iterator[Happening]":
    """What happens to a run, wherever it goes on, told of its own job there."""
    from batchml.ops.watch import Ended, Progress, StatusChanged

    last: Run | None = None
    for happening in happenings:
        if isinstance(happening, Ended | StatusChanged | Progress):
            last = moves.true(happening.run)
            happening = replace(happening, run=last)
        while last is not None and moves.news:
            yield Progress(last, moves.news.pop(0))
        yield happening


# --- finding it again -----------------------------------------------------------------------


def learn(place: "Place", run: "Run", now: str) -> None:
    """Keep in the history where a run of this machine has gone on. A full disk is no reason not to
    follow it."""
    history = place.history
    plans_of(place).drop(run.key)
    known = history.remembered(place.env).get(run.job_id)
    if known is None:
        return
    with suppress(OSError):
        if known.moved != run.job_id:
            history.intend(followed(known, run.job_id, moved_to(run) or known.queue))
        history.submitted(known.key, now)


def now_of(place: "Place", names: "Sequence[Name]", job_id: str) -> str:
    """The job that a run is now: another, where it has moved. AWS is asked about those alone that
    may move and are not known to have."""
    whole = bare_id(job_id)
    for name in names:
        if whole == name.moved != name.job_id:
            return name.job_id + job_id.removeprefix(whole)
        if whole == name.job_id and name.fallback and name.moved in ("", whole):
            run = place.describe([whole]).get(whole)
            if run is None or not moved_to(run):
                return job_id
            now = successor(place.batch, run)
            if now:
                learn(place, run, now)
            return (now or whole) + job_id.removeprefix(whole)
    return job_id


def arrived(place: "Place", runs: "Iterable[Run]") -> dict[str, str]:
    """Of jobs that were left for another queue: where they have come to, looked for as long as AWS
    Batch may hide what was submitted just now. Who ends a run has to end that; no other is made.
    """
    from batchml.model.record import Record
    from batchml.ops.reconcile import adopt, lag, look_up

    found = {}
    for run in runs:
        queue = moved_to(run)
        if not queue or not run.key:
            continue
        plans_of(place).drop(run.key)
        age = place.clock.now() - (run.stopped_at or 0) / 1000
        seconds = lag(place.batch) if age < OVERDUE else 0.0
        wanted = Record(job_name=run.job_name, queue=queue)
        jobs = look_up(place.batch, wanted, place.clock, seconds)
        if jobs:
            found[run.job_id] = adopt(place.batch, jobs, lambda _: None)
            learn(place, run, found[run.job_id])
    return found


def with_moves(place: "Place", told: "dict[str, Run]") -> "dict[str, Run]":
    """The same runs; in place of one that has moved, the job that it is now."""
    for asked, run in told.items():
        if moved_to(run):
            now = successor(place.batch, run)
            if now:
                told = {**told, asked: place.describe([now]).get(now, run)}
    return told
