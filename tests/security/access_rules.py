"""Rules for templates, about who gets in, and who may do what."""

import re
from collections.abc import Iterator

from tests.security.cloudformation import (
    Template,
    branches,
    group_rules,
    identity_statements,
    policies,
    resource_statements,
    resources,
    statements,
    text,
    texts,
)

Found = Iterator[str]

INSTANCE_POLICIES = (
    "service-role/AmazonEC2ContainerServiceforEC2Role",
    "AmazonSSMManagedInstanceCore",
    "EC2InstanceProfileForImageBuilder",  # on instances that build an AMI, never on a job's
)
# Services that send no source to compare with, or are not documented to.
NO_SOURCE = ("ec2.${AWS::URLSuffix}", "ec2.amazonaws.com", "imagebuilder.${AWS::URLSuffix}")
# Actions that know no resource (Service Authorization Reference), beside Describe* and List*.
NO_RESOURCE = ("ecr:GetAuthorizationToken", "batch:GetJobQueueSnapshot", "pricing:GetProducts")
NO_RESOURCE_PREFIXES = ("ssmmessages:",)


def t1_no_way_in(template: Template) -> Found:
    for name, rule in group_rules(template, "Ingress"):
        if any(key.startswith("Cidr") or key == "SourcePrefixListId" for key in rule):
            yield f"T1 {name}: lets addresses in; only security groups may be named."
        if not rule.get("SourceSecurityGroupId"):
            yield f"T1 {name}: names no security group that may come in."
        is_own = rule.get("SourceSecurityGroupId") == rule.get("GroupId")
        if str(rule.get("IpProtocol")) == "-1" and not is_own:
            yield f"T1 {name}: all ports, to others than the group's own members."
        low, high = rule.get("FromPort"), rule.get("ToPort")
        for port in (22, 3389):
            if isinstance(low, int) and isinstance(high, int) and low <= port <= high:
                yield f"T1 {name}: port {port}; instances are reached by Session Manager."


def t2_no_key_pairs(template: Template) -> Found:
    for name, _, properties in resources(template):
        for holder in (properties, properties.get("LaunchTemplateData", {}),
                       properties.get("ComputeResources", {})):  # fmt: skip
            for key in ("KeyName", "KeyPair", "Ec2KeyPair"):
                if key in holder:
                    yield f"T2 {name}: {key}; instances are reached by Session Manager."
    for name, parameter in template.get("Parameters", {}).items():
        if "KeyPair" in parameter["Type"]:
            yield f"T2 {name}: asks for a key pair."


def t3_metadata(template: Template) -> Found:
    for name, _, properties in resources(
        template, "AWS::EC2::LaunchTemplate", "AWS::ImageBuilder::InfrastructureConfiguration"
    ):
        data = properties.get("LaunchTemplateData", properties)
        options = data.get("MetadataOptions", data.get("InstanceMetadataOptions", {}))
        if options.get("HttpTokens") != "required":
            yield f"T3 {name}: HttpTokens is not required."
        if options.get("HttpPutResponseHopLimit") != 1:
            yield f"T3 {name}: HttpPutResponseHopLimit is not 1."
        if options.get("InstanceMetadataTags", "disabled") != "disabled":
            yield f"T3 {name}: instance tags are in the metadata."


def t4_instance_role(template: Template) -> Found:
    for name, resource, properties in resources(template, "AWS::IAM::Role"):
        if not any(service.startswith("ec2.") for service in _trusted(properties)):
            continue
        for arn in texts(properties.get("ManagedPolicyArns")):
            if arn.partition(":policy/")[2] not in INSTANCE_POLICIES:
                yield f"T4 {name}: an instance does not need {arn}."
        for document in policies(resource):
            for statement in statements(document):
                given = texts(statement.get("Action")), texts(statement.get("Resource"))
                logs = given[1] and all(each.endswith("/image-builder/*") for each in given[1])
                if not (given[0] == ["s3:PutObject"] and logs):
                    yield f"T4 {name}: a policy of its own, which every job can use."


def t5_least_privilege(template: Template) -> Found:
    for name, _, properties in resources(template):
        for arn in texts(properties.get("ManagedPolicyArns")):
            if re.search(r"policy/.*(AdministratorAccess|FullAccess|PowerUser)", arn):
                yield f"T5 {name}: {arn}"
    for name, statement in identity_statements(template):
        if statement["Effect"] != "Allow":
            continue
        if "NotAction" in statement or "NotResource" in statement:
            yield f"T5 {name}: allows all but something."
        actions, targets = texts(statement.get("Action")), texts(statement.get("Resource"))
        yield from (f"T5 {name}: allows {a}" for a in actions if a == "*" or a.endswith(":*"))
        if "*" in targets:
            wide = [action for action in actions if not _knows_no_resource(action)]
            yield from (f"T5 {name}: {action} on every resource." for action in wide)
        if "iam:PassRole" in actions:
            if any("*" in target for target in targets):
                yield f"T5 {name}: iam:PassRole of roles that are not named."
            if "iam:PassedToService" not in str(statement.get("Condition")):
                yield f"T5 {name}: iam:PassRole to any service."


def t6_separate_roles(template: Template) -> Found:
    for name, _, properties in resources(template, "AWS::IAM::Role"):
        trusted = _trusted(properties)
        if len(trusted) != 1:
            yield f"T6 {name}: trusts {len(trusted)} services; one role, one purpose."
        for statement in statements(properties["AssumeRolePolicyDocument"]):
            principal = statement.get("Principal")
            if not isinstance(principal, dict) or set(principal) != {"Service"}:
                yield f"T6 {name}: trusts others than a service."
            condition = str(statement.get("Condition"))
            if not set(trusted) <= set(NO_SOURCE):
                for key in ("aws:SourceAccount", "aws:SourceArn"):
                    if key not in condition:
                        yield f"T6 {name}: trusts without {key}."
    outputs = template.get("Outputs", {})
    given = [text(output["Value"]) for key, output in outputs.items() if key.endswith("RoleArn")]
    given += texts([p.get("Roles") for _, _, p in resources(template, "AWS::IAM::InstanceProfile")])
    plain = [value.removesuffix(".Arn}").rstrip("}") for value in given]
    if len(plain) != len(set(plain)):
        yield f"T6 Outputs: one role for two purposes: {', '.join(sorted(plain))}."


def t13_submitters(template: Template) -> Found:
    for name, _, properties in resources(template, "AWS::IAM::ManagedPolicy"):
        said = statements(properties["PolicyDocument"])
        define = [s for s in said if "batch:RegisterJobDefinition" in texts(s.get("Action"))]
        if not define:
            continue
        denied = str([s.get("Condition") for s in define if s["Effect"] == "Deny"])
        for key in ("batch:Privileged", "batch:User", "batch:Image"):
            if key not in denied:
                yield f"T13 {name}: no Deny by {key}."
        for statement in said:
            actions = {"batch:TerminateJob", "batch:CancelJob"} & {*texts(statement["Action"])}
            own = str(statement.get("Condition", {}).get("StringEquals"))
            is_own = "aws:ResourceTag/batchml:env" in own
            if statement["Effect"] == "Allow" and actions and not is_own:
                yield f"T13 {name}: {min(actions)} of the jobs of other environments."


def t13_controllers(template: Template) -> Found:
    """A role that submits is a controller's: it may do what submitters may, with what is there.

    No role ends jobs of other environments.
    """
    people: set[str] = set()
    for _, _, properties in resources(template, "AWS::IAM::ManagedPolicy"):
        for statement in statements(properties["PolicyDocument"]):
            if statement["Effect"] == "Allow":
                people |= {*texts(statement.get("Action"))}
    for name, resource, _ in resources(template, "AWS::IAM::Role"):
        said = [each for document in policies(resource) for each in statements(document)]
        may = {action for each in said for action in texts(each.get("Action"))}
        for statement in said:
            actions = {"batch:TerminateJob", "batch:CancelJob"} & {*texts(statement.get("Action"))}
            own = str(statement.get("Condition", {}).get("StringEquals"))
            if actions and "aws:ResourceTag/batchml:env" not in own:
                yield f"T13 {name}: {min(actions)} of the jobs of other environments."
        if "batch:SubmitJob" not in may:
            continue
        for action in sorted(may & {"batch:RegisterJobDefinition", "iam:PassRole"}):
            yield f"T13 {name}: {action}; it submits by definitions that people have made."
        yield from (f"T13 {name}: {action}, which no submitter may." for action in may - people)


def t14_private(template: Template) -> Found:
    for name, _, properties in resources(template, "AWS::EC2::Subnet"):
        if properties.get("MapPublicIpOnLaunch") is not False:
            yield f"T14 {name}: may give public addresses."
    for name, rule in group_rules(template, "Egress"):
        for key in ("CidrIp", "CidrIpv6"):
            is_https = (rule.get("IpProtocol"), rule.get("FromPort"), rule.get("ToPort")) == (
                "tcp", 443, 443,
            )  # fmt: skip
            if key in rule and rule[key] != "127.0.0.1/32" and not is_https:
                yield f"T14 {name}: lets more out than HTTPS."
    inline = {
        name for name, _, p in resources(template, "AWS::EC2::SecurityGroup")
        if not p.get("SecurityGroupEgress")
    }  # fmt: skip
    yield from (f"T14 {name}: no egress rule, so that AWS adds one for all." for name in inline)
    for name, _, properties in resources(template, "AWS::EC2::Route"):
        if "GatewayId" in properties and "Private" in text(properties["RouteTableId"]):
            yield f"T14 {name}: a private subnet with a way in from the internet."
    for name, _, properties in resources(
        template, "AWS::ImageBuilder::InfrastructureConfiguration"
    ):
        if not properties.get("SubnetId") or not properties.get("SecurityGroupIds"):
            yield f"T14 {name}: builds in the default network."
    for name, _, properties in resources(template, "AWS::ImageBuilder::ImageRecipe"):
        parent = properties.get("ParentImage")
        for each in branches(parent):
            given = text(each)
            if given.startswith("${"):
                given = str(template["Parameters"][given[2:-1]].get("Default", "ssm:"))
            if not given.startswith("ssm:"):
                yield f"T14 {name}: its parent is not found by an SSM parameter."


def t17_described(template: Template) -> Found:
    """Beside cfn-lint, which knows every action (W3037): nothing that a reader must guess."""
    for section in ("Parameters", "Outputs"):
        for name, entry in template.get(section, {}).items():
            if not str(entry.get("Description", "")).strip():
                yield f"T17 {name}: no description."
    for name, statement in [*identity_statements(template), *resource_statements(template)]:
        for action in texts(statement.get("Action")):
            if not re.fullmatch(r"\*|[a-z0-9-]+:[A-Za-z]*\*?", action):
                yield f"T17 {name}: {action!r} is no action."


def _trusted(properties: dict[str, object]) -> list[str]:
    found = []
    for statement in statements(properties["AssumeRolePolicyDocument"]):
        principal = statement.get("Principal")
        if isinstance(principal, dict):
            found += texts(principal.get("Service"))
    return found


def _knows_no_resource(action: str) -> bool:
    verb = action.partition(":")[2]
    return (
        verb.startswith(("Describe", "List"))
        or action in NO_RESOURCE
        or action.startswith(NO_RESOURCE_PREFIXES)
    )
