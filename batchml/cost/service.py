"""Make quotes, bills and budgets: ask AWS for hosts and prices in few calls, then compute."""

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.hosts import HostPool, RunHost, fetch_host_pools, find_hosts
from batchml.aws.pricing.prices import (
    InstanceType,
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
    bill_from_history,
    cost_of_bill,
    cost_of_record,
    fixed_rates,
    free_bill,
    make_bill,
    merge_bills,
    need_of,
    time_span,
)
from batchml.cost.quote import (
    LOCAL_PRICE,
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
from batchml.jobs.gpus import resolve_gpus
from batchml.jobs.neurons import take_whole_hosts
from batchml.model.job import JobSpec
from batchml.model.names import dollars, duration
from batchml.model.run import NOT_KNOWN, JobStatus, Record, Run, run_from_record

if TYPE_CHECKING:
    from batchml.context import Context

HOST_DESCRIBED = 2 * 3_600_000  # ms after an attempt in which EC2 may still describe its host
THIS_MACHINE = "this machine"
# The suffix of a compute environment with which `setup` replaced another: `gpu-r2`.
_REPLACED = r"-r[0-9]+$"


def quote_of(context: "Context", need: ContainerNeed, queue: str) -> Quote:
    """Quote a run in a queue. `queue`: its name in job.toml; "" if it names none.

    AWS is asked only for prices that are not cached, and for the compute environments of a queue
    that batchml.toml does not describe; then AWS Batch's errors are raised. Prices that stay
    unknown are in `Quote.unknown`.
    """
    if context.settings.is_local:
        return _local_quote(context, need)
    prices, region = context.prices, context.settings.environment.region
    queue = context.choose_queue(queue, need.gpus)
    choices, why = _choices_in_file(context, queue), ""
    if not choices:
        choices = _with_disks(
            context, fetch_host_pools(context.connect()).get(context.queue(queue), ())
        )
        why = "" if choices else f"the queue {queue} has no compute environments"
    names = [name for each in choices for name in each.pool.types]
    candidates, missing = find_candidates(need, choices, prices.instances(region, names))
    if why:
        missing[f"the queue {queue}"] = why
    return make_quote(need, candidates, missing, prices.ask(region, price_items(candidates)))


def quote_of_job(
    context: "Context", spec: JobSpec, queue: str | None = None, children: int = 0
) -> Quote:
    """Quote a run of a job: all its nodes, or the head and workers of a group run.

    `children`: the size of the array; 0 without one.
    """
    queue = queue or spec.queue
    spec = resolve_gpus(context, replace(spec, queue=queue), None, None, [])
    spec = take_whole_hosts(context, spec, None, [])
    queue = spec.queue
    if not spec.groups:
        return quote_of(context, need_of_job(spec, children), queue)
    head, *workers = [
        (group, quote_of(context, need, own_queue or queue))
        for group, own_queue, need in needs_of_group_run(spec)
    ]
    return replace(head[1], parts=dict(workers))


def make_bills(context: "Context", runs: Sequence[Run]) -> dict[str, Bill]:
    """Bill runs that DescribeJobs described: job id -> bill.

    This describes the children of arrays, by a call for each hundred.
    """
    now = int(context.clock.now() * 1000)
    arrays = {
        run.job_id: [f"{run.job_id}:{index}" for index in range(run.array_size)]
        for run in runs
        if run.array_size
    }
    ids = [child for children in arrays.values() for child in children]
    single = [run for run in runs if not run.array_size]
    single += context.describe(ids).values() if ids else ()
    bill_runs = _bill_local_runs if context.settings.is_local else _bill_aws_runs
    bills = bill_runs(context, single, now)
    for run in runs:
        if run.array_size:
            known = [bills[child] for child in arrays[run.job_id] if child in bills]
            bills[run.job_id] = merge_bills(run.job_id, known, _count_forgotten(run, len(known)))
    return {run.job_id: bills[run.job_id] for run in runs}


def _count_forgotten(run: Run, known: int) -> int:
    """The number of an array's children that AWS Batch has forgotten.

    Before any child has ended, a missing child may not exist yet.
    """
    has_ended = any(JobStatus(state).is_terminal for state in run.children)
    return run.array_size - known if has_ended or run.status.is_terminal else 0


# --- this machine ---------------------------------------------------------------------------


def is_free(context: "Context") -> bool:
    """Whether runs cost nothing: on this machine, if batchml.toml gives it no price."""
    return context.settings.is_local and not context.settings.environment.usd_per_hour


def _local_price(context: "Context") -> Price | None:
    usd = context.settings.environment.usd_per_hour
    if not usd:
        return None
    return Price(Decimal(str(usd)), Decimal(str(usd)), "hour", 0, "", LOCAL_PRICE)


def _machine_candidate(need: ContainerNeed) -> Candidate:
    """This machine, and the share of it that a run takes: the whole machine if it requests more."""
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
    machine = _machine_candidate(need)
    return make_quote(need, [machine], {}, PriceTable({machine.item: price}))


def _bill_local_runs(context: "Context", runs: Sequence[Run], now: int) -> dict[str, Bill]:
    price = _local_price(context)
    if price is None:
        return {run.job_id: free_bill(run, THIS_MACHINE, now) for run in runs}
    machines = {need: _machine_candidate(need) for need in {need_of(run) for run in runs}}
    bills = {}
    for run in runs:
        machine = machines[need_of(run)]
        bills[run.job_id] = make_bill(run, [machine], {}, fixed_rates(price, machine.item), now)
    return bills


# --- AWS ------------------------------------------------------------------------------------


def _bill_aws_runs(context: "Context", runs: Sequence[Run], now: int) -> dict[str, Bill]:
    """Bill runs in AWS: at most two calls to AWS Batch, then one for each uncached price."""
    if not runs:
        return {}
    region, prices = context.settings.environment.region, context.prices
    choices, why = _choices_of_queues(context, {run.queue for run in runs})
    names = [name for each in choices.values() for choice in each for name in choice.pool.types]
    instances = prices.instances(region, dict.fromkeys(names))
    fitting = {  # once for the thousand children of an array
        (queue, need): find_candidates(need, choices.get(queue, ()), instances)
        for queue, need in {(run.queue, need_of(run)) for run in runs}
    }
    candidates = {run.job_id: fitting[run.queue, need_of(run)][0] for run in runs}
    hosts = _hosts(context, runs, candidates, choices, now)
    price_table = _list_prices(context, candidates.values())
    rates = Rates(price_table, _spot_prices(context, runs, candidates, hosts, now), now)
    bills = {}
    for run in runs:
        missing = fitting[run.queue, need_of(run)][1].items()
        reason = why.get(run.queue, "") or next((f"{name}: {each}" for name, each in missing), "")
        bills[run.job_id] = make_bill(run, candidates[run.job_id], hosts, rates, now, reason)
    return bills


def _choices_of_queues(
    context: "Context", queues: Iterable[str]
) -> tuple[dict[str, list[ComputeChoice]], dict[str, str]]:
    """The compute environments of each queue, from AWS or else from batchml.toml.

    Also returns the reason for each queue without a compute environment.
    """
    refused, pools = "", dict[str, tuple[HostPool, ...]]()
    try:
        pools = fetch_host_pools(context.connect())
    except BatchmlError as error:
        refused = describe_failure("asking for compute environments", error)
    environment = context.settings.environment
    names = {context.qualified(name): name for name in environment.queues}
    choices, why = {}, {}
    for queue in queues:
        choices[queue] = _with_disks(context, pools.get(queue, ())) or _choices_in_file(
            context, names.get(queue, "")
        )
        if not choices[queue]:
            why[queue] = refused or f"the queue {queue} does not exist any more"
    return choices, why


def _choices_in_file(context: "Context", queue: str) -> list[ComputeChoice]:
    """The compute environments of a queue in batchml.toml; none if the file lacks the queue."""
    environment = context.settings.environment
    names = environment.queues[queue].compute if queue in environment.queues else ()
    return [
        ComputeChoice(
            HostPool(context.qualified(name), each.instance_types, each.spot), each.disk_gib
        )
        for name in names
        for each in [environment.compute[name]]
    ]


def _with_disks(context: "Context", pools: Iterable[HostPool]) -> list[ComputeChoice]:
    """Compute environments with the disk sizes that batchml.toml describes."""
    compute = context.settings.environment.compute
    disks = {context.qualified(name): each.disk_gib for name, each in compute.items()}
    return [ComputeChoice(pool, disks.get(re.sub(_REPLACED, "", pool.name), 0)) for pool in pools]


def _hosts(
    context: "Context",
    runs: Iterable[Run],
    candidates: Mapping[str, Sequence[Candidate]],
    choices: Mapping[str, Sequence[ComputeChoice]],
    now: int,
) -> dict[str, RunHost]:
    """Describe the hosts of runs that may have had several instance types or zones."""
    ids, pools = set(), dict[str, HostPool]()
    for run in runs:
        of_run = candidates[run.job_id]
        if len(of_run) < 2 and not any(each.spot for each in of_run):
            continue
        for attempt in run.attempts:
            if attempt.host and (attempt.stopped_at or now) > now - HOST_DESCRIBED:
                ids.add(attempt.host)
                pools |= {each.pool.name: each.pool for each in choices.get(run.queue, ())}
    return find_hosts(context.connect(), ids, list(pools.values())) if ids else {}


def _list_prices(context: "Context", candidates: Iterable[Sequence[Candidate]]) -> PriceTable:
    """The list prices of on-demand hosts and of disks."""
    items = price_items([each for of_run in candidates for each in of_run])
    listed = [item for item in items if not item.startswith("spot:")]
    return context.prices.ask(context.settings.environment.region, listed)


def _spot_prices(
    context: "Context",
    runs: Iterable[Run],
    candidates: Mapping[str, Sequence[Candidate]],
    hosts: Mapping[str, RunHost],
    now: int,
) -> SpotHistory:
    """The spot prices over the time span of all runs that may have had spot hosts."""
    names, zones, spans = set[str](), set[str](), []
    for run in runs:
        spot = {each.instance.name for each in candidates[run.job_id] if each.spot}
        span = time_span(run, now) if spot else None
        if span is not None:
            names |= spot
            spans.append(span)
            zones |= {hosts.get(each.host, RunHost()).zone for each in run.attempts}
    if not spans:
        return SpotHistory()
    start = max(min(start for start, _ in spans), now - MAX_AGE)
    stop = max(start, *(stop for _, stop in spans))
    # A host in an unknown zone needs the prices of all zones.
    return fetch_spot_history(context.connect(), names, () if "" in zones else zones, start, stop)


# --- many runs ------------------------------------------------------------------------------


def list_spending(
    context: "Context", since: int, queue: str = "", project: str = ""
) -> tuple[list[RunCost], tuple[Rate, ...]]:
    """The cost of an environment's runs since a time (ms), and the prices that were used.

    Runs come from AWS Batch; runs that it has forgotten come from this user's history. `queue`: its
    name in AWS; all queues unless given. `project`: its identity; all projects unless given.
    """
    recorded: dict[str, RunCost] = {}
    records: dict[str, Record] = {}  # of which the cost is not known
    elsewhere = set[str]()
    for record in context.history.since(context.env, since):
        if queue not in ("", record.queue):
            continue
        if project and record.project not in ("", project):
            elsewhere.add(record.job_id)
        if project not in ("", record.project):
            continue
        if record.cost is None:
            records[record.job_id] = record
        else:
            recorded[record.job_id] = cost_of_record(record, record.cost)
    listed = [
        run.job_id
        for each in ([queue] if queue else context.batch.queues())
        for run in context.batch.list_recent(each, since)
        if run.job_id not in elsewhere
    ]
    live = context.describe(listed) if listed else {}
    if project:
        live = {job_id: run for job_id, run in live.items() if run.project == project}
    kept = [cost for job_id, cost in recorded.items() if job_id not in live]
    old = (record for job_id, record in records.items() if job_id not in live)
    forgotten = [run for run in map(run_from_record, old) if run]
    runs = [*live.values(), *(run for run in forgotten if not run.array_size)]
    bills = make_bills(context, runs)
    record_costs(context, records, live.values(), bills)
    billed = [cost_of_bill(run, bills[run.job_id]) for run in runs]
    rates = tuple(dict.fromkeys(rate for each in bills.values() for rate in each.rates))
    return sorted([*kept, *billed], key=lambda each: -each.at), rates


def bill_of(context: "Context", job_id: str) -> tuple[Run, Bill]:
    """The bill of one run, even if AWS Batch has forgotten it.

    Raises NotFound if neither AWS Batch nor the history knows the run or its times.
    """
    record = context.history.records(context.env).get(job_id)
    run = context.describe([job_id]).get(job_id)
    if run is None:
        run = run_from_record(record)
        if run is not None and record is not None and record.cost is not None:
            return run, bill_from_history(run, record.cost)
        if run is None or run.array_size:
            hint = f"It is {NOT_KNOWN}, and its cost is not in the history of this machine."
            raise NotFound("Run", job_id, [], hint)
    bill = make_bills(context, [run])[job_id]
    if record is not None:
        record_costs(context, {job_id: record}, [run], {job_id: bill})
    return run, bill


def record_costs(
    context: "Context",
    records: Mapping[str, Record],
    runs: Iterable[Run],
    bills: Mapping[str, Bill],
) -> None:
    """Write the cost of ended runs into the history, because AWS soon forgets hosts and runs."""
    for run in runs:
        record, bill = records.get(run.job_id), bills[run.job_id]
        if record is None or record.cost is not None or bill.is_free or bill.upper_bound is None:
            continue
        context.history.add_end(run, cost=bill.upper_bound)  # add_end ignores unfinished runs


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
