"""What `compute score` asks and prints."""

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from batchml.cli.output import print_json, say
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.scoring import Answer, Question, Row


def show_scores(
    place: "Place",
    types: tuple[str, ...],
    hosts: int | None,
    vcpus: int | None,
    regions: tuple[str, ...],
    zones: bool,
    *,
    json_: bool,
) -> None:
    """Ask and print. Raises UsageError with all the mistakes of the flags."""
    from batchml.client.scoring import ask

    question = read_question(place, types, hosts, vcpus, regions, zones)
    print_scores(question, ask(place, question), json_=json_)


def print_scores(question: "Question", answer: "Answer", *, json_: bool) -> None:
    from batchml.cli.single import print_table

    if json_:
        return print_json([_json(row) for row in answer.rows])
    zones = question.zones
    heads = ["SCORE", "REGION", *(["ZONE"] if zones else []), "SPOT USD/H OF A HOST"]
    rows = [heads]
    for row in answer.rows:
        where = [row.score.region, *([row.score.zone] if zones else [])]
        rows.append([f"{row.score.score} of 10", *where, _price(row)])
    print_table(rows, "EC2 scores none of these regions.")
    for line in explained(question, answer):
        say(line)


def read_question(
    place: "Place",
    types: tuple[str, ...],
    hosts: int | None,
    vcpus: int | None,
    regions: tuple[str, ...],
    zones: bool,
) -> "Question":
    """Raises UsageError with all the mistakes of the flags at once."""
    from batchml.client.scoring import Question, types_of
    from batchml.model.description import is_instance_type, is_region

    types = types or types_of(place)
    mistakes = [
        f'--instance-type {each}: expected a type, "g5.xlarge", or a family, "g5".'
        for each in types
        if not is_instance_type(each)
    ]
    if not types:
        mistakes.append(
            f"--instance-type: missing: environment {place.env} describes none. For example "
            "--instance-type g5 --instance-type g6."
        )
    if (hosts is None) == (vcpus is None):
        mistakes.append("--instances N or --vcpus N: give one of them: how much you want at once.")
    for flag, number in (("--instances", hosts), ("--vcpus", vcpus)):
        if number is not None and number < 1:
            mistakes.append(f"{flag} {number}: 1 or more.")
    mistakes += [
        f'--region {each}: expected one like "us-east-1".'
        for each in regions
        if not is_region(each)
    ]
    if mistakes:
        raise UsageError("\n".join(mistakes))
    if hosts is not None:
        return Question(types, hosts, "units", regions, zones)
    return Question(types, vcpus or 0, "vcpu", regions, zones)


def explained(question: "Question", answer: "Answer") -> list[str]:
    """What the numbers mean, and what would make them better."""
    from batchml.aws.capacity import FEW_TYPES

    unit = "hosts" if question.unit == "units" else "vCPUs"
    where = "one zone" if question.zones else "a region"
    lines = [
        f"10 of 10: {question.target} {unit} of spot in {where} are very likely to be had now; 1: "
        "hardly. It says nothing of how long they stay.",
        f"For {', '.join(answer.types[:8])}{' and more' if len(answer.types) > 8 else ''}.",
    ]
    if len(answer.types) < FEW_TYPES:
        lines.append(
            f"Fewer than {FEW_TYPES} types score low whatever there is: add other --instance-type."
        )
    why = next((row.why for row in answer.rows if row.why and row.why != "not asked"), "")
    return lines + ([f"Prices: {why}."] if why else [])


def _price(row: "Row") -> str:
    if row.low is None or row.high is None:
        return "-"
    return " to ".join(dict.fromkeys(f"{each:.3f}" for each in (row.low, row.high)))


def _json(row: "Row") -> dict[str, Any]:
    def number(value: Decimal | None) -> float | None:
        return None if value is None else float(value)

    return {
        "region": row.score.region,
        "availabilityZoneId": row.score.zone or None,
        "score": row.score.score,
        "spotUsdPerHour": {"low": number(row.low), "high": number(row.high)},
        "why": row.why or None,
    }
