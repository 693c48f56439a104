"""Answers against botocore's own shapes, strictly, for jobs and resources in any state.

In process. test_every_operation.py goes over HTTP too, and sees to it that none is left out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.local_server import define
from tests.support.server_rig import Checked, Rig, furnish

GROUP = "/aws/batch/job"


class Place:
    """A furnished server and clients whose answers are checked."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder)
        self.checked = Checked()
        self.batch = self.checked.watch(self.rig.client("batch"))
        self.logs = self.checked.watch(self.rig.client("logs"))
        self.sts = self.rig.client("sts")
        furnish(self.batch)

    def submit(self, name: str = "job", **more: Any) -> str:
        made = self.batch.submit_job(
            **{"jobName": name, "jobQueue": "q", "jobDefinition": "d"} | more
        )
        return str(made["jobId"])

    def described(self, job_id: str) -> dict[str, Any]:
        """The raw record of a job, checked; listed as well in its state."""
        self.batch.describe_jobs(jobs=[job_id])
        (job,) = self.checked.last["jobs"]
        listed = self.batch.list_jobs(jobQueue="q", jobStatus=job["status"])["jobSummaryList"]
        assert job_id in [summary["jobId"] for summary in listed]
        assert self.checked.wrong == []
        return dict(job)

    def write(self, job_id: str, *lines: tuple[int, str]) -> str:
        """Give an attempt output; its stream."""
        attempt = self.rig.core.state.jobs[job_id].attempt
        assert attempt is not None
        with open(self.rig.log_of(attempt.task_id), "ab") as file:
            file.write(b"".join(f"{stamp} {text}\n".encode() for stamp, text in lines))
        return attempt.log_stream

    def listed(self, **params: Any) -> list[str]:
        """Job names, by the paginator."""
        pages = self.batch.get_paginator("list_jobs").paginate(jobQueue="q", **params)
        return [job["jobName"] for page in pages for job in page["jobSummaryList"]]


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.rig.close()
    assert made.checked.wrong == []


def test_a_job_fits_its_shape_in_every_state(context: Place) -> None:
    first = context.submit(
        timeout={"attemptDurationSeconds": 60},
        retryStrategy={
            "attempts": 2,
            "evaluateOnExit": [{"onExitCode": "9", "action": "exit"}],
        },
        parameters={"a.b": "c"},
        tags={"k": "v"},
        propagateTags=True,
        containerOverrides={"environment": [{"name": "A", "value": "1"}], "command": ["x"]},
    )
    pending = context.submit(dependsOn=[{"jobId": first}])
    assert context.described(pending)["status"] == "PENDING"
    starting = context.described(first)
    assert starting["status"] == "STARTING"
    assert starting["container"]["taskArn"]
    context.rig.start(first)
    running = context.described(first)
    assert running["status"] == "RUNNING"
    assert running["container"]["logStreamName"].startswith("d/default/")
    assert running["attempts"] == []
    context.batch.update_compute_environment(computeEnvironment="ce", state="DISABLED")
    context.rig.end(first, 3)
    runnable = context.described(first)
    assert (runnable["status"], len(runnable["attempts"])) == ("RUNNABLE", 1)
    context.batch.update_compute_environment(computeEnvironment="ce", state="ENABLED")
    context.rig.start(first)
    context.rig.end(first, 0)
    done = context.described(first)
    assert done["status"] == "SUCCEEDED"
    assert done["container"]["exitCode"] == done["attempts"][-1]["container"]["exitCode"] == 0
    assert [a["container"]["exitCode"] for a in done["attempts"]] == [3, 0]
    context.rig.end(pending, 137, oom=True)
    failed = context.described(pending)
    assert failed["status"] == "FAILED"
    assert failed["container"]["reason"].startswith("OutOfMemoryError")


@pytest.mark.parametrize(
    "end", [{"start_failure": "CannotPullContainerError: x"}, {"lost": "Host EC2 (x) terminated."}]
)
def test_a_job_without_an_exit_code_fits_its_shape(context: Place, end: dict[str, str]) -> None:
    job_id = context.submit()
    context.rig.end(job_id, code=None, **end)  # type: ignore[arg-type]
    job = context.described(job_id)
    assert "exitCode" not in job["container"]
    assert job["status"] == "FAILED"


def test_a_stopped_job_says_who_stopped_it(context: Place) -> None:
    """B12, B15."""
    jobs = [context.submit() for _ in range(5)]
    context.batch.cancel_job(jobId=jobs[4], reason="enough")
    context.batch.terminate_job(jobId=jobs[0], reason="halt")
    context.rig.end(jobs[0], 143)
    cancelled, terminated = context.described(jobs[4]), context.described(jobs[0])
    assert (cancelled["isCancelled"], cancelled["isTerminated"]) == (True, False)
    assert (terminated["isCancelled"], terminated["isTerminated"]) == (False, True)
    assert (cancelled["statusReason"], terminated["statusReason"]) == ("enough", "halt")


def test_a_definition_with_everything_fits_its_shape(context: Place) -> None:
    container = {
        "image": "i",
        "command": ["a", "Ref::p"],
        "jobRoleArn": "arn:aws:iam::000000000000:role/r",
        "volumes": [{"name": "v", "host": {"sourcePath": "/x"}}],
        "mountPoints": [{"containerPath": "/x", "sourceVolume": "v"}],
        "environment": [{"name": "A"}, {"name": "B", "value": ""}],
        "ulimits": [{"name": "nofile", "softLimit": 1, "hardLimit": 2}],
        "privileged": True,
        "user": "u",
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"},
            {"type": "MEMORY", "value": "64"},
            {"type": "GPU", "value": "1"},
        ],
        "linuxParameters": {"sharedMemorySize": 64, "initProcessEnabled": True},
        "logConfiguration": {"logDriver": "awslogs", "options": {"awslogs-stream-prefix": "pre"}},
    }
    context.batch.register_job_definition(
        jobDefinitionName="full", type="container", containerProperties=container,
        parameters={"p": "x"}, schedulingPriority=3, propagateTags=True, tags={"k": "v"},
        timeout={"attemptDurationSeconds": 99}, platformCapabilities=["EC2"],
        retryStrategy={"attempts": 3, "evaluateOnExit": [{"onReason": "*", "action": "EXIT"}]},
    )  # fmt: skip
    (definition,) = context.batch.describe_job_definitions(jobDefinitions=["full:1"])[
        "jobDefinitions"
    ]
    assert definition["containerProperties"] == container
    job = context.described(context.submit(jobDefinition="full", parameters={"p": "y"}))
    assert job["container"]["command"] == ["a", "y"]
    assert job["container"]["logStreamName"].startswith("pre/default/")
    assert job["timeout"] == {"attemptDurationSeconds": 99}
    assert job["retryStrategy"]["attempts"] == 3


def test_environments_and_queues_fit_their_shapes_through_their_lives(context: Place) -> None:
    batch = context.batch
    batch.create_compute_environment(
        computeEnvironmentName="own", type="UNMANAGED", unmanagedvCpus=3, serviceRole="r"
    )
    batch.update_compute_environment(computeEnvironment="own", unmanagedvCpus=4, state="DISABLED")
    environments = batch.describe_compute_environments()["computeEnvironments"]
    assert {e["computeEnvironmentName"]: (e["state"], e["status"]) for e in environments} == {
        "ce": ("ENABLED", "VALID"),
        "own": ("DISABLED", "VALID"),
    }
    batch.update_job_queue(jobQueue="q", priority=7)
    (queue,) = batch.describe_job_queues(jobQueues=["q"])["jobQueues"]
    assert (queue["state"], queue["status"], queue["priority"]) == ("ENABLED", "VALID", 7)
    assert queue["computeEnvironmentOrder"][0]["computeEnvironment"].endswith(":ce") is False
    with pytest.raises(batch.exceptions.ClientException, match="JobQueue relationship"):
        batch.update_compute_environment(computeEnvironment="ce", state="DISABLED")
        batch.delete_compute_environment(computeEnvironment="ce")
    batch.update_job_queue(jobQueue=queue["jobQueueArn"], state="DISABLED")
    batch.delete_job_queue(jobQueue="q")
    batch.delete_compute_environment(computeEnvironment="ce")
    assert batch.describe_job_queues()["jobQueues"] == []
    batch.delete_job_queue(jobQueue="q")


def test_a_deregistered_definition_is_inactive_and_its_number_is_not_used_again(
    context: Place,
) -> None:
    """B41."""
    batch = context.batch
    batch.deregister_job_definition(jobDefinition="d:1")
    with pytest.raises(batch.exceptions.ClientException, match="not ACTIVE"):
        context.submit()
    again = batch.register_job_definition(
        jobDefinitionName="d", type="container",
        containerProperties={"image": "i", "vcpus": 1, "memory": 4},
    )  # fmt: skip
    assert again["revision"] == 2
    found = batch.describe_job_definitions(jobDefinitionName="d")["jobDefinitions"]
    assert [(d["revision"], d["status"]) for d in found] == [(2, "ACTIVE"), (1, "INACTIVE")]
    active = batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    assert [d["revision"] for d in active] == [2]


def test_definitions_come_in_pages_that_make_up_the_whole(context: Place) -> None:
    for number in range(7):
        define(context.batch, ["x"], name=f"d{number % 2}")
    pages = context.batch.get_paginator("describe_job_definitions").paginate(
        PaginationConfig={"PageSize": 3}
    )
    sizes, names = [], []
    for page in pages:
        sizes.append(len(page["jobDefinitions"]))
        names += [f"{d['jobDefinitionName']}:{d['revision']}" for d in page["jobDefinitions"]]
    assert sizes == [3, 3, 2]
    assert names == ["d:1", "d0:4", "d0:3", "d0:2", "d0:1", "d1:3", "d1:2", "d1:1"]


def test_jobs_are_listed_newest_first_in_pages_without_loss(context: Place) -> None:
    """B42."""
    names = [f"job{number}" for number in range(7)]
    for name in names:
        context.submit(name)
    config = {"PageSize": 2}
    assert context.listed(jobStatus="STARTING", PaginationConfig=config) == names[3::-1]
    assert context.listed(jobStatus="RUNNABLE", PaginationConfig=config) == names[:3:-1]
    everything = [{"name": "JOB_NAME", "values": ["job*"]}]
    assert context.listed(filters=everything, PaginationConfig=config) == names[::-1]


def test_without_a_status_running_jobs_alone_are_listed(context: Place) -> None:
    """B43."""
    running = context.submit("running")
    context.submit("starting")
    context.rig.start(running)
    assert context.listed() == ["running"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("JOB_NAME", "TRAIN-a", ["Train-A"]),
        ("JOB_NAME", "train*", ["train-b", "Train-A"]),
        ("JOB_NAME", "*", ["other", "train-b", "Train-A"]),
        ("JOB_NAME", "rain*", []),
        ("JOB_DEFINITION", "d", ["other", "train-b", "Train-A"]),
        ("JOB_DEFINITION", "d*", ["other", "train-b", "Train-A"]),
        ("JOB_DEFINITION", "D", []),
        ("AFTER_CREATED_AT", "0", ["other", "train-b", "Train-A"]),
        ("BEFORE_CREATED_AT", "0", []),
        ("AFTER_CREATED_AT", "9999999999999", []),
        ("BEFORE_CREATED_AT", "9999999999999", ["other", "train-b", "Train-A"]),
    ],
)
def test_filters_list_jobs_of_all_states(
    context: Place, name: str, value: str, expected: list[str]
) -> None:
    """B44."""
    ended = context.submit("Train-A")
    context.rig.end(ended)
    context.submit("train-b")
    context.submit("other")
    filters = [{"name": name, "values": [value]}]
    assert context.listed(filters=filters, jobStatus="FAILED") == expected


def test_a_time_filter_leaves_out_the_moment_itself(context: Place) -> None:
    job_id = context.submit()
    created = context.described(job_id)["createdAt"]
    for name in ("AFTER_CREATED_AT", "BEFORE_CREATED_AT"):
        assert context.listed(filters=[{"name": name, "values": [str(created)]}]) == []
    after = [{"name": "AFTER_CREATED_AT", "values": [str(created - 1)]}]
    assert context.listed(filters=after) == ["job"]


def test_an_empty_token_is_no_token(context: Place) -> None:
    context.submit()
    listed = context.batch.list_jobs(jobQueue="q", jobStatus="STARTING", nextToken="")
    assert len(listed["jobSummaryList"]) == 1
    assert len(context.batch.describe_job_definitions(nextToken="")["jobDefinitions"]) == 1


def test_jobs_are_found_by_id_and_arn_and_unknown_ones_left_out(context: Place) -> None:
    """B45."""
    a, b = context.submit(), context.submit()
    arn = context.described(a)["jobArn"]
    found = context.batch.describe_jobs(jobs=[b, "unknown", arn])["jobs"]
    assert [job["jobId"] for job in found] == [b, a]
    assert context.batch.describe_jobs(jobs=[])["jobs"] == []
    with pytest.raises(context.batch.exceptions.ClientException, match="jobs supported is  100"):
        context.batch.describe_jobs(jobs=["x"] * 101)


# --- logs -----------------------------------------------------------------------------------


def test_the_forward_token_stays_the_same_at_the_end(context: Place) -> None:
    """B50."""
    job_id = context.submit()
    stream = context.write(job_id, *[(1000 + n, f"line {n}") for n in range(5)])
    found: list[str] = []
    token: dict[str, str] = {}
    for _ in range(10):
        page = context.logs.get_log_events(
            logGroupName=GROUP, logStreamName=stream, startFromHead=True, limit=2, **token
        )
        found += [event["message"] for event in page["events"]]
        if page["nextForwardToken"] == token.get("nextToken"):
            break
        token = {"nextToken": page["nextForwardToken"]}
    assert found == [f"line {n}" for n in range(5)]
    context.write(job_id, (2000, "late"))
    page = context.logs.get_log_events(logGroupName=GROUP, logStreamName=stream, **token)
    assert [event["message"] for event in page["events"]] == ["late"]


def test_without_start_from_head_the_newest_events_come_first_and_lead_back(context: Place) -> None:
    stream = context.write(context.submit(), *[(1000, f"line {n}") for n in range(7)])
    pages: list[list[str]] = []
    token: dict[str, str] = {}
    for _ in range(10):
        page = context.logs.get_log_events(
            logGroupName=GROUP, logStreamName=stream, limit=3, **token
        )
        pages.append([event["message"][5:] for event in page["events"]])
        if page["nextBackwardToken"] == token.get("nextToken"):
            break
        token = {"nextToken": page["nextBackwardToken"]}
    assert pages == [["4", "5", "6"], ["1", "2", "3"], ["0"], []]


def test_times_bound_what_is_read(context: Place) -> None:
    stream = context.write(context.submit(), *[(n, f"{n}") for n in range(9)])
    for head in (True, False):
        page = context.logs.get_log_events(
            logGroupName=GROUP, logStreamName=stream, startTime=3, endTime=6, startFromHead=head
        )
        assert [event["message"] for event in page["events"]] == ["3", "4", "5"]


def test_a_job_that_has_not_written_yet_has_an_empty_stream(context: Place) -> None:
    job_id = context.submit()
    stream = context.described(job_id)["container"]["logStreamName"]
    for head in (True, False):
        page = context.logs.get_log_events(
            logGroupName=GROUP, logStreamName=stream, startFromHead=head
        )
        assert page["events"] == []
    context.write(job_id, (1, "first"))
    page = context.logs.get_log_events(
        logGroupName=GROUP, logStreamName=stream, nextToken=page["nextForwardToken"]
    )
    assert [event["message"] for event in page["events"]] == ["first"]


def test_events_of_many_streams_are_merged_by_time_in_pages(context: Place) -> None:
    """B54."""
    first, other = context.submit(), context.submit()
    names = [
        context.write(first, *[(n, f"a{n}") for n in range(0, 200, 2)]),
        context.write(other, *[(n, f"b{n}") for n in range(1, 200, 2)]),
    ]
    expected = [f"{'ab'[n % 2]}{n}" for n in range(200)]
    for chosen in ({}, {"logStreamNames": [*names, names[0]]}, {"logStreamNamePrefix": "d/"}):
        pages = context.logs.get_paginator("filter_log_events").paginate(
            logGroupName=GROUP, PaginationConfig={"PageSize": 7}, **chosen
        )
        events = [event for page in pages for event in page["events"]]
        assert [event["message"] for event in events] == expected
        assert len({event["eventId"] for event in events}) == 200
        assert {event["logStreamName"] for event in events} == set(names)


def test_more_streams_than_files_may_be_open_are_read_at_once(context: Place) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    context.batch.update_compute_environment(
        computeEnvironment="ce", computeResources={"maxvCpus": 4}
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, hard))
    try:
        for number in range(130):
            job_id = context.submit()
            context.write(job_id, (number, "line"))
            context.rig.end(job_id)
        events = context.logs.filter_log_events(logGroupName=GROUP)["events"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [event["timestamp"] for event in events] == list(range(130))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("loss", ["loss 1", "val loss 2"]), ("loss -val", ["loss 1"]), ("Loss", []),
        ("?val ?done", ["val loss 2", "done"]), ('"val loss"', ["val loss 2"]), ("", None),
        ('""', None),
    ],
)  # fmt: skip
def test_plain_patterns_choose_events(
    context: Place, pattern: str, expected: list[str] | None
) -> None:
    """B55."""
    lines = ["loss 1", "val loss 2", "done"]
    context.write(context.submit(), *[(n, line) for n, line in enumerate(lines)])
    found = context.logs.filter_log_events(logGroupName=GROUP, filterPattern=pattern)["events"]
    assert [event["message"] for event in found] == (lines if expected is None else expected)


def test_groups_and_streams_are_described_in_pages(context: Place) -> None:
    for number in range(3):
        context.write(context.submit(), (number + 5, "x"))
    pages = context.logs.get_paginator("describe_log_streams").paginate(
        logGroupName=GROUP, PaginationConfig={"PageSize": 2}
    )
    streams = [stream for page in pages for stream in page["logStreams"]]
    assert sorted(stream["lastEventTimestamp"] for stream in streams) == [5, 6, 7]
    (newest,) = context.logs.describe_log_streams(
        logGroupName=GROUP, orderBy="LastEventTime", descending=True, limit=1
    )["logStreams"]
    assert newest["lastEventTimestamp"] == 7
    assert [g["logGroupName"] for g in context.logs.describe_log_groups()["logGroups"]] == [GROUP]


def test_log_groups_keep_to_the_limit(context: Place) -> None:
    options = {"awslogs-group": "/mine"}
    define(context.batch, ["x"], container={
        "logConfiguration": {"logDriver": "awslogs", "options": options}
    }, name="own")  # fmt: skip
    context.submit(jobDefinition="own")
    page = context.logs.describe_log_groups(limit=1)
    assert [group["logGroupName"] for group in page["logGroups"]] == [GROUP]
    rest = context.logs.describe_log_groups(nextToken=page["nextToken"])["logGroups"]
    assert [group["logGroupName"] for group in rest] == ["/mine"]


# --- errors ---------------------------------------------------------------------------------


def test_errors_are_typed(context: Place) -> None:
    batch, logs = context.batch, context.logs
    with pytest.raises(batch.exceptions.ClientException, match="Error executing request"):
        context.submit(jobQueue="nope")
    with pytest.raises(logs.exceptions.ResourceNotFoundException):
        logs.get_log_events(logGroupName=GROUP, logStreamName="nope")
    with pytest.raises(logs.exceptions.ResourceNotFoundException):
        logs.filter_log_events(logGroupName="/nope")
    with pytest.raises(logs.exceptions.InvalidParameterException):
        logs.get_log_events(logGroupName=GROUP, logStreamName="a*b")


def test_what_is_not_served_says_so_in_each_service_s_way(context: Place) -> None:
    with pytest.raises(
        context.batch.exceptions.ClientException, match="not served by the embedded"
    ):
        context.batch.list_service_jobs(jobQueue="q")
    with pytest.raises(ClientError, match="not served by the embedded") as refused:
        context.logs.create_log_group(logGroupName="x", tags={"a": "b"})
    assert refused.value.response["Error"]["Code"] == "UnknownOperationException"
    with pytest.raises(ClientError, match="not served by the embedded"):
        context.sts.get_session_token()


def test_sts_says_who_is_calling(context: Place) -> None:
    identity = context.sts.get_caller_identity()
    assert (identity["Account"], identity["UserId"]) == ("000000000000", "BMLLOCALTEST")


def test_wrong_keys_are_an_error_that_every_service_s_client_can_read(context: Place) -> None:
    for service, call in (
        ("batch", "describe_job_queues"),
        ("ecs", "list_container_instances"),
        ("logs", "describe_log_groups"),
        ("sts", "get_caller_identity"),
    ):
        client = context.rig.client(service)
        client._request_signer._credentials.secret_key = "wrong"
        with pytest.raises(ClientError) as refused:
            getattr(client, call)()
        assert refused.value.response["Error"]["Code"] == "InvalidSignatureException"
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_what_is_out_of_scope_is_refused_and_never_ignored(context: Place) -> None:
    """A job without half of what it asked for would fail in stranger ways. (B92)"""
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
    container: dict[str, Any] = {"image": "i", "command": ["true"], "resourceRequirements": needs}
    task = {"containers": [{"image": "i", "resourceRequirements": needs}]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("ecsProperties: not served", {"ecsProperties": {"taskProperties": [task]}}),
        ("eksProperties: not served", {"eksProperties": {"podProperties": {}}}),
        ("Fargate is not", {"containerProperties": container, "platformCapabilities": ["FARGATE"]}),
    ]
    for text, more in asked:
        with pytest.raises(context.batch.exceptions.ClientException, match=text):
            context.batch.register_job_definition(jobDefinitionName="d", type="container", **more)
