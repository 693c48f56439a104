"""What an environment costs, by prices made up here: the program has none."""

import json
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.pricing.prices import InstanceType, InstanceTypes, Price, PriceTable
from batchml.cost.estimate import (
    ENDPOINTS,
    KEYS,
    NETWORK_KEYS,
    Estimate,
    estimate_environment,
    items_needed,
    make_estimate,
)
from batchml.cost.render import estimate_json, estimate_lines
from batchml.model.environment import Compute, Environment, Network, Storage

DAY = 1_795_276_800  # 2026-11-21
SIZES = {
    "g5": (("g5.xlarge", 4, 1), ("g5.4xlarge", 16, 1), ("g5.12xlarge", 48, 4)),
    "g6": (("g6.xlarge", 4, 1), ("g6.8xlarge", 32, 1)),
    "p4d.24xlarge": (("p4d.24xlarge", 96, 8),),
    "c7i.large": (("c7i.large", 2, 0),),
}
EACH = {
    each: InstanceType(each, vcpus, vcpus * 4096, gpus, "x86_64")
    for of in SIZES.values()
    for each, vcpus, gpus in of
}
FAMILIES = {name: tuple(EACH[each] for each, _, _ in of) for name, of in SIZES.items()}
INSTANCES = InstanceTypes({**{name: (each,) for name, each in EACH.items()}, **FAMILIES})
FIXED = {
    "nat-hour": ("0.045", "hour"), "nat-gb": ("0.045", "GB"), "ipv4-hour": ("0.005", "hour"),
    "endpoint-hour": ("0.01", "hour"), "gp3-gb-month": ("0.08", "GB-month"),
    "efs-gb-month": ("0.30", "GB-month"), "fsx-125-gb-month": ("0.145", "GB-month"),
    "kms-key-month": ("1.00", "month"), "logs-gb": ("0.50", "GB"),
}  # fmt: skip
HOURLY = {
    "g5.xlarge": "1.006", "g5.4xlarge": "1.624", "g5.12xlarge": "5.672", "g6.xlarge": "0.8048",
    "g6.8xlarge": "2.0144", "p4d.24xlarge": "32.7726", "c7i.large": "0.08925",
}  # fmt: skip


def price(low: str, per: str = "hour", high: str = "", asked: int = DAY) -> Price:
    return Price(Decimal(low), Decimal(high or low), per, asked, "2026-10-01", "AWS Price List")


PRICES = {
    **{item: price(usd, per) for item, (usd, per) in FIXED.items()},
    **{f"on-demand:{name}": price(usd) for name, usd in HOURLY.items()},
    **{
        f"spot:{name}": price(str(Decimal(usd) / 4), high=str(Decimal(usd) / 2))
        for name, usd in HOURLY.items()
    },
}


def book(without: Mapping[str, str] | None = None) -> PriceTable:
    unknown = dict(without or {})
    return PriceTable({item: each for item, each in PRICES.items() if item not in unknown}, unknown)


def environment(**more: Any) -> Environment:
    return Environment(region="eu-west-1", **more)


def gpu(**more: Any) -> Compute:
    given = {"instance_types": ("g5.xlarge",), "max_vcpus": 64, **more}
    return Compute(**given)


def test_an_environment_at_rest_pays_for_its_gateway_and_its_key() -> None:
    found = make_estimate(environment(compute={"gpu": gpu_of("g5.xlarge")}), book(), INSTANCES)
    assert [(line.what, line.quantity, line.micros) for line in found.fixed] == [
        ("NAT gateway", 1, 45_000),
        ("public IPv4 address of the NAT gateway", 1, 5_000),
        ("3 KMS keys", 3, 4_110),
    ]
    assert found.idle == (54_110, 54_110)
    machines = 16 * 1_006_000
    disks = round(16 * 100 * 80_000 / 730)
    assert found.full == (54_110 + machines + disks,) * 2


def gpu_of(*types: str, **more: Any) -> Compute:
    return gpu(instance_types=types, **more)


def test_endpoints_are_paid_in_one_zone_and_a_given_network_is_not_ours() -> None:
    endpoints = environment(network=Network(egress="endpoints", zones=3))
    assert make_estimate(endpoints, book(), INSTANCES).idle[0] == 12 * 10_000 + 4_110
    given = environment(network=Network(subnets=("subnet-0123abcd",), security_groups=("sg-0",)))
    found = make_estimate(given, book(), INSTANCES)
    assert found.idle[0] == 2_740
    assert "the network that exists" in found.left_out
    assert not any("nat" in item for item in items_needed(given, INSTANCES))


def test_lustre_is_paid_full_or_empty_and_efs_is_not() -> None:
    lustre = environment(storage=Storage(workspace="fsx-lustre", size="2400 GiB"))
    extra = (
        make_estimate(lustre, book(), INSTANCES).idle[0]
        - make_estimate(environment(), book(), INSTANCES).idle[0]
    )
    assert extra == round(2400 * 145_000 / 730)
    assert (
        "files in EFS ($0.3 a GB-month)" in make_estimate(environment(), book(), INSTANCES).left_out
    )
    assert not any("EFS" in each for each in make_estimate(lustre, book(), INSTANCES).left_out)


def test_full_is_from_the_cheapest_type_to_the_dearest() -> None:
    found = make_estimate(
        environment(compute={"gpu": gpu_of("g6", "p4d.24xlarge")}), book(), INSTANCES
    )
    full = found.computes[0].full
    assert [line.what for line in full.cheapest] == ["2 x g6.8xlarge", "2 x 100 GiB of disk"]
    assert [line.what for line in full.dearest] == ["1 x p4d.24xlarge", "1 x 100 GiB of disk"]
    assert found.full[0] < found.full[1]


def test_both_environments_of_a_queue_count_and_spot_ranges_over_zones() -> None:
    both = {"a": gpu_of("g5.xlarge", spot=True), "b": gpu_of("g5.xlarge")}
    found = make_estimate(environment(compute=both), book(), INSTANCES)
    only = [make_estimate(environment(compute={k: v}), book(), INSTANCES) for k, v in both.items()]
    fixed = found.idle[0]
    for end in (0, 1):
        assert found.full[end] - fixed == sum(each.full[end] - fixed for each in only)
    full = found.computes[0].full
    low, high = full.cheapest[0].micros, full.dearest[0].micros
    assert (low, high) == (16 * 251_500, 16 * 503_000)


def test_best_fit_stays_within_its_limit_and_others_may_pass_it_by_one_machine() -> None:
    for strategy, count in (("BEST_FIT", 1), ("BEST_FIT_PROGRESSIVE", 2)):
        compute = gpu_of("g5.12xlarge", max_vcpus=90, allocation_strategy=strategy)
        found = make_estimate(environment(compute={"gpu": compute}), book(), INSTANCES)
        assert found.computes[0].full.dearest[0].quantity == count


def test_best_fit_keeps_no_more_warm_than_it_may_start() -> None:
    compute = gpu_of("g5.12xlarge", max_vcpus=95, min_vcpus=95, allocation_strategy="BEST_FIT")
    found = make_estimate(environment(compute={"gpu": compute}), book(), INSTANCES)
    assert found.computes[0].idle == found.computes[0].full
    assert found.computes[0].idle.cheapest[0].quantity == 1


def test_the_templates_make_what_is_counted() -> None:
    folder = Path(__file__).parents[2] / "cfn"
    texts = {path.stem: path.read_text("utf-8") for path in folder.glob("*.yaml")}
    services = set(
        re.findall(r'"(?:cn\.)?com\.amazonaws\.\S+Region}\.([\w.-]+)"', texts["network"])
    )
    assert services == {*ENDPOINTS, "s3"}
    assert texts["network"].count("VpcEndpointType: Interface\n") == len(ENDPOINTS)
    for kind in ("NatGateway", "EIP"):
        assert texts["network"].count(f"Type: AWS::EC2::{kind}\n") == 1
    keys = {name: text.count("Type: AWS::KMS::Key\n") for name, text in texts.items()}
    found = {name for name, count in keys.items() if count}
    assert found == {*KEYS, *NETWORK_KEYS} and max(keys.values()) == 1


def test_warm_machines_and_their_disks_are_paid_at_rest() -> None:
    compute = gpu_of("g5.xlarge", min_vcpus=5, disk="200 GiB")
    idle = make_estimate(environment(compute={"gpu": compute}), book(), INSTANCES).computes[0].idle
    assert [(line.what, line.quantity) for line in idle.cheapest] == [
        ("2 x g5.xlarge", 2), ("2 x 200 GiB of disk", 400),
    ]  # fmt: skip


# --- words ----------------------------------------------------------------------------------


def test_the_words_of_a_plan() -> None:
    made = environment(compute={"gpu": gpu_of("g6", "p4d.24xlarge")})
    found = estimate_lines(make_estimate(made, book(), INSTANCES))
    assert found[0] == (
        "Idle: $0.05 an hour ($40 a month). With all "
        "compute at max_vcpus: $4.10 to $32.84 an hour (prices of 2026-11-21)."
    )
    assert found[1:] == [
        "Not counted: traffic through the NAT gateway ($0.045 a GB); files in EFS ($0.3 a "
        "GB-month); log ingestion ($0.5 a GB); traffic between zones and out of AWS; data in the "
        "bucket, and requests; reading and writing in EFS, and its backups; use and rotation of "
        "keys; taxes, discounts and free allowances."
    ]


def test_words_for_spot_old_prices_and_what_else_is_not_counted() -> None:
    compute = {
        "a": gpu_of("g5.xlarge", spot=True, ami="build"),
        "b": gpu_of("g5.xlarge", capacity_reservation="cr-0123abcd"),
    }
    old = price("0.045", asked=DAY - 9 * 86_400)
    mixed = PriceTable(
        PRICES | {"nat-hour": old}, {}, ("Prices of 2026-11-12 are used: no answer.",)
    )
    text = estimate_lines(make_estimate(environment(compute=compute), mixed, INSTANCES))
    assert "(prices of 2026-11-12 to 2026-11-21)" in text[0]
    assert "today's spot prices" in text[1]
    assert text[2] == "Prices of 2026-11-12 are used: no answer."
    assert "snapshots" in text[3] and "capacity reservations" in text[3]


def test_without_prices_nothing_is_invented() -> None:
    made = environment(compute={"gpu": gpu_of("g5")})
    why = dict.fromkeys(items_needed(made, INSTANCES), "pricing:GetProducts is not allowed")
    found = make_estimate(made, PriceTable({}, why), INSTANCES)
    assert estimate_lines(found)[:2] == [
        "Idle: unknown. With all compute at max_vcpus: unknown.",
        "Price unknown: pricing:GetProducts is not allowed (NAT gateway, public IPv4 address of "
        "the NAT gateway, 3 KMS keys, g5.xlarge on demand and 3 more).",
    ]
    assert "log ingestion (price unknown)" in found.left_out
    assert estimate_json(found)["lines"][0]["perHour"] is None


def test_one_unknown_type_makes_a_lower_bound_of_the_full_amount_only() -> None:
    made = environment(compute={"gpu": gpu_of("g5.xlarge", "p4d.24xlarge")})
    found = make_estimate(made, book({"on-demand:p4d.24xlarge": "it is not listed"}), INSTANCES)
    assert (found.idle_is_lower_bound, found.full_is_lower_bound) == (False, True)
    assert found.full[0] == found.idle[0]  # p4d might be had for nothing
    assert estimate_lines(found)[0].startswith(
        "Idle: $0.05 an hour ($40 a month). With all compute at max_vcpus: at least $0.05 to $16."
    )
    assert estimate_lines(found)[1] == "Price unknown: it is not listed (p4d.24xlarge on demand)."


def test_a_bound_below_half_a_cent_is_written_as_unknown() -> None:
    """Only keys have a price: `at least less than $0.01` would say nothing."""
    made = environment(compute={"gpu": gpu_of("g5.xlarge")})
    keys = PriceTable({"kms-key-month": price("1", "month")}, {})
    assert estimate_lines(make_estimate(made, keys, INSTANCES))[0] == (
        "Idle: unknown. With all compute at max_vcpus: unknown (prices of 2026-11-21)."
    )
    more = PriceTable({**keys.prices, "on-demand:g5.xlarge": price("1.006", "hour")}, {})
    assert estimate_lines(make_estimate(made, more, INSTANCES))[0].startswith(
        "Idle: unknown. With all compute at max_vcpus: at least $"
    )


def test_a_family_that_is_not_there_is_named() -> None:
    compute = {"gpu": gpu_of("g5.xlarge", "optimal", min_vcpus=1)}
    known = replace(INSTANCES, unknown={"optimal": "AWS Batch chooses the instance types itself"})
    found = make_estimate(environment(compute=compute), book(), known)
    assert found.unknown == {"compute.gpu: optimal": "AWS Batch chooses the instance types itself"}
    assert found.idle_is_lower_bound and found.full_is_lower_bound


def test_amounts_are_shown_to_the_cent_and_small_ones_are_not_nothing() -> None:
    given = Network(subnets=("subnet-0123abcd",), security_groups=("sg-0123abcd",))
    (text, *_) = estimate_lines(make_estimate(environment(network=given), book(), INSTANCES))
    assert text.startswith(
        "Idle: less than $0.01 an hour ($2.00 a month). With all compute "
        "at max_vcpus: less than $0.01 "
    )
    many = environment(compute={"gpu": gpu_of("p4d.24xlarge", max_vcpus=96_000)})
    assert "$32,783." in estimate_lines(make_estimate(many, book(), INSTANCES))[0]


def test_json_has_every_line_that_makes_it_up() -> None:
    made = environment(compute={"gpu": gpu_of("g6", min_vcpus=4)})
    found = make_estimate(made, book(), INSTANCES)
    said = json.loads(json.dumps(estimate_json(found)))
    for name, ends in (("idle", found.idle), ("full", found.full)):
        assert said[name]["perHour"] == {"low": ends[0] / 1e6, "high": ends[1] / 1e6}
        assert said[name]["perMonth"] == {
            "low": ends[0] * 730 / 1e6, "high": ends[1] * 730 / 1e6,
        }  # fmt: skip
        for end, kind in (("low", "cheapest"), ("high", "dearest")):
            parts = [*said["lines"], *said["compute"]["gpu"][name][kind]]
            total = sum(Decimal(str(part["perHour"])) for part in parts)
            assert total == Decimal(str(said[name]["perHour"][end]))
    assert said["lines"][0] == {
        "what": "NAT gateway", "quantity": 1, "unit": "hour", "unitPrice": 0.045,
        "perHour": 0.045, "date": "2026-11-21", "since": "2026-10-01", "source": "AWS Price List",
    }  # fmt: skip


# --- any environment ------------------------------------------------------------------------


def computes() -> st.SearchStrategy[Compute]:
    return st.builds(
        lambda types, limits, spot, disk, best: Compute(
            instance_types=tuple(types), min_vcpus=min(limits), max_vcpus=max(max(limits), 1),
            spot=spot, disk=f"{disk} GiB",
            allocation_strategy="BEST_FIT" if best and not spot else "",
        ),
        st.lists(st.sampled_from([*SIZES, "optimal"]), min_size=1, max_size=3, unique=True),
        st.tuples(st.integers(0, 300), st.integers(0, 300)), st.booleans(), st.integers(30, 500),
        st.booleans(),
    )  # fmt: skip


def environments() -> st.SearchStrategy[Environment]:
    return st.builds(
        Environment, region=st.just("eu-west-1"),
        network=st.builds(Network, egress=st.sampled_from(["nat", "endpoints"]),
                          zones=st.integers(1, 3)),
        storage=st.builds(Storage, workspace=st.sampled_from(["efs", "fsx-lustre", "none"])),
        compute=st.dictionaries(st.sampled_from(["a", "b", "c"]), computes(), max_size=3),
    )  # fmt: skip


def missing() -> st.SearchStrategy[dict[str, str]]:
    items = st.lists(st.sampled_from(sorted(PRICES)), max_size=6)
    return items.map(lambda found: dict.fromkeys(found, "no reason"))


@given(environments(), missing())
def test_at_rest_costs_no_more_than_full_and_the_least_no_more_than_the_most(
    made: Environment, without: dict[str, str]
) -> None:
    found = make_estimate(made, book(without), INSTANCES)
    assert 0 <= found.idle[0] <= found.idle[1] <= found.full[1]
    assert found.idle[0] <= found.full[0] <= found.full[1]
    assert estimate_lines(found) and json.dumps(estimate_json(found))


@given(environments(), missing(), st.integers(0, 200), st.sampled_from(["min_vcpus", "max_vcpus"]))
def test_more_vcpus_never_cost_less(
    made: Environment, without: dict[str, str], more: int, field: str
) -> None:
    grown = {}
    for name, compute in made.compute.items():
        value = getattr(compute, field) + more
        if field == "min_vcpus":
            value = min(value, compute.max_vcpus)
        grown[name] = replace(compute, **{field: value})
    small = make_estimate(made, book(without), INSTANCES)
    large = make_estimate(replace(made, compute=grown), book(without), INSTANCES)
    for before, after in zip((*small.idle, *small.full), (*large.idle, *large.full), strict=True):
        assert before <= after


@given(environments(), missing(), st.dictionaries(st.sampled_from(sorted(PRICES)),
                                                  st.integers(0, 10_000)))  # fmt: skip
def test_whatever_an_unknown_price_is_the_truth_is_not_below_the_estimate(
    made: Environment, without: dict[str, str], truth: dict[str, int]
) -> None:
    said = make_estimate(made, book(without), INSTANCES)
    real = {
        item: price(str(Decimal(truth[item]) / 1000), PRICES[item].per)
        if item in truth and item in without
        else PRICES[item]
        for item in PRICES
    }
    true = make_estimate(made, PriceTable(real), INSTANCES)
    for name in ("idle", "full"):
        below = zip(getattr(said, name), getattr(true, name), strict=True)
        assert all(bound <= amount for bound, amount in below)
        if not getattr(said, f"{name}_is_lower_bound"):
            assert getattr(said, name) == getattr(true, name)


@given(environments())
def test_what_is_needed_is_all_that_is_needed(made: Environment) -> None:
    items = items_needed(made, INSTANCES)
    assert len(items) == len(set(items))
    full = make_estimate(made, book(), INSTANCES)
    assert (
        make_estimate(made, PriceTable({item: PRICES[item] for item in items}), INSTANCES) == full
    )
    names = {name for each in made.compute.values() for name in each.instance_types}
    assert bool(full.unknown) == ("optimal" in names)


# --- asking ---------------------------------------------------------------------------------


class Asked:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def instances(self, region: str, names: Any) -> InstanceTypes:
        self.calls.append((region, list(names)))
        return INSTANCES

    def ask(self, region: str, items: Any) -> PriceTable:
        self.calls.append((region, list(items)))
        return book()


def test_a_file_is_priced_with_two_questions() -> None:
    text = """
    region = "eu-west-1"
    [compute.gpu]
    instance_types = ["g5", "g6.xlarge"]
    max_vcpus = 64
    """
    made = msgspec.convert(tomllib.loads(text), Environment)
    asked = Asked()
    assert estimate_environment(made, asked).full[1] > 0
    assert asked.calls[0] == ("eu-west-1", ["g5", "g6.xlarge"])
    assert "on-demand:g5.12xlarge" in asked.calls[1][1] and len(asked.calls) == 2


def test_this_machine_costs_nothing_and_nobody_is_asked() -> None:
    asked = Asked()
    assert (
        estimate_environment(Environment(), asked)
        == Estimate()
        == make_estimate(Environment(), book(), INSTANCES)
    )
    assert (asked.calls, estimate_lines(Estimate())) == ([], [])
