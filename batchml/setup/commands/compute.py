"""batchml compute list, create, update, score, delete and hosts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from batchml.aws.batch.resources import neuron_image_of
from batchml.aws.ec2 import newest_neuron_image
from batchml.aws.naming import NEURON_IMAGE
from batchml.cli.app import command_group
from batchml.cli.options import Env, Json, open_context, read_seconds
from batchml.cli.output import confirm, print_json, print_line, say
from batchml.cli.terminal import screen
from batchml.cluster.service import HostPrices, open_poller
from batchml.cluster.snapshot import ClusterSnapshot
from batchml.cluster.tables import (
    compute_json,
    host_json,
    host_lines,
    missing_line,
    total_json,
    total_line,
)
from batchml.config.environments import read_compute
from batchml.context import Context
from batchml.cost.capacity import ask_scores
from batchml.errors import UsageError
from batchml.model.environment import Compute
from batchml.setup.commands.capacity import (
    print_scores,
    read_question,
    read_warm_columns,
    report_cost,
    warm_hosts,
)
from batchml.setup.commands.shared import (
    Enable,
    Name,
    Yes,
    compute_api,
    compute_order,
    create_resources,
    delete_resource,
    described_environment,
    drop_none,
    find_resource,
    override,
    print_table,
    refuse_existing,
    report_update,
)
from batchml.setup.images import (
    JOB_MINUTES,
    MAX_JOB_MINUTES,
    check_refresh,
    describe_refresh,
    has_newest_images,
    newer_image_lines,
    own_details,
    refresh_members,
)

compute_app = command_group(
    "compute",
    "Manage compute environments: the hosts that jobs run on.",
    "batchml compute list",
)

MinVcpus = Annotated[
    int | None,
    typer.Option(metavar="N", help="Keep, and pay, this number of vCPUs even without jobs."),
]
MaxVcpus = Annotated[
    int | None, typer.Option(metavar="N", help="Limit the vCPUs, and so the cost.")
]
Types = Annotated[
    list[str] | None,
    typer.Option(
        "--instance-type", metavar="TYPE", help="Use this type or family. May be repeated."
    ),
]
ScaleDownDelay = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Keep idle instances for this time: 20m to 7d, or 0."),
]


@compute_app.command("list", epilog="Example: batchml compute list --env dev")
def compute_list(env: Env = None, json_: Json = False) -> None:
    """List the compute environments with their limits and state."""
    context = open_context(env)
    details = compute_api(context).environments()
    warm = read_warm_columns(context, details)
    if json_:
        return print_json([{**each, **warm.json(name)} for name, each in details.items()])
    machine_vcpus = 0
    if context.settings.is_local:  # where all compute environments share this machine
        total = open_poller(context).poll(with_usage=False).total
        machine_vcpus = round(total.resources.vcpus)
    rows = [
        ["NAME", "STATE", "STATUS", "KIND", "INSTANCES", "VCPUS MIN/NOW/MAX", *warm.heads, "REASON"]
    ]
    for name, detail in sorted(details.items()):
        resources = detail.get("computeResources", {})
        limits = [resources.get(key, 0) for key in ("minvCpus", "desiredvCpus", "maxvCpus")]
        limits[1] = min(machine_vcpus or limits[1], limits[2])
        rows.append(
            [
                context.bare(name),
                detail["state"],
                detail.get("status", ""),
                resources.get("type", detail.get("type", "")),
                ", ".join(resources.get("instanceTypes", ())),
                "{}/{}/{}".format(*limits),
                *warm.cells(name),
                "" if detail.get("status") == "VALID" else detail.get("statusReason", ""),
            ]
        )
    print_table(rows, "No compute environments. `batchml setup` makes them.")
    for line in warm.lines():
        say(line)
    for line in newer_image_lines(own_details(details, context.env), context.env):
        say(line)


@compute_app.command("create", epilog="Example: batchml compute create gpu --max-vcpus 64")
def compute_create(
    name: Name,
    instance_type: Types = None,
    max_vcpus: MaxVcpus = None,
    min_vcpus: MinVcpus = None,
    spot: Annotated[bool | None, typer.Option("--spot", help="Use spot instances.")] = None,
    allocation_strategy: Annotated[
        str | None,
        typer.Option(
            metavar="STRATEGY", help="Use this strategy of AWS Batch; default: the recommended one."
        ),
    ] = None,
    bid_percentage: Annotated[
        int | None,
        typer.Option(
            metavar="PERCENT", help="Limit spot prices to this part of the on-demand price."
        ),
    ] = None,
    ami: Annotated[
        str | None,
        typer.Option(
            metavar="AMI", help="Start this AMI: build, ecs-gpu or ami-0123456789abcdef0."
        ),
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Give each instance this disk: "100 GiB".')
    ] = None,
    placement_group: Annotated[
        str | None, typer.Option(metavar="GROUP", help='Use this group; "cluster": create one.')
    ] = None,
    capacity_reservation: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Use this reservation: its id, a resource group's ARN, open or none."
        ),
    ] = None,
    capacity_block: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Use this capacity block: cr-0123456789abcdef0."),
    ] = None,
    scale_down_delay: ScaleDownDelay = None,
    stop_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Wait this time from the stop signal to the kill: 30s to 120s."
        ),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Create a compute environment.

    Without flags, create it as batchml.toml describes it. `setup` does not delete it.
    """
    context = open_context(env)
    table = drop_none(
        instance_types=instance_type, max_vcpus=max_vcpus, min_vcpus=min_vcpus, spot=spot,
        allocation_strategy=allocation_strategy, bid_percentage=bid_percentage, ami=ami, disk=disk,
        placement_group=placement_group, capacity_reservation=capacity_reservation,
        capacity_block=capacity_block,
        scale_down_delay=scale_down_delay, stop_timeout=stop_timeout,
    )  # fmt: skip
    described = described_environment(context).compute.get(name)
    compute = read_compute(name, override(described, table), f"compute create {name}")
    refuse_existing(context, "compute", name, compute_api(context).environments())
    create_resources(context, {name: compute}, {}, json_)


@compute_app.command("update", epilog="Example: batchml compute update gpu --max-vcpus 128")
def compute_update(
    name: Name,
    instance_type: Types = None,
    max_vcpus: MaxVcpus = None,
    min_vcpus: MinVcpus = None,
    warm: Annotated[
        int | None,
        typer.Option(metavar="HOSTS", help="Set --min-vcpus to the vCPUs of this number of hosts."),
    ] = None,
    scale_down_delay: ScaleDownDelay = None,
    enable: Enable = None,
    refresh: Annotated[
        bool,
        typer.Option("--refresh", help="Replace the hosts, to get AWS's newest AMI."),
    ] = False,
    job_time: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="With --refresh: let runs finish for this time: 1m to 5d; default: 30m.",
        ),
    ] = None,
    yes: Yes = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Change a compute environment now. If setup made it, the next setup changes it back.

    Hosts that --warm keeps cost money without jobs: their price is printed, and the command that
    ends them.

    New types and --refresh replace the instances; other changes disturb no run. For other
    properties, such as the disk, change batchml.toml and run setup.
    """
    minutes = _job_minutes(job_time, refresh)
    context = open_context(env)
    aws_name, detail = find_resource(
        context, name, "Compute environment", compute_api(context).environments()
    )
    if warm is not None:
        min_vcpus = warm_hosts(context, warm, min_vcpus, detail)
    table = drop_none(
        instance_types=instance_type, max_vcpus=max_vcpus, min_vcpus=min_vcpus,
        scale_down_delay=scale_down_delay,
    )  # fmt: skip
    if refresh:
        check_refresh(name, detail, is_local=context.settings.is_local)
    if not table and enable is None and not refresh:
        raise UsageError("Nothing to change was given: see batchml compute update --help.")
    neuron_image = ""
    if refresh and neuron_image_of(detail):
        neuron_image = newest_neuron_image(context.connect())
    is_newest = has_newest_images(detail) or neuron_image == neuron_image_of(detail) != ""
    if refresh and not table and enable is None and is_newest:
        say(f"{name} already has the newest AMI. Nothing was changed.")
        if json_:
            print_json(detail)
        return
    checked = _checked(name, detail, table)
    request: dict[str, Any] = {"computeEnvironment": aws_name}
    if enable is not None:
        request["state"] = "ENABLED" if enable else "DISABLED"
    if table:
        request["computeResources"] = _resources(checked, table)
    if refresh:
        _add_refresh(request, name, detail, minutes, yes, neuron_image)
    compute_api(context).update_environment(request)
    if neuron_image:
        compute_api(context).tag(detail["computeEnvironmentArn"], {NEURON_IMAGE: neuron_image})
    report_update(context, "compute environment", request, json_)
    if table:
        report_cost(context, name, detail, checked, table)


def _job_minutes(job_time: str | None, refresh: bool) -> int:
    """The minutes that runs have to finish at a refresh. Raises UsageError."""
    seconds = read_seconds(job_time, "--job-time")
    if seconds is None:
        return JOB_MINUTES
    if not refresh:
        raise UsageError("--job-time is only for --refresh.")
    if not 60 <= seconds <= MAX_JOB_MINUTES * 60:
        raise UsageError(f"--job-time {job_time}: write a time from 1m to 5d.")
    return seconds // 60


def _add_refresh(
    request: dict[str, Any],
    name: str,
    detail: Mapping[str, Any],
    minutes: int,
    yes: bool,
    neuron_image: str,
) -> None:
    """Add a refresh to an UpdateComputeEnvironment request, if the user agrees."""
    for line in describe_refresh(name, detail, minutes):
        say(line)
    if not confirm("Refresh it? [y/N]", "--yes", yes=yes):
        say("Nothing was changed.")
        raise typer.Exit(1)
    added = refresh_members(minutes, detail, neuron_image)
    resources = {**request.get("computeResources", {}), **added.pop("computeResources")}
    request.update(added, computeResources=resources)


def _checked(name: str, detail: Mapping[str, Any], table: Mapping[str, Any]) -> Compute:
    """The compute environment after the change. Raises ConfigError."""
    resources = detail.get("computeResources", {})
    present = {
        "instance_types": list(resources.get("instanceTypes", ())) or ["g5"],
        "max_vcpus": resources.get("maxvCpus", 0),
        "min_vcpus": resources.get("minvCpus", 0),
    }
    return read_compute(name, {**present, **table}, f"compute update {name}")


def _resources(checked: Compute, named: Iterable[str]) -> dict[str, Any]:
    """`computeResources` of UpdateComputeEnvironment, with only the named options."""
    scaling_policy = {"minScaleDownDelayMinutes": checked.scale_down_minutes}
    members = {
        "instance_types": ("instanceTypes", list(checked.instance_types)),
        "max_vcpus": ("maxvCpus", checked.max_vcpus),
        "min_vcpus": ("minvCpus", checked.min_vcpus),
        "scale_down_delay": ("scalingPolicy", scaling_policy),
    }
    return dict(members[key] for key in named)


@compute_app.command("score", epilog="Example: batchml compute score --instances 8")
def compute_score(
    instance_type: Types = None,
    instances: Annotated[
        int | None, typer.Option(metavar="N", help="Score this number of hosts.")
    ] = None,
    vcpus: Annotated[
        int | None, typer.Option(metavar="N", help="Score this number of vCPUs instead.")
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(metavar="REGION", help="Score only this region. May be repeated."),
    ] = None,
    single_az: Annotated[
        bool, typer.Option("--single-az", help="Score zones: all hosts in one zone.")
    ] = False,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Score how likely each region has spot hosts now, 1 to 10, with their price.

    Works without an environment. With one in batchml.toml it uses its types and profile.
    """
    types, regions = tuple(instance_type or ()), tuple(region or ())
    context = open_context(env)
    question = read_question(context, types, instances, vcpus, regions, single_az)
    print_scores(question, ask_scores(context, question), json_=json_)


@compute_app.command("delete", epilog="Example: batchml compute delete gpu --yes")
def compute_delete(name: Name, yes: Yes = False, env: Env = None, json_: Json = False) -> None:
    """Delete a compute environment that no queue uses, with its launch template."""
    context = open_context(env)
    api = compute_api(context)
    aws_name, detail = find_resource(context, name, "Compute environment", api.environments())
    users = [
        queue for queue, each in api.queues().items()
        if detail["computeEnvironmentArn"] in compute_order(each)
    ]  # fmt: skip
    if users:
        names = ", ".join(context.bare(queue) for queue in users)
        raise UsageError(
            f"Compute environment {name} is used by: {names}. First give these queues another one "
            f"(batchml queue update NAME --compute OTHER), or delete them."
        )
    delete_resource(context, "compute environment", aws_name, yes, json_)


# --- hosts ----------------------------------------------------------------------------------


@compute_app.command("hosts", epilog="Example: batchml compute hosts gpu")
def compute_hosts(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Compute environments; default: all."),
    ] = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """List the hosts with their state, used resources, price and runs.

    States are those of sinfo: allocated, mixed, idle, draining, starting, down. CPU and GPU are
    reported by runs. Prices come from AWS, for spot hosts in the dearest zone.
    """
    context = open_context(env)
    snapshot = _select(context, open_poller(context).poll(), names or ())
    snapshot = HostPrices(context).add_to(snapshot)
    if json_:
        return print_json(_json(snapshot))
    lines = host_lines(snapshot, screen(), len(snapshot.hosts or ()))
    ends = [line for line in (total_line(snapshot), missing_line(snapshot)) if line]
    print_line("\n".join([*lines, *([""] if lines and ends else []), *ends]))


def _select(context: Context, snapshot: ClusterSnapshot, names: Sequence[str]) -> ClusterSnapshot:
    """The part of a snapshot with these compute environments. Raises NotFound."""
    if not names:
        return snapshot
    known: dict[str, dict[str, Any]] = {row.state.name: {} for row in snapshot.computes}
    chosen = {find_resource(context, name, "Compute environment", known)[0] for name in names}
    hosts = snapshot.hosts
    return replace(
        snapshot,
        computes=tuple(row for row in snapshot.computes if row.state.name in chosen),
        hosts=hosts and tuple(row for row in hosts if chosen.intersection(row.computes)),
    )


def _json(snapshot: ClusterSnapshot) -> dict[str, Any]:
    hosts = snapshot.hosts
    return {
        "total": total_json(snapshot),
        "computeEnvironments": [compute_json(row) for row in snapshot.computes],
        "hosts": None if hosts is None else [host_json(row) for row in hosts],
        "missing": list(snapshot.missing),
    }
