"""Make quotes, bills and budgets: ask AWS for hosts and prices in few calls, then compute."""

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.hosts import HostPool, RunHost, fetch_host_pools, find_hosts
from batchml.aws.naming import qualified, queue_name
from batchml.aws.pricing.prices import (
    InstanceType,
    InstanceTypes,
    Price,
    PriceTable,
    describe_failure,
)
from batchml.aws.pricing.spot import MAX_AGE, SpotHistory, fetch_spot_history
from batchml.cost.bill import (
    Bill,
    Rate,
    Rates,
    RunCost,
    cost_of_bill,
    cost_of_record,
    fixed_rates,
    free_bill,
    kept_bill,
    make_bill,
    merge_bills,
    need_of,
    time_span,
)
from batchml.cost.quote import (
    OWN_PRICE,
    Candidate,
    ComputeChoice,
    ContainerNeed,
    Quote,
    find_candidates,
    make_budget,
    make_quote,
    need_of_job,
    needs_of_group_run,
    price_items,
    share_of,
)
from batchml.errors import BatchmlError, NotFound
from batchml.model.job import JobSpec
from batchml.model.names import dollars, duration
from batchml.model.run import NOT_KNOWN, JobStatus, Record, Run, run_from_record

if TYPE_CHECKING:
    from batchml.context import Context

HOSTS_KNOWN = 2 * 3_600_000  # ms after its end in which EC2 may still describe a host
THIS_MACHINE = "this machine"
DEFAULT_QUEUE = "default"
_REPLACED = re.compile(r"-r[0-9]+$")  # suffix of a compute environment that replaced another


def quote_of(context: "Context", need: ContainerNeed, queue: str) -> Quote:
    """Quote a run in a queue, whose name is that of job.toml.

    A queue that batchml.toml describes needs no call to AWS Batch; for any other, AWS Batch's
    errors are raised. Prices that are not cached are asked for; unknown ones are in `unknown`.
    """
    if context.settings.is_local:
        return _local_quote(context, need)
    prices, region = context.prices, context.settings.environment.region
    choices, why = _choices_in_file(context, queue), ""
    if not choices:
        choices = _with_disks(
            context, fetch_host_pools(context.connect()).get(context.queue(queue), ())
        )
        why = "" if choices else f"the queue {queue} has no compute environments"
    names = [name for each in choices for name in each.pool.types]
    found, missing = find_candidates(need, choices, prices.instances(region, names))
    if why:
        missing[f"the queue {queue}"] = why
    return make_quote(need, found, missing, prices.ask(region, price_items(found)))


def quote_of_job(
    context: "Context", spec: JobSpec, queue: str | None = None, children: int = 0
) -> Quote:
    """Quote a run of a job: all its nodes, or the head and workers of a group run."""
    named = queue or spec.queue or DEFAULT_QUEUE
    if not spec.groups:
        return quote_of(context, need_of_job(spec, children), named)
    head, *workers = [
        (group, quote_of(context, need, own or named))
        for group, own, need in needs_of_group_run(spec)
    ]
    return replace(head[1], parts=dict(workers))


def make_bills(context: "Context", runs: Sequence[Run]) -> dict[str, Bill]:
    """Bill runs as DescribeJobs describes them: job id -> bill.

    The children of arrays are described too, a hundred a call.
    """
    now = int(context.clock.now() * 1000)
    arrays = {run.job_id: _children(run) for run in runs if run.array_size}
    ids = [child for children in arrays.values() for child in children]
    single = [run for run in runs if not run.array_size]
    single += context.describe(ids).values() if ids else ()
    each = _local(context, single, now) if context.settings.is_local else _aws(context, single, now)
    for run in runs:
        if run.array_size:
            known = [each[child] for child in arrays[run.job_id] if child in each]
            each[run.job_id] = merge_bills(run.job_id, known, _forgotten(run, len(known)))
    return {run.job_id: each[run.job_id] for run in runs}


def _children(run: Run) -> list[str]:
    return [f"{run.job_id}:{index}" for index in range(run.array_size)]


def _forgotten(run: Run, known: int) -> int:
    """The number of an array's children that AWS Batch has forgotten.

    Until a child has ended, missing ones may not exist yet.
    """
    has_ended = any(JobStatus(state).is_terminal for state in run.children)
    return run.array_size - known if has_ended or run.status.is_terminal else 0


# --- this machine ---------------------------------------------------------------------------


def _local_price(context: "Context") -> Price | None:
    usd = context.settings.environment.usd_per_hour
    if not usd:
        return None
    return Price(Decimal(str(usd)), Decimal(str(usd)), "hour", 0, "", OWN_PRICE)


def _this_machine(need: ContainerNeed) -> Candidate:
    """This machine, and the share of it that a run takes: all of it if it requests more."""
    from batchml.local.machine import read_machine

    machine = read_machine(with_gpus=need.gpus > 0)
    gpus = len(machine.gpus)
    instance = InstanceType(THIS_MACHINE, machine.vcpus, machine.memory, gpus, "")
    alone = ContainerNeed(need.vcpus, need.memory_mib, need.gpus)  # nodes share the machine too
    return Candidate(instance, share_of(alone, instance) or Decimal(1))


def _local_quote(context: "Context", need: ContainerNeed) -> Quote:
    price = _local_price(context)
    if price is None:
        return Quote(need, is_free=True)
    here = _this_machine(need)
    return make_quote(need, [here], {}, PriceTable({here.item: price}))


def _local(context: "Context", runs: Sequence[Run], now: int) -> dict[str, Bill]:
    price = _local_price(context)
    if price is None:
        return {run.job_id: free_bill(run, THIS_MACHINE, now) for run in runs}
    kinds: dict[ContainerNeed, Candidate] = {}
    found = {}
    for run in runs:
        need = need_of(run)
        if need not in kinds:
            kinds[need] = _this_machine(need)
        kind = kinds[need]
        found[run.job_id] = make_bill(run, [kind], {}, fixed_rates(price, kind.item), now)
    return found


# --- AWS ------------------------------------------------------------------------------------


def _aws(context: "Context", runs: Sequence[Run], now: int) -> dict[str, Bill]:
    """Bill runs in AWS: at most two calls to AWS Batch, then one for each uncached price."""
    runs = list(runs)
    if not runs:
        return {}
    region, prices = context.settings.environment.region, context.prices
    choices, why = _choices_of_queues(context, {run.queue for run in runs})
    names = [name for each in choices.values() for choice in each for name in choice.pool.types]
    instances = prices.instances(region, dict.fromkeys(names))
    fitting = _candidates_of_runs(runs, choices, instances)
    kinds = {run.job_id: fitting[run.queue, need_of(run)][0] for run in runs}
    hosts = _hosts(context, runs, kinds, choices, now)
    price_table = _list_prices(context, kinds.values())
    rates = Rates(price_table, _spot(context, runs, kinds, hosts, now), now)
    found = {}
    for run in runs:
        nowhere = fitting[run.queue, need_of(run)][1].items()
        reason = why.get(run.queue, "") or next((f"{name}: {each}" for name, each in nowhere), "")
        found[run.job_id] = make_bill(run, kinds[run.job_id], hosts, rates, now, reason)
    return found


def _choices_of_queues(
    context: "Context", queues: Iterable[str]
) -> tuple[dict[str, list[ComputeChoice]], dict[str, str]]:
    """The compute environments of each queue, from AWS or else from batchml.toml.

    And for each queue without any, the reason.
    """
    refused, there = "", dict[str, tuple[HostPool, ...]]()
    try:
        there = fetch_host_pools(context.connect())
    except BatchmlError as error:
        refused = describe_failure("asking for compute environments", error)
    environment = context.settings.environment
    given = {queue_name(context.env, environment, name): name for name in environment.queues}
    found, why = {}, {}
    for queue in queues:
        found[queue] = _with_disks(context, there.get(queue, ())) or _choices_in_file(
            context, given.get(queue, "")
        )
        if not found[queue]:
            why[queue] = refused or f"the queue {queue} is not there any more"
    return found, why


def _choices_in_file(context: "Context", queue: str) -> list[ComputeChoice]:
    """The compute environments of a queue as batchml.toml describes it; none for another queue."""
    environment = context.settings.environment
    if queue not in environment.queues:
        return []
    chosen = [environment.compute[name] for name in environment.queues[queue].compute]
    names = environment.queues[queue].compute
    return [
        ComputeChoice(
            HostPool(qualified(context.env, name), each.instance_types, each.spot), each.disk_gib
        )
        for name, each in zip(names, chosen, strict=True)
    ]


def _with_disks(context: "Context", found: Iterable[HostPool]) -> list[ComputeChoice]:
    """Compute environments with the disk sizes that batchml.toml describes."""
    compute = context.settings.environment.compute
    disks = {qualified(context.env, name): each.disk_gib for name, each in compute.items()}
    return [ComputeChoice(pool, disks.get(_REPLACED.sub("", pool.name), 0)) for pool in found]


def _candidates_of_runs(
    runs: Iterable[Run], choices: Mapping[str, Sequence[ComputeChoice]], instances: InstanceTypes
) -> dict[tuple[str, ContainerNeed], tuple[list[Candidate], dict[str, str]]]:
    """The candidates of each queue and request, and the unknown types with the reasons.

    Computed once for the thousand children of an array.
    """
    wanted = {(run.queue, need_of(run)) for run in runs}
    return {
        (queue, need): find_candidates(need, choices.get(queue, ()), instances)
        for queue, need in wanted
    }


def _hosts(
    context: "Context",
    runs: Iterable[Run],
    kinds: Mapping[str, Sequence[Candidate]],
    choices: Mapping[str, Sequence[ComputeChoice]],
    now: int,
) -> dict[str, RunHost]:
    """Describe the hosts of runs that may have had several instance types or zones."""
    ids, where = set(), dict[str, HostPool]()
    for run in runs:
        chosen = kinds[run.job_id]
        if len(chosen) < 2 and not any(each.spot for each in chosen):
            continue
        for attempt in run.attempts:
            if attempt.host and (attempt.stopped_at or now) > now - HOSTS_KNOWN:
                ids.add(attempt.host)
                where |= {each.pool.name: each.pool for each in choices.get(run.queue, ())}
    return find_hosts(context.connect(), ids, list(where.values())) if ids else {}


def _list_prices(context: "Context", kinds: Iterable[Sequence[Candidate]]) -> PriceTable:
    """The list prices of on-demand hosts and of disks."""
    items = price_items(each for found in kinds for each in found)
    wanted = [item for item in items if not item.startswith("spot:")]
    return context.prices.ask(context.settings.environment.region, wanted)


def _spot(
    context: "Context",
    runs: Iterable[Run],
    kinds: Mapping[str, Sequence[Candidate]],
    hosts: Mapping[str, RunHost],
    now: int,
) -> SpotHistory:
    """The spot prices over the time span of all runs that may have had spot hosts."""
    names, zones, spans = set[str](), set[str](), []
    for run in runs:
        spot = {each.instance.name for each in kinds[run.job_id] if each.spot}
        found = time_span(run, now) if spot else None
        if found is not None:
            names |= spot
            spans.append(found)
            zones |= {hosts.get(each.host, RunHost()).zone for each in run.attempts}
    if not spans:
        return SpotHistory()
    start = max(min(start for start, _ in spans), now - MAX_AGE)
    stop = max(start, *(stop for _, stop in spans))
    # A host in an unknown zone needs the prices of all zones.
    return fetch_spot_history(context.connect(), names, () if "" in zones else zones, start, stop)


# --- many runs ------------------------------------------------------------------------------


def list_spending(
    context: "Context", since: int, queue: str = ""
) -> tuple[list[RunCost], tuple[Rate, ...]]:
    """The cost of an environment's runs since a time (ms), and the prices that it rests on.

    Runs come from AWS Batch; those that it has forgotten from this user's history. `queue`: its
    name in AWS.
    """
    listed = [
        run.job_id
        for each in ([queue] if queue else context.batch.queues())
        for run in context.batch.list_recent(each, since)
    ]
    live = context.describe(listed) if listed else {}
    records = {
        record.job_id: record
        for record in context.history.newest_first(context.env)
        if record.at >= since and queue in ("", record.queue)
    }
    old = [record for job_id, record in records.items() if job_id not in live]
    kept = [cost_of_record(each, each.cost) for each in old if each.cost is not None]
    forgotten = [run for each in old if each.cost is None for run in [run_from_record(each)] if run]
    runs = [*live.values(), *(run for run in forgotten if not run.array_size)]
    made = make_bills(context, runs)
    remember(context, records, live.values(), made)
    spent = [cost_of_bill(run, made[run.job_id]) for run in runs]
    rates = tuple(dict.fromkeys(rate for each in made.values() for rate in each.rates))
    return sorted([*kept, *spent], key=lambda each: -each.at), rates


def bill_of(context: "Context", job_id: str) -> tuple[Run, Bill]:
    """The bill of one run, even if AWS Batch has forgotten it.

    Raises NotFound if neither AWS Batch nor the history knows the run or its times.
    """
    record = context.history.records(context.env).get(job_id)
    run = context.describe([job_id]).get(job_id)
    if run is None:
        run = run_from_record(record)
        if run is not None and record is not None and record.cost is not None:
            return run, kept_bill(run, record.cost)
        if run is None or run.array_size:
            hint = f"It is {NOT_KNOWN}, and its cost is not in the history of this machine."
            raise NotFound("Run", job_id, [], hint)
    bill = make_bills(context, [run])[job_id]
    if record is not None:
        remember(context, {job_id: record}, [run], {job_id: bill})
    return run, bill


def remember(
    context: "Context",
    records: Mapping[str, Record],
    runs: Iterable[Run],
    made: Mapping[str, Bill],
) -> None:
    """Write the cost of ended runs into the history, because AWS soon forgets hosts and runs."""
    for run in runs:
        record, bill = records.get(run.job_id), made[run.job_id]
        if record is None or record.cost is not None or bill.is_free or bill.figure is None:
            continue
        context.history.add_end(run, cost=bill.figure)  # it ignores runs that have not ended


# --- budgets --------------------------------------------------------------------------------


def limit_cost(
    context: "Context", spec: JobSpec, usd: float, children: int = 0
) -> tuple[dict[str, str], str]:
    """Convert `--max-cost` into environment variables of the run, and a sentence for the user.

    Raises UsageError if the price of a candidate is unknown.
    """
    limit = make_budget(quote_of_job(context, spec, children=children), usd)
    if not limit.seconds:
        return {}, "--max-cost has no effect: this machine has no price (docs/cost.md)."
    who = f"each of {limit.copies} containers" if limit.copies > 1 else "the run"
    return limit.variables, (
        f"--max-cost ${usd:g}: {who} may run {duration(limit.seconds)}, all attempts together, "
        f"at {dollars(limit.price)} an hour; then it saves and stops."
    )
