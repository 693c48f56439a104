"""A run of four nodes on the embedded server, one of whose hosts lacks an EFA device.

The command gives each node of each attempt a host of its own, as AWS Batch would, then becomes the
entry of batchml's images. A folder in place of /sys has the devices of each host.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.local.home import Home
from batchml.runtime.protocol.launch import TORCHRUN, LaunchPlan
from tests.process.test_multinode import KINDS, Cluster
from tests.support.efa_fake import fake_sys
from tests.support.local_server import wait_for_job

ROOT = str(Path(__file__).parents[2])
ENTRY = f"""
export BATCHML_HOST_ID=host-$AWS_BATCH_JOB_ATTEMPT-$AWS_BATCH_JOB_NODE_INDEX
export BATCHML_LAUNCH={shlex.quote(LaunchPlan(TORCHRUN, processes=1, start_within=60).to_json())}
exec {sys.executable} -m batchml.runtime.run {sys.executable} -c "$PROGRAM"
"""
PROGRAM = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
RETRY = {
    "attempts": 3,
    "evaluateOnExit": [
        {"onExitCode": "75", "action": "RETRY"},
        {"onExitCode": "*", "action": "EXIT"},
    ],
}


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    home = Home(tmp_path / "home")
    home.prepare()
    made = Cluster(home, request.param, tmp_path / "files")
    yield made
    made.close()


@pytest.mark.journey
@pytest.mark.parametrize("cluster", KINDS[-1:], indirect=True)
def test_a_node_without_one_of_its_efa_devices_is_named_and_the_run_goes_on_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    for attempt in (1, 2):
        for node in range(4):
            is_broken = (attempt, node) == (1, 2)
            fake_sys(tmp_path / "sys" / f"host-{attempt}-{node}", 3 if is_broken else 4)
    definition = cluster.define(4, command=["sh", "-c", ENTRY])
    variables = {
        "PROGRAM": PROGRAM,
        "PYTHONPATH": ROOT,
        "BATCHML_GANG_TOKEN": "00112233445566778899aabbccddeeff",
        "BATCHML_EFA": "4",
        "BATCHML_SYS": str(tmp_path / "sys" / "{host}"),
    }
    environment = [{"name": name, "value": text} for name, text in variables.items()]
    job_id = cluster.batch.submit_job(
        jobName="four", jobQueue="default", jobDefinition=definition, retryStrategy=RETRY,
        nodeOverrides={"nodePropertyOverrides": [
            {"targetNodes": "0:", "containerOverrides": {"environment": environment}}
        ]},
    )["jobId"]  # fmt: skip
    job = wait_for_job(cluster.batch, job_id, limit=90)
    assert job["status"] == "SUCCEEDED", cluster.lines(job_id, 0)
    codes, main = [], []
    for attempt in cluster.node(job_id, 0)["attempts"]:
        codes.append(attempt["container"]["exitCode"])
        events = cluster.logs.get_log_events(
            logGroupName="/aws/batch/job", startFromHead=True,
            logStreamName=attempt["container"]["logStreamName"],
        )["events"]  # fmt: skip
        main += [event["message"] for event in events]
    assert codes == [75, 0]
    assert (
        "batchml: node 2: this host (host-1-2) is unfit: EFA: 3 of 4 devices are there (only "
        "rdmap0, rdmap1, rdmap2 in /sys/class/infiniband); another one is tried"
    ) in main
    assert "rank 0 of 4" in main
