"""Importances: what decides comes out first, and what decides nothing near zero."""

import math
from random import Random
from statistics import median

from batchml.model.sweep import Dimension, Params, Space
from batchml.sweeps.results import LEAST, importances

SPACE: Space = {
    "lr": Dimension("float", 1e-4, 1e-1, log=True),
    "opt": Dimension("choice", values=("a", "b", "c")),
    "layers": Dimension("int", 1, 8),
    "noise": Dimension("float", 0.0, 1.0),
    "coin": Dimension("choice", values=(True, False)),
    "same": Dimension("constant", values=(1,)),
}


def ranked(count: int, seed: int, *, greedy: bool = False) -> list[Params]:
    """The best first. lr and opt decide, layers a little; two parameters nothing."""
    random = Random(seed)
    found: list[tuple[float, Params]] = []
    for number in range(count):
        spread = 0.3 if greedy and number > count / 4 else 1.5
        params: Params = {
            "lr": 10 ** max(-4.0, min(-1.0, random.gauss(-2, spread))),
            "opt": random.choice("abc"),
            "layers": random.randint(1, 8),
            "noise": random.random(),
            "coin": random.random() < 0.5,
            "same": 1,
        }
        loss = (math.log10(float(params["lr"])) + 2.3) ** 2
        loss += 0.3 * (params["opt"] != "b") + 0.01 * int(params["layers"])
        found.append((loss + random.gauss(0, 0.02), params))
    return [params for _, params in sorted(found, key=lambda pair: pair[0])]


def test_the_parameters_that_decide_stand_first_and_others_near_zero() -> None:
    shares = [importances(SPACE, ranked(400, seed)) for seed in range(5)]
    for each in shares:
        assert set(list(each)[:2]) == {"lr", "opt"}
        assert math.isclose(sum(each.values()), 1)
        assert "same" not in each
    for name in ("noise", "coin"):
        assert median(each[name] for each in shares) < 0.02


def test_a_sampler_that_tries_one_region_more_often_does_not_make_it_important() -> None:
    found = importances(SPACE, ranked(400, 1, greedy=True))
    assert found["noise"] < 0.1 and found["coin"] < 0.1


def test_too_few_trials_say_nothing() -> None:
    assert importances(SPACE, ranked(LEAST - 1, 0)) == {}
    assert importances({"same": SPACE["same"]}, ranked(100, 0)) == {}


def test_a_parameter_that_is_seldom_active_is_judged_by_the_trials_that_have_it() -> None:
    space = {**SPACE, "momentum": Dimension("float", 0.0, 1.0, when={"opt": ("b",)})}
    random, trials = Random(0), ranked(600, 0)
    for place, params in enumerate(trials):
        if params["opt"] == "b":
            params["momentum"] = min(1.0, place / 600 + random.random() * 0.1)
    found = importances(space, trials)
    assert 0 < found["momentum"] < 1


def test_the_same_trials_give_the_same_importances() -> None:
    assert importances(SPACE, ranked(100, 3)) == importances(SPACE, ranked(100, 3))


def test_ten_thousand_trials_of_mixed_and_equal_values_are_no_trouble() -> None:
    trials: list[Params] = [{"lr": 0.1, "opt": "a", "layers": 1}] * 10_000
    assert importances(SPACE, trials) == {}
