"""Outputs are copied whole, once, and never out of the folder."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import UsageError
from batchml.model.run import Record
from batchml.runs.outputs import (
    PARTIAL_SUFFIX,
    ChildrenOutputs,
    CopiedOutputs,
    FolderOutputs,
    OutputEntry,
    Unreadable,
    copy_files,
    copy_outputs,
    name_problem,
)
from batchml.runs.search import FoundRun
from tests.support.fakes import FakeClock


class Names:
    """A source whose files have these names; each holds its own name."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.fetched: list[str] = []
        self.left_out: list[str] = []

    def entries(self) -> Iterator[OutputEntry]:
        for name in self.names:
            yield OutputEntry(name, len(name.encode()), 1_000_000_000)

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        self.fetched.append(entry.name)
        path.write_bytes(entry.name.encode())


def copied(source: "Names | FolderOutputs | ChildrenOutputs", dest: Path) -> CopiedOutputs:
    *_, last = copy_files(source, dest)
    assert isinstance(last, CopiedOutputs)
    return last


def test_a_second_time_only_what_is_new_or_changed_is_copied(tmp_path: Path) -> None:
    source, dest = Names("a", "b/c"), tmp_path / "dest"
    assert copied(source, dest) == CopiedOutputs(2, 4, 0)
    assert copied(source, dest) == CopiedOutputs(0, 0, 2)
    (dest / "a").write_text("changed")
    assert copied(Names("a", "b/c", "d"), dest) == CopiedOutputs(2, 2, 1)
    assert (dest / "a").read_text() == "a"


def test_a_file_where_the_folder_would_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "local")
    found = FoundRun(None, Record(job_id="j", name="n"))
    for dest in (tmp_path / "train.py", tmp_path / "train.py" / "results"):
        with pytest.raises(UsageError, match=r"train\.py is not a folder\. Give a folder"):
            copy_outputs(Context(settings, FakeClock(), tmp_path), found, dest)


def test_what_was_cut_off_is_copied_again_and_nothing_half_has_the_name(tmp_path: Path) -> None:
    class Broken(Names):
        def fetch(self, entry: OutputEntry, path: Path) -> None:
            super().fetch(entry, path)
            if entry.name == "b":
                path.write_bytes(b"")
                raise ConnectionError

    with pytest.raises(ConnectionError):
        copied(Broken("a", "b"), tmp_path)
    assert not (tmp_path / "b").exists()
    assert copied(Names("a", "b"), tmp_path) == CopiedOutputs(1, 1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "a/.",
        "",
        "a\0b",
        "x" * 250,
        f"x{PARTIAL_SUFFIX}",
    ],
)
def test_a_name_that_leads_elsewhere_is_left_out(name: str, tmp_path: Path) -> None:
    assert name_problem(name)
    done = copied(Names(name, "fine"), tmp_path / "dest")
    assert (done.files, len(done.left_out)) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]


def test_a_link_in_the_destination_is_not_followed(tmp_path: Path) -> None:
    dest, elsewhere = tmp_path / "dest", tmp_path / "elsewhere"
    dest.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    (dest / "out").symlink_to(elsewhere)
    (dest / "file").symlink_to(elsewhere / "kept")
    (dest / f"part{PARTIAL_SUFFIX}").symlink_to(elsewhere / "kept")
    (dest / "folder").mkdir()
    done = copied(Names("out/x", "file", "part", "folder"), dest)
    assert done.files == 2
    assert [text.partition(":")[0] for text in done.left_out] == ["out/x", "folder"]
    assert not (dest / "file").is_symlink()
    assert [path.read_text() for path in elsewhere.iterdir()] == ["kept"]


def test_links_and_pipes_among_the_outputs_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "output"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "model.bin").write_bytes(b"12345")
    (source / "passwd").symlink_to("/etc/passwd")
    (source / "etc").symlink_to("/etc")
    os.mkfifo(source / "pipe")
    done = copied(FolderOutputs(source), tmp_path / "dest")
    assert (done.files, done.size) == (1, 5)
    assert sorted(text.partition(":")[0] for text in done.left_out) == ["etc", "passwd", "pipe"]
    assert (tmp_path / "dest" / "sub" / "model.bin").read_bytes() == b"12345"


def test_what_cannot_be_had_is_left_out_and_the_rest_is_copied(tmp_path: Path) -> None:
    class Fleeting(Names):
        def fetch(self, entry: OutputEntry, path: Path) -> None:
            if entry.name == "b":
                raise Unreadable("deleted meanwhile")
            super().fetch(entry, path)

    done = copied(Fleeting("a", "b", "c", "c/d"), tmp_path)  # a store has files beside folders
    assert done.files == 2
    assert sorted(done.left_out)[0] == "b: deleted meanwhile"
    assert sorted(done.left_out)[1].startswith(("c: one of the outputs", "c/d: one of the outputs"))


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(tmp_path: Path) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside"
    (source / "in").mkdir(parents=True)
    outside.mkdir()
    (source / "in" / "a").write_text("of the run")
    (outside / "a").write_text("of the host")
    folder = FolderOutputs(source)
    (entry,) = folder.entries()
    (source / "in").rename(source / "was")
    (source / "in").symlink_to(outside)
    with pytest.raises(Unreadable):
        folder.fetch(entry, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    listed = folder.entries()
    assert [next(listed).name] == ["was/a"]


def test_a_file_that_the_run_deletes_meanwhile_is_left_out(tmp_path: Path) -> None:
    source = tmp_path / "output"
    source.mkdir()
    for name in "ab":
        (source / name).write_text(name)
    folder = FolderOutputs(source)
    entries = folder.entries()
    first = next(entries)
    for name in "ab":
        (source / name).unlink()
    assert list(entries) == []
    with pytest.raises(Unreadable, match="No such file"):
        folder.fetch(first, tmp_path / "x")


def test_children_lie_apart(tmp_path: Path) -> None:
    together = ChildrenOutputs({"0": Names("m"), "10": Names("m")})
    assert copied(together, tmp_path).files == 2
    assert (tmp_path / "10" / "m").read_text() == "m"


def test_what_the_first_node_left_lies_beside_the_folders_of_the_others(tmp_path: Path) -> None:
    done = copied(
        ChildrenOutputs({"": Names("m", "sub/x", "node-1/y"), "node-1": Names("y")}), tmp_path
    )
    assert done.left_out == ("node-1/y: the outputs of another node have this folder",)
    names = sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    )
    assert names == ["m", "node-1/y", "sub/x"]


def test_many_files_are_copied_in_their_order(tmp_path: Path) -> None:
    names = [f"{number:04d}" for number in range(200)]
    found = [
        each.name for each in copy_files(Names(*names), tmp_path) if isinstance(each, OutputEntry)
    ]
    assert found == names


def test_folders_deeper_than_pythons_stack_are_copied(tmp_path: Path) -> None:
    source, dest, name = tmp_path / "output", tmp_path / "dest", "d/" * 1300 + "f"
    at = str(source)
    for part in ("", *name.split("/")[:-1]):
        at = os.path.join(at, part)
        os.mkdir(at)
    Path(source, name).write_text("x")
    try:
        assert copied(FolderOutputs(source), dest) == CopiedOutputs(1, 1)
        assert copied(FolderOutputs(source), dest) == CopiedOutputs(0, 0, 1)
        assert (dest / name).read_text() == "x"
        assert (
            "the path is too long" in copied(FolderOutputs(source), dest / ("e/" * 800)).left_out[0]
        )
    finally:  # who tidies up calls itself, too
        subprocess.run(["rm", "-r", source, dest], check=True)
