"""Every decision of the plan: what is wanted and what is there -> what is to be done."""

from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.cloudformation import Blueprint, ChangeSet, Drift, Stack, StackChange
from batchml.aws.ec2 import LaunchTemplate
from batchml.setup.plan import (
    current_name,
    decide_environment,
    decide_policy,
    decide_queue,
    decide_stack,
    is_version_of,
    make_plan,
    queues_of,
    refusals,
)
from batchml.setup.sharing import (
    Action,
    CurrentState,
    PlanStep,
    ResourceKind,
    WantedState,
    is_known,
)

STORAGE = Blueprint("s-storage", "text", {"A": "1"}, {"t": "v"}, is_protected=True)
THERE = Stack(
    "id", "s-storage", "CREATE_COMPLETE", parameters={"A": "1"}, tags={"t": "v"},
    template="text\n", is_protected=True,
)  # fmt: skip


def decided(stack: Stack | None, blueprint: Blueprint = STORAGE, **current: Any) -> PlanStep:
    stacks = {stack.name: stack} if stack else {}
    return decide_stack(blueprint, CurrentState(stacks=stacks, **current))


# --- stacks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "action", "how", "says"),
    [
        ("CREATE_COMPLETE", "keep", "", ""),
        ("UPDATE_COMPLETE", "keep", "", ""),
        ("UPDATE_ROLLBACK_COMPLETE", "keep", "", ""),
        ("IMPORT_COMPLETE", "keep", "", ""),
        ("CREATE_IN_PROGRESS", "create", "wait", "CREATE_IN_PROGRESS: it is waited for"),
        ("ROLLBACK_IN_PROGRESS", "update", "wait", "it is waited for"),
        ("UPDATE_IN_PROGRESS", "update", "wait", "it is waited for"),
        ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", "update", "wait", "it is waited for"),
        ("UPDATE_ROLLBACK_IN_PROGRESS", "update", "wait", "it is waited for"),
        ("DELETE_IN_PROGRESS", "delete", "wait", "it is waited for"),
        ("CREATE_FAILED", "replace", "recreate", "its creation failed earlier: why"),
        ("ROLLBACK_COMPLETE", "replace", "recreate", "its creation failed earlier: why"),
        ("ROLLBACK_FAILED", "replace", "recreate", "its creation failed earlier: why"),
        ("DELETE_FAILED", "replace", "recreate", "its deletion failed earlier: why"),
        ("REVIEW_IN_PROGRESS", "replace", "recreate", "was begun, and it is empty"),
        ("UPDATE_ROLLBACK_FAILED", "update", "continue-rollback", "stuck: why"),
    ],
)
def test_every_status_of_a_stack_has_its_step(
    status: str, action: str, how: str, says: str
) -> None:
    step = decided(replace(THERE, status=status), failure_causes={THERE.name: "why"})
    assert (step.action.value, step.how) == (action, how)
    assert says in " ".join(step.reasons)


def test_a_stack_that_is_not_there_is_created() -> None:
    assert decided(None).action is Action.CREATE


@pytest.mark.parametrize(
    ("stack", "says"),
    [
        (replace(THERE, template="other"), "its template has changed"),
        (replace(THERE, parameters={"A": "2"}), "A: 2 -> 1"),
        (replace(THERE, parameters={}), "A: none -> 1"),
        (replace(THERE, tags={"t": "w"}), "tag t: w -> v"),
        (replace(THERE, tags={"t": "v", "old": "x"}), "tag old: x -> none"),
        (replace(THERE, is_protected=False), "its termination protection is off"),
    ],
)
def test_whatever_of_a_stack_differs_is_a_reason_to_update_it(stack: Stack, says: str) -> None:
    step = decided(stack)
    assert (step.action, step.reasons, step.loses) == (Action.UPDATE, (says,), "")


def test_what_is_no_difference_is_kept() -> None:
    assert decided(replace(THERE, tags={"t": "v", "aws:cloudformation:x": "y"})).reasons == ()
    assert decided(replace(THERE, parameters={"A": "1", "Default": "5"})).reasons == ()


EMPTY = ChangeSet("c", "FAILED", "The submitted information didn't contain changes.")


def test_what_is_no_change_to_aws_is_no_update() -> None:
    step = decided(replace(THERE, template="# text"), change_sets={THERE.name: EMPTY})
    assert step.action is Action.KEEP


def test_a_protection_that_is_off_is_seen_where_aws_sees_no_change() -> None:
    step = decided(replace(THERE, is_protected=False), change_sets={THERE.name: EMPTY})
    assert step.reasons == ("its termination protection is off",)


@pytest.mark.parametrize(
    ("change", "says", "loses"),
    [
        (StackChange("Modify", "Vpc", "AWS::EC2::VPC", "True", ("CidrBlock",)),
         "AWS replaces Vpc (AWS::EC2::VPC): CidrBlock", ""),
        (StackChange("Remove", "Nat", "AWS::EC2::NatGateway"), "AWS removes Nat", ""),
        (StackChange("Modify", "Efs", "AWS::EFS::FileSystem", "True", ("Encrypted",)),
         "AWS replaces Efs", "Efs (AWS::EFS::FileSystem)"),
        (StackChange("Modify", "Efs", "AWS::EFS::FileSystem", "Conditional"), "",
         "Efs (AWS::EFS::FileSystem)"),
        (StackChange("Remove", "Bucket", "AWS::S3::Bucket"), "AWS removes Bucket",
         "Bucket (AWS::S3::Bucket)"),
        (StackChange("Modify", "Bucket", "AWS::S3::Bucket", "False"), "", ""),
        (StackChange("Add", "Bucket", "AWS::S3::Bucket"), "", ""),
    ],
)  # fmt: skip
def test_what_aws_would_replace_or_remove_is_told_and_of_data_it_is_a_loss(
    change: StackChange, says: str, loses: str
) -> None:
    change_set = ChangeSet("c", "CREATE_COMPLETE", changes=(change,))
    step = decided(replace(THERE, parameters={"A": "0"}), change_sets={THERE.name: change_set})
    assert step.action is Action.UPDATE
    assert says in " ".join(step.reasons)
    assert step.loses == loses


def test_the_flow_logs_of_a_network_are_no_data() -> None:
    change = StackChange("Remove", "FlowLogs", "AWS::Logs::LogGroup")
    change_set = ChangeSet("c", "CREATE_COMPLETE", changes=(change,))
    blueprint = replace(STORAGE, is_protected=False, parameters={"A": "0"})
    assert decided(THERE, blueprint, change_sets={THERE.name: change_set}).loses == ""


def test_what_was_changed_by_hand_is_told_with_an_update_and_is_none_by_itself() -> None:
    drifts = {THERE.name: (Drift("Nat", "AWS::EC2::NatGateway", "MODIFIED", ("/Tags",)),
                           Drift("Eip", "AWS::EC2::EIP", "DELETED"))}  # fmt: skip
    step = decided(replace(THERE, parameters={"A": "0"}), drifts=drifts)
    assert step.reasons[1:] == (
        "Nat was changed by hand (/Tags)", "Eip was changed by hand (deleted)",
    )  # fmt: skip
    assert decided(THERE, drifts=drifts).action is Action.KEEP


def unwanted(stack: Stack, **wanted: Any) -> PlanStep:
    (step,) = make_plan(WantedState(**wanted), CurrentState(stacks={stack.name: stack}))
    return step


@pytest.mark.parametrize(
    ("status", "action", "how"),
    [
        ("CREATE_COMPLETE", "delete", ""),
        ("ROLLBACK_COMPLETE", "delete", ""),
        ("UPDATE_ROLLBACK_FAILED", "delete", ""),
        ("DELETE_IN_PROGRESS", "delete", "wait"),
        ("UPDATE_IN_PROGRESS", "update", "wait"),
        ("CREATE_IN_PROGRESS", "create", "wait"),
    ],
)
def test_a_stack_that_is_not_wanted_is_deleted_once_nothing_is_under_way(
    status: str, action: str, how: str
) -> None:
    step = unwanted(replace(THERE, status=status))
    assert (step.action.value, step.how) == (action, how)


def test_a_stack_with_data_stays_unless_its_data_may_go() -> None:
    stack = replace(THERE, outputs={"BucketName": "b", "FileSystemId": "", "KeyArn": "k"})
    kept = unwanted(stack, data_stacks=(stack.name,))
    assert kept.action is Action.KEEP and "--delete-data" in kept.reasons[0]
    gone = unwanted(stack, data_stacks=(stack.name,), deletes_data=True)
    assert (gone.action, gone.how, gone.loses) == (Action.DELETE, "with-data", "b")


# --- compute environments ---------------------------------------------------------------------

REQUEST: dict[str, Any] = {
    "computeEnvironmentName": "gpu", "type": "MANAGED", "state": "ENABLED",
    "computeResources": {
        "type": "EC2", "allocationStrategy": "BEST_FIT_PROGRESSIVE", "minvCpus": 0,
        "maxvCpus": 64, "instanceTypes": ["g5", "g6"], "subnets": ["subnet-1", "subnet-2"],
        "scalingPolicy": {"minScaleDownDelayMinutes": 0},
        "launchTemplate": {"launchTemplateName": "gpu", "version": "1"},
        "instanceRole": "arn:aws:iam::123456789012:instance-profile/gpu",
    },
    "tags": {"batchml:env": "dev"},
}  # fmt: skip
ARN = "arn:aws:batch:us-east-1:123456789012:compute-environment"


def there(status: str = "VALID", tags: Any = None, **resources: Any) -> dict[str, Any]:
    """The compute environment as AWS describes it, with other resources."""
    return {
        "computeEnvironmentName": "gpu", "computeEnvironmentArn": f"{ARN}/gpu",
        "status": status, "statusReason": "because", "state": "ENABLED", "type": "MANAGED",
        "serviceRole": "arn:aws:iam::123456789012:role/aws-service-role",
        "computeResources": {
            **REQUEST["computeResources"], "subnets": ["subnet-2", "subnet-1"],
            "desiredvCpus": 8, **resources,
        },
        "tags": tags if tags is not None else {"batchml:env": "dev", "other": "theirs"},
    }  # fmt: skip


def test_a_compute_environment_as_described_is_kept() -> None:
    assert decide_environment(REQUEST, there()) == (Action.KEEP, [])


REPLACES_INSTANCES = "its instances are replaced; their jobs get 30 minutes to end"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (there(maxvCpus=8), ["maxvCpus: 8 -> 64"]),
        (there(minvCpus=4), ["minvCpus: 4 -> 0"]),
        (there(scalingPolicy={"minScaleDownDelayMinutes": 60}),
         ["minScaleDownDelayMinutes: 60 -> 0"]),
        ({**there(), "state": "DISABLED"}, ["state: DISABLED -> ENABLED"]),
        (there(tags={}), ["tag batchml:env: none -> dev"]),
        (there(instanceTypes=["g5"]), ["instanceTypes: [g5] -> [g5, g6]", REPLACES_INSTANCES]),
        (there(subnets=["subnet-1"]),
         ["subnets: [subnet-1] -> [subnet-1, subnet-2]", REPLACES_INSTANCES]),
        (there(launchTemplate={"launchTemplateName": "gpu", "version": "0"}),
         ["version: 0 -> 1", REPLACES_INSTANCES]),
        (there(type="SPOT", allocationStrategy="SPOT_CAPACITY_OPTIMIZED"),
         ["type: SPOT -> EC2",
          "allocationStrategy: SPOT_CAPACITY_OPTIMIZED -> BEST_FIT_PROGRESSIVE",
          REPLACES_INSTANCES]),
        (there("INVALID"), ["it is INVALID: because"]),
        (there("INVALID", maxvCpus=8), ["it is INVALID: because", "maxvCpus: 8 -> 64"]),
        # Its scaling changes in place even then.
        (there(allocationStrategy="BEST_FIT_PROGRESSIVE", maxvCpus=1), ["maxvCpus: 1 -> 64"]),
    ],
)  # fmt: skip
def test_what_aws_batch_changes_in_place_is_updated(found: dict[str, Any], says: list[str]) -> None:
    assert decide_environment(REQUEST, found) == (Action.UPDATE, says)


@pytest.mark.parametrize(
    ("request_", "found", "says"),
    [
        (REQUEST, there("DELETING"), "it is being deleted"),
        (REQUEST, there(allocationStrategy="BEST_FIT"), "cannot be updated in place"),
        (REQUEST, there(allocationStrategy="BEST_FIT", maxvCpus=8), "cannot be updated in place"),
        ({**REQUEST, "computeResources": {
            **REQUEST["computeResources"], "allocationStrategy": "BEST_FIT"}}, there(),
         "existing compute environment to BEST_FIT"),
        (REQUEST, there(placementGroup="gpu"), "placementGroup: gpu -> none"),
    ],
)  # fmt: skip
def test_what_aws_batch_cannot_change_is_replaced(
    request_: dict[str, Any], found: dict[str, Any], says: str
) -> None:
    action, reasons = decide_environment(request_, found)
    assert action is Action.REPLACE
    assert says in reasons[-1]


def test_one_with_best_fit_is_scaled_in_place() -> None:
    resources = {**REQUEST["computeResources"], "allocationStrategy": "BEST_FIT"}
    found = there(allocationStrategy="BEST_FIT", maxvCpus=8)
    action, reasons = decide_environment({**REQUEST, "computeResources": resources}, found)
    assert (action, reasons) == (Action.UPDATE, ["maxvCpus: 8 -> 64"])


QUEUE: dict[str, Any] = {
    "jobQueueName": "default", "state": "ENABLED", "priority": 10,
    "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": "gpu"}],
    "jobStateTimeLimitActions": [
        {"reason": "R", "state": "RUNNABLE", "maxTimeSeconds": 600, "action": "CANCEL"},
    ],
    "tags": {"batchml:env": "dev"},
}  # fmt: skip


def queue(**changed: Any) -> dict[str, Any]:
    """The queue as AWS describes it."""
    return {
        **QUEUE, "status": "VALID", "jobQueueArn": "arn:aws:batch:r:1:job-queue/default",
        "computeEnvironmentOrder": [{"order": 7, "computeEnvironment": f"{ARN}/gpu"}],
        **changed,
    }  # fmt: skip


OLD = there(allocationStrategy="BEST_FIT")
WANTED = WantedState(environments={"gpu": REQUEST}, queues={"default": QUEUE})


def lines(wanted: WantedState, current: CurrentState) -> list[str]:
    return [f"{s.action} {s.kind} {s.name}" for s in make_plan(wanted, current) if s.changes]


def test_a_replaced_compute_environment_makes_room_in_this_order() -> None:
    """The new one, then the queues take it, then the old one goes."""
    current = CurrentState(environments={"gpu": OLD}, queues={"default": queue()})
    assert lines(WANTED, current) == [
        "replace compute environment gpu", "update job queue default",
        "delete compute environment gpu",
    ]  # fmt: skip
    assert make_plan(WANTED, current)[0].reasons[-1] == "it becomes gpu-r2"
    assert current_name(WANTED, current, "gpu") == "gpu-r2"
    renewed = CurrentState(
        environments={"gpu": OLD, "gpu-r2": there()}, queues={"default": queue()}
    )
    assert lines(WANTED, renewed) == [
        "update job queue default", "delete compute environment gpu",
    ]  # fmt: skip
    order = queues_of(WANTED, renewed)["default"]["computeEnvironmentOrder"]
    assert order == [{"order": 1, "computeEnvironment": "gpu-r2"}]
    moved = queue(computeEnvironmentOrder=[{"order": 1, "computeEnvironment": f"{ARN}/gpu-r2"}])
    finished = CurrentState(environments={"gpu-r2": there()}, queues={"default": moved})
    assert lines(WANTED, finished) == []
    third = CurrentState(environments={"gpu-r2": OLD}, queues={"default": moved})
    assert current_name(WANTED, third, "gpu") == "gpu-r3"


def test_the_newest_generation_is_the_one_by_number() -> None:
    current = CurrentState(environments={"gpu-r9": there(), "gpu-r10": there(), "gpu": there()})
    assert current_name(WANTED, current, "gpu") == "gpu-r10"
    reasons = {
        s.name: s.reasons for s in make_plan(WantedState(environments={"gpu": REQUEST}), current)
    }
    assert reasons["gpu-r9"] == reasons["gpu"] == ("it was replaced",)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("gpu", True), ("gpu-r2", True), ("gpu-r10", True), ("gpu-research", False),
     ("gpu-r", False), ("gpu-rx2", False), ("cpu", False), ("gpu2", False)],
)  # fmt: skip
def test_a_name_that_begins_alike_is_no_generation(name: str, is_one: bool) -> None:
    assert is_version_of(name, "gpu") is is_one


@pytest.mark.parametrize("status", ["CREATING", "UPDATING"])
def test_what_aws_batch_is_busy_with_is_waited_for(status: str) -> None:
    current = CurrentState(
        environments={"gpu": there(status)}, queues={"default": queue(status=status)}
    )
    steps = make_plan(WANTED, current)
    assert [(s.action, s.how) for s in steps] == [(Action.UPDATE, "wait")] * 2
    assert all(s.reasons == (f"{status}: it is waited for",) for s in steps)


# --- queues -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [
        queue(),
        queue(tags={"batchml:env": "dev", "other": "theirs"}),
        queue(jobStateTimeLimitActions=[dict(reversed(QUEUE["jobStateTimeLimitActions"][0].items()))]),
    ],
)  # fmt: skip
def test_a_queue_as_described_is_kept(found: dict[str, Any]) -> None:
    assert decide_queue(QUEUE, found) == (Action.KEEP, [])


BOTH = [{"order": 1, "computeEnvironment": f"{ARN}/cpu"},
        {"order": 2, "computeEnvironment": f"{ARN}/gpu"}]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (queue(priority=1), "priority: 1 -> 10"),
        (queue(state="DISABLED"), "state: DISABLED -> ENABLED"),
        (queue(computeEnvironmentOrder=BOTH), "computeEnvironmentOrder: [cpu, gpu] -> [gpu]"),
        (queue(jobStateTimeLimitActions=[]), "time limits: [] -> [R after 600 s]"),
        (queue(tags={}), "tag batchml:env: none -> dev"),
        (queue(status="INVALID", statusReason="why"), "it is INVALID: why"),
    ],
)
def test_what_differs_of_a_queue_is_updated(found: dict[str, Any], says: str) -> None:
    assert decide_queue(QUEUE, found) == (Action.UPDATE, [says])


def test_the_order_of_compute_environments_is_by_their_numbers() -> None:
    order = [{"order": 5, "computeEnvironment": "gpu"}, {"order": 1, "computeEnvironment": "cpu"}]
    wanted = {**QUEUE, "computeEnvironmentOrder": order}
    assert decide_queue(wanted, queue(computeEnvironmentOrder=BOTH))[0] is Action.KEEP
    swapped = [{**BOTH[0], "order": 9}, BOTH[1]]
    assert decide_queue(wanted, queue(computeEnvironmentOrder=swapped))[0] is Action.UPDATE


POLICY = "arn:aws:batch:r:1:scheduling-policy/default"


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        (None, None, Action.KEEP),
        (POLICY, POLICY, Action.KEEP),
        (POLICY, f"{POLICY}-2", Action.UPDATE),
        (None, POLICY, Action.REPLACE),
        (POLICY, None, Action.REPLACE),
    ],
)
def test_fair_share_is_given_to_a_queue_or_taken_from_it_by_replacing_it(
    before: str | None, after: str | None, action: Action
) -> None:
    wanted = {**QUEUE, "schedulingPolicyArn": after} if after else QUEUE
    found = queue(schedulingPolicyArn=before) if before else queue()
    assert decide_queue(wanted, found)[0] is action


def test_a_queue_that_is_being_deleted_is_made_anew() -> None:
    assert decide_queue(QUEUE, queue(status="DELETING"))[0] is Action.REPLACE


def test_replacing_or_deleting_a_queue_loses_the_runs_in_it() -> None:
    fair = {"default": queue(schedulingPolicyArn=POLICY)}
    environments = {"gpu": there()}
    (step,) = [
        s for s in make_plan(WANTED, CurrentState(environments=environments, queues=fair,
                                           unfinished_runs={"default": 1})) if s.changes
    ]  # fmt: skip
    assert (step.action, step.loses) == (Action.REPLACE, "1 run in it")
    current = CurrentState(queues={"old": queue()}, unfinished_runs={"old": 2})
    (step,) = make_plan(WantedState(), current)
    assert (step.action, step.loses) == (Action.DELETE, "2 runs in it")


# --- the others -------------------------------------------------------------------------------


def test_a_scheduling_policy_is_compared_by_what_it_says() -> None:
    share = {"shareDecaySeconds": 60, "shareDistribution": [
        {"shareIdentifier": "a", "weightFactor": 0.5}, {"shareIdentifier": "b", "weightFactor": 1},
    ]}  # fmt: skip
    request = {"name": "p", "fairsharePolicy": share, "tags": {"t": "v"}}
    found = {"name": "p", "arn": POLICY, "tags": {"t": "v"}, "fairsharePolicy": {
        "shareDecaySeconds": 60, "computeReservation": 0,
        "shareDistribution": share["shareDistribution"][::-1],  # type: ignore[index]
    }}  # fmt: skip
    assert decide_policy(request, found)[0] is Action.KEEP
    other = {**found, "fairsharePolicy": {**share, "shareDecaySeconds": 61}}
    assert decide_policy(request, other)[1] == ["shareDecaySeconds: 61 -> 60"]
    assert decide_policy(request, {**found, "tags": {}})[1] == ["tag t: none -> v"]


TEMPLATE = {"LaunchTemplateName": "gpu", "VersionDescription": "batchml content abc"}


@pytest.mark.parametrize(
    ("found", "action", "says"),
    [
        ({}, "create", "it does not exist"),
        ({"gpu": LaunchTemplate("gpu", 3, "abc")}, "keep", ""),
        ({"gpu": LaunchTemplate("gpu", 3, "xyz")}, "update", "version 4"),
    ],
)
def test_a_launch_template_is_known_by_its_content(
    found: dict[str, LaunchTemplate], action: str, says: str
) -> None:
    (step,) = make_plan(WantedState(templates={"gpu": TEMPLATE}), CurrentState(templates=found))
    assert (step.action.value, step.kind) == (action, ResourceKind.LAUNCH_TEMPLATE)
    assert says in " ".join(step.reasons)


def test_a_job_definition_is_registered_once_and_never_deleted() -> None:
    wanted = WantedState(definitions={"lenet-1": {}})
    assert lines(wanted, CurrentState()) == ["create job definition lenet-1"]
    assert lines(wanted, CurrentState(definitions=frozenset(["lenet-1", "lenet-0"]))) == []


def test_a_placement_group_is_there_or_not() -> None:
    wanted = WantedState(groups={"g": {}})
    assert lines(wanted, CurrentState()) == ["create placement group g"]
    assert lines(wanted, CurrentState(groups={"g": {}})) == []


EVERYTHING = CurrentState(
    stacks={f"s-{name}": replace(THERE, name=f"s-{name}") for name in ("network", "roles")},
    groups={"g": {}},
    templates={"gpu": LaunchTemplate("gpu", 1, "abc")},
    policies={"p": {"arn": POLICY}},
    environments={"gpu": there()},
    queues={"default": queue()},
)


def test_what_is_not_wanted_goes_in_the_order_that_aws_needs() -> None:
    assert lines(WantedState(), EVERYTHING) == [
        "delete job queue default", "delete compute environment gpu", "delete scheduling policy p",
        "delete launch template gpu", "delete placement group g", "delete stack s-roles",
        "delete stack s-network",
    ]  # fmt: skip


def test_what_others_stand_on_is_made_first() -> None:
    wanted = WantedState(
        stacks=(STORAGE,), groups={"g": {}}, templates={"gpu": TEMPLATE},
        policies={"p": {}}, environments={"gpu": REQUEST}, queues={"default": QUEUE},
        definitions={"lenet": {}},
    )  # fmt: skip
    assert [step.kind for step in make_plan(wanted, CurrentState())] == [
        ResourceKind.STACK,
        ResourceKind.PLACEMENT_GROUP,
        ResourceKind.LAUNCH_TEMPLATE,
        ResourceKind.POLICY,
        ResourceKind.ENVIRONMENT,
        ResourceKind.QUEUE,
        ResourceKind.DEFINITION,
    ]


def test_a_teardown_changes_the_stacks_that_stay_last() -> None:
    kept = replace(STORAGE, name="s-network", parameters={"A": "none"})
    found = lines(WantedState(stacks=(kept,), stacks_last=True), EVERYTHING)
    assert found[-2:] == ["delete stack s-roles", "update stack s-network"]


def test_a_single_command_deletes_nothing() -> None:
    wanted = WantedState(queues={"new": {**QUEUE, "jobQueueName": "new"}}, deletes_unwanted=False)
    assert lines(wanted, EVERYTHING) == ["create job queue new"]


def test_what_waits_for_something_else_is_known_as_such() -> None:
    assert is_known({"a": ["b", {"c": 1}], "d": None})
    assert not is_known({"a": [{"b": "x «network.SubnetIds»"}]})
    assert not is_known("«p»")


def test_another_range_of_addresses_is_refused_under_compute_environments() -> None:
    parameters = {"VpcCidr": "10.0.0.0/16"}
    network = Blueprint("batchml-dev-network", "t", {"VpcCidr": "10.1.0.0/16"}, {})
    stack = Stack("id", network.name, "CREATE_COMPLETE", parameters=parameters)
    wanted = WantedState(stacks=(network,))
    empty = CurrentState(stacks={network.name: stack})
    used = CurrentState(stacks={network.name: stack}, environments={"batchml-dev-gpu": there()})
    assert refusals(wanted, [], empty) == []
    (why,) = refusals(wanted, [], used)
    assert "network.cidr cannot be changed from 10.0.0.0/16" in why
