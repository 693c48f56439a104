"""A sweep and its job: mistakes and notices, also of the jobs and documents that ship."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from batchml.model.job import JobSpec, read_job
from batchml.model.sweep import (
    SweepSpec,
)
from batchml.sweeps.spec.file import read_sweep
from batchml.sweeps.spec.rules import check_with_job, notices, with_full_length
from tests.support.sweep_files import SMALLEST, read

ROOT = Path(__file__).parent.parent.parent
JOBS, DOCS = ROOT / "jobs", ROOT / "docs"


def job(*words: str, **table: Any) -> JobSpec:
    params = {"lr": 0.1, "opt": "sgd", "layers": 1, "x": 1}
    return read_job({"image": "i", "command": ["run", *words], "params": params, **table}, "job")


def test_each_parameter_must_reach_the_command() -> None:
    spec = read()
    assert check_with_job(spec, job("{params}")) == []
    assert check_with_job(spec, job("{lr}", "{opt}", "--n={layers}")) == []
    line = "train --lr={lr} --opt=$BATCHML_PARAM_OPT {params:json}"
    assert check_with_job(spec, job("sh", "-c", line)) == []
    (found,) = check_with_job(spec, job("{lr}", "{opt}"))
    assert found == (
        "space.layers: the job's command never uses {layers}; add it, or {params} for all of them."
    )


def test_a_name_that_is_spelt_nearly_like_a_parameter_is_a_mistake() -> None:
    spec = read(space={**SMALLEST["space"], "layer": [1, 2]})
    (found,) = check_with_job(spec, job("{params}"))
    assert found == (
        "space.layer: [params] has no such name. Did you mean 'layers'? If layer is a parameter of "
        "its own, add it to [params] of job.toml with a default."
    )
    assert check_with_job(spec, job("{params}"), of_program=["layer"]) == []


@pytest.mark.parametrize("words", [(), ("{lr}", "{opt}", "{layers}")])
def test_without_params_in_the_command_a_job_takes_no_other_names(words: tuple[str, ...]) -> None:
    spec = read(space={**SMALLEST["space"], "decay": [1, 2]})
    (found,) = check_with_job(spec, job(*words))
    assert found.startswith("space.decay: the job has no such parameter. Parameters: layers, lr,")


def test_a_job_with_params_in_its_command_takes_new_names_and_a_notice_names_them() -> None:
    spec = read(space={**SMALLEST["space"], "decay": [1, 2], "warmup": [1, 2]})
    assert check_with_job(spec, job("{params}")) == []
    said = "The job's [params] has no decay, warmup: {params} passes them to the program."
    assert about(said, spec, job("{params}"))
    assert not about("[params] has no", read(), job("{params}"))


def test_a_flag_that_the_command_has_is_no_new_name() -> None:
    spec = read(space={**SMALLEST["space"], "out": ["a", "b"]})
    (found,) = check_with_job(spec, job("--out", "x", "{params}"))
    assert found.startswith("space.out: the command has --out x already.")


@pytest.mark.parametrize(
    ("words", "params"),
    [
        (["train", "{params}"], {}),
        (["train", "{new}", "{params}"], {"x": 1}),
        (["sh", "-c", "$BATCHML_PARAM_NEW {params}"], {"x": 1}),
    ],
)
def test_a_job_without_a_list_takes_any_name_and_its_command_may_name_one(
    words: list[str], params: dict[str, Any]
) -> None:
    beside = read_job(
        {"image": "i", "command": words, "params": params}, "job", provided_params=["new"]
    )
    assert check_with_job(read(space={"new": [1, 2]}), beside) == []


def test_a_command_without_any_parameter_must_read_the_variables() -> None:
    spec = read()
    assert check_with_job(spec, job()) == []
    assert any("BATCHML_PARAMS" in notice for notice in notices(spec, job()))
    assert not any("BATCHML_PARAMS" in notice for notice in notices(spec, job("{params}")))


def test_a_trial_is_one_container() -> None:
    assert check_with_job(read(), job("{params}", launch={"kind": "torchrun"})) == []
    (found,) = check_with_job(read(), job("{params}", nodes=2))
    assert "nodes = 2: a trial is one container" in found
    gang = {"launch": {"kind": "ray"}, "groups": [{"name": "head"}]}
    (found,) = check_with_job(read(), job("{params}", **gang))
    assert "groups: a trial is one container" in found


def test_a_job_does_not_say_what_each_trial_has_for_itself() -> None:
    (found,) = check_with_job(read(), job("{params}", env={"BATCHML_CHECKPOINT_DIR": "/x"}))
    assert (
        found == "lenet: env.BATCHML_CHECKPOINT_DIR: batchml sets it for each trial; "
        "remove it from the job."
    )


@pytest.mark.parametrize("name", ["epochs", "n_epochs", "max-epochs", "epoch", "num_train_epochs"])
@pytest.mark.parametrize("number", [20, 30])
def test_a_full_training_has_as_many_steps_in_the_program_as_in_the_sweep(
    name: str, number: int
) -> None:
    spec = read(early_stop={"max": 27, "step": "epoch"})
    full, said = with_full_length(spec, job("{params}", params={"lr": 0.1, name: number}))
    assert full.params == {"lr": 0.1, name: 27}
    assert said == [
        f"Trials run with {name} = 27, which is early_stop.max; the job has {number}. "
        f"To choose another number, write {name} below [space]."
    ]


@pytest.mark.parametrize(
    "params", [{"epochs": 27}, {"epochs": -1}, {"epoch_size": 2}, {"epochs": "2"}]
)
def test_other_parameters_stay(params: dict[str, Any]) -> None:
    beside = job("{params}", params={"lr": 0.1, **params})
    for early_stop in ({"max": 27}, {"method": "none"}):
        assert with_full_length(read(early_stop=early_stop), beside) == (beside, [])
    steps = read(early_stop={"max": 500, "step": "iter"})
    full, _ = with_full_length(steps, job("{params}", params={"max_iterations": 20}))
    assert full.params == {"max_iterations": 500}


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (20, "epochs is at most 20: no trial comes to epoch 27. Write max = 20."),
        ([10, 20], "epochs is at most 20: no trial comes to epoch 27. Write max = 20."),
        (30, "epochs is up to 30: trials are stopped after epoch 27"),
        ({"int": [5, 30]}, "epochs is up to 30: trials are stopped after epoch 27"),
        (27, ""),
        (26, ""),  # 0 to 26 are 27 steps
        ([9, 27], ""),
    ],
)
def test_a_number_of_steps_in_the_space_stays_and_is_a_notice(epochs: Any, said: str) -> None:
    spec = read(space={**SMALLEST["space"], "epochs": epochs}, early_stop={"max": 27})
    beside = job("{params}", params={"epochs": 3})
    assert with_full_length(spec, beside) == (beside, [])
    assert about(said, spec) if said else not about("early_stop.max", spec)


def test_a_seed_that_all_trials_share_is_a_notice() -> None:
    confirmed: dict[str, Any] = {"confirm": {"top": 1}}
    for name in ("seed", "data_seed"):
        beside = job("{params}", params={"lr": 0.1, "opt": "", "layers": 1, name: 0})
        write = f'write {name} = "{{seed}}" below [params] of job.toml.'
        said = f"All trials run with {name} = 0"
        assert about(f"{said}. For a seed of each trial's own {write}", read(), beside)
        assert about(f"{said}.", read(**confirmed), beside)
    own = job("{params}", params={"lr": 0.1, "opt": "", "layers": 1, "seed": "{seed}"})
    assert not about("seed", read(**confirmed), own)
    fixed = {**SMALLEST["space"], "seed": {"constant": 0}}
    assert not about("seed", read(space=fixed), own)
    assert about("the best again with the same seed", read(space=fixed, **confirmed), own)


def about(said: str, spec: SweepSpec, beside: JobSpec | None = None) -> bool:
    return any(said in notice for notice in notices(spec, beside))


def test_what_people_should_know() -> None:
    wide = read(limits={"trials": 100, "parallel": 64})
    assert about("tpe learns nothing when 64 of 100 trials start at once", wide)
    assert not about("learns nothing", read(limits={"trials": 100, "parallel": 25}))
    stopping = read(limits={"trials": 100, "parallel": 64}, early_stop={"max": 27})
    assert not about("learns nothing", stopping)
    assert about("so tpe draws at random", read(early_stop={"max": 27, "method": "halving"}))
    assert about("must save to", read(early_stop={"max": 27, "resume": True}), job("{params}"))
    small = {"a": [1, 2], "b": [1, 2]}
    assert about("only 4 points", read(space=small))
    assert about("grid has 4 points; limits.trials allows 3", read(
        space=small, method="grid", limits={"trials": 3}
    ))  # fmt: skip
    metrics = {"val_accuracy": "acc=([0-9.]+)"}
    spec = read(goal={"max": "val_acuracy"})
    assert about("Did you mean 'val_accuracy'?", spec, job("{params}", metrics=metrics))
    both = {"train_acc": "a=([0-9.]+)", "test_acc": "t=([0-9.]+)"}
    spec = read(goal={"max": "acc"})
    assert about("has no acc, only train_acc, test_acc. Trials must print acc=VALUE.", spec, job(
        "{params}", metrics=both
    ))  # fmt: skip
    assert not about("[metrics]", spec, job("{params}"))
    assert about("needs a pattern", read(goal={"max": "val accuracy"}), job("{params}"))
    assert not about("pattern", read(goal={"max": "val/accuracy"}), job("{params}"))


@pytest.mark.parametrize("name", ["lenet", "lenet-mxnet"])
def test_the_sweeps_that_ship_with_batchml_fit_their_jobs(name: str) -> None:
    text = (JOBS / name / "sweep.toml").read_text("utf-8")
    spec = read_sweep(tomllib.loads(text), name, text=text)
    beside = read_job(tomllib.loads((JOBS / name / "job.toml").read_text("utf-8")), name)
    assert check_with_job(spec, beside) == []
    assert notices(spec, beside) == []
    assert (spec.job, spec.early_stop.method, spec.space["epochs"].values) == (name, "asha", (3,))


def test_the_files_in_the_documentation_are_read() -> None:
    text = (DOCS / "sweep-file.md").read_text("utf-8")
    whole, where, points = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    table = tomllib.loads(whole)
    assert read_sweep(table, "docs", text=whole).early_stop.method == "asha"
    assert read_sweep({**table, **tomllib.loads(where)}, "docs").where
    listed = {**table, "method": "list", "space": {}, **tomllib.loads(points)}
    assert read_sweep(listed, "docs").limits.trials == 1


@pytest.mark.parametrize(
    "written", re.findall(r"^\| (`x = .*?) \|", (DOCS / "sweep-file.md").read_text("utf-8"), re.M)
)
def test_the_parameters_in_the_documentation_are_read(written: str) -> None:
    for each in re.findall(r"`(x = [^`]*)`", written):
        assert read(space={**SMALLEST["space"], **tomllib.loads(each)}).space["x"]
