"""The embedded AWS Batch: finished jobs, queued jobs, children of an array, dependencies."""

import gc
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from immutables import Map
from msgspec.structs import replace

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.batch.engine import restore, step
from batchml.local.batch.events import (
    AnswerCall,
    AttemptEnded,
    AttemptExit,
    CallReceived,
    ClockTicked,
    Effect,
    PrepareAttempt,
    RefuseCall,
    SaveJob,
    SaveRecord,
    SaveSpec,
)
from batchml.local.batch.reads import READS, ReadView
from batchml.local.batch.state import BatchState, Job, SubmittedSpec, empty_state
from batchml.local.home import Home
from batchml.local.machine import MachineCapacity, Needs
from batchml.local.store.journal import Journal
from batchml.model.run import JobStatus
from benchmarks.curves.cost import SOME, cpu, cpu_of_process, each, memory_of_process, sizes
from benchmarks.rows import Curve

NOW = 1_800_000_000_000  # ms
MACHINE = MachineCapacity(1, 4096)
_CONTAINER = {"image": "i", "command": ["python", "train.py"], "environment": []}


class Server:
    """The rules of the embedded AWS Batch with a queue `q`, without a server around them."""

    def __init__(self, share: bool = False, enabled: bool = True) -> None:
        self.state: BatchState = empty_state(MACHINE)
        self.effects: list[Effect] = []
        self._calls = 0
        environment: dict[str, Any] = {
            "type": "EC2", "minvCpus": 0, "maxvCpus": 1, "subnets": [], "instanceRole": "r",
            "instanceTypes": ["optimal"],
        }  # fmt: skip
        self.call(
            "CreateComputeEnvironment", computeEnvironmentName="ce", type="MANAGED",
            state="ENABLED" if enabled else "DISABLED", computeResources=environment,
        )  # fmt: skip
        policy = {}
        if share:
            made = self.call("CreateSchedulingPolicy", name="fair", fairsharePolicy={})
            policy = {"schedulingPolicyArn": made["arn"]}
        order = [{"order": 1, "computeEnvironment": "ce"}]
        self.call(
            "CreateJobQueue", jobQueueName="q", priority=1, computeEnvironmentOrder=order, **policy
        )
        self.call(
            "RegisterJobDefinition", jobDefinitionName="d", type="container",
            containerProperties={**_CONTAINER, "vcpus": 1, "memory": 64},
        )  # fmt: skip

    def call(self, operation: str, **params: Any) -> dict[str, Any]:
        """Raises RuntimeError when it is refused."""
        self._calls += 1
        new_id = f"{self._calls:08x}-1111-4111-8111-111111111111"
        event = CallReceived(operation, params, NOW + self._calls, new_id, "request", {}, {})
        self.state, effects = step(self.state, event)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, AnswerCall):
                return effect.body
            if isinstance(effect, RefuseCall):
                raise RuntimeError(effect.message)
        return {}

    def add(self, jobs: Sequence[Job]) -> None:
        """Unfinished jobs, as a start of the server adds them."""
        plain = replace(
            self.state, jobs=Map({job.id: job for job in jobs}), sequence=len(jobs),
            lines=Map(), dependents=Map(),
        )  # fmt: skip
        self.state = restore(plain, NOW)

    def tick(self) -> list[Effect]:
        self.state, effects = step(self.state, ClockTicked(NOW))
        return effects

    def end(self, task_id: str) -> list[Effect]:
        self.state, effects = step(self.state, AttemptEnded(task_id, AttemptExit(code=0), NOW))
        return effects


def job(number: int, status: JobStatus = JobStatus.RUNNABLE, share: str = "", **more: Any) -> Job:
    job_id = f"{number:08x}-0000-4000-8000-000000000000"
    spec = SubmittedSpec(
        job_id, f"name-{number}", "q", "d:1", _CONTAINER, Needs(1, 64), NOW, share=share
    )
    return Job(job_id, spec, number, status, **more)


def finished(number: int) -> Job:
    detail = {
        "container": {"exitCode": 0, "taskArn": "arn", "logStreamName": "d/default/x"},
        "startedAt": 2, "stoppedAt": 3, "statusReason": "Essential container in task exited",
    }  # fmt: skip
    return job(number, JobStatus.SUCCEEDED, exit_code=0, attempts=(detail,))


def write(path: Path, count: int, make: Callable[[int], Job], live: bool) -> None:
    """A journal with a queue and so many jobs, as the server itself writes it."""
    server = Server(enabled=False)
    store = Journal(path)
    store.commit([effect for effect in server.effects if isinstance(effect, SaveRecord)])
    for first in range(1, count + 1, 10_000):
        effects: list[Effect] = []
        for number in range(first, min(count + 1, first + 10_000)):
            one = make(number)
            effects += [SaveSpec(one.spec), SaveJob(one, live)]
        store.commit(effects)
    store.close()


Points = list[tuple[int, float]]


def _measured(
    measure: Callable[[int], dict[str, float]], of_sizes: Sequence[int]
) -> dict[str, Points]:
    """What is measured at each size, by its name."""
    found: dict[str, Points] = {}
    for size in of_sizes:
        for name, cost in measure(size).items():
            found.setdefault(name, []).append((size, cost))
        gc.collect()
    return found


def finished_jobs(full: bool) -> Iterator[Curve]:
    found = _measured(_finished, sizes(full))
    how = "finished jobs in the journal, written as the server writes them"
    for name, title, unit, more in (
        ("start", "Start of the server", "s of CPU", "until the server is ready"),
        ("memory", "Memory of the server", "MiB", "once it is ready"),
        ("describe", "DescribeJobs of 100 jobs", "ms of CPU", f"median of {SOME}"),
        ("list", "ListJobs: the newest 100", "ms of CPU", f"median of {SOME}"),
        ("name", "ListJobs: a name", "ms of CPU", f"median of {SOME}"),
        ("prefix", "ListJobs: a prefix of ten names", "ms of CPU", f"median of {SOME}"),
    ):
        yield Curve(
            name=f"curves/finished_{name}", title=title, axis="finished jobs", unit=unit,
            how=f"{more}; {how}", points=found[name], whole=name in ("start", "memory"),
        )  # fmt: skip


def _finished(size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "h")
        home.prepare()
        write(home.journal, size, finished, live=False)
        store = Journal(home.journal)
        view = ReadView(restore(store.load(MACHINE)), store, "key", NOW)
        chance = random.Random(1)

        def read(operation: str, **params: Any) -> None:
            READS["batch", operation](view, params)

        def name() -> None:
            filters = [{"name": "JOB_NAME", "values": [f"name-{chance.randrange(size) + 1}"]}]
            read("ListJobs", jobQueue="q", filters=filters)

        def prefix() -> None:
            filters = [{"name": "JOB_NAME", "values": [f"name-{chance.randrange(size) // 10}*"]}]
            read("ListJobs", jobQueue="q", filters=filters)

        def newest() -> None:
            read("ListJobs", jobQueue="q", jobStatus="SUCCEEDED", maxResults=100)

        def describe() -> None:
            ids = [finished(chance.randrange(size) + 1).id for _ in range(100)]
            read("DescribeJobs", jobs=ids)

        acts = {"describe": describe, "list": newest, "name": name, "prefix": prefix}
        costs = {what: each(act) / 1000 for what, act in acts.items()}
        store.close()
        started, memory = serve(home)
    return {**costs, "start": started, "memory": memory}


def serve(home: Home) -> tuple[float, float]:
    """Seconds of CPU until a server on this state is ready, and the MiB that it holds then."""
    endpoint = control.ensure_server(home, SystemClock())
    try:
        return cpu_of_process(endpoint.pid), memory_of_process(endpoint.pid)
    finally:
        control.stop_server(home, SystemClock())


def queued_jobs(full: bool) -> Iterator[Curve]:
    found = _measured(_queued, sizes(full))
    bare = "without the request and the commit"
    for name, title, how in (
        ("decision", "A scheduling decision", "one job ends and the next one starts"),
        ("shares", "A scheduling decision among 100 shares", "a queue with a scheduling policy"),
        ("submit", "SubmitJob to a full queue", bare),
        ("cancel", "CancelJob of a queued job", bare),
        ("snapshot", "GetJobQueueSnapshot", "the first 100 jobs in their order"),
    ):
        yield Curve(
            name=f"curves/queued_{name}", title=title, axis="queued jobs", unit="us of CPU",
            how=f"{how}; median of {SOME}", points=found[name],
        )  # fmt: skip
    yield Curve(
        name="curves/queued_restart", title="Restart with queued jobs", axis="queued jobs",
        unit="us of CPU a job", how="checking and reading the journal, and deriving the indexes",
        points=found["restart"],
    )  # fmt: skip


def _queued(size: int) -> dict[str, float]:
    server = Server()
    server.add([job(number) for number in range(1, size + 1)])
    costs = {"decision": _decide(server)}
    request = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}
    costs["submit"] = each(lambda: server.call("SubmitJob", **request))
    last = iter(range(size, 0, -1))
    costs["cancel"] = each(
        lambda: server.call("CancelJob", jobId=job(next(last)).id, reason="r"), SOME // 2
    )
    fair = Server(share=True)
    fair.add([job(number, share=f"s{number % 100}") for number in range(1, size + 1)])
    costs["shares"] = _decide(fair)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "j", size, job, live=True)
        store = Journal(Path(folder) / "j")
        view = ReadView(server.state, store, "key", NOW)
        snapshot = READS["batch", "GetJobQueueSnapshot"]
        costs["snapshot"] = each(lambda: snapshot(view, {"jobQueue": "q"}), SOME // 5)
        store.close()
        costs["restart"] = cpu(lambda: _restart(Path(folder) / "j")) / size * 1e6
    return costs


def _restart(path: Path) -> None:
    store = Journal(path)
    restore(store.load(MACHINE), NOW)
    store.close()


def _decide(server: Server) -> float:
    """Microseconds of the end of one job and the start of the next one."""
    effects = server.tick()

    def end_one() -> None:
        nonlocal effects
        effects = server.end(_task(effects))

    return each(end_one)


def _task(effects: Sequence[Effect]) -> str:
    """The task that has been started."""
    return next(one.attempt.task_id for one in effects if isinstance(one, PrepareAttempt))


def array_children(full: bool) -> Iterator[Curve]:
    """AWS's largest array has 10,000 children."""
    found = _measured(_array, sizes(full, 10_000, 10_000))
    for name, title in (
        ("accept", "Accepting an array"),
        ("end", "A child ends and the next one starts"),
        ("terminate", "Terminating an array"),
    ):
        yield Curve(
            name=f"curves/array_{name}", title=title, axis="children", unit="us of CPU a child",
            how="without the request and the commit", points=found[name],
        )  # fmt: skip


def _array(size: int) -> dict[str, float]:
    server = Server()
    request = {"jobName": "a", "jobQueue": "q", "jobDefinition": "d"}
    made: dict[str, Any] = {}
    array = {"arrayProperties": {"size": size}}
    accept = cpu(lambda: made.update(server.call("SubmitJob", **request, **array)))
    effects = server.effects

    def end_one() -> None:
        nonlocal effects
        effects = server.end(_task(effects))

    end = each(end_one)
    stop = cpu(lambda: server.call("TerminateJob", jobId=made["jobId"], reason="r"))
    return {"accept": accept / size * 1e6, "end": end, "terminate": stop / size * 1e6}


def dependencies(full: bool) -> Iterator[Curve]:
    """A chain, in which each job waits for the one before, and a fan, in which all wait for one."""
    found = _measured(_dependencies, sizes(full, 100_000, 100_000))
    for name, title in (
        ("chain_submit", "SubmitJob at the end of a chain"),
        ("chain_fail", "The first job of a chain fails, and so do all"),
        ("fan_submit", "SubmitJob of one more job that waits for the same one"),
        ("fan_fail", "A job for which all others wait fails"),
    ):
        yield Curve(
            name=f"curves/{name}", title=title, axis="jobs",
            unit="us of CPU" if name.endswith("submit") else "us of CPU a job",
            how="without the request and the commit", points=found[name],
        )  # fmt: skip


def _dependencies(size: int) -> dict[str, float]:
    costs = {}
    for shape in ("chain", "fan"):
        server = Server(enabled=False)
        ids = [job(number).id for number in range(1, size + 1)]
        waited = ids if shape == "chain" else [ids[0]] * size
        more = [
            job(number, JobStatus.PENDING, waiting_for=(waited[number - 2],))
            for number in range(2, size + 1)
        ]
        server.add([job(1), *more])
        request = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}
        on = [{"jobId": waited[-1]}]
        costs[f"{shape}_submit"] = each(partial(server.call, "SubmitJob", dependsOn=on, **request))
        stop = cpu(partial(server.call, "TerminateJob", jobId=ids[0], reason="r"))
        costs[f"{shape}_fail"] = stop / size * 1e6
    return costs
