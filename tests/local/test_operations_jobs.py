"""Checks and changes of the API calls, besides scheduling: docs/behaviours.md B180-B190."""

from pathlib import Path
from typing import Any

import pytest

from batchml.local.server.protocol import ApiError
from tests.support.engine_world import World, consuming, pairs, world
from tests.support.models import ec2

JOB: dict[str, Any] = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}


def arn(kind: str, name: str) -> str:
    return f"arn:aws:batch:us-east-1:000000000000:{kind}/{name}"


# --- tags -------------------------------------------------------------------------------------


@pytest.fixture
def tagged(tmp_path: Path) -> World:
    """A world with one of everything that can have tags; job j6 has ended, j7 has not."""
    w = world(journal=tmp_path / "journal.db")
    w.call("CreateSchedulingPolicy", name="p", fairsharePolicy={})
    w.call("CreateConsumableResource", consumableResourceName="c", totalQuantity=1)
    w.end(w.submit(tags={"old": "1"}))
    assert w.array(2) == "j7"
    return w


@pytest.mark.parametrize(
    "name",
    ["compute-environment/ce", "job-queue/q", "job-definition/d:1", "scheduling-policy/p",
     "consumable-resource/c", "job/j6", "job/j7"],
)  # fmt: skip
def test_everything_with_an_arn_can_be_tagged(tagged: World, name: str) -> None:
    """B180: also jobs that have ended."""
    resource = arn(*name.split("/"))
    before = tagged.read("ListTagsForResource", resourceArn=resource)["tags"]
    tagged.call("TagResource", resourceArn=resource, tags={"a": "1", "b": "2"})
    tagged.call("TagResource", resourceArn=resource, tags={"a": "3"})
    tagged.call("UntagResource", resourceArn=resource, tagKeys=["b", "none"])
    tagged.restart()
    after = tagged.read("ListTagsForResource", resourceArn=resource)["tags"]
    assert after == before | {"a": "3"}


@pytest.mark.parametrize("name", ["job/j7:0", "job/j7#0"])
def test_children_and_nodes_cannot_be_tagged(tagged: World, name: str) -> None:
    """B180."""
    resource = arn(*name.split("/"))
    for operation, given in (
        ("TagResource", {"tags": {"a": "1"}}),
        ("UntagResource", {"tagKeys": ["a"]}),
    ):
        text = tagged.refusal(operation, resourceArn=resource, **given)
        assert "can not be tagged" in text


@pytest.mark.parametrize(
    "name", ["job/none", "job-queue/none", "job-definition/d:9", "service-job/x", "job-queue/ce"]
)
def test_tags_are_for_what_exists(tagged: World, name: str) -> None:
    resource = arn(*name.split("/"))
    assert "not found" in tagged.refusal("TagResource", resourceArn=resource, tags={"a": "1"})
    with pytest.raises(ApiError, match="not found"):
        tagged.read("ListTagsForResource", resourceArn=resource)


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ({"": "v"}, "1-128 characters"),
        ({"k" * 129: "v"}, "1-128 characters"),
        ({"k": "v" * 257}, "256"),
        ({"aws:k": "v"}, "aws:"),
        ({f"k{n}": "v" for n in range(51)}, "at most 50"),
    ],
)
def test_tags_have_limits(tagged: World, tags: dict[str, str], text: str) -> None:
    """B180: the same when a resource is made."""
    queue = arn("job-queue", "q")
    assert text in tagged.refusal("TagResource", resourceArn=queue, tags=tags)
    assert text in tagged.refusal("SubmitJob", **JOB, tags=tags)
    assert text in tagged.refusal("CreateConsumableResource", consumableResourceName="n", tags=tags)


def test_the_fiftieth_tag_is_the_last(tagged: World) -> None:
    """B180."""
    queue = arn("job-queue", "q")
    tagged.call("TagResource", resourceArn=queue, tags={f"k{n}": "v" for n in range(50)})
    assert "at most 50" in tagged.refusal("TagResource", resourceArn=queue, tags={"more": "v"})
    tagged.call("TagResource", resourceArn=queue, tags={"k7": "w"})


def test_a_tag_changes_nothing_else_of_a_job_that_has_ended(tagged: World) -> None:
    before = tagged.described("j6")
    tagged.call("TagResource", resourceArn=arn("job", "j6"), tags={"a": "1"})
    assert tagged.described("j6") == before | {"tags": {"old": "1", "a": "1"}}
    assert "j6" not in tagged.state.jobs
    assert tagged.state.counts["j7"] == {"PENDING": 0, "RUNNABLE": 0, "STARTING": 2}


# --- compute environments and queues ----------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        ({"instanceRole": ""}, "Instance role is required."),
        ({"minvCpus": None}, "Resource minvCpus is required."),
        ({"instanceTypes": ["c7i", "this-machine"]}, "Instance type can only be one of"),
        ({"instanceTypes": ["C7I.large"]}, "not 'C7I.large'"),
    ],
)
def test_an_environment_is_refused_as_by_aws(resources: dict[str, Any], text: str) -> None:
    """B7a."""
    given = {name: value for name, value in ec2(1, **resources).items() if value is not None}
    asked = {"computeEnvironmentName": "n", "type": "MANAGED", "computeResources": given}
    assert text in world().refusal("CreateComputeEnvironment", **asked)


def test_instance_types_of_ec2_are_taken_newer_ones_too() -> None:
    """B7a."""
    names = ["optimal", "default_x86_64", "default-arm64", "c7i", "p5en.48xlarge", "g6e", "u-6tb1",
             "u7i-12tb.224xlarge", "c9gd.metal-48xl", "trn3.3xlarge"]  # fmt: skip
    world().environment("many", computeResources=ec2(1, instanceTypes=names))


def test_a_queue_has_environments_of_its_own_account() -> None:
    """B7a."""
    w = world()
    theirs = arn("compute-environment", "ce").replace("000000000000", "123456789012")
    asked = {"jobQueueName": "n", "priority": 1}
    order = [{"order": 1, "computeEnvironment": theirs}]
    text = w.refusal("CreateJobQueue", **asked, computeEnvironmentOrder=order)
    assert "belongs to an account other than 000000000000" in text
    w.queue("n", 1, arn("compute-environment", "ce"))


# --- what is accepted and then fails ----------------------------------------------------------


def test_more_than_fifty_tags_to_propagate_fail_the_job() -> None:
    """B182."""
    w = world()
    w.call("RegisterJobDefinition", jobDefinitionName="t", type="container", propagateTags=True,
           containerProperties={"image": "i", "vcpus": 1, "memory": 64},
           tags={f"d{n}": "v" for n in range(30)})  # fmt: skip
    few = {f"j{n}": "v" for n in range(20)}
    assert w.status(w.submit(jobDefinition="t", tags=few)) == ["STARTING"]
    many = w.submit(jobDefinition="t", tags=few | {"one": "more"})
    assert w.status(many) == ["FAILED"]
    assert "Tags propagated" in w.reasons(many)[0]
    spared = w.submit(jobDefinition="t", tags=few | {"one": "more"}, propagateTags=False)
    assert w.status(spared) == ["STARTING"]


@pytest.mark.parametrize(
    "override",
    [
        {"command": ["x" * 8000]},
        {"environment": [{"name": "A", "value": "x" * 8000}]},
        {"environment": [{"name": f"NAME_{n}", "value": "x" * 50} for n in range(110)]},
    ],
)
def test_overrides_that_are_too_long_for_ecs_fail_the_job_when_it_would_be_sent(
    override: dict[str, Any],
) -> None:
    """B181: it never has an attempt, and what depends on it fails."""
    w = world()
    other = w.submit()
    job = w.submit(after=(other,), containerOverrides=override)
    then = w.submit(after=(job,))
    assert w.status(job, then) == ["PENDING", "PENDING"]
    w.end(other)
    assert w.reasons(job, then) == [
        "Container Overrides length must be at most 8192", "Dependent Job failed",
    ]  # fmt: skip
    assert w.jobs[job].attempts == ()
    assert [launch.job.id for launch in w.launches] == [other]
    array = w.array(2, containerOverrides=override)
    assert set(w.reasons(array, f"{array}:0", f"{array}:1")) == {
        "Container Overrides length must be at most 8192"
    }


def test_overrides_of_seven_thousand_bytes_are_sent() -> None:
    """B181."""
    w = world()
    assert w.status(w.submit(containerOverrides={"command": ["x" * 7000]})) == ["STARTING"]


# --- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["CancelJob", "TerminateJob"])
def test_a_reason_has_at_most_1024_characters(operation: str) -> None:
    """B183."""
    w = world(vcpus=1)
    w.submit()
    job = w.submit()
    assert "1024" in w.refusal(operation, jobId=job, reason="x" * 1025)
    w.call(operation, jobId=job, reason="x" * 1024)
    assert w.reasons(job) == ["x" * 1024]


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        ({"attempts": 0}, "between 1 and 10"),
        ({"attempts": 11}, "between 1 and 10"),
        ({"evaluateOnExit": [{"action": "EXIT", "onReason": "x"}]}, "must be provided"),
        ({"attempts": 2, "evaluateOnExit": [{"action": "EXIT"}] * 6}, "At most 5"),
    ],
)
def test_a_retry_strategy_has_limits(strategy: dict[str, Any], text: str) -> None:
    """B184."""
    w = world()
    assert text in w.refusal("SubmitJob", **JOB, retryStrategy=strategy)


@pytest.mark.parametrize(
    ("name", "pattern", "good"),
    [
        ("onReason", "CannotPull*", True),
        ("onReason", "a b.c:D9 *", True),
        ("onReason", "with-hyphen", False),
        ("onReason", "Host EC2 (instance*", False),
        ("onReason", "a*b", False),
        ("onReason", "*a", False),
        ("onReason", "x" * 511 + "*", True),
        ("onReason", "x" * 512, True),
        ("onReason", "x" * 512 + "*", False),
        ("onStatusReason", "Host EC2*", True),
        ("onStatusReason", "ä", False),
        ("onExitCode", "13*", True),
        ("onExitCode", "-1", False),
        ("onExitCode", "1a", False),
        ("onExitCode", "*", True),
    ],
)
def test_a_pattern_of_a_retry_has_the_characters_that_aws_allows(
    name: str, pattern: str, good: bool
) -> None:
    """B184."""
    w = world()
    strategy = {"attempts": 2, "evaluateOnExit": [{name: pattern, "action": "RETRY"}]}
    if good:
        assert w.submit(retryStrategy=strategy)
    else:
        assert name in w.refusal("SubmitJob", **JOB, retryStrategy=strategy)


def test_a_job_has_at_most_20_dependencies() -> None:
    """B185."""
    w = world()
    job = w.submit()
    assert "At most 20" in w.refusal("SubmitJob", **JOB, dependsOn=[{"jobId": job}] * 21)
    assert w.submit(after=(job,) * 20)


def test_a_timeout_is_a_minute_at_least() -> None:
    w = world()
    text = w.refusal("SubmitJob", **JOB, timeout={"attemptDurationSeconds": 59})
    assert "at least 60" in text


def test_what_a_job_gives_itself_wins_over_its_definition() -> None:
    """B186."""
    w = world()
    w.call("CreateConsumableResource", consumableResourceName="a", totalQuantity=9)
    w.call("CreateConsumableResource", consumableResourceName="b", totalQuantity=9)
    w.call(
        "RegisterJobDefinition", jobDefinitionName="full", type="container",
        containerProperties={
            "image": "i", "vcpus": 1, "memory": 64, "command": ["Ref::x", "Ref::y", "a Ref::x"],
            "environment": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        },
        parameters={"x": "1", "y": "2"}, retryStrategy={"attempts": 2}, schedulingPriority=7,
        timeout={"attemptDurationSeconds": 60}, consumableResourceProperties=consuming(a=1),
    )  # fmt: skip
    given = w.jobs[w.submit(jobDefinition="full", containerOverrides={})].spec
    assert given.container["command"] == ["1", "2", "a Ref::x"]
    assert (given.retry, given.timeout, given.priority) == ({"attempts": 2}, 60, 7)
    assert given.consumables == (("a", 1),)
    own = w.jobs[
        w.submit(
            jobDefinition="full", parameters={"y": "3"}, retryStrategy={"attempts": 3},
            timeout={"attemptDurationSeconds": 90}, schedulingPriorityOverride=1,
            consumableResourcePropertiesOverride=consuming(b=2),
            containerOverrides={"vcpus": 2, "environment": [{"name": "B", "value": "3"}]},
        )
    ].spec  # fmt: skip
    assert own.container["command"] == ["1", "3", "a Ref::x"]
    assert (own.retry, own.timeout, own.priority) == ({"attempts": 3}, 90, 1)
    assert own.consumables == (("b", 2),)
    assert own.needs.vcpus == 2
    assert {e["name"]: e["value"] for e in own.container["environment"]} == {"A": "1", "B": "3"}


# --- CancelJobs and TerminateJobs -------------------------------------------------------------


@pytest.mark.parametrize("operation", ["CancelJobs", "TerminateJobs"])
def test_many_jobs_are_stopped_with_one_call(operation: str) -> None:
    """B190."""
    w = world(vcpus=1)
    running, *waiting = (w.submit() for _ in range(3))
    array = w.array(2)
    ended = w.submit()
    w.cancel(ended, "before")
    asked = [running, *waiting, arn("job", array), ended, "none", running]
    answer = w.call(operation, jobs=asked, reason="enough")
    assert answer == {"successful": asked, "errors": []}
    assert w.reasons(*waiting, array, f"{array}:0", ended) == ["enough"] * 4 + ["before"]
    assert w.stops == ([w.task(running)] if operation == "TerminateJobs" else [])


@pytest.mark.parametrize("operation", ["CancelJobs", "TerminateJobs"])
def test_up_to_fifty_jobs_are_stopped_with_one_call(operation: str) -> None:
    """B190."""
    w = world()
    assert "between 0 and 50" in w.refusal(operation, jobs=["j"] * 51, reason="r")
    assert "1024" in w.refusal(operation, jobs=["j"], reason="x" * 1025)
    for count in (0, 50):
        w.call(operation, jobs=["j"] * count, reason="r")


@pytest.mark.parametrize("operation", ["CancelJob", "TerminateJob"])
def test_a_stop_names_a_job_and_a_reason(operation: str) -> None:
    """B183."""
    w = world()
    for given in ({"jobId": "", "reason": "r"}, {"jobId": w.submit(), "reason": ""}):
        assert "must not be empty" in w.refusal(operation, **given)


def test_stopping_jobs_that_depend_on_each_other_with_one_call() -> None:
    """B190: one that is ended by another's end before its turn keeps that reason."""
    w = world(vcpus=1)
    w.submit()
    first = w.submit()
    second = w.submit(after=(first,))
    array = w.array(2)
    paired = w.array(2, pairs(array))
    w.call("TerminateJobs", jobs=[second, first, paired, array], reason="enough")
    assert set(w.reasons(first, second, array, paired, f"{paired}:1")) == {"enough"}
    assert len(w.state.jobs) == 1
