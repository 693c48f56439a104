"""Print placement scores (`compute score`) and the cost of warm hosts (`list`, `update`)."""

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
    ask_scores,
    default_types,
    delay_price,
    describe_delay,
    describe_reservation,
    dollar_range,
    list_warm_capacity,
    read_compute_detail,
    warm_cost,
    warm_vcpus,
)
from batchml.errors import UsageError
from batchml.model.environment import Compute
from batchml.setup.commands.shared import bare, print_table


def show_scores(
    context: Context,
    types: tuple[str, ...],
    hosts: int | None,
    vcpus: int | None,
    regions: tuple[str, ...],
    zones: bool,
    *,
    json_: bool,
) -> None:
    """Ask for scores and print them. Raises UsageError with all mistakes of the flags."""
    question = read_question(context, types, hosts, vcpus, regions, zones)
    print_scores(question, ask_scores(context, question), json_=json_)


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
    """Columns, notes and JSON on the warm hosts of compute environments; empty for `local`."""

    def __init__(
        self, kept: Mapping[str, WarmCapacity], known: ReservationTable | None, now: float
    ) -> None:
        self._kept = kept
        self._known = known
        self._now = now

    @property
    def heads(self) -> list[str]:
        return ["WARM", "NOW"] if self._kept else []

    def cells(self, name: str) -> list[str]:
        if not self._kept:
            return []
        each = self._kept.get(name)
        return [_cell(each.warm), _cell(each.now)] if each else ["", ""]

    def lines(self) -> Iterator[str]:
        for each in self._kept.values():
            if each.warm.vcpus:
                yield f"{each.name}: kept warm, even without jobs: {_hosts(each.warm)}"
            if each.delay:
                yield f"{each.name}: {describe_delay(each.delay)}"
            found = self._known.found.get(each.reservation) if self._known else None
            if found:
                yield f"{each.name}: {describe_reservation(found, self._now)}"
            elif each.reservation and self._known and self._known.why:
                yield f"{each.name}: reservation {each.reservation}: {self._known.why}"

    def json(self, name: str) -> dict[str, Any]:
        each = self._kept.get(name)
        if each is None:
            return {}
        found = self._known.found.get(each.reservation) if self._known else None
        return {
            "warm": _paid_to_json(each.warm),
            "now": _paid_to_json(each.now),
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
        return WarmColumns({}, None, 0.0)

    described = context.settings.environment.compute
    computes = {
        name: read_compute_detail(detail, described.get(bare(context, name)))
        for name, detail in details.items()
        if detail.get("computeResources", {}).get("instanceTypes")
    }
    region = context.settings.environment.region
    kept = {
        each.name: each for each in list_warm_capacity(region, details, computes, context.prices)
    }
    known = fetch_reservations(context.connect(), [each.reservation for each in kept.values()])
    by_name = {name: replace(each, name=bare(context, name)) for name, each in kept.items()}
    return WarmColumns(by_name, known, context.clock.now())


def warm_hosts(
    context: Context, hosts: int, min_vcpus: int | None, detail: Mapping[str, Any]
) -> int:
    """`--warm HOSTS` as vCPUs. Raises UsageError."""
    if min_vcpus is not None:
        raise UsageError("--warm and --min-vcpus have the same meaning: give one of them.")
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
    table: Mapping[str, Any],
) -> None:
    """Print the cost of a change by the hour and the day, and the command that undoes it."""
    if context.settings.is_local:
        return
    if "min_vcpus" in table and checked.min_vcpus:
        known = read_compute_detail(before, context.settings.environment.compute.get(name))
        compute = replace(
            known, min_vcpus=checked.min_vcpus, max_vcpus=checked.max_vcpus,
            instance_types=checked.instance_types,
        )  # fmt: skip
        paid = warm_cost(context.settings.environment.region, compute, context.prices)
        undo = before.get("computeResources", {}).get("minvCpus", 0)
        say(f"Kept warm, even without jobs: {_hosts(paid)}.")
        say(f"  to end it:  batchml compute update {name} --min-vcpus {undo} --env {context.env}")
    if "scale_down_delay" in table and checked.scale_down_minutes:
        compute = replace(
            read_compute_detail(before, context.settings.environment.compute.get(name)),
            instance_types=checked.instance_types, scale_down_delay=checked.scale_down_delay,
        )  # fmt: skip
        price = delay_price(context.settings.environment.region, compute, context.prices)
        words = describe_delay(checked.scale_down_minutes)
        say(f"From now on {words}{', ' if price else ''}{price}.")


def _hosts(paid: HostsCost) -> str:
    hosts = f", {paid.hosts}" if paid.hosts else ""
    return f"{paid.vcpus} vCPUs{hosts}: {paid.words}"


def _cell(paid: HostsCost) -> str:
    if not paid.vcpus:
        return "-"
    if paid.is_prepaid:
        return "prepaid"
    return "price unknown" if paid.why else f"{dollar_range(paid.low, paid.high)}/h"


def _paid_to_json(paid: HostsCost) -> dict[str, Any]:
    known = bool(paid.vcpus) and not paid.why and not paid.is_prepaid
    return {
        "vcpus": paid.vcpus,
        "usdPerHour": {"low": paid.low / 1e6, "high": paid.high / 1e6} if known else None,
        "why": paid.why or ("prepaid" if paid.is_prepaid else None),
    }
