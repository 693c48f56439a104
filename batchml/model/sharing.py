"""Environments that share one workspace: `[env.X.storage] shared_with = "dev"`.

X works in the file system and the network of `dev`, and has a bucket, roles and queues of its own
(`docs/decisions/032-sharing.md`). Once read, X makes neither a network nor a file system.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from batchml.errors import did_you_mean
from batchml.model.environment import LOCAL, Environment, Network

_OWN_KEYS = ("workspace", "size", "throughput")  # of `storage`: they are those of the other


class Borrowed(Network, frozen=True):
    """The network of the environment that a workspace is shared with: nothing of it is made here.

    Its subnets and groups are in the outputs of that environment's stacks.
    """

    @property
    def is_given(self) -> bool:
        return True


def sharing_mistakes(
    name: str, table: Mapping[str, Any], environments: Mapping[str, Environment]
) -> Iterator[str]:
    """What is wrong with an environment's `shared_with`, each as `key: text`."""
    env = environments[name]
    where, other = "storage.shared_with", env.storage.shared_with
    if not other:
        return
    if name == LOCAL:
        yield f"{where}: local has one workspace for all that is on this machine: take it out."
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
            yield f"storage.{key}: the workspace is that of {other}, which says it: take it out."
    if table.get("network"):
        yield f"network: a shared workspace is in the network of {other}: take it out."


def _unlike(env: Environment, owner: Environment, other: str) -> Iterator[str]:
    where = "storage.shared_with"
    if owner.storage.shared_with:
        yield f"{where}: {other} has no workspace of its own: name {owner.storage.shared_with!r}."
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
    """The environments, those that share a workspace as what they make themselves."""
    return {name: _resolved(env, environments) for name, env in environments.items()}


def _resolved(env: Environment, environments: Mapping[str, Environment]) -> Environment:
    owner = environments.get(env.storage.shared_with)
    if owner is None or not env.storage.shared_with:
        return env
    network = owner.network if owner.network.is_given else Borrowed()
    return replace(env, storage=replace(env.storage, workspace="none"), network=network)


def sharers(owner: str, environments: Mapping[str, Environment]) -> tuple[str, ...]:
    """The environments of a file that work in the workspace of `owner`."""
    return tuple(name for name, env in environments.items() if env.storage.shared_with == owner)
