"""`compute score`: where spot hosts are likely to be had, and what they cost there."""

import os
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.aws.capacity import Score, Unit, placement_scores, score_requests
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.aws.pricing import Prices
    from batchml.aws.session import Session
    from batchml.client.place import Place

    Connect = Callable[[Place, Sequence[str]], Session]

PRICED = 10  # regions: a call each
_ANYWHERE = "us-east-1"  # where EC2 is asked when no region is said: it scores all of them


class Question(Struct, frozen=True):
    """What is asked: types or families, how much of them, and where. No regions: all."""

    types: tuple[str, ...]
    target: int
    unit: Unit
    regions: tuple[str, ...] = ()
    zones: bool = False


class Row(Struct, frozen=True):
    """A score, and an hour of one host there in US dollars; `why` there is no price."""

    score: Score
    low: Decimal | None = None
    high: Decimal | None = None
    why: str = ""


class Answer(Struct, frozen=True):
    rows: list[Row]
    types: tuple[str, ...]  # what the families came to


def types_of(place: "Place") -> tuple[str, ...]:
    """What the environment's spot hosts are of, or where it has none, any with GPUs, or all."""
    computes = list(place.settings.environment.compute.values())
    for chosen in ([each.spot for each in computes], [each.has_gpus for each in computes]):
        if any(chosen):
            computes = [each for each, is_one in zip(computes, chosen, strict=True) if is_one]
            break
    return tuple(dict.fromkeys(name for each in computes for name in each.instance_types))


def ask(place: "Place", question: Question, connect: "Connect | None" = None) -> Answer:
    """Ask EC2. Raises UsageError for types that nobody knows, and what EC2 refuses."""
    connect = connect or aws_session
    session = connect(place, question.regions[:1])
    names = [each for each in question.types if "." not in each]
    known = _prices(place, session).instances(session.region, names)
    mistakes = [f"{name}: {why}." for name, why in known.unknown.items()]
    if mistakes:
        raise UsageError("--instance-type " + " ".join(mistakes))
    types = tuple(
        dict.fromkeys(
            each
            for name in question.types
            for each in ([name] if "." in name else [t.name for t in known.types.get(name, ())])
        )
    )
    requests = score_requests(
        types, question.target, question.unit, question.regions, zones=question.zones
    )
    scores = placement_scores(session, requests)
    return Answer(list(_priced(place, scores, types, connect)), types)


def _priced(
    place: "Place", scores: Sequence[Score], types: Sequence[str], connect: "Connect"
) -> Iterable[Row]:
    regions = list(dict.fromkeys(each.region for each in scores))[:PRICED]
    books = {
        region: _prices(place, connect(place, (region,))).ask(
            region, [f"spot:{name}" for name in types]
        )
        for region in regions
    }
    for score in scores:
        book = books.get(score.region)
        found = list(book.prices.values()) if book else []
        why = "" if found else next(iter(book.unknown.values()), "") if book else "not asked"
        low = min((price.low for price in found), default=None)
        high = max((price.high for price in found), default=None)
        yield Row(score, low, high, why)


def aws_session(place: "Place", regions: Sequence[str]) -> "Session":
    """AWS, also where no environment in it is described yet: then the usual credentials."""
    from batchml.aws.session import Access, Session

    environment = place.settings.environment
    usual = environment.region or os.environ.get("AWS_REGION") or _ANYWHERE
    return Session(Access(regions[0] if regions else usual, environment.profile))


def _prices(place: "Place", session: "Session") -> "Prices":
    from batchml.aws.pricing import Prices

    home = place.home
    home.prepare()
    return Prices(session, home.root / "prices.json", place.clock)
