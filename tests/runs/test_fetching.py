"""Where the outputs of a run are: in the bucket of its environment, or in a folder here."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.s3 import StoredObject
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import NotFound, UsageError
from batchml.jobs.written import is_outputs_rule
from batchml.model.run import JobStatus, Run
from batchml.runs.outputs import (
    CHECKPOINTS,
    BucketOutputs,
    CompleteCheckpoints,
    CopiedOutputs,
    FolderOutputs,
    OutputEntry,
    copy_outputs,
    describe_checkpoints,
    open_outputs,
)
from batchml.runs.search import FoundRun
from tests.support.fakes import FakeClock

AT = 1_763_751_777.0


class FakeBucket:
    """Keys and contents."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.downloads: list[str] = []

    def list_objects(self, prefix: str) -> Iterable[StoredObject]:
        return [
            StoredObject(key, len(data), AT)
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
        ]

    def get_file(self, key: str, path: str) -> bool:
        self.downloads.append(key)
        Path(path).write_bytes(self.objects[key])
        return True


def place(tmp_path: Path, env: str = "local") -> Context:
    (tmp_path / "batchml.toml").write_text('[env.dev]\nregion = "us-east-1"\n')
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, env)
    return Context(settings, FakeClock(), tmp_path)


def found(job_id: str = "id", **more: Any) -> FoundRun:
    return FoundRun(Run(job_id, "n", "q", JobStatus.SUCCEEDED, **more), None)


def test_what_a_bucket_holds_below_the_run_is_copied_once_with_its_time(tmp_path: Path) -> None:
    bucket: Any = FakeBucket(
        {"runs/k/output/": b"", "runs/k/output/a/m": b"12", "runs/k/output/../x": b"1",
         "runs/k/spent": b"", "runs/other/output/y": b""}
    )  # fmt: skip
    from batchml.runs.outputs import copy_files

    *files, done = copy_files(BucketOutputs(bucket, "runs/k/output/"), tmp_path)
    assert isinstance(done, CopiedOutputs)
    assert (len(files), done.files, done.left_out[0].partition(":")[0]) == (1, 1, "../x")
    assert (tmp_path / "a" / "m").stat().st_mtime == AT
    list(copy_files(BucketOutputs(bucket, "runs/k/output/"), tmp_path))
    assert bucket.downloads == ["runs/k/output/a/m"]


@pytest.mark.parametrize(
    ("job_id", "prefix"),
    [
        ("id", "runs/k/output/"),
        ("id:12", "runs/k/output/12/"),
        ("id#0", "runs/k/output/"),
        ("id#2", "runs/k/output/node-2/"),
    ],
)
def test_in_aws_the_run_itself_says_where(
    job_id: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "AWS_ACCESS_KEY_ID", "x")
    source = open_outputs(
        place(tmp_path, "dev"), found(job_id, environment={"BATCHML_STORE": "s3://bkt/runs/k"})
    )
    assert isinstance(source, BucketOutputs)
    assert source._prefix == prefix


@pytest.mark.parametrize("store", ["", "s3://bkt", "file:///etc", "s3://B/../x y"])
def test_a_run_without_a_store_has_none(store: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="BATCHML_OUTPUT_DIR were not kept"):
        open_outputs(place(tmp_path, "dev"), found(environment={"BATCHML_STORE": store}))


def test_here_the_children_of_an_array_lie_in_their_order(tmp_path: Path) -> None:
    runs = tmp_path / "home" / "runs"
    for number in (10, 9, 0):
        (runs / f"id:{number}" / "output").mkdir(parents=True)
        (runs / f"id:{number}" / "output" / "m").write_text(str(number))
    *files, _ = copy_outputs(place(tmp_path), found(), tmp_path / "dest")
    names = [each.name for each in files if not isinstance(each, CopiedOutputs)]
    assert names == ["0/m", "9/m", "10/m"]
    assert isinstance(open_outputs(place(tmp_path), found("id:9")), FolderOutputs)
    with pytest.raises(NotFound, match="Its folder was deleted"):
        open_outputs(place(tmp_path), found("other", started_at=1))
    with pytest.raises(NotFound, match="It never began"):
        open_outputs(place(tmp_path), found("other"))


def test_checkpoints_are_copied_whole_and_described(tmp_path: Path) -> None:
    context, saved = place(tmp_path), tmp_path / "home" / "runs" / "id" / "checkpoints"
    assert describe_checkpoints(context, "id") == ""
    for name, at in (
        ("best.pt", 1),
        ("step-3/state", 2),
        (".saving-step-4/state", 3),
        (".batchml-resumed.json", 4),
    ):
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_text("x" * 1024)
        os.utime(saved / name, (at, at))
    said = "2 files, 2.0 KiB, the newest is step-3 (batchml get id --env local --checkpoints)"
    assert describe_checkpoints(context, "id").replace(" --env local", "") == said.replace(
        " --env local", ""
    )
    *files, done = copy_outputs(context, found(), tmp_path / "dest", CHECKPOINTS)
    assert [each.name for each in files if isinstance(each, OutputEntry)] == [
        "best.pt", "step-3/state",
    ]  # fmt: skip
    assert isinstance(done, CopiedOutputs) and done.files == 2


def test_a_folder_with_the_outputs_of_another_run_is_refused(tmp_path: Path) -> None:
    context, dest = place(tmp_path), tmp_path / "dest"
    for job_id in ("first", "other"):
        (tmp_path / "home" / "runs" / job_id / "output").mkdir(parents=True)
        (tmp_path / "home" / "runs" / job_id / "output" / job_id).write_text("x")
    list(copy_outputs(context, found("first"), dest))
    *_, again = copy_outputs(context, found("first"), dest)
    assert again == CopiedOutputs(unchanged=1)
    with pytest.raises(UsageError, match="has the outputs of another run, first: nothing was"):
        copy_outputs(context, found("other"), dest)
    assert sorted(os.listdir(dest)) == [".batchmlignore", "first"]
    assert is_outputs_rule(dest / ".batchmlignore")
    rerun = found("other", environment={"BATCHML_ARRAY_MAP": "3"})
    assert len(list(copy_outputs(context, rerun, dest))) == 2  # it joins its array's outputs


def test_a_users_folder_takes_the_outputs_of_one_run_too(tmp_path: Path) -> None:
    context, dest = place(tmp_path), tmp_path / "dest"
    context.home.prepare()
    dest.mkdir()
    (dest / "mine").write_text("x")
    for job_id in ("first", "other"):
        (tmp_path / "home" / "runs" / job_id / "output").mkdir(parents=True)
        (tmp_path / "home" / "runs" / job_id / "output" / job_id).write_text("x")
    list(copy_outputs(context, found("first"), dest))
    *_, again = copy_outputs(context, found("first"), dest)
    assert again == CopiedOutputs(unchanged=1)
    with pytest.raises(UsageError, match=r"has the outputs of another run, first: .* as .*/dest/"):
        copy_outputs(context, found("other"), dest)
    assert sorted(os.listdir(dest)) == ["first", "mine"]
    list(copy_outputs(context, found("other"), dest / "below"))
    (dest / "first").write_text("of the user now")
    *_, done = copy_outputs(context, found("other"), dest)
    assert isinstance(done, CopiedOutputs) and done.files == 1


def test_files_of_the_users_own_are_not_replaced(tmp_path: Path) -> None:
    context, dest = place(tmp_path), tmp_path / "dest"
    context.home.prepare()
    output = tmp_path / "home" / "runs" / "first" / "output"
    output.mkdir(parents=True)
    dest.mkdir()
    for name in ("a.csv", "train.py"):
        (output / name).write_text("of the run")
    (dest / "train.py").write_text("of the user")
    with pytest.raises(UsageError, match=r"outputs: train.py\. Nothing was .*/dest/n-first\."):
        list(copy_outputs(context, found("first"), dest))
    assert (dest / "train.py").read_text() == "of the user"
    assert os.listdir(dest) == ["train.py"]
    (dest / "train.py").unlink()
    list(copy_outputs(context, found("first"), dest))
    (output / "train.py").write_text("of the run, later")
    list(copy_outputs(context, found("first"), dest))
    assert (dest / "train.py").read_text() == "of the run, later"
    (dest / "train.py").write_text("changed by the user")
    with pytest.raises(UsageError, match="files of your own"):
        list(copy_outputs(context, found("first"), dest))


def test_in_a_bucket_checkpoints_lie_beside_the_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "AWS_ACCESS_KEY_ID", "x")
    of = found("id:3", environment={"BATCHML_STORE": "s3://bkt/runs/k"})
    source = open_outputs(place(tmp_path, "dev"), of, CHECKPOINTS)
    assert isinstance(source, CompleteCheckpoints)
    assert isinstance(source.source, BucketOutputs)
    assert source.source._prefix == "runs/k/checkpoints/3/"


def test_here_the_nodes_lie_as_they_do_in_a_bucket(tmp_path: Path) -> None:
    for number in (0, 1):
        output = tmp_path / "home" / "runs" / f"id#{number}" / "output"
        output.mkdir(parents=True)
        (output / "m").write_text(str(number))
    *files, _ = copy_outputs(place(tmp_path), found(nodes=2), tmp_path / "dest")
    assert [each.name for each in files if not isinstance(each, CopiedOutputs)] == ["m", "node-1/m"]
    assert (tmp_path / "dest" / "m").read_text() == "0"
