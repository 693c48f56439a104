"""`--after` over environments: one pipeline of a CPU environment and a GPU one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import UsageError
from batchml.explain.compute import AwsQuestion, WaitingRun
from batchml.explain.suggest import CommandWriter
from batchml.explain.waiting import explain_pending
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.dependencies import resolve_dependencies, split_env, unknown_env
from batchml.runs.options import RunRequest
from batchml.runs.prepare import prepare
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

CONFIG = """
default = "gpu"
[env.cpu]
region = "us-east-1"
[env.gpu]
region = "us-east-1"
[env.eu]
region = "eu-west-1"
[env.theirs]
region = "us-east-1"
profile = "theirs"
"""
PREP = "11111111-2222-3333-4444-555555555555"
FIRST = "2aaaaaaaaaaaaaaaa"


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """The environment `gpu`, on a machine from which `prep` was submitted to `cpu`."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")
    (tmp_path / "batchml.toml").write_text(CONFIG)
    settings = load_settings({"BATCHML_HOME": str(tmp_path / "home")}, tmp_path, "gpu")
    made = Context(settings, FakeClock(), tmp_path)
    made.home.prepare()
    remember(made, "cpu", "prep", PREP, FIRST)
    return made


def remember(context: Context, env: str, name: str, job_id: str, key: str, **more: Any) -> None:
    record = Record(key=key, name=name, job_name=f"{name}-{key}", env=env, **more)
    context.history.intend(record)
    context.history.add_job_id(key, job_id)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("cpu:prep", ("cpu", "prep")),
        ("cpu:prep:3", ("cpu", "prep:3")),
        ("cpu:@last", ("cpu", "@last")),
        ("prep", ("cpu", "prep")),
        ("prep:3", ("cpu", "prep:3")),
        (PREP, ("cpu", PREP)),
        (PREP[:8], ("cpu", PREP[:8])),
        (PREP[:4], ("gpu", PREP[:4])),  # too short to mean a run elsewhere
        ("train", ("gpu", "train")),
        ("@last", ("gpu", "@last")),
        ("cpu:3", ("gpu", "cpu:3")),  # child 3 of a run called cpu
        ("nowhere:prep", ("gpu", "nowhere:prep")),
    ],
)
def test_which_environment_a_word_means(
    context: Context, word: str, found: tuple[str, str]
) -> None:
    assert split_env(context, word) == found


@pytest.mark.parametrize("word", ["cpus:prep", "arn:aws:batch:us-east-1:123456789012:job/x"])
def test_an_environment_that_is_not_described_is_named(context: Context, word: str) -> None:
    if word.startswith("arn:"):
        assert not unknown_env(context, word)
        return
    with pytest.raises(UsageError, match=r"environment cpus does not exist in batchml\.toml\. Did"):
        resolve_dependencies(context, [word], [])


def test_a_run_of_here_is_meant_before_one_of_elsewhere(context: Context) -> None:
    remember(context, "gpu", "prep", PREP.replace("1", "9"), "3aaaaaaaaaaaaaaaa")
    assert split_env(context, "prep") == ("gpu", "prep")


def test_a_name_that_two_others_have_needs_its_environment(context: Context) -> None:
    remember(context, "eu", "prep", PREP.replace("1", "9"), "3aaaaaaaaaaaaaaaa")
    with pytest.raises(UsageError, match="--after cpu:prep or --after eu:prep"):
        split_env(context, "prep")


def test_the_request_depends_on_the_job_of_the_other_environment(context: Context) -> None:
    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        return "ValidationError: Stack does not exist"

    context._session = ScriptedSession(answer)
    order = RunRequest(
        command=("true",), changes={"image": "docker.io/library/busybox", "code": False},
        after=("cpu:prep", PREP),
    )  # fmt: skip
    submit = prepare(context, order, dry_run=False).requests.submit
    assert submit["dependsOn"] == [{"jobId": PREP}, {"jobId": PREP}]


def test_what_aws_batch_cannot_wait_for_is_refused_all_at_once(context: Context) -> None:
    remember(context, "eu", "far", PREP.replace("1", "8"), "4aaaaaaaaaaaaaaaa")
    remember(context, "local", "here", PREP.replace("1", "7"), "5aaaaaaaaaaaaaaaa")
    with pytest.raises(UsageError) as caught:
        resolve_dependencies(context, ["far", "local:here", "prep"], [])
    first, second = str(caught.value).splitlines()
    assert "gpu is in us-east-1, and eu is in eu-west-1" in first
    assert "batchml wait --env eu far && batchml submit --env gpu" in first
    assert "gpu is in us-east-1, and local is this machine" in second
    assert "batchml wait --env local here &&" in second


def test_another_profile_may_be_the_same_account(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = iter(["123456789012", "123456789012", "123456789012", "999999999999"])

    def answer(operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        return {"Account": next(accounts), "Arn": "arn:aws:iam::123456789012:root"}

    session = ScriptedSession(answer)
    monkeypatch.setattr(Context, "connect", lambda self: session)
    remember(context, "theirs", "other", PREP.replace("1", "6"), "6aaaaaaaaaaaaaaaa")
    assert resolve_dependencies(context, ["theirs:other"], []) == (PREP.replace("1", "6"),)
    with pytest.raises(UsageError, match="account 123456789012, and theirs in 999999999999"):
        resolve_dependencies(context, ["theirs:other"], [])


@pytest.mark.parametrize(("status", "warns"), [("RUNNABLE", True), ("RUNNING", False)])
def test_a_run_that_may_move_is_told_of(context: Context, status: str, warns: bool) -> None:
    job_id = PREP.replace("1", "5")
    detail = {
        "jobId": job_id, "jobName": "spotty-7aaaaaaaaaaaaaaaa", "jobQueue": "q", "status": status,
        "createdAt": 1, "jobDefinition": "d", "container": {},
        **({"startedAt": 2} if status == "RUNNING" else {}),
    }  # fmt: skip
    context._session = ScriptedSession(lambda operation, params: {"jobs": [detail]})
    remember(context, "gpu", "spotty", job_id, "7aaaaaaaaaaaaaaaa", fallback="batchml-gpu-od:1800")
    notices: list[str] = []
    assert resolve_dependencies(context, ["spotty"], notices) == (job_id,)
    assert [("fails the jobs that depend on it" in notice) for notice in notices] == [True] * warns


def test_explain_names_the_environment_of_what_is_waited_for() -> None:
    prep = Run("a", "prep", "q", JobStatus.FAILED, tags={"batchml:env": "cpu"})
    train = Run("b", "train", "q", JobStatus.PENDING, depends_on=("a",))
    waiting = WaitingRun(
        train,
        now=0,
        commands=CommandWriter("gpu"),
        dependencies=(prep,),
        asked=frozenset({AwsQuestion.DEPENDENCIES}),
    )
    for each, command in (
        (prep, "batchml explain a --env cpu"),
        (replace(prep, status=JobStatus.RUNNING), "batchml explain a --env cpu"),
        (replace(prep, tags={}), "batchml explain a --env gpu"),
    ):
        found = explain_pending(replace(waiting, dependencies=(each,)))
        assert found is not None
        assert found.command == command
