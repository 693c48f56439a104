"""Runs of several nodes, as a user submits them: against a real server. docs/multi-node.md."""

import os

import pytest

from tests.support.cli import Cli, write_job

JOB = """
image = "docker.io/library/python:3.12"
command = ["sh", "train.sh"]
nodes = 2
[retry]
attempts = 2
"""

# The first attempt ends as our runtime ends one whose host is unfit; the second finds what it left.
TRAIN = """
mine=$AWS_BATCH_JOB_ATTEMPT-$AWS_BATCH_JOB_NODE_INDEX
touch "$BATCHML_CHECKPOINT_DIR/$mine"
[ "$AWS_BATCH_JOB_NODE_INDEX" = 0 ] || exec sleep 600
for node in $(seq 1 $((AWS_BATCH_JOB_NUM_NODES - 1))); do
  until [ -e "$BATCHML_CHECKPOINT_DIR/$AWS_BATCH_JOB_ATTEMPT-$node" ]; do sleep 0.02; done
done
[ "$AWS_BATCH_JOB_ATTEMPT" = 2 ] || exit 75
echo $(ls "$BATCHML_CHECKPOINT_DIR") > "$BATCHML_OUTPUT_DIR/found"
"""


@pytest.mark.journey
def test_nodes_share_their_folders_over_attempts_on_a_machine_believed_larger(cli: Cli) -> None:
    """(B237, B239)"""
    write_job(cli.folder, "two", JOB, train__sh=TRAIN)
    cpus = len(os.sched_getaffinity(0))
    refused = cli("submit", "two", "--nodes", str(cpus + 1), "--dry-run")
    assert refused.code == 78
    assert f"batchml local start --vcpus {cpus + 1}" in refused.err
    assert cli("local", "start", "--vcpus", "3", "--json").json["vcpus"] == 3

    done = cli("submit", "two", "--nodes", "3", "--vcpus", "2", "--wait", "--json")
    assert (done.code, done.json["class"], done.json["attempts"]) == (0, "succeeded", 2), done
    assert "1 vCPU instead of 2 on each node" in done.err
    assert cli("get", f"{done.json['jobId']}#1", "out").code == 0
    assert (cli.folder / "out" / "found").read_text() == "1-0 1-1 1-2 2-0 2-1 2-2\n"

    cli("local", "stop")  # what was said of the machine is kept
    failed = cli("submit", "two", "--nodes", "3", "--wait", "--attempts", "1", "--json")
    assert (failed.code, failed.json["class"]) == (75, "host-lost"), failed
    assert cli("explain", "@last", "--json").json["cause"] == "host-lost"
