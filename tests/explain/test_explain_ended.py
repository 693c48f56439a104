"""Why a run failed, with AWS: which calls are made, and what AWS Batch and EC2 have forgotten."""

from typing import Any

import pytest

from batchml.errors import NotFound
from batchml.model.run import Attempt, Record
from tests.support.explain_world import (
    EXITED,
    ID,
    LOST,
    OOM,
    OTHER,
    TIMED_OUT,
    Aws,
    World,
    ago,
    job,
    log,
)


def test_the_memory_that_a_killed_run_used_is_read_from_its_log(aws: Aws) -> None:
    killed = failed(attempts=[{"container": {"logStreamName": "s", "exitCode": 137}}],
                    container={"exitCode": 137, "logStreamName": "s"})  # fmt: skip
    marks = ("::batchml usage cpu=0.1 memory=90", "hi",
             "::batchml usage cpu=0.1 memory=90 mean_cpu=0.1 most_memory=173")  # fmt: skip
    told, calls = aws.explain(World(killed, GetLogEvents=log(*marks)))
    assert "it used 173 of 15360 MiB" in told.explanation.verdict
    assert calls == ["DescribeJobs", "GetLogEvents"]
    told, _ = aws.explain(World(killed, GetLogEvents=log("hi")))
    assert "--memory" in told.explanation.command


def failed(because: str = EXITED, **more: Any) -> dict[str, Any]:
    tried = {"container": {"logStreamName": "s", "exitCode": 1}, "statusReason": because}
    container = {"exitCode": 1, "logStreamName": "s", **more.pop("container", {})}
    return job("FAILED", text=because, container=container, **{"attempts": [tried], **more})


def test_a_failed_program_takes_two_calls_and_one_page_of_its_log(aws: Aws) -> None:
    world = World(failed(), GetLogEvents=log(
        "::batchml host vcpus=2", "ModuleNotFoundError: No module named 'x'",
        "::batchml end code=1 lines=1"))  # fmt: skip
    told, calls = aws.explain(world)
    assert calls == ["DescribeJobs", "GetLogEvents"]
    asked = aws.session.asked("GetLogEvents")[0]
    assert (asked["logStreamName"], asked["limit"]) == ("s", 200)
    assert "nextToken" not in asked and not asked.get("startFromHead")
    assert told.explanation.cause == "missing-module"
    assert not any("::batchml" in each for each in told.explanation.evidence)


def test_a_log_that_is_gone_leaves_the_exit_code(aws: Aws) -> None:
    told, _ = aws.explain(World(failed(), GetLogEvents="ResourceNotFoundException: no"))
    assert told.explanation.cause == "exit-code"
    assert told.failed_calls == ("logs:GetLogEvents (ResourceNotFoundException)",)


def test_of_an_array_one_failed_child_is_explained_by_four_calls(aws: Aws) -> None:
    array = failed("Array Child Job failed", container={}, attempts=[], arrayProperties={
        "size": 10, "statusSummary": {"FAILED": 2, "SUCCEEDED": 8}})  # fmt: skip
    child = {**failed(), "jobId": f"{ID}:3", "arrayProperties": {"index": 3}}
    listed = {"jobId": f"{ID}:3", "jobName": "lenet", "status": "FAILED"}
    world = World(None, DescribeJobs=[{"jobs": [array]}, {"jobs": [child]}],
                  ListJobs={"jobSummaryList": [listed]},
                  GetLogEvents=log("MemoryError"))  # fmt: skip
    told, calls = aws.explain(world)
    assert calls == ["DescribeJobs", "ListJobs", "DescribeJobs", "GetLogEvents"]
    assert told.explanation.evidence[0] == "child 3 of 10"
    assert told.explanation.cause == "python-memory"


def test_children_that_failed_are_told_together_by_six_calls_at_most(aws: Aws) -> None:
    """One page lists them all; those that ended differently are looked at first."""
    array = failed("Array Child Job failed", container={}, attempts=[], arrayProperties={
        "size": 10, "statusSummary": {"FAILED": 5, "SUCCEEDED": 5}})  # fmt: skip
    ends = {1: {"exitCode": 1}, 2: {"exitCode": 1}, 3: {"exitCode": 1}, 4: {"exitCode": 1},
            7: {"exitCode": 137, "reason": OOM}}  # fmt: skip
    listed = [
        {"jobId": f"{ID}:{n}", "jobName": "lenet", "status": "FAILED", "statusReason": EXITED,
         "container": end, "arrayProperties": {"index": n}} for n, end in ends.items()
    ]  # fmt: skip
    children = [
        {**failed(container=ends[n]), "jobId": f"{ID}:{n}", "arrayProperties": {"index": n}}
        for n in (1, 2, 7)
    ]
    world = World(None, DescribeJobs=[{"jobs": [array]}, {"jobs": children}],
                  ListJobs={"jobSummaryList": listed},
                  GetLogEvents=log("ValueError: lr"))  # fmt: skip
    told, calls = aws.explain(world)
    assert calls == ["DescribeJobs", "ListJobs", "DescribeJobs", *["GetLogEvents"] * 3]
    assert aws.session.asked("DescribeJobs")[1]["jobs"] == [f"{ID}:{n}" for n in (1, 2, 7)]
    found = told.explanation
    assert found.verdict == (
        "5 of its 10 children failed. Children 1 and 2: The program raised ValueError: lr"
    )
    assert found.evidence[:3] == (
        "failed: 1, 2, 3, 4 and 7; 1, 2 and 7 examined",
        "children: 5 FAILED (4 app-error, 1 out-of-memory), 5 SUCCEEDED of 10",
        "Child 7: It needed more memory than the 15 GiB that it had.",
    )
    assert found.cause == "exception"


def test_a_multi_node_run_is_explained_by_its_main_nodes_log(aws: Aws) -> None:
    nodes = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": []}
    whole = {**job("FAILED", text=EXITED, attempts=[{"container": {"exitCode": 1}}]),
             "container": {}, "nodeProperties": nodes}  # fmt: skip
    main = {**failed(), "jobId": f"{ID}#0"}
    world = World(None, DescribeJobs=[{"jobs": [whole]}, {"jobs": [main]}],
                  GetLogEvents=log("ValueError: lr"))  # fmt: skip
    told, calls = aws.explain(world)
    assert calls == ["DescribeJobs", "DescribeJobs", "GetLogEvents"]
    assert told.explanation.cause == "exception"


@pytest.mark.parametrize(("lifecycle", "cause"), [("spot", "spot"), (None, "host-lost")])
def test_a_lost_host_was_a_spot_instance_or_was_not(
    aws: Aws, lifecycle: str | None, cause: str
) -> None:
    one = {"InstanceId": "i-0abc", "State": {"Name": "terminated"},
           "StateReason": {"Message": "Server.SpotInstanceTermination"},
           **({"InstanceLifecycle": lifecycle} if lifecycle else {})}  # fmt: skip
    world = World(failed(LOST, retryStrategy={"attempts": 2}),
                  DescribeInstances={"Reservations": [{"Instances": [one]}]})  # fmt: skip
    told, calls = aws.explain(world)
    assert calls == ["DescribeJobs", "DescribeInstances"]
    assert told.explanation.cause == cause
    assert "--attempts 4" in told.explanation.command


def test_ec2_may_have_forgotten_the_host(aws: Aws) -> None:
    told, _ = aws.explain(World(failed(LOST), DescribeInstances="InvalidInstanceID.NotFound: gone"))
    assert told.explanation.cause == "host-lost"
    assert told.failed_calls == ("ec2:DescribeInstances (InvalidInstanceID.NotFound)",)


def test_a_run_whose_dependency_failed_leads_to_that_one(aws: Aws) -> None:
    world = World(None, DescribeJobs=[
        {"jobs": [failed("Dependent Job failed", dependsOn=[{"jobId": OTHER}], attempts=[])]},
        {"jobs": [{**failed(), "jobId": OTHER}]}])  # fmt: skip
    told, calls = aws.explain(world)
    assert len(calls) == 2
    assert told.explanation.command == f"batchml explain {OTHER} --env dev"


@pytest.mark.parametrize(
    ("detail", "cause", "command"),
    [
        (failed(container={"reason": OOM, "exitCode": 137}), "out-of-memory", "'30 GiB'"),
        (failed(TIMED_OUT, timeout={"attemptDurationSeconds": 600}), "timed-out",
         "--timeout 1200s"),
        (failed("enough", isTerminated=True), "cancelled", "rerun"),
        (failed("JobQueue deleted", attempts=[]), "cancelled", "rerun"),
        (failed("Container Overrides length must be at most 8192", attempts=[]),
         "overrides-too-long", "submit jobs/lenet --env"),
        (failed("Canceled by JobStateTimeLimit action due to reason: "
                "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY", isCancelled=True), "unschedulable",
         "rerun"),
        (failed("something new", container={"exitCode": None}), "unknown", "logs"),
        ({**failed(), "status": "SUCCEEDED"}, "succeeded", ""),
    ],
)  # fmt: skip
def test_each_other_end_has_its_verdict(
    aws: Aws, detail: dict[str, Any], cause: str, command: str
) -> None:
    container = {k: v for k, v in detail["container"].items() if v is not None}
    told, calls = aws.explain(World({**detail, "container": container}))
    assert told.explanation.cause == cause
    assert command in told.explanation.command
    assert len(calls) <= 2


RECORD = Record(
    job_id=ID, name="lenet", env="dev", queue="q", at=ago(20 * 24 * 60), job="jobs/lenet",
    command=("python", "train.py"), memory_mib=512, status="FAILED", outcome="app-error",
    exit_code=1, reason=EXITED, attempts=(Attempt(exit_code=1, log_stream="s", host="i-0abc"),),
    log_group="/batchml/dev",
)  # fmt: skip


def test_what_aws_batch_has_forgotten_is_explained_from_here_and_its_log(aws: Aws) -> None:
    world = World(None, GetLogEvents=log("ValueError: lr"))
    told, calls = aws.explain(world, record=RECORD)
    assert calls == ["DescribeJobs", "GetLogEvents"]
    assert told.is_forgotten
    assert told.explanation.evidence[0] == "app-error: the program ended with code 1 on i-0abc"
    assert aws.session.asked("GetLogEvents")[0]["logGroupName"] == "/batchml/dev"


def test_without_a_log_what_is_kept_here_is_enough(aws: Aws) -> None:
    record = Record(job_id=ID, name="lenet", at=ago(20_000), status="FAILED", reason=EXITED,
                    container_reason=OOM, exit_code=137, memory_mib=512)  # fmt: skip
    told, _ = aws.explain(World(None), record=record)
    assert (told.explanation.cause, told.is_forgotten) == ("out-of-memory", True)


def test_an_end_that_nobody_saw_is_not_made_up(aws: Aws) -> None:
    told, _ = aws.explain(World(None), record=Record(job_id=ID, name="lenet", at=ago(20_000)))
    assert told.explanation.cause == "forgotten"
    told, _ = aws.explain(World(None), record=Record(job_id=ID, name="lenet", at=ago(0.1)))
    assert told.explanation.cause == "submitted"


def test_what_nobody_knows_is_not_found(aws: Aws) -> None:
    with pytest.raises(NotFound, match="not known to the server"):
        aws.explain(World(None))
