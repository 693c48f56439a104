"""The lines of a dry run about data sets, with one call to S3 for each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.model.job import JobSpec
from batchml.runs.commands.submit import describe_data
from tests.support.fakes import FakeClock
from tests.support.s3 import BUCKET, KEYS, RoleS3, client, moto_s3


@pytest.fixture
def s3() -> Iterator[RoleS3]:
    with moto_s3() as address:
        server = RoleS3(address)
        yield server
        server.close()


def test_files_and_bytes_are_counted_in_one_call_each(
    s3: RoleS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        client(s3.inner).put_object(Bucket=BUCKET, Key=f"a/{number}", Body=b"1" * 2048)
    client(s3.inner).put_object(Bucket=BUCKET, Key="a2", Body=b"1")
    (tmp_path / "batchml.toml").write_text('[env.dev]\nregion = "eu-west-1"\n')
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": s3.address}.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "h")}, tmp_path, "dev")
    context = Context(settings, FakeClock(), tmp_path)
    data = {"a": f"s3://{BUCKET}/a", "b": f"s3://{BUCKET}/none/", "c": "{workspace}/c"}
    one = list(describe_data(context, JobSpec(data={"one": f"s3://{BUCKET}/a2"})))
    assert one == [f"Data one, copied to the host first: s3://{BUCKET}/a2: 1 file, 1 B."]
    s3.requests.clear()
    lines = list(describe_data(context, JobSpec(data=data)))
    assert lines == [
        f"Data a, copied to the host first: s3://{BUCKET}/a: 3 files, 6.0 KiB.",
        f"Data b, copied to the host first: s3://{BUCKET}/none/: no files below it.",
        "Data c, copied to the host first: {workspace}/c.",
    ]
    assert s3.requests == ["GET list"] * 3, "the second one might be an object"
    s3.lists, s3.listed = False, ()
    (line, *_) = describe_data(context, JobSpec(data=data))
    assert "/a, of unknown size: ListObjectsV2: AWS" in line and "\n" not in line
    s3.requests.clear()
    offline = context.without_aws("--offline")
    assert all(line.startswith("Data ") for line in describe_data(offline, JobSpec(data=data)))
    assert s3.requests == []
