"""What a run of several nodes needs of its environment: hosts that stay, and our runtime."""

from typing import TYPE_CHECKING

from batchml.errors import AccessError, ConfigError
from batchml.runtime.protocol.launch import TORCHRUN

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.job import JobSpec


def check_nodes(
    place: "Place", spec: "JobSpec", queue: str, *, has_runtime: bool, asks: bool
) -> None:
    """Raise ConfigError, with all mistakes, for a run that could not do what it is to do.

    `has_runtime`: its image was built by batchml. `asks`: AWS may be asked about a queue that
    batchml.toml does not describe, in two calls.
    """
    mistakes = []
    if spec.launch.kind != "plain" and not has_runtime:
        mistakes.append(
            f'launch.kind: "{spec.launch.kind}" needs the runtime of an image that batchml built, '
            f"and {spec.image} is none. Name a folder below images/ whose Dockerfile builds on one."
        )
    if spec.launch.kind == TORCHRUN:
        mistakes += _bad_command(spec)
    if spec.nodes > 1:
        spot = _spot_pools(place, queue, asks)
        if spot:
            mistakes.append(_refusal(place, spec, queue, spot))
    if mistakes:
        raise ConfigError(spec.name, mistakes)


def _bad_command(spec: "JobSpec") -> list[str]:
    """What the supervisor of the ranks would refuse on every node: flags of torchrun."""
    from batchml.runtime.nodes.torchrun.settings import BadCommand, rank_command

    try:
        rank_command(spec.argv(), spec.nodes, lambda name: name)
    except BadCommand as error:
        return [f"command: {error}."]
    return []


def _spot_pools(place: "Place", queue: str, asks: bool) -> list[str]:
    """The spot compute environments of a queue, by the names that batchml.toml has for them.

    One is enough: AWS Batch may choose it, and nodes of one job are never placed there. Source: AWS
    Batch User Guide, "Multi-node parallel jobs".
    """
    environment = place.settings.environment
    if queue in environment.queues:
        names = environment.queues[queue].compute
        return [name for name in names if environment.compute[name].spot]
    if not asks:
        return []
    from batchml.aws.batch.hosts import pools

    try:
        found = pools(place.connect()).get(place.queue(queue), ())
    except AccessError:  # who may submit there need not be allowed to ask what it is made of
        return []
    return [pool.name for pool in found if pool.spot]


def _refusal(place: "Place", spec: "JobSpec", queue: str, spot: list[str]) -> str:
    environment = place.settings.environment
    steady = [
        name
        for name, each in environment.queues.items()
        if not any(environment.compute[part].spot for part in each.compute)
    ]
    other = (
        f"Take --queue {' or --queue '.join(steady)}"
        if steady
        else "Make a queue of on-demand compute environments alone in batchml.toml, then batchml "
        "setup"
    )
    return (
        f"nodes: {spec.nodes} on the queue {queue}, whose {', '.join(spot)} is of spot instances: "
        f"AWS Batch runs multi-node jobs on on-demand instances alone. {other}. Where only part of "
        f'the work may be lost at any time, [[groups]] with launch.kind = "ray" keep a head '
        f"on-demand and its workers on spot."
    )
