"""A state while one step changes it. Every change goes through here, so none goes unsaved."""

from collections.abc import Iterable
from typing import Any

from immutables import Map
from msgspec.structs import replace

from batchml.local.batch import persistent_heap as heap
from batchml.local.batch.events import DropRecord, Effect, SaveJob, SaveRecord
from batchml.local.batch.fair_share import faded, matters
from batchml.local.batch.state import Attempt, Job, Line, Queue, Record, State, Usage

_FEW = 64


class Draft:
    """Starts from a frozen state; `state` is the frozen state so far, `effects` what to do."""

    def __init__(self, state: State, now: int = 0) -> None:
        self.state = state
        self.now = now  # ms
        self.effects: list[Effect] = []

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    # --- jobs -------------------------------------------------------------------------------

    def put_job(self, job: Job, *, live: bool | None = None) -> None:
        """Keep the job; a finished one leaves the state and stays in the store.

        A node that has ended is `live` until its whole job ends, for that may be tried again.
        """
        jobs = self.state.jobs
        if job.index is not None:
            before = jobs.get(job.id)
            if before is not None and before.status is not job.status:
                self._count(job.parent, before.status.value, job.status.value)
        if live is None:
            live = not job.status.is_terminal
        if live:
            jobs = jobs.set(job.id, job)
        elif job.id in jobs:  # else it ended as it was submitted: what it depends on had failed
            jobs = jobs.delete(job.id)
        self._set(jobs=jobs)
        self.effects.append(SaveJob(job, live))

    def add_children(self, parent: Job, children: Iterable[Job]) -> None:
        """Keep the children of a new array, or the nodes of a new job, all at once."""
        counts: dict[str, int] = {}
        with self.state.jobs.mutate() as jobs:
            for child in children:
                jobs[child.id] = child
                counts[child.status.value] = counts.get(child.status.value, 0) + 1
                self.effects.append(SaveJob(child, True))
            self._set(jobs=jobs.finish())
        if parent.is_array:
            self._set(counts=self.state.counts.set(parent.id, counts))

    def _count(self, parent: str, before: str, after: str) -> None:
        counts = dict(self.state.counts[parent])
        counts[before] -= 1
        counts[after] = counts.get(after, 0) + 1
        self._set(counts=self.state.counts.set(parent, counts))

    def forget_counts(self, parent: str) -> dict[str, int]:
        """The counts of an array that has ended, which its own record keeps from now on."""
        counts = {status: count for status, count in self.state.counts[parent].items() if count}
        self._set(counts=self.state.counts.delete(parent))
        return counts

    # --- lines ------------------------------------------------------------------------------

    def enqueue(self, job: Job, *, front: bool = False) -> None:
        """Put a RUNNABLE job into its queue's line; a retried one goes to the front (AWS).

        The scheduling priority counts among the jobs of one share only.
        """
        key = (0 if front else 1, -job.spec.priority if job.spec.share else 0, job.sequence)
        self._push(job.queue, Line(job.spec.share), key, job.id)

    def _push(self, queue: str, line: Line, key: Any, job_id: str) -> None:
        lines: Map[Line, heap.Heap] = self.state.lines.get(queue, Map())
        lines = lines.set(line, heap.push(lines.get(line), key, job_id))
        self._set(lines=self.state.lines.set(queue, lines))

    def pop_line(self, queue: str, line: Line) -> None:
        """Take the first job out of a line; a line without jobs goes."""
        lines = self.state.lines[queue]
        rest = heap.pop(lines[line])
        lines = lines.delete(line) if rest is None else lines.set(line, rest)
        left = self.state.lines
        self._set(lines=left.set(queue, lines) if lines else left.delete(queue))

    def move(self, queue: str, line: Line, to: Line) -> None:
        """The first job of a line goes to another, and keeps its place in the queue's order."""
        first = self.state.lines[queue][line]
        assert first is not None
        self.pop_line(queue, line)
        self._push(queue, to, first[1], first[2])

    def has(self, consumable: str, quantity: int) -> bool:
        """True when so much of a consumable resource is left."""
        record = self.state.consumables.get(consumable)
        if record is None:
            return False
        held = record.spent + self.state.in_use.get(consumable, 0)
        return record.total - held >= quantity

    # --- what attempts occupy ---------------------------------------------------------------

    def occupy(self, job: Job, attempt: Attempt) -> None:
        """Give an attempt the vCPUs, memory, GPUs and consumables that its job asked for."""
        state = self.state
        name = attempt.environment
        free = state.free if attempt.is_aside else state.free.taking(job.needs, attempt.gpus)
        self._set(
            free=free,
            used=state.used.set(name, state.used.get(name, 0) + job.needs.vcpus),
            by_task=state.by_task.set(attempt.task_id, job.id),
        )
        self._use(job, job.needs.vcpus)
        for consumable, quantity in job.spec.consumables:
            record = self.state.consumables.get(consumable)
            if record is not None and record.replenishable:
                self._hold(consumable, quantity)

    def spend(self, job: Job) -> None:
        """Take from the consumables that are not given back."""
        for consumable, quantity in job.spec.consumables:
            record = self.state.consumables.get(consumable)
            if record is not None and not record.replenishable:
                self.put(replace(record, spent=record.spent + quantity))

    def release(self, job: Job, attempt: Attempt) -> None:
        state = self.state
        # One that was taken out of the machine meanwhile does not come back.
        gpus = tuple(gpu for gpu in attempt.gpus if gpu in state.machine.gpus)
        self._set(
            free=state.free if attempt.is_aside else state.free.plus(job.needs, gpus),
            used=state.used.set(
                attempt.environment, state.used[attempt.environment] - job.needs.vcpus
            ),
            by_task=state.by_task.delete(attempt.task_id),
        )
        self._use(job, -job.needs.vcpus)
        for consumable, quantity in job.spec.consumables:
            record = self.state.consumables.get(consumable)
            if record is not None and record.replenishable:
                self._hold(consumable, -quantity)

    def _use(self, job: Job, vcpus: int) -> None:
        """The share of a job uses so many vCPUs more, or less, from now on."""
        share = job.spec.share
        if share:
            of_queue: Map[str, Usage] = self.state.usage.get(job.queue, Map())
            policy = self.state.policy_of(job.queue)
            if share not in of_queue:  # else names that come once each would be kept for good
                of_queue = Map((name, use) for name, use in of_queue.items()
                               if matters(use, self.now, policy))  # fmt: skip
            usage = faded(of_queue.get(share, Usage()), self.now, policy)
            of_queue = of_queue.set(share, replace(usage, vcpus=usage.vcpus + vcpus))
            self._set(usage=self.state.usage.set(job.queue, of_queue))
            if job.queue not in self.state.queues:
                self._forget_usage(job.queue)

    def _forget_usage(self, queue: str) -> None:
        """A queue that is gone has no past, only what still runs of it."""
        of_queue: Map[str, Usage] = self.state.usage.get(queue, Map())
        left = {share: Usage(0.0, self.now, use.vcpus)
                for share, use in of_queue.items() if use.vcpus}  # fmt: skip
        if left:
            self._set(usage=self.state.usage.set(queue, Map(left)))
        elif queue in self.state.usage:
            self._set(usage=self.state.usage.delete(queue))

    def _hold(self, consumable: str, quantity: int) -> None:
        held = self.state.in_use.get(consumable, 0) + quantity
        self._set(in_use=self.state.in_use.set(consumable, held))

    def know_task(self, task_id: str, job_id: str) -> None:
        """Events of this task are of that job."""
        self._set(by_task=self.state.by_task.set(task_id, job_id))

    def forget_task(self, task_id: str) -> None:
        self._set(by_task=self.state.by_task.delete(task_id))

    def watch_deadline(self, at: int, task_id: str) -> None:
        known = self.awaited(self.state.deadlines)
        self._set(deadlines=heap.push(known, (at, task_id), task_id))

    def awaited(self, times: heap.Heap) -> heap.Heap:
        """What falls due for attempts, by (time, task); without those that are over, once they are
        most of it: an hour's timeout must not keep a job in mind for an hour.
        """
        tasks = self.state.by_task
        if heap.size(times) <= 2 * len(tasks) + _FEW:
            return times
        return heap.made((key, item) for key, item in heap.items(times) if key[1] in tasks)

    def pop_deadline(self) -> str:
        """The task whose time is up first."""
        assert self.state.deadlines is not None
        task_id = str(self.state.deadlines[2])
        self._set(deadlines=heap.pop(self.state.deadlines))
        return task_id

    # --- dependencies -----------------------------------------------------------------------

    def depend(self, job_id: str, on: str) -> None:
        known = self.state.dependents.get(on, ())
        self._set(dependents=self.state.dependents.set(on, (*known, job_id)))

    def pop_dependents(self, job_id: str) -> tuple[str, ...]:
        found = self.state.dependents.get(job_id, ())
        if found:
            self._set(dependents=self.state.dependents.delete(job_id))
        return found

    def next_sequence(self, count: int = 1) -> int:
        """The first of `count` numbers, which no job had before and none gets again."""
        first = self.state.sequence + 1
        self._set(sequence=self.state.sequence + count)
        return first

    # --- records ----------------------------------------------------------------------------

    def put(self, record: Record) -> None:
        known = getattr(self.state, record.field)
        self._set(**{record.field: known.set(record.key, record)})
        self.effects.append(SaveRecord(record.kind, record.key, record))

    def drop(self, record: Record) -> None:
        known = getattr(self.state, record.field)
        self._set(**{record.field: known.delete(record.key)})
        self.effects.append(DropRecord(record.kind, record.key))

    def drop_queue(self, record: Queue) -> None:
        """A queue goes with all that is known of it."""
        state, name = self.state, record.name
        self._set(
            lines=state.lines.delete(name) if name in state.lines else state.lines,
            blocked=state.blocked.delete(name) if name in state.blocked else state.blocked,
        )
        self._forget_usage(name)
        self.drop(record)

    def next_revision(self, definition: str) -> int:
        """A number that no revision of this definition had before and none gets again."""
        revision = self.state.revisions.get(definition, 0) + 1
        self._set(revisions=self.state.revisions.set(definition, revision))
        return revision
