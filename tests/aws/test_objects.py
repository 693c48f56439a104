"""An environment's bucket as the client sees it; moto's S3 is the judge."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.aws.s3 import BucketStore
from batchml.aws.session import Access, Session
from batchml.errors import ServiceError
from tests.support.s3 import BUCKET, KEYS, moto_s3


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with moto_s3() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": address}.items():
            patch.setenv(name, value)
        yield Session(Access("eu-west-1"))


def test_objects_go_and_come(session: Session, tmp_path: Path) -> None:
    bucket = BucketStore(session, BUCKET)
    assert not bucket.has("code/a b")
    assert bucket.get("code/a b") is None
    bucket.put("code/a b", b"content")
    assert bucket.has("code/a b")
    assert bucket.get("code/a b") == b"content"
    assert bucket.get_file("code/a b", str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"content"
    assert not bucket.get_file("code/none", str(tmp_path / "none"))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_objects_are_listed_with_their_sizes(session: Session) -> None:
    bucket = BucketStore(session, BUCKET)
    for name in ("output/b", "output/a", "outer"):
        bucket.put(f"runs/k/{name}", name.encode())
    found = bucket.list_objects("runs/k/output/")
    assert [(each.key, each.size) for each in found] == [
        ("runs/k/output/a", 8), ("runs/k/output/b", 8),
    ]  # fmt: skip
    assert found[0].modified > 1.7e9
    assert bucket.list_objects("runs/none") == []


def test_a_bucket_that_is_not_there_is_an_error(session: Session) -> None:
    with pytest.raises(ServiceError):
        BucketStore(session, "nobodys-bucket").put("a", b"")
