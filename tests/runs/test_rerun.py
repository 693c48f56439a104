"""The same again: from the history, from AWS alone, and of an array only some children."""

import json
import os
import subprocess
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.batch.requests import BY_DOCUMENT
from batchml.errors import UsageError
from batchml.model.group import launch_plan
from batchml.model.job import JobSpec, Launch, Resources
from batchml.model.numbering import MAPPING, format_ranges, parse_ranges
from batchml.model.run import FUNCTION_TAG, JobStatus, Record, Run
from batchml.runs.compare.facts import compare
from batchml.runs.rerun.rules import (
    SIZE,
    changeable_command,
    limit_to_children,
    make_rerun,
    record_spec,
)
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.launch import LaunchPlan
from batchml.runtime.protocol.variables import ARRAY_MAP

SPEC = JobSpec(
    image="pytorch", command=("python", "train.py", "--lr", "{lr}", "{not a parameter}"),
    name="train", params={"lr": 0.1}, env={"OMP_NUM_THREADS": 4}, code="src",
    resources=Resources(vcpus=4, memory="8 GiB"), metrics={"loss": "loss=(.*)"}, timeout="4h",
)  # fmt: skip
RECORD = Record(
    key="2abc", job_id="id", name="train", image="registry/pytorch@sha256:1", code="/code/1.tar.gz",
    spec=msgspec.to_builtins(SPEC), tags={"team": "v", "batchml:key": "2abc"}, max_cost=3.0,
)  # fmt: skip


def run(**more: Any) -> Run:
    values: dict[str, Any] = {
        "job_id": "id", "name": "train", "queue": "gpu", "status": JobStatus.FAILED,
        "image": "registry/pytorch@sha256:1", "command": ("python", "train.py", "--lr", "0.1"),
        "vcpus": 4, "memory_mib": 8192, "timeout": 14400, "max_attempts": 3, "share": "me",
        "environment": {"X": "hush", "OMP_NUM_THREADS": "4", "BATCHML_KEY": "2abc",
                        "BATCHML_CODE": "s3://b/code/1", "AWS_BATCH_JOB_ID": "id"},
        "tags": {"team": "v", "batchml:commit": "abcd"},
    }  # fmt: skip
    return Run(**{**values, **more})


@pytest.mark.parametrize(
    ("command", "own", "new"),
    [
        (["t", "--num-leaves", "15", "x"], "--num-leaves 15", "t --num-leaves 63 x"),
        (["t", "--num_leaves=15"], "--num_leaves=15", "t --num_leaves=63"),
    ],
)
def test_a_parameter_does_not_change_a_flag_that_the_command_has(
    command: list[str], own: str, new: str
) -> None:
    spec = {**RECORD.spec, "command": command, "params": {"num_leaves": 15}}
    record = replace(RECORD, spec=spec, job="/a b")
    with pytest.raises(UsageError, match=f"the command of the run has {own} itself") as caught:
        make_rerun(run(), record, {"num_leaves": "63"})
    assert str(caught.value).endswith(f"batchml submit '/a b' -- {new}")
    for other in ([*command, "{params}"], ["t", "$BATCHML_PARAM_NUM_LEAVES"], ["t"]):
        make_rerun(run(), replace(record, spec={**spec, "command": other}), {"num_leaves": "63"})


def test_another_command_takes_the_parameters_that_it_names() -> None:
    wanted = make_rerun(run(), RECORD, {"lr": "1"}, command=("python", "t.py", "{lr}"))
    assert wanted.spec.command == ("python", "t.py", "{lr}")
    assert make_rerun(run(), None, command=("ls",)).spec.command == ("ls",)
    part = limit_to_children(make_rerun(run(array_size=50), RECORD, command=("ls",)), [7, 9])
    assert part.spec.command == ("sh", "-c", MAPPING, "sh", "ls")


def test_the_command_that_may_be_changed_has_its_parameters_as_names() -> None:
    assert changeable_command(FoundRun(run(), RECORD)) == SPEC.command
    assert changeable_command(FoundRun(run(), None)) == ("python", "train.py", "--lr", "0.1")
    assert changeable_command(FoundRun(run(tags={FUNCTION_TAG: "f"}), None)) == ()
    assert changeable_command(FoundRun(run(command=(BY_DOCUMENT, "x")), None)) == ()


def test_what_is_remembered_is_sent_again_with_the_same_image_and_code() -> None:
    wanted = make_rerun(run(), RECORD)
    assert wanted.spec.image == "registry/pytorch@sha256:1"
    assert (wanted.spec.command, wanted.spec.params) == (SPEC.command, {"lr": 0.1})
    assert wanted.spec.env == {"OMP_NUM_THREADS": "4", "X": "hush"}
    assert (wanted.code, wanted.spec.metrics) == ("/code/1.tar.gz", SPEC.metrics)
    assert (wanted.tags, wanted.share, wanted.max_cost) == ({"team": "v"}, "me", 3.0)
    assert wanted.notices == ()


def test_the_folder_of_data_sets_of_the_shell_of_then_is_given_again() -> None:
    seen = run(environment={"BATCHML_DATA_DIR": "/sets"})
    kept = replace(RECORD, spec={**RECORD.spec, "env": {"BATCHML_DATA_DIR": "/sets"}})
    for wanted in (make_rerun(seen, RECORD), make_rerun(None, kept)):
        assert wanted.spec.env["BATCHML_DATA_DIR"] == "/sets"
        assert record_spec(wanted.spec, RECORD)["env"]["BATCHML_DATA_DIR"] == "/sets"
    (fact,) = [each for each in compare(FoundRun(seen, RECORD), FoundRun(run(), RECORD))
               if not each.same]  # fmt: skip
    assert (fact.what, fact.left, fact.right) == ("data", "/sets", None)


def test_data_sets_are_known_of_runs_of_others_and_compared() -> None:
    seen = run(environment={"BATCHML_DATA": '{"train": "s3://b/old"}'})
    own = replace(RECORD, spec={**RECORD.spec, "data": {"train": "s3://b/new"}})
    assert FoundRun(seen, None).data_sets == {"train": "s3://b/old"}
    assert FoundRun(run(environment={"BATCHML_DATA": "no JSON"}), None).data_sets == {}
    assert make_rerun(seen, None).spec.data == {"train": "s3://b/old"}
    facts = compare(FoundRun(seen, None), FoundRun(run(), own))
    (fact,) = [each for each in facts if each.what == "data.train"]
    assert (fact.left, fact.right) == ("s3://b/old", "s3://b/new")


def test_of_a_forgotten_run_the_variables_of_the_command_line_are_not_known() -> None:
    wanted = make_rerun(None, RECORD)
    assert wanted.spec.env == {"OMP_NUM_THREADS": 4}
    assert "--set-env" in wanted.notices[0]


def test_a_run_from_elsewhere_comes_to_the_same_requests() -> None:
    spec = make_rerun(run(), None).spec
    assert (spec.command, spec.queue, spec.timeout) == (run().command, "gpu", 14400)
    assert (spec.resources.vcpus, spec.resources.memory_mib) == (4, 8192)
    assert (spec.retry.attempts, spec.env["X"]) == (3, "hush")
    assert make_rerun(run(), None).code == "s3://b/code/1"
    assert spec.image == run().image
    assert make_rerun(run(image="busybox"), None).spec.image == "docker.io/library/busybox"
    assert "not submitted from this machine" in make_rerun(run(), None).notices[0]
    with pytest.raises(UsageError, match="batchml submit JOB -p"):
        make_rerun(run(), None, {"lr": "1"})


def test_a_run_of_several_nodes_comes_again_with_as_many() -> None:
    plan = LaunchPlan("torchrun", processes=4, logs="main", hang_after=90.0)
    seen = run(nodes=2, key="2abc", environment={"BATCHML_LAUNCH": plan.to_json()})
    spec = make_rerun(seen, None).spec
    assert (spec.nodes, launch_plan(spec)) == (2, plan)
    assert make_rerun(run(nodes=2, key="2abc"), None).spec.launch == Launch()
    assert make_rerun(run(nodes=2), RECORD).spec.nodes == SPEC.nodes  # what was asked for is known


def test_a_run_of_another_machine_comes_again_with_its_data_sets() -> None:
    data = {"train": "s3://sets/train"}
    seen = run(environment={"BATCHML_DATA": json.dumps(data)}, command=("t", "{data.train}"))
    assert make_rerun(seen, None).spec.data == data
    assert make_rerun(run(environment={"BATCHML_DATA": "{"}), None).spec.data == {}


def test_nodes_that_may_be_unlike_do_not_come_again() -> None:
    with pytest.raises(UsageError, match="may not all be alike"):
        make_rerun(run(nodes=2), None)
    with pytest.raises(UsageError, match=r"batchml rerun id$"):
        make_rerun(run(job_id="id#0", node_index=0), None)
    with pytest.raises(UsageError, match="cannot be read"):
        make_rerun(run(nodes=2, key="2abc", environment={"BATCHML_LAUNCH": "{"}), None)


def test_nothing_known_is_said() -> None:
    with pytest.raises(UsageError, match="forgotten"):
        make_rerun(None, Record(job_id="id"))


def test_values_of_variables_do_not_get_into_the_history() -> None:
    wanted = make_rerun(run(), RECORD)
    kept = record_spec(wanted.spec, RECORD)
    assert "hush" not in str(kept)
    assert kept["env"] == {"OMP_NUM_THREADS": "4"}
    assert kept["code"] == "src"
    assert "hush" not in str(record_spec(make_rerun(run(), None).spec, None))


# --- some children --------------------------------------------------------------------------


@given(st.sets(st.integers(0, 9_999), max_size=60).map(sorted))
@settings(max_examples=40)
def test_children_are_written_and_read(chosen: list[int]) -> None:
    assert parse_ranges(format_ranges(chosen)) == chosen


def test_neighbours_are_written_as_a_range() -> None:
    assert format_ranges([3, 17, 18, 19, 40]) == "3 17-19 40"
    with pytest.raises(UsageError):
        parse_ranges("3;rm")


def children_of(size: int) -> dict[str, int]:
    return {"FAILED": 1, "SUCCEEDED": size - 1}


def test_failed_children_are_a_smaller_array_that_keeps_the_old_numbers() -> None:
    wanted = limit_to_children(
        make_rerun(run(array_size=50, children=children_of(50)), RECORD), [3, 17, 18]
    )
    assert (wanted.array, wanted.children) == (3, (3, 17, 18))
    assert wanted.spec.env[ARRAY_MAP] == "3 17-18"
    assert wanted.spec.env[SIZE] == "50"
    assert wanted.spec.command[:4] == ("sh", "-c", MAPPING, "sh")
    assert wanted.spec.command[4:] == SPEC.command  # placeholders are still to be filled in


def test_one_child_is_a_run_of_its_own() -> None:
    assert limit_to_children(make_rerun(run(array_size=50), RECORD), [7]).array is None


@pytest.mark.parametrize("is_known", [True, False])
def test_what_failed_again_is_run_again_by_its_first_number(is_known: bool) -> None:
    first = limit_to_children(
        make_rerun(run(array_size=50), RECORD if is_known else None), [3, 17, 18]
    )
    record = msgspec.structs.replace(RECORD, spec=record_spec(first.spec, RECORD), array_size=3)
    told = run(
        array_size=3, command=first.spec.command,
        environment={name: str(value) for name, value in first.spec.env.items()},
    )  # fmt: skip
    whole = make_rerun(told, record if is_known else None)
    assert (whole.children, whole.array, whole.size) == ((3, 17, 18), 3, 50)
    second = limit_to_children(whole, [1, 2])
    assert (second.children, second.spec.env[SIZE]) == ((17, 18), "50")
    assert second.spec.command.count(MAPPING) == 1


@given(st.sets(st.integers(0, 60), min_size=1, max_size=12).map(sorted))
@settings(max_examples=8)
def test_the_shell_gives_each_child_its_number(chosen: list[int]) -> None:
    """By a real shell: what the program of child 0, 1, ... sees; its arguments stay as they are."""
    child = 'AWS_BATCH_JOB_ARRAY_INDEX=$i "$@"'
    loop = f"i=0; while [ $i -lt {len(chosen)} ]; do {child}; i=$((i+1)); done"
    program = ("sh", "-c", 'echo "$AWS_BATCH_JOB_ARRAY_INDEX $1"', "sh", "a b * $HOME")
    done = subprocess.run(
        ["sh", "-c", loop, "sh", "sh", "-c", MAPPING, "sh", *program],
        env={"PATH": os.environ["PATH"], ARRAY_MAP: format_ranges(chosen)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{number} a b * $HOME" for number in chosen]
