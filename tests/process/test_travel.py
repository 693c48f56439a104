"""A run in AWS from its submission to its outputs: the client, the runtime and S3 together.

AWS Batch is the embedded server, S3 is moto's; the environment is one in AWS to the client.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.client import Client
from batchml.handles import RunHandle
from batchml.local.home import Home, ServerEndpoint
from tests.support.counting import counting
from tests.support.s3 import BUCKET, KEYS, client, moto_s3

CONFIG = """
default = "dev"
[env.dev]
region = "us-east-1"
[env.dev.storage]
workspace = "none"
"""
JOB = """
image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/python:1"
command = ["python", "train.py", "--lr", "{lr}"]
[params]
lr = 0.5
[env]
BATCHML_OUTPUT_DIR = ""  # AWS Batch names none
AWS_ENDPOINT_URL_S3 = "%s"
AWS_ACCESS_KEY_ID = "%s"
AWS_SECRET_ACCESS_KEY = "%s"
"""
TRAIN = """
import os, sys
from batchml.runtime import report
report(step=1, loss=0.25)
index = os.environ.get("AWS_BATCH_JOB_ARRAY_INDEX", "-")
print(index, *(word if len(word) < 50 else len(word) for word in sys.argv[1:]))
with open(os.environ["BATCHML_OUTPUT_DIR"] + "/model", "w") as file:
    file.write("weights " + index)
"""


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address:
        yield address


@pytest.fixture
def dev(
    moto: str, home: Home, server: ServerEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """The client of `dev`, in a project with the job `train`."""
    job, keys = tmp_path / "project" / "jobs" / "train", home.keys()
    job.mkdir(parents=True)
    (tmp_path / "project" / "batchml.toml").write_text(CONFIG)
    (job / "job.toml").write_text(JOB % (moto, KEYS["AWS_ACCESS_KEY_ID"], "secret"))
    (job / "train.py").write_text(TRAIN)
    for name in list(os.environ):
        if name.startswith(("AWS_", "BATCHML_")):
            monkeypatch.delenv(name)
    with counting(server.url, keys) as (_, url):
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ENDPOINT_URL_S3": moto,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        environ = {"BATCHML_HOME": str(tmp_path / "state")}
        yield Client(folder=tmp_path / "project", environ=environ)


def ended(home: Home, run: RunHandle) -> RunHandle:
    """Waited for at the server itself, where it takes no time."""
    there = Client("local", environ={"BATCHML_HOME": str(home.root)})
    found = there.run(run.job_id).wait(timeout=60)
    assert found.status == "SUCCEEDED", [line.text for line in run.logs()]
    return run


def test_code_there_outputs_and_metrics_back(dev: Client, home: Home, tmp_path: Path) -> None:
    run = ended(home, dev.submit("train", params={"lr": 0.1}))
    assert [line.text for line in run.logs()] == ["- --lr 0.1"]
    assert run.metrics() == {"loss": 0.25}
    folder = run.outputs(tmp_path / "out")
    assert (folder / "model").read_text() == "weights -"
    again = run.rerun(params={"lr": 0.2})
    assert again is not None
    assert [line.text for line in ended(home, again).logs()] == ["- --lr 0.2"]
    (newest, older) = dev.runs(job="train")
    assert (newest, older) == (again, run)
    assert newest.seen is not None and newest.seen.params == {"lr": 0.2}


def test_a_command_longer_than_batch_takes_and_an_array(
    dev: Client, home: Home, moto: str, tmp_path: Path
) -> None:
    words = ["python", "train.py", *["x" * 100] * 200, "last"]
    run = ended(home, dev.submit("train", command=words, array=2))
    lines = [(line.child, line.text.split()) for line in run.logs()]
    assert [child for child, _ in lines] == ["0", "1"]
    assert [text[0] for _, text in lines] == ["0", "1"]
    assert all(text[1:] == ["100"] * 200 + ["last"] for _, text in lines)
    folder = run.outputs(tmp_path / "out")
    assert (folder / "1" / "model").read_text() == "weights 1"
    kept = client(moto).list_objects_v2(Bucket=BUCKET, Prefix="runs/")["Contents"]
    assert sum("/claims/" in each["Key"] for each in kept) >= 2
