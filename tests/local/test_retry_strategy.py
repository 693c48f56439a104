"""Retry strategies, `batchml.local.batch.lifecycle`: docs/behaviours.md B20-B24."""

from typing import Any

import pytest

from batchml.local.batch.lifecycle import matches, wants_retry


def asks(strategy: dict[str, Any], made: int = 1, **end: Any) -> bool:
    """Whether the strategy asks for another attempt after an end like `end`."""
    how: dict[str, Any] = {"status_reason": "", "reason": "", "exit_code": 1, **end}
    return wants_retry(strategy, attempts_made=made, **how)


def test_without_a_strategy_there_is_one_attempt() -> None:
    assert not asks({})


@pytest.mark.parametrize(("made", "again"), [(1, True), (2, True), (3, False), (4, False)])
def test_attempts_counts_all_tries(made: int, again: bool) -> None:
    assert asks({"attempts": 3}, made) is again


SPOT_ONLY = {
    "attempts": 5,
    "evaluateOnExit": [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ],
}


def test_the_rules_for_spot_retry_a_lost_host_and_nothing_else() -> None:
    lost = "Host EC2 (instance i-0123) terminated."
    assert asks(SPOT_ONLY, status_reason=lost, exit_code=None)
    assert not asks(SPOT_ONLY, status_reason="Essential container in task exited", exit_code=1)
    oom = "OutOfMemoryError: Container killed due to memory usage"
    assert not asks(SPOT_ONLY, reason=oom, exit_code=137)


def test_the_first_rule_that_matches_decides() -> None:
    rules = [{"onExitCode": "1*", "action": "EXIT"}, {"onExitCode": "137", "action": "RETRY"}]
    assert not asks({"attempts": 2, "evaluateOnExit": rules}, exit_code=137)
    assert asks({"attempts": 2, "evaluateOnExit": rules[::-1]}, exit_code=137)


def test_all_conditions_of_a_rule_must_match() -> None:
    rule = {"onExitCode": "3", "onStatusReason": "Essential*", "action": "EXIT"}
    strategy = {"attempts": 2, "evaluateOnExit": [rule]}
    assert not asks(strategy, exit_code=3, status_reason="Essential container in task exited")
    assert asks(strategy, exit_code=4, status_reason="Essential container in task exited")
    assert asks(strategy, exit_code=3, status_reason="Task failed to start")


def test_when_no_rule_matches_the_job_is_retried() -> None:
    strategy = {"attempts": 2, "evaluateOnExit": [{"onExitCode": "3", "action": "EXIT"}]}
    assert asks(strategy, exit_code=4)
    assert asks(strategy, exit_code=None)


def test_a_rule_cannot_give_more_attempts_than_the_strategy() -> None:
    strategy = {"attempts": 2, "evaluateOnExit": [{"onExitCode": "*", "action": "RETRY"}]}
    assert not asks(strategy, made=2)


@pytest.mark.parametrize(("action", "again"), [("exit", False), ("Exit", False), ("retry", True)])
def test_actions_are_not_case_sensitive(action: str, again: bool) -> None:
    strategy = {"attempts": 2, "evaluateOnExit": [{"onExitCode": "1", "action": action}]}
    assert asks(strategy) is again


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("137", "137", True),
        ("13", "137", False),
        ("13*", "137", True),
        ("137*", "137", True),
        ("*", None, True),
        ("*", "", True),
        ("Host*", None, False),
        ("host*", "Host EC2", False),
        ("a*c", "abc", False),
        ("a*c", "a*c", True),
        ("a.c", "abc", False),
    ],
)
def test_patterns_are_exact_or_a_prefix(pattern: str, text: str | None, expected: bool) -> None:
    assert matches(pattern, text) is expected
