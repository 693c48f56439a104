"""Many small files: one sync for many, few descriptors, for each user, beside other transfers."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime.transfer import files
from batchml.runtime.transfer.groups import (
    FEWEST_FILES,
    SMALL,
    FileGroup,
    SyncFileSystem,
    find_type,
    open_syncfs,
)
from batchml.runtime.transfer.receive import FolderSource, receive
from batchml.runtime.transfer.tree import (
    PARTS_FOLDER,
    LeftOut,
    NearTree,
    OpenedFile,
    Reader,
    Tree,
    TreeEntry,
)
from tests.support.trees import Seen, file, make, seen

ROOT = str(Path(__file__).parents[2])
NOBODY = 65534
MOUNTS = [
    "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n",
    "23 22 0:21 / /dev/shm rw shared:3 master:1 - tmpfs tmpfs rw\n",
    "40 22 0:50 / /fsx rw,relatime - lustre 10.0.0.5@tcp:/abcdefgh rw,flock\n",
    "41 22 8:17 / /mnt/with\\040space rw - fuseblk /dev/sdb1 rw,user_id=0\n",
    "4 22 259:1 / /nvme rw - xfs /dev/nvme1n1 rw\n",
]


def many(count: int = FEWEST_FILES, mode: int = 0o644) -> Seen:
    return {b"d%d/f" % number: file(f"content {number}", mode=mode) for number in range(count)}


class Syncs:
    """Counts the syncs of groups."""

    def __init__(self) -> None:
        self.count = 0

    def open(self, root: str) -> SyncFileSystem:
        return self.sync

    def sync(self, fd: int) -> None:
        self.count += 1


def tree_of(folder: Path) -> Tree:
    return Tree(str(folder))


def write(group: FileGroup, top: Path) -> None:
    reader = Reader(tree_of(top), "f")
    try:
        group.write("f", reader.as_file("f"), files.ignore_bytes)
    finally:
        reader.close()


# It is imported before the user changes, since that one may not be able to read the code.
AS_NOBODY = f"""
import os, sys
from batchml.runtime.transfer import files, receive, tree
import concurrent.futures, concurrent.futures.thread, ctypes, fcntl, hashlib, tempfile
top = sys.argv[1]
if os.getuid() == 0:
    os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
source = receive.FolderSource(tree.Tree(top + "/top"), "")
for name, sync in (("group", os.fsync), ("alone", None)):
    there = tree.Tree(f"{{top}}/{{name}}")
    for expected in ((40, 0), (0, 40)):
        done = receive.receive(source, there, open_sync=lambda root: sync)
        assert (done.files, done.unchanged, done.missing) == (*expected, ()), done
entry = source.tree.lookup("d7/f")._replace(path="f")
there = tree.Tree(top + "/killed")
os.makedirs(there.root + "/.batchml-parts", 0o700)
part = os.path.join(there.root, ".batchml-parts", files.part_name(entry))
with open(part, "w") as begun:
    begun.write("content")
os.chmod(part, entry.mode)  # as of a process that was killed before it named the file
inode = os.stat(part).st_ino
done = receive.receive(receive.FolderSource(source.tree, "d7/f"), there, "f")
assert (done.files, done.missing) == (1, ()), done
assert os.stat(there.root + "/f").st_ino == inode, "it was continued"
assert os.listdir(there.root) == ["f"]
"""


@pytest.mark.parametrize("mode", [0o444, 0o400, 0o555])
def test_a_user_without_privileges_copies_read_only_files(mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        top = make(Path(folder, "top"), many(40, mode))
        if os.getuid() == 0:
            for above, _, names in os.walk(folder):
                for path in (above, *(os.path.join(above, name) for name in names)):
                    os.chown(path, NOBODY, NOBODY)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, folder],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for name in ("group", "alone"):
            assert files_of(Path(folder, name)) == files_of(top)


def files_of(top: Path) -> Seen:
    return {path: node for path, node in seen(top).items() if node.kind == "file"}


def test_a_tree_keeps_few_folders_open(tmp_path: Path) -> None:
    make(tmp_path, many(200))
    with NearTree(tree_of(tmp_path)) as near, near.folder("d0") as first:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            for number in range(1, 200):
                with near.folder(f"d{number}") as fd, near.folder("d0") as again:
                    at = os.stat(tmp_path / f"d{number}")
                    assert os.fstat(fd).st_ino == at.st_ino
                    assert again == first, "a folder that is in use stays open"
                assert len(os.listdir("/proc/self/fd")) < before + 64
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_files_in_many_folders_need_few_descriptors(tmp_path: Path) -> None:
    top, there = make(tmp_path / "top", many(400)), tree_of(tmp_path / "there")
    before, during = len(os.listdir("/proc/self/fd")), []

    def sync(fd: int) -> None:
        during.append(len(os.listdir("/proc/self/fd")) - before)

    done = receive(FolderSource(tree_of(top), ""), there, open_sync=lambda root: sync)
    assert (done.files, done.missing) == (400, ())
    assert len(during) == 1 and during[0] < 2 * 64 + 10, "of the source and the target"


def test_bytes_that_another_push_writes_after_the_sync_get_no_name(tmp_path: Path) -> None:
    top, there = make(tmp_path / "top", {b"f": file("same")}), make(tmp_path / "there", {})
    synced: dict[str, set[int]] = {}

    def inodes() -> set[int]:
        return {os.stat(os.path.join(at, name)).st_ino
                for at, _, names in os.walk(there) for name in names}  # fmt: skip

    def sync_then_let_the_other_write(fd: int) -> None:
        synced["one"] = inodes()
        write(other, top)
        assert len(inodes() - synced["one"]) == 1, "it writes into a file of its own"

    def sync_other(fd: int) -> None:
        synced["other"] = inodes() - synced["one"]

    with (
        NearTree(tree_of(there)) as near,
        FileGroup(near, sync_then_let_the_other_write, False) as one,
        FileGroup(near, sync_other, False) as other,
    ):
        write(one, top)
        assert one.finish() == {"f"}
        assert inodes() & synced["one"] == {(there / "f").stat().st_ino}
        assert other.finish() == {"f"}
        assert {(there / "f").stat().st_ino} == synced["other"]


def test_a_file_that_has_grown_is_copied_alone(tmp_path: Path) -> None:
    top, there, syncs = make(tmp_path / "top", many()), make(tmp_path / "there", {}), Syncs()

    class Growing(FolderSource):
        def entries(self, left_out: list[LeftOut]) -> Iterator[TreeEntry]:
            listed = list(super().entries(left_out))
            os.truncate(top / "d7" / "f", SMALL + 1)
            return iter(listed)

    done = receive(Growing(tree_of(top), ""), tree_of(there), open_sync=syncs.open)
    assert (done.files, done.missing, syncs.count) == (FEWEST_FILES, (), 1)
    assert files_of(there) == files_of(top)

    def read(start: int, length: int) -> bytes:
        raise AssertionError("it is not read into memory")

    large = OpenedFile(TreeEntry("f", size=SMALL + 1), read, lambda: True)
    with (
        NearTree(tree_of(there)) as near,
        FileGroup(near, syncs.sync, False) as group,
        pytest.raises(files.SourceChanged),
    ):
        group.write("f", large, files.ignore_bytes)


def test_a_disk_is_synced_for_many_files_only(tmp_path: Path) -> None:
    top, there, syncs = make(tmp_path / "top", many()), tree_of(tmp_path / "there"), Syncs()

    def push() -> int:
        return receive(FolderSource(tree_of(top), ""), there, open_sync=syncs.open).files

    assert (push(), syncs.count) == (FEWEST_FILES, 1)
    for number in range(FEWEST_FILES - 1):
        (top / f"d{number}" / "f").write_text("changed and longer")
    assert (push(), syncs.count) == (FEWEST_FILES - 1, 1), "the others are there already"
    assert files_of(tmp_path / "there") == files_of(top)


def test_the_parts_of_a_killed_group_are_removed_and_those_of_a_living_one_stay(
    tmp_path: Path,
) -> None:
    there = tree_of(tmp_path)
    killed, fd = files.make_group_folder(there)
    (tmp_path / killed / "1").write_text("x")
    os.close(fd)  # as when its process is killed
    living, fd = files.make_group_folder(there)
    (tmp_path / living / "1").write_text("x")
    files.clear_parts(there, 0.0)
    assert os.listdir(tmp_path / PARTS_FOLDER) == [living.rpartition("/")[2]]
    assert (tmp_path / living / "1").exists()
    os.close(fd)
    files.clear_parts(there, 0.0)
    assert os.listdir(tmp_path) == []


def test_a_group_whose_sync_fails_leaves_nothing_and_its_files_are_copied_alone(
    tmp_path: Path,
) -> None:
    top = make(tmp_path / "top", many())

    def fail(fd: int) -> None:
        assert len(os.listdir(fd)) == FEWEST_FILES
        raise OSError(5, "Input/output error")

    there = tree_of(tmp_path / "there")
    done = receive(FolderSource(tree_of(top), ""), there, open_sync=lambda root: fail)
    assert (done.files, done.missing) == (FEWEST_FILES, ())
    assert files_of(tmp_path / "there") == files_of(top)
    assert not (tmp_path / "there" / PARTS_FOLDER).exists()


@pytest.mark.parametrize(
    ("mount", "expected"),
    [("22", "ext4"), ("23", "tmpfs"), ("40", "lustre"), ("41", "fuseblk"), ("4", "xfs"), ("2", ""),
     ("", "")],
)  # fmt: skip
def test_the_type_of_a_file_system_is_that_of_the_mount(mount: str, expected: str) -> None:
    assert find_type(mount, MOUNTS) == expected


@pytest.mark.parametrize("root", ["/proc", "/sys", "/dev", "/none"])
def test_only_known_file_systems_are_synced_at_once(root: str) -> None:
    assert open_syncfs(root) is None


def test_a_part_that_another_process_uses_is_not_made_writable(tmp_path: Path) -> None:
    part = make(tmp_path, {b"part": file("x", mode=0o444)}) / "part"
    parts = os.open(tmp_path, os.O_RDONLY)
    with open(part, "rb") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        assert not files._make_writable(parts, "part")
        assert part.stat().st_mode & 0o777 == 0o444
    assert files._make_writable(parts, "part")
    assert part.stat().st_mode & 0o777 == 0o600
    os.close(parts)
