"""Fair share: shares of a queue with a policy (docs/behaviours.md, B155-B163)."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batchml.local.batch import fair_share
from batchml.local.batch.state import ShareUsage
from tests.support.engine_world import World, world


def policy(w: World, name: str = "p", decay: int = 0, reserve: int = 0, **weights: float) -> None:
    distribution = [
        {"shareIdentifier": share.replace("_", "*"), "weightFactor": weight}
        for share, weight in weights.items()
    ]
    fair = {
        "shareDecaySeconds": decay,
        "computeReservation": reserve,
        "shareDistribution": distribution,
    }
    w.call("CreateSchedulingPolicy", name=name, fairsharePolicy=fair)


def fair(
    vcpus: int = 2, journal: Path | None = None, decay: int = 0, reserve: int = 0, **weights: float
) -> World:
    """A world with a queue `fair` whose policy `p` has these weights."""
    w = world(vcpus, journal=journal)
    policy(w, "p", decay, reserve, **weights)
    w.queue("fair", schedulingPolicyArn="arn:aws:batch:us-east-1:000000000000:scheduling-policy/p")
    return w


def submit(w: World, share: str, vcpus: int = 1, priority: int = 0, **more: Any) -> str:
    return w.submit(vcpus, queue="fair", shareIdentifier=share,
                    schedulingPriorityOverride=priority, **more)  # fmt: skip


# --- the sum ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "weight"),
    [("a", 0.5), ("ab", 1.0), ("xy", 2.0), ("xyz", 2.0), ("x", 1.0), ("none", 1.0)],
)
def test_a_share_that_is_not_listed_weighs_one_and_a_star_stands_for_any_end(
    share: str, weight: float
) -> None:
    """B156."""
    entries = [
        {"shareIdentifier": "a", "weightFactor": 0.5},
        {"shareIdentifier": "xy*", "weightFactor": 2.0},
        {"shareIdentifier": "plain"},
    ]
    weights = fair_share.weights_of({"shareDistribution": entries})
    assert fair_share.weight_of(weights, share) == weight
    assert fair_share.weight_of(fair_share.weights_of({}), share) == 1.0


def test_what_was_used_fades_with_the_decay_of_the_policy() -> None:
    """B157: to 1/e within shareDecaySeconds, of which 0 is 600."""
    used = ShareUsage(1000.0, 0, 0)
    assert fair_share.decay(used, 600_000, {}).decayed == pytest.approx(367.88, abs=0.01)
    assert fair_share.decay(used, 60_000, {"shareDecaySeconds": 60}).decayed == pytest.approx(
        367.88, 1e-4
    )
    assert fair_share.decay(used, -5, {}).decayed == 1000.0  # a clock that went back


@given(
    vcpus=st.integers(0, 64),
    before=st.floats(0, 1e9),
    first=st.integers(0, 10**7),
    second=st.integers(0, 10**7),
    decay=st.integers(0, 604_800),
)
def test_it_does_not_matter_how_often_the_usage_is_looked_at(
    vcpus: int, before: float, first: int, second: int, decay: int
) -> None:
    rules = {"shareDecaySeconds": decay}
    at_once = fair_share.decay(ShareUsage(before, 0, vcpus), first + second, rules)
    twice = fair_share.decay(
        fair_share.decay(ShareUsage(before, 0, vcpus), first, rules), first + second, rules
    )
    assert twice.decayed == pytest.approx(at_once.decayed, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    ("reservation", "active", "part"),
    [(50, 1, 0.5), (50, 2, 0.25), (50, 3, 0.125), (25, 2, 0.0625), (0, 1, 0.0), (50, 0, 0.0)],
)
def test_the_reserve_is_that_of_the_api_reference(
    reservation: int, active: int, part: float
) -> None:
    """B158."""
    assert fair_share.reserved_fraction({"computeReservation": reservation}, active) == part


# --- a queue with a policy --------------------------------------------------------------------


def test_the_share_that_uses_least_is_served_next() -> None:
    """B155."""
    w = fair(vcpus=3)
    jobs = [submit(w, "a") for _ in range(4)]
    b = submit(w, "b")
    w.end(jobs[0])
    assert w.active() == [*jobs[1:3], b]
    w.end(b)
    assert w.active() == [*jobs[1:3], jobs[3]]


def test_a_share_with_an_eighth_of_the_weight_gets_eight_times_as_much() -> None:
    """B155."""
    w = fair(vcpus=9, a=0.125, b=1.0)
    holder = w.submit(vcpus=9)
    for _ in range(40):
        submit(w, "b")
        submit(w, "a")
    w.end(holder)
    running = Counter(w.jobs[job_id].spec.share for job_id in w.active())
    assert running == {"a": 8, "b": 1}


def test_what_was_used_before_counts_until_it_has_faded() -> None:
    """B157."""
    w = fair(vcpus=1)
    first = submit(w, "a")
    w.tick(600)
    a, b, c = submit(w, "a"), submit(w, "b"), submit(w, "c")
    w.end(first)
    assert w.active() == [b]
    w.end(b)
    assert w.active() == [c]
    w.end(c)
    assert w.active() == [a]
    w.tick(10**6)
    again = [submit(w, "a"), submit(w, "b")]
    w.end(a)
    assert w.active() == [again[1]]


def test_in_a_share_the_higher_priority_goes_first_then_the_older() -> None:
    """B159."""
    w = fair(vcpus=1)
    holder = submit(w, "a")
    low, high, high_too, mid = (submit(w, "a", priority=p) for p in (0, 9, 9, 5))
    for job_id, after in ((holder, high), (high, high_too), (high_too, mid), (mid, low)):
        w.end(job_id)
        assert w.active() == [after]


def test_a_retried_job_goes_before_those_of_a_higher_priority() -> None:
    """B20, B159."""
    w = fair(vcpus=1)
    first = submit(w, "a", retryStrategy={"attempts": 2})
    submit(w, "a", priority=99)
    w.end(first, 1)
    assert w.active() == [first]


def test_priorities_mean_nothing_without_a_policy() -> None:
    """B159."""
    w = world(vcpus=1)
    holder = w.submit()
    low, high = (w.submit(schedulingPriorityOverride=p) for p in (0, 9))
    w.end(holder)
    assert w.status(low, high) == ["STARTING", "RUNNABLE"]


def test_the_priority_is_0_to_9999() -> None:
    w = fair()
    for wrong in (-1, 10_000):
        asked = {"jobName": "n", "jobQueue": "fair", "jobDefinition": "d", "shareIdentifier": "a"}
        assert "between 0 and 9999" in w.refusal(
            "SubmitJob", **asked, schedulingPriorityOverride=wrong
        )


def test_a_part_is_kept_for_shares_of_which_nothing_runs() -> None:
    """B158."""
    w = fair(vcpus=99, reserve=50)
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 8})
    a = [submit(w, "a") for _ in range(8)]
    assert len(w.active()) == 4
    b = [submit(w, "b") for _ in range(8)]
    running = Counter(w.jobs[job_id].spec.share for job_id in w.active())
    assert running == {"a": 5, "b": 1}  # two shares: a quarter of 8 is kept
    c = submit(w, "c")
    assert w.status(c) == ["STARTING"]
    while active := w.active():
        w.end(active[0])
    assert set(w.status(*a, *b, c)) == {"SUCCEEDED"}


def test_a_job_as_large_as_the_environment_starts_when_nothing_else_runs() -> None:
    """B158: what is kept is for those of whom nothing runs."""
    w = fair(vcpus=4, reserve=99)
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 4})
    first, second = submit(w, "a", 4), submit(w, "b", 4)
    assert w.status(first, second) == ["STARTING", "RUNNABLE"]
    w.end(first)
    assert w.status(second) == ["STARTING"]


def test_a_share_is_given_if_and_only_if_the_queue_has_a_policy() -> None:
    """B160."""
    w = fair()
    asked = {"jobName": "n", "jobDefinition": "d"}
    assert "must be provided" in w.refusal("SubmitJob", **asked, jobQueue="fair")
    assert "can not be" in w.refusal("SubmitJob", **asked, jobQueue="q", shareIdentifier="a")
    for name in ("a-b", "ä", "a" * 256, "*"):
        text = w.refusal("SubmitJob", **asked, jobQueue="fair", shareIdentifier=name)
        assert "letters and digits" in text
    assert submit(w, "a" * 255)


def test_at_most_500_shares_wait_in_a_queue() -> None:
    """B160."""
    w = fair(vcpus=1)
    submit(w, "first")
    for number in range(500):
        submit(w, f"s{number}")
    asked = {"jobName": "n", "jobQueue": "fair", "jobDefinition": "d"}
    assert "500 active" in w.refusal("SubmitJob", **asked, shareIdentifier="more")
    assert submit(w, "s7")


# --- policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fairshare", "text"),
    [
        ({"shareDecaySeconds": 604_801}, "shareDecaySeconds"),
        ({"computeReservation": 100}, "computeReservation"),
        ({"computeReservation": -1}, "computeReservation"),
        ({"shareDistribution": [{"shareIdentifier": "a-b"}]}, "letters and digits"),
        ({"shareDistribution": [{"shareIdentifier": "a", "weightFactor": 0.0}]}, "weightFactor"),
        ({"shareDistribution": [{"shareIdentifier": "a", "weightFactor": 1000.0}]}, "weightFactor"),
        ({"shareDistribution": [{"shareIdentifier": "a"}] * 2}, "overlap"),
        ({"shareDistribution": [{"shareIdentifier": s} for s in ("ab1", "z", "ab*")]}, "overlap"),
        ({"shareDistribution": [{"shareIdentifier": s} for s in ("a", "a*")]}, "overlap"),
        ({"shareDistribution": [{"shareIdentifier": s} for s in ("b*", "a", "bc*")]}, "overlap"),
    ],
)
def test_a_policy_out_of_its_limits_is_refused(fairshare: dict[str, Any], text: str) -> None:
    """B161."""
    w = world()
    assert text in w.refusal("CreateSchedulingPolicy", name="p", fairsharePolicy=fairshare)


def test_policies_are_made_shown_changed_and_deleted(tmp_path: Path) -> None:
    """B161."""
    w = fair(journal=tmp_path / "journal.db", a=0.5)
    policy(w, "other")
    arn = "arn:aws:batch:us-east-1:000000000000:scheduling-policy/"
    assert "already exists" in w.refusal("CreateSchedulingPolicy", name="p")
    assert "relationship" in w.refusal("DeleteSchedulingPolicy", arn=arn + "p")
    w.call("UpdateSchedulingPolicy", arn=arn + "p", fairsharePolicy={"shareDecaySeconds": 9})
    w.restart()
    found = w.read("DescribeSchedulingPolicies", arns=[arn + "p", arn + "none"])
    (shown,) = found["schedulingPolicies"]
    assert (shown["name"], shown["fairsharePolicy"]) == ("p", {"shareDecaySeconds": 9})
    listed = w.read("ListSchedulingPolicies")["schedulingPolicies"]
    assert listed == [{"arn": arn + "other"}, {"arn": arn + "p"}]
    w.call("DeleteSchedulingPolicy", arn=arn + "other")
    w.call("DeleteSchedulingPolicy", arn=arn + "other")
    assert "not found" in w.refusal("UpdateSchedulingPolicy", arn=arn + "other")
    assert w.read("ListSchedulingPolicies")["schedulingPolicies"] == [{"arn": arn + "p"}]


def test_a_policy_can_be_replaced_but_not_added_to_a_first_in_first_out_queue() -> None:
    """B162."""
    w = fair(vcpus=2, a=0.5)
    policy(w, "other", b=0.001)
    assert "can not be added" in w.refusal("UpdateJobQueue", jobQueue="q", schedulingPolicyArn="p")
    assert "not found" in w.refusal("UpdateJobQueue", jobQueue="fair", schedulingPolicyArn="no")
    holder = submit(w, "z", 2)
    a, b = submit(w, "a", 2), submit(w, "b", 2)
    w.tick(60)
    w.call("UpdateJobQueue", jobQueue="fair", schedulingPolicyArn="other")
    w.end(holder)
    assert w.active() == [a]  # neither has used anything: the older
    more = [submit(w, "a", 1), submit(w, "b", 1)]
    w.tick(60)
    w.end(a)
    assert w.active() == [b]
    w.tick(60)
    w.end(b)
    assert w.active() == [more[1], more[0]]


def test_a_queue_made_again_has_no_past() -> None:
    """B163."""
    w = fair(vcpus=3)
    running = submit(w, "a")
    w.drop_queue("fair")
    w.queue("fair", schedulingPolicyArn="p")
    assert {share: use.vcpus for share, use in w.state.usage["fair"].items()} == {"a": 1}
    w.end(running, 143)
    assert w.state.usage["fair"]["a"].vcpus == 0
    w.drop_queue("fair")
    assert "fair" not in w.state.usage
    w.queue("fair", schedulingPolicyArn="p")
    gone = submit(w, "b")
    w.drop_queue("fair")
    w.end(gone, 143)
    assert "fair" not in w.state.usage


def test_a_restarted_server_knows_what_runs_and_not_what_ran(tmp_path: Path) -> None:
    """B163."""
    w = fair(vcpus=2, journal=tmp_path / "journal.db")
    a = submit(w, "a")
    w.tick(600)
    w.restart()
    (usage,) = w.state.usage["fair"].values()
    assert (usage.vcpus, usage.decayed) == (1, 0.0)
    b = submit(w, "b")
    more = [submit(w, "a"), submit(w, "b")]
    w.tick(5)
    w.end(b)
    assert w.active() == [a, more[1]]


def test_an_array_takes_its_turns_within_its_share() -> None:
    """B155."""
    w = fair(vcpus=2)
    array = w.array(6, queue="fair", shareIdentifier="a")
    b = [submit(w, "b") for _ in range(2)]
    w.end(f"{array}:0")
    w.tick(1)
    assert w.active() == [f"{array}:1", b[0]]


# The same examples each time: in so few steps chance may take one of many beyond the bounds.
@settings(
    max_examples=8,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
@given(
    weights=st.lists(st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0]), min_size=2, max_size=4),
    steps=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    decay=st.sampled_from([0, 1800]),
)
def test_in_the_long_run_each_share_gets_the_inverse_of_its_weight(
    weights: list[float], steps: list[int], decay: int
) -> None:
    """B155: whatever its jobs take, while all of them always have some that wait."""
    names = "abcd"[: len(weights)]
    w = fair(8, None, decay, 0, **dict(zip(names, weights, strict=True)))
    used: Counter[str] = Counter()
    until: dict[str, int] = {}
    for name in names:
        for _ in range(9):
            submit(w, name)
    for step in range(500):
        for job_id in w.busy():
            share = w.jobs[job_id].spec.share
            lasts = steps[names.index(share) % len(steps)]
            if until.setdefault(job_id, step + lasts) <= step:
                submit(w, share)
                w.end(job_id)
        used.update(w.jobs[job_id].spec.share for job_id in w.busy())
        w.now += 5000
    total = sum(1 / weight for weight in weights)
    for name, weight in zip(names, weights, strict=True):
        expected = 1 / weight / total
        assert used[name] / sum(used.values()) == pytest.approx(expected, rel=0.25, abs=0.03)


def test_shares_that_came_once_and_have_faded_are_forgotten() -> None:
    w = fair(vcpus=2)
    for number in range(100):
        job = submit(w, f"once{number}")
        w.start(job)
        w.tick(3600)
        w.end(job)
    assert len(w.state.usage["fair"]) < 10


def test_a_share_that_is_used_still_counts_when_others_are_forgotten() -> None:
    w = fair(vcpus=2)
    long, short = submit(w, "long"), submit(w, "short")
    w.start(long, short)
    w.end(short)
    w.tick(24 * 3600)
    submit(w, "new")
    assert {share: use.vcpus for share, use in w.state.usage["fair"].items()} == {
        "long": 1,
        "new": 1,
    }
