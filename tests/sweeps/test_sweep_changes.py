"""`--set KEY=VALUE`: a change is as if the file said so."""

import copy
import tomllib
from typing import Any

import pytest

from batchml.errors import ConfigError
from batchml.model.sweep import (
    SweepSpec,
)
from batchml.sweeps.spec.file import read_sweep
from tests.support.sweep_files import EXAMPLE, SMALLEST, mistakes, read


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
