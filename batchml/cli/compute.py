"""compute list, create, update, delete."""

from typing import Annotated, Any

import typer

from batchml.cli.app import command_group
from batchml.cli.flags import Env, Json
from batchml.cli.output import print_json
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
from batchml.errors import UsageError

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
    if json_:
        return print_json(list(found.values()))
    rows = [["NAME", "STATE", "STATUS", "KIND", "INSTANCES", "VCPUS MIN/NOW/MAX", "REASON"]]
    for name, detail in sorted(found.items()):
        resources = detail.get("computeResources", {})
        limits = [resources.get(key, 0) for key in ("minvCpus", "desiredvCpus", "maxvCpus")]
        rows.append(
            [
                bare(place, name),
                detail["state"],
                detail.get("status", ""),
                resources.get("type", detail.get("type", "")),
                ", ".join(resources.get("instanceTypes", ())),
                "{}/{}/{}".format(*limits),
                "" if detail.get("status") == "VALID" else detail.get("statusReason", ""),
            ]
        )
    print_table(rows, "No compute environments. `batchml setup` makes them.")


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
    scale_down_delay: ScaleDownDelay = None,
    enable: Enable = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Change a compute environment now. What setup made, setup changes back.

    Other types replace its instances; the rest is felt by none. For what is not here, such as the
    disk, change batchml.toml and run setup.
    """
    from batchml.cli.wiring import open_place
    from batchml.model.description import read_compute
    from batchml.model.environment import Compute

    place = open_place(env)
    there, detail = find_one(place, name, "Compute environment", compute_api(place).environments())
    table = given(
        instance_types=instance_type, max_vcpus=max_vcpus, min_vcpus=min_vcpus,
        scale_down_delay=scale_down_delay,
    )  # fmt: skip
    if not table and enable is None:
        raise UsageError("Nothing to change was given: see batchml compute update --help.")
    resources = detail.get("computeResources", {})
    known = {
        "instance_types": list(resources.get("instanceTypes", ())) or ["g5"],
        "max_vcpus": resources.get("maxvCpus", 0),
        "min_vcpus": resources.get("minvCpus", 0),
    }
    checked: Compute = read_compute(name, {**known, **table}, f"compute update {name}")
    values = {
        "instance_types": ("instanceTypes", list(checked.instance_types)),
        "max_vcpus": ("maxvCpus", checked.max_vcpus),
        "min_vcpus": ("minvCpus", checked.min_vcpus),
        "scale_down_delay": (
            "scalingPolicy",
            {"minScaleDownDelayMinutes": checked.scale_down_minutes},
        ),
    }
    request: dict[str, Any] = {"computeEnvironment": there}
    if enable is not None:
        request["state"] = "ENABLED" if enable else "DISABLED"
    if table:
        request["computeResources"] = dict(values[key] for key in table)
    compute_api(place).update_environment(request)
    say_settled(place, "compute environment", request, json_)


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
