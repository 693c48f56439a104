"""Injected faults: their syntax, and their effect on attempts. docs/behaviours.md B200-B213."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.errors import UsageError
from batchml.local.batch import fault_injection, faults
from batchml.local.batch.engine import next_deadline
from batchml.local.batch.events import (
    AttemptEnded,
    AttemptExit,
    AttemptStarted,
    ClockTicked,
    LoseHost,
)
from batchml.local.batch.fault_injection import (
    Chaos,
    Fault,
    fault_of,
    host_of,
    is_throttled,
    parse,
    read_tag,
)
from batchml.local.batch.scheduling import NEVER_FITS_MACHINE, NO_CAPACITY, TIME_LIMIT
from batchml.local.batch.state import JobAttempt
from tests.local.test_engine_nodes import nodes_of
from tests.local.test_engine_nodes import running as cluster_running
from tests.support.engine_world import World, children, needing, world
from tests.support.models import ec2

TAGGED: dict[str, Any] = {"tags": {fault_injection.TAG: "host-lost@20s"}}
SPOT_RULES = {
    "attempts": 3,
    "evaluateOnExit": [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ],
}

# --- words ------------------------------------------------------------------------------------


def test_the_words_of_the_documentation() -> None:
    asked = parse("host-lost@60s, oom, throttle=20%, no-capacity=5m, seed=7")
    assert asked == Chaos((Fault("host-lost", 60), Fault("oom")), 0.2, 300, 7)
    assert parse("spot@1h30m=12.5%").faults == (Fault("spot", 5400, 0.125),)
    assert parse(" oom   oom,oom ") == Chaos((Fault("oom"),) * 3)
    assert parse("seed=0").seed == 0


FAULTS = st.builds(
    Fault,
    st.sampled_from(["host-lost", "node-lost", "spot", "oom"]),
    st.integers(0, 10**6),
    st.integers(1, 1000).map(lambda n: n / 1000),
)


@given(
    st.builds(
        Chaos,
        st.lists(FAULTS, min_size=1, max_size=10).map(tuple),
        st.integers(0, 1000).map(lambda n: n / 1000),
        st.integers(0, 10**6),
        st.none() | st.integers(0, 10**9),
    )
)
def test_what_is_shown_can_be_asked_for_again(asked: Chaos) -> None:
    assert parse(str(asked)) == asked


def test_all_mistakes_are_reported_at_once_each_with_what_to_write() -> None:
    words = "host-lst@60s, throttle=200%, no-capacity, seed=x, oom@soon, spot@@, throttle=1%=2"
    with pytest.raises(UsageError) as caught:
        parse(words)
    heading, *told = str(caught.value).splitlines()
    assert heading == "--chaos: 7 mistakes, no server was started."
    for word, line in zip(words.split(", "), told, strict=True):
        assert line.startswith(f"  - {word!r}: ")
    assert "Did you mean 'host-lost'?" in told[0]
    assert "throttle=20%" in told[1]
    assert "no-capacity=5m" in told[2]
    assert "seed=7" in told[3]
    assert "oom@60s" in told[4]
    assert "spot@60s" in told[5]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an entry is missing"),
        ("oom,", "an entry is missing"),
        ("throttle=0%", "more than 0%"),
        ("throttle=20", "more than 0%"),
        ("throttle@5s=20%", "more than 0%"),
        ("no-capacity=0s", "for how long"),
        ("no-capacity@5m", "for how long"),
        ("host-lost=0%", "a part of the jobs"),
        ("seed=-1", "a whole number"),
        ("seed=\u0663", "a whole number"),
        ("seed=1 seed=1", "given twice"),
        ("oom " * 11, "Leave 1 out"),
        ("=", "there is no fault ''"),
        ("OOM", "Did you mean 'oom'?"),
    ],
)
def test_a_mistake_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(UsageError, match="1 mistake,") as caught:
        parse(text)
    assert said in str(caught.value)


@given(st.text(max_size=40) | st.text(alphabet="omspt@=,% 0123459-", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (fault_injection.read, read_tag):
        asked, mistakes = read(text)
        assert mistakes or asked != Chaos() or asked.seed is not None


def test_a_tag_knows_the_faults_of_attempts_alone() -> None:
    assert read_tag("host-lost@20s oom") == (Chaos((Fault("host-lost", 20), Fault("oom"))), [])
    for text in ("throttle=20%", "seed=1", "host-lost@20s=20%", "host-lost@20s,oom", ""):
        assert read_tag(text)[1], text


# --- chance -----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_again_and_another_does_not() -> None:
    def drawn(seed: int) -> list[bool]:
        return [is_throttled(Chaos(throttle=0.2, seed=seed), number) for number in range(1000)]

    assert drawn(7) == drawn(7) != drawn(8)
    assert 150 < sum(drawn(7)) < 250


def test_nothing_and_all_are_no_chance() -> None:
    assert not any(is_throttled(Chaos(seed=1), number) for number in range(100))
    assert not is_throttled(None, 1)
    assert all(is_throttled(Chaos(throttle=1.0, seed=1), number) for number in range(100))


def test_attempts_get_the_faults_in_their_order() -> None:
    asked = parse("host-lost@60s, oom")
    assert [str(fault_of(asked, None, 1, number)) for number in (1, 2, 3)] == [
        "host-lost@1m", "oom", "None",
    ]  # fmt: skip
    assert str(fault_of(asked, "spot", 1, 1)) == "spot"
    assert fault_of(asked, "spot", 1, 2) is None, "the tag replaces the server's faults"
    assert fault_of(None, None, 1, 1) is None


def test_a_part_of_the_jobs_gets_the_fault() -> None:
    asked = replace(parse("oom=20%"), seed=3)
    hit = [number for number in range(1000) if fault_of(asked, None, number, 1)]
    assert 150 < len(hit) < 250
    assert hit == [number for number in range(1000) if fault_of(asked, None, number, 1)]


# --- attempts -----------------------------------------------------------------------------------


def world_with(words: str, **more: Any) -> World:
    w = world(**more)
    w.state = faults.enable(w.state, replace(parse(words), seed=1), w.now)
    return w


def losses(w: World, seconds: float) -> list[LoseHost]:
    """The losses of hosts that the executor has to simulate after this time."""
    w.now += int(seconds * 1000)
    return [effect for effect in w.apply(ClockTicked(w.now)) if isinstance(effect, LoseHost)]


def lost(w: World, job: str) -> str:
    return f"Host EC2 (instance {host_of(w.task(job))}) terminated."


def test_a_job_that_loses_its_host_is_tried_again_by_the_rules_for_spot() -> None:
    w = world_with("host-lost@60s")
    job = w.submit(retryStrategy=SPOT_RULES)
    w.start(job)
    assert losses(w, 59.999) == []
    assert next_deadline(w.state) == w.now + 1
    assert losses(w, 0.001) == [LoseHost(w.task(job), "host-lost@1m")]
    assert losses(w, 60) == [], "once is enough"
    said = lost(w, job)
    w.end(job, AttemptExit(code=137, started_at=1, stopped_at=2))
    (first,) = w.jobs[job].attempts
    assert first["statusReason"] == said
    assert "exitCode" not in first["container"]
    assert "reason" not in first["container"]
    assert w.status(job) == ["STARTING"], "the second attempt"
    w.start(job)
    assert losses(w, 600) == [], "only the first"
    w.end(job)
    assert w.status(job) == ["SUCCEEDED"]
    assert len(w.jobs[job].attempts) == 2


def test_without_a_rule_for_it_the_job_fails() -> None:
    w = world_with("host-lost")
    job = w.submit()
    w.start(job)
    losses(w, 0)
    said = lost(w, job)
    w.end(job, 137)
    assert (w.status(job), w.reasons(job)) == (["FAILED"], [said])


def test_the_kill_for_memory_looks_like_the_kernel_s() -> None:
    w = world_with("oom@10s")
    job = w.submit(retryStrategy=SPOT_RULES)
    w.start(job)
    (loss,) = losses(w, 10)
    assert loss == LoseHost(w.task(job), "oom@10s")
    w.end(job, AttemptExit(code=143))
    over = w.jobs[job]
    assert (over.status.value, over.exit_code) == ("FAILED", 137)
    assert over.status_reason == "Essential container in task exited"
    assert over.reason == "OutOfMemoryError: Container killed due to memory usage"


@pytest.mark.parametrize(("code", "ends"), [(0, "SUCCEEDED"), (143, "FAILED"), (137, "FAILED")])
def test_a_reclaim_is_announced_and_who_ends_well_before_it_has_ended(code: int, ends: str) -> None:
    w = world_with("spot@30s")
    job = w.submit()
    w.start(job)
    (loss,) = losses(w, 30)
    assert loss == LoseHost(w.task(job), "spot@30s", warned=True)
    said = lost(w, job)
    w.end(job, code)
    assert w.status(job) == [ends]
    assert (w.reasons(job) == [said]) == bool(code)


@pytest.mark.parametrize(
    "exit_",
    [
        AttemptExit(code=0),
        AttemptExit(code=7),
        AttemptExit(code=137, oom=True),
        AttemptExit(start_failure="CannotPullContainerError: x"),
        AttemptExit(lost="Host EC2 (instance this-machine) terminated: the runner is gone."),
    ],
)
def test_an_attempt_with_a_fault_ends_with_its_exit_whatever_the_runner_reports(
    exit_: AttemptExit,
) -> None:
    attempt = JobAttempt(1, "t", "ce", (), doom="host-lost@1m")
    said = AttemptExit(lost=f"Host EC2 (instance {host_of('t')}) terminated.")
    assert faults.apply_fault(attempt, exit_) == said
    assert faults.apply_fault(replace(attempt, doom="oom=20%"), exit_) == AttemptExit(
        code=137, oom=True
    )
    assert faults.apply_fault(replace(attempt, doom=""), exit_) == exit_


def test_an_instance_id_is_one_of_aws_s() -> None:
    assert host_of("a") == host_of("a") != host_of("b")
    assert set(host_of("a")[2:]) <= set("0123456789abcdef")
    assert len(host_of("a")) == len("i-0123456789abcdef0")


def test_who_is_being_stopped_is_spared() -> None:
    w = world_with("host-lost@10s")
    job = w.submit()
    w.start(job)
    w.terminate(job)
    assert losses(w, 10) == []
    w.end(job, 143)
    assert w.reasons(job) == ["why"]


def test_an_attempt_that_ends_before_its_time_is_left_alone_and_so_is_the_next_job() -> None:
    w = world_with("host-lost@10s")
    job = w.submit()
    w.start(job)
    w.end(job)
    assert w.status(job) == ["SUCCEEDED"]
    assert losses(w, 60) == []
    assert next_deadline(w.state) is None


def test_a_start_that_is_reported_twice_injects_one_fault() -> None:
    w = world_with("host-lost@10s")
    job = w.submit()
    w.start(job)
    w.apply(AttemptStarted(w.task(job), w.now, ""))
    assert len(losses(w, 10)) == 1


def test_a_tag_needs_no_server_that_was_started_with_chaos() -> None:
    w = world()
    job = w.submit(**TAGGED)
    w.start(job)
    (loss,) = losses(w, 20)
    assert loss.fault == "host-lost@20s"


def test_a_tag_that_cannot_be_read_is_refused() -> None:
    w = world()
    job = w.submit()
    bad = {fault_injection.TAG: "host-lots@20s"}
    override = needing()
    said = w.refusal(
        "SubmitJob", jobName="job", jobQueue="q", jobDefinition="d", tags=bad,
        containerOverrides=override,
    )  # fmt: skip
    assert "Did you mean 'host-lost'?" in said
    arn = w.jobs[job].arn
    assert "host-lots" in w.refusal("TagResource", resourceArn=arn, tags=bad)
    w.call("TagResource", resourceArn=arn, tags={fault_injection.TAG: "oom"})
    w.start(job)
    assert [loss.fault for loss in losses(w, 0)] == ["oom"]


def test_each_child_of_an_array_has_its_own() -> None:
    w = world_with("oom")
    array = w.array(3)
    w.start(*children(array, 0, 1, 2))
    assert len(losses(w, 0)) == 3


def test_the_main_node_of_a_multi_node_job_gets_the_fault() -> None:
    w, job = cluster_running(3, **TAGGED, retryStrategy=SPOT_RULES)
    main = nodes_of(job)[0]
    (loss,) = losses(w, 20)
    assert loss == LoseHost(w.task(main), "host-lost@20s")
    said = lost(w, main)
    w.end(main, 137)
    assert {w.task(node) for node in nodes_of(job)[1:]} <= set(w.stops)
    for node in nodes_of(job)[1:]:
        w.end(node, 143)
    assert [attempt["statusReason"] for attempt in w.jobs[job].attempts] == [said]
    assert w.status(job) == ["STARTING"]


def test_node_lost_takes_a_node_that_is_not_the_main_one_and_the_job_goes_on() -> None:
    w, job = cluster_running(
        3, tags={fault_injection.TAG: "node-lost@20s"}, retryStrategy=SPOT_RULES
    )
    main, *others = nodes_of(job)
    (loss,) = losses(w, 20)
    assert loss.task_id in {w.task(node) for node in others}
    hit = next(node for node in others if w.task(node) == loss.task_id)
    w.end(hit, 137)
    assert w.stops == []
    assert w.status(job, main, hit) == ["RUNNING", "RUNNING", "FAILED"]
    assert w.jobs[hit].status_reason.startswith("Host EC2 (instance i-")
    w.end(main, 75)  # as our runtime then does


def test_node_lost_has_no_effect_on_a_job_with_one_container() -> None:
    w = world_with("node-lost")
    w.start(w.submit())
    assert losses(w, 60) == []


# --- restarts -----------------------------------------------------------------------------------


def test_an_injected_fault_survives_a_restart(tmp_path: Path) -> None:
    w = world_with("host-lost@10s", journal=tmp_path / "journal.db")
    job = w.submit(retryStrategy=SPOT_RULES)
    w.start(job)
    losses(w, 10)
    said = lost(w, job)
    w.restart()
    assert w.state.chaos is None
    assert faults.pending_losses(w.state) == [LoseHost(w.task(job), "host-lost@10s")]
    task = w.task(job)
    w.end(job, 137)
    assert w.jobs[job].attempts[0]["statusReason"] == said
    before = w.state
    w.apply(AttemptEnded(task, AttemptExit(code=137), w.now))
    assert w.state == before, "nothing ends twice"
    w.start(job)
    assert losses(w, 600) == [], "it is off"


def test_a_tag_goes_on_after_a_restart(tmp_path: Path) -> None:
    w = world(journal=tmp_path / "journal.db")
    job = w.submit(**TAGGED)
    w.start(job)
    w.tick(5)
    w.restart()
    assert losses(w, 14.999) == []
    assert len(losses(w, 0.001)) == 1


# --- capacity -----------------------------------------------------------------------------------


def test_without_capacity_nothing_starts_and_the_head_of_a_queue_says_so() -> None:
    w = world_with("no-capacity=5m")
    first, second, large = w.submit(), w.submit(), w.submit(vcpus=64, queue="q")
    assert w.status(first, second, large) == ["RUNNABLE"] * 3
    assert w.reasons(first, second) == [f"{NO_CAPACITY}[this-machine]", ""]
    end = next_deadline(w.state)
    assert end == w.now + 300_000
    w.tick(299.999)
    assert w.status(first) == ["RUNNABLE"]
    w.tick(0.001)
    assert w.status(first, second) == ["STARTING", "STARTING"]
    assert w.reasons(first, large) == ["", NEVER_FITS_MACHINE]
    assert next_deadline(w.state) is None


def test_the_instance_types_are_the_environment_s() -> None:
    w = world_with("no-capacity=5m")
    resources = ec2(4, instanceTypes=["g5.xlarge", "g6"])
    w.environment("gpu", computeResources=resources)
    w.queue("g", 1, "gpu")
    job = w.submit(queue="g")
    assert w.reasons(job) == [
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested "
        "for instance type [g5.xlarge, g6]"
    ]


def test_a_queue_s_time_limit_ends_what_waits_for_capacity() -> None:
    w = world_with("no-capacity=1h")
    action = {
        "reason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
        "state": "RUNNABLE",
        "maxTimeSeconds": 600,
        "action": "CANCEL",
    }
    w.call("UpdateJobQueue", jobQueue="q", jobStateTimeLimitActions=[action])
    first, second = w.submit(), w.submit()
    w.tick(600)
    assert w.status(first, second) == ["FAILED", "RUNNABLE"]
    assert w.reasons(first) == [f"{TIME_LIMIT}CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"]
    assert w.reasons(second)[0].startswith(NO_CAPACITY)


def test_the_reason_goes_when_the_next_server_has_capacity_and_no_room() -> None:
    w = world_with("no-capacity=5m", vcpus=1)
    first, second = w.submit(), w.submit()
    w.state = replace(w.state, no_capacity_until=w.now)
    w.cancel(first)
    assert w.status(second) == ["STARTING"]
    third = w.submit()
    w.tick(1)
    assert w.reasons(second, third) == ["", ""]
