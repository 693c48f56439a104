"""An archive in S3, where moto is the judge: plain objects, parts that are gone on with."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.transfer import s3_archives
from batchml.runtime.transfer.archive import archive, free
from batchml.runtime.transfer.manifest import COMPLETE, read_manifest
from batchml.runtime.transfer.parallel import ProgressState, TransferProgress
from batchml.runtime.transfer.restore import restore, verify
from batchml.runtime.transfer.s3_archives import S3Archive
from batchml.runtime.transfer.tree import Tree
from tests.runtime.test_transfer import Cut, cut_after
from tests.support.s3 import BUCKET, KEYS, client, moto_s3
from tests.support.trees import Node, Seen, file, make, seen


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address:
        yield address


@pytest.fixture
def store(moto: str, tmp_path: Path) -> S3Archive:
    environ = {**KEYS, "AWS_ENDPOINT_URL_S3": moto}
    return S3Archive.open(f"s3://{BUCKET}/{tmp_path.name}", environ)


def test_a_tree_of_any_names_comes_back_from_a_bucket(
    store: S3Archive, moto: str, tmp_path: Path
) -> None:
    tree: Seen = {
        b"a/x": file("one"), "\u00e4 +%&=?#".encode(): file("odd"), b"a\nb": file("line"),
        b"\xff\xfe": file("no text"), b"empty": Node("folder", mode=0o755), b"none": file(b""),
        b"a/l": Node("link", b"x"),
    }  # fmt: skip
    top = make(tmp_path / "top", tree)
    before = seen(top)
    assert archive(Tree(str(top)), store).missing == ()
    # What consoles and FSx make to show a folder is no file of the archive.
    client(moto).put_object(Bucket=BUCKET, Key=f"{tmp_path.name}/a/", Body=b"")
    assert (
        client(moto).get_object(Bucket=BUCKET, Key=f"{tmp_path.name}/a/x")["Body"].read() == b"one"
    )
    assert set(store.sizes().values()) == {3, 4, 7, 0}
    assert archive(Tree(str(top)), store).files == 0
    assert verify(store).files == 5
    assert free(Tree(str(top)), store).removed == 5
    assert seen(top) == {}
    assert restore(store, Tree(str(top))).files == 5
    assert seen(top) == before


def test_a_large_file_is_sent_in_parts_and_no_part_twice(
    store: S3Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_archives, "PART", 5 << 20)  # S3's least
    content = os.urandom(12 << 20)
    tree = Tree(str(make(tmp_path / "top", {b"large": file(content)})))
    with pytest.raises(Cut):
        archive(tree, store, cut_after(1))
    assert store.sizes() == {} and not read_manifest(store).is_complete
    seen: list[ProgressState] = []
    assert archive(tree, store, TransferProgress(seen.append)).missing == ()
    assert seen[-1].moved == 2 << 20, "two of three parts were there"
    assert store.read("large", 0, 20 << 20) == content
    assert json.loads(store.get(COMPLETE) or b"")["files"] == 1
    assert store.keys(".batchml/archive/uploads/") == []
    with pytest.raises(Cut):  # another content: its first part is kept, if that is the same
        (tmp_path / "top/large").write_bytes(content[: 5 << 20] + os.urandom(7 << 20))
        archive(tree, store, cut_after(1))
    store.delete(*store.keys(".batchml/archive/uploads/"))  # as the bucket's rules do
    assert archive(tree, store).missing == ()
    assert verify(store).missing == ()


@pytest.mark.parametrize("call", ["part", "end"])
def test_an_upload_that_another_process_ended_begins_again(
    call: str, moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 says 404 NoSuchUpload then; moto 500. So it is said here in S3's place, once."""

    class Ended(S3Archive):
        left = 1

        def send_part(self, key: str, upload: str, number: int, body: bytes) -> str:
            return "" if self._is_gone("part") else super().send_part(key, upload, number, body)

        def end(self, key: str, upload: str, tags: list[str]) -> bool:
            return False if self._is_gone("end") else super().end(key, upload, tags)

        def _is_gone(self, now: str) -> bool:
            Ended.left -= now == call
            return now == call and Ended.left == 0

    monkeypatch.setattr(s3_archives, "PART", 5 << 20)
    environ = {**KEYS, "AWS_ENDPOINT_URL_S3": moto}
    store = Ended.open(f"s3://{BUCKET}/{tmp_path.name}", environ)
    tree = Tree(str(make(tmp_path / "top", {b"large": file(os.urandom(6 << 20))})))
    assert archive(tree, store).missing == ()
    assert verify(store).files == 1
