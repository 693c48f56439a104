"""A checkpoint of many ranks: there once every part is, or not at all. Ranks are threads here."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event

import pytest

from batchml.runtime import checkpoint
from batchml.runtime.checkpoint.layout import FenceTerm, claim_folder
from batchml.runtime.checkpoint.sharded import KEPT_APART, ShardedSave, are_apart, launch_of
from tests.support.fakes import FakeClock

Writer = Callable[[int, Path], object]
TERM = FenceTerm("job", 1, 0)


def part(rank: int, path: Path) -> None:
    (path / f"part-{rank}").write_text(f"of rank {rank}" * 100)


def save(folder: Path, writer: Writer = part, world: int = 4, call: int = 1) -> list[object]:
    """What each rank hears: empty, why not, or what was raised."""

    def one(rank: int) -> object:
        shards = ShardedSave(str(folder), TERM, 7, rank, world, 60.0, f"launch.{call}")
        try:
            return shards.save(lambda path: writer(rank, Path(path)), 2)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_all_parts_are_one_checkpoint(tmp_path: Path) -> None:
    assert save(tmp_path) == ["", "", "", ""]
    found = checkpoint.newest(str(tmp_path))
    assert found is not None
    assert sorted(os.listdir(found.path)) == ["MANIFEST.json", *(f"part-{r}" for r in range(4))]


def test_a_rank_may_write_nothing_or_much(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint does: its coordinator writes more, in folders, too."""

    def write(rank: int, path: Path) -> None:
        if rank == 2:
            (path / "deep").mkdir()
            for number in range(9):
                (path / "deep" / f"{number}.distcp").write_bytes(os.urandom(100))

    assert save(tmp_path, write) == ["", "", "", ""]
    assert checkpoint.newest_step(str(tmp_path)) == 7


def test_a_file_that_another_rank_is_about_to_rename_does_no_harm(tmp_path: Path) -> None:
    first_is_done = Event()

    def write(rank: int, path: Path) -> None:
        if rank == 1:
            (path / "part-1.tmp").write_text("x")
            meet.wait()
            assert first_is_done.wait(30)
            (path / "part-1.tmp").rename(path / "part-1")
        else:
            meet.wait()

    meet = Barrier(2)

    def tell(shards: ShardedSave, rank: int) -> str:
        return shards.save(lambda path: write(rank, Path(path)), 2)

    class First(ShardedSave):
        def _sync_files(self) -> list[str]:
            names = super()._sync_files()
            first_is_done.set()
            return names

    kinds = (First, ShardedSave)
    made = [kinds[r](str(tmp_path), TERM, 7, r, 2, 60.0, "launch.1") for r in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(tell, made, range(2))) == ["", ""]
    found = checkpoint.newest(str(tmp_path))
    assert found is not None
    assert sorted(os.listdir(found.path)) == ["MANIFEST.json", "part-1"]


@pytest.mark.parametrize("bad", [0, 3])
def test_where_one_part_fails_no_rank_has_saved(tmp_path: Path, bad: int) -> None:
    """And nobody waits: it is told by a rename, which needs no room on a full disk."""

    def write(rank: int, path: Path) -> None:
        part(rank, path)
        if rank == bad:
            raise OSError(28, "No space left on device")

    began = time.monotonic()
    told = save(tmp_path, write)
    assert time.monotonic() - began < 30  # not the limit of a minute
    assert isinstance(told.pop(bad), OSError)
    assert told == [f"rank {bad} could not write its part"] * 3
    assert visible(tmp_path) == []
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert not [name for name in left if name.startswith("part-")], "the room is free again"
    assert save(tmp_path, call=2) == ["", "", "", ""]


def test_no_part_at_all_is_the_programs_mistake(tmp_path: Path) -> None:
    told = save(tmp_path, lambda rank, path: None, world=2)
    assert isinstance(told[0], ValueError)
    assert told[1] == "rank 0 could not write its part"


def test_a_generation_that_should_have_ended_commits_nothing(tmp_path: Path) -> None:
    def write(rank: int, path: Path) -> None:
        part(rank, path)
        if rank == 0:
            claim_folder(str(tmp_path), FenceTerm("job", 1, 1))

    told = save(tmp_path, write, world=2)
    assert "generation 1 of run job saves here now" in str(told[0])
    assert visible(tmp_path) == []


def test_a_rank_that_is_gone_is_waited_for_so_long_and_named(tmp_path: Path) -> None:
    clock = FakeClock()
    shards = ShardedSave(
        str(tmp_path), TERM, 7, 0, 3, 60.0, "launch.1", clock=clock.monotonic, sleep=clock.sleep
    )
    assert shards.save(lambda path: part(0, Path(path)), 2) == (
        "no sign of rank 1, 2 for 60 seconds"
    )
    assert 60 <= sum(clock.naps) < 62


def test_two_launches_never_meet_in_one_folder() -> None:
    first = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
    names = {
        launch_of(first, 1), launch_of(first, 2), launch_of({**first, "MASTER_PORT": "4001"}, 1),
        launch_of({**first, "TORCHELASTIC_RESTART_COUNT": "1"}, 1),
    }  # fmt: skip
    assert len(names) == 4


def test_nodes_without_a_common_folder_are_refused_at_once(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert not are_apart(folder, 4, {"LOCAL_WORLD_SIZE": "2"})
    (tmp_path / KEPT_APART).write_text("")
    assert are_apart(folder, 4, {"LOCAL_WORLD_SIZE": "2"})
    assert not are_apart(folder, 4, {"LOCAL_WORLD_SIZE": "4"})
    assert not are_apart(folder, 4, {})


def test_it_is_called_as_a_function_in_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHML_CHECKPOINT_DIR", str(tmp_path))
    assert checkpoint.save_shards(lambda path: part(0, Path(path)), 3, 0, 1)
    assert checkpoint.newest_step(str(tmp_path)) == 3
