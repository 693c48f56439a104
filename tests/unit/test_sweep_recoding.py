"""Other code for a sweep that was started: what its waves run, and what people hear."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.client.place import Place
from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.reading import Wish
from batchml.client.sweeping.recoding import CODE, check_code, old_code, send_code, with_code
from batchml.client.sweeping.starting import make_ready
from batchml.errors import ConfigError, NotFound, UsageError
from batchml.runtime.storage.store import FolderStore
from tests.unit.test_sweep_starting import place as place


@pytest.fixture
def frozen(place: Place) -> Frozen:
    return make_ready(place, Wish(file="sweep.toml")).frozen


@pytest.fixture
def board(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "board"))


def mend(frozen: Frozen) -> None:
    (Path(frozen.folder) / "train.py").write_text("print('acc=2')\n")


def test_unchanged_code_is_run_and_nothing_is_said(
    place: Place, frozen: Frozen, board: FolderStore
) -> None:
    assert with_code(frozen, board).code == frozen.code
    assert old_code(place, frozen, board) == ""
    assert not send_code(place, frozen, board)


def test_other_code_is_run_once_it_was_sent(
    place: Place, frozen: Frozen, board: FolderStore
) -> None:
    mend(frozen)
    assert "differs now: --code sends it." in old_code(place, frozen, board)
    assert with_code(frozen, board).code == frozen.code, "not before somebody says so"
    assert send_code(place, frozen, board)
    code = with_code(frozen, board).code
    assert code != frozen.code and Path(code).is_file()
    assert old_code(place, frozen, board) == ""


@pytest.mark.parametrize("data", [b"", b"{", b'{"name": "../../etc/passwd", "at": 1}'])
def test_what_is_no_word_of_ours_changes_nothing(
    frozen: Frozen, board: FolderStore, data: bytes
) -> None:
    board.put(CODE, data)
    assert with_code(frozen, board).code == frozen.code


def test_code_that_cannot_be_sent_is_refused(
    place: Place, frozen: Frozen, board: FolderStore
) -> None:
    with pytest.raises(UsageError, match="in the image"):
        send_code(place, replace(frozen, code=""), board)
    with pytest.raises(UsageError, match="is not there"):
        send_code(place, replace(frozen, folder="/nowhere"), board)
    (Path(frozen.folder) / "id_rsa").write_text("secret")
    with pytest.raises(ConfigError):
        send_code(place, frozen, board)
    assert send_code(place, frozen, board, include_secrets=True)


def test_a_sweep_whose_code_is_gone_can_begin_no_trial(
    place: Place, frozen: Frozen, board: FolderStore
) -> None:
    assert not send_code(place, frozen, board)  # which puts it where it was, if it is gone
    check_code(place, frozen, board)
    Path(frozen.code).unlink()
    with pytest.raises(NotFound, match=f"run {frozen.code}, which is gone, so nothing was asked"):
        check_code(place, frozen, board)
    check_code(place, replace(frozen, code=""), board)  # it is in the image
    mend(frozen)
    assert send_code(place, frozen, board)
    check_code(place, frozen, board)
