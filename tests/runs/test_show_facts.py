"""Facts of `show` that stand on one machine alone, and how long ones are folded."""

import pytest

from batchml.model.run import Record
from batchml.runs.commands.show import _describe_cuts, _describe_params, _fold
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.launch import SCRIPT_RUNNER, own_command


@pytest.mark.parametrize(
    ("resources", "more", "said"),
    [
        ({}, {}, ""),
        ({"vcpus": 2, "memory": "2 GiB"}, {}, ""),
        ({"gpus": 2}, {}, "2 GPU: more than this machine has"),
        (
            {"vcpus": 8, "memory": "4 GiB"},
            {},
            "8 vCPU, 4096 MiB: more than this machine has",
        ),
        ({"vcpus": 8}, {"env": "dev"}, ""),
        ({"of": "another version"}, {}, ""),
    ],
)
def test_what_was_cut_down_is_said_again(
    resources: dict[str, object], more: dict[str, str], said: str
) -> None:
    values = {"env": "local", "vcpus": 2, "memory_mib": 2048, **more}
    record = Record(spec={"resources": resources}, **values)  # type: ignore[arg-type]
    assert _describe_cuts(record) == said
    assert _describe_cuts(None) == ""


def test_parameters_that_the_command_does_not_use_are_named() -> None:
    params = {"lr": 0.1, "seed": 3}
    for command, said in (
        (["train", "{params}"], "lr=0.1 seed=3"),
        (["train", "{lr}"], "lr=0.1 seed=3 (seed: only in BATCHML_PARAMS)"),
        (["sh", "-c", "echo $BATCHML_PARAMS"], "lr=0.1 seed=3"),
        ([], "lr=0.1 seed=3"),  # of another client, or of an earlier version
    ):
        record = Record(params=params, spec={"command": command, "params": params})
        assert _describe_params(FoundRun(None, record)) == said


def test_words_are_folded_and_none_is_broken() -> None:
    line = "status     FAILED  (app-error: " + "children of it " * 4 + "x" * 60 + ")"
    folded = _fold(line, 50)
    assert folded.split() == line.split()
    assert folded.startswith("status     FAILED  (app-error: ")
    assert all(len(each) < 50 or "x" * 60 in each for each in folded.splitlines())
    assert _fold(line, 0) == line


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ((*SCRIPT_RUNNER, "train.py", "--lr", "1"), ("train.py", "--lr", "1")),
        ((*SCRIPT_RUNNER, "--packed", "eJwr", "stdin", "7"), ("stdin", "7")),
        (("python3", "-m", "mine"), ("python3", "-m", "mine")),
    ],
)
def test_the_command_of_a_script_is_its_own(command: tuple[str, ...], own: tuple[str, ...]) -> None:
    assert own_command(command) == own
