"""What comes next in a proof: the order, the cap, interruptions, what is taken away."""

from math import inf

import pytest

from batchml.prove.claims import World
from batchml.prove.steps import (
    BY_NAME,
    STEPS,
    Ask,
    ClaimAnswer,
    Ended,
    ProofState,
    Skip,
    cost_of,
    end_of,
    estimate,
    exit_code,
    next_action,
    steps_of,
)

ALL = ("gpu", "nodes")


def run_steps(
    world: World = "aws", *, options: tuple[str, ...] = (), throw_away: bool = True,
    ends: dict[str, Ended] | None = None, max_cost: float = 2.0, keep: bool = False,
    interrupt_at: str = "", made_by: str = "setup",
) -> dict[str, Ask | Skip]:  # fmt: skip
    """Carry out the decisions for a proof whose steps end as `ends` says, else well."""
    steps = steps_of(world, options, throw_away=throw_away)
    state, actions = ProofState(), dict[str, Ask | Skip]()
    while True:
        action = next_action(steps, state, world=world, max_cost=max_cost, keep=keep)
        if action is None:
            return actions
        name = action.step.name
        actions[name] = action
        ended: Ended = "skipped"
        if isinstance(action, Ask):
            ended = (ends or {}).get(name, "done")
        state = ProofState(
            ended={**state.ended, name: ended},
            spent=state.spent + (estimate(action.step, world) if isinstance(action, Ask) else 0.0),
            made=(state.made or (name == made_by and isinstance(action, Ask)))
            and not (name == "teardown" and ended == "done"),
            interrupted=state.interrupted or name == interrupt_at,
            capped=state.capped
            or (action.why if isinstance(action, Skip) and action.capped else ""),
        )


def asked(actions: dict[str, Ask | Skip]) -> list[str]:
    return [name for name, action in actions.items() if isinstance(action, Ask)]


def why(actions: dict[str, Ask | Skip], name: str) -> str:
    action = actions[name]
    assert isinstance(action, Skip)
    return action.why


def test_in_aws_all_steps_are_asked_in_their_order() -> None:
    assert asked(run_steps(options=ALL)) == [step.name for step in STEPS]


def test_on_local_only_steps_with_a_claim_there_are_asked() -> None:
    names = asked(run_steps("local"))
    assert "image" not in names and "submitter" not in names and "search" not in names
    assert names[:3] == ["doctor", "setup", "plan"] and names[-1] == "teardown"


def test_a_gpu_and_nodes_are_asked_only_with_their_options() -> None:
    assert not {"gpu", "nodes"} & set(asked(run_steps()))
    assert "gpu" in asked(run_steps(options=("gpu",)))


def test_an_environment_of_the_users_own_is_neither_made_nor_taken_away() -> None:
    names = asked(run_steps(throw_away=False))
    assert not {"setup", "teardown", "search"} & set(names)
    assert {"doctor", "plan", "probe", "cancel"} <= set(names)


def test_after_a_problem_of_doctor_nothing_is_made() -> None:
    actions = run_steps(ends={"doctor": "failed"})
    assert asked(actions) == ["doctor"]
    assert why(actions, "setup") == "the step doctor did not succeed"
    assert why(actions, "cancel") == "the step doctor did not succeed", "the first cause"
    assert why(actions, "teardown") == "nothing was made"


@pytest.mark.parametrize("failing", [step.name for step in STEPS if not step.removes][1:])
def test_whatever_step_fails_the_environment_is_taken_away(failing: str) -> None:
    actions = run_steps(options=ALL, ends={failing: "failed"})
    assert asked(actions)[-2:] == ["teardown", "search"]


def test_a_step_that_fails_stops_only_the_steps_that_need_it() -> None:
    actions = run_steps(ends={"shell": "failed"})
    assert why(actions, "cancel") == "the step shell did not succeed"
    assert "host" in asked(actions)


@pytest.mark.parametrize("at", [step.name for step in STEPS if not step.removes])
def test_interrupted_at_any_step_only_what_was_made_is_taken_away(at: str) -> None:
    actions = run_steps(options=ALL, interrupt_at=at, ends={at: "failed"})
    names = asked(actions)
    later = names[names.index(at) + 1 :]
    assert later == ([] if at == "doctor" else ["teardown", "search"])
    for step in STEPS[STEPS.index(BY_NAME[at]) + 1 :]:
        if not step.removes:
            assert why(actions, step.name) == "interrupted"


def test_after_a_failed_teardown_nothing_is_searched_for() -> None:
    actions = run_steps(ends={"teardown": "failed"})
    assert why(actions, "search") == "the step teardown did not succeed"


def test_with_keep_the_environment_stays() -> None:
    assert why(run_steps(keep=True), "teardown") == "--keep was given"


def test_the_cap_leaves_out_a_step_that_could_go_beyond_it_and_all_later_ones() -> None:
    names = asked(run_steps(options=ALL, max_cost=0.15))
    full = asked(run_steps(options=ALL))
    assert "gpu" not in names and names[-2:] == ["teardown", "search"]
    assert names[:-2] == full[: len(names) - 2]


def test_the_reason_of_the_cap_says_what_was_spent_and_what_was_needed() -> None:
    actions = run_steps(max_cost=0.0)
    assert asked(actions) == []
    assert why(actions, "doctor").startswith("--max-cost: $0.00 of $0.00 is spent, this needs $")
    assert why(actions, "teardown") == "nothing was made"


def test_a_proof_by_the_estimates_stays_within_the_cap() -> None:
    for cents in range(0, 60, 3):
        names = asked(run_steps(options=ALL, max_cost=cents / 100))
        assert sum(estimate(BY_NAME[name], "aws") for name in names) <= cents / 100 + 1e-9


def test_a_step_has_the_time_that_the_cap_pays_for_and_taking_away_has_any() -> None:
    for name, action in run_steps(options=ALL, max_cost=1.0).items():
        if isinstance(action, Ask):
            usd = cost_of(action.step, min(action.seconds, 1e9), "aws", stands=True)
            assert action.step.removes or action.step.seconds <= action.seconds, name
            assert (usd > 1.0) if action.step.removes else (usd < 1.0), name
    assert {each.seconds for each in run_steps("local").values() if isinstance(each, Ask)} == {inf}


def test_a_proof_without_a_gpu_costs_less_than_half_a_dollar_and_with_one_less_than_1_50() -> None:
    def usd(*options: str) -> float:
        return sum(estimate(step, "aws") for step in steps_of("aws", options, throw_away=True))

    assert usd() < 0.5
    assert usd("gpu") < 1.5


def test_only_aws_costs_anything() -> None:
    step = BY_NAME["gpu"]
    assert cost_of(step, 3600, "local", stands=True) == 0
    assert cost_of(step, 3600, "endpoint", stands=True) == 0
    assert cost_of(step, 3600, "aws", stands=True) == pytest.approx(0.976)


HELD, REFUTED, UNASKED = (
    ClaimAnswer("setup", True), ClaimAnswer("teardown", False), ClaimAnswer("doctor", None),
)  # fmt: skip


def test_a_step_ends_well_if_every_claim_that_it_asked_held() -> None:
    assert end_of([HELD, UNASKED]) == "done"
    assert end_of([HELD, REFUTED]) == "failed"
    assert end_of([UNASKED]) == "skipped"


def test_the_exit_code_names_the_reason() -> None:
    assert exit_code([HELD, UNASKED], {0, 1, 77}, interrupted=False) == 0
    assert exit_code([HELD, REFUTED], {0, 1}, interrupted=False) == 1
    assert exit_code([HELD, REFUTED], {0, 1, 74, 77}, interrupted=False) == 77
    assert exit_code([REFUTED], {74}, interrupted=False) == 74
    assert exit_code([HELD], {0}, interrupted=True) == 130
