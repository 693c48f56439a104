"""Code archives: regular files and folders inside the folder, and nothing else, whatever comes."""

import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchml.runtime.entry.fetch import BadArchive, unpack


def member(name: str, kind: bytes = tarfile.REGTYPE, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """A folder to unpack into, with a bystander beside it."""
    (tmp_path / "bystander").write_text("untouched")
    folder = tmp_path / "inside"
    folder.mkdir()
    return folder


def test_files_and_folders_arrive_with_their_content_and_executable_bit(inside: Path) -> None:
    made = archive(
        inside.parent / "code.tar.gz",
        (member("./train.py"), b"print(1)\n"),
        (member("package", tarfile.DIRTYPE), b""),
        (member("package/deep/tool.sh", mode=0o755), b"#!/bin/sh\n"),
        (member("empty"), b""),
        (member("back\\slash"), b"is a letter as any other on Linux"),
    )
    assert unpack(made, str(inside)) == 4
    assert (inside / "back\\slash").exists()
    assert (inside / "train.py").read_bytes() == b"print(1)\n"
    assert (inside / "empty").read_bytes() == b""
    assert os.access(inside / "package/deep/tool.sh", os.X_OK)
    assert not (inside / "train.py").stat().st_mode & 0o111


@pytest.mark.parametrize(
    "bad",
    [
        member("/etc/evil"),
        member("../bystander"),
        member("a/../../bystander"),
        member(".."),
        member("link", tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("link", tarfile.SYMTYPE, linkname="good"),
        member("hard", tarfile.LNKTYPE, linkname="good"),
        member("device", tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("block", tarfile.BLKTYPE),
        member("pipe", tarfile.FIFOTYPE),
        member("sparse", tarfile.GNUTYPE_SPARSE),
        member("good"),  # a second time
        member("good/below-a-file"),
    ],
    ids=lambda info: f"{info.name}-{info.type.decode()}",
)
def test_what_a_code_archive_may_not_hold_is_refused(inside: Path, bad: tarfile.TarInfo) -> None:
    made = archive(inside.parent / "code.tar.gz", (member("good"), b"good"), (bad, b""))
    with pytest.raises(BadArchive):
        unpack(made, str(inside))
    assert (inside.parent / "bystander").read_text() == "untouched"
    assert (inside / "good").read_bytes() == b"good"
    assert sorted(path.name for path in inside.parent.iterdir()) == [
        "bystander", "code.tar.gz", "inside",
    ]  # fmt: skip


def test_a_file_is_never_written_through_a_link_that_was_there(inside: Path) -> None:
    (inside / "train.py").symlink_to(inside.parent / "bystander")
    made = archive(inside.parent / "code.tar.gz", (member("train.py"), b"overwritten"))
    with pytest.raises(BadArchive):
        unpack(made, str(inside))
    assert (inside.parent / "bystander").read_text() == "untouched"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not an archive",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-4],
        lambda data: data[:2000] + bytes(40) + data[2040:],
        lambda data: data[:-6] + b"\x00" + data[-5:],
    ],
    ids=["empty", "text", "half", "without its end", "zeros within", "another checksum"],
)
def test_a_damaged_archive_is_one_clear_error(
    inside: Path, damage: Callable[[bytes], bytes]
) -> None:
    made = archive(inside.parent / "code.tar.gz", (member("train.py"), os.urandom(5000)))
    Path(made).write_bytes(damage(Path(made).read_bytes()))
    with pytest.raises(BadArchive, match=r"code\.tar\.gz cannot be unpacked"):
        unpack(made, str(inside))


def test_an_archive_that_is_not_there_is_one_clear_error(inside: Path) -> None:
    with pytest.raises(BadArchive, match="No such file"):
        unpack(str(inside / "none.tar.gz"), str(inside))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_never_give_another_error_nor_a_file_outside(
    tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    """On the tar before compression, so that its checksums are the only guard."""
    folder = tmp_path / "inside"
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for info, content in ((member("a/b.py"), b"x" * 700), (member("c.py"), b"y")):
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = bytearray(plain.getvalue())
    for place, value in flips:
        data[place % len(data)] = value
    path = tmp_path / "code.tar.gz"
    path.write_bytes(gzip.compress(bytes(data), 1))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        unpack(str(path), str(folder))
    except BadArchive:
        pass
    assert {entry.name for entry in tmp_path.iterdir()} == {"inside", "code.tar.gz"}
