"""The changes of one step of the engine. All changes go through it, so that each is also saved."""

from collections.abc import Iterable
from typing import Any

from immutables import Map
from msgspec.structs import replace

from batchml.local.batch import persistent_heap
from batchml.local.batch.events import DropRecord, Effect, SaveJob, SaveRecord
from batchml.local.batch.fair_share import decay, is_significant
from batchml.local.batch.state import (
    BatchState,
    Job,
    JobAttempt,
    JobQueue,
    QueueLine,
    ResourceRecord,
    ShareUsage,
)

_FEW = 64  # ended attempts that `prune_ended` keeps, besides one for each live attempt


def _line_key(job: Job, front: bool) -> tuple[int, int, int]:
    """What orders the RUNNABLE jobs of a line."""
    return 0 if front else 1, -job.spec.priority if job.spec.share else 0, job.sequence


class Transaction:
    """Starts from a frozen state. `state` is the changed state so far, `effects` the actions to
    take.
    """

    def __init__(self, state: BatchState, now: int = 0) -> None:
        self.state = state
        self.now = now  # ms
        self.effects: list[Effect] = []

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    # --- Jobs -------------------------------------------------------------------------------

    def put_job(self, job: Job, *, live: bool | None = None) -> None:
        """Store a job. A finished one leaves the state and stays in the journal.

        A node that has ended is `live` until its whole job ends, because the job may be retried.
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
        elif job.id in jobs:  # else it ended at its submission: a dependency had failed
            jobs = jobs.delete(job.id)
        self._set(jobs=jobs)
        self.effects.append(SaveJob(job, live))

    def add_children(self, parent: Job, children: Iterable[Job]) -> None:
        """Store all children of a new array, or all nodes of a new job, at once."""
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
        """Remove and return the counts of an ended array. Its own record keeps them from now on."""
        counts = {status: count for status, count in self.state.counts[parent].items() if count}
        self._set(counts=self.state.counts.delete(parent))
        return counts

    def next_sequence(self, count: int) -> int:
        """Allocate `count` consecutive numbers of jobs, which are never used again, and return the
        first.
        """
        first = self.state.sequence + 1
        self._set(sequence=self.state.sequence + count)
        return first

    # --- Lines of waiting jobs --------------------------------------------------------------

    def enqueue(self, job: Job, *, front: bool = False) -> None:
        """Put a RUNNABLE job into its queue's line; a retried job goes to the front (AWS).

        The scheduling priority orders jobs within one share only.
        """
        self._push(job.queue, QueueLine(job.spec.share), _line_key(job, front), job.id)

    def enqueue_all(self, jobs: Iterable[tuple[Job, bool]]) -> None:
        """`enqueue` many jobs at once, each with its `front`."""
        found: dict[tuple[str, str], list[tuple[Any, str]]] = {}
        for job, front in jobs:
            entries = found.setdefault((job.spec.queue, job.spec.share), [])
            entries.append((_line_key(job, front), job.id))
        for (queue, share), entries in found.items():
            line, heap = QueueLine(share), persistent_heap.from_items(entries)
            lines: Map[QueueLine, persistent_heap.Heap] = self.state.lines.get(queue, Map())
            lines = lines.set(line, persistent_heap.merge(lines.get(line), heap))
            self._set(lines=self.state.lines.set(queue, lines))

    def _push(self, queue: str, line: QueueLine, key: Any, job_id: str) -> None:
        lines: Map[QueueLine, persistent_heap.Heap] = self.state.lines.get(queue, Map())
        lines = lines.set(line, persistent_heap.push(lines.get(line), key, job_id))
        self._set(lines=self.state.lines.set(queue, lines))

    def pop_line(self, queue: str, line: QueueLine) -> None:
        """Remove the first job of a line, and the line if it is empty then."""
        lines = self.state.lines[queue]
        rest = persistent_heap.pop(lines[line])
        lines = lines.delete(line) if rest is None else lines.set(line, rest)
        left = self.state.lines
        self._set(lines=left.set(queue, lines) if lines else left.delete(queue))

    def move_first(self, queue: str, line: QueueLine, to: QueueLine) -> None:
        """Move the first job of a line to another line; it keeps its position in the queue's
        order.
        """
        first = self.state.lines[queue][line]
        assert first is not None
        self.pop_line(queue, line)
        self._push(queue, to, first[1], first[2])

    def has_consumable(self, consumable: str, quantity: int) -> bool:
        """True when this quantity of a consumable resource is left."""
        record = self.state.consumables.get(consumable)
        return record is not None and record.total - self.state.quantity_in_use(record) >= quantity

    # --- Resources of attempts --------------------------------------------------------------

    def occupy(self, job: Job, attempt: JobAttempt) -> None:
        """Give an attempt the vCPUs, memory, GPUs and consumable resources that its job
        requests.
        """
        state = self.state
        name = attempt.environment
        free = state.free if attempt.is_controller else state.free.minus(job.needs, attempt.gpus)
        self._set(
            free=free,
            used=state.used.set(name, state.used.get(name, 0) + job.needs.vcpus),
            by_task=state.by_task.set(attempt.task_id, job.id),
        )
        self._add_share_usage(job, job.needs.vcpus)
        self._add_consumables(job, 1)

    def spend(self, job: Job) -> None:
        """Take from the consumable resources that are not replenished."""
        for consumable, quantity in job.spec.consumables:
            record = self.state.consumables.get(consumable)
            if record is not None and not record.replenishable:
                self.put(replace(record, spent=record.spent + quantity))

    def release(self, job: Job, attempt: JobAttempt) -> None:
        """Take back the resources of an attempt that has ended."""
        state = self.state
        # A GPU that was removed from the machine meanwhile is not given back.
        gpus = tuple(gpu for gpu in attempt.gpus if gpu in state.machine.gpus)
        self._set(
            free=state.free if attempt.is_controller else state.free.plus(job.needs, gpus),
            used=state.used.set(
                attempt.environment, state.used[attempt.environment] - job.needs.vcpus
            ),
            by_task=state.by_task.delete(attempt.task_id),
        )
        self._add_share_usage(job, -job.needs.vcpus)
        self._add_consumables(job, -1)

    def _add_share_usage(self, job: Job, vcpus: int) -> None:
        """Add vCPUs, or subtract them, from now on in the usage of a job's share."""
        share = job.spec.share
        if share:
            of_queue: Map[str, ShareUsage] = self.state.usage.get(job.queue, Map())
            policy = self.state.policy_of(job.queue)
            if share not in of_queue:  # else shares that are used once would be kept forever
                of_queue = Map((name, use) for name, use in of_queue.items()
                               if is_significant(use, self.now, policy))  # fmt: skip
            usage = decay(of_queue.get(share, ShareUsage()), self.now, policy)
            of_queue = of_queue.set(share, replace(usage, vcpus=usage.vcpus + vcpus))
            self._set(usage=self.state.usage.set(job.queue, of_queue))
            if job.queue not in self.state.queues:
                self._forget_usage(job.queue)

    def _forget_usage(self, queue: str) -> None:
        """Forget the past usage of a deleted queue; running jobs still count."""
        of_queue: Map[str, ShareUsage] = self.state.usage.get(queue, Map())
        left = {share: ShareUsage(0.0, self.now, use.vcpus)
                for share, use in of_queue.items() if use.vcpus}  # fmt: skip
        if left:
            self._set(usage=self.state.usage.set(queue, Map(left)))
        elif queue in self.state.usage:
            self._set(usage=self.state.usage.delete(queue))

    def _add_consumables(self, job: Job, sign: int) -> None:
        """Add, or with `sign` -1 subtract, the replenishable resources that a job holds."""
        for name, quantity in job.spec.consumables:
            record = self.state.consumables.get(name)
            if record is not None and record.replenishable:
                held = self.state.in_use.get(name, 0) + sign * quantity
                self._set(in_use=self.state.in_use.set(name, held))

    def add_task(self, task_id: str, job_id: str) -> None:
        """Assign the events of a task to a job."""
        self._set(by_task=self.state.by_task.set(task_id, job_id))

    def forget_task(self, task_id: str) -> None:
        self._set(by_task=self.state.by_task.delete(task_id))

    def add_deadline(self, at: int, task_id: str) -> None:
        deadlines = self.prune_ended(self.state.deadlines)
        self._set(deadlines=persistent_heap.push(deadlines, (at, task_id), task_id))

    def prune_ended(self, times: persistent_heap.Heap) -> persistent_heap.Heap:
        """`times`, with keys (time, task id), without ended attempts, which are removed once they
        are the majority: else an hour's timeout would keep an ended job for an hour.
        """
        tasks = self.state.by_task
        if persistent_heap.size(times) <= 2 * len(tasks) + _FEW:
            return times
        return persistent_heap.from_items(
            (key, item) for key, item in persistent_heap.items(times) if key[1] in tasks
        )

    def pop_deadline(self) -> str:
        """Remove the first deadline, and return the id of its task."""
        assert self.state.deadlines is not None
        task_id = str(self.state.deadlines[2])
        self._set(deadlines=persistent_heap.pop(self.state.deadlines))
        return task_id

    # --- Dependencies -----------------------------------------------------------------------

    def add_dependency(self, job_id: str, on: str) -> None:
        """Let a job wait for the job `on`."""
        others = self.state.dependents.get(on)
        self._set(dependents=self.state.dependents.set(on, (job_id, others)))

    def pop_dependents(self, job_id: str) -> list[str]:
        """Remove and return the jobs that wait for a job, in the order in which they were added."""
        left = self.state.dependents.get(job_id)
        if left is not None:
            self._set(dependents=self.state.dependents.delete(job_id))
        found = []
        while left is not None:
            dependent, left = left
            found.append(dependent)
        return found[::-1]

    # --- Resources of users -----------------------------------------------------------------

    def put(self, record: ResourceRecord) -> None:
        records = getattr(self.state, record.field)
        self._set(**{record.field: records.set(record.key, record)})
        self.effects.append(SaveRecord(record.kind, record.key, record))

    def drop(self, record: ResourceRecord) -> None:
        records = getattr(self.state, record.field)
        self._set(**{record.field: records.delete(record.key)})
        self.effects.append(DropRecord(record.kind, record.key))

    def drop_queue(self, record: JobQueue) -> None:
        """Delete a queue with its lines, its blocked head and its past usage."""
        state, name = self.state, record.name
        self._set(
            lines=state.lines.delete(name) if name in state.lines else state.lines,
            blocked=state.blocked.delete(name) if name in state.blocked else state.blocked,
        )
        self._forget_usage(name)
        self.drop(record)

    def next_revision(self, definition: str) -> int:
        """Allocate a revision number, which is never used again for this definition."""
        revision = self.state.revisions.get(definition, 0) + 1
        self._set(revisions=self.state.revisions.set(definition, revision))
        return revision
