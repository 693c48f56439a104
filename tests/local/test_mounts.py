"""Mounts of a container: walks through descriptors while names change between two steps."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local.executors import mounts
from batchml.local.executors.mounts import (
    AttemptNotStarted,
    ContainerMounts,
    ProposedPath,
    give_access,
    propose,
    walk,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that containers may write to, beside one that they must not have."""
    made = tmp_path / "root"
    (made / "a" / "b").mkdir(parents=True)
    (tmp_path / "outside" / "b").mkdir(parents=True)
    for folder in (tmp_path / "outside", tmp_path / "outside" / "b"):
        folder.chmod(0o700)
    return made


def opened(path: Path) -> int:
    return os.open(path, os.O_PATH)


def swap(root: Path) -> None:
    """What a program of another container does: a link is put in the place of a folder."""
    (root / "a").rename(root / "was")
    (root / "a").symlink_to(root.parent / "outside")


def source(path: Path, *roots: Path, **more: Any) -> dict[str, Any]:
    return {
        "path": str(path), "target": "/v", "roots": list(map(str, roots)), "read_only": False,
        "make": True, "ours": True, "fixed": False, "before": (), **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("root", ProposedPath("root", ())), ("root/a/b", ProposedPath("root", ("a", "b"))),
        ("root/new//x/", ProposedPath("root", ("new", "x"))),
        ("root/a/../a", ProposedPath("root", ("a",))),
        ("root/inner", ProposedPath("root", ("a", "b"))),
        ("root/a/b/", ProposedPath("root", ("a", "b"))),
    ],
)  # fmt: skip
def test_the_uppermost_folder_that_containers_may_write_to_is_where_a_walk_begins(
    root: Path, path: str, found: ProposedPath
) -> None:
    (root / "inner").symlink_to(root / "a" / "b")
    roots = [str(root / "a"), str(root), str(root.parent / "other")]
    expected = found._replace(root=str(root))
    assert propose(f"{root.parent}/{path}", roots) == expected


@pytest.mark.parametrize("path", ["outside", "root/out", "root/out/b", "root/../outside", "rooted"])
def test_what_lies_elsewhere_is_refused(root: Path, path: str) -> None:
    (root / "out").symlink_to(root.parent / "outside")
    with pytest.raises(AttemptNotStarted, match="--allow-path"):
        propose(f"{root.parent}/{path}", [str(root)])


@pytest.mark.parametrize("make", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_a_link_that_comes_between_two_steps_leads_nowhere(
    root: Path, after: int, make: bool
) -> None:
    """Before the step the swap is refused; after it the walk goes on in the folder it is in."""

    def names() -> Iterator[str]:
        for number, name in enumerate(("a", "b", "new")[: 3 if make else 2]):
            if number == after:
                swap(root)
            yield name

    if after == 0:
        with pytest.raises(NotADirectoryError):
            walk(opened(root), names(), make)
    else:
        found = walk(opened(root), names(), make)
        end = root / "was" / "b" / "new" if make else root / "was" / "b"
        assert os.fstat(found).st_ino == end.stat().st_ino
    assert os.listdir(root.parent / "outside") == ["b"]
    assert os.listdir(root.parent / "outside" / "b") == []


def test_what_was_found_is_opened_to_the_user_and_nothing_of_its_name_by_then(root: Path) -> None:
    found = walk(opened(root), ["a"])
    swap(root)
    give_access(found)
    assert (root / "was").stat().st_mode & 0o777 == 0o777
    assert (root.parent / "outside").stat().st_mode & 0o777 == 0o700


def test_no_descriptor_is_left_open(root: Path) -> None:
    top = opened(root)
    before = len(os.listdir("/proc/self/fd"))
    os.close(walk(top, ["a", "b", "new", "newer"], make=True))
    with pytest.raises(FileNotFoundError):
        walk(top, ["a", "none"])
    (root / "link").symlink_to("a")
    with pytest.raises(NotADirectoryError):
        walk(top, ["link"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_volume_of_an_older_version_is_moved_once_and_a_link_is_not(tmp_path: Path) -> None:
    old, volumes = tmp_path / "workspace" / "efs", tmp_path / "volumes"
    (old / "fs-1").mkdir(parents=True)
    (old / "fs-1" / "file").write_text("kept")
    (old / "fs-2").symlink_to("/etc")

    def opened(name: str) -> list[dict[str, Any]]:
        before = (str(tmp_path / "workspace"), "efs", name)
        wanted = source(volumes / name, volumes / name, before=before)
        return ContainerMounts([wanted], "test", "task").open()

    for _ in range(2):
        assert opened("fs-1")[0]["Source"] == str(volumes / "fs-1")
        assert (volumes / "fs-1" / "file").read_text() == "kept"
    opened("fs-2")
    assert os.listdir(volumes / "fs-2") == []
    assert os.listdir(old) == ["fs-2"]


WITHOUT_ROOT = """
import os, sys
from pathlib import Path
from tests.local.test_mounts import source
from batchml.local.executors.mounts import ContainerMounts, AttemptNotStarted
root = Path(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(ContainerMounts([source(root, root, ours=False)], "x", "y").open()[0]["Source"])
try:
    ContainerMounts([source(root / "bin", root, ours=False, make=False)], "x", "y").open()
except AttemptNotStarted as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_server_of_an_ordinary_user_mounts_the_folder_itself_and_none_in_it() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOT, "/usr"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    whole, refused = shown.stdout.splitlines()
    assert whole == "/usr"
    assert refused.startswith("CannotCreateContainerError: containers may rename /usr/bin, so only")


def test_escapes_of_the_list_of_mounts_are_read() -> None:
    assert mounts._unescape(b"/a\\040b\\134/\xc3\xa9") == "/a b\\/é"
