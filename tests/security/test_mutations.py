"""Every rule catches what it is there for: faults seeded into templates and requests.

Each fault is one small change of a template in cfn/, or of a sample request, which has no violation
before. It names the rule that has to catch it; another one may as well.
"""

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from batchml.local.server.protocol import problems
from tests.security import samples
from tests.security.cloudformation import FILES, Template, load
from tests.security.rules import request_violations, template_violations
from tests.security.template_rules import RULES

Fault = Callable[[Any], object]

TEMPLATES = {path.stem: load(path) for path in FILES}


def of(template: Template, name: str) -> Any:
    """The properties of a resource."""
    return template["Resources"][name]["Properties"]


def said(template: Template, name: str, sid: str) -> Any:
    """A statement, by its Sid or the name of its policy, of a role, policy, key or bucket."""
    properties = of(template, name)
    documents = [
        properties[key] for key in ("PolicyDocument", "KeyPolicy", "FileSystemPolicy")
        if key in properties
    ]  # fmt: skip
    documents += [policy["PolicyDocument"] for policy in properties.get("Policies", [])]
    every = [each for document in documents for each in document["Statement"]]
    flat = [
        inner for each in every for inner in each.get("Fn::If", [each]) if isinstance(inner, dict)
    ]
    return next(each for each in flat if each.get("Sid") == sid)


def trust(template: Template, name: str) -> Any:
    return of(template, name)["AssumeRolePolicyDocument"]["Statement"][0]


def drop(holder: Any, key: str) -> Any:
    """Remove what is there: a fault that changes nothing is none."""
    return holder.pop(key)


# What is wrong, the rule that catches it, the template, the change.
TEMPLATE_FAULTS: list[tuple[str, str, str, Fault]] = [
    ("anyone may come in", "T1", "network",
     lambda t: of(t, "JobGroup").update(SecurityGroupIngress=[
         {"IpProtocol": "tcp", "FromPort": 8888, "ToPort": 8888, "CidrIp": "0.0.0.0/0"}])),
    ("the network's own range may come in", "T1", "storage",
     lambda t: (drop(of(t, "EfsFromJobs"), "SourceSecurityGroupId"),
                of(t, "EfsFromJobs").update(CidrIp="10.42.0.0/16"))),
    ("SSH", "T1", "network",
     lambda t: of(t, "EndpointGroup")["SecurityGroupIngress"][0].update(FromPort=22, ToPort=22)),
    ("a range of ports with SSH in it", "T1", "network",
     lambda t: of(t, "EndpointGroup")["SecurityGroupIngress"][0].update(FromPort=1)),
    ("every port of the endpoints", "T1", "network",
     lambda t: of(t, "EndpointGroup")["SecurityGroupIngress"][0].update(IpProtocol="-1")),
    ("a prefix list may come in", "T1", "network",
     lambda t: of(t, "JobsFromJobs").update(SourcePrefixListId="pl-1")),
    ("a key pair for the build", "T2", "ami",
     lambda t: of(t, "Infrastructure").update(KeyPair="mine")),
    ("a key pair as a parameter", "T2", "network",
     lambda t: t["Parameters"].update(Key={
         "Type": "AWS::EC2::KeyPair::KeyName", "Description": "x"})),
    ("metadata without a token", "T3", "ami",
     lambda t: of(t, "Infrastructure")["InstanceMetadataOptions"].update(HttpTokens="optional")),
    ("metadata two hops away", "T3", "ami",
     lambda t: of(t, "Infrastructure")["InstanceMetadataOptions"].update(
         HttpPutResponseHopLimit=2)),
    ("no word about metadata", "T3", "ami",
     lambda t: drop(of(t, "Infrastructure"), "InstanceMetadataOptions")),
    ("instances may read buckets", "T4", "roles",
     lambda t: of(t, "InstanceRole")["ManagedPolicyArns"].append(
         "arn:aws:iam::aws:policy/AmazonS3ReadOnlyAccess")),
    ("instances may read secrets", "T4", "roles",
     lambda t: of(t, "InstanceRole").update(Policies=[{"PolicyName": "x", "PolicyDocument": {
         "Statement": [{"Effect": "Allow", "Action": "secretsmanager:GetSecretValue",
                        "Resource": "arn:aws:secretsmanager:*:*:secret:a"}]}}])),
    ("the build writes wherever it likes", "T4", "ami",
     lambda t: of(t, "BuildRole")["Policies"]["Fn::If"][1][0]["PolicyDocument"]["Statement"][0]
     .update(Resource="arn:aws:s3:::b/*")),
    ("an administrator", "T5", "roles",
     lambda t: of(t, "JobRole").update(ManagedPolicyArns=[
         "arn:aws:iam::aws:policy/AdministratorAccess"])),
    ("full access to S3", "T5", "roles",
     lambda t: of(t, "JobRole").update(ManagedPolicyArns=[
         "arn:aws:iam::aws:policy/AmazonS3FullAccess"])),
    ("every action", "T5", "roles",
     lambda t: said(t, "JobRole", "Read").update(Action="*")),
    ("every action of a service", "T5", "roles",
     lambda t: said(t, "JobRole", "Write").update(Action=["s3:*"])),
    ("all actions but one", "T5", "roles",
     lambda t: (drop(said(t, "JobRole", "Read"), "Action"),
                said(t, "JobRole", "Read").update(NotAction="s3:DeleteBucket"))),
    ("jobs cancelled on every resource", "T5", "roles",
     lambda t: said(t, "SubmitterPolicy", "Cancel").update(Resource="*")),
    ("every role may be passed", "T5", "roles",
     lambda t: said(t, "SubmitterPolicy", "Roles").update(
         Resource="arn:aws:iam::123456789012:role/*")),
    ("a role may be passed to any service", "T5", "roles",
     lambda t: drop(said(t, "SubmitterPolicy", "Roles"), "Condition")),
    ("secrets of every name", "T5", "roles",
     lambda t: of(t, "SecretsPolicy")["PolicyDocument"]["Statement"][0].update(Resource="*")),
    ("one role for the program and the agent", "T6", "roles",
     lambda t: t["Outputs"]["JobRoleArn"].update(Value={
         "Fn::GetAtt": ["ExecutionRole", "Arn"]})),
    ("instances have the program's role", "T6", "roles",
     lambda t: of(t, "InstanceProfile").update(Roles=[{"Ref": "JobRole"}])),
    ("two services trusted", "T6", "roles",
     lambda t: trust(t, "JobRole")["Principal"].update(
         Service=["ecs-tasks.amazonaws.com", "ec2.amazonaws.com"])),
    ("the account is trusted", "T6", "roles",
     lambda t: trust(t, "JobRole")["Principal"].update(AWS="123456789012")),
    ("tasks of other accounts", "T6", "roles",
     lambda t: drop(trust(t, "ExecutionRole")["Condition"], "StringEquals")),
    ("flow logs of whatever source", "T6", "network",
     lambda t: drop(trust(t, "FlowRole")["Condition"], "ArnLike")),
    ("public access is not blocked", "T7", "storage",
     lambda t: of(t, "Bucket")["PublicAccessBlockConfiguration"].update(BlockPublicPolicy=False)),
    ("public access of the logs is not blocked", "T7", "storage",
     lambda t: drop(of(t, "AccessLogs"), "PublicAccessBlockConfiguration")),
    ("access lists", "T7", "storage",
     lambda t: of(t, "Bucket")["OwnershipControls"]["Rules"][0].update(
         ObjectOwnership="ObjectWriter")),
    ("no versions", "T7", "storage",
     lambda t: of(t, "Bucket")["VersioningConfiguration"].update(Status="Suspended")),
    ("S3's own key", "T7", "storage",
     lambda t: of(t, "Bucket")["BucketEncryption"]["ServerSideEncryptionConfiguration"][0].update(
         ServerSideEncryptionByDefault={"SSEAlgorithm": "AES256"})),
    ("without TLS", "T7", "storage",
     lambda t: drop(t["Resources"], "BucketPolicy")),
    ("without TLS, to objects", "T7", "storage",
     lambda t: said(t, "BucketPolicy", "OnlyTls")["Resource"].pop()),
    ("TLS only where it is there anyway", "T7", "storage",
     lambda t: said(t, "BucketPolicy", "OnlyTls")["Condition"]["Bool"].update(
         {"aws:SecureTransport": "true"})),
    ("data sets of others may be written", "T7", "roles",
     lambda t: said(t, "DataPolicy", "Read").update(Action=["s3:GetObject", "s3:PutObject"])),
    ("nobody logs who reads", "T7", "storage",
     lambda t: drop(of(t, "Bucket"), "LoggingConfiguration")),
    ("unfinished uploads", "T7", "storage",
     lambda t: of(t, "Bucket")["LifecycleConfiguration"]["Rules"].pop(0)),
    ("the whole bucket", "T7", "roles",
     lambda t: said(t, "JobRole", "Write").update(Resource="arn:aws:s3:::batchml-lab/*")),
    ("everyone reads the bucket", "T7", "storage",
     lambda t: of(t, "BucketPolicy")["PolicyDocument"]["Statement"].append(
         {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "x"})),
    ("everyone uses the key", "T7", "storage",
     lambda t: drop(said(t, "Key", "LustreToBucket"), "Condition")),
    ("everyone mounts", "T7", "storage",
     lambda t: drop(said(t, "Efs", "FromMountTargets"), "Condition")),
    ("EFS in clear", "T8", "storage", lambda t: of(t, "Efs").update(Encrypted=False)),
    ("EFS with AWS's key", "T8", "storage", lambda t: drop(of(t, "Efs"), "KmsKeyId")),
    ("EFS without TLS", "T8", "storage",
     lambda t: of(t, "Efs")["FileSystemPolicy"]["Statement"].pop()),
    ("EFS for root", "T8", "storage",
     lambda t: said(t, "Efs", "FromMountTargets")["Action"].append(
         "elasticfilesystem:ClientRootAccess")),
    ("EFS without backup", "T8", "storage",
     lambda t: of(t, "Efs")["BackupPolicy"].update(Status="DISABLED")),
    ("Lustre with AWS's key", "T8", "storage", lambda t: drop(of(t, "Lustre"), "KmsKeyId")),
    ("Lustre in the jobs' group", "T8", "storage",
     lambda t: of(t, "Lustre").update(SecurityGroupIds=[{"Ref": "SecurityGroupId"}])),
    ("EFS in the default group", "T8", "storage",
     lambda t: drop(of(t, "EfsTarget2"), "SecurityGroups")),
    ("too many ports of Lustre", "T8", "storage",
     lambda t: of(t, "LustreFromJobs988").update(ToPort=1023)),
    ("the AMI's disk in clear", "T8", "ami",
     lambda t: of(t, "Recipe")["BlockDeviceMappings"][0]["Ebs"].update(Encrypted=False)),
    ("a repository as AWS makes it", "T9", "storage",
     lambda t: t["Resources"].update(R={"Type": "AWS::ECR::Repository", "Properties": {}})),
    ("logs for ever", "T10", "observability", lambda t: drop(of(t, "JobLogs"), "RetentionInDays")),
    ("logs without a key", "T10", "observability", lambda t: drop(of(t, "StateLogs"), "KmsKeyId")),
    ("a key for ever", "T10", "storage", lambda t: of(t, "Key").update(EnableKeyRotation=False)),
    ("no flow log", "T10", "network", lambda t: drop(t["Resources"], "FlowLog")),
    ("a flow log of what was refused", "T10", "network",
     lambda t: of(t, "FlowLog").update(TrafficType="REJECT")),
    ("a password with a default", "T12", "roles",
     lambda t: t["Parameters"].update(Password={
         "Type": "String", "Default": "hunter2", "Description": "x"})),
    ("a key of AWS", "T12", "observability",
     lambda t: of(t, "StateRule").update(Description="AKIA" + "ABCDEFGHIJKLMNOP")),
    ("a secret as an output", "T12", "roles",
     lambda t: t["Outputs"].update(ApiKey={"Value": "x", "Description": "x"})),
    ("submitters may use any image", "T13", "roles",
     lambda t: said(t, "SubmitterPolicy", "NoOtherImages").update(Effect="Allow")),
    ("submitters may be root", "T13", "roles",
     lambda t: drop(said(t, "SubmitterPolicy", "NoRoot"), "Condition")),
    ("submitters may be privileged", "T13", "roles",
     lambda t: of(t, "SubmitterPolicy")["PolicyDocument"]["Statement"].remove(next(
         each for each in of(t, "SubmitterPolicy")["PolicyDocument"]["Statement"]
         if "NoPrivileged" in str(each)))),
    ("submitters cancel everyone's jobs", "T13", "roles",
     lambda t: drop(said(t, "SubmitterPolicy", "Cancel"), "Condition")),
    ("controllers define jobs", "T13", "roles",
     lambda t: said(t, "ControllerRole", "Submit").update(
         Action=["batch:SubmitJob", "batch:RegisterJobDefinition"])),
    ("controllers pass roles", "T13", "roles",
     lambda t: of(t, "ControllerRole")["Policies"][0]["PolicyDocument"]["Statement"].append(
         copy.deepcopy(said(t, "SubmitterPolicy", "Roles")))),
    ("controllers may what submitters may not", "T13", "roles",
     lambda t: said(t, "ControllerRole", "Submit").update(
         Action=["batch:SubmitJob", "batch:UpdateJobQueue"])),
    ("controllers cancel everyone's jobs", "T13", "roles",
     lambda t: drop(said(t, "ControllerRole", "Cancel"), "Condition")),
    ("heads of gangs cancel everyone's jobs", "T13", "roles",
     lambda t: drop(said(t, "JobRole", "End"), "Condition")),
    ("a public address", "T14", "network",
     lambda t: of(t, "PrivateSubnet1").update(MapPublicIpOnLaunch=True)),
    ("a public address by default", "T14", "network",
     lambda t: drop(of(t, "PublicSubnet"), "MapPublicIpOnLaunch")),
    ("HTTP goes out", "T14", "network",
     lambda t: of(t, "JobGroup")["SecurityGroupEgress"][0].update(FromPort=80)),
    ("everything goes out", "T14", "network",
     lambda t: of(t, "JobsToJobs").update(CidrIp="0.0.0.0/0")),
    ("AWS's own rule for what goes out", "T14", "storage",
     lambda t: drop(of(t, "EfsGroup"), "SecurityGroupEgress")),
    ("private subnets with an internet gateway", "T14", "network",
     lambda t: of(t, "PrivateRoute").update(GatewayId={"Ref": "Internet"})),
    ("a build in the default network", "T14", "ami",
     lambda t: drop(of(t, "Infrastructure"), "SubnetId")),
    ("a parent of a certain day", "T14", "ami",
     lambda t: of(t, "Recipe").update(ParentImage="ami-0123456789abcdef0")),
    ("the bucket goes with the stack", "T15", "storage",
     lambda t: drop(t["Resources"]["Bucket"], "DeletionPolicy")),
    ("EFS goes when it is replaced", "T15", "storage",
     lambda t: drop(t["Resources"]["Efs"], "UpdateReplacePolicy")),
    ("Lustre goes with the stack", "T15", "storage",
     lambda t: t["Resources"]["Lustre"].update(DeletionPolicy="Delete")),
    ("data without its key", "T15", "storage",
     lambda t: t["Resources"]["Key"].update(DeletionPolicy="Delete")),
    ("output goes with the stack", "T15", "observability",
     lambda t: drop(t["Resources"]["JobLogs"], "DeletionPolicy")),
    ("a budget that nobody hears of", "T15", "observability",
     lambda t: drop(of(t, "MonthlyBudget"), "NotificationsWithSubscribers")),
    ("an AMI without tests", "T16", "ami",
     lambda t: of(t, "Image")["ImageTestsConfiguration"].update(ImageTestsEnabled=False)),
    ("an AMI without a list of packages", "T16", "ami",
     lambda t: of(t, "Image").update(EnhancedImageMetadataEnabled=False)),
    ("steps from elsewhere", "T16", "ami",
     lambda t: of(t, "DriverComponent").update(Uri="s3://b/driver.yaml")),
    ("a component of any version", "T16", "ami",
     lambda t: of(t, "Recipe")["Components"].append({
         "ComponentArn": "arn:aws:imagebuilder:us-east-1:aws:component/update-linux/x.x.x"})),
    ("an action that is none", "T17", "roles",
     lambda t: said(t, "JobRole", "Read").update(Action="GetObject")),
    ("a parameter that nobody explains", "T17", "network",
     lambda t: drop(t["Parameters"]["Zones"], "Description")),
    ("an output that nobody explains", "T17", "storage",
     lambda t: t["Outputs"]["KeyArn"].update(Description=" ")),
]  # fmt: skip


@pytest.mark.parametrize("stem", TEMPLATES)
def test_templates_have_no_violation(stem: str) -> None:
    assert template_violations(TEMPLATES[stem]) == []


@pytest.mark.parametrize(
    ("rule", "stem", "fault"),
    [pytest.param(*rest, id=f"{rest[0]} {what}") for what, *rest in TEMPLATE_FAULTS],
)
def test_template_fault_is_caught(rule: str, stem: str, fault: Fault) -> None:
    template = copy.deepcopy(TEMPLATES[stem])
    fault(template)
    assert template != TEMPLATES[stem]
    found = template_violations(template)
    assert rule in {each.partition(" ")[0] for each in found}, found


def test_every_template_rule_has_a_fault() -> None:
    rules = {rule.__name__.partition("_")[0].upper() for rule in RULES}
    assert rules == {rule for _, rule, _, _ in TEMPLATE_FAULTS}


def container(request: Any) -> Any:
    return request["containerProperties"]


def compute(request: Any) -> Any:
    return request["computeResources"]


def data(request: Any) -> Any:
    return request["LaunchTemplateData"]


def mount(request: Any, path: str) -> None:
    """Mount a folder of the host, read-only even."""
    container(request)["volumes"].append({"name": "more", "host": {"sourcePath": path}})
    container(request)["mountPoints"].append(
        {"sourceVolume": "more", "containerPath": "/more", "readOnly": True}
    )


def say(request: Any, old: str, new: str) -> None:
    """Change the user data."""
    text = base64.b64decode(data(request)["UserData"]).decode()
    assert old in text
    data(request)["UserData"] = base64.b64encode(text.replace(old, new).encode()).decode()


REGISTER = "RegisterJobDefinition"
DRIVER = "RegisterJobDefinition with the driver's mount"
NODES = "RegisterJobDefinition of many nodes"
CREATE = "CreateComputeEnvironment"
UPDATE = "UpdateComputeEnvironment"
LAUNCH = "CreateLaunchTemplate"

# What is wrong, the rule that catches it, the sample, the change.
REQUEST_FAULTS: list[tuple[str, str, str, Fault]] = [
    ("key pair of an environment", "T2", CREATE, lambda r: compute(r).update(ec2KeyPair="mine")),
    ("key pair of an update", "T2", UPDATE, lambda r: compute(r).update(ec2KeyPair="mine")),
    ("key pair of a template", "T2", LAUNCH, lambda r: data(r).update(KeyName="mine")),
    ("metadata without a token", "T3", LAUNCH,
     lambda r: data(r)["MetadataOptions"].update(HttpTokens="optional")),
    ("metadata two hops away", "T3", LAUNCH,
     lambda r: data(r)["MetadataOptions"].update(HttpPutResponseHopLimit=2)),
    ("tags in the metadata", "T3", "CreateLaunchTemplateVersion",
     lambda r: data(r)["MetadataOptions"].update(InstanceMetadataTags="enabled")),
    ("no word about metadata", "T3", LAUNCH, lambda r: drop(data(r), "MetadataOptions")),
    ("no wall before the instance's role", "T4", LAUNCH, lambda r: say(r, "DROP", "ACCEPT")),
    ("no wall for nodes", "T4", LAUNCH, lambda r: say(r, "IMDS=true", "IMDS=false")),
    ("no user data", "T4", LAUNCH, lambda r: drop(data(r), "UserData")),
    ("macros that rewrite a template", "T5", "CreateStack",
     lambda r: r["Capabilities"].append("CAPABILITY_AUTO_EXPAND")),
    ("one role for program and agent", "T6", REGISTER,
     lambda r: container(r).update(jobRoleArn=container(r)["executionRoleArn"])),
    ("one role for Batch and instances", "T6", CREATE,
     lambda r: r.update(serviceRole="arn:aws:iam::123456789012:role/instance")),
    ("a disk in clear", "T8", LAUNCH,
     lambda r: data(r)["BlockDeviceMappings"][0]["Ebs"].update(Encrypted=False)),
    ("a second disk, of which nothing is said", "T8", LAUNCH,
     lambda r: data(r)["BlockDeviceMappings"].append(
         {"DeviceName": "/dev/xvdb", "Ebs": {"VolumeSize": 9}})),
    ("no disk", "T8", LAUNCH, lambda r: drop(data(r), "BlockDeviceMappings")),
    ("an image by tag", "T9", REGISTER, lambda r: container(r).update(image="python:3.12")),
    ("the latest image", "T9", REGISTER, lambda r: container(r).update(image="a/b:latest")),
    ("half a digest", "T9", REGISTER, lambda r: container(r).update(image="a/b@sha256:12")),
    ("a node's image by tag", "T9", NODES,
     lambda r: r["nodeProperties"]["nodeRangeProperties"][0]["container"].update(image="a:1")),
    ("no scan", "T9", "CreateRepository",
     lambda r: r["imageScanningConfiguration"].update(scanOnPush=False)),
    ("tags that move", "T9", "CreateRepository",
     lambda r: r.update(imageTagMutability="MUTABLE")),
    ("tags made to move", "T9", "PutImageTagMutability",
     lambda r: r.update(imageTagMutability="MUTABLE")),
    ("scans turned off", "T9", "PutImageScanningConfiguration",
     lambda r: r["imageScanningConfiguration"].update(scanOnPush=False)),
    ("a repository without KMS", "T9", "CreateRepository",
     lambda r: r["encryptionConfiguration"].update(encryptionType="AES256")),
    ("privileged for no reason", "T11", REGISTER, lambda r: container(r).update(privileged=True)),
    ("a driver that jobs can change", "T11", DRIVER,
     lambda r: container(r)["mountPoints"][1].update(readOnly=False)),
    ("a driver of which nothing is said", "T11", DRIVER,
     lambda r: drop(container(r)["mountPoints"][1], "readOnly")),
    ("a notice that jobs can write", "T11", REGISTER,
     lambda r: drop(container(r)["mountPoints"][1], "readOnly")),
    ("privileged, the driver not mounted", "T11", DRIVER,
     lambda r: container(r)["mountPoints"].pop()),
    ("the driver without privileges", "T11", DRIVER, lambda r: drop(container(r), "privileged")),
    ("the host's root", "T11", DRIVER, lambda r: mount(r, "/")),
    ("the engine's socket", "T11", REGISTER, lambda r: mount(r, "/var/run/docker.sock")),
    ("the agent's files", "T11", REGISTER, lambda r: mount(r, "/etc/ecs")),
    ("out of the workspace", "T11", REGISTER, lambda r: mount(r, "/workspace/../etc")),
    ("root", "T11", REGISTER, lambda r: container(r).update(user="root")),
    ("root by number", "T11", REGISTER, lambda r: container(r).update(user="0:1000")),
    ("no init", "T11", REGISTER,
     lambda r: container(r)["linuxParameters"].update(initProcessEnabled=False)),
    ("a node without init", "T11", NODES,
     lambda r: drop(r["nodeProperties"]["nodeRangeProperties"][0]["container"],
                    "linuxParameters")),
    ("the host's disk", "T11", REGISTER,
     lambda r: container(r)["linuxParameters"].update(devices=[{"hostPath": "/dev/nvme0n1"}])),
    ("no container", "T11", REGISTER, lambda r: drop(r, "containerProperties")),
    ("the host's processes", "T11", REGISTER,
     lambda r: r.update(ecsProperties={"taskProperties": [
         {"pidMode": "host", "containers": [r.pop("containerProperties")]}]})),
    ("whatever fails is tried again", "T11", REGISTER,
     lambda r: drop(r["retryStrategy"], "evaluateOnExit")),
    ("no rules for what is tried again", "T11", "SubmitJob", lambda r: drop(r, "retryStrategy")),
    ("a secret as a variable", "T12", REGISTER,
     lambda r: container(r)["environment"].append({"name": "WANDB_API_KEY", "value": "1234"})),
    ("a secret as an override", "T12", "SubmitJob",
     lambda r: r["containerOverrides"]["environment"].append(
         {"name": "DB_PASSWORD", "value": "hunter2"})),
    ("a secret on the command line", "T12", REGISTER,
     lambda r: container(r)["command"].append("--token=hf_" + "a" * 34)),
    ("a password within an address", "T12", "SubmitJob",
     lambda r: r["containerOverrides"]["environment"].append(
         {"name": "DB", "value": "postgres://me:hunter2@db/x"})),
    ("a secret's value for its ARN", "T12", REGISTER,
     lambda r: container(r)["secrets"][0].update(valueFrom="hunter2")),
    ("a secret as a parameter of a job", "T12", REGISTER,
     lambda r: r.update(parameters={"api_key": "1234"})),
    ("a secret as a parameter of a stack", "T12", "CreateStack",
     lambda r: r["Parameters"].append(
         {"ParameterKey": "AdminPassword", "ParameterValue": "hunter2"})),
    ("definitions that nobody finds", "T13", REGISTER, lambda r: drop(r, "tags")),
    ("jobs that nobody may cancel", "T13", "SubmitJob", lambda r: drop(r["tags"], "batchml:env")),
    ("queues that nobody finds", "T13", "CreateJobQueue", lambda r: drop(r, "tags")),
    ("environments that nobody finds", "T13", CREATE, lambda r: drop(r, "tags")),
    ("stacks that nobody finds", "T13", "CreateChangeSet", lambda r: drop(r, "Tags")),
    ("repositories that nobody finds", "T13", "CreateRepository", lambda r: drop(r, "tags")),
    ("the latest template", "T14", CREATE,
     lambda r: compute(r)["launchTemplate"].update(version="$Latest")),
    ("the default template", "T14", UPDATE,
     lambda r: compute(r)["launchTemplate"].update(version="$Default")),
    ("whichever template", "T14", CREATE,
     lambda r: drop(compute(r)["launchTemplate"], "version")),
    ("no template", "T14", CREATE, lambda r: drop(compute(r), "launchTemplate")),
    ("the default group", "T14", CREATE, lambda r: compute(r).update(securityGroupIds=[])),
    ("an image by the deprecated way", "T14", CREATE,
     lambda r: compute(r).update(imageId="ami-0123abcd")),
    ("a public address", "T14", LAUNCH,
     lambda r: data(r).update(NetworkInterfaces=[
         {"DeviceIndex": 0, "AssociatePublicIpAddress": True}])),
    ("no bound", "T15", CREATE, lambda r: drop(compute(r), "maxvCpus")),
    ("a bound beyond all money", "T15", UPDATE, lambda r: compute(r).update(maxvCpus=10**6)),
    ("jobs stuck for less than AWS takes", "T15", "CreateJobQueue",
     lambda r: r.update(jobStateTimeLimitActions=[{
         "reason": "x", "state": "RUNNABLE", "maxTimeSeconds": 10, "action": "CANCEL"}])),
    ("data that a slip deletes", "T15", "CreateStack",
     lambda r: r.update(EnableTerminationProtection=False)),
    ("data that an update deletes", "T15", "CreateStack", lambda r: drop(r, "StackPolicyBody")),
    ("a policy lifted", "T15", "SetStackPolicy",
     lambda r: r.update(StackPolicyBody=json.dumps(
         {"Statement": samples.STACK_POLICY["Statement"][:1]}))),
    ("a policy that allows what it names", "T15", "SetStackPolicy",
     lambda r: r.update(StackPolicyBody=r["StackPolicyBody"].replace("Deny", "Allow"))),
    ("a secret in the user data", "T16", LAUNCH,
     lambda r: say(r, "#!/bin/bash", "#!/bin/bash\nexport K=AKIA" + "ABCDEFGHIJKLMNOP")),
    ("a template from elsewhere", "T16", "CreateStack",
     lambda r: (drop(r, "TemplateBody"), r.update(TemplateURL="https://b.s3.amazonaws.com/t"))),
    ("a stack with a faulty template", "T14", "CreateChangeSet",
     lambda r: r.update(TemplateBody=r["TemplateBody"].replace(
         "MapPublicIpOnLaunch: false", "MapPublicIpOnLaunch: true"))),
]  # fmt: skip

_SERVICES = {"CreateLaunchTemplate": "ec2", "CreateLaunchTemplateVersion": "ec2",
             "CreateRepository": "ecr", "PutImageScanningConfiguration": "ecr",
             "PutImageTagMutability": "ecr", "CreateStack": "cloudformation",
             "CreateChangeSet": "cloudformation", "SetStackPolicy": "cloudformation"}  # fmt: skip


@pytest.mark.parametrize("name", samples.names())
def test_samples_have_no_violation(name: str) -> None:
    operation, request = samples.sample(name)
    assert request_violations(operation, request) == []


@pytest.mark.parametrize("name", samples.names())
def test_samples_are_what_aws_takes(name: str) -> None:
    """A rule about a member that AWS does not know would never find anything."""
    from botocore.session import Session

    operation, request = samples.sample(name)
    model = Session().get_service_model(_SERVICES.get(operation, "batch"))
    assert list(problems(model.operation_model(operation).input_shape, request, strict=True)) == []


@pytest.mark.parametrize(
    ("rule", "name", "fault"),
    [pytest.param(*rest, id=f"{rest[0]} {what}") for what, *rest in REQUEST_FAULTS],
)
def test_request_fault_is_caught(rule: str, name: str, fault: Fault) -> None:
    operation, request = samples.sample(name)
    fault(request)
    assert request != samples.sample(name)[1]
    found = request_violations(operation, request)
    assert rule in {each.partition(":")[0].partition(" ")[0] for each in found}, found


def test_an_operation_without_rules_is_no_pass() -> None:
    with pytest.raises(KeyError):
        request_violations("RunInstances", {})


def test_there_are_enough_faults() -> None:
    faults = [what for what, *_ in TEMPLATE_FAULTS + REQUEST_FAULTS]
    assert len(faults) >= 40
