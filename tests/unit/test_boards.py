"""Which sweep a word means, and where its board is: in the state folder, or in the bucket."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from batchml.client.known import Known
from batchml.client.place import Place
from batchml.client.sweeping.boards import (
    BoardError,
    Listed,
    board_at,
    choose,
    find_sweep,
    list_boards,
    open_board,
)
from batchml.client.sweeping.freezing import SPEC, Frozen, read_frozen, write_frozen
from batchml.errors import BatchmlError, ConfigError, NotFound, UsageError
from batchml.model.names import new_key
from batchml.model.sweep import Dimension, Goal, SweepSpec
from batchml.runtime.storage.store import StoreError
from batchml.settings import load_settings
from tests.fakes import FakeClock
from tests.s3 import BUCKET, KEYS, moto_s3

SWEEP = SweepSpec("lenet", "lenet", (Goal("acc", "max"),), {"lr": Dimension("float", 0, 1)})
FIRST, SECOND, THIRD = "2aaaaaaaaaaaaaaaa", "3aaaaaaaaaaaaaaaa", "3abbbbbbbbbbbbbbb"
SWEEPS = [
    Listed(THIRD, "mnist", 30.0), Listed(SECOND, "lenet", 20.0), Listed(FIRST, "lenet", 10.0),
]  # fmt: skip


def place(tmp_path: Path, env: str = "local") -> Place:
    (tmp_path / "batchml.toml").write_text('[env.dev]\nregion = "eu-west-1"\n')
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, env)
    made = Place(settings, FakeClock(), tmp_path)
    made.home.prepare()
    return made


@pytest.fixture
def in_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An environment whose stacks are known to have moto's bucket."""
    with moto_s3() as address:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": address}.items():
            monkeypatch.setenv(name, value)
        made = place(tmp_path, "dev")
        known = Known(made, os.environ)
        known._learn(outputs={"BucketName": BUCKET, "JobRoleArn": "arn"})
        known.save()
        yield made


def started(place: Place, key: str, name: str, at: float) -> None:
    frozen = Frozen(key, name, place.env, SWEEP, {}, created_at=at)
    assert write_frozen(open_board(place, key), frozen)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("@last", THIRD), ("@last~2", FIRST), ("mnist", THIRD), ("lenet", SECOND), (FIRST, FIRST),
        ("2aaa", FIRST), ("3abb", THIRD),
    ],
)  # fmt: skip
def test_a_word_names_a_sweep(word: str, key: str) -> None:
    assert choose(word, SWEEPS).key == key


def test_a_word_that_names_none_says_what_there_is() -> None:
    with pytest.raises(NotFound, match="Did you mean 'mnist'"):
        choose("mnits", SWEEPS)
    with pytest.raises(NotFound, match="Only 3 were started"):
        choose("@last~3", SWEEPS)
    with pytest.raises(NotFound, match="None was started"):
        choose("@last", [])
    with pytest.raises(NotFound):
        choose("3ab", SWEEPS)  # too short
    alike = [*SWEEPS, Listed("3abbc" + "a" * 12, "x", 1.0)]
    with pytest.raises(UsageError, match="several"):
        choose("3abb", alike)


def check_sweeps(there: Place) -> None:
    assert list_boards(there) == []
    with pytest.raises(NotFound, match="None was started"):
        find_sweep(there, "@last")
    for listed in SWEEPS:
        started(there, listed.key, listed.name, listed.created_at)
    open_board(there, new_key(os.urandom)).put("course.json", b"{}")  # not started yet
    assert list_boards(there) == SWEEPS
    for word in ("@last~1", SECOND, "lenet"):
        board = find_sweep(there, word)
        frozen = read_frozen(board)
        assert frozen is not None
        assert (board.key, frozen.key) == (SECOND, SECOND)
    assert board_at(there, board.where).get(SPEC) == board.get(SPEC)
    with pytest.raises(NotFound):
        find_sweep(there, new_key(os.urandom))


def test_sweeps_of_this_machine_are_found(tmp_path: Path) -> None:
    here = place(tmp_path)
    check_sweeps(here)
    folder = tmp_path / "home" / "sweeps"
    assert open_board(here, FIRST).where == str(folder / FIRST)
    (folder / FIRST / SPEC).write_bytes(b"{torn")  # one that is damaged hides none
    (folder / "else").mkdir()
    (folder / "else" / SPEC).write_bytes(msgspec.json.encode({"name": "no key"}))
    torn, *others = sorted(list_boards(here), key=lambda each: bool(each.name))
    assert (torn.key, torn.name) == (FIRST, "") and others == SWEEPS[:2]


def test_sweeps_of_an_environment_are_found_in_its_bucket(in_aws: Place) -> None:
    check_sweeps(in_aws)
    assert open_board(in_aws, FIRST).where == f"s3://{BUCKET}/runs/{FIRST}"


def test_an_environment_without_a_bucket_has_no_sweeps(in_aws: Place) -> None:
    known = Known(in_aws, os.environ)
    known._learn(outputs={"JobRoleArn": "arn", "BucketName": ""})
    known._is_new = True
    known.save()
    with pytest.raises(ConfigError, match="no bucket"):
        list_boards(in_aws)


@pytest.mark.parametrize("word", ["../../etc", "", "a" * 17, "2AAAAAAAAAAAAAAAA"])
def test_what_is_no_key_opens_nothing(tmp_path: Path, word: str) -> None:
    with pytest.raises(NotFound):
        open_board(place(tmp_path), word)


def test_an_address_that_is_no_boards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        board_at(place(tmp_path), "s3://bucket")


def test_a_folder_that_cannot_be_written_is_told_as_ours(tmp_path: Path) -> None:
    here = place(tmp_path)
    (tmp_path / "home" / "sweeps").write_text("no folder")
    with pytest.raises(BoardError, match="cannot create") as caught:
        started(here, FIRST, "lenet", 1.0)
    assert isinstance(caught.value, BatchmlError)
    assert isinstance(caught.value, StoreError)
    assert not caught.value.temporary
