"""`batchml.sweeps.spec.file`: what a sweep file says, and every mistake of it at once."""

import copy
import tomllib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.errors import ConfigError
from batchml.model.conditions import satisfies
from batchml.model.sweep import (
    ConfirmSettings,
    Dimension,
    EarlyStop,
    Goal,
    SweepLimits,
    SweepSpec,
    active_parameters,
    as_value,
    count_points,
    every_point,
)
from batchml.sweeps.spec.file import apply_changes, read_sweep
from tests.support.sweep_files import EXAMPLE, SMALLEST, in_space, mistakes, read


def test_the_documented_file_is_read() -> None:
    spec = read_sweep(tomllib.loads(EXAMPLE), "sweep.toml", text=EXAMPLE)
    assert (spec.name, spec.job, spec.method) == ("lenet", "lenet", "tpe")
    assert spec.goals == (Goal("val_accuracy", "max"),)
    assert spec.space == {
        "lr": Dimension("float", 1e-4, 1e-1, log=True),
        "layers": Dimension("int", 1, 4),
        "width": Dimension("int", 16, 256, log=True),
        "batch_size": Dimension("choice", values=(64, 128, 256)),
        "optimizer": Dimension("choice", values=("sgd", "adamw")),
        "epochs": Dimension("constant", values=(27,)),
        "momentum": Dimension("float", 0.8, 0.99, when={"optimizer": ("sgd",)}),
    }
    assert list(spec.space).index("optimizer") < list(spec.space).index("momentum")
    assert spec.early_stop == EarlyStop("asha", "epoch", max=27, min=1, eta=3)
    assert spec.limits == SweepLimits(trials=64, hours=12.0, cost=50.0, target=0.995)
    assert spec.confirm == ConfirmSettings(top=3, seeds=3)
    # What is started is read back as it was.
    assert msgspec.json.decode(msgspec.json.encode(spec), type=SweepSpec) == spec


def test_the_smallest_file_has_defaults_for_the_rest() -> None:
    spec = read()
    assert (spec.method, spec.early_stop, spec.confirm) == ("tpe", EarlyStop(), None)
    assert spec.limits == SweepLimits(trials=8, parallel=16, failed_share=0.2)


def test_all_mistakes_are_reported_at_once_and_each_says_where() -> None:
    wrong = {
        "jbo": "x", "goal": "acc", "method": "bayes", "trials": 3, "seed": -1, "name": "a b",
        "space": {
            "lr": {"uniform": [1, 2]}, "b": [1], "c": {"log": [0, 0.1]}, "d": {"int": [4, 1]},
            "e": {"float": [0, 1], "when": {"f": "x"}}, "f": ["y", "z"], "1x": 1,
            "params": 2, "g": {"choice": [1, 2], "when": {"h": 3}},
        },
        "limits": {"paralel": 3, "hours": "x", "cost": "5 EUR", "failed": 0.2, "target": "high"},
        "early_stop": {"max": 3, "min": 30, "eta": 1},
        "where": ["lr = 1", "foo > 1"],
        "confirm": {"top": 0},
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        read_sweep(wrong, "sweep.toml")
    keys = sorted(mistake.partition(": ")[0] for mistake in refused.value.mistakes)
    assert keys == sorted([
        "jbo", "job", "goal", "method", "trials", "seed", "name", "space.lr.uniform", "space.b",
        "space.c.log", "space.d.int", "space.e.when", "space.1x", "space.params", "space.g.when",
        "limits.paralel", "limits.hours", "limits.cost", "limits.failed", "limits.target",
        "early_stop.min", "early_stop.eta", "where[0]", "where[1]", "confirm.top",
    ])  # fmt: skip


def test_nothing_at_all_is_met_with_what_is_needed() -> None:
    with pytest.raises(ConfigError) as refused:
        read_sweep({}, "sweep.toml")
    assert [each.partition(":")[0] for each in refused.value.mistakes] == [
        "job", "goal", "space", "limits",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"methdo": 1}, "methdo: unknown key. Did you mean 'method'?"),
        ({"limits": {"paralel": 2, "trials": 8}}, "Did you mean 'parallel'?"),
        ({"parallel": 2}, "parallel: unknown key here. It belongs under [limits]."),
        ({"eta": 2}, "eta: unknown key here. It belongs under [early_stop]."),
        ({"parameters": {}}, "It belongs in [space]."),
        ({"metric": "acc"}, "It belongs in goal ="),
        ({"method": "tp"}, "Expected one of tpe, random, sobol, grid, list, gp, cmaes, nsga2."),
        ({"goal": {"maximum": "acc"}}, "goal.maximum: unknown key. Did you mean 'max'?"),
        ({"goal": {"max": ""}}, "Expected a metric's name"),
        ({"goal": {}}, "Say goal = { max"),
        ({"goal": "acc"}, 'goal = { max = "acc" } or goal = { min = "acc" }; there is no default'),
        ({"goal": {"max": ["a", "a"]}, "method": "random"}, "a is named twice"),
        ({"limits": {}}, "give at least one of trials, hours, cost"),
        ({"limits": {"target": 1.0, "parallel": 4}}, "give at least one of trials, hours, cost"),
        ({"limits": {"trials": 0}}, "limits.trials: found 0. Expected a whole number >= 1."),
        ({"limits": {"trials": True}}, "limits.trials: found True"),
        ({"limits": {"trials": 8, "failed": "120%"}}, 'a share of the trials, "20%"'),
        ({"limits": {"trials": 8, "failed": -1}}, 'a share of the trials, "20%"'),
        ({"limits": {"hours": 0}}, "limits.hours: found 0."),
        ({"limits": {"cost": float("inf")}}, "limits.cost: found inf."),
        ({"early_stop": {"method": "asha"}}, "max: missing. Give the number of steps"),
        ({"early_stop": {"min": 2}}, "max: missing. Without the steps"),
        ({"early_stop": {"max": 27, "min": 30}}, "early_stop.min: min 30 is not below max 27."),
        ({"early_stop": {"max": 1}}, "early_stop.max: min 1 is not below max 1."),
        ({"early_stop": {"max": 27, "eta": 11}}, "Expected a whole number <= 10"),
        ({"early_stop": {"max": 9, "method": "median", "resume": True}}, "median has no rungs"),
        ({"early_stop": {"max": 9, "step": " "}}, "early_stop.step: is empty"),
        ({"early_stop": {"max": 9, "method": "halving"}, "limits": {"hours": 1}}, "halving needs"),
        ({"early_stop": "asha"}, "early_stop: found 'asha'. Expected a table."),
        ({"confirm": True}, "confirm: found True. Expected a table."),
        ({"method": "grid"}, "space.lr: grid needs a list or a step for lr."),
        ({"method": "gp", "limits": {"trials": 501}}, "gp is for up to 500 trials"),
        ({"method": "gp", "limits": {"hours": 1}}, "gp is for up to 500 trials"),
        ({"method": "list"}, "points: missing."),
        ({"goal": {"max": "a", "min": "b"}}, "several need random, sobol, grid, list or nsga2"),
        (
            {"goal": {"max": "a", "min": "b"}, "method": "nsga2",
             "early_stop": {"method": "asha", "max": 9}},
            "several goals have no early stopping",
        ),
        ({"space": {"lr": 1}}, "nothing to search"),
        ({"space": "lr"}, "space: found 'lr'. Expected a table."),
        ({"where": ["layers > 9"]}, "where[0]: 'layers > 9' accepts 0 of 1,000 samples."),
        ({"where": ["opt < 3"]}, "accepts 0 of 1,000 samples"),
        ({"where": ["layers < 2", "layers > 3"]}, "where: accepts 0 of 1,000 samples."),
        ({"where": ["layer < 2"]}, "no parameter layer. Did you mean 'layers'?"),
        ({"where": ["opt == sgd"]}, "Texts have quotes: 'sgd'."),
        ({"where": 3}, "where: found 3. Expected a list of conditions"),
        ({"name": "x" * 49}, "1-48 letters"),
        ({"job": ""}, "job: missing."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(table: dict[str, Any], says: str) -> None:
    (found,) = mistakes(**table)
    assert says in found


@pytest.mark.parametrize(
    ("parameter", "says"),
    [
        ({"log": [0, 0.1]}, "log range needs 0 < low < high, got [0, 0.1]"),
        ({"int": [0, 9], "log": True}, "log range needs 0 < low < high"),
        ({"float": [1, 1]}, "Expected low < high."),
        ({"float": [0, float("nan")]}, "Expected a number"),
        ({"float": [0, True]}, "found true. Expected a number"),
        ({"float": 3}, "Expected two numbers, float = [low, high]"),
        ({"int": [1, 2.5]}, "Expected whole numbers"),
        ({"int": [0, 2**60]}, "At most 2**53"),
        ({"int": [0, 10**400]}, "Expected a number"),
        ({"float": [0, 1], "int": [0, 1]}, "float and int are both given"),
        ({"float": [0, 1], "step": 2}, "Expected more than 0 and at most high - low"),
        ({"log": [1, 8], "step": 1}, "not with log, which has no equal steps"),
        ({"int": [1, 8], "step": 1.5}, "Expected a whole number beside int"),
        ({"float": [0, 1], "stpe": 0.1}, "stpe: unknown key. Did you mean 'step'?"),
        ({"float": [0, 1], "log": [1, 2]}, ".log: found [1, 2]. Expected true or false"),
        ({"min": 0, "max": 1}, "Write float = [low, high]."),
        ({"values": [1, 2]}, "Write choice = [...]."),
        ({"when": {"opt": "sgd"}}, "has no kind. Give one of"),
        ({"normal": [0, 0]}, "sigma is 0; it must be greater than 0"),
        ({"normal": [0]}, "Expected two numbers, normal = [mu, sigma]"),
        ({"lognormal": [0, 500]}, "natural logarithm"),
        ({"choice": [1, 2], "log": True}, ".log: only for float and int ranges"),
        ({"choice": 3}, "Expected a list of values"),
        ([1], "A choice has 2 values or more. Write 1 alone for a constant."),
        ([], "A choice has 2 values or more."),
        ([1, 1.0], "1 is there twice"),
        ([1, [2]], "Expected a text, a number, or true or false"),
        ([1, float("inf")], "Expected a finite number"),
        (2**70, "more than 64 bits"),
        ("a\0b", "cannot be an argument of a program"),
        ({"int": [1, 2], "when": "opt"}, "Expected a table such as"),
        ({"int": [1, 2], "when": {"opt": []}}, "is empty, so the parameter would never be active"),
        (
            {"int": [1, 2], "when": {"opt": "rmsprop"}},
            "when: opt=rmsprop can never happen; choices are sgd, adamw.",
        ),
        ({"int": [1, 2], "when": {"opt": "sdg"}}, "Did you mean 'sgd'?"),
        ({"int": [1, 2], "when": {"layers": 7}}, "it goes from 1 to 4"),
        ({"int": [1, 2], "when": {"lr": 0.1}}, "lr is continuous, without single values"),
        ({"int": [1, 2], "when": {"layer": 1}}, "no parameter layer. Did you mean 'layers'?"),
        ({"int": [1, 2], "when": {"x": 1}}, "x depends on itself"),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_is_refused_in_words(parameter: Any, says: str) -> None:
    (found,) = in_space(x=parameter)
    assert found.startswith("space.x")
    assert says in found


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({1: 2}, "the table: the key 1 is not a text."),
        ({"limits": {1: 2}}, "limits: the key 1 is not a text."),
        ({"goal": {"max": "a\udcff"}}, "goal.max: 'a\\udcff' is not UTF-8."),
        ({"where": ["\ud800"]}, "where[0]: '\\ud800' is not UTF-8."),
    ],
)
def test_what_only_a_program_can_say_is_refused_in_words(table: dict[Any, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_sweep({**SMALLEST, **table}, "The sweep")
    assert refused.value.mistakes == (says,)


def test_parameters_that_depend_on_each_other_or_exclude_each_other() -> None:
    one = {"choice": [1, 2], "when": {"b": 1}}
    assert in_space(a=one, b={"choice": [1, 2], "when": {"a": 1}}) == [
        "space: a, b depend on each other in a cycle (when)."
    ]
    parent = {"choice": [1, 2], "when": {"opt": "sgd"}}
    child = {"choice": [1, 2], "when": {"opt": "adamw", "p": 1}}
    (found,) = in_space(p=parent, c=child)
    assert found == "space.c.when: can never be met: its parents need other values of opt."


def test_two_names_that_would_be_one_variable() -> None:
    (found,) = in_space(**{"weight-decay": [1, 2], "weight_decay": [1, 2]})
    assert "BATCHML_PARAM_WEIGHT_DECAY" in found


def test_ways_to_write_a_parameter() -> None:
    spec = read(
        space={
            "a": {"float": [0, 1], "step": 0.25}, "b": {"int": ["1e1", 1e3], "log": True},
            "c": {"normal": [0, 2]}, "d": {"lognormal": [-3, 1.5]}, "e": {"constant": "x"},
            "f": {"choice": [1, True], "when": {"g": [True, "auto"]}}, "g": [True, False, "auto"],
            "h": {"float": [1, 8], "log": True}, "i": {"int": [0, 8], "step": 4},
        }
    ).space  # fmt: skip
    assert spec["a"] == Dimension("float", 0.0, 1.0, step=0.25)
    assert spec["b"] == Dimension("int", 10, 1000, log=True)
    assert spec["c"] == Dimension("normal", mu=0.0, sigma=2.0)
    assert spec["d"] == Dimension("normal", mu=-3.0, sigma=1.5, log=True)
    assert spec["e"] == Dimension("constant", values=("x",))
    assert spec["f"] == Dimension("choice", values=(1, True), when={"g": (True, "auto")})
    assert spec["h"] == Dimension("float", 1.0, 8.0, log=True)
    assert spec["i"] == Dimension("int", 0, 8, step=4)


@pytest.mark.parametrize(
    ("low", "high", "step", "values"),
    [
        (0.8, 0.9, 0.1, [0.8, 0.9]), (0.1, 0.3, 0.2, [0.1, 0.3]), (1.1, 1.2, 0.1, [1.1, 1.2]),
        (1000000.1, 1000000.2, 0.1, [1000000.1, 1000000.2]), (0.1, 0.7, 0.3, [0.1, 0.4, 0.7]),
        (0.1234567890123456, 0.2, 0.0765432109876544, [0.1234567890123456, 0.2]),
    ],
)  # fmt: skip
def test_a_step_that_fits_the_range_but_for_the_last_digits_ends_on_high(
    low: float, high: float, step: float, values: list[float]
) -> None:
    space = read(method="grid", space={"x": {"float": [low, high], "step": step}}).space
    assert [point["x"] for point in every_point(space)] == values
    assert [as_value(space["x"], value) for value in values] == values


@pytest.mark.parametrize("method", ["sobol", "gp", "cmaes", "nsga2"])
def test_a_normal_is_for_tpe_and_random(method: str) -> None:
    (found,) = mistakes(method=method, space={"x": {"normal": [0, 1]}})
    assert found == f"space.x: {method} has no normal distribution; tpe and random have."


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({"hours": "90m"}, {"hours": 1.5}),
        ({"hours": "2"}, {"hours": 2.0}),
        ({"cost": 20}, {"cost": 20.0}),
        ({"cost": "$20.5"}, {"cost": 20.5}),
        ({"trials": 3, "failed": "5%"}, {"trials": 3, "failed_share": 0.05}),
        ({"trials": 3, "failed": 0}, {"trials": 3, "failed_share": None, "failed_count": 0}),
    ],
)
def test_ways_to_write_a_limit(given: dict[str, Any], limits: dict[str, Any]) -> None:
    assert read(limits=given).limits == SweepLimits(**limits)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"max": 100}, EarlyStop("asha", max=100, min=4)),
        ({"max": 9, "method": "none"}, EarlyStop("none", max=9, min=1)),
        ({"max": 9, "method": "median", "min": 2}, EarlyStop("median", max=9, min=2)),
        ({"max": 9, "resume": True}, EarlyStop("asha", max=9, min=1, resume=True)),
        ({"max": 9, "method": "halving", "resume": True}, EarlyStop("halving", max=9, min=1)),
        ({"step": "images"}, EarlyStop("none", "images", is_step_given=True)),
    ],
)
@pytest.mark.parametrize("method", ["tpe", "random", "sobol"])
def test_early_stopping_is_on_once_max_is_known(
    method: str, stop: dict[str, Any], expected: EarlyStop
) -> None:
    assert read(method=method, early_stop=stop).early_stop == expected


def test_several_goals_have_no_early_stopping_and_their_order_is_the_files() -> None:
    goal = {"min": ["latency", "size"], "max": "acc"}
    spec = read(method="random", goal=goal, early_stop={"max": 9})
    assert spec.goals == (Goal("latency", "min"), Goal("size", "min"), Goal("acc", "max"))
    assert (spec.goal.metric, spec.early_stop.method) == ("latency", "none")


def test_a_grid_and_a_list_end_by_themselves() -> None:
    space = {"a": [1, 2, 3], "b": {"int": [1, 4]}}
    assert read(method="grid", space=space, limits=None).limits.trials == 12
    assert read(method="grid", space=space, limits={"trials": 5}).limits.trials == 5
    assert read(method="grid", space=space, where=["a < b"]).limits.trials == 6
    assert mistakes(method="grid", space=space, where=["a > b + 9"]) == [
        "where[0]: 'a > b + 9' accepts 0 of 12 points."
    ]
    huge = {"a": {"int": [1, 1000]}, "b": {"int": [1, 1000]}}
    assert "1,000,000 points" in mistakes(method="grid", space=huge, limits=None)[0]
    assert read(method="grid", space=huge, limits={"trials": 9}).limits.trials == 9
    points = [{"lr": 0.1}, {"lr": 0.2}]
    listed = read(method="list", points=points, space=None, limits=None)
    assert listed.limits.trials == 2
    assert listed.points == ({"lr": 0.1}, {"lr": 0.2})
    assert listed.space == {"lr": Dimension("choice", values=(0.1, 0.2))}


def test_a_list_beside_a_space_takes_constants_from_it() -> None:
    space = {"epochs": 3, "lr": {"log": [1e-4, 1]}}
    spec = read(method="list", space=space, points=[{"lr": 1, "opt": "sgd"}])
    assert spec.points == ({"epochs": 3, "lr": 1.0, "opt": "sgd"},)


def test_what_only_the_points_of_a_list_name_is_judged_like_a_space() -> None:
    points = [{"params": 1, "a b": 2}, {"params": 3, "a b": 2}]
    found = mistakes(method="list", space=None, points=points)
    assert [each.partition(":")[0] for each in found] == ["space.params", "space.a b"]


def test_a_condition_has_the_value_that_the_parent_will_have() -> None:
    parent = {"float": [0, 1], "step": 0.1}
    child = {"int": [1, 2], "when": {"p": 0.30000000001}}
    spec = read(space={"p": parent, "c": child})
    assert spec.space["c"].when == {"p": (0.3,)}
    assert count_points(spec.space) == 10 + 2


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ({"lr": 0.1, "opt": "sgd"}, "points[1].layers: missing."),
        ({"lr": 2, "opt": "sgd", "layers": 1}, "points[1].lr: 2 is not in the space."),
        ({"lr": 0.1, "opt": "sdg", "layers": 1}, "points[1].opt: sdg is not in the space."),
        ({"lr": 0.1, "otp": "sgd", "layers": 1}, "no such parameter. Did you mean 'opt'?"),
        ({"lr": 0.1, "opt": [], "layers": 1}, "points[1].opt: found []."),
        ({"lr": 0.01, "opt": "sgd", "layers": 2}, "points[1]: is the same as points[0]."),
        ({"lr": 0.05, "opt": "sgd", "layers": 4}, "points[1]: does not satisfy `where`."),
        ({"lr": 0.1, "opt": "sgd", "layers": 1, "m": 1}, "m: is not active with the other values"),
    ],
)
def test_points_that_are_outside_the_space_are_named(point: dict[str, Any], says: str) -> None:
    first = {"lr": 0.01, "opt": "sgd", "layers": 2}
    space = {**SMALLEST["space"], "m": {"int": [1, 2], "when": {"opt": "adamw"}}}
    (found,) = mistakes(points=[first, point], space=space, where=["layers < 4"])
    assert says in found


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text("ab{}.-\0", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "b", "float", "int", "log", "choice", "when", "step", "normal"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
_KEYS = [
    "job", "goal", "method", "space", "early_stop", "limits", "confirm", "seed", "where", "points",
    "name", "other",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=4),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), _JSON, max_size=3),
    st.lists(st.text("ab.=[],1\"'", max_size=8), max_size=2),
)
def test_whatever_a_file_says_it_is_read_or_refused_in_words(
    table: dict[str, Any], space: dict[str, Any], changes: list[str]
) -> None:
    whole = {**SMALLEST, "space": {**SMALLEST["space"], **space}, **table}
    try:
        spec = read_sweep(whole, "sweep.toml", changes=changes)
    except ConfigError as error:
        assert error.mistakes
        assert all(isinstance(mistake, str) for mistake in error.mistakes)
        return
    assert spec.goals and spec.job
    assert msgspec.json.decode(msgspec.json.encode(spec), type=SweepSpec) == spec
    for point in spec.points:
        assert satisfies(spec.where, point)
        assert active_parameters(spec.space, point) == list(point)


@pytest.mark.parametrize(
    ("key", "value", "is_refused"),
    [
        ("where", "layers < 3", True),
        ("where", ["layers < 3"], True),
        ("where", ["here", "there"], False),
        ("method", "random", True),
        ("method", ["random", "sobol"], False),
        ("method", "adjoint", False),
        ("seed", 7, True),
        ("seed", {"constant": 7}, False),
        ("seed", [1, 2], False),
        ("name", "mine", True),
    ],
)
def test_a_key_of_the_file_below_space_is_refused(key: str, value: Any, is_refused: bool) -> None:
    space = {**SMALLEST["space"], key: value}
    if not is_refused:
        assert key in read(space=space).space
        return
    with pytest.raises(ConfigError, match=f"space.{key}: is below .space.; write it above."):
        read(space=space)
    if key in ("seed", "name"):
        assert key in read(space=space, **{key: value}).space, "the file has its own above"


def test_a_goal_and_a_job_below_space_are_found_there() -> None:
    space = {**SMALLEST["space"], "goal": {"max": "acc"}, "job": "tiny"}
    with pytest.raises(ConfigError) as caught:
        read(space=space, goal=None, job=None)
    assert sum("is below [space]" in each for each in caught.value.mistakes) == 2


# --- `--set KEY=VALUE`: a change has the effect of the same text in the file ----------------------


def test_the_same_file_has_the_same_seed_whatever_is_set() -> None:
    table = tomllib.loads(EXAMPLE)

    def seed(**more: Any) -> int:
        return read_sweep({**table, **more}, "f", text=EXAMPLE).seed

    assert seed() == read_sweep(table, "f", text=EXAMPLE, changes=["limits.trials=8"]).seed
    assert seed() != seed(name="other")
    assert seed() != read_sweep(table, "f", text=EXAMPLE + "\n").seed
    assert seed(seed=7) == 7
    assert 0 <= seed() < 2**31


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        ("space.lr.log=[1e-5,1e-1]", "space.lr", {"log": [1e-5, 0.1]}),
        ("space.momentum.log=[0.5,0.9]", "space.momentum",
         {"log": [0.5, 0.9], "when": {"optimizer": "sgd"}}),
        ("space.width.int=[1,8]", "space.width", {"int": [1, 8], "log": True}),
        ("space.width.log=false", "space.width", {"int": [16, 256], "log": False}),
        ("space.optimizer=[sgd, lion]", "space.optimizer", ["sgd", "lion"]),
        ("space.optimizer=sgd", "space.optimizer", "sgd"),
        ("space.epochs=3", "space.epochs", 3),
        ("space.momentum.when.optimizer=adamw", "space.momentum",
         {"float": [0.8, 0.99], "when": {"optimizer": "adamw"}}),
        ("space.nesterov=[true,false]", "space.nesterov", [True, False]),
        ("limits.trials=8", "limits", {"trials": 8}),
        ("limits.cost=5 USD", "limits", {"cost": "5 USD"}),
        ("goal.min=loss", "goal", {"min": "loss"}),
        ("goal.max=acc", "goal", {"max": "acc"}),
        ("method=random", "method", "random"),
        ('where=["lr < 1"]', "where", ["lr < 1"]),
    ],
)  # fmt: skip
def test_a_change_is_as_if_the_file_said_so(change: str, path: str, expected: Any) -> None:
    """The sweep is the same, or so are its mistakes."""
    table = tomllib.loads(EXAMPLE) | {"limits": {"trials": 9}}
    said = copy.deepcopy(table)
    *above, last = path.split(".")
    inner = said
    for key in above:
        inner = inner[key]
    inner[last] = {**inner[last], **expected} if last == "limits" else expected
    assert outcome(table, change) == outcome(said)


@pytest.mark.parametrize("change", ["space.lr=", "space.lr= ", "name="])
def test_a_change_without_a_value_is_refused(change: str) -> None:
    """It is a variable of the shell that is not set; trials would get an empty argument."""
    expected = (f'--set {change}: the value is empty; "" is the empty text.',)
    assert outcome(tomllib.loads(EXAMPLE) | {"limits": {"trials": 9}}, change) == expected
    quoted = apply_changes({"space": {}}, ['space.suffix=""'])
    assert quoted == ({"space": {"suffix": ""}}, [])


def outcome(table: dict[str, Any], *changes: str) -> SweepSpec | tuple[str, ...]:
    try:
        return read_sweep(table, "f", text="the same", changes=changes)
    except ConfigError as error:
        return error.mistakes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("trials", "write KEY=VALUE"),
        ("=3", "write KEY=VALUE"),
        ("limits..trials=3", "write KEY=VALUE"),
        ("space.lrr.log=[1,2]", "the file has no parameter lrr. Did you mean 'lr'?"),
        ("space.lr.log.x=3", "log.x is not a part of a parameter"),
        ("goal.max.x=3", "max is not a table"),
        ("limits.trails=3", "limits.trails: unknown key. Did you mean 'trials'?"),
        ("limits.trials=many", "limits.trials: found 'many'. Expected a whole number."),
        ("space.lr.log=[0,1]", "space.lr.log: log range needs"),
        ("name=\udcff", "not UTF-8"),
    ],
)
def test_a_wrong_change_is_a_mistake_like_one_of_the_file(change: str, says: str) -> None:
    found = mistakes((change,))
    assert any(says in each for each in found), found


def test_parameters_whose_names_have_dots_can_be_changed() -> None:
    space = {**SMALLEST["space"], "model.lr": {"float": [0, 1]}}
    assert read(("space.model.lr.float=[0,2]",), space=space).space["model.lr"].high == 2.0
