"""Convert `batchml.toml` into the wanted state of AWS: a request for each resource. Pure.

Values from other stacks are taken from their outputs. Until a stack exists, a placeholder such as
`«network.SubnetIds»` stands in the requests; the plan shows it, and no step sends it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws import ec2
from batchml.aws.batch import resources
from batchml.aws.cloudformation import Blueprint, Stack
from batchml.aws.naming import Platform, Site, make_platform, make_site, stack_name
from batchml.model.environment import LOCAL, Compute, Environment
from batchml.setup import sharing
from batchml.setup.plan import DATA_TYPES
from batchml.setup.sharing import TAG_SOURCE, UNKNOWN, CurrentState, WantedState

# In the order of creation; teardown reverses it.
STACKS = ("network", "roles", "storage", "observability", "ami")
DATA_STACKS = ("storage", "observability")  # these hold the files and the logs of jobs

TAG_DATA = "batchml:data"  # on a stack: `delete` or `files`, once these may be deleted with it

_OUTPUTS = {
    "network": ("VpcId", "SubnetIds", "SecurityGroupId", "BuildSubnetId"),
    "roles": ("InstanceProfileArn", "JobRoleArn", "ExecutionRoleArn"),
    "storage": ("BucketName", "FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId"),
    "observability": ("LogGroupName",),
    "ami": ("ImageId",),
}

# The embedded server starts with this queue, which uses the whole machine.
LOCAL_QUEUE = "default"
_LOCAL_DEFAULT: dict[str, Any] = {
    "jobQueueName": LOCAL_QUEUE,
    "state": "ENABLED",
    "priority": 10,
    "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": "this-machine"}],
    "jobStateTimeLimitActions": [],
    "tags": {},
}

# No update replaces or removes data, unless `--allow-loss NAME` lifts this policy for one update.
_STACK_POLICY = json.dumps(
    {
        "Statement": [
            {"Effect": "Allow", "Action": "Update:*", "Principal": "*", "Resource": "*"},
            {
                "Effect": "Deny",
                "Action": ["Update:Replace", "Update:Delete"],
                "Principal": "*",
                "Resource": "*",
                "Condition": {"StringEquals": {"ResourceType": sorted(DATA_TYPES)}},
            },
        ]
    }
)


class SetupSpec(Struct, frozen=True):
    """The input for the wanted state of an environment.

    `templates`: the texts of `cfn/` by name. `definitions`: a function from a platform to the
    RegisterJobDefinition requests of the environment's jobs, by name.
    """

    name: str
    environment: Environment
    templates: Mapping[str, str]
    definitions: Callable[[Platform], Mapping[str, dict[str, Any]]]

    @property
    def is_local(self) -> bool:
        return self.name == LOCAL

    def stack(self, short: str) -> str:
        return stack_name(self.name, short)

    @property
    def stack_names(self) -> list[str]:
        return [] if self.is_local else [self.stack(short) for short in STACKS]


def wanted_state(scheme: SetupSpec, facts: CurrentState) -> WantedState:
    """The wanted state for `setup`."""
    outputs = _outputs(scheme, facts)
    flat = {key: value for inner in outputs.values() for key, value in inner.items()}
    if scheme.environment.storage.shared_with:
        flat = sharing.with_shared_outputs(flat, facts)
    site = make_site(scheme.name, scheme.environment, flat)
    batch = _batch(scheme, site, facts)
    if scheme.is_local:
        queues = {**_original_queue(facts), **batch.pop("queues")}
        return WantedState(**batch, queues=queues, definitions=dict(scheme.definitions(Platform())))
    platform = make_platform(scheme.name, scheme.environment, flat)
    return WantedState(
        stacks=tuple(_blueprint(scheme, short, outputs) for short in wanted_stacks(scheme)),
        **_launch(scheme, site),
        **batch,
        definitions=dict(scheme.definitions(platform)),
        shared_with=scheme.environment.storage.shared_with,
    )


def wanted_by_command(scheme: SetupSpec, facts: CurrentState) -> WantedState:
    """The wanted state for a single command: only the compute environments and queues."""
    everything = wanted_state(scheme, facts)
    return replace(
        everything,
        stacks=(),
        definitions={},
        is_all=False,
        environments=_tag_as_command(everything.environments, facts.environments),
        queues=_tag_as_command(
            {
                name: request
                for name, request in everything.queues.items()
                if request is not _LOCAL_DEFAULT
            },
            facts.queues,
        ),
        policies=_tag_as_command(everything.policies, facts.policies),
    )


def _tag_as_command(
    requests: Mapping[str, dict[str, Any]], found: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Tag requests as made by a command, so that `setup` does not delete the resources.

    Resources that `setup` made keep its tag.
    """
    marked = {}
    for name, request in requests.items():
        before = (found.get(name, {}).get("tags") or {}).get(TAG_SOURCE, "command")
        marked[name] = {**request, "tags": {**request["tags"], TAG_SOURCE: before}}
    return marked


def _original_queue(facts: CurrentState) -> dict[str, dict[str, Any]]:
    """The embedded server's own queue in its original state, if `setup` has changed it."""
    return {LOCAL_QUEUE: _LOCAL_DEFAULT} if LOCAL_QUEUE in facts.queues else {}


def state_after_teardown(
    scheme: SetupSpec, facts: CurrentState, *, delete_data: bool, delete_files: bool = False
) -> WantedState:
    """The wanted state after `teardown`: nothing, or the stacks with data and their network.

    With `delete_files` the file system, whose files are archived, and the network are deleted too.
    """
    if scheme.is_local:
        return WantedState(queues=_original_queue(facts))
    data = tuple(map(scheme.stack, DATA_STACKS))
    storage, network = (facts.stacks.get(scheme.stack(each)) for each in ("storage", "network"))
    kept: tuple[Blueprint, ...] = ()
    held: dict[str, str] = {}
    if network is not None and facts.sharers:
        # Their instances are in its subnets.
        held = {network.name: f"{', '.join(facts.sharers)} uses it"}
    elif (
        storage is not None
        and storage.outputs.get("FileSystemId")
        and network
        and not (delete_data or delete_files)
    ):
        # The file system needs the network's subnets. Remove what costs money by the hour.
        bare = {**network.parameters, "Egress": "none"}
        kept = (Blueprint(network.name, network.template, bare, network.tags),)
    if storage is not None and not delete_data:
        if storage.parameters.get(sharing.PARAMETER):
            # An environment that is torn down does not block another one's file system.
            alone = {**storage.parameters, sharing.PARAMETER: ""}
            kept += (_protected(storage, alone, storage.tags),)
        elif delete_files and not (storage.outputs.get("FileSystemId") or storage.is_protected):
            # A command removed the file system, and was killed before it protected the stack.
            kept += (_protected(storage, storage.parameters, storage.tags),)
    return WantedState(
        stacks=kept, data_stacks=data, deletes_data=delete_data, deletes_files=delete_files,
        is_backwards=True, held=held,
    )  # fmt: skip


def with_deletable_data(stack: Stack) -> Blueprint:
    """Change a stack so that its deletion deletes its data too.

    A deletion policy holds once its template is deployed. The tag records that, and is needed
    because CloudFormation refuses an update that changes only deletion policies.
    """
    text = _unretained(stack.template)
    return Blueprint(stack.name, text, stack.parameters, {**stack.tags, TAG_DATA: "delete"})


# The resources of the file system in cfn/storage.yaml.
_FILES = "Efs|EfsAccess|Lustre|LustreGroup|LustreLink"
_BLOCK = re.compile(rf"(?m)^  ({_FILES}):\n(?:(?:    .*)?\n)+")


def with_deletable_files(stack: Stack) -> Blueprint:
    """Change a stack so that only its file system is deleted once it is removed from the stack."""
    text = _BLOCK.sub(lambda found: _unretained(found[0]), f"{stack.template}\n")
    return Blueprint(stack.name, text, stack.parameters, {**stack.tags, TAG_DATA: "files"})


def without_files(stack: Stack) -> Blueprint:
    """Remove the file system from a stack, and protect the stack as before.

    The template is the deployed one, because its deletion policies count.
    """
    tags = {key: value for key, value in stack.tags.items() if key != TAG_DATA}
    return _protected(stack, {**stack.parameters, "Workspace": "none"}, tags)


def _protected(stack: Stack, parameters: dict[str, str], tags: dict[str, str]) -> Blueprint:
    """Change only parameters and tags of a stack, and protect it as a stack with data."""
    return Blueprint(
        stack.name, stack.template, parameters, tags, is_protected=True, policy=_STACK_POLICY
    )


def _unretained(text: str) -> str:
    return text.replace("RetainExceptOnCreate", "Delete").replace(
        "Policy: Retain", "Policy: Delete"
    )


def _is_whole(status: str) -> bool:
    """Whether the resources of a stack exist; during an update, those from before."""
    return status.startswith("UPDATE_") or status in ("CREATE_COMPLETE", "IMPORT_COMPLETE")


def wanted_stacks(scheme: SetupSpec) -> list[str]:
    """The stacks that an environment needs, in the order of creation."""
    environment = scheme.environment
    unneeded = set()
    if environment.network.is_given:
        unneeded.add("network")
    if not needs_image(environment):
        unneeded.add("ami")
    return [short for short in STACKS if short not in unneeded]


def needs_image(environment: Environment) -> bool:
    """Whether a compute environment uses an AMI that setup builds."""
    images = {compute.ami or environment.ami for compute in environment.compute.values()}
    return "build" in images or (not images and environment.ami == "build")


def _outputs(scheme: SetupSpec, facts: CurrentState) -> dict[str, dict[str, str]]:
    """The outputs of the wanted stacks: AWS's values, or placeholders where they will change."""
    found: dict[str, dict[str, str]] = {}
    for short in wanted_stacks(scheme):
        stack = facts.stacks.get(scheme.stack(short))
        if stack is None or not _is_whole(stack.status):
            found[short] = {key: _unknown(short, key) for key in _OUTPUTS[short]}
            continue
        parameters = _blueprint(scheme, short, found).parameters
        deciding, decided = _DECIDES.get(short, ((), ()))
        moves = any(parameters[key] != stack.parameters.get(key) for key in deciding)
        unknown = {key: _unknown(short, key) for key in decided} if moves else {}
        found[short] = {**stack.outputs, **unknown}
    return found


# Stack -> the parameters whose update changes outputs, and these outputs. So the plan shows the
# consequences of an update before AWS has made it.
_DECIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "network": (("VpcCidr", "SubnetBits", "Zones"), ("SubnetIds", "BuildSubnetId")),
    "storage": (
        ("Workspace",),
        ("FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId"),
    ),
    "ami": (("ContentVersion",), ("ImageId",)),
}


def _unknown(short: str, key: str) -> str:
    return f"{UNKNOWN}{short}.{key}\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"


def _blueprint(
    scheme: SetupSpec, short: str, outputs: Mapping[str, Mapping[str, str]]
) -> Blueprint:
    environment = scheme.environment
    given = {
        "EnvironmentName": scheme.name,
        **_PARAMETERS[short](scheme.name, environment, outputs),
    }
    if short == "ami":
        given["ContentVersion"] = content_version(scheme.templates[short])
    holds_data = short in DATA_STACKS
    return Blueprint(
        name=scheme.stack(short),
        template=scheme.templates[short],
        parameters=given,
        tags={**environment.tags, "batchml:env": scheme.name},
        is_protected=holds_data,
        policy=_STACK_POLICY if holds_data else "",
    )


Outputs = Mapping[str, Mapping[str, str]]


def log_group(env: str) -> str:
    """The log group of an environment; AWS Batch itself creates `/aws/batch/job`."""
    return f"/aws/batch/batchml-{env}"


def _network(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    network = environment.network
    prefix = int(network.cidr.rpartition("/")[2])
    return {
        "VpcCidr": network.cidr,
        "SubnetBits": str(30 - prefix),  # each subnet has a quarter of the range
        "Zones": str(network.zones),
        "Egress": network.egress,
    }


def _roles(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    allowed = str(environment.gpu_mode == "driver-mount").lower()
    return {
        "LogGroupName": log_group(env),
        "AllowPrivileged": allowed,
        "JobSecrets": ",".join(environment.secrets),
        "AllowQuarantine": str(environment.quarantine).lower(),
    }


def _storage(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    storage = environment.storage
    if storage.shared_with:
        # The other environment has the file system.
        return {"Workspace": "none", sharing.PARAMETER: storage.shared_with}
    return {
        "Workspace": storage.workspace,
        sharing.PARAMETER: "",
        **_network_parameters(environment, outputs, vpc=True),
        "SizeGiB": str(storage.size_gib),
        "ThroughputPerTiB": str(storage.throughput),
    }


def _observability(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    budget = environment.budget
    return {
        "LogGroupName": log_group(env),
        "RetentionInDays": str(environment.logs.retention_days),
        "BudgetUsd": str(budget.usd if budget else 0),
        "BudgetEmail": budget.email if budget else "",
    }


def _ami(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    network = _network_parameters(environment, outputs, vpc=False)
    subnet = outputs.get("network", {}).get("BuildSubnetId") or network["SubnetIds"].split(",")[0]
    return {"Subnet": subnet, "SecurityGroup": network["SecurityGroupId"]}


def content_version(template: str) -> str:
    """A version `1.x.y` that changes with the template.

    Image Builder's components and recipes cannot be changed, so a change needs a new version. Each
    part may be up to 2^30 - 1. Source: Image Builder API reference, CreateComponent.
    """
    digest = int(hashlib.sha256(template.strip().encode()).hexdigest(), 16)
    return f"1.{digest % 2**30}.{(digest >> 30) % 2**30}"


def _network_parameters(environment: Environment, outputs: Outputs, *, vpc: bool) -> dict[str, str]:
    network, given = outputs.get("network", {}), environment.network
    found = {
        "SubnetIds": ",".join(given.subnets) or network.get("SubnetIds", ""),
        "SecurityGroupId": ",".join(given.security_groups[:1])
        or network.get("SecurityGroupId", ""),
    }
    return {"VpcId": given.vpc or network.get("VpcId", ""), **found} if vpc else found


_PARAMETERS: dict[str, Callable[[str, Environment, Outputs], dict[str, str]]] = {
    "network": _network,
    "roles": _roles,
    "storage": _storage,
    "observability": _observability,
    "ami": _ami,
}


def _launch(scheme: SetupSpec, site: Site) -> dict[str, Any]:
    computes = scheme.environment.compute
    return {
        "groups": {
            site.named(name): ec2.placement_group_request(site, name)
            for name, compute in computes.items()
            if compute.placement_group == resources.CLUSTER_GROUP
        },
        "templates": {
            site.named(name): ec2.launch_template_request(site, name, compute)
            for name, compute in computes.items()
        },
    }


def _batch(scheme: SetupSpec, site: Site, facts: CurrentState) -> dict[str, Any]:
    environment = scheme.environment
    policies = {
        site.named(name): resources.scheduling_policy_request(site, name, queue.fair_share)
        for name, queue in environment.queues.items()
        if queue.fair_share is not None
    }
    found = {
        "policies": policies,
        "environments": {
            site.named(name): resources.compute_environment_request(
                site, name, compute, _template(site, name, compute, facts)
            )
            for name, compute in environment.compute.items()
        },
        "queues": {
            site.named(name): resources.queue_request(
                site, name, queue, _policy_arn(site, name, facts)
            )
            if site.named(name) in policies
            else resources.queue_request(site, name, queue)
            for name, queue in environment.queues.items()
        },
    }
    for requests in found.values():
        for request in requests.values():
            request["tags"] = {**request["tags"], TAG_SOURCE: "setup"}
    return found


def _template(
    site: Site, name: str, compute: Compute, facts: CurrentState
) -> ec2.LaunchTemplate | None:
    """The launch template version for instances: the newest, or the one that the plan creates."""
    if site.is_local:
        return None
    content = ec2.content_hash(ec2.launch_template_request(site, name, compute))
    found = facts.templates.get(site.named(name))
    if found is not None and found.content == content:
        return found
    return ec2.LaunchTemplate(site.named(name), found.version + 1 if found else 1, content)


def _policy_arn(site: Site, name: str, facts: CurrentState) -> str:
    found = facts.policies.get(site.named(name))
    return str(found["arn"]) if found else f"{UNKNOWN}{site.named(name)}"
