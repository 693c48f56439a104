"""What setup steps share: AWS APIs and clock, waits, and the causes and fixes of failures."""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.resources import ComputeApi
from batchml.aws.cloudformation import Blueprint, ChangeSet, Drift, Stack, StackEvent, Stacks
from batchml.aws.ec2 import LaunchApi
from batchml.aws.leftovers import PolicyApi
from batchml.clock import Clock
from batchml.context import PollIntervals, backoff
from batchml.errors import AccessError, BatchmlError, ServiceError, SetupFailed
from batchml.setup.sharing import CurrentState, ResourceKind, is_known

# --- causes and fixes -----------------------------------------------------------------------
# When a resource of a stack fails, AWS cancels other resources, and reports them as failed, too.
# Users have to fix the first resource that failed by itself. Sources: CloudFormation User Guide,
# "Troubleshooting"; AWS Batch User Guide, "Troubleshooting", INVALID compute environments.

# Reasons of resources that were cancelled because another one failed.
_CASCADE = (
    "Resource creation cancelled", "Resource update cancelled", "Resource deletion cancelled",
    "The following resource(s) failed",
)  # fmt: skip

_FIXES: tuple[tuple[str, str], ...] = (
    (
        r"(?i)cannot delete a policy attached to entities|DeleteConflict",
        "Users, groups or roles outside the stack have its policy: batchml teardown "
        "--detach-policy takes it from them.",
    ),
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
        "Create the role once: aws iam create-service-linked-role --aws-service-name "
        "batch.amazonaws.com",
    ),
    (
        r"(?i)(not authorized|access ?denied|UnauthorizedOperation|not have permission)",
        "Your AWS user lacks a permission: batchml doctor prints the policy statement to add.",
    ),
    (
        r"(?i)already exists",
        "A resource of that name exists outside this stack. Delete or rename it; if an earlier "
        "environment left it and it holds data, copy the data first.",
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
        "A quota of the account is reached: batchml doctor checks the quotas for GPUs; the console "
        "shows others under Service Quotas.",
    ),
    (
        r"(?i)(throttl|rate exceeded|too many requests)",
        "AWS was busy. Run batchml setup again: it continues from here.",
    ),
    (
        r"(?i)(has dependencies|DependencyViolation|in use)",
        "A resource outside this stack uses it, such as an instance or a network interface: the "
        "console's page of the resource names it.",
    ),
    (
        r"(?i)stack policy",
        "The update would replace data, which the stack's policy forbids. To allow it: batchml "
        "setup --allow-loss STACK",
    ),
)  # fmt: skip

_OTHERWISE = "Fix the named cause, then run batchml setup again: it continues from here."

_INVALID: tuple[tuple[str, str], ...] = (
    (
        r"none of the instances joined|did not join",
        "Its instances started and did not reach the cluster: the subnets need access to ECS, ECR "
        "and CloudWatch Logs (network.egress), the AMI needs an ECS agent, and the instance "
        "profile needs the policy of ECS.",
    ),
    (
        r"(?i)instance profile|InvalidParameterValue.*iamInstanceProfile",
        "The instance profile does not exist: batchml setup creates the roles again.",
    ),
    (
        r"(?i)not authorized|AccessDenied|assume.*role|service role",
        "AWS Batch lacks permissions: aws iam create-service-linked-role --aws-service-name "
        "batch.amazonaws.com, then batchml setup again.",
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
        r"(?i)instance type|Unsupported|availability zone",
        "An instance type is not offered where its subnets are: batchml setup --plan names types "
        "that the region does not offer, and chooses subnets in zones that offer the others.",
    ),
    (
        r"(?i)subnet|security group|vpc",
        "The network that it uses has changed: batchml setup --plan shows the changes.",
    ),
    (
        r"(?i)spot fleet role|spotIamFleetRole",
        "BEST_FIT with spot is not offered by batchml: use SPOT_PRICE_CAPACITY_OPTIMIZED.",
    ),
)


class StackFailure(NamedTuple):
    """A resource of a stack that failed."""

    resource: str
    type: str
    reason: str

    def __str__(self) -> str:
        kind = f" ({self.type})" if self.type else ""
        return f"{self.resource}{kind}: {self.reason or 'no reason given'}"

    @property
    def fix(self) -> str:
        return stack_fix(self.reason)


def first_failure(events: Sequence[StackEvent]) -> StackFailure | None:
    """The first failure in the events of an operation, the oldest event first; None without one."""
    failed = [event for event in events if event.status.endswith("_FAILED")]
    own = [event for event in failed if not event.reason.startswith(_CASCADE)]
    # An event of the stack itself repeats an event of a resource, so it counts only without one.
    resources = [
        event for event in own
        if event.type != "AWS::CloudFormation::Stack" or ":stack/" not in event.physical_id
    ]  # fmt: skip
    for event in resources or own or failed:
        return StackFailure(event.resource, event.type, event.reason)
    return None


def stack_fix(reason: str) -> str:
    """The fix for the reason that CloudFormation gives for a failure."""
    return _first(_FIXES, reason)


def invalid_fix(reason: str) -> str:
    """The fix for the reason that AWS Batch gives for an INVALID compute environment."""
    return _first(_INVALID, reason)


def _first(fixes: Sequence[tuple[str, str]], reason: str) -> str:
    return next((fix for pattern, fix in fixes if re.search(pattern, reason)), _OTHERWISE)


# --- tools ----------------------------------------------------------------------------------


Steps = Generator[str, None, CurrentState]
BATCH_LIMIT = 900.0  # seconds for a compute environment or queue to become VALID
_DRIFT_LIMIT = 300.0
POLICY_OUTPUT = "SubmitterPolicyArn"  # output of the stack `roles`: a policy that people may have
PACE = PollIntervals(shortest=0.5, longest=10.0)


class SetupTools(Struct, frozen=True):
    """The APIs and options of setup steps. `local` has no stacks and no launch templates."""

    stacks: Stacks
    compute: ComputeApi
    batch: JobApi
    clock: Clock
    launch: LaunchApi | None = None
    policies: PolicyApi | None = None
    empty_bucket: Callable[[str], None] | None = None
    continue_rollback: Sequence[str] | None = None  # resources to skip; None: do not continue
    command: str = "setup"  # the command to repeat, for messages
    replacing: frozenset[str] = frozenset()  # stacks whose data this command may replace

    def create_change_set(self, blueprint: Blueprint, stack: Stack) -> ChangeSet:
        """Create a change set: AWS says which changes an update would make. Wait for the answer.

        Raises SetupFailed if AWS refuses the update.
        """
        change_set = self.stacks.create_change_set(blueprint, stack)
        end, pauses = self.clock.monotonic() + BATCH_LIMIT, backoff(PACE)
        while (found := self.stacks.read_change_set(change_set, stack.name)).is_pending:
            if self.clock.monotonic() > end:
                raise BatchmlError(f"CloudFormation is still working on {change_set}.")
            self.clock.sleep(next(pauses))
        if not found.is_ready and not found.is_empty:
            self.stacks.discard(change_set, stack.name)
            fix = stack_fix(found.reason)
            raise SetupFailed(ResourceKind.STACK, stack.name, f"AWS refuses: {found.reason}", fix)
        if found.is_empty:
            self.stacks.discard(change_set, stack.name)
        return replace(found, token=blueprint.update_token(stack))

    def drifts(self, name: str) -> tuple[Drift, ...]:
        """Manual changes to the resources of a stack; empty if AWS does not answer in time."""
        try:
            detection = self.stacks.detect_drift(name)
            end, pauses = self.clock.monotonic() + _DRIFT_LIMIT, backoff(PACE)
            while not self.stacks.has_drift_result(detection):
                if self.clock.monotonic() > end:
                    return ()
                self.clock.sleep(next(pauses))
            return tuple(self.stacks.drifts(name))
        except (ServiceError, AccessError):
            return ()

    def first_cause(self, stack: Stack) -> str:
        """The first cause for which a stack's last operation failed."""
        found = first_failure(self.stacks.operation(stack.id))
        return str(found) if found else stack.reason


def check_time(end: float, kind: ResourceKind, name: str, status: str, tools: SetupTools) -> None:
    """Raise BatchmlError after `end`, a time of the monotonic clock."""
    if tools.clock.monotonic() > end:
        raise BatchmlError(
            f"{kind} {name} is still {status}. AWS continues; run the command again to follow it."
        )


def refuse_unknown(kind: ResourceKind, name: str, request: Any) -> None:
    """Raise AssertionError for a request with a placeholder: the plan's order would be wrong."""
    if not is_known(request):
        raise AssertionError(f"{kind} {name} needs a resource that does not exist yet: {request}")
