"""What the stacks of an environment give to what is made of them: Site, and Platform.

A Site is what compute environments and queues need of their place, a Platform what job definitions
need. Both are values, made from the outputs of the stacks (`cfn/`), and both are empty on `local`.
"""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from batchml.model.environment import LOCAL, Compute, Environment

WORKSPACE = "/workspace"  # on the instances and in the containers
NOTICES = "/run/batchml"  # on the instances and in the containers: what EC2 announces
NOTICE_FILE = f"{NOTICES}/notice"
USER = "1000:1000"  # of images/*/Dockerfile, and of the files in the workspace (cfn/storage.yaml)
PREFIX = "batchml"

# The stacks whose outputs a Platform needs.
PLATFORM_STACKS = ("roles", "observability", "storage")


class Workspace(Struct, frozen=True):
    """The file system that every instance mounts at `/workspace`."""

    kind: Literal["none", "efs", "fsx-lustre"] = "none"
    file_system: str = ""
    dns: str = ""
    mount_name: str = ""  # of FSx for Lustre
    access_point: str = ""  # of EFS; optional


class Site(Struct, frozen=True):
    """Where compute environments are, and what they have in common.

    `ami` is the environment's, as `batchml.toml` says it; `built_image` the id of the one that our
    stack built. Tags are those of the user.
    """

    env: str = LOCAL
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    instance_profile: str = ""
    ami: str = "ecs-gpu"
    built_image: str = ""
    gpu_mode: str = "toolkit"
    workspace: Workspace = Workspace()
    tags: dict[str, str] = {}

    @property
    def is_local(self) -> bool:
        return self.env == LOCAL

    def named(self, name: str) -> str:
        """The name in AWS: others share the account. Bare on `local`."""
        return qualified(self.env, name)

    def tagged(self, name: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The tags of a resource of ours: the user's, and what it is found again by."""
        return {**self.tags, **(more or {}), **owner_tags(self.env), "batchml:name": name}

    def lets_privileged(self, compute: Compute) -> bool:
        """True where jobs reach GPUs by a mount of the driver, which privileged ones alone can."""
        return self.gpu_mode == "driver-mount" and compute.has_gpus


class Platform(Struct, frozen=True):
    """What the job definitions of an environment have in common. An empty one is that of `local`.

    `gpu` is how containers with GPUs reach them: `driver-mount` (privileged, the driver's folder of
    the host), `toolkit` (unprivileged, the NVIDIA runtime), or empty: nothing is said about it.
    `workspace` is the folder of the host that containers have at `/workspace`, `user` whom images
    of ours run as, `notices` the folder in which spot hosts write what EC2 announces. `secrets` are
    the ARNs of what jobs may be given.
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


def stack_name(env: str, stack: str) -> str:
    """`batchml-dev-roles`"""
    return f"{PREFIX}-{env}-{stack}"


def qualified(env: str, name: str) -> str:
    return name if env == LOCAL else f"{PREFIX}-{env}-{name}"


def owner_tags(env: str) -> dict[str, str]:
    return {"batchml:env": env}


def queue_name(env: str, environment: Environment, given: str) -> str:
    """The name in AWS of a queue: `batchml-ENV-QUEUE` for one that `batchml.toml` describes.

    Any other is taken to be a queue that exists under that name.
    """
    return qualified(env, given) if given in environment.queues else given


def make_site(env: str, environment: Environment, outputs: Mapping[str, str]) -> Site:
    """The Site of an environment from the outputs of its stacks, all in one mapping.

    An output that is missing leaves its value empty: the stack is not there (yet).
    """
    if env == LOCAL:
        return Site(tags=environment.tags)
    network = environment.network
    return Site(
        env=env,
        subnets=network.subnets or _listed(outputs.get("SubnetIds", "")),
        security_groups=network.security_groups or _listed(outputs.get("SecurityGroupId", "")),
        instance_profile=outputs.get("InstanceProfileArn", ""),
        ami=environment.ami,
        built_image=outputs.get("ImageId", ""),
        gpu_mode=environment.gpu_mode,
        workspace=_workspace(environment, outputs),
        tags=environment.tags,
    )


def make_platform(env: str, environment: Environment, outputs: Mapping[str, str]) -> Platform:
    """The Platform of an environment from the outputs of its stacks, all in one mapping."""
    if env == LOCAL:
        return Platform()
    has_workspace = _workspace(environment, outputs).kind != "none"
    return Platform(
        gpu="driver-mount" if environment.gpu_mode == "driver-mount" else "toolkit",
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
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _workspace(environment: Environment, outputs: Mapping[str, str]) -> Workspace:
    """The file system that is mounted: the environment's own, or one that it shares.

    Of a shared one the outputs are those of the other environment's stacks, where they are known:
    what kind it is shows in them. Its own stack gives no more than the id.
    """
    kind, found = environment.storage.workspace, outputs.get("FileSystemId")
    if environment.storage.shared_with:
        kind = "fsx-lustre" if outputs.get("LustreMountName") else "efs"
        found = found or outputs.get("SharedFileSystemId")
    if kind == "none" or not found:
        return Workspace()
    return Workspace(
        kind=kind,
        file_system=found,
        dns=outputs.get("FileSystemDns", ""),
        mount_name=outputs.get("LustreMountName", ""),
        access_point=outputs.get("AccessPointId", ""),
    )
