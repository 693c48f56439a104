"""Find the jobs of a group run, with their states and their cost."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import BatchmlError, NotFound
from batchml.model.group import GANG_TAG, GROUP_TAG, is_worker
from batchml.model.run import Record
from batchml.runs.find import describe_parts, load_runs
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.launch import LaunchPlan

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.cost.bill import Bill
    from batchml.model.run import Run


class GroupWorkers(Struct, frozen=True):
    """The workers of one group.

    `found` is None if they were never submitted, or AWS Batch has forgotten them. `size` is 0 if
    only the history has the run.
    """

    group: str
    size: int = 0
    job_id: str = ""
    found: FoundRun | None = None


def worker_ids(context: "Context", found: FoundRun) -> dict[str, str]:
    """Group -> job id of its workers, or ""; {} for a run without groups.

    For runs that are not in the history, one ListJobs for each group.
    """
    if GROUP_TAG not in found.tags or is_worker(found.tags):
        return {}
    if found.record is not None and found.record.groups:
        groups = found.record.groups
        wanted = set(groups.values())
        known = {
            each.key: each.job_id
            for each in context.history.group(context.env, found.key)
            if each.key in wanted
        }
        return {group: known.get(key, "") for group, key in groups.items()}
    plan = launch_plan(found.run)
    return {
        each.name: next(
            (job.job_id for job in context.batch.find_by_name(each.queue, each.job_name)), ""
        )
        for each in (plan.groups if plan else ())
    }


def find_worker_groups(context: "Context", found: FoundRun) -> list[GroupWorkers]:
    """The groups of workers with their current states, also groups that AWS Batch has forgotten."""
    ids = worker_ids(context, found)
    plan = launch_plan(found.run)
    sizes = {each.name: each.size for each in plan.groups} if plan else {}
    told = {}
    if any(ids.values()):
        try:
            known = load_runs(context, [job_id for job_id in ids.values() if job_id])
        except NotFound:  # AWS Batch may have forgotten some jobs of a run of another machine
            known = []
        told = {each.job_id: each for each in known}
    return [
        GroupWorkers(group, sizes.get(group, 0), job_id, told.get(job_id))
        for group, job_id in ids.items()
    ]


def with_workers(context: "Context", runs: Iterable[FoundRun]) -> list[FoundRun]:
    """These runs, and after each head its workers, without duplicates."""
    seen: dict[str, FoundRun] = {}
    for found in runs:
        seen.setdefault(found.job_id, found)
        for part in find_worker_groups(context, found):
            if part.found is not None:
                seen.setdefault(part.job_id, part.found)
    return list(seen.values())


def member_id(context: "Context", found: FoundRun, group: str) -> str:
    """The job id of the workers of a group, or of the head for the head's group.

    Raises NotFound if the run does not have the group.
    """
    if group == found.tags.get(GROUP_TAG) and not is_worker(found.tags):
        return found.job_id
    ids = worker_ids(context, found)
    if ids.get(group):
        return ids[group]
    if group in ids:
        hint = "Its workers were not submitted: batchml reconcile finds out why."
        raise NotFound("Group", group, [], hint)
    own = found.tags.get(GROUP_TAG, "")
    known = [*([own] if own and not is_worker(found.tags) else ()), *ids]
    hint = "" if known else f"{found.name} has no groups."
    raise NotFound("Group", group, known, hint)


def terminate_all(context: "Context", job_ids: Sequence[str], reason: str) -> None:
    """Terminate runs, with all jobs of group runs.

    Raises the first error of AWS Batch, after all jobs were tried.
    """
    errors: list[BatchmlError] = []
    for job_id in _with_worker_ids(context, job_ids):
        try:
            context.batch.terminate(job_id, reason)
        except BatchmlError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _with_worker_ids(context: "Context", job_ids: Sequence[str]) -> Iterator[str]:
    records = context.history.records(context.env)
    for job_id in job_ids:
        yield job_id
        record = records.get(job_id)
        run = None if record else context.describe([job_id]).get(job_id)
        if record or run:
            yield from filter(None, worker_ids(context, FoundRun(run, record)).values())


def group_bill(context: "Context", job_id: str) -> "tuple[Run, Bill]":
    """The cost of all jobs of a run, and of its job in the queue that it has left.

    Raises NotFound as `bill_of` does.
    """
    from batchml.cost.bill import merge_bills
    from batchml.cost.service import bill_of
    from batchml.model.fallback import MOVED_TAG

    try:
        run, own = bill_of(context, job_id)
    except NotFound:
        hint = describe_parts(context, job_id)
        if not hint:
            raise
        raise NotFound("Run", job_id, [], hint) from None
    found = FoundRun(run, context.history.records(context.env).get(job_id))
    bills = [own]
    for part in (found.tags.get(MOVED_TAG, ""), *worker_ids(context, found).values()):
        try:
            bills += [bill_of(context, part)[1]] if part else []
        except NotFound:  # AWS Batch has forgotten the job, and the history does not have it
            continue
    return (run, merge_bills(job_id, bills)) if len(bills) > 1 else (run, own)


def bill_runs(context: "Context", runs: Sequence[FoundRun]) -> "dict[str, Bill]":
    """Job id -> bill of each run that AWS Batch or the history describes.

    The runs that are single jobs are billed together, in few calls.
    """
    from batchml.cost.service import make_bills, record_costs
    from batchml.model.fallback import MOVED_TAG

    single: dict[str, FoundRun] = {}
    bills: dict[str, Bill] = {}
    for found in runs:
        if found.run is None:
            continue
        if found.cost is not None or MOVED_TAG in found.tags or worker_ids(context, found):
            with suppress(NotFound):  # AWS Batch has forgotten an array, and so its children
                bills[found.job_id] = group_bill(context, found.job_id)[1]
        else:
            single[found.job_id] = found
    described = [each.run for each in single.values() if each.run]
    made = make_bills(context, described)
    records = {job_id: each.record for job_id, each in single.items() if each.record}
    record_costs(context, records, described, made)
    return bills | made


def record_bills(context: "Context", runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs with their costs so far; a run without a known cost is returned as it is."""
    bills = bill_runs(context, [each for each in runs if each.cost is None])
    costs = {job_id: bill.upper_bound for job_id, bill in bills.items() if not bill.is_free}
    return [
        each
        if costs.get(each.job_id) is None
        else FoundRun(each.run, replace(each.record or Record(), cost=costs[each.job_id]))
        for each in runs
    ]


def head_key(found: FoundRun) -> str:
    """The key of the head's run, for workers; empty for any other run."""
    return found.tags[GANG_TAG] if is_worker(found.tags) else ""


def launch_plan(run: "Run | None") -> LaunchPlan | None:
    """How the nodes of a run were started, from its environment variables."""
    try:
        return LaunchPlan.read(run.environment) if run is not None else None
    except ValueError:  # a variable of another program
        return None
