"""Read `batchml.toml`: its environments, and every mistake of the file at once."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.config.accelerators import accelerator_mistakes, build_mistakes, mount_mistakes
from batchml.config.project import MAX_PROJECT_NAME, is_project_name
from batchml.errors import ConfigError, did_you_mean
from batchml.model.data import prefix_mistakes
from batchml.model.environment import (
    LOCAL,
    MAX_ENVIRONMENTS,
    MAX_TAGS,
    SPOT_STRATEGIES,
    TIME_LIMITS,
    Budget,
    Compute,
    ConfigContent,
    Environment,
    FairShare,
    Network,
    Queue,
    Storage,
    endpoint_mistakes,
    is_arm_type,
)
from batchml.model.fabric import efa_obstacles
from batchml.model.names import is_valid_name
from batchml.model.tables import parse_duration, read_struct

# --- Shared workspaces ----------------------------------------------------------------------------
# `[env.X.storage] shared_with = "dev"`: X uses the file system and the network of `dev`, and has a
# bucket, roles and queues of its own (`docs/decisions/032-sharing.md`). `setup` creates neither a
# network nor a file system for X.


_OWNER_KEYS = ("workspace", "size", "throughput")  # keys of `storage` that only the owner may set


class SharedNetwork(Network, frozen=True):
    """The network of the environment that owns the shared workspace.

    Its subnets and security groups are outputs of that environment's stacks.
    """

    @property
    def is_given(self) -> bool:
        return True


def sharing_mistakes(
    name: str, table: Mapping[str, Any], environments: Mapping[str, Environment]
) -> Iterator[str]:
    """The mistakes in an environment's `shared_with`, each as `key: text`."""
    env = environments[name]
    where, other = "storage.shared_with", env.storage.shared_with
    if not other:
        return
    if name == LOCAL:
        yield f"{where}: local has one workspace for all runs of this machine. Remove the key."
        return
    if other not in environments or other in (LOCAL, name):
        known = sorted(set(environments) - {LOCAL, name})
        yield (
            f"{where}: found {other!r}. Expected another environment of this file: "
            f"{', '.join(known) or 'there is none'}.{did_you_mean(other, known)}"
        )
        return
    yield from _owner_mistakes(env, environments[other], other)
    for key in _OWNER_KEYS:
        if key in _inner(table, "storage"):
            yield f"storage.{key}: {other} owns the workspace and sets it. Remove the key."
    if table.get("network"):
        yield f"network: a shared workspace is in the network of {other}. Remove the table."


def _owner_mistakes(env: Environment, owner: Environment, other: str) -> Iterator[str]:
    """The mistakes of `env` with the owner of its workspace, whose name is `other`."""
    where = "storage.shared_with"
    if owner.storage.shared_with:
        yield (
            f"{where}: {other} has no workspace of its own: it uses the workspace of "
            f"{owner.storage.shared_with!r}."
        )
    elif owner.storage.workspace == "none":
        yield f'{where}: {other} has no workspace (workspace = "none").'
    if env.region != owner.region:
        yield (
            f"{where}: {other} is in {owner.region}, this environment in {env.region}. A file "
            "system is shared within one region."
        )
    if env.profile != owner.profile:
        yield (
            f"{where}: profile is {env.profile!r} here and {owner.profile!r} in {other}. A file "
            "system is shared within one account."
        )


def _resolve_sharing(env: Environment, environments: Mapping[str, Environment]) -> Environment:
    """The environment with its owner's network, and without a file system of its own."""
    owner = environments.get(env.storage.shared_with)
    if owner is None or not env.storage.shared_with:
        return env
    network = owner.network if owner.network.is_given else SharedNetwork()
    return replace(env, storage=replace(env.storage, workspace="none"), network=network)


# --- The file -------------------------------------------------------------------------------------


_ENV_NAME = r"[a-z][a-z0-9-]{0,19}"
_REGION = r"[a-z]{2}(-[a-z]+)+-[0-9]"
_AMI = r"ami-[0-9a-f]{8,17}"
_INSTANCE = r"[a-z]+[0-9][a-z0-9-]*(\.[a-z0-9-]+)?|optimal|default_x86_64|default_arm64"
_RESERVATION = r"cr-[0-9a-f]{8,17}|arn:aws[a-z-]*:resource-groups:\S+|open|none"
_BLOCK = r"cr-[0-9a-f]{8,17}"
_CIDR = r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})/(1[6-9]|2[0-2])"
_SHARE = r"[A-Za-z0-9]{1,254}\*?"
_SUBNET = r"subnet-[0-9a-f]{8,17}"
_VPC = r"vpc-[0-9a-f]{8,17}"
_GROUP = r"sg-[0-9a-f]{8,17}"
_SECRET = r"arn:aws[a-z-]*:(ssm:[a-z0-9-]+:\d{12}:parameter/|secretsmanager:)\S+"
_EMAIL = r"[^@\s]+@[^@\s]+\.[^@\s]+"


def is_instance_type(text: str) -> bool:
    """Whether a text looks like an instance type, a family, or `optimal`."""
    return re.fullmatch(_INSTANCE, text) is not None


def is_region(text: str) -> bool:
    return re.fullmatch(_REGION, text) is not None


class ConfigFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys at the top of `batchml.toml`."""

    default: str = LOCAL
    project: str = ""  # "": the folder
    env: dict[str, dict[str, Any]] = {}


def read_environments(table: Mapping[str, Any], where: str) -> tuple[str, dict[str, Environment]]:
    """Return the default environment's name, and the environments by name.

    `where` names the file. Raises ConfigError with every mistake of the file at once.
    """
    content = read_config(table)
    mistakes = content.mistakes_of(*content.environments)
    if mistakes:
        raise ConfigError(where, mistakes)
    return content.default, content.environments


def read_config(table: Mapping[str, Any]) -> ConfigContent:
    """Read the file's table. The mistakes are in the result, not raised."""
    config, general = read_struct(table, ConfigFile, tables=_tables_of_keys(table.get("env")))
    mistakes: dict[str, tuple[str, ...]] = {}
    environments = {LOCAL: Environment()}
    for name, inner in config.env.items():
        environments[name], found = read_struct(inner, Environment, f"env.{name}")
        found += _mistakes(environments[name], inner, is_local=name == LOCAL)
        found = [f"env.{name}.{mistake}" for mistake in found]
        if not re.fullmatch(_ENV_NAME, name):
            found.append(
                f"env.{name}: an environment's name has 1 to 20 lower-case letters, digits and "
                "hyphens, and begins with a letter."
            )
        mistakes[name] = tuple(found)
    for name, inner in config.env.items():
        shared = sharing_mistakes(name, inner, environments)
        mistakes[name] += tuple(f"env.{name}.{mistake}" for mistake in shared)
    environments = {name: _resolve_sharing(env, environments) for name, env in environments.items()}
    general += _prefix_mistakes(environments)
    if config.default not in environments:
        meant = did_you_mean(config.default, environments)
        general.append(f"default: there is no environment {config.default!r}.{meant}")
    if isinstance(table.get("project"), str) and not is_project_name(config.project):
        general.append(
            f"project: found {config.project!r}. Expected 1 to {MAX_PROJECT_NAME} letters, digits, "
            "- and _; the first is a letter or digit, and no two hyphens are together."
        )
    mistakes = {"": tuple(general), **mistakes}
    return ConfigContent(config.default, environments, mistakes, config.project)


def _tables_of_keys(environments: object) -> dict[str, str]:
    """For each key of an environment, the table to move it to from the top of the file."""
    names = (
        [name for name in environments if name != LOCAL] if isinstance(environments, dict) else []
    )
    table = f"under [env.{names[0] if len(names) == 1 else 'NAME'}]"
    fields = msgspec.structs.fields(Environment)
    tables = {field.encode_name: table for field in fields}
    return {**tables, **dict.fromkeys(("usd_per_hour", "endpoints"), f"under [env.{LOCAL}]")}


def _prefix_mistakes(names: Iterable[str]) -> Iterator[str]:
    """The mistakes of environments whose resources in AWS could have equal names.

    `batchml-dev-x-gpu` is the compute environment `gpu` of `dev-x`, or `x-gpu` of `dev`.
    """
    for short, long in permutations(names, 2):
        if long.startswith(f"{short}-"):
            yield f"env.{long}: the name begins with {short!r} and a hyphen. Choose another."


def with_default(text: str, name: str) -> str:
    """The text of a `batchml.toml` with another default environment; the rest is unchanged.

    The key `default` must be before the first table.
    """
    first_table = re.search(r"(?m)^[ \t]*\[", text)
    end = first_table.start() if first_table else len(text)
    head, rest = text[:end], text[end:]
    line = f'default = "{name}"'
    changed, count = re.subn(r"(?m)^[ \t]*default[ \t]*=[^#\n]*?(?=[ \t]*(#|$))", line, head)
    return (changed if count else f"{line}\n{head}") + rest


def read_compute(name: str, table: Mapping[str, Any], where: str) -> Compute:
    """Read one compute environment. Raises ConfigError with every mistake at once."""
    compute, mistakes = read_struct(table, Compute)
    mistakes += map(_reword_for_flags, _compute_mistakes(name, compute, table))
    if mistakes:
        raise ConfigError(where, mistakes)
    return compute


def _reword_for_flags(mistake: str) -> str:
    """Reword a mistake of a table of the file (`.key: ...`, `: ...` for its name) for flags."""
    return mistake.removeprefix(".") if mistake.startswith(".") else f"NAME{mistake}"


def read_queue(name: str, table: Mapping[str, Any], where: str) -> Queue:
    """Read one queue; its compute environments are not checked. Raises ConfigError."""
    queue, mistakes = read_struct(table, Queue)
    environment = Environment(compute=dict.fromkeys(queue.compute, Compute()))
    mistakes += map(_reword_for_flags, _queue_mistakes(name, queue, environment, table))
    if mistakes:
        raise ConfigError(where, mistakes)
    return queue


def _mistakes(env: Environment, table: Mapping[str, Any], *, is_local: bool) -> list[str]:
    """The mistakes that types cannot find. A key that `read_struct` refused has its default."""
    return [
        *_location_mistakes(env, is_local),
        *_network_mistakes(env.network),
        *build_mistakes(env),
        *(() if is_local else mount_mistakes(env)),
        *(f"compute.{name}.efa: {text}" for name, compute in env.compute.items()
          if compute.efa is True and not is_local for text in efa_obstacles(compute, env.ami)),
        *_secret_mistakes(env.secrets),
        *prefix_mistakes(env.data),
        *_storage_mistakes(env.storage),
        *_tag_mistakes("tags", env.tags),
        *_budget_mistakes(env.budget, _inner(table, "budget")),
        *(f"compute.{name}{text}" for name, compute in env.compute.items()
          for text in _compute_mistakes(name, compute, _inner(table, "compute", name))),
        *(f"queues.{name}{text}" for name, queue in env.queues.items()
          for text in _queue_mistakes(name, queue, env, _inner(table, "queues", name))),
    ]  # fmt: skip


def _inner(table: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The table at a path of keys; an empty one if there is none."""
    for key in path:
        found = table.get(key)
        table = found if isinstance(found, Mapping) else {}
    return table


def _location_mistakes(env: Environment, is_local: bool) -> Iterator[str]:
    if is_local:
        if env.region or env.profile:
            yield "region: local is this machine: it has no region and no profile."
    elif not env.region:
        yield 'region: missing. For example region = "us-east-1".'
    elif not re.fullmatch(_REGION, env.region):
        yield f'region: found {env.region!r}. Expected a region such as "us-east-1".'
    if not is_local and env.usd_per_hour:
        yield "usd_per_hour: is the price of this machine: only for [env.local]."
    if is_local and (env.data or env.data_cache):
        yield "data, data_cache: are for AWS. This machine keeps copies of data sets by itself."
    if not is_local and env.endpoints:
        yield "endpoints: are for [env.local] only. In AWS, the SDKs know the services' addresses."
    yield from (f"endpoints.{mistake}" for mistake in endpoint_mistakes(env.endpoints))
    if env.ami not in ("build", "ecs-gpu") and not re.fullmatch(_AMI, env.ami):
        yield f'ami: found {env.ami!r}. Expected "build", "ecs-gpu" or an AMI\'s id, "ami-0123...".'


def _secret_mistakes(secrets: Iterable[str]) -> Iterator[str]:
    for arn in secrets:
        if not re.fullmatch(_SECRET, arn):
            yield (
                f"secrets: found {arn!r}. Expected the ARN of an SSM parameter or of a secret of "
                "Secrets Manager."
            )


def _network_mistakes(network: Network) -> Iterator[str]:
    match = re.fullmatch(_CIDR, network.cidr)
    if not match or any(int(part) > 255 for part in match.groups()[:4]):
        yield f"network.cidr: found {network.cidr!r}. Expected an IPv4 range of /16 to /22."
    for subnet in network.subnets:
        if not re.fullmatch(_SUBNET, subnet):
            yield f"network.subnets: found {subnet!r}. Expected ids like subnet-0123abcd."
    for group in network.security_groups:
        if not re.fullmatch(_GROUP, group):
            yield f"network.security_groups: found {group!r}. Expected ids like sg-0123abcd."
    if network.vpc and not re.fullmatch(_VPC, network.vpc):
        yield f"network.vpc: found {network.vpc!r}. Expected an id like vpc-0123abcd."
    if len({bool(network.vpc), bool(network.subnets), bool(network.security_groups)}) > 1:
        yield "network: vpc, subnets and security_groups go together: give all three or none."


def _storage_mistakes(storage: Storage) -> Iterator[str]:
    size = storage.size_gib
    if not size:
        yield f'storage.size: found {storage.size!r}. Expected a size such as "2400 GiB".'
    elif storage.workspace == "fsx-lustre" and size != 1200 and (size < 2400 or size % 2400):
        yield f"storage.size: found {storage.size!r}. FSx for Lustre has 1200 GiB, or n x 2400 GiB."


def _tag_mistakes(where: str, tags: Mapping[str, str]) -> Iterator[str]:
    if len(tags) > MAX_TAGS:
        yield f"{where}: {len(tags)} tags; at most {MAX_TAGS}."
    for key, value in tags.items():
        if not 1 <= len(key) <= 128 or len(value) > 256:
            yield f"{where}.{key}: a key has 1 to 128 characters, a value up to 256."
        elif key.lower().startswith(("aws:", "batchml")):
            yield f"{where}.{key}: tags that begin with {key.partition(':')[0]} are reserved."


def _budget_mistakes(budget: Budget | None, table: Mapping[str, Any]) -> Iterator[str]:
    if budget is not None:
        if "usd" not in table:
            yield "budget.usd: missing. Dollars a month, for example usd = 500."
        if not re.fullmatch(_EMAIL, budget.email):
            yield f"budget.email: found {budget.email!r}. Expected the address for warnings."


def _compute_mistakes(name: str, compute: Compute, table: Mapping[str, Any]) -> Iterator[str]:
    if not is_valid_name(name) or len(name) > 64:
        yield ": is not a valid name: up to 64 letters, digits, hyphens and underscores."
    if re.search(r"-r[0-9]+$", name):
        yield ": names that end like -r2 are reserved for replaced compute environments."
    if not compute.instance_types and not table.get("instance_types"):
        yield '.instance_types: missing. For example ["g5.xlarge", "g6.xlarge"].'
    for each in compute.instance_types:
        if not re.fullmatch(_INSTANCE, each):
            yield f'.instance_types: found {each!r}. Expected a type, "g5.xlarge", or family, "g5".'
    if compute.instance_types and len({is_arm_type(each) for each in compute.instance_types}) > 1:
        yield ".instance_types: Arm and x86 types cannot be mixed in one compute environment."
    yield from accelerator_mistakes(name, compute)
    if "max_vcpus" not in table:
        yield ".max_vcpus: missing. It limits the cost."
    elif compute.max_vcpus and compute.min_vcpus > compute.max_vcpus:
        yield f".min_vcpus: {compute.min_vcpus} is more than max_vcpus, {compute.max_vcpus}."
    yield from _instance_mistakes(compute)
    yield from _tag_mistakes(".tags", compute.tags)


def _instance_mistakes(compute: Compute) -> Iterator[str]:
    if compute.allocation_strategy in SPOT_STRATEGIES and not compute.spot:
        yield f".allocation_strategy: {compute.allocation_strategy} needs spot = true."
    if compute.spot and compute.allocation_strategy in ("BEST_FIT", "BEST_FIT_PROGRESSIVE"):
        yield (
            f".allocation_strategy: AWS has no {compute.allocation_strategy} for spot. Expected "
            f"one of {', '.join(SPOT_STRATEGIES)}."
        )
    if compute.bid_percentage is not None and not compute.spot:
        yield ".bid_percentage: needs spot = true."
    if compute.ami not in ("", "build", "ecs-gpu") and not re.fullmatch(_AMI, compute.ami):
        yield f'.ami: found {compute.ami!r}. Expected "build", "ecs-gpu" or an AMI\'s id.'
    if not 30 <= compute.disk_gib <= 16_384:
        yield f'.disk: found {compute.disk!r}. Expected "30 GiB" to "16384 GiB".'
    if compute.capacity_reservation and not re.fullmatch(
        _RESERVATION, compute.capacity_reservation
    ):
        yield (
            f".capacity_reservation: found {compute.capacity_reservation!r}. Expected a "
            'reservation\'s id ("cr-0123..."), a resource group\'s ARN, "open" or "none".'
        )
    if compute.capacity_reservation.startswith(("cr-", "arn:")) and compute.spot:
        yield ".capacity_reservation: reservations are for on-demand hosts. Remove spot = true."
    yield from _block_mistakes(compute)
    delay = compute.scale_down_minutes
    if parse_duration(compute.scale_down_delay) is None or (delay and not 20 <= delay <= 10_080):
        yield f'.scale_down_delay: found {compute.scale_down_delay!r}. Expected 0, "20m" to "7d".'
    if not 30 <= compute.stop_seconds <= 120:
        yield f'.stop_timeout: found {compute.stop_timeout!r}. Expected "30s" to "120s".'


def _block_mistakes(compute: Compute) -> Iterator[str]:
    """Settings that exclude a capacity block. Source: EC2 User Guide, "Capacity Blocks for ML"."""
    if not compute.capacity_block:
        return
    if not re.fullmatch(_BLOCK, compute.capacity_block):
        yield (
            f".capacity_block: found {compute.capacity_block!r}. Expected the id of its "
            'reservation, "cr-0123...".'
        )
    if compute.spot:
        yield ".capacity_block: is paid in advance. Remove spot = true."
    if compute.capacity_reservation:
        yield ".capacity_block: excludes capacity_reservation. Remove that."
    if len(compute.instance_types) > 1 or "." not in "".join(compute.instance_types):
        yield (
            ".capacity_block: has hosts of one type. Name that type in instance_types, such as "
            '"p5.48xlarge".'
        )
    if compute.allocation_strategy not in ("", "BEST_FIT"):
        yield (
            f".allocation_strategy: found {compute.allocation_strategy}. A capacity_block needs "
            "BEST_FIT."
        )


def _queue_mistakes(
    name: str, queue: Queue, env: Environment, table: Mapping[str, Any]
) -> Iterator[str]:
    if not is_valid_name(name) or len(name) > 64:
        yield ": is not a valid name: up to 64 letters, digits, hyphens and underscores."
    is_list = isinstance(table.get("compute", []), list | tuple)
    if is_list and not 1 <= len(queue.compute) <= MAX_ENVIRONMENTS:
        count = len(queue.compute)
        yield f".compute: has {count} compute environments. Expected 1 to {MAX_ENVIRONMENTS}."
    for each in sorted(set(queue.compute) - set(env.compute)):
        yield f".compute: there is no compute.{each}.{did_you_mean(each, env.compute)}"
    if len(set(queue.compute)) < len(queue.compute):
        yield ".compute: a compute environment is named twice."
    known = [env.compute[each] for each in queue.compute if each in env.compute]
    if len({compute.is_arm for compute in known}) > 1:
        yield ".compute: Arm and x86 compute environments cannot be in one queue."
    if len({compute.has_neurons for compute in known}) > 1:
        yield (
            ".compute: AWS Batch does not count Neuron chips, and would start runs that need them "
            "on the other hosts of the queue. Make one queue for each kind."
        )
    for key, text in queue.time_limits.items():
        seconds = parse_duration(text)
        if key not in TIME_LIMITS:
            yield f".time_limits.{key}: unknown key. Known: {', '.join(TIME_LIMITS)}."
        elif seconds is None or (seconds and not 600 <= seconds <= 86_400):
            yield f'.time_limits.{key}: found {text!r}. Expected "10m" to "24h", or 0 for no limit.'
    if queue.fair_share is not None:
        yield from (f".fair_share{text}" for text in _share_mistakes(queue.fair_share))


def _share_mistakes(policy: FairShare) -> Iterator[str]:
    decay = parse_duration(policy.decay)
    if decay is None or decay > 604_800:
        yield f'.decay: found {policy.decay!r}. Expected up to "7d".'
    for share, weight in policy.shares.items():
        if not re.fullmatch(_SHARE, share):
            yield (
                f".shares: {share!r} is not a share identifier, which has letters, digits and "
                "perhaps * at its end."
            )
        if not 0.0011 <= weight <= 9999:  # AWS's limits for its inverse
            yield f".shares.{share}: found {weight}. Expected 0.0011 to 9999."
