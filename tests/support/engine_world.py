"""An engine at work, for tests: calls and ends go in, and what became of the jobs is looked at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from immutables import Map
from msgspec.structs import replace

from batchml.local.batch.engine import restore, step
from batchml.local.batch.events import (
    AnswerCall,
    AttemptEnded,
    AttemptExit,
    AttemptStarted,
    CallReceived,
    ClockTicked,
    Effect,
    Event,
    PrepareAttempt,
    RefuseCall,
    SaveJob,
    StopAttempt,
)
from batchml.local.batch.persistent_heap import Heap
from batchml.local.batch.reads import READS, ReadView
from batchml.local.batch.state import BatchState, Dependents, Job, QueueLine, empty_state
from batchml.local.machine import MachineCapacity
from batchml.local.store.journal import Journal
from batchml.model.names import bare_name
from batchml.model.run import JobStatus
from tests.support.models import ec2

LOST = AttemptExit(lost="Host EC2 (instance this-machine) terminated: the runner is gone.")


class World:
    """An engine at work: its state, all jobs as last saved, and what it asked for.

    With a `journal` it keeps what it is told to, and restarts from there.
    """

    def __init__(
        self, vcpus: int = 4, memory: int = 4096, gpus: tuple[str, ...] = (),
        journal: Path | None = None,
    ) -> None:  # fmt: skip
        self.state = empty_state(MachineCapacity(vcpus, memory, gpus))
        self.store = Journal(journal) if journal else None
        self._unkept: list[Effect] = []
        self.jobs: dict[str, Job] = {}
        self.history: dict[str, list[str]] = {}
        self.ends: dict[str, int] = {}  # how often a job was said to have ended
        self.launches: list[PrepareAttempt] = []
        self.stops: list[str] = []
        self.now = 1_000_000
        self.count = 0

    def apply(self, event: Event) -> list[Effect]:
        self.state, effects = step(self.state, event)
        if self.store is not None:
            self._unkept += effects
        for effect in effects:
            if isinstance(effect, SaveJob):
                self.jobs[effect.job.id] = effect.job
                if not effect.live:
                    self.ends[effect.job.id] = self.ends.get(effect.job.id, 0) + 1
                seen = self.history.setdefault(effect.job.id, [])
                if seen[-1:] != [effect.job.status.value]:
                    seen.append(effect.job.status.value)
            elif isinstance(effect, PrepareAttempt):
                self.launches.append(effect)
            elif isinstance(effect, StopAttempt):
                self.stops.append(effect.task_id)
        return effects

    # --- calls ------------------------------------------------------------------------------

    def call(self, operation: str, /, **params: Any) -> dict[str, Any]:
        """A request that is accepted."""
        self.count += 1
        effects = self.apply(self._request(operation, params, f"j{self.count}"))
        answer = effects[-1] if isinstance(effects[-1], RefuseCall) else None
        assert answer is None, answer
        return next(effect.body for effect in effects if isinstance(effect, AnswerCall))

    def refusal(self, operation: str, /, **params: Any) -> str:
        """The words in which a request is refused; it must have changed nothing."""
        before = self.state
        (effect,) = self.apply(self._request(operation, params, "no"))
        assert isinstance(effect, RefuseCall)
        assert self.state is before
        assert (effect.code, effect.status) == ("ClientException", 400)
        return effect.message

    def _request(self, operation: str, params: dict[str, Any], new_id: str) -> CallReceived:
        """As the core hands it to the engine, with what is known of jobs that have ended."""
        over: dict[str, Job] = {}
        if "dependsOn" in params or "resourceArn" in params:
            over = {job.id: job for job in self.jobs.values() if job.status.is_terminal}
        ended = {job_id: job.status.value for job_id, job in over.items()}
        named = bare_name(params.get("resourceArn", ""))
        found = {named: over[named]} if named in over else {}
        return CallReceived(operation, params, self.now, new_id, "request", ended, found)

    def read(self, operation: str, /, **params: Any) -> dict[str, Any]:
        """A request that changes nothing. Raises Refused."""
        self.keep()
        assert self.store is not None, "it needs a journal"
        view = ReadView(self.state, self.store, "key", self.now)
        return READS["batch", operation](view, params)

    def described(self, job_id: str) -> dict[str, Any]:
        (found,) = self.read("DescribeJobs", jobs=[job_id])["jobs"]
        return dict(found)

    def listed(self, **params: Any) -> list[str]:
        return [job["jobId"] for job in self.read("ListJobs", **params)["jobSummaryList"]]

    def environment(self, name: str = "ce", max_vcpus: int = 99, **more: Any) -> None:
        resources = ec2(max_vcpus)
        self.call(
            "CreateComputeEnvironment",
            **{"computeEnvironmentName": name, "type": "MANAGED", "computeResources": resources}
            | more,
        )

    def queue(self, name: str = "q", priority: int = 1, *environments: str, **more: Any) -> None:
        order = [
            {"order": place, "computeEnvironment": environment}
            for place, environment in enumerate(environments or ("ce",))
        ]
        self.call(
            "CreateJobQueue",
            jobQueueName=name,
            priority=priority,
            computeEnvironmentOrder=order,
            **more,
        )

    def switch(self, on: bool, environment: str = "ce") -> None:
        """Let an environment start jobs, or none."""
        state = "ENABLED" if on else "DISABLED"
        self.call("UpdateComputeEnvironment", computeEnvironment=environment, state=state)

    def drop_queue(self, name: str = "q") -> None:
        self.call("UpdateJobQueue", jobQueue=name, state="DISABLED")
        self.call("DeleteJobQueue", jobQueue=name)

    def submit(
        self, vcpus: int = 1, memory: int = 64, gpus: int = 0, queue: str = "q",
        after: Sequence[str] = (), **more: Any,
    ) -> str:  # fmt: skip
        """Submit a job; its id."""
        if after:
            more["dependsOn"] = [{"jobId": job_id} for job_id in after]
        made = self.call(
            "SubmitJob",
            jobName="job",
            jobQueue=queue,
            **{
                "jobDefinition": "d",
                "containerOverrides": needing(vcpus, memory, gpus),
                **more,
            },
        )
        return str(made["jobId"])

    def array(self, size: int = 3, *depends_on: dict[str, str], **more: Any) -> str:
        """Submit an array; its id. `PAIRS(id)` and `SEQUENTIAL` make dependencies."""
        if depends_on:
            more["dependsOn"] = list(depends_on)
        return self.submit(arrayProperties={"size": size}, **more)

    def cancel(self, job_id: str, reason: str = "why") -> None:
        self.call("CancelJob", jobId=job_id, reason=reason)

    def terminate(self, job_id: str, reason: str = "why") -> None:
        self.call("TerminateJob", jobId=job_id, reason=reason)

    # --- what becomes of attempts -----------------------------------------------------------

    def task(self, job_id: str) -> str:
        attempt = self.jobs[job_id].attempt
        assert attempt is not None, f"{job_id} is {self.jobs[job_id].status}"
        return attempt.task_id

    def start(self, *job_ids: str) -> None:
        for job_id in job_ids:
            self.apply(AttemptStarted(self.task(job_id), self.now, f"127.0.0.{len(job_id)}"))

    def end(self, job_id: str, exit_: AttemptExit | int = 0) -> None:
        how = AttemptExit(code=exit_) if isinstance(exit_, int) else exit_
        self.apply(AttemptEnded(self.task(job_id), how, self.now))

    def tick(self, seconds: float) -> None:
        self.now += int(seconds * 1000)
        self.apply(ClockTicked(self.now))

    # --- restarts ---------------------------------------------------------------------------

    def keep(self) -> None:
        if self.store is not None:
            self.store.commit(self._unkept)
            self._unkept = []

    def restart(self) -> None:
        """The server is killed, and starts again from its journal; nothing else has changed."""
        if self.store is None:
            self.state = restore(stored(self.state), self.now)
        else:
            self.keep()
            self.store.close()
            self.store = Journal(self.store.path)
            self.state = restore(self.store.load(self.state.machine), self.now)
        self.apply(ClockTicked(self.now))

    # --- looking ----------------------------------------------------------------------------

    def status(self, *job_ids: str) -> list[str]:
        return [self.jobs[job_id].status.value for job_id in job_ids]

    def reasons(self, *job_ids: str) -> list[str]:
        return [self.jobs[job_id].status_reason for job_id in job_ids]

    def counts(self, array: str) -> dict[str, int]:
        """How many children of an array are in which state, as DescribeJobs shows it."""
        known = self.jobs[array].summary or self.state.counts[array]
        return {status: count for status, count in known.items() if count}

    def active(self) -> list[str]:
        """Jobs that have an attempt, in the order in which they were launched."""
        return [
            launch.job.id
            for launch in self.launches
            if (attempt := self.jobs[launch.job.id].attempt) and attempt == launch.attempt
        ]

    def busy(self) -> list[str]:
        """Jobs and nodes that have a task to report on, in the order of their names."""
        return sorted(
            job.id
            for job in self.state.jobs.values()
            if job.attempt is not None and not job.is_multinode
        )


def needing(vcpus: int = 1, memory: int = 64, gpus: int = 0) -> dict[str, Any]:
    """Container overrides that ask for so much."""
    needs = [("VCPU", vcpus), ("MEMORY", memory), *([("GPU", gpus)] if gpus else [])]
    return {"resourceRequirements": [{"type": t, "value": str(v)} for t, v in needs]}


def consuming(**quantities: int) -> dict[str, Any]:
    """The consumable resources that a job asks for."""
    return {
        "consumableResourceList": [
            {"consumableResource": name, "quantity": quantity}
            for name, quantity in quantities.items()
        ]
    }


def children(array: str, *indexes: int) -> list[str]:
    return [f"{array}:{index}" for index in indexes]


SEQUENTIAL = {"type": "SEQUENTIAL"}


def pairs(job_id: str) -> dict[str, str]:
    return {"jobId": job_id, "type": "N_TO_N"}


def furnish(made: World) -> World:
    """One environment `ce`, one queue `q` and one definition `d`."""
    made.environment()
    made.queue()
    made.call(
        "RegisterJobDefinition",
        jobDefinitionName="d",
        type="container",
        containerProperties={"image": "i", "command": ["true"], "vcpus": 1, "memory": 64},
    )
    return made


def world(
    vcpus: int = 4, memory: int = 4096, gpus: tuple[str, ...] = (), journal: Path | None = None
) -> World:
    return furnish(World(vcpus, memory, gpus, journal))


def in_state(status: str) -> tuple[World, str, str]:
    """A world, a job in `status`, and a job that it depends on ("" for none)."""
    w = world(vcpus=2)
    if status == "PENDING":
        other = w.submit()
        return w, w.submit(after=(other,)), other
    if status == "RUNNABLE":
        w.submit(vcpus=2)
        return w, w.submit(), ""
    job_id = w.submit()
    if status != "STARTING":
        w.start(job_id)
    if status in ("SUCCEEDED", "FAILED"):
        w.end(job_id, 0 if status == "SUCCEEDED" else 7)
    assert w.status(job_id) == [status]
    return w, job_id, ""


# --- comparing states -----------------------------------------------------------------------


def stored(state: BatchState) -> BatchState:
    """The state as the journal keeps it: records and jobs, no index but children that ended."""
    ended: dict[str, dict[str, int]] = {}
    for array, counts in state.counts.items():
        ended[array] = {s: n for s, n in counts.items() if n and JobStatus(s).is_terminal}
    return replace(
        empty_state(state.machine),
        environments=state.environments,
        queues=state.queues,
        definitions=state.definitions,
        revisions=state.revisions,
        policies=state.policies,
        consumables=state.consumables,
        jobs=state.jobs,
        sequence=state.sequence,
        counts=Map(ended),
    )


def ids_of(dependents: Dependents) -> list[str]:
    found = []
    while dependents is not None:
        one, dependents = dependents
        found.append(one)
    return found[::-1]


def indexes(state: BatchState) -> dict[str, Any]:
    """The indexes, without what is stale in them and told from nothing."""
    live = {on: ids_of(ids) for on, ids in state.dependents.items() if on in state.jobs}
    return {
        "free": state.free,
        "used": {name: vcpus for name, vcpus in state.used.items() if vcpus},
        "in_use": {name: held for name, held in state.in_use.items() if held},
        "running": {
            (queue, share): use.vcpus
            for queue, shares in state.usage.items()
            for share, use in shares.items()
            if use.vcpus
        },
        "by_task": dict(state.by_task),
        "dependents": {
            on: left for on, ids in live.items() if (left := {i for i in ids if i in state.jobs})
        },
        "counts": {
            array: {status: count for status, count in counts.items() if count}
            for array, counts in state.counts.items()
        },
        "order": {
            (queue, share): line
            for queue in state.queues
            for share in {job.spec.share for job in state.jobs.values() if job.queue == queue}
            if (line := order_of(state, queue, share))
        },
    }


def order_of(state: BatchState, queue: str, share: str = "") -> list[str]:
    """The RUNNABLE jobs of a queue in their order, those that wait for a consumable included.

    What is stale in the lines is left out, and a job that stands twice shows twice.
    """
    lines: Map[QueueLine, Heap] = state.lines.get(queue, Map())
    heaps = [jobs for line, jobs in lines.items() if line.share == share]
    found = []
    while heaps:
        line = heaps.pop()
        if line is not None:
            _, key, job_id, left, right = line
            heaps += [left, right]
            job = state.jobs.get(job_id)
            if job is not None and job.status is JobStatus.RUNNABLE:
                found.append((key, job_id))
    return [job_id for _, job_id in sorted(found)]
