"""What is remembered of generations, and when a program is given up."""

import os
from pathlib import Path

import pytest

from batchml.runtime.nodes.supervisor.restarts import (
    DONE,
    EXIT,
    HANG,
    KEPT,
    LOST,
    MEMORY,
    SIGNAL,
    STOPPED,
    CheckpointWatch,
    NewestCheckpoint,
    RestartHistory,
    RestartRecord,
    close_last,
    decide_end,
)
from batchml.runtime.protocol.exit_codes import CRASH_LOOP
from batchml.runtime.storage.files import write_atomically
from batchml.runtime.storage.folder import FolderStore


def past(*kinds: str, code: int = 1) -> list[RestartRecord]:
    return [RestartRecord(i, 1, kind, code, f"{kind}.") for i, kind in enumerate(kinds, 1)]


@pytest.mark.parametrize("kinds", [
    (EXIT,), (SIGNAL, SIGNAL), (EXIT, SIGNAL), (DONE, LOST, LOST),
    (STOPPED, STOPPED, STOPPED, LOST), (LOST, HANG, STOPPED),
])  # fmt: skip
def test_a_run_goes_on_while_it_may_yet_come_further(kinds: tuple[str, ...]) -> None:
    assert decide_end(past(*kinds), has_saved=False) is None


@pytest.mark.parametrize("kinds", [
    (SIGNAL, LOST, HANG), (EXIT, STOPPED, LOST, EXIT), (DONE, HANG, HANG, HANG),
])  # fmt: skip
def test_the_third_in_a_row_without_a_checkpoint_is_the_last(kinds: tuple[str, ...]) -> None:
    found = decide_end(past(*kinds), has_saved=False)
    assert found is not None and (found.code, found.by_runtime) == (CRASH_LOOP, True)
    assert found.why.endswith(f"The last of them: {kinds[-1]}.")


def test_a_program_that_never_saved_and_fails_alike_twice_ends_with_its_own_code() -> None:
    found = decide_end(past(EXIT, EXIT, code=3), has_saved=False)
    assert found is not None and (found.code, found.by_runtime) == (3, False)
    assert decide_end(past(EXIT, EXIT, code=3), has_saved=True) is None
    assert (
        decide_end([RestartRecord(1, 1, EXIT, 3), RestartRecord(2, 1, EXIT, 4)], has_saved=False)
        is None
    )
    assert (
        decide_end(
            [RestartRecord(1, 1, EXIT, 3, "", True), RestartRecord(2, 1, EXIT, 3)], has_saved=False
        )
        is None
    )


@pytest.mark.parametrize(("kinds", "has_saved"), [
    ((MEMORY, MEMORY), False), ((MEMORY, MEMORY, MEMORY), True), ((LOST, EXIT, MEMORY), True),
])  # fmt: skip
def test_a_program_that_lacks_memory_ends_as_one_that_is_killed_for_it(
    kinds: tuple[str, ...], has_saved: bool
) -> None:
    found = decide_end(past(*kinds, code=-9), has_saved)
    assert found is not None and (found.code, found.by_runtime) == (-9, False)
    assert decide_end(past(*kinds, code=-9)[:-1], has_saved) is None


def test_a_generation_whose_main_node_was_lost_counts_as_lost() -> None:
    assert close_last([RestartRecord(1, 1)], progressed=False)[-1].kind == LOST
    assert decide_end(close_last([*past(LOST, LOST), RestartRecord(3, 3)], False), True) is not None
    assert decide_end(close_last([*past(LOST, LOST), RestartRecord(3, 3)], True), True) is None
    assert close_last(past(DONE), True) == tuple(past(DONE))


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_the_history_outlives_the_attempt_and_stays_short(tmp_path: Path, kind: str) -> None:
    store = FolderStore(str(tmp_path / "store")) if kind == "store" else None
    history = RestartHistory(store, str(tmp_path))
    assert history.read() == ((), NewestCheckpoint())
    many = past(*[LOST] * (KEPT + 5))
    history.write(many, NewestCheckpoint(7))
    assert RestartHistory(store, str(tmp_path)).read() == (tuple(many[5:]), NewestCheckpoint(7))


def test_a_history_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    for text in ("", "[]", '{"past": [{"what": 1}]}', '{"past": 3}', "\xff"):
        (tmp_path / ".batchml-generations.json").write_text(text, "latin-1")
        assert RestartHistory(None, str(tmp_path)).read() == ((), NewestCheckpoint())


def test_a_plain_file_that_changed_is_progress(tmp_path: Path) -> None:
    """One that only has another time was brought back from a store, or saved as it was."""
    looker = CheckpointWatch(str(tmp_path))
    assert (
        not looker.newest()
        and not CheckpointWatch("").newest()
        and not CheckpointWatch("/none").newest()
    )
    write_atomically(str(tmp_path / ".batchml-generations.json"), b"{}")
    assert not looker.newest(), "ours is none of the program's"
    path = tmp_path / "deep" / "snapshot.pt"
    path.parent.mkdir()
    path.write_bytes(bytes(1 << 20))
    first = looker.newest()
    assert first.is_after(NewestCheckpoint()) and not first.is_after(first)
    os.utime(path, ns=(1, 1))
    assert looker.newest() == CheckpointWatch(str(tmp_path)).newest() == first
    for name in (".saving-7-1.1-2-ab", ".removing-step-0000000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text("of a save that was killed, which saved nothing")
    assert looker.newest() == first
    path.write_bytes(bytes((1 << 20) - 1) + b"1")
    assert looker.newest().is_after(first)


def test_steps_are_compared_as_numbers() -> None:
    assert NewestCheckpoint(100).is_after(NewestCheckpoint(20)) and not NewestCheckpoint(
        20
    ).is_after(NewestCheckpoint(100))
    assert NewestCheckpoint(0).is_after(NewestCheckpoint())
    assert not NewestCheckpoint().is_after(NewestCheckpoint(3))
