"""Checkpoints: whole or not there, the newest that is whole, one generation at a time."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.runtime import checkpoint
from batchml.runtime.checkpoint.layout import (
    FENCE,
    CheckpointName,
    FenceTerm,
    claim_folder,
    find_damage,
    list_checkpoints,
    select_old,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder for checkpoints."""
    made = tmp_path / "checkpoint"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "BATCHML_GENERATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATCHML_CHECKPOINT_DIR", str(made))
    monkeypatch.setenv("BATCHML_RUN", "job")
    monkeypatch.setenv("BATCHML_ATTEMPT", "1")
    return made


def wrote(text: str) -> Callable[[str], None]:
    """A writer of two files, one of them in a folder."""

    def write(path: str) -> None:
        Path(path, "deep").mkdir()
        Path(path, "deep", "model").write_text(text)
        Path(path, "optimizer").write_bytes(bytes(1000))

    return write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != FENCE)


def loaded(folder: Path) -> str:
    found = checkpoint.newest(str(folder))
    assert found is not None
    return Path(found.path, "deep", "model").read_text()


def test_what_was_saved_last_is_what_is_loaded(folder: Path) -> None:
    assert checkpoint.newest() is None
    for step in (5, 10, 100):
        assert checkpoint.save(wrote(f"after {step}"), step)
        assert checkpoint.newest() == (str(folder / f"step-{step:010d}"), step)
        assert checkpoint.newest_step(str(folder)) == step
        assert loaded(folder) == f"after {step}"
    assert names(folder) == ["step-0000000010", "step-0000000100"]


def test_the_manifest_says_who_saved_what(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHML_GENERATION", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    checkpoint.save(wrote("x"), 7)
    told = json.loads((folder / "step-0000000007" / "MANIFEST.json").read_text())
    assert (told["run"], told["attempt"], told["generation"]) == ("job", 1, 3)
    assert (told["step"], told["world"]) == (7, 8)
    assert sorted(told["files"]) == ["deep/model", "optimizer"]
    assert told["files"]["optimizer"]["size"] == 1000


def test_numbers_are_compared_as_numbers(folder: Path) -> None:
    """A program, or a person, may have named some with fewer digits."""
    checkpoint.save(wrote("a"), 9)
    checkpoint.save(wrote("b"), 10, keep=5)
    (folder / "step-0000000009").rename(folder / "step-9")
    assert [each.step for each in list_checkpoints(str(folder))] == [10, 9]


def test_a_step_that_is_saved_again_is_never_missing_meanwhile(folder: Path) -> None:
    checkpoint.save(wrote("first"), 5)
    checkpoint.save(wrote("again"), 5)
    assert names(folder) == ["step-0000000005.1"]
    assert loaded(folder) == "again"


def test_outside_a_run_they_are_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATCHML_CHECKPOINT_DIR", "BATCHML_RUN", "BATCHML_ATTEMPT"):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    assert checkpoint.save(wrote("x"), 1)
    assert checkpoint.newest() == (str(tmp_path / "checkpoints" / "step-0000000001"), 1)


# --- damage -------------------------------------------------------------------------------------


def damages(path: Path) -> Iterator[tuple[str, Path, bytes | None]]:
    """Every file of a checkpoint missing (None), cut, flipped in a bit, or grown."""
    for file in sorted(path.rglob("*")):
        if file.is_file():
            data, name = file.read_bytes(), file.relative_to(path)
            yield f"{name} missing", file, None
            yield f"{name} grown", file, data + b"x"
            yield f"{name} flipped", file, bytes([data[0] ^ 1]) + data[1:]
            for percent in range(0, 100, 10):
                yield f"{name} cut at {percent} %", file, data[: len(data) * percent // 100]


def test_the_newest_that_is_unharmed_is_loaded_and_the_others_are_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """C2: each file missing, cut at every tenth, changed in one bit, or longer."""
    checkpoint.save(wrote("old"), 1)
    checkpoint.save(wrote("new"), 2)
    new = folder / "step-0000000002"
    tried = list(damages(new))
    assert len(tried) == 3 * 13
    for what, path, damaged in tried:
        whole = path.read_bytes()
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        assert loaded(folder) == "old", what
        assert f"{new} is skipped: " in capfd.readouterr().err, what
        path.write_bytes(whole)
    assert loaded(folder) == "new"


def test_no_byte_of_a_manifest_can_change_unseen(folder: Path) -> None:
    """Or it changes what nothing depends on: who saved it, and when."""
    checkpoint.save(wrote("x"), 3)
    path = folder / "step-0000000003"
    data = bytearray((path / "MANIFEST.json").read_bytes())
    told = json.loads(data)
    for place in range(0, len(data), 3):
        data[place] ^= 1
        (path / "MANIFEST.json").write_bytes(data)
        if not find_damage(str(path), 3):
            changed = json.loads(data)
            assert (changed["files"], changed["step"]) == (told["files"], 3)
        data[place] ^= 1


def test_what_is_damaged_goes_first_and_never_the_newest_that_is_whole(folder: Path) -> None:
    checkpoint.save(wrote("whole"), 10)
    checkpoint.save(wrote("damaged"), 20)
    (folder / "step-0000000020" / "optimizer").write_bytes(b"\1" * 1000)
    assert loaded(folder) == "whole"
    checkpoint.save(wrote("after"), 15)
    assert names(folder) == ["step-0000000010", "step-0000000015"]


def test_what_was_left_half_done_is_no_checkpoint_and_goes_with_the_next_save(
    folder: Path,
) -> None:
    checkpoint.save(wrote("x"), 1)
    for name in (".saving-2-1.0-999999999-abcd", ".saving-2-0.9-1-abcd", ".removing-ab-step-1"):
        (folder / name).mkdir()
    (folder / "step-0000000009").mkdir()
    assert checkpoint.newest_step(str(folder)) == 1
    checkpoint.save(wrote("y"), 2)
    assert names(folder) == ["step-0000000001", "step-0000000002"]


ENTRIES = st.lists(
    st.builds(lambda step, version: CheckpointName(step, version, f"{step}.{version}"),
              st.integers(0, 5), st.integers(0, 2)), unique=True, min_size=1,
)  # fmt: skip


@settings(max_examples=50)
@given(ENTRIES, st.data())
def test_of_those_that_are_whole_the_newest_stay(
    found: list[CheckpointName], data: st.DataObject
) -> None:
    whole = data.draw(st.sets(st.sampled_from([each.name for each in found]), min_size=1))
    new = data.draw(st.sampled_from(sorted(whole)))
    keep = data.draw(st.integers(1, 3))
    gone = select_old(found, whole, keep, new)
    stays = [each for each in sorted(found) if each.name not in gone]
    newest = max(each for each in found if each.name in whole)
    assert new not in gone
    assert newest in stays
    assert len(stays) <= keep + 1
    assert len({each.step for each in stays if each.name != new}) >= len(stays) - 1


# --- failures -----------------------------------------------------------------------------------


def full(path: str) -> None:
    Path(path, "half").write_text("x")
    raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_once_and_the_old_checkpoint_stands(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint.save(wrote("old"), 10)
    for step in (20, 30):
        assert not checkpoint.save(full, step)
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "the checkpoint of step 20 was not saved: [Errno 28] No space left on device" in told
    assert "the checkpoint of step 10 is kept" in told
    assert names(folder) == ["step-0000000010"]
    assert loaded(folder) == "old"
    assert checkpoint.save(wrote("new"), 40)
    assert "saving works again: the checkpoint of step 40 was saved" in capfd.readouterr().err


def test_what_a_framework_says_of_a_full_disk_is_no_end_of_the_training() -> None:
    class CheckpointException(BaseException):
        """torch.distributed.checkpoint's."""

    for error in (RuntimeError("file write failed"), CheckpointException("rank 1"), MemoryError()):

        def write(_: str, error: BaseException = error) -> None:
            raise error

        assert not checkpoint.save(write, 1)


@pytest.mark.parametrize("error", [TypeError("a dict"), KeyError("model"), KeyboardInterrupt()])
def test_a_mistake_in_the_program_is_the_programs(folder: Path, error: BaseException) -> None:
    def write(_: str) -> None:
        raise error

    with pytest.raises(type(error)):
        checkpoint.save(write, 1)
    assert names(folder) == []


def test_a_writer_that_writes_elsewhere_is_told_of() -> None:
    with pytest.raises(ValueError, match="wrote no file into the folder"):
        checkpoint.save(lambda _: None, 1)


def test_a_folder_that_cannot_be_made_fails_the_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHML_CHECKPOINT_DIR", str(tmp_path / "file" / "below"))
    assert not checkpoint.save(wrote("x"), 1)
    assert checkpoint.newest() is None


# --- ranks and generations ----------------------------------------------------------------------


def test_of_several_ranks_the_first_saves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert checkpoint.save(full, 1)
    assert not folder.exists()
    assert checkpoint.save(wrote("its own"), 1, folder=str(folder / "mine"))


def test_a_generation_that_should_have_ended_saves_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A4: it was cut off from the others, and lives. From the first look of its successor on."""
    checkpoint.save(wrote("old"), 10)
    monkeypatch.setenv("BATCHML_GENERATION", "1")
    checkpoint.newest()  # the next generation begins
    monkeypatch.setenv("BATCHML_GENERATION", "0")
    assert not checkpoint.save(wrote("zombie"), 20)
    assert "attempt 1, generation 1 of run job saves here now" in capfd.readouterr().err
    assert loaded(folder) == "old"
    for attempt, generation in ((1, 1), (1, 2), (2, 0)):
        monkeypatch.setenv("BATCHML_ATTEMPT", str(attempt))
        monkeypatch.setenv("BATCHML_GENERATION", str(generation))
        assert checkpoint.save(wrote(f"{attempt}.{generation}"), 30 + generation)


def test_it_is_looked_at_again_right_before_the_name_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: str) -> None:
        wrote("slow")(path)
        monkeypatch.setenv("BATCHML_ATTEMPT", "2")
        checkpoint.newest()

    assert not checkpoint.save(slow, 5)
    assert names(folder) == []


def test_who_only_looks_elsewhere_takes_nothing_over(folder: Path, tmp_path: Path) -> None:
    other = str(tmp_path / "other run")
    checkpoint.save(wrote("x"), 1, folder=other)
    (Path(other) / FENCE).unlink()
    checkpoint.newest(other)
    assert not (Path(other) / FENCE).exists()


def test_of_two_jobs_the_one_that_began_later_saves(tmp_path: Path) -> None:
    """A run that goes on as another job, or the waves of a sweep: attempts say nothing there."""
    first, second = FenceTerm("a", 9, 4, began=100.0), FenceTerm("b", 1, 0, began=200.0)
    where = str(tmp_path)
    assert claim_folder(where, first) == ""
    assert claim_folder(where, second) == ""
    assert "run b saves here" in claim_folder(where, first)


def test_a_fence_that_is_not_ours_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FENCE).write_text("[]")
    assert claim_folder(str(tmp_path), FenceTerm("a", 1, 0)) == ""
    assert json.loads((tmp_path / FENCE).read_text())["run"] == "a"


def test_who_runs_is_read_from_the_environment() -> None:
    environ = {"AWS_BATCH_JOB_ID": "j#1", "AWS_BATCH_JOB_ATTEMPT": "3", "BATCHML_GENERATION": "2"}
    assert FenceTerm.read(environ)[:3] == ("j", 3, 2)
    assert FenceTerm.read({"BATCHML_GENERATION": "x"})[:3] == ("", 1, 0)
    assert FenceTerm.read(os.environ)[:3] == ("job", 1, 0)
