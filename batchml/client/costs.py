"""What runs will cost, cost now, and have cost: asks what the pure parts need, in few calls."""

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.hosts import Host, Pool, find_hosts, pools
from batchml.aws.naming import qualified, queue_name
from batchml.aws.pricing import Book, Instances, InstanceType, Price, why_not
from batchml.aws.spot import MAX_AGE, SpotHistory, spot_history
from batchml.errors import BatchmlError, NotFound
from batchml.model.job import JobSpec
from batchml.model.names import dollars, duration
from batchml.model.record import NOT_KNOWN, Record
from batchml.model.run import JobStatus, Run
from batchml.ops.bill import Bill, bill, free_bill, kept_bill, need_of, span, together
from batchml.ops.cost import (
    OWN,
    Candidate,
    Landing,
    Need,
    Quote,
    budget,
    candidates,
    items_of,
    need_of_job,
    needs_of_gang,
    quote,
    share_of,
)
from batchml.ops.rates import Rate, Rates, flat
from batchml.ops.search import as_run
from batchml.ops.spending import Spent, of_bill, of_record

if TYPE_CHECKING:
    from batchml.client.place import Place

HOSTS_KNOWN = 2 * 3_600_000  # ms for which a host that is gone is worth asking about
THIS_MACHINE = "this machine"
DEFAULT_QUEUE = "default"
_REPLACED = re.compile(r"-r[0-9]+$")  # compute environments that replaced another: ops/plan


def quote_of(place: "Place", need: Need, queue: str) -> Quote:
    """What an hour of a run would cost in a queue, named as job.toml does.

    For a queue that batchml.toml describes, no call to AWS Batch. Prices are asked for where they
    are not kept; one that AWS does not say is unknown. Raises what AWS Batch raises for a queue
    that is not described.
    """
    if place.settings.is_local:
        return _local_quote(place, need)
    prices, region = place.prices, place.settings.environment.region
    landings, why = _described(place, queue), ""
    if not landings:
        landings = _landings(place, pools(place.connect()).get(place.queue(queue), ()))
        why = "" if landings else f"the queue {queue} has no compute environments"
    names = [name for each in landings for name in each.pool.types]
    found, missing = candidates(need, landings, prices.instances(region, names))
    if why:
        missing[f"the queue {queue}"] = why
    return quote(need, found, missing, prices.ask(region, items_of(found)))


def quote_of_job(
    place: "Place", spec: JobSpec, queue: str | None = None, children: int = 0
) -> Quote:
    """What an hour of a job costs: of all its nodes, or of head and workers of a gang."""
    named = queue or spec.queue or DEFAULT_QUEUE
    if not spec.groups:
        return quote_of(place, need_of_job(spec, children), named)
    head, *workers = [
        (group, quote_of(place, need, own or named)) for group, own, need in needs_of_gang(spec)
    ]
    return replace(head[1], parts=dict(workers))


def bills(place: "Place", runs: Sequence[Run]) -> dict[str, Bill]:
    """Job id -> what the run has cost until now, of runs as DescribeJobs tells them.

    The children of arrays are described, a hundred a call.
    """
    now = int(place.clock.now() * 1000)
    arrays = {run.job_id: _children(run) for run in runs if run.array_size}
    ids = [child for children in arrays.values() for child in children]
    single = [run for run in runs if not run.array_size]
    single += place.describe(ids).values() if ids else ()
    each = _local(place, single, now) if place.settings.is_local else _aws(place, single, now)
    for run in runs:
        if run.array_size:
            known = [each[child] for child in arrays[run.job_id] if child in each]
            each[run.job_id] = together(run.job_id, known, _forgotten(run, len(known)))
    return {run.job_id: each[run.job_id] for run in runs}


def _children(run: Run) -> list[str]:
    return [f"{run.job_id}:{index}" for index in range(run.array_size)]


def _forgotten(run: Run, known: int) -> int:
    """How many children of an array are missing, once some may have been forgotten.

    Before it has any that ended, they may not have been made yet.
    """
    has_ended = any(JobStatus(state).is_terminal for state in run.children)
    return run.array_size - known if has_ended or run.status.is_terminal else 0


# --- this machine ---------------------------------------------------------------------------


def _local_price(place: "Place") -> Price | None:
    usd = place.settings.environment.usd_per_hour
    if not usd:
        return None
    return Price(Decimal(str(usd)), Decimal(str(usd)), "hour", 0, "", OWN)


def _here(need: Need) -> Candidate:
    """This machine, and the part of it that a run takes: all of it where it asks for more."""
    from batchml.local.ecs import read_machine

    machine = read_machine(with_gpus=need.gpus > 0)
    gpus = len(machine.gpus)
    instance = InstanceType(THIS_MACHINE, machine.vcpus, machine.memory, gpus, "")
    alone = Need(need.vcpus, need.memory_mib, need.gpus)  # nodes share it as well
    return Candidate(instance, share_of(alone, instance) or Decimal(1))


def _local_quote(place: "Place", need: Need) -> Quote:
    price = _local_price(place)
    if price is None:
        return Quote(need, is_free=True)
    here = _here(need)
    return quote(need, [here], {}, Book({here.item: price}))


def _local(place: "Place", runs: Sequence[Run], now: int) -> dict[str, Bill]:
    price = _local_price(place)
    if price is None:
        return {run.job_id: free_bill(run, THIS_MACHINE, now) for run in runs}
    kinds: dict[Need, Candidate] = {}
    found = {}
    for run in runs:
        need = need_of(run)
        if need not in kinds:
            kinds[need] = _here(need)
        kind = kinds[need]
        found[run.job_id] = bill(run, [kind], {}, flat(price, kind.item), now)
    return found


# --- AWS ------------------------------------------------------------------------------------


def _aws(place: "Place", runs: Sequence[Run], now: int) -> dict[str, Bill]:
    """At most two calls to AWS Batch for all runs; then one each for what is not kept."""
    runs = list(runs)
    if not runs:
        return {}
    region, prices = place.settings.environment.region, place.prices
    landings, why = _all_landings(place, {run.queue for run in runs})
    names = [name for each in landings.values() for landing in each for name in landing.pool.types]
    instances = prices.instances(region, dict.fromkeys(names))
    fitting = _fitting(runs, landings, instances)
    kinds = {run.job_id: fitting[run.queue, need_of(run)][0] for run in runs}
    hosts = _hosts(place, runs, kinds, landings, now)
    book = _book(place, kinds.values())
    rates = Rates(book, _spot(place, runs, kinds, hosts, now), now)
    found = {}
    for run in runs:
        nowhere = fitting[run.queue, need_of(run)][1].items()
        reason = why.get(run.queue, "") or next((f"{name}: {each}" for name, each in nowhere), "")
        found[run.job_id] = bill(run, kinds[run.job_id], hosts, rates, now, reason)
    return found


def _all_landings(
    place: "Place", queues: Iterable[str]
) -> tuple[dict[str, list[Landing]], dict[str, str]]:
    """The landings of each queue, as AWS says; what batchml.toml describes where it does not.

    With the reasons why a queue has none.
    """
    refused, there = "", dict[str, tuple[Pool, ...]]()
    try:
        there = pools(place.connect())
    except BatchmlError as error:
        refused = why_not("asking for compute environments", error)
    environment = place.settings.environment
    given = {queue_name(place.env, environment, name): name for name in environment.queues}
    found, why = {}, {}
    for queue in queues:
        found[queue] = _landings(place, there.get(queue, ())) or _described(
            place, given.get(queue, "")
        )
        if not found[queue]:
            why[queue] = refused or f"the queue {queue} is not there any more"
    return found, why


def _described(place: "Place", queue: str) -> list[Landing]:
    """The landings of a queue as batchml.toml describes it; none for any other."""
    environment = place.settings.environment
    if queue not in environment.queues:
        return []
    chosen = [environment.compute[name] for name in environment.queues[queue].compute]
    names = environment.queues[queue].compute
    return [
        Landing(Pool(qualified(place.env, name), each.instance_types, each.spot), each.disk_gib)
        for name, each in zip(names, chosen, strict=True)
    ]


def _landings(place: "Place", found: Iterable[Pool]) -> list[Landing]:
    """Pools with the disks that batchml.toml describes for them."""
    compute = place.settings.environment.compute
    disks = {qualified(place.env, name): each.disk_gib for name, each in compute.items()}
    return [Landing(pool, disks.get(_REPLACED.sub("", pool.name), 0)) for pool in found]


def _fitting(
    runs: Iterable[Run], landings: Mapping[str, Sequence[Landing]], instances: Instances
) -> dict[tuple[str, Need], tuple[list[Candidate], dict[str, str]]]:
    """What each kind of run may have been on, and the types of which nothing is known: worked out
    once for the thousand children of an array."""
    wanted = {(run.queue, need_of(run)) for run in runs}
    return {
        (queue, need): candidates(need, landings.get(queue, ()), instances)
        for queue, need in wanted
    }


def _hosts(
    place: "Place",
    runs: Iterable[Run],
    kinds: Mapping[str, Sequence[Candidate]],
    landings: Mapping[str, Sequence[Landing]],
    now: int,
) -> dict[str, Host]:
    """What AWS still tells of hosts, for the runs that may have been on several kinds or zones."""
    ids, where = set(), dict[str, Pool]()
    for run in runs:
        chosen = kinds[run.job_id]
        if len(chosen) < 2 and not any(each.spot for each in chosen):
            continue
        for attempt in run.attempts:
            if attempt.host and (attempt.stopped_at or now) > now - HOSTS_KNOWN:
                ids.add(attempt.host)
                where |= {each.pool.name: each.pool for each in landings.get(run.queue, ())}
    return find_hosts(place.connect(), ids, list(where.values())) if ids else {}


def _book(place: "Place", kinds: Iterable[Sequence[Candidate]]) -> Book:
    """The list prices of what is on demand, and of disks."""
    items = items_of(each for found in kinds for each in found)
    wanted = [item for item in items if not item.startswith("spot:")]
    return place.prices.ask(place.settings.environment.region, wanted)


def _spot(
    place: "Place",
    runs: Iterable[Run],
    kinds: Mapping[str, Sequence[Candidate]],
    hosts: Mapping[str, Host],
    now: int,
) -> SpotHistory:
    """The spot prices of the whole span of all runs that may have been on spot hosts."""
    names, zones, spans = set[str](), set[str](), []
    for run in runs:
        spot = {each.instance.name for each in kinds[run.job_id] if each.spot}
        found = span(run, now) if spot else None
        if found is not None:
            names |= spot
            spans.append(found)
            zones |= {hosts.get(each.host, Host()).zone for each in run.attempts}
    if not spans:
        return SpotHistory()
    start = max(min(start for start, _ in spans), now - MAX_AGE)
    stop = max(start, *(stop for _, stop in spans))
    # One host whose zone is not known asks for all zones.
    return spot_history(place.connect(), names, () if "" in zones else zones, start, stop)


# --- many runs ------------------------------------------------------------------------------


def spending(place: "Place", since: int, queue: str = "") -> tuple[list[Spent], tuple[Rate, ...]]:
    """What the runs of an environment since a time (ms) have cost, and the prices behind it.

    Those that AWS Batch knows are asked of it; older ones are of this user's history. `queue` is
    its name in AWS.
    """
    listed = [
        run.job_id
        for each in ([queue] if queue else place.batch.queues())
        for run in place.batch.list_recent(each, since)
    ]
    live = place.describe(listed) if listed else {}
    records = {
        record.job_id: record
        for record in place.history.newest_first(place.env)
        if record.at >= since and queue in ("", record.queue)
    }
    old = [record for job_id, record in records.items() if job_id not in live]
    kept = [of_record(each, each.cost) for each in old if each.cost is not None]
    forgotten = [run for each in old if each.cost is None for run in [as_run(each)] if run]
    runs = [*live.values(), *(run for run in forgotten if not run.array_size)]
    made = bills(place, runs)
    remember(place, records, live.values(), made)
    spent = [of_bill(run, made[run.job_id]) for run in runs]
    rates = tuple(dict.fromkeys(rate for each in made.values() for rate in each.rates))
    return sorted([*kept, *spent], key=lambda each: -each.at), rates


def bill_of(place: "Place", job_id: str) -> tuple[Run, Bill]:
    """The bill of one run, also of one that AWS Batch has forgotten.

    Raises NotFound where neither AWS nor the history knows it, or its times.
    """
    record = place.history.remembered(place.env).get(job_id)
    run = place.describe([job_id]).get(job_id)
    if run is None:
        run = as_run(record)
        if run is not None and record is not None and record.cost is not None:
            return run, kept_bill(run, record.cost)
        if run is None or run.array_size:
            from batchml.client.finding import about_part

            hint = f"It is {NOT_KNOWN}, and its cost is not in the history of this machine."
            raise NotFound("Run", job_id, [], about_part(place, job_id) or hint)
    bill = bills(place, [run])[job_id]
    if record is not None:
        remember(place, {job_id: record}, [run], {job_id: bill})
    return run, bill


def remember(
    place: "Place",
    records: Mapping[str, Record],
    runs: Iterable[Run],
    made: Mapping[str, Bill],
) -> None:
    """Keep the cost of runs that have ended: hosts and runs are soon forgotten by AWS."""
    for run in runs:
        record, bill = records.get(run.job_id), made[run.job_id]
        if record is None or record.cost is not None or bill.is_free or bill.figure is None:
            continue
        place.history.ended(run, cost=bill.figure)  # which keeps nothing of a run that goes on


# --- budgets --------------------------------------------------------------------------------


def budget_of(
    place: "Place", spec: JobSpec, usd: float, children: int = 0
) -> tuple[dict[str, str], str]:
    """What `--max-cost` comes to: variables of the run, and a sentence for the user.

    Raises UsageError when the price of a host that it may land on is unknown.
    """
    limit = budget(quote_of_job(place, spec, children=children), usd)
    if not limit.seconds:
        return {}, "--max-cost limits nothing: this machine has no price (docs/cost.md)."
    who = f"each of {limit.copies} containers" if limit.copies > 1 else "the run"
    return limit.variables, (
        f"--max-cost ${usd:g}: {who} may run {duration(limit.seconds)}, all attempts together, "
        f"at {dollars(limit.price)} an hour; then it saves and stops."
    )
