"""Of two jobs that one submission became, the first to start trains, and the other says so."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchml.runtime.entry.fetch import claim, describe_duplicate
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import StoreError


def env(job_id: str, **more: str) -> RuntimeEnv:
    return RuntimeEnv.read({"AWS_BATCH_JOB_ID": job_id, **more})


def child(job_id: str, index: int) -> RuntimeEnv:
    return env(f"{job_id}:{index}", AWS_BATCH_JOB_ARRAY_INDEX=str(index))


def test_the_first_job_goes_on_in_every_attempt_and_the_second_hears_of_it(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    assert claim(store, env("first")) is None
    assert claim(store, env("second")) == "first"
    assert claim(store, env("first")) is None, "a later attempt"
    assert "this is a second run of one submission; first goes on" in describe_duplicate("first")


def test_each_child_of_an_array_claims_for_itself(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    assert claim(store, child("first", 0)) is None
    assert claim(store, child("second", 1)) is None
    assert claim(store, child("first", 1)) == "second:1"
    assert claim(store, child("second", 0)) == "first:0"


def test_the_nodes_of_a_job_claim_together(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    assert claim(store, env("first#1", AWS_BATCH_JOB_NODE_INDEX="1")) is None
    assert claim(store, env("second#0", AWS_BATCH_JOB_NODE_INDEX="0")) == "first"
    assert claim(store, env("first#0", AWS_BATCH_JOB_NODE_INDEX="0")) is None


def test_of_many_that_start_together_one_goes_on(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    with ThreadPoolExecutor(16) as pool:
        holders = list(pool.map(lambda number: claim(store, env(f"job-{number}")), range(64)))
    (winner,) = [number for number, holder in enumerate(holders) if holder is None]
    assert {holder for holder in holders if holder} == {f"job-{winner}"}


def test_outside_of_batch_there_is_nothing_to_claim(tmp_path: Path) -> None:
    assert claim(FolderStore(str(tmp_path)), env("")) is None
    assert list(tmp_path.iterdir()) == []


class Blinking(FolderStore):
    """Its values are removed between two calls."""

    def create(self, key: str, data: bytes) -> bool:
        return False


def test_a_claim_that_comes_and_goes_is_no_reason_to_stay_for_ever(tmp_path: Path) -> None:
    assert claim(Blinking(str(tmp_path)), env("job")) is None


class Broken(FolderStore):
    def create(self, key: str, data: bytes) -> bool:
        raise StoreError("no answer")


def test_a_store_that_cannot_be_had_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        claim(Broken(str(tmp_path)), env("job"))
