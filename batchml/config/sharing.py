"""Environments that share a workspace: `[env.X.storage] shared_with = "dev"`.

X uses the file system and the network of `dev`, and has a bucket, roles and queues of its own
(`docs/decisions/032-sharing.md`). After reading, X has neither a network nor a file system to
create.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from batchml.errors import did_you_mean
from batchml.model.environment import LOCAL, Environment, Network

_OWN_KEYS = ("workspace", "size", "throughput")  # of `storage`: only the owner may set them


class SharedNetwork(Network, frozen=True):
    """The network of the workspace's owner.

    Its subnets and security groups are outputs of the owner's stacks.
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
    yield from _unlike(env, environments[other], other)
    given = table.get("storage")
    for key in _OWN_KEYS:
        if isinstance(given, Mapping) and key in given:
            yield f"storage.{key}: {other} owns the workspace and sets it. Remove the key."
    if table.get("network"):
        yield f"network: a shared workspace is in the network of {other}. Remove the table."


def _unlike(env: Environment, owner: Environment, other: str) -> Iterator[str]:
    where = "storage.shared_with"
    if owner.storage.shared_with:
        owners = owner.storage.shared_with
        yield f"{where}: {other} has no workspace of its own: it shares that of {owners!r}."
    elif owner.storage.workspace == "none":
        yield f'{where}: {other} has no workspace (workspace = "none").'
    if env.region != owner.region:
        yield (
            f"{where}: {other} is in {owner.region}, this one in {env.region}. A file system is "
            "shared within one region."
        )
    if env.profile != owner.profile:
        yield (
            f"{where}: profile is {env.profile!r} here and {owner.profile!r} in {other}. A file "
            "system is shared within one account."
        )


def with_sharing(environments: Mapping[str, Environment]) -> dict[str, Environment]:
    """The environments. Those that share a workspace keep only the resources that they create."""
    return {name: _resolved(env, environments) for name, env in environments.items()}


def _resolved(env: Environment, environments: Mapping[str, Environment]) -> Environment:
    owner = environments.get(env.storage.shared_with)
    if owner is None or not env.storage.shared_with:
        return env
    network = owner.network if owner.network.is_given else SharedNetwork()
    return replace(env, storage=replace(env.storage, workspace="none"), network=network)
