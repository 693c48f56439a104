"""`rerun --resume`: a run goes on from what another has saved, which is only read."""

import os
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import NotFound, UsageError
from batchml.local.executors.choice import Permits
from batchml.local.executors.container_spec import container_spec
from batchml.local.executors.spec import ExecutorHost
from batchml.local.home import Home
from batchml.model.job import JobSpec
from batchml.model.numbering import format_ranges
from batchml.model.run import RESUMES_TAG, JobStatus, Record, Run
from batchml.runs.rerun.resubmit import prepare_again, with_checkpoints
from batchml.runs.rerun.rules import RerunSpec, make_rerun
from batchml.runs.search import FoundRun
from batchml.runtime import checkpoint
from batchml.runtime.checkpoint.remote import RESUMED, fetch
from batchml.runtime.checkpoint.resume import (
    VARIABLE,
    NoCheckpoint,
    ResumeSource,
    checkpoint_folder,
    resume,
)
from batchml.runtime.entry.folders import TemporaryFolder, make_folders, workspace_folder
from batchml.runtime.protocol.launch import LaunchPlan
from batchml.runtime.protocol.variables import ARRAY_MAP, RuntimeEnv
from batchml.runtime.storage.store import StoreError
from tests.runs.test_submission import Aws as Account
from tests.runs.test_submission import place_in
from tests.support.executor_rig import attempt_of, job_of
from tests.support.fakes import FakeClock

OLD = "0ldrun00"
Say = Callable[[str], None]


def save(folder: Path, *steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        assert checkpoint.save(
            lambda path, step=step: Path(path, "model").write_text(f"after {step}"),  # type: ignore[misc]
            step, folder=str(folder),
        )  # fmt: skip


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


class New:
    """The new run, on a machine where `runs/OLD` is the old one's."""

    def __init__(self, root: Path) -> None:
        self.old = root / "runs" / OLD / "checkpoints"
        self.own = root / "runs" / "new" / "checkpoints"
        self.own.mkdir(parents=True)
        self.said: list[str] = []
        self.told = ResumeSource(OLD, "train", folder=str(root / "runs" / OLD))
        self.environ = {"AWS_BATCH_JOB_ID": "new", "BATCHML_CHECKPOINT_DIR": str(self.own)}

    def begin(self, check: Callable[[], None] = lambda: None, **more: str) -> int:
        """One attempt begins; the step that its program finds."""
        environ = {**self.environ, VARIABLE: self.told.to_json(), **more}
        resume(RuntimeEnv.read(environ), environ, self.said.append, check, _no_sleep)
        return checkpoint.newest_step(str(self.own)) or 0


def _no_sleep(_: float) -> None:
    raise AssertionError("nobody is waited for")


@pytest.fixture
def new(tmp_path: Path) -> New:
    return New(tmp_path)


# --- in the container -----------------------------------------------------------------------------


def test_the_newest_is_copied_before_the_command_and_the_old_one_is_only_read(new: New) -> None:
    save(new.old, 10, 20)
    before = tree(new.old)
    assert new.begin() == 20
    assert new.said == [f"batchml notice: this run resumes from step 20 of train {OLD}"]
    found = checkpoint.newest(str(new.own))
    assert found is not None and Path(found.path, "model").read_text() == "after 20"
    save(new.own, 30)
    assert tree(new.old) == before


def test_a_later_attempt_goes_on_from_its_own(new: New) -> None:
    save(new.old, 20)
    new.begin()
    save(new.own, 30)
    shutil.rmtree(new.old)
    new.said.clear()
    assert new.begin() == 30
    assert new.said == []


def test_one_that_is_damaged_is_passed_over_and_where_none_is_left_nothing_begins(new: New) -> None:
    save(new.old, 10, 20)
    (new.old / "step-0000000020" / "model").write_text("after 2O")
    assert new.begin() == 10
    assert "step-0000000020 of train 0ldrun00 is skipped: model has changed" in new.said[0]
    shutil.rmtree(new.own)
    new.own.mkdir()
    (new.old / "step-0000000010" / "model").unlink()
    with pytest.raises(NoCheckpoint, match="all checkpoints of train 0ldrun00 are damaged"):
        new.begin()
    assert checkpoint.newest_step(str(new.own)) is None


def test_without_a_checkpoint_a_run_ends_and_a_child_begins_anew(new: New) -> None:
    with pytest.raises(NoCheckpoint, match="saved no checkpoint to go on from"):
        new.begin()
    new.told = new.told._replace(is_array=True)
    assert new.begin(AWS_BATCH_JOB_ARRAY_INDEX="3") == 0
    assert new.said == [
        f"batchml notice: train {OLD}:3 has saved no checkpoint: this run starts from the beginning"
    ]


def test_files_of_a_programs_own_come_with_their_times_and_links(new: New) -> None:
    (new.old / "step-5").mkdir(parents=True)  # called as ours, and none of ours
    (new.old / "step-5" / "weights").write_text("w")
    (new.old / "snapshot.pt").write_text("s")
    os.utime(new.old / "snapshot.pt", ns=(1, 7_000_000_000))
    (new.old / "latest").symlink_to("step-5")
    (new.old / "out").symlink_to("/etc")
    for ours in (".batchml-generations.json", ".batchml-fence.json", RESUMED):
        (new.old / ours).write_text("{}")
    new.begin()
    assert new.said == [f"batchml notice: this run resumes from the 2 files of train {OLD}"]
    assert (new.own / "latest" / "weights").read_text() == "w"
    assert (new.own / "snapshot.pt").stat().st_mtime_ns == 7_000_000_000
    assert sorted(os.listdir(new.own)) == [RESUMED, "latest", "snapshot.pt", "step-5"]


@pytest.mark.parametrize("at", range(4))
def test_a_copy_that_is_cut_off_is_made_by_the_next_attempt(new: New, at: int) -> None:
    save(new.old, 10)
    (new.old / "a").write_text("a")
    (new.old / "b").write_text("b")
    calls = iter([False] * at + [True] + [False] * 9)

    def check() -> None:
        if next(calls):
            raise KeyboardInterrupt

    if at < 3:
        with pytest.raises(KeyboardInterrupt):
            new.begin(check)
        assert not (new.own / RESUMED).exists()
    assert new.begin() == 10
    assert sorted(os.listdir(new.own)) == [RESUMED, "a", "b", "step-0000000010"]


def test_each_child_goes_on_from_the_one_that_it_stands_for(new: New) -> None:
    for child in (1, 3, 4):
        save(Path(checkpoint_folder(new.told.folder, child)), 10 * child)
    new.told = new.told._replace(is_array=True, children="1 3-4")
    steps = {}
    for index in range(3):
        new.own = new.own.parent / str(index)
        new.own.mkdir()
        new.environ |= {ARRAY_MAP: "11 13-14", "BATCHML_CHECKPOINT_DIR": str(new.own)}
        steps[index] = new.begin(AWS_BATCH_JOB_ARRAY_INDEX=str(index))
    assert steps == {0: 10, 1: 30, 2: 40}
    assert new.said[-1].endswith("step 40 of train 0ldrun00:14")  # by the first array of all


@given(st.sets(st.integers(0, 9_999), min_size=1, max_size=40).map(sorted))
def test_children_are_counted_as_the_client_wrote_them(chosen: list[int]) -> None:
    told = ResumeSource("j", "n", children=format_ranges(chosen))
    assert [told.child(index) for index in range(len(chosen))] == chosen
    with pytest.raises(ValueError, match="no number"):
        told.child(len(chosen))
    assert ResumeSource.read(told.to_json()) == told


def test_in_a_workspace_it_is_found_by_its_key(new: New, tmp_path: Path) -> None:
    save(Path(workspace_folder(str(tmp_path), "2key", None)), 50)
    new.told = ResumeSource(OLD, "train", key="2key", store=str(tmp_path / "nowhere"))
    assert new.begin(BATCHML_WORKSPACE=str(tmp_path)) == 50


def test_without_a_shared_folder_the_new_runs_store_has_it_before_the_command(
    tmp_path: Path,
) -> None:
    """Also when the old one's is gone afterwards, and on another host."""
    save(tmp_path / "old" / "checkpoints", 20)
    store, said = tmp_path / "own", list[str]()
    told = ResumeSource(OLD, "train", store=str(tmp_path / "old"))
    environ = {
        "AWS_BATCH_JOB_ID": "new", "BATCHML_STORE": str(store), VARIABLE: told.to_json(),
    }  # fmt: skip

    def attempt(do: Callable[[RuntimeEnv, Mapping[str, str], Say], None]) -> int:
        temporary = TemporaryFolder()
        try:
            env = make_folders(RuntimeEnv.read(environ), temporary)
            do(env, environ, said.append)
            fetch(env, environ, said.append)
            return checkpoint.newest_step(env.checkpoint_dir) or 0
        finally:
            temporary.remove()

    assert attempt(resume) == 20
    assert (store / "checkpoints" / "step-0000000020" / "MANIFEST.json").exists()
    shutil.rmtree(tmp_path / "old")
    assert attempt(resume) == 20
    assert sum("resumes from" in line for line in said) == 1


def test_other_nodes_wait_for_the_main_one(new: New) -> None:
    naps: list[float] = []
    environ = {
        **new.environ, VARIABLE: new.told.to_json(), "AWS_BATCH_JOB_NODE_INDEX": "1",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    }  # fmt: skip

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            (new.own / RESUMED).touch()

    env = RuntimeEnv.read(environ)
    resume(env, environ, new.said.append, sleep=sleep)
    assert len(naps) == 3 and new.said == []
    (new.own / RESUMED).unlink()
    with pytest.raises(StoreError, match="main node"):
        resume(env, environ, new.said.append, sleep=lambda _: None)


def test_workers_of_a_gang_leave_it_to_their_head(new: New) -> None:
    save(new.old, 10)
    assert new.begin(BATCHML_LAUNCH=LaunchPlan("ray", role="worker").to_json()) == 0
    assert new.begin(BATCHML_LAUNCH=LaunchPlan("ray", role="head").to_json()) == 10


def test_a_container_sees_the_old_folder_to_read_it_and_no_other(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    host = ExecutorHost(home, home.runtimes / "r", {})
    old = home.runs / OLD / "checkpoints"

    def asked(folder: Path) -> tuple[list[dict[str, Any]], ResumeSource]:
        told = ResumeSource(OLD, "train", folder=str(folder))
        job = job_of(["true"], environment=[{"name": VARIABLE, "value": told.to_json()}])
        spec = container_spec(host, Permits(), job, attempt_of(job))
        env = dict(entry.split("=", 1) for entry in spec["config"]["Env"])
        assert spec["wrap"] is True
        found = [each for each in spec["sources"] if "resumed" in each["target"]]
        return found, ResumeSource.read(env[VARIABLE])

    assert asked(home.runs / OLD)[0] == []  # the runtime says that nothing is there
    old.mkdir(parents=True)
    (source,), told = asked(home.runs / OLD)
    assert (source["path"], source["read_only"]) == (str(old), True)
    assert source["target"] == checkpoint_folder(told.folder, None)
    assert asked(tmp_path)[0] == asked(home.runs / ".." / OLD)[0] == []


# --- before it is sent ----------------------------------------------------------------------------

RUN = Run(OLD, "train", "q", JobStatus.FAILED, key="2key")
FOUND = FoundRun(RUN, None)
SPEC = JobSpec(image="python", command=("python", "t.py"))


@pytest.fixture
def context(tmp_path: Path) -> Context:
    environ = {"BATCHML_HOME": str(tmp_path / "home")}
    return Context(load_settings(environ, tmp_path, None), FakeClock(), tmp_path)


def saved(context: Context, *parts: str) -> Path:
    return context.home.runs.joinpath(*parts, "checkpoints")


def test_the_step_is_said_before_and_the_run_remembers_from_where(context: Context) -> None:
    save(saved(context, OLD), 120)
    wanted = with_checkpoints(context, FOUND, FOUND, RerunSpec(SPEC), None)
    assert wanted.notices == (f"It resumes from step 120 of train {OLD}.",)
    done = FoundRun(replace(RUN, status=JobStatus.SUCCEEDED), None)
    (words,) = with_checkpoints(context, done, done, RerunSpec(SPEC), None).notices
    assert words.startswith("It resumes from step 120") and "It had succeeded: " in words
    assert wanted.own_tags == {RESUMES_TAG: OLD}
    told = ResumeSource.read(str(wanted.spec.env[VARIABLE]))
    assert told == ResumeSource(OLD, "train", "2key", folder=str(context.home.runs / OLD))


def test_a_rerun_of_it_without_the_word_begins_anew() -> None:
    run = replace(RUN, environment={VARIABLE: "{}"}, tags={RESUMES_TAG: "x", "mine": "y"},
                  image="a/b:c", command=("true",))  # fmt: skip
    wanted = make_rerun(run, None)
    assert (wanted.spec.env, wanted.tags) == ({}, {"mine": "y"})


def test_of_an_array_each_has_its_own_and_what_has_none_is_named(context: Context) -> None:
    save(saved(context, f"{OLD}:1"), 10)
    save(saved(context, f"{OLD}:7"), 40)
    array = FoundRun(replace(RUN, children={"FAILED": 4, "SUCCEEDED": 5}, array_size=9), None)
    wanted = with_checkpoints(context, array, array, RerunSpec(SPEC, array=3), [1, 2, 7])
    assert wanted.notices == (
        f"It resumes from steps 10 to 40 of train {OLD}. "
        "1 of 3 children have no checkpoint and start anew: 2.",
    )
    assert ResumeSource.read(str(wanted.spec.env[VARIABLE])).children == "1-2 7"


@pytest.mark.parametrize(
    ("changes", "spec", "words"),
    [
        ({"status": JobStatus.RUNNING}, SPEC, "is RUNNING: it has not ended"),
        (
            {},
            replace(SPEC, env={"BATCHML_CHECKPOINT_DIR": "/x"}),
            "sets BATCHML_CHECKPOINT_DIR itself",
        ),
    ],
)
def test_what_cannot_go_on_is_refused(
    context: Context, changes: dict[str, Any], spec: JobSpec, words: str
) -> None:
    save(saved(context, OLD), 120)
    found = FoundRun(replace(RUN, **changes), None)
    with pytest.raises(UsageError, match=words):
        with_checkpoints(context, found, found, RerunSpec(spec), None)


def test_where_nothing_was_saved_nothing_is_sent_and_the_one_before_is_named(
    context: Context,
) -> None:
    with pytest.raises(NotFound, match=f"From the beginning: batchml rerun {OLD}"):
        with_checkpoints(context, FOUND, FOUND, RerunSpec(SPEC), None)
    found = FoundRun(replace(RUN, tags={RESUMES_TAG: "0lder"}), None)
    with pytest.raises(NotFound, match="batchml rerun --resume 0lder"):
        with_checkpoints(context, found, found, RerunSpec(SPEC), None)


class Bucket(Account):
    """With one bucket, whose objects have these keys."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.stacks["batchml-dev-storage"] = {"BucketName": "bucket"}
        self._keys = keys

    def answer(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation == "ListObjectsV2":
            found = [key for key in self._keys if key.startswith(params["Prefix"])]
            return {
                "Contents": [
                    {"Key": k, "Size": 1, "LastModified": datetime.now(UTC)} for k in found
                ]
            }
        return super().answer(operation, params)


STORED = replace(
    RUN, environment={"BATCHML_STORE": "s3://bucket/runs/2key"}, image="r/python@sha:1"
)
IN_AWS = FoundRun(
    STORED,
    Record(key="2key", job_id=OLD, name="train",
           image="123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/python@sha256:1",
           spec=msgspec.to_builtins(replace(SPEC, code=False, queue="gpu"))),
)  # fmt: skip
TOP = "runs/2key/checkpoints/"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")


def test_in_aws_the_bucket_is_asked_and_the_request_says_where(tmp_path: Path, keys: None) -> None:
    names = ("step-0000000007/m", "step-0000000007/MANIFEST.json", "step-0000000009/m")
    place, session = place_in(tmp_path, Bucket(*(TOP + name for name in names)).answer)
    prepared = prepare_again(place, IN_AWS, resume=True, dry_run=True)
    assert prepared is not None
    assert f"It resumes from step 7 of train {OLD}." in prepared.notices
    request = prepared.requests.submit
    env = {each["name"]: each["value"] for each in request["containerOverrides"]["environment"]}
    assert ResumeSource.read(env[VARIABLE]) == ResumeSource(
        OLD, "train", "2key", "s3://bucket/runs/2key"
    )
    assert request["tags"][RESUMES_TAG] == OLD
    assert VARIABLE not in str(prepared.record.spec)
    assert len(session.asked("ListObjectsV2")) == 1


@pytest.mark.parametrize("count", [3, 40])
def test_in_aws_children_that_have_kept_files_do_not_start_anew(
    tmp_path: Path, keys: None, count: int
) -> None:
    """Child 1 has a checkpoint, child 2 files of its working folder, the others other outputs."""
    kept = [f"runs/2key/output/{each}/ranks/work" for each in range(count)]
    stored = Bucket(f"{TOP}1/step-0000000007/MANIFEST.json", "runs/2key/output/2/work/m.pt", *kept)
    place, session = place_in(tmp_path, stored.answer)
    found = replace(STORED, children={"FAILED": count}, array_size=count)
    array = FoundRun(found, IN_AWS.record)
    wanted = RerunSpec(SPEC, array=count)
    (notice,) = with_checkpoints(place, array, array, wanted, None).notices
    others = "0" if count == 3 else f"0 3-{min(count - 1, 21)} ..."
    assert notice == (
        f"It resumes from step 7 of train {OLD}. {count - 2} of {count} children have no "
        f"checkpoint and start anew: {others}."
    )
    assert len(session.asked("ListObjectsV2")) == (3 if count == 3 else 2)


def test_in_aws_an_array_with_kept_files_alone_can_go_on(tmp_path: Path, keys: None) -> None:
    stored = Bucket(*(f"runs/2key/output/{each}/work/m.pt" for each in range(2)))
    place, _ = place_in(tmp_path, stored.answer)
    array = FoundRun(replace(STORED, array_size=2), IN_AWS.record)
    wanted = with_checkpoints(place, array, array, RerunSpec(SPEC, array=2), None)
    assert wanted.notices[0].startswith(f"What train {OLD} has saved is there again")


def test_in_aws_nothing_saved_is_refused_and_a_workspace_is_not_seen(
    tmp_path: Path, keys: None
) -> None:
    account = Bucket()
    place, _ = place_in(tmp_path, account.answer)
    with pytest.raises(NotFound, match=r"nothing to go on from.* any: batchml get [0-9a-f-]"):
        prepare_again(place, IN_AWS, resume=True, dry_run=True)
    account.stacks["batchml-dev-storage"] |= {"FileSystemId": "fs-1"}
    (tmp_path / "b").mkdir()
    place, _ = place_in(tmp_path / "b", account.answer)
    prepared = prepare_again(place, IN_AWS, resume=True, dry_run=True)
    assert prepared is not None
    assert "which this machine cannot see" in prepared.notices[0]


def test_an_image_that_is_not_ours_would_bring_nothing(tmp_path: Path, keys: None) -> None:
    place, _ = place_in(tmp_path, Bucket(f"{TOP}snapshot.pt").answer)
    assert IN_AWS.record is not None
    record = replace(IN_AWS.record, image="docker.io/library/python:3.12")
    with pytest.raises(UsageError, match="not an image that batchml built"):
        prepare_again(place, FoundRun(IN_AWS.run, record), resume=True, dry_run=True)
