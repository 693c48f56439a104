"""What went wrong first in a stack, or with a compute environment, and what to do. Pure.

A stack that fails tells of every resource that was then given up; the first that failed by itself
is what a person has to mend. Sources: CloudFormation User Guide, "Troubleshooting"; AWS Batch User
Guide, "Troubleshooting", INVALID compute environments.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from batchml.aws.cloudformation import StackEvent

# Said of what was given up because something else failed.
_CASCADE = (
    "Resource creation cancelled", "Resource update cancelled", "Resource deletion cancelled",
    "The following resource(s) failed",
)  # fmt: skip

_FIXES: tuple[tuple[str, str], ...] = (
    (
        r"AddressLimitExceeded|maximum number of addresses",
        "The account has no Elastic IP address left for the NAT gateway: release one, ask for more "
        '(service-quotas, "EC2-VPC Elastic IPs"), or use network.egress = "endpoints".',
    ),
    (
        r"VpcLimitExceeded|maximum number of VPCs",
        "The account has as many VPCs as its quota allows: delete one, ask for more "
        '(service-quotas, "VPCs per Region"), or give network.vpc, network.subnets and '
        "network.security_groups that exist.",
    ),
    (
        r"(?i)service.linked role",
        "Make the role once: aws iam create-service-linked-role --aws-service-name "
        "batch.amazonaws.com",
    ),
    (
        r"(?i)(not authorized|access ?denied|UnauthorizedOperation|not have permission)",
        "Whoever runs this lacks a permission: batchml doctor prints the policy statement to add.",
    ),
    (
        r"(?i)already exists",
        "Something of that name is there and not in this stack. Delete it or rename it, or, if it "
        "was left by an earlier environment and holds data, copy the data first.",
    ),
    (
        r"(?i)bucket.*not empty|BucketNotEmpty",
        "The bucket holds objects: batchml teardown --delete-data empties it.",
    ),
    (
        r"(?i)(image ?builder|workflow|SSM execution|build.*failed|component)",
        "The build of the AMI failed. Its log is in CloudWatch Logs, group /aws/imagebuilder/, or "
        'use ami = "ecs-gpu" meanwhile.',
    ),
    (
        r"(?i)(LimitExceeded|quota|maximum number)",
        "A quota of the account is reached: batchml doctor names those that GPUs need; others are "
        "in the console under Service Quotas.",
    ),
    (
        r"(?i)(throttl|rate exceeded|too many requests)",
        "AWS was busy. Run batchml setup again: it goes on from here.",
    ),
    (
        r"(?i)(has dependencies|DependencyViolation|in use)",
        "Something that is not in this stack uses it, such as an instance or a network interface: "
        "the console's page of the resource says what.",
    ),
    (
        r"(?i)stack policy|Action denied by stack policy",
        "The update would replace data, which the stack's policy forbids. If that is meant: "
        "batchml setup --allow-loss STACK",
    ),
)  # fmt: skip

_OTHERWISE = "Mend what that says, then run batchml setup again: it goes on from here."

_INVALID: tuple[tuple[str, str], ...] = (
    (
        r"none of the instances joined|did not join",
        "Its instances started and did not reach the cluster: the subnets need a way to ECS, ECR "
        "and CloudWatch Logs (network.egress), the AMI an ECS agent, the instance profile the "
        "container service's policy.",
    ),
    (
        r"(?i)instance profile|InvalidParameterValue.*iamInstanceProfile",
        "The instance profile does not exist (any more): batchml setup makes the stack roles anew.",
    ),
    (
        r"(?i)not authorized|AccessDenied|assume.*role|service role",
        "AWS Batch may not do what it has to: aws iam create-service-linked-role "
        "--aws-service-name batch.amazonaws.com, then batchml setup again.",
    ),
    (
        r"(?i)launch template",
        "The launch template is missing or wrong: batchml setup writes it again.",
    ),
    (
        r"(?i)\bami-|image ?id|The image",
        "The AMI does not exist in this region, or is not shared with this account: see ami in "
        "batchml.toml.",
    ),
    (
        r"(?i)instance type|Unsupported",
        "An instance type is not offered in these zones: change instance_types or network.zones.",
    ),
    (
        r"(?i)subnet|security group|vpc",
        "The network that it uses is not there as it was: batchml setup --plan shows what changed.",
    ),
    (
        r"(?i)spot fleet role|spotIamFleetRole",
        "BEST_FIT with spot is not offered by batchml: use SPOT_PRICE_CAPACITY_OPTIMIZED.",
    ),
)


class Failure(NamedTuple):
    resource: str
    type: str
    reason: str

    def __str__(self) -> str:
        kind = f" ({self.type})" if self.type else ""
        return f"{self.resource}{kind}: {self.reason or 'no reason given'}"

    @property
    def fix(self) -> str:
        return fix_for(self.reason)


def failure_of(events: Sequence[StackEvent]) -> Failure | None:
    """The first failure of an operation, oldest event first; None when there is none."""
    failed = [event for event in events if event.status.endswith("_FAILED")]
    own = [event for event in failed if not event.reason.startswith(_CASCADE)]
    # The stack's own event repeats a resource's; it counts where there is no other.
    resources = [event for event in own if event.physical_id == "" or not _is_stack(event)]
    for event in resources or own or failed:
        return Failure(event.resource, event.type, event.reason)
    return None


def _is_stack(event: StackEvent) -> bool:
    return event.type == "AWS::CloudFormation::Stack" and ":stack/" in event.physical_id


def fix_for(reason: str) -> str:
    """What to do about the reason that CloudFormation gives for a failure."""
    return _first(_FIXES, reason)


def invalid_fix(reason: str) -> str:
    """What to do about the reason that AWS Batch gives for an INVALID compute environment."""
    return _first(_INVALID, reason)


def _first(fixes: Sequence[tuple[str, str]], reason: str) -> str:
    return next((fix for pattern, fix in fixes if re.search(pattern, reason)), _OTHERWISE)
