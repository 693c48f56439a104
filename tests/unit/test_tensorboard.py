"""What TensorBoard is given of runs that go on."""

import fcntl
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.cli.tensorboard import _workspaces as workspaces
from batchml.client.place import Place
from batchml.client.tensorboard import (
    Curves,
    Points,
    append,
    event_files,
    fetch,
    files_here,
    folder_for,
    link,
    safe,
    scratch,
    show_folder,
)
from batchml.errors import UsageError
from batchml.ops.outputs import Entry, Unreadable
from batchml.ops.tensorboard import beginning, started
from batchml.ops.watch import Happening, Line, Measured, Opened
from batchml.settings import load_settings
from tests.fakes import FakeClock


def events(path: Path) -> list[bytes]:
    """The events of a file, whose frames are whole."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        assert len(data) >= 16 + length
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return Place(
        load_settings({"BATCHML_HOME": str(folder)}, tmp_path, None), FakeClock(), tmp_path
    )


# --- curves ---------------------------------------------------------------------------------------


def fed(points: Points, *happenings: Happening) -> None:
    for _ in points.watch(iter(happenings)):
        pass


def test_points_come_once_by_child_and_a_new_attempt_goes_back() -> None:
    points = Points({"loss": r"loss=(\S+)"}, lambda: 7.0)
    fed(points, Opened("s", 1), Line(2000, "loss=0.5"), Line(3000, "loss=0.25", "3"))
    first = points.taken()
    assert sorted(first) == ["", "3"]
    assert struct.pack("<d", 2.0) in first[""]
    assert points.taken() == {}
    fed(points, Measured("s", ({"step": 5, "acc": 0.1}, {"step": 9, "acc": 0.2})))
    assert points.taken()[""].count(b"acc") == 2
    fed(points, Opened("t", 2), Measured("t", ({"step": 5, "acc": 0.3},)))
    assert points.taken()[""].startswith(started(5, 7.0))
    fed(points, Opened("u", 3), Measured("u", ({"step": 6, "acc": 0.3},)))
    assert b"acc" in points.taken()[""]


def test_curves_are_added_to_the_file_that_is_being_read(tmp_path: Path) -> None:
    clock = FakeClock(50.0)
    points = Points({}, clock.now)
    curves = Curves(tmp_path / "mine", points, clock.now)
    curves.write()
    assert not (tmp_path / "mine").exists()
    fed(points, Measured("s", ({"step": 1, "acc": 0.1},)))
    curves.write()
    (path,) = (tmp_path / "mine").iterdir()
    inode = path.stat().st_ino
    fed(points, Measured("s", ({"step": 2, "acc": 0.2},)), Measured("c", ({"x": 1.0},), "4"))
    clock.sleep(100)
    curves.write()
    assert path.stat().st_ino == inode
    assert len(events(path)) == 4
    assert len(events(next((tmp_path / "mine" / "4").iterdir()))) == 3


# --- event files ----------------------------------------------------------------------------------


def test_event_files_of_this_machine_are_linked_and_so_are_a_childs(
    place: Place, tmp_path: Path
) -> None:
    def wrote(*parts: str) -> Path:
        path = place.home.runs.joinpath(*parts, "events.out.tfevents.1.x")
        path.parent.mkdir(parents=True)
        path.write_bytes(beginning(1.0))
        return path

    source = wrote("id", "output", "tb")
    wrote("id", "output", "lightning", "version_0")
    wrote("id", "checkpoints")
    wrote("id:3", "output", "tb")
    wrote("idx", "output")  # of another run
    (place.home.runs / "id" / "output" / "model.pt").touch()
    (place.home.runs / "id" / "output" / "loop").symlink_to(place.home.runs)
    found = list(files_here(place, "id"))
    assert sorted(each.folder for each in found) == [
        "3/tb", "checkpoints/", "lightning/version_0", "tb",
    ]  # fmt: skip
    assert all(link(each, tmp_path / "logs") for each in found)
    assert not any(link(each, tmp_path / "logs") for each in found)
    assert (tmp_path / "logs" / "tb" / source.name).resolve() == source
    assert folder_for("outputs", "") == "outputs"  # the run's own folder is for its metrics


class InBucket:
    def __init__(self, **files: bytes) -> None:
        self.files = {name.replace("__", "/"): data for name, data in files.items()}
        self.fetched: list[str] = []

    def entries(self) -> Iterator[Entry]:
        return (Entry(name, len(data), 0) for name, data in self.files.items())

    def fetch(self, entry: Entry, path: Path) -> None:
        self.fetched.append(entry.name)
        if not self.files[entry.name]:
            raise Unreadable("gone")
        path.write_bytes(self.files[entry.name])


def test_only_changed_event_files_are_fetched_and_what_is_new_is_added(tmp_path: Path) -> None:
    bucket = InBucket(tb__a_tfevents=b"one", model__pt=b"x", tfevents_top=b"", __up_tfevents=b"no")
    assert fetch(bucket, tmp_path) == 1
    path = tmp_path / "tb" / "a_tfevents"
    inode = path.stat().st_ino
    assert fetch(bucket, tmp_path) == 0
    bucket.files["tb/a_tfevents"] = b"one two"
    assert fetch(bucket, tmp_path) == 1
    assert (path.read_bytes(), path.stat().st_ino) == (b"one two", inode)
    assert bucket.fetched.count("tb/a_tfevents") == 2
    assert "model/pt" not in bucket.fetched and "/up_tfevents" not in bucket.fetched
    assert list(event_files(tmp_path)) == [path]  # nothing half fetched is left


def test_a_file_that_has_become_shorter_is_another(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"x")
    (tmp_path / "old").write_bytes(b"abc")
    assert append(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"x"


# --- the folder -----------------------------------------------------------------------------------


def test_the_folder_goes_with_the_command_and_so_do_those_of_killed_ones(place: Place) -> None:
    above = place.home.root / "tensorboard"
    with scratch(place) as first, scratch(place) as second:
        assert first.is_dir() and second.is_dir()  # one that is alive is left alone
        left = above / "runs-left"
        left.mkdir()
        (left / "link").symlink_to(place.home.root)
        (above / "runs-left.lock").touch()
        with scratch(place):
            assert not left.exists()
        assert place.home.root.is_dir()
        with open(f"{first}.lock", encoding="ascii") as file, pytest.raises(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(above.iterdir()) == []


def test_a_folder_of_the_workspace_is_named_as_runs_see_it(place: Place, tmp_path: Path) -> None:
    root = place.home.root / "workspace"
    (root / "mine" / "tb").mkdir(parents=True)
    (root / "mine" / "tb" / "tfevents.1").touch()
    both = workspaces(place, [Path("mine"), Path("/workspace/mine")])
    assert both == [(root / "mine").resolve()] * 2
    show_folder(both[0], root, tmp_path / "logs")
    assert (tmp_path / "logs" / "workspace" / "mine" / "tb" / "tfevents.1").is_symlink()
    for wrong in ("..", "/etc", "mine/none"):
        with pytest.raises(UsageError, match="no such folder in the workspace"):
            workspaces(place, [Path(wrong)])


def test_what_a_run_is_called_there_is_a_folder() -> None:
    assert safe("le net/..:3") == "le-net-..-3"
