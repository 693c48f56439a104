"""The search is worth its name: beside random search, on problems whose best answer is known.

The figures are in docs/sweeps-figures.md; this is the gate that keeps them from getting worse.
"""

from functools import partial

import pytest

from benchmarks.sweep_problems import H6CURVES, MIXED8CURVES, Problem, mnist
from benchmarks.sweep_quality import SMALL, measure_search, ours
from benchmarks.sweep_simulator import budget, share_to_match

SEEDS = range(10)


@pytest.mark.full
@pytest.mark.parametrize("problem", [H6CURVES, MIXED8CURVES], ids=lambda p: p.name)
def test_tpe_with_asha_has_at_most_60_percent_of_the_regret_of_random(problem: Problem) -> None:
    chance = measure_search(partial(ours, method="random"), problem, *SMALL, SEEDS)
    found = measure_search(partial(ours, stops=True), problem, *SMALL, SEEDS)
    assert found.regret <= 0.6 * chance.regret
    match = share_to_match(found.outcomes, chance.regret, budget(problem, SMALL[1]))
    assert match <= 0.5  # of the steps


def test_the_table_of_real_trainings_is_whole() -> None:
    problem = mnist()
    losses = [problem.loss(dict.fromkeys(problem.space, 0), step) for step in (1, 3, 9, 27)]
    assert losses == sorted(losses, reverse=True)  # it learns
    assert 0.02 < problem.best < 0.1
    last = {name: int(dimension.high) for name, dimension in problem.space.items()}
    assert problem.loss({**last}, 27) > 0
