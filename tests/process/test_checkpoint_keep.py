"""Checkpoints of runs without a workspace: in the store, and back from there."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.runtime import checkpoint
from batchml.runtime.checkpoint.layout import FenceTerm
from batchml.runtime.checkpoint.remote import LATEST, CheckpointSender, fetch_newest
from batchml.runtime.checkpoint.resume import VARIABLE, ResumeSource, resume
from batchml.runtime.entry.folders import TemporaryFolder, is_kept_in_store, make_folders
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import StoreError
from tests.support.s3 import BUCKET, KEYS, client, moto_s3

ROOT = str(Path(__file__).parents[2])
PREFIX = "checkpoints/"


class Bucket(FolderStore):
    """A store that notes in which order things came, and can fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.sent: list[str] = []
        self.fails_at = ""

    def put_file(self, key: str, path: str) -> None:
        if self.fails_at and self.fails_at in key:
            raise StoreError("503 SlowDown", temporary=True)
        super().put_file(key, path)
        self.sent.append(key[len(PREFIX) :])


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "first attempt"
    made.mkdir()
    return made


def save(folder: Path, step: int) -> None:
    def write(path: str) -> None:
        Path(path, "model").write_text(f"after {step}")
        Path(path, "deep").mkdir()
        Path(path, "deep", "optimizer").write_text("x")

    assert checkpoint.save(write, step, folder=str(folder))


def fetched(bucket: Bucket, folder: Path) -> tuple[int, str]:
    """What another attempt, on another host, begins with: its step, and what is told."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    said: list[str] = []
    fetch_newest(bucket, PREFIX, str(folder), said.append)
    return checkpoint.newest_step(str(folder)) or 0, "\n".join(said)


def test_what_was_saved_is_there_for_the_next_attempt(
    bucket: Bucket, folder: Path, tmp_path: Path
) -> None:
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    save(folder, 10)
    assert kept.poll() == []
    first = "step-0000000010"
    assert bucket.sent == [f"{first}/deep/optimizer", f"{first}/model", f"{first}/MANIFEST.json"]
    assert json.loads(bucket.get(PREFIX + LATEST) or b"")["name"] == first
    assert fetched(bucket, tmp_path / "second")[0] == 10
    found = checkpoint.newest(str(tmp_path / "second"))
    assert found is not None
    assert Path(found.path, "model").read_text() == "after 10"


def test_the_store_has_as_many_as_the_folder(bucket: Bucket, folder: Path) -> None:
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    for step in (10, 20, 30):
        save(folder, step)
        kept.poll()
    tops = {key.split("/")[1] for key in bucket.keys(PREFIX)}
    assert tops == {"step-0000000020", "step-0000000030", LATEST}
    assert json.loads(bucket.get(PREFIX + LATEST) or b"")["step"] == 30


def test_the_tenth_save_of_a_step_is_the_latest(bucket: Bucket, folder: Path) -> None:
    """Its name, which ends with .10, sorts before the one that ends with .9."""
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    for _ in range(11):
        save(folder, 10)
        kept.poll()
    assert json.loads(bucket.get(PREFIX + LATEST) or b"")["name"] == "step-0000000010.10"


def test_one_of_which_only_a_part_came_is_none(
    bucket: Bucket, folder: Path, tmp_path: Path
) -> None:
    """The host goes in the middle of sending, or S3 fails."""
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    save(folder, 10)
    kept.poll()
    save(folder, 20)
    bucket.fails_at = "20/model"
    assert kept.poll() == ["step-0000000020/model: 503 SlowDown"]
    assert kept.error
    assert fetched(bucket, tmp_path / "second")[0] == 10
    bucket.fails_at = ""
    assert kept.poll() == []
    assert fetched(bucket, tmp_path / "second")[0] == 20


def test_one_that_changed_in_the_store_is_passed_over(
    bucket: Bucket, folder: Path, tmp_path: Path
) -> None:
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    for step in (10, 20):
        save(folder, step)
        kept.poll()
    bucket.put(f"{PREFIX}step-0000000020/model", b"after 2O")
    step, said = fetched(bucket, tmp_path / "second")
    assert step == 10
    assert "step-0000000020 in the store is skipped: model has changed" in said
    assert sorted(os.listdir(tmp_path / "second")) == ["step-0000000010"]


def test_plain_files_go_once_they_have_rested_and_leave_with_the_programs(
    bucket: Bucket, folder: Path, tmp_path: Path
) -> None:
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    (folder / "snapshot.pt").write_text("half")
    kept.poll()
    assert bucket.sent == []
    (folder / "snapshot.pt").write_text("whole now")
    for _ in range(2):
        kept.poll()
    assert bucket.sent == ["snapshot.pt"]
    (folder / "snapshot.pt").rename(folder / "last.pt")
    for _ in range(4):
        kept.poll()
    assert bucket.keys(PREFIX) == [f"{PREFIX}last.pt"]
    fetched(bucket, tmp_path / "second")
    assert (tmp_path / "second" / "last.pt").read_text() == "whole now"


def test_at_the_end_all_goes_and_nothing_goes_twice(bucket: Bucket, folder: Path) -> None:
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    save(folder, 10)
    (folder / "snapshot.pt").write_text("x")
    assert kept.finish() == []
    assert len(bucket.sent) == 4
    kept.poll()
    assert len(bucket.sent) == 4


def test_what_was_brought_is_not_sent_back(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    save(folder, 10)
    CheckpointSender(str(folder), bucket, PREFIX).finish()
    bucket.sent.clear()
    second = tmp_path / "second"
    fetched(bucket, second)
    save(second, 20)
    kept = CheckpointSender(str(second), bucket, PREFIX)
    kept.finish()
    assert not [name for name in bucket.sent if "0010" in name]
    assert [name for name in bucket.sent if "0020" in name]


def test_a_look_at_what_did_not_change_asks_the_store_for_nothing(
    bucket: Bucket, folder: Path
) -> None:
    kept = CheckpointSender(str(folder), bucket, PREFIX)
    save(folder, 10)
    for _ in range(3):
        kept.poll()
    bucket.keys = bucket.get = None  # type: ignore[method-assign, assignment]
    assert kept.poll() == []


def test_an_attempt_that_should_have_ended_sends_nothing_more(
    bucket: Bucket, folder: Path, tmp_path: Path
) -> None:
    """Its host was given up, and lives."""
    second = tmp_path / "second"
    second.mkdir()
    for attempt, where in ((2, second), (1, folder)):
        os.environ["BATCHML_ATTEMPT"], os.environ["BATCHML_RUN"] = str(attempt), "job"
        try:
            save(where, 10 * attempt)
        finally:
            del os.environ["BATCHML_ATTEMPT"], os.environ["BATCHML_RUN"]
        told = CheckpointSender(str(where), bucket, PREFIX, FenceTerm("job", attempt, 0)).finish()
        assert told == (
            [] if attempt == 2 else ["a later attempt of this run keeps its checkpoints now"]
        )
    assert json.loads(bucket.get(PREFIX + LATEST) or b"")["step"] == 20


def test_only_checkpoints_that_would_go_with_the_attempt_are_kept(tmp_path: Path) -> None:
    given = RuntimeEnv.read({"AWS_BATCH_JOB_ID": "j", "BATCHML_STORE": "s", "BATCHML_KEY": "k"})
    temporary = TemporaryFolder()
    try:
        assert is_kept_in_store(make_folders(given, temporary))
        assert not is_kept_in_store(make_folders(given._replace(store=""), temporary))
        assert not is_kept_in_store(make_folders(given._replace(sweep="store"), temporary))
        assert not is_kept_in_store(
            make_folders(given._replace(workspace=str(tmp_path)), temporary)
        )
        assert not is_kept_in_store(
            make_folders(given._replace(checkpoint_dir=str(tmp_path / "c")), temporary)
        )
        assert not is_kept_in_store(given._replace(is_run=False))
    finally:
        temporary.remove()


# --- through the entry, with S3 -------------------------------------------------------------------

PROGRAM = """
import os, sys, time
from batchml.runtime import checkpoint
found = checkpoint.newest()
print("from", found.step if found else 0, flush=True)
step = (found.step if found else 0) + 10
def write(path):
    with open(path + "/model", "w") as file:
        file.write("x" * step)
checkpoint.save(write, step)
print("saved", step, flush=True)
if "wait" in sys.argv:
    time.sleep(60)
sys.exit(0)
"""


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_s3() as address:
        yield address


def test_a_host_that_is_lost_costs_what_came_after_the_last_kept_one(
    moto: str, tmp_path: Path
) -> None:
    """AWS without a workspace: each attempt on a disk of its own, the first one killed."""

    def start(attempt: int, *words: str) -> "subprocess.Popen[str]":
        disk = tmp_path / f"host-{attempt}"
        disk.mkdir()
        return subprocess.Popen(
            [sys.executable, "-m", "batchml.runtime.run", sys.executable, "-c", PROGRAM, *words],
            cwd=disk, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={
                "PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "TMPDIR": str(disk), **KEYS,
                "AWS_ENDPOINT_URL_S3": moto, "BATCHML_STORE": f"s3://{BUCKET}/runs/k",
                "BATCHML_KEY": "k", "AWS_BATCH_JOB_ID": "job",
                "AWS_BATCH_JOB_ATTEMPT": str(attempt),
            },
        )  # fmt: skip

    def keys() -> list[str]:
        found = client(moto).list_objects_v2(Bucket=BUCKET, Prefix="runs/k/checkpoints/")
        return [each["Key"].partition("/checkpoints/")[2] for each in found.get("Contents", ())]

    output, _ = start(1).communicate(timeout=60)
    assert output.startswith("from 0\nsaved 10\n"), output
    assert set(keys()) == {
        "LATEST.json",
        *(f"step-0000000010/{n}" for n in ("model", "MANIFEST.json")),
    }

    lost = start(2, "wait")
    assert lost.stdout is not None
    lines = [lost.stdout.readline() for _ in range(3)]
    assert lines[1:] == ["from 10\n", "saved 20\n"], lines
    lost.send_signal(signal.SIGTERM)  # it has no time to see it kept: the end keeps it
    lost.communicate(timeout=60)

    output, _ = start(3).communicate(timeout=60)
    assert "the checkpoint of step 20 was fetched from the store\nfrom 20\nsaved 30\n" in output
    assert {name.split("/")[0] for name in keys()} == {
        "LATEST.json", "step-0000000020", "step-0000000030",
    }  # fmt: skip


def test_another_run_goes_on_from_the_bucket_and_has_its_own_copy_there(
    moto: str, folder: Path
) -> None:
    """`rerun --resume` where no folder is shared: the old run's objects stay as they are."""
    environ = {
        **KEYS, "AWS_ENDPOINT_URL_S3": moto, "BATCHML_STORE": f"s3://{BUCKET}/runs/new",
        "AWS_BATCH_JOB_ID": "new",
    }  # fmt: skip
    old = open_store(f"s3://{BUCKET}/runs/old", environ)
    save(folder, 10)
    CheckpointSender(str(folder), old, PREFIX).finish()
    before = {key: old.get(key) for key in old.keys("")}
    told = ResumeSource("old", "train", key="old", store=f"s3://{BUCKET}/runs/old")
    temporary, said = TemporaryFolder(), list[str]()
    try:
        env = make_folders(RuntimeEnv.read(environ), temporary)
        resume(env, {**environ, VARIABLE: told.to_json()}, said.append)
        found = checkpoint.newest(env.checkpoint_dir)
        assert found is not None
        assert Path(found.path, "deep", "optimizer").read_text() == "x"
    finally:
        temporary.remove()
    assert said == ["batchml notice: this run resumes from step 10 of train old"]
    new = open_store(environ["BATCHML_STORE"], environ)
    assert f"{PREFIX}step-0000000010/MANIFEST.json" in new.keys(PREFIX)
    assert {key: old.get(key) for key in old.keys("")} == before
