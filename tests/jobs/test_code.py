"""The code that travels: which files, under which name, refused when secret, sent once."""

import inspect
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.s3 import BucketStore
from batchml.errors import AccessError, ConfigError
from batchml.jobs import code
from batchml.jobs.code import (
    PackMemory,
    check_command_size,
    describe_sent,
    find_files,
    pack,
    put_once,
)
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import StoreError
from tests.support.fakes import FakeClock


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_what_the_own_file_says_is_the_last_word(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{".gitignore": "*.bin\n/built/\n", ".batchmlignore": "!model.bin\n!built/\nnotes\n"},
        **{"model.bin": "", "other.bin": "", "built/lib.so": "", "notes": "", "train.py": ""},
        **{"venv/lib.py": ""},
    )
    assert find_files(tmp_path).files == (
        ".batchmlignore", ".gitignore", "built/lib.so", "model.bin", "train.py",
    )  # fmt: skip


def test_rules_of_the_folders_above_count_within_one_repository(tmp_path: Path) -> None:
    write(tmp_path, **{".gitignore": "*.log\n"})  # of no repository
    top = tmp_path / "top"
    (top / ".git" / "info").mkdir(parents=True)
    write(
        top,
        **{".gitignore": "*.tmp\n/jobs/lenet/out\njobs/\n", ".git/info/exclude": "*.mine\n"},
        **{"jobs/.gitignore": "*.pt\n!keep.tmp\n"},
        **{f"jobs/lenet/{name}": "" for name in ("a.tmp", "a.pt", "a.log", "a.mine", "keep.tmp")},
        **{"jobs/lenet/out": "", "jobs/lenet/deep/out": ""},
    )
    assert find_files(top / "jobs" / "lenet").files == ("a.log", "deep/out", "keep.tmp")


@pytest.mark.parametrize("name", [".env", "deep/id_rsa", ".aws/credentials", "site.pem"])
def test_a_file_named_as_a_secret_stays_unless_it_is_said_to_be_none(
    tmp_path: Path, name: str
) -> None:
    write(tmp_path, **{name: "hunter2", "train.py": ""})
    with pytest.raises(ConfigError, match=name) as caught:
        pack(tmp_path)
    assert f"`!{name}`" in str(caught.value) and "--include-secrets" in str(caught.value)
    assert pack(tmp_path, include_secrets=True).files == 2
    (tmp_path / ".batchmlignore").write_text(f"/{name}\n")
    assert pack(tmp_path).files == 2, "the ignore file itself and train.py"
    (tmp_path / ".batchmlignore").write_text(f"!/{name}\n")
    assert pack(tmp_path).files == 3


def test_a_secret_that_git_ignores_stays_without_a_word(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    write(tmp_path, **{".gitignore": ".env\n", ".env": "hunter2", "train.py": ""})
    assert pack(tmp_path).files == 2


def test_a_folder_of_secrets_that_is_taken_in_takes_its_files_in(tmp_path: Path) -> None:
    write(tmp_path, **{".batchmlignore": "!.aws/\n", ".aws/credentials": ""})
    assert pack(tmp_path).files == 2


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path: Path) -> None:
    write(tmp_path, train="")
    for name in (".gitignore", ".batchmlignore", "pipe"):
        os.mkfifo(tmp_path / name)
    for name, target in (("itself", "itself"), ("nothing", "none"), ("out", "/etc/passwd")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "red\x1b[31m").symlink_to("..")
    found = find_files(tmp_path)
    assert found.files == ("train",)
    assert found.left_out == (
        ".batchmlignore", ".gitignore", "itself", "nothing", "out", "pipe", "'red\\x1b[31m'",
    )  # fmt: skip


def test_files_that_go_while_it_is_packed_are_not_missed(tmp_path: Path) -> None:
    write(tmp_path, **{"lock": "held", "train.py": "print()"})
    found = find_files(tmp_path)
    (tmp_path / "lock").unlink()
    _, sizes = code._tar(tmp_path, found.files)
    assert sizes == [len("print()")]


def test_names_in_a_message_move_no_cursor(tmp_path: Path) -> None:
    write(tmp_path, **{"\x1b[2J\n\u202e.pem": ""})
    with pytest.raises(ConfigError) as caught:
        pack(tmp_path)
    assert "'\\x1b[2J\\n\\u202e.pem'" in str(caught.value)


def test_folders_may_lie_deeper_than_pythons_stack(tmp_path: Path) -> None:
    write(tmp_path, **{"a/" * 300 + "train.py": ""})
    most = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        found = find_files(tmp_path)
    finally:
        sys.setrecursionlimit(most)
    assert found.files == ("a/" * 300 + "train.py",)


def test_the_name_does_not_depend_on_how_the_archive_is_packed(tmp_path: Path) -> None:
    import gzip
    import hashlib

    archive = pack(write(tmp_path, train="print()"))
    plain = gzip.decompress(archive.data)
    assert archive.name == f"{hashlib.sha256(plain).hexdigest()}.tar.gz"
    assert archive.describe() == f"1 file, 7 B ({archive.digest[:8]})"


def _edit_with_old_time(folder: Path) -> None:
    path = folder / "train.py"
    times = path.stat().st_mtime_ns
    path.write_text("print(2)")
    os.utime(path, ns=(times, times))


def _retarget(folder: Path) -> None:
    (folder / "link.py").unlink()
    (folder / "link.py").symlink_to("other.py")


@pytest.mark.parametrize(
    "change",
    [
        _edit_with_old_time,
        _retarget,
        lambda folder: (folder / "train.py").chmod(0o755),
        lambda folder: (folder / "new.py").write_text("print(1)"),
        lambda folder: (folder / "other.py").unlink(),
        lambda folder: (folder / ".gitignore").write_text("other.py"),
    ],
    ids=["edit", "link", "mode", "new", "deleted", "ignored"],
)
def test_an_unchanged_folder_is_packed_once_and_a_changed_one_again(
    tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    folder = write(tmp_path / "job", **{"train.py": "print(1)", "other.py": "print(3)"})
    (folder / "link.py").symlink_to("train.py")
    memory = PackMemory(FakeClock(folder.stat().st_ctime + 10_000))
    first = pack(folder, memory=memory)
    assert pack(folder, memory=memory) is first
    before = (folder / "train.py").stat().st_ctime_ns
    change(folder)
    while change is _edit_with_old_time and (folder / "train.py").stat().st_ctime_ns == before:
        change(folder)  # within a tick of the kernel's clock
    second = pack(folder, memory=memory)
    assert second.digest == pack(folder).digest != first.digest
    assert pack(folder, memory=memory) is second


def test_a_file_that_was_changed_a_moment_ago_is_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path, **{"train.py": "print(1)"})
    clock = FakeClock((folder / "train.py").stat().st_ctime + 1.9)
    memory = PackMemory(clock)
    first = pack(folder, memory=memory)
    assert (second := pack(folder, memory=memory)) is not first
    clock.sleep(0.2)
    third = pack(folder, memory=memory)
    assert third is not second
    assert pack(folder, memory=memory) is third


def test_secrets_are_refused_also_after_the_folder_was_sent_with_them(tmp_path: Path) -> None:
    folder = write(tmp_path, **{".env": "KEY=1", "train.py": "print(1)"})
    memory = PackMemory(FakeClock(folder.stat().st_ctime + 10_000))
    assert pack(folder, include_secrets=True, memory=memory).files == 2
    with pytest.raises(ConfigError, match="named like secrets"):
        pack(folder, memory=memory)


def test_few_small_archives_are_remembered(tmp_path: Path) -> None:
    folders = [write(tmp_path / str(each), **{"train.py": "1"}) for each in range(5)]
    memory = PackMemory(FakeClock(folders[-1].stat().st_ctime + 10_000))
    packed = [pack(folder, memory=memory) for folder in folders]
    again = [pack(folder, memory=memory) for folder in reversed(folders)]
    kept = [new is old for new, old in zip(again, packed[::-1], strict=True)]
    assert kept == [True, True, True, True, False]
    (folders[0] / "large").write_bytes(bytes(17 * 1024**2))
    assert pack(folders[0], memory=memory) is not pack(folders[0], memory=memory)


class Said:
    """An S3 client that records its calls, and has the objects that were put."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.kept: set[str] = set()

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        self.calls.append("HeadObject")
        if Key not in self.kept:
            raise ClientError({"Error": {"Code": "404", "Message": "Not Found"}}, "HeadObject")
        return {}

    def put_object(self, Bucket: str, Key: str, Body: bytes) -> dict[str, Any]:
        self.calls.append("PutObject")
        self.kept.add(Key)
        return {}


def test_what_is_there_costs_one_question_and_is_not_packed(tmp_path: Path) -> None:
    client: Any = Said()
    session: Any = type("Session", (), {"client": lambda self, name: client})()
    bucket = BucketStore(session, "bucket", "code")
    archive = pack(write(tmp_path, train="print()"))
    assert put_once(bucket, archive.name, lambda: archive.data)
    assert client.kept == {f"code/{archive.name}"}
    assert client.calls == ["HeadObject", "PutObject"]

    def never() -> bytes:
        raise AssertionError("packed though it is there")

    assert not put_once(bucket, archive.name, never)
    assert client.calls == ["HeadObject", "PutObject", "HeadObject"]


def test_a_private_folder_keeps_packages_too(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "code"), private=True)
    assert put_once(store, "a", lambda: b"x")
    assert not put_once(store, "a", lambda: b"y")
    assert (tmp_path / "code" / "a").read_bytes() == b"x"
    assert (tmp_path / "code" / "a").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "code").stat().st_mode & 0o777 == 0o700


class WriteOnly(FolderStore):
    """The store of someone whom S3 does not tell whether an object is there."""

    def has(self, key: str) -> bool:
        raise AccessError("Access Denied", code="AccessDenied")


def test_code_that_may_only_be_written_is_sent(tmp_path: Path) -> None:
    store = WriteOnly(str(tmp_path))
    assert put_once(store, "a", lambda: b"x")
    assert put_once(store, "a", lambda: b"x"), "again: the same key has the same bytes"
    assert store.get("a") == b"x"


def test_a_folder_that_is_full_is_named(tmp_path: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(StoreError, match=f"cannot write 'a' in {tmp_path}: File too large"):
            FolderStore(str(tmp_path), private=True).put("a", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert list(tmp_path.iterdir()) == []


def test_people_are_told_the_size_and_what_was_not_sent(tmp_path: Path) -> None:
    archive = pack(write(tmp_path, train="x" * 2000))
    assert describe_sent(archive, sent=True) == f"Code: 1 file, 2.0 KiB ({archive.digest[:8]})."
    assert describe_sent(archive, sent=False).endswith(", unchanged and not sent again.")


def test_words_that_no_program_could_be_started_with_are_refused() -> None:
    check_command_size("j", ["x" * 131_071] * 10, {"A": "y" * 100_000})
    with pytest.raises(ConfigError) as caught:
        check_command_size("j", ["ok", "x" * 131_072], {"A": "ä" * 65_535})
    assert len(caught.value.mistakes) == 2
    with pytest.raises(ConfigError, match="2 MiB together"):
        check_command_size("j", ["x" * 100_000] * 20, {})


def test_what_ignore_files_keep_here_is_told(tmp_path: Path) -> None:
    for name in (".git/HEAD", "a.py", "data/x", "b.log", "c.log", "d.log", "__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("data/\n*.log\n__pycache__/\n")
    (tmp_path / ".batchmlignore").write_text("!d.log\n.gitignore\n")
    archive = pack(tmp_path)
    assert archive.ignored == (".gitignore", "b.log", "c.log", "data/")
    said = describe_sent(archive, sent=True)
    assert said.endswith(" Ignored: .gitignore, b.log, c.log and 1 more.")
