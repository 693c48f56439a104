"""Print placement scores (`compute score`), and the cost of hosts that run without jobs.

`compute list` and `compute update` show this cost.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from msgspec.structs import replace

from batchml.aws.capacity import FEW_TYPES, ReservationTable, fetch_reservations
from batchml.cli.output import print_json, say
from batchml.config.environments import is_instance_type, is_region
from batchml.context import Context
from batchml.cost.capacity import (
    HostsCost,
    ScoreAnswer,
    ScoreQuestion,
    ScoreRow,
    WarmCapacity,
    cents_range,
    default_types,
    delay_price,
    describe_delay,
    describe_reservation,
    list_warm_capacity,
    read_compute_detail,
    warm_cost,
    warm_vcpus,
)
from batchml.errors import UsageError
from batchml.model.environment import Compute
from batchml.setup.commands.shared import print_table


def print_scores(question: ScoreQuestion, answer: ScoreAnswer, *, json_: bool) -> None:
    if json_:
        return print_json([_row_to_json(row) for row in answer.rows])
    zones = question.zones
    heads = ["SCORE", "REGION", *(["ZONE"] if zones else []), "SPOT USD/H OF A HOST"]
    rows = [heads]
    for row in answer.rows:
        where = [row.score.region, *([row.score.zone] if zones else [])]
        rows.append([f"{row.score.score} of 10", *where, _price(row)])
    print_table(rows, "EC2 scores none of these regions.")
    for line in explain_scores(question, answer):
        say(line)


def read_question(
    context: Context,
    types: tuple[str, ...],
    hosts: int | None,
    vcpus: int | None,
    regions: tuple[str, ...],
    zones: bool,
) -> ScoreQuestion:
    """Read the flags of `compute score`. Raises UsageError with all mistakes at once."""
    types = types or default_types(context)
    mistakes = [
        f'--instance-type {each}: expected a type, "g5.xlarge", or a family, "g5".'
        for each in types
        if not is_instance_type(each)
    ]
    if not types:
        mistakes.append(
            f"--instance-type: missing: environment {context.env} describes no types. For example "
            "--instance-type g5 --instance-type g6."
        )
    if (hosts is None) == (vcpus is None):
        mistakes.append("Give either --instances N or --vcpus N: the capacity needed at once.")
    for flag, number in (("--instances", hosts), ("--vcpus", vcpus)):
        if number is not None and number < 1:
            mistakes.append(f"{flag} {number}: give 1 or more.")
    mistakes += [
        f'--region {each}: expected a region such as "us-east-1".'
        for each in regions
        if not is_region(each)
    ]
    if mistakes:
        raise UsageError("\n".join(mistakes))
    if hosts is not None:
        return ScoreQuestion(types, hosts, "units", regions, zones)
    return ScoreQuestion(types, vcpus or 0, "vcpu", regions, zones)


def explain_scores(question: ScoreQuestion, answer: ScoreAnswer) -> list[str]:
    """The meaning of the scores, and how to get better ones."""
    unit = "hosts" if question.unit == "units" else "vCPUs"
    where = "one zone" if question.zones else "a region"
    lines = [
        f"10 of 10: EC2 very likely has {question.target} spot {unit} in {where} now; 1: unlikely. "
        "A score does not tell how long they stay.",
        f"For {', '.join(answer.types[:8])}{' and more' if len(answer.types) > 8 else ''}.",
    ]
    if len(answer.types) < FEW_TYPES:
        lines.append(f"Fewer than {FEW_TYPES} types always score low: add other --instance-type.")
    why = next((row.why for row in answer.rows if row.why and row.why != "not asked"), "")
    return lines + ([f"Prices: {why}."] if why else [])


def _price(row: ScoreRow) -> str:
    if row.low is None or row.high is None:
        return "-"
    return " to ".join(dict.fromkeys(f"{each:.3f}" for each in (row.low, row.high)))


def _row_to_json(row: ScoreRow) -> dict[str, Any]:
    def number(value: Decimal | None) -> float | None:
        return None if value is None else float(value)

    return {
        "region": row.score.region,
        "availabilityZoneId": row.score.zone or None,
        "score": row.score.score,
        "spotUsdPerHour": {"low": number(row.low), "high": number(row.high)},
        "why": row.why or None,
    }


# --- warm hosts and reservations ------------------------------------------------------------


Details = Mapping[str, Mapping[str, Any]]


class WarmColumns:
    """Columns, notes and JSON on the warm hosts of compute environments; empty for `local`.

    `capacities`: name in AWS -> warm hosts.
    """

    def __init__(
        self,
        capacities: Mapping[str, WarmCapacity],
        reservations: ReservationTable = ReservationTable(),  # noqa: B008  (it is immutable)
        now: float = 0.0,
    ) -> None:
        self._capacities = capacities
        self._reservations = reservations
        self._now = now

    @property
    def heads(self) -> list[str]:
        return ["WARM", "NOW"] if self._capacities else []

    def cells(self, name: str) -> list[str]:
        if not self._capacities:
            return []
        each = self._capacities.get(name)
        return [_cell(each.warm), _cell(each.now)] if each else ["", ""]

    def lines(self) -> Iterator[str]:
        for each in self._capacities.values():
            if each.warm.vcpus:
                yield f"{each.name}: kept warm, even without jobs: {_describe_cost(each.warm)}"
            if each.delay:
                yield f"{each.name}: {describe_delay(each.delay)}"
            found = self._reservations.found.get(each.reservation)
            if found:
                yield f"{each.name}: {describe_reservation(found, self._now)}"
            elif each.reservation and self._reservations.why:
                yield f"{each.name}: reservation {each.reservation}: {self._reservations.why}"

    def json(self, name: str) -> dict[str, Any]:
        each = self._capacities.get(name)
        if each is None:
            return {}
        found = self._reservations.found.get(each.reservation)
        return {
            "warm": _cost_to_json(each.warm),
            "now": _cost_to_json(each.now),
            "reservation": None
            if found is None
            else {
                "capacityReservationId": found.id,
                "state": found.state,
                "totalInstanceCount": found.total,
                "availableInstanceCount": found.free,
                "endDate": int(found.end * 1000) or None,
                "isBlock": found.is_block,
            },
        }


def read_warm_columns(context: Context, details: Details) -> WarmColumns:
    """Ask for prices and reservations, if hosts run or stay warm; nothing for `local`."""
    if context.settings.is_local:
        return WarmColumns({})
    described = context.settings.environment.compute
    computes = {
        name: read_compute_detail(detail, described.get(context.bare(name)))
        for name, detail in details.items()
        if detail.get("computeResources", {}).get("instanceTypes")
    }
    region = context.settings.environment.region
    capacities = list_warm_capacity(region, details, computes, context.prices)
    reservations = fetch_reservations(context.connect(), [c.reservation for c in capacities])
    by_name = {each.name: replace(each, name=context.bare(each.name)) for each in capacities}
    return WarmColumns(by_name, reservations, context.clock.now())


def warm_hosts(
    context: Context, hosts: int, min_vcpus: int | None, detail: Mapping[str, Any]
) -> int:
    """Convert `--warm HOSTS` into vCPUs. Raises UsageError."""
    if min_vcpus is not None:
        raise UsageError("--warm and --min-vcpus set the same value: give one of them.")
    if hosts < 0:
        raise UsageError(f"--warm {hosts}: give 0 or more hosts.")
    if context.settings.is_local:
        raise UsageError("--warm: local has one host, this machine, which is always warm.")
    if not hosts:
        return 0
    compute = read_compute_detail(detail)
    region = context.settings.environment.region
    instances = context.prices.instances(region, compute.instance_types[:1])
    return warm_vcpus(hosts, compute, instances)


def report_cost(
    context: Context,
    name: str,
    before: Mapping[str, Any],
    checked: Compute,
    changed: Mapping[str, Any],
) -> None:
    """Print the cost of a change by the hour and the day, and the command that undoes it.

    `before`: AWS's description before the change; `checked`: the compute environment after it;
    `changed`: the options that the user gave.
    """
    if context.settings.is_local:
        return
    environment = context.settings.environment
    compute = replace(
        read_compute_detail(before, environment.compute.get(name)),
        instance_types=checked.instance_types,
    )
    if "min_vcpus" in changed and checked.min_vcpus:
        warm = replace(compute, min_vcpus=checked.min_vcpus, max_vcpus=checked.max_vcpus)
        cost = warm_cost(environment.region, warm, context.prices)
        undo = before.get("computeResources", {}).get("minvCpus", 0)
        say(f"Kept warm, even without jobs: {_describe_cost(cost)}.")
        say(f"  to end it:  batchml compute update {name} --min-vcpus {undo} --env {context.env}")
    if "scale_down_delay" in changed and checked.scale_down_minutes:
        delayed = replace(compute, scale_down_delay=checked.scale_down_delay)
        price = delay_price(environment.region, delayed, context.prices)
        delay = describe_delay(checked.scale_down_minutes)
        say(f"From now on {delay}{', ' if price else ''}{price}.")


def _describe_cost(cost: HostsCost) -> str:
    hosts = f", {cost.hosts}" if cost.hosts else ""
    return f"{cost.vcpus} vCPUs{hosts}: {cost.words}"


def _cell(cost: HostsCost) -> str:
    if not cost.vcpus:
        return "-"
    if cost.is_prepaid:
        return "prepaid"
    return "price unknown" if cost.why else f"{cents_range(cost.low, cost.high)}/h"


def _cost_to_json(cost: HostsCost) -> dict[str, Any]:
    known = bool(cost.vcpus) and not cost.why and not cost.is_prepaid
    return {
        "vcpus": cost.vcpus,
        "usdPerHour": {"low": cost.low / 1e6, "high": cost.high / 1e6} if known else None,
        "why": cost.why or ("prepaid" if cost.is_prepaid else None),
    }
