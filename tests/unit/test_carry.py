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
from batchml.runtime.transfer import archive as carry_archive
from batchml.runtime.transfer import files as carry_place
from batchml.runtime.transfer import main as carry
from batchml.runtime.transfer import manifest as carry_book
from batchml.runtime.transfer.archive import archive, free, plan
from batchml.runtime.transfer.backends import FolderVault, key_of, open_vault
from batchml.runtime.transfer.manifest import COMPLETE, read_book
from batchml.runtime.transfer.parallel import Account, Progress
from batchml.runtime.transfer.receive import FolderSource, Full, receive
from batchml.runtime.transfer.restore import Incomplete, lacking, restore, verify
from batchml.runtime.transfer.tree import PARTS, CarryError, Entry, Tree, from_line, to_line
from tests.contract.generate import TORTURE
from tests.trees import Node, Seen, file, make, seen, trees

KEPT = 6 * TORTURE


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return make(tmp_path / "top", {b"a/x": file("one"), b"a/y": file("two"), b"z": file("three")})


@pytest.fixture
def tree(top: Path) -> Tree:
    return Tree(str(top))


@pytest.fixture
def vault(tmp_path: Path) -> FolderVault:
    return FolderVault(str(tmp_path / "vault"))


class Cut(CarryError):
    """Somebody pulled the plug."""


def cut_after(count: int) -> Account:
    """An account that is told so many times, and then ends it all."""
    told = 0

    def tell(now: Progress) -> None:
        nonlocal told
        told += now.size > 0
        if told > count:
            raise Cut("cut")

    return Account(tell)


@settings(max_examples=4 * KEPT)
@given(trees(), trees())
def test_any_tree_comes_back_from_its_archive_as_it_was(first: Seen, then: Seen) -> None:
    """Also where the archive held another tree before, and where all was freed meanwhile."""
    assume(any(node.kind == "file" for node in then.values()))  # else see below: a new disk
    with tempfile.TemporaryDirectory() as folder:
        vault = FolderVault(f"{folder}/vault")
        make(Path(folder, "first"), first)
        assert not archive(Tree(f"{folder}/first"), vault).missing
        before = seen(make(Path(folder, "then"), then))
        tree = Tree(f"{folder}/then")
        assert not archive(tree, vault).missing
        assert not restore(vault, Tree(f"{folder}/back")).missing
        assert seen(Path(folder, "back")) == before
        freed = free(tree, vault)
        assert freed.removed == sum(node.kind == "file" for node in before.values())
        assert seen(Path(tree.root)) == {}
        assert not archive(tree, vault).missing  # of nothing: what was freed stays
        assert not restore(vault, tree).missing
        assert seen(Path(tree.root)) == before
        again = archive(tree, vault)
        assert (again.files, again.missing) == (0, ())


@settings(max_examples=2 * KEPT)
@given(trees(), trees())
def test_any_tree_is_pushed_over_any_other_and_a_second_time_nothing_is(
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
def test_any_entry_is_a_line_of_ascii_and_back(tree: Seen) -> None:
    for path, node in tree.items():
        name = os.fsdecode(path)
        target = os.fsdecode(node.content) if node.kind == "link" else ""
        entry = Entry(name, node.kind, node.mode, 3, node.mtime_ns, "ab", target, "s", "freed")
        line = to_line(entry)
        assert line.isascii() and "\n" not in line and from_line(line) == entry


@pytest.mark.parametrize(
    "line",
    ['{"path": "../x"}', '{"path": "/etc/x"}', '{"path": "a//b"}', '{"path": ""}', "[]", "nonsense",
     '{"path": "x", "size": -1}', '{"path": "x", "kind": "device"}', '{"path": 3}', '{"size": 3}',
     '{"path": "x", "mode": 65535}', '{"path": ".batchml/archive/x"}', '{"path": "x\\u0000"}'],
)  # fmt: skip
def test_a_manifest_that_leads_elsewhere_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        from_line(line)


def test_what_is_unchanged_is_not_sent_and_what_looks_so_is_read(tree: Tree, top: Path) -> None:
    known = {
        "same": Entry("same", size=3, mtime_ns=5000, sha256="s", stamp="1"),
        "touched": Entry("touched", size=3, mtime_ns=5000, sha256="t", stamp="1"),
        "other": Entry("other", size=3, mtime_ns=5000, sha256="o", stamp="1"),
        "lost": Entry("lost", size=3, mtime_ns=5000, sha256="l", stamp="1"),
        "removed": Entry("removed", size=3, sha256="r"),
        "freed": Entry("freed", size=3, sha256="f", away="freed"),
        "turned": Entry("turned", size=3, sha256="u", away="freed"),
    }
    now = [
        Entry("same", size=3, mtime_ns=5001, stamp="1"),
        Entry("touched", size=3, mtime_ns=5000, stamp="2"),
        Entry("other", size=3, mtime_ns=6000, stamp="1"),
        Entry("lost", size=3, mtime_ns=5000, stamp="1"),
        Entry("turned/new", size=1),
    ]
    sizes = {path: 3 for path in known if path != "lost"}
    found = plan(now, known, sizes)
    assert [entry.path for entry in found.kept] == ["same"]
    assert [entry.path for entry in found.looked] == ["touched"]
    assert [entry.path for entry in found.sent] == ["other", "lost", "turned/new"]
    assert {entry.path: entry.away for entry in found.away} == {
        "removed": "deleted", "freed": "freed",
    }  # fmt: skip
    checked = plan(now, known, sizes, checksum=True)
    assert [entry.path for entry in checked.looked] == ["same", "touched"]


def test_names_that_s3_could_not_have_get_a_key_of_their_own() -> None:
    assert key_of("a/\u00e4 b.bin") == "a/\u00e4 b.bin"
    for odd in ("a\nb", os.fsdecode(b"\xff"), "d/" * 500 + "x", "\x7f", "\uffff"):
        assert key_of(odd).startswith(".batchml/archive/odd/")


def test_an_archive_is_plain_files_and_says_when_it_is_complete(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    done = archive(tree, vault)
    assert (done.files, done.size, done.missing) == (3, 11, ())
    assert (tmp_path / "vault/a/x").read_text() == "one"
    told = json.loads((tmp_path / "vault" / COMPLETE).read_text())
    assert (told["files"], told["bytes"]) == (3, 11)
    assert archive(tree, vault).unchanged == 3
    os.utime(top / "z", ns=(1, 1))  # its time was set back: its content decides
    (top / "a/x").write_text("uno")
    assert archive(tree, vault).files == 2
    (top / "a/y").unlink()
    assert archive(tree, vault).files == 0
    assert restore(vault, Tree(str(tmp_path / "back"))).files == 2, "what was deleted stays away"
    assert (tmp_path / "vault/a/y").exists(), "and is not lost"


def test_content_that_changed_under_the_old_time_is_seen(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    state = os.stat(top / "z")
    (top / "z").write_text("THREE")
    os.utime(top / "z", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert archive(tree, vault).files == 1
    assert (tmp_path / "vault/z").read_text() == "THREE"


def test_an_archive_stays_complete_while_it_is_only_compared(
    tree: Tree, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    back = Tree(str(tmp_path / "back"))
    restore(vault, back)  # other inodes: contents have to be compared
    with pytest.raises(Cut):
        archive(back, vault, cut_after(1))
    assert read_book(vault).is_complete
    said: list[Progress] = []
    assert archive(back, vault, Account(said.append)).files == 0
    assert {now.doing for now in said} == {"comparing", "archiving"}


def test_a_new_disk_deletes_nothing_in_the_archive(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    """As when somebody archives every night, and the file system was lost meanwhile."""
    archive(tree, vault)
    new = Tree(str(make(tmp_path / "new", {b"folder": Node("folder", mode=0o755)})))
    archive(new, vault)
    assert restore(vault, new).files == 3
    assert seen(tmp_path / "new").keys() == {*seen(top).keys(), b"folder"}


def test_a_cut_archive_is_not_complete_and_goes_on(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    make(top, {b"n%03d" % number: file("new") for number in range(100)})
    with pytest.raises(Cut):
        archive(tree, vault, cut_after(150))  # two words for each file, in rounds of 64
    book = read_book(vault)
    assert not book.is_complete and 0 < len(book.missing()) < 100
    back = Tree(str(tmp_path / "back"))
    with pytest.raises(Incomplete, match="it was cut off: it lacks 'n"):
        restore(vault, back)
    assert back.look("") is None
    some = restore(vault, back, partial=True)
    assert some.files + len(some.missing) == 103 and some.missing
    with pytest.raises(CarryError, match="not complete: nothing was deleted"):
        free(tree, vault)
    done = archive(tree, vault)
    assert done.files < 100 and not done.missing
    assert read_book(vault).is_complete
    assert restore(vault, back).missing == ()
    assert seen(Path(back.root)) == seen(top)
    assert not (tmp_path / "vault/.batchml/archive/going").exists()


def test_a_large_file_that_was_cut_goes_on_where_it_was(tmp_path: Path, vault: FolderVault) -> None:
    content = os.urandom(5 << 20)
    tree = Tree(str(make(tmp_path / "top", {b"large": file(content)})))
    with pytest.raises(Cut):
        archive(tree, vault, cut_after(2))
    (part,) = (tmp_path / "vault/.batchml-parts").iterdir()
    assert part.stat().st_size == 3 << 20
    part.write_bytes(part.read_bytes()[: 2 << 20] + b"damage" + bytes(100))
    moved = []
    archive(tree, vault, Account(lambda now: moved.append(now.moved)))
    assert moved[-1] == 3 << 20, "what was there was compared, and kept where it was right"
    back = Tree(str(tmp_path / "back"))
    with pytest.raises(Cut):
        restore(vault, back, cut_after(2))
    assert not (tmp_path / "back/large").exists()
    moved.clear()
    restore(vault, back, Account(lambda now: moved.append(now.moved)))
    assert moved[-1] == 2 << 20
    assert (tmp_path / "back/large").read_bytes() == content
    assert os.listdir(tmp_path / "back") == ["large"]


def test_a_part_that_is_wrong_is_not_believed(tmp_path: Path, vault: FolderVault) -> None:
    content = os.urandom(2 << 20)
    archive(Tree(str(make(tmp_path / "top", {b"f": file(content)}))), vault)
    back = Tree(str(tmp_path / "back"))
    with pytest.raises(Cut):
        restore(vault, back, cut_after(1))
    (part,) = (each for each in (tmp_path / "back/.batchml-parts").iterdir() if len(each.name) > 9)
    part.write_bytes(bytes(part.stat().st_size))
    assert restore(vault, back).missing == ()
    assert (tmp_path / "back/f").read_bytes() == content


def test_damage_in_an_archive_is_found_before_anything_is_deleted(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    stored = tmp_path / "vault/z"
    state = stored.stat()
    stored.write_text("WRONG")
    os.utime(stored, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert [str(each) for each in verify(vault).missing] == [
        "z: its SHA-256 is another than when it was sent"
    ]
    before = seen(top)
    with pytest.raises(CarryError, match="damaged, nothing was deleted: 'z'"):
        free(tree, vault)
    assert seen(top) == before
    (bad,) = restore(vault, Tree(str(tmp_path / "back"))).missing
    assert bad.path == "z" and not (tmp_path / "back/z").exists()
    assert archive(tree, vault).files == 0, "by size and time it is there"
    assert archive(tree, vault, checksum=True).files == 1
    assert verify(vault).missing == ()


def test_a_file_of_an_archive_that_is_gone_is_named(
    tree: Tree, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    (tmp_path / "vault/a/x").unlink()
    with pytest.raises(Incomplete, match="files of it are gone: it lacks 'a/x'"):
        restore(vault, Tree(str(tmp_path / "back")))
    assert restore(vault, Tree(str(tmp_path / "back")), partial=True).files == 2
    assert archive(tree, vault).files == 1


@pytest.mark.parametrize("name", ["complete.json", "manifest"])
def test_papers_that_were_changed_are_not_believed(
    name: str, tree: Tree, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    (paper,) = (tmp_path / "vault/.batchml/archive").glob(f"{name}*")
    paper.write_bytes(paper.read_bytes().replace(b"a/x", b"b/x").replace(b"manifest", b"another"))
    with pytest.raises(CarryError, match=r"is damaged|was changed|is missing"):
        restore(vault, Tree(str(tmp_path / "back")))


def test_two_archives_at_once_do_not_both_say_that_they_are_complete(
    tree: Tree, vault: FolderVault
) -> None:
    def other(_: Progress) -> None:
        if not others:
            others.append(True)
            carry_book.Writer(vault, read_book(vault)).begin([])

    others: list[bool] = []
    with pytest.raises(CarryError, match="another archive to the same place goes on"):
        archive(tree, vault, Account(other))
    assert not read_book(vault).is_complete


def test_what_changes_all_the_time_is_named_and_the_archive_not_complete(
    tree: Tree, top: Path, vault: FolderVault
) -> None:
    def tell(now: Progress) -> None:
        if now.path == "z" and now.size:
            with open(top / "z", "a") as growing:
                growing.write("more")

    done = archive(tree, vault, Account(tell))
    assert [each.path for each in done.missing] == ["z"]
    assert "changes while it is" in done.missing[0].why
    assert not read_book(vault).is_complete
    assert archive(tree, vault).missing == ()


def test_what_is_deleted_meanwhile_is_not_missing(
    tree: Tree, top: Path, vault: FolderVault
) -> None:
    def tell(now: Progress) -> None:
        (top / "z").unlink(missing_ok=True)

    done = archive(tree, vault, Account(tell))
    assert (done.files, done.missing) == (2, ())
    assert read_book(vault).is_complete


def test_what_changes_once_is_sent_again(tree: Tree, top: Path, vault: FolderVault) -> None:
    def tell(now: Progress) -> None:
        if now.files == 3 and not changed:
            changed.append(True)
            make(top, {b"a/x": file("later"), b"new": file("new")})

    changed: list[bool] = []
    assert archive(tree, vault, Account(tell)).missing == ()
    assert verify(vault).files == 4
    assert read_book(vault).entries["a/x"].size == 5


def test_what_changes_while_it_is_pushed_is_pushed_once_more_and_then_named(
    tree: Tree, top: Path, tmp_path: Path
) -> None:
    def tell(now: Progress) -> None:
        if now.path == "z" and now.size > before["size"] and before["left"]:
            before["left"] -= 1
            with open(top / "z", "a") as growing:
                growing.write("more")
        before["size"] = now.size

    for times, missing in ((1, []), (9, ["z"])):
        before = {"left": times, "size": 0}
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        done = receive(FolderSource(tree, ""), Tree(str(tmp_path / "there")), "", Account(tell))
        assert [each.path for each in done.missing] == missing
        assert (tmp_path / "there/z").exists() != bool(missing)


def test_devices_are_left_out_links_that_lead_out_too_and_all_are_named(
    tmp_path: Path, vault: FolderVault
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
    done = archive(Tree(str(top)), vault)
    assert done.missing == ()
    assert {str(each).partition(",")[0] for each in done.left_out} == {
        "out: a link that leads out", "up/out: a link that leads out", "pipe: a pipe",
        "socket: a socket", "trick: a link that leads out",
    }  # fmt: skip
    restore(vault, Tree(str(tmp_path / "back")))
    assert set(seen(tmp_path / "back")) == {b"up", b"up/in", b"turn", b"dangling", b"file"}
    named = {each.path for each in lacking(Tree(str(top)), read_book(vault))[0]}
    assert named == {"out", "up/out", "trick"}


def test_nothing_is_written_through_a_link(tmp_path: Path, vault: FolderVault) -> None:
    outside = make(tmp_path / "outside", {b"f": file("mine")})
    archive(Tree(str(make(tmp_path / "top", {b"d/f": file("new"), b"g": file("g")}))), vault)
    back = make(tmp_path / "back", {b"d": Node("link", os.fsencode(outside)),
                                    b"g": Node("link", os.fsencode(outside / "f"))})  # fmt: skip
    done = restore(vault, Tree(str(back)), overwrite=True)
    assert {each.path for each in done.missing} == {"d", "d/f"}
    assert (outside / "f").read_text() == "mine"
    assert (back / "g").read_text() == "g" and not (back / "g").is_symlink()


def test_a_link_among_the_parts_is_not_followed(tmp_path: Path) -> None:
    top = make(tmp_path / "top", {b"f": file("new")})
    there = Tree(str(make(tmp_path / "there", {})))
    outside = make(tmp_path / "outside", {b"f": file("mine")})
    entry = Tree(str(top)).look("f")
    assert entry is not None
    (tmp_path / "there/.batchml-parts").mkdir()
    part = tmp_path / "there/.batchml-parts" / carry_place.part_name(entry)
    part.symlink_to(outside / "f")
    done = receive(FolderSource(Tree(str(top)), ""), there)
    assert [each.path for each in done.missing] == ["f"]
    assert (outside / "f").read_text() == "mine"


def test_holes_stay_holes_and_the_memory_small(tmp_path: Path, vault: FolderVault) -> None:
    top = make(tmp_path / "top", {b"f": file("begin")})
    with open(top / "f", "r+b") as sparse:
        sparse.seek(40 << 20)
        sparse.write(b"end")
    archive(Tree(str(top)), vault)
    restore(vault, Tree(str(tmp_path / "back")))
    for place in ("vault/f", "back/f"):
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


def test_a_full_disk_is_told_with_what_is_missing_and_goes_on_later(
    tmp_path: Path, small_disk: Callable[[Path, int], Path]
) -> None:
    top = make(tmp_path / "top", {b"a%d" % n: file(os.urandom(1 << 20)) for n in range(6)})
    disk = small_disk(tmp_path / "disk", 3 << 20)
    source = FolderSource(Tree(str(top)), "")
    with pytest.raises(
        Full, match=r"No space left on device in .*/disk: \d files, [\d.]+ MiB, not"
    ):
        receive(source, Tree(str(disk)))
    for path in disk.glob("a*"):
        assert path.read_bytes() == (top / path.name).read_bytes()
    vault = FolderVault(str(disk / "vault"))
    with pytest.raises((Full, StoreError), match="No space left on device"):
        archive(Tree(str(top)), vault)
    shutil.rmtree(disk / "vault", ignore_errors=True)
    small_disk(disk, 20 << 20)
    done = receive(source, Tree(str(disk)))
    assert done.missing == () and seen(disk) == seen(top)


def test_a_disk_that_gives_back_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = make(tmp_path / "top", {b"f": file("new")})
    monkeypatch.setattr(carry_place, "digest_of", lambda *_: "another")
    done = receive(FolderSource(Tree(str(top)), ""), Tree(str(tmp_path / "there")))
    assert "not what is read back" in done.missing[0].why
    assert not (tmp_path / "there/f").exists()


def test_what_another_sent_is_only_read_back(tree: Tree, top: Path, tmp_path: Path) -> None:
    """As with FSx for Lustre, which exports to its bucket by itself."""
    sent = shutil.copytree(top, tmp_path / "sent")
    (sent / "a/y").write_text("TWO")
    vault = FolderVault(str(sent))
    done = archive(tree, vault, sends=False)
    assert [str(each) for each in done.missing] == ["a/y: the archive has another content, or none"]
    assert (sent / "a/y").read_text() == "TWO"
    (sent / "a/y").write_text("two")
    assert archive(tree, vault, sends=False).missing == ()
    assert read_book(vault).is_complete and verify(vault).files == 3


def test_freed_files_that_changed_meanwhile_stay(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    (top / "z").write_text("newer")
    done = free(tree, vault)
    assert (done.removed, [each.path for each in done.left_out]) == (2, ["z"])
    assert seen(top).keys() == {b"z"}
    assert archive(tree, vault).files == 1
    restore(vault, tree)
    assert seen(top).keys() == {b"a", b"a/x", b"a/y", b"z"}
    assert (top / "z").read_text() == "newer"


def test_a_file_that_becomes_a_folder_and_back(tmp_path: Path, vault: FolderVault) -> None:
    for number, tree in enumerate([{b"a": file("1")}, {b"a/b": file("2")}, {b"a": file("3")}]):
        top = make(tmp_path / f"top{number}", tree)
        assert archive(Tree(str(top)), vault).missing == ()
        assert restore(vault, Tree(str(tmp_path / f"back{number}"))).missing == ()
        assert seen(tmp_path / f"back{number}").keys() == seen(top).keys()


def test_carriers_are_told_by_lines_and_a_document_at_the_end(top: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def run(*words: str) -> tuple[int, object]:
        code = carry.main(words, {}, said.append)
        return code, json.loads(said[-1].removeprefix(carry.MARK))

    place, folder = str(tmp_path / "vault"), str(top)
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
    assert code == 1 and "no place for an archive" in str(told)
    teller = carry.Teller(said.append, iter([0.0, 11.0, 11.0, 12.0]).__next__)
    teller(Progress("archiving", "x", 1, 2, 10, 20))
    assert said[-1] == "archiving: 1 of 2 files, 10 of 20 bytes"


def test_no_place_for_an_archive_is_a_mistake() -> None:
    for url in ("", "ftp://x", "file:///x"):
        with pytest.raises(StoreError, match="no place for an archive"):
            open_vault(url, {})


def test_an_error_of_one_file_is_told_of_that_file(tree: Tree, vault: FolderVault) -> None:
    class Failing(FolderVault):
        def send(self, key: str, *more: object) -> str:
            if key == "z":
                raise OSError(errno.EIO, "Input/output error")
            return super().send(key, *more)  # type: ignore[arg-type]

    done = archive(tree, Failing(vault._folder))
    assert [str(each) for each in done.missing] == ["z: Input/output error"]
    assert done.files == 2 and carry_archive.archive(tree, vault).files == 1


def test_a_restore_destroys_no_newer_work_unless_it_is_told_to(
    tree: Tree, top: Path, vault: FolderVault
) -> None:
    make(top, {b"l": Node("link", b"z")})
    archive(tree, vault)
    (top / "a/x").write_text("days of work")
    os.utime(top / "a/y")  # the same content at another time
    (top / "l").unlink()
    (top / "l").symlink_to("a/x")
    (top / "z").unlink()
    done = restore(vault, tree)
    assert {each.path for each in done.missing} == {"a/x", "l"}
    assert "another, and newer: it stays, unless you say --overwrite" in done.missing[1].why
    assert (done.files, done.unchanged) == (1, 1)
    assert (top / "a/x").read_text() == "days of work" and os.readlink(top / "l") == "a/x"
    assert restore(vault, tree, overwrite=True).missing == ()
    assert (top / "a/x").read_text() == "one" and os.readlink(top / "l") == "z"


def test_what_comes_while_a_restore_brings_it_stays(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    back = tmp_path / "back"

    def tell(now: Progress) -> None:
        if now.path == "z":
            (back / "z").write_text("of a run")

    done = restore(vault, Tree(str(back)), Account(tell))
    assert [str(each) for each in done.missing] == ["z: another has come here meanwhile, and stays"]
    assert (back / "z").read_text() == "of a run"


def test_what_a_cut_restore_did_not_bring_was_deleted_by_nobody(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    """As when an archive is made every night, and a restore has been cut the day before."""
    make(top, {b"n%03d" % number: file("new") for number in range(100)})
    archive(tree, vault)
    new = Tree(str(tmp_path / "new"))
    with pytest.raises(Cut):
        restore(vault, new, cut_after(150))
    make(tmp_path / "new", {b"work": file("since")})
    assert archive(new, vault).missing == ()
    assert restore(vault, new).missing == ()
    assert seen(tmp_path / "new").keys() == {*seen(top).keys(), b"work"}
    archive(new, vault)
    (tmp_path / "new/z").unlink()  # all was back: this was somebody
    archive(new, vault)
    assert restore(vault, new).files == 0


def test_the_only_copy_of_a_freed_file_is_not_replaced(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    free(tree, vault)
    make(top, {b"a/x": file("of a new run"), b"z/in": file("of it, too"), b"a/y": file("two")})
    with pytest.raises(CarryError, match=r"others of these names now: 'a/x', 'z'\. Nothing"):
        archive(tree, vault)
    assert (tmp_path / "vault/a/x").read_text() == "one"
    assert read_book(vault).is_complete
    done = archive(tree, vault, overwrite=True)
    assert done.missing == () and verify(vault).missing == ()
    assert {path for path, entry in read_book(vault).entries.items() if entry.is_file} == {
        "a/x", "a/y", "z/in",
    }  # fmt: skip


def test_an_archive_keeps_what_it_has_of_a_file_that_changes(
    tree: Tree, top: Path, vault: FolderVault, tmp_path: Path
) -> None:
    archive(tree, vault)
    (top / "z").write_text("begun")

    def tell(now: Progress) -> None:
        if now.path == "z" and now.size:
            with open(top / "z", "a") as growing:
                growing.write("more")

    assert archive(tree, vault, Account(tell)).missing
    assert (tmp_path / "vault/z").read_text() == "three"
    back = restore(vault, Tree(str(tmp_path / "back")), partial=True)
    assert [each.path for each in back.missing] == ["z"]
    assert (tmp_path / "back/z").read_text() == "three"


def test_an_archive_without_news_says_of_what_time_it_is(
    tree: Tree, vault: FolderVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teardown compares that with when runs ended."""
    for now in (1000.0, 2000.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        archive(tree, vault)
        assert read_book(vault).at == now
    free(tree, vault)
    assert read_book(vault).at == 2000.0


def test_nothing_is_freed_while_another_archives(tree: Tree, top: Path, vault: FolderVault) -> None:
    """As in a bucket, out of which nobody can be kept."""

    def other(now: Progress) -> None:
        if now.doing == "reading back" and now.size:
            carry_book.Writer(vault, read_book(vault)).sent([Entry("x", sha256="0")])

    archive(tree, vault)
    before = seen(top)
    with pytest.raises(CarryError, match=r"try again after it\. Nothing was deleted"):
        free(tree, vault, Account(other))
    assert seen(top) == before


def test_papers_that_could_not_be_removed_mislead_nobody(
    tree: Tree, top: Path, vault: FolderVault
) -> None:
    """As a disk leaves them that failed as an archive had just become complete."""
    archive(tree, vault)

    carry_book.Writer(vault, read_book(vault)).sent([Entry("a/x", size=9, sha256="0")])
    assert free(tree, vault).removed == 3
    make(top, {b"new": file()})
    with pytest.raises(Cut):
        archive(tree, vault, cut_after(0))
    assert read_book(vault).entries["a/x"].away == "freed"
    assert archive(tree, vault).missing == () and restore(vault, tree).files == 3


def test_one_archive_at_a_time(tree: Tree, vault: FolderVault, tmp_path: Path) -> None:
    with vault.alone(), pytest.raises(CarryError, match="another archive to the same place"):
        archive(tree, FolderVault(str(tmp_path / "vault")))
    assert archive(tree, vault).missing == ()


def test_a_disk_on_which_two_names_are_one_keeps_no_complete_archive(
    tmp_path: Path, vault: FolderVault
) -> None:
    class Insensitive(FolderVault):
        def send(self, key: str, *more: object) -> str:
            return super().send(key.lower(), *more)  # type: ignore[arg-type]

    tree = Tree(str(make(tmp_path / "top", {b"A": file("1"), b"a": file("22")})))
    bad = archive(tree, Insensitive(vault._folder)).missing
    assert bad[0].path == "A" and "another name the same" in bad[0].why
    assert not read_book(vault).is_complete


def test_a_source_out_of_reach_ends_it_and_is_no_full_disk(
    tree: Tree, vault: FolderVault, tmp_path: Path
) -> None:
    class Away(FolderVault):
        def read(self, key: str, start: int, length: int) -> bytes:
            raise StoreError("S3 does not answer", temporary=True)

    archive(tree, vault)
    with pytest.raises(StoreError, match="S3 does not answer"):
        restore(Away(vault._folder), Tree(str(tmp_path / "back")))


def test_two_that_push_at_once_do_not_meet(tmp_path: Path, tree: Tree) -> None:
    """The other ends as this one begins, and removes the folder of parts, or looks for old ones."""

    class Shared(Tree):
        others = 2

        @contextmanager
        def folder(self, below: str) -> Iterator[int]:
            if below == PARTS and self.others:
                self.others -= 1
                os.rmdir(f"{self.root}/{PARTS}")
            with super().folder(below) as fd:
                yield fd

    there = Shared(str(tmp_path / "there"))
    done = receive(FolderSource(tree, "z"), there, "z")  # one file: one thread
    assert (done.files, done.missing, there.others) == (1, (), 0)
    parts = make(tmp_path / "there" / PARTS, {b"part": file(mtime_ns=5)})  # its source's time
    carry_place.clear_parts(there, time.time())
    assert os.listdir(parts) == ["part"]
    carry_place.clear_parts(there, time.time() + carry_place.OLD + 60)
    assert not parts.exists()
