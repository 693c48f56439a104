"""What an end means: a class for every text of AWS Batch and ECS, and one sentence about it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.batch.responses import to_run
from batchml.model.outcome import describe_attempt, describe_outcome, signal_name
from batchml.model.run import (
    Attempt,
    JobStatus,
    OutcomeClass,
    Record,
    Run,
    class_of,
    classify,
    run_from_record,
    with_failures,
)
from batchml.runtime.protocol.launch import LaunchPlan
from batchml.runtime.protocol.variables import IDLE_AFTER

EXITED = "Essential container in task exited"
LOST = "Host EC2 (instance i-0123456789abcdef0) terminated."
OOM = "OutOfMemoryError: Container killed due to memory usage"
DID_NOT_START = "Task failed to start"

# Status text, container's reason, exit code, who stopped it -> class. The texts are AWS's own.
TEXTS: list[tuple[str, str, int | None, str, OutcomeClass]] = [
    (EXITED, "", 1, "", OutcomeClass.APP_ERROR),
    (EXITED, "", 137, "", OutcomeClass.APP_ERROR),
    (EXITED, "", 255, "", OutcomeClass.APP_ERROR),
    (EXITED, OOM, 137, "", OutcomeClass.OUT_OF_MEMORY),
    (DID_NOT_START, "CannotPullContainerError: pull access denied", None, "",
     OutcomeClass.IMAGE_ERROR),
    (DID_NOT_START, "CannotStartContainerError: Error response from daemon", None, "",
     OutcomeClass.IMAGE_ERROR),
    (DID_NOT_START, "CannotCreateContainerError: no space", None, "", OutcomeClass.IMAGE_ERROR),
    (DID_NOT_START, "CannotInspectContainerError: gone", None, "", OutcomeClass.IMAGE_ERROR),
    (DID_NOT_START, "CannotCreateVolumeError: EFS", None, "", OutcomeClass.IMAGE_ERROR),
    (DID_NOT_START,
     "DockerTimeoutError: Could not transition to created; timed out after waiting 4m0s", None,
     "", OutcomeClass.IMAGE_ERROR),
    (DID_NOT_START, "ResourceInitializationError: unable to pull secrets", None, "",
     OutcomeClass.IMAGE_ERROR),
    (DID_NOT_START, "", None, "", OutcomeClass.IMAGE_ERROR),
    (LOST, "", None, "", OutcomeClass.HOST_LOST),
    (LOST, "", 143, "", OutcomeClass.HOST_LOST),
    ("Job attempt duration exceeded timeout", "", 137, "", OutcomeClass.TIMED_OUT),
    ("Job attempt duration exceeded timeout", "", None, "", OutcomeClass.TIMED_OUT),
    ("Dependent Job failed", "", None, "", OutcomeClass.DEPENDENCY_FAILED),
    ("Array Child Job failed", "", None, "", OutcomeClass.APP_ERROR),
    ("JobQueue deleted", "", None, "", OutcomeClass.CANCELLED),
    ("Container Overrides length must be at most 8192", "", None, "",
     OutcomeClass.UNSCHEDULABLE),
    ("Canceled by JobStateTimeLimit action due to reason: "
     "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY", "", None, "cancelled",
     OutcomeClass.UNSCHEDULABLE),
    ("Canceled by JobStateTimeLimit action due to reason: "
     "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT", "", None, "cancelled",
     OutcomeClass.UNSCHEDULABLE),
    ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - CE(s) associated with the job queue "
     "cannot meet the CPU requirement of the job.", "", None, "", OutcomeClass.UNSCHEDULABLE),
    ("I changed my mind", "", None, "cancelled", OutcomeClass.CANCELLED),
    ("I changed my mind", "", 143, "terminated", OutcomeClass.CANCELLED),
    ("I changed my mind", OOM, 137, "terminated", OutcomeClass.CANCELLED),
    ("a text that nobody has seen", "", None, "", OutcomeClass.UNKNOWN),
    ("", "", None, "", OutcomeClass.UNKNOWN),
]  # fmt: skip

# While it waits: no end, so no class yet, whatever AWS Batch says meanwhile.
WAITING = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested for "
    "instance type [p4d.24xlarge]",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) is "
    "higher than that can be met by the CE(s) attached to the job queue.",
    "ACTION_REQUIRED - CE(s) associated with the job queue are invalid.",
    "UNDETERMINED - Batch job is blocked, root cause is undetermined.",
)


def failed(because: str = "", **more: Any) -> Run:
    return Run("j", "lenet", "q", JobStatus.FAILED, status_reason=because, **more)


@pytest.mark.parametrize(("because", "reason", "code", "who", "outcome"), TEXTS)
def test_every_status_text_has_its_class_and_a_sentence(
    because: str, reason: str, code: int | None, who: str, outcome: OutcomeClass
) -> None:
    run = failed(
        because, reason=reason, exit_code=code,
        is_cancelled=who == "cancelled", is_terminated=who == "terminated",
    )  # fmt: skip
    assert classify(run).outcome is outcome
    said = describe_outcome(run)
    assert said.startswith(f"{outcome.value}: ")
    assert "None" not in said


def test_every_class_is_met_by_a_text() -> None:
    assert {outcome for *_, outcome in TEXTS} == set(OutcomeClass) - {OutcomeClass.SUCCEEDED}


@pytest.mark.parametrize("text", WAITING)
def test_a_run_that_waits_has_not_ended_whatever_is_said_of_it(text: str) -> None:
    run = Run("j", "n", "q", JobStatus.RUNNABLE, status_reason=text)
    assert classify(run).outcome is OutcomeClass.UNKNOWN


def test_the_sentence_says_what_happened_to_which_attempt_on_which_host() -> None:
    run = failed(
        EXITED, exit_code=1, max_attempts=3, host="3f2c", attempts=(
            Attempt(status_reason=LOST, host="i-0abc"),
            Attempt(status_reason=EXITED, reason=OOM, exit_code=137, host="i-0def"),
            Attempt(status_reason=EXITED, exit_code=1, host="3f2c"),
        ),
    )  # fmt: skip
    assert describe_outcome(run) == (
        "app-error: attempt 3 of 3 ended with code 1 on 3f2c; attempt 1 lost its host i-0abc; "
        "attempt 2 was killed for memory on i-0def"
    )


def test_attempts_that_were_left_are_named_with_the_flag_that_retries_such_ends() -> None:
    attempt = Attempt(status_reason=EXITED, exit_code=137)
    run = failed(EXITED, exit_code=137, max_attempts=3, attempts=(attempt,))
    assert describe_outcome(run) == (
        "app-error: attempt 1 of 3 ended with code 137, signal SIGKILL; 2 attempts were left, but "
        "app-error is only retried with --retry-on app-error"
    )
    for other in (
        replace(run, max_attempts=1), replace(run, attempts=(attempt,) * 3),
        replace(run, exit_code=78), replace(run, status_reason=LOST),
    ):  # fmt: skip
        assert "--retry-on" not in describe_outcome(other)


def test_an_array_is_what_its_failed_children_all_came_to() -> None:
    array = failed("Array Child Job failed", children={"FAILED": 2, "SUCCEEDED": 1}, array_size=3)
    killed, raised = failed(EXITED, reason=OOM, exit_code=137), failed(EXITED, exit_code=3)
    alike = with_failures(array, [killed, killed])
    assert classify(alike) == (OutcomeClass.OUT_OF_MEMORY, 137)
    assert describe_outcome(alike) == "out-of-memory: children 2 FAILED, 1 SUCCEEDED of 3"
    mixed = with_failures(array, [raised, killed])
    assert classify(mixed) == (OutcomeClass.APP_ERROR, 1)
    assert describe_outcome(mixed) == (
        "app-error: children 2 FAILED (1 app-error, 1 out-of-memory), 1 SUCCEEDED of 3"
    )
    assert with_failures(array, [killed]) is array  # not all were seen


def test_attempts_that_ended_alike_are_said_once() -> None:
    lost = Attempt(status_reason=LOST, host="i-0abc")
    run = failed(LOST, host="i-9", max_attempts=3, attempts=(lost, lost, Attempt(host="i-9")))
    assert describe_outcome(run) == (
        "host-lost: attempt 3 of 3 lost its host i-9, and no attempt is left; "
        "attempts 1, 2 each lost its host i-0abc"
    )


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (Run("j", "n", "q", JobStatus.SUCCEEDED, exit_code=0, attempts=(Attempt(),)),
         "succeeded: the program ended with code 0"),
        (Run("j", "n", "q", JobStatus.SUCCEEDED, exit_code=0, max_attempts=2, host="i-1",
             attempts=(Attempt(status_reason=LOST, host="i-0"), Attempt(host="i-1"))),
         "succeeded: attempt 2 of 2 ended with code 0 on i-1; attempt 1 lost its host i-0"),
        (failed(EXITED, exit_code=139, attempts=(Attempt(),)),
         "app-error: the program ended with code 139, signal SIGSEGV"),
        (failed(EXITED, exit_code=137, reason=OOM, memory_mib=512, attempts=(Attempt(),)),
         "out-of-memory: the program was killed for memory; it had 512 MiB"),
        (failed("Job attempt duration exceeded timeout", timeout=60, attempts=(Attempt(),)),
         "timed-out: the program ran past its timeout of 60 s"),
        (failed("enough", is_terminated=True),
         "cancelled: stopped before it was started: enough"),
        (failed("enough", is_terminated=True, attempts=(Attempt(host="i-1"),), host="i-1"),
         "cancelled: the program was stopped on i-1: enough"),
        (failed(EXITED, exit_code=143, environment={"BATCHML_MAX_SECONDS": "60"},
                attempts=(Attempt(1_000, 46_000),)),
         "cancelled: the program was stopped: its budget (--max-cost) was spent"),
        (failed(EXITED, exit_code=143, is_terminated=True, attempts=(Attempt(1_000, 46_000),)),
         "cancelled: the program was stopped: its budget (--max-cost) was spent"),  # from history
        (failed(EXITED, exit_code=143, environment={"BATCHML_MAX_SECONDS": "60"},
                attempts=(Attempt(1_000, 21_000),)),
         "app-error: the program ended with code 143, signal SIGTERM"),
        (failed("Job attempt duration exceeded timeout", exit_code=143, timeout=60,
                environment={"BATCHML_MAX_SECONDS": "60"}, attempts=(Attempt(1_000, 61_000),)),
         "timed-out: the program ran past its timeout of 60 s"),
        (failed(EXITED, exit_code=143, attempts=(Attempt(),)),
         "app-error: the program ended with code 143, signal SIGTERM"),
        (failed(DID_NOT_START, attempts=(Attempt(),), reason="CannotPullContainerError: ERROR: "
                "No matching distribution found for torhc==2"),
         "image-error: the program could not be started: no index has torhc==2 "
         "(requirements.txt): correct the file, and submit the job again"),
        (failed(DID_NOT_START, attempts=(Attempt(),), reason="CannotPullContainerError: Invalid "
                "requirement: 'six==1..0': Expected end (from line 2 of /images/requirements.txt)"),
         "image-error: the program could not be started: pip cannot read 'six==1..0' "
         "(requirements.txt): correct the file, and submit the job again"),
        (failed("JobQueue deleted"),
         "cancelled: stopped before it was started: its queue was deleted"),
        (failed("Array Child Job failed", children={"FAILED": 2, "SUCCEEDED": 8}, array_size=10),
         "app-error: children 2 FAILED, 8 SUCCEEDED of 10"),
        (failed("Host EC2 (instance this-machine) terminated: the runner is gone.",
                host="this-machine", attempts=(Attempt(),), max_attempts=3),
         "host-lost: attempt 1 of 3 lost its host (the runner is gone)"),
    ],
)  # fmt: skip
def test_one_sentence_for_each_kind_of_end(run: Run, said: str) -> None:
    assert describe_outcome(run) == said


def test_a_running_attempt_and_each_that_ended_say_their_host() -> None:
    arn = "arn:aws:ecs:us-east-1:123456789012:container-instance/cluster/"
    run = to_run(
        {
            "jobId": "j", "status": "RUNNING", "jobName": "lenet",
            "container": {"logStreamName": "s2", "containerInstanceArn": f"{arn}bbb"},
            "attempts": [
                {"container": {"logStreamName": "s1", "containerInstanceArn": f"{arn}aaa"},
                 "statusReason": LOST, "stoppedAt": 5},
            ],
        }
    )  # fmt: skip
    # EC2's own name of a host goes before that of its ECS agent.
    assert [attempt.host for attempt in run.attempts] == ["i-0123456789abcdef0", "bbb"]
    assert run.host == "bbb"


def test_a_detail_says_what_a_run_was_given() -> None:
    run = to_run(
        {
            "jobId": "j", "status": "PENDING", "jobName": "lenet-2abcdefghijklmnop",
            "tags": {"team": "vision", "batchml:key": "2abcdefghijklmnop"},
            "dependsOn": [{"jobId": "a"}, {"type": "SEQUENTIAL"}], "shareIdentifier": "ann",
            "arrayProperties": {"size": 4, "statusSummary": {"PENDING": 4, "FAILED": 0}},
            "retryStrategy": {"attempts": 3}, "timeout": {"attemptDurationSeconds": 90},
            "consumableResourceProperties": {"consumableResourceList": [
                {"consumableResource": "arn:aws:batch:us-east-1:123456789012:consumable-resource/"
                 "licence", "quantity": 2}]},
            "container": {"environment": [
                {"name": "BATCHML_PARAMS", "value": '{"lr": 0.1, "on": true}'}]},
        }
    )  # fmt: skip
    assert (run.name, run.key, run.job_name) == (
        "lenet", "2abcdefghijklmnop", "lenet-2abcdefghijklmnop",
    )  # fmt: skip
    assert run.params == {"lr": 0.1, "on": True}
    assert run.tags["team"] == "vision"
    assert (run.array_size, run.array_index, run.depends_on) == (4, None, ("a",))
    assert (run.is_sequential, run.share, run.consumables) == (True, "ann", {"licence": 2})
    assert (run.max_attempts, run.timeout, run.children) == (3, 90, {"PENDING": 4})


def test_a_multi_node_job_has_its_first_groups_container_and_its_main_nodes_end() -> None:
    run = to_run(
        {
            "jobId": "j", "status": "FAILED", "statusReason": EXITED,
            "nodeProperties": {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": [
                {"targetNodes": "0:1", "container": {"image": "i", "vcpus": 4, "memory": 64}}]},
            "attempts": [{"container": {"exitCode": 3, "reason": "r", "logStreamName": "s"}}],
        }
    )  # fmt: skip
    assert (run.nodes, run.image, run.vcpus, run.exit_code, run.reason) == (2, "i", 4, 3, "r")
    assert classify(run) == (OutcomeClass.APP_ERROR, 3)


def test_a_job_of_ecs_properties_is_read_from_its_first_container() -> None:
    task = {"containers": [{"image": "i", "exitCode": 2, "logStreamName": "s"}],
            "containerInstanceArn": "arn:aws:ecs:r:1:container-instance/c/h"}  # fmt: skip
    run = to_run(
        {
            "jobId": "j", "status": "FAILED", "statusReason": EXITED, "container": {},
            "ecsProperties": {"taskProperties": [task]},
            "attempts": [{"taskProperties": [task], "statusReason": EXITED}],
        }
    )  # fmt: skip
    assert (run.image, run.exit_code, run.host) == ("i", 2, "h")
    assert (run.attempts[0].log_stream, run.attempts[0].host) == ("s", "h")


_TEXT = st.sampled_from([text for text, *_ in TEXTS] + list(WAITING)) | st.text(max_size=20)


@given(
    st.sampled_from(JobStatus), _TEXT, st.sampled_from([r for _, r, *_ in TEXTS]),
    st.none() | st.integers(-5, 300), st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_whatever_aws_says_there_is_one_sentence_and_it_names_the_class(
    status: JobStatus, because: str, reason: str, code: int | None, tries: int, ended: bool
) -> None:
    attempt = Attempt(status_reason=because, reason=reason, exit_code=code)
    run = Run("j", "n", "q", status, status_reason=because, reason=reason, exit_code=code,
              is_terminated=ended, attempts=(attempt,) * tries)  # fmt: skip
    assert describe_outcome(run).startswith(classify(run).outcome.value + ": ")
    assert describe_attempt(attempt)
    assert class_of(because, reason, code) is not OutcomeClass.SUCCEEDED


@pytest.mark.parametrize(
    ("code", "name"),
    [(137, ", signal SIGKILL"), (139, ", signal SIGSEGV"), (128, ""), (160, ""), (1, ""),
     (255, ""), (None, "")],
)  # fmt: skip
def test_codes_over_128_name_their_signal(code: int | None, name: str) -> None:
    assert signal_name(code) == name


@pytest.mark.parametrize("key", ["", "k" * 17])
@pytest.mark.parametrize("code", [75, 76, 77, 78])
def test_the_codes_of_our_runtime_mean_something_in_runs_of_ours(key: str, code: int) -> None:
    attempt = Attempt(exit_code=code, status_reason=EXITED)
    run = Run(
        "j", "n", "q", JobStatus.FAILED, status_reason=EXITED, exit_code=code, key=key,
        max_attempts=2, attempts=(attempt, attempt),
    )  # fmt: skip
    found = classify(run)
    if key and code == 75:
        assert (found.outcome, found.exit_code) == (OutcomeClass.HOST_LOST, 75)
        assert describe_outcome(run) == (
            "host-lost: attempt 2 of 2 gave up with code 75, and no attempt is left; "
            "attempt 1 gave up with code 75"
        )
    else:
        assert (found.outcome, found.exit_code) == (OutcomeClass.APP_ERROR, code)
    stopped = Run("j", "n", "q", JobStatus.FAILED, exit_code=code, key=key, is_terminated=True)
    assert classify(stopped).outcome is OutcomeClass.CANCELLED


def test_a_crash_loop_is_told_as_what_it_is_where_ranks_ran() -> None:
    """Code 76 is our runtime's there; of any other program it is its own."""
    more: dict[str, Any] = {"exit_code": 76, "attempts": (Attempt(exit_code=76),), "key": "k"}
    looped = failed(
        EXITED, environment={"BATCHML_LAUNCH": LaunchPlan("torchrun").to_json()}, **more
    )
    assert describe_outcome(looped) == (
        "app-error: given up after 3 starts without a new checkpoint (76)"
    )
    said = describe_attempt(looped.attempts[-1], is_ours=True, restarts=True)
    assert said == "was given up after 3 starts without a new checkpoint (76)"
    for kind in ({}, {"BATCHML_LAUNCH": LaunchPlan("ray").to_json()}):
        other = failed(EXITED, environment=kind, **more)
        assert describe_outcome(other) == "app-error: the program ended with code 76"
    assert classify(looped) == (OutcomeClass.APP_ERROR, 76)


def test_a_crash_loop_is_told_so_from_the_history_too() -> None:
    kept = Record(name="ddp", job_id="j", status="FAILED", outcome="app-error", exit_code=76,
                  key="k", attempts=(Attempt(exit_code=76),),
                  spec={"launch": {"kind": "torchrun"}})  # fmt: skip
    told = run_from_record(kept)
    assert told is not None and "given up after 3 starts" in describe_outcome(told)
    plain = run_from_record(replace(kept, spec={}))
    assert plain is not None and describe_outcome(plain).endswith("ended with code 76")


def test_a_run_that_did_nothing_is_told_from_a_program_that_uses_the_same_code() -> None:
    idle = {IDLE_AFTER: "1800"}
    run = Run("j", "n", "q", JobStatus.FAILED, status_reason=EXITED, exit_code=79)
    assert describe_outcome(run) == "app-error: the program ended with code 79"
    ended = replace(run, environment=idle)
    said = "app-error: the program did nothing for 30 min and was ended (79)"
    assert describe_outcome(ended) == said
    assert describe_outcome(replace(ended, exit_code=1)).endswith("ended with code 1")
    record = Record(job_id="j", status="FAILED", exit_code=79, reason=EXITED, outcome="app-error",
                    spec={"idle_after": "30m"})  # fmt: skip
    kept = run_from_record(record)
    assert kept is not None and describe_outcome(kept) == said
