"""The workspace as commands have it: where things go, what is said, what may be deleted."""

import json
import os
import shutil
from pathlib import Path

import pytest

from batchml.errors import NotFound, TransferFailed, UsageError
from batchml.local.deletion_guard import NAMES, delete_data, describe_losses, find_losses
from batchml.local.home import Home
from batchml.model.environment import TransferStatus, ignore_progress, relative_path
from batchml.runtime.transfer.archives import FolderArchive
from batchml.runtime.transfer.parallel import TransferProgress
from batchml.workspace.base import plan_copies, pull_target
from batchml.workspace.commands import TransferDisplay, progress_line
from batchml.workspace.local import LocalWorkspace
from tests.support.fakes import FakeClock
from tests.support.trees import Node, file, make, seen

HOUR = 3600.0


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return make(
        tmp_path / "here", {b"data/a": file("aa"), b"data/in/b": file("b"), b"f": file("f")}
    )


@pytest.fixture
def workspace(home: Home, here: Path) -> LocalWorkspace:
    return LocalWorkspace(home.root, here)


def names(found: LocalWorkspace, path: str = "") -> list[str]:
    return [entry.path for entry in found.ls(path, deep=True) if entry.kind != "folder"]


@pytest.mark.parametrize(
    ("path", "found"),
    [("", ""), (".", ""), ("/", ""), ("/workspace", ""), ("/workspace/a/", "a"),
     ("a//b/./c", "a/b/c"), ("workspace/a", "workspace/a"), ("./-x", "-x")],
)  # fmt: skip
def test_a_path_is_below_the_workspace(path: str, found: str) -> None:
    assert relative_path(path) == found


@pytest.mark.parametrize(
    "path", ["..", "a/../..", "/etc", "/workspaces/a", "/workspace/../x", "a\0"]
)
def test_a_path_that_leads_out_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match=r"leads out of the workspace|is not in the workspace"):
        relative_path(path)


@pytest.mark.parametrize(
    ("sources", "dest", "found"),
    [
        (["data"], "", ["data"]),
        (["data"], "sets", ["sets"]),
        (["data"], "sets/", ["sets/data"]),
        (["data/", "f"], "sets", ["sets/data", "sets/f"]),
        (["f"], "there", ["there/f"]),
        (["f"], "new", ["new"]),
        (["data/in/.."], "", ["data"]),
    ],
)
def test_what_is_pushed_goes_to_the_same_place_every_time(
    here: Path, sources: list[str], dest: str, found: list[str]
) -> None:
    made = plan_copies(
        [here / source for source in sources], dest, lambda name: name in ("there", "sets")
    )
    assert [way.name for way in made] == found


def test_all_that_cannot_be_pushed_is_told_at_once(here: Path) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(UsageError) as told:
        plan_copies(
            [here / "no", here / "pipe", here / "f", here / "data/../f"], "", lambda _: False
        )
    assert str(told.value).count("\n  - ") == 3
    for words in ("no does not exist", "neither a file nor a folder", "would become f"):
        assert words in str(told.value)


def test_what_is_pulled_goes_to_the_same_place_every_time(here: Path) -> None:
    assert pull_target("sets/a", True, None, here) == here / "a"
    assert pull_target("", True, None, here) == here / "workspace"
    assert pull_target("sets/a", True, Path("data"), here) == here / "data"
    assert pull_target("sets/a", False, Path("data"), here) == here / "data/a"
    assert pull_target("sets/a", False, Path("new"), here) == here / "new"


def test_push_ls_pull_archive_restore(workspace: LocalWorkspace, here: Path, home: Home) -> None:
    pushed = workspace.push([Path("data"), Path("f")], "sets/", ignore_progress)
    assert (pushed.files, pushed.size, pushed.is_complete) == (3, 4, True)
    assert names(workspace) == ["sets/data/a", "sets/data/in/b", "sets/f"]
    assert [entry.path for entry in workspace.ls("/workspace/sets")] == ["sets/data", "sets/f"]
    assert [entry.path for entry in workspace.ls(f"{home.root}/workspace/sets/f")] == ["sets/f"]
    assert workspace.push([Path("data")], "sets/", ignore_progress).unchanged == 2
    assert workspace.pull("sets", None, ignore_progress).location == str(here / "sets")
    assert seen(here / "sets/data").keys() == seen(here / "data").keys()
    assert workspace.pull("sets/f", Path("g"), ignore_progress).files == 1
    assert (here / "g").read_text() == "f" and not (here / ".batchml-parts").exists()
    with pytest.raises(NotFound, match="'none' does not exist"):
        workspace.ls("none")
    with pytest.raises(NotFound):
        workspace.pull("none", None, ignore_progress)
    with pytest.raises(TransferFailed, match="there is no archive"):
        workspace.restore("", ignore_progress)
    done = workspace.archive("", ignore_progress, delete=True)
    assert (done.removed, done.location) == (3, str(home.root / "archive"))
    assert names(workspace) == []
    assert workspace.restore("", ignore_progress).files == 3
    assert workspace.archive("../elsewhere", ignore_progress).files == 3
    with pytest.raises(UsageError, match="contain each other"):
        workspace.archive(f"{home.root}/workspace/archive", ignore_progress)
    with pytest.raises(UsageError, match="an archive is a folder"):
        workspace.archive("gs://x", ignore_progress)


def test_links_in_paths_are_followed_as_long_as_they_stay_inside(
    workspace: LocalWorkspace, home: Home, here: Path
) -> None:
    make(home.root / "workspace", {b"runs/5/f": file("five"), b"last": Node("link", b"runs/5"),
                                   b"out": Node("link", os.fsencode(here))})  # fmt: skip
    assert names(workspace, "last") == ["runs/5/f"]
    workspace.pull("last", None, ignore_progress)
    assert (here / "last/f").read_text() == "five"
    for path in ("out", "out/f", "last/../../../f"):
        with pytest.raises(UsageError, match="leads out of the workspace"):
            workspace.ls(path)
    with pytest.raises(UsageError, match="leads out"):
        workspace.push([Path("f")], "out/x", ignore_progress)
    assert workspace.ls()[1].kind == "link"


def test_nobodys_workspace_is_pushed_into_itself_or_freed_under_a_run(
    home: Home, here: Path
) -> None:
    workspace = LocalWorkspace(home.root, here, lambda: 2)
    with pytest.raises(UsageError, match="contains the workspace itself"):
        workspace.push([home.root], "", ignore_progress)
    with pytest.raises(UsageError, match="2 runs are using"):
        workspace.archive("", ignore_progress, delete=True)


def test_what_is_freed_is_freed_under_no_run_that_began_meanwhile(home: Home, here: Path) -> None:
    at_work = iter([0, 1])
    workspace = LocalWorkspace(home.root, here, lambda: next(at_work))
    top = make(home.root / "workspace", {b"x": file()})
    with pytest.raises(UsageError, match="all files are archived, and nothing was freed"):
        workspace.archive("", ignore_progress, delete=True)
    assert (top / "x").exists()


def test_what_is_removed_is_what_is_named(
    workspace: LocalWorkspace, home: Home, here: Path
) -> None:
    top = make(home.root / "workspace", {
        b"d/in/x": file(), b"d/y": file(), b"d/out": Node("link", bytes(here)), b"keep": file(),
        b"l": Node("link", b"d"), b"shut/x": file(), b"e": Node("folder", mode=0o755),
    })  # fmt: skip
    done = workspace.remove(
        ["/workspace/l", f"{home.root}/workspace/d/in", "nothing"], ignore_progress
    )
    assert (done.removed, done.missing) == (2, ("nothing: No such file or directory",))
    assert workspace.remove(["d", "e", "shut/"], ignore_progress).removed == 3
    assert os.listdir(top) == ["keep"] and (here / "f").exists()
    assert workspace.remove([""], ignore_progress).missing == (
        ".: it is not a path in the workspace",
    )
    (top / "out").symlink_to(here)
    for path in ("../x", "out/f"):
        with pytest.raises(UsageError, match="leads out"):
            workspace.remove([path], ignore_progress)


def test_data_is_deleted_where_an_archive_has_it(home: Home, workspace: LocalWorkspace) -> None:
    make(home.root / "workspace", {b"a/x": file(), b"e": Node("folder", mode=0o555)})
    store = FolderArchive(workspace.default_archive)
    (loss,) = find_losses(home, store)
    assert (loss.files, loss.why) == (("a/x: it is not in the archive",), "there is no archive")
    workspace.archive("", ignore_progress)
    assert find_losses(home, store) == []
    make(home.root / "workspace", {b"new": file(), b"a/x": file("other")})
    (loss,) = find_losses(home, store)
    assert loss.files == ("a/x: it has changed since", "new: it is not in the archive")
    workspace.archive("", ignore_progress)
    Path(workspace.default_archive, "new").unlink()
    (loss,) = find_losses(home, store)
    assert loss.files == ("new: its file in the archive is gone",)
    workspace.archive("", ignore_progress)
    Path(workspace.default_archive, "new").write_bytes(b"y")
    assert find_losses(home, store) == []
    (loss,) = find_losses(home, store, TransferProgress())
    assert loss.files == ("new: its SHA-256 differs from when it was sent",)
    Path(workspace.default_archive, "new").unlink()
    make(home.root / "data", {b"mnist": file()})
    make(home.volumes, {b"fs-1/a": file()})
    assert describe_losses(find_losses(home, store), ["workspace"]) == [
        "data: 1 file would be lost, no archive holds data sets", "  mnist",
        "volumes: 1 file would be lost, no archive holds file systems of EFS", "  fs-1/a",
    ]  # fmt: skip
    workspace.archive("", ignore_progress)
    before = seen(home.root / "workspace")
    outside = home.root.parent / "outside"
    make(outside, {b"f": file()})
    (home.root / "data" / "link").symlink_to(outside)
    (home.root / "data" / "closed" / "in").mkdir(parents=True)
    (home.root / "data" / "closed").chmod(0)
    os.mkfifo(home.root / "data" / "pipe")
    delete_data(home, store)
    assert [os.listdir(home.root / name) for name in NAMES] == [[], [], []]
    assert os.listdir(outside) == ["f"]
    workspace.archive("", ignore_progress)  # of nothing: what was emptied comes back all the same
    workspace.restore("", ignore_progress)
    assert seen(home.root / "workspace") == before


def test_an_absolute_path_is_found_in_a_workspace_that_is_a_link(home: Home, here: Path) -> None:
    """Also if the name of the link's target begins the name of the link."""
    target = make(home.root / "work", {b"a": file("a")})
    (home.root / "workspace").symlink_to(target)
    workspace = LocalWorkspace(home.root, here)
    for root in (home.root / "workspace", target):
        assert names(workspace, str(root)) == ["a"]
        assert names(workspace, f"{root}/a") == ["a"]


def test_a_workspace_that_is_a_link_is_not_emptied(home: Home, here: Path) -> None:
    (home.root / "workspace").symlink_to(here)
    with pytest.raises(NotADirectoryError, match="its target is not deleted"):
        delete_data(home, FolderArchive(str(home.root / "archive")))
    assert (here / "f").exists()


def test_an_archive_whose_papers_are_gone_is_none(home: Home, workspace: LocalWorkspace) -> None:
    make(home.root / "workspace", {b"x": file()})
    workspace.archive("", ignore_progress)
    shutil.rmtree(home.root / "archive/.batchml")
    with pytest.raises(TransferFailed, match=r"archive: there is no archive\. Nothing was written"):
        workspace.restore("", ignore_progress)
    (loss,) = find_losses(home, FolderArchive(workspace.default_archive))
    assert loss.why == "there is no archive"
    paper = home.root / "archive/.batchml/archive/complete.json"
    paper.parent.mkdir(parents=True)
    paper.write_text(json.dumps({"format": 1}))
    assert "is damaged" in find_losses(home, FolderArchive(workspace.default_archive))[0].why


def test_a_line_of_progress_says_how_far_how_fast_and_how_long() -> None:
    now = TransferStatus("pushing", "sets/a.bin", 12, 40, 1 << 30, 4 << 30, 1 << 29)
    assert progress_line(now, 10.0, 100) == (
        "pushing 12/40 files  1.0 GiB of 4.0 GiB  25%  52 MiB/s  ~0:30 left  sets/a.bin"
    )
    assert progress_line(now, 1.0, 56) == "pushing 12/40 files  1.0 GiB of 4.0 GiB  25%"
    assert len(progress_line(now, 10.0, 84)) <= 84
    assert progress_line(TransferStatus("pulling", "", 0, 1), 9.0) == "pulling 0/1 files"
    done = TransferStatus("pulling", "", 1, 1, 5, 5)
    assert progress_line(done, HOUR) == "pulling 1/1 files  5 B of 5 B  100%"


def test_without_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock()
    shown = TransferDisplay(clock)
    for number in range(25):
        shown.print_sometimes(TransferStatus("pushing", "x", number, 25, number, 25))
        clock.sleep(1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:19] for line in lines] == ["pushing 10/25 files", "pushing 20/25 files"]
