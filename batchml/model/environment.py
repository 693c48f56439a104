"""An environment of `batchml.toml`: an AWS account and region with queues, or this machine.

Also the entries of its workspace (the shared folder), and the progress of transfers to and from it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field

from batchml.errors import UsageError
from batchml.model.tables import parse_duration, parse_size

LOCAL = "local"
DEFAULT_QUEUE = "default"
MAX_ENVIRONMENTS = 3  # compute environments of one queue; AWS Batch quotas
MAX_TAGS = 45  # AWS allows 50; batchml adds up to 5 of its own
SPOT_STRATEGIES = ("SPOT_CAPACITY_OPTIMIZED", "SPOT_PRICE_CAPACITY_OPTIMIZED")


# Reasons of jobStateTimeLimitActions: AWS Batch User Guide, "Jobs stuck in RUNNABLE".
TIME_LIMITS = {
    "no-capacity": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "too-large-for-compute": "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "too-large-for-instances": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
}


_ARM_FAMILY = r"(g5g|p6e|a1|[a-z]+[0-9]+g[a-z0-9-]*)"


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """The network of the instances: one that `setup` creates, or existing subnets."""

    cidr: str = "10.42.0.0/16"
    zones: Annotated[int, Meta(ge=1, le=6)] = 6  # at most, of those that offer the instance types
    egress: Literal["nat", "endpoints"] = "nat"
    vpc: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()

    @property
    def is_given(self) -> bool:
        """Whether the network exists already, so that `setup` creates none."""
        return bool(self.subnets)


class Storage(Struct, frozen=True, forbid_unknown_fields=True):
    workspace: Literal["efs", "fsx-lustre", "none"] = "efs"  # the kind of file system
    size: str | int = "1200 GiB"  # of fsx-lustre
    throughput: Literal[125, 250, 500, 1000] = 125  # of fsx-lustre: MB/s for each TiB
    shared_with: str = ""  # the environment that owns the workspace; `workspace` is "none" then

    @property
    def size_gib(self) -> int:
        return (parse_size(self.size) or 0) // 1024**3


class Compute(Struct, frozen=True, forbid_unknown_fields=True):
    """A managed compute environment. The fields are named as in AWS Batch."""

    instance_types: tuple[str, ...] = ()
    max_vcpus: Annotated[int, Meta(ge=1, le=100_000)] = 0
    min_vcpus: Annotated[int, Meta(ge=0)] = 0
    spot: bool = False
    allocation_strategy: Literal[
        "", "BEST_FIT", "BEST_FIT_PROGRESSIVE", "SPOT_CAPACITY_OPTIMIZED",
        "SPOT_PRICE_CAPACITY_OPTIMIZED",
    ] = ""  # fmt: skip
    bid_percentage: Annotated[int, Meta(ge=1, le=100)] | None = None
    ami: str = ""  # "": the AMI of the environment
    bootstrap: str = ""  # a script that hosts run before they join; relative to batchml.toml
    disk: str | int = "100 GiB"
    placement_group: str = ""  # "cluster": `setup` creates one; else the name of an existing one
    efa: bool | Literal["auto"] = False  # "auto": where nothing prevents it; see model/fabric.py
    capacity_reservation: str = ""
    capacity_block: str = ""  # the id of a reservation of hosts that are paid in advance
    scale_down_delay: str | int = 0
    stop_timeout: str | int = "110s"
    tags: dict[str, str] = {}

    @property
    def strategy(self) -> str:
        """The allocation strategy: by default the one that AWS recommends.

        A capacity block has hosts of one type in one zone: AWS's samples use BEST_FIT for it.
        """
        default = "SPOT_PRICE_CAPACITY_OPTIMIZED" if self.spot else "BEST_FIT_PROGRESSIVE"
        return self.allocation_strategy or ("BEST_FIT" if self.capacity_block else default)

    @property
    def reservation(self) -> str:
        """The id of the capacity reservation of the hosts, or ""."""
        named = self.capacity_block or self.capacity_reservation
        return named if named.startswith("cr-") else ""

    @property
    def is_reserved(self) -> bool:
        """Whether its hosts are in a capacity reservation or block, and so in the zone of that."""
        named = self.capacity_block or self.capacity_reservation
        return named.startswith(("cr-", "arn:"))

    @property
    def has_gpus(self) -> bool:
        return any(is_gpu_type(name) for name in self.instance_types)

    @property
    def has_neurons(self) -> bool:
        return any(is_neuron_type(name) for name in self.instance_types)

    @property
    def is_arm(self) -> bool:
        return any(is_arm_type(name) for name in self.instance_types)

    @property
    def processor(self) -> str:
        """The processor of its hosts, in the words of images: see `model.image.PROCESSORS`."""
        return processor_of(self.instance_types)

    @property
    def disk_gib(self) -> int:
        return (parse_size(self.disk) or 0) // 1024**3

    @property
    def scale_down_minutes(self) -> int:
        return (parse_duration(self.scale_down_delay) or 0) // 60

    @property
    def stop_seconds(self) -> int:
        return parse_duration(self.stop_timeout) or 0


class FairShare(Struct, frozen=True, forbid_unknown_fields=True):
    """A fair-share policy. A share of weight 2 gets twice as much as a share of weight 1.

    AWS's weightFactor is the inverse: a share with a lower factor gets more.
    """

    shares: dict[str, Annotated[float, Meta(gt=0)]] = {}
    decay: str | int = 3600
    reservation: Annotated[int, Meta(ge=0, le=99)] = 0

    @property
    def decay_seconds(self) -> int:
        return parse_duration(self.decay) or 0


class Queue(Struct, frozen=True, forbid_unknown_fields=True):
    """A job queue. `compute` lists its compute environments in the order in which they are used."""

    priority: Annotated[int, Meta(ge=0, le=1000)] = 1
    compute: tuple[str, ...] = ()
    fair_share: FairShare | None = None
    # After how long a run that cannot start is cancelled, by the reason. By default, runs that wait
    # for capacity are not cancelled.
    time_limits: dict[str, str | int] = field(
        default_factory=lambda: {"too-large-for-compute": "30m", "too-large-for-instances": "30m"}
    )

    @property
    def limits_seconds(self) -> dict[str, int]:
        """The time limits in seconds, by AWS's reason."""
        found = {TIME_LIMITS[key]: parse_duration(text) for key, text in self.time_limits.items()}
        return {reason: seconds for reason, seconds in found.items() if seconds}


class Logs(Struct, frozen=True, forbid_unknown_fields=True):
    retention_days: Literal[
        1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557,
        2922, 3288, 3653,
    ] = 90  # fmt: skip


class Budget(Struct, frozen=True, forbid_unknown_fields=True):
    """A mail is sent when the environment's cost of a month exceeds `usd`."""

    usd: Annotated[int, Meta(ge=1)] = 0
    email: str = ""


class Environment(Struct, frozen=True, forbid_unknown_fields=True):
    """An environment. `local` is built in and needs no section."""

    region: str = ""
    profile: str = ""
    ami: str = "ecs-gpu"  # build | ecs-gpu | ami-0123...
    gpu_access: Literal["", "driver-mount", "toolkit"] = ""  # "": `ami` decides
    # For controllers of detached sweeps ("": the queue of the sweep), watchers and transfers.
    controller_queue: str = ""
    jobs: tuple[str, ...] = ()  # the jobs whose definitions `setup` registers
    data_cache: bool = False  # whether hosts keep copies of data sets, on NVMe if they have it
    data: tuple[str, ...] = ()  # s3:// prefixes with data sets that jobs may read
    secrets: tuple[str, ...] = ()  # ARNs of SSM parameters and Secrets Manager secrets for jobs
    quarantine: bool = False  # whether runs may drain hosts that fail their checks
    network: Network = Network()
    storage: Storage = Storage()
    logs: Logs = Logs()
    budget: Budget | None = None
    usd_per_hour: Annotated[float, Meta(ge=0, le=100_000)] = 0.0  # only `local`: the machine's cost
    endpoints: dict[str, str] = {}  # only `local`: URLs of services beside the embedded server
    tags: dict[str, str] = {}
    compute: dict[str, Compute] = {}
    queues: dict[str, Queue] = {}

    @property
    def processors(self) -> tuple[str, ...]:
        """The processors of its hosts: x86 if it describes no compute environment."""
        return tuple(sorted({each.processor for each in self.compute.values()})) or ("amd64",)

    def processor_of_queue(self, queue: str) -> str:
        """The processor of a queue's hosts; "" for a queue that the file does not describe."""
        if queue not in self.queues:
            return ""
        return next((self.compute[each].processor for each in self.queues[queue].compute), "")

    @property
    def queues_with_gpus(self) -> tuple[str, ...]:
        """The queues with a compute environment whose hosts have GPUs."""
        return tuple(
            name
            for name, queue in self.queues.items()
            if any(self.compute[each].has_gpus for each in queue.compute)
        )

    @property
    def queues_with_neurons(self) -> tuple[str, ...]:
        """The queues whose hosts have Neuron chips: a queue has no other hosts beside them."""
        return tuple(
            name
            for name, queue in self.queues.items()
            if any(self.compute[each].has_neurons for each in queue.compute)
        )

    @property
    def builds_image(self) -> bool:
        """Whether a compute environment uses an AMI that `setup` builds."""
        images = {compute.ami or self.ami for compute in self.compute.values()}
        return "build" in (images or {self.ami})

    @property
    def gpu_mode(self) -> Literal["driver-mount", "toolkit"]:
        """How containers reach GPUs. Only the AMI that batchml builds has the driver's folder."""
        return self.gpu_access or ("driver-mount" if self.ami == "build" else "toolkit")


class ConfigContent(Struct, frozen=True):
    """The content of a `batchml.toml`, with its mistakes by environment ("" for the rest).

    An environment with mistakes has defaults in place of the wrong values, so use it in messages
    only.
    """

    default: str
    environments: dict[str, Environment]
    mistakes: dict[str, tuple[str, ...]]
    project: str = ""

    def mistakes_of(self, *names: str) -> list[str]:
        """All mistakes of the file, if these environments or the rest of the file have some."""
        matters = any(self.mistakes.get(name) for name in ("", *names))
        return [text for texts in self.mistakes.values() for text in texts] if matters else []


def choose_queue(environment: Environment, gpus: int | Literal["auto"], neurons: int = 0) -> str:
    """The queue of a run that names none, by its number of GPUs or Neuron chips.

    It is `default`. A run with GPUs could never start there if none of its hosts has GPUs: then it
    is the first queue of the file that has such hosts. A run with "auto" stays in `default`: it can
    do without a GPU, and hosts with GPUs cost more and have quotas of their own.
    """
    if DEFAULT_QUEUE not in environment.queues or not (neurons or gpus not in (0, "auto")):
        return DEFAULT_QUEUE
    fit = environment.queues_with_neurons if neurons else environment.queues_with_gpus
    return DEFAULT_QUEUE if DEFAULT_QUEUE in fit else next(iter(fit), DEFAULT_QUEUE)


def is_gpu_type(instance_type: str) -> bool:
    """Whether an instance type or family has NVIDIA GPUs."""
    return _accelerator_maker(instance_type) == "nvidia"


def is_neuron_type(instance_type: str) -> bool:
    """Whether an instance type or family has AWS's Neuron chips: Trainium or Inferentia."""
    return _accelerator_maker(instance_type) == "neuron"


def _accelerator_maker(instance_type: str) -> str:
    from batchml.runtime.protocol.instance_types import family_accelerator  # late: a large table

    accelerator = family_accelerator(instance_type)
    return accelerator.maker if accelerator else ""


def is_arm_type(instance_type: str) -> bool:
    """Whether an instance type or family has Arm processors."""
    return instance_type == "default_arm64" or bool(
        re.fullmatch(_ARM_FAMILY, instance_type.partition(".")[0])
    )


def processor_of(instance_types: Iterable[str]) -> str:
    """The processor of hosts of these types. The types of a queue have one processor."""
    return "arm64" if any(map(is_arm_type, instance_types)) else "amd64"


def sharers(owner: str, environments: Mapping[str, Environment]) -> tuple[str, ...]:
    """The environments that share the workspace of `owner`."""
    return tuple(name for name, env in environments.items() if env.storage.shared_with == owner)


# --- Endpoints ------------------------------------------------------------------------------------

_SERVICE = r"[a-z][a-z0-9_]*"

# The embedded server answers for these services itself.
_SERVED = ("batch", "cloudwatch_logs", "ecs", "logs", "sts")


def endpoint_mistakes(endpoints: Mapping[str, str]) -> Iterator[str]:
    """The mistakes in `endpoints`, a table of services and their URLs."""
    for service, url in endpoints.items():
        if service in _SERVED:
            yield f"{service}: the embedded AWS Batch answers for {service} itself."
        elif not re.fullmatch(_SERVICE, service):
            yield (
                f"{service}: not a service. Expected a name as in AWS's variables, in lower case: "
                f"s3, dynamodb, secrets_manager."
            )
        if not _is_url(url):
            yield f"{service}: found {url!r}. Expected a URL such as http://127.0.0.1:9000."


def endpoint_variables(endpoints: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with which AWS's SDKs find these services."""
    return {f"AWS_ENDPOINT_URL_{service.upper()}": url for service, url in endpoints.items()}


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError for a wrong port
    except ValueError:
        return False
    plain = not (parts.query or parts.fragment or parts.username or re.search(r"\s", text))
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname)


# --- The workspace --------------------------------------------------------------------------------


MOUNT = "/workspace"  # its path in containers

Kind = Literal["file", "folder", "link"]


class WorkspaceEntry(Struct, frozen=True):
    """A file, folder or link. `path` is relative to the workspace, with `/` as separator."""

    path: str
    kind: Kind = "file"
    mode: int = 0o644  # permissions only
    size: int = 0  # bytes of a file, else 0
    mtime_ns: int = 0  # since the epoch
    sha256: str = ""  # of a file, in hex; empty if it was not computed
    target: str = ""  # of a link


class TransferStatus(Struct, frozen=True):
    """The progress of a transfer. Unchanged files count as done."""

    doing: str = ""  # the activity, such as "pushing"
    path: str = ""  # the latest file
    files: int = 0
    of_files: int = 0  # the number of all files; 0 while it is unknown
    size: int = 0  # bytes done
    of_size: int = 0  # bytes of all files
    moved: int = 0  # bytes of `size` that were really sent, from which the rate is computed


OnProgress = Callable[[TransferStatus], None]  # is called often, by one thread at a time


def ignore_progress(_: TransferStatus) -> None:
    """Do nothing: the default callback."""


class TransferReport(Struct, frozen=True):
    """The result of a transfer. `left_out` and `missing` list paths, each with a reason.

    Devices, and links to paths outside the workspace, are left out on purpose; `missing` are files
    that should have been transferred.
    """

    verb: str = ""
    location: str = ""  # a folder, or s3://BUCKET/PREFIX
    files: int = 0  # transferred
    size: int = 0  # bytes transferred
    unchanged: int = 0
    removed: int = 0  # files that `archive --delete` freed or `rm` deleted
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # messages: the cost, files that appear later

    @property
    def is_complete(self) -> bool:
        return not self.missing


def relative_path(path: str) -> str:
    """Return a path relative to the workspace: `/workspace/a/` becomes `a`. Raises UsageError."""
    relative = path.removeprefix(MOUNT) if f"{path}/".startswith(f"{MOUNT}/") else path
    if relative.startswith("/") and relative == path != "/":
        raise UsageError(f"{path!r} is not in the workspace: give a relative path or {MOUNT}/...")
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise UsageError(f"{path!r} leads out of the workspace: give a path inside it.")
    return "/".join(parts)
