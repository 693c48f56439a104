"""The price list on board: dated, sound, and silent about what it does not know."""

import tomllib
from decimal import Decimal

import pytest

from batchml.aws.pricing.listed import LISTED, ListedPrices
from batchml.aws.pricing.prices import PriceTable, describe_failure
from batchml.config.environments import read_environments
from batchml.config.settings import CONFIG_NAME
from batchml.cost.estimate import items_needed, make_estimate
from batchml.errors import ServiceError
from batchml.model.environment import Environment
from batchml.runtime.protocol.instance_types import devices_of, vcpus_of
from batchml.setup.init import first_files


def first_environment(region: str) -> Environment:
    text = first_files("dev", region)[CONFIG_NAME]
    return read_environments(tomllib.loads(text), CONFIG_NAME)[1]["dev"]


@pytest.mark.parametrize("region", ["us-east-1", "us-east-2", "us-west-2"])
def test_the_environment_of_init_has_a_whole_price(region: str) -> None:
    environment, prices = first_environment(region), ListedPrices()
    names = [name for each in environment.compute.values() for name in each.instance_types]
    instances = prices.instances(region, names)
    table = prices.ask(region, items_needed(environment, instances))
    estimate = make_estimate(environment, table, instances)
    assert not estimate.unknown and not estimate.full_is_lower_bound
    # NAT gateway with its address, three keys; 16 vCPUs of g5.xlarge twice, 8 of m7i, and disks.
    assert estimate.idle[0] == 45_000 + 5_000 + round(3e6 / 730)
    most = 2 * 4 * 1.006 + 8 * 0.0504 + (2 * 4 + 4) * 100 * 0.08 / 730
    assert estimate.full[1] == pytest.approx(estimate.idle[1] + most * 1e6, abs=5)


def test_a_price_says_its_date_and_that_it_may_have_changed() -> None:
    table = ListedPrices().ask("us-east-1", ["on-demand:g6.xlarge", "kms-key-month"])
    price = table.prices["on-demand:g6.xlarge"]
    assert (price.low, price.high, price.per) == (Decimal("0.8048"), Decimal("0.8048"), "hour")
    assert (price.date, price.since, price.source) == ("2026-07-20", "2026-07-20", LISTED)
    assert table.prices["kms-key-month"].per == "month"
    assert table.notes == (
        "These list prices of 2026-07-20 come with batchml; today's prices may differ.",
    )


def test_a_spot_host_counts_as_one_on_demand() -> None:
    table = ListedPrices().ask("eu-west-1", ["spot:g5.xlarge", "on-demand:g5.xlarge"])
    assert table.prices["spot:g5.xlarge"] == table.prices["on-demand:g5.xlarge"]
    assert "on-demand price, which is the most that they cost" in table.notes[1]


@pytest.mark.parametrize(
    ("region", "item", "why"),
    [
        ("us-east-1", "on-demand:x9.huge", "batchml's price list does not have it for us-east-1"),
        ("eu-west-1", "on-demand:g6.xlarge", "batchml's price list does not have it for eu-west-1"),
        ("eu-north-1", "nat-hour", "batchml's price list does not have it for eu-north-1"),
        ("us-esat-1", "nat-hour", "no prices for us-esat-1. Did you mean 'us-east-1'?"),
        ("", "nat-hour", "batchml's price list has no prices for "),
    ],
)
def test_what_the_list_lacks_is_unknown_with_the_reason(region: str, item: str, why: str) -> None:
    table = ListedPrices().ask(region, [item])
    assert why.strip() in table.unknown[item]
    assert table == PriceTable({}, table.unknown, ())


def test_a_family_is_known_only_where_the_list_has_all_its_sizes() -> None:
    prices = ListedPrices()
    there = prices.instances("us-east-1", ["g5", "g6.xlarge", "optimal"])
    assert [each.name for each in there.types["g5"]][:2] == ["g5.xlarge", "g5.2xlarge"]
    assert len(there.types["g5"]) == 8
    assert there.unknown == {"optimal": "AWS Batch chooses the instance types itself"}
    elsewhere = prices.instances("eu-west-1", ["g5", "g5.xlarge", "g5.2xlarge"])
    assert set(elsewhere.types) == {"g5.xlarge"}


def test_sizes_and_prices_of_the_list_are_sound() -> None:
    """Bigger hosts of a family never cost less, and vCPUs are those that the size's name says."""
    prices = ListedPrices()
    content = prices._list
    assert set(content.sources) and len(content.regions) >= 10
    for region, there in content.regions.items():
        assert all(usd > 0 for usd in there.charges.values())
        assert all(prices.ask(region, [item]).prices for item in there.charges)
        for family, listed in there.types.items():
            about = content.families[family]
            assert set(listed) <= set(about.sizes)
            sized = [(size, *about.sizes[size][:2]) for size in listed]
            for size, vcpus, memory in sized:
                assert memory >= 1024 * vcpus
                row = devices_of(f"{family}.{size}")
                assert row is not None and row.count == about.sizes[size][2], (family, size)
                if not size.startswith("m"):  # medium, metal
                    assert vcpus == vcpus_of(f"{family}.{size}"), (family, size)
            dollars = [listed[size] for size, *_ in sized if not size.startswith("metal")]
            gpus = [about.sizes[size][2] for size, *_ in sized]
            if len(set(gpus)) == 1:
                assert dollars == sorted(dollars), (region, family)


def test_a_page_in_place_of_an_answer_is_cut_to_one_line() -> None:
    page = "<!doctype html>\n<html lang=en>\n<title>500 Internal Server Error</title>\n" * 9
    error = ServiceError("GetProducts", "500", page, 500)
    reason = describe_failure("pricing:GetProducts", error)
    assert reason == "pricing:GetProducts: the answer is a web page, which did not come from AWS"
    long = describe_failure("x", ServiceError("GetProducts", "E", "why " * 500 + "\nmore", 500))
    assert "\n" not in long and len(long) < 310 and long.endswith("...")
