"""From a job.toml with Neuron chips to the requests, which botocore checks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.context import Context
from batchml.errors import ConfigError
from batchml.jobs.neurons import whole_vcpus
from batchml.runs.fit import Capacity, fit_job
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runtime.protocol.instance_types import family_types, vcpus_of
from tests.runs.test_submission import Aws, place_in, write
from tests.support.models import faults

CONFIG = """
[env.dev]
region = "us-east-1"
[env.dev.compute.cpu]
instance_types = ["c7i.2xlarge"]
max_vcpus = 64
[env.dev.compute.trn]
instance_types = ["trn1.32xlarge"]
max_vcpus = 512
[env.dev.compute.small]
instance_types = ["trn1", "inf2.xlarge"]
max_vcpus = 512
[env.dev.queues.default]
compute = ["cpu"]
[env.dev.queues.trn]
compute = ["trn"]
[env.dev.queues.mixed]
compute = ["small"]
"""
IMAGE = "public.ecr.aws/neuron/pytorch-training-neuronx:2.9.0-neuronx-py310-sdk2.27.0-ubuntu24.04"
JOB = f"""
image = "{IMAGE}"
command = ["python", "train.py"]
code = false
[resources]
neurons = 16
memory = "400 GiB"
"""


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    return Aws()


def prepared(folder: Path, aws: Aws, job: str = JOB, **changes: Any) -> PreparedRun:
    write(folder, job)
    context, _ = place_in(folder, aws.answer, CONFIG)
    return made(context, **changes)


def made(context: Context, **changes: Any) -> PreparedRun:
    found = prepare(context, RunRequest(job="hello", changes=changes), dry_run=True)
    assert faults("batch", "RegisterJobDefinition", found.requests.register) == []
    assert faults("batch", "SubmitJob", found.requests.submit) == []
    return found


def requested(overrides: Mapping[str, Any]) -> dict[str, str]:
    return {each["type"]: each["value"] for each in overrides["resourceRequirements"]}


def test_a_run_on_trainium_has_its_devices_and_a_host_of_its_own(tmp_path: Path, aws: Aws) -> None:
    found = prepared(tmp_path, aws)
    container = found.requests.register["containerProperties"]
    devices = container["linuxParameters"]["devices"]
    assert [each["hostPath"] for each in devices] == [f"/dev/neuron{n}" for n in range(16)]
    assert {tuple(each["permissions"]) for each in devices} == {("READ", "WRITE", "MKNOD")}
    assert "privileged" not in container and "nvidia" not in json.dumps(container)
    submit = found.requests.submit
    assert submit["jobQueue"] == "batchml-dev-trn", "the first queue that has the chips"
    overrides = submit["containerOverrides"]
    assert requested(overrides) == {"VCPU": "128", "MEMORY": str(400 * 1024)}
    assert {"name": "BATCHML_NEURONS", "value": "16"} in overrides["environment"]
    assert found.record.neurons == 16 and found.record.vcpus == 128
    assert any("128 vCPUs instead of 1, all of a host" in each for each in found.notices)


def test_each_node_has_the_devices(tmp_path: Path, aws: Aws) -> None:
    job = JOB.replace("code = false", 'code = false\nnodes = 4').replace(
        "[resources]", '[launch]\nkind = "plain"\n[resources]'
    )  # fmt: skip
    found = prepared(tmp_path, aws, job)
    (nodes,) = found.requests.register["nodeProperties"]["nodeRangeProperties"]
    assert len(nodes["container"]["linuxParameters"]["devices"]) == 16
    (override,) = found.requests.submit["nodeOverrides"]["nodePropertyOverrides"]
    assert requested(override["containerOverrides"])["VCPU"] == "128"


def test_a_host_without_a_device_is_left(tmp_path: Path, aws: Aws) -> None:
    rules = prepared(tmp_path, aws).requests.submit["retryStrategy"]["evaluateOnExit"]
    assert any("device" in json.dumps(rule) for rule in rules), rules


def test_own_vcpus_stay_if_no_second_run_fits_beside_them(tmp_path: Path, aws: Aws) -> None:
    found = prepared(tmp_path, aws, resources={"vcpus": 96})
    assert found.record.vcpus == 96 and not any("instead of" in each for each in found.notices)
    assert prepared(tmp_path, aws, resources={"vcpus": 64}).record.vcpus == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resources": {"neurons": 3}}, "resources.neurons: found 3. A run may have, in the queue "
         "trn: trn1.32xlarge: 1, 4, 8 or 16."),
        ({"queue": "default"}, "resources.neurons: hosts of the queue default have no Neuron "
         "chips: c7i.2xlarge. Choose --queue trn."),
        ({"resources": {"vcpus": 200}}, "resources.vcpus: found 200. The largest host of the queue "
         "trn, trn1.32xlarge, has 128."),
        ({"queue": "mixed", "resources": {"neurons": 5}}, "inf2.xlarge: 1."),
    ],
)  # fmt: skip
def test_a_run_that_could_not_have_its_chips_is_refused(
    tmp_path: Path, aws: Aws, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        prepared(tmp_path, aws, **changes)
    (mistake,) = error.value.mistakes
    assert words in mistake


@pytest.mark.parametrize("neurons", [-1, 65, "many", 1.5, ""])
def test_nonsense_is_refused_with_the_key(tmp_path: Path, aws: Aws, neurons: object) -> None:
    with pytest.raises(ConfigError, match=r"resources\.neurons: found"):
        prepared(tmp_path, aws, resources={"neurons": neurons})


def test_gpus_and_chips_exclude_each_other(tmp_path: Path, aws: Aws) -> None:
    with pytest.raises(ConfigError, match="found 16 with 2 GPUs"):
        prepared(tmp_path, aws, resources={"gpus": 2})
    assert prepared(tmp_path, aws, resources={"gpus": "auto"}).record.gpus == 0


def test_a_run_without_chips_on_hosts_with_chips_is_told_so(tmp_path: Path, aws: Aws) -> None:
    job = JOB.replace("neurons = 16", "").replace("400 GiB", "8 GiB")
    found = prepared(tmp_path, aws, job, queue="trn")
    assert any("reaches none of them" in each for each in found.notices)
    assert "devices" not in found.requests.register["containerProperties"]["linuxParameters"]
    found = prepared(tmp_path, aws, job)
    assert not any("Neuron" in each for each in found.notices)


# --- How many vCPUs keep other runs away ----------------------------------------------------------

TYPES = [row for name in ("trn1", "trn1n", "trn2", "inf1", "inf2") for row in family_types(name)]


@given(
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=4, unique=True),
    st.integers(1, 17), st.integers(1, 400),
)  # fmt: skip
def test_a_run_never_shares_a_host_and_never_lands_where_its_chips_are_missing(
    rows: list[Any], neurons: int, vcpus: int
) -> None:
    found = whole_vcpus(rows, neurons, vcpus)
    sizes = {row.instance_type: vcpus_of(row.instance_type) for row in rows}
    if found is None:
        # Then not even all vCPUs of any host would do.
        for size in sizes.values():
            hosts = [row for row in rows if sizes[row.instance_type] >= size]
            alone = all(2 * size > sizes[row.instance_type] for row in hosts)
            fits = all(neurons in row.job_counts for row in hosts)
            assert size < vcpus or not (alone and fits)
        return
    assert found >= vcpus
    hosts = [row for row in rows if sizes[row.instance_type] >= found]
    assert hosts
    assert all(neurons in row.job_counts for row in hosts)
    assert all(2 * found > sizes[row.instance_type] for row in hosts)


# --- On this machine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chips", "nodes", "given", "cut"),
    [
        (0, 1, 0, "no Neuron chip instead of 16"), (1, 1, 1, "1 Neuron chip instead of 16"),
        (16, 1, 16, ""), (16, 2, 0, "no Neuron chip instead of 16 on each node"),
    ],
)  # fmt: skip
def test_a_machine_gives_the_chips_that_it_has_to_one_run(
    tmp_path: Path, aws: Aws, chips: int, nodes: int, given: int, cut: str
) -> None:
    spec = prepared(tmp_path, aws, nodes=nodes, launch={"kind": "plain"}).spec
    fitted = fit_job(spec, Capacity(128, 512 * 1024, 0, chips))
    assert fitted.spec.resources.neurons == given
    assert [each for each in fitted.cuts if "Neuron" in each] == ([cut] if cut else [])
    if given:
        assert fitted.spec.resources.vcpus == 128
