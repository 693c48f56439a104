"""Runs that no host of their queue can hold, or that need more hosts than it may have."""

from pathlib import Path
from typing import Any

import pytest

from batchml.config.environments import read_config
from batchml.errors import ConfigError
from batchml.jobs.placement import host_sizes, too_small_computes
from batchml.model.job import Resources
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, prepare
from tests.runs.test_submission import Aws, place_in, write

COMPUTE = {
    "cpu": ('["c7i"]', 256), "g6": ('["g6"]', 192), "p5": ('["p5.48xlarge"]', 384),
    "trn": ('["trn1.32xlarge"]', 256), "odd": ('["g6.xlarge", "z9.xlarge"]', 256),
    "other": ('["z9"]', 256),
}  # fmt: skip
QUEUES = {"default": ["cpu"], **{name: [name] for name in COMPUTE if name != "cpu"}}
QUEUES["both"] = ["cpu", "g6"]
IMAGE = "public.ecr.aws/docker/library/python:3.12"


def config(**most: int) -> str:
    lines = ["[env.dev]", 'region = "us-east-1"']
    for name, (types, vcpus) in COMPUTE.items():
        lines += [f"[env.dev.compute.{name}]", f"instance_types = {types}"]
        lines += [f"max_vcpus = {most.get(name, vcpus)}"]
    for name, computes in QUEUES.items():
        lines += [f"[env.dev.queues.{name}]", f"compute = {computes}"]
    return "\n".join(lines).replace("'", '"')


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    return Aws()


def prepared(folder: Path, aws: Aws, queue: str, nodes: int = 1, **resources: Any) -> PreparedRun:
    write(folder, f'image = "{IMAGE}"\ncommand = ["nproc"]\ncode = false\n')
    most = resources.pop("most", {})
    context, _ = place_in(folder, aws.answer, config(**most))
    changes = {"queue": queue, "nodes": nodes, "resources": resources}
    return prepare(context, RunRequest(job="hello", changes=changes), dry_run=True)


def mistakes(folder: Path, aws: Aws, queue: str, nodes: int = 1, **resources: Any) -> str:
    with pytest.raises(ConfigError) as error:
        prepared(folder, aws, queue, nodes, **resources)
    return str(error.value)


@pytest.mark.parametrize(
    ("queue", "resources", "words"),
    [
        ("trn", {"gpus": 8}, "resources.gpus: found 8. Hosts of the queue trn have no GPUs "
         "(trn1.32xlarge). Give --gpus 0, or choose --queue g6. --neurons 1 to 16 requests their "
         "Neuron chips."),
        ("default", {"gpus": 1}, "Hosts of the queue default have no GPUs (c7i). Give --gpus 0, or "
         "choose --queue g6."),
        ("g6", {"gpus": 9}, "The largest host of the queue g6, g6.48xlarge, has 8 GPUs. Request at "
         "most 8."),
        ("g6", {"vcpus": 400}, "g6.48xlarge, has 192 vCPUs. Request at most 192."),
        ("g6", {"memory": "3000 GiB"}, "resources.memory: found 3000 GiB. The largest host of the "
         "queue g6, g6.48xlarge, has 768 GiB, of which its system takes a part. Request less."),
        ("g6", {"memory": "1000 GiB"}, "Request less, or choose --queue p5."),
        ("g6", {"gpus": 8, "vcpus": 193, "memory": "800 GiB"}, "resources.vcpus: found 193."),
        ("both", {"gpus": 9}, "The largest host of the queue both, g6.48xlarge, has 8 GPUs."),
    ],
)  # fmt: skip
def test_a_container_that_no_host_of_the_queue_holds_is_refused(
    tmp_path: Path, aws: Aws, queue: str, resources: dict[str, Any], words: str
) -> None:
    assert words in mistakes(tmp_path, aws, queue, **resources)


def test_all_that_is_too_much_is_named_at_once(tmp_path: Path, aws: Aws) -> None:
    text = mistakes(tmp_path, aws, "g6", gpus=9, vcpus=400, memory="9 TiB")
    assert all(f"resources.{each}: found" in text for each in ("gpus", "vcpus", "memory"))


@pytest.mark.parametrize(
    ("queue", "resources"),
    [
        ("g6", {"gpus": 8, "vcpus": 192, "memory": "700 GiB"}), ("default", {"vcpus": 192}),
        ("both", {"gpus": 1}), ("both", {"memory": "300 GiB"}),
        ("odd", {"vcpus": 200}), ("other", {"memory": "9 TiB", "vcpus": 256}),
        ("elsewhere", {"gpus": 99, "vcpus": 999}), ("trn", {"neurons": 16}),
    ],
)  # fmt: skip
def test_what_a_host_holds_or_may_hold_is_taken(
    tmp_path: Path, aws: Aws, queue: str, resources: dict[str, Any]
) -> None:
    assert prepared(tmp_path, aws, queue, **resources).requests.submit


@pytest.mark.parametrize(
    ("queue", "nodes", "resources", "words"),
    [
        ("p5", 3, {"gpus": 8}, "nodes: found 3. Each takes a host, p5.48xlarge at least, with 192 "
         "vCPUs: 576 in all, and compute p5 may have 384 (max_vcpus), which is 2 hosts. Request at "
         "most 2, or set max_vcpus = 576 in compute.p5"),
        ("g6", 100, {"gpus": 8}, "19200 in all, and compute g6 may have 192 (max_vcpus), which is "
         "1 host. Request fewer"),
        ("g6", 49, {}, "Each takes a host, g6.xlarge at least, with 4 vCPUs: 196 in all"),
        ("trn", 3, {"neurons": 16}, "384 in all, and compute trn may have 256"),
        ("trn", 1, {"neurons": 16, "most": {"trn": 127}}, "resources.vcpus: found 128, and compute "
         "trn may have 127 vCPUs (max_vcpus). Request less, or set max_vcpus = 128 in compute.trn"),
        ("trn", 2, {"neurons": 16, "most": {"trn": 127}}, "which is no host."),
    ],
)  # fmt: skip
def test_whole_hosts_are_compared_with_max_vcpus(
    tmp_path: Path, aws: Aws, queue: str, nodes: int, resources: dict[str, Any], words: str
) -> None:
    assert words in mistakes(tmp_path, aws, queue, nodes, **resources)


@pytest.mark.parametrize(
    ("queue", "nodes", "resources"),
    [
        ("p5", 2, {"gpus": 8}), ("trn", 2, {"neurons": 16}), ("g6", 48, {"gpus": 1}),
        ("both", 64, {}), ("other", 64, {"vcpus": 4}),
        ("g6", 1, {"gpus": 1, "most": {"g6": 2}}),  # AWS Batch may exceed it by one host
    ],
)  # fmt: skip
def test_hosts_within_max_vcpus_are_taken(
    tmp_path: Path, aws: Aws, queue: str, nodes: int, resources: dict[str, Any]
) -> None:
    assert prepared(tmp_path, aws, queue, nodes, **resources).requests.submit


@pytest.mark.parametrize(
    ("queue", "nodes", "resources", "idle"),
    [
        ("p5", 2, {"gpus": 1}, "7 of the 8 GPUs of a p5.48xlarge stay idle. --gpus 8 takes all"),
        ("p5", 2, {"gpus": 8}, ""), ("p5", 1, {"gpus": 1}, ""), ("g6", 2, {"gpus": 1}, ""),
        ("g6", 2, {"gpus": 2}, "2 of the 4 GPUs of a g6.12xlarge"), ("p5", 2, {}, ""),
        ("p5", 2, {"gpus": "auto"}, "7 of the 8 GPUs"),
    ],
)  # fmt: skip
def test_gpus_that_nodes_leave_idle_are_named(
    tmp_path: Path, aws: Aws, queue: str, nodes: int, resources: dict[str, Any], idle: str
) -> None:
    most = {"g6": 4096}
    said = prepared(tmp_path, aws, queue, nodes, most=most, **resources).notices
    found = [each for each in said if "stay idle" in each]
    assert [idle in each for each in found] == ([True] if idle else [])


GROUPS = """
[launch]
kind = "ray"
[[groups]]
name = "head"
[groups.resources]
vcpus = 1
[[groups]]
name = "workers"
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_resources_of_the_command_line_are_refused_where_each_group_has_its_own(
    tmp_path: Path, aws: Aws, is_own: bool
) -> None:
    own = "[groups.resources]\nvcpus = 2\n" if is_own else ""
    write(tmp_path, f'image = "{IMAGE}"\ncommand = ["nproc"]\ncode = false\n{GROUPS}{own}')
    context, _ = place_in(tmp_path, aws.answer, config())
    request = RunRequest(job="hello", changes={"resources": {"gpus": 1, "vcpus": 3}})
    with pytest.raises(ConfigError) as error:
        prepare(context, request, dry_run=True)
    text = str(error.value)
    for name in ("gpus", "vcpus"):
        refused = f"--{name}: each of the [[groups]] has its own. Set {name} in job.toml."
        assert (refused in text) is is_own


def test_max_vcpus_below_the_smallest_host_is_named() -> None:
    environment = read_config_of(config(trn=127, g6=3, p5=191, other=1))
    said = list(too_small_computes(environment))
    assert [each.partition(":")[0] for each in said] == [
        "compute g6", "compute p5", "compute trn",
    ]  # fmt: skip
    assert "max_vcpus is 127, and its smallest host, trn1.32xlarge, has 128 vCPUs" in said[2]
    assert not list(too_small_computes(read_config_of(config())))


def read_config_of(text: str) -> Any:
    import tomllib

    found = read_config(tomllib.loads(text))
    assert not found.mistakes_of("dev")
    return found.environments["dev"]


def test_sizes_are_those_of_both_tables() -> None:
    (trn,) = host_sizes(["trn1.32xlarge"])
    assert (trn.vcpus, trn.neurons, trn.gpus) == (128, 16, 0)
    assert trn.holds(Resources(memory="900 TiB")), "its memory is not known"
    (unknown,) = host_sizes(["c99.xlarge"])
    assert unknown.holds(Resources(vcpus=9999)) and not unknown.holds(Resources(gpus=1))
    assert {each.name for each in host_sizes(["p5", "p5.48xlarge"])} == {
        "p5.4xlarge", "p5.48xlarge",
    }  # fmt: skip
