"""The journal for Optuna, against the format that Optuna 5 reads.

`tests/unit/test_sweep_export.py::test_optuna_itself_reads_it` loads it where Optuna is installed.
"""

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.model.sweep import Dimension, Params, Trial, TrialState
from batchml.sweep.export import journal, write_journal
from tests.sweep_story import BEGAN, PARETO, SPEC, told

NOW = BEGAN + 10_000
# What JournalStorageReplayResult._apply_create_trial takes.
FIELDS = {
    "op_code", "worker_id", "study_id", "datetime_start", "datetime_complete", "state", "value",
    "values", "distributions", "params", "user_attrs", "system_attrs", "intermediate_values",
}  # fmt: skip


def operations(count: int = 100, spec: Any = SPEC) -> list[dict[str, Any]]:
    trials = list(told(count, spec).trials.values())
    return list(journal("s", spec, trials, NOW))


def trials_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if each["op_code"] == 4]


def test_a_study_comes_first_then_its_trials_in_order() -> None:
    first, *_ = found = operations()
    assert first == {
        "op_code": 0, "worker_id": "batchml", "study_name": "s", "directions": [2],
    }  # fmt: skip
    numbers = [each["user_attrs"]["trial"] for each in trials_of(found)]
    assert numbers == list(range(100))
    assert all(set(each) <= FIELDS and each["study_id"] == 0 for each in trials_of(found))


def test_each_trial_has_optunas_state_and_what_that_needs() -> None:
    for each in trials_of(operations()):
        state = each["user_attrs"]["state"]
        assert each["state"] == {"DONE": 1, "PRUNED": 2, "FAILED": 3, "DIVERGED": 3}[state]
        assert (each["value"] is None) == (each["state"] == 3)
        assert each["values"] is None
        started, ended = each["datetime_start"], each["datetime_complete"]
        assert datetime.fromisoformat(started) <= datetime.fromisoformat(ended)


def test_parameters_lie_in_their_distributions() -> None:
    for each in trials_of(operations()):
        assert set(each["params"]) == set(each["distributions"])
        assert "epochs" not in each["params"]  # a constant
        for name, inner in each["params"].items():
            told_as = json.loads(each["distributions"][name])
            attributes = told_as["attributes"]
            if told_as["name"] == "CategoricalDistribution":
                assert 0 <= inner < len(attributes["choices"])
            else:
                assert attributes["low"] <= inner <= attributes["high"]


def test_one_parameter_has_one_distribution_in_all_trials() -> None:
    kinds: dict[str, set[str]] = {}
    for each in trials_of(operations()):
        for name, text in each["distributions"].items():
            kinds.setdefault(name, set()).add(text)
    assert all(len(texts) == 1 for texts in kinds.values())


def test_true_and_one_are_two_choices() -> None:
    spec = replace(SPEC, space={"x": Dimension("choice", values=(1, True, "1"))})
    tried: list[Params] = [{"x": True}, {"x": 1}, {"x": "1"}]
    trials = [
        Trial(number, params, 0, state=TrialState.WAITING) for number, params in enumerate(tried)
    ]
    found = trials_of(list(journal("s", spec, trials, NOW)))
    assert [each["params"]["x"] for each in found] == [1, 0, 2]
    assert [each["state"] for each in found] == [4, 4, 4]
    assert all(each["datetime_start"] is None for each in found)
    assert all("datetime_complete" not in each for each in found)


def test_several_goals_have_values_and_no_steps() -> None:
    found = operations(50, PARETO)
    assert found[0]["directions"] == [2, 1]
    for each in trials_of(found):
        assert each["value"] is None and each["intermediate_values"] == {}
        assert (each["values"] is None) == (each["state"] == 3)


def test_nan_is_never_written(tmp_path: Path) -> None:
    state = told(10)
    state.trials[0].metrics["loss"] = math.nan
    write_journal(tmp_path / "j.log", "s", SPEC, state, NOW)
    assert "NaN" not in (tmp_path / "j.log").read_text()


def test_a_file_that_is_there_is_replaced_not_appended_to(tmp_path: Path) -> None:
    for _ in range(2):
        assert write_journal(tmp_path / "j.log", "s", SPEC, told(10), NOW) == 10
    lines = (tmp_path / "j.log").read_text().splitlines()
    assert len(lines) == 1 + 2 + 10


@pytest.mark.parametrize("spec", [SPEC, PARETO], ids=["one goal", "two goals"])
def test_optuna_itself_reads_it(tmp_path: Path, spec: Any) -> None:
    optuna = pytest.importorskip("optuna")
    state = told(60, spec)
    write_journal(tmp_path / "j.log", "s", spec, state, NOW)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "j.log"))
    study = optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend))
    assert len(study.trials) == 60
    for theirs in study.trials:
        ours = state.trials[theirs.number]
        assert {**theirs.params, "epochs": 27} == {**ours.params, "epochs": 27}
