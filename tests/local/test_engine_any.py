"""Any events in any order, and the invariants after each. docs/behaviours.md B1-B34, B120-B174."""

import random
import shutil
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchml.local.batch import scheduling
from batchml.local.batch.engine import tasks_to_stop
from batchml.local.batch.events import AttemptEnded, AttemptExit, PrepareAttempt
from batchml.local.batch.state import Job
from batchml.local.batch.transaction import Transaction
from batchml.local.machine import Needs
from batchml.model.run import JobStatus
from tests.support.engine_world import (
    LOST,
    SEQUENTIAL,
    World,
    consuming,
    indexes,
    needing,
    order_of,
    pairs,
    world,
)

GPUS = ("g0", "g1", "g2")
SMALL = st.integers(1, 3)
ENDS = [
    AttemptExit(code=0),
    AttemptExit(code=0),
    AttemptExit(code=1),
    LOST,
    AttemptExit(start_failure="CannotPull"),
]
PICK = st.integers(0, 999)
QUEUES = ["q", "low", "fair"]


class AnyEvents(RuleBasedStateMachine):
    """Random calls, ends and restarts."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="any-events-"))
        self.w = w = World(4, 400, GPUS, self.folder / "journal.db")
        w.environment("ce", max_vcpus=3)
        w.environment("spill", max_vcpus=2)
        w.call(
            "CreateSchedulingPolicy",
            name="p",
            fairsharePolicy={
                "computeReservation": 40,
                "shareDistribution": [{"shareIdentifier": "a", "weightFactor": 0.25}],
            },
        )
        w.queue("q", 1, "ce", "spill")
        w.queue("low", 0, "spill")
        w.queue("fair", 0, "spill", "ce", schedulingPolicyArn="p")
        for name, kind in (("seat", "REPLENISHABLE"), ("fuel", "NON_REPLENISHABLE")):
            w.call("CreateConsumableResource", consumableResourceName=name, totalQuantity=2,
                   resourceType=kind)  # fmt: skip
        container = {"image": "i", **needing(1, 64)}
        w.call("RegisterJobDefinition", jobDefinitionName="d", type="container",
               containerProperties=container)  # fmt: skip
        for nodes in (2, 3):
            entry = {"targetNodes": "0:", "container": {"image": "i", **needing(1, 64, nodes - 2)}}
            w.call("RegisterJobDefinition", jobDefinitionName=f"m{nodes}", type="multinode",
                   nodeProperties={"numNodes": nodes, "mainNode": nodes - 2,
                                   "nodeRangeProperties": [entry]})  # fmt: skip
        self.seen_launches = 0

    def teardown(self) -> None:
        """Whatever happened: when all that runs has ended, nothing is left."""
        if not hasattr(self, "w"):
            return
        self.drain()
        assert self.w.store is not None
        self.w.store.close()
        shutil.rmtree(self.folder)

    def drain(self) -> None:
        w = self.w
        for name in ("ce", "spill"):
            w.switch(True, name)
        for name in ("seat", "fuel"):
            w.call("UpdateConsumableResource", consumableResource=name, operation="SET",
                   quantity=10**6)  # fmt: skip
        while busy := w.busy():
            w.end(busy[-1])
        stuck = [job for job in w.state.jobs.values() if job.node is None]
        assert all(self.never_fits(job) or self.behind_one(job) for job in stuck), stuck
        for job in stuck:
            if job.id in w.state.jobs:
                w.terminate(job.id)
            while busy := w.busy():
                w.end(busy[0])
        assert not w.state.jobs
        assert not w.state.counts
        assert w.state.free == w.state.machine
        assert not w.state.lines
        w.restart()
        assert not w.state.jobs

    def never_fits(self, job: Job) -> bool:
        largest = {"low": 2}.get(job.queue, 3)
        return job.status is JobStatus.RUNNABLE and (
            job.needs.vcpus > largest or not self.w.state.machine.fits(job.needs)
        )

    def behind_one(self, job: Job) -> bool:
        """What waits in a queue whose head can never start, or for such a job."""
        return any(self.never_fits(other) for other in self.w.state.jobs.values())

    # --- calls ------------------------------------------------------------------------------

    def known(self, pick: int) -> str:
        ids = sorted(self.w.jobs)
        return ids[pick % len(ids)]

    def more(self, queue: str, seats: int, fuel: int) -> dict[str, Any]:
        wanted = {name: n for name, n in (("seat", seats), ("fuel", fuel)) if n}
        more: dict[str, Any] = {"queue": queue}
        if wanted:
            more["consumableResourcePropertiesOverride"] = consuming(**wanted)
        if queue == "fair":
            more["shareIdentifier"] = "abc"[(seats + fuel + len(self.w.jobs)) % 3]
            more["schedulingPriorityOverride"] = seats
        return more

    def dependencies(self, picks: list[int]) -> list[dict[str, str]]:
        return [{"jobId": self.known(pick)} for pick in picks] if self.w.jobs else []

    @rule(
        vcpus=SMALL, memory=st.integers(4, 300), gpus=st.integers(0, 2), attempts=SMALL,
        queue=st.sampled_from(QUEUES), after=st.lists(PICK, max_size=3),
        timeout=st.sampled_from([None, 60, 90]), seats=st.integers(0, 2), fuel=st.integers(0, 1),
    )  # fmt: skip
    def submit(
        self, vcpus: int, memory: int, gpus: int, attempts: int, queue: str, after: list[int],
        timeout: int | None, seats: int, fuel: int,
    ) -> None:  # fmt: skip
        more = self.more(queue, seats, fuel)
        more |= {"timeout": {"attemptDurationSeconds": timeout}} if timeout else {}
        depends = self.dependencies(after)
        more |= {"dependsOn": depends} if depends else {}
        self.w.submit(vcpus, memory, gpus, retryStrategy={"attempts": attempts}, **more)

    @rule(
        size=st.integers(2, 4), vcpus=SMALL, attempts=SMALL, queue=st.sampled_from(QUEUES),
        after=st.lists(PICK, max_size=2), in_sequence=st.booleans(),
        paired=st.lists(PICK, max_size=2), seats=st.integers(0, 2),
    )  # fmt: skip
    def submit_array(
        self, size: int, vcpus: int, attempts: int, queue: str, after: list[int],
        in_sequence: bool, paired: list[int], seats: int,
    ) -> None:  # fmt: skip
        depends = self.dependencies(after) + ([SEQUENTIAL] if in_sequence else [])
        arrays = [j.id for j in self.w.jobs.values() if j.is_array and j.spec.array_size == size]
        depends += [pairs(arrays[pick % len(arrays)]) for pick in paired if arrays]
        self.w.array(size, *depends, vcpus=vcpus, retryStrategy={"attempts": attempts},
                     **self.more(queue, seats, 0))  # fmt: skip

    @rule(
        nodes=st.sampled_from([2, 3]), attempts=SMALL, queue=st.sampled_from(QUEUES),
        after=st.lists(PICK, max_size=2), timeout=st.sampled_from([None, 60]),
        seats=st.integers(0, 1),
    )  # fmt: skip
    def submit_nodes(
        self, nodes: int, attempts: int, queue: str, after: list[int], timeout: int | None,
        seats: int,
    ) -> None:  # fmt: skip
        more = self.more(queue, seats, 0)
        more["jobQueue"] = more.pop("queue")
        more |= {"timeout": {"attemptDurationSeconds": timeout}} if timeout else {}
        depends = self.dependencies(after)
        more |= {"dependsOn": depends} if depends else {}
        self.w.call("SubmitJob", jobName="n", jobDefinition=f"m{nodes}",
                    retryStrategy={"attempts": attempts}, **more)  # fmt: skip

    @precondition(lambda self: self.w.jobs)
    @rule(pick=PICK, how=st.sampled_from(["cancel", "terminate"]))
    def stop(self, pick: int, how: str) -> None:
        getattr(self.w, how)(self.known(pick))

    @rule(name=st.sampled_from(["ce", "spill"]), on=st.booleans())
    def switch(self, name: str, on: bool) -> None:
        self.w.switch(on, name)

    @rule(name=st.sampled_from(["seat", "fuel"]), quantity=st.integers(0, 5))
    def set_quantity(self, name: str, quantity: int) -> None:
        self.w.call("UpdateConsumableResource", consumableResource=name, operation="SET",
                    quantity=quantity)  # fmt: skip

    @rule()
    def make_the_low_queue_anew(self) -> None:
        self.w.drop_queue("low")
        self.w.queue("low", 0, "spill")

    # --- what happens -----------------------------------------------------------------------

    @precondition(lambda self: self.w.busy())
    @rule(pick=PICK)
    def start(self, pick: int) -> None:
        busy = self.w.busy()
        self.w.start(busy[pick % len(busy)])

    @precondition(lambda self: self.w.busy())
    @rule(pick=PICK, end=st.sampled_from(ENDS))
    def end(self, pick: int, end: AttemptExit) -> None:
        busy = self.w.busy()
        self.w.end(busy[pick % len(busy)], end)

    @rule(seconds=st.integers(0, 100))
    def tick(self, seconds: int) -> None:
        self.w.tick(seconds)

    @rule(task=st.sampled_from(["0" * 32, "x"]))
    def stray(self, task: str) -> None:
        assert self.w.apply(AttemptEnded(task, AttemptExit(code=0), self.w.now)) == []

    @rule()
    def restart(self) -> None:
        """A server killed here goes on as if nothing had happened."""
        before, jobs, asked = (
            indexes(self.w.state),
            dict(self.w.state.jobs),
            tasks_to_stop(self.w.state),
        )
        launched = len(self.w.launches)
        self.w.restart()
        if len(self.w.launches) == launched:
            assert indexes(self.w.state) == before
            assert dict(self.w.state.jobs) == jobs
        else:  # the shares' past is forgotten, so that another may go first
            assert {launch.job.queue for launch in self.w.launches[launched:]} == {"fair"}
        assert set(asked) == set(tasks_to_stop(self.w.state))

    # --- what must hold ---------------------------------------------------------------------

    def holders(self) -> list[Job]:
        """Jobs that hold a place: for its nodes, a multi-node job does."""
        live = self.w.state.jobs.values()
        return [job for job in live if job.attempt is not None and job.node is None]

    @invariant()
    def nothing_leaks_and_nothing_is_given_twice(self) -> None:
        state, busy = self.w.state, self.holders()
        assert state.free.vcpus >= 0
        assert state.free.memory >= 0
        assert state.free.vcpus + sum(job.needs.vcpus for job in busy) == 4
        assert state.free.memory + sum(job.needs.memory for job in busy) == 400
        held = [gpu for job in busy if job.attempt for gpu in job.attempt.gpus]
        assert sorted([*held, *state.free.gpus]) == sorted(GPUS)
        assert all(job.attempt and len(job.attempt.gpus) == job.needs.gpus for job in busy)
        for name, limit in (("ce", 3), ("spill", 2)):
            used = [job for job in busy if job.attempt and job.attempt.environment == name]
            assert sum(job.needs.vcpus for job in used) == state.used.get(name, 0) <= limit
        tasks = {job.attempt.task_id: job.id for job in state.jobs.values() if job.attempt}
        assert tasks == dict(state.by_task)

    @invariant()
    def a_node_s_gpus_are_those_of_its_job(self) -> None:
        for job in self.holders():
            if job.is_multinode and job.attempt is not None:
                nodes = [self.w.state.jobs[node] for node in job.child_ids()]
                held = [gpu for node in nodes if node.attempt for gpu in node.attempt.gpus]
                assert len(held) == len({*held})
                assert {*held} <= {*job.attempt.gpus}

    @invariant()
    def consumables_are_held_by_who_runs_and_spent_by_who_ran(self) -> None:
        held = Counter({n: 0 for n in ("seat", "fuel")})
        for job in self.holders():
            held.update(dict(job.spec.consumables))
        assert self.w.state.in_use.get("seat", 0) == held["seat"]
        spent = sum(
            (len(job.attempts) + (job.attempt is not None)) * dict(job.spec.consumables)["fuel"]
            for job in self.w.jobs.values()
            if job.node is None and not job.is_array and "fuel" in dict(job.spec.consumables)
        )
        assert self.w.state.consumables["fuel"].spent == spent

    @invariant()
    def the_shares_use_what_their_jobs_do(self) -> None:
        running = Counter[str]()
        for job in self.holders():
            if job.queue == "fair":
                running[job.spec.share] += job.needs.vcpus
        usage = indexes(self.w.state)["running"]
        assert usage == {("fair", share): vcpus for share, vcpus in running.items()}

    @invariant()
    def the_counts_of_an_array_are_those_of_its_children(self) -> None:
        for job in self.w.jobs.values():
            if job.is_array:
                found = Counter(self.w.jobs[child].status.value for child in job.child_ids())
                assert self.w.counts(job.id) == dict(found)
                over = all(JobStatus(status).is_terminal for status in found)
                assert over == job.status.is_terminal == (job.id not in self.w.state.jobs)
                if not over:
                    assert job.status is JobStatus.PENDING
                elif job.status is JobStatus.SUCCEEDED:
                    assert dict(found) == {"SUCCEEDED": job.spec.array_size}
                    assert not job.is_ending

    @invariant()
    def a_multi_node_job_follows_its_main_node(self) -> None:
        for job in self.w.jobs.values():
            if not job.is_multinode or job.spec.nodes is None:
                continue
            nodes = [self.w.jobs[node] for node in job.child_ids()]
            main = nodes[job.spec.nodes.main]
            made = job.attempt.number - 1 if job.attempt is not None else len(main.attempts)
            assert job.attempts == main.attempts[:made]
            if job.status.is_terminal:
                assert all(node.status.is_terminal and node.attempt is None for node in nodes)
                assert not any(node.id in self.w.state.jobs for node in nodes)
                if not job.is_ending:
                    assert main.status is job.status
            elif job.status.holds_resources:
                assert any(node.attempt is not None for node in nodes)
                started = [node for node in nodes if node.attempt is not None]
                numbers = {node.attempt.number for node in started if node.attempt}
                assert numbers == {made + 1}
            else:
                assert {node.status for node in nodes} == {JobStatus.PENDING}

    @invariant()
    def a_job_is_in_one_place(self) -> None:
        jobs = self.w.state.jobs
        for job in jobs.values():
            assert set(job.waiting_for) <= set(jobs)
            if job.node is not None:
                continue
            assert not job.status.is_terminal
            assert (job.attempt is not None) == job.status.holds_resources
            if job.index is not None:
                waits = bool(job.waiting_for or jobs[job.parent].waiting_for)
            else:
                waits = bool(job.waiting_for) or job.is_array
            assert waits == (job.status is JobStatus.PENDING)
        waiting = {j.id for j in jobs.values() if j.status is JobStatus.RUNNABLE}
        shares = [("q", ""), ("low", ""), *(("fair", share) for share in "abc")]
        lines = [
            job_id for queue, share in shares for job_id in order_of(self.w.state, queue, share)
        ]
        assert sorted(lines) == sorted(waiting)

    @invariant()
    def a_job_ends_once_and_only_moves_forward(self) -> None:
        for job_id, seen in self.w.history.items():
            job = self.w.jobs[job_id]
            if job.node is not None:
                continue
            ended = [
                place for place, status in enumerate(seen) if status in ("SUCCEEDED", "FAILED")
            ]
            assert ended in ([], [len(seen) - 1])
            assert bool(ended) == (job_id not in self.w.state.jobs) == job.status.is_terminal
            retries = 0
            for before, after in pairwise(seen):
                if JobStatus(after).order < JobStatus(before).order:
                    assert (before, after) in (("STARTING", "RUNNABLE"), ("RUNNING", "RUNNABLE"))
                    retries += 1
            assert retries == max(0, len(job.attempts) - (1 if job.status.is_terminal else 0)) or (
                job.status.is_terminal and retries == len(job.attempts)
            )
            assert len(job.attempts) <= job.spec.retry["attempts"]
            if job.status is JobStatus.SUCCEEDED and not job.is_array:
                assert job.attempts[-1]["container"]["exitCode"] == 0
                assert not job.is_ending

    @invariant()
    def each_end_is_told_once(self) -> None:
        assert self.w.ends == {
            job.id: 1 for job in self.w.jobs.values() if job.id not in self.w.state.jobs
        }

    @invariant()
    def a_queue_is_first_in_first_out(self) -> None:
        new = self.w.launches[self.seen_launches :]
        self.seen_launches = len(self.w.launches)
        tx = Transaction(self.w.state, self.w.now)
        for launch in new:
            whole = self.whole(launch)
            if launch.attempt.number > 1 or whole is None or whole.queue == "fair":
                continue
            ahead = [
                job
                for job in self.w.state.jobs.values()
                if job.queue == whole.queue
                and job.status is JobStatus.RUNNABLE
                and job.sequence < whole.sequence
                and all(
                    tx.has_consumable(name, quantity) for name, quantity in job.spec.consumables
                )
            ]
            assert ahead == []

    def whole(self, launch: PrepareAttempt) -> Job | None:
        """The job that took a place with this launch; None for a node that came after."""
        if launch.job.node is None:
            return launch.job
        return self.w.jobs[launch.job.parent] if launch.job.is_main_node else None

    @invariant()
    def the_head_of_a_line_waits_only_for_want_of_room(self) -> None:
        for queue in self.w.state.queues.values():
            for head, _ in scheduling.front_of_queue(self.w.state, queue, self.w.now, 1):
                assert scheduling.environment_for(self.w.state, queue, head) is None


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_thousand_jobs_with_random_ends_all_end() -> None:
    chance = random.Random(4)
    w = world(vcpus=8, memory=9000, gpus=GPUS)
    for number in range(1000):
        after = (f"j{4 + chance.randrange(number)}",) if number and chance.random() < 0.3 else ()
        w.submit(chance.randint(1, 8), 100, chance.randint(0, 3), after=after,
                 retryStrategy={"attempts": chance.randint(1, 3)})  # fmt: skip
    while w.state.jobs:
        active = list(w.state.by_task.values())
        assert active, "jobs wait and nothing runs"
        w.end(chance.choice(active), chance.choice([0, 0, 0, 1]))
    assert w.state.free == w.state.machine
    assert {job.status for job in w.jobs.values()} == {JobStatus.SUCCEEDED, JobStatus.FAILED}
    assert Needs(0, 0) == Needs(sum(w.state.used.values()), 0)
