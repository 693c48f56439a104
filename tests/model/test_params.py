"""The parameters of `-p`: names that a job takes, and their values."""

import re

import pytest

from batchml.errors import ConfigError
from batchml.model.job import read_job
from batchml.model.params import with_params
from tests.model.test_job_model import SMALLEST


def test_given_parameters_keep_the_type_of_their_default() -> None:
    spec = read_job({**SMALLEST, "params": {"n": 1, "lr": 0.1, "on": True, "s": "a"}}, "job.toml")
    given = with_params(spec, {"n": "2", "lr": "1e-3", "on": "False", "s": "3"}, "-p")
    assert given.params == {"n": 2, "lr": 0.001, "on": False, "s": "3"}
    assert with_params(spec, {"n": "0.5"}, "-p").params["n"] == 0.5
    with pytest.raises(ConfigError, match=r"so give a whole number; or write n = 1\.0 in job"):
        with_params(spec, {"n": "0.5", "lr": "2"}, "-p", keep_whole=True)


def test_a_number_may_be_that_of_each_child_of_an_array() -> None:
    spec = read_job({**SMALLEST, "params": {"seed": 0, "on": True}}, "job.toml")
    assert with_params(spec, {"seed": "1{index}"}, "-p").params["seed"] == "1{index}"
    for wrong in ({"seed": "a{index}"}, {"seed": "{child}"}, {"on": "{index}"}):
        with pytest.raises(ConfigError, match="the default is"):
            with_params(spec, wrong, "-p")


def test_a_seed_may_be_that_of_each_trial_and_a_number_in_other_runs() -> None:
    spec = read_job({**SMALLEST, "params": {"seed": 0}}, "job.toml")
    spec = with_params(spec, {"seed": "{seed}"}, "-p")
    assert spec.params["seed"] == "{seed}"
    assert with_params(spec, {"seed": "5"}, "-p").params["seed"] == 5


def test_an_unknown_parameter_is_refused_with_those_there_are() -> None:
    spec = read_job({**SMALLEST, "params": {"lr": 0.1}}, "job.toml")
    with pytest.raises(ConfigError, match=r"no such parameter.*Parameters: lr\."):
        with_params(spec, {"rate": "1"}, "-p")


def test_a_command_with_params_takes_parameters_of_any_name() -> None:
    table = {**SMALLEST, "command": ["train", "{params}"], "params": {"batch_size": 8}}
    spec = read_job(table, "job.toml")
    texts = {"lr": "0.3", "n": "-2", "on": "true", "id": "007", "word": "1_0", "big": "1e999"}
    assert with_params(spec, texts, "-p").params == {
        "batch_size": 8, "lr": 0.3, "n": -2, "on": True, "id": "007", "word": "1_0", "big": "1e999",
    }  # fmt: skip
    assert with_params(spec, {"lr": "0.3"}, "-p").argv() == [
        "train", "--batch_size", "8", "--lr", "0.3",
    ]  # fmt: skip
    for name, why in (
        ("batch-size", "the job's parameter is batch_size"), ("a b", "a name has letters"),
        ("", "a name has letters"), ("x" * 101, "a name has letters"), ("params", "is not params"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            with_params(spec, {name: "1"}, "-p")
    assert with_params(read_job(SMALLEST, "x"), {"lr": "1"}, "-p", ["x", "{params}"]).params


@pytest.mark.parametrize(
    ("typed", "meant"), [("eta", "eta0"), ("epoch", "epochs"), ("xlen", "len")]
)
def test_a_new_parameter_spelt_nearly_like_one_of_the_job_is_refused(
    typed: str, meant: str
) -> None:
    table = {**SMALLEST, "command": ["train", "{params}"], "params": {meant: 8}}
    spec = read_job(table, "job.toml")
    with pytest.raises(ConfigError, match=rf"no such name\. Did you mean '{meant}'\?") as caught:
        with_params(spec, {typed: "0.3"}, "-p")
    assert f"If {typed} is a parameter of its own, add it to [params]" in str(caught.value)
    with pytest.raises(ConfigError, match="with a default, and submit it anew: a rerun has the"):
        with_params(spec, {typed: "0.3"}, "-p", is_rerun=True)
    assert with_params(spec, {typed: "3"}, "-p", of_program={typed}).params[typed] == 3


def test_a_new_parameter_may_resemble_one_of_the_job() -> None:
    table = {**SMALLEST, "command": ["train", "{params}"], "params": {"sleep": 0.0, "on": False}}
    spec = read_job(table, "job.toml")
    assert with_params(spec, {"seed": "2"}, "-p").params["seed"] == 2
    with pytest.raises(ConfigError, match="-p on=maybe: the default is false, so give true or"):
        with_params(spec, {"on": "maybe"}, "-p")


def test_a_flag_that_the_command_has_is_not_written_twice() -> None:
    table = {**SMALLEST, "command": ["t", "--out", "{outputs}", "--log-dir=x", "{params}"]}
    for flags, name, there in (
        ("as-is", "out", "--out {outputs}"), ("kebab", "log_dir", "--log-dir=x"),
    ):  # fmt: skip
        spec = read_job({**table, "flags": flags}, "job.toml")
        with pytest.raises(ConfigError, match=f"the command has {re.escape(there)} already"):
            with_params(spec, {name: "foo"}, "-p")
        assert with_params(spec, {"outer": "1"}, "-p").params == {"outer": 1}
    assert with_params(spec, {"out": "x"}, "-p", ["t", "--out", "y", "{params}"]).params
