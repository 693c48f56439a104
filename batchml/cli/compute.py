"""compute list, create, update, score, delete."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json, say
from batchml.cli.single import (
    Enable,
    Name,
    Yes,
    bare,
    compute_api,
    described_environment,
    find_one,
    given,
    make,
    print_table,
    refuse_existing,
    say_settled,
    table_of,
    unmake,
    used,
)
from batchml.cli.warmth import say_kept, warm_hosts, warmth
from batchml.errors import UsageError

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.environment import Compute

compute_app = command_group(
    "compute",
    "Compute environments: the machines that jobs run on.",
    "batchml compute list",
)

MinVcpus = Annotated[int | None, typer.Option(help="Kept running, and paid, without jobs.")]
MaxVcpus = Annotated[int | None, typer.Option(help="Never more: it bounds what this can cost.")]
Types = Annotated[
    list[str] | None, typer.Option("--instance-type", help="A type or family. May be repeated.")
]
ScaleDownDelay = Annotated[
    str | None, typer.Option(help="How long an idle instance is kept: 20m to 7d, or 0.")
]


@compute_app.command("list", epilog="Example: batchml compute list --env dev")
def compute_list(env: Env = None, json_: Json = False) -> None:
    """List the compute environments with what they may grow to and how they are."""
    from batchml.cli.wiring import open_place

    place = open_place(env)
    found = compute_api(place).environments()
    kept, here = warmth(place, found), _vcpus_here(place)
    if json_:
        return print_json([{**each, **kept.json(name)} for name, each in found.items()])
    rows = [
        ["NAME", "STATE", "STATUS", "KIND", "INSTANCES", "VCPUS MIN/NOW/MAX", *kept.heads, "REASON"]
    ]
    for name, detail in sorted(found.items()):
        resources = detail.get("computeResources", {})
        limits = [resources.get(key, 0) for key in ("minvCpus", "desiredvCpus", "maxvCpus")]
        limits[1] = min(here or limits[1], limits[2])
        rows.append(
            [
                bare(place, name),
                detail["state"],
                detail.get("status", ""),
                resources.get("type", detail.get("type", "")),
                ", ".join(resources.get("instanceTypes", ())),
                "{}/{}/{}".format(*limits),
                *kept.cells(name),
                "" if detail.get("status") == "VALID" else detail.get("statusReason", ""),
            ]
        )
    print_table(rows, "No compute environments. `batchml setup` makes them.")
    for line in kept.lines():
        say(line)


def _vcpus_here(place: "Place") -> int:
    """On `local` those of this machine, which every environment has; 0 elsewhere."""
    if not place.settings.is_local:
        return 0
    from batchml.client.cluster import poller

    return round(poller(place).look(with_usage=False).total.room.vcpus)


@compute_app.command("create", epilog="Example: batchml compute create gpu --max-vcpus 64")
def compute_create(
    name: Name,
    instance_type: Types = None,
    max_vcpus: MaxVcpus = None,
    min_vcpus: MinVcpus = None,
    spot: Annotated[bool | None, typer.Option("--spot", help="Spot instances.")] = None,
    allocation_strategy: Annotated[
        str | None, typer.Option(help="AWS Batch's word. The recommended one unless given.")
    ] = None,
    bid_percentage: Annotated[
        int | None, typer.Option(help="Of spot: at most so much of the on-demand price.")
    ] = None,
    ami: Annotated[str | None, typer.Option(help="build, ecs-gpu or ami-0123...")] = None,
    disk: Annotated[str | None, typer.Option(help='Of each instance: "100 GiB".')] = None,
    placement_group: Annotated[
        str | None, typer.Option(help='"cluster": a new one; else the name of one.')
    ] = None,
    capacity_reservation: Annotated[
        str | None, typer.Option(help="cr-0123..., a resource group's ARN, open or none.")
    ] = None,
    capacity_block: Annotated[
        str | None, typer.Option(help="cr-0123...: hosts paid for a span of time.")
    ] = None,
    scale_down_delay: ScaleDownDelay = None,
    stop_timeout: Annotated[
        str | None, typer.Option(help="From the stop signal to the kill: 30s to 120s.")
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Create a compute environment.

    Without flags, the one that batchml.toml describes. What is made here is not touched by setup.
    """
    from batchml.cli.wiring import open_place
    from batchml.model.description import read_compute

    place = open_place(env)
    table = given(
        instance_types=instance_type, max_vcpus=max_vcpus, min_vcpus=min_vcpus, spot=spot,
        allocation_strategy=allocation_strategy, bid_percentage=bid_percentage, ami=ami, disk=disk,
        placement_group=placement_group, capacity_reservation=capacity_reservation,
        capacity_block=capacity_block,
        scale_down_delay=scale_down_delay, stop_timeout=stop_timeout,
    )  # fmt: skip
    described = described_environment(place).compute.get(name)
    if described is not None and not table:
        compute = described
    else:
        table = {**(table_of(described) if described else {}), **table}
        compute = read_compute(name, table, f"compute create {name}")
    refuse_existing(place, "compute", name, compute_api(place).environments())
    make(place, {name: compute}, {}, json_)


@compute_app.command("update", epilog="Example: batchml compute update gpu --max-vcpus 128")
def compute_update(
    name: Name,
    instance_type: Types = None,
    max_vcpus: MaxVcpus = None,
    min_vcpus: MinVcpus = None,
    warm: Annotated[
        int | None, typer.Option(metavar="HOSTS", help="--min-vcpus, as hosts of its first type.")
    ] = None,
    scale_down_delay: ScaleDownDelay = None,
    enable: Enable = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Change a compute environment now. What setup made, setup changes back.

    What is kept warm is paid without jobs: its price, and how to end it, are said.

    Other types replace its instances; the rest is felt by none. For what is not here, such as the
    disk, change batchml.toml and run setup.
    """
    from batchml.cli.wiring import open_place

    place = open_place(env)
    there, detail = find_one(place, name, "Compute environment", compute_api(place).environments())
    if warm is not None:
        min_vcpus = warm_hosts(place, warm, min_vcpus, detail)
    table = given(
        instance_types=instance_type, max_vcpus=max_vcpus, min_vcpus=min_vcpus,
        scale_down_delay=scale_down_delay,
    )  # fmt: skip
    if not table and enable is None:
        raise UsageError("Nothing to change was given: see batchml compute update --help.")
    checked = _checked(name, detail, table)
    request: dict[str, Any] = {"computeEnvironment": there}
    if enable is not None:
        request["state"] = "ENABLED" if enable else "DISABLED"
    if table:
        request["computeResources"] = _resources(checked, table)
    compute_api(place).update_environment(request)
    say_settled(place, "compute environment", request, json_)
    if table:
        say_kept(place, name, there, detail, checked, table)


def _checked(name: str, detail: Mapping[str, Any], table: Mapping[str, Any]) -> "Compute":
    """What the environment is to be. Raises ConfigError."""
    from batchml.model.description import read_compute

    resources = detail.get("computeResources", {})
    known = {
        "instance_types": list(resources.get("instanceTypes", ())) or ["g5"],
        "max_vcpus": resources.get("maxvCpus", 0),
        "min_vcpus": resources.get("minvCpus", 0),
    }
    return read_compute(name, {**known, **table}, f"compute update {name}")


def _resources(checked: "Compute", named: Iterable[str]) -> dict[str, Any]:
    """Of UpdateComputeEnvironment, what was named of them."""
    values = {
        "instance_types": ("instanceTypes", list(checked.instance_types)),
        "max_vcpus": ("maxvCpus", checked.max_vcpus),
        "min_vcpus": ("minvCpus", checked.min_vcpus),
        "scale_down_delay": (
            "scalingPolicy",
            {"minScaleDownDelayMinutes": checked.scale_down_minutes},
        ),
    }
    return dict(values[key] for key in named)


@compute_app.command("score", epilog="Example: batchml compute score --instances 8")
def compute_score(
    instance_type: Types = None,
    instances: Annotated[int | None, typer.Option(metavar="N", help="So many hosts.")] = None,
    vcpus: Annotated[int | None, typer.Option(metavar="N", help="Or so many vCPUs.")] = None,
    region: Annotated[
        list[str] | None, typer.Option(help="May be repeated; all of them unless given.")
    ] = None,
    single_az: Annotated[
        bool, typer.Option("--single-az", help="Score zones: all hosts in one of them.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Score where spot hosts can be had now, 1 to 10, with their price.

    Works before there is an environment. Of one in batchml.toml it takes the types and the profile.
    """
    from batchml.cli.scores import show_scores
    from batchml.cli.wiring import open_place

    wanted = (tuple(instance_type or ()), instances, vcpus, tuple(region or ()), single_az)
    show_scores(open_place(env), *wanted, json_=json_)


@compute_app.command("delete", epilog="Example: batchml compute delete gpu --yes")
def compute_delete(name: Name, yes: Yes = False, env: Env = None, json_: Json = False) -> None:
    """Delete a compute environment that no queue uses, with its launch template."""
    from batchml.cli.wiring import open_place

    place = open_place(env)
    api = compute_api(place)
    there, detail = find_one(place, name, "Compute environment", api.environments())
    users = [
        queue for queue, each in api.queues().items()
        if detail["computeEnvironmentArn"] in used(each)
    ]  # fmt: skip
    if users:
        names = ", ".join(bare(place, queue) for queue in users)
        raise UsageError(
            f"Compute environment {name} is used by: {names}. Give those others first "
            f"(batchml queue update NAME --compute OTHER), or delete them."
        )
    unmake(place, "compute environment", there, yes, json_)
