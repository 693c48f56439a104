"""`batchml.model.sweep` and `.conditions`: what is active, how many points, what `where` means."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.conditions import ConditionError, check_condition, condition_names, satisfies
from batchml.model.sweep import (
    Dimension,
    Params,
    Space,
    active_parameters,
    as_value,
    count_points,
    draw_point,
    every_point,
    is_discrete,
    sort_parents_first,
)


def choice(*values: Any, when: dict[str, tuple[Any, ...]] | None = None) -> Dimension:
    return Dimension("choice", values=values, when=when or {})


def ints(low: int, high: int, **more: Any) -> Dimension:
    return Dimension("int", low, high, **more)


SPACE: Space = {
    "optimizer": choice("sgd", "adamw"),
    "momentum": Dimension("float", 0.8, 1.0, step=0.1, when={"optimizer": ("sgd",)}),
    "nesterov": choice(True, False, when={"momentum": (0.9, 1.0)}),
    "width": Dimension("int", 16, 256, log=True),
}


def test_a_parameter_is_active_where_its_parents_say_so() -> None:
    assert active_parameters(SPACE, {"optimizer": "adamw"}) == ["optimizer", "width"]
    assert active_parameters(SPACE, {"optimizer": "sgd", "momentum": 0.8}) == [
        "optimizer",
        "momentum",
        "width",
    ]
    assert active_parameters(SPACE, {"optimizer": "sgd", "momentum": 0.9, "width": 16}) == list(
        SPACE
    )
    # A value of an inactive parent makes nothing active.
    assert "nesterov" not in active_parameters(SPACE, {"optimizer": "adamw", "momentum": 0.9})


def test_one_and_true_are_two_values() -> None:
    space = {"a": choice(1, True), "b": choice(3, 4, when={"a": (True,)})}
    assert active_parameters(space, {"a": 1}) == ["a"]
    assert active_parameters(space, {"a": True}) == ["a", "b"]
    assert count_points(space) == len(list(every_point(space))) == 3
    space["c"] = choice(5, 6, when={"a": (1, True)})
    assert count_points(space) == len(list(every_point(space))) == 6


def test_points_are_counted_with_their_conditions() -> None:
    assert count_points(SPACE) == (1 + 2 * 2 + 1) * 241
    assert is_discrete(SPACE)
    infinite = {**SPACE, "lr": Dimension("float", 1e-4, 1e-1, log=True)}
    assert count_points(infinite) is None
    assert not is_discrete(infinite)
    assert count_points({}) == 1


_VALUES = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(tuple)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Small discrete spaces whose parameters depend on some before them."""
    space: Space = {}
    for number in range(draw(st.integers(1, 5))):
        parents = draw(st.sets(st.sampled_from(list(space)), max_size=2)) if space else set()
        when = {parent: draw(_VALUES) for parent in sorted(parents)}
        kind = draw(st.sampled_from(["choice", "int", "float"]))
        if kind == "choice":
            space[f"p{number}"] = choice(*draw(_VALUES), when=when)
        else:
            low = draw(st.integers(0, 2))
            step = None if kind == "int" else 0.5
            high = low + draw(st.integers(1, 3))
            space[f"p{number}"] = Dimension(kind, low, high, step=step, when=when)  # type: ignore[arg-type]
    return space


@settings(max_examples=50, deadline=None)
@given(spaces(), st.integers())
def test_counting_listing_and_drawing_agree(space: Space, seed: int) -> None:
    points = list(every_point(space))
    assert count_points(space) == len(points)
    keys = {tuple(sorted(point.items())) for point in points}
    assert len(keys) == len(points)
    point = draw_point(space, Random(seed))
    assert tuple(sorted(point.items())) in keys
    assert active_parameters(space, point) == list(point)
    assert all(as_value(space[name], value) == value for name, value in point.items())


def test_parents_come_first_and_circles_are_found() -> None:
    shuffled = {name: SPACE[name] for name in ("nesterov", "width", "momentum", "optimizer")}
    ordered, circle = sort_parents_first(shuffled)
    assert list(ordered) == ["width", "optimizer", "momentum", "nesterov"]
    assert circle == []
    twins = {"a": choice(1, 2, when={"b": (1,)}), "b": choice(1, 2, when={"a": (1,)})}
    assert sorted(sort_parents_first(twins)[1]) == ["a", "b"]


@pytest.mark.parametrize(
    ("dimension", "given", "expected"),
    [
        (Dimension("float", 0, 1), 1, 1.0),
        (Dimension("float", 0, 1), 1.01, None),
        (Dimension("float", 0, 1, step=0.25), 0.5, 0.5),
        (Dimension("float", 0, 1, step=0.25), 0.3, None),
        (ints(1, 9), 4.0, 4),
        (ints(1, 9), 4.5, None),
        (ints(1, 9, step=2), 4, None),
        (ints(1, 9), True, None),
        (ints(1, 9), "4", None),
        (Dimension("normal", mu=0.0, sigma=1.0), -50, -50.0),
        (Dimension("normal", mu=0.0, sigma=1.0, log=True), -1, None),
        (choice("a", 2), 2, 2),
        (choice("a", 2), "b", None),
        (Dimension("float", 0, 1), float("nan"), None),
    ],
)
def test_a_value_is_taken_as_the_parameter_has_it(
    dimension: Dimension, given: Any, expected: Any
) -> None:
    found = as_value(dimension, given)
    assert (found, type(found)) == (expected, type(expected))


POINT: Params = {"width": 32, "lr": 0.1, "opt": "sgd", "on": True, "weight-decay": 0.5, "m.d": 3}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("width <= 4 * 8", True), ("width < 32", False), ("width > 64 or lr < 1", True),
        ("not width > 64", True), ("16 < width <= 32", True), ("opt in ['sgd', 'adam']", True),
        ("opt not in ('sgd',)", False), ("opt == 'sgd' and on == true", True),
        ("on != false", True),
        ("log2(width) == 5", True), ("max(width, 40) == 40", True), ("width % 16 == 0", True),
        ("weight_decay < 1", True), ("m.d ** 2 == 9", True), ("-width < 0", True),
        ("round(lr * 3, 1) == 0.3", True),
        # Without a value, a condition is not met, and never an accident.
        ("1 / (width - 32) > 0", False), ("9 ** 9 ** 9 > 0", False), ("opt < 3", False),
        ("opt * 9 == 'x'", False), ("sqrt(-width) > 0", False), ("min() > 0", False),
        # A parameter that is not active has nothing to meet.
        ("momentum > 3", True), ("not momentum > 3", True), ("momentum > 3 and width == 32", True),
        ("momentum > 3 and width == 31", False),
    ],
)  # fmt: skip
def test_what_conditions_mean(text: str, holds: bool) -> None:
    check_condition(text)
    assert satisfies([text], POINT) is holds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lr = 1", "write == to compare"), ("lr < 1 && on == true", "write and instead of &&"),
        ("!on == true", "write not instead of !"), ("lr +", "not an expression"),
        ("lr * 2", "not a comparison"), ("", "not an expression"), ("on", "not a comparison"),
        ("open('/etc/passwd') == 1", "open() is unknown"),
        ("lr.__class__() == 1", "is unknown"),
        ("[x for x in lr] == 1", "cannot be"), ("(lambda: 1) == 1", "cannot be"),
        ("lr is 1", "cannot be"), ("lr[0] == 1", "cannot be"), ("f'{lr}' == 1", "cannot be"),
        ("max(*lr) == 1", "cannot be"), ("None == 1", "cannot be"), ("lr @ 2 == 1", "cannot be"),
        ("(" * 300 + "lr < 1" + ")" * 300, "not an expression"), ("lr < 1" + " " * 1000, "longer"),
        ("not " * 240 + "lr < 1", None),
    ],
)  # fmt: skip
def test_only_comparisons_of_parameters_are_conditions(text: str, why: str | None) -> None:
    if why is None:
        check_condition(text)
        assert satisfies([text], {"lr": 0.5})
        return
    with pytest.raises(ConditionError) as refused:
        check_condition(text)
    assert why in str(refused.value)


@settings(max_examples=50)
@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_is_refused(text: str) -> None:
    try:
        check_condition(text)
    except ConditionError:
        return
    assert satisfies([text], POINT) in (True, False)


def test_the_parameters_of_a_condition() -> None:
    assert condition_names("width <= m.d * max(width, lr) and opt in ['a', 'b'] or on == true") == [
        "width", "m.d", "lr", "opt", "on",
    ]  # fmt: skip
