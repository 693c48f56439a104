"""Rehearsed failures in the rules: attempts that lose their host or run out of memory, and a fleet
without capacity. `fault_injection.py` reads what is asked for. A function changes a draft, or none.

An attempt that is struck is marked, and the mark is on disk before anything is killed: however the
attempt ends from then on, and whichever server hears of it, it ends as it was to.
"""

import re

from msgspec.structs import replace

from batchml.local.batch import fault_injection as chaos
from batchml.local.batch import persistent_heap as heap
from batchml.local.batch.events import Exit, Lose
from batchml.local.batch.fault_injection import Chaos, Fault
from batchml.local.batch.lifecycle import job_of
from batchml.local.batch.state import Attempt, Job, State
from batchml.local.batch.transaction import Draft

KILLED = 137  # 128 and the number of KILL


def rehearse(state: State, asked: Chaos | None, now: int) -> State:
    """The state of a server that was started with `asked`."""
    if asked is None:
        return state
    until = now + asked.no_capacity * 1000 if asked.no_capacity else 0
    return replace(state, chaos=asked, no_capacity_until=until)


def arm(draft: Draft, job: Job) -> None:
    """The program of an attempt runs: note what is in store for it.

    Of a multi-node job the main node is struck, which ends the whole, or by `node-lost` another,
    which AWS Batch does nothing about.
    """
    attempt = job.attempt
    if attempt is None or attempt.started_at is None or attempt.doom or job.is_multinode:
        return
    whole = draft.state.jobs.get(job.parent, job) if job.node is not None else job
    asked, tag = draft.state.chaos, job.tags.get(chaos.TAG)
    fault = chaos.fault_of(asked, tag, whole.sequence, attempt.number)
    if fault is not None and _is_struck(asked, whole, job, attempt, fault):
        at = attempt.started_at + fault.after * 1000
        item = (attempt.task_id, fault)
        known = draft.awaited(draft.state.faults)
        faults = heap.push(known, (at, attempt.task_id), item)
        draft.state = replace(draft.state, faults=faults)


def _is_struck(asked: Chaos | None, whole: Job, job: Job, attempt: Attempt, fault: Fault) -> bool:
    """Whether a fault of a whole job is for this container of it."""
    nodes = job.spec.nodes
    if job.node is None or nodes is None:
        return fault.kind != chaos.NODE_LOST
    if fault.kind != chaos.NODE_LOST or nodes.count < 2:
        return fault.kind != chaos.NODE_LOST and job.is_main_node
    others = [index for index in range(nodes.count) if index != nodes.main]
    place = chaos.struck_node(asked, whole.sequence, attempt.number, len(others))
    return job.node == others[place]


def strike(draft: Draft) -> None:
    """Strike the attempts whose time has come; one that is being stopped already is spared."""
    while draft.state.faults is not None and draft.state.faults[1][0] <= draft.now:
        task_id, fault = draft.state.faults[2]
        draft.state = replace(draft.state, faults=heap.pop(draft.state.faults))
        job = job_of(draft, task_id)
        if job is None or job.attempt is None or job.attempt.doom:
            continue
        whole = draft.state.jobs.get(job.parent) if job.node is not None else job
        if whole is not None and not whole.is_ending:
            _doom(draft, job, job.attempt, fault)


def _doom(draft: Draft, job: Job, attempt: Attempt, fault: Fault) -> None:
    attempt = replace(attempt, doom=str(fault))
    draft.put_job(replace(job, attempt=attempt))
    draft.effects.append(_order(attempt))


def _order(attempt: Attempt) -> Lose:
    return Lose(attempt.task_id, attempt.doom, warned=_kind(attempt) == chaos.SPOT)


def _kind(attempt: Attempt) -> str:
    return re.split("[@=]", attempt.doom)[0]


def doomed(state: State) -> list[Lose]:
    """What was struck and lives, for a server that was killed before it could do it."""
    attempts = [job.attempt for job in state.jobs.values() if job.attempt is not None]
    return [_order(attempt) for attempt in attempts if attempt.doom]


def verdict(attempt: Attempt | None, exit_: Exit) -> Exit:
    """How an attempt ends: as its runner says, unless it was struck.

    A program that ends well after the warning was faster than the end of its host.
    """
    if attempt is None or not attempt.doom or (_kind(attempt) == chaos.SPOT and exit_.code == 0):
        return exit_
    if _kind(attempt) == chaos.OOM:
        return replace(exit_, code=KILLED, oom=True, lost="", start_failure="")
    lost = f"Host EC2 (instance {chaos.host_of(attempt.task_id)}) terminated."
    return replace(exit_, code=None, oom=False, lost=lost, start_failure="")
