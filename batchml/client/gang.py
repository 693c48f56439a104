"""A job with `[[groups]]`: the requests of its jobs, and what is kept of each."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchml.aws.batch.requests import Travel
from batchml.errors import ConfigError
from batchml.model.group import GROUP_TAG, Member, members
from batchml.model.names import new_key, to_name

if TYPE_CHECKING:
    from batchml.aws.batch.requests import Submission
    from batchml.aws.naming import Platform
    from batchml.client.luggage import Depot
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.client.submission import Prepared, Tell
    from batchml.model.job import JobSpec
    from batchml.model.record import Record
    from batchml.ops.gang import Intent
    from batchml.ops.ratelimit import Bucket

DEFAULT_QUEUE = "default"

Request = Callable[["JobSpec", Travel], "tuple[Submission, str]"]  # and the image


def split(
    place: "Place",
    order: "Order",
    spec: "JobSpec",
    travel: Travel,
    depot: "Depot",
    platform: "Platform",
    random: Callable[[int], bytes] = os.urandom,
) -> list[tuple[Member, Travel]]:
    """The jobs of a job with groups, the head first, and what each takes along.

    `travel` is the head's. Raises ConfigError where its jobs could not find each other.
    """
    if order.array is not None:
        raise ConfigError(spec.name, ["--array: a job with groups cannot be an array."])
    rendezvous = depot.store(travel.key)
    if not (place.settings.is_local or rendezvous or platform.workspace):
        raise ConfigError(
            spec.name,
            [
                f"groups: head and workers find each other in the bucket or the workspace of "
                f"{place.env}, and it has neither. Make them: batchml setup --env {place.env}."
            ],
        )
    keys = [travel.key, *(new_key(random) for _ in spec.groups[1:])]
    found = members(
        spec,
        keys,
        travel.token,
        queue=lambda name: place.queue(name or DEFAULT_QUEUE),
        rendezvous=rendezvous,
    )
    return [(member, _travel(travel, member, depot)) for member in found]


def _travel(travel: Travel, member: Member, depot: "Depot") -> Travel:
    return replace(
        travel,
        key=member.key,
        store=depot.store(member.key),
        env={**travel.env, **member.env},
        tags={**travel.tags, **member.tags, "batchml:key": member.key},
        array=member.array,
    )


def with_workers(
    head: "Record", workers: "list[tuple[Member, Travel]]", make: Request
) -> "tuple[Record, list[Intent]]":
    """The record of a gang's head, which knows the other jobs, and the intents of these."""
    groups = {member.group: member.key for member, _ in workers}
    intents = [_intent(head, member, travel, make) for member, travel in workers]
    return replace(head, groups=groups), intents


def _intent(head: "Record", member: Member, travel: Travel, make: Request) -> "Intent":
    from batchml.ops.gang import Intent

    requests, image = make(member.spec, travel)
    resources = member.spec.resources
    record = replace(
        head,
        gang=head.key,
        key=member.key,
        name=to_name(member.spec.name),
        job_name=requests.submit["jobName"],
        queue=requests.submit["jobQueue"],
        tags=travel.tags,
        image=image,
        vcpus=resources.vcpus,
        memory_mib=resources.memory_mib,
        gpus=resources.gpus,
        array_size=member.array or 0,
        patterns={},
        max_cost=None,
        spec={},  # the head's says it all
    )
    return Intent(requests, record)


def shown_workers(workers: "Sequence[Intent]") -> dict[str, Any]:
    """What `--dry-run` prints of the other jobs of a gang: group -> requests."""
    return {
        each.record.tags[GROUP_TAG]: {
            "RegisterJobDefinition": each.requests.register,
            "SubmitJob": each.requests.submit,
        }
        for each in workers
    }


def send_gang(
    place: "Place", prepared: "Prepared", record: "Record", bucket: "Bucket | None", tell: "Tell"
) -> str:
    """Submit the jobs of a gang; the head's id. `record` is the head's, with the time."""
    from batchml.client.luggage import put
    from batchml.client.submission import own_share
    from batchml.ops.gang import Intent, submit_gang

    for each in prepared.workers:
        if each.requests.document is not None:
            put(place, prepared.depot, None, each.requests.document, tell)
    workers = [
        Intent(each.requests, replace(each.record, at=record.at)) for each in prepared.workers
    ]
    return submit_gang(
        place.batch,
        Intent(prepared.requests, record),
        workers,
        place.history,
        clock=place.clock,
        bucket=bucket,
        share=own_share(),
        tell=tell,
    )
