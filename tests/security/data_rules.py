"""Rules for templates, about data: kept, encrypted, logged, and no secrets among it."""

import re
from collections.abc import Iterator

from tests.security.cloudformation import (
    Template,
    branches,
    group_rules,
    identity_statements,
    items,
    resource_statements,
    resources,
    statements,
    strings,
    text,
    texts,
)
from tests.security.secret_looking import is_secret_name, is_secret_value

Found = Iterator[str]

# What nothing else holds, so that a stack's end must not be its end.
DATA = (
    "AWS::S3::Bucket", "AWS::S3::BucketPolicy", "AWS::EFS::FileSystem", "AWS::FSx::FileSystem",
    "AWS::EFS::AccessPoint", "AWS::FSx::DataRepositoryAssociation", "AWS::DynamoDB::Table",
    "AWS::EC2::Volume", "AWS::Logs::LogGroup", "AWS::KMS::Key",
)  # fmt: skip
# Records that go with what they are about.
NOT_DATA = ("FlowLogs", "FlowKey", "BuildLogs")
# Conditions that keep a policy for everyone to this account.
ACCOUNT_KEYS = ("kms:CallerAccount", "elasticfilesystem:AccessedViaMountTarget")
FILE_SYSTEM_PORTS = {(2049, 2049), (988, 988), (1018, 1023)}


def t7_buckets(template: Template) -> Found:
    closed = set()
    for _, _, properties in resources(template, "AWS::S3::BucketPolicy"):
        for statement in statements(properties["PolicyDocument"]):
            off = {"Bool": {"aws:SecureTransport": "false"}}
            whole = len(items(statement.get("Resource"))) == 2
            is_all = statement.get("Action") == "s3:*" and statement.get("Principal") == "*"
            if statement["Effect"] == "Deny" and statement.get("Condition") == off and whole:
                closed |= {text(properties["Bucket"])} if is_all else set()
    for name, _, properties in resources(template, "AWS::S3::Bucket"):
        block = properties.get("PublicAccessBlockConfiguration", {})
        if [*block.values()] != [True] * 4:
            yield f"T7 {name}: public access is not blocked."
        owner = properties.get("OwnershipControls", {}).get("Rules", [{}])[0]
        if owner.get("ObjectOwnership") != "BucketOwnerEnforced":
            yield f"T7 {name}: BucketOwnerEnforced is missing."
        if properties.get("VersioningConfiguration", {}).get("Status") != "Enabled":
            yield f"T7 {name}: no versions."
        takes_logs = _takes_logs(template, name)
        encryption = "AES256" if takes_logs else "aws:kms"
        if f"'SSEAlgorithm': '{encryption}'" not in str(properties.get("BucketEncryption")):
            yield f"T7 {name}: not encrypted with {encryption}."
        if not takes_logs and "LoggingConfiguration" not in properties:
            yield f"T7 {name}: accesses are not logged."
        if "AbortIncompleteMultipartUpload" not in str(properties.get("LifecycleConfiguration")):
            yield f"T7 {name}: unfinished uploads stay for ever."
        if f"${{{name}}}" not in closed:
            yield f"T7 {name}: no policy that refuses what comes without TLS."
    for name, statement in identity_statements(template):
        if statement["Effect"] == "Allow" and "s3:" in str(texts(statement.get("Action"))):
            yield from (
                f"T7 {name}: objects without a prefix: {target}"
                for target in texts(statement["Resource"])
                if re.fullmatch(r"[^/]*(/\*)?", target) and "s3:ListBucket" not in str(statement)
                # The prefixes that the environment lists, for reading alone.
                if (target, statement["Action"]) != ("${JobData}", "s3:GetObject")
            )


def t7_resource_policies(template: Template) -> Found:
    """Everyone is somebody's principal only with a condition that means this account."""
    for name, statement in resource_statements(template):
        everyone = "*" in (texts(statement.get("Principal")) + [
            each for value in branches(statement.get("Principal")) if isinstance(value, dict)
            for each in texts(value.get("AWS"))
        ])  # fmt: skip
        condition = str(statement.get("Condition"))
        is_ours = any(key in condition for key in ACCOUNT_KEYS)
        if statement["Effect"] == "Allow" and everyone and not is_ours:
            yield f"T7 {name}: everyone may use it."


def t8_encryption(template: Template) -> Found:
    for name, _, properties in resources(template, "AWS::EFS::FileSystem"):
        if properties.get("Encrypted") is not True or not properties.get("KmsKeyId"):
            yield f"T8 {name}: not encrypted with a key of ours."
        if "aws:SecureTransport" not in str(properties.get("FileSystemPolicy")):
            yield f"T8 {name}: may be mounted without TLS."
        if "ClientRootAccess" in str(properties.get("FileSystemPolicy")):
            yield f"T8 {name}: root in a container is root in the workspace."
        if properties.get("BackupPolicy", {}).get("Status") != "ENABLED":
            yield f"T8 {name}: no backup."
    for name, _, properties in resources(template, "AWS::FSx::FileSystem"):
        if not properties.get("KmsKeyId"):
            yield f"T8 {name}: not encrypted with a key of ours."
    for name, _, properties in resources(template):
        for mapping in items(properties.get("LaunchTemplateData", properties).get(
            "BlockDeviceMappings"
        )):  # fmt: skip
            if mapping.get("Ebs", {}).get("Encrypted") is not True:
                yield f"T8 {name}: a disk that is not encrypted."
    own = {name for name, _, _ in resources(template, "AWS::EC2::SecurityGroup")}
    for name, _, properties in resources(template, "AWS::EFS::MountTarget", "AWS::FSx::FileSystem"):
        groups = properties.get("SecurityGroups", properties.get("SecurityGroupIds"))
        if not texts(groups) or not {each[2:-1] for each in texts(groups)} <= own:
            yield f"T8 {name}: has no security group of its own."
    if any(resources(template, "AWS::EFS::FileSystem", "AWS::FSx::FileSystem")):
        for name, rule in group_rules(template, "Ingress"):
            if (rule.get("FromPort"), rule.get("ToPort")) not in FILE_SYSTEM_PORTS:
                yield f"T8 {name}: ports that a file system does not need."


def t9_repositories(template: Template) -> Found:
    for name, _, properties in resources(template, "AWS::ECR::Repository"):
        if properties.get("ImageScanningConfiguration", {}).get("ScanOnPush") is not True:
            yield f"T9 {name}: images are not scanned."
        if properties.get("ImageTagMutability") != "IMMUTABLE":
            yield f"T9 {name}: a tag may come to mean another image."
        if properties.get("EncryptionConfiguration", {}).get("EncryptionType") != "KMS":
            yield f"T9 {name}: not encrypted with KMS."


def t10_logs(template: Template) -> Found:
    for name, _, properties in resources(template, "AWS::Logs::LogGroup"):
        if not properties.get("RetentionInDays"):
            yield f"T10 {name}: kept for ever."
        if not items(properties.get("KmsKeyId")):
            yield f"T10 {name}: no KMS key."
    for name, _, properties in resources(template, "AWS::KMS::Key"):
        if properties.get("EnableKeyRotation") is not True:
            yield f"T10 {name}: the key is never rotated."
    if any(resources(template, "AWS::EC2::VPC")):
        flows = [each for _, _, each in resources(template, "AWS::EC2::FlowLog")]
        if not any(flow.get("TrafficType") == "ALL" for flow in flows):
            yield "T10 Vpc: nobody records who talks to whom."


def t12_secrets(template: Template) -> Found:
    for name, parameter in template.get("Parameters", {}).items():
        if is_secret_name(name) and parameter.get("Default"):
            yield f"T12 {name}: a secret with a default."
    for name, resource, properties in resources(template):
        if any(map(is_secret_value, strings(resource))):
            yield f"T12 {name}: a secret."
        for variable in items(properties.get("ContainerProperties", {}).get("Environment")):
            if is_secret_name(variable["Name"]):
                yield f"T12 {name}: {variable['Name']} is in clear."
    for name in filter(is_secret_name, template.get("Outputs", {})):
        yield f"T12 {name}: a secret as an output."


def t15_data_stays(template: Template) -> Found:
    for name, resource, _ in resources(template, *DATA):
        if name in NOT_DATA:
            continue
        if resource.get("DeletionPolicy") not in ("Retain", "RetainExceptOnCreate"):
            yield f"T15 {name}: goes with the stack."
        if resource.get("UpdateReplacePolicy") != "Retain":
            yield f"T15 {name}: goes when it is replaced."
    if "BudgetUsd" in template.get("Parameters", {}):
        budgets = [each for _, _, each in resources(template, "AWS::Budgets::Budget")]
        if not any(each.get("NotificationsWithSubscribers") for each in budgets):
            yield "T15 MonthlyBudget: nobody is told what a month costs."


def t16_image_builder(template: Template) -> Found:
    phases: set[str] = set()
    for name, _, properties in resources(template, "AWS::ImageBuilder::Component"):
        data = text(properties.get("Data", ""))
        phases |= set(re.findall(r"- name: (build|validate|test)\b", data))
        if "Uri" in properties:
            yield f"T16 {name}: its steps are elsewhere, and may change there."
        if re.search(r"\bcurl\b[^\n]*\|\s*(ba)?sh\b|--nogpgcheck|--no-check-certificate", data):
            yield f"T16 {name}: runs what it has not checked."
    for name, _, properties in resources(template, "AWS::ImageBuilder::ImageRecipe"):
        yield from (
            f"T16 {name}: a component whose version is open: {arn}"
            for part in items(properties.get("Components"))
            if (arn := text(part["ComponentArn"])).endswith(("/x.x.x", "/1.x.x", ".x"))
        )
    for name, _, properties in resources(template, "AWS::ImageBuilder::Image"):
        if properties.get("ImageTestsConfiguration", {}).get("ImageTestsEnabled") is not True:
            yield f"T16 {name}: is not tested."
        if properties.get("EnhancedImageMetadataEnabled") is not True:
            yield f"T16 {name}: the list of its packages is not kept."
        if not {"build", "validate", "test"} <= phases:
            yield f"T16 {name}: no phase that validates, or none that tests."


def _takes_logs(template: Template, bucket: str) -> bool:
    return any(
        properties.get("LoggingConfiguration", {}).get("DestinationBucketName") == {"Ref": bucket}
        for _, _, properties in resources(template, "AWS::S3::Bucket")
    )
