"""What TensorBoard is given of runs that go on."""

import fcntl
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import UsageError
from batchml.runs.metrics.event_files import file_header, session_start
from batchml.runs.outputs import OutputEntry, Unreadable
from batchml.runs.watch.events import LogOpened, MetricsReported, OutputLine, RunEvent
from batchml.sessions.commands.tensorboard import _workspace_folders as workspaces
from batchml.sessions.tensorboard.data import (
    CurveWriter,
    PointBuffer,
    append_new,
    event_files,
    fetch_files,
    folder_for,
    link_file,
    local_event_files,
    safe_name,
    scratch_folder,
    show_folder,
)
from tests.support.fakes import FakeClock


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
def context(tmp_path: Path) -> Context:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return Context(
        load_settings({"BATCHML_HOME": str(folder)}, tmp_path, None), FakeClock(), tmp_path
    )


# --- curves ---------------------------------------------------------------------------------------


def fed(points: PointBuffer, *happenings: RunEvent) -> None:
    for _ in points.watch(iter(happenings)):
        pass


def test_points_come_once_by_child_and_a_new_attempt_goes_back() -> None:
    points = PointBuffer({"loss": r"loss=(\S+)"}, lambda: 7.0)
    fed(points, LogOpened("s", 1), OutputLine(2000, "loss=0.5"), OutputLine(3000, "loss=0.25", "3"))
    first = points.take_records()
    assert sorted(first) == ["", "3"]
    assert struct.pack("<d", 2.0) in first[""]
    assert points.take_records() == {}
    fed(points, MetricsReported("s", ({"step": 5, "acc": 0.1}, {"step": 9, "acc": 0.2})))
    assert points.take_records()[""].count(b"acc") == 2
    fed(points, LogOpened("t", 2), MetricsReported("t", ({"step": 5, "acc": 0.3},)))
    assert points.take_records()[""].startswith(session_start(5, 7.0))
    fed(points, LogOpened("u", 3), MetricsReported("u", ({"step": 6, "acc": 0.3},)))
    assert b"acc" in points.take_records()[""]


def test_curves_are_added_to_the_file_that_is_being_read(tmp_path: Path) -> None:
    clock = FakeClock(50.0)
    points = PointBuffer({}, clock.now)
    curves = CurveWriter(tmp_path / "mine", points, clock.now)
    curves.write()
    assert not (tmp_path / "mine").exists()
    fed(points, MetricsReported("s", ({"step": 1, "acc": 0.1},)))
    curves.write()
    (path,) = (tmp_path / "mine").iterdir()
    inode = path.stat().st_ino
    fed(
        points,
        MetricsReported("s", ({"step": 2, "acc": 0.2},)),
        MetricsReported("c", ({"x": 1.0},), "4"),
    )
    clock.sleep(100)
    curves.write()
    assert path.stat().st_ino == inode
    assert len(events(path)) == 4
    assert len(events(next((tmp_path / "mine" / "4").iterdir()))) == 3


# --- event files ----------------------------------------------------------------------------------


def test_event_files_of_this_machine_are_linked_and_so_are_a_childs(
    context: Context, tmp_path: Path
) -> None:
    def wrote(*parts: str) -> Path:
        path = context.home.runs.joinpath(*parts, "events.out.tfevents.1.x")
        path.parent.mkdir(parents=True)
        path.write_bytes(file_header(1.0))
        return path

    source = wrote("id", "output", "tb")
    wrote("id", "output", "lightning", "version_0")
    wrote("id", "checkpoints")
    wrote("id:3", "output", "tb")
    wrote("idx", "output")  # of another run
    (context.home.runs / "id" / "output" / "model.pt").touch()
    (context.home.runs / "id" / "output" / "loop").symlink_to(context.home.runs)
    found = list(local_event_files(context, "id"))
    assert sorted(each.folder for each in found) == [
        "3/tb", "checkpoints/", "lightning/version_0", "tb",
    ]  # fmt: skip
    assert all(link_file(each, tmp_path / "logs") for each in found)
    assert not any(link_file(each, tmp_path / "logs") for each in found)
    assert (tmp_path / "logs" / "tb" / source.name).resolve() == source
    assert folder_for("outputs", "") == "outputs"  # the run's own folder is for its metrics


class InBucket:
    def __init__(self, **files: bytes) -> None:
        self.files = {name.replace("__", "/"): data for name, data in files.items()}
        self.fetched: list[str] = []
        self.left_out: list[str] = []

    def entries(self) -> Iterator[OutputEntry]:
        return (OutputEntry(name, len(data), 0) for name, data in self.files.items())

    def fetch(self, entry: OutputEntry, path: Path) -> None:
        self.fetched.append(entry.name)
        if not self.files[entry.name]:
            raise Unreadable("gone")
        path.write_bytes(self.files[entry.name])


def test_only_changed_event_files_are_fetched_and_what_is_new_is_added(tmp_path: Path) -> None:
    bucket = InBucket(tb__a_tfevents=b"one", model__pt=b"x", tfevents_top=b"", __up_tfevents=b"no")
    assert fetch_files(bucket, tmp_path) == 1
    path = tmp_path / "tb" / "a_tfevents"
    inode = path.stat().st_ino
    assert fetch_files(bucket, tmp_path) == 0
    bucket.files["tb/a_tfevents"] = b"one two"
    assert fetch_files(bucket, tmp_path) == 1
    assert (path.read_bytes(), path.stat().st_ino) == (b"one two", inode)
    assert bucket.fetched.count("tb/a_tfevents") == 2
    assert "model/pt" not in bucket.fetched and "/up_tfevents" not in bucket.fetched
    assert list(event_files(tmp_path)) == [path]  # nothing half fetched is left


def test_a_file_that_has_become_shorter_is_another(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"x")
    (tmp_path / "old").write_bytes(b"abc")
    assert append_new(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"x"


# --- the folder -----------------------------------------------------------------------------------


def test_the_folder_goes_with_the_command_and_so_do_those_of_killed_ones(context: Context) -> None:
    above = context.home.root / "tensorboard"
    with scratch_folder(context) as first, scratch_folder(context) as second:
        assert first.is_dir() and second.is_dir()  # one that is alive is left alone
        left = above / "runs-left"
        left.mkdir()
        (left / "link").symlink_to(context.home.root)
        (above / "runs-left.lock").touch()
        with scratch_folder(context):
            assert not left.exists()
        assert context.home.root.is_dir()
        with open(f"{first}.lock", encoding="ascii") as file, pytest.raises(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(above.iterdir()) == []


def test_a_folder_of_the_workspace_is_named_as_runs_see_it(
    context: Context, tmp_path: Path
) -> None:
    root = context.home.root / "workspace"
    (root / "mine" / "tb").mkdir(parents=True)
    (root / "mine" / "tb" / "tfevents.1").touch()
    both = workspaces(context, [Path("mine"), Path("/workspace/mine")])
    assert both == [(root / "mine").resolve()] * 2
    show_folder(both[0], root, tmp_path / "logs")
    assert (tmp_path / "logs" / "workspace" / "mine" / "tb" / "tfevents.1").is_symlink()
    for wrong in ("..", "/etc", "mine/none"):
        with pytest.raises(UsageError, match="has no such folder"):
            workspaces(context, [Path(wrong)])


def test_what_a_run_is_called_there_is_a_folder() -> None:
    assert safe_name("le net/..:3") == "le-net-..-3"
