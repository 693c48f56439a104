"""Our rules for requests: pure functions from AWS arguments to what is wrong with them."""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.security.cloudformation import parse, strings
from tests.security.secret_looking import is_secret_name, is_secret_value
from tests.security.template_rules import template_violations

Params = Mapping[str, Any]
Found = Iterator[str]

DRIVER = "/opt/nvidia"  # of the host; for privileged containers, read-only
NOTICES = "/run/batchml"  # of the host: what EC2 announces; read-only
HOST_PATHS = (DRIVER, NOTICES, "/workspace")
# EFA and NVIDIA's, which a container without privileges may be given.
DEVICES = re.compile(r"/dev/(infiniband/[a-z0-9]+|nvidia[a-z0-9-]*)")
DATA_STACKS = re.compile(r"-(storage|observability)$")
CAPABILITIES = {"CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"}
MAX_VCPUS = 100_000
TAGGED = {"batchml:env"}  # by which people's rights to cancel, and teardown, go

_PINNED = re.compile(r".+@sha256:[0-9a-f]{64}")
_USER = re.compile(r"[1-9][0-9]*(:[1-9][0-9]*)?")


def request_violations(operation: str, params: Params) -> list[str]:
    """What is wrong with a request, each with its rule. `operation` is AWS's: `CreateStack`.

    Raises KeyError for an operation that no rule speaks of: it wants one, or a line in `EXEMPT`.
    """
    rules = () if operation in EXEMPT else RULES[operation]
    found = [each for rule in (*rules, _t12_values) for each in rule(params)]
    return [f"{each} ({operation})" for each in found]


# --- definitions and submissions


def _containers(params: Params) -> Iterator[tuple[Params, list[Params]]]:
    """(container, volumes) of every container of a definition, of whatever kind it is."""
    if "containerProperties" in params:
        container = params["containerProperties"]
        yield container, container.get("volumes", [])
    for task in params.get("ecsProperties", {}).get("taskProperties", []):
        yield from ((each, task.get("volumes", [])) for each in task["containers"])
    for node in params.get("nodeProperties", {}).get("nodeRangeProperties", []):
        yield from _containers(
            {"containerProperties": node["container"]} if "container" in node else node
        )


def _t9_images(params: Params) -> Found:
    for container, _ in _containers(params):
        if not _PINNED.fullmatch(container.get("image", "")):
            yield f"T9: image {container.get('image')!r} is not pinned by its digest"


def _t6_roles(params: Params) -> Found:
    for container, _ in _containers(params):
        roles = container.get("jobRoleArn"), container.get("executionRoleArn")
        if roles[0] and roles[0] == roles[1]:
            yield "T6: the program has the role that starts it"


def _t11_containers(params: Params) -> Found:
    containers = list(_containers(params))
    if not containers:
        yield "T11: no container to judge"
    for container, volumes in containers:
        linux = container.get("linuxParameters", {})
        if linux.get("initProcessEnabled") is not True:
            yield "T11: no init process to reap children and pass signals on"
        if "user" in container and not _USER.fullmatch(container["user"]):
            yield f"T11: user {container['user']!r} is root, or a name that an image may give to it"
        yield from _t11_volumes(container, volumes)
        for device in linux.get("devices", []):
            if not DEVICES.fullmatch(device["hostPath"]):
                yield f"T11: device {device['hostPath']}"
    for task in params.get("ecsProperties", {}).get("taskProperties", []):
        for key in ("ipcMode", "pidMode"):
            if task.get(key) == "host":
                yield f"T11: {key} of the host"


def _t11_volumes(container: Params, volumes: list[Params]) -> Found:
    hosts = {each["name"]: each.get("host", {}).get("sourcePath") for each in volumes}
    mounts = container.get("mountPoints", [])
    for name, path in hosts.items():
        if path is not None and path not in HOST_PATHS:
            yield f"T11: the host's {path}, as volume {name}"
    has_driver = False
    for mount in mounts:
        path = hosts.get(mount["sourceVolume"])
        has_driver = has_driver or path == DRIVER
        if path in (DRIVER, NOTICES) and mount.get("readOnly") is not True:
            yield f"T11: the host's {path} can be written to"
    if container.get("privileged") and not has_driver:
        yield "T11: privileged, without the driver's mount that needs it"
    if not container.get("privileged") and has_driver:
        yield "T11: the driver's mount, which does nothing without privileges"


def _t11_retries(params: Params) -> Found:
    retry = params.get("retryStrategy")
    if retry is not None and retry.get("attempts", 1) > 1 and not retry.get("evaluateOnExit"):
        yield "T11: whatever fails is tried again"


def _t11_submitted(params: Params) -> Found:
    if not params.get("retryStrategy", {}).get("evaluateOnExit"):
        yield "T11: no rules say what is tried again"


def _t12_variables(params: Params) -> Found:
    overrides = params.get("containerOverrides", {})
    for container in (*(each for each, _ in _containers(params)), overrides):
        for variable in container.get("environment", []):
            if is_secret_name(variable["name"]) and variable.get("value"):
                yield f"T12: variable {variable['name']} is in clear; it belongs into secrets"
        for secret in container.get("secrets", []):
            if not re.match(r"arn:aws[a-z-]*:(secretsmanager|ssm):", secret["valueFrom"]):
                yield f"T12: secret {secret['name']} is not named by its ARN"
    for name, value in params.get("parameters", {}).items():
        if is_secret_name(name) and value:
            yield f"T12: parameter {name} is in clear"


def _t12_values(params: Params) -> Found:
    if any(map(is_secret_value, strings(dict(params)))):
        yield "T12: a value that is a secret"


def _t13_tags(params: Params) -> Found:
    tags = params.get("tags", params.get("Tags", {}))
    names = set(tags) if isinstance(tags, Mapping) else {
        each.get("Key", each.get("key")) for each in tags
    }  # fmt: skip
    for key in sorted(TAGGED - names):
        yield f"T13: no tag {key}"


# --- compute environments and queues


def _t2_key_pair(params: Params) -> Found:
    if params.get("computeResources", {}).get("ec2KeyPair"):
        yield "T2: a key pair"


def _t6_service_role(params: Params) -> Found:
    role = params.get("serviceRole", "").rpartition("/")[2]
    if (
        role
        and role == params.get("computeResources", {}).get("instanceRole", "").rpartition("/")[2]
    ):
        yield "T6: AWS Batch has the instances' role"


def _t14_template(params: Params) -> Found:
    template = params.get("computeResources", {}).get("launchTemplate")
    if template is not None:
        version = template.get("version", "$Default")
        if not re.fullmatch(r"[1-9][0-9]*", version):
            yield f"T14: version {version} of the launch template, which may come to be another"
    if params.get("computeResources", {}).get("imageId"):
        yield "T14: imageId, which AWS has deprecated and others override"


def _t14_complete(params: Params) -> Found:
    resources = params["computeResources"]
    for key in ("launchTemplate", "instanceRole", "securityGroupIds", "subnets"):
        if not resources.get(key):
            yield f"T14: no {key}"


def _t15_bounded(params: Params) -> Found:
    resources = params.get("computeResources", {})
    if "maxvCpus" in resources and not 1 <= resources["maxvCpus"] <= MAX_VCPUS:
        yield f"T15: maxvCpus {resources['maxvCpus']}"


def _t15_has_bound(params: Params) -> Found:
    if "maxvCpus" not in params["computeResources"]:
        yield "T15: no maxvCpus"


def _t15_queue(params: Params) -> Found:
    for action in params.get("jobStateTimeLimitActions", []):
        if not 600 <= action["maxTimeSeconds"] <= 86_400:
            yield f"T15: {action['maxTimeSeconds']} s"
    if not params["computeEnvironmentOrder"]:
        yield "T15: no compute environment, and so no bound"


# --- launch templates


def _data(params: Params) -> Params:
    found = params["LaunchTemplateData"]
    assert isinstance(found, Mapping)
    return found


def _t2_launch_key(params: Params) -> Found:
    if _data(params).get("KeyName"):
        yield "T2: a key pair"


def _t3_metadata(params: Params) -> Found:
    options = _data(params).get("MetadataOptions", {})
    if options.get("HttpTokens") != "required":
        yield "T3: HttpTokens is not required"
    if options.get("HttpPutResponseHopLimit") != 1:
        yield "T3: HttpPutResponseHopLimit is not 1"
    if options.get("InstanceMetadataTags", "disabled") != "disabled":
        yield "T3: instance tags are in the metadata"


def _t4_metadata_wall(params: Params) -> Found:
    """Jobs share the host's network, so that a hop limit alone keeps nobody out."""
    script = base64.b64decode(_data(params).get("UserData", "")).decode()
    if not re.search(r"169\.254\.169\.254.*! --uid-owner 0 -j DROP", script):
        yield "T4: jobs reach the instance's role"
    if not re.search(r"ECS_AWSVPC_BLOCK_IMDS[= ]true", script):
        yield "T4: nodes of multi-node jobs reach the instance's role"
    if is_secret_value(script):
        yield "T16: a secret in the user data"


def _t8_disks(params: Params) -> Found:
    mappings = _data(params).get("BlockDeviceMappings", [])
    if not mappings:
        yield "T8: the disk is left to the AMI, and may not be encrypted"
    for mapping in mappings:
        if mapping.get("Ebs", {}).get("Encrypted") is not True:
            yield f"T8: disk {mapping.get('DeviceName')} is not encrypted"


def _t14_no_public_ip(params: Params) -> Found:
    for interface in _data(params).get("NetworkInterfaces", []):
        if interface.get("AssociatePublicIpAddress") is not False:
            yield "T14: a public address"


# --- repositories and stacks


def _t9_repository(params: Params) -> Found:
    if params.get("imageScanningConfiguration", {}).get("scanOnPush") is not True:
        yield "T9: images are not scanned"
    if params.get("imageTagMutability") != "IMMUTABLE":
        yield "T9: a tag may come to mean another image"
    if params.get("encryptionConfiguration", {}).get("encryptionType") not in ("KMS", "KMS_DSSE"):
        yield "T9: not encrypted with KMS"


def _t9_scan(params: Params) -> Found:
    if params["imageScanningConfiguration"].get("scanOnPush") is not True:
        yield "T9: images are not scanned"


def _t9_mutability(params: Params) -> Found:
    if params["imageTagMutability"] != "IMMUTABLE":
        yield "T9: a tag may come to mean another image"


def _t5_capabilities(params: Params) -> Found:
    for capability in sorted(set(params.get("Capabilities", [])) - CAPABILITIES):
        yield f"T5: {capability}: what is deployed is not what was read"


def _t15_protected(params: Params) -> Found:
    if DATA_STACKS.search(params["StackName"]):
        if params.get("EnableTerminationProtection") is not True:
            yield "T15: anyone's slip deletes a stack with data"
        if not _denies_loss(params.get("StackPolicyBody", "{}")):
            yield "T15: an update may replace or delete data"


def _t15_policy(params: Params) -> Found:
    if DATA_STACKS.search(params["StackName"]) and not _denies_loss(params["StackPolicyBody"]):
        yield "T15: an update may replace or delete data"


def _denies_loss(policy: str) -> bool:
    """True when updates may neither replace nor delete what holds data."""
    for statement in json.loads(policy).get("Statement", []):
        said = json.dumps(statement)
        lost = all(action in said for action in ("Update:Replace", "Update:Delete"))
        kinds = all(kind in said for kind in ("S3::Bucket", "EFS::FileSystem", "FSx::FileSystem"))
        if statement["Effect"] == "Deny" and lost and kinds:
            return True
    return False


def _t12_stack_parameters(params: Params) -> Found:
    for parameter in params.get("Parameters", []):
        name = parameter["ParameterKey"]
        if is_secret_name(name) and parameter.get("ParameterValue"):
            yield f"T12: parameter {name} is in clear"


def _template(params: Params) -> Found:
    if "TemplateURL" in params:
        yield "T16: a template that is elsewhere, and may change there"
    if "TemplateBody" in params:
        yield from template_violations(parse(params["TemplateBody"]))


Rule = Callable[[Params], Found]
_STACK: tuple[Rule, ...] = (_t5_capabilities, _t12_stack_parameters, _t13_tags, _template)
_LAUNCH: tuple[Rule, ...] = (
    _t2_launch_key, _t3_metadata, _t4_metadata_wall, _t8_disks, _t14_no_public_ip,
)  # fmt: skip
_COMPUTE: tuple[Rule, ...] = (_t2_key_pair, _t6_service_role, _t14_template, _t15_bounded)

RULES: dict[str, tuple[Rule, ...]] = {
    "RegisterJobDefinition": (
        _t6_roles, _t9_images, _t11_containers, _t11_retries, _t12_variables, _t13_tags,
    ),
    "SubmitJob": (_t11_submitted, _t12_variables, _t13_tags),
    "CreateComputeEnvironment": (*_COMPUTE, _t13_tags, _t14_complete, _t15_has_bound),
    "UpdateComputeEnvironment": _COMPUTE,
    "CreateJobQueue": (_t13_tags, _t15_queue),
    "CreateLaunchTemplate": _LAUNCH,
    "CreateLaunchTemplateVersion": _LAUNCH,
    "CreateRepository": (_t9_repository, _t13_tags),
    "PutImageScanningConfiguration": (_t9_scan,),
    "PutImageTagMutability": (_t9_mutability,),
    "CreateStack": (*_STACK, _t15_protected),
    "UpdateStack": _STACK,
    "CreateChangeSet": _STACK,
    "SetStackPolicy": (_t15_policy,),
}  # fmt: skip

# What makes or changes something, but nothing that a rule is about.
EXEMPT = {
    "CreatePlacementGroup", "CreateSchedulingPolicy", "UpdateSchedulingPolicy", "UpdateJobQueue",
    "PutLifecyclePolicy", "TagResource", "UpdateTerminationProtection", "ContinueUpdateRollback",
}  # fmt: skip
