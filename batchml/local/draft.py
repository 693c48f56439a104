"""A state while one step changes it. Every change goes through here, so none goes unsaved."""

from msgspec.structs import replace

from batchml.local import heap
from batchml.local.messages import DropRecord, Effect, SaveJob, SaveRecord
from batchml.local.state import Attempt, Definition, Environment, Job, Queue, State


class Draft:
    """Starts from a frozen state; `state` is the frozen state so far, `effects` what to do."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.effects: list[Effect] = []

    def put_job(self, job: Job) -> None:
        """Keep the job; a finished one leaves the state and stays in the store."""
        jobs = self.state.jobs
        if not job.status.is_terminal:
            jobs = jobs.set(job.id, job)
        elif job.id in jobs:  # else it ended as it was submitted: what it depends on had failed
            jobs = jobs.delete(job.id)
        self.state = replace(self.state, jobs=jobs)
        self.effects.append(SaveJob(job))

    def enqueue(self, job: Job, *, front: bool = False) -> None:
        """Put a RUNNABLE job into its queue's line; a retried one goes to the front (AWS)."""
        key = (0 if front else 1, job.sequence)
        line = heap.push(self.state.waiting.get(job.queue), key, job.id)
        self.set_line(job.queue, line)

    def set_line(self, queue: str, line: heap.Heap) -> None:
        self.state = replace(self.state, waiting=self.state.waiting.set(queue, line))

    def occupy(self, job: Job, attempt: Attempt) -> None:
        state = self.state
        self.state = replace(
            state,
            free=state.free.without(job.needs),
            used=state.used.set(
                attempt.environment, state.used.get(attempt.environment, 0) + job.needs.vcpus
            ),
            by_task=state.by_task.set(attempt.task_id, job.id),
        )

    def release(self, job: Job, attempt: Attempt) -> None:
        state = self.state
        # One that was taken out of the machine meanwhile does not come back.
        gpus = tuple(gpu for gpu in attempt.gpus if gpu in state.machine.gpus)
        self.state = replace(
            state,
            free=state.free.plus(job.needs, gpus),
            used=state.used.set(
                attempt.environment, state.used[attempt.environment] - job.needs.vcpus
            ),
            by_task=state.by_task.delete(attempt.task_id),
        )

    def watch_deadline(self, at: int, task_id: str) -> None:
        self.state = replace(
            self.state, deadlines=heap.push(self.state.deadlines, (at, task_id), task_id)
        )

    def depend(self, job_id: str, on: str) -> None:
        known = self.state.dependents.get(on, ())
        self.state = replace(self.state, dependents=self.state.dependents.set(on, (*known, job_id)))

    def pop_dependents(self, job_id: str) -> tuple[str, ...]:
        found = self.state.dependents.get(job_id, ())
        if found:
            self.state = replace(self.state, dependents=self.state.dependents.delete(job_id))
        return found

    def next_sequence(self) -> int:
        self.state = replace(self.state, sequence=self.state.sequence + 1)
        return self.state.sequence

    def put_environment(self, record: Environment) -> None:
        self.state = replace(
            self.state, environments=self.state.environments.set(record.name, record)
        )
        self.effects.append(SaveRecord("environment", record.name, record))

    def drop_environment(self, name: str) -> None:
        self.state = replace(self.state, environments=self.state.environments.delete(name))
        self.effects.append(DropRecord("environment", name))

    def put_queue(self, record: Queue) -> None:
        self.state = replace(self.state, queues=self.state.queues.set(record.name, record))
        self.effects.append(SaveRecord("queue", record.name, record))

    def drop_queue(self, name: str) -> None:
        self.state = replace(self.state, queues=self.state.queues.delete(name))
        self.effects.append(DropRecord("queue", name))

    def put_definition(self, record: Definition) -> None:
        latest = max(record.revision, self.state.revisions.get(record.name, 0))
        self.state = replace(
            self.state,
            definitions=self.state.definitions.set(record.key, record),
            revisions=self.state.revisions.set(record.name, latest),
        )
        self.effects.append(SaveRecord("definition", record.key, record))
