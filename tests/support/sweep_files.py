"""Sweep files as tables, and their mistakes."""

from typing import Any

import pytest

from batchml.errors import ConfigError
from batchml.model.sweep import (
    SweepSpec,
)
from batchml.sweeps.spec.file import read_sweep

EXAMPLE = """
job = "lenet"
goal = { max = "val_accuracy" }

[space]
lr = { log = [1e-4, 1e-1] }
momentum = { float = [0.8, 0.99], when = { optimizer = "sgd" } }
layers = { int = [1, 4] }
width = { int = [16, 256], log = true }
batch_size = [64, 128, 256]
optimizer = ["sgd", "adamw"]
epochs = 27

[early_stop]
max = 27

[limits]
trials = 64
hours = 12
cost = "50 USD"
target = 0.995

[confirm]
"""

SMALLEST: dict[str, Any] = {
    "job": "lenet",
    "goal": {"max": "acc"},
    "space": {"lr": {"log": [1e-4, 0.1]}, "opt": ["sgd", "adamw"], "layers": {"int": [1, 4]}},
    "limits": {"trials": 8},
}


def read(changes: tuple[str, ...] = (), **table: Any) -> SweepSpec:
    """The smallest sweep with `table` added; None takes a key out."""
    merged = {**SMALLEST, **table}
    given = {key: value for key, value in merged.items() if value is not None}
    return read_sweep(given, "sweep.toml", changes=changes)


def mistakes(changes: tuple[str, ...] = (), **table: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read(changes, **table)
    assert refused.value.exit_code == 78
    return list(refused.value.mistakes)


def in_space(**space: Any) -> list[str]:
    return mistakes(space={**SMALLEST["space"], **space})
