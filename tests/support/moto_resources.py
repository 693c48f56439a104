"""Resources that moto makes otherwise than AWS, for `moto_aws.py`: patched in its process only.

Each patch replaces or adds one thing of moto's and names AWS's document. A type of resource that
moto does not know is a resource that remembers its properties, so a template is never cut.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from moto.batch import models as batch
from moto.batch import responses as batch_responses
from moto.batch.utils import JobStatus
from moto.core.common_models import CloudFormationModel
from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.ec2.models.security_groups import SecurityGroup
from moto.ec2.models.subnets import Subnet
from moto.efs.models import AccessPoint, MountTarget
from moto.iam.models import iam_backends
from moto.kms.models import Key
from moto.s3.models import FakeBucket, s3_backends

Json = dict[str, Any]


def patch(owner: Any, name: str) -> Callable[[Any], Any]:
    """Replace an attribute of moto's; the patch gets what was there as its first argument."""
    before = getattr(owner, name, None)
    held = vars(owner).get(name)

    def put(function: Any) -> Any:
        def patched(*args: Any, **kwargs: Any) -> Any:
            return function(before, *args, **kwargs)

        patched.__name__ = name
        if isinstance(held, classmethod):
            setattr(owner, name, staticmethod(patched))
        elif isinstance(held, property):
            setattr(owner, name, property(lambda self: function(held.fget, self)))
        else:
            setattr(owner, name, patched)
        return function

    return put


# --- Resources of stacks ----------------------------------------------------------------


class Unmodelled(CloudFormationModel):
    """A resource of a type that moto does not know: it remembers its properties."""

    made = 0

    def __init__(self, name: str, properties: Json) -> None:
        self.name = name
        self.properties = properties

    @property
    def physical_resource_id(self) -> str:
        return self.name

    @staticmethod
    def cloudformation_type() -> str:
        return "Test::Unmodelled"

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Json, account_id: str, region_name: str,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        cls.made += 1
        return cls(resource_name, cloudformation_json["Properties"])

    @classmethod
    def update_from_cloudformation_json(
        cls, original_resource: Any, new_resource_name: str, cloudformation_json: Json,
        account_id: str, region_name: str,
    ) -> Any:  # fmt: skip
        original_resource.properties = cloudformation_json["Properties"]
        return original_resource

    @classmethod
    def delete_from_cloudformation_json(cls, *_: Any) -> None: ...

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return True

    def get_cfn_attribute(self, attribute_name: str) -> str:
        """An attribute that looks as AWS's: an AMI for ImageId, else the name with it."""
        if attribute_name == "ImageId":
            return f"ami-{abs(hash(self.name)) % 16**8:08x}"
        return f"{self.name}.{attribute_name}"


class SecurityGroupEgress(Unmodelled):
    """Template reference, AWS::EC2::SecurityGroupEgress."""

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::SecurityGroupEgress"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Json, account_id: str, region_name: str,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        rule = cloudformation_json["Properties"]
        _allow_egress(ec2_backends[account_id][region_name], rule["GroupId"], rule)
        return cls(resource_name, rule)

    def delete(self, account_id: str, region_name: str) -> None:
        ec2 = ec2_backends[account_id][region_name]
        group = ec2.get_security_group_by_name_or_id(self.properties["GroupId"])
        if group is not None:
            target = self.properties["DestinationSecurityGroupId"]
            group.egress_rules = [
                each for each in group.egress_rules
                if not (each.group_id == group.id and target in str(vars(each)))
            ]  # fmt: skip


def _allow_egress(ec2: Any, group: str, rule: Json) -> None:
    target = rule.get("DestinationSecurityGroupId")
    ec2.authorize_security_group_egress(
        group, rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort"),
        ip_ranges=[{"CidrIp": rule["CidrIp"]}] if "CidrIp" in rule else [],
        source_groups=[{"GroupId": target}] if target else [],
    )  # fmt: skip


@patch(SecurityGroup, "create_from_cloudformation_json")
def create_security_group(
    before: Any, name: str, template: Json, account: str, region: str, **more: Any
) -> Any:
    """SecurityGroupEgress replaces the rule that allows all. Template reference, SecurityGroup."""
    group = before(name, template, account, region, **more)
    rules = template["Properties"].get("SecurityGroupEgress", ())
    if rules:
        group.egress_rules.clear()
    for rule in rules:
        _allow_egress(ec2_backends[account][region], group.id, rule)
    return group


class BucketPolicy(Unmodelled):
    """Template reference, AWS::S3::BucketPolicy."""

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::S3::BucketPolicy"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Json, account_id: str, region_name: str,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        wanted = cloudformation_json["Properties"]
        policy = json.dumps(wanted["PolicyDocument"]).encode()
        s3_backends[account_id]["aws"].put_bucket_policy(wanted["Bucket"], policy)
        return cls(resource_name, wanted)


@patch(FakeBucket, "get_permission")
def judge_bucket_policy(before: Any, self: Any, *request: Any) -> Any:
    """moto ignores conditions: a statement for requests without TLS would deny all. So statements
    with conditions are left out; the requests of a client of AWS have TLS."""
    policy = self.policy
    if policy is not None:
        document = json.loads(policy)
        plain = [each for each in document["Statement"] if "Condition" not in each]
        self.policy = json.dumps({**document, "Statement": plain}).encode()
    try:
        return before(self, *request)
    finally:
        self.policy = policy


class RolePolicy(Unmodelled):
    """Template reference, AWS::IAM::RolePolicy."""

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::IAM::RolePolicy"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Json, account_id: str, region_name: str,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        wanted = cloudformation_json["Properties"]
        text = json.dumps(wanted["PolicyDocument"])
        iam_backends[account_id]["aws"].put_role_policy(
            wanted["RoleName"], wanted["PolicyName"], text
        )
        return cls(resource_name, wanted)

    def delete(self, account_id: str, region_name: str) -> None:
        iam = iam_backends[account_id]["aws"]
        iam.delete_role_policy(self.properties["RoleName"], self.properties["PolicyName"])


OWN = {each.cloudformation_type(): each for each in (SecurityGroupEgress, BucketPolicy, RolePolicy)}


@patch(Key, "create_from_cloudformation_json")
def create_key(before: Any, name: str, template: Json, *more: Any, **others: Any) -> Any:
    """KMS's tags are `TagKey` and `TagValue`; a template's are `Key` and `Value`."""
    wanted = template["Properties"]
    tags = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in wanted.get("Tags", ())]
    policy = json.dumps(wanted["KeyPolicy"])
    mended = {**template, "Properties": {**wanted, "Tags": tags, "KeyPolicy": policy}}
    return before(name, mended, *more, **others)


@patch(Key, "delete")
def delete_key(_: Any, key: Any, *__: Any) -> None:
    """A key waits for its deletion. Template reference, AWS::KMS::Key, PendingWindowInDays."""
    key.enabled, key.key_state = False, "PendingDeletion"
    key.deletion_date = utcnow() + timedelta(days=30)


@patch(Subnet, "get_cfn_attribute")
def read_subnet(before: Any, self: Any, name: str) -> Any:
    """Template reference, AWS::EC2::Subnet, "Return values"."""
    return self.availability_zone if name == "AvailabilityZone" else before(self, name)


# The id, not a representation of the object. Template reference, AWS::EFS::AccessPoint, "Ref".
setattr(AccessPoint, "physical_resource_id", property(lambda self: self.access_point_id))  # noqa: B010


@patch(MountTarget, "update_from_cloudformation_json")
def keep_mount_target(_: Any, original_resource: Any, **more: Any) -> Any:
    """One in the same subnet stays. Template reference, AWS::EFS::MountTarget, SubnetId."""
    wanted = more["cloudformation_json"]["Properties"]["SubnetId"]
    assert original_resource._subnet.id == wanted, "it would be replaced"
    return original_resource


def _delete_policy(account: str, region: str, policy: Any) -> None:
    """IAM API reference, DeletePolicy: DeleteConflict while it is attached to anyone."""
    iam = iam_backends[account]["aws"]
    holders: list[Any] = [*iam.get_roles(), *iam.users.values(), *iam.groups.values()]
    if any(policy.arn in each.managed_policies for each in holders):
        raise Exception("Cannot delete a policy attached to entities.")
    iam.delete_policy(policy.arn)


def _in_ec2(delete: Callable[[Any, Any], object]) -> Callable[[str, str, Any], object]:
    return lambda account, region, made: delete(ec2_backends[account][region], made)


def _leave_subnet(ec2: Any, made: Any) -> None:
    table = ec2.route_tables[made.route_table_id]
    for key in [key for key, subnet in table._associations.items() if subnet == made.subnet_id]:
        del table._associations[key]


def _revoke_ingress(ec2: Any, made: Any) -> None:
    source = str(made.properties.get("SourceSecurityGroupId"))
    rules = made.security_group.ingress_rules
    rules[:] = [rule for rule in rules if source not in str(vars(rule))]


# Types that moto makes and never deletes.
DELETIONS: dict[str, Callable[[str, str, Any], object]] = {
    "AWS::EC2::EIP": _in_ec2(lambda ec2, made: ec2.release_address(None, made.allocation_id)),
    "AWS::EC2::FlowLog": _in_ec2(lambda ec2, made: ec2.delete_flow_logs([made.id])),
    "AWS::EC2::InternetGateway": _in_ec2(lambda ec2, made: ec2.delete_internet_gateway(made.id)),
    "AWS::EC2::NatGateway": _in_ec2(lambda ec2, made: ec2.delete_nat_gateway(made.id)),
    "AWS::EC2::Route": _in_ec2(
        lambda ec2, made: ec2.delete_route(made.route_table.id, made.destination_cidr_block)
    ),
    "AWS::EC2::RouteTable": _in_ec2(lambda ec2, made: ec2.delete_route_table(made.id)),
    "AWS::EC2::SecurityGroupIngress": _in_ec2(_revoke_ingress),
    "AWS::EC2::SubnetRouteTableAssociation": _in_ec2(_leave_subnet),
    "AWS::EC2::VPCEndpoint": _in_ec2(lambda ec2, made: ec2.delete_vpc_endpoints([made.id])),
    "AWS::EC2::VPCGatewayAttachment": _in_ec2(
        lambda ec2, made: ec2.detach_internet_gateway(made.gateway_id, made.vpc_id)
    ),
    "AWS::IAM::ManagedPolicy": _delete_policy,
}


# --- AWS Batch --------------------------------------------------------------------------------

_BATCH = batch.BatchBackend
_SERVICE_ROLE = "AWSServiceRoleForBatch"


@patch(_BATCH, "create_compute_environment")
def create_environment(before: Any, self: Any, **request: Any) -> Any:
    """serviceRole is optional: AWS Batch uses its service-linked role, and makes it at the first
    use. API reference, CreateComputeEnvironment; User Guide, "Using service-linked roles"."""
    if not request.get("service_role"):
        path = f"/aws-service-role/batch.amazonaws.com/{_SERVICE_ROLE}"
        iam = self.iam_backend
        roles = {role.name: role for role in iam.get_roles()}
        role = roles.get(_SERVICE_ROLE) or iam.create_role(
            _SERVICE_ROLE, "{}", path.rpartition("/")[0] + "/", None, "", [], 3600
        )
        request["service_role"] = role.arn
    made = before(self, **request)
    # So AWS Batch names a cluster; moto's name lacks the compute environment.
    self.ecs_backend.delete_cluster(made.ecs_name)
    name = f"AWSBatch-{made.name}-{made.ecs_name.rpartition('_')[2]}"
    made.set_ecs(self.ecs_backend.create_cluster(name).arn, name)
    return made


@patch(_BATCH, "update_compute_environment")
def update_environment(before: Any, self: Any, **request: Any) -> Any:
    """computeResources are merged. API reference, UpdateComputeEnvironment."""
    found = self.get_compute_environment(request["compute_environment_name"])
    if found is not None and request.get("compute_resources"):
        found.compute_resources = {**found.compute_resources, **request["compute_resources"]}
    return before(self, **request)


@patch(batch_responses.BatchResponse, "createjobqueue")
def create_queue(before: Any, self: Any) -> Any:
    answer = before(self)
    _keep_limits(self, self._get_param("jobQueueName"))
    return answer


@patch(batch_responses.BatchResponse, "updatejobqueue")
def update_queue(before: Any, self: Any) -> Any:
    answer = before(self)
    _keep_limits(self, self._get_param("jobQueue"))
    return answer


def _keep_limits(response: Any, queue: str) -> None:
    """API reference, CreateJobQueue and UpdateJobQueue: `jobStateTimeLimitActions`."""
    limits = response._get_param("jobStateTimeLimitActions")
    if limits is not None:
        response.batch_backend.get_job_queue(queue).limits = limits


@patch(batch.JobQueue, "describe")
def describe_queue(before: Any, self: Any) -> Any:
    return {**before(self), "jobStateTimeLimitActions": getattr(self, "limits", [])}


@patch(_BATCH, "update_job_queue")
def update_job_queue(before: Any, self: Any, **request: Any) -> Any:
    """By name or ARN, compute environments too. API reference, UpdateJobQueue."""
    order = request.get("compute_env_order")
    for entry in order or ():
        found = self.get_compute_environment(entry["computeEnvironment"])
        entry["computeEnvironment"] = found.arn if found else entry["computeEnvironment"]
    return before(self, **request)


NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity request"
)


@patch(batch.Job, "start")
def wait_for_host(_: Any, self: Any) -> None:
    """No host ever joins: a job stays RUNNABLE, with AWS Batch's reason. User Guide, "Job queue
    blocked events"."""
    self.job_stopped_reason = NO_CAPACITY
    self._transitions = [(None, JobStatus.RUNNABLE)]
    self.status = JobStatus.RUNNABLE


@patch(batch.Job, "terminate")
def end_job(_: Any, self: Any, reason: str) -> None:
    """API reference, CancelJob: a job that waits is FAILED, with the reason."""
    if not self.job_stopped:
        self.stop, self.job_stopped_reason = True, reason
        for child in self._child_jobs or ():
            child.terminate(reason)
        self._mark_stopped(success=False)
