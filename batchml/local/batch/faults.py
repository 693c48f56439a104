"""Inject the faults that `fault_injection.py` parses: lost hosts, exceeded memory, no capacity.

Functions that change something take a transaction.

An attempt with an injected fault is marked (`doom`), and the mark is on disk before anything is
killed. So the attempt gets the exit of that fault, however it ends from then on and whichever
server notices the end.
"""

import re

from msgspec.structs import replace

from batchml.local.batch import fault_injection, persistent_heap
from batchml.local.batch.events import AttemptExit, LoseHost
from batchml.local.batch.fault_injection import Chaos, Fault
from batchml.local.batch.lifecycle import job_of
from batchml.local.batch.state import BatchState, Job, JobAttempt
from batchml.local.batch.transaction import Transaction

KILLED = 137  # 128 plus the number of KILL


def enable(state: BatchState, chaos: Chaos | None, now: int) -> BatchState:
    """The state of a server that was started to inject `chaos`."""
    if chaos is None:
        return state
    until = now + chaos.no_capacity * 1000 if chaos.no_capacity else 0
    return replace(state, chaos=chaos, no_capacity_until=until)


def schedule_fault(tx: Transaction, job: Job) -> None:
    """The program of an attempt runs: schedule the fault for this attempt, if there is one.

    In a multi-node job the main node gets the fault, and the job ends. Only `node-lost` applies to
    another node: AWS Batch does not react to its loss.
    """
    attempt = job.attempt
    if attempt is None or attempt.started_at is None or attempt.doom or job.is_multinode:
        return
    whole_job = tx.state.jobs.get(job.parent, job) if job.node is not None else job
    chaos, tag = tx.state.chaos, job.tags.get(fault_injection.TAG)
    fault = fault_injection.fault_of(chaos, tag, whole_job.sequence, attempt.number)
    if fault is not None and _is_target(chaos, whole_job, job, attempt, fault):
        at = attempt.started_at + fault.after * 1000
        item = (attempt.task_id, fault)
        scheduled = tx.prune_ended(tx.state.faults)
        faults = persistent_heap.push(scheduled, (at, attempt.task_id), item)
        tx.state = replace(tx.state, faults=faults)


def _is_target(
    chaos: Chaos | None, whole_job: Job, job: Job, attempt: JobAttempt, fault: Fault
) -> bool:
    """Whether the fault for the job `whole_job` is injected into `job`, which is that job or one of
    its nodes.
    """
    nodes = job.spec.nodes
    if job.node is None or nodes is None:
        return fault.kind != fault_injection.NODE_LOST
    if fault.kind != fault_injection.NODE_LOST or nodes.count < 2:
        return fault.kind != fault_injection.NODE_LOST and job.is_main_node
    others = [index for index in range(nodes.count) if index != nodes.main]
    index = fault_injection.choose_node(chaos, whole_job.sequence, attempt.number, len(others))
    return job.node == others[index]


def inject_due(tx: Transaction) -> None:
    """Inject the faults whose time has come, except into jobs that are being stopped."""
    while tx.state.faults is not None and tx.state.faults[1][0] <= tx.now:
        task_id, fault = tx.state.faults[2]
        tx.state = replace(tx.state, faults=persistent_heap.pop(tx.state.faults))
        job = job_of(tx, task_id)
        if job is None or job.attempt is None or job.attempt.doom:
            continue
        whole_job = tx.state.jobs.get(job.parent) if job.node is not None else job
        if whole_job is not None and not whole_job.is_ending:
            attempt = replace(job.attempt, doom=str(fault))
            tx.put_job(replace(job, attempt=attempt))
            tx.effects.append(_lose_host(attempt))


def _lose_host(attempt: JobAttempt) -> LoseHost:
    return LoseHost(attempt.task_id, attempt.doom, warned=_kind(attempt) == fault_injection.SPOT)


def _kind(attempt: JobAttempt) -> str:
    return re.split("[@=]", attempt.doom)[0]


def pending_losses(state: BatchState) -> list[LoseHost]:
    """The faults of live attempts, injected again by a server that follows one that was killed."""
    attempts = [job.attempt for job in state.jobs_with_attempt() if job.attempt is not None]
    return [_lose_host(attempt) for attempt in attempts if attempt.doom]


def apply_fault(attempt: JobAttempt | None, exit_: AttemptExit) -> AttemptExit:
    """The exit of an attempt: the actual exit, or that of the injected fault if there is one.

    A program that succeeds after the warning of `spot` has ended before its host.
    """
    if (
        attempt is None
        or not attempt.doom
        or (_kind(attempt) == fault_injection.SPOT and exit_.code == 0)
    ):
        return exit_
    if _kind(attempt) == fault_injection.OOM:
        return replace(exit_, code=KILLED, oom=True, lost="", start_failure="")
    lost = f"Host EC2 (instance {fault_injection.host_of(attempt.task_id)}) terminated."
    return replace(exit_, code=None, oom=False, lost=lost, start_failure="")
