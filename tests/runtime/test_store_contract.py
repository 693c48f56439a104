"""One contract for every store: in a folder, in S3 by either client, of sweeps and of archives."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchml.aws.s3 import BucketStore
from batchml.aws.session import Access, Session
from batchml.errors import BatchmlError
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store
from batchml.runtime.transfer.backends import open_archive, open_posix_archive
from batchml.sweeps.stores import SweepStore
from tests.support.s3 import BUCKET, KEYS, RoleS3, moto_s3


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": address}.items():
            patch.setenv(name, value)
        yield address


def boto3_store(bucket: str, prefix: str) -> BucketStore:
    return BucketStore(Session(Access("eu-west-1")), bucket, prefix)


# Backend -> a store in a bucket, below a prefix, or in a folder.
Open = Callable[[str, str, str, dict[str, str]], Store]
BACKENDS: dict[str, Open] = {
    "folder": lambda bucket, prefix, folder, environ: open_store(folder, environ),
    "private folder": lambda bucket, prefix, folder, environ: FolderStore(folder, private=True),
    "s3": lambda bucket, prefix, folder, environ: open_store(f"s3://{bucket}/{prefix}", environ),
    "boto3": lambda bucket, prefix, folder, environ: boto3_store(bucket, prefix),
    "sweep in a folder": lambda bucket, prefix, folder, environ: SweepStore(
        "k", folder, FolderStore(folder)
    ),
    "sweep in a bucket": lambda bucket, prefix, folder, environ: SweepStore(
        "k", f"s3://{bucket}/{prefix}", boto3_store(bucket, prefix)
    ),
    "archive in a folder": lambda bucket, prefix, folder, environ: open_archive(folder, environ),
    "archive in s3": lambda bucket, prefix, folder, environ: open_archive(
        f"s3://{bucket}/{prefix}", environ
    ),
    "archive for FSx": lambda bucket, prefix, folder, environ: open_posix_archive(
        f"s3://{bucket}/{prefix}", environ
    ),
}
IN_BUCKETS = sorted(set(BACKENDS) - {kind for kind in BACKENDS if "folder" in kind})


@pytest.mark.parametrize("kind", BACKENDS)
class TestStore:
    @pytest.fixture
    def store(self, kind: str, moto: str, tmp_path: Path) -> Store:
        environ = {**KEYS, "AWS_ENDPOINT_URL_S3": moto}
        prefix = f"runs/{tmp_path.name}-{kind.replace(' ', '-')}"
        return BACKENDS[kind](BUCKET, prefix, str(tmp_path / "store"), environ)

    # The odd one has characters that a path and a signature escape differently.
    @pytest.mark.parametrize("key", ["plain", "a/deep/key", "odd (+%20 ä&=?;@:$~'*!)/ü.txt"])
    def test_a_value_comes_back_as_it_was_put(self, store: Store, key: str) -> None:
        assert store.get(key) is None
        assert not store.has(key)
        store.put(key, b"first\x00\xff")
        store.put(key, b"second")
        assert store.get(key) == b"second"
        assert store.has(key)
        assert store.keys("") == [key]
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.has("empty")

    def test_the_start_of_a_key_is_no_key(self, store: Store) -> None:
        store.put("logs/a", b"x")
        assert not store.has("logs")
        assert store.get("logs") is None
        assert not store.has("logs/b")

    def test_only_the_first_call_creates(self, store: Store) -> None:
        assert store.create("claims/0", b"job-1")
        assert not store.create("claims/0", b"job-2")
        assert not store.create("claims/0", b"job-1")
        assert store.get("claims/0") == b"job-1"
        store.delete("claims/0")
        assert store.create("claims/0", b"again")

    def test_keys_are_listed_by_prefix_in_order(self, store: Store) -> None:
        for key in ("output/b", "output/a/c", "outputs", "claims/1"):
            store.put(key, b"x")
        assert store.keys("output/") == ["output/a/c", "output/b"]
        assert store.keys("out") == ["output/a/c", "output/b", "outputs"]
        assert store.keys("out", 2) == ["output/a/c", "output/b"]
        assert store.keys("out", 9) == ["output/a/c", "output/b", "outputs"]
        assert store.keys("none") == []
        assert store.keys("none/", 3) == []

    def test_a_part_of_a_value_is_read(self, store: Store) -> None:
        store.put("waves/1", b"0123456789")
        assert store.read("waves/1", 0, 4) == b"0123"
        assert store.read("waves/1", 3, 4) == b"3456"
        assert store.read("waves/1", 8, 4) == b"89"
        assert store.read("waves/1", 10, 4) == b""
        assert store.read("waves/1", 99, 1) == b""
        assert store.read("waves/1", 3, 0) == b""
        assert store.read("waves/2", 0, 4) is None
        assert store.read("waves/2", 0, 0) is None

    def test_many_values_are_read_in_the_order_of_their_keys(self, store: Store) -> None:
        for number in range(25):
            store.put(f"inbox/{number:02d}", str(number).encode())
        keys = [f"inbox/{number:02d}" for number in (7, 30, *range(24, -1, -1))]
        expected = [b"7", None, *(str(number).encode() for number in range(24, -1, -1))]
        assert store.get_many(keys) == expected
        assert store.get_many(keys[:1]) == [b"7"]
        assert store.get_many([]) == []
        assert store.keys("inbox/", 3) == ["inbox/00", "inbox/01", "inbox/02"]

    def test_deleted_values_are_gone(self, store: Store) -> None:
        for key in ("inbox/a", "inbox/b", "inbox/c"):
            store.put(key, b"x")
        store.delete("inbox/a", "inbox/c", "inbox/none", "none/at/all")
        assert store.keys("inbox/") == ["inbox/b"]
        store.delete()
        store.delete("inbox/b")
        assert store.get("inbox/b") is None
        assert store.create("inbox/b", b"again")

    def test_files_are_written_and_read(self, store: Store, tmp_path: Path) -> None:
        content = os.urandom(3 << 20)
        (tmp_path / "file").write_bytes(content)
        store.put_file("output/file", str(tmp_path / "file"))
        assert store.get_file("output/file", str(tmp_path / "back"))
        assert (tmp_path / "back").read_bytes() == content
        assert not store.get_file("output/none", str(tmp_path / "none"))
        names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
        assert names == ["back", "file"]
        with pytest.raises(OSError):
            store.put_file("output/x", str(tmp_path / "missing"))

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b", "a/..", "a\0b"])
    def test_other_texts_than_keys_are_refused(
        self, store: Store, key: str, tmp_path: Path
    ) -> None:
        path = str(tmp_path / "file")
        calls: tuple[Callable[[], object], ...] = (
            lambda: store.get(key), lambda: store.get_many([key, key]), lambda: store.has(key),
            lambda: store.put(key, b""), lambda: store.create(key, b""),
            lambda: store.delete(key), lambda: store.read(key, 0, 1),
            lambda: store.put_file(key, path), lambda: store.get_file(key, path),
        )  # fmt: skip
        Path(path).touch()
        for call in calls:
            with pytest.raises(OSError, match="not a key of a store"):
                call()


@pytest.mark.parametrize("kind", IN_BUCKETS)
def test_a_missing_bucket_is_an_error(kind: str, moto: str, tmp_path: Path) -> None:
    environ = {**KEYS, "AWS_ENDPOINT_URL_S3": moto}
    store = BACKENDS[kind]("nobodys-bucket", "runs", str(tmp_path), environ)
    for call in (store.get, store.keys, lambda key: store.put(key, b"")):
        with pytest.raises((OSError, BatchmlError), match=r"(?i)bucket") as caught:
            call("x")
        assert not getattr(caught.value, "temporary", False)


# --- S3 as a role sees it -----------------------------------------------------------------------


# How S3 answers a request for a missing object, and whether the role may list the store's prefix.
MAY_LIST = "404"
NAMED = "403 that names the action, and no list"
PLAIN = "403 that names nothing, and a list of the prefix"
ANSWERS = (MAY_LIST, NAMED, PLAIN)


@pytest.fixture(scope="module")
def role(moto: str) -> Iterator[RoleS3]:
    made = RoleS3(moto)
    yield made
    made.close()


def restrict(role: RoleS3, answers: str) -> None:
    role.lists = answers == MAY_LIST
    role.names_action = answers != PLAIN
    role.denied = "denied"
    role.listed = ("runs/",)
    role.requests.clear()


@pytest.mark.parametrize("kind", IN_BUCKETS)
class TestStoreOfRole:
    """A missing object is missing, however S3 says so; one that may not be read is a denial."""

    @pytest.fixture
    def store(
        self, kind: str, role: RoleS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Store:
        restrict(role, MAY_LIST)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", role.address)
        environ = {**KEYS, "AWS_ENDPOINT_URL_S3": role.address}
        prefix = f"runs/{tmp_path.name}-{kind.replace(' ', '-')}"
        made = BACKENDS[kind](BUCKET, prefix, "", environ)
        made.put("denied", b"x")
        role.requests.clear()
        return made

    @pytest.mark.parametrize("answers", ANSWERS)
    def test_a_missing_object_is_missing(
        self, store: Store, role: RoleS3, answers: str, tmp_path: Path
    ) -> None:
        restrict(role, answers)
        assert store.get("none") is None
        assert not store.has("none")
        assert store.read("none", 3, 4) is None
        assert store.read("none", 0, 0) is None
        assert store.get_many(["none", "other"]) == [None, None]
        assert not store.get_file("none", str(tmp_path / "file"))
        assert list(tmp_path.iterdir()) == []
        assert store.create("none", b"0123456789")
        assert not store.create("none", b"1")
        assert store.get("none") == b"0123456789"
        assert store.has("none")
        assert store.read("none", 3, 4) == b"3456"
        assert store.read("none", 10, 4) == b""
        assert store.get_file("none", str(tmp_path / "file"))
        store.delete("none")
        assert store.get("none") is None

    @pytest.mark.parametrize("answers", ANSWERS)
    def test_an_object_that_may_not_be_read_is_not_missing(
        self, store: Store, role: RoleS3, answers: str, tmp_path: Path
    ) -> None:
        restrict(role, answers)
        path = tmp_path / "file"
        for read in (
            lambda: store.get("denied"),
            lambda: store.has("denied"),
            lambda: store.read("denied", 0, 1),
            lambda: store.get_file("denied", str(path)),
        ):
            with pytest.raises((OSError, BatchmlError), match=r"(?i)denie|authorized") as caught:
                read()
            assert not getattr(caught.value, "temporary", False)
        assert not path.exists()

    def test_what_s3_does_not_say_is_not_missing(self, store: Store, role: RoleS3) -> None:
        """A 403 without the action, for a role that may not list: the object may be there."""
        role.lists, role.names_action, role.listed = False, False, ()
        for read in (store.get, store.has):
            with pytest.raises((OSError, BatchmlError), match=r"(?i)denie|authorized"):
                read("missing")

    @pytest.mark.parametrize(
        ("answers", "calls"),
        [(MAY_LIST, 1), (NAMED, 1), (PLAIN, 2)],
    )
    def test_a_missing_object_costs_at_most_one_more_call(
        self, store: Store, role: RoleS3, answers: str, calls: int
    ) -> None:
        restrict(role, answers)
        assert store.get("missing") is None
        assert role.requests == ["GET object", "GET list"][:calls]
