"""Other code for a sweep that was started: what its waves run, and what people hear."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.context import Context
from batchml.errors import ConfigError, NotFound, UsageError
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.code_update import (
    CODE,
    check_code,
    describe_old_code,
    send_code,
    with_current_code,
)
from batchml.sweeps.start import SweepOptions, prepare_sweep
from batchml.sweeps.started import StartedSweep
from tests.sweeps.test_sweep_starting import context as context


@pytest.fixture
def started(context: Context) -> StartedSweep:
    return prepare_sweep(context, SweepOptions(file="sweep.toml")).sweep


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(str(tmp_path / "board"))


def mend(started: StartedSweep) -> None:
    (Path(started.folder) / "train.py").write_text("print('acc=2')\n")


def test_unchanged_code_is_run_and_nothing_is_said(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    assert with_current_code(started, store).code == started.code
    assert describe_old_code(context, started, store) == ""
    assert not send_code(context, started, store)


def test_other_code_is_run_once_it_was_sent(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    mend(started)
    assert "has changed since: --code sends it." in describe_old_code(context, started, store)
    assert with_current_code(started, store).code == started.code, "not before somebody says so"
    assert send_code(context, started, store)
    code = with_current_code(started, store).code
    assert code != started.code and Path(code).is_file()
    assert describe_old_code(context, started, store) == ""


@pytest.mark.parametrize("data", [b"", b"{", b'{"name": "../../etc/passwd", "at": 1}'])
def test_what_is_no_word_of_ours_changes_nothing(
    started: StartedSweep, store: FolderStore, data: bytes
) -> None:
    store.put(CODE, data)
    assert with_current_code(started, store).code == started.code


def test_code_that_cannot_be_sent_is_refused(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    with pytest.raises(UsageError, match="in the image"):
        send_code(context, replace(started, code=""), store)
    with pytest.raises(UsageError, match="does not exist"):
        send_code(context, replace(started, folder="/nowhere"), store)
    (Path(started.folder) / "id_rsa").write_text("secret")
    with pytest.raises(ConfigError):
        send_code(context, started, store)
    assert send_code(context, started, store, include_secrets=True)


def test_a_sweep_whose_code_is_gone_can_begin_no_trial(
    context: Context, started: StartedSweep, store: FolderStore
) -> None:
    assert not send_code(context, started, store)  # which puts it where it was, if it is gone
    check_code(context, started, store)
    Path(started.code).unlink()
    with pytest.raises(
        NotFound, match=f"run {started.code}, which is gone, so nothing was requested"
    ):
        check_code(context, started, store)
    check_code(context, replace(started, code=""), store)  # it is in the image
    mend(started)
    assert send_code(context, started, store)
    check_code(context, started, store)
