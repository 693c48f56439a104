"""A project with an environment in AWS: AWS Batch is the embedded server, S3 is moto's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.clock import SystemClock
from batchml.local.home import Home, ServerEndpoint
from tests.support.counting import Counted, counting
from tests.support.s3 import KEYS, moto_s3

CONFIG = """
default = "dev"
[env.dev]
region = "us-east-1"
[env.dev.storage]
workspace = "none"
"""


@pytest.fixture
def account(
    home: Home, server: ServerEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Counted]:
    """A project whose environment `dev` is in the account, from whose folder all is done."""
    project, keys = tmp_path / "project", home.keys()
    (project / "jobs" / "hello").mkdir(parents=True)
    (project / "batchml.toml").write_text(CONFIG)
    for name in list(os.environ):
        if name.startswith(("AWS_", "BATCHML_")):
            monkeypatch.delenv(name)
    with moto_s3() as s3, counting(server.url, keys) as (counted, url):
        trial = {**KEYS, "AWS_ENDPOINT_URL_S3": s3, "AWS_REGION": "eu-west-1"}
        lines = "".join(f'{name} = "{value}"\n' for name, value in trial.items())
        (project / "jobs" / "hello" / "job.toml").write_text(
            'image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/python:1"\n'
            """command = ["python", "-c", "print('loss={x}')"]\n[params]\nx = 0\n[env]\n""" + lines
        )
        for name, value in {
            "BATCHML_HOME": str(tmp_path / "state"),
            "AWS_ENDPOINT_URL": url,
            "AWS_ENDPOINT_URL_S3": s3,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(project)
        yield counted


class Hurried(SystemClock):
    """The pace is made for AWS, where trials take longer than here: each nap is cut short, and
    taken for a whole one."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.2))
        self.ahead += max(0.0, seconds - 0.2)
