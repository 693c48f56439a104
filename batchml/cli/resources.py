"""compute and queue: list, create, update, delete. The single resources of an environment.

They are made by the same plan as `setup` makes, of one thing alone.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchml.cli.app import app
from batchml.cli.flags import Env, Json, read_pairs
from batchml.cli.output import print_json, print_line, say
from batchml.errors import NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchml.cli.wiring import Place
    from batchml.model.environment import Compute, Queue

compute_app = typer.Typer(
    help="Compute environments: the machines that jobs run on.",
    epilog="Example: batchml compute list",
    no_args_is_help=True,
    rich_markup_mode=None,
)
queue_app = typer.Typer(
    help="Job queues: who waits for which machines, and who comes first.",
    epilog="Example: batchml queue list",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(compute_app, name="compute")
app.add_typer(queue_app, name="queue")

Name = Annotated[str, typer.Argument(metavar="NAME", help="As batchml.toml has it, or any other.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
MinVcpus = Annotated[int | None, typer.Option(help="Kept running, and paid, without jobs.")]
MaxVcpus = Annotated[int | None, typer.Option(help="Never more: it bounds what this can cost.")]
Types = Annotated[
    list[str] | None, typer.Option("--instance-type", help="A type or family. May be repeated.")
]
ScaleDownDelay = Annotated[
    str | None, typer.Option(help="How long an idle instance is kept: 20m to 7d, or 0.")
]
Enable = Annotated[bool | None, typer.Option("--enable/--disable", help="Take jobs, or no more.")]
Priority = Annotated[int | None, typer.Option(help="0 to 1000; the highest is served first.")]
Computes = Annotated[
    list[str] | None,
    typer.Option("--compute", help="In this order; the next takes what this one cannot."),
]
TimeLimits = Annotated[
    list[str] | None,
    typer.Option(
        "--time-limit", metavar="WHY=TIME",
        help="Cancel runs stuck so long: no-capacity=6h, too-large-for-compute=30m, "
        "too-large-for-instances=30m.",
    ),
]  # fmt: skip


@compute_app.command("list", epilog="Example: batchml compute list --env dev")
def compute_list(env: Env = None, json_: Json = False) -> None:
    """List the compute environments with what they may grow to and how they are."""
    from batchml.cli.wiring import open_place

    place = open_place(env)
    found = _compute_api(place).environments()
    if json_:
        return print_json(list(found.values()))
    rows = [["NAME", "STATE", "STATUS", "KIND", "INSTANCES", "VCPUS MIN/NOW/MAX", "REASON"]]
    for name, detail in sorted(found.items()):
        resources = detail.get("computeResources", {})
        limits = [resources.get(key, 0) for key in ("minvCpus", "desiredvCpus", "maxvCpus")]
        rows.append(
            [
                _bare(place, name),
                detail["state"],
                detail.get("status", ""),
                resources.get("type", detail.get("type", "")),
                ", ".join(resources.get("instanceTypes", ())),
                "{}/{}/{}".format(*limits),
                "" if detail.get("status") == "VALID" else detail.get("statusReason", ""),
            ]
        )
    _print_table(rows, "No compute environments. `batchml setup` makes them.")


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
    from batchml.model.environment import read_compute

    place = open_place(env)
    table = _given(
        instance_types=instance_type, max_vcpus=max_vcpus, min_vcpus=min_vcpus, spot=spot,
        allocation_strategy=allocation_strategy, bid_percentage=bid_percentage, ami=ami, disk=disk,
        placement_group=placement_group, capacity_reservation=capacity_reservation,
        scale_down_delay=scale_down_delay, stop_timeout=stop_timeout,
    )  # fmt: skip
    described = place.settings.environment.compute.get(name)
    if described is not None and not table:
        compute = described
    else:
        table = {**(_table(described) if described else {}), **table}
        compute = read_compute(name, table, f"compute create {name}")
    _refuse_existing(place, "compute", name, _compute_api(place).environments())
    _make(place, {name: compute}, {}, json_)


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
    from batchml.model.environment import Compute, read_compute

    place = open_place(env)
    there, detail = _found(place, name, "Compute environment", _compute_api(place).environments())
    table = _given(
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
    _compute_api(place).update_environment(request)
    _say_settled(place, "compute environment", there, json_)


@compute_app.command("delete", epilog="Example: batchml compute delete gpu --yes")
def compute_delete(name: Name, yes: Yes = False, env: Env = None, json_: Json = False) -> None:
    """Delete a compute environment that no queue uses, with its launch template."""
    from batchml.cli.wiring import open_place

    place = open_place(env)
    api = _compute_api(place)
    there, detail = _found(place, name, "Compute environment", api.environments())
    users = [
        queue for queue, each in api.queues().items()
        if detail["computeEnvironmentArn"] in _used(each)
    ]  # fmt: skip
    if users:
        names = ", ".join(_bare(place, queue) for queue in users)
        raise UsageError(
            f"Compute environment {name} is used by: {names}. Give those others first "
            f"(batchml queue update NAME --compute OTHER), or delete them."
        )
    _unmake(place, "compute environment", there, yes, json_)


@queue_app.command("list", epilog="Example: batchml queue list --env dev")
def queue_list(env: Env = None, json_: Json = False) -> None:
    """List the job queues, the highest priority first."""
    from batchml.cli.wiring import open_place
    from batchml.model.names import bare_name

    place = open_place(env)
    found = _compute_api(place).queues()
    if json_:
        return print_json(list(found.values()))
    rows = [["NAME", "PRIORITY", "STATE", "STATUS", "COMPUTE", "ORDER", "REASON"]]
    for name, detail in sorted(found.items(), key=lambda item: (-item[1]["priority"], item[0])):
        rows.append(
            [
                _bare(place, name),
                str(detail["priority"]),
                detail["state"],
                detail.get("status", ""),
                ", ".join(_bare(place, bare_name(arn)) for arn in _used(detail)),
                "fair share" if detail.get("schedulingPolicyArn") else "first come",
                "" if detail.get("status") == "VALID" else detail.get("statusReason", ""),
            ]
        )
    _print_table(rows, "No job queues. `batchml setup` makes them.")


@queue_app.command("create", epilog="Example: batchml queue create urgent --compute gpu")
def queue_create(
    name: Name,
    priority: Priority = None,
    compute: Computes = None,
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=WEIGHT", help="Fair share: twice the weight, twice the share."),
    ] = None,
    time_limit: TimeLimits = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Create a job queue. Without flags, the one that batchml.toml describes."""
    from batchml.cli.wiring import open_place
    from batchml.model.environment import read_queue

    place = open_place(env)
    table = _given(priority=priority, compute=compute, **_queue_tables(share, time_limit))
    described = place.settings.environment.queues.get(name)
    if described is not None and not table:
        queue = described
    else:
        table = {**(_table(described) if described else {}), **table}
        queue = read_queue(name, table, f"queue create {name}")
    _refuse_existing(place, "queue", name, _compute_api(place).queues())
    _make(place, {}, {name: _on_known(place, queue)}, json_)


@queue_app.command("update", epilog="Example: batchml queue update urgent --priority 500")
def queue_update(
    name: Name,
    priority: Priority = None,
    compute: Computes = None,
    time_limit: TimeLimits = None,
    enable: Enable = None,
    env: Env = None,
    json_: Json = False,
) -> None:
    """Change a job queue now. What setup made, setup changes back."""
    from batchml.aws.resources import queue as queue_request
    from batchml.aws.site import Site
    from batchml.cli.wiring import open_place
    from batchml.model.environment import read_queue
    from batchml.model.names import bare_name

    place = open_place(env)
    there, detail = _found(place, name, "Job queue", _compute_api(place).queues())
    table = _given(priority=priority, compute=compute, **_queue_tables(None, time_limit))
    if not table and enable is None:
        raise UsageError("Nothing to change was given: see batchml queue update --help.")
    known = {
        "priority": detail["priority"],
        "compute": [_bare(place, bare_name(arn)) for arn in _used(detail)],
    }
    queue = _on_known(place, read_queue(name, {**known, **table}, f"queue update {name}"))
    full = queue_request(Site(env=place.env), name, queue)
    members = {
        "priority": "priority",
        "compute": "computeEnvironmentOrder",
        "time_limits": "jobStateTimeLimitActions",
    }
    request: dict[str, Any] = {"jobQueue": there}
    if enable is not None:
        request["state"] = "ENABLED" if enable else "DISABLED"
    request |= {members[key]: full[members[key]] for key in table}
    _compute_api(place).update_queue(request)
    _say_settled(place, "job queue", there, json_)


@queue_app.command("delete", epilog="Example: batchml queue delete urgent --yes")
def queue_delete(name: Name, yes: Yes = False, env: Env = None, json_: Json = False) -> None:
    """Delete a job queue. Runs in it are terminated: `JobQueue deleted`."""
    from batchml.cli.wiring import open_place

    place = open_place(env)
    api = _compute_api(place)
    there, _ = _found(place, name, "Job queue", api.queues())
    count = api.unfinished(there)
    if count:
        say(f"{count} run{'s' if count > 1 else ''} in it will be terminated.")
    _unmake(place, "job queue", there, yes, json_)


# --- what they have in common ---------------------------------------------------------------


def _compute_api(place: "Place") -> Any:
    from batchml.aws.compute import ComputeApi

    return ComputeApi(place.connect())


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _table(struct: "Compute | Queue") -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(struct))


def _queue_tables(share: list[str] | None, time_limit: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if share:
        pairs = read_pairs(share, "--share")
        found["fair_share"] = {"shares": {name: _number(text) for name, text in pairs.items()}}
    if time_limit:
        found["time_limits"] = read_pairs(time_limit, "--time-limit")
    return found


def _number(text: str) -> float | str:
    """A number, or the text for the reader to complain about."""
    try:
        return float(text)
    except ValueError:
        return text


def _bare(place: "Place", name: str) -> str:
    """The name as batchml.toml has it."""
    from batchml.aws.site import qualified

    return name.removeprefix(qualified(place.env, ""))


def _found(
    place: "Place", name: str, kind: str, known: "Mapping[str, dict[str, Any]]"
) -> tuple[str, dict[str, Any]]:
    """A resource by its name here or in AWS. Raises NotFound."""
    from batchml.aws.site import qualified

    for each in (qualified(place.env, name), name):
        if each in known:
            return each, known[each]
    names = [_bare(place, each) for each in known]
    raise NotFound(kind, name, names, f"They are listed by batchml {_command(kind)} list.")


def _command(kind: str) -> str:
    return "queue" if "queue" in kind else "compute"


def _refuse_existing(
    place: "Place", command: str, name: str, known: "Mapping[str, dict[str, Any]]"
) -> None:
    from batchml.aws.site import qualified

    if qualified(place.env, name) in known:
        raise UsageError(
            f"{name} exists already. To change it: batchml {command} update {name}, or change "
            "batchml.toml and run batchml setup."
        )


def _on_known(place: "Place", queue: "Queue") -> "Queue":
    """The queue, after a look whether its compute environments exist. Raises NotFound."""
    known = _compute_api(place).environments()
    for each in queue.compute:
        _found(place, each, "Compute environment", known)
    return queue


def _used(queue: "Mapping[str, Any]") -> list[str]:
    order = sorted(queue["computeEnvironmentOrder"], key=lambda entry: entry["order"])
    return [entry["computeEnvironment"] for entry in order]


def _print_table(rows: list[list[str]], empty: str) -> None:
    from batchml.cli.render import table

    if len(rows) == 1:
        return say(empty)
    print_line(table(rows))


def _make(
    place: "Place", computes: "dict[str, Compute]", queues: "dict[str, Queue]", json_: bool
) -> None:
    """Carry out the plan of these alone."""
    from msgspec.structs import replace

    from batchml.cli import environments
    from batchml.ops.setup import desired
    from batchml.ops.setup.apply import carry_out, look

    subject = environments.subject(place)
    narrowed = replace(subject.scheme.environment, compute=computes, queues=queues)
    scheme = replace(subject.scheme, environment=narrowed)
    tools = environments.tools(place)
    facts = look(scheme, tools)
    _refuse_without_stacks(place, scheme, facts, computes)
    made = []
    with environments.going_on(f"batchml compute list --env {place.env}"):
        for progress in carry_out(lambda now: desired.single(scheme, now), facts, tools, set()):
            step = progress.step
            if not progress.text:
                made.append({"kind": step.kind.value, "name": step.name})
                say(f"{step.kind.value} {step.name}: done")
    if json_:
        print_json(made)


def _refuse_without_stacks(
    place: "Place", scheme: Any, facts: Any, computes: "dict[str, Compute]"
) -> None:
    """Compute environments stand on the stacks of `setup`."""
    from batchml.ops.setup.desired import wanted_stacks

    if place.settings.is_local or not computes:
        return
    missing = [
        short
        for short in wanted_stacks(scheme)
        if short not in ("storage", "observability") and scheme.stack(short) not in facts.stacks
    ]
    if missing:
        raise UsageError(
            f"Environment {place.env} has no {' and no '.join(missing)} yet, which compute "
            f"environments stand on. Make it first: batchml setup --env {place.env}"
        )


def _say_settled(place: "Place", kind: str, name: str, json_: bool) -> None:
    """Wait until AWS has taken an update."""
    from batchml.cli import environments
    from batchml.ops.setup.batch_steps import settle
    from batchml.ops.setup.values import Kind

    tools = environments.tools(place)
    with environments.going_on(f"batchml {_command(kind)} list --env {place.env}"):
        detail = settle(Kind(kind), name, tools, lambda text: say(f"    {text}"))
    if json_:
        print_json(detail)
    else:
        print_line(f"{kind} {name} is changed.")


def _unmake(place: "Place", kind: str, name: str, yes: bool, json_: bool) -> None:
    from batchml.cli import environments
    from batchml.ops.setup.batch_steps import remove
    from batchml.ops.setup.values import Kind

    if not environments.ask(f"Delete {kind} {name}? [y/N]", "--yes", yes=yes):
        say("Nothing was changed.")
        raise typer.Exit(1)
    tools = environments.tools(place)
    with environments.going_on(f"batchml {_command(kind)} list --env {place.env}"):
        remove(Kind(kind), name, tools, lambda text: say(f"    {text}"))
    if json_:
        print_json([{"kind": kind, "name": name}])
    else:
        print_line(f"{kind} {name} is deleted.")
