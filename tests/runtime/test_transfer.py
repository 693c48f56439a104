"""A tree to an archive and back, and folder to folder: the same, whatever happens on the way."""

import errno
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import assume, given, settings

from batchml.runtime.storage.store import StoreError
from batchml.runtime.transfer import archive as transfer_archive
from batchml.runtime.transfer import files, main, manifest
from batchml.runtime.transfer.archive import archive, free, plan_archive
from batchml.runtime.transfer.archives import FolderArchive, key_of
from batchml.runtime.transfer.backends import open_archive
from batchml.runtime.transfer.manifest import COMPLETE, read_manifest
from batchml.runtime.transfer.parallel import ProgressState, TransferProgress
from batchml.runtime.transfer.receive import FolderSource, NoSpaceLeft, receive
from batchml.runtime.transfer.restore import ArchiveIncomplete, find_unarchived, restore, verify
from batchml.runtime.transfer.tree import (
    PARTS_FOLDER,
    TransferError,
    Tree,
    TreeEntry,
    from_line,
    to_line,
)
from tests.support.generate import TORTURE
from tests.support.trees import Node, Seen, file, make, seen, trees

KEPT = 6 * TORTURE


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return make(tmp_path / "top", {b"a/x": file("one"), b"a/y": file("two"), b"z": file("three")})


@pytest.fixture
def tree(top: Path) -> Tree:
    return Tree(str(top))


@pytest.fixture
def store(tmp_path: Path) -> FolderArchive:
    return FolderArchive(str(tmp_path / "store"))


class Cut(TransferError):
    """Somebody pulled the plug."""


def cut_after(count: int) -> TransferProgress:
    """An account that is told so many times, and then ends it all."""
    told = 0

    def tell(now: ProgressState) -> None:
        nonlocal told
        told += now.size > 0
        if told > count:
            raise Cut("cut")

    return TransferProgress(tell)


@settings(max_examples=4 * KEPT)
@given(trees(), trees())
def test_any_tree_is_restored_from_its_archive_unchanged(first: Seen, then: Seen) -> None:
    """Also where the archive held another tree before, and where all was freed meanwhile."""
    assume(any(node.kind == "file" for node in then.values()))  # else see below: a new disk
    with tempfile.TemporaryDirectory() as folder:
        store = FolderArchive(f"{folder}/store")
        make(Path(folder, "first"), first)
        assert not archive(Tree(f"{folder}/first"), store).missing
        before = seen(make(Path(folder, "then"), then))
        tree = Tree(f"{folder}/then")
        assert not archive(tree, store).missing
        assert not restore(store, Tree(f"{folder}/back")).missing
        assert seen(Path(folder, "back")) == before
        freed = free(tree, store)
        assert freed.removed == sum(node.kind == "file" for node in before.values())
        assert seen(Path(tree.root)) == {}
        assert not archive(tree, store).missing  # of nothing: what was freed stays
        assert not restore(store, tree).missing
        assert seen(Path(tree.root)) == before
        again = archive(tree, store)
        assert (again.files, again.missing) == (0, ())


@settings(max_examples=2 * KEPT)
@given(trees(), trees())
def test_any_tree_is_copied_over_any_other_and_a_second_copy_changes_nothing(
    one: Seen, on: Seen
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = seen(make(Path(folder, "one"), one))
        there = seen(make(Path(folder, "on"), on))
        source = FolderSource(Tree(f"{folder}/one"), "")
        done = receive(source, Tree(f"{folder}/on"))
        after = seen(Path(folder, "on"))
        failed = {os.fsencode(each.path) for each in done.missing}
        for path, node in before.items():
            if path not in failed:
                assert after[path]._replace(mtime_ns=0) == node._replace(mtime_ns=0)
        assert all(_clashes(path, before, there) for path in failed)
        assert {path for path in there if path not in before} <= set(after)
        assert receive(source, Tree(f"{folder}/on")).files == 0


def _clashes(path: bytes, new: Seen, old: Seen) -> bool:
    """Whether a folder meets something else there, on the way to a path or at its end."""
    parts = path.split(b"/")
    ways = [b"/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(
        each in old and (old[each].kind == "folder") != (new[each].kind == "folder")
        for each in ways
    )


@settings(max_examples=KEPT)
@given(trees())
def test_any_entry_can_be_written_as_a_line_of_ascii_and_read_back(tree: Seen) -> None:
    for path, node in tree.items():
        name = os.fsdecode(path)
        target = os.fsdecode(node.content) if node.kind == "link" else ""
        entry = TreeEntry(name, node.kind, node.mode, 3, node.mtime_ns, "ab", target, "s", "freed")
        line = to_line(entry)
        assert line.isascii() and "\n" not in line and from_line(line) == entry


@pytest.mark.parametrize(
    "line",
    ['{"path": "../x"}', '{"path": "/etc/x"}', '{"path": "a//b"}', '{"path": ""}', "[]", "nonsense",
     '{"path": "x", "size": -1}', '{"path": "x", "kind": "device"}', '{"path": 3}', '{"size": 3}',
     '{"path": "x", "mode": 65535}', '{"path": ".batchml/archive/x"}', '{"path": "x\\u0000"}'],
)  # fmt: skip
def test_a_manifest_with_paths_outside_of_the_tree_is_rejected(line: str) -> None:
    with pytest.raises(ValueError):
        from_line(line)


def test_unchanged_files_are_not_sent_and_contents_decide_if_only_the_inode_differs(
    tree: Tree, top: Path
) -> None:
    known = {
        "same": TreeEntry("same", size=3, mtime_ns=5000, sha256="s", stamp="1"),
        "touched": TreeEntry("touched", size=3, mtime_ns=5000, sha256="t", stamp="1"),
        "other": TreeEntry("other", size=3, mtime_ns=5000, sha256="o", stamp="1"),
        "lost": TreeEntry("lost", size=3, mtime_ns=5000, sha256="l", stamp="1"),
        "removed": TreeEntry("removed", size=3, sha256="r"),
        "freed": TreeEntry("freed", size=3, sha256="f", away="freed"),
        "turned": TreeEntry("turned", size=3, sha256="u", away="freed"),
    }
    now = [
        TreeEntry("same", size=3, mtime_ns=5001, stamp="1"),
        TreeEntry("touched", size=3, mtime_ns=5000, stamp="2"),
        TreeEntry("other", size=3, mtime_ns=6000, stamp="1"),
        TreeEntry("lost", size=3, mtime_ns=5000, stamp="1"),
        TreeEntry("turned/new", size=1),
    ]
    sizes = {path: 3 for path in known if path != "lost"}
    found = plan_archive(now, known, sizes)
    assert [entry.path for entry in found.kept] == ["same"]
    assert [entry.path for entry in found.compared] == ["touched"]
    assert [entry.path for entry in found.sent] == ["other", "lost", "turned/new"]
    assert {entry.path: entry.away for entry in found.away} == {
        "removed": "deleted", "freed": "freed",
    }  # fmt: skip
    checked = plan_archive(now, known, sizes, checksum=True)
    assert [entry.path for entry in checked.compared] == ["same", "touched"]


def test_names_that_cannot_be_s3_keys_get_another_key() -> None:
    assert key_of("a/\u00e4 b.bin") == "a/\u00e4 b.bin"
    for odd in ("a\nb", os.fsdecode(b"\xff"), "d/" * 500 + "x", "\x7f", "\uffff"):
        assert key_of(odd).startswith(".batchml/archive/odd/")


def test_an_archive_is_plain_files_and_says_when_it_is_complete(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    done = archive(tree, store)
    assert (done.files, done.size, done.missing) == (3, 11, ())
    assert (tmp_path / "store/a/x").read_text() == "one"
    told = json.loads((tmp_path / "store" / COMPLETE).read_text())
    assert (told["files"], told["bytes"]) == (3, 11)
    assert archive(tree, store).unchanged == 3
    os.utime(top / "z", ns=(1, 1))  # its time was set back: its content decides
    (top / "a/x").write_text("uno")
    assert archive(tree, store).files == 2
    (top / "a/y").unlink()
    assert archive(tree, store).files == 0
    assert restore(store, Tree(str(tmp_path / "back"))).files == 2, "what was deleted stays away"
    assert (tmp_path / "store/a/y").exists(), "and is not lost"


def test_changed_content_with_the_old_time_is_noticed(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    state = os.stat(top / "z")
    (top / "z").write_text("THREE")
    os.utime(top / "z", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert archive(tree, store).files == 1
    assert (tmp_path / "store/z").read_text() == "THREE"


def test_an_archive_stays_complete_while_it_is_only_compared(
    tree: Tree, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    back = Tree(str(tmp_path / "back"))
    restore(store, back)  # other inodes: contents have to be compared
    with pytest.raises(Cut):
        archive(back, store, cut_after(1))
    assert read_manifest(store).is_complete
    said: list[ProgressState] = []
    assert archive(back, store, TransferProgress(said.append)).files == 0
    assert {now.doing for now in said} == {"comparing", "archiving"}


def test_a_new_disk_deletes_nothing_in_the_archive(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    """As when somebody archives every night, and the file system was lost meanwhile."""
    archive(tree, store)
    new = Tree(str(make(tmp_path / "new", {b"folder": Node("folder", mode=0o755)})))
    archive(new, store)
    assert restore(store, new).files == 3
    assert seen(tmp_path / "new").keys() == {*seen(top).keys(), b"folder"}


def test_an_interrupted_archive_is_not_complete_and_continues(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    make(top, {b"n%03d" % number: file("new") for number in range(100)})
    with pytest.raises(Cut):
        archive(tree, store, cut_after(150))  # two words for each file, in rounds of 64
    book = read_manifest(store)
    assert not book.is_complete and 0 < len(book.missing()) < 100
    back = Tree(str(tmp_path / "back"))
    with pytest.raises(ArchiveIncomplete, match="it was interrupted: it lacks 'n"):
        restore(store, back)
    assert back.lookup("") is None
    some = restore(store, back, partial=True)
    assert some.files + len(some.missing) == 103 and some.missing
    with pytest.raises(TransferError, match="not complete: nothing was deleted"):
        free(tree, store)
    done = archive(tree, store)
    assert done.files < 100 and not done.missing
    assert read_manifest(store).is_complete
    assert restore(store, back).missing == ()
    assert seen(Path(back.root)) == seen(top)
    assert not (tmp_path / "store/.batchml/archive/going").exists()


def test_an_interrupted_large_file_continues_where_it_stopped(
    tmp_path: Path, store: FolderArchive
) -> None:
    content, block = os.urandom(5 << 20), files.NEAR_BLOCK
    tree = Tree(str(make(tmp_path / "top", {b"large": file(content)})))
    with pytest.raises(Cut):
        archive(tree, store, cut_after(2))
    (part,) = (tmp_path / "store/.batchml-parts").iterdir()
    assert part.stat().st_size == 3 * block
    part.write_bytes(part.read_bytes()[: 2 * block] + b"damage" + bytes(100))
    moved = []
    archive(tree, store, TransferProgress(lambda now: moved.append(now.moved)))
    assert moved[-1] == len(content) - 2 * block, (
        "what was there was compared, and kept where it was right"
    )
    back = Tree(str(tmp_path / "back"))
    with pytest.raises(Cut):
        restore(store, back, cut_after(2))
    assert not (tmp_path / "back/large").exists()
    moved.clear()
    restore(store, back, TransferProgress(lambda now: moved.append(now.moved)))
    assert moved[-1] == 2 << 20
    assert (tmp_path / "back/large").read_bytes() == content
    assert os.listdir(tmp_path / "back") == ["large"]


def test_a_wrong_part_file_is_not_used(tmp_path: Path, store: FolderArchive) -> None:
    content = os.urandom(2 << 20)
    archive(Tree(str(make(tmp_path / "top", {b"f": file(content)}))), store)
    back = Tree(str(tmp_path / "back"))
    with pytest.raises(Cut):
        restore(store, back, cut_after(1))
    (part,) = (each for each in (tmp_path / "back/.batchml-parts").iterdir() if len(each.name) > 9)
    part.write_bytes(bytes(part.stat().st_size))
    assert restore(store, back).missing == ()
    assert (tmp_path / "back/f").read_bytes() == content


def test_damage_in_an_archive_is_found_before_anything_is_deleted(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    stored = tmp_path / "store/z"
    state = stored.stat()
    stored.write_text("WRONG")
    os.utime(stored, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert [str(each) for each in verify(store).missing] == [
        "z: its SHA-256 differs from when it was sent"
    ]
    before = seen(top)
    with pytest.raises(TransferError, match="damaged, nothing was deleted: 'z'"):
        free(tree, store)
    assert seen(top) == before
    (bad,) = restore(store, Tree(str(tmp_path / "back"))).missing
    assert bad.path == "z" and not (tmp_path / "back/z").exists()
    assert archive(tree, store).files == 0, "by size and time it is there"
    assert archive(tree, store, checksum=True).files == 1
    assert verify(store).missing == ()


def test_a_file_that_the_archive_has_lost_is_named(
    tree: Tree, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    (tmp_path / "store/a/x").unlink()
    with pytest.raises(ArchiveIncomplete, match="files were deleted from it: it lacks 'a/x'"):
        restore(store, Tree(str(tmp_path / "back")))
    assert restore(store, Tree(str(tmp_path / "back")), partial=True).files == 2
    assert archive(tree, store).files == 1


@pytest.mark.parametrize("name", ["complete.json", "manifest"])
def test_a_changed_manifest_is_rejected(
    name: str, tree: Tree, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    (paper,) = (tmp_path / "store/.batchml/archive").glob(f"{name}*")
    paper.write_bytes(paper.read_bytes().replace(b"a/x", b"b/x").replace(b"manifest", b"another"))
    with pytest.raises(TransferError, match=r"is damaged|was changed|is missing"):
        restore(store, Tree(str(tmp_path / "back")))


def test_two_archives_at_once_do_not_both_say_that_they_are_complete(
    tree: Tree, store: FolderArchive
) -> None:
    def other(_: ProgressState) -> None:
        if not others:
            others.append(True)
            manifest.ManifestWriter(store, read_manifest(store)).begin([])

    others: list[bool] = []
    with pytest.raises(TransferError, match="another archive to the same place is in progress"):
        archive(tree, store, TransferProgress(other))
    assert not read_manifest(store).is_complete


def test_a_file_that_changes_all_the_time_is_named_and_the_archive_is_incomplete(
    tree: Tree, top: Path, store: FolderArchive
) -> None:
    def tell(now: ProgressState) -> None:
        if now.path == "z" and now.size:
            with open(top / "z", "a") as growing:
                growing.write("more")

    done = archive(tree, store, TransferProgress(tell))
    assert [each.path for each in done.missing] == ["z"]
    assert "changes while it is" in done.missing[0].why
    assert not read_manifest(store).is_complete
    assert archive(tree, store).missing == ()


def test_a_file_that_is_deleted_meanwhile_is_not_missing(
    tree: Tree, top: Path, store: FolderArchive
) -> None:
    def tell(now: ProgressState) -> None:
        (top / "z").unlink(missing_ok=True)

    done = archive(tree, store, TransferProgress(tell))
    assert (done.files, done.missing) == (2, ())
    assert read_manifest(store).is_complete


def test_a_file_that_changes_once_is_sent_again(
    tree: Tree, top: Path, store: FolderArchive
) -> None:
    def tell(now: ProgressState) -> None:
        if now.files == 3 and not changed:
            changed.append(True)
            make(top, {b"a/x": file("later"), b"new": file("new")})

    changed: list[bool] = []
    assert archive(tree, store, TransferProgress(tell)).missing == ()
    assert verify(store).files == 4
    assert read_manifest(store).entries["a/x"].size == 5


def test_a_file_that_changes_while_it_is_copied_is_copied_again_and_then_named(
    tree: Tree, top: Path, tmp_path: Path
) -> None:
    def tell(now: ProgressState) -> None:
        if now.path == "z" and now.size > before["size"] and before["left"]:
            before["left"] -= 1
            with open(top / "z", "a") as growing:
                growing.write("more")
        before["size"] = now.size

    for times, missing in ((1, []), (9, ["z"])):
        before = {"left": times, "size": 0}
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        done = receive(
            FolderSource(tree, ""), Tree(str(tmp_path / "there")), "", TransferProgress(tell)
        )
        assert [each.path for each in done.missing] == missing
        assert (tmp_path / "there/z").exists() != bool(missing)


def test_devices_and_links_that_lead_out_are_left_out_and_named(
    tmp_path: Path, store: FolderArchive
) -> None:
    links: Seen = {
        b"out": Node("link", b"/etc/passwd"),
        b"up/out": Node("link", b"../../x"),
        b"up/in": Node("link", b"../file"),
        b"turn": Node("link", b"up/./"),
        b"trick": Node("link", b"turn/../../x"),
        b"dangling": Node("link", b"nothing"),
        b"file": file(),
    }
    top = make(tmp_path / "top", links)
    os.mkfifo(top / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(top / "socket"))
    done = archive(Tree(str(top)), store)
    assert done.missing == ()
    assert {str(each).partition(",")[0] for each in done.left_out} == {
        "out: a link that leads out", "up/out: a link that leads out", "pipe: a pipe",
        "socket: a socket", "trick: a link that leads out",
    }  # fmt: skip
    restore(store, Tree(str(tmp_path / "back")))
    assert set(seen(tmp_path / "back")) == {b"up", b"up/in", b"turn", b"dangling", b"file"}
    named = {each.path for each in find_unarchived(Tree(str(top)), read_manifest(store))[0]}
    assert named == {"out", "up/out", "trick"}


def test_nothing_is_written_through_a_link(tmp_path: Path, store: FolderArchive) -> None:
    outside = make(tmp_path / "outside", {b"f": file("mine")})
    archive(Tree(str(make(tmp_path / "top", {b"d/f": file("new"), b"g": file("g")}))), store)
    back = make(tmp_path / "back", {b"d": Node("link", os.fsencode(outside)),
                                    b"g": Node("link", os.fsencode(outside / "f"))})  # fmt: skip
    done = restore(store, Tree(str(back)), overwrite=True)
    assert {each.path for each in done.missing} == {"d", "d/f"}
    assert (outside / "f").read_text() == "mine"
    assert (back / "g").read_text() == "g" and not (back / "g").is_symlink()


def test_a_link_among_the_parts_is_not_followed(tmp_path: Path) -> None:
    top = make(tmp_path / "top", {b"f": file("new")})
    there = Tree(str(make(tmp_path / "there", {})))
    outside = make(tmp_path / "outside", {b"f": file("mine")})
    entry = Tree(str(top)).lookup("f")
    assert entry is not None
    (tmp_path / "there/.batchml-parts").mkdir()
    part = tmp_path / "there/.batchml-parts" / files.part_name(entry)
    part.symlink_to(outside / "f")
    done = receive(FolderSource(Tree(str(top)), ""), there)
    assert [each.path for each in done.missing] == ["f"]
    assert (outside / "f").read_text() == "mine"


def test_holes_stay_holes_and_the_memory_small(tmp_path: Path, store: FolderArchive) -> None:
    top = make(tmp_path / "top", {b"f": file("begin")})
    with open(top / "f", "r+b") as sparse:
        sparse.seek(40 << 20)
        sparse.write(b"end")
    archive(Tree(str(top)), store)
    restore(store, Tree(str(tmp_path / "back")))
    for place in ("store/f", "back/f"):
        state = os.stat(tmp_path / place)
        assert state.st_size == (40 << 20) + 3 and state.st_blocks * 512 < 8 << 20, place


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], Path]]:
    """A file system of so many bytes."""
    mounted: list[Path] = []

    def mount(folder: Path, size: int) -> Path:
        folder.mkdir(exist_ok=True)
        again = ["-o", f"remount,size={size}"] if folder in mounted else ["-t", "tmpfs", "none"]
        words = ["mount", *again, *([] if folder in mounted else ["-o", f"size={size}"])]
        if subprocess.run([*words, str(folder)], stderr=subprocess.DEVNULL).returncode:
            pytest.skip("no file system may be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in set(mounted):
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_with_the_missing_files_and_the_transfer_continues_later(
    tmp_path: Path, small_disk: Callable[[Path, int], Path]
) -> None:
    top = make(tmp_path / "top", {b"a%d" % n: file(os.urandom(1 << 20)) for n in range(6)})
    disk = small_disk(tmp_path / "disk", 3 << 20)
    source = FolderSource(Tree(str(top)), "")
    with pytest.raises(
        NoSpaceLeft,
        match=r"No space left on device in .*/disk: \d files, [\d.]+ MiB, still missing",
    ):
        receive(source, Tree(str(disk)))
    for path in disk.glob("a*"):
        assert path.read_bytes() == (top / path.name).read_bytes()
    store = FolderArchive(str(disk / "store"))
    with pytest.raises((NoSpaceLeft, StoreError), match="No space left on device"):
        archive(Tree(str(top)), store)
    shutil.rmtree(disk / "store", ignore_errors=True)
    small_disk(disk, 20 << 20)
    done = receive(source, Tree(str(disk)))
    assert done.missing == () and seen(disk) == seen(top)


@pytest.mark.parametrize("names", [["f"], ["f", "g"]], ids=["alone", "in a group"])
@pytest.mark.parametrize("size", [3, 3 * files.BLOCK + 3])
def test_a_disk_that_returns_other_content_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], size: int
) -> None:
    monkeypatch.setattr(files, "WINDOW", files.BLOCK)
    content = os.urandom(size)
    top = make(tmp_path / "top", {os.fsencode(name): file(content) for name in names})

    def damage(now: ProgressState) -> None:
        for part in (tmp_path / "there" / PARTS_FOLDER).glob("*"):
            with open(part, "r+b") as disk:
                disk.write(bytes([content[0] ^ 1]))

    done = receive(
        FolderSource(Tree(str(top)), ""), Tree(str(tmp_path / "there")), "",
        TransferProgress(damage),
    )  # fmt: skip
    assert [each.path for each in done.missing] == names
    for each in done.missing:
        assert "content read back is not what was written" in each.why
    assert os.listdir(tmp_path / "there") == [PARTS_FOLDER]


def test_files_that_another_program_sent_are_only_read_back(
    tree: Tree, top: Path, tmp_path: Path
) -> None:
    """As with FSx for Lustre, which exports to its bucket by itself."""
    sent = shutil.copytree(top, tmp_path / "sent")
    (sent / "a/y").write_text("TWO")
    store = FolderArchive(str(sent))
    done = archive(tree, store, sends=False)
    assert [str(each) for each in done.missing] == ["a/y: the archive does not have this content"]
    assert (sent / "a/y").read_text() == "TWO"
    (sent / "a/y").write_text("two")
    assert archive(tree, store, sends=False).missing == ()
    assert read_manifest(store).is_complete and verify(store).files == 3


def test_freed_files_that_changed_meanwhile_stay(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    (top / "z").write_text("newer")
    done = free(tree, store)
    assert (done.removed, [each.path for each in done.left_out]) == (2, ["z"])
    assert seen(top).keys() == {b"z"}
    assert archive(tree, store).files == 1
    restore(store, tree)
    assert seen(top).keys() == {b"a", b"a/x", b"a/y", b"z"}
    assert (top / "z").read_text() == "newer"


def test_a_file_may_become_a_folder_and_a_file_again(tmp_path: Path, store: FolderArchive) -> None:
    for number, tree in enumerate([{b"a": file("1")}, {b"a/b": file("2")}, {b"a": file("3")}]):
        top = make(tmp_path / f"top{number}", tree)
        assert archive(Tree(str(top)), store).missing == ()
        assert restore(store, Tree(str(tmp_path / f"back{number}"))).missing == ()
        assert seen(tmp_path / f"back{number}").keys() == seen(top).keys()


def test_the_program_prints_progress_and_a_json_document_at_the_end(
    top: Path, tmp_path: Path
) -> None:
    said: list[str] = []

    def run(*words: str) -> tuple[int, object]:
        code = main.main(words, {}, said.append)
        return code, json.loads(said[-1].removeprefix(main.RESULT_MARK))

    place, folder = str(tmp_path / "store"), str(top)
    code, told = run("restore", place, folder)
    assert (code, told) == (1, {"error": "there is no archive"})
    assert run("archive", place, folder, "--delete")[1] == {
        "files": 3, "bytes": 11, "unchanged": 0, "removed": 3, "leftOut": [], "missing": [],
    }  # fmt: skip
    assert run("list", folder) == (0, {"entries": []})
    assert run("restore", place, folder, "--below", "a")[0] == 0
    assert os.listdir(top / "a") == ["x", "y"] and not (top / "z").exists()
    assert run("verify", place)[0] == run("check", place, folder)[0] == 0
    code, told = run("archive", "gs://x", folder)
    assert code == 1 and "cannot be an archive" in str(told)
    teller = main.ProgressPrinter(said.append, iter([0.0, 11.0, 11.0, 12.0]).__next__)
    teller(ProgressState("archiving", "x", 1, 2, 10, 20))
    assert said[-1] == "archiving: 1 of 2 files, 10 of 20 bytes"


def test_a_url_that_cannot_be_an_archive_is_an_error() -> None:
    for url in ("", "ftp://x", "file:///x"):
        with pytest.raises(StoreError, match="cannot be an archive"):
            open_archive(url, {})


def test_an_error_of_one_file_is_reported_for_that_file(tree: Tree, store: FolderArchive) -> None:
    class Failing(FolderArchive):
        def send(self, key: str, *more: object) -> str:
            if key == "z":
                raise OSError(errno.EIO, "Input/output error")
            return super().send(key, *more)  # type: ignore[arg-type]

    done = archive(tree, Failing(store._folder))
    assert [str(each) for each in done.missing] == ["z: Input/output error"]
    assert done.files == 2 and transfer_archive.archive(tree, store).files == 1


def test_a_restore_replaces_newer_files_only_with_overwrite(
    tree: Tree, top: Path, store: FolderArchive
) -> None:
    make(top, {b"l": Node("link", b"z")})
    archive(tree, store)
    (top / "a/x").write_text("days of work")
    os.utime(top / "a/y")  # the same content at another time
    (top / "l").unlink()
    (top / "l").symlink_to("a/x")
    (top / "z").unlink()
    done = restore(store, tree)
    assert {each.path for each in done.missing} == {"a/x", "l"}
    assert "differs and is newer: it stays. To replace it: --overwrite" in done.missing[1].why
    assert (done.files, done.unchanged) == (1, 1)
    assert (top / "a/x").read_text() == "days of work" and os.readlink(top / "l") == "a/x"
    assert restore(store, tree, overwrite=True).missing == ()
    assert (top / "a/x").read_text() == "one" and os.readlink(top / "l") == "z"


def test_a_file_that_appears_during_a_restore_stays(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    back = tmp_path / "back"

    def tell(now: ProgressState) -> None:
        if now.path == "z":
            (back / "z").write_text("of a run")

    done = restore(store, Tree(str(back)), TransferProgress(tell))
    assert [str(each) for each in done.missing] == [
        "z: another file has been created at its path meanwhile, and stays"
    ]
    assert (back / "z").read_text() == "of a run"


def test_files_that_an_interrupted_restore_lacks_do_not_count_as_deleted(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    """As when an archive is made every night, and a restore has been cut the day before."""
    make(top, {b"n%03d" % number: file("new") for number in range(100)})
    archive(tree, store)
    new = Tree(str(tmp_path / "new"))
    with pytest.raises(Cut):
        restore(store, new, cut_after(150))
    make(tmp_path / "new", {b"work": file("since")})
    assert archive(new, store).missing == ()
    assert restore(store, new).missing == ()
    assert seen(tmp_path / "new").keys() == {*seen(top).keys(), b"work"}
    archive(new, store)
    (tmp_path / "new/z").unlink()  # all was back: this was somebody
    archive(new, store)
    assert restore(store, new).files == 0


def test_the_only_copy_of_a_freed_file_is_not_replaced(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    free(tree, store)
    make(top, {b"a/x": file("of a new run"), b"z/in": file("of it, too"), b"a/y": file("two")})
    with pytest.raises(
        TransferError, match=r"names of freed files, of .* only copy: 'a/x', 'z'\. None"
    ):
        archive(tree, store)
    assert (tmp_path / "store/a/x").read_text() == "one"
    assert read_manifest(store).is_complete
    done = archive(tree, store, overwrite=True)
    assert done.missing == () and verify(store).missing == ()
    assert {path for path, entry in read_manifest(store).entries.items() if entry.is_file} == {
        "a/x", "a/y", "z/in",
    }  # fmt: skip


def test_an_archive_keeps_the_old_content_of_a_file_that_changes(
    tree: Tree, top: Path, store: FolderArchive, tmp_path: Path
) -> None:
    archive(tree, store)
    (top / "z").write_text("begun")

    def tell(now: ProgressState) -> None:
        if now.path == "z" and now.size:
            with open(top / "z", "a") as growing:
                growing.write("more")

    assert archive(tree, store, TransferProgress(tell)).missing
    assert (tmp_path / "store/z").read_text() == "three"
    back = restore(store, Tree(str(tmp_path / "back")), partial=True)
    assert [each.path for each in back.missing] == ["z"]
    assert (tmp_path / "back/z").read_text() == "three"


def test_an_archive_without_changes_records_the_later_time(
    tree: Tree, store: FolderArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teardown compares that with when runs ended."""
    for now in (1000.0, 2000.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        archive(tree, store)
        assert read_manifest(store).at == now
    free(tree, store)
    assert read_manifest(store).at == 2000.0


def test_nothing_is_freed_while_another_archives(
    tree: Tree, top: Path, store: FolderArchive
) -> None:
    """As in a bucket, out of which nobody can be kept."""

    def other(now: ProgressState) -> None:
        if now.doing == "reading back" and now.size:
            manifest.ManifestWriter(store, read_manifest(store)).record(
                [TreeEntry("x", sha256="0")]
            )

    archive(tree, store)
    before = seen(top)
    with pytest.raises(TransferError, match=r"try again when it has ended\. Nothing was deleted"):
        free(tree, store, TransferProgress(other))
    assert seen(top) == before


def test_old_records_that_could_not_be_deleted_are_ignored(
    tree: Tree, top: Path, store: FolderArchive
) -> None:
    """As a disk leaves them that failed as an archive had just become complete."""
    archive(tree, store)

    manifest.ManifestWriter(store, read_manifest(store)).record(
        [TreeEntry("a/x", size=9, sha256="0")]
    )
    assert free(tree, store).removed == 3
    make(top, {b"new": file()})
    with pytest.raises(Cut):
        archive(tree, store, cut_after(0))
    assert read_manifest(store).entries["a/x"].away == "freed"
    assert archive(tree, store).missing == () and restore(store, tree).files == 3


def test_one_archive_at_a_time(tree: Tree, store: FolderArchive, tmp_path: Path) -> None:
    with store.lock(), pytest.raises(TransferError, match="another archive to the same place"):
        archive(tree, FolderArchive(str(tmp_path / "store")))
    assert archive(tree, store).missing == ()


def test_a_disk_on_which_two_names_are_one_keeps_no_complete_archive(
    tmp_path: Path, store: FolderArchive
) -> None:
    class Insensitive(FolderArchive):
        def send(self, key: str, *more: object) -> str:
            return super().send(key.lower(), *more)  # type: ignore[arg-type]

    tree = Tree(str(make(tmp_path / "top", {b"A": file("1"), b"a": file("22")})))
    bad = archive(tree, Insensitive(store._folder)).missing
    assert bad[0].path == "A" and "another name differ only in case" in bad[0].why
    assert not read_manifest(store).is_complete


def test_an_unreachable_source_ends_the_transfer_and_is_not_reported_as_a_full_disk(
    tree: Tree, store: FolderArchive, tmp_path: Path
) -> None:
    class Away(FolderArchive):
        def read(self, key: str, start: int, length: int) -> bytes:
            raise StoreError("S3 does not answer", temporary=True)

    archive(tree, store)
    with pytest.raises(StoreError, match="S3 does not answer"):
        restore(Away(store._folder), Tree(str(tmp_path / "back")))


def test_a_copy_survives_another_that_removes_the_folder_of_parts(
    tmp_path: Path, tree: Tree
) -> None:
    """The other ends as this one begins, and removes the folder of parts, or looks for old ones."""

    class Shared(Tree):
        others = 2

        @contextmanager
        def folder(self, below: str) -> Iterator[int]:
            if below == PARTS_FOLDER and self.others:
                self.others -= 1
                os.rmdir(f"{self.root}/{PARTS_FOLDER}")
            with super().folder(below) as fd:
                yield fd

    there = Shared(str(tmp_path / "there"))
    done = receive(FolderSource(tree, "z"), there, "z")  # one file: one thread
    assert (done.files, done.missing, there.others) == (1, (), 0)
    parts = make(
        tmp_path / "there" / PARTS_FOLDER, {b"part": file(mtime_ns=5)}
    )  # its source's time
    files.clear_parts(there, time.time())
    assert os.listdir(parts) == ["part"]
    files.clear_parts(there, time.time() + files.PART_EXPIRES + 60)
    assert not parts.exists()
