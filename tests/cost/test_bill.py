"""Bills: attempts, hosts, shares, and prices over a span."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.batch.hosts import RunHost
from batchml.aws.pricing.prices import InstanceType, Price, PriceTable
from batchml.aws.pricing.spot import SpotHistory, mean_price
from batchml.cost.bill import (
    Bill,
    Rates,
    RunCost,
    UsualDuration,
    bill_from_history,
    cost_of_bill,
    cost_of_record,
    free_bill,
    group_costs,
    make_bill,
    merge_bills,
    need_of,
    sum_costs,
    time_span,
    unused_cost,
    usual_duration,
)
from batchml.cost.quote import Candidate, Usd, make_quote, share_of
from batchml.cost.render import (
    bill_json,
    bill_lines,
    quote_json,
    quote_lines,
    spending_json,
    spending_lines,
)
from batchml.model.run import SWEEP_TAG, Attempt, JobStatus, Record, Run
from batchml.runtime.protocol.variables import ARRAY_MAP

HOUR = 3_600_000
T0 = 1_795_276_800_000  # 2026-11-21T16:00:00Z
G5 = InstanceType("g5.xlarge", 4, 16_384, 1, "x86_64")
G5_4 = InstanceType("g5.4xlarge", 16, 65_536, 1, "x86_64")
SPOT = SpotHistory(
    {
        ("g5.xlarge", "eu-west-1a"): [(T0 - HOUR, Decimal("0.30")), (T0 + HOUR, Decimal("0.50"))],
        ("g5.xlarge", "eu-west-1b"): [(T0 - HOUR, Decimal("0.40"))],
    }
)


def price(usd: str, per: str = "hour") -> Price:
    return Price(Decimal(usd), Decimal(usd), per, T0 // 1000, "2026-10-01", "AWS Price List")


BOOK = PriceTable(
    {
        "on-demand:g5.xlarge": price("1"),
        "on-demand:g5.4xlarge": price("1.6"),
        "gp3-gb-month": price("0.073", "GB-month"),
    }
)
RATES = Rates(BOOK, SPOT, T0 + 10 * HOUR)


def attempt(start: float, stop: float | None, host: str = "", code: int | None = 0) -> Attempt:
    """Times in hours after T0."""
    ended = None if stop is None else T0 + int(stop * HOUR)
    return Attempt(T0 + int(start * HOUR), ended, None if stop is None else code, host=host)


def run(*attempts: Attempt, status: str = "SUCCEEDED", **more: Any) -> Run:
    given = {"vcpus": 4, "memory_mib": 8_192, "gpus": 1, "created_at": T0, **more}
    return Run("j-1", "lenet", "gpu", JobStatus(status), attempts=attempts, **given)


def kind(instance: InstanceType, of: Run, **more: Any) -> Candidate:
    share = share_of(need_of(of), instance)
    assert share is not None
    return Candidate(instance, share, **more)


def usd(low: str, high: str = "") -> Usd:
    return Usd(Decimal(low), Decimal(high or low))


def test_a_run_costs_its_time_on_its_share_of_the_host() -> None:
    one = run(attempt(0, 1.5), vcpus=2, gpus=0)
    found = make_bill(one, [kind(G5, one, disk_gib=100)], {}, RATES, T0)
    assert found.attempts[0].share == usd("0.5")
    assert found.usd == usd("0.7575")  # 1.5 h x 0.5 x (1 + 0.01 of disk)
    assert found.upper_bound == 0.7575
    assert not found.is_lower_bound


def test_failed_attempts_are_paid_and_told_apart() -> None:
    tried = run(attempt(0, 1, code=1), attempt(1, 3, code=1), attempt(3, 4))
    found = make_bill(tried, [kind(G5, tried)], {}, RATES, T0)
    assert (found.usd, found.failed) == (usd("4"), usd("3"))
    assert "Of this, $3.00 went into 2 attempts that failed." in bill_lines(tried, found)
    failed = replace(tried, status=JobStatus.FAILED, exit_code=1)
    assert make_bill(failed, [kind(G5, tried)], {}, RATES, T0).failed == usd("4")


def test_what_its_user_stopped_has_not_failed() -> None:
    stopped = run(attempt(0, 1, code=143), status="FAILED", is_terminated=True, exit_code=143)
    found = make_bill(stopped, [kind(G5, stopped)], {}, RATES, T0)
    assert (found.usd, found.failed) == (usd("1"), usd("0"))


def test_a_running_attempt_is_metered_until_now() -> None:
    going = run(
        attempt(0, 1, code=1), attempt(2, None), status="RUNNING",
        environment={"BATCHML_MAX_SECONDS": "7200"},
    )  # fmt: skip
    found = make_bill(going, [kind(G5, going)], {}, RATES, T0 + int(2.5 * HOUR))
    assert found.usd == usd("1.5")
    assert found.failed == usd("1")
    assert found.hour == usd("1")
    lines = bill_lines(going, found)
    assert "So far: $1.50, and $1.00 an hour." in lines
    assert "--max-cost allows 2:00:00 of running time; 30:00 is left." in lines
    assert bill_json(going, found)["cost"]["isFinal"] is False


def test_spot_is_the_mean_price_of_its_zone_over_the_span() -> None:
    one = run(attempt(0, 2, host="i-1"))
    found = make_bill(
        one,
        [kind(G5, one, spot=True)],
        {"i-1": RunHost("g5.xlarge", "eu-west-1a", True)},
        RATES,
        T0,
    )
    assert found.usd == usd("0.8")  # an hour at 0.30, an hour at 0.50
    assert found.attempts[0].host == "g5.xlarge spot in eu-west-1a"
    assert found.rates[0].source == "EC2 spot history"


def test_without_its_host_a_bill_lies_between() -> None:
    one = run(attempt(0, 1, host="gone"))
    kinds = [kind(G5, one, spot=True), kind(G5_4, one)]
    found = make_bill(one, kinds, {}, RATES, T0)
    assert found.usd == usd("0.3", "1.6")
    assert found.upper_bound == 1.6
    assert "Cost: $0.300 to $1.60." in bill_lines(one, found)
    known = make_bill(one, kinds, {"gone": RunHost("g5.4xlarge", "eu-west-1b", False)}, RATES, T0)
    assert known.usd == usd("1.6")


def test_a_price_that_is_not_known_makes_a_lower_bound() -> None:
    one = run(attempt(0, 1))
    unpriced = Rates(PriceTable({}, {"on-demand:g5.xlarge": "pricing:GetProducts is not allowed"}))
    found = make_bill(one, [kind(G5, one)], {}, unpriced, T0)
    assert found.upper_bound is None
    lines = bill_lines(one, found)
    assert "Cost: unknown." in lines
    assert "Price unknown: pricing:GetProducts is not allowed (g5.xlarge)." in lines
    none = make_bill(one, [], {}, RATES, T0, "the queue gpu does not exist any more")
    assert none.unknown == {"an unknown host": "the queue gpu does not exist any more"}
    old = run(Attempt(T0 - 100 * 24 * HOUR, T0 - 99 * 24 * HOUR))
    forgotten = make_bill(old, [kind(G5, old, spot=True)], {}, RATES, T0)
    assert forgotten.unknown == {"g5.xlarge spot": "AWS keeps spot prices for 90 days"}


def test_nodes_are_paid_whole_and_all() -> None:
    gang = run(attempt(0, 1), nodes=4, vcpus=1, gpus=0)
    assert make_bill(gang, [kind(G5, gang)], {}, RATES, T0).usd == usd("4")


def test_an_attempt_that_never_started_costs_nothing() -> None:
    failed = run(Attempt(reason="CannotPullContainerError: no"), status="FAILED")
    assert bill_lines(failed, make_bill(failed, [kind(G5, failed)], {}, RATES, T0)) == [
        "It has cost nothing: no attempt has started."
    ]
    assert time_span(failed, T0) is None


def test_an_array_costs_what_its_children_do() -> None:
    children = [replace(run(attempt(0, 1)), job_id=f"j-1:{index}") for index in range(3)]
    bills = [make_bill(each, [kind(G5, each)], {}, RATES, T0) for each in children]
    found = merge_bills("j-1", bills)
    assert found.usd == usd("3")
    assert "2/1" in bill_lines(run(array_size=3), found)[0]
    again = replace(children[1], environment={ARRAY_MAP: "2 5-6"})
    rerun = merge_bills("j-1", [make_bill(again, [kind(G5, again)], {}, RATES, T0)])
    assert "5/1" in bill_lines(run(array_size=3), rerun)[0]
    many = merge_bills("j-1", bills * 10)
    assert bill_lines(run(array_size=30), many)[0] == "30 attempts, 30:00:00 of running."


def test_children_that_are_forgotten_leave_the_cost_of_an_array_unknown() -> None:
    child = replace(run(attempt(0, 1)), job_id="j-1:2")
    found = merge_bills("j-1", [make_bill(child, [kind(G5, child)], {}, RATES, T0)], forgotten=2)
    assert (found.usd, found.is_lower_bound, found.upper_bound) == (usd("1"), True, None)
    lines = bill_lines(run(array_size=3), found)
    assert "Cost: at least $1.00." in lines
    assert "Price unknown: AWS Batch has forgotten them (2 children)." in lines
    free = merge_bills("j-1", [free_bill(child, "this machine", T0)], forgotten=2)
    assert (free.is_free, free.is_lower_bound) == (True, False)


@pytest.mark.parametrize(
    ("unused", "words"),
    [
        (0.25, ["Of this, $1.00 paid for 25 % of 1 GPU that it did not use."]),
        (0.004, []),
        (None, []),
    ],
)
def test_the_resources_that_a_run_did_not_use_have_a_price(
    unused: float | None, words: list[str]
) -> None:
    one = run(attempt(0, 4), gpus=1)
    bill = make_bill(one, [kind(G5, one)], {}, RATES, T0)
    assert [line for line in bill_lines(one, bill, unused) if "not use" in line] == words
    told = bill_json(one, bill, unused)["unused"]
    assert told == (unused and {"part": unused, "low": 4 * unused, "high": 4 * unused})


def test_without_a_price_the_unused_resources_are_still_named() -> None:
    one = replace(run(attempt(0, 1)), vcpus=4, gpus=0)
    free = free_bill(one, "this machine", T0)
    assert "It did not use 78 % of 4 vCPUs." in bill_lines(one, free, 0.775)
    assert unused_cost(free, 0.775) == usd("0")


def test_a_machine_without_a_price_is_free() -> None:
    one = run(attempt(0, 1))
    free = free_bill(one, "this machine", T0)
    shown, cost, words = bill_lines(one, free)
    assert shown.splitlines()[1].split() == ["1", "this", "machine", "1:00:00", "$0.00", "ended"]
    assert (cost, "costs nothing" in words) == ("Cost: $0.00.", True)
    told = bill_json(one, free)["cost"]
    assert (told["usd"], told["seconds"], told["prices"]) == (0.0, 3600.0, [])


@settings(max_examples=60)
@given(st.data())
def test_a_bill_is_the_sum_of_its_attempts_and_grows_with_time(data: st.DataObject) -> None:
    hours = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=6))
    ends = [sum(hours[: index + 1]) for index in range(len(hours))]
    attempts = [attempt(end - long, end) for end, long in zip(ends, hours, strict=True)]
    going = run(*attempts, attempt(ends[-1], None), status="RUNNING")
    kinds = [kind(G5, going), kind(G5_4, going)]
    cut = data.draw(st.integers(0, 50))
    found = make_bill(going, kinds, {}, RATES, T0 + (ends[-1] + cut) * HOUR)
    assert found.usd == usd(str(ends[-1] + cut), str(Decimal("1.6") * (ends[-1] + cut)))
    assert found.failed.high <= found.usd.high
    later = make_bill(going, kinds, {}, RATES, T0 + (ends[-1] + cut + 1) * HOUR)
    assert later.usd.low - found.usd.low == Decimal(1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 99)), min_size=1, max_size=8),
       st.integers(0, 60), st.integers(1, 40))  # fmt: skip
def test_the_mean_is_that_of_every_moment(
    changes: list[tuple[int, int]], start: int, length: int
) -> None:
    table = sorted({at: Decimal(usd) for at, usd in changes}.items())
    found = mean_price(table, start, start + length)
    if start < table[0][0]:
        assert found is None
        return
    moments = [
        [usd for at, usd in table if at <= moment][-1] for moment in range(start, start + length)
    ]
    assert found is not None
    assert abs(found - sum(moments, Decimal(0)) / length) < Decimal("1e-20")


# --- many runs ------------------------------------------------------------------------------


def test_totals_are_by_queue_and_by_job_the_dearest_first() -> None:
    spent = [
        RunCost("a", "lenet", "gpu", T0, usd("1"), usd("0.5"), 3600),
        RunCost("b", "lenet", "cpu", T0, usd("0.1"), seconds=60),
        RunCost("c", "resnet", "gpu", T0, usd("3"), seconds=60, unknown=("no answer (g6)",)),
    ]
    by_job = group_costs(spent, lambda each: each.name)
    assert [(each.name, each.runs, each.usd.low) for each in by_job] == [
        ("resnet", 1, Decimal(3)), ("lenet", 2, Decimal("1.1")),
    ]  # fmt: skip
    assert sum_costs("", spent).is_lower_bound
    lines = spending_lines(spent, (), "7d")
    assert "The last 7d: at least $4.10 for 3 runs, 1:02:00 of running." in lines
    assert "Price unknown: no answer (g6)." in lines
    assert spending_json(spent, (), T0)["queues"]["gpu"]["low"] == 4.0
    assert spending_lines([], (), "1h") == ["No runs in the last 1h."]


def test_the_runs_of_a_sweep_are_one_row() -> None:
    tags = {SWEEP_TAG: "20261128-050000-abcdef"}
    bill = Bill("j", is_free=True)
    runs = [replace(run(), name=name, tags=tags) for name in ("mn-w1", "mn-w12", "mn-controller")]
    spent = [cost_of_bill(each, bill) for each in (*runs, replace(run(), name="mn-w2"))]
    record = Record(job_id="j-1", name="mn-w13", tags=tags, at=T0)
    found = spending_json([*spent, cost_of_record(record, 1.5)], (), T0)["jobs"]
    assert {name: each["runs"] for name, each in found.items()} == {"sweep mn": 4, "mn-w2": 1}
    assert found["sweep mn"]["low"] == 1.5


def test_of_a_run_that_batch_forgot_its_cost_was_kept() -> None:
    record = Record(job_id="j-1", name="lenet", queue="gpu", at=T0, attempts=(attempt(0, 2),))
    assert cost_of_record(record, 1.5) == RunCost(
        "j-1", "lenet", "gpu", T0, usd("1.5"), seconds=7200
    )
    one = run(attempt(0, 2))
    kept = bill_from_history(one, 1.5)
    assert (kept.upper_bound, kept.seconds) == (1.5, 7200)
    assert bill_lines(one, kept) == [
        "Cost: $1.50, from the history: AWS Batch has forgotten the run."
    ]
    assert cost_of_bill(one, kept).usd == usd("1.5")


def test_a_quote_says_what_runs_of_the_job_have_taken() -> None:
    def ended(hours: float, name: str = "lenet", status: str = "SUCCEEDED") -> Record:
        return Record(name=name, status=status, attempts=(attempt(0, hours),))

    records = [ended(2), ended(1), ended(9, "resnet"), ended(9, status="FAILED"), ended(4)]
    before = usual_duration(records, "lenet")
    assert before == UsualDuration(3, 7200.0)
    one = run()
    found = make_quote(need_of(one), [kind(G5, one), kind(G5_4, one)], {}, BOOK)
    assert "Its last 3 runs took 2:00:00 (the median): that is $2.00 to $3.20." in quote_lines(
        found, before
    )
    assert quote_json(found, before)["usual"]["high"] == 3.2
    assert usual_duration(records, "other") is None
    assert quote_json(found)["usual"] is None


def test_what_its_budget_stopped_has_not_failed() -> None:
    stopped = run(
        attempt(0, 1, code=143), status="FAILED", exit_code=143,
        status_reason="Essential container in task exited",
        environment={"BATCHML_MAX_SECONDS": "3700"},
    )  # fmt: skip
    assert make_bill(stopped, [kind(G5, stopped)], {}, RATES, T0).failed == usd("0")
    lost = replace(stopped, status_reason="Host EC2 (instance i-0) terminated.")
    assert make_bill(lost, [kind(G5, lost)], {}, RATES, T0).failed == usd("1")


def test_an_empty_bill_is_nothing() -> None:
    assert Bill("j").usd == Usd()
    assert not Bill("j").is_running
