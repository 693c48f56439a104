"""Names and tags in AWS, and the outputs of an environment's stacks (`cfn/`).

`Site` has the outputs that compute environments and queues need, `Platform` the outputs that job
definitions need. On `local` there are no outputs.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from batchml.model.environment import LOCAL, Compute, Environment
from batchml.model.run import PROJECT_TAG

WORKSPACE = "/workspace"  # on the instances and in the containers
CACHE_ON_HOST = "/var/lib/batchml/cache"  # of data sets: on NVMe where the instance has it
CACHE = "/batchml/cache"  # the same folder in containers
NOTICES = "/run/batchml"  # the folder of EC2's spot notices, on the instances and in containers
NOTICE_FILE = f"{NOTICES}/notice"
USER = "1000:1000"  # the user of images/*/Dockerfile, who owns the workspace (cfn/storage.yaml)
PREFIX = "batchml"

# The stacks with the outputs of a Platform.
PLATFORM_STACKS = ("roles", "observability", "storage")

# The outputs of the stacks in `cfn/` that other resources need.
STACK_OUTPUTS = {
    "network": ("VpcId", "SubnetIds", "SecurityGroupId", "BuildSubnetId"),
    "roles": ("InstanceProfileArn", "JobRoleArn", "ExecutionRoleArn"),
    "storage": ("BucketName", "FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId"),
    "observability": ("LogGroupName",),
    "ami": ("ImageId",),
}
# The first character of a placeholder in a request, for a value that another resource will have:
# "«network.SubnetIds»".
UNKNOWN = "\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}"

# The tag of a job definition with the date of its registration, which AWS Batch does not report.
REGISTERED = "batchml:registered"

# The tag of a compute environment with the id of AWS's AMI for Neuron chips that batchml chose.
NEURON_IMAGE = "batchml:neuron-image"


class WorkspaceMount(Struct, frozen=True):
    """The file system that every instance mounts at `/workspace`. The fields are as in AWS."""

    kind: Literal["none", "efs", "fsx-lustre"] = "none"
    file_system: str = ""
    dns: str = ""
    mount_name: str = ""  # of FSx for Lustre
    access_point: str = ""  # of EFS; optional


class Site(Struct, frozen=True):
    """The network, role, AMI and tags that all compute environments of an environment share.

    `ami` is the value in `batchml.toml`; `built_image` is the id of the AMI that our stack built.
    """

    env: str = LOCAL
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    instance_profile: str = ""
    ami: str = "ecs-gpu"
    built_image: str = ""
    gpu_mode: str = "toolkit"
    data_cache: bool = False
    neuron_image: str = ""  # the id of AWS's AMI for Neuron chips
    workspace: WorkspaceMount = WorkspaceMount()
    tags: dict[str, str] = {}
    project: str = ""  # on `local`: the project to which the resources belong
    shared: frozenset[str] = frozenset()  # compute environments that `named` does not make
    scripts: Mapping[str, str] = {}  # the texts of bootstrap scripts, by their names

    @property
    def is_local(self) -> bool:
        return self.env == LOCAL

    def named(self, name: str) -> str:
        """The name of a resource in AWS: `batchml-ENV-NAME`; on `local`, `PROJECT--NAME`."""
        return qualified(self.env, name, self.project)

    def named_compute(self, name: str) -> str:
        """The name of a compute environment that a queue uses."""
        return name if name in self.shared else self.named(name)

    def tagged(self, name: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The tags of a resource: the user's tags, and the tags by which batchml finds it."""
        ours = owner_tags(self.env, self.project)
        return {**self.tags, **(more or {}), **ours, "batchml:name": name}

    def lets_privileged(self, compute: Compute) -> bool:
        """Whether hosts allow privileged jobs, which reach GPUs through the mounted driver."""
        return self.gpu_mode == "driver-mount" and compute.has_gpus


class Platform(Struct, frozen=True):
    """The values that all job definitions of an environment share; empty on `local`.

    Containers reach GPUs by `gpu`: `driver-mount` (privileged, with the driver's folder of the
    host), `toolkit` (unprivileged, with the NVIDIA runtime), or "" (nothing is set). `workspace` is
    the host's folder that is mounted at `/workspace`, `user` the user of our images, `notices` the
    host's folder of EC2's spot notices. `secrets` are the ARNs of the secrets that jobs may use.
    `data_cache`: hosts have a folder for copies of data sets.
    `efa` has the number of EFA devices of each host of a queue, by the queue's name in AWS; a queue
    that batchml.toml does not describe is missing.
    """

    gpu: Literal["", "driver-mount", "toolkit"] = ""
    job_role: str = ""
    execution_role: str = ""
    log_group: str = ""
    workspace: str = ""
    user: str = ""
    notices: str = ""
    tags: dict[str, str] = {}
    env: str = LOCAL
    region: str = ""
    secrets: tuple[str, ...] = ()
    data_cache: bool = False
    efa: Mapping[str, int] = {}


def stack_name(env: str, stack: str) -> str:
    """The name of a stack in AWS, such as `batchml-dev-roles`."""
    return f"{PREFIX}-{env}-{stack}"


def unknown_output(stack: str, key: str) -> str:
    """The placeholder for an output of a stack: `«network.SubnetIds»`."""
    return f"{UNKNOWN}{stack}.{key}\N{RIGHT-POINTING DOUBLE ANGLE QUOTATION MARK}"


def qualified(env: str, name: str, project: str = "") -> str:
    """`batchml-dev-gpu`; on `local`, `PROJECT--gpu`, or the name alone without a project.

    All projects of this machine share the server of `local`, so each has names of its own there
    (docs/decisions/043-projects.md).
    """
    if env != LOCAL:
        return f"{PREFIX}-{env}-{name}"
    return f"{project.replace('.', '-')}--{name}" if project else name


def owner_tags(env: str, project: str = "") -> dict[str, str]:
    """The tags of everything that belongs to an environment, or to a project on `local`."""
    return {"batchml:env": env, **({PROJECT_TAG: project} if project else {})}


def queue_name(env: str, environment: Environment, given: str) -> str:
    """The name of a queue in AWS: `batchml-ENV-QUEUE` for a queue of `batchml.toml`.

    Any other name is unchanged: it names a queue that batchml did not create.
    """
    return qualified(env, given) if given in environment.queues else given


def make_site(
    env: str, environment: Environment, outputs: Mapping[str, str], project: str = ""
) -> Site:
    """The Site of an environment. `outputs` has the outputs of all its stacks.

    `project`: the project whose resources are made on `local`.

    A missing output leaves its value empty: the stack does not exist (yet).
    """
    if env == LOCAL:
        return Site(tags=environment.tags, project=project)
    network = environment.network
    return Site(
        env=env,
        subnets=network.subnets or _listed(outputs.get("SubnetIds", "")),
        security_groups=network.security_groups or _listed(outputs.get("SecurityGroupId", "")),
        instance_profile=outputs.get("InstanceProfileArn", ""),
        ami=environment.ami,
        built_image=outputs.get("ImageId", ""),
        gpu_mode=environment.gpu_mode,
        data_cache=environment.data_cache,
        workspace=_workspace(environment, outputs),
        tags=environment.tags,
    )


def make_platform(env: str, environment: Environment, outputs: Mapping[str, str]) -> Platform:
    """The Platform of an environment. `outputs` has the outputs of all its stacks."""
    if env == LOCAL:
        return Platform()
    from batchml.model.fabric import efa_of_queue  # late: it has a table of instance types

    has_workspace = _workspace(environment, outputs).kind != "none"
    return Platform(
        gpu=environment.gpu_mode,
        job_role=outputs.get("JobRoleArn", ""),
        execution_role=outputs.get("ExecutionRoleArn", ""),
        log_group=outputs.get("LogGroupName", ""),
        workspace=WORKSPACE if has_workspace else "",
        user=USER,
        notices=NOTICES if any(each.spot for each in environment.compute.values()) else "",
        tags={**environment.tags, **owner_tags(env)},
        env=env,
        region=environment.region,
        secrets=environment.secrets,
        data_cache=environment.data_cache,
        efa={qualified(env, name): efa_of_queue(environment, name) for name in environment.queues},
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _workspace(environment: Environment, outputs: Mapping[str, str]) -> WorkspaceMount:
    """The file system to mount: the environment's own, or that of the environment it shares.

    The kind of a shared file system is read from outputs of the other environment's stacks, if they
    are known. The environment's own stack has only the id.
    """
    kind, found = environment.storage.workspace, outputs.get("FileSystemId")
    if environment.storage.shared_with:
        kind = "fsx-lustre" if outputs.get("LustreMountName") else "efs"
        found = found or outputs.get("SharedFileSystemId")
    if kind == "none" or not found:
        return WorkspaceMount()
    return WorkspaceMount(
        kind=kind,
        file_system=found,
        dns=outputs.get("FileSystemDns", ""),
        mount_name=outputs.get("LustreMountName", ""),
        access_point=outputs.get("AccessPointId", ""),
    )
