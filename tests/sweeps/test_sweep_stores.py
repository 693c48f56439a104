"""Which sweep a word names, and where its store is: in the state folder, or in the bucket."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from batchml.config.settings import load_settings
from batchml.context import Context, EnvironmentCache
from batchml.errors import BatchmlError, ConfigError, NotFound, SweepStoreError, UsageError
from batchml.model.names import new_key
from batchml.model.sweep import Dimension, Goal, SweepSpec
from batchml.runtime.storage.store import StoreError
from batchml.sweeps.started import SPEC, StartedSweep, read_started, write_started
from batchml.sweeps.stores import (
    ListedSweep,
    choose_sweep,
    find_sweep_store,
    list_sweeps,
    open_sweep_store,
    sweep_store_at,
)
from tests.support.fakes import FakeClock
from tests.support.s3 import BUCKET, KEYS, moto_s3

SWEEP = SweepSpec("lenet", "lenet", (Goal("acc", "max"),), {"lr": Dimension("float", 0, 1)})
FIRST, SECOND, THIRD = "2aaaaaaaaaaaaaaaa", "3aaaaaaaaaaaaaaaa", "3abbbbbbbbbbbbbbb"
SWEEPS = [
    ListedSweep(THIRD, "mnist", 30.0),
    ListedSweep(SECOND, "lenet", 20.0),
    ListedSweep(FIRST, "lenet", 10.0),
]


def place(tmp_path: Path, env: str = "local") -> Context:
    (tmp_path / "batchml.toml").write_text('[env.dev]\nregion = "eu-west-1"\n')
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, env)
    made = Context(settings, FakeClock(), tmp_path)
    made.home.prepare()
    return made


@pytest.fixture
def in_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """An environment whose stacks are known to have moto's bucket."""
    with moto_s3() as address:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": address}.items():
            monkeypatch.setenv(name, value)
        made = place(tmp_path, "dev")
        known = EnvironmentCache(made, os.environ)
        known._learn(outputs={"BucketName": BUCKET, "JobRoleArn": "arn"})
        known.save()
        yield made


def started(context: Context, key: str, name: str, at: float) -> None:
    started = StartedSweep(
        key=key, name=name, env=context.env, spec=SWEEP, job={}, created_at=at,
        project=context.project,
    )  # fmt: skip
    assert write_started(open_sweep_store(context, key), started)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("@last", THIRD), ("@last~2", FIRST), ("mnist", THIRD), ("lenet", SECOND), (FIRST, FIRST),
        ("2aaa", FIRST), ("3abb", THIRD),
    ],
)  # fmt: skip
def test_a_word_names_a_sweep(word: str, key: str) -> None:
    assert choose_sweep(word, SWEEPS).key == key


def test_a_word_that_names_none_says_what_there_is() -> None:
    with pytest.raises(NotFound, match="Did you mean 'mnist'"):
        choose_sweep("mnits", SWEEPS)
    with pytest.raises(NotFound, match="Only 3 were started"):
        choose_sweep("@last~3", SWEEPS)
    with pytest.raises(NotFound, match="None was started"):
        choose_sweep("@last", [])
    with pytest.raises(NotFound):
        choose_sweep("3ab", SWEEPS)  # too short
    alike = [*SWEEPS, ListedSweep("3abbc" + "a" * 12, "x", 1.0)]
    with pytest.raises(UsageError, match="several"):
        choose_sweep("3abb", alike)


def check_sweeps(there: Context) -> None:
    assert list_sweeps(there) == []
    with pytest.raises(NotFound, match="None was started"):
        find_sweep_store(there, "@last")
    for listed in SWEEPS:
        started(there, listed.key, listed.name, listed.created_at)
    open_sweep_store(there, new_key(os.urandom)).put("course.json", b"{}")  # not started yet
    assert list_sweeps(there) == [replace(each, project=there.project) for each in SWEEPS]
    for word in ("@last~1", SECOND, "lenet"):
        store = find_sweep_store(there, word)
        sweep = read_started(store)
        assert sweep is not None
        assert (store.key, sweep.key) == (SECOND, SECOND)
    assert sweep_store_at(there, store.where).get(SPEC) == store.get(SPEC)
    with pytest.raises(NotFound):
        find_sweep_store(there, new_key(os.urandom))


def test_sweeps_of_this_machine_are_found(tmp_path: Path) -> None:
    here = place(tmp_path)
    check_sweeps(here)
    folder = tmp_path / "home" / "sweeps"
    assert open_sweep_store(here, FIRST).where == str(folder / FIRST)
    (folder / FIRST / SPEC).write_bytes(b"{torn")  # one that is damaged hides none
    (folder / "else").mkdir()
    (folder / "else" / SPEC).write_bytes(msgspec.json.encode({"name": "no key"}))
    torn, *others = sorted(list_sweeps(here), key=lambda each: bool(each.name))
    assert (torn.key, torn.name) == (FIRST, "") and [each.key for each in others] == [THIRD, SECOND]


def test_sweeps_of_an_environment_are_found_in_its_bucket(in_aws: Context) -> None:
    check_sweeps(in_aws)
    assert open_sweep_store(in_aws, FIRST).where == f"s3://{BUCKET}/runs/{FIRST}"


def test_an_environment_without_a_bucket_has_no_sweeps(in_aws: Context) -> None:
    known = EnvironmentCache(in_aws, os.environ)
    known._learn(outputs={"JobRoleArn": "arn", "BucketName": ""})
    known._must_save = True
    known.save()
    with pytest.raises(ConfigError, match="no bucket"):
        list_sweeps(in_aws)


@pytest.mark.parametrize("word", ["../../etc", "", "a" * 17, "2AAAAAAAAAAAAAAAA"])
def test_what_is_no_key_opens_nothing(tmp_path: Path, word: str) -> None:
    with pytest.raises(NotFound):
        open_sweep_store(place(tmp_path), word)


def test_an_address_that_is_no_stores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        sweep_store_at(place(tmp_path), "s3://bucket")


def test_a_folder_that_cannot_be_written_is_told_as_ours(tmp_path: Path) -> None:
    here = place(tmp_path)
    (tmp_path / "home" / "sweeps").write_text("no folder")
    with pytest.raises(SweepStoreError, match="cannot create") as caught:
        started(here, FIRST, "lenet", 1.0)
    assert isinstance(caught.value, BatchmlError)
    assert isinstance(caught.value, OSError)
    assert not caught.value.temporary
