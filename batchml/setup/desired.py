"""Convert `batchml.toml` into the wanted state of AWS: a request for each resource. Pure.

Values from other stacks are taken from their outputs. Until a stack exists, a placeholder such as
`«network.SubnetIds»` stands in the requests; the plan shows it, and no step sends it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws import ec2
from batchml.aws.batch import resources
from batchml.aws.capacity import Offers
from batchml.aws.cloudformation import Blueprint, Stack
from batchml.aws.naming import (
    STACK_OUTPUTS,
    UNKNOWN,
    Platform,
    Site,
    make_platform,
    make_site,
    stack_name,
    unknown_output,
)
from batchml.model.data import prefix_arns
from batchml.model.environment import LOCAL, Compute, Environment
from batchml.model.fabric import fabric_layout
from batchml.setup import sharing
from batchml.setup.network import (
    SubnetLayout,
    build_subnet,
    plan_layout,
    subnet_ids,
    usable_subnets,
    zone_mistakes,
)
from batchml.setup.plan import DATA_TYPES, is_version_of
from batchml.setup.sharing import TAG_SOURCE, CurrentState, WantedState, is_known

# In the order of creation; teardown reverses it.
STACKS = ("network", "roles", "storage", "observability", "ami")
DATA_STACKS = ("storage", "observability")  # these hold the files and the logs of jobs

TAG_DATA = "batchml:data"  # tag of a stack: `delete`, or `files` for its file system alone

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
    RegisterJobDefinition requests of the environment's jobs, by name. `project`: the project to
    which the resources on `local` belong. `shared`: compute environments that queues use by their
    names in AWS, because batchml.toml does not describe them. `rebuild_of`: the ContentVersion of
    the machine image that is to be built anew. `scripts`: the texts of bootstrap scripts, by their
    names in batchml.toml. `offers`: the zones that offer the instance types; None if AWS was not
    asked. `neuron_image`: the id of AWS's newest AMI for Neuron chips; "" if AWS was not asked.
    `changes_stacks`: False to use the stacks as they are. `mistakes`: of the environment, as AWS's
    answers show them, each as `key: text`.
    """

    name: str
    environment: Environment
    templates: Mapping[str, str]
    definitions: Callable[[Platform], Mapping[str, dict[str, Any]]]
    project: str = ""
    shared: frozenset[str] = frozenset()
    rebuild_of: str = ""
    scripts: Mapping[str, str] = {}
    offers: Offers | None = None
    neuron_image: str = ""
    changes_stacks: bool = True
    mistakes: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        return self.name == LOCAL

    def stack(self, short: str) -> str:
        return stack_name(self.name, short)

    @property
    def stack_names(self) -> list[str]:
        return [] if self.is_local else [self.stack(short) for short in STACKS]


def wanted_state(spec: SetupSpec, current: CurrentState) -> WantedState:
    """The wanted state for `setup`."""
    layout = _layout(spec, current)
    outputs = _outputs(spec, current, layout)
    flat = {key: value for inner in outputs.values() for key, value in inner.items()}
    if spec.environment.storage.shared_with:
        flat = sharing.with_shared_outputs(flat, current)
    site = replace(make_site(spec.name, spec.environment, flat, spec.project), scripts=spec.scripts)
    zones = tuple(filter(None, flat.get("AvailabilityZones", "").split(",")))
    batch = _batch(spec, replace(site, shared=spec.shared), zones, current)
    if spec.is_local:
        return WantedState(**batch, definitions=dict(spec.definitions(Platform())))
    platform = make_platform(spec.name, spec.environment, flat)
    return WantedState(
        stacks=tuple(_blueprint(spec, short, outputs, current) for short in wanted_stacks(spec)),
        **_launch(spec, site),
        **batch,
        definitions=dict(spec.definitions(platform)),
        shared_with=spec.environment.storage.shared_with,
        mistakes=(
            *spec.mistakes,
            *_zone_mistakes(spec, zones if not spec.changes_stacks else layout.zones or zones),
        ),
    )


def _zone_mistakes(spec: SetupSpec, zones: Sequence[str]) -> tuple[str, ...]:
    builds = spec.environment.builds_image and not spec.environment.network.is_given
    return tuple(zone_mistakes(spec.environment, spec.offers, zones, builds_image=builds))


def wanted_by_command(spec: SetupSpec, current: CurrentState) -> WantedState:
    """The wanted state for `compute create` and `queue create`: no stacks, no job definitions."""
    everything = wanted_state(replace(spec, changes_stacks=False), current)
    return replace(
        everything,
        stacks=(),
        definitions={},
        deletes_unwanted=False,
        environments=_tag_as_command(everything.environments, current.environments),
        queues=_tag_as_command(everything.queues, current.queues),
        policies=_tag_as_command(everything.policies, current.policies),
    )


def _tag_as_command(
    requests: Mapping[str, dict[str, Any]], found: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Tag requests as made by a command, so that `setup` does not delete the resources.

    Resources that `setup` made keep its tag.
    """
    tagged = {}
    for name, request in requests.items():
        source = (found.get(name, {}).get("tags") or {}).get(TAG_SOURCE, "command")
        tagged[name] = {**request, "tags": {**request["tags"], TAG_SOURCE: source}}
    return tagged


_TORN_DOWN = "teardown deletes it"


def state_after_teardown(
    spec: SetupSpec, current: CurrentState, *, delete_data: bool, delete_files: bool = False,
    detach: bool = False,
) -> WantedState:  # fmt: skip
    """The wanted state after `teardown`: nothing, or the stacks with data and their network.

    With `detach`, the policy for submitters is detached from the people who have it.
    With `delete_files` the file system, whose files are archived, and the network are deleted too.
    """
    if spec.is_local:
        return WantedState(why_unwanted=_TORN_DOWN)
    data = tuple(map(spec.stack, DATA_STACKS))
    storage, network = (current.stacks.get(spec.stack(each)) for each in ("storage", "network"))
    kept: tuple[Blueprint, ...] = ()
    needed_by_others: dict[str, str] = {}
    if network is not None and current.sharers:
        # The instances of the environments that share the workspace are in its subnets.
        needed_by_others = {network.name: f"{', '.join(current.sharers)} uses it"}
    elif (
        storage is not None
        and storage.outputs.get("FileSystemId")
        and network
        and not (delete_data or delete_files)
    ):
        # The file system needs the network's subnets. Remove only what costs money by the hour.
        parameters = {**network.parameters, "Egress": "none"}
        kept = (Blueprint(network.name, network.template, parameters, network.tags),)
    if storage is not None and not delete_data:
        if storage.parameters.get(sharing.PARAMETER):
            # This environment must not keep the other one from deleting its file system.
            parameters = {**storage.parameters, sharing.PARAMETER: ""}
            kept += (_protected(storage, parameters, storage.tags),)
        elif delete_files and not (storage.outputs.get("FileSystemId") or storage.is_protected):
            # A command removed the file system, and was killed before it protected the stack.
            kept += (_protected(storage, storage.parameters, storage.tags),)
    return WantedState(
        stacks=kept, data_stacks=data, deletes_data=delete_data, deletes_files=delete_files,
        detaches=detach, stacks_last=True, needed_by_others=needed_by_others,
        why_unwanted=_TORN_DOWN,
    )  # fmt: skip


def with_deletable_data(stack: Stack) -> Blueprint:
    """The content with which the deletion of a stack deletes its data too.

    A deletion policy holds once its template is deployed. The tag records that, and is needed
    because CloudFormation refuses an update that changes only deletion policies.
    """
    text = _unretained(stack.template)
    return Blueprint(stack.name, text, stack.parameters, {**stack.tags, TAG_DATA: "delete"})


# The resources of the file system in cfn/storage.yaml.
_FILES = "Efs|EfsAccess|Lustre|LustreGroup|LustreLink"
_BLOCK = re.compile(rf"(?m)^  ({_FILES}):\n(?:(?:    .*)?\n)+")


def with_deletable_files(stack: Stack) -> Blueprint:
    """The content with which removing the file system from a stack deletes the file system."""
    text = _BLOCK.sub(lambda found: _unretained(found[0]), f"{stack.template}\n")
    return Blueprint(stack.name, text, stack.parameters, {**stack.tags, TAG_DATA: "files"})


def without_files(stack: Stack) -> Blueprint:
    """The content of a stack without its file system, protected as before.

    The template is the deployed one, because its deletion policies count.
    """
    tags = {key: value for key, value in stack.tags.items() if key != TAG_DATA}
    return _protected(stack, {**stack.parameters, "Workspace": "none"}, tags)


def _protected(stack: Stack, parameters: dict[str, str], tags: dict[str, str]) -> Blueprint:
    """The content of a stack with other parameters and tags, protected as a stack with data."""
    return Blueprint(
        stack.name, stack.template, parameters, tags, is_protected=True, policy=_STACK_POLICY
    )


def _unretained(text: str) -> str:
    return text.replace("RetainExceptOnCreate", "Delete").replace(
        "Policy: Retain", "Policy: Delete"
    )


def _has_resources(status: str) -> bool:
    """Whether the resources of a stack exist; during an update, its earlier resources."""
    return status.startswith("UPDATE_") or status in ("CREATE_COMPLETE", "IMPORT_COMPLETE")


def wanted_stacks(spec: SetupSpec) -> list[str]:
    """The stacks that an environment needs, in the order of creation."""
    environment = spec.environment
    unneeded = set()
    if environment.network.is_given:
        unneeded.add("network")
    if not environment.builds_image:
        unneeded.add("ami")
    return [short for short in STACKS if short not in unneeded]


def _layout(spec: SetupSpec, current: CurrentState) -> SubnetLayout:
    """The subnets of the network; without any, if the environment has no network of its own."""
    stack = current.stacks.get(spec.stack("network"))
    if spec.is_local or spec.environment.network.is_given:
        return SubnetLayout((), (), "")
    if stack is not None and not _has_resources(stack.status):
        stack = None
    builds = spec.environment.builds_image
    return plan_layout(spec.environment, spec.offers, stack, builds_image=builds)


def _outputs(
    spec: SetupSpec, current: CurrentState, layout: SubnetLayout
) -> dict[str, dict[str, str]]:
    """The outputs of the wanted stacks: AWS's values, or placeholders where they will change."""
    found: dict[str, dict[str, str]] = {}
    if "network" in current.owner_stacks:
        found["network"] = current.owner_stacks["network"].outputs
    for short in wanted_stacks(spec):
        stack = current.stacks.get(spec.stack(short))
        if stack is None or not _has_resources(stack.status):
            found[short] = {key: unknown_output(short, key) for key in STACK_OUTPUTS[short]}
            continue
        found[short] = dict(stack.outputs)
        if not spec.changes_stacks:
            continue
        parameters = _blueprint(spec, short, found, current).parameters
        inputs, results = _CHANGES_OUTPUTS.get(short, ((), ()))
        if any(parameters[key] != stack.parameters.get(key) for key in inputs):
            found[short] |= {key: unknown_output(short, key) for key in results}
        elif short == "network" and is_known(layout.zones):
            found[short] |= _subnet_outputs(spec, stack, layout)
    return found


def _subnet_outputs(spec: SetupSpec, stack: Stack, layout: SubnetLayout) -> dict[str, str]:
    """The outputs for subnets: the ids of those that exist, and a placeholder for each new one."""
    known = subnet_ids(stack)
    ids = [
        known.get(zone) or unknown_output("network", f"SubnetIds.{zone}") for zone in layout.zones
    ]
    return {
        "SubnetIds": ",".join(ids),
        "AvailabilityZones": ",".join(layout.zones),
        "BuildSubnetId": build_subnet(ids, layout.zones, spec.offers),
    }


# Stack -> the parameters whose update changes outputs, and these outputs. So the plan shows the
# consequences of an update before AWS has made it.
_CHANGES_OUTPUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "network": (("VpcCidr",), ("VpcId", "SubnetIds", "AvailabilityZones", "BuildSubnetId")),
    "storage": (
        ("Workspace",),
        ("FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId"),
    ),
    "ami": (("ContentVersion",), ("ImageId",)),
}


def _blueprint(
    spec: SetupSpec, short: str, outputs: Mapping[str, Mapping[str, str]], current: CurrentState
) -> Blueprint:
    environment, template = spec.environment, spec.templates[short]
    if short == "ami" and not _has_efa(environment):
        template = without_efa(template)
    parameters = {
        "EnvironmentName": spec.name,
        **_PARAMETERS[short](spec.name, environment, outputs),
    }
    if short == "network":
        parameters |= _layout(spec, current).to_parameters()
    if short == "ami":
        deployed = deployed_content(current.stacks.get(spec.stack(short)))
        parameters["ContentVersion"] = content_version(
            template, deployed, rebuild=bool(deployed) and deployed == spec.rebuild_of
        )
    holds_data = short in DATA_STACKS
    return Blueprint(
        name=spec.stack(short),
        template=template,
        parameters=parameters,
        tags={**environment.tags, sharing.TAG_ENV: spec.name},
        is_protected=holds_data,
        policy=_STACK_POLICY if holds_data else "",
    )


_EFA_PASSAGE = re.compile(r"(?ms)^ *# efa: begin\n.*?^ *# efa: end\n")


def without_efa(template: str) -> str:
    """The text of `cfn/ami.yaml` without EFA.

    A condition in the template would not do. The driver's check is in a component that all images
    have, and a changed component makes another image, and so other hosts.
    """
    return _EFA_PASSAGE.sub("", template)


def _has_efa(environment: Environment) -> bool:
    """Whether hosts with EFA start from the AMI that batchml builds."""
    return any(
        (each.ami or environment.ami) == "build" and fabric_layout(each, environment.ami)
        for each in environment.compute.values()
    )


Outputs = Mapping[str, Mapping[str, str]]


def log_group(env: str) -> str:
    """The log group of an environment, in place of AWS Batch's own `/aws/batch/job`."""
    return f"/aws/batch/batchml-{env}"


def _network(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    return {"VpcCidr": environment.network.cidr, "Egress": environment.network.egress}


def _roles(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    objects, buckets = prefix_arns(environment.data, environment.region)
    return {
        "LogGroupName": log_group(env),
        "AllowPrivileged": str(environment.gpu_mode == "driver-mount").lower(),
        "JobSecrets": ",".join(environment.secrets),
        "JobData": ",".join(objects),
        "JobDataBuckets": ",".join(buckets),
        "AllowQuarantine": str(environment.quarantine).lower(),
    }


def _storage(env: str, environment: Environment, outputs: Outputs) -> dict[str, str]:
    storage = environment.storage
    if storage.shared_with:
        # The file system is in the other environment's stack.
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


def deployed_content(stack: Stack | None) -> str:
    """The ContentVersion of the stack with the machine image; "" if there is none."""
    return stack.parameters.get("ContentVersion", "") if stack is not None else ""


def content_version(template: str, deployed: str = "", *, rebuild: bool = False) -> str:
    """The version `1.x.y` of a machine image: x changes with the template, y with each rebuild.

    `deployed`: the version in AWS, which stays if the template is the same. Image Builder's
    components and recipes cannot be changed, so a change needs a new version. Each part may be up
    to 2^30 - 1. Source: Image Builder API reference, CreateComponent.
    """
    digest = int(hashlib.sha256(template.strip().encode()).hexdigest(), 16)
    content = f"1.{digest % 2**30}"
    same, _, count = deployed.rpartition(".")
    built = int(count) if same == content and count.isdecimal() else 0
    return f"{content}.{(built + rebuild) % 2**30}"


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


def _launch(spec: SetupSpec, site: Site) -> dict[str, Any]:
    computes = spec.environment.compute
    return {
        "groups": {
            site.named(name): ec2.placement_group_request(site, name)
            for name, compute in computes.items()
            if resources.placement_group_name(site, name, compute) == site.named(name)
        },
        "templates": {
            site.named(name): ec2.launch_template_request(site, name, compute)
            for name, compute in computes.items()
        },
    }


def _batch(
    spec: SetupSpec, site: Site, zones: Sequence[str], current: CurrentState
) -> dict[str, Any]:
    """The requests for AWS Batch. `zones` has the zone of each subnet of the site."""
    environment = spec.environment
    policies = {
        site.named(name): resources.scheduling_policy_request(site, name, queue.fair_share)
        for name, queue in environment.queues.items()
        if queue.fair_share is not None
    }
    kinds = {
        "policies": policies,
        "environments": {
            site.named(name): resources.compute_environment_request(
                replace(
                    site,
                    subnets=_subnets(spec, site, name, zones, current),
                    neuron_image=_neuron_image(spec, site, name, current),
                ),
                name, compute, _template(site, name, compute, current),
            )
            for name, compute in environment.compute.items()
        },
        "queues": {
            site.named(name): resources.queue_request(
                site, name, queue, _policy_arn(site, name, current)
            )
            if site.named(name) in policies
            else resources.queue_request(site, name, queue)
            for name, queue in environment.queues.items()
        },
    }  # fmt: skip
    for requests in kinds.values():
        for request in requests.values():
            request["tags"] = {**request["tags"], TAG_SOURCE: "setup"}
    return kinds


def _subnets(
    spec: SetupSpec, site: Site, name: str, zones: Sequence[str], current: CurrentState
) -> tuple[str, ...]:
    """The subnets of a compute environment. Those that it has stay, if the offers are not known.

    Hosts with EFA are in one subnet, because EFA does not reach other zones. Reserved hosts are in
    the zone of their reservation, which is not known here.
    """
    there = (
        found.get("computeResources", {}).get("subnets", ())
        for key, found in current.environments.items()
        if is_version_of(key, site.named(name))
    )
    network, compute = spec.environment.network, spec.environment.compute[name]
    is_alone = bool(fabric_layout(compute, spec.environment.ami)) and not compute.is_reserved
    limit = 1 if is_alone else network.zones
    has = next((subnets for subnets in there if set(subnets) <= set(site.subnets)), ())
    if has and not network.subnets and (spec.offers is None or not spec.offers.is_known):
        return tuple(has)[: 1 if is_alone else None]
    found = usable_subnets(compute.instance_types, site.subnets, zones, spec.offers, limit)
    return found[: 1 if is_alone else None]


def _neuron_image(spec: SetupSpec, site: Site, name: str, current: CurrentState) -> str:
    """The AMI of a compute environment with Neuron chips: the one that it has, else the newest.

    So a plan does not replace hosts whenever AWS publishes an AMI. `compute update --refresh` does.
    """
    if not spec.environment.compute[name].has_neurons:
        return ""
    there = (
        resources.neuron_image_of(found)
        for key, found in current.environments.items()
        if is_version_of(key, site.named(name))
    )
    return next(filter(None, there), spec.neuron_image)


def _template(
    site: Site, name: str, compute: Compute, current: CurrentState
) -> ec2.LaunchTemplate | None:
    """The launch template version for instances: the newest, or the one that the plan creates."""
    if site.is_local:
        return None
    content = ec2.content_hash(ec2.launch_template_request(site, name, compute))
    found = current.templates.get(site.named(name))
    if found is not None and found.content == content:
        return found
    return ec2.LaunchTemplate(site.named(name), found.version + 1 if found else 1, content)


def _policy_arn(site: Site, name: str, current: CurrentState) -> str:
    found = current.policies.get(site.named(name))
    return str(found["arn"]) if found else f"{UNKNOWN}{site.named(name)}"
