"""Quotes and budgets, by prices made up here: the program has none."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.batch.hosts import HostPool
from batchml.aws.pricing.prices import InstanceType, InstanceTypes, Price, PriceTable
from batchml.config.environments import read_config
from batchml.cost.bill import UsualDuration
from batchml.cost.quote import (
    LOCAL_PRICE,
    Candidate,
    ComputeChoice,
    ContainerNeed,
    Quote,
    Usd,
    find_candidates,
    make_budget,
    make_quote,
    need_of_job,
    needs_of_group_run,
    price_items,
    share_of,
)
from batchml.cost.render import FREE, money, quote_json, quote_lines
from batchml.errors import UsageError
from batchml.model.job import Group, JobSpec, Launch, Resources, Retry
from batchml.model.names import dollars

DAY = 1_795_276_800  # 2026-11-21
G5 = InstanceType("g5.xlarge", 4, 16_384, 1, "x86_64")
P4 = InstanceType("p4d.24xlarge", 96, 1_179_648, 8, "x86_64")
C7 = InstanceType("c7i.large", 2, 4_096, 0, "x86_64")
INSTANCES = InstanceTypes({each.name: (each,) for each in (G5, P4, C7)} | {"g5": (G5,)})


def price(low: str, high: str = "", per: str = "hour") -> Price:
    return Price(Decimal(low), Decimal(high or low), per, DAY, "2026-10-01", "AWS Price List")


BOOK = PriceTable(
    {
        "on-demand:g5.xlarge": price("1.006"),
        "on-demand:p4d.24xlarge": price("32.7726"),
        "on-demand:c7i.large": price("0.08925"),
        "spot:g5.xlarge": price("0.30", "0.40"),
        "gp3-gb-month": price("0.073", per="GB-month"),
    }
)


def landing(*types: str, spot: bool = False, disk: int = 0) -> ComputeChoice:
    return ComputeChoice(HostPool("gpu", types, spot), disk)


def quoted(need: ContainerNeed, *landings: ComputeChoice, book: PriceTable = BOOK) -> Quote:
    found, missing = find_candidates(need, landings, INSTANCES)
    return make_quote(need, found, missing, book)


@pytest.mark.parametrize(
    ("need", "instance", "share"),
    [
        (ContainerNeed(1, 1_000, 0), G5, "0.25"),
        (ContainerNeed(1, 8_192, 0), G5, "0.5"),
        (ContainerNeed(1, 1_000, 1), G5, "1"),
        (ContainerNeed(8, 60_000, 1), P4, "0.125"),
        (ContainerNeed(1, 1_000, 1, nodes=2), P4, "1"),
        (ContainerNeed(0, 0, 0), G5, "1"),  # nobody says what it asks for
        (ContainerNeed(1, 1_000, 1), C7, None),
        (ContainerNeed(5, 1_000, 0), G5, None),
    ],
)
def test_a_share_is_the_largest_of_its_parts(
    need: ContainerNeed, instance: InstanceType, share: str | None
) -> None:
    assert share_of(need, instance) == (None if share is None else Decimal(share))


@settings(max_examples=50)
@given(
    st.integers(1, 100), st.integers(4, 2_000_000), st.integers(0, 9),
    st.sampled_from([G5, P4, C7]),
)  # fmt: skip
def test_shares_of_a_full_host_are_no_more_than_the_host(
    vcpus: int, memory: int, gpus: int, instance: InstanceType
) -> None:
    """As many runs as fit pay for one host together, and never for more."""
    share = share_of(ContainerNeed(vcpus, memory, gpus), instance)
    if share is not None:
        fitting = min(
            instance.vcpus // vcpus,
            instance.memory_mib // memory,
            instance.gpus // gpus if gpus else 10**9,
        )
        assert 0 < share * fitting <= Decimal("1.0000000001")


def test_a_quote_is_from_the_cheapest_host_to_the_dearest_with_their_disks() -> None:
    found = quoted(
        ContainerNeed(4, 8_192, 1), landing("g5.xlarge", disk=100), landing("p4d.24xlarge")
    )
    assert found.hour == Usd(Decimal("1.016"), Decimal("32.7726") / 8)
    assert [offer.candidate.instance.name for offer in found.offers] == [
        "g5.xlarge", "p4d.24xlarge"
    ]  # fmt: skip
    assert quote_lines(found)[0] == (
        "It costs $1.02 to $4.10 an hour, on g5.xlarge or p4d.24xlarge (prices of 2026-11-21)."
    )
    assert quote_json(found)["hosts"][0]["perHour"] == {"low": 1.016, "high": 1.016}


def test_spot_is_from_the_cheapest_zone_to_the_dearest() -> None:
    found = quoted(ContainerNeed(4, 8_192, 1), landing("g5", spot=True))
    assert found.hour == Usd(Decimal("0.30"), Decimal("0.40"))
    assert "Spot hosts are counted at today's spot prices, which change." in quote_lines(found)


def test_nodes_and_children_are_all_paid_and_a_timeout_bounds_it() -> None:
    nodes = quoted(
        ContainerNeed(1, 1_000, nodes=3, timeout=7_200, attempts=2), landing("g5.xlarge")
    )
    assert nodes.hour == Usd(Decimal("3.018"), Decimal("3.018"))
    assert nodes.most == Usd(Decimal("12.072"), Decimal("12.072"))
    assert "At most $12.07, if it runs to its timeout in all of 2 attempts." in quote_lines(nodes)
    children = quoted(ContainerNeed(1, 4_096, children=10), landing("g5.xlarge"))
    assert children.hour == Usd(Decimal("2.515"), Decimal("2.515"))
    assert children.most is None


def test_hosts_that_the_run_does_not_fit_on_are_left_out() -> None:
    found = quoted(ContainerNeed(8, 60_000, 1), landing("g5.xlarge", "p4d.24xlarge", "c7i.large"))
    assert [offer.candidate.instance.name for offer in found.offers] == ["p4d.24xlarge"]
    nowhere = quoted(ContainerNeed(8, 60_000, 1), landing("c7i.large"))
    assert nowhere.hour is None
    assert "the run fits on no instance type of the queue" in quote_lines(nowhere)[0]


def test_what_has_no_price_is_said_and_bounds_nothing() -> None:
    book = PriceTable({"on-demand:g5.xlarge": price("1")}, {"on-demand:p4d.24xlarge": "no answer"})
    found = quoted(
        ContainerNeed(1, 1_000, 1), landing("g5.xlarge", "p4d.24xlarge", "optimal"), book=book
    )
    assert found.unknown == {
        "optimal": "AWS was not asked about it", "p4d.24xlarge": "no answer"
    }  # fmt: skip
    assert "Price unknown: no answer (p4d.24xlarge)." in quote_lines(found)
    with pytest.raises(UsageError, match="the price of optimal is unknown: AWS was not asked"):
        make_budget(found, 5)


def test_prices_are_asked_for_once_each() -> None:
    kinds, _ = find_candidates(
        ContainerNeed(1, 1_000),
        [landing("g5", "g5.xlarge", disk=30), landing("g5", spot=True)],
        INSTANCES,
    )
    assert price_items(kinds) == ["on-demand:g5.xlarge", "spot:g5.xlarge", "gp3-gb-month"]


def test_a_budget_is_time_on_the_dearest_host() -> None:
    need = ContainerNeed(4, 8_192, 1)
    limit = make_budget(quoted(need, landing("g5.xlarge"), landing("g5.xlarge", spot=True)), 2.012)
    assert limit.seconds == 7_200
    assert limit.variables == {"BATCHML_MAX_SECONDS": "7200", "BATCHML_PRICE": "1.006000"}
    spot = make_budget(quoted(need, landing("g5", spot=True)), Decimal(1))
    assert spot.seconds == 9_000  # at 0.40, the dearest zone's


@settings(max_examples=50)
@given(
    st.decimals("0.01", 1_000, places=2), st.integers(0, 500), st.integers(0, 8),
    st.lists(st.sampled_from(["g5.xlarge", "p4d.24xlarge"]), min_size=1, unique=True),
)  # fmt: skip
def test_containers_that_use_their_whole_budget_stay_within_it(
    usd: Decimal, children: int, nodes: int, types: list[str]
) -> None:
    found = quoted(ContainerNeed(2, 8_192, 1, nodes=nodes, children=children), landing(*types))
    try:
        limit = make_budget(found, usd)
    except UsageError as error:
        assert "buys less than a second" in str(error)
        return
    assert limit.price == max(offer.hour.high for offer in found.offers)
    assert limit.seconds * limit.price / 3600 * limit.copies <= usd
    assert (limit.seconds + 1) * limit.price / 3600 * limit.copies > usd


def test_a_gang_costs_what_its_head_and_all_its_workers_do() -> None:
    spec = JobSpec(
        queue="gpu", resources=Resources(4, "8 GiB", 1), launch=Launch("ray"),
        groups=(Group("head"), Group("workers", 4, 1, "cpu", Resources(2, "8 GiB"))),
    )  # fmt: skip
    needs = needs_of_group_run(spec)
    assert needs == [("head", "gpu", ContainerNeed(4, 8_192, 1)),
                     ("workers", "cpu", ContainerNeed(2, 8_192, children=4))]  # fmt: skip
    head, workers = (quoted(need, landing("g5.xlarge")) for _, _, need in needs)
    gang = replace(head, parts={"workers": workers})
    assert head.hour is not None
    assert workers.hour is not None
    assert gang.hour == head.hour + workers.hour
    assert gang.copies == 5
    limit = make_budget(gang, 10)
    rate = head.hour.high + workers.hour.high
    assert limit.seconds * rate / 3600 <= 10 < (limit.seconds + 1) * rate / 3600
    unknown = replace(gang, parts={"workers": Quote(needs[1][2], unknown={"p9": "nobody knows"})})
    assert unknown.hour is None
    with pytest.raises(UsageError, match="price of p9 is unknown"):
        make_budget(unknown, 10)


def test_a_machine_without_a_price_limits_nothing() -> None:
    limit = make_budget(Quote(ContainerNeed(1, 1_000), is_free=True), 1)
    assert limit.variables == {}


def test_a_job_says_what_it_needs() -> None:
    spec = JobSpec(
        resources=Resources(vcpus=4, memory="8 GiB", gpus=1), retry=Retry(3), nodes=2, timeout="1h"
    )
    assert need_of_job(spec) == ContainerNeed(4, 8_192, 1, nodes=2, timeout=3_600, attempts=3)
    children = need_of_job(JobSpec(), 5)
    assert (children.nodes, children.children, children.copies) == (0, 5, 5)


def test_only_this_machine_is_given_a_price() -> None:
    found = read_config({"env": {"local": {"usd_per_hour": 1}}})
    assert found.environments["local"].usd_per_hour == 1.0
    assert not any(found.mistakes.values())
    dev = {"region": "eu-west-1", "usd_per_hour": 2.5}
    wrong = read_config({"env": {"dev": dev, "local": {"usd_per_hour": -1}}})
    (mistake,) = wrong.mistakes["dev"]
    assert mistake.startswith(
        "env.dev.usd_per_hour: is the price of this machine: only for [env.local]."
    )
    assert "env.local.usd_per_hour: found -1." in wrong.mistakes["local"][0]


@pytest.mark.parametrize(
    ("usd", "words"),
    [
        ("0", "$0.00"), ("0.00001", "less than $0.0001"), ("0.0042", "$0.0042"),
        ("0.0523", "$0.052"), ("1.006", "$1.01"), ("12345.678", "$12,345.68"),
    ],
)  # fmt: skip
def test_small_amounts_are_not_shown_as_nothing(usd: str, words: str) -> None:
    assert dollars(Decimal(usd)) == words


def test_amounts_say_what_is_not_known() -> None:
    assert money(Usd(Decimal(1), Decimal(2))) == "$1.00 to $2.00"
    assert money(Usd(Decimal(1), Decimal(1)), is_lower_bound=True) == "at least $1.00"
    assert money(Usd(), is_lower_bound=True) == "unknown"


@pytest.mark.parametrize(
    ("share", "where"),
    [("1", ""), ("0.5", "half of "), ("0.25", "a quarter of "), ("0.2", "20 % of ")],
)
def test_a_quote_says_which_part_of_this_machine_it_is_of(share: str, where: str) -> None:
    here = Candidate(InstanceType("this machine", 4, 8_192, 0, ""), Decimal(share))
    price = Price(Decimal(3), Decimal(3), "hour", 0, "", LOCAL_PRICE)
    (line,) = quote_lines(
        make_quote(ContainerNeed(2, 64), [here], {}, PriceTable({here.item: price}))
    )
    assert line.endswith(f" an hour, on {where}this machine.")


def test_a_quote_of_a_machine_without_a_price_is_nothing_an_hour() -> None:
    first, *_, last = quote_lines(Quote(ContainerNeed(1, 64), is_free=True), UsualDuration(1, 24.0))
    assert first == "It costs $0.00 an hour, on this machine."
    assert last == FREE
