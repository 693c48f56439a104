"""`batchml workspace` in AWS, by the real commands: stacks by the script of `aws_world.py`, and a
bucket that moto keeps. What carriers do, and FSx's own part, is in tests/workspace.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.resources import shipped_folder
from tests.support.aws_http import served
from tests.support.aws_world import Account
from tests.support.cli import Cli
from tests.support.fakes import FastClock
from tests.support.s3 import BUCKET, client, moto_s3

CONFIG = """
default = "dev"
[env.dev]
region = "us-east-1"
[env.dev.storage]
workspace = "fsx-lustre"
[env.dev.compute.cpu]
instance_types = ["m6i.large"]
max_vcpus = 8
[env.dev.queues.default]
compute = ["cpu"]
[env.lab]
region = "us-east-1"
[env.lab.storage]
shared_with = "dev"
"""


class Lab:
    def __init__(self, cli: Cli, aws: str, s3: str) -> None:
        self._cli = cli
        self.s3 = client(s3)
        self._environ = {
            "AWS_ENDPOINT_URL": aws, "AWS_ENDPOINT_URL_S3": s3, "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(cli.folder), "BATCHML_HOME": str(cli.folder / "client"),
        }  # fmt: skip
        self.folder = cli.folder

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        shown = self._cli(*arguments, timeout=60, **self._environ)
        return shown.code, shown.out, shown.err


@pytest.fixture
def lab(cli: Cli, tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "account").mkdir()
    account = Account(tmp_path / "account", FastClock())
    account.event_every = 0.0
    account.outputs |= {"storage.BucketName": BUCKET, "storage.LustreMountName": "abcdefgh"}
    values = {"EnvironmentName": "dev", "Workspace": "fsx-lustre"}
    account.create_stack({
        "StackName": "batchml-dev-storage", "ClientRequestToken": "t", "Tags": [],
        "TemplateBody": (shipped_folder("cfn") / "storage.yaml").read_text("utf-8"),
        "Parameters": [{"ParameterKey": k, "ParameterValue": v} for k, v in values.items()],
    })  # fmt: skip
    (cli.folder / "batchml.toml").write_text(CONFIG)
    with served(account) as aws, moto_s3() as s3:
        yield Lab(cli, aws, s3)
    account.close()


def test_files_go_there_and_back_and_nothing_is_lost(lab: Lab) -> None:
    (lab.folder / "sets").mkdir()
    (lab.folder / "sets" / "a.txt").write_text("one")
    code, out, err = lab("workspace", "push", "sets", "data/")
    assert (code, "1 file, 3 B" in out, "FSx imports the files" in err) == (0, True, True), (
        out + err
    )
    said = lab.s3.head_object(Bucket=BUCKET, Key="workspace/data/sets/a.txt")["Metadata"]
    assert said["file-owner"] == "1000"

    # Another environment works in the same one.
    code, out, err = lab("workspace", "ls", "data/sets", "--env", "lab", "--json")
    assert code == 0 and [each["path"] for each in json.loads(out)] == ["data/sets/a.txt"], err
    code, out, err = lab("workspace", "pull", "data", "back")
    assert code == 0 and (lab.folder / "back" / "sets" / "a.txt").read_text() == "one", err

    code, out, err = lab("teardown", "--delete-file-system", "--plan")
    assert code == 2 and "no complete archive" in err, out + err
    assert "First: batchml workspace archive --env dev" in err
