"""`batchml.toml` -> what is to be in AWS. Pure.

Values that other stacks give are taken from their outputs; one that is not there yet stands as
`«network.SubnetIds»` in the requests, which the plan shows and nothing sends.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws import ec2 as launch
from batchml.aws.batch import resources
from batchml.aws.cloudformation import Blueprint, Stack
from batchml.aws.naming import Platform, Site, make_platform, make_site, stack_name
from batchml.model.environment import LOCAL, Compute, Environment
from batchml.ops.setup import sharing
from batchml.ops.setup.stack_plan import DATA_TYPES
from batchml.ops.setup.values import TAG_SOURCE, UNKNOWN, Facts, Wanted

# In the order in which they are made; teardown goes backwards.
STACKS = ("network", "roles", "storage", "observability", "ami")
DATA_STACKS = ("storage", "observability")  # what jobs left behind: files, and what they printed

TAG_DATA = "batchml:data"  # of a stack: `delete` once its data may go with it; or its `files`

_OUTPUTS = {
    "network": ("VpcId", "SubnetIds", "SecurityGroupId", "BuildSubnetId"),
    "roles": ("InstanceProfileArn", "JobRoleArn", "ExecutionRoleArn"),
    "storage": ("BucketName", "FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId"),
    "observability": ("LogGroupName",),
    "ami": ("ImageId",),
}

# What the embedded server is born with: its default queue on the whole of this machine.
LOCAL_QUEUE = "default"
_LOCAL_DEFAULT: dict[str, Any] = {
    "jobQueueName": LOCAL_QUEUE,
    "state": "ENABLED",
    "priority": 10,
    "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": "this-machine"}],
    "jobStateTimeLimitActions": [],
    "tags": {},
}

# An update replaces or removes no data by itself: `--allow-loss NAME` lifts this for one update.
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


class Scheme(Struct, frozen=True):
    """All that decides what an environment is to be.

    `templates` are the texts of `cfn/` by name; `definitions` gives the RegisterJobDefinition
    requests of the environment's jobs, by name, for a platform.
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


def wanted(scheme: Scheme, facts: Facts) -> Wanted:
    """What `setup` makes."""
    outputs = _outputs(scheme, facts)
    flat = {key: value for inner in outputs.values() for key, value in inner.items()}
    if scheme.environment.storage.shared_with:
        flat = sharing.with_lent(flat, facts)
    site = make_site(scheme.name, scheme.environment, flat)
    batch = _batch(scheme, site, facts)
    if scheme.is_local:
        queues = {**_born_with(facts), **batch.pop("queues")}
        return Wanted(**batch, queues=queues, definitions=dict(scheme.definitions(Platform())))
    platform = make_platform(scheme.name, scheme.environment, flat)
    return Wanted(
        stacks=tuple(_blueprint(scheme, short, outputs) for short in wanted_stacks(scheme)),
        **_launch(scheme, site),
        **batch,
        definitions=dict(scheme.definitions(platform)),
        shared_with=scheme.environment.storage.shared_with,
    )


def single(scheme: Scheme, facts: Facts) -> Wanted:
    """What a single command makes: the compute environments and queues of the scheme alone."""
    everything = wanted(scheme, facts)
    return replace(
        everything,
        stacks=(),
        definitions={},
        is_all=False,
        environments=_by_command(everything.environments, facts.environments),
        queues=_by_command(
            {
                name: request
                for name, request in everything.queues.items()
                if request is not _LOCAL_DEFAULT
            },
            facts.queues,
        ),
        policies=_by_command(everything.policies, facts.policies),
    )


def _by_command(
    requests: Mapping[str, dict[str, Any]], found: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """So tagged that `setup` leaves alone what is not in its file; what it made stays its own."""
    marked = {}
    for name, request in requests.items():
        before = (found.get(name, {}).get("tags") or {}).get(TAG_SOURCE, "command")
        marked[name] = {**request, "tags": {**request["tags"], TAG_SOURCE: before}}
    return marked


def _born_with(facts: Facts) -> dict[str, dict[str, Any]]:
    """The embedded server's own queue, as it was, once `setup` has changed it."""
    return {LOCAL_QUEUE: _LOCAL_DEFAULT} if LOCAL_QUEUE in facts.queues else {}


def leftovers(
    scheme: Scheme, facts: Facts, *, delete_data: bool, delete_files: bool = False
) -> Wanted:
    """What `teardown` leaves: nothing, or what holds data and what that cannot be without.

    With `delete_files` the file system goes, whose files are archived, and with it the network.
    """
    if scheme.is_local:
        return Wanted(queues=_born_with(facts))
    data = tuple(map(scheme.stack, DATA_STACKS))
    storage, network = (facts.stacks.get(scheme.stack(each)) for each in ("storage", "network"))
    kept: tuple[Blueprint, ...] = ()
    held: dict[str, str] = {}
    if network is not None and facts.sharers:
        # Their instances are in its subnets, too.
        held = {network.name: f"{', '.join(facts.sharers)} works in it"}
    elif (
        storage is not None
        and storage.outputs.get("FileSystemId")
        and network
        and not (delete_data or delete_files)
    ):
        # The file system is in the network's subnets. What costs there by the hour goes.
        bare = {**network.parameters, "Egress": "none"}
        kept = (Blueprint(network.name, network.template, bare, network.tags),)
    if storage is not None and not delete_data:
        if storage.parameters.get(sharing.PARAMETER):
            # What is torn down holds no other environment's file system.
            alone = {**storage.parameters, sharing.PARAMETER: ""}
            kept += (_guarded(storage, alone, storage.tags),)
        elif delete_files and not (storage.outputs.get("FileSystemId") or storage.is_protected):
            # It was taken out by a command that was killed before it had guarded the rest.
            kept += (_guarded(storage, storage.parameters, storage.tags),)
    return Wanted(
        stacks=kept, data_stacks=data, deletes_data=delete_data, deletes_files=delete_files,
        is_backwards=True, held=held,
    )  # fmt: skip


def doomed(stack: Stack) -> Blueprint:
    """A stack so changed that the data in it goes when it is deleted.

    What a template says about deletion holds once it is deployed. The tag says that it has been,
    and CloudFormation takes no update that changes deletion policies alone.
    """
    text = _unretained(stack.template)
    return Blueprint(stack.name, text, stack.parameters, {**stack.tags, TAG_DATA: "delete"})


# What a file system is in the template: cfn/storage.yaml.
_FILES = "Efs|EfsAccess|Lustre|LustreGroup|LustreLink"
_BLOCK = re.compile(rf"(?m)^  ({_FILES}):\n(?:(?:    .*)?\n)+")


def with_doomed_files(stack: Stack) -> Blueprint:
    """A stack so changed that its file system goes when it is taken out, and nothing else."""
    text = _BLOCK.sub(lambda found: _unretained(found[0]), f"{stack.template}\n")
    return Blueprint(stack.name, text, stack.parameters, {**stack.tags, TAG_DATA: "files"})


def without_files(stack: Stack) -> Blueprint:
    """The stack without its file system, guarded as before.

    The template is the one that was deployed: what it says of deletion is what counts.
    """
    tags = {key: value for key, value in stack.tags.items() if key != TAG_DATA}
    return _guarded(stack, {**stack.parameters, "Workspace": "none"}, tags)


def _guarded(stack: Stack, parameters: dict[str, str], tags: dict[str, str]) -> Blueprint:
    """The stack as it is but for these, with the locks of what holds data."""
    return Blueprint(
        stack.name, stack.template, parameters, tags, is_protected=True, policy=_STACK_POLICY
    )


def _unretained(text: str) -> str:
    return text.replace("RetainExceptOnCreate", "Delete").replace(
        "Policy: Retain", "Policy: Delete"
    )


def _is_whole(status: str) -> bool:
    """Whether what a stack made is there; while an update is under way, that of before."""
    return status.startswith("UPDATE_") or status in ("CREATE_COMPLETE", "IMPORT_COMPLETE")


def wanted_stacks(scheme: Scheme) -> list[str]:
    """The stacks that an environment needs, in the order in which they are made."""
    environment = scheme.environment
    unneeded = set()
    if environment.network.is_given:
        unneeded.add("network")
    if not needs_image(environment):
        unneeded.add("ami")
    return [short for short in STACKS if short not in unneeded]


def needs_image(environment: Environment) -> bool:
    """True when a compute environment starts from an image of ours."""
    images = {compute.ami or environment.ami for compute in environment.compute.values()}
    return "build" in images or (not images and environment.ami == "build")


def _outputs(scheme: Scheme, facts: Facts) -> dict[str, dict[str, str]]:
    """The outputs of the wanted stacks: AWS's where they stay, else what they are to be called."""
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


# What an update changes in a stack's outputs: the parameters that decide, and what they decide. So
# that a plan shows what follows from the update, before AWS has made it.
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


def _blueprint(scheme: Scheme, short: str, outputs: Mapping[str, Mapping[str, str]]) -> Blueprint:
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
    """A log group of its own: AWS Batch makes `/aws/batch/job` by itself, before any stack."""
    return f"/aws/batch/batchml-{env}"


def _network(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    network = environment.network
    prefix = int(network.cidr.rpartition("/")[2])
    return {
        "VpcCidr": network.cidr,
        "SubnetBits": str(30 - prefix),  # a quarter of the range each
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
        # The file system's place is the other's matter.
        return {"Workspace": "none", sharing.PARAMETER: storage.shared_with}
    return {
        "Workspace": storage.workspace,
        sharing.PARAMETER: "",
        **_place(environment, outputs, vpc=True),
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
    place = _place(environment, outputs, vpc=False)
    subnet = outputs.get("network", {}).get("BuildSubnetId") or place["SubnetIds"].split(",")[0]
    return {"Subnet": subnet, "SecurityGroup": place["SecurityGroupId"]}


def content_version(template: str) -> str:
    """A version, `1.x.y`, that is another whenever the template is.

    Image Builder's components and recipes cannot be changed, so what changes is a new version. Each
    part may be up to 2^30 - 1. Source: Image Builder API reference, CreateComponent.
    """
    digest = int(hashlib.sha256(template.strip().encode()).hexdigest(), 16)
    return f"1.{digest % 2**30}.{(digest >> 30) % 2**30}"


def _place(environment: Environment, outputs: Outputs, *, vpc: bool) -> dict[str, str]:
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


def _launch(scheme: Scheme, site: Site) -> dict[str, Any]:
    computes = scheme.environment.compute
    return {
        "groups": {
            site.named(name): launch.placement_group(site, name)
            for name, compute in computes.items()
            if compute.placement_group == resources.CLUSTER_GROUP
        },
        "templates": {
            site.named(name): launch.launch_template(site, name, compute)
            for name, compute in computes.items()
        },
    }


def _batch(scheme: Scheme, site: Site, facts: Facts) -> dict[str, Any]:
    environment = scheme.environment
    policies = {
        site.named(name): resources.scheduling_policy(site, name, queue.fair_share)
        for name, queue in environment.queues.items()
        if queue.fair_share is not None
    }
    found = {
        "policies": policies,
        "environments": {
            site.named(name): resources.compute_environment(
                site, name, compute, _template(site, name, compute, facts)
            )
            for name, compute in environment.compute.items()
        },
        "queues": {
            site.named(name): resources.queue(site, name, queue, _policy_arn(site, name, facts))
            if site.named(name) in policies
            else resources.queue(site, name, queue)
            for name, queue in environment.queues.items()
        },
    }
    for requests in found.values():
        for request in requests.values():
            request["tags"] = {**request["tags"], TAG_SOURCE: "setup"}
    return found


def _template(site: Site, name: str, compute: Compute, facts: Facts) -> launch.Template | None:
    """The version that instances are to start from: the newest, or what the plan makes of it."""
    if site.is_local:
        return None
    content = launch.content_of(launch.launch_template(site, name, compute))
    found = facts.templates.get(site.named(name))
    if found is not None and found.content == content:
        return found
    return launch.Template(site.named(name), found.version + 1 if found else 1, content)


def _policy_arn(site: Site, name: str, facts: Facts) -> str:
    found = facts.policies.get(site.named(name))
    return str(found["arn"]) if found else f"{UNKNOWN}{site.named(name)}"
