"""Data sets of `[data]`: copied once to a host, checked, continued, shared and removed."""

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchml.runtime.data.cache import DataCache, read_boot
from batchml.runtime.data.sources import BLOCK, DataError
from batchml.runtime.data.stage import StagedData, StagingContext, choose_cache, stage_data
from batchml.runtime.storage import s3 as storage
from tests.support.needs import unavailable
from tests.support.s3 import BUCKET, KEYS, RoleS3, client, moto_s3

URL = f"s3://{BUCKET}/sets/train"
# No block is like another, and 64 MiB of random bytes would take each worker of pytest a while.
LARGE = (random.Random(1).randbytes(1_000_003) * 68)[: 2 * BLOCK + 5]


class ChangingS3(RoleS3):
    """S3 whose objects change, or whose readers are killed, between two requests."""

    def __init__(self, inner: str) -> None:
        super().__init__(inner)
        self.after: Callable[[str, int], None] = lambda _path, _count: None
        self._guard = threading.Lock()

    def refusal(self, method: str, path: str, query: dict[str, str], status: int) -> bytes:
        with self._guard:
            self.after(path, len(self.requests))
        return super().refusal(method, path, query, status)

    @property
    def reads(self) -> int:
        return self.requests.count("GET object")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address:
        yield address


@pytest.fixture
def s3(moto: str) -> Iterator[ChangingS3]:
    server = ChangingS3(moto)
    yield server
    server.close()
    inner = client(moto)
    for page in inner.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        keys = [{"Key": each["Key"]} for each in page.get("Contents", ())]
        if keys:
            inner.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})


class Host:
    """A host with a cache. Each `stage` is a run on it, with lines that it printed."""

    def __init__(self, root: Path, s3: ChangingS3) -> None:
        self.root, self.s3 = root, s3
        self.lines: list[str] = []
        self._inner = client(s3.inner)

    def put(self, name: str, content: bytes, top: str = "sets/train/") -> None:
        self._inner.put_object(Bucket=BUCKET, Key=top + name, Body=content)

    def stage(self, url: str = URL, threads: int = 4) -> StagedData:
        environ = {**KEYS, "AWS_ENDPOINT_URL_S3": self.s3.address}
        context = StagingContext(
            environ, self.lines.append, lambda: None, time.sleep, threads=threads
        )
        return stage_data({"train": url}, str(self.root), context)

    def files(self, staged: StagedData) -> dict[str, bytes]:
        root = Path(staged.paths["train"])
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    @property
    def cache(self) -> DataCache:
        return DataCache(str(self.root), read_boot())


@pytest.fixture
def host(tmp_path: Path, s3: ChangingS3) -> Host:
    return Host(tmp_path / "cache", s3)


def leave(staged: StagedData) -> None:
    """End the run."""
    for lock in staged.locks:
        lock.close()


def test_a_prefix_becomes_a_folder_and_a_second_run_reads_nothing_again(host: Host) -> None:
    content = {"a.bin": b"one", "deep/er/b.bin": LARGE, "empty": b""}
    for name, data in content.items():
        host.put(name, data)
    host.put("folder/", b"")  # the mark of a folder
    host.put("sets/train2/other", b"x", top="")
    staged = host.stage()
    assert host.files(staged) == content
    assert staged.variables() == {"BATCHML_DATA_TRAIN": staged.paths["train"]}
    assert host.s3.reads == 1 + 3, "one small object, three blocks of the large one"
    again = host.stage()
    assert again.paths == staged.paths and host.s3.reads == 4
    assert "already" in host.lines[-1]
    assert all(p.stat().st_mode & 0o222 == 0 for p in Path(staged.paths["train"]).rglob("*"))


def test_an_address_may_be_one_object(host: Host) -> None:
    host.put("words.txt", b"a b c")
    staged = host.stage(f"{URL}/words.txt")
    assert Path(staged.paths["train"]).name == "words.txt"
    assert Path(staged.paths["train"]).read_bytes() == b"a b c"


def test_a_file_cut_in_the_cache_is_found_and_copied_again(host: Host) -> None:
    host.put("a", b"whole content")
    host.put("b", b"other")
    staged = host.stage()
    path = Path(staged.paths["train"]) / "a"
    path.chmod(0o644)
    os.truncate(path, 5)
    again = host.stage()  # while the first run still uses the data set
    assert host.files(again) == {"a": b"whole content", "b": b"other"}
    assert "1 file in this host's cache, damaged: copied again (a)" in host.lines[-2]
    assert host.s3.reads == 3


def test_a_data_set_with_much_damage_is_copied_again(host: Host) -> None:
    for number in range(102):
        host.put(f"{number}", b"%d" % number)
    staged = host.stage(threads=16)
    leave(staged)
    for number in range(101):
        path = Path(staged.paths["train"]) / str(number)
        path.chmod(0o644)
        os.truncate(path, 0)
    again = host.stage(threads=16)
    assert host.files(again) == {str(number): b"%d" % number for number in range(102)}
    assert not any("restarted" in line for line in host.lines)


def test_after_a_boot_contents_are_read_back(host: Host) -> None:
    host.put("a", b"whole content")
    staged = host.stage()
    leave(staged)
    path, key = Path(staged.paths["train"]) / "a", Path(staged.paths["train"]).name
    files = host.cache.files(key)
    assert files is not None
    DataCache(str(host.root), "an earlier boot").write_manifest(key, URL, files)
    again = host.stage()
    assert host.s3.reads == 1 and host.cache.header(key).boot == read_boot()  # type: ignore[union-attr]
    leave(again)
    state = path.stat()  # zeros of a power cut, with the same size and time
    path.chmod(0o644)
    path.write_bytes(b"\0" * 13)
    os.utime(path, ns=(state.st_mtime_ns, state.st_mtime_ns))
    DataCache(str(host.root), "an earlier boot").write_manifest(key, URL, files)
    assert host.files(host.stage()) == {"a": b"whole content"}
    assert host.s3.reads == 2


def test_an_object_that_changes_meanwhile_leads_to_a_new_list(host: Host) -> None:
    host.put("a", b"same")
    host.put("b", b"old")
    changed: list[str] = []

    def change(path: str, _: int) -> None:
        if not changed and "list" in host.s3.requests[-1]:
            changed.append(path)
            host.put("b", b"newest")

    host.s3.after = change
    assert host.files(host.stage(threads=1))["b"] == b"newest"
    assert any("'b' in" in line and "changed while it was copied" in line for line in host.lines)


def test_a_source_that_never_rests_is_an_error_worth_another_attempt(host: Host) -> None:
    host.put("a", b"0")

    def change(_: str, count: int) -> None:
        if "list" in host.s3.requests[-1]:
            host.put("a", str(count).encode())

    host.s3.after = change
    with pytest.raises(DataError, match="keeps changing while it is copied") as caught:
        host.stage()
    assert caught.value.temporary


def test_a_new_version_links_the_files_that_are_the_same(host: Host) -> None:
    host.put("a", LARGE)
    host.put("b", b"old")
    first = host.stage()
    reads = host.s3.reads
    host.put("b", b"new")
    second = host.stage()
    assert host.s3.reads == reads + 1, "only b"
    assert host.files(second) == {"a": LARGE, "b": b"new"}
    assert host.files(first) == {"a": LARGE, "b": b"old"}, "a data set in use never changes"


_STAGE = """
import sys, time
from batchml.runtime.data.stage import StagingContext, stage_data
url, root, address = sys.argv[1:]
environ = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL_S3": address}
stage_data({"train": url}, root, StagingContext(environ, print, str, time.sleep, threads=1))
"""


def stage_until(host: Host, reads: int) -> None:
    """Stage in a process that is killed at this request for an object."""
    process: list[subprocess.Popen[bytes]] = []
    started = threading.Event()

    def kill(path: str, _: int) -> None:
        if host.s3.reads == reads:
            started.wait()
            process[0].kill()

    host.s3.after = kill
    process.append(
        subprocess.Popen([sys.executable, "-c", _STAGE, URL, host.root, host.s3.address])
    )
    started.set()
    assert process[0].wait() == -9
    host.s3.after = lambda _path, _count: None


def test_a_killed_copy_is_continued(host: Host) -> None:
    for number in range(6):
        host.put(f"{number}", bytes([number]))
    host.put("large", LARGE)
    stage_until(host, 8)  # six small ones, one block; the second is on its way
    before = host.s3.reads
    staged = host.stage()
    assert host.files(staged)["large"] == LARGE
    assert host.s3.reads - before == 2, "the two blocks that were missing"
    assert any("are here already" in line for line in host.lines)


def test_of_two_runs_at_once_one_copies(host: Host) -> None:
    for number in range(40):
        host.put(f"{number}", bytes([number]))
    with ThreadPoolExecutor(4) as pool:
        staged = list(pool.map(lambda _: host.stage(), range(4)))
    assert host.s3.reads == 40
    assert len({each.paths["train"] for each in staged}) == 1
    assert len(host.files(staged[0])) == 40


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (f"s3://{BUCKET}/sets/trian", f"no objects. s3://{BUCKET}/sets/ has: train/"),
        (f"s3://{BUCKET}/nothing/here", "has no objects"),
        ("s3://no-such-bucket-here/sets", "there is no such bucket"),
        ("s3:///sets", "names no bucket"),
        ("gs://bucket/sets", "neither s3://BUCKET/PREFIX nor a folder's path"),
        ("/no/such/folder", "/no/such/folder cannot be read here: No such file"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_named(host: Host, url: str, sentence: str) -> None:
    host.put("a", b"1")
    with pytest.raises(DataError) as caught:
        host.stage(url)
    assert sentence in str(caught.value) and not caught.value.temporary


def test_a_role_without_the_right_is_told_what_to_list(host: Host) -> None:
    host.put("a", b"1")
    host.s3.denied = "train"
    with pytest.raises(DataError, match="list it under `data` of the environment") as caught:
        host.stage()
    assert not caught.value.temporary
    host.s3.denied, host.s3.lists, host.s3.listed = "?", False, ()
    with pytest.raises(DataError, match="may not be read by this job's role"):
        host.stage()


def test_keys_that_are_no_paths_are_named(host: Host) -> None:
    for name in ("a", "a/b", "x//y"):
        host.put(name, b"1")
    with pytest.raises(DataError, match=r"2 objects whose keys cannot be files.*'x//y', 'a'"):
        host.stage()


def test_data_sets_that_no_run_uses_make_room(host: Host) -> None:
    for name in ("one", "two", "three"):
        host.put(f"{name}/data", os.urandom(100_000))
    staged = {name: host.stage(f"{URL}/{name}") for name in ("one", "two")}
    (host.root / "limit").write_text("250000")
    leave(staged["one"])
    leave(staged["two"])
    again = host.stage(f"{URL}/one")  # the later use
    host.stage(f"{URL}/three")
    assert os.path.exists(again.paths["train"]), "in use"
    assert not os.path.exists(staged["two"].paths["train"])
    assert any("is removed from this host's cache" in line for line in host.lines)


def test_a_data_set_that_does_not_fit_says_which_limit(host: Host) -> None:
    host.put("one/data", b"1" * 100_000)
    host.put("two/data", b"2" * 100_000)
    host.stage(f"{URL}/one")
    (host.root / "limit").write_text("150000")
    with pytest.raises(DataError, match=r"47 KiB are free, and other runs use the rest") as caught:
        host.stage(f"{URL}/two")
    assert caught.value.temporary, "another host may have room"
    (host.root / "limit").write_text("50000")
    with pytest.raises(DataError, match=r"cache, which may take 49 KiB\. Use hosts") as caught:
        host.stage(f"{URL}/two")
    assert not caught.value.temporary


@pytest.fixture
def small_disk(host: Host) -> Iterator[Path]:
    host.root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(host.root)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        unavailable("no right to mount a small disk")
    yield host.root
    subprocess.run(["umount", "-l", str(host.root)], check=True)


def test_a_disk_that_others_fill_meanwhile(host: Host, small_disk: Path) -> None:
    """A program writes to the disk while the data set is copied: unused ones are removed first."""
    host.put("old/data", b"1" * 300_000)
    leave(host.stage(f"{URL}/old"))
    for number in range(4):
        host.put(f"new/{number}", b"2" * 100_000)

    def fill(path: str, _: int) -> None:
        if path.endswith("new/1"):
            free = os.statvfs(small_disk)
            (small_disk / "other").write_bytes(b"3" * (free.f_bavail * free.f_frsize - 30_000))

    host.s3.after = fill
    staged = host.stage(f"{URL}/new", threads=1)
    assert len(host.files(staged)) == 4
    host.s3.after = lambda _path, _count: None
    host.put("more/0", b"4" * 400_000)
    with pytest.raises(DataError, match="do not fit into this host's cache"):
        host.stage(f"{URL}/more")


@pytest.mark.parametrize("continued", [True, False])
def test_a_killed_copy_of_most_of_the_disk_is_continued_or_makes_room(
    host: Host, small_disk: Path, continued: bool
) -> None:
    for number in range(6):
        for top in ("sets/train/", "sets/other/"):
            host.put(f"{number}", b"1" * 120_000, top)
    stage_until(host, 5)
    staged = host.stage(URL if continued else f"s3://{BUCKET}/sets/other")
    assert len(host.files(staged)) == 6
    assert any("are here already" in line for line in host.lines) is continued


def test_a_new_version_needs_room_only_for_what_has_changed(host: Host, small_disk: Path) -> None:
    for number in range(5):
        host.put(f"{number}", b"1" * 120_000)
    first = host.stage()  # in use: its files can be linked, and not removed
    host.put("4", b"2" * 120_000)
    leave(host.stage())
    assert host.s3.reads == 5 + 1
    (small_disk / "limit").write_text("800000")
    host.put("4", b"3" * 120_000)
    second = host.stage()
    assert host.s3.reads == 5 + 2
    assert host.files(second)["4"] == b"3" * 120_000
    assert host.files(first)["4"] == b"1" * 120_000


def test_small_files_take_one_request_each_and_one_for_each_page_of_the_list(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PAGE", 50)
    for number in range(101):
        host.put(f"{number % 10}/{number}", b"%d" % number)
    staged = host.stage(threads=16)
    assert host.s3.requests.count("GET list") == 3
    assert host.s3.reads == 101 and len(host.files(staged)) == 101
    host.stage()
    assert host.s3.requests.count("GET list") == 6 and host.s3.reads == 101


# --- Folders --------------------------------------------------------------------------------------


def test_a_folder_on_the_same_disk_is_used_where_it_is(host: Host, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a").write_bytes(b"1")
    staged = host.stage(str(tmp_path / "set"))
    assert staged.paths["train"] == str(tmp_path / "set")
    assert not list((host.root / "sets").iterdir())


def test_a_folder_on_another_disk_is_copied(host: Host) -> None:
    source = Path(f"/dev/shm/batchml-test-{os.getpid()}")
    if source.parent.stat().st_dev == host.root.parent.stat().st_dev:
        unavailable("/dev/shm is on the disk of the tests")
    (source / "deep").mkdir(parents=True)
    try:
        (source / "a").write_bytes(b"1")
        (source / "deep" / "b").write_bytes(LARGE)
        (source / "deep" / "again").symlink_to(source)  # a circle
        (source / "nowhere").symlink_to(source / "missing")
        staged = host.stage(str(source))
        assert host.files(staged) == {"a": b"1", "deep/b": LARGE}
        (source / "a").write_bytes(b"2")
        assert host.files(host.stage(str(source)))["a"] == b"2"
    finally:
        shutil.rmtree(source)


def test_an_empty_folder_is_an_error(host: Host, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(DataError, match="has no files"):
        host.stage(str(tmp_path / "set"))


def test_a_host_without_a_cache_copies_for_the_run_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    own = str(tmp_path / "own")
    assert choose_cache(str(tmp_path / "file" / "cache"), lambda: own, lines.append) == own
    assert "cannot be used: Not a directory. Copying for this run" in lines[0]
    cache = str(tmp_path / "cache")
    assert choose_cache(cache, lambda: own, lines.append) == cache and len(lines) == 1
    assert choose_cache("", lambda: own, lines.append) == own and len(lines) == 1
