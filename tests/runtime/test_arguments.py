"""`batchml.runtime.protocol.variables`: how parameters become words of a command, and variables."""

import argparse
import json
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.runtime.protocol.variables import (
    FOLDERS,
    fill_command,
    fill_folders,
    folder_placeholders,
    folder_values,
    format_value,
    parameter_variable,
    parameter_variables,
    placeholders,
    switches,
    takes,
    takes_all,
)

PARAMS: dict[str, str | int | float | bool] = {"lr": 0.01, "optimizer": "sgd", "nesterov": True}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "--lr={lr}"], ["train", "--lr=0.01"]),
        (["{params}"], ["--lr", "0.01", "--optimizer", "sgd", "--nesterov", "true"]),
        (["{params:key=value}"], ["lr=0.01", "optimizer=sgd", "nesterov=true"]),
        (["{params:json}"], [json.dumps(PARAMS, sort_keys=True)]),
        (["c={params:json}"], [f"c={json.dumps(PARAMS, sort_keys=True)}"]),
        (["{}", "{x}", "{a b}", "{params:yaml}"], ["{}", "{x}", "{a b}", "{params:yaml}"]),
        (["-c", "run {params}"], ["-c", "run --lr 0.01 --optimizer sgd --nesterov true"]),
        (["{optimizer}{lr}"], ["sgd0.01"]),
    ],
)  # fmt: skip
def test_placeholders_become_values(command: list[str], words: list[str]) -> None:
    assert fill_command(command, PARAMS) == words


def test_all_are_those_that_the_command_does_not_name() -> None:
    words = fill_command(["run", "--rate", "{lr}", "{params}"], PARAMS)
    assert words == ["run", "--rate", "0.01", "--optimizer", "sgd", "--nesterov", "true"]


@pytest.mark.parametrize(
    ("word", "on", "off"),
    [
        ("{--amp}", ["--amp"], []),
        ("{--amp/--no-amp}", ["--amp"], ["--no-amp"]),
        ("{--no-cuda}", ["--no-cuda"], []),
        ("run {--amp} {params}", ["run --amp --lr 1"], ["run  --lr 1"]),
        ("{--other}", ["{--other}"], ["{--other}"]),
        ("{--}", ["{--}"], ["{--}"]),
    ],
)
def test_a_switch_is_a_word_or_none(word: str, on: list[str], off: list[str]) -> None:
    """`argparse` has `store_true`: such a flag takes no value."""
    name = "no_cuda" if "cuda" in word else "amp"
    assert fill_command([word], {name: True, "lr": 1}) == on
    assert fill_command([word], {name: False, "lr": 1}) == off
    assert fill_command(["{--amp}", "{params}"], {"amp": True, "lr": 1}) == ["--amp", "--lr", "1"]
    assert switches("{--no-cuda} {lr}", {"lr"}) == ["no_cuda"]
    assert takes(["{--a-b}"], "a_b", {"a_b"}) and takes(["{--a-b}"], "a-b", {"a-b"})


def test_there_may_be_none() -> None:
    assert fill_command(["run", "{params}", "x{params}"], {}) == ["run", "x"]
    assert fill_command(["{params:json}"], {}) == ["{}"]


def test_a_parameter_called_params_is_just_one() -> None:
    assert fill_command(["{params}"], {"params": "a b", "lr": 1}) == ["a b"]
    assert placeholders("{params} {lr}", {"params"}) == ["params", "lr"]
    assert not takes_all(["{params}"], {"params"})


NAMES = st.from_regex(r"[a-z_][a-z0-9_.]{0,8}", fullmatch=True).filter(
    lambda name: name != "params"
)
VALUES = st.one_of(st.text(st.characters(exclude_characters="\0")), st.integers(), st.booleans())


@settings(max_examples=50)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_in_a_line_for_a_shell_each_value_stays_one_word(params: dict[str, str | int]) -> None:
    """What a value has of quotes, spaces and `$(...)` reaches the program as it is."""
    (line,) = fill_command(["run {params}"], params)
    assert shlex.split(line) == ["run", *fill_command(["{params}"], params)]
    (line,) = fill_command(["run {params:json}"], params)
    assert json.loads(shlex.split(line)[1]) == params


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(["lr", "momentum", "opt"]),
        st.one_of(VALUES, st.floats(allow_nan=False), st.sampled_from(["-x", "--lr", "-", "-1e3"])),
        max_size=3,
    )
)
def test_argparse_reads_each_value_as_it_was(params: dict[str, str | int | float]) -> None:
    """Also those that begin as an option does: -5.38753e-05 is none."""
    parser = argparse.ArgumentParser()
    for name in ("lr", "momentum", "opt"):
        parser.add_argument(f"--{name}")
    found = vars(parser.parse_args(fill_command(["{params}"], params)))
    assert {name: value for name, value in found.items() if value is not None} == {
        name: format_value(value) for name, value in params.items()
    }


def test_a_value_that_begins_as_an_option_is_one_word_with_its_name() -> None:
    params: dict[str, str | float] = {"a": -0.5, "b": -5.38753e-05, "c": "-x", "d": -3}
    assert fill_command(["{params}"], params) == [
        "--a", "-0.5", "--b=-5.38753e-05", "--c=-x", "--d", "-3",
    ]  # fmt: skip


@settings(max_examples=50)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_a_value_is_never_looked_into_for_placeholders(params: dict[str, str | int]) -> None:
    words = fill_command([f"{{{name}}}" for name in params], params)
    shown = [str(v).lower() if isinstance(v, bool) else str(v) for v in params.values()]
    assert words == shown


def test_variables_carry_the_same() -> None:
    told = parameter_variables({"lr": 0.1, "weight-decay": 0.0, "model.width": 8, "on": False})
    assert json.loads(told.pop("BATCHML_PARAMS"))["model.width"] == 8
    assert told == {
        "BATCHML_PARAM_LR": "0.1", "BATCHML_PARAM_WEIGHT_DECAY": "0.0",
        "BATCHML_PARAM_MODEL_WIDTH": "8", "BATCHML_PARAM_ON": "false",
    }  # fmt: skip
    assert parameter_variable("lr") == "BATCHML_PARAM_LR"


@pytest.mark.parametrize(
    ("word", "is_taken"),
    [
        ("{lr}", True), ("{params}", True), ("--x={params:json}", True), ("{width}", False),
        ("run --lr $BATCHML_PARAM_LR", True), ("run $BATCHML_PARAMS", True), ("lr", False),
        ("run $BATCHML_PARAM_LRX", False),
    ],
)  # fmt: skip
def test_whether_a_command_has_a_place_for_a_parameter(word: str, is_taken: bool) -> None:
    assert takes(["run", word], "lr", ("lr", "width")) is is_taken


FOLDER_VALUES = {name: f"/its {name}" for name in FOLDERS}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "--out={outputs}/m.pt"], ["train", "--out=/its outputs/m.pt"]),
        (["{run}", "{data}{workspace}"], ["/its run", "/its data/its workspace"]),
        (["sh", "-c", "cat {data}/x"], ["sh", "-c", "cat '/its data'/x"]),
        (["sh", "-c", "echo ${data} $run"], ["sh", "-c", "echo ${data} $run"]),
        (["python3", "-c", "print(f'{data}')"], ["python3", "-c", "print(f'{data}')"]),
        (["awk", "{print}", "{checkpoint}"], ["awk", "{print}", "{checkpoint}"]),
    ],
)
def test_the_folders_of_a_run_have_placeholders(command: list[str], words: list[str]) -> None:
    assert fill_folders(command, FOLDER_VALUES) == words
    assert bool(folder_placeholders(command)) == (command != words)


def test_data_sets_are_in_the_workspace_unless_a_folder_is_set() -> None:
    assert folder_values({"BATCHML_WORKSPACE": "/w"})["data"] == "/w"
    assert folder_values({"BATCHML_WORKSPACE": "/w", "BATCHML_DATA_DIR": "/d"})["data"] == "/d"
