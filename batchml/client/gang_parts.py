"""The jobs of a gang, for whom its head is known: which they are, and how they are."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.errors import NotFound
from batchml.model.group import GANG_TAG, GROUP_TAG, is_worker

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.run import Run
    from batchml.ops.bill import Bill
    from batchml.ops.search import Found
    from batchml.runtime.protocol.launch import Plan

STOPPED_WITH = "The run that it belongs to was stopped"


class Part(Struct, frozen=True):
    """The workers of one group. `found` is None where they were never submitted, or are forgotten.

    `size` is 0 where only the history of this machine knows the gang.
    """

    group: str
    size: int = 0
    job_id: str = ""
    found: "Found | None" = None


def part_ids(place: "Place", found: "Found") -> dict[str, str]:
    """Group -> job id, "" where it has none, of the workers of a gang; of any other run nothing.

    The history of this machine knows them without a call; for another's gang it is one ListJobs
    for each group.
    """
    if GROUP_TAG not in found.tags or is_worker(found.tags):
        return {}
    if found.record is not None and found.record.groups:
        groups = found.record.groups
        wanted = set(groups.values())
        known = {
            each.key: each.job_id for each in place.history.names(place.env) if each.key in wanted
        }
        return {group: known.get(key, "") for group, key in groups.items()}
    plan = plan_of(found.run)
    return {
        each.name: next((job.job_id for job in place.batch.called(each.queue, each.job_name)), "")
        for each in (plan.groups if plan else ())
    }


def parts_of(place: "Place", found: "Found") -> list[Part]:
    """The groups of a gang's workers as they are now, also what AWS Batch has forgotten of them."""
    from batchml.client.finding import recall

    ids = part_ids(place, found)
    plan = plan_of(found.run)
    sizes = {each.name: each.size for each in plan.groups} if plan else {}
    told = {}
    if any(ids.values()):
        try:
            known = recall(place, [job_id for job_id in ids.values() if job_id])
        except NotFound:  # of a gang of another machine AWS forgets parts first
            known = []
        told = {each.job_id: each for each in known}
    return [
        Part(group, sizes.get(group, 0), job_id, told.get(job_id)) for group, job_id in ids.items()
    ]


def with_parts(place: "Place", runs: Iterable["Found"]) -> "list[Found]":
    """These, and behind each head of a gang its workers, each once."""
    seen: dict[str, Found] = {}
    for found in runs:
        seen.setdefault(found.job_id, found)
        for part in parts_of(place, found):
            if part.found is not None:
                seen.setdefault(part.job_id, part.found)
    return list(seen.values())


def part_id(place: "Place", found: "Found", group: str) -> str:
    """The job id of the workers of a group; with "head" or its name, the head's.

    Raises NotFound for a run without such a group.
    """
    if group == found.tags.get(GROUP_TAG) and not is_worker(found.tags):
        return found.job_id
    ids = part_ids(place, found)
    if ids.get(group):
        return ids[group]
    if group in ids:
        hint = "Its workers were not submitted: batchml reconcile finds out why."
        raise NotFound("Group", group, [], hint)
    own = found.tags.get(GROUP_TAG, "")
    known = [*([own] if own and not is_worker(found.tags) else ()), *ids]
    hint = "" if known else f"{found.name} has no groups."
    raise NotFound("Group", group, known, hint)


def stop_all(place: "Place", job_ids: Sequence[str], reason: str) -> None:
    """End runs, of gangs all jobs; a run that was submitted from here costs no look.

    Raises what AWS Batch raises, once every one was tried.
    """
    from batchml.errors import BatchmlError

    errors: list[BatchmlError] = []
    for job_id in _with_ids(place, job_ids):
        try:
            place.batch.terminate(job_id, reason)
        except BatchmlError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _with_ids(place: "Place", job_ids: Sequence[str]) -> Iterator[str]:
    from batchml.ops.search import Found

    records = place.history.remembered(place.env)
    for job_id in job_ids:
        yield job_id
        record = records.get(job_id)
        run = None if record else place.describe([job_id]).get(job_id)
        if record or run:
            yield from filter(None, part_ids(place, Found(run, record)).values())


def gang_bill(place: "Place", job_id: str) -> "tuple[Run, Bill]":
    """What a run has cost: of a gang all of it, and of one that has moved what it was before.

    Raises NotFound as `bill_of` does.
    """
    from batchml.client.costs import bill_of
    from batchml.model.fallback import MOVED_TAG
    from batchml.ops.bill import together
    from batchml.ops.search import Found

    run, own = bill_of(place, job_id)
    found = Found(run, place.history.remembered(place.env).get(job_id))
    bills = [own]
    for part in (found.tags.get(MOVED_TAG, ""), *part_ids(place, found).values()):
        try:
            bills += [bill_of(place, part)[1]] if part else []
        except NotFound:  # forgotten, and not submitted from here
            continue
    return (run, together(job_id, bills)) if len(bills) > 1 else (run, own)


def head_of(found: "Found") -> str:
    """The key of the run that workers belong to; empty for anything else."""
    return found.tags[GANG_TAG] if is_worker(found.tags) else ""


def plan_of(run: "Run | None") -> "Plan | None":
    """What AWS tells of how the nodes of a run were to be started."""
    from batchml.runtime.protocol.launch import Plan

    try:
        return Plan.read(run.environment) if run is not None else None
    except ValueError:  # somebody else's variable
        return None
