"""Requests as they should be, of each operation that a rule speaks of."""

import base64
import copy
import json
from typing import Any

from tests.security.cloudformation import ROOT

ACCOUNT = "arn:aws:iam::123456789012"
DIGEST = "@sha256:" + "0123456789abcdef" * 4
TAGS = {"batchml:env": "lab"}
TAG_LIST = [{"Key": "batchml:env", "Value": "lab"}]

USER_DATA = """\
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="==B=="

--==B==
Content-Type: text/cloud-boothook; charset="us-ascii"

#!/bin/bash
iptables -I OUTPUT -d 169.254.169.254/32 -m owner ! --uid-owner 0 -j DROP
--==B==
Content-Type: text/x-shellscript; charset="us-ascii"

#!/bin/bash
echo ECS_AWSVPC_BLOCK_IMDS=true >> /etc/ecs/ecs.config
--==B==--
"""

STACK_POLICY = {
    "Statement": [
        {"Effect": "Allow", "Action": "Update:*", "Principal": "*", "Resource": "*"},
        {
            "Effect": "Deny",
            "Action": ["Update:Replace", "Update:Delete"],
            "Principal": "*",
            "Resource": "*",
            "Condition": {
                "StringEquals": {
                    "ResourceType": [
                        "AWS::S3::Bucket", "AWS::EFS::FileSystem", "AWS::FSx::FileSystem",
                    ]
                }
            },
        },
    ]
}  # fmt: skip

_CONTAINER: dict[str, Any] = {
    "image": f"123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/pytorch{DIGEST}",
    "command": ["python", "train.py"],
    "jobRoleArn": f"{ACCOUNT}:role/job",
    "executionRoleArn": f"{ACCOUNT}:role/execution",
    "resourceRequirements": [
        {"type": "VCPU", "value": "4"},
        {"type": "MEMORY", "value": "16384"},
        {"type": "GPU", "value": "1"},
    ],
    "linuxParameters": {"initProcessEnabled": True, "sharedMemorySize": 1024},
    "environment": [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}],
    "secrets": [
        {
            "name": "HF_TOKEN",
            "valueFrom": "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf",
        }
    ],
    "volumes": [
        {"name": "workspace", "host": {"sourcePath": "/workspace"}},
        {"name": "notices", "host": {"sourcePath": "/run/batchml"}},
    ],
    "mountPoints": [
        {"sourceVolume": "workspace", "containerPath": "/workspace"},
        {"sourceVolume": "notices", "containerPath": "/run/batchml", "readOnly": True},
    ],
}

_DRIVER_MOUNT: dict[str, Any] = {
    **_CONTAINER,
    "privileged": True,
    "volumes": [
        {"name": "workspace", "host": {"sourcePath": "/workspace"}},
        {"name": "nvidia", "host": {"sourcePath": "/opt/nvidia"}},
    ],
    "mountPoints": [
        {"sourceVolume": "workspace", "containerPath": "/workspace"},
        {"sourceVolume": "nvidia", "containerPath": "/usr/local/nvidia", "readOnly": True},
    ],
}

_LAUNCH: dict[str, Any] = {
    "LaunchTemplateName": "batchml-lab-gpu",
    "LaunchTemplateData": {
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 100, "Encrypted": True}}
        ],
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "disabled",
        },
        "UserData": base64.b64encode(USER_DATA.encode()).decode(),
    },
}

_RESOURCES: dict[str, Any] = {
    "type": "SPOT",
    "allocationStrategy": "SPOT_PRICE_CAPACITY_OPTIMIZED",
    "minvCpus": 0,
    "maxvCpus": 64,
    "instanceTypes": ["g5"],
    "instanceRole": f"{ACCOUNT}:instance-profile/instance",
    "subnets": ["subnet-0123abcd"],
    "securityGroupIds": ["sg-0123abcd"],
    "launchTemplate": {"launchTemplateName": "batchml-lab-gpu", "version": "3"},
}

# The first word of a sample is its operation.
_SAMPLES: dict[str, dict[str, Any]] = {
    "RegisterJobDefinition": {
        "jobDefinitionName": "train",
        "type": "container",
        "containerProperties": _CONTAINER,
        "retryStrategy": {
            "attempts": 3,
            "evaluateOnExit": [{"onStatusReason": "Host EC2*", "action": "RETRY"}],
        },
        "tags": TAGS,
    },
    "RegisterJobDefinition with the driver's mount": {
        "jobDefinitionName": "train",
        "type": "container",
        "containerProperties": _DRIVER_MOUNT,
        "tags": TAGS,
    },
    "RegisterJobDefinition of many nodes": {
        "jobDefinitionName": "train",
        "type": "multinode",
        "nodeProperties": {
            "numNodes": 2,
            "mainNode": 0,
            "nodeRangeProperties": [{"targetNodes": "0:1", "container": _CONTAINER}],
        },
        "tags": TAGS,
    },
    "SubmitJob": {
        "jobName": "train",
        "jobQueue": "batchml-lab-default",
        "jobDefinition": "train",
        "containerOverrides": {"environment": [{"name": "EPOCHS", "value": "3"}]},
        "retryStrategy": {
            "attempts": 3,
            "evaluateOnExit": [{"onReason": "*", "action": "EXIT"}],
        },
        "tags": TAGS,
    },
    "CreateComputeEnvironment": {
        "computeEnvironmentName": "batchml-lab-gpu",
        "type": "MANAGED",
        "computeResources": _RESOURCES,
        "tags": TAGS,
    },
    "UpdateComputeEnvironment": {
        "computeEnvironment": "batchml-lab-gpu",
        "computeResources": {
            "maxvCpus": 128,
            "launchTemplate": {"launchTemplateName": "batchml-lab-gpu", "version": "4"},
        },
    },
    "CreateJobQueue": {
        "jobQueueName": "batchml-lab-default",
        "priority": 1,
        "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": "batchml-lab-gpu"}],
        "tags": TAGS,
    },
    "CreateLaunchTemplate": _LAUNCH,
    "CreateLaunchTemplateVersion": _LAUNCH,
    "CreateRepository": {
        "repositoryName": "batchml/pytorch",
        "imageTagMutability": "IMMUTABLE",
        "imageScanningConfiguration": {"scanOnPush": True},
        "encryptionConfiguration": {"encryptionType": "KMS"},
        "tags": TAG_LIST,
    },
    "PutImageScanningConfiguration": {
        "repositoryName": "batchml/pytorch",
        "imageScanningConfiguration": {"scanOnPush": True},
    },
    "PutImageTagMutability": {
        "repositoryName": "batchml/pytorch",
        "imageTagMutability": "IMMUTABLE",
    },
    "CreateStack": {
        "StackName": "batchml-lab-storage",
        "TemplateBody": (ROOT / "cfn" / "storage.yaml").read_text("utf-8"),
        "Parameters": [{"ParameterKey": "EnvironmentName", "ParameterValue": "lab"}],
        "Capabilities": ["CAPABILITY_NAMED_IAM"],
        "EnableTerminationProtection": True,
        "StackPolicyBody": json.dumps(STACK_POLICY),
        "Tags": TAG_LIST,
    },
    "CreateChangeSet": {
        "StackName": "batchml-lab-network",
        "ChangeSetName": "c",
        "TemplateBody": (ROOT / "cfn" / "network.yaml").read_text("utf-8"),
        "Tags": TAG_LIST,
    },
    "SetStackPolicy": {
        "StackName": "batchml-lab-storage",
        "StackPolicyBody": json.dumps(STACK_POLICY),
    },
}


def names() -> list[str]:
    return list(_SAMPLES)


def sample(name: str) -> tuple[str, dict[str, Any]]:
    """(operation, arguments) of a sample; a copy that may be changed."""
    return name.partition(" ")[0], copy.deepcopy(_SAMPLES[name])
