"""The page of costs: sums by day and group, ranges, unknown prices, and answers that fail."""

from decimal import Decimal
from typing import Any

import pytest

from batchml.cost.bill import RunCost, cost_of_bill, free_bill
from batchml.cost.quote import Usd
from batchml.dashboard.cost import (
    DAY,
    CostAnswer,
    CostBook,
    CostFilter,
    amount,
    bars,
    cost_page,
    cost_panel,
    cost_slots,
    nice_top,
    read_filter,
)
from batchml.errors import ServiceUnreachable, UsageError
from batchml.model.run import JobStatus, Run
from tests.dashboard.test_cluster import NASTY, words

NOW = 1_790_000_000_000  # 2026-09-21 14:13 UTC


def cost(job_id: str, low: float, high: float | None = None, days: int = 0, **more: Any) -> RunCost:
    usd = Usd(Decimal(str(low)), Decimal(str(low if high is None else high)))
    return RunCost(**{"job_id": job_id, "name": job_id, "queue": "gpu", "at": NOW - days * DAY,
                      "usd": usd, "seconds": 3600.0, **more})  # fmt: skip


COSTS = (
    cost("a", 1, 2, project="vision.1a", owner="anna"),
    cost("b", 4, queue="cpu", days=1, failed=Usd(Decimal(4), Decimal(4)), owner="ben"),
    cost("c", 0, days=1, unknown=("no price (p9.large)",), project="speech.2b", is_running=True),
)


def panel(
    costs: tuple[RunCost, ...] = COSTS, url: dict[str, str] | None = None, **more: Any
) -> str:
    return words(cost_panel(CostAnswer(costs, NOW), read_filter(url or {}), NOW, **more))


def test_the_total_has_its_range_and_says_when_a_price_is_unknown() -> None:
    text = panel()
    assert "Cost at least $5.00 to $6.00" in text and "Failed attempts $4.00 67% of it" in text
    assert "Runs 3 1 still running" in text and "Price unknown: no price (p9.large)." in text


def test_groups_are_sums_the_dearest_first() -> None:
    text = panel()
    assert "Owner Cost Failed Ran Runs ben $4.00 $4.00 1:00:00 1 anna $1.00 to $2.00 $0" in text
    assert "Queue Cost Failed Ran Runs cpu $4.00 $4.00 1:00:00 1 gpu at least $1.00 to" in text
    assert "speech - $0 1:00:00 1" in text  # a price that is not known is no zero


def test_a_value_of_a_group_narrows_everything_and_can_be_left_out_again() -> None:
    text = panel(url={"owner": "anna", "since": "30d"})
    assert "Only owner: anna" in text and "Runs 1" in text and "ben" not in text
    assert panel(url={"owner": "none"}).count("Runs 1") >= 1
    assert "No runs in this period with these values." in panel(url={"queue": "nowhere"})
    chosen = CostFilter("30d", (("owner", "anna"),))
    assert chosen.query(queue="a&b") == "since=30d&owner=anna&queue=a%26b"
    assert chosen.query(owner=None) == "since=30d"


def test_days_are_those_of_utc_and_empty_days_are_there() -> None:
    slots = cost_slots(COSTS, "7d", NOW)
    assert [each.name for each in slots][-2:] == ["2026-09-20", "2026-09-21"] and len(slots) == 8
    assert [each.runs for each in slots] == [0, 0, 0, 0, 0, 0, 2, 1]
    hours = cost_slots(COSTS[:1], "24h", NOW)
    assert len(hours) == 25 and hours[-1].name == "2026-09-21 14:00" and hours[-1].runs == 1


def test_a_bar_shows_what_failed_what_is_sure_and_what_may_be() -> None:
    drawn = str(bars(cost_slots(COSTS, "7d", NOW)))
    assert drawn.count('class="maybe"') == 2  # the day's range, and the legend
    assert drawn.count('class="failed"') == 2 and "style=" not in drawn
    assert "2026-09-21: $1.00 to $2.00, 1 runs" in drawn
    none = str(bars(cost_slots((), "7d", NOW)))
    assert "<rect" in none and "nan" not in none


def test_a_machine_without_a_price_shows_running_time_instead() -> None:
    free = (cost("a", 0), cost("b", 0, days=2))
    text = panel(free, is_local=True)
    assert "Cost $0 no price" in text and "This machine costs nothing." in text
    assert "running time" in text and "Longest runs" in text
    assert "This machine costs nothing" not in panel(free)  # in AWS a zero has other causes


@pytest.mark.parametrize(
    ("most", "top"), [(0, 1), (0.7, 1), (1, 1), (1.1, 2), (2.2, 2.5), (42, 50), (0.003, 0.005)]
)
def test_the_axis_ends_at_a_round_number(most: float, top: float) -> None:
    assert nice_top(most) == pytest.approx(top)


def test_an_unknown_amount_is_a_dash() -> None:
    assert amount(Usd(), is_lower_bound=True) == "-" and amount(Usd()) == "$0.00"


def test_the_owner_is_a_tag_or_else_a_share() -> None:
    def owner(**more: Any) -> str:
        run = Run("a", "a", "gpu", JobStatus.SUCCEEDED, **more)
        return cost_of_bill(run, free_bill(run, "here", NOW)).owner

    assert owner(tags={"owner": "anna"}, share="x") == "anna"
    assert (owner(share="ben"), owner()) == ("ben", "")


def test_texts_of_others_stay_texts() -> None:
    bad = cost(NASTY, 1, name=NASTY, queue=NASTY, owner=NASTY, project=NASTY, unknown=(NASTY,))
    chosen = read_filter({"queue": NASTY})
    page = str(cost_page(CostAnswer((bad,), NOW, NASTY), chosen, NOW, NASTY, trouble=NASTY))
    for sign in ("<img", "\x00", "\u202e", "\x1b"):
        assert sign not in page
    assert "&lt;img src=x" in page


def test_a_period_is_one_of_a_few() -> None:
    with pytest.raises(UsageError, match="since=2y: choose one of 24h, 7d"):
        read_filter({"since": "2y"})


class Service:
    """Costs of a client that can fail."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.fails = False
        self.now = NOW / 1000

    def costs(self, since: float) -> tuple[RunCost, ...]:
        self.asked.append(since)
        if self.fails:
            raise ServiceUnreachable("AWS does not answer.")
        return COSTS


def test_costs_are_asked_for_once_a_minute() -> None:
    service = Service()
    book = CostBook(service.costs, lambda: service.now)
    assert book.known("7d") is None
    first = book.get("7d")
    assert book.get("7d") == first and book.known("7d") == first and len(service.asked) == 1
    assert service.asked == [service.now - 7 * 86_400]
    service.now += 61
    book.get("7d")
    assert len(service.asked) == 2


def test_an_answer_stays_with_its_age_if_the_next_one_fails() -> None:
    service = Service()
    book = CostBook(service.costs, lambda: service.now)
    service.fails = True
    with pytest.raises(ServiceUnreachable):
        book.get("7d")
    service.fails = False
    book.get("7d")
    service.fails, service.now = True, service.now + 120
    text = words(cost_panel(book.get("7d"), read_filter({}), int(service.now * 1000)))
    assert "These values are 2 min old: AWS does not answer." in text and "anna" in text
