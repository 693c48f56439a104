"""Which job definitions are collected, and how."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.aws.batch.jobs import DefinitionApi, DefinitionRevision, JobApi, to_definition
from batchml.errors import NotFound, ServiceError
from batchml.setup.definitions import deregister, find_definitions, find_old, register, unused
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
DAY = 86_400


def made(
    name: str, age: int | None = 40, job: str = "lenet", env: str = "local"
) -> DefinitionRevision:
    """A definition registered `age` days ago; without a date for None."""
    day = "" if age is None else (NOW - timedelta(days=age)).date().isoformat()
    return DefinitionRevision(name, 1, f"arn:{name}", job, env, day)


def collected(*given_: DefinitionRevision, keep: tuple[str, ...] = (), days: int = 30) -> list[str]:
    found = find_old(given_, "local", keep, NOW.timestamp(), days * DAY)
    return [each.name for each in found]


def test_old_ones_are_collected_and_young_ones_are_not() -> None:
    assert collected(made("old"), made("young", 29), made("undated", None)) == ["old", "undated"]


@pytest.mark.parametrize(("age", "days", "goes"), [
    (30, 30, False),  # registered some time on that day, perhaps after noon
    (31, 30, True), (0, 0, False), (1, 0, True), (1, 1, False), (2, 1, True),
])  # fmt: skip
def test_whole_days_must_have_passed(age: int, days: int, goes: bool) -> None:
    assert collected(made("d", age), days=days) == (["d"] if goes else [])


def test_a_day_that_has_just_passed_is_whole() -> None:
    midnight = NOW.replace(hour=0).timestamp()
    yesterday = made("d", 1)
    assert find_old([yesterday], "local", (), midnight, 0) == [yesterday]
    assert find_old([yesterday], "local", (), midnight - 1, 0) == []


def test_those_of_others_are_never_collected() -> None:
    assert collected(made("by-hand", job=""), made("elsewhere", env="dev")) == []


def test_the_newest_of_a_job_here_stays() -> None:
    old = [made("a", 50), made("b", 40), made("b2", 40), made("other", 50, job="resnet")]
    assert collected(*old, keep=("lenet",)) == ["a", "other"]
    assert collected(*old) == ["a", "b", "b2", "other"]


def test_a_date_that_nobody_can_read_is_as_none() -> None:
    assert collected(DefinitionRevision("d", 1, "arn", "lenet", "local", "yesterday")) == ["d"]


ages = st.none() | st.integers(0, 100)


@given(st.lists(st.tuples(ages, st.sampled_from(["lenet", "resnet", ""]),
                          st.sampled_from(["local", "dev"])), max_size=12),
       st.integers(0, 60))  # fmt: skip
def test_what_goes_is_ours_old_and_not_the_newest(
    given_: list[tuple[int | None, str, str]], days: int
) -> None:
    all_ = [made(f"d{i}", age, job, env) for i, (age, job, env) in enumerate(given_)]
    gone = find_old(all_, "local", {"lenet"}, NOW.timestamp(), days * DAY)
    for each in gone:
        age = given_[int(each.name[1:])][0]
        assert each.job and each.env == "local"
        assert age is None or age > days
    left = {each.registered for each in all_ if each not in gone and each.job == "lenet"}
    ours = [each.registered for each in all_ if each.job == "lenet" and each.env == "local"]
    assert not ours or max(ours) in left


def test_only_those_that_no_run_uses_go() -> None:
    asked: list[str] = []

    def is_used(each: DefinitionRevision) -> bool:
        asked.append(each.name)
        return each.name == "b"

    found = unused([made("a"), made("b"), made("c")], is_used)
    assert next(found).name == "a"
    assert asked == ["a"]  # each when it comes to it
    assert [each.name for each in found] == ["c"]


def test_aws_is_not_asked_faster_than_it_takes_well() -> None:
    gone: list[str] = []
    clock = FakeClock()
    done = list(deregister(gone.append, [made("a"), made("b"), made("c")], clock))
    assert [each.full_name for each in done] == gone == ["a:1", "b:1", "c:1"]
    assert clock.naps == [0.1, 0.1]


def test_a_definition_is_read_with_what_its_tags_say() -> None:
    detail = {
        "jobDefinitionName": "lenet-1", "revision": 2, "jobDefinitionArn": "arn",
        "containerProperties": {"image": "i"},
        "tags": {"batchml": "lenet", "batchml:env": "dev", "batchml:registered": "2026-11-21"},
    }  # fmt: skip
    assert to_definition(detail) == DefinitionRevision(
        "lenet-1", 2, "arn", "lenet", "dev", "2026-11-21", "i"
    )
    bare = {key: detail[key] for key in ("jobDefinitionName", "revision", "jobDefinitionArn")}
    assert to_definition(bare) == DefinitionRevision("lenet-1", 2, "arn")


# --- calls ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")


def with_runs(*runs: tuple[str, str, int]) -> ScriptedSession:
    """Runs as (queue, status, created at, in seconds); the first page of each queue is empty."""

    def answer(operation: str, params: dict[str, Any]) -> dict[str, Any]:
        if "nextToken" not in params:
            return {"jobSummaryList": [], "nextToken": "more"}
        return {
            "jobSummaryList": [
                {"jobId": "j", "jobName": "n", "status": status, "createdAt": at * 1000}
                for queue, status, at in runs
                if queue == params["jobQueue"]
            ]
        }

    return ScriptedSession(answer)


@pytest.mark.parametrize(
    ("run", "used"),
    [
        (("b", "RUNNABLE", 1), True), (("b", "RUNNING", 1), True), (("b", "PENDING", 1), True),
        (("b", "SUCCEEDED", 99), False), (("b", "FAILED", 101), True), (("c", "RUNNING", 1), False),
    ],
)  # fmt: skip
def test_a_definition_is_used_by_what_is_unfinished_or_young(
    run: tuple[str, str, int], used: bool
) -> None:
    session = with_runs(run)
    assert DefinitionApi(session).is_used(made("d"), ["a", "b"], since=100) is used
    assert session.calls[0] == (
        "ListJobs", {"jobQueue": "a", "filters": [{"name": "JOB_DEFINITION", "values": ["arn:d"]}]}
    )  # fmt: skip


def test_one_that_is_gone_stays_gone_and_any_other_refusal_is_told() -> None:
    gone = ScriptedSession(lambda *_: "ClientException: Job definition d:1 does not exist")
    DefinitionApi(gone).deregister("d:1")
    assert gone.asked("DeregisterJobDefinition") == [{"jobDefinition": "d:1"}]
    with pytest.raises(ServiceError):
        DefinitionApi(ScriptedSession(lambda *_: "ClientException: no")).deregister("d:1")


def described(*names: str) -> ScriptedSession:
    def answer(operation: str, params: dict[str, Any]) -> dict[str, Any]:
        asked = params.get("jobDefinitionName")
        pairs = [name.split(":") for name in names if asked in (None, name.split(":")[0])]
        return {"jobDefinitions": [
            {"jobDefinitionName": name, "revision": int(revision), "jobDefinitionArn": "arn",
             "tags": {"batchml": "lenet"}}
            for name, revision in pairs
        ]}  # fmt: skip

    return ScriptedSession(answer)


def test_a_name_means_all_of_its_revisions() -> None:
    session = described("d:1", "d:3", "e:1")
    assert [each.revision for each in find_definitions(DefinitionApi(session), "d")] == [3, 1]
    assert [each.revision for each in find_definitions(DefinitionApi(session), "d:1")] == [1]
    assert session.calls[0][1]["status"] == "ACTIVE"


@pytest.mark.parametrize(("asked", "hint"), [("d:2", "d:1, d:3"), ("dd", "d:1, d:3, e:1")])
def test_a_name_that_is_not_there_says_which_are(asked: str, hint: str) -> None:
    with pytest.raises(NotFound, match=f"Known: {hint}"):
        find_definitions(DefinitionApi(described("d:1", "d:3", "e:1")), asked)


def test_what_is_there_is_not_registered_again() -> None:
    session = described("d:1")
    assert register(JobApi(session), {"jobDefinitionName": "d"}, 0.0) is False
    assert session.asked("RegisterJobDefinition") == []
    request = {"jobDefinitionName": "new", "type": "container", "tags": {"batchml": "new"}}
    assert register(JobApi(session), request, 1_800_000_000.0) is True
    (sent,) = session.asked("RegisterJobDefinition")
    assert sent["tags"] == {"batchml": "new", "batchml:registered": "2027-01-15"}
