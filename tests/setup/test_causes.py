"""What failed first in a stack or compute environment, and what is to be done."""

import pytest

from batchml.aws.cloudformation import StackEvent
from batchml.setup.tools import first_failure, invalid_fix, stack_fix

STACK_ID = "arn:aws:cloudformation:us-east-1:123456789012:stack/s/1"
STACK = "AWS::CloudFormation::Stack"


def event(resource: str, status: str, reason: str = "", type_: str = "AWS::EC2::VPC") -> StackEvent:
    physical = STACK_ID if type_ == STACK else f"{resource}-1"
    return StackEvent(f"{resource}-{status}", resource, type_, physical, status, reason)


def test_the_first_failure_by_itself_is_the_cause_not_what_was_given_up() -> None:
    found = first_failure(
        [
            event("s", "CREATE_IN_PROGRESS", type_=STACK),
            event("Other", "CREATE_FAILED", "Resource creation cancelled"),
            event("Nat", "CREATE_FAILED", "no address left", "AWS::EC2::NatGateway"),
            event("Late", "CREATE_FAILED", "also"),
            event("s", "ROLLBACK_IN_PROGRESS", "The following resource(s) failed: [Nat]", STACK),
        ]
    )
    assert str(found) == "Nat (AWS::EC2::NatGateway): no address left"


def test_where_all_was_given_up_the_first_is_named() -> None:
    found = first_failure([event("A", "UPDATE_FAILED", "Resource update cancelled")])
    assert found is not None and found.resource == "A"


def test_where_only_the_stack_says_why_that_is_the_cause() -> None:
    reason = "Export name in use"
    found = first_failure([event("s", "UPDATE_ROLLBACK_FAILED", reason, STACK)])
    assert found is not None and found.reason == reason


def test_a_nested_stack_is_a_resource_like_any_other() -> None:
    found = first_failure(
        [
            event("s", "CREATE_FAILED", "The following resource(s) failed to create: [A]", STACK),
            event("A", "CREATE_FAILED", "own reason"),
        ]
    )
    assert found is not None and found.resource == "A"


def test_without_a_failure_there_is_no_cause() -> None:
    assert first_failure([event("A", "CREATE_COMPLETE")]) is None
    assert first_failure([]) is None


def test_a_failure_without_a_reason_says_so() -> None:
    assert str(first_failure([event("A", "DELETE_FAILED")])) == "A (AWS::EC2::VPC): no reason given"


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        (
            "AddressLimitExceeded: the maximum number of addresses has been reached",
            "EC2-VPC Elastic",
        ),
        ("The maximum number of VPCs has been reached. (VpcLimitExceeded)", "network.vpc"),
        ("Caller may not create the Service Linked Role", "create-service-linked-role"),
        ("User: arn:aws:iam::1:user/u is not authorized to perform: iam:CreateRole", "doctor"),
        ("API: ec2:RunInstances You are not authorized (UnauthorizedOperation)", "doctor"),
        ("batchml-dev-1-us-east-1 already exists in stack arn:aws:x", "Delete or rename it"),
        ("The bucket you tried to delete is not empty (BucketNotEmpty)", "--delete-data"),
        ("Image Builder workflow failed: step InstallDriver", 'ami = "ecs-gpu"'),
        ("The quota for file systems is reached", "Service Quotas"),
        ("Cannot delete a policy attached to entities. (Service: Iam)", "--detach-policy"),
        ("Rate exceeded (Throttling)", "continues from here"),
        ("resource sg-1 has a dependent object (DependencyViolation)", "network interface"),
        ("Action denied by stack policy: Statement [#2]", "--allow-loss"),
        ("the moon is full", "Fix the named cause"),
    ],
)
def test_every_usual_reason_has_its_fix(reason: str, fix: str) -> None:
    assert fix in stack_fix(reason)


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("MISCONFIGURATION:INSTANCE - none of the instances joined the underlying ECS cluster",
         "network.egress"),
        ("CLIENT_ERROR - Invalid IAM Instance Profile name: instance profile x",
         "creates the roles again"),
        ("CLIENT_ERROR - You are not authorized to use launch template (Service: Ec2)",
         "create-service-linked-role"),
        ("CLIENT_ERROR - The specified launch template does not exist", "writes it again"),
        ("CLIENT_ERROR - The image id '[ami-0123]' does not exist", "see ami in"),
        ("CLIENT_ERROR - Your requested instance type (p5) is not supported in your requested "
         "Availability Zone (us-east-1e)", "subnets in zones that offer"),
        ("CLIENT_ERROR - The subnet ID 'subnet-1' does not exist", "setup --plan"),
        ("INTERNAL_ERROR - who knows", "Fix the named cause"),
    ],
)  # fmt: skip
def test_every_usual_reason_of_an_invalid_compute_environment_has_its_fix(
    reason: str, fix: str
) -> None:
    assert fix in invalid_fix(reason)
